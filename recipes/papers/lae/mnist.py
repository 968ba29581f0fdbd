"""Laplacian autoencoders on MNIST: table 2 and figures 1 and 8 of the paper (Miani et al., "Laplacian autoencoders for
learning stochastic representations").

    python -m recipes.papers.lae.mnist            # minutes: 14 × 14 pixels, a narrow network, some of MNIST
    python -m recipes.papers.lae.mnist --pixels 28 --width 512 --hessian approx
    python -m recipes.papers.lae.mnist --paper    # 784-512-256-2-256-512-784 on 55,000 images; needs a GPU

One autoencoder trains as usual and gets its posterior afterwards (post-hoc), with the KFAC, the exact diagonal and the
approximate diagonal Hessian; others train at samples of their posterior (online), with the exact and the approximate
diagonal. The table shows the squared error of the mean reconstruction, and the log-likelihood of a sampled network,
averaged over the samples. The exact diagonal costs a backward pass per pixel, so the default has few pixels.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import FisherMC, LaplacePosterior, Tuning, fit_laplace
from recipes.papers.claims import Claim, verdict
from recipes.papers.lae.autoencoders import (
    BATCH,
    NOISE,
    Laplacian,
    LitAutoencoder,
    LitVAE,
    Method,
    Several,
    Variational,
    online,
    post_hoc,
    seed_everything,
    trained,
)
from recipes.papers.lae.common import FAST, PAPER, Data, Settings, describe, linear_net, read_data
from recipes.papers.lae.pictures import figure_1, figure_8, square_around
from recipes.program import Row, Run, markdown, read_rows, start

DEFAULT = Settings(n_train=3000, epochs=10, pixels=14, width=256, hessian="exact and approx")
TINY, PAPERS = (replace(settings, hessian=DEFAULT.hessian) for settings in (FAST, PAPER))
STORED_RUN = 28.4  # squared error per image of the online LAE with the exact diagonal, in the authors' repository
ALIKE = 0.1  # relative difference of two similar errors
NOTE = """\
"latent σ" is relative to the spread of the latent points; "far / near" is the decoder's σ on the edge of figure 1's
map over that at the latent points. log p(x) is −‖x − f(x)‖² averaged over sampled networks, as in the paper: without ½
and without a constant. "authors" is the one run in their repository, with 28 × 28 pixels, scored on the images used for
early stopping; the numbers of table 2 are not in the paper's text."""


def train(run: Run, data: Data) -> dict[str, Method]:
    """Train the methods of every row of the table, and the VAE of figure 1."""
    settings = run.settings
    module = trained(run, "autoencoder", lambda: LitAutoencoder(settings), data, run.seed)
    methods: dict[str, Method] = {"AE": Several([module])}
    methods["post-hoc KFAC"] = Laplacian(kfac(run, module, data))
    for hessian in hessians(settings.hessian):
        methods[f"post-hoc {hessian}"] = Laplacian(post_hoc(run, f"post-hoc {hessian}", module, data, hessian))
    print("trained the autoencoder and fitted the post-hoc posteriors", flush=True)
    for hessian in hessians(settings.hessian):
        posterior = online(run, f"online {hessian}", data, replace(settings, hessian=hessian))
        methods[f"online {hessian}"] = Laplacian(posterior)
        print(f"trained the online LAE with the {hessian} Hessian", flush=True)
    methods["VAE"] = Variational(trained(run, "VAE", lambda: LitVAE(settings), data, run.seed))
    return methods


def hessians(words: str) -> list[str]:
    """`--hessian approx` skips the slow methods."""
    return words.split(" and ")


def kfac(run: Run, module: LitAutoencoder, data: Data) -> LaplacePosterior:
    """Fit with labels drawn from the model, because the GGN's factors would take a backward pass for every pixel."""

    def state() -> dict[str, Any]:
        x, _ = data.train.tensors
        pairs = DataLoader(TensorDataset(x, x), BATCH)
        posterior = fit_laplace(module, pairs, NOISE, curvature=FisherMC(samples=10), seed=run.seed, structure="kron")
        return posterior.tune_prior(Tuning("marglik", noise=False)).state_dict()

    return LaplacePosterior.from_state_dict(module, run.once("post-hoc KFAC", state))  # type: ignore[return-value]


def judge(name: str, method: Method, data: Data, samples: int, seed: int) -> list[Row]:
    x, _ = data.test.tensors
    moments = method.moments(x, samples, seed)
    assert moments.mean is not None
    assert moments.variance is not None
    assert moments.latent_mean is not None
    assert moments.latent_variance is not None
    mse = (x - moments.mean).square().flatten(1).sum(1).mean()
    # Averaged over samples, the error of a sampled network is the error of the mean plus the variance.
    spread = 0.0 if isinstance(method, Variational) else moments.variance.flatten(1).sum(1).mean()
    latent = moments.latent_variance.mean().sqrt() / moments.latent_mean.std(0).mean()
    row = {"method": name, "MSE": float(mse), "log p(x)": -float(mse + spread), "latent σ": float(latent)}
    if isinstance(method, Several):  # with a single network
        return [row | {"latent σ": None, "far / near": None}]
    return [row | {"far / near": growth(method, moments.latent_mean[:BATCH], samples, seed)}]


def growth(method: Method, z: torch.Tensor, samples: int, seed: int) -> float:
    """The decoder's mean σ on a square around the latent points, divided by its mean σ at the points themselves."""
    centre, side = square_around(z)
    edge = torch.cartesian_prod(side, side)
    edge = edge[edge.abs().amax(1) == side[-1]] + centre
    far, near = (method.decoder_variance(points, samples, seed).sqrt().mean() for points in (edge, z))
    return float(far / near)


def claims(rows: dict[str, Row], names: list[str]) -> list[Claim]:
    """The claims of section 5 on table 2 and of figure 1."""
    statements = []
    if len(names) == 2:
        for kind in ("post-hoc", "online"):
            a, b = (rows[f"{kind} {name}"] for name in names)
            alike = all(abs(a[key] / b[key] - 1) <= ALIKE for key in ("MSE", "log p(x)"))
            numbers = ", ".join(f"{key} {a[key]:.2f} and {b[key]:.2f}" for key in ("MSE", "log p(x)"))
            statements.append(Claim(f"{kind}, exact and approximate diagonal are alike, ± {ALIKE:.0%}", alike, numbers))
    for name in names:
        after, during, plain = rows[f"post-hoc {name}"], rows[f"online {name}"], rows["AE"]["MSE"]
        worse = after["MSE"] / plain - 1
        text = f"post-hoc {name}: the mean reconstruction is good (MSE at most {2 * ALIKE:.0%} above the AE's)"
        statements.append(Claim(text, worse <= 2 * ALIKE, f"{after['MSE']:.2f}, AE {plain:.2f}"))
        text = f"online {name}: sampled networks reconstruct much better than post-hoc ones"
        numbers = f"log p(x) {during['log p(x)']:.2f} and {after['log p(x)']:.2f}"
        statements.append(Claim(text, during["log p(x)"] > after["log p(x)"], numbers))
        for kind in ("post-hoc", "online"):
            ratio = rows[f"{kind} {name}"]["far / near"]
            statements.append(Claim(f"{kind} {name}: σ grows away from the data", ratio > 1, f"far / near {ratio:.2f}"))
    ratio = rows["VAE"]["far / near"]
    return [*statements, Claim("a VAE's σ does not grow away from the data", ratio <= 1, f"far / near {ratio:.2f}")]


def report(folder: Path) -> str:
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))["settings"]
    rows = {row["method"]: row for row in read_rows(folder / "results.csv")}
    columns = ["MSE", "log p(x)", "latent σ", "far / near"]
    lines = []
    for name, row in rows.items():
        line = [row[column] for column in columns]
        if name == "VAE":
            line[1] = None  # its log-likelihood uses a different variance
        lines.append([name, *line, STORED_RUN if name == "online exact" else None])
    return "\n\n".join(
        [
            f"MNIST, table 2 on {settings['n_test']:,} test images: {describe(linear_net(settings), settings)}.",
            markdown(["", *columns, "MSE (authors)"], lines, 3),
            NOTE,
            verdict(claims(rows, hessians(settings["hessian"]))),
            "Pictures: figure_1.png, figure_8.png.",
        ]
    )


def main() -> None:
    run = start(__doc__, "papers/lae/mnist", {"default": DEFAULT, "fast": TINY, "paper": PAPERS})
    settings = run.settings
    data = read_data("MNIST", run.data, settings)
    methods = train(run, data)
    for name, method in methods.items():
        run.collect("results", name, judge, name, method, data, settings.samples, run.seed)

    seed_everything(run.seed)
    lae = {name: method for name, method in methods.items() if isinstance(method, Laplacian)}
    run.save_picture("figure_8", figure_8(lae, data, settings.samples, run.seed))
    first = hessians(settings.hessian)[0]
    compared = {"VAE": "VAE", "LAE (post-hoc)": f"post-hoc {first}", "LAE (online)": f"online {first}"}
    shown = {name: methods[row] for name, row in compared.items()}
    run.save_picture("figure_1", figure_1(shown, data, settings.samples, run.seed))
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()
