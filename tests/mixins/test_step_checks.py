"""Between two looks, a step with which something is wrong changes nothing; the next look says what it was."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from variational_cases import NOISE, Lit, gradients, images, options, spread, targets, trainer

from lightning_bayes.jacobian.checks import CHECK_INTERVAL
from lightning_bayes.likelihoods import LikelihoodError
from lightning_bayes.mixins import StepError, VariationalInferenceMixin, VariationalLaplaceMixin

METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "auto": (VariationalLaplaceMixin, {}),
    "finite_difference": (VariationalLaplaceMixin, {"method": "finite_difference"}),
    "exact": (VariationalLaplaceMixin, {"method": "exact"}),
    "empirical": (VariationalLaplaceMixin, {"estimator": "empirical"}),
    "deterministic": (VariationalLaplaceMixin, {"deterministic": ["*.bias"]}),
    "vi": (VariationalInferenceMixin, {}),
    "vi of two samples": (VariationalInferenceMixin, {"train_samples": 2}),
    "local": (VariationalInferenceMixin, {"local_reparameterization": True}),
}
AWRY = {"target": "regression", "label": "binary", "class": "classification", "input": "regression", "loss": "binary"}
MESSAGES = {
    "target": (LikelihoodError, "got the target nan"),
    "label": (LikelihoodError, "needs targets that are 0 or 1, got 2"),
    "class": (LikelihoodError, "got the target 7, but the network has 3 outputs"),
    "input": (LikelihoodError, "NaN in the network's output"),
    "loss": (StepError, r"training_step returned \S+, but the mean negative log-likelihood"),
}


class Unchecked(Lit):
    """Does not look at its targets."""

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        if self.task != "regression":
            return super().nll(f, y)
        return (0.5 * ((y - f) / NOISE).square() + math.log(NOISE * math.sqrt(2 * math.pi))).sum(1).mean()


class Changing(Unchecked):
    """Its loss is another one for a marked batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.nll(self(x), y.clamp_max(1) if self.task == "binary" else y)
        return loss + (x.flatten()[0] > 100) * loss


def made(base: type, method: str = "auto", task: str = "classification", **more: Any) -> Any:
    mixin, given = METHODS[method]
    module = type("Bayes", (mixin, base), {})(task=task, variational=options(task, **given, **more))
    return spread(module.double().train())


def batch(task: str, n: int = 5) -> tuple[Tensor, Tensor]:
    return images(n), targets(task, n)


def awry(what: str) -> tuple[Tensor, Tensor]:
    x, y = (t.clone() for t in batch(AWRY[what]))
    if what == "input":
        x[2] = torch.nan
    elif what == "loss":
        x[0, 0, 0, 0] = 1e3
    else:
        y.flatten()[3] = {"target": torch.nan, "label": 2, "class": 7}[what]
    return x, y


@pytest.mark.parametrize("what", [what for what in AWRY if what != "class"])  # which torch's own loss refuses
@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_is_wrong_moves_nothing_and_is_told(what: str, method: str) -> None:
    module = made(Changing, method, AWRY[what])
    module.training_step(batch(AWRY[what]), 0)
    moved = gradients(module, module.training_step(batch(AWRY[what]), 1))
    assert all(g.abs().sum() > 0 for name, g in moved.items() if "weight" in name)
    still = gradients(module, module.training_step(awry(what), 2))
    assert still.keys() == moved.keys()
    assert all(torch.equal(g, torch.zeros_like(g)) for g in still.values())
    kind, message = MESSAGES[what]
    with pytest.raises(kind, match=message):
        module._variational.checks.raise_pending()


@pytest.mark.parametrize("method", ["auto", "vi"])
def test_a_class_that_is_none_is_told_by_the_likelihoods_own_loss(method: str) -> None:
    class Constant(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0]).sum()

    module = made(Constant, method, loss="likelihood")
    module.training_step(batch("classification"), 0)
    module.training_step(awry("class"), 1)
    with pytest.raises(LikelihoodError, match=MESSAGES["class"][1]):
        module._variational.checks.raise_pending()


@pytest.mark.parametrize("what", ["target", "loss"])
@pytest.mark.parametrize("method", ["auto", "exact", "vi"])
def test_a_short_training_ends_with_the_error_and_finite_weights(what: str, method: str, tmp_path: Path) -> None:
    data = [batch(AWRY[what]), awry(what), batch(AWRY[what])]
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    module = made(Changing, method, AWRY[what])
    kind, message = MESSAGES[what]
    with pytest.raises(kind, match=message):
        trainer(tmp_path, max_epochs=1).fit(module, DataLoader(TensorDataset(x, y), 5))
    assert all(p.isfinite().all() for p in module.parameters())


def test_the_first_step_and_every_so_many_look() -> None:
    with pytest.raises(LikelihoodError, match="nan"):
        made(Unchecked, task="regression").training_step(awry("target"), 0)
    module = made(Unchecked, task="regression")
    for step in range(CHECK_INTERVAL):
        module.training_step(awry("target") if step == 1 else batch("regression"), step)
    with pytest.raises(LikelihoodError, match="nan"):
        module.training_step(batch("regression"), CHECK_INTERVAL)


# -- what the graph shows ----------------------------------------------------------------------------------------------


class Scaled(Lit):
    """Beside the network stand parameters that its loss depends on, with a value at which that does not show."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.scale, self.other = nn.Parameter(torch.ones(())), nn.Linear(32, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.nll(self.net(batch[0]) * self.scale, batch[1])


class Branched(Scaled):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.nll(self.net(batch[0]) + (self.scale - 1) * self.other(batch[0].flatten(1)), batch[1])


class Again(Scaled):
    """A weight of the network once more; the scale is one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        w = self.net[1].weight.sum()  # type: ignore[index, union-attr]
        return self.nll(self.net(batch[0]) * (1 + w - w.detach()), batch[1])


class Untouched(Scaled):
    """As is done for DDP: all parameters in the graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.nll(self.net(batch[0]), batch[1]) + 0 * sum(p.sum() for p in self.parameters())


@pytest.mark.parametrize("method", ["auto", "exact", "vi"])
@pytest.mark.parametrize(
    ("base", "names"), [(Scaled, "scale"), (Branched, "scale"), (Again, r"net\.1\.weight")], ids=lambda v: str(v)
)
def test_parameters_beside_the_networks_outputs_are_refused(base: type, names: str, method: str) -> None:
    with pytest.raises(StepError, match=f"depends on {names} besides the network's outputs.*'network'"):
        made(base, method, network="net").training_step(batch("classification"), 0)


@pytest.mark.parametrize("method", ["auto", "exact", "vi"])
def test_a_gradient_of_zero_is_none(method: str) -> None:
    made(Untouched, method, network="net").training_step(batch("classification"), 0)


class AtZero(Lit):
    """All classes are as likely: label smoothing does not change the value of the loss."""

    factor = 1.0

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for p in self.net[-1].parameters():  # type: ignore[index]
            nn.init.zeros_(p)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        f = self(batch[0])
        loss = F.cross_entropy(f, batch[1], label_smoothing=0.1 * self.factor)
        return loss if self.factor else 2 * loss - loss.detach()


class Weighted(AtZero):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


class TwiceAsSteep(AtZero):
    factor = 0.0


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (AtZero, "0.9 times that of"),
        (TwiceAsSteep, "2 times"),
        (Weighted, "does not depend on the network's outputs as"),
    ],
)
def test_another_gradient_of_the_same_value_is_refused(base: type, message: str) -> None:
    with pytest.raises(StepError, match=message):
        made(base).training_step(batch("classification"), 0)


def test_log_probabilities_may_be_read_as_they_are() -> None:
    class Normalised(Lit):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).log_softmax(1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.nll_loss(self(batch[0]), batch[1])

    made(Normalised).training_step(batch("classification"), 0)
