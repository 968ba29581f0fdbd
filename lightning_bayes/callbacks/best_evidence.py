"""What learning by the marginal likelihood keeps: priors and noise, and the weights with the best evidence.

Numbers and tensors only, which a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Hyperparameters:
    prior_precision: dict[str, float] = field(default_factory=dict)  # δ_l, by the layer's name
    noise: float = 1.0  # σ/σ₀, relative to the likelihood that was given


@dataclass(frozen=True)
class BestEvidence:
    """The largest evidence so far, with the hyperparameters and weights that it belongs to."""

    log_evidence: float
    hyperparameters: Hyperparameters
    parameters: tuple[str, ...]  # that it is the evidence of; that of others is no larger or smaller
    weights: dict[str, Tensor]  # parameters and buffers of the module, copied to the CPU

    @staticmethod
    def of(
        module: nn.Module, log_evidence: float, hyperparameters: Hyperparameters, parameters: tuple[str, ...]
    ) -> BestEvidence:
        weights = {name: t.detach().cpu().clone() for name, t in _tensors(module).items()}
        return BestEvidence(log_evidence, hyperparameters, parameters, weights)

    @torch.no_grad()
    def restore(self, module: nn.Module) -> None:
        """Put the weights back."""
        for name, t in _tensors(module).items():
            t.copy_(self.weights[name])

    def state(self) -> dict[str, Any]:
        return {
            "log_evidence": self.log_evidence,
            "hyperparameters": asdict(self.hyperparameters),
            "parameters": self.parameters,
            "weights": self.weights,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> BestEvidence:
        return BestEvidence(**{**state, "hyperparameters": Hyperparameters(**state["hyperparameters"])})


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
