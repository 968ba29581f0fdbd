"""Outputs at every pixel: against the dense Jacobian, with ignored pixels and uneven batches, and what keeps only
running sums against what keeps every draw."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.networks import made
from helpers.options import predictive_of
from helpers.oracles import at_weights, jacobian
from helpers.tensors import TIGHT, real, seeded
from helpers.training import trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import GLM, Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, LaplaceCallback, fit_laplace
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError
from lightning_bayes.network.messages import BayesWarning
from lightning_bayes.posterior import LaplacePosterior
from lightning_bayes.predictive import evaluate as scores
from lightning_bayes.predictive import predict as predict_module
from lightning_bayes.predictive.evaluate import evaluate

H, W, N, IGNORED = 3, 4, 7, 255
KNOWN_NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def pixels(channels: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, outputs, 1))


def labels(classes: int, ignored: bool = True) -> Tensor:
    y = torch.randint(classes, (N, H, W), generator=seeded(1))
    return y.masked_fill(torch.rand(N, H, W, generator=seeded(2)) < 0.3, IGNORED) if ignored else y


def batches(y: Tensor, x: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """Uneven ones, one of them a single example."""
    x = real(N, 2, H, W, seed=3) if x is None else x
    return list(zip(x.split([4, 1, 2]), y.split([4, 1, 2]), strict=True))


TASKS: dict[str, tuple[Likelihood, int, Tensor]] = {
    "classes": (Categorical(ignore_index=IGNORED), 2, labels(2)),
    "three classes": (Categorical(ignore_index=IGNORED), 3, labels(3)),
    "labels": (Bernoulli(), 2, (real(N, 2, H, W, seed=4) > 0).double()),
    "values": (Gaussian(0.4), 2, real(N, 2, H, W, seed=5)),
    "values with noise": (HeteroscedasticGaussian(), 2, real(N, 1, H, W, seed=5)),
}
every_task = pytest.mark.parametrize("task", TASKS)


def fitted(task: str, **options: Any) -> LaplacePosterior:
    likelihood, outputs, y = TASKS[task]
    return fit_laplace(made(lambda: pixels(2, outputs)), batches(y), likelihood, prior_precision=2.0, **options)


def fisher(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """`Λ` of the flat outputs, by its definition at one position after the other.  # [B, C·R, C·R]"""
    B, C = f.shape[:2]
    whole = f.new_zeros(B, C, H * W, C, H * W)
    p = f.softmax(1).flatten(2)
    for n in range(B):
        for r in range(H * W):
            if y[n].flatten()[r] != IGNORED:
                whole[n, :, r, :, r] = p[n, :, r].diag() - torch.outer(p[n, :, r], p[n, :, r])
    return whole.reshape(B, C * H * W, -1)


@pytest.mark.parametrize("task", ["classes", "three classes"])
def test_the_curvature_is_that_of_the_dense_jacobian(task: str) -> None:
    likelihood, _, y = TASKS[task]
    posterior = fitted(task, structure="full")
    assert posterior.curvature.kind == "ggn"
    x = torch.cat([x for x, _ in batches(y)])
    J = jacobian(posterior.network, x)  # [N, C·R, P]
    with torch.no_grad():
        H_ = torch.einsum("nip,nij,njq->pq", J, fisher(likelihood, posterior.network(x), y), J)
    torch.testing.assert_close(posterior.curvature.structure.to_dense(), H_, **TIGHT)
    torch.testing.assert_close(fitted(task, structure="diag").curvature.structure.diagonal(), H_.diagonal(), **TIGHT)


def test_ignored_pixels_change_nothing() -> None:
    """Neither their inputs' labels nor a batch with nothing else."""
    likelihood, _, y = TASKS["classes"]
    network = made(lambda: pixels(2, 2))
    nothing = (real(2, 2, H, W, seed=9), torch.full((2, H, W), IGNORED))
    one, other = (fit_laplace(network, data, likelihood) for data in (batches(y), [*batches(y), nothing]))
    torch.testing.assert_close(one.curvature.log_likelihood, other.curvature.log_likelihood, **TIGHT)
    one, other = (fit_laplace(network, d, likelihood, structure="diag") for d in (batches(y), [*batches(y), nothing]))
    torch.testing.assert_close(one.curvature.structure.diagonal(), other.curvature.structure.diagonal(), **TIGHT)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_variances_are_those_of_the_dense_jacobian(structure: str) -> None:
    posterior = fitted("values", structure=structure)
    x = real(3, 2, H, W, seed=6)
    J = jacobian(posterior.network, x)
    covariance = J @ torch.linalg.inv(posterior.precision.to_dense()) @ J.mT
    expected = covariance.diagonal(dim1=1, dim2=2).reshape(3, 2, H, W)
    prediction = posterior.predict(x)
    torch.testing.assert_close(prediction.epistemic, expected, **TIGHT)
    torch.testing.assert_close(prediction.variance, expected + 0.16, **TIGHT)


@pytest.mark.parametrize("kept", [0, 2**26])
def test_many_outputs_are_functions_of_the_posterior_s_own_weights(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr(predict_module, "MANY", 1)
    monkeypatch.setattr(predict_module, "KEPT", kept)
    posterior, x = fitted("three classes", structure="kron"), real(3, 2, H, W, seed=6)
    generator = seeded(5)
    moves = torch.cat([posterior.sample(1, generator) for _ in range(9)]) - posterior.mean
    f = at_weights(posterior.network, posterior.mean, KNOWN_NAMES, x)
    J = jacobian(posterior.network, x)
    p = (f + torch.einsum("bcp,sp->sbc", J, moves).reshape(9, *f.shape)).softmax(2)
    prediction, used = posterior.predict(x, GLM(samples=9), generator=(used := seeded(5))), used
    torch.testing.assert_close(prediction.probs, p.mean(0), **TIGHT)
    torch.testing.assert_close(prediction.epistemic, p.var(0, correction=0), **TIGHT)
    torch.testing.assert_close(prediction.aleatoric, (p * (1 - p)).mean(0), **TIGHT)
    assert torch.equal(used.get_state(), generator.get_state())


def both_ways(monkeypatch: pytest.MonkeyPatch, work: Any) -> tuple[Any, Any]:
    """With every draw in memory, and with running sums alone."""
    monkeypatch.setattr(predict_module, "MANY", 1)
    plain = work()
    monkeypatch.setattr(predict_module, "KEPT", 0)
    monkeypatch.setattr(predict_module, "CHUNK", 20)
    monkeypatch.setattr(scores, "ROWS", 5)
    return plain, work()


@every_task
@pytest.mark.parametrize("predictive", ["glm", "bnn"])
def test_running_sums_give_the_same_predictions(task: str, predictive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = fitted(task, structure="diag"), real(3, 2, H, W, seed=6)
    for link in posterior.likelihood.links:
        plain, running = both_ways(
            monkeypatch,
            lambda link=link: posterior.predict(
                x, predictive_of(predictive, link=link, samples=6), generator=seeded(1)
            ),
        )
        for name, value in vars(plain).items():
            if value is not None:
                torch.testing.assert_close(getattr(running, name), value, **TIGHT)


def test_without_a_generator_running_sums_take_the_global_one_s_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = fitted("classes", structure="diag"), real(3, 2, H, W, seed=6)
    torch.manual_seed(3)
    plain, running = both_ways(monkeypatch, lambda: posterior.predict(x, GLM(samples=4)))
    torch.testing.assert_close(plain.probs, running.probs, **TIGHT)


@every_task
@pytest.mark.parametrize("of", ["outputs", "probs"])
def test_running_sums_choose_the_same_temperature(task: str, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, data = fitted(task, structure="diag"), batches(TASKS[task][2], real(N, 2, H, W, seed=8))
    plain, running = both_ways(monkeypatch, lambda: posterior.calibrate(data, GLM(samples=4), of=of))
    for name, value in vars(plain.calibrations[-1]).items():
        assert getattr(running.calibrations[-1], name) == (value if isinstance(value, str) else pytest.approx(value))


@every_task
def test_running_sums_tune_and_score_alike(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, data = fitted(task, structure="diag"), batches(TASKS[task][2], real(N, 2, H, W, seed=8))

    def work() -> tuple[float, dict[str, float]]:
        tuned = posterior.tune_prior("auto", data, predictive=GLM(samples=4))
        return float(tuned.prior_precision), evaluate(tuned, data, predictive=GLM(samples=4))

    plain, running = both_ways(monkeypatch, work)
    assert running[0] == pytest.approx(plain[0])
    assert running[1] == pytest.approx(plain[1])


def test_a_failing_likelihood_leaves_the_network_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict_module, "MANY", 1)
    monkeypatch.setattr(predict_module, "KEPT", 0)
    posterior = fitted("classes", structure="diag")
    posterior.network.train()

    def broken(self: Any, f: Tensor) -> Any:
        raise ArithmeticError("in the middle")

    monkeypatch.setattr(Categorical, "conditional", broken)
    with pytest.raises(ArithmeticError):
        posterior.predict(real(3, 2, H, W), GLM(samples=3))
    assert posterior.network.training
    assert all(p.requires_grad and p.grad is None for p in posterior.network.parameters())


@pytest.mark.parametrize(
    ("side", "word", "kind"),
    [(3, "auto", "ggn"), (9, "auto", "fisher_mc"), (9, "ggn", "ggn"), (9, "empirical_fisher", "empirical_fisher")],
)
def test_the_default_curvature_of_an_image_takes_one_backward_pass(side: int, word: str, kind: str) -> None:
    x, y = real(2, 2, side, side), torch.randint(2, (2, side, side), generator=seeded(1))
    assert fit_laplace(made(lambda: pixels(2, 2)), [(x, y)], curvature=word).curvature.kind == kind


def test_the_covariance_of_all_pixels_is_refused() -> None:
    x, y = torch.randn(1, 2, 400, 400), torch.zeros(1, 400, 400, dtype=torch.long)
    posterior = fit_laplace(nn.Conv2d(2, 2, 1), [(x, y)], curvature="auto")
    with pytest.raises(CurvatureError, match=r"320000 outputs per example takes 410 GB: use predict"):
        posterior.functional(x)


def test_classes_without_positions_stay_exact() -> None:
    x, y = real(6, 3), torch.arange(6)
    assert fit_laplace(made(lambda: nn.Linear(3, 100)), [(x, y)], structure="diag").curvature.kind == "ggn"


class LitUNet(L.LightningModule):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(6, 4, 2, 2), nn.Conv2d(8, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x).relu()
        coarse = self.bottom(F.max_pool2d(fine, 2)).relu()
        return self.head(torch.cat([fine, self.up(coarse)], dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], ignore_index=IGNORED)

    validation_step = test_step = lambda self, batch, batch_idx: None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.02)


def images(n: int, seed: int) -> DataLoader[Any]:
    """The class of a pixel is how bright its surroundings are; some have none."""
    x = torch.randn(n, 1, 8, 8, generator=seeded(seed))
    y = (F.avg_pool2d(x, 3, 1, 1)[:, 0].mul(3).round() + 1).clamp(0, 2).long()
    y[torch.rand(y.shape, generator=seeded(seed)) < 0.2] = IGNORED
    return DataLoader(TensorDataset(x, y), 5)


def test_a_u_net_through_the_callback(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = LitUNet()
    laplace = LaplaceCallback(Categorical(ignore_index=IGNORED), save=False, predictive=GLM(samples=5))
    runner = trainer(tmp_path, laplace, max_epochs=3)
    runner.fit(module, images(22, 0), images(60, 1))
    assert laplace.posterior.curvature.kind == "fisher_mc"
    (logged,) = runner.test(module, test := images(13, 2), verbose=False)
    predictions = runner.predict(module, test)
    for name, predict in (("laplace", None), ("map", lambda x: module(x).softmax(1))):
        probs, labels = [], []
        for (x, y), prediction in zip(test, predictions, strict=True):
            with torch.no_grad():
                p = prediction.probs if predict is None else predict(x)
            probs.append(p.movedim(1, -1)[y != IGNORED].double())
            labels.append(y[y != IGNORED])
        p, y = torch.cat(probs), torch.cat(labels)
        assert logged[f"test_nll_{name}"] == pytest.approx(float(F.nll_loss(p.log(), y)), rel=1e-4)
        assert logged[f"test_acc_{name}"] == pytest.approx(float((p.argmax(1) == y).double().mean()), rel=1e-5)
        brier = (p - F.one_hot(y, 3)).square().sum(1).mean()
        assert logged[f"test_brier_{name}"] == pytest.approx(float(brier), rel=1e-4)


def test_an_exact_curvature_of_images_is_said_before_training_and_tried_by_one_pass(
    tmp_path: Path,
) -> None:
    laplace = LaplaceCallback(Categorical(ignore_index=IGNORED), curvature="ggn", tune=None, calibrate=None, save=False)
    x, y = torch.randn(4, 1, 20, 20, generator=seeded(0)), torch.zeros(4, 20, 20, dtype=torch.long)

    class Stop(Exception):
        pass

    class StopAtFirstStep(L.Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            raise Stop

    said = "needs about 1200 backward passes.*curvature='fisher_mc'.*hessian='approx'"
    with pytest.warns(BayesWarning, match=said), pytest.raises(Stop):
        trainer(tmp_path, laplace, StopAtFirstStep()).fit(LitUNet(), DataLoader(TensorDataset(x, y), 4))
