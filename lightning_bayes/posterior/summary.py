"""`PosteriorSummary`: a posterior block by block, as a table and as numbers.

A row describes one block of the stored matrix (the curvature of a Laplace posterior, the precision of any other): its
parameters, form and memory, and the number of its weights that the data determine, `γ_b = Σ_{i∈b} (1 − δᵢ [P⁻¹]ᵢᵢ)`. A
diagonal matrix has one row per layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_bayes.likelihoods import Likelihood, LikelihoodError
from lightning_bayes.likelihoods.outputs import vector
from lightning_bayes.network import inputs
from lightning_bayes.posterior.prior import per_parameter
from lightning_bayes.structures import Structure

if TYPE_CHECKING:
    from lightning_bayes.posterior.gaussian import Calibration, GaussianPosterior
    from lightning_bayes.posterior.laplace import LaplacePosterior

NOTHING = "–"  # shown for a value that the posterior does not have


@dataclass(frozen=True)
class BlockSummary:
    """One block of the matrix."""

    parameters: tuple[str, ...]
    form: str  # "kronecker", "dense" or "diagonal"
    sizes: str  # sizes of the stored matrices: "4×4 ⊗ 6×6", "31×31" or "31"
    n_weights: int
    n_bytes: int
    prior_precision: tuple[float, float] | None  # the smallest and the largest
    effective_parameters: float | None


@dataclass(frozen=True)
class PosteriorSummary:
    """`print` shows a table; the fields contain the numbers."""

    title: str
    blocks: tuple[BlockSummary, ...]
    n_weights: int
    n_bytes: int  # memory of the stored matrix, on this process
    n_data: int
    likelihood: Likelihood
    prior_precision: tuple[float, float] | None
    effective_parameters: float | None
    log_evidence: float | None
    noise_std: tuple[float, ...] | None
    calibrations: tuple[Calibration, ...]

    def __str__(self) -> str:
        return "\n".join([self.title, "", *_table(self._rows()), "", *self._facts()])

    def _rows(self) -> Iterator[list[str]]:
        yield ["parameters", "block", "stored", "weights", "memory", "prior", "γ"]
        total = BlockSummary(
            ("all",), "", "", self.n_weights, self.n_bytes, self.prior_precision, self.effective_parameters
        )
        for block in (*self.blocks, total):
            γ = NOTHING if block.effective_parameters is None else f"{block.effective_parameters:.4g}"
            sizes = [f"{block.n_weights:,}", readable_bytes(block.n_bytes)]
            yield [_names(block.parameters), block.form, block.sizes, *sizes, _range(block.prior_precision), γ]

    def _facts(self) -> Iterator[str]:
        yield f"likelihood   {self.likelihood!r}"
        yield f"examples     {self.n_data:,}"
        if self.noise_std is not None:
            yield f"noise std    {', '.join(f'{σ:.4g}' for σ in self.noise_std)}"
        yield f"log evidence {NOTHING if self.log_evidence is None else f'{self.log_evidence:.6g}'}"
        for c in self.calibrations:
            numbers = {"T of outputs": c.output_temperature, "T of probabilities": c.probs_temperature}
            numbers["variance factor"] = c.variance_factor
            changed = [f"{what} {value:.4g}" for what, value in numbers.items() if value != 1]
            changed = [*changed, *([f"df {c.df:g}"] if math.isfinite(c.df) else [])] or ["unchanged"]
            yield f"calibration  {c.predictive}, {c.link}: {', '.join(changed)}"
        if not self.calibrations:
            yield f"calibration  {NOTHING}"


def summarise(posterior: GaussianPosterior) -> PosteriorSummary:
    """Summarise any posterior; values that it does not have are None."""
    laplace = _as_laplace(posterior)
    δ = γ = evidence = None
    if laplace is not None:
        δ = _prior_per_weight(laplace)
        γ = 1 - laplace.prior_shares()  # [P]
        evidence = float(laplace.log_marginal_likelihood()) if laplace.curvature.knows_likelihood else None
    blocks = []
    for block in _matrix(posterior).parameter_blocks(posterior.subset):
        own_δ, own_γ = (None if t is None else t[block.places.to(t.device)] for t in (δ, γ))
        blocks.append(
            BlockSummary(
                parameters=block.parameters,
                form=_form_name(block.matrix),
                sizes=block.matrix.sizes,
                n_weights=block.matrix.size,
                n_bytes=n_bytes(block.matrix),
                prior_precision=_bounds(own_δ),
                # Rounding can make the sum negative.
                effective_parameters=None if own_γ is None else max(0.0, float(own_γ.sum())),
            )
        )
    noise = getattr(posterior.likelihood, "noise_std", None)
    return PosteriorSummary(
        title=repr(posterior),
        blocks=tuple(blocks),
        n_weights=posterior.subset.size,
        n_bytes=n_bytes(_matrix(posterior)),
        n_data=posterior.n_data,
        likelihood=posterior.likelihood,
        prior_precision=_bounds(δ),
        effective_parameters=None if laplace is None else float(laplace.effective_parameters),
        log_evidence=evidence,
        noise_std=None if noise is None else tuple(vector("noise_std", noise, LikelihoodError).flatten().tolist()),
        calibrations=posterior.calibrations,
    )


def one_line(posterior: GaussianPosterior) -> str:
    """`LaplacePosterior(kron over 31 weights, n_data=11, likelihood=Categorical(), prior_precision=2)`."""
    laplace, matrix = _as_laplace(posterior), _matrix(posterior)
    parts = [
        f"{matrix.word or _form_name(matrix)} over {posterior.subset.size:,} weights",
        f"n_data={posterior.n_data}",
    ]
    parts.append(f"likelihood={posterior.likelihood!r}")
    if laplace is not None:
        parts.append(f"prior_precision={_range(_bounds(laplace.prior_precision.detach()))}")
        if laplace.prior.precision is not None:
            parts.append("of another posterior")
        elif laplace.prior.mean is not None:
            parts.append("around given weights")
    return f"{type(posterior).__name__}({', '.join(parts)})"


def n_bytes(structure: Structure) -> int:
    """The memory of all tensors of the matrix."""
    return sum(t.numel() * t.element_size() for t in inputs.tensors(structure.parts()))


def readable_bytes(number: int) -> str:
    """
    >>> readable_bytes(812), readable_bytes(3_200_000)
    ('812 B', '3.2 MB')
    """
    size = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{number} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _as_laplace(posterior: GaussianPosterior) -> LaplacePosterior | None:
    from lightning_bayes.posterior.laplace import LaplacePosterior

    return posterior if isinstance(posterior, LaplacePosterior) else None


def _matrix(posterior: GaussianPosterior) -> Structure:
    """The stored matrix: the curvature, or the precision if the prior is not stored separately."""
    laplace = _as_laplace(posterior)
    return posterior.precision if laplace is None else laplace.curvature.structure


def _prior_per_weight(posterior: LaplacePosterior) -> Tensor:
    """`δ` of each weight; under sharding, of this process's weights.  # [P]"""
    δ = posterior.prior_precision.detach()
    full = δ if δ.shape in ((), posterior.mean.shape) else per_parameter(δ, posterior.subset)
    return full.expand_as(posterior.mean)


def _form_name(matrix: Structure) -> str:
    return (matrix.name or type(matrix).__name__).lower()


def _bounds(values: Tensor | None) -> tuple[float, float] | None:
    if values is None or not values.numel():
        return None
    least, most = values.aminmax()
    return float(least), float(most)


def _range(bounds: tuple[float, float] | None) -> str:
    if bounds is None:
        return NOTHING
    least, most = (f"{bound:.4g}" for bound in bounds)
    return least if least == most else f"{least}…{most}"


def _names(parameters: tuple[str, ...]) -> str:
    """Write `0.weight, 0.bias` as `0: weight, bias`, shortened to one line."""
    layers: dict[str, list[str]] = {}
    for name in parameters:
        layers.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
    parts = [f"{layer}: {', '.join(names)}" if layer else ", ".join(names) for layer, names in layers.items()]
    return "; ".join(parts) if len(parts) < 3 else f"{parts[0]}; … ({len(layers)} layers)"


def _table(rows: Iterator[list[str]]) -> Iterator[str]:
    """Align the first three columns to the left, and numbers to the right."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.ljust(w) if n < 3 else cell.rjust(w) for n, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
