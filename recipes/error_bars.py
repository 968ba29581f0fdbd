"""Figures of a reconstruction's error bars."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from program import Run
from torch import Tensor
from views import Measured, stabiliser


def draw_pictures(run: Run, seen: Measured, laws: dict[str, dict[str, Tensor]]) -> None:
    """Plot the first image (truth, reconstruction, error and standard deviation by method), a histogram and
    calibration."""
    stable = stabiliser(seen.A, seen.noise_std)
    figure = Figure(figsize=(7.2, 1.9 * len(laws)), layout="constrained", dpi=160)
    for axes, (method, law) in zip(figure.subplots(len(laws), 4, squeeze=False), laws.items(), strict=True):
        error, std = (seen.image - law["mean"]).abs(), law["covariance"].diagonal().clamp_min(0).sqrt()
        top = float(max(error.max(), std.max()))
        shown = {"image": seen.image, method: law["mean"], "|error|": error, "standard deviation": std.view_as(error)}
        for ax, (title, picture) in zip(axes, shown.items(), strict=True):
            grey = title in ("image", method)
            ax.imshow(picture.numpy(), cmap="gray" if grey else "magma", vmin=0, vmax=1 if grey else top)
            ax.set_title(title, fontsize=8)
            ax.set_axis_off()
    run.save_picture("images", figure)
    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=160)
    left, right = figure.subplots(1, 2)
    levels = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    for n, (method, law) in enumerate(laws.items()):
        error = (seen.image - law["mean"]).double().flatten()
        std = (law["covariance"].double().diagonal() + stable).sqrt()
        within = [float((error.abs() <= torch.special.ndtri((1 + p) / 2) * std).double().mean()) for p in levels]
        right.plot(levels, within, label=method)
        left.hist(std.log10().numpy(), 40, histtype="step", label=f"σ, {method}", color=f"C{n}")
    left.hist(error.abs().clamp_min(1e-4).log10().numpy(), 40, color="0.8", label="|error|", zorder=0)
    left.set(xlabel="log₁₀", ylabel="pixels")
    right.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
    right.set(xlabel="level of the interval", ylabel="share of pixels in it")
    for ax in (left, right):
        ax.legend(fontsize=7)
    run.save_picture("calibration", figure)
