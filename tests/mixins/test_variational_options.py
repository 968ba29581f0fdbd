"""log σ, the prior, the number of examples, and everything that can be said in `variational`."""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler
from variational_cases import VI, VL, Lit, dataset, images, loader, options, targets, trainer, vl, weighted_kl

from lightning_bayes import Gaussian
from lightning_bayes.mixins import (
    LogSigmaMultiplierMixin,
    PriorStdError,
    VariationalError,
    VariationalLaplaceMixin,
    VariationalMixin,
)
from lightning_bayes.network import DataError


class Decayed(Lit):
    decay: float = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, weight_decay=self.decay)


class DecayedVL(VariationalLaplaceMixin, Decayed):
    pass


@pytest.mark.parametrize("kind", [VL, VI])
def test_log_sigma_is_a_mapping_by_the_weights_names(kind: type) -> None:
    module = kind(variational={"prior_std": 0.5})
    assert isinstance(module, VariationalMixin)
    weights = {n: p for n, p in module.named_parameters() if not n.startswith("log_sigma.")}
    assert list(module.log_sigma) == list(module.log_sigma.keys()) == list(weights)
    assert len(module.log_sigma) == len(weights) == 6
    assert "net.1.weight" in module.log_sigma
    assert "net.9.weight" not in module.log_sigma
    for name, log_σ in module.log_sigma.items():
        assert isinstance(log_σ, nn.Parameter)
        assert log_σ.shape == weights[name].shape
        torch.testing.assert_close(log_σ, torch.full_like(log_σ, math.log(0.5) - 3))
    mine = {id(p) for n, p in module.named_parameters() if n.startswith("log_sigma.")}
    assert mine == {id(p) for p in module.log_sigma.values()}
    with pytest.raises(KeyError, match=r"no log σ for 'net.9.weight'"):
        module.log_sigma["net.9.weight"]


class Bare(L.LightningModule):
    """Parameters of the module itself, with names that mean something else to a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(2))
        self.training_rate = nn.Parameter(torch.zeros(3))


class BareVL(VariationalLaplaceMixin, Bare):
    pass


PUBLIC = {"log_sigma", "posterior", "weights_and_log_sigma"}


@pytest.mark.parametrize(("kind", "public"), [(VL, {*PUBLIC, "vl_loss"}), (VI, PUBLIC)])
def test_the_users_namespace_has_one_private_name_more(kind: type, public: set[str]) -> None:
    """Besides Lightning's own, such as the hooks and the hyperparameters."""
    plain, module = Lit(), kind(variational={})
    assert not plain.hparams
    assert set(dir(module)) - set(dir(plain)) == {*public, "_variational"}


def test_the_multiplier_adds_no_private_name() -> None:
    plain, module = VL(variational={}), CliVL(variational={})
    assert set(dir(module)) - set(dir(plain)) == {"log_sigma_multiplier"}


@pytest.mark.parametrize("kind", [VL, VI])
def test_a_copy_is_a_module_of_its_own(kind: type) -> None:
    module = kind(variational=options())
    copy = deepcopy(module)
    with torch.no_grad():
        for p in copy.parameters():
            p.add_(1.0)
    assert copy._variational.module is copy
    assert copy.log_sigma is copy._variational.log_sigma
    torch.testing.assert_close(copy.posterior.mean, module.posterior.mean + 1)
    before = module.net[1].weight.detach().clone()
    copy.training_step((images(4).float(), targets("classification", 4)), 0)
    assert (module._variational.draws, copy._variational.draws) == (0, 1)
    assert torch.equal(module.net[1].weight, before)


def test_a_parameter_may_have_any_name() -> None:
    module = BareVL(variational={})
    assert list(module.log_sigma.keys()) == ["values", "training_rate"]
    assert module.log_sigma["values"].shape == (2,)
    again = BareVL(variational={})
    again.load_state_dict(module.state_dict())


def test_deterministic_frozen_and_tied_parameters() -> None:
    assert list(vl("residual", deterministic=["*.bias", "net.1.norm", "net.2"]).log_sigma) == [
        "net.0.weight",
        "net.1.conv.weight",
        "net.6.weight",
    ]
    assert "net.1.weight" not in vl("frozen").log_sigma
    assert list(vl("tied").log_sigma) == [
        "net.first.weight",
        "net.first.bias",
        "net.second.bias",
        "net.out.weight",
        "net.out.bias",
    ]


def test_he_scales_with_the_fan_in() -> None:
    module = vl("residual", prior_std="he")
    prior = module._variational.prior_std
    assert prior["net.0.weight"] == prior["net.0.bias"] == pytest.approx(math.sqrt(2 / 18))
    assert prior["net.1.conv.weight"] == pytest.approx(math.sqrt(2 / 27))
    assert prior["net.6.weight"] == pytest.approx(math.sqrt(2 / 3))
    assert prior["net.1.norm.weight"] == prior["net.2.bias"] == 1.0
    assert VL(variational={"prior_std": "he"}).log_sigma["net.1.bias"][0].item() == pytest.approx(
        math.log(math.sqrt(2 / 32)) - 3
    )


def test_a_prior_for_each_name_pattern() -> None:
    module = vl(prior_std={"*": 2.0, "net.1": "he", "net.1.bias": 0.1})
    prior = module._variational.prior_std
    assert prior["net.1.bias"] == 0.1
    assert prior["net.1.weight"] == pytest.approx(math.sqrt(2 / 32))
    assert prior["net.5.weight"] == 2.0


def test_weight_decay_becomes_the_prior(tmp_path: Path) -> None:
    """`s² = 1/(N·wd)`; log σ starts three below it, and the optimizer's own decay is gone."""
    module = DecayedVL(lr=0.0, variational=options(prior_std="weight_decay", n_data=None)).double()
    with pytest.raises(PriorStdError, match=r"is not known before training: run trainer.fit, or give a number"):
        module._variational.kl()
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(module, loader(n=11))
    s = 1 / math.sqrt(11 * 0.01)
    assert list(module._variational.prior_std.values()) == pytest.approx([s] * 6)
    assert [group["weight_decay"] for group in fit.optimizers[0].param_groups] == [0.0]
    torch.testing.assert_close(module.log_sigma["net.1.bias"].detach(), torch.full((4,), math.log(s) - 3).double())


def test_a_second_fit_goes_on_with_the_log_sigma_of_the_first(tmp_path: Path) -> None:
    """The optimizer is new and has its weight decay again, which becomes the same prior; log σ is not put back."""
    module = DecayedVL(lr=0.0, variational=options(prior_std="weight_decay", n_data=None)).double()
    trainer(tmp_path, max_epochs=1).fit(module, loader(n=11))
    with torch.no_grad():
        for log_σ in module.log_sigma.values():
            log_σ.fill_(-1.0)
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(module, loader(n=11))
    assert all(bool((log_σ == -1).all()) for log_σ in module.log_sigma.values())
    assert list(module._variational.prior_std.values()) == pytest.approx([1 / math.sqrt(11 * 0.01)] * 6)
    assert [group["weight_decay"] for group in fit.optimizers[0].param_groups] == [0.0]


def test_the_prior_from_weight_decay_pulls_as_the_decay_did() -> None:
    """The gradient of the KL divergence in μ at β = 1 is `wd·μ`."""
    module = DecayedVL(variational=options(prior_std=1 / math.sqrt(11 * 0.01), beta=1.0)).double()
    weight = module.net[1].weight
    (found,) = torch.autograd.grad(weighted_kl(module), weight)
    torch.testing.assert_close(found, 0.01 * weight.detach())


def test_weight_decay_as_a_prior_needs_one(tmp_path: Path) -> None:
    with pytest.raises(
        PriorStdError, match=r"no optimizer has a weight decay for net.1.weight, net.1.bias, net.3.weight, …"
    ):
        trainer(tmp_path).fit(VL(variational=options(prior_std="weight_decay")), loader())
    mixed = DecayedVL(variational=options(prior_std="weight_decay", deterministic=["*.bias"]))
    with pytest.raises(PriorStdError, match="put those into a separate param group"):
        trainer(tmp_path).fit(mixed, loader())


def test_a_weight_decay_beside_the_kl_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="has a weight decay for net.1.weight, net.1.bias, net.3.weight, … or its log σ"
    ):
        trainer(tmp_path, max_epochs=1).fit(DecayedVL(variational=options()), loader())


class NetOnly(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), self.lr)


def test_log_sigma_in_no_optimizer_is_warned_of(tmp_path: Path) -> None:
    kind = type("Bayes", (VariationalLaplaceMixin, NetOnly), {})
    with pytest.warns(UserWarning, match=r"no optimizer has log σ of net.1.weight.*LogSigmaMultiplierMixin"):
        trainer(tmp_path, max_epochs=1).fit(kind(variational=options()), loader())


def test_the_multiplier_adds_them(tmp_path: Path) -> None:
    kind = type("Bayes", (LogSigmaMultiplierMixin, VariationalLaplaceMixin, NetOnly), {})
    module = kind(log_sigma_multiplier=10.0, variational=options())
    before = module.log_sigma["net.1.weight"].detach().clone()
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(module, loader())
    assert not torch.equal(module.log_sigma["net.1.weight"], before)
    assert [group["lr"] for group in fit.optimizers[0].param_groups] == [0.05, 0.5]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(dataset())


def n_data(folder: Path, data: Any, **arguments: Any) -> int:
    module = VL(lr=0.0, variational=options(n_data=None))
    trainer(folder, max_epochs=1, **arguments).fit(module, data)
    return module.posterior.n_data


def test_the_training_examples_are_counted(tmp_path: Path) -> None:
    """Never batches times their size."""
    assert n_data(tmp_path, loader(n=11, batch_size=4)) == 11
    assert n_data(tmp_path, loader(n=11, batch_size=4, drop_last=True, shuffle=True)) == 11
    assert n_data(tmp_path, DataLoader(Subset(dataset(), range(7)), 4)) == 7
    assert n_data(tmp_path, DataLoader(dataset(), 4, sampler=SubsetRandomSampler(range(9)))) == 9


@pytest.mark.parametrize(("limit", "n"), [(2, 8), (0.7, 8), (0.4, 4), (1.0, 11), (99, 11)])
def test_a_limit_in_order_leaves_only_the_first_examples(limit: Any, n: int, tmp_path: Path) -> None:
    assert n_data(tmp_path, loader(n=11, batch_size=4), limit_train_batches=limit) == n


@pytest.mark.parametrize("limit", [2, 0.7])
def test_a_limit_on_shuffled_data_leaves_none_out(limit: Any, tmp_path: Path) -> None:
    """Every epoch begins with other examples."""
    assert n_data(tmp_path, loader(n=11, batch_size=4, shuffle=True), limit_train_batches=limit) == 11


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_of_one_batch_counts_all_examples(shuffle: bool, tmp_path: Path) -> None:
    assert n_data(tmp_path, loader(n=11, batch_size=4, shuffle=shuffle), fast_dev_run=True) == 11


class OfPairs(Lit):
    """Trained on two loaders at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx)

    def split_batch(self, batch: Any) -> Any:
        return batch["a"] if isinstance(batch, dict) else batch


UNCOUNTABLE = {
    "a stream": (lambda: DataLoader(Stream(), batch_size=4), "cannot be counted, because they have no length"),
    "whole batches": (lambda: DataLoader(list(loader()), batch_size=None), "because the dataset gives whole batches"),
    "two loaders": (
        lambda: {"a": loader(), "b": loader()},
        "there are 2 training dataloaders, but a posterior needs one that has each example once",
    ),
}


@pytest.mark.parametrize("case", UNCOUNTABLE)
def test_what_cannot_be_counted_has_to_be_given(case: str, tmp_path: Path) -> None:
    make, why = UNCOUNTABLE[case]
    kind = type("Bayes", (VariationalLaplaceMixin, OfPairs if case == "two loaders" else Lit), {})
    module = kind(variational=options(n_data=None))
    before = module.net[1].weight.detach().clone()
    with pytest.raises(DataError, match=f"{why}: set variational={{'n_data': …}}"):
        trainer(tmp_path, max_epochs=1).fit(module, make())
    assert torch.equal(module.net[1].weight, before)  # no step was made
    module = kind(variational=options(n_data=11))
    trainer(tmp_path, max_epochs=1).fit(module, make())
    assert module.posterior.n_data == 11
    assert not torch.equal(module.net[1].weight, before)


def test_a_given_number_is_used(tmp_path: Path) -> None:
    module = VL(lr=0.0, variational=options(n_data=500))
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(module, loader())
    logged = fit.callback_metrics
    assert float(logged["train_ell"] - logged["train_elbo"]) == pytest.approx(0.7 / 500 * float(logged["train_kl"]))


def test_without_a_number_the_loss_is_an_error() -> None:
    module = VL(variational={"prior_std": 1.0})
    with pytest.raises(VariationalError, match=r"is not known before training starts: set variational={'n_data': …}"):
        module.vl_loss(module(images(3).float()), targets("classification", 3))


def test_the_order_of_the_classes_matters_and_says_so() -> None:
    with pytest.raises(
        TypeError, match=r"name the mixin before your module, as in class Bayes\(.*class Backwards has it"
    ):
        type("Backwards", (Lit, VariationalLaplaceMixin), {})


def test_a_layer_frozen_later_is_deterministic_while_it_is() -> None:
    module = vl()
    module.net[1].requires_grad_(False)
    assert list(module.weights_and_log_sigma()) == ["net.3.weight", "net.3.bias", "net.5.weight", "net.5.bias"]
    assert module.posterior.subset.names == ("net.3.weight", "net.3.bias", "net.5.weight", "net.5.bias")
    loss = module.training_step((images(4), targets("classification", 4)), 0)
    loss.backward()
    assert module.net[1].weight.grad is None
    assert module.log_sigma["net.1.weight"].grad is None


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning's own
def test_lightning_cli_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["program"])
    cli = LightningCLI(
        CliVL,
        run=False,
        seed_everything_default=False,
        save_config_callback=None,
        trainer_defaults={"logger": False, "accelerator": "cpu", "enable_checkpointing": False},
        args=[
            "--model.kind=conv",
            "--model.log_sigma_multiplier=3",
            '--model.variational={"likelihood": "classification", "beta": 0.25, "prior_std": {"*": 2, "net.3": "he"}}',
        ],
    )
    settings = cli.model._variational.options
    assert settings.beta == 0.25
    assert settings.prior_std == {"*": 2, "net.3": "he"}
    assert cli.model.log_sigma_multiplier == 3
    assert cli.model.log_sigma["net.0.weight"].shape == (3, 2, 2, 2)


class CliVL(LogSigmaMultiplierMixin, VariationalLaplaceMixin, Lit):
    pass


def test_a_likelihood_object_is_taken() -> None:
    assert float(VL(variational={"likelihood": Gaussian(0.3)})._variational.options.likelihood.noise_std) == 0.3  # type: ignore[attr-defined]
