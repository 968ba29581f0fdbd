"""`LaplaceCallback(subset=Subnetwork(…))`: the weights that `fit_laplace` chooses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from callback_cases import Classifier, laplace, plain_loader, trainer
from helpers.training import LitNet, loader
from helpers.untouched import refused

from lightning_bayes import (
    Full,
    L2MCallback,
    LaplaceCallback,
    Subnetwork,
    SWAGCallback,
    VariationalLaplaceMixin,
    fit_laplace,
)
from lightning_bayes.network import SubsetError
from lightning_bayes.posterior import PriorError
from lightning_bayes.trainer.module import ModuleError

DOUBLE: dict[str, Any] = {"precision": "64-true"}


def plain(**words: Any) -> LaplaceCallback:
    return laplace(tune=None, calibrate=None, **words)


@pytest.mark.parametrize("by", ["laplace_diag", "magnitude", "random"])
def test_it_is_the_posterior_of_fit_laplace(by: str, tmp_path: Path) -> None:
    module, subset = LitNet(), Subnetwork(9, by, seed=4)
    callback = plain(subset=subset, prior_precision=[1.0, 3.0])
    trainer(tmp_path, callback, **DOUBLE).fit(module, loader())
    expected = fit_laplace(module, loader(), subset=subset, prior_precision=[1.0, 3.0])
    assert callback.structure == Full()
    assert torch.equal(callback.posterior.subset.mask, expected.subset.mask)  # type: ignore[arg-type]
    torch.testing.assert_close(callback.posterior.precision.to_dense(), expected.precision.to_dense())


@pytest.mark.parametrize("kind", [SWAGCallback, L2MCallback])
def test_the_posterior_of_another_callback_chooses(kind: Any, tmp_path: Path) -> None:
    words = {"start": 0} if kind is SWAGCallback else {"prior_precision": 1.0}
    module, source = LitNet(), kind(network="net", **words)
    trainer(tmp_path, source, **DOUBLE).fit(module, loader())
    subset = Subnetwork(5, by=source.posterior)
    posterior = plain(subset=subset).fit_now(None, module, loader())
    assert torch.equal(posterior.mean, fit_laplace(module, loader(), subset=subset).mean)
    variances = source.posterior.precision.inverse_diagonal()
    assert variances[variances.argsort(descending=True)[4]] > variances.median()


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ({"subset": Subnetwork(32)}, SubsetError, r"n=32\) asks for more weights than the 31 that are available"),
        ({"subset": Subnetwork(3), "prior_precision": [1.0, 2.0, 3.0]}, PriorError, "one for each of the 2 layers"),
    ],
)
def test_what_cannot_work_is_known_before_the_first_step(words: Any, error: Any, message: str, tmp_path: Path) -> None:
    module = LitNet()
    with refused(module, error, message):
        trainer(tmp_path, plain(**words), **DOUBLE).fit(module, loader())


class VariationalNet(VariationalLaplaceMixin, LitNet):
    pass


def test_log_sigmas_are_not_taken_for_weights(tmp_path: Path) -> None:
    module = VariationalNet("classification", variational={"likelihood": "classification"})
    with pytest.raises(ModuleError, match="would treat its log σ as weights"):
        trainer(tmp_path, plain(subset=Subnetwork(5)), **DOUBLE).fit(module, loader())


def test_a_checkpoint_holds_the_subnetwork(tmp_path: Path) -> None:
    callback, module = plain(subset=Subnetwork(7)), Classifier()
    fit = trainer(tmp_path, callback, enable_checkpointing=True)
    fit.fit(module, plain_loader())
    path = fit.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    again = plain(subset=Subnetwork(7))
    (logged,) = trainer(tmp_path, again, enable_checkpointing=True).test(
        module, plain_loader(), ckpt_path=path, verbose=False
    )
    assert "test_nll_laplace" in logged
    assert torch.equal(again.posterior.precision.to_dense(), callback.posterior.precision.to_dense())
