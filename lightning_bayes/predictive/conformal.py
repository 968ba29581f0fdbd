"""Sets of classes and intervals that hold the target with a promised probability, whatever the model is worth.

Split conformal prediction (Vovk, Gammerman & Shafer 2005; Papadopoulos et al. 2002): on `n` held-out examples take the
scores `sᵢ` of the true targets (see `conformal_scores`), and their quantile

    q = the ⌈(n + 1)·level⌉-th smallest of s₁ … sₙ, or ∞ if there are fewer.

A set holds all targets with a score of at most `q`. If the held-out examples and a new one are exchangeable, and the
model has not seen them before, the set holds the new target with probability `level` at least, and, without ties, at
most `level + 1/(n + 1)`. This is an average over examples and over held-out data, not a promise for each input.

**Several outputs** (of a regression, or yes/no labels) have a quantile each: the promise is made for each by itself.

**Dense outputs**: the positions of one example are not exchangeable, examples are. With `Fᵢ(q)` the share of example
`i`'s positions whose score is at most `q`, the smallest `q` with `Σᵢ Fᵢ(q) ≥ (n + 1)·level` promises that of a new
example's positions a share of `level` is held on average (conformal risk control, Angelopoulos et al. 2024). With one
position it is the quantile above.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import between, flag, instance, integer
from lightning_bayes.metrics.functional.inputs import accumulation_dtype
from lightning_bayes.network import DataError, inputs
from lightning_bayes.network.borrowed import generator_on, preserved_rng
from lightning_bayes.network.checks import check_loader
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.files import describe, read, write
from lightning_bayes.posterior.used_data import example_hashes, share_used
from lightning_bayes.predictive.conformal_quantile import TargetScores
from lightning_bayes.predictive.conformal_scores import ClassScore, by_output, class_probs, n_outputs
from lightning_bayes.predictive.ensemble import DeepEnsemble
from lightning_bayes.predictive.prediction import Prediction

FORMAT = 1
USED = 0.05  # the share of examples used before that is worth a warning
PURPOSES = {"fit": "fitted to", "tuning": "tuned on", "calibration": "calibrated on"}
Predictor = GaussianPosterior | DeepEnsemble


@dataclass(frozen=True, eq=False)
class Conformal:
    """Sets or intervals that hold the target with probability `level`.

    `posterior.conformalize(loader, level)` makes one, and `Conformal.fit(prediction, y, level)` makes one from any
    `Prediction`, such as that of `trainer.predict`. It has to be applied to predictions that are made in the same way.
    """

    quantile: Tensor = field(repr=False)  # of the scores of each output, float64 [K]
    level: float
    n_data: int  # held-out examples
    kind: str  # of predictions
    score: ClassScore | None = None  # None: |y − m| / s of real targets
    allow_empty: bool = False
    predictor: Predictor | None = field(default=None, repr=False)
    how: dict[str, Any] = field(default_factory=dict, repr=False)  # it predicts

    @staticmethod
    def fit(
        prediction: Prediction,
        y: Tensor,
        level: float = 0.9,
        method: str = "aps",
        *,
        randomised: bool = True,
        penalty: float = 0.01,
        free_classes: int = 5,
        allow_empty: bool = False,
        seed: int = 0,
        ignore_index: int | None = -100,
    ) -> Conformal:
        """From predictions of held-out examples and their targets; for the arguments see `conformalize`."""
        instance("prediction", prediction, Prediction, "a Prediction; Prediction.cat puts batches together")
        if ignore_index is not None:
            integer("ignore_index", ignore_index)
        score = ClassScore(method, randomised, penalty, free_classes, seed)
        scores = TargetScores(score, ignore_index)
        scores.update(prediction, y)
        return _made(scores, score, level, allow_empty)

    def predict(self, x: Any) -> Tensor | tuple[Tensor, Tensor]:
        """`sets` or `interval` of the posterior's predictions at `x`, made as those of the held-out examples were."""
        if self.predictor is None:
            raise PosteriorError(
                "this Conformal was made without a posterior: use sets(prediction) or interval(prediction), or pass "
                "the posterior to Conformal.load"
            )
        prediction = _predict(self.predictor, x, self.how)
        return self.interval(prediction) if self.kind == "regression" else self.sets(prediction)

    def sets(self, prediction: Prediction) -> Tensor:
        """Which classes are in the set; `sets.sum(1)` has their number. Yes/no labels have the classes no and yes in
        dimension 1. The likeliest class is always in it, unless `allow_empty`.  # bool [B, C, …]"""
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
        """Tensors, numbers and strings; the posterior is not among them."""
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
    def from_state_dict(state: dict[str, Any], predictor: Predictor | None = None) -> Conformal:
        """What `state_dict` described; `predict` needs the posterior or ensemble."""
        fields = dict(state) if isinstance(state, dict) else {}
        if fields.pop("format", None) != f"conformal {FORMAT}":
            raise PosteriorError(f"the state holds no Conformal that this version reads: it is {describe(state)}")
        if predictor is not None:
            instance("predictor", predictor, (GaussianPosterior, DeepEnsemble), "a posterior or a DeepEnsemble")
        score = fields.pop("score")
        return Conformal(**fields, score=None if score is None else ClassScore(**score), predictor=predictor)

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as one small file beside the posterior's."""
        write(self.state_dict(), path)

    @staticmethod
    def load(path: str | PathLike[str], predictor: Predictor | None = None) -> Conformal:
        """From a file that `save` wrote."""
        return Conformal.from_state_dict(read(path), predictor)

    def _check(self, prediction: Prediction) -> None:
        instance("prediction", prediction, Prediction, "a Prediction, as posterior.predict gives it")
        if prediction.kind != self.kind:
            raise PosteriorError(f"this Conformal is of {self.kind}, but the prediction is of {prediction.kind}")
        outputs = n_outputs(prediction)
        if outputs != len(self.quantile):
            raise PosteriorError(f"this Conformal is of {len(self.quantile)} outputs, but the prediction has {outputs}")

    def _quantile_like(self, t: Tensor) -> Tensor:
        return self.quantile.to(t.device, accumulation_dtype(t.device)).reshape(1, -1, 1)


def conformalize(
    predictor: Predictor,
    loader: Iterable[Any],
    level: float = 0.9,
    method: str = "aps",
    predictive: str = "glm",
    link: str | None = None,
    samples: int = 100,
    seed: int = 0,
    *,
    randomised: bool = True,
    penalty: float = 0.01,
    free_classes: int = 5,
    allow_empty: bool = False,
) -> Conformal:
    """See `GaussianPosterior.conformalize`; of an ensemble, too."""
    instance("predictor", predictor, (GaussianPosterior, DeepEnsemble), "a posterior or a DeepEnsemble")
    between("level", level, 0, 1, borders=False)
    flag("allow_empty", allow_empty)
    check_loader(loader)
    score = ClassScore(method, randomised, penalty, free_classes, seed)
    how = {"predictive": predictive, "link": link, "samples": samples, "seed": seed}
    members = predictor.posteriors if isinstance(predictor, DeepEnsemble) else [predictor]
    scores, hashes = TargetScores(score, predictor.likelihood.ignore_index), []
    unknown = ""  # the type of inputs that have no hashes
    with preserved_rng(predictor.device):  # a shuffling loader draws from the global generator
        for batch in loader:
            x, y = inputs.split_targets(members[0].network, batch, "calib")
            prediction = _predict(predictor, x, how)
            scores.update(prediction, y.to(predictor.device))
            hashes.append(example_hashes(x, y).cpu())
            if len(y) and not len(hashes[-1]):
                unknown = type(batch[0] if isinstance(batch, (tuple, list)) else batch).__name__
    if not hashes:
        raise DataError("the held-out data are empty: conformal sets need at least one batch of (x, y)")
    _warn_of_used(members, torch.cat(hashes))
    if unknown:
        warnings.warn(
            f"whether these examples were used before cannot be told for inputs of type {unknown}: the level is "
            "promised only with examples that were used for nothing else",
            stacklevel=3,
        )
    return replace(_made(scores, score, level, allow_empty), predictor=predictor, how=how)


def _made(scores: TargetScores, score: ClassScore, level: float, allow_empty: bool) -> Conformal:
    between("level", level, 0, 1, borders=False)
    flag("allow_empty", allow_empty)
    n = scores.n_examples
    if not n:
        raise DataError("no held-out target counts: there are none, or all are marked as unknown (ignore_index)")
    quantile = scores.quantile(level)
    if quantile.isinf().any():
        result = "intervals are infinite" if scores.kind == "regression" else "sets hold all classes"
        fewest = math.ceil(level / (1 - level) - 1e-6)
        warnings.warn(
            f"{n} held-out examples cannot promise a level of {level:g}, so {result}: hold out at least {fewest}",
            stacklevel=4,
        )
    kept = None if scores.kind == "regression" else score
    return Conformal(quantile, float(level), n, scores.kind, kept, allow_empty)


def _predict(predictor: Predictor, x: Any, how: dict[str, Any]) -> Prediction:
    generator = generator_on(predictor.device).manual_seed(how["seed"])
    return predictor.predict(x, how["predictive"], how["link"], how["samples"], generator)


def _warn_of_used(members: Iterable[GaussianPosterior], hashes: Tensor) -> None:
    for purpose, words in PURPOSES.items():
        shares = [share_used(hashes, kept) for m in members if (kept := m.used_data.get(purpose)) is not None]
        if max(shares, default=0.0) > USED:
            warnings.warn(
                f"about {max(shares):.0%} of these examples are among those that the posterior was {words}: the level "
                "is promised only with examples that were used for nothing else; hold out others",
                stacklevel=4,
            )
