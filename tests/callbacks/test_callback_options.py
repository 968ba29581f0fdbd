"""What all callbacks share: how arguments are given, in Python, YAML and Hydra, and one way to score."""

import inspect
import pickle
import re
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from callback_cases import FEATURES, Classifier, draw, fitted, held_out, laplace, same_posterior, train_loader
from helpers.cli import run_cli
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, default_collate

import lightning_bayes
from lightning_bayes import (
    BNN,
    GLM,
    MAP,
    FisherMC,
    FitData,
    Gaussian,
    IVONCallback,
    Kron,
    L2MCallback,
    LaplaceCallback,
    Learning,
    MarginalLikelihoodCallback,
    Memory,
    Network,
    OnlineLaplaceCallback,
    Prior,
    Subnetwork,
    SWAGCallback,
    Tuning,
    fit_laplace,
)  # fmt: skip
from lightning_bayes.callbacks import PosteriorCallback
from lightning_bayes.options.callback import UseOptions
from lightning_bayes.predictive.evaluate import evaluate

BNN_7 = "{class_path: lightning_bayes.BNN, init_args: {samples: 7}}"
PROBIT = "{class_path: lightning_bayes.GLM, init_args: {link: probit, samples: 7}}"
GAUSSIAN = "{class_path: lightning_bayes.Gaussian, init_args: {noise_std: 0.3}}"
SHARED = (
    "network: {name: net, output: logits}, calibrate: outputs, ood: true, seed: 3, predict_step: both, progress: false"
)
# What a file says, with words, lists and nested options, and what it means. Each row gives almost every argument.
FROM_YAML: list[tuple[type[PosteriorCallback], str, dict[str, Any]]] = [
    (
        LaplaceCallback,
        f"""likelihood: {GAUSSIAN}, structure: {{class_path: lightning_bayes.Kron, init_args: {{rank: auto}}}},
            subset: [net.0, net.4.bias], curvature: {{samples: 3}}, prior_precision: [1.0, 2.0], weights: last,
            prior: {{temperature: 0.5}}, tune: {{method: marglik, noise: false}}, data: {{max_batches: 2}},
            predictive: {PROBIT}, name: mine, save: false""",
        {
            "likelihood": Gaussian(0.3), "structure": Kron(rank="auto"), "subset": ["net.0", "net.4.bias"],
            "curvature": FisherMC(3), "prior_precision": [1.0, 2.0], "weights": "last",
            "prior": Prior(temperature=0.5), "tune": Tuning("marglik", noise=False), "data": FitData(max_batches=2),
            "predictive": GLM("probit", 7), "name": "mine", "save": False,
        },
    ),
    (
        LaplaceCallback,
        "structure: diag, subset: {n: 6, by: magnitude}, curvature: fisher_mc, tune: null, prior_precision: 2.0",
        {
            "structure": "diag", "subset": Subnetwork(6, "magnitude"), "curvature": "fisher_mc", "tune": None,
            "prior_precision": 2.0,
        },
    ),
    (
        L2MCallback,
        f"""likelihood: {GAUSSIAN}, scaling: paper, prior_precision: [1.0, 2.0], prior: {{mean: null}}, loss_scale: 1.0,
            n_data: 100, tune: marglik, predictive: {BNN_7}, name: mine""",
        {
            "likelihood": Gaussian(0.3), "scaling": "paper", "prior_precision": [1.0, 2.0], "prior": Prior(),
            "loss_scale": 1.0, "n_data": 100, "tune": "marglik", "predictive": BNN(7), "name": "mine",
        },
    ),
    (
        OnlineLaplaceCallback,
        f"""likelihood: classification, memory_factor: 0.01, hessian: mixed, prior_precision: 2.5, train_samples: 2,
            memory: {{scale: 0.5, average: true, curvature_at: sample, initial_curvature: 3.0, extrapolate: false,
            threshold: 4.0}}, same_sample: true, max_std: 0.1, n_data: 100, subset: [net.0, net.4.bias],
            predictive: {PROBIT}, name: mine""",
        {
            "likelihood": "classification", "memory_factor": 0.01, "hessian": "mixed", "prior_precision": 2.5,
            "train_samples": 2, "memory": Memory(True, 0.5, False, 3.0, "sample", 4.0), "same_sample": True,
            "max_std": 0.1, "n_data": 100, "subset": ["net.0", "net.4.bias"], "predictive": GLM("probit", 7),
            "name": "mine",
        },
    ),
    (
        MarginalLikelihoodCallback,
        f"""likelihood: classification, structure: diag, curvature: ggn, subset: [net.0], prior_precision: 2.5,
            every_n_epochs: 2, burn_in_epochs: 3, data: train_dataloader, predictive: {PROBIT}, name: mine,
            evidence: {{method: linear, steps: 3, lr: 0.2, noise: false, keep: last, loss_scale: 1.0, n_data: 11}}""",
        {
            "likelihood": "classification", "structure": "diag", "curvature": "ggn", "subset": ["net.0"],
            "prior_precision": 2.5, "every_n_epochs": 2, "burn_in_epochs": 3, "data": "train_dataloader",
            "predictive": GLM("probit", 7), "name": "mine",
            "evidence": Learning("linear", 3, 0.2, False, "last", 1.0, 11),
        },
    ),
    (
        SWAGCallback,
        f"start: 1, every_n_epochs: 2, every_n_steps: 5, data: {{max_batches: 2}}, predictive: {BNN_7}, name: mine",
        {
            "start": 1, "every_n_epochs": 2, "every_n_steps": 5, "data": FitData(max_batches=2), "predictive": BNN(7),
            "name": "mine",
        },
    ),
    (
        IVONCallback,
        f"likelihood: binary, train_samples: 2, predictive: {BNN_7}, name: mine",
        {"likelihood": "binary", "train_samples": 2, "predictive": BNN(7), "name": "mine"},
    ),
]  # fmt: skip
SHARED_MEANS: dict[str, Any] = {
    "network": Network("net", "logits"), "calibrate": "outputs", "ood": True, "seed": 3, "predict_step": "both",
    "progress": False,
}  # fmt: skip
CALLBACKS = list(dict.fromkeys(kind for kind, _, _ in FROM_YAML))


def said(callback: PosteriorCallback) -> dict[str, str]:
    """The arguments as a callback keeps them; plain values, also of a configuration tool's containers."""
    assert b"omegaconf" not in pickle.dumps(callback)
    return {name: repr(value) for name, value in vars(callback).items() if not name.startswith("_")}


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning's own
@pytest.mark.parametrize(("kind", "words", "means"), FROM_YAML)
def test_a_file_means_the_same_as_python(kind: Any, words: str, means: dict[str, Any], tmp_path: Path) -> None:
    cli = run_cli(tmp_path, Classifier, train_loader, {kind.__name__: f"{{{words}, {SHARED}}}"}, run=False)
    (callback,) = [each for each in cli.trainer.callbacks if isinstance(each, PosteriorCallback)]
    assert type(callback) is kind
    assert said(callback) == said(kind(**means, **SHARED_MEANS))


@pytest.mark.parametrize(("kind", "words", "means"), FROM_YAML)
def test_hydras_containers_mean_the_same_as_python(kind: Any, words: str, means: dict[str, Any]) -> None:
    """Hydra makes the objects, and passes lists and dictionaries as OmegaConf's."""
    omegaconf = pytest.importorskip("omegaconf", reason="OmegaConf comes with Hydra: pip install omegaconf")

    def instantiated(value: Any) -> Any:
        if isinstance(value, dict) and "class_path" in value:
            return getattr(lightning_bayes, value["class_path"].split(".")[-1])(**value["init_args"])
        return omegaconf.OmegaConf.create(value) if isinstance(value, (dict, list)) else value

    given = {name: instantiated(value) for name, value in yaml.safe_load(f"{{{words}, {SHARED}}}").items()}
    assert said(kind(**given)) == said(kind(**means, **SHARED_MEANS))


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize("kind", CALLBACKS)
def test_help_describes_every_argument(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--trainer.callbacks.help=lightning_bayes.{kind.__name__}"]
    with patch.object(sys, "argv", ["program"]), pytest.raises(SystemExit):
        LightningCLI(Classifier, run=False, save_config_callback=None, args=arguments)
    text = capsys.readouterr().out
    names = [*inspect.signature(kind).parameters, *inspect.signature(PosteriorCallback).parameters]
    for name in set(names) - {"use"}:
        assert re.search(rf"^  --trainer\.callbacks\.{name}[ +].*\n? +\S", text, re.MULTILINE), name
        (described,) = re.findall(rf"^  --trainer\.callbacks\.{name} .*?\(type:", text, re.MULTILINE | re.DOTALL)
        assert len(described.split()) > 3, name


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_program_of_a_file_fits_the_callbacks(tmp_path: Path) -> None:
    words = {
        "LaplaceCallback": f"{{structure: diag, tune: null, predictive: {BNN_7}, name: mine, progress: false}}",
        "SWAGCallback": "{start: 1}",
    }
    cli = run_cli(tmp_path, Classifier, train_loader, words, epochs=3)
    callback = next(each for each in cli.trainer.callbacks if isinstance(each, LaplaceCallback))
    expected = fit_laplace(cli.model, train_loader(shuffle=False), structure="diag")
    same_posterior(callback.posterior, expected, draw(5, FEATURES, seed=9))
    assert callback.posterior_path == tmp_path / "mine_posterior.pt"


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
