"""Sixteen architectures of timm, with random weights: each is fitted and predicts, on images of 64 × 64, two at a time.

The seconds are printed (`pytest -m slow -s`); the aim is a minute for each on two cores.
"""

import importlib.util
import time
import warnings
from typing import Any

import pytest
import torch
from helpers.tensors import seeded
from helpers.untouched import untouched
from torch import nn

from lightning_bayes import fit_laplace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="needs the extra 'real'"),
]

CLASSES, BATCH, SIZE = 10, 2, 64
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "mobilenetv3_small_050": {},
    "vit_tiny_patch16_224": {"img_size": SIZE},
    "convnext_atto": {},
    "swin_tiny_patch4_window7_224": {"img_size": SIZE, "embed_dim": 48, "depths": (2, 2, 2, 2)},
    "mixer_s32_224": {"img_size": SIZE},
    "regnetx_002": {},
    "ghostnet_050": {},
    "edgenext_xx_small": {},
    "poolformer_s12": {},
    "mobilevit_xxs": {},
    "lcnet_050": {},
    "efficientnet_lite0": {},
    "densenet121": {},
    "tinynet_e": {},
    "pit_ti_224": {"img_size": SIZE},
}


def made(name: str) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # those of timm, while it is imported
        import timm

        torch.manual_seed(0)
        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **ARCHITECTURES[name])


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_fitted_and_predicts(name: str, structure: str, capsys: pytest.CaptureFixture[str]) -> None:
    net = made(name)
    x = torch.randn(2, BATCH, 3, SIZE, SIZE, generator=seeded(1))
    y = torch.randint(CLASSES, (2, BATCH), generator=seeded(1))
    start, work = time.perf_counter(), time.process_time()
    with untouched(net):
        posterior = fit_laplace(net, list(zip(x, y, strict=True)), structure=structure)
        fitted = time.perf_counter()
        prediction = posterior.predict(x[0])
    seconds = fitted - start, time.perf_counter() - fitted, time.process_time() - work
    with capsys.disabled():
        print(f"\n{name} {structure}: fit {seconds[0]:.1f} s, predict {seconds[1]:.1f} s, CPU {seconds[2]:.1f} s")
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(BATCH))
    assert prediction.probs.shape == (BATCH, CLASSES)
    assert (prediction.epistemic > 0).all()
    assert posterior.subset.names == tuple(key for key, p in net.named_parameters() if p.requires_grad)
    assert posterior.n_data == 2 * BATCH
