"""Figure 1 of the L2M paper: what twelve predictives believe about y = x³ where they have seen no data.

20 points, x uniform in [−4, 4], y = x³ + N(0, 3²), a network of 2 × 40 ReLU, AdamW with learning rate 0.1 and weight
decay 0.1, 500 samples. All methods know the noise. The result is one picture, and a table of the negative
log-likelihood and the coverage of the 95 % interval between the data (|x| < 4) and beyond them (4 < |x| < 6).

The paper does not state its batch size or its loss, and has no public code. Here are two trainings:

- "eq. (6)": full batches, squared error, a constant learning rate, 5,000 epochs; sampled weights. The precision is
  `v̂ + 1/λ + ε` as printed, and `v̂ + λ + ε` as meant: the prior's precision is λ = 0.1, not 10.
- everything else: batches of 5, and a learning rate that falls to zero. A full batch has no gradient noise from which
  to estimate a Fisher information (`scaling="dataset"` refuses it). With batches of 5 a constant 0.1 often ends with
  most units dead. By default as many steps as the paper has epochs; with --paper as many epochs, and so four times the
  steps.

"L2M" is the package's default: calibrated scaling, linearised network, the prior of AdamW's weight decay. HMC and both
post-hoc Laplace posteriors have the prior N(0, 1) on every weight. The ensembles share their five members.

    python -m recipes.papers.l2m.toy              # two minutes of processor time
    python -m recipes.papers.l2m.toy --paper      # four times the training
"""

from __future__ import annotations

import argparse
import logging
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import DeepEnsemble, Gaussian, L2MCallback, LaplacePosterior, Prediction, fit_laplace, metrics

N, NOISE, INSIDE, OUTSIDE = 20, 3.0, 4.0, 6.0
LIKELIHOOD = Gaussian(noise_std=NOISE)
Method = Callable[[Tensor], Prediction]
NOTE = """
"L2M, sampled" is L2M by weight samples, and too wide for the picture: units that no data point switches on have no
gradient, and only the prior of weight decay, N·wd/c = 0.1, holds their weights. This hardly affects the linearised
network. Eq. (6) as meant has the same problem; as printed, its slip of 1/λ = 10 holds every weight to ± 0.3."""


@dataclass(frozen=True)
class Cubic:
    """Points on y = x³ with noise: to train on, and to test on between them and beyond them.  # all [N, 1]"""

    x: Tensor
    y: Tensor
    between: tuple[Tensor, Tensor]
    beyond: tuple[Tensor, Tensor]

    def loader(self, batch_size: int) -> DataLoader[list[Tensor]]:
        return DataLoader(TensorDataset(self.x, self.y), batch_size, shuffle=True)


def draw_cubic(seed: int, n_test: int = 1000) -> Cubic:
    generator = torch.Generator().manual_seed(seed)

    def observe(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x**3 + NOISE * torch.randn(x.shape, generator=generator)

    def uniform(size: int) -> Tensor:
        return 2 * torch.rand(size, 1, generator=generator) - 1

    x, y = observe(INSIDE * uniform(N))
    far = uniform(n_test)
    return Cubic(x, y, observe(INSIDE * uniform(n_test)), observe(far.sign() * INSIDE + far * (OUTSIDE - INSIDE)))


class CubicNet(L.LightningModule):
    """An ordinary regression: nothing in it is Bayesian."""

    def __init__(self, dropout: float = 0.0, falling: bool = True, width: int = 40) -> None:
        super().__init__()
        self.falling = falling
        hidden = [nn.Linear(1, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU()]
        self.net = nn.Sequential(*hidden, nn.Dropout(dropout), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> dict[str, object]:
        adamw = torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)
        steps = self.trainer.estimated_stepping_batches
        rate = torch.optim.lr_scheduler.LambdaLR(adamw, lambda t: 1 - t / steps if self.falling else 1.0)
        return {"optimizer": adamw, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


def train(model: CubicNet, loader: DataLoader[list[Tensor]], epochs: int, folder: Path, *callbacks: L.Callback) -> None:
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=list(callbacks),
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    model.eval()


def train_l2m(data: Cubic, epochs: int, folder: Path) -> LaplacePosterior:
    """The calibrated posterior; that the loss is the squared error is what the callback takes it for by default."""
    l2m = L2MCallback(likelihood=LIKELIHOOD)
    train(CubicNet(), data.loader(batch_size=5), epochs, folder, l2m)
    return l2m.posterior


def train_as_in_the_paper(data: Cubic, epochs: int, folder: Path) -> list[LaplacePosterior]:
    """Eq. (6) as printed and as meant, from one training."""
    both = [L2MCallback(likelihood=LIKELIHOOD, scaling=word, name=word) for word in ("paper_literal", "paper")]
    train(CubicNet(falling=False), data.loader(batch_size=N), epochs, folder, *both)
    return [callback.posterior for callback in both]


# -- methods that are not the package's --------------------------------------------------------------------------------


def from_functions(f: Tensor) -> Prediction:
    """The prediction of sampled outputs, with the noise that all methods know.  # [S, N, 1]"""
    return Prediction.from_predictive(LIKELIHOOD.from_samples(f.detach()))


def outputs_at(network: nn.Module, θ: Tensor, x: Tensor) -> Tensor:
    """The network at each of several weight vectors.  # [S, P], [N, 1] -> [S, N, 1]"""
    parameters = dict(network.named_parameters())
    sizes = [p.numel() for p in parameters.values()]

    def call(flat: Tensor) -> Tensor:
        parts = zip(parameters.items(), flat.split(sizes), strict=True)
        return functional_call(network, {name: part.view(p.shape) for (name, p), part in parts}, (x,))

    return torch.vmap(call)(θ)


def mc_dropout(data: Cubic, epochs: int, samples: int, folder: Path) -> Method:
    """Gal and Ghahramani (2016): dropout stays on."""
    model = CubicNet(dropout=0.1)
    train(model, data.loader(batch_size=5), epochs, folder)
    model.train()
    return lambda x: from_functions(torch.stack([model(x) for _ in range(samples)]))


def swag_diagonal(network: nn.Module, data: Cubic, epochs: int, samples: int, lr: float = 1e-3) -> Method:
    """Maddox et al. (2019): mean and variance of the weights that SGD visits from the trained ones, once an epoch. The
    rate is the largest power of ten at which it does not diverge."""
    model = CubicNet()
    model.load_state_dict(network.state_dict())
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    visited = []
    for _ in range(epochs):
        for x, y in data.loader(batch_size=5):
            sgd.zero_grad()
            F.mse_loss(model(x), y).backward()
            sgd.step()
        visited.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    σ, μ = torch.std_mean(torch.stack(visited), 0, correction=0)
    model.eval()
    θ = μ + σ * torch.randn(samples, len(μ))
    return lambda x: from_functions(outputs_at(model, θ, x))


@dataclass(frozen=True)
class Chains:
    """Weights that several Markov chains have visited after their warm-up."""

    draws: Tensor  # [S, K, P]
    acceptance: float
    step_size: float


def hmc(
    log_density: Callable[[Tensor], Tensor],
    θ: Tensor,
    warm_up: int,
    draws: int,
    path: float = 0.5,
    target: float = 0.8,
    longest: int = 200,
) -> Chains:
    """Hamiltonian Monte Carlo, several chains side by side. During warm-up the step size is led to the wanted
    acceptance by dual averaging (Hoffman and Gelman, 2014, algorithm 5); the length of a path is random.  # θ [K, P]"""

    def evaluate(θ: Tensor) -> tuple[Tensor, Tensor]:
        θ = θ.detach().requires_grad_()
        value = log_density(θ)  # [K]
        return value.detach(), torch.autograd.grad(value.sum(), θ)[0]

    value, slope = evaluate(θ)
    log_ε = log_ε_mean = math.log(1e-3)
    μ, error, kept, accepted = log_ε + math.log(10), 0.0, [], []
    for t in range(1, warm_up + draws + 1):
        ε = math.exp(log_ε if t <= warm_up else log_ε_mean)
        steps = math.ceil(path * (0.5 + float(torch.rand(()))) / ε)
        p = torch.randn_like(θ)
        start = value - 0.5 * p.square().sum(1)
        θ_new, value_new, slope_new = θ, value, slope
        for _ in range(min(steps, longest)):  # leapfrog
            p = p + 0.5 * ε * slope_new
            θ_new = θ_new + ε * p
            value_new, slope_new = evaluate(θ_new)
            p = p + 0.5 * ε * slope_new
        log_ratio = value_new - 0.5 * p.square().sum(1) - start
        probability = log_ratio.exp().clamp(max=1).nan_to_num(0.0)  # [K]
        take = torch.rand_like(probability) < probability
        θ, slope = torch.where(take[:, None], θ_new, θ), torch.where(take[:, None], slope_new, slope)
        value = torch.where(take, value_new, value)
        rate = float(probability.mean())
        if t <= warm_up:
            error += (target - rate - error) / (t + 10)
            log_ε = μ - 20 * math.sqrt(t) * error
            log_ε_mean += t**-0.75 * (log_ε - log_ε_mean)
        else:
            kept.append(θ)
            accepted.append(rate)
    return Chains(torch.stack(kept), sum(accepted) / len(accepted), math.exp(log_ε_mean))


def log_joint(network: nn.Module, data: Cubic) -> Callable[[Tensor], Tensor]:
    """Likelihood times the prior N(0, 1), up to a constant.  # [K, P] -> [K]"""
    x, y = data.x.double(), data.y.double()
    return lambda θ: -0.5 * (((outputs_at(network, θ, x) - y) / NOISE).square().sum((1, 2)) + θ.square().sum(1))


def largest_r_hat(f: Tensor) -> float:
    """Split-R̂ of the functions' values: 1 where all chains, and both halves of each, agree.  # [S, K, N]"""
    halves = torch.cat(f[: len(f) // 2 * 2].chunk(2), dim=1)
    ratio = halves.mean(0).var(0) / halves.var(0).mean(0)
    return float((1 - 1 / len(halves) + ratio).sqrt().max())


def sample_by_hmc(members: list[LaplacePosterior], data: Cubic, warm_up: int, draws: int) -> Method:
    """One chain from each trained member, in float64."""
    network = CubicNet().double().eval()
    start = torch.stack([member.mean for member in members]).double()
    chains = hmc(log_joint(network, data), start, warm_up, draws)

    def functions(x: Tensor) -> Tensor:
        return outputs_at(network, chains.draws.flatten(0, 1), x.double()).unflatten(0, chains.draws.shape[:2])

    grid = torch.linspace(-OUTSIDE, OUTSIDE, 49)[:, None]
    f = functions(grid).squeeze(3).detach()  # [S, K, N]
    inside = grid.abs().squeeze(1) <= INSIDE
    print(
        f"HMC: {len(members)} chains of {warm_up} + {draws} draws, step size {chains.step_size:.4f}, acceptance "
        f"{chains.acceptance:.2f}; largest R-hat of f between the data {largest_r_hat(f[..., inside]):.3f}, beyond "
        f"them {largest_r_hat(f[..., ~inside]):.3f}"
    )
    return lambda x: from_functions(functions(x).flatten(0, 1)).to(x.dtype)


# -- all of them, in one picture and one table -------------------------------------------------------------------------


def make_methods(data: Cubic, arguments: argparse.Namespace) -> dict[str, Method]:
    """Train everything; each method is then a function from x to a prediction. The last one is for the table only."""
    epochs, samples, folder = arguments.epochs, arguments.samples, arguments.output

    def sampled(posterior: LaplacePosterior) -> Method:
        generator = torch.Generator()
        return lambda x: posterior.predict(x, "bnn", samples=samples, generator=generator.manual_seed(arguments.seed))

    members = []
    for m in range(arguments.members):
        L.seed_everything(arguments.seed + m, verbose=False)
        members.append(train_l2m(data, epochs, folder / f"member_{m}"))
    l2m, ensemble, network = members[0], DeepEnsemble(members), members[0].network
    literal, meant = train_as_in_the_paper(data, arguments.paper_epochs, folder / "paper")
    diagonal, full = (fit_laplace(network, data.loader(N), LIKELIHOOD, word) for word in ("diag", "full"))
    return {
        "MAP": lambda x: l2m.predict(x, "map"),
        "MC dropout": mc_dropout(data, epochs, samples, folder / "dropout"),
        "deep ensemble": lambda x: ensemble.predict(x, "map"),
        "SWAG-diagonal": swag_diagonal(network, data, min(epochs, 500), samples),
        "L2M, eq. (6) as printed": sampled(literal),
        "L2M, eq. (6) as meant": sampled(meant),
        "L2M": l2m.predict,
        "L2M ensemble": ensemble.predict,
        "L2M, N(0, 1), sampled": sampled(l2m.with_prior(1.0)),
        "Laplace, diagonal": diagonal.predict,
        "Laplace, full": full.predict,
        "HMC": sample_by_hmc(members, data, arguments.warm_up, arguments.draws),
        "L2M, sampled": sampled(l2m),
    }


def judge(method: Method, data: Cubic) -> dict[str, float]:
    row = {}
    for where, (x, y) in (("between", data.between), ("beyond", data.beyond)):
        prediction = method(x)
        row[f"NLL {where}"] = float(metrics.functional.gaussian_nll(prediction.mean, prediction.variance, y))
        row[f"coverage {where}"] = float(metrics.functional.interval_coverage(prediction.mean, prediction.variance, y))
    return row


def format_table(rows: dict[str, dict[str, float]]) -> str:
    head = [f"{'':<24}{'interpolation':>22}{'extrapolation':>22}", f"{'':<24}" + f"{'NLL':>11}{'coverage':>11}" * 2]
    return "\n".join(
        head + [f"{name:<24}" + "".join(f"{v:>11.3f}" for v in row.values()) for name, row in rows.items()]
    )


def save_picture(methods: dict[str, Method], rows: dict[str, dict[str, float]], data: Cubic, path: Path) -> None:
    """Mean and 1, 2, 3 standard deviations of the function, as in the paper; the noise comes on top."""
    from matplotlib.figure import Figure

    x = torch.linspace(-OUTSIDE, OUTSIDE, 481)[:, None]
    line = x.squeeze(1)
    figure = Figure(figsize=(12, 8.8), layout="constrained", dpi=120)
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.06)
    axes = figure.subplots(3, 4, sharex=True, sharey=True).flatten()
    for ax, (name, method) in zip(axes, methods.items(), strict=False):
        prediction = method(x)
        mean, σ, total = prediction.mean, prediction.epistemic.sqrt(), prediction.variance.sqrt()
        mean, σ, total = (t.squeeze(1) for t in (mean, σ, total))
        for k, tint in ((3, "#fbdccb"), (2, "#f4b08d"), (1, "#e5814f")):
            ax.fill_between(line, mean - k * σ, mean + k * σ, color=tint, linewidth=0, label=f"± {k} σ of f")
        for side in (-2, 2):
            ax.plot(line, mean + side * total, color="#404040", linewidth=0.9, linestyle=":", label="± 2 σ with noise")
        ax.plot(line, line**3, color="#0072B2", linewidth=1.2, linestyle="--", label="x³")
        ax.plot(line, mean, color="black", linewidth=1.4, label="mean")
        ax.plot(data.x, data.y, "x", color="black", markersize=4.5, label="data")
        ax.set_title(name, fontsize=10.5)
        score = f"NLL {rows[name]['NLL between']:.1f} between,\n{rows[name]['NLL beyond']:.1f} beyond the data"
        box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.5}
        ax.text(0.03, 0.97, score, transform=ax.transAxes, va="top", fontsize=8.5, bbox=box)
        for border in (-INSIDE, INSIDE):
            ax.axvline(border, color="#b0b0b0", linewidth=0.7, zorder=0)
    axes[0].set(xlim=(-OUTSIDE, OUTSIDE), ylim=(-250, 250))
    for number, ax in enumerate(axes):
        ax.set(xlabel="x" if number > 7 else "", ylabel="" if number % 4 else "y")
    labels = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/papers/l2m"), help="folder for picture and posteriors"
    )
    parser.add_argument("--paper", action="store_true", help="5,000 epochs also for batches of 5")
    parser.add_argument("--epochs", type=int, default=1250, help="with batches of 5: four steps each")
    parser.add_argument("--paper-epochs", type=int, default=5000, help="with full batches: one step each")
    parser.add_argument("--members", type=int, default=5, help="of the ensembles, and chains of HMC")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--warm-up", type=int, default=100, help="of HMC")
    parser.add_argument("--draws", type=int, default=150, help="of each HMC chain")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.epochs = 5000 if arguments.paper else arguments.epochs
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)  # a network this small is faster on one
    arguments.output.mkdir(parents=True, exist_ok=True)

    data = draw_cubic(arguments.seed)
    print(
        f"y = x³ + N(0, {NOISE:g}²), {N} points; {arguments.members} members: {arguments.epochs} epochs of batches of "
        f"5, learning rate falling from 0.1; eq. (6): {arguments.paper_epochs} epochs of full batches, constant rate …"
    )
    start = time.perf_counter()
    methods = make_methods(data, arguments)
    rows = {name: judge(method, data) for name, method in methods.items()}
    print(f"trained and sampled in {time.perf_counter() - start:.0f} s\n\n{format_table(rows)}\n{NOTE}")
    save_picture(methods, rows, data, arguments.output / "l2m_toy.png")
    print(f"\nl2m_toy.png and the posteriors are in {arguments.output}")


if __name__ == "__main__":
    main()
