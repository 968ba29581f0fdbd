"""Is a step of Variational Laplace in two passes as good as one in three? `python -m benchmarks.two_passes`

The pass at `μ + εv`, which the true and the sampled labels share, takes their gradient `ε‖v‖` away from the mean. For
networks with any σ, untrained and trained, the first table compares the gradient of the weights in float32 with that
of the whole objective in float64 by double backward, over the batches of the training data:

- bias: the length of the mean error over the batches and both signs of ε, relative to that of the mean gradient;
- one sign: the same without the random sign;
- noise: the root mean square of the error, relative to that of a batch's gradient around the mean gradient.

ε is the value that a step uses, times the factors of the columns. The second table has the test NLL after training.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.report import table
from lightning_bayes import Categorical, LogSigmaMultiplierMixin, VariationalLaplaceMixin
from lightning_bayes.mixins import variational_laplace as vl
from lightning_bayes.mixins.training_step import recorded_calls
from lightning_bayes.trainer.dry_run import mean_nll

SIGMAS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
FACTORS = (1e-2, 1e-1, 1.0, 1e1)
STATES = {"untrained": ("exact", 0), "trained": ("exact", 1), "sure": (None, 2)}  # method, factor on the epochs
METHODS = ("exact", "finite_difference", "two_passes")
BATCH, TRAIN = 64, 1024
LIKELIHOOD = Categorical()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 10)
    )


def resnet() -> nn.Module:
    from recipes.papers.variational_laplace.preact_resnet import PreActResNet

    return PreActResNet(1, 10, width=4, blocks=1)


NETWORKS = {"digits MLP": mlp, "narrow ResNet": resnet}


class Module(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 3e-3)


class Bayes(LogSigmaMultiplierMixin, VariationalLaplaceMixin, Module):
    pass


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(x, dtype=torch.float32) / 8 - 1).view(-1, 1, 8, 8)
    return images[order], torch.tensor(y)[order]


def trained(network: str, method: str | None, seed: int, epochs: int) -> Bayes:
    """Train by Variational Laplace or, without a method, by maximum likelihood until the network is sure of its
    labels."""
    torch.manual_seed(seed)
    net = NETWORKS[network]()
    given = {"method": method or "auto", "seed": seed, "beta": 0.1, "prior_std": "he", "n_data": TRAIN}
    module = Bayes(net, variational=given)
    if epochs:
        x, y = (t[:TRAIN] for t in digits())
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        run = L.Trainer(accelerator="cpu", max_epochs=epochs, enable_model_summary=False, **quiet)
        data = DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
        run.fit(Module(net) if method is None else module, data)
    return module.train()


def test_nll(module: Bayes) -> float:
    x, y = (t[TRAIN:] for t in digits())
    module.eval()
    probs = module.posterior.predict(x, "glm").probs
    assert probs is not None
    return float(F.nll_loss(probs.log(), y))


# -- the gradient's error ----------------------------------------------------------------------------------------------


def errors(module: Bayes, σ: float | None, factors: tuple[float, ...]) -> list[tuple[str, float, float, float]]:
    """`(method, bias, bias with one sign, noise)` for three backward passes, for two with each factor, and for two with
    the ε of three. σ defaults to the module's."""
    if σ is not None:
        with torch.no_grad():
            for log_σ in module.log_sigma.values():
                log_σ.fill_(math.log(σ))
    q, exact = module._variational, copy.deepcopy(module).double()
    pairs, pairs64 = dict(module.weights_and_log_sigma().values()), exact.weights_and_log_sigma().values()
    θ, θ64 = q.trainable(), exact._variational.trainable()
    rule = vl.shared_step_size
    ways: dict[str, Any] = {f"× {c:g}": lambda *given, c=c: c * rule(*given) for c in factors}
    ways["the ε of three"] = lambda *given: vl.step_size(*given[:3])
    found: dict[str, list[list[Tensor]]] = {way: [] for way in ("three", *ways)}
    gradients: list[Tensor] = []
    x_all, y_all = (t[:TRAIN] for t in digits())
    for number, (x, y) in enumerate(zip(x_all.split(BATCH), y_all.split(BATCH), strict=True)):
        S = len(x)
        with recorded_calls(module) as calls:
            f = module(x)
        generator = torch.Generator().manual_seed(number)
        ỹ = LIKELIHOOD.sample(f.detach(), torch.rand(f.shape, generator=generator))
        f64 = exact(x.double())
        R = vl.exact(mean_nll(LIKELIHOOD, f64, ỹ), [μ for μ, _ in pairs64], [l for _, l in pairs64], S)
        kl = exact._variational.kl_weight * exact._variational.kl()
        loss = mean_nll(LIKELIHOOD, f64, y) + R
        whole = torch.autograd.grad(loss + kl, θ64, retain_graph=True)
        data = torch.autograd.grad(loss, θ64)
        gradients.append(_flat(whole))
        oracle = _flat(data)
        sampled = vl.gradients_of(mean_nll(LIKELIHOOD, f, ỹ), θ, keep_graph=True)
        true = vl.gradients_of(mean_nll(LIKELIHOOD, f, y), θ)
        _, three = vl.by_differences(calls[0], LIKELIHOOD, ỹ, sampled, pairs)
        found["three"].append([_flat([three[p] + true[p] for p in θ]) - oracle])
        for way, other in ways.items():
            with _rule(other):
                both = [vl.with_true_labels(calls[0], LIKELIHOOD, ỹ, y, sampled, pairs, s)[1] for s in (1, -1)]
            found[way].append([_flat([two[p] for p in θ]) - oracle for two in both])
    mean = torch.stack(gradients).mean(0)
    scatter = torch.stack([(g - mean).square().sum() for g in gradients]).mean().sqrt()
    rows = []
    for way, batches in found.items():
        bias = torch.stack([torch.stack(e).mean(0) for e in batches]).mean(0).norm() / mean.norm()
        one = torch.stack([e[0] for e in batches]).mean(0).norm() / mean.norm()
        size = torch.stack([e.square().sum() for es in batches for e in es]).mean().sqrt()
        rows.append((way, float(bias), float(one), float(size / scatter)))
    return rows


def _flat(tensors: Any) -> Tensor:
    return torch.cat([t.double().reshape(-1) for t in tensors])


@contextmanager
def _rule(rule: Any) -> Iterator[None]:
    before = vl.shared_step_size
    vl.shared_step_size = rule
    try:
        yield
    finally:
        vl.shared_step_size = before


# -- the tables --------------------------------------------------------------------------------------------------------


def gradient_table(seeds: int, epochs: int) -> str:
    """The worst value over seeds."""
    rows, headers = [], []
    for network in NETWORKS:
        for state, (method, length) in STATES.items():
            modules = [trained(network, method, seed, length * epochs) for seed in range(seeds)]
            for σ in (None, *SIGMAS):
                of_seeds = [errors(copy.deepcopy(module), σ, FACTORS) for module in modules]
                worst = [
                    tuple(max(values) for values in zip(*(r[1:] for r in ways), strict=True))
                    for ways in zip(*of_seeds, strict=True)
                ]
                headers = [way for way, *_ in of_seeds[0]]
                cells = [" / ".join(_percent(v) for v in values) for values in worst]
                rows.append([network, state, "its own" if σ is None else f"{σ:g}", *cells])
                print(*rows[-1], sep=" | ", flush=True)
    return table(["network", "", "σ", *headers], rows)


def training_table(seeds: int, epochs: int) -> str:
    rows = []
    for network in NETWORKS:
        scores = {m: [test_nll(trained(network, m, seed, epochs)) for seed in range(seeds)] for m in METHODS}
        for method in METHODS:
            own = torch.tensor(scores[method])
            apart = own - torch.tensor(scores["exact"])
            deviation = float(apart.std() / math.sqrt(seeds))
            rows.append(
                [network, method, f"{own.mean():.4f} ± {own.std():.4f}", f"{apart.mean():+.4f} ± {deviation:.4f}"]
            )
            print(*rows[-1], sep=" | ", flush=True)
    return table(["network", "method", f"test NLL of {seeds} seeds", "minus exact"], rows)


def _percent(value: float) -> str:
    return f"{100 * value:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--only", choices=("gradients", "trainings"))
    arguments = parser.parse_args()
    if arguments.only != "trainings":
        print("bias / with one sign / noise, in per cent:\n\n" + gradient_table(arguments.seeds, arguments.epochs))
    if arguments.only != "gradients":
        print(training_table(arguments.seeds, arguments.epochs))


if __name__ == "__main__":
    main()
