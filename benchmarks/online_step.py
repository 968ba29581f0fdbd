"""How long a step of online Laplace takes, in plain steps of the same convolutional autoencoder.

A step is everything from a batch to the next one in a Trainer: forward and backward pass, Adam, and for online Laplace
also the batch's diagonal, the curvature memory, drawing the sample and restoring the mean. The network is that of
Laplacian autoencoders, appendix A.2, for one-channel images of either size. Memory is what training adds to a process;
the plain step's memory is measured in a separate process.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.isolate import Job
from benchmarks.measure import Result
from benchmarks.networks import Batches, Network
from benchmarks.steps import STEPS, Comparison, Contender, Train, fastest_step, measure, plain_module

TITLE = "A step of online Laplace"
PLAIN = "plain"
CONTENDERS = {"approx": Contender(2.2), "mixed": Contender()}


def autoencoder(side: int, width: int = 64, hidden: tuple[int, int] = (2048, 1024)) -> nn.Module:
    """Two convolutions with pooling and three linear layers to two numbers, and the same mirrored."""
    small = side // 4
    features, (wide, narrow) = width * small**2, hidden
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(features, wide), nn.Tanh(), nn.Linear(wide, narrow), nn.Tanh(), nn.Linear(narrow, 2)),
        *(nn.Linear(2, narrow), nn.Tanh(), nn.Linear(narrow, wide), nn.Tanh(), nn.Linear(wide, features), nn.Tanh()),
        *(nn.Unflatten(1, (width, small, small)), nn.Upsample(scale_factor=2)),
        *(nn.Conv2d(width, width, 3, padding=1), nn.Tanh(), nn.Upsample(scale_factor=2)),
        nn.Conv2d(width, 1, 3, padding=1),
    )


NETWORKS = {
    network.name: network
    for network in (
        Network("autoencoder 28×28", partial(autoencoder, 28), (1, 28, 28), 100, STEPS * 100, STEPS * 4),
        Network("autoencoder 64×64", partial(autoencoder, 64), (1, 64, 64), 100, STEPS * 100, STEPS * 2),
    )
}
SECONDS = {"autoencoder 28×28": 40, "autoencoder 64×64": 90}
COMPARISON = Comparison("online_step", PLAIN, CONTENDERS, NETWORKS, SECONDS)


def jobs(quick: bool) -> list[Job]:
    return COMPARISON.jobs(measure_step, quick)


def measure_step(network: str, contender: str, quick: bool) -> Result:
    return measure(NETWORKS[network], _trained(contender), _trained(PLAIN), quick)


def _trained(contender: str) -> Train:
    from lightning_bayes import OnlineLaplaceCallback

    class Autoencoder(plain_module(lambda f, x, y: F.mse_loss(f, x))):  # type: ignore[misc]
        def split_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return batch[0], batch[0]

    def train(net: nn.Module, data: Batches) -> float:
        callbacks = []
        if contender != PLAIN:
            callbacks.append(OnlineLaplaceCallback(hessian=contender, n_data=len(data.dataset), name="online"))
        return fastest_step(Autoencoder(net), data, *callbacks)

    return train
