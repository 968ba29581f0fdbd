"""Laplacian autoencoders on MNIST: table 2 and figures 1 and 8 of the paper (Miani et al., "Laplacian autoencoders for
learning stochastic representations").

    python -m recipes.papers.lae.mnist            # minutes: 14 × 14 pixels, a narrow network, some of MNIST
    python -m recipes.papers.lae.mnist --pixels 28 --width 512 --hessian approx
    python -m recipes.papers.lae.mnist --paper    # 784-512-256-2-256-512-784 on 55,000 images; wants a GPU

One autoencoder is trained as usual and gets its posterior afterwards (post-hoc), by the KFAC, the exact and the
approximate diagonal Hessian; others are trained at samples of their posterior (online), with the exact and the
approximate diagonal. The table has the squared error of the mean reconstruction, and the log-likelihood of a
sampled network, averaged over the samples. The exact diagonal costs a backward pass per pixel, so the default has few
pixels. Results go to outputs/papers/lae/mnist/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import fit_laplace
from recipes.papers.lae.autoencoders import (
    BATCH,
    NOISE,
    Laplacian,
    LitAutoencoder,
    LitVAE,
    Method,
    Several,
    Variational,
    fit,
    online,
    post_hoc,
    seed,
)
from recipes.papers.lae.common import PAPER, Claim, Data, Settings, begin, linear_net, parse, table, verdict, write_csv
from recipes.papers.lae.pictures import figure_1, figure_8, square_around

DEFAULT = Settings(n_train=3000, epochs=10, pixels=14, width=256, hessian="exact and approx")
PAPERS = replace(PAPER, hessian=DEFAULT.hessian)
STORED_RUN = 28.4  # squared error per image of the online LAE with the exact diagonal, in the authors' repository
ALIKE = 0.1  # relative difference of two errors
NOTE = """\
"latent σ" is relative to the spread of the latent points; "far / near" is the decoder's σ on the edge of figure 1's
map over that at the latent points. log p(x) is −‖x − f(x)‖² averaged over sampled networks, as in the paper: without ½
and without a constant. "authors" is the one run that their repository stores, 28 × 28 pixels, judged by the images that
stopped it; the numbers of table 2 are not in the paper's text."""


def train(data: Data, settings: Settings, output: Path, say: Callable[[str], None]) -> dict[str, Method]:
    """Every row of the table, and the VAE of figure 1."""
    seed(settings.seed)
    module = fit(LitAutoencoder(settings), data, settings, output)
    methods: dict[str, Method] = {"AE": Several([module])}
    say("trained the autoencoder")
    methods["post-hoc KFAC"] = Laplacian(kfac(module, data, settings))
    for hessian in hessians(settings):
        methods[f"post-hoc {hessian}"] = Laplacian(post_hoc(module, data, hessian))
    say("fitted the post-hoc posteriors")
    for hessian in hessians(settings):
        methods[f"online {hessian}"] = Laplacian(online(data, replace(settings, hessian=hessian), output))
        say(f"trained the online LAE with the {hessian} Hessian")
    seed(settings.seed)
    methods["VAE"] = Variational(fit(LitVAE(settings), data, settings, output).eval())
    say("trained the VAE")
    return methods


def hessians(settings: Settings) -> list[str]:
    """`--hessian approx`, alone, leaves out what is slow."""
    return settings.hessian.split(" and ")


def kfac(module: LitAutoencoder, data: Data, settings: Settings) -> Any:
    """With labels drawn from the model: the GGN's factors would take a backward pass for every pixel."""
    x, _ = data.train.tensors
    pairs = DataLoader(TensorDataset(x, x), BATCH)
    posterior = fit_laplace(module, pairs, NOISE, "kron", curvature="fisher_mc", samples=10, seed=settings.seed)
    return posterior.tune_prior("marglik", noise=False)


def judge(method: Method, data: Data, settings: Settings) -> dict[str, float]:
    x, _ = data.test.tensors
    moments = method.moments(x, settings.samples, settings.seed)
    assert moments.mean is not None
    assert moments.variance is not None
    assert moments.latent_mean is not None
    assert moments.latent_variance is not None
    mse = (x - moments.mean).square().flatten(1).sum(1).mean()
    # Averaged over the samples, the error of a sampled network is that of the mean plus the variance.
    spread = 0.0 if isinstance(method, Variational) else moments.variance.flatten(1).sum(1).mean()
    latent = moments.latent_variance.mean().sqrt() / moments.latent_mean.std(0).mean()
    row = {"MSE": float(mse), "log p(x)": -float(mse + spread), "latent σ": float(latent)}
    if isinstance(method, Several):
        return row | {"far / near": float("nan")}
    return row | {"far / near": growth(method, moments.latent_mean[:BATCH], settings)}


def growth(method: Method, z: torch.Tensor, settings: Settings) -> float:
    """The decoder's σ, averaged over pixels, on the edge of a square around the latent points, over that at them."""
    centre, side = square_around(z)
    edge = torch.cartesian_prod(side, side)
    edge = edge[edge.abs().amax(1) == side[-1]] + centre
    far, near = (method.decoder_variance(points, settings.samples, settings.seed).sqrt().mean() for points in (edge, z))
    return float(far / near)


def claims(rows: dict[str, dict[str, float]], names: list[str]) -> list[Claim]:
    """Of section 5 on table 2, and of figure 1."""
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


def main() -> None:
    settings, arguments = parse(__doc__ or "", "mnist", DEFAULT, PAPERS)
    data, say = begin("MNIST", f"MNIST: {linear_net(settings)}", settings, PAPERS, arguments)
    methods = train(data, settings, arguments.output, say)

    rows = {name: judge(method, data, settings) for name, method in methods.items()}
    columns = ["MSE", "log p(x)", "latent σ", "far / near", "MSE (authors)"]
    shown: dict[str, Any] = {name: [*row.values(), None] for name, row in rows.items()}
    if "online exact" in shown:
        shown["online exact"][-1] = f"{STORED_RUN}"
    shown["AE"][2:4] = None, None  # which has one network
    shown["VAE"][1] = None  # its log-likelihood has a variance of its own
    print(f"\ntable 2, on {len(data.test):,} test images, {settings.samples} sampled networks:\n")
    print(f"{table(columns, shown)}\n{NOTE}")
    write_csv(
        arguments.output / "results.csv", ["method", *columns[:4]], [[n, *row.values()] for n, row in rows.items()]
    )

    torch.manual_seed(settings.seed)
    lae = {name: method for name, method in methods.items() if isinstance(method, Laplacian)}
    figure_8(lae, data, settings).savefig(arguments.output / "figure_8.png")
    first = hessians(settings)[0]
    compared = {"VAE": "VAE", "LAE (post-hoc)": f"post-hoc {first}", "LAE (online)": f"online {first}"}
    figure_1({name: methods[row] for name, row in compared.items()}, data, settings).savefig(
        arguments.output / "figure_1.png"
    )
    print(f"\nfigure_1.png, figure_8.png and results.csv are in {arguments.output}\n")
    print(verdict(claims(rows, hessians(settings))))


if __name__ == "__main__":
    main()
