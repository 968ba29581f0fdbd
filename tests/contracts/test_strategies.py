"""Each method under each strategy that leaves no process with the whole network: what cannot run is refused by name,
before training. `docs/distributed.md` has the table. What runs is tested on real processes, in `tests/callbacks`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import LitNet, loader, trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from posterior_kinds import VariationalInferenceNet, VariationalLaplaceNet, VariationalLastLayerNet

from lightning_bayes import (
    IVONCallback,
    L2MCallback,
    LaplaceCallback,
    MarginalLikelihoodCallback,
    OnlineLaplaceCallback,
    SWAGCallback,
)

DIAGONAL: dict[str, Any] = {"structure": "diag", "curvature": "fisher_mc"}
CALLBACKS: dict[str, Any] = {
    "laplace": lambda: LaplaceCallback(),
    "laplace last layer": lambda: LaplaceCallback(subset="last_layer"),
    "laplace diagonal": lambda: LaplaceCallback(**DIAGONAL, predictive="bnn"),
    "marginal likelihood": lambda: MarginalLikelihoodCallback(),
    "marginal likelihood last layer": lambda: MarginalLikelihoodCallback(subset="last_layer"),
    "online": lambda: OnlineLaplaceCallback("classification"),
    "swag": lambda: SWAGCallback(),
    "l2m": lambda: L2MCallback(),
    "ivon": lambda: IVONCallback(),
}
VARIATIONAL = {
    "variational Laplace": VariationalLaplaceNet,
    "variational inference": VariationalInferenceNet,
    "variational last layer": VariationalLastLayerNet,
}
STRATEGIES = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
RUNS = {  # under ModelParallelStrategy, on real processes
    ("laplace last layer", "ModelParallelStrategy"),
    ("laplace diagonal", "ModelParallelStrategy"),
    ("l2m", "ModelParallelStrategy"),
    ("ivon", "ModelParallelStrategy"),
}
REFUSED = [(method, s) for method in (*CALLBACKS, *VARIATIONAL) for s in STRATEGIES if (method, s) not in RUNS]


@pytest.mark.parametrize(("method", "strategy"), REFUSED)
def test_what_cannot_run_is_refused_before_training(tmp_path: Path, method: str, strategy: str) -> None:
    """By a stand-in of the strategy's name: the real ones need other packages, or several processes."""
    stand_in: Any = type(strategy, (SingleDeviceStrategy,), {})
    kind = VARIATIONAL.get(method)
    module = LitNet() if kind is None else kind("classification", variational={"likelihood": "classification"})
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    callbacks = [CALLBACKS[method]()] if method in CALLBACKS else []
    fit = trainer(tmp_path, *callbacks, strategy=stand_in("cpu"))
    with pytest.raises(RuntimeError, match=rf"{strategy}.*(: use|: leave it out, or use)"):
        fit.fit(module, loader())
    assert fit.global_step == 0
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
