"""Parallel-beam tomography of small images: the Radon transform as a sparse matrix, and test images.

A detector measures the sum along the beam of the image, rotated by the angle with bilinear interpolation. The matrix
agrees with scikit-image's `radon(image, theta, circle=True)`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def radon_matrix(size: int, angles: int) -> Tensor:
    """The matrix of `angles` views, evenly spaced over half a turn, with a row per view and detector.  # sparse
    [angles·size, size²]"""
    rows, columns, values = [], [], []
    centre = size // 2
    beam, detector = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")  # along, across
    for view in range(angles):
        c, s = math.cos(math.pi * view / angles), math.sin(math.pi * view / angles)
        across = c * (detector - centre) + s * (beam - centre) + centre
        down = -s * (detector - centre) + c * (beam - centre) + centre
        x, y = across.floor(), down.floor()
        for dx in (0, 1):
            for dy in (0, 1):
                weight = (1 - (across - x - dx).abs()) * (1 - (down - y - dy).abs())
                inside = (x + dx >= 0) & (x + dx < size) & (y + dy >= 0) & (y + dy < size) & (weight > 1e-9)
                rows.append((view * size + detector)[inside])
                columns.append(((y + dy) * size + x + dx)[inside].long())
                values.append(weight[inside])
    places = torch.stack([torch.cat(rows), torch.cat(columns)])
    shape = (angles * size, size**2)
    return torch.sparse_coo_tensor(places, torch.cat(values), shape, check_invariants=True).coalesce()


def ellipses(size: int, seed: int) -> Tensor:
    """A phantom like Shepp and Logan's: a head with random ellipses, from 0 to 1.  # [size, size]"""
    g = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    image = 0.8 * _ellipse(x, y, 0, 0, 0.62, 0.82, 0) - 0.5 * _ellipse(x, y, 0, 0, 0.56, 0.76, 0)
    for _ in range(8):
        u = torch.rand(6, generator=g).tolist()
        place, axes = (0.7 * (u[0] - 0.5), 0.9 * (u[1] - 0.5)), (0.05 + 0.2 * u[2], 0.05 + 0.2 * u[3])
        image = image + 0.4 * (u[5] - 0.4) * _ellipse(x, y, *place, *axes, math.pi * u[4])
    return image.clamp(0, 1)


def _ellipse(x: Tensor, y: Tensor, x0: float, y0: float, a: float, b: float, angle: float) -> Tensor:
    u = (x - x0) * math.cos(angle) + (y - y0) * math.sin(angle)
    v = (y - y0) * math.cos(angle) - (x - x0) * math.sin(angle)
    return ((u / a).square() + (v / b).square() <= 1).float()
