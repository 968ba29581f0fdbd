"""Back-propagation of the GGN's diagonal (Laplacian autoencoders, section 3 and appendix E)."""

from lightning_bayes.curvature.diagonal.batch_diagonal import MODES, BatchDiagonal, choose_mode
from lightning_bayes.curvature.diagonal.tape import RuleError

__all__ = ["MODES", "BatchDiagonal", "RuleError", "choose_mode"]
