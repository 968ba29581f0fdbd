"""Option objects: their defaults, their words, what they refuse, and their form in YAML and in checkpoints."""

import inspect
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, asdict, dataclass, field
from typing import Any

import pytest
import torch

import lightning_bayes
from lightning_bayes import metrics, options
from lightning_bayes.options import (
    BNN,
    EKFAC,
    GLM,
    GP,
    MAP,
    AutoStructure,
    Diag,
    Dropout,
    FisherMC,
    FitData,
    Full,
    Kron,
    Learning,
    LowRank,
    Memory,
    Network,
    Prior,
    Tuning,
    to_plain,
)
from lightning_bayes.options.callback import memory_option
from lightning_bayes.options.fit import (
    curvature_estimate,
    data_option,
    network_option,
    output_option,
    prior_option,
    structure_option,
)
from lightning_bayes.options.predictive import predictive_option
from lightning_bayes.options.tuning import learning_option, tuning_option


@dataclass(frozen=True)
class Case:
    read: Callable[[Any], Any] | None  # the option that an argument means
    defaults: dict[str, Any]
    word: Any = None  # for the option with its defaults
    given: dict[str, Any] = field(default_factory=dict)  # other valid values
    refused: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # an error names the field


COUNTS, POSITIVES, FLAGS = (
    (0, -3, 2.5, True, "ten"),
    (0.0, -1.0, math.inf, math.nan, True, "one"),
    (0, None, "yes"),
)
DRAWS = {"samples": COUNTS}
CASES: dict[type, Case] = {
    AutoStructure: Case(structure_option, {"largest": 2000}, "auto", {"largest": 50}, {"largest": COUNTS}),
    Full: Case(structure_option, {}, "full"),
    Kron: Case(
        structure_option,
        {"rank": None, "weight_sharing": "expand", "damping": None, "updatable": False},
        "kron",
        {"rank": "auto", "weight_sharing": "reduce", "damping": "ritter", "updatable": True},
        {"rank": (*COUNTS, "all"), "weight_sharing": ("sum", None), "damping": ("off", True), "updatable": FLAGS},
    ),
    EKFAC: Case(
        structure_option, {"weight_sharing": "expand"}, "ekfac", {"weight_sharing": "reduce"}, {"weight_sharing": (3,)}
    ),
    Diag: Case(structure_option, {"method": "exact"}, "diag", {"method": "mixed"}, {"method": ("fast", None)}),
    LowRank: Case(structure_option, {"rank": 100}, "lowrank", {"rank": 7}, {"rank": (*COUNTS, None, "auto")}),
    FisherMC: Case(None, {"samples": 1}, None, {"samples": 3}, {"samples": (*COUNTS, None)}),
    GLM: Case(
        predictive_option,
        {"link": None, "samples": 100},
        "glm",
        {"link": "pairwise", "samples": 5},
        DRAWS | {"link": (3, True)},
    ),
    BNN: Case(predictive_option, {"samples": 100}, "bnn", {"samples": 5}, DRAWS),
    MAP: Case(predictive_option, {}, "map"),
    Dropout: Case(predictive_option, {"samples": 100}, "dropout", {"samples": 5}, DRAWS),
    GP: Case(
        predictive_option,
        {"points": 1000, "outputs": "auto", "link": None, "samples": 100},
        "gp",
        {"points": None, "outputs": "joint", "link": "mc", "samples": 5},
        DRAWS | {"points": COUNTS, "outputs": ("all", None), "link": (3, True)},
    ),
    Prior: Case(
        prior_option,
        {"mean": None, "temperature": 1.0, "posterior": None},
        None,
        {"temperature": 0.5, "posterior": "old.pt"},
        {"temperature": POSITIVES},
    ),
    Network: Case(
        network_option,
        {"name": None, "output": None, "class_dim": None},
        None,
        {"name": "net", "output": "logits", "class_dim": -1},
        {"name": ("", 3), "output": (2.5, True, ""), "class_dim": (0, "last", True)},
    ),
    FitData: Case(
        data_option,
        {"loader": None, "max_batches": None},
        None,
        {"loader": "plain_dataloader", "max_batches": 3},
        {"loader": ("",), "max_batches": COUNTS},
    ),
    Tuning: Case(
        tuning_option,
        {"method": "auto", "groups": None, "noise": True, "steps": None, "tolerance": None, "iterate": False}
        | {"passes": 10, "fisher": "weights", "metric": None, "low": None, "high": None, "size": None},
        "auto",
        {"method": "linear", "iterate": True, "groups": "layers", "passes": 4, "tolerance": 0.1, "fisher": "optimum"},
        {"method": ("kfac", None, 3), "groups": ("norms",), "noise": FLAGS, "steps": COUNTS, "tolerance": POSITIVES}
        | {"iterate": FLAGS, "passes": (1, *COUNTS), "fisher": ("data",), "low": POSITIVES, "high": POSITIVES}
        | {"size": (1, *COUNTS)},
    ),
    Learning: Case(
        learning_option,
        {"method": "marglik", "steps": 10, "lr": 0.1, "noise": True, "keep": "best"}
        | {"loss_scale": None, "n_data": None},
        "marglik",
        {"method": "mackay", "steps": 3, "keep": "last", "noise": False},
        {"method": ("kfac", None, 3), "steps": COUNTS, "lr": POSITIVES, "noise": FLAGS, "keep": ("first", None)}
        | {"loss_scale": POSITIVES, "n_data": COUNTS},
    ),
    Memory: Case(
        memory_option,
        {"average": False, "scale": 1.0, "extrapolate": True, "initial_curvature": 0.0, "curvature_at": "mean"}
        | {"threshold": 256},
        None,
        {"average": True, "scale": 2.0, "curvature_at": "sample", "threshold": 8},
        {"average": FLAGS, "scale": POSITIVES, "extrapolate": FLAGS, "initial_curvature": (-1.0, math.inf, "half")}
        | {"curvature_at": ("end", None), "threshold": (-1, math.nan, True, "half")},
    ),
}
kinds = pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)


def test_the_table_has_every_option() -> None:
    bases = {"PredictiveOption", "StructureOption", "to_plain"}
    assert {kind.__name__ for kind in CASES} == set(options.__all__) - bases


@kinds
def test_defaults_are_frozen_and_documented(kind: Any) -> None:
    case, option = CASES[kind], kind()
    assert asdict(option) == case.defaults
    for name in case.defaults:
        assert f"\n    {name}: " in inspect.getdoc(kind) + "\n"
        with pytest.raises(FrozenInstanceError):
            setattr(option, name, None)


@kinds
def test_a_word_an_object_and_a_mapping_mean_the_same(kind: Any) -> None:
    """A mapping is what YAML and Hydra give; an option of several kinds has its word in it."""
    case = CASES[kind]
    if case.read is None:
        return
    option = kind(**case.given)
    assert case.read(option) is option
    plain = to_plain(option) if hasattr(kind, "kind") else case.given
    assert asdict(case.read(json.loads(json.dumps(plain)))) == asdict(option)
    if case.word is not None:
        assert case.read(case.word) == kind()
    if kind is FitData:
        return  # another mapping is a dictionary of loaders
    with pytest.raises(TypeError, match="has no argument 'nonsense'"):
        case.read({**plain, "nonsense": 1})


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind, case in CASES.items() for name, values in case.refused.items() for value in values],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b") as refusal:
        kind(**{name: value})
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) <= 200


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (prior_option(None).posterior, None),
        (prior_option("old.pt").posterior, "old.pt"),
        (network_option("net"), Network(name="net")),
        (output_option("f"), Network(output="f")),
        (tuning_option(None), None),
        (memory_option(None), Memory()),
        (curvature_estimate("fisher_mc", Kron()), ("fisher_mc", 1)),
        (curvature_estimate(FisherMC(3), Kron()), ("fisher_mc", 3)),
        (data_option("plain").loader, "plain"),
        (data_option({"a": 1, "b": 2}).loader, {"a": 1, "b": 2}),
    ],
)
def test_plain_values_mean_options(actual: Any, expected: Any) -> None:
    assert actual == expected


TOGETHER: dict[str, tuple[Callable[[], Any], str]] = {
    "a prior with two means": (lambda: Prior(mean=torch.ones(3), posterior="old.pt"), "pass either posterior= or"),
    "a submodule of a network": (lambda: output_option(Network("net")), "pass the submodule 'net' itself"),
    "groups without evidence": (lambda: Tuning("grid", groups="layers"), "use 'marglik' with groups='layers'"),
    "a grid that is empty": (lambda: Tuning("grid", low=10.0, high=1.0), "low must be less than high=1.0"),
    "iterate by another method": (lambda: Tuning("mackay", iterate=True), "an option of tune='linear'"),
    "a field of another method": (lambda: Tuning("marglik", size=3), "size=3 is not an option of .*'grid'"),
    "a field that iterating ignores": (lambda: Tuning("linear", iterate=True, steps=3), "steps=3 is not an option"),
    "a diagonal of the Fisher": (lambda: curvature_estimate("fisher_mc", Diag("approx")), "needs curvature='ggn'"),
    "an unknown kind": (lambda: structure_option({"kind": "kfac"}), "unknown kind of structure 'kfac'"),
    "a memory that is a word": (lambda: memory_option("long"), "memory must be a Memory"),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_what_does_not_go_together_is_refused(case: str) -> None:
    make, message = TOGETHER[case]
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def public_callables() -> Iterator[tuple[str, Any]]:
    """Functions, classes, and the methods of classes."""
    for module in (lightning_bayes, options, metrics, metrics.functional, lightning_bayes.plots):
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing) and not (inspect.isclass(thing) and issubclass(thing, Exception)):
                yield name, thing
                methods = vars(thing).items() if inspect.isclass(thing) else ()
                yield from ((f"{name}.{k}", f) for k, f in methods if inspect.isfunction(f) and not k.startswith("_"))


def test_no_public_callable_takes_too_many_arguments() -> None:
    """Callbacks take those of their base class by `**use`, and `PosteriorCallback` is counted with them."""
    names = {key: {*inspect.signature(thing).parameters} - {"self"} for key, thing in public_callables()}
    shared = {*inspect.signature(lightning_bayes.callbacks.PosteriorCallback).parameters}
    found = {key: len((own | shared) - {"use"} if key.endswith("Callback") else own) for key, own in names.items()}
    assert {name: n for name, n in found.items() if n > 20} == {}
    assert found["fit_laplace"] <= 14
    assert found["GaussianPosterior.predict"] <= 8


@pytest.mark.parametrize(
    ("scales_noise", "weights", "outputs", "kind"),
    [
        (True, 100, 10_000, "full"),  # few weights
        (True, 10_000, 1000, "full"),  # few outputs
        (True, 10_000, 5000, "kron"),
        (True, 10_000, None, "kron"),  # data that cannot be counted
        (True, 10_000_000, 1000, "kron"),  # rows that would take too much memory
        (False, 100, 100, "kron"),  # classes
    ],
)
def test_the_full_matrix_is_for_small_regressions(
    scales_noise: bool, weights: int, outputs: int | None, kind: str
) -> None:
    assert AutoStructure().resolve(scales_noise, weights, outputs).kind == kind
