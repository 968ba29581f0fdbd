"""Users' modules, and online Laplace by hand: eqs. (64) and (65), example by example."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.nn.functional as F
from callback_cases import FEATURES, draw, trainer
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from lightning_bayes import BNN, OnlineLaplaceCallback

EXAMPLES, BATCH = 11, 4  # batches of 4, 4 and 3
Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.0)


class Autoencoder(L.LightningModule):
    """Its batches are tensors."""

    def __init__(self, optimizer: Optimizer = sgd) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, FEATURES))
        seeded(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self(batch), batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Convolutional(Autoencoder):
    """1×4×4 images; convolutions, whose backward pass reads the weights, pooling, up-sampling and batch norm."""

    def __init__(self, optimizer: Optimizer = sgd) -> None:
        super().__init__(optimizer)
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(8, 2)),
        )
        self.decoder = nn.Sequential(
            *(nn.Linear(2, 8), nn.Tanh(), nn.Unflatten(1, (2, 2, 2)), nn.Upsample(scale_factor=2)),
            nn.Conv2d(2, 1, 3, padding=1),
        )
        seeded(self)


class Labels(Autoencoder):
    """A classifier, with pairs for batches."""

    def __init__(self, optimizer: Optimizer = sgd) -> None:
        super().__init__(optimizer)
        self.decoder = nn.Sequential(nn.Linear(2, 3))
        seeded(self)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


def seeded(module: nn.Module, seed: int = 1) -> None:
    with torch.no_grad():
        for number, p in enumerate(module.parameters()):
            p.copy_(0.5 * draw(*p.shape, seed=1000 * seed + number))


class Given:
    """A loader of these batches in order, whose examples cannot be counted."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def vectors(n: int = EXAMPLES, size: int = BATCH, seed: int = 0) -> list[Tensor]:
    return list(draw(n, FEATURES, seed=seed).double().split(size))


def images(n: int = EXAMPLES, size: int = BATCH, seed: int = 0) -> list[Tensor]:
    return list(draw(n, 1, 4, 4, seed=seed).double().split(size))


def online(**arguments: Any) -> OnlineLaplaceCallback:
    """Settings with which every term of the update counts."""
    few = {"memory_factor": 0.2, "hessian": "exact", "prior_precision": 3.0, "predictive": BNN(samples=5)}
    return OnlineLaplaceCallback(**{**few, **arguments})


@dataclass
class Run:
    """What a fit leaves behind."""

    model: Any
    callback: OnlineLaplaceCallback
    noises: list[Tensor] = field(default_factory=list)  # ε of every draw

    @property
    def C(self) -> Tensor:
        return self.callback.state_dict()["memory"]["C"]

    @property
    def weights(self) -> Tensor:
        return flat(self.model)


def trained(
    folder: Path, model: Any, batches: Any, callback: OnlineLaplaceCallback | None = None, **options: Any
) -> Run:
    """A copy of `model` after a fit in float64."""
    if callback is None:
        callback = online(n_data=EXAMPLES)
    model = copy.deepcopy(model)
    others, val = options.pop("callbacks", []), options.pop("val", None)
    fit = trainer(folder, callback, *others, **{"precision": "64-true", **options})
    with noted() as noises:
        fit.fit(model, Given(batches) if isinstance(batches, list) else batches, None if val is None else Given(val))
    return Run(model, callback, noises)


@contextmanager
def noted() -> Iterator[list[Tensor]]:
    """The numbers that `torch.randn` gives."""
    found: list[Tensor] = []
    original = torch.randn

    def randn(*args: Any, **kwargs: Any) -> Tensor:
        numbers = original(*args, **kwargs)
        if kwargs.get("dtype") is not None:  # of the tests' own data it is not given
            found.append(numbers.clone())
        return numbers

    with patch("torch.randn", randn):
        yield found


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def weights_of(model: nn.Module, θ: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    parts = θ.split([p.numel() for p in parameters.values()])
    return {name: part.view_as(p) for (name, p), part in zip(parameters.items(), parts, strict=True)}


# -- the oracle --------------------------------------------------------------------------------------------------------


@dataclass
class ByHand:
    """The update without the package, except for its noise."""

    model: Any
    N: int
    α: float = 0.2
    δ: float = 3.0
    scale: float = 1.0
    average: bool = False
    scaling: str = "dataset"
    at: str = "mean"
    samples: int = 1
    C0: float = 0.0
    max_std: float = float("inf")
    accumulate: int = 1
    clip: float | None = None

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model).double()
        self.C = torch.full_like(flat(self.model), self.C0)
        self.optimizer = self.model.configure_optimizers()

    def run(self, batches: Sequence[Any], noises: Sequence[Tensor], epochs: int = 2) -> "ByHand":
        left = iter(noises)
        for _ in range(epochs):
            for start in range(0, len(batches), self.accumulate):
                self.step(batches[start : start + self.accumulate], left)
        assert next(left, None) is None
        return self

    def step(self, group: Sequence[Any], noises: Iterator[Tensor]) -> None:
        θ = flat(self.model)
        std = (self.scale * self.C + self.δ).rsqrt().clamp(max=self.max_std)
        gradient, h, b = torch.zeros_like(θ), torch.zeros_like(θ), 0
        for batch in group:
            drawn = [θ + std * next(noises) for _ in range(self.samples)]
            places = [θ] if self.at == "mean" else drawn
            h += sum(self.curvature(place, batch) for place in places) / len(places)
            b += len(batch[0] if isinstance(batch, (tuple, list)) else batch)
            gradient += self.gradient(drawn[0], batch) / self.samples / self.accumulate
            with unmoved(self.model):  # batch norm's statistics are those at the first sample
                gradient += sum(self.gradient(each, batch) for each in drawn[1:]) / self.samples / self.accumulate
        for p, g in zip(self.model.parameters(), weights_of(self.model, gradient).values(), strict=True):
            p.grad = g.clone()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        factor = self.N / b if self.scaling == "dataset" else 1.0
        self.C = (1 - self.α) * self.C + factor * h * (self.α if self.average else 1.0)

    def gradient(self, θ: Tensor, batch: Any) -> Tensor:
        θ = θ.clone().requires_grad_()
        loss = functional_call(_Loss(self.model), _prefixed(weights_of(self.model, θ)), (batch,))
        return torch.autograd.grad(loss, θ)[0]

    def curvature(self, θ: Tensor, batch: Any) -> Tensor:
        """`Σₙ diag(JₙᵀΛₙJₙ)` with the whole Jacobian of each example, in eval mode."""
        x, labels = (batch[0], True) if isinstance(batch, (tuple, list)) else (batch, False)
        was_training = self.model.training
        self.model.eval()

        def outputs(θ: Tensor, example: Tensor) -> Tensor:
            return functional_call(self.model, weights_of(self.model, θ), (example[None],)).reshape(-1)

        J = vmap(jacrev(outputs), (None, 0))(θ, x)  # [B, C, P]
        if labels:
            p = vmap(outputs, (None, 0))(θ, x).softmax(-1)
            Λ = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        else:
            Λ = torch.eye(J.shape[1], dtype=θ.dtype).expand(len(x), -1, -1)
        self.model.train(was_training)
        return torch.einsum("bip,bij,bjp->p", J, Λ, J).detach()


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])


class _Loss(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        return self.model.loss(batch)


def _prefixed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": t for name, t in state.items()}


def same(found: Tensor, expected: Tensor, what: str = "") -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda m: f"{what}: {m}")


def agree(run: Run, expected: ByHand) -> None:
    same(run.weights, flat(expected.model), "weights")
    same(run.C, expected.C, "C")
