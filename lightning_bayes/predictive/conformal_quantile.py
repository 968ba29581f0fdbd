"""The scores of held-out targets, and their quantile: the formulas are at the head of `conformal`."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.arguments import instance
from lightning_bayes.network import DataError
from lightning_bayes.predictive.conformal_scores import ClassScore, by_output, class_probs, n_outputs
from lightning_bayes.predictive.prediction import Prediction, real_targets, unfit_targets

POSITIONS = 4096  # of a dense example that are scored, drawn at random


class TargetScores:
    """The scores of held-out targets, batch after batch."""

    def __init__(self, score: ClassScore, ignore_index: int | None) -> None:
        self._score, self._ignore_index = score, ignore_index
        self._of = ("", 0)  # the kind of predictions, and their outputs
        self._scores: list[Tensor] = []  # float64 [B·R, K]
        self._weights: list[Tensor] = []  # 1/R, or 0 without a target
        self._examples: list[Tensor] = []  # with a target [K]
        self._generator = torch.Generator().manual_seed(score.seed)

    @property
    def kind(self) -> str:
        return self._of[0]

    @property
    def n_examples(self) -> int:
        """Those with a target."""
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
            raise DataError("held-out predictions or targets hold NaN or infinity: leave these examples out")
        positions = known.sum(2, keepdim=True)  # [B, K, 1]
        weights = known.double() / positions.clamp_min(1)
        for parts, t in ((self._scores, scores), (self._weights, weights)):
            parts.append(t.double().movedim(1, 2).flatten(0, 1))
        self._examples.append((positions > 0).sum((0, 2)))

    def quantile(self, level: float) -> Tensor:
        """The smallest `q` of each output with `Σᵢ Fᵢ(q) ≥ (n + 1)·level`; infinity without one.  # [K]"""
        scores, order = torch.cat(self._scores).sort(dim=0)  # [N·R, K]
        held = torch.cat(self._weights).gather(0, order).cumsum(0)
        n = torch.stack(self._examples).sum(0)  # [K]
        enough = held >= (n + 1) * (level - 1e-9)  # but for rounding
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
        """Those that are scored.  # of [B, K, R, …]"""
        R = t.shape[2]
        if R <= POSITIONS:
            return slice(None)
        return torch.randperm(R, generator=self._generator, device="cpu")[:POSITIONS].to(t.device)
