"""Back-propagation of the GGN's diagonal (Laplacian autoencoders, section 3 and appendix E)."""

from lightning_bayes.curvature.backprop.diagonal import MODES, BatchDiagonal, choose_mode
from lightning_bayes.curvature.backprop.op import RuleError

__all__ = ["MODES", "BatchDiagonal", "RuleError", "choose_mode"]
