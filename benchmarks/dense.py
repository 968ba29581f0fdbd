"""The memory of dense outputs: a U-Net on images of 256 × 256 pixels with 21 classes.

The peak memory that a step adds to its process is also given relative to what a plain forward and backward pass of
the same batch adds to a separate process; time is in such passes. There are 20 function samples, and 5 for several
images: memory does not grow with them, time does. Images are noise, and the network is untrained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
from benchmarks.rows import Row, memory_beside
from lightning_bayes import GLM, Diag

TITLE = "Dense outputs"
CLASSES, SIDE = 21, 256
BATCHES = (1, 8)
SAMPLES = 20  # for single images; a quarter for larger batches, because memory is the same
PASS = "forward and backward"
FITS: dict[str, dict[str, Any]] = {
    "fit, Kronecker": {},
    "fit, diagonal": {"structure": "diag"},
    "fit, last layer": {"subset": "last_layer"},
    "fit, approximate diagonal": {"curvature": "ggn", "structure": Diag(method="approx")},
}
USES = ("predict", "evaluate", "calibrate", "tune")
MOST = 4.0  # times the memory of a pass


class UNet(nn.Module):
    """A U-Net with three resolutions and 16 to 64 channels.  # [B, 3, H, W] -> [B, classes, H, W]"""

    def __init__(self, classes: int = CLASSES, width: int = 16) -> None:
        super().__init__()
        w = width
        self.down = nn.ModuleList([_block(3, w), _block(w, 2 * w), _block(2 * w, 4 * w)])
        self.up = nn.ModuleList([_block(6 * w, 2 * w), _block(3 * w, w)])
        self.head = nn.Conv2d(w, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down[0](x)
        middle = self.down[1](F.max_pool2d(fine, 2))
        coarse = self.down[2](F.max_pool2d(middle, 2))
        middle = self.up[0](torch.cat([middle, F.interpolate(coarse, scale_factor=2.0)], dim=1))
        return self.head(self.up[1](torch.cat([fine, F.interpolate(middle, scale_factor=2.0)], dim=1)))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def jobs(quick: bool) -> list[Job]:
    size, batches = ({"side": 32}, (1,)) if quick else ({"side": SIDE}, BATCHES)
    options: dict[str, Any] = {"seconds": 300, "default": False}
    return [
        Job(f"dense/{B}/{work}", measure, {**size, "work": work, "batch_size": B}, unit="passes", **options)
        for B in batches
        for work in (PASS, *FITS, *USES)
    ]


def measure(work: str, batch_size: int, side: int) -> Result:
    """Measure one run, compared with a plain pass."""
    from lightning_bayes import fit_laplace
    from lightning_bayes.predictive.evaluate import evaluate

    torch.manual_seed(0)
    net = UNet().eval()
    x, y = torch.randn(batch_size, 3, side, side), torch.randint(CLASSES, (batch_size, side, side))

    def plain_pass() -> None:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()

    def fit(words: dict[str, Any]) -> Any:
        return fit_laplace(net, [(x, y)], **{"curvature": "fisher_mc", **words})

    small = UNet().eval()  # setup at first use does not count
    warm = fit_laplace(small, [(x[:1, :, :16, :16], y[:1, :16, :16])], curvature="fisher_mc")
    warm.predict(x[:1, :, :16, :16], GLM(samples=2))
    if work == PASS:
        return side_by_side(lambda: plain_pass, plain_pass, 0)
    if work in FITS:
        return side_by_side(lambda: lambda: fit(FITS[work]), plain_pass, 0)
    state = warm.state_dict()  # the size of this posterior does not depend on the data
    posterior = type(warm).from_state_dict(small, state)
    glm = GLM(samples=SAMPLES if batch_size == 1 else SAMPLES // 4)
    uses: dict[str, Callable[[], Any]] = {
        "predict": lambda: posterior.predict(x, glm),
        "evaluate": lambda: evaluate(posterior, [(x, y)], predictive=glm),
        "calibrate": lambda: posterior.calibrate([(x, y)], glm),
        "tune": lambda: posterior.tune_prior("auto", [(x, y)], predictive=glm),
    }
    return side_by_side(lambda: uses[work], plain_pass, 0)


def derived(rows: Sequence[Row]) -> list[Row]:
    values = []
    for B in BATCHES:
        plain = next((row for row in rows if row.name == f"dense/{B}/{PASS}"), None)
        others = [row for row in rows if row.name.startswith(f"dense/{B}/") and row is not plain]
        values += memory_beside(others, plain, MOST)
    return values
