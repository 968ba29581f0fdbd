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

**Classes separately** (Mondrian; Vovk, Gammerman & Shafer 2005): with `per_class`, each class has the quantile of the
held-out examples of that class, and the guarantee holds for the examples of each class. Of dense outputs, `Fᵢ` is then
a share of example `i`'s positions of this class, in the examples that have the class.

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
added to the score.

The score of a real target `y` is `|y − m| / s`, where `m` and `s` are the mean and the standard deviation of its
prediction: intervals are stretched by a factor. Conformalised quantile regression (Romano, Patterson & Candès 2019)
moves the ends of an interval `[l, u]` instead, that of the prediction at the same level or two quantiles that a network
predicts:

- `"cqr"`: `max(l − y, y − u)`, with the interval `[l − q, u + q]`, eqs. (6) to (8);
- `"cqr_asymmetric"`: `l − y` and `y − u` are two scores with a quantile each, at the level `1 − α/2` for
  `level = 1 − α` (theorem 2), so that each end moves by its own amount.

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

from lightning_bayes.arguments import (
    between,
    count,
    flag,
    format_names,
    format_value,
    instance,
    integer,
    not_negative,
    to_plain,
    word,
)
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

FORMAT = 2
CQR = ("cqr", "cqr_asymmetric")
AnyPredictor = GaussianPosterior | Predictor


Quantiles = tuple[Tensor, Tensor]  # lower and upper ends, [B, …] each


@dataclass(frozen=True, eq=False)
class Conformal:
    """Sets or intervals that contain the target with probability `level`.

    `posterior.conformalize(loader, level)` makes one, and `Conformal.fit(prediction, y, level)` makes one from any
    `Prediction`, such as one of `trainer.predict`. Apply it only to predictions that are made in the same way as those
    of the held-out examples.
    """

    # Quantile of the scores of each output, float64 [K]; with `per_class` [K, C], for both ends of an interval [2, K]
    quantile: Tensor = field(repr=False)
    level: float
    n_data: int  # number of held-out examples
    kind: str  # kind of the predictions, or "quantiles"
    score: Score | None = None  # None: |y − m| / s of real targets
    allow_empty: bool = False
    per_class: bool = False
    predictor: AnyPredictor | None = field(default=None, repr=False)
    how: dict[str, Any] = field(default_factory=dict, repr=False)  # arguments of `predict`

    @staticmethod
    def fit(
        prediction: Prediction | Quantiles,
        y: Tensor,
        level: float = 0.9,
        method: ConformalScore = "aps",
        *,
        randomised: bool = True,
        penalty: float = 0.01,
        free_classes: int = 5,
        allow_empty: bool = False,
        per_class: bool = False,
        seed: int = 0,
        ignore_index: int | None = -100,
    ) -> Conformal:
        """Make sets from predictions of held-out examples and their targets; for the arguments see `conformalize`. A
        pair of tensors `(lower, upper)` instead of a prediction are two quantiles of each target, such as a network
        trained with the pinball loss predicts: intervals are then those of "cqr", or of "cqr_asymmetric"."""
        _check_prediction(prediction, "a Prediction; Prediction.cat joins batches")
        if ignore_index is not None:
            integer("ignore_index", ignore_index)
        score = Score(method, randomised, penalty, free_classes, seed)
        scores = TargetScores(score, level, ignore_index, per_class)
        scores.update(prediction, y)
        return _made(scores, allow_empty)

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
        if self.kind in ("regression", "quantiles"):
            raise PosteriorError("real targets have intervals, not sets: use interval(prediction)")
        self._check(prediction)
        assert self.score is not None
        assert prediction.probs is not None
        probs = class_probs(prediction)
        q = self._on(probs)  # [K] or [K, C]
        q = q[:, None] if self.per_class else q[:, None, None]
        member = self.score.of_classes(probs) <= q  # [B, K, R, C]
        if not self.allow_empty:
            member = member.scatter(-1, probs.argmax(-1, keepdim=True), True)
        if prediction.kind == "classification":
            return member[:, 0].mT.reshape(prediction.probs.shape)
        B, *outputs = prediction.probs.shape
        return member.movedim(-1, 1).reshape(B, 2, *outputs)

    def interval(self, prediction: Prediction | Quantiles) -> tuple[Tensor, Tensor]:
        """Lower and upper ends: `m ± q·s`, or `l − q` and `u + q` of "cqr". An interval of "cqr" is empty, with the
        lower end above the upper, if both move in by more than its length.  # [B, …] each"""
        if self.kind not in ("regression", "quantiles"):
            raise PosteriorError("classes have sets, not intervals: use sets(prediction)")
        self._check(prediction)
        if self.score is None:
            assert isinstance(prediction, Prediction)
            lower = upper = mean_of(prediction)
            scale = prediction.std
        else:
            lower, upper = _ends(prediction, self.level)
            scale = torch.ones_like(lower)
        q = self._on(lower).to(lower.dtype).expand(2, -1)  # of both ends [2, K]
        below, above = ((q_end[:, None] * by_output(scale)).reshape(lower.shape) for q_end in q)
        return lower - below, upper + above

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
            "per_class": self.per_class,
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
        return Conformal(**fields, score=None if score is None else Score(**score), predictor=predictor)

    def save(self, path: str | PathLike[str]) -> None:
        """Save to a small file; the posterior has its own file."""
        write(self.state_dict(), path)

    @staticmethod
    def load(path: str | PathLike[str], predictor: AnyPredictor | None = None) -> Conformal:
        """Load a file that `save` wrote."""
        return Conformal.from_state_dict(read(path), predictor)

    def _check(self, prediction: Prediction | Quantiles) -> None:
        _check_prediction(prediction, "a Prediction, as posterior.predict returns")
        kind, outputs = _kind_of(prediction), _n_outputs(prediction)
        if kind != self.kind:
            raise PosteriorError(f"this Conformal is for {self.kind}, but the prediction is of {kind}")
        own = self.quantile.shape[0 if self.per_class else -1]
        if outputs != own:
            raise PosteriorError(f"this Conformal is for {own} outputs, but the prediction has {outputs}")

    def _on(self, t: Tensor) -> Tensor:
        """The quantiles on the device of `t`."""
        return self.quantile.to(t.device, accumulation_dtype(t.device))


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
    per_class: bool = False,
) -> Conformal:
    """See `GaussianPosterior.conformalize`. The predictor may be an ensemble or another `Predictor`."""
    instance("predictor", predictor, (GaussianPosterior, Predictor), PREDICTORS)
    check_loader(loader)
    score = Score(method, randomised, penalty, free_classes, seed)
    how = {"predictive": to_plain(predictive_option(predictive)), "seed": seed}
    scores, is_empty = TargetScores(score, level, predictor.likelihood.ignore_index, per_class), True
    flag("allow_empty", allow_empty)
    draws = SharedDraws(predictor.device)
    with preserved_rng(predictor.device):  # a shuffling loader draws from the global generator
        for batch in loader:
            x, y = inputs.split_targets(predictor.network, batch, "calib")
            prediction = _predict(predictor, x, how, draws)
            scores.update(prediction, y.to(predictor.device))
            is_empty = False
    if is_empty:
        raise DataError("the held-out data are empty: conformal sets need at least one batch of (x, y)")
    return replace(_made(scores, allow_empty), predictor=predictor, how=how)


def _made(scores: TargetScores, allow_empty: bool) -> Conformal:
    flag("allow_empty", allow_empty)
    n, is_real, level = scores.n_examples, scores.kind in ("regression", "quantiles"), scores.level
    if not n:
        raise DataError("there are no held-out targets: all are missing or marked as unknown (ignore_index)")
    quantile, needed = scores.quantiles(), scores.level_of_scores
    missing, fewest = quantile.isinf(), math.ceil(needed / (1 - needed) - 1e-6)
    if missing.any() and scores.per_class:
        names = [f"{c}" if len(missing) == 1 else f"{c} of output {k}" for k, c in missing.nonzero().tolist()]
        warn(
            f"class {format_names(names)} has too few held-out examples for a level of {level:g}, so every set has "
            f"it: hold out at least {fewest} of each class"
        )
    elif missing.any():
        result = "intervals are infinite" if is_real else "sets hold all classes"
        warn(f"{n} held-out examples cannot guarantee a level of {level:g}, so {result}: hold out at least {fewest}")
    kept = scores.score if scores.of_quantiles or not is_real else None
    return Conformal(quantile, float(level), n, scores.kind, kept, allow_empty, scores.per_class)


def _predict(predictor: AnyPredictor, x: Any, how: dict[str, Any], generator: torch.Generator) -> Prediction:
    return predictor.predict(x, how["predictive"], generator=generator.manual_seed(how["seed"]))


def _check_prediction(prediction: Any, meaning: str) -> None:
    if not isinstance(prediction, tuple):
        instance("prediction", prediction, Prediction, meaning)
    elif len(prediction) != 2 or not all(isinstance(end, Tensor) and end.is_floating_point() for end in prediction):
        raise TypeError(
            f"prediction must be a pair (lower, upper) of floating-point tensors, got {format_value(prediction)}"
        )
    elif prediction[0].shape != prediction[1].shape or not prediction[0].ndim:
        shapes = [list(end.shape) for end in prediction]
        raise ValueError(
            f"prediction must be a pair (lower, upper) of one shape [B, …], got {shapes[0]} and {shapes[1]}"
        )


def _kind_of(prediction: Prediction | Quantiles) -> str:
    return prediction.kind if isinstance(prediction, Prediction) else "quantiles"


def _ends(prediction: Prediction | Quantiles, level: float) -> Quantiles:
    return prediction.interval(level) if isinstance(prediction, Prediction) else prediction


def _n_outputs(prediction: Prediction | Quantiles) -> int:
    """The number of outputs with their own quantiles; the classes of one label are one output."""
    mean = mean_of(prediction) if isinstance(prediction, Prediction) else prediction[0]
    return 1 if _kind_of(prediction) == "classification" or mean.ndim == 1 else mean.shape[1]


POSITIONS = 4096  # randomly drawn positions of a dense example that are scored


class TargetScores:
    """Collects the scores of held-out targets over batches, in groups: those of a class, or a single group."""

    def __init__(self, score: Score, level: float, ignore_index: int | None, per_class: bool) -> None:
        between("level", level, 0, 1, borders=False)
        self.score, self.level, self.per_class = score, level, flag("per_class", per_class)
        self._ignore_index = ignore_index
        self._of = ("", 0)  # kind of the predictions, and number of outputs
        self._scores: list[Tensor] = []  # float64 [B·R, K]; K is twice the number of outputs for "cqr_asymmetric"
        self._groups: list[Tensor] = []  # [B·R, K]
        self._weights: list[Tensor] = []  # 1/(positions of the group), or 0 at a position without a target [B·R, K]
        self._examples: list[Tensor] = []  # number of examples with a target in each group, for each batch [K, G]
        self._n_examples: list[Tensor] = []  # number of examples with a target, for each batch [K]
        self._generator = torch.Generator().manual_seed(score.seed)

    @property
    def kind(self) -> str:
        return self._of[0]

    @property
    def of_quantiles(self) -> bool:
        """Whether the scores are those of "cqr", the only ones of a pair of quantiles."""
        return self.kind == "quantiles" or (self.kind == "regression" and self.score.method in CQR)

    @property
    def level_of_scores(self) -> float:
        """The level of each quantile of the scores."""
        return (1 + self.level) / 2 if self.of_quantiles and self.score.method == "cqr_asymmetric" else self.level

    @property
    def n_examples(self) -> int:
        """The number of examples with a target."""
        return int(torch.stack(self._n_examples).sum(0).min()) if self._n_examples else 0

    def update(self, prediction: Prediction | Quantiles, y: Tensor) -> None:
        instance("y", y, Tensor, "a tensor of targets")
        of = (_kind_of(prediction), _n_outputs(prediction))
        if self._scores and of != self._of:
            raise DataError(f"batches differ: {self._of[1]} outputs of {self._of[0]}, then {of[1]} of {of[0]}")
        self._of, is_real = of, of[0] in ("regression", "quantiles")
        if is_real and self.per_class:
            raise DataError("per_class is for classes, and real targets have none: leave it out")
        if not is_real and self.score.method in CQR:
            raise DataError(f"method={self.score.method!r} is for real targets: use 'aps', 'raps' or 'lac' for classes")
        if isinstance(prediction, Prediction) and not is_real:
            scored = self._of_classes(prediction, y)
        else:
            scored = self._of_real(prediction, y)
        scores, known, classes = (t.cpu() for t in scored)  # [B, K, R]
        if not scores[known].isfinite().all():
            raise DataError("held-out predictions or targets contain NaN or infinity: leave these examples out")
        groups, G = (classes, self._n_classes(prediction)) if self.per_class else (torch.zeros_like(classes), 1)
        positions = known.new_zeros(*known.shape[:2], G, dtype=torch.float64).scatter_add_(2, groups, known.double())
        weights = known / positions.gather(2, groups).clamp_min(1)
        for parts, t in ((self._scores, scores.double()), (self._groups, groups), (self._weights, weights)):
            parts.append(t.movedim(1, 2).flatten(0, 1))
        self._examples.append((positions > 0).sum(0))
        self._n_examples.append(known.any(2).sum(0))

    def quantiles(self) -> Tensor:
        """The smallest `q` of each output (and class) with `Σᵢ Fᵢ(q) ≥ (n + 1)·level`; infinity if there is no such q.
        # [K], [2, K] or [K, C]"""
        scores, order = torch.cat(self._scores).sort(dim=0)  # [N·R, K]
        groups, weights = (torch.cat(parts).gather(0, order) for parts in (self._groups, self._weights))
        n = torch.stack(self._examples).sum(0)  # [K, G]
        columns = []
        for group in range(n.shape[1]):
            held = (weights * (groups == group)).cumsum(0)
            # up to rounding, which float32 would not resolve
            enough = held >= (n[:, group] + 1).double() * (self.level_of_scores - 1e-9)
            first = enough.double().argmax(0, keepdim=True)
            columns.append(torch.where(enough.any(0), scores.gather(0, first)[0], torch.inf))
        quantiles = torch.stack(columns, 1)  # [K, G]
        if self.per_class:
            return quantiles
        return quantiles.view(2, -1) if len(quantiles) > self._of[1] else quantiles[:, 0]

    def _of_real(self, prediction: Prediction | Quantiles, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, whether there is a target, and zeros.  # [B, K, R] each"""
        lower, upper = _ends(prediction, self.level)
        if not y.is_floating_point():
            raise unfit_targets(lower, y, "real targets", lower.shape)
        y = real_targets(lower, y.to(lower.device)).to(lower)
        if not self.of_quantiles:
            assert isinstance(prediction, Prediction)
            scores = by_output((y - mean_of(prediction)).abs() / prediction.std)
        elif self.score.method == "cqr_asymmetric":
            scores = torch.cat([by_output(lower - y), by_output(y - upper)], 1)
        else:
            scores = by_output(torch.maximum(lower - y, y - upper))
        scores = scores[:, :, self._positions(scores)]
        return scores, torch.ones_like(scores, dtype=torch.bool), torch.zeros_like(scores, dtype=torch.long)

    def _of_classes(self, prediction: Prediction, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, whether there is a target, and its class.  # [B, K, R] each"""
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
        classes = labels.long().masked_fill(~known, 0)
        scores = self.score.of_classes(probs[:, :, positions]).gather(-1, classes.unsqueeze(-1)).squeeze(-1)
        return scores, known, classes

    @staticmethod
    def _n_classes(prediction: Prediction | Quantiles) -> int:
        return mean_of(prediction).shape[1] if _kind_of(prediction) == "classification" else 2  # type: ignore[arg-type]

    def _positions(self, t: Tensor) -> Tensor | slice:
        """Indices along the `R` dimension of `t` (`[B, K, R, …]`) to score: all of them, or a random subset of
        `POSITIONS` if there are more."""
        R = t.shape[2]
        if R <= POSITIONS:
            return slice(None)
        return torch.randperm(R, generator=self._generator, device="cpu")[:POSITIONS].to(t.device)


CERTAIN = 1e-6  # remaining probability below which ranks count, and the weight of a rank


@dataclass(frozen=True)
class Score:
    """The choice of a score, with the settings of those of classes."""

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
