"""What all callbacks share: how arguments are given, and one way to score."""

import inspect
import pickle
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from callback_cases import FEATURES, draw, fitted, held_out, laplace
from torch.utils.data import DataLoader, default_collate

from lightning_bayes import MAP, L2MCallback, LaplaceCallback, OnlineLaplaceCallback
from lightning_bayes.callbacks import PosteriorCallback
from lightning_bayes.options.callback import UseOptions
from lightning_bayes.predictive.evaluate import evaluate

CALLBACKS = [LaplaceCallback, L2MCallback, OnlineLaplaceCallback]


@pytest.mark.parametrize("callback", CALLBACKS)
def test_all_arguments_but_the_likelihood_are_keywords(callback: Any) -> None:
    first, *others = inspect.signature(callback).parameters.values()
    assert (first.name, first.kind) == ("likelihood", first.POSITIONAL_OR_KEYWORD)
    assert {p.kind for p in others} == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    with pytest.raises(TypeError, match="positional"):
        callback("classification", "kron")


@pytest.mark.parametrize("callback", CALLBACKS)
def test_the_shared_options_are_one_frozen_object(callback: Any) -> None:
    """Each field is an argument of every callback, and the attributes of a callback read it."""
    shared = inspect.signature(PosteriorCallback).parameters.keys()
    assert {field.name for field in fields(UseOptions)} == shared - {"likelihood"}
    made = callback(predictive="map", seed=3, name="mine")
    assert (made.predictive, made.seed, made.name) == (made.use.predictive, made.use.seed, made.use.name)
    assert (made.predictive, made.seed, made.name) == (MAP(), 3, "mine")
    with pytest.raises(FrozenInstanceError):
        made.use.seed = 4
    for name in (field.name for field in fields(UseOptions)):
        with pytest.raises(AttributeError):
            setattr(made, name, 4)


def test_a_callback_does_not_keep_the_loaders_that_it_has_scored(tmp_path: Path) -> None:
    callback = laplace()
    model, trainer = fitted(tmp_path, callback)
    data = held_out().dataset
    trainer.test(model, DataLoader(data, 4, collate_fn=lambda batch: default_collate(batch)), verbose=False)
    copy = pickle.loads(pickle.dumps(callback))
    assert copy.name == callback.name


@pytest.mark.parametrize("documented", CALLBACKS)
def test_arguments_are_documented_in_the_order_of_the_signature(documented: Any) -> None:
    text = inspect.getdoc(documented) or ""
    lines = text[text.index("Args:") :].splitlines()
    names = [line.split(":")[0].strip() for line in lines if line.startswith("    ") and line[4] != " "]
    assert names == list(inspect.signature(documented).parameters)


def test_a_callback_and_evaluate_have_the_same_keys_and_numbers(tmp_path: Path) -> None:
    callback = laplace(seed=3)
    model, _ = fitted(tmp_path, callback)
    others = [DataLoader(scale * draw(9, FEATURES, seed=8), 4) for scale in (2, 4)]  # type: ignore[arg-type]
    by_callback = callback.evaluate(model, held_out(), others)
    ours = {key.replace("_laplace", ""): v for key, v in by_callback.items() if "_laplace" in key}
    assert evaluate(callback.posterior, held_out(), others, seed=3) == pytest.approx(ours, rel=1e-6)
    assert {"nll", "ood_auroc_entropy/dataloader_idx_1", "ood_auroc_epistemic/dataloader_idx_2"} <= ours.keys()


def test_a_callback_that_is_given_nothing_to_score_says_so(tmp_path: Path) -> None:
    callback = laplace()
    model, _ = fitted(tmp_path, callback)
    with pytest.raises(ValueError, match=r"the loader is empty: evaluate needs at least one \(x, y\)"):
        callback.evaluate(model, [])
    with pytest.raises(ValueError, match=r"ood_dataloaders\[1\] is empty"):
        callback.evaluate(model, held_out(), [held_out(), []])
