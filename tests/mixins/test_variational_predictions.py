"""`.posterior`, what `validate`, `test` and `predict` make of it, and callbacks that fit another posterior."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.options import predictive_of
from torch import Tensor
from variational_cases import VI, VL, Lit, dataset, gradients, images, loader, options, spread, targets, trainer, vl

from lightning_bayes import GaussianPosterior, L2MCallback, LaplaceCallback, OnlineLaplaceCallback, Prediction
from lightning_bayes.mixins import VariationalInferenceMixin, VariationalLaplaceMixin
from lightning_bayes.structures import Diagonal
from lightning_bayes.trainer.module import ModuleError


@pytest.mark.parametrize("kind", ["mlp", "residual", "tied"])
def test_the_posterior_is_a_diagonal_gaussian(kind: str) -> None:
    module = vl(kind, deterministic=["*.bias"])
    posterior = module.posterior
    assert type(posterior) is GaussianPosterior
    assert isinstance(posterior.precision, Diagonal)
    assert posterior.network is module
    assert posterior.subset.names == tuple(module.log_sigma)
    weights = dict(module.named_parameters())
    mean = torch.cat([weights[name].flatten() for name in module.log_sigma])
    σ = torch.cat([log_σ.exp().flatten() for log_σ in module.log_sigma.values()])
    torch.testing.assert_close(posterior.mean, mean.detach())
    draws = posterior.sample(20_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.mean(0), mean.detach(), rtol=0, atol=5 * σ.max().item() / 20_000**0.5)
    torch.testing.assert_close(draws.std(0), σ.detach(), rtol=0.04, atol=0)


def test_the_posterior_of_a_submodule_has_its_names() -> None:
    module = vl(network="net")
    assert module.posterior.network is module.net
    assert module.posterior.subset.names == ("1.weight", "1.bias", "3.weight", "3.bias", "5.weight", "5.bias")
    assert module.posterior.functional(images(3))[1].shape == (3, 3, 3)


def test_the_posterior_follows_the_weights_and_an_old_one_knows() -> None:
    module = vl()
    old = module.posterior
    with torch.no_grad():
        module.net[1].weight += 0.1
    with pytest.raises(RuntimeError, match="weights are not those the posterior was fitted to"):
        old.predict(images(2))
    module.posterior.predict(images(2))


def test_glm_variance_is_that_of_independent_weights() -> None:
    """`J diag(σ²) Jᵀ`, example by example."""
    module = vl("residual").eval()
    x = images(3)
    _, covariance = module.posterior.functional(x)
    names = dict(module.named_parameters())
    for n in range(3):
        rows = []
        for c in range(3):
            grads = torch.autograd.grad(module(x)[n, c], [names[name] for name in module.log_sigma])
            rows.append(torch.cat([g.flatten() for g in grads]))
        J = torch.stack(rows)
        σ2 = torch.cat([(2 * log_σ).exp().flatten() for log_σ in module.log_sigma.values()]).detach()
        torch.testing.assert_close(covariance[n], J * σ2 @ J.T)


@pytest.mark.parametrize(("kind", "name"), [(VL, "vl"), (VI, "vi")])
@pytest.mark.parametrize("task", ["classification", "binary", "regression"])
def test_test_scores_the_mean_and_the_posterior(kind: Any, name: str, task: str, tmp_path: Path) -> None:
    module = kind(task=task, variational=options(task))
    fit = trainer(tmp_path)
    fit.fit(module, loader(task))
    spread(module)
    (logged,) = fit.test(module, loader(task, n=7), verbose=False)
    x, y = dataset(task, 7).tensors
    predictive = {"vl": "glm", "vi": "bnn"}[name]
    for who, word in ((name, predictive), ("map", "map")):
        p = module.posterior.predict(x, predictive_of(word, samples=10), generator=torch.Generator().manual_seed(0))
        if task == "classification":
            nll = -p.probs[range(7), y].log().mean()
        elif task == "binary":
            nll = -torch.where(y == 1, p.probs, 1 - p.probs).log().mean()
        else:
            nll = -torch.distributions.Normal(p.mean, p.variance.sqrt()).log_prob(y).mean()
        assert logged[f"test_nll_{who}"] == pytest.approx(float(nll), rel=1e-6)
    assert logged[f"test_nll_{name}"] != logged["test_nll_map"]
    assert "test_loss" in logged


@pytest.mark.parametrize("word", ["mean", "bnn", "glm"])
def test_predict_answers_with_predictions(word: str, tmp_path: Path) -> None:
    module = vl(predictive=word)
    out = trainer(tmp_path).predict(module, loader(n=7))
    assert out is not None
    assert [type(p) for p in out] == [Prediction, Prediction]
    probs = torch.cat([p.probs for p in out])  # type: ignore[union-attr]
    expected = module.posterior.predict(
        images(7),
        {"mean": "map"}.get(word, word),
        generator=torch.Generator().manual_seed(0),
    )
    torch.testing.assert_close(probs, expected.probs)
    epistemic = torch.cat([p.epistemic for p in out])  # type: ignore[union-attr]
    assert bool((epistemic > 0).all()) == (word != "mean")


def test_methods_are_compared_through_one_interface(tmp_path: Path) -> None:
    """A Laplace posterior of the same weights, on the same Trainer."""
    module = VL(variational=options(network="net"))
    laplace = LaplaceCallback(structure="diag", network="net", tune=None, progress=False)
    fit = trainer(tmp_path, callbacks=[laplace])
    fit.fit(module, loader())
    (logged,) = fit.test(module, loader(n=7), verbose=False)
    assert {"test_nll_map", "test_nll_vl", "test_nll_laplace", "test_ece_vl", "test_ece_laplace"} <= logged.keys()
    out: Any = fit.predict(module, loader(n=7))
    assert set(out[0]) == {"vl", "laplace"}


def test_validate_scores_too(tmp_path: Path) -> None:
    class Validated(Lit):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    class Bayes(VariationalLaplaceMixin, Validated):
        pass

    (logged,) = trainer(tmp_path).validate(Bayes(variational=options()), loader(n=7), verbose=False)
    assert {"val_nll_map", "val_nll_vl", "val_acc_vl"} <= logged.keys()


def test_the_users_callbacks_stay(tmp_path: Path) -> None:
    import lightning as L

    class Mine(L.Callback):
        started = 0

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.started += 1

    mine = Mine()

    class WithCallbacks(Lit):
        def configure_callbacks(self) -> Any:
            return mine

    class Bayes(VariationalLaplaceMixin, WithCallbacks):
        pass

    trainer(tmp_path, max_epochs=1).fit(Bayes(variational=options()), loader())
    assert mine.started == 1


def test_a_strategy_that_shards_the_weights_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class FSDPStrategy(SingleDeviceStrategy):
        pass

    why = "a variational module needs the whole network on every process, but FSDPStrategy shards it: use strateg"
    with pytest.raises(RuntimeError, match=why):
        trainer(tmp_path, strategy=FSDPStrategy("cpu")).fit(VL(variational=options()), loader())


def test_prediction_leaves_the_gradient_of_training_alone(tmp_path: Path) -> None:
    """After `test` in Lightning's inference mode the module trains on as if nothing had been."""
    module, untouched = vl(), vl()
    trainer(tmp_path).test(module, loader(n=7), verbose=False)
    batch = images(4), targets("classification", 4)
    found, expected = (gradients(m, m.train().training_step(batch, 0)) for m in (module, untouched))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


MIXINS = [VariationalLaplaceMixin, VariationalInferenceMixin]


class Adam(Lit):
    """Counts its steps."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def made(mixin: type) -> Any:
    return type("Bayes", (mixin, Adam), {})(variational=options())


@pytest.mark.parametrize("mixin", MIXINS)
def test_a_laplace_posterior_over_log_sigma_is_refused_before_training(mixin: type, tmp_path: Path) -> None:
    module, callback = made(mixin), LaplaceCallback(progress=False)
    why = (
        "Bayes is variational and already has a posterior, but LaplaceCallback would treat its log σ as weights: "
        "leave the callback out, or pass network= or a subset= of weights for a Laplace posterior around the means"
    )
    with pytest.raises(ModuleError, match=why):
        trainer(tmp_path, callbacks=[callback]).fit(module, loader())
    assert module.steps == 0
    with pytest.raises(ModuleError, match="would treat its log σ as weights"):
        callback.fit_now(None, module, loader())


@pytest.mark.parametrize("mixin", MIXINS)
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_laplace_posterior_around_the_means_has_no_log_sigma(mixin: type, structure: str, tmp_path: Path) -> None:
    """By the name of the network, or of its weights; the weights are the means, in the same order."""
    words = {"structure": structure, "tune": None, "progress": False}
    callbacks = [
        LaplaceCallback(network="net", name="network", **words),  # type: ignore[arg-type]
        LaplaceCallback(subset=["net"], name="subset", **words),  # type: ignore[arg-type]
    ]
    module = made(mixin)
    trainer(tmp_path, callbacks=callbacks).fit(module, loader())
    assert module.steps > 0
    by_network, by_subset = (callback.posterior for callback in callbacks)
    assert tuple(f"net.{name}" for name in by_network.subset.names) == by_subset.subset.names
    assert by_subset.subset.names == module.posterior.subset.names
    assert torch.equal(by_subset.mean, module.posterior.mean)
    torch.testing.assert_close(by_network.precision.to_dense(), by_subset.precision.to_dense())


@pytest.mark.parametrize("mixin", MIXINS)
def test_the_last_layer_is_a_subset_too(mixin: type, tmp_path: Path) -> None:
    callback = LaplaceCallback(subset="last_layer", tune=None, progress=False)
    trainer(tmp_path, callbacks=[callback]).fit(made(mixin), loader())
    assert callback.posterior.subset.names == ("net.5.weight", "net.5.bias")


@pytest.mark.parametrize("network", [None, "net"])
@pytest.mark.parametrize("kind", [L2MCallback, OnlineLaplaceCallback])
@pytest.mark.parametrize("mixin", MIXINS)
def test_what_reads_the_loss_of_training_is_refused_with_any_network(
    mixin: type, kind: Any, network: str | None, tmp_path: Path
) -> None:
    """The variational loss has a KL divergence in it, and the noise of samples or a squared gradient."""
    module = made(mixin)
    why = (
        f"Bayes is variational and already has a posterior, but {kind.__name__} needs a loss that is the negative "
        "log-likelihood alone: leave the callback out, or train the module without the mixin"
    )
    with pytest.raises(ModuleError, match=why):
        trainer(tmp_path, callbacks=[kind("classification", network=network)]).fit(module, loader())
    assert module.steps == 0


@pytest.mark.parametrize("kind", [LaplaceCallback, L2MCallback])
def test_the_same_module_without_the_mixin_is_taken(kind: Any, tmp_path: Path) -> None:
    callback = kind(prior_precision=1.0)
    trainer(tmp_path, callbacks=[callback]).fit(Adam(), loader())
    assert callback.posterior.subset.names[0] == "net.1.weight"
