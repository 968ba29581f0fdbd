"""Bayesian optimisation: find the minimum of a function of two variables with as few looks at it as possible.

After each look a small network trains on all values so far, and its Laplace posterior says where to look next: at the
minimum of one function drawn from it (Thompson sampling, `sample_function`), or where the expected improvement is
largest (`predict(..., differentiable=True)`). Both are optimised by their gradient in x, from the best of many points.
Beside them: random search. The regret is the best value so far minus the minimum.

    python recipes/bayesian_optimisation.py    # five minutes; results go to outputs/bayesian_optimisation/
"""

from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
from branin import branin, draw_searches, summarise
from support import QUIET, be_quiet, print_table
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import GaussianPosterior, LaplaceCallback

OUTPUT = Path("outputs/bayesian_optimisation")
SEEDS, FIRST, LOOKS, ITERATIONS, DECAY = 5, 5, 20, 200, 1e-4


class Surrogate(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(2 * x - 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1]) + DECAY * sum(p.square().sum() for p in self.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=ITERATIONS, line_search_fn="strong_wolfe")


def fit(x: Tensor, y: Tensor) -> GaussianPosterior:
    """One step of L-BFGS on all data; the evidence chooses prior and noise."""
    laplace = LaplaceCallback("regression", structure="full", tune="marglik", calibrate=None, progress=False)
    loader = DataLoader(TensorDataset(x, y[:, None]), len(x))
    L.Trainer(max_epochs=1, callbacks=[laplace], accelerator="cpu", **QUIET).fit(Surrogate(), loader)
    return laplace.posterior


def maximise(score: Callable[[Tensor], Tensor], generator: torch.Generator) -> Tensor:
    """From the best 8 of 500 points along the gradient.  # [1, 2]"""
    points = torch.rand(500, 2, generator=generator)
    x = points[score(points).topk(8).indices].requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.02, maximize=True)
    for _ in range(20):
        optimizer.zero_grad()
        score(x).sum().backward()
        optimizer.step()
        x.data.clamp_(0, 1)
    return x.detach()[score(x.detach()).argmax()][None]


def thompson(x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    f = fit(x, y).sample_function(generator)
    return maximise(lambda x: -f(x).squeeze(1), generator)


def expected_improvement(x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    posterior, normal = fit(x, y), Normal(0.0, 1.0)

    def score(x: Tensor) -> Tensor:
        prediction = posterior.predict(x, differentiable=x.requires_grad)
        mean, σ = prediction.mean.squeeze(1), prediction.epistemic.squeeze(1).sqrt()
        z = (y.min() - mean) / σ
        return σ * (z * normal.cdf(z) + normal.log_prob(z).exp())

    return maximise(score, generator)


def search(method: Callable[..., Tensor] | None, seed: int) -> Tensor:
    """The points in their order.  # [n, 2]"""
    L.seed_everything(seed, verbose=False)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(FIRST, 2, generator=generator)
    for _ in range(LOOKS):
        y = (branin(x) - branin(x).mean()) / branin(x).std()
        x = torch.cat([x, method(x, y, generator) if method else torch.rand(1, 2, generator=generator)])
    return x


def main() -> None:
    be_quiet()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    points, regrets = {}, {}
    methods = {"random": None, "Thompson": thompson, "expected improvement": expected_improvement}
    for name, method in methods.items():
        runs = [search(method, seed) for seed in range(SEEDS)]
        points[name], regrets[name] = runs[0], torch.stack([branin(x).cummin(0).values for x in runs])  # [S, n]
    table = {name: summarise(regret) for name, regret in regrets.items()}
    print_table(table)
    draw_searches(points, regrets).savefig(OUTPUT / "branin.png", dpi=100)
    rows = [["method", *table["random"]], *([name, *map(str, row.values())] for name, row in table.items())]
    (OUTPUT / "regret.csv").write_text("\n".join(map(",".join, rows)) + "\n")
    print(f"\nbranin.png and regret.csv are in {OUTPUT}")


if __name__ == "__main__":
    main()
