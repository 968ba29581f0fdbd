"""Conformal prediction: sets of classes and intervals with guaranteed coverage, however good or bad the model is.

Split conformal prediction (Vovk, Gammerman & Shafer 2005; Papadopoulos et al. 2002): compute the scores
`sᵢ` of the true targets of `n` held-out examples, and their quantile

    q = the ⌈(n + 1)·level⌉-th smallest of s₁ … sₙ, or ∞ if there are fewer scores.

A set holds all targets with a score of at most `q`. If the held-out examples and a new one are exchangeable, and the
model has not seen them before, the set contains the new target with probability at least `level` and, without ties, at
most `level + 1/(n + 1)`. This holds on average over examples and held-out data, not for each input.

**Several outputs** (of a regression, or yes/no labels) have one quantile each, and the guarantee holds for each output
separately.

**Dense outputs**: examples are exchangeable, but the positions of one example are not. Let `Fᵢ(q)` be the share of
example `i`'s positions whose score is at most `q`. For the smallest `q` with `Σᵢ Fᵢ(q) ≥ (n + 1)·level`, the sets
contain the target at a share `level` of a new example's positions on average (conformal risk control, Angelopoulos et
al. 2024). With one position, this is the quantile above.

**Scores.** Less likely classes have larger scores. With the classes sorted by falling probability, `k` the rank of
class `c`, and `u` a uniform random number of the example, the score of `c` is

- `"aps"`: `p₍₁₎ + … + p₍ₖ₋₁₎ + u·p₍ₖ₎` (Romano, Sesia & Candès 2020, "Classification with valid and adaptive
  coverage"), or `u = 1` if sets are not randomised;
- `"raps"`: the same plus `λ max(k − k₀, 0)` (Angelopoulos et al. 2021, "Uncertainty sets for image classifiers using
  conformal prediction"), which keeps unlikely classes out of sets, with `λ = penalty` and `k₀ = free_classes`;
- `"lac"`: `1 − p_c` (Sadinle, Lei & Wasserman 2019, "Least ambiguous set-valued classifiers"): the smallest sets on
  average, but possibly with low coverage of difficult examples.

If the classes before `c` have all but a millionth of the probability, `"aps"` could only distinguish the rest by
rounding errors, and a network that is often wrong and certain would get sets of all classes. In that case, `10⁻⁶ k` is
added to the score. The score of a real target `y` is `|y − m| / s`, where `m` and `s` are the mean and the standard
deviation of its prediction.

`u` is computed from a seed and the bits of the example's log-probabilities, rounded to half precision. A score is
therefore a function of the example: it does not depend on the batch, and is exchangeable if examples are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from typing import Any, get_args

import torch
from torch import Tensor

from lightning_bayes.arguments import between, count, flag, instance, integer, not_negative, to_plain, word
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.likelihoods.base import log_probability
from lightning_bayes.metrics.functional.statistics import accumulation_dtype
from lightning_bayes.network import DataError, inputs
from lightning_bayes.network.borrowed import generator_on, preserved_rng
from lightning_bayes.network.float64 import running_sum
from lightning_bayes.network.loaders import check_loader
from lightning_bayes.network.messages import warn
from lightning_bayes.network.processes import as_bits, hashed, unit
from lightning_bayes.options.predictive import ConformalScore, PredictiveOption, PredictiveWord, predictive_option
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.files import describe, read, write
from lightning_bayes.posterior.gaussian import implements
from lightning_bayes.predictive.draws import SharedDraws
from lightning_bayes.predictive.mixture import PREDICTORS, Predictor
from lightning_bayes.predictive.prediction import Prediction, mean_of, real_targets, unfit_targets

FORMAT = 1
AnyPredictor = GaussianPosterior | Predictor


@dataclass(frozen=True, eq=False)
class Conformal:
    """Sets or intervals that contain the target with probability `level`.

    `posterior.conformalize(loader, level)` makes one, and `Conformal.fit(prediction, y, level)` makes one from any
    `Prediction`, such as one of `trainer.predict`. Apply it only to predictions that are made in the same way as those
    of the held-out examples.
    """

    quantile: Tensor = field(repr=False)  # quantile of the scores of each output, float64 [K]
    level: float
    n_data: int  # number of held-out examples
    kind: str  # kind of the predictions
    score: ClassScore | None = None  # None: |y − m| / s of real targets
    allow_empty: bool = False
    predictor: AnyPredictor | None = field(default=None, repr=False)
    how: dict[str, Any] = field(default_factory=dict, repr=False)  # arguments of `predict`

    @staticmethod
    def fit(
        prediction: Prediction,
        y: Tensor,
        level: float = 0.9,
        method: ConformalScore = "aps",
        *,
        randomised: bool = True,
        penalty: float = 0.01,
        free_classes: int = 5,
        allow_empty: bool = False,
        seed: int = 0,
        ignore_index: int | None = -100,
    ) -> Conformal:
        """Make sets from predictions of held-out examples and their targets; for the arguments see `conformalize`."""
        instance("prediction", prediction, Prediction, "a Prediction; Prediction.cat joins batches")
        if ignore_index is not None:
            integer("ignore_index", ignore_index)
        score = ClassScore(method, randomised, penalty, free_classes, seed)
        scores = TargetScores(score, ignore_index)
        scores.update(prediction, y)
        return _made(scores, score, level, allow_empty)

    def predict(self, x: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Predict at `x` in the same way as for the held-out examples, and return `sets` or `interval` of the
        result."""
        if self.predictor is None:
            raise PosteriorError(
                "this Conformal has no posterior: use sets(prediction) or interval(prediction), or pass "
                "the posterior to Conformal.load"
            )
        prediction = _predict(self.predictor, x, self.how, generator_on(self.predictor.device))
        return self.interval(prediction) if self.kind == "regression" else self.sets(prediction)

    def sets(self, prediction: Prediction) -> Tensor:
        """A mask of the classes in the set; `sets.sum(1)` counts them. Yes/no labels have the classes no and yes in
        dimension 1. The likeliest class is always in the set, unless `allow_empty`.  # bool [B, C, …]"""
        if self.kind == "regression":
            raise PosteriorError("real targets have intervals, not sets: use interval(prediction)")
        self._check(prediction)
        assert self.score is not None
        assert prediction.probs is not None
        probs = class_probs(prediction)
        member = self.score.of_classes(probs) <= self._quantile_like(probs).unsqueeze(-1)  # [B, K, R, C]
        if not self.allow_empty:
            member = member.scatter(-1, probs.argmax(-1, keepdim=True), True)
        if prediction.kind == "classification":
            return member[:, 0].mT.reshape(prediction.probs.shape)
        B, *outputs = prediction.probs.shape
        return member.movedim(-1, 1).reshape(B, 2, *outputs)

    def interval(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """Lower and upper ends, `m ± q·s`.  # [B, …] each"""
        if self.kind != "regression":
            raise PosteriorError("classes have sets, not intervals: use sets(prediction)")
        self._check(prediction)
        mean, std = prediction.mean, prediction.std
        assert mean is not None
        q = self._quantile_like(by_output(std)).to(std.dtype)
        half = (q * by_output(std)).reshape(std.shape)
        return mean - half, mean + half

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings, without the posterior."""
        return {
            "format": f"conformal {FORMAT}",
            "quantile": self.quantile,
            "level": self.level,
            "n_data": self.n_data,
            "kind": self.kind,
            "score": None if self.score is None else asdict(self.score),
            "allow_empty": self.allow_empty,
            "how": dict(self.how),
        }

    @staticmethod
    def from_state_dict(state: dict[str, Any], predictor: AnyPredictor | None = None) -> Conformal:
        """Restore a `state_dict`; `predict` also needs the posterior or ensemble."""
        fields = dict(state) if isinstance(state, dict) else {}
        if fields.pop("format", None) != f"conformal {FORMAT}":
            raise PosteriorError(f"this version cannot read a Conformal from the state: it is {describe(state)}")
        if predictor is not None:
            instance("predictor", predictor, (GaussianPosterior, Predictor), PREDICTORS)
        score = fields.pop("score")
        return Conformal(**fields, score=None if score is None else ClassScore(**score), predictor=predictor)

    def save(self, path: str | PathLike[str]) -> None:
        """Save to a small file; the posterior has its own file."""
        write(self.state_dict(), path)

    @staticmethod
    def load(path: str | PathLike[str], predictor: AnyPredictor | None = None) -> Conformal:
        """Load a file that `save` wrote."""
        return Conformal.from_state_dict(read(path), predictor)

    def _check(self, prediction: Prediction) -> None:
        instance("prediction", prediction, Prediction, "a Prediction, as posterior.predict returns")
        if prediction.kind != self.kind:
            raise PosteriorError(f"this Conformal is for {self.kind}, but the prediction is of {prediction.kind}")
        outputs = n_outputs(prediction)
        if outputs != len(self.quantile):
            raise PosteriorError(
                f"this Conformal is for {len(self.quantile)} outputs, but the prediction has {outputs}"
            )

    def _quantile_like(self, t: Tensor) -> Tensor:
        return self.quantile.to(t.device, accumulation_dtype(t.device)).reshape(1, -1, 1)


@implements("conformalize", sharded=True)
def conformalize(
    predictor: AnyPredictor,
    loader: Iterable[Any],
    level: float = 0.9,
    method: ConformalScore = "aps",
    predictive: PredictiveWord | PredictiveOption = "glm",
    *,
    seed: int = 0,
    randomised: bool = True,
    penalty: float = 0.01,
    free_classes: int = 5,
    allow_empty: bool = False,
) -> Conformal:
    """See `GaussianPosterior.conformalize`. The predictor may be an ensemble or another `Predictor`."""
    instance("predictor", predictor, (GaussianPosterior, Predictor), PREDICTORS)
    between("level", level, 0, 1, borders=False)
    flag("allow_empty", allow_empty)
    check_loader(loader)
    score = ClassScore(method, randomised, penalty, free_classes, seed)
    how = {"predictive": to_plain(predictive_option(predictive)), "seed": seed}
    scores, is_empty = TargetScores(score, predictor.likelihood.ignore_index), True
    draws = SharedDraws(predictor.device)
    with preserved_rng(predictor.device):  # a shuffling loader draws from the global generator
        for batch in loader:
            x, y = inputs.split_targets(predictor.network, batch, "calib")
            prediction = _predict(predictor, x, how, draws)
            scores.update(prediction, y.to(predictor.device))
            is_empty = False
    if is_empty:
        raise DataError("the held-out data are empty: conformal sets need at least one batch of (x, y)")
    return replace(_made(scores, score, level, allow_empty), predictor=predictor, how=how)


def _made(scores: TargetScores, score: ClassScore, level: float, allow_empty: bool) -> Conformal:
    between("level", level, 0, 1, borders=False)
    flag("allow_empty", allow_empty)
    n = scores.n_examples
    if not n:
        raise DataError("there are no held-out targets: all are missing or marked as unknown (ignore_index)")
    quantile = scores.quantile(level)
    if quantile.isinf().any():
        result = "intervals are infinite" if scores.kind == "regression" else "sets hold all classes"
        fewest = math.ceil(level / (1 - level) - 1e-6)
        warn(f"{n} held-out examples cannot guarantee a level of {level:g}, so {result}: hold out at least {fewest}")
    kept = None if scores.kind == "regression" else score
    return Conformal(quantile, float(level), n, scores.kind, kept, allow_empty)


def _predict(predictor: AnyPredictor, x: Any, how: dict[str, Any], generator: torch.Generator) -> Prediction:
    return predictor.predict(x, how["predictive"], generator=generator.manual_seed(how["seed"]))


POSITIONS = 4096  # randomly drawn positions of a dense example that are scored


class TargetScores:
    """Collects the scores of held-out targets over batches."""

    def __init__(self, score: ClassScore, ignore_index: int | None) -> None:
        self._score, self._ignore_index = score, ignore_index
        self._of = ("", 0)  # kind of the predictions, and number of outputs
        self._scores: list[Tensor] = []  # float64 [B·R, K]
        self._weights: list[Tensor] = []  # 1/(positions with a target), or 0 at a position without a target [B·R, K]
        self._examples: list[Tensor] = []  # number of examples with a target, for each batch [K]
        self._generator = torch.Generator().manual_seed(score.seed)

    @property
    def kind(self) -> str:
        return self._of[0]

    @property
    def n_examples(self) -> int:
        """The number of examples with a target."""
        return int(torch.stack(self._examples).sum(0).min()) if self._examples else 0

    def update(self, prediction: Prediction, y: Tensor) -> None:
        instance("y", y, Tensor, "a tensor of targets")
        of = (prediction.kind, n_outputs(prediction))
        if self._scores and of != self._of:
            raise DataError(f"batches differ: {self._of[1]} outputs of {self._of[0]}, then {of[1]} of {of[0]}")
        self._of = of
        scored = (self._of_real if self.kind == "regression" else self._of_classes)(prediction, y)
        scores, known = (t.cpu() for t in scored)  # [B, K, R]
        if not scores[known].isfinite().all():
            raise DataError("held-out predictions or targets contain NaN or infinity: leave these examples out")
        positions = known.sum(2, keepdim=True)  # [B, K, 1]
        weights = known.double() / positions.clamp_min(1)
        for parts, t in ((self._scores, scores), (self._weights, weights)):
            parts.append(t.double().movedim(1, 2).flatten(0, 1))
        self._examples.append((positions > 0).sum((0, 2)))

    def quantile(self, level: float) -> Tensor:
        """The smallest `q` of each output with `Σᵢ Fᵢ(q) ≥ (n + 1)·level`; infinity if there is no such q.  # [K]"""
        scores, order = torch.cat(self._scores).sort(dim=0)  # [N·R, K]
        held = torch.cat(self._weights).gather(0, order).cumsum(0)
        n = torch.stack(self._examples).sum(0)  # [K]
        enough = held >= (n + 1).double() * (level - 1e-9)  # up to rounding, which float32 would not resolve
        first = enough.double().argmax(0, keepdim=True)
        return torch.where(enough.any(0), scores.gather(0, first)[0], torch.inf)

    def _of_real(self, prediction: Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and whether there is a target.  # [B, K, R] each"""
        mean, std = prediction.mean, prediction.std
        assert mean is not None
        if not y.is_floating_point():
            raise unfit_targets(mean, y, "real targets", mean.shape)
        scores = by_output((real_targets(mean, y).to(mean) - mean).abs() / std)
        scores = scores[:, :, self._positions(scores)]
        return scores, torch.ones_like(scores, dtype=torch.bool)

    def _of_classes(self, prediction: Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
        probs, whole, is_binary = class_probs(prediction), prediction.probs, prediction.kind == "binary"
        assert whole is not None
        shape = whole.shape if is_binary else whole.shape[:1] + whole.shape[2:]
        if y.shape != shape or y.is_complex():
            raise unfit_targets(whole, y, "class labels", shape)
        positions, C = self._positions(probs), probs.shape[-1]
        y = y.to(whole.device)
        labels = (by_output(y) if is_binary else y.reshape(len(y), 1, -1 if y.numel() else 1))[:, :, positions]
        ignored = None if is_binary else self._ignore_index
        known = torch.ones_like(labels, dtype=torch.bool) if ignored is None else labels != ignored
        wrong = known & ((labels < 0) | (labels >= C) | (labels != labels.long()))
        if wrong.any():
            raise DataError(f"targets must be classes from 0 to {C - 1}, got {labels[wrong][0].item()}")
        index = labels.long().masked_fill(~known, 0).unsqueeze(-1)
        return self._score.of_classes(probs[:, :, positions]).gather(-1, index).squeeze(-1), known

    def _positions(self, t: Tensor) -> Tensor | slice:
        """Indices along the `R` dimension of `t` (`[B, K, R, …]`) to score: all of them, or a random subset of
        `POSITIONS` if there are more."""
        R = t.shape[2]
        if R <= POSITIONS:
            return slice(None)
        return torch.randperm(R, generator=self._generator, device="cpu")[:POSITIONS].to(t.device)


CERTAIN = 1e-6  # remaining probability below which ranks count, and the weight of a rank


@dataclass(frozen=True)
class ClassScore:
    """A score of classes, with its settings."""

    method: ConformalScore = "aps"
    randomised: bool = True
    penalty: float = 0.01
    free_classes: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        word("method", self.method, get_args(ConformalScore))
        flag("randomised", self.randomised)
        not_negative("penalty", self.penalty)
        count("free_classes", self.free_classes, 0)
        check_seed("seed", self.seed)

    def of_classes(self, probs: Tensor) -> Tensor:
        """The scores of all classes.  # [..., C] -> [..., C]"""
        if self.method == "lac":
            return 1 - probs
        p, order = probs.sort(dim=-1, descending=True, stable=True)
        u = self._uniform(probs).unsqueeze(-1) if self.randomised else 1.0
        before = running_sum(p, -1) - p
        rank = torch.arange(1, p.shape[-1] + 1, dtype=p.dtype, device=p.device)
        scores = before + u * p + CERTAIN * rank * (before > 1 - CERTAIN)
        if self.method == "raps":
            scores = scores + self.penalty * (rank - self.free_classes).clamp_min(0)
        return torch.empty_like(scores).scatter_(-1, order, scores)

    def _uniform(self, probs: Tensor) -> Tensor:
        rows = log_probability(probs).half().reshape(-1, probs.shape[-1])
        return unit(hashed(as_bits(rows), self.seed), probs.dtype).reshape(probs.shape[:-1])


def class_probs(prediction: Prediction) -> Tensor:
    """The probabilities as `[B, K, R, C]`: `K` separate labels (`K = 1` for classification) at `R` positions."""
    probs = prediction.probs
    assert probs is not None
    probs = probs.to(accumulation_dtype(probs.device))
    if prediction.kind == "classification":
        return probs.flatten(2).mT.unsqueeze(1) if probs.ndim > 2 else probs[:, None, None]
    p = by_output(probs)
    return torch.stack([1 - p, p], dim=-1)


def by_output(t: Tensor) -> Tensor:
    """`t` as `[B, K, R]`: `K` outputs at `R` positions."""
    return t.flatten(2) if t.ndim > 2 else t.reshape(*t.shape, *[1] * (3 - t.ndim))


def n_outputs(prediction: Prediction) -> int:
    """The number of quantiles; the classes of one label share a quantile."""
    mean = mean_of(prediction)
    return 1 if prediction.kind == "classification" or mean.ndim == 1 else mean.shape[1]
