"""A variational module in checkpoints: loaded without a word, resumed bit by bit, and shared with its plain self."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from variational_cases import VI, VL, LastLayer, Lit, dataset, options, trainer

from lightning_bayes import Gaussian
from lightning_bayes.mixins import LogSigmaMultiplierMixin, OptionError, VariationalLaplaceMixin


class Both(LogSigmaMultiplierMixin, VariationalLaplaceMixin, Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def data(task: str = "classification", n: int = 11) -> DataLoader[Any]:
    """In float32, which is what `load_from_checkpoint` makes modules in."""
    x, y = dataset(task, n).tensors
    return DataLoader(TensorDataset(x.float(), y.float() if y.is_floating_point() else y), 4)


def quiet(folder: Path, **arguments: Any) -> L.Trainer:
    return trainer(folder, precision="32-true", **arguments)


def fitted(folder: Path, module: Any, epochs: int = 2, path: str | None = None) -> str:
    """The path of the last checkpoint of a short fit."""
    keep = ModelCheckpoint(folder / f"{epochs} {path is None}", save_last=True)
    fit = quiet(folder, callbacks=[keep], enable_checkpointing=True, max_epochs=epochs)
    fit.fit(module, data(module.task), ckpt_path=path)
    return keep.last_model_path


@pytest.mark.parametrize("kind", [VL, VI, LastLayer])
def test_load_from_checkpoint_needs_no_arguments(kind: Any, tmp_path: Path) -> None:
    """The user's module saves no hyperparameters; the mixin saves its own."""
    module = kind(variational=options(n_data=None, prior_std="he"))
    path = fitted(tmp_path, module)
    again = kind.load_from_checkpoint(path)
    assert again._variational.options.beta == 0.7
    assert again._variational.prior_std == module._variational.prior_std
    assert again.posterior.n_data == 11
    for name, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


class Saves(Lit):
    def __init__(self, kind: str = "mlp", task: str = "classification") -> None:
        super().__init__(kind, task)
        self.save_hyperparameters()


class SavesVL(VariationalLaplaceMixin, Saves):
    pass


def test_a_likelihood_object_survives_beside_the_users_hyperparameters(tmp_path: Path) -> None:
    """In plain numbers, or the file could not be read with `weights_only`."""
    module = SavesVL("mlp", "regression", variational=options("regression"))
    path = fitted(tmp_path, module)
    stored = torch.load(path, weights_only=True)["hyper_parameters"]
    assert stored["task"] == "regression"
    assert stored["variational"]["likelihood"] == {"name": "Gaussian", "noise_std": 0.6}
    again = SavesVL.load_from_checkpoint(path)
    assert again.task == "regression"
    assert isinstance(again._variational.options.likelihood, Gaussian)
    assert again._variational.options.likelihood.noise_std == 0.6


class Own(Gaussian):
    """A likelihood of the user's own."""


def test_a_likelihood_of_ones_own_has_to_be_passed_again(tmp_path: Path) -> None:
    given = {**options("regression"), "likelihood": Own(0.6)}
    path = fitted(tmp_path, VL("mlp", "regression", variational=given))
    with pytest.raises(OptionError, match=r"Own' cannot be loaded from a file: pass variational={'likelihood': …}"):
        VL.load_from_checkpoint(path, task="regression")
    again = VL.load_from_checkpoint(path, task="regression", variational=given)
    assert isinstance(again._variational.options.likelihood, Own)


@pytest.mark.parametrize("kind", [Both, VI])
@pytest.mark.parametrize("method", ["exact", "finite_difference"])
def test_a_resumed_run_is_bit_by_bit_the_uninterrupted_one(kind: Any, method: str, tmp_path: Path) -> None:
    """The labels and weights that are drawn too, which know how many were drawn before."""
    how = options(method=method) if kind is Both else options(local_reparameterization=method == "exact")

    arguments: dict[str, Any] = {"log_sigma_multiplier": 100.0} if kind is Both else {}
    whole, half, resumed = (kind("residual", variational=how, **arguments) for _ in range(3))
    fitted(tmp_path, whole, epochs=4)
    fitted(tmp_path, resumed, 4, path=fitted(tmp_path, half, epochs=2))
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_a_prior_from_weight_decay_is_kept(tmp_path: Path) -> None:
    class Decayed(Lit):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05, weight_decay=0.02)

    class Bayes(VariationalLaplaceMixin, Decayed):
        pass

    whole, half, resumed = (Bayes(variational=options(prior_std="weight_decay")) for _ in range(3))
    fitted(tmp_path, whole, epochs=3)
    path = fitted(tmp_path, half, epochs=1)
    assert Bayes.load_from_checkpoint(path)._variational.prior_std == half._variational.prior_std
    fitted(tmp_path, resumed, 3, path)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_the_checkpoint_of_the_plain_module_fits(tmp_path: Path) -> None:
    """MAP training first, Bayes after: log σ starts where a new one does."""
    plain = Lit()
    path = fitted(tmp_path, plain)
    with pytest.warns(UserWarning, match="has no log σ for 6 of 6 parameters: they start at the prior's") as caught:
        module = VL.load_from_checkpoint(path, variational=options(prior_std=0.5))
    assert len(caught) == 1
    assert torch.equal(module.net[1].weight, plain.net[1].weight)
    torch.testing.assert_close(module.log_sigma["net.1.bias"].exp(), torch.full((4,), 0.5 * torch.e**-3))


def test_the_plain_module_takes_the_mean_of_a_variational_checkpoint(tmp_path: Path) -> None:
    module = VL(variational=options())
    path = fitted(tmp_path, module)
    with pytest.warns(UserWarning, match="not in the model state dict but in the checkpoint"):
        plain = Lit.load_from_checkpoint(path, strict=False)
    assert torch.equal(plain.net[1].weight, module.net[1].weight)


def test_one_that_fits_neither_is_still_refused(tmp_path: Path) -> None:
    path = fitted(tmp_path, Lit("conv"))
    with pytest.warns(UserWarning, match="no log σ"), pytest.raises(RuntimeError, match="Missing key"):
        VL.load_from_checkpoint(path, variational=options())


def test_variational_laplace_goes_on_from_variational_inference(tmp_path: Path) -> None:
    module = VI(variational=options())
    path = fitted(tmp_path, module)
    again = VL.load_from_checkpoint(path, variational=options())
    for name, log_σ in module.log_sigma.items():
        assert torch.equal(again.log_sigma[name], log_σ)


@pytest.mark.parametrize("saves", [False, True], ids=["plain", "save_hyperparameters"])
def test_options_of_hydra_are_stored_as_plain_values(saves: bool, tmp_path: Path) -> None:
    """A `DictConfig` with lists and dictionaries in it leaves a checkpoint that `weights_only` reads."""
    omegaconf = pytest.importorskip("omegaconf")

    class Hydra(LogSigmaMultiplierMixin, VariationalLaplaceMixin, Saves if saves else Lit):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    given = {"deterministic": ["*.bias"], "prior_std": {"*": 0.5}, "likelihood": {"name": "Categorical"}}
    config = omegaconf.OmegaConf.create({"variational": given, "multiplier": {"*": 500.0}})
    module = Hydra(variational=config.variational, log_sigma_multiplier=config.multiplier)
    stored = torch.load(fitted(tmp_path, module), weights_only=True)["hyper_parameters"]
    assert stored["variational"] == given
    assert type(stored["variational"]["deterministic"]) is list
    assert stored["log_sigma_multiplier"] == {"*": 500.0}
    again = Hydra.load_from_checkpoint(tmp_path / "2 True" / "last.ckpt")
    assert all(torch.equal(again.log_sigma[name], l) for name, l in module.log_sigma.items())
