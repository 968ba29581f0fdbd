"""Laplacian autoencoders on MNIST: table 2 and figures 1 and 8 of the paper (Miani et al., "Laplacian autoencoders for
learning stochastic representations").

    python recipes/laplacian_autoencoder.py            # minutes: 14 × 14 pixels, a narrow network, some of MNIST
    python recipes/laplacian_autoencoder.py --pixels 28 --width 512 --hessian approx
    python recipes/laplacian_autoencoder.py --paper    # 784-512-256-2-256-512-784 on 55,000 images; wants a GPU

One autoencoder is trained as usual and gets its posterior afterwards (post-hoc), by the KFAC, the exact and the
approximate diagonal Hessian; others are trained at samples of their posterior (online), with the exact and the
approximate diagonal. Each is asked for the squared error of the mean reconstruction, and for the log-likelihood of a
sampled network, averaged over the samples. The exact diagonal costs as many backward passes as there are pixels, which
is why the default has few of them. Results go to outputs/laplacian_autoencoder/.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from autoencoders import (
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
from lae_common import PAPER, Data, Settings, describe, parse, read_data, table, write_csv
from lae_pictures import figure_1, figure_8
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import fit_laplace

DEFAULT = Settings(n_train=3000, epochs=10, pixels=14, width=256, hessian="exact and approx")
PAPERS = replace(PAPER, hessian=DEFAULT.hessian)
STORED_RUN = 28.4  # squared error per image of the online LAE with the exact diagonal, in the authors' repository
PAPER_SAYS = """\
The paper on its table 2 (section 5): exact and approximate diagonal are alike, post-hoc and online. Post-hoc has good
mean reconstructions (MSE), but a sampled network does not reconstruct well (log p). Online training has a much higher
log p. "authors": the one run that their repository stores, 28 × 28 pixels, judged by the images that stopped it; the
numbers of the table itself are not in the paper's text. log p(x) is −‖x − f(x)‖² averaged over sampled networks, as in
the paper: without ½ and without a constant."""


def train(data: Data, settings: Settings, output: Path) -> dict[str, Method]:
    """Every row of the table, and the VAE of figure 1."""
    start = time.perf_counter()

    def done(what: str) -> None:
        print(f"{what} [{time.perf_counter() - start:.0f} s]", flush=True)

    seed(settings.seed)
    module = fit(LitAutoencoder(settings), data, settings, output)
    found: dict[str, Method] = {"AE": Several([module])}
    done("trained the autoencoder")
    found["post-hoc KFAC"] = Laplacian(kfac(module, data, settings))
    for hessian in hessians(settings):
        found[f"post-hoc {hessian}"] = Laplacian(post_hoc(module, data, settings, output, hessian))
    done("fitted the post-hoc posteriors")
    for hessian in hessians(settings):
        found[f"online {hessian}"] = Laplacian(online(data, replace(settings, hessian=hessian), output))
        done(f"trained the online LAE with the {hessian} Hessian")
    seed(settings.seed)
    found["VAE"] = Variational(fit(LitVAE(settings), data, settings, output).eval())
    done("trained the VAE")
    return found


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
    found = method.moments(x, settings.samples, settings.seed)
    assert found.mean is not None
    assert found.variance is not None
    assert found.latent_mean is not None
    assert found.latent_variance is not None
    mse = (x - found.mean).square().flatten(1).sum(1).mean()
    # Averaged over the samples, the error of a sampled network is that of the mean plus the variance.
    spread = 0.0 if isinstance(method, Variational) else found.variance.flatten(1).sum(1).mean()
    latent = found.latent_variance.mean().sqrt() / found.latent_mean.std(0).mean()
    return {"MSE": float(mse), "log p(x)": -float(mse + spread), "latent σ": float(latent)}


def main() -> None:
    settings, arguments = parse(__doc__ or "", "laplacian_autoencoder", DEFAULT, PAPERS)
    data = read_data("MNIST", arguments.data, arguments.output, settings)
    width, pixels = settings.width, settings.pixels**2
    what = f"MNIST: {pixels}-{width}-{width // 2}-2-{width // 2}-{width}-{pixels}, tanh"
    print(describe(what, data, settings, PAPERS), flush=True)
    methods = train(data, settings, arguments.output)

    rows = {name: judge(method, data, settings) for name, method in methods.items()}
    columns = ["MSE", "log p(x)", "latent σ", "MSE (authors)"]
    shown: dict[str, Any] = {name: [*row.values(), None] for name, row in rows.items()}
    if "online exact" in shown:
        shown["online exact"][-1] = f"{STORED_RUN}"
    shown["VAE"][1] = None  # its log-likelihood has a variance of its own
    print(f"\ntable 2, on {len(data.test):,} test images, {settings.samples} sampled networks:\n")
    print(table(columns, shown))
    print(f'"latent σ" is relative to the spread of the latent points.\n\n{PAPER_SAYS}')
    write_csv(
        arguments.output / "results.csv", ["method", *columns[:3]], [[n, *row.values()] for n, row in rows.items()]
    )

    torch.manual_seed(settings.seed)
    lae = {name: method for name, method in methods.items() if isinstance(method, Laplacian)}
    figure_8(lae, data, settings).savefig(arguments.output / "figure_8.png")
    first = hessians(settings)[0]
    compared = {"VAE": "VAE", "LAE (post-hoc)": f"post-hoc {first}", "LAE (online)": f"online {first}"}
    figure_1({name: methods[row] for name, row in compared.items()}, data, settings).savefig(
        arguments.output / "figure_1.png"
    )
    print(f"\nfigure_1.png, figure_8.png and results.csv are in {arguments.output}")


if __name__ == "__main__":
    main()
