"""X-ray tomography with a deep image prior: how certain is the reconstruction, pixel by pixel?

A digit is measured from few angles, with noise. A U-Net that is trained only on these measurements reconstructs it.
The network is then linearised, and the evidence of the measurements tunes its prior, which gives each pixel a variance.
It follows Antorán et al. 2022, "A probabilistic deep image prior for computational tomography" (tutorial, section 7).

- Bayes DIP (TV): variances and lengths of the U-Net's filters, block by block, with the TV-PredCP prior over lengths.
- Bayes DIP (filters): the same without that prior. Bayes DIP (ARD): one variance per block.
- Gaussian: one variance for all weights. MC dropout: images drawn from a U-Net with dropout. one σ: the plain
  reconstruction; every pixel has the mean square error of the other images.

The NLL of the true image is in nats per pixel, for single pixels and joint, both with the authors' stabilising
term on the variances, σ²·mean diag (AᵀA)†. Images are MNIST's test digits if `--data` has them, else random ellipses.

    python recipes/tomography.py    # ten digits from 10 angles: a quarter of an hour on one core
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from deep_image_prior import dropout_images, reconstruct
from error_bars import draw_pictures
from idx import read_idx
from program import Row, Run, progress, start
from radon import ellipses, radon_matrix
from torch import Tensor
from views import Measured, order, score, stabiliser, summary

from lightning_bayes import LinearMeasurement, fit_measurements

PRIORS = {"Bayes DIP (TV)": "tv", "Bayes DIP (filters)": "filters", "Bayes DIP (ARD)": "ard", "Gaussian": "gaussian"}


@dataclass(frozen=True)
class Settings:
    images: int = 10
    angles: tuple[int, ...] = (10,)
    noise: tuple[float, ...] = (0.05,)  # relative to the measurements' mean size
    size: int = 28
    steps: int = 1500
    width: int = 16
    smoothness: float = 0.1  # γ
    dropout: float = 0.05
    samples: int = 200


SCALES = {
    "default": Settings(),
    "fast": Settings(images=2, angles=(4,), size=10, steps=10, width=4, samples=20),
    "paper": Settings(images=50, angles=(5, 10, 20, 30), noise=(0.05, 0.1)),
}


def read(run: Run) -> Tensor:
    """# [images, size, size]"""
    digits = read_idx(run.data, "MNIST", train=False) if run.settings.size == 28 else None
    if digits is None:
        return torch.stack([ellipses(run.settings.size, seed) for seed in run.seeds(run.settings.images)])
    chosen = torch.randperm(len(digits[0]), generator=torch.Generator().manual_seed(run.seed))
    return digits[0][chosen[: run.settings.images]] / 255


def views(run: Run) -> dict[str, Measured]:
    """Measurements of every image for each number of angles and each noise, keyed by the name of the step."""
    maps = {angles: radon_matrix(run.settings.size, angles) for angles in run.settings.angles}
    return {
        f"{angles} angles, {100 * noise:g} % noise, image {n}": Measured.of(image, A, noise, seed=1000 * run.seed + n)
        for (angles, A), noise in product(maps.items(), run.settings.noise)
        for n, image in enumerate(read(run))
    }


def images_of(seen: Measured, settings: Settings, seed: int) -> dict[str, dict[str, Tensor]]:
    """The mean and covariance of the image by method."""
    options = {"smoothness": settings.smoothness, "width": settings.width}
    network, x = reconstruct(seen.A, seen.y, seed, settings.steps, **options)
    network, x, laws = network.double(), x.double(), {}  # the covariance is a small difference of large matrices
    for method, prior in PRIORS.items():
        posterior = fit_measurements(network, x, seen.y, LinearMeasurement(seen.A, seen.noise_std), prior)
        mean, covariance = posterior.tune(noise=False).functional(joint=True)
        laws[method] = {"mean": mean[0], "covariance": covariance}
    network, x = reconstruct(seen.A, seen.y, seed, settings.steps, dropout=settings.dropout, **options)
    images = dropout_images(network, x, settings.samples, seed).double()
    laws["MC dropout"] = {"mean": images.mean(0), "covariance": images.flatten(1).T.cov()}
    return laws


def judge(run: Run, name: str, seen: Measured) -> Iterator[Row]:
    """Keep all results for the first image of each setup, for the figures."""
    arguments = (seen, run.settings, run.seed)
    laws = run.once(name, images_of, *arguments) if name.endswith(" 0") else images_of(*arguments)
    for method, law in laws.items():
        setup = dict(zip(("angles", "noise", "image"), name.split(", "), strict=True))
        yield {**setup, "method": method, **score(seen.image, **law, stable=stabiliser(seen.A, seen.noise_std))}


def main() -> None:
    seen = views(run := start(__doc__, "tomography", SCALES, threads=1))
    for name, view in progress(seen.items(), "images"):
        run.collect("scores", name, judge, run, name, view)
    run.save_table("table", summary(run.rows("scores")), digits=3)
    (run.output / "order.md").write_text(order(run.rows("scores")), encoding="utf-8")
    name, view = next(iter(seen.items()))
    draw_pictures(run, view, run.once(name, images_of, view, run.settings, run.seed))


if __name__ == "__main__":
    main()
