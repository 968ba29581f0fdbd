"""Networks with every kind of layer, LightningModules as users write them, and the objective written out slowly."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from helpers import training
from helpers.tensors import real as draw
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Bernoulli, Categorical, Gaussian
from lightning_bayes.mixins import VariationalInferenceMixin, VariationalLaplaceMixin, VariationalLastLayerMixin

SIDE, CHANNELS = 4, 2  # of the images
NOISE = 0.6
LIKELIHOODS = {"classification": Categorical(), "binary": Bernoulli(), "regression": Gaussian(NOISE)}


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, outputs)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.softplus(self.first(x.flatten(1)[:, :6]))
        return self.out(torch.tanh(self.second(x)))


class Residual(nn.Module):
    """A pre-activation block: norm, activation, convolution, and a sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.softplus(self.norm(x)))


class Preact(nn.Module):
    """A deeper pre-activation network, as wide as is quick."""

    def __init__(self, outputs: int, blocks: int = 3, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2 * blocks))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2 * blocks))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(0, len(self.convs), 2):
            h = self.convs[i](F.softplus(self.norms[i](x)))
            x = x + self.convs[i + 1](F.softplus(self.norms[i + 1](h)))
        return self.head(x.mean((2, 3)))


def network(kind: str, outputs: int) -> nn.Module:
    if kind == "deep":
        return Preact(outputs)
    if kind == "tied":
        net: nn.Module = Tied(outputs)
    elif kind == "conv":
        net = nn.Sequential(nn.Conv2d(CHANNELS, 3, 2), nn.Softplus(), nn.Flatten(), nn.Linear(27, outputs))
    elif kind == "residual":
        layers = [nn.Conv2d(CHANNELS, 3, 3, padding=1), Residual(3), nn.BatchNorm2d(3), nn.Softplus()]
        net = nn.Sequential(*layers, nn.AvgPool2d(SIDE), nn.Flatten(), nn.Linear(3, outputs))
    else:
        net = nn.Sequential(
            nn.Flatten(), nn.Linear(32, 4), nn.Softplus(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, outputs)
        )
    if kind == "frozen":
        for p in net[1].parameters():  # type: ignore[index]
            p.requires_grad_(False)
    return net


class Lit(L.LightningModule):
    """A user's module: its loss is the mean negative log-likelihood."""

    def __init__(
        self, kind: str = "mlp", task: str = "classification", lr: float = 0.05, eval_mode: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.task, self.lr, self.eval_mode = task, lr, eval_mode
        self.net = network(kind, {"classification": 3, "binary": 1, "regression": 2}[task])

    def forward(self, x: Tensor) -> Tensor:
        f = self.net(x)
        return f.squeeze(1) if self.task == "binary" else f

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.eval_mode:
            self.net.eval()
        loss = self.nll(self(batch[0]), batch[1])
        if self._trainer is not None and self._trainer.training:
            self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        if self.task == "classification":
            return F.cross_entropy(f, y)
        if self.task == "binary":
            return F.binary_cross_entropy_with_logits(f, y)
        return -torch.distributions.Normal(f, NOISE).log_prob(y).sum(1).mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.nll(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


class VL(VariationalLaplaceMixin, Lit):
    pass


class VI(VariationalInferenceMixin, Lit):
    pass


class LastLayer(VariationalLastLayerMixin, Lit):
    pass


def images(n: int, seed: int = 1) -> Tensor:
    return draw(n, CHANNELS, SIDE, SIDE, seed=seed)


def targets(task: str, n: int, seed: int = 2) -> Tensor:
    noise = draw(n, 3, seed=seed)
    return {"classification": noise.argmax(1), "binary": (noise[:, 0] > 0).double(), "regression": noise[:, :2]}[task]


def dataset(task: str = "classification", n: int = 11) -> TensorDataset:
    return TensorDataset(images(n), targets(task, n))


def loader(task: str = "classification", n: int = 11, batch_size: int = 4, **arguments: Any) -> DataLoader[Any]:
    """Uneven batches."""
    return DataLoader(dataset(task, n), batch_size, **arguments)


def options(task: str = "classification", **more: Any) -> dict[str, Any]:
    return {"likelihood": LIKELIHOODS[task], "n_data": 11, "beta": 0.7, "prior_std": 0.8, **more}


def spread(module: Any, centre: float = -1.0, seed: int = 5) -> Any:
    """Give every log σ a value of its own."""
    with torch.no_grad():
        for place, log_σ in enumerate(module.log_sigma.values()):
            log_σ.copy_(centre + 0.3 * draw(*log_σ.shape, seed=seed + place).to(log_σ))
    return module


def vl(kind: str = "mlp", task: str = "classification", eval_mode: bool = False, **more: Any) -> VL:
    """A float64 module in training mode, with a σ of about e⁻¹ everywhere."""
    module = VL(kind, task, eval_mode=eval_mode, variational=options(task, **more))
    return spread(module.double().train())


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of every parameter that trains; zero where the loss does not depend on it."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(trained.items(), found, strict=True)}


def weighted_kl(module: Any) -> Tensor:
    """`β/N · KL`, with its graph."""
    return module._variational.kl_weight * module._variational.kl()


def naive_objective(module: Any, x: Tensor, y: Tensor, y_sampled: Tensor, β: float, N: int, s: float) -> Tensor:
    """−(1/S) L_VL, eq. (30) with the KL divergence of eq. (12), one weight after the other, in plain distributions."""
    S, task = len(y), module.task
    if module.eval_mode:
        module.net.eval()
    f = module(x)
    total = -log_p(task, f, y).sum() / S
    names = dict(module.named_parameters())
    sampled = log_p(task, f, y_sampled)  # [S]
    for name, log_σ in module.log_sigma.items():
        μ, σ = names[name], log_σ.exp()
        g = sum(torch.autograd.grad(sampled[n], μ, create_graph=True, allow_unused=True)[0] for n in range(S))
        total = total + S / 2 * (σ**2 * (g / S) ** 2).sum()
        q, p = torch.distributions.Normal(μ, σ), torch.distributions.Normal(torch.zeros_like(μ), s)
        total = total + β / N * torch.distributions.kl_divergence(q, p).sum()
    return total


def log_p(task: str, f: Tensor, y: Tensor) -> Tensor:
    if task == "classification":
        return torch.distributions.Categorical(logits=f).log_prob(y)
    if task == "binary":
        return torch.distributions.Bernoulli(logits=f).log_prob(y)
    return torch.distributions.Normal(f, NOISE).log_prob(y).sum(1)


def trainer(folder: Path, *callbacks: L.Callback, **arguments: Any) -> L.Trainer:
    return training.trainer(folder, *callbacks, **{"precision": "64-true", **arguments})
