"""What `trainer.predict` runs: the posterior's predictions, the module's own `predict_step`, or both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from lightning_bayes.network.errors import NetworkError
from lightning_bayes.trainer.module import ModuleError, ReplacedMethod, call_step, split_batch
from lightning_bayes.trainer.private import is_default_predict_step

USER = "user"  # key of the module's own output beside the predictions


class PredictStep(ReplacedMethod):
    """`run` instead of `module.predict_step`, from `install` to `remove`.

    A batch's answer is one `Prediction`; of several callbacks `{name: Prediction}`; and if one of them wants "both",
    also what the module's own step returns, under "user".
    """

    def __init__(self, module: LightningModule, callbacks: list[Any]) -> None:
        super().__init__(module, "predict_step")
        self._callbacks = callbacks
        self._both = any(callback.use.predict_step == "both" for callback in callbacks)
        if self._both and USER in [callback.name for callback in callbacks]:
            raise ValueError(
                f"predict_step='both' returns the output of your own predict_step under {USER!r}: give the callback "
                "another name="
            )

    def say_replaced(self) -> bool:
        """Whether a `predict_step` of the user's own is not run; then that is said."""
        if self._both or is_default_predict_step(self.original):
            return False
        rank_zero_info(
            f"{self._callbacks[0].name}: predict returns the posterior's predictions instead of "
            f"{type(self._module).__name__}.predict_step (predict_step='both' returns its output too, 'keep' it alone)"
        )
        return True

    def run(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        x, _ = split_batch(self._module, batch, predicting=True)
        answers: dict[str, Any] = {}
        if self._both:
            answers[USER] = call_step(self.original, batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)
        try:
            answers.update({callback.name: callback.predict(x) for callback in self._callbacks})
        except NetworkError as error:
            if not isinstance(batch, Mapping) or hasattr(self._module, "split_batch"):
                raise
            raise ModuleError(
                f"a batch has {', '.join(map(repr, batch))}, which the network cannot take: give "
                f"{type(self._module).__name__} a method split_batch(self, batch) that returns (x, None)"
            ) from error
        return answers if len(answers) > 1 else next(iter(answers.values()))
