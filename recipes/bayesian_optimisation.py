"""Bayesian optimisation: find the minimum of a function of two variables with as few evaluations as possible.

After each evaluation a small network trains on all values so far, and its Laplace posterior chooses the next point: the
minimum of one function drawn from it (Thompson sampling, `sample_function`), or the point with the largest expected
improvement (`predict(..., differentiable=True)`). Both are optimised by their gradient in x, from the best of many
points. The baseline is random search. Regret is the best value so far minus the minimum.

    python recipes/bayesian_optimisation.py    # five minutes; results go to outputs/bayesian_optimisation/
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import lightning as L
import torch
from branin import branin, draw_searches, maximise, summarise
from program import QUIET, progress, start
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import GaussianPosterior, LaplaceCallback

FIRST, DECAY = 5, 1e-4
Fit = Callable[[], GaussianPosterior]


@dataclass(frozen=True)
class Settings:
    searches: int = 5
    looks: int = 20  # evaluations after the first ones
    iterations: int = 200  # steps of L-BFGS


class Surrogate(L.LightningModule):
    def __init__(self, iterations: int) -> None:
        super().__init__()
        self.iterations = iterations
        self.net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(2 * x - 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1]) + DECAY * sum(p.square().sum() for p in self.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=self.iterations, line_search_fn="strong_wolfe")


def fit(x: Tensor, y: Tensor, iterations: int) -> GaussianPosterior:
    """One step of L-BFGS on all data; the evidence chooses prior and noise."""
    laplace = LaplaceCallback("regression", structure="full", tune="marglik", calibrate=None, progress=False)
    loader = DataLoader(TensorDataset(x, y[:, None]), len(x))
    L.Trainer(max_epochs=1, callbacks=[laplace], accelerator="cpu", **QUIET).fit(Surrogate(iterations), loader)
    return laplace.posterior


def random(fit: Fit, y: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(1, 2, generator=generator)


def thompson(fit: Fit, y: Tensor, generator: torch.Generator) -> Tensor:
    f = fit().sample_function(generator)
    return maximise(lambda x: -f(x).squeeze(1), generator)


def expected_improvement(fit: Fit, y: Tensor, generator: torch.Generator) -> Tensor:
    posterior, normal = fit(), Normal(0.0, 1.0)

    def score(x: Tensor) -> Tensor:
        prediction = posterior.predict(x, differentiable=x.requires_grad)
        mean, σ = prediction.mean.squeeze(1), prediction.epistemic.squeeze(1).sqrt()
        z = (y.min() - mean) / σ
        return σ * (z * normal.cdf(z) + normal.log_prob(z).exp())

    return maximise(score, generator)


METHODS = {"random": random, "Thompson": thompson, "expected improvement": expected_improvement}


def search(name: str, seed: int, settings: Settings) -> Tensor:
    """The evaluated points, in order.  # [n, 2]"""
    L.seed_everything(seed, verbose=False)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(FIRST, 2, generator=generator)
    for _ in range(settings.looks):
        y = (branin(x) - branin(x).mean()) / branin(x).std()
        x = torch.cat([x, METHODS[name](partial(fit, x, y, settings.iterations), y, generator)])
    return x


def main() -> None:
    scales = {"default": Settings(), "fast": Settings(searches=2, looks=3, iterations=60)}
    run = start(__doc__, "bayesian_optimisation", scales, threads=1)
    points, seeds = {}, run.seeds(run.settings.searches)
    for name, seed in progress(list(product(METHODS, seeds)), "searches"):
        points[name, seed] = run.once(f"{name} {seed}", search, name, seed, run.settings)
    regret = {way: torch.stack([branin(points[way, s]).cummin(0).values for s in seeds]) for way in METHODS}  # [S, n]
    run.save_table("table", {name: summarise(regrets) for name, regrets in regret.items()})
    run.save_picture("branin", draw_searches({name: points[name, seeds[0]] for name in METHODS}, regret))


if __name__ == "__main__":
    main()
