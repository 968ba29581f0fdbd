"""What the DDP tests compare: the same training on any number of processes, and with accumulation.

    python variational_ddp_worker.py FOLDER WORLD

is one process of `WORLD`, its place in `LOCAL_RANK`; it leaves its results as `FOLDER/rank<r>.pt`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from variational_cases import VI, VL, dataset, options, spread, trainer

N, BATCH = 16, 8  # examples, and of them in one optimizer step
MANY, EPOCHS = 64, 8  # for averages over the labels that are drawn


def fit(
    folder: Path, world: int, module: Any, accumulate: int = 1, epochs: int = 2, n: int = N, **more: Any
) -> dict[str, Any]:
    data = dataset(n=n)
    # Lightning would shuffle: here every optimizer step sees the same examples on any number of processes.
    mine = DistributedSampler(data, world, int(os.environ.get("LOCAL_RANK", 0)), shuffle=False)
    shared = {"devices": world, "strategy": "ddp", "use_distributed_sampler": False} if world > 1 else {}
    run = trainer(folder, max_epochs=epochs, accumulate_grad_batches=accumulate, **shared, **more)
    run.fit(module, DataLoader(data, BATCH // world // accumulate, sampler=mine))
    return {
        "weights": {name: t.detach().clone() for name, t in module.state_dict().items()},
        "logged": {key: float(value) for key, value in run.callback_metrics.items()},
        "n_data": module.posterior.n_data,
    }


class Spy(VL):
    """Keeps the squared-gradient term's gradient in log σ at every step, as the optimizer gets it; moves nothing."""

    def on_fit_start(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        log_σ = self.log_sigma["net.1.weight"]
        kl = 0.7 / MANY * ((2 * log_σ.detach()).exp() / 0.8**2 - 1)
        assert log_σ.grad is not None
        self.seen.append(log_σ.grad - kl)


def run(folder: Path, world: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for accumulate in (1, 2):
        # Without a spread there is no squared-gradient term: the likelihood and the KL divergence are left.
        narrow = spread(VL("mlp", variational=options(n_data=None)), centre=-30)
        results[f"narrow/{accumulate}"] = fit(folder, world, narrow, accumulate)
        # Training that moves nothing shows the squared-gradient term over many draws.
        still = spread(Spy("mlp", lr=0.0, variational=options(n_data=None)), centre=-1)
        found = fit(folder, world, still, accumulate, epochs=EPOCHS, n=MANY)
        results[f"still/{accumulate}"] = {**found, "gradients": torch.stack(still.seen)}
    results["fd"] = fit(
        folder, world, spread(VL("residual", variational=options(method="finite_difference")), centre=-2)
    )
    results["exact"] = fit(folder, world, spread(VL("residual", variational=options(method="exact")), centre=-2))
    results["vi"] = fit(folder, world, spread(VI("mlp", variational=options())))
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    torch.save(run(where, int(sys.argv[2])), where / f"rank{os.environ['LOCAL_RANK']}.pt")
