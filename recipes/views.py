"""Measurements of an image, and scores for the error bars of its reconstruction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from program import Row, spread
from torch import Tensor

KEPT = 100  # singular values of A in its pseudo-inverse, as in the authors' code
SCORES = ("NLL", "joint NLL", "PSNR", "in 95 %", "rank correlation")


@dataclass(frozen=True)
class Measured:
    """An image and its measurement `y = Ax + η`."""

    image: Tensor  # [size, size]
    A: Tensor  # sparse [d_y, size²]
    y: Tensor  # [d_y]
    noise_std: float

    @staticmethod
    def of(image: Tensor, A: Tensor, noise: float, seed: int) -> Measured:
        """Measure with white noise, `noise` times the average size of the measurements."""
        clean = A @ image.flatten()
        σ = noise * float(clean.abs().mean())
        return Measured(
            image, A, clean + σ * torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed)), σ
        )


def stabiliser(A: Tensor, noise_std: float) -> float:
    """`σ²·mean diag (AᵀA)†`: the variance of a pixel that noise alone causes, for near-singular covariances."""
    values = torch.linalg.svdvals(A.to_dense().double())[:KEPT]
    return noise_std**2 * float((values[values > 1e-6 * values[0]] ** -2).sum()) / A.shape[1]


def score(image: Tensor, mean: Tensor, covariance: Tensor, stable: float) -> dict[str, float]:
    """Scores of the true image under a Gaussian, per pixel.  # [size, size], [size, size], [d_x, d_x]"""
    error, d = (image.double() - mean.double()).flatten(), mean.numel()
    S = covariance.double() + stable * torch.eye(d, dtype=torch.float64)
    variances, root = S.diagonal(), torch.linalg.cholesky(S)
    one_by_one = 0.5 * (error.square() / variances + (2 * math.pi * variances).log()).mean()
    whitened = torch.linalg.solve_triangular(root, error.unsqueeze(1), upper=False)
    joint = (0.5 * whitened.square().sum() + root.diagonal().log().sum()) / d + 0.5 * math.log(2 * math.pi)
    ranks = torch.stack([t.argsort().argsort().double() for t in (error.abs(), variances)])
    return {
        "NLL": float(one_by_one),
        "joint NLL": float(joint),
        "PSNR": -10 * math.log10(float(error.square().mean())),
        "in 95 %": float((error.abs() < 1.96 * variances.sqrt()).double().mean()),
        "rank correlation": float(torch.corrcoef(ranks)[0, 1]),
        "stabiliser": stable,
    }


def summary(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Mean ± standard error over images, by setup and method; "one σ" uses the errors of the other images."""
    setups = dict.fromkeys((row["angles"], row["noise"]) for row in rows)
    table = {}
    for angles, noise in setups:
        of_setup = [row for row in rows if (row["angles"], row["noise"]) == (angles, noise)]
        of_setup += one_sigma([row for row in of_setup if row["method"] == "Gaussian"])
        for method in dict.fromkeys(row["method"] for row in of_setup):
            of_method = [row for row in of_setup if row["method"] == method]
            name = method if len(setups) == 1 else f"{angles}, {noise}: {method}"
            table[name] = {s: spread([r[s] for r in of_method]) if of_method[0][s] is not None else "–" for s in SCORES}
    return table


def order(rows: Sequence[Row], best: str = "Bayes DIP (TV)") -> str:
    """Compare the paper's best method with each other method, image by image."""
    rows, lines = [*rows, *one_sigma([row for row in rows if row["method"] == "Gaussian"])], []
    for score in SCORES[:2]:
        values = {(row["step"], row["method"]): row[score] for row in rows}
        lines += [
            f"{score} of {best} minus another method's, mean ± standard error, and on how many images it is lower:",
            "",
        ]
        for other in dict.fromkeys(row["method"] for row in rows if row["method"] != best):
            gaps = [value - values[step, other] for (step, method), value in values.items() if method == best]
            lines.append(f"- {other}: {spread(gaps)}, {sum(gap < 0 for gap in gaps)} of {len(gaps)}")
        lines.append("")
    return "\n".join(lines)


def one_sigma(rows: Sequence[Row]) -> list[Row]:
    """The plain reconstruction; every pixel has the mean squared error of the other images."""
    errors = [10 ** (-row["PSNR"] / 10) for row in rows]
    judged = []
    for row, mse in zip(rows, errors, strict=True):
        others = (sum(errors) - mse) / (len(errors) - 1) if len(errors) > 1 else mse
        variance = others + row["stabiliser"]
        nll = 0.5 * (mse / variance + math.log(2 * math.pi * variance))
        judged.append(
            {**row, "method": "one σ", "NLL": nll, "joint NLL": nll, "in 95 %": None, "rank correlation": None}
        )
    return judged
