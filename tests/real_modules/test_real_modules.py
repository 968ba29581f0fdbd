"""Modules in their authors' usual form, from the libraries that people use, go the whole way.

`make test` takes one of each family, `make test-real` all of them. No weights are downloaded: all are made from
configurations.
"""

import importlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import real_plain
from real_frame import Journey, Real
from torch import Tensor, nn

FAMILIES = {
    "plain": (),
    "torchvision_nets": ("torchvision",),
    "timm_nets": ("timm",),
    "transformers_nets": ("transformers", "peft"),
    "geometric_nets": ("torch_geometric",),
}
REASON = "real modules need the extra 'real': pip install lightning-bayes[real]"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the posterior does not improve the predictions"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # that peft asks transformers for
    # The loss of a few random examples is no test of the likelihood.
    pytest.mark.filterwarnings("ignore:.*held out"),
]


def rows() -> list[Any]:
    collected = []
    for family, packages in FAMILIES.items():
        if any(importlib.util.find_spec(package) is None for package in packages):
            collected.append(pytest.param(None, id=family, marks=pytest.mark.skip(reason=REASON)))
            continue
        with warnings.catch_warnings(action="ignore"):  # those of other packages, while they are imported
            cases: dict[str, Real] = importlib.import_module(f"real_{family}").CASES
        for name, case in cases.items():
            collected.append(pytest.param(case, id=name, marks=[] if case.in_default else [pytest.mark.real]))
    return collected


@pytest.fixture(scope="module", params=rows())
def journey(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Journey:
    return Journey(request.param, tmp_path_factory.mktemp("real"))


def test_it_is_scored_beside_map(journey: Journey) -> None:
    journey.check_scores()


def test_it_predicts(journey: Journey) -> None:
    journey.check_predictions()


def test_what_is_loaded_predicts_the_same(journey: Journey) -> None:
    journey.check_loaded()


def test_nothing_of_it_is_changed(journey: Journey) -> None:
    journey.check_untouched()


def test_memory_does_not_grow_with_the_number_of_batches(journey: Journey, monkeypatch: pytest.MonkeyPatch) -> None:
    journey.check_memory(monkeypatch)


def test_a_leak_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaking(real_plain.Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(super().forward(x))
            return kept[-1]

    kept: list[Tensor] = []
    case = replace(real_plain.CASES["LSTM"], module=lambda: Leaking(nn.LSTM))
    with pytest.raises(AssertionError):
        Journey(case, tmp_path).check_memory(monkeypatch)
