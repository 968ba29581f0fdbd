"""The prior of a callback: around pretrained weights, or the posterior of an earlier training."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.tensors import TIGHT
from helpers.training import TASKS, LitNet, loader, trainer
from torch import Tensor

from lightning_bayes import Kron, L2MCallback, LaplaceCallback, Learning, MarginalLikelihoodCallback, Prior, fit_laplace
from lightning_bayes.posterior import PriorError


class Plain(LitNet):
    """Without weight decay, which is a prior."""

    decay = 0.0


def trained(folder: Path, callback: L.Callback, seed: int = 0, task: str = "classification", **words: Any) -> LitNet:
    module = Plain(task, seed)
    trainer(folder, callback, **words).fit(module, loader(task))
    return module


@pytest.mark.parametrize(
    ("within", "saved"),
    [(None, "tensor"), (None, "module"), (None, "file"), ("net", "module"), ("net", "network"), ("net", "checkpoint")],
)
def test_a_prior_mean_may_come_in_any_form(within: str | None, saved: str, tmp_path: Path) -> None:
    pretrained = Plain(seed=3)
    weights = torch.cat([p.detach().flatten() for p in pretrained.parameters()])
    forms: dict[str, Any] = {
        "tensor": weights,
        "module": pretrained.state_dict(),
        "network": pretrained.net.state_dict(),
        "file": str(tmp_path / "weights.pt"),
        "checkpoint": str(tmp_path / "model.ckpt"),
    }
    torch.save(pretrained.state_dict(), tmp_path / "weights.pt")
    torch.save({"state_dict": pretrained.state_dict()}, tmp_path / "model.ckpt")
    callback = LaplaceCallback(network=within, tune="marglik", structure="full", prior=Prior(mean=forms[saved]))
    trained(tmp_path, callback, max_epochs=1)
    posterior = callback.posterior
    assert torch.equal(posterior.prior.mean, weights)
    by_hand = fit_laplace(posterior.network, loader(), structure="full", prior=Prior(mean=weights)).tune_prior(
        "marglik"
    )
    assert torch.allclose(posterior.prior_precision, by_hand.prior_precision)


@pytest.mark.parametrize("kind", [LaplaceCallback, MarginalLikelihoodCallback, L2MCallback])
def test_the_state_dict_of_the_module_that_trains_is_its_start(kind: Any, tmp_path: Path) -> None:
    module = Plain()
    start = torch.cat([p.detach().flatten() for p in module.parameters()])
    callback = kind(prior_precision=1.0, calibrate=None, prior=Prior(mean=module.state_dict()))
    trainer(tmp_path, callback).fit(module, loader())
    assert torch.equal(callback.posterior.prior.mean, start)
    assert not torch.allclose(callback.posterior.mean, start)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("held_out", [True, False])
def test_by_default_the_old_data_count_as_they_did(task: str, held_out: bool, tmp_path: Path) -> None:
    """The validation data of the new task calibrate, but do not weight the old posterior."""
    before = fit_laplace(LitNet(task, 3).net, loader(task), TASKS[task])
    callback = LaplaceCallback(TASKS[task], network="net", prior=before)
    module = Plain(task)
    trainer(tmp_path, callback).fit(module, loader(task), loader(task, seed=5) if held_out else None)
    assert float(callback.posterior.prior_precision) == 1.0
    assert len(callback.posterior.calibrations) == held_out


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_the_posterior_of_one_training_is_the_prior_of_the_next(structure: str, tmp_path: Path) -> None:
    first = LaplaceCallback(structure=structure, tune=None, calibrate=None, save=str(tmp_path / "first.pt"))
    trained(tmp_path, first)
    for prior in (first.posterior, str(tmp_path / "first.pt")):
        second = LaplaceCallback(structure=structure, tune=None, calibrate=None, prior=prior)
        trained(tmp_path, second, seed=1)
        after = second.posterior
        by_hand = fit_laplace(after.network, loader(), structure=structure, prior=first.posterior)
        assert torch.allclose(after.precision.to_dense(), by_hand.precision.to_dense(), **TIGHT)
        assert torch.allclose(after.log_marginal_likelihood(), by_hand.log_marginal_likelihood(), **TIGHT)
        prediction = trainer(tmp_path, second).predict(second._module, loader())
        assert len(prediction) == 3


def test_a_wrong_prior_is_known_before_training(tmp_path: Path) -> None:
    other = fit_laplace(LitNet(seed=2).net, loader(), subset="last_layer")
    steps: list[int] = []

    class Counting(LitNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    for words in (
        {"prior": other},
        {"prior": Prior(mean=torch.zeros(3))},
        {"prior": Prior(mean={"net.0.weight": torch.ones(2)})},
    ):
        with pytest.raises(PriorError, match="prior"):
            trainer(tmp_path, LaplaceCallback(network="net", **words)).fit(Counting(), loader())
    with pytest.raises(FileNotFoundError, match="no posterior's file"):
        trainer(tmp_path, LaplaceCallback(prior=str(tmp_path / "none.pt"))).fit(Counting(), loader())
    assert steps == []


def test_data_can_be_added_to_the_posterior_of_a_callback(tmp_path: Path) -> None:
    callback = LaplaceCallback(tune=None, calibrate=None, structure=Kron(updatable=True))
    trained(tmp_path, callback)
    grown = callback.posterior.update(loader(n=5, seed=9))
    both = [*loader(), *loader(n=5, seed=9)]
    whole = fit_laplace(callback.posterior.network, both)
    assert torch.allclose(grown.precision.to_dense(), whole.precision.to_dense(), **TIGHT)


@pytest.mark.parametrize("kind", [MarginalLikelihoodCallback, L2MCallback])
def test_the_evidence_of_other_callbacks_is_around_it_too(kind: Any, tmp_path: Path) -> None:
    pretrained = Plain(seed=3).state_dict()
    by_loss = {"tune": "marglik", "loss_scale": 1.0}
    words: dict[str, Any] = by_loss if kind is L2MCallback else {"evidence": Learning(loss_scale=1.0)}
    callback = kind(calibrate=None, prior=Prior(mean=pretrained), **words)
    trained(tmp_path, callback)
    posterior = callback.posterior
    m = torch.cat([w.flatten() for w in pretrained.values()])
    assert torch.equal(posterior.prior.mean, m)
    δ = posterior.prior_matrix().diagonal()
    plain = posterior.log_marginal_likelihood() + 0.5 * (δ * (posterior.mean - m).square()).sum()
    P = posterior.precision.logdet() - δ.log().sum()
    assert torch.allclose(plain, posterior.curvature.log_likelihood - 0.5 * P, **TIGHT)


def test_marginal_likelihood_training_pulls_to_the_prior_mean(tmp_path: Path) -> None:
    """A prior that is much stronger than the data."""
    pretrained = Plain(seed=3).state_dict()

    class Descending(Plain):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    module = Descending()
    words: dict[str, Any] = {"burn_in_epochs": 10, "prior_precision": 1e4, "calibrate": None}
    callback = MarginalLikelihoodCallback(
        prior=Prior(mean=pretrained), evidence=Learning(keep="last", loss_scale=1.0), **words
    )
    trainer(tmp_path, callback, max_epochs=10).fit(module, loader())
    far = [(p - pretrained[name]).abs().max() for name, p in module.named_parameters()]
    assert max(far) < 0.05
