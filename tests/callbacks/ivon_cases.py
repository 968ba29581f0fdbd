"""A module that records the weights at each of its steps, and algorithm 1 by hand at the recorded weights."""

from dataclasses import dataclass
from typing import Any

import torch
from callback_cases import labelled
from helpers.networks import made, mlp
from helpers.training import Lit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_bayes import IVON, IVONCallback

FEATURES, CLASSES, EXAMPLES = 4, 3, 11
OPTIONS: dict[str, Any] = {
    "lr": 0.3,
    "betas": (0.7, 0.8),
    "weight_decay": 0.02,
    "hess_init": 0.5,
    "seed": 3,
}


def network() -> nn.Sequential:
    return made(lambda: mlp(FEATURES, 5, CLASSES))


class Recorded(Lit):
    """Its weights at each call of `training_step`, which are samples, and the batches."""

    def __init__(self, **options: Any) -> None:
        super().__init__(network(), optimizer=lambda parameters: IVON(parameters, **{**OPTIONS, **options}))
        self.records: list[tuple[Tensor, Tensor, Tensor]] = []
        self.fail_at = self.skip_at = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights = [p for layer in (self.net[0], self.net[2]) for p in (layer.weight, layer.bias)]
        θ = torch.cat([whole(p).reshape(-1) for p in weights])
        self.records.append((θ.clone(), *batch))
        if len(self.records) == self.fail_at:
            raise RuntimeError("no step")
        return None if len(self.records) == self.skip_at else super().training_step(batch, batch_idx)


def whole(p: Tensor) -> Tensor:
    return p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()


def data(n: int = EXAMPLES) -> list[Any]:
    """Pairs in float64, one by one."""
    x, y = labelled(n).tensors
    return list(zip(x.double(), y, strict=True))


def ivon(**words: Any) -> IVONCallback:
    return IVONCallback(**{"progress": False, **words})


@dataclass
class ByHand:
    """The recursion as the paper writes it, of vectors."""

    m: Tensor
    N: int
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    hess_init: float
    clip_radius: float = float("inf")
    temperature: float = 1.0
    t: int = 0

    def __post_init__(self) -> None:
        self.λ, self.δ = self.N / self.temperature, self.weight_decay
        self.g, self.h = torch.zeros_like(self.m), torch.full_like(self.m, self.hess_init)

    @property
    def precision(self) -> Tensor:
        return self.λ * (self.h + self.δ)

    def step(self, samples: list[tuple[Tensor, Tensor]], clip: float = float("inf")) -> None:
        """`(θ, ĝ)` of each sample; the optimizer's gradient is clipped to a norm."""
        β1, β2 = self.betas
        σ2 = 1 / self.precision
        h_hat = torch.stack([g * (θ - self.m) / σ2 for θ, g in samples]).mean(0)
        g_hat = torch.stack([g for _, g in samples]).mean(0)
        g_hat = g_hat * min(1.0, clip / (float(g_hat.norm()) + 1e-6))
        self.t += 1
        self.g = β1 * self.g + (1 - β1) * g_hat
        correction = 0.5 * (1 - β2) ** 2 * (self.h - h_hat) ** 2 / (self.h + self.δ)
        self.h = β2 * self.h + (1 - β2) * h_hat + correction
        step = (self.g / (1 - β1**self.t) + self.δ * self.m) / (self.h + self.δ)
        step = step.clamp(-self.clip_radius, self.clip_radius)
        self.m = self.m - self.lr * (self.hess_init + self.δ) * step


def replayed(
    processes: list[list[Any]],
    n_data: int = EXAMPLES,
    samples: int = 1,
    accumulated: int = 1,
    clip: float = float("inf"),
    **options: Any,
) -> ByHand:
    """The run that made these records, one list for each process; None is a batch that an accumulation lacks."""
    given = {key: value for key, value in {**OPTIONS, **options}.items() if key not in ("seed", "n_data")}
    net = network()
    hand = ByHand(parameters_to_vector(net.parameters()).detach(), n_data, **given)

    def gradient(record: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        θ, x, y = record
        vector_to_parameters(θ, net.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
        return parameters_to_vector(gradients)

    calls = len(processes[0])
    for start in range(0, calls, samples * accumulated):
        drawn = []
        for number in range(samples):
            places = range(start + number, min(start + samples * accumulated, calls), samples)
            records = [own[place] for place in places for own in processes if own[place] is not None]
            (θ,) = {tuple(record[0].tolist()) for record in records}  # one sample for all
            total = torch.stack([gradient(record) for record in records]).sum(0)
            drawn.append((torch.tensor(θ, dtype=torch.float64), total / (accumulated * len(processes))))
        hand.step(drawn, clip)
    return hand


def weights(module: Any) -> Tensor:
    return torch.cat([whole(p).reshape(-1) for p in module.parameters()])


def agrees(module: Any, precision: Tensor, hand: ByHand) -> None:
    torch.testing.assert_close(weights(module), hand.m, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(precision, hand.precision, rtol=1e-9, atol=1e-11)
