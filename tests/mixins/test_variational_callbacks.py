"""Callbacks that fit a posterior, on a module that has one already."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from variational_cases import Lit, loader, options, trainer

from lightning_bayes import L2MCallback, LaplaceCallback, OnlineLaplaceCallback
from lightning_bayes.mixins import VariationalInferenceMixin, VariationalLaplaceMixin
from lightning_bayes.trainer.module import ModuleError

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
        "Bayes is variational and already has a posterior, but LaplaceCallback would take its log σ for weights: "
        "leave the callback out, or for a Laplace posterior around the means name its network= or its subset= of"
    )
    with pytest.raises(ModuleError, match=why):
        trainer(tmp_path, callbacks=[callback]).fit(module, loader())
    assert module.steps == 0
    with pytest.raises(ModuleError, match="would take its log σ for weights"):
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
