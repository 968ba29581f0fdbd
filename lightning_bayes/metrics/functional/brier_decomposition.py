"""The Brier score taken apart: reliability, resolution, uncertainty (Murphy, 1973).

For one class, let bin k hold n_k of N forecasts p with mean p̄_k and outcome rate ȳ_k, and let ȳ be the overall rate:

    BS = Σ_k (n_k/N) (p̄_k - ȳ_k)²      reliability  (0 is best: forecasts mean what they say)
       - Σ_k (n_k/N) (ȳ_k - ȳ)²        resolution   (large is best: forecasts tell cases apart)
       + ȳ (1 - ȳ)                      uncertainty  (of the data alone)
       + (1/N) Σ [(p - p̄_k)² - 2 (p - p̄_k)(y - ȳ_k)]   within_bin

The last term is zero when all forecasts in a bin are equal, Murphy's case; with it the identity holds exactly for any
bins (Stephenson, Coelho & Jolliffe, 2008). Each term is summed over the classes, like the Brier score.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lightning_bayes.metrics.functional.binning import cell_sums
from lightning_bayes.metrics.functional.inputs import check_count, classification_inputs


def brier_decomposition(
    probs: Tensor, target: Tensor, n_bins: int = 15, ignore_index: int | None = None, validate_args: bool = True
) -> dict[str, Tensor]:
    """Reliability, resolution, uncertainty and the within-bin remainder of the Brier score.

    >>> import torch
    >>> parts = brier_decomposition(torch.tensor([0.25, 0.25, 0.75, 0.75]), torch.tensor([0, 1, 1, 1]), n_bins=2)
    >>> {name: round(float(value), 4) for name, value in parts.items()}
    {'reliability': 0.125, 'resolution': 0.125, 'uncertainty': 0.375, 'within_bin': 0.0}
    """
    check_count("n_bins", n_bins)
    return _brier_decomposition_compute(_brier_decomposition_update(probs, target, n_bins, ignore_index, validate_args))


def _brier_decomposition_update(
    probs: Tensor, target: Tensor, n_bins: int, ignore_index: int | None, validate: bool
) -> Tensor:
    """Per class and bin, the sums of 1, p, y, p² and p·y: `[C, n_bins, 5]`."""
    p, target = classification_inputs(probs, target, ignore_index, validate)  # [N, C], [N]
    y = one_hot(target, p.shape[1]).to(p.dtype)  # [N, C]
    return cell_sums(p, torch.stack([torch.ones_like(p), p, y, p * p, p * y], dim=-1), n_bins)


def _brier_decomposition_compute(sums: Tensor) -> dict[str, Tensor]:
    n, p, y, pp, py = sums.unbind(-1)  # [C, n_bins] each
    total = n.sum(1, keepdim=True)  # [C, 1]
    rate = y.sum(1, keepdim=True) / total  # [C, 1]
    p_bar, y_bar = p / n.clamp(min=1), y / n.clamp(min=1)  # [C, n_bins]
    within = pp - n * p_bar.square() - 2 * (py - n * p_bar * y_bar)  # [C, n_bins]
    return {
        "reliability": (n * (p_bar - y_bar).square() / total).sum(),
        "resolution": (n * (y_bar - rate).square() / total).sum(),
        "uncertainty": (rate * (1 - rate)).sum(),
        "within_bin": (within / total).sum(),
    }
