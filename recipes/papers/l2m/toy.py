"""Figure 1 of the L2M paper: what twelve predictives say about y = x³ beyond the data.

There are 20 points on y = x³ + N(0, 3²), with x uniform in [−4, 4]. A network of 2 × 40 ReLU units trains by AdamW with
learning rate 0.1 and weight decay 0.1; methods draw 500 samples and know the noise. The result is one picture, and a
table of the negative log-likelihood and the coverage of the 95 % interval between the data (|x| < 4) and beyond them (4
< |x| < 6). Randomised prior functions, one of the paper's panels, are left out.

The paper does not state its batch size or its loss, and has no public code. This program trains in two ways:

- "eq. (6)": full batches, squared error, a constant learning rate, 5,000 epochs; sampled weights. The precision is
  `v̂ + 1/λ + ε` as printed, and `v̂ + λ + ε` as intended: the prior's precision is λ = 0.1, not 10.
- all other methods: batches of 5, and a learning rate that falls to zero. A full batch has no gradient noise from which
  to estimate a Fisher information (`scaling="dataset"` raises an error). With batches of 5, a constant 0.1 often ends
  with most units dead. The default is as many steps as the paper has epochs; --paper runs as many epochs, and so four
  times the steps.

"L2M" is the package's default: calibrated scaling, linearised network, the prior of AdamW's weight decay. HMC and both
post-hoc Laplace posteriors have the prior N(0, 1) on every weight. The ensembles share their five members. Some of
these training runs lose the fit; all other methods use the network with the smallest training error.

    python -m recipes.papers.l2m.toy              # two minutes of processor time
    python -m recipes.papers.l2m.toy --paper      # four times the training
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import (
    BNN,
    DeepEnsemble,
    GaussianPosterior,
    L2MCallback,
    LaplacePosterior,
    Prediction,
    fit_laplace,
    metrics,
)
from recipes.papers.claims import Claim, verdict
from recipes.papers.l2m.cubic import INSIDE, LIKELIHOOD, NOISE, Cubic, CubicNet, N, draw_cubic, outputs_at, train
from recipes.papers.l2m.figure import GRID, draw_panels
from recipes.papers.l2m.hmc import hmc, largest_r_hat
from recipes.program import Row, Run, markdown, progress, read_rows, start

Method = Callable[[Tensor], Prediction]
PRINTED = "L2M, eq. (6) as printed"
PEERS = ("MC dropout", "deep ensemble", "SWAG-diagonal", "HMC")  # methods that are also in the paper's figure
NOTE = """"L2M, sampled" is L2M with weight samples, and too wide for the figure: units that no data point switches on
have no gradient, and only the prior of weight decay, N·wd/c = 0.1, constrains their weights. This barely affects the
linearised network. Eq. (6) as intended has the same problem; as printed, its slip of 1/λ = 10 holds every weight to
± 0.3."""

UNEQUAL = "The deep ensemble uses all training runs, including those that lost the fit; L2M uses the best one."


@dataclass(frozen=True)
class Settings:
    epochs: int = 1250  # with batches of 5, so four steps each
    paper_epochs: int = 5000  # with full batches, so one step each
    members: int = 5  # members of the ensembles, and chains of HMC
    samples: int = 500
    warm_up: int = 100  # steps of HMC's warm-up
    draws: int = 150  # draws of each HMC chain


SCALES = {
    "default": Settings(),
    "fast": Settings(epochs=30, paper_epochs=60, members=3, samples=20, warm_up=20, draws=6),
    "paper": replace(Settings(), epochs=5000),
}


# -- training, each network at most once -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Posteriors and chains of one run, trained on demand or read from disk."""

    run: Run
    data: Cubic

    def member(self, m: int) -> LaplacePosterior:
        """The calibrated L2M posterior of one separately trained network."""
        return _posterior(self.run.once(f"member {m}", _train_member, self.data, self.run, m))

    def members(self) -> list[LaplacePosterior]:
        return [self.member(m) for m in range(self.run.settings.members)]

    @cached_property
    def best(self) -> int:
        """The member that fits its data best."""
        return min(range(self.run.settings.members), key=lambda m: training_error(self.member(m), self.data))

    def network(self) -> LaplacePosterior:
        """The network that all methods use except ensembles, HMC and eq. (6)."""
        return self.member(self.best)

    def paper(self, prior: str) -> LaplacePosterior:
        """Eq. (6) as "printed" and as "meant", from one training run."""
        return _posterior(self.run.once("eq. (6)", _train_as_in_the_paper, self.data, self.run)[prior])

    def chains(self) -> dict[str, Any]:
        return self.run.once("chains", _sample_chains, self.members(), self.data, self.run)


def _train_member(data: Cubic, run: Run, m: int) -> dict[str, Any]:
    L.seed_everything(run.seeds(run.settings.members)[m], verbose=False)
    # By default the callback assumes that the loss is the squared error.
    train(CubicNet(), data.loader(batch_size=5), run.settings.epochs, l2m := L2MCallback(LIKELIHOOD, save=False))
    return l2m.posterior.state_dict()


def _train_as_in_the_paper(data: Cubic, run: Run) -> dict[str, dict[str, Any]]:
    L.seed_everything(run.seed, verbose=False)
    l2m = L2MCallback(LIKELIHOOD, scaling="paper", save=False)
    train(CubicNet(falling=False), data.loader(batch_size=N), run.settings.paper_epochs, l2m)
    meant = l2m.posterior
    return {"printed": meant.with_prior(1 / meant.prior_precision).state_dict(), "meant": meant.state_dict()}


def _posterior(state: dict[str, Any]) -> LaplacePosterior:
    network = CubicNet().eval()
    nn.utils.vector_to_parameters(state["mean"], network.parameters())
    return GaussianPosterior.from_state_dict(network, state)


def _sample_chains(members: list[LaplacePosterior], data: Cubic, run: Run) -> dict[str, Any]:
    """Run one chain from each trained member, in float64, under the prior N(0, 1)."""
    L.seed_everything(run.seed, verbose=False)
    network, x, y = CubicNet().double().eval(), data.x.double(), data.y.double()

    def log_joint(θ: Tensor) -> Tensor:  # [K, P] -> [K]
        return -0.5 * (((outputs_at(network, θ, x) - y) / NOISE).square().sum((1, 2)) + θ.square().sum(1))

    first = torch.stack([member.mean for member in members]).double()
    chains = hmc(log_joint, first, run.settings.warm_up, run.settings.draws)
    return {"draws": chains.draws, "acceptance": chains.acceptance, "step size": chains.step_size}


# -- the methods, functions from x to a prediction ---------------------------------------------------------------------


def sampled(posterior: LaplacePosterior, run: Run) -> Method:
    """Predict with weight samples that are the same at every x."""
    generator = torch.Generator()
    samples = run.settings.samples
    return lambda x: posterior.predict(x, BNN(samples=samples), generator=generator.manual_seed(run.seed))


def post_hoc(trained: Trained, structure: str) -> Method:
    return fit_laplace(trained.network().network, trained.data.loader(N), LIKELIHOOD, structure=structure).predict


def mc_dropout(trained: Trained) -> Method:
    """Predict with dropout left on (Gal and Ghahramani 2016)."""
    model, settings = CubicNet(dropout=0.1), trained.run.settings
    train(model, trained.data.loader(batch_size=5), settings.epochs)
    model.train()
    return lambda x: _from_functions(torch.stack([model(x) for _ in range(settings.samples)]))


def swag_diagonal(trained: Trained, lr: float = 1e-4) -> Method:
    """The mean and variance of the weights after each epoch of SGD, which starts at the trained weights (Maddox et al.
    2019). We chose the learning rate on the test points, as the largest power of ten that keeps the fit."""
    model, settings = trained.network().network, trained.run.settings
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    visited = []
    for _ in range(min(settings.epochs, 500)):
        for x, y in trained.data.loader(batch_size=5):
            sgd.zero_grad()
            F.mse_loss(model(x), y).backward()
            sgd.step()
        visited.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    σ, μ = torch.std_mean(torch.stack(visited), 0, correction=0)
    θ = μ + σ * torch.randn(settings.samples, len(μ))
    return lambda x: _from_functions(outputs_at(model, θ, x))


def by_chains(draws: Tensor) -> Method:
    """# [S, K, P]"""
    network = CubicNet().double().eval()
    return lambda x: _from_functions(outputs_at(network, draws.flatten(0, 1), x.double())).to(x.dtype)


def _from_functions(f: Tensor) -> Prediction:
    """The prediction from sampled outputs, with the known noise.  # [S, N, 1]"""
    return Prediction.from_predictive(LIKELIHOOD.from_samples(f.detach()))


METHODS: dict[str, Callable[[Trained], Method]] = {
    "MAP": lambda t: lambda x: t.network().predict(x, "map"),
    "MC dropout": mc_dropout,
    "deep ensemble": lambda t: lambda x: DeepEnsemble(t.members()).predict(x, "map"),
    "SWAG-diagonal": swag_diagonal,
    PRINTED: lambda t: sampled(t.paper("printed"), t.run),
    "L2M, eq. (6) as meant": lambda t: sampled(t.paper("meant"), t.run),
    "L2M": lambda t: t.network().predict,
    "L2M ensemble": lambda t: DeepEnsemble(t.members()).predict,
    "L2M, N(0, 1), sampled": lambda t: sampled(t.network().with_prior(1.0), t.run),
    "Laplace, diagonal": lambda t: post_hoc(t, "diag"),
    "Laplace, full": lambda t: post_hoc(t, "full"),
    "HMC": lambda t: by_chains(t.chains()["draws"]),
    "L2M, sampled": lambda t: sampled(t.network(), t.run),  # only in the table
}


# -- all methods, in one figure and one table --------------------------------------------------------------------------


def predict(name: str, trained: Trained) -> dict[str, dict[str, Tensor]]:
    """Predict on the figure's grid, between the data, and beyond the data."""
    trained.network()  # a method's random numbers do not depend on earlier training
    L.seed_everything(trained.run.seed, verbose=False)
    method, data = METHODS[name](trained), trained.data
    places = {"grid": GRID, "between": data.between[0], "beyond": data.beyond[0]}
    beliefs = {where: method(x) for where, x in places.items()}
    return {where: {"mean": b.mean, "epistemic": b.epistemic, "variance": b.variance} for where, b in beliefs.items()}


def judge(name: str, trained: Trained) -> Iterator[Row]:
    beliefs, row = trained.run.once(name, predict, name, trained), {"method": name}
    for where, (_, y) in (("between", trained.data.between), ("beyond", trained.data.beyond)):
        mean, variance = beliefs[where]["mean"], beliefs[where]["variance"]
        row[f"NLL {where}"] = float(metrics.functional.gaussian_nll(mean, variance, y))
        row[f"coverage {where}"] = float(metrics.functional.interval_coverage(mean, variance, y))
        row[f"σ of f {where}"] = float(beliefs[where]["epistemic"].sqrt().mean())
    σ, is_right = beliefs["beyond"]["epistemic"].sqrt(), trained.data.beyond[0] > 0
    yield row | {"σ of f left": float(σ[~is_right].mean()), "σ of f right": float(σ[is_right].mean())}


def judge_member(m: int, trained: Trained) -> Iterator[Row]:
    """Each training run separately: its training error, the number of units that the data switch on, and its NLL
    without and with L2M."""
    posterior, row = trained.member(m), {"seed": trained.run.seeds(trained.run.settings.members)[m]}
    net = posterior.network.net
    with torch.no_grad():
        first, second = (net[:n](trained.data.x) for n in (2, 5))  # [N, 40]
    row["training error"] = training_error(posterior, trained.data)
    row["units alive"] = int((torch.cat((first, second), 1) > 0).any(0).sum())
    for where, (x, y) in (("between", trained.data.between), ("beyond", trained.data.beyond)):
        for name, predictive in (("MAP", "map"), ("L2M", "glm")):
            belief = posterior.predict(x, predictive)
            row[f"{name} {where}"] = float(metrics.functional.gaussian_nll(belief.mean, belief.variance, y))
    yield row


def training_error(posterior: LaplacePosterior, data: Cubic) -> float:
    """The root mean squared error, which is close to the noise if the network fits."""
    mean = posterior.predict(data.x, "map").mean
    assert mean is not None
    return float((mean - data.y).square().mean().sqrt())


def judge_chains(trained: Trained) -> Iterator[Row]:
    chains, x = trained.chains(), torch.linspace(GRID[0].item(), GRID[-1].item(), 49)[:, None]
    draws = chains["draws"]
    f = outputs_at(CubicNet().double().eval(), draws.flatten(0, 1), x.double()).detach()  # [S·K, N, 1]
    f, inside = f.unflatten(0, draws.shape[:2]).squeeze(3), x.abs().squeeze(1) <= INSIDE
    yield {
        "chains": draws.shape[1],
        "draws": draws.shape[0],
        "step size": chains["step size"],
        "acceptance": chains["acceptance"],
        "R-hat between": largest_r_hat(f[..., inside]),
        "R-hat beyond": largest_r_hat(f[..., ~inside]),
    }


def report(folder: Path) -> str:
    """The table, the diagnostics of the chains, and whether the paper's statements about its figure hold."""
    rows = {row["method"]: row for row in read_rows(folder / "scores.csv")}
    columns = [f"{what} {where}" for where in ("between", "beyond") for what in ("NLL", "coverage", "σ of f")]
    columns += ["σ of f left", "σ of f right"]
    text = markdown(["", *columns], [[name, *(row[c] for c in columns)] for name, row in rows.items()], digits=3)
    (chain,) = read_rows(folder / "chains.csv")
    chains = (
        f"HMC: {chain['chains']} chains of {chain['draws']} draws, step size {chain['step size']:.4f}, acceptance "
        f"{chain['acceptance']:.2f}; largest R-hat of f between the data {chain['R-hat between']:.3f}, beyond them "
        f"{chain['R-hat beyond']:.3f}."
    )
    trainings = read_rows(folder / "members.csv")
    names = [name for name in trainings[0] if name not in ("step", "cpu_seconds")]
    members = markdown(names, [[row[name] for name in names] for row in trainings], digits=2)
    lost = sum(row["training error"] > 2 * NOISE for row in trainings)
    caption = (
        "The training runs. All methods except ensembles, HMC and eq. (6) use the one with the smallest training "
        f"error; {lost} of {len(trainings)} lost the fit, with an error of more than twice the noise. The table also "
        "shows their NLL:"
    )
    beside = verdict(list(on_par(rows)), "additional comparisons, for the claim that L2M is on par with others,")
    parts = [text, chains, caption, members, " ".join(NOTE.split()), verdict(list(claims(rows))), beside, UNEQUAL]
    return "\n\n".join(parts)


def claims(rows: dict[str, Row]) -> Iterator[Claim]:
    """The paper's statements about its figure, which gives no numbers."""
    for name in (PRINTED, "L2M"):
        low, *high = (rows[name][f"σ of f {where}"] for where in ("between", "left", "right"))
        statement = f"{name}: σ of f is higher beyond the data than between, on both sides"
        yield Claim(statement, min(high) > low, f"{high[0]:.1f} and {high[1]:.1f}; {low:.1f}")


def on_par(rows: dict[str, Row]) -> Iterator[Claim]:
    for name, where in product((PRINTED, "L2M"), ("between", "beyond")):
        own, others = rows[name][f"NLL {where}"], [rows[peer][f"NLL {where}"] for peer in PEERS]
        numbers = ", ".join(f"{peer} {nll:.2f}" for peer, nll in zip(PEERS, others, strict=True))
        statement = f"{name}: an NLL {where} the data below the median of other methods"
        yield Claim(statement, own <= median(others), f"{own:.2f}; {numbers}")


def main() -> None:
    run = start(__doc__, "papers/l2m/toy", SCALES, threads=1)  # a network this small is faster on one
    trained = Trained(run, draw_cubic(run.seed))
    for name in progress(list(METHODS), "methods"):
        run.collect("scores", name, judge, name, trained)
    run.collect("chains", "HMC", judge_chains, trained)
    for m in range(run.settings.members):
        run.collect("members", f"member {m}", judge_member, m, trained)
    rows = {row["method"]: row for row in run.rows("scores")}
    panels = {name: run.once(name, predict, name, trained)["grid"] for name in list(METHODS)[:12]}
    run.save_picture("figure1", draw_panels(panels, rows, trained.data))
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()
