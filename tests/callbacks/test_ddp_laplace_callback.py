"""Any number of processes under DDP gives the results of one."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import FEATURES, Classifier, Regressor, draw, labelled, laplace, measured
from helpers.processes import Peer, alone_and_together
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_bayes import BNN, GLM, GP, GaussianPosterior, Prior, Tuning, fit_laplace
from lightning_bayes.network import Processes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*in eval mode"),
]


X = draw(5, FEATURES, seed=9).double()
CURVATURES = ("ggn", "empirical_fisher", "fisher_mc")
STRUCTURES = ("diag", "full", "ekfac", "lowrank")
PRIORS = ("prior", "prior_mean")
NAMES = (*CURVATURES, *STRUCTURES, "points", *PRIORS)
BATCH = 4
OTHERS = ("one_example", "iterated", "regression", "evaluation", "stream", "best")
LOADERS = ("plain", "shuffled", "drop_last", "subset", "limited")


class Still(Classifier):
    """Training with learning rate zero, so that the weights are the same on any number of processes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for t in self.state_dict().values():
                if t.is_floating_point():
                    t.copy_(torch.randn(t.shape, generator=generator).abs())
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net[1].eval()  # a process may have a single example
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


class StillRegressor(Regressor):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(labelled(11))


class OwnBatches(BatchSampler):
    """A subclass, which Lightning rebuilds with a distributed sampler."""


def alone(model: nn.Module, loader: Any) -> Tensor:
    """The posterior that one process fits to all data."""
    data = [(x.double(), y) for x, y in loader]
    return fit_laplace(model, data, processes=Processes()).precision.logdet()


def callbacks(**arguments: Any) -> list[Any]:
    earlier = fit_laplace(
        Still().double(), [(draw(7, FEATURES, seed=3).double(), torch.arange(7) % 3)], processes=Processes()
    )
    priors = {"prior": earlier, "prior_mean": Prior(mean=0.5 * earlier.mean)}
    return [
        *(laplace(name=word, curvature=word, **arguments) for word in CURVATURES),
        *(laplace(name=word, structure=word, **arguments) for word in STRUCTURES),
        laplace(name="points", predictive=GP(points=4), **arguments),
        *(laplace(name=word, tune=None, prior=priors[word], **arguments) for word in PRIORS),
    ]


def train_loader(kind: str, n: int) -> tuple[DataLoader[Any], dict[str, Any]]:
    data, limits = labelled(n), {}
    if kind == "subset":
        return DataLoader(data, BATCH, sampler=SubsetRandomSampler(list(range(1, n, 2)))), limits
    if kind == "limited":
        limits = {"limit_train_batches": 2}
    return DataLoader(data, BATCH, shuffle=kind in ("shuffled", "limited"), drop_last=kind == "drop_last"), limits


class Scenarios:
    def __init__(self, peer: Peer) -> None:
        self.peer, self.results = peer, dict[str, Any]()

    def trainer(self, *callbacks: Any, **arguments: Any) -> L.Trainer:
        return self.peer.trainer(*callbacks, **{"max_epochs": 1, "precision": "64-true", **arguments})

    def posteriors(self, kind: str, n: int) -> None:
        """Every curvature and structure, side by side on one Trainer."""
        loader, limits = train_loader(kind, n)
        found = callbacks()
        self.trainer(*found, **limits).fit(Still(), loader)
        for callback in found:
            self.keep(f"{kind}:{n}/{callback.name}", callback.posterior)

    def keep(self, key: str, posterior: Any) -> None:
        self.results[key] = {
            "n_data": posterior.n_data,
            "logdet": posterior.precision.logdet(),
            "prior": posterior.prior_precision,
            "evidence": posterior.log_marginal_likelihood(),
            "effective parameters": posterior.effective_parameters,
            "functional covariance": posterior.functional(X)[1],
            "prediction": posterior.predict(X).probs,
            "novelty": posterior.novelty(X),
            "known novelty": posterior.known_novelty,
            "samples": posterior.sample(3, torch.Generator().manual_seed(2)),
            "sampled prediction": posterior.predict(
                X, BNN(samples=4), generator=torch.Generator().manual_seed(2)
            ).probs,
        }
        if posterior.points is not None:
            points = {**vars(posterior.points), "prediction": posterior.predict(X, "gp").probs}
            self.results[key]["points"] = points

    def one_example(self) -> None:
        """Fewer examples than processes."""
        callback = laplace()
        self.trainer(callback).fit(Still(), DataLoader(labelled(1), BATCH))
        self.keep("one", callback.posterior)

    def iterated(self) -> None:
        """Passes of the linear model, where a process may have fewer examples, or none."""
        for n in (11, 1):
            callback = laplace(tune=Tuning("linear", groups="normalised", iterate=True, passes=8), calibrate=None)
            self.trainer(callback).fit(Still(), DataLoader(labelled(n), BATCH, shuffle=True))
            self.keep(f"iterated {n}", callback.posterior)

    def regression(self) -> None:
        """Prior, noise and tails by the evidence and heavy-tailed validation data, for each structure."""
        x, y = measured(60, 4).tensors
        held_out = DataLoader(TensorDataset(x, y + draw(60, 2, seed=6) ** 5), BATCH)
        for structure, precision in product(("full", "kron"), ("64-true", "32-true")):
            callback = laplace(likelihood="regression", structure=structure)
            trainer = self.trainer(callback, precision=precision)
            trainer.fit(StillRegressor(), DataLoader(measured(37), BATCH, shuffle=True), held_out)
            found = callback.posterior
            (calibration,) = found.calibrations
            assert calibration.df < 50
            numbers = torch.stack([found.prior_precision, torch.as_tensor(found.likelihood.noise_std)])
            self.results.setdefault("regression", {})[f"{structure}, {precision}"] = (numbers, calibration.df)

    def evaluation(self) -> None:
        """Test loaders that DDP pads, out-of-distribution data, pictures, predictions, checkpoints, a tuned grid."""
        callback = laplace(ood=True, plots=True, tune="grid", name="grid", predictive=GLM(link="bridge"))
        checkpoint = ModelCheckpoint(self.peer.folder / "kept")
        model = Still()
        fit = self.trainer(callback, checkpoint, enable_checkpointing=True)
        validation = DataLoader(labelled(13, 4), BATCH)
        fit.fit(model, DataLoader(labelled(11), BATCH, shuffle=True), validation)
        self.keep("grid", callback.posterior)
        held_out = labelled(11, 5)
        far = DataLoader(4 * draw(7, FEATURES, seed=8), BATCH)  # type: ignore[arg-type]
        loaders = {
            "plain": DataLoader(held_out, BATCH),
            "shuffled": DataLoader(held_out, BATCH, shuffle=True),
            "subset": DataLoader(held_out, BATCH, sampler=SubsetRandomSampler(range(9))),
            "batches": DataLoader(held_out, batch_sampler=OwnBatches(SequentialSampler(held_out), BATCH, False)),
        }
        for kind, loader in loaders.items():
            parts = fit.test(model, [loader, far], verbose=False)
            self.results[f"test/{kind}"] = {key: value for part in parts for key, value in part.items()}
            callback.use = replace(callback.use, plots=False)  # one pair of pictures is enough
        self.results["val"] = fit.validate(model, [loaders["plain"]], verbose=False)[0]
        predictions = fit.predict(model, loaders["plain"])
        self.results["predict"] = torch.cat([each.probs for each in predictions])
        self.results["files"] = {"posterior": str(callback.posterior_path), "checkpoint": checkpoint.best_model_path}

    def best(self) -> None:
        """Weights that move, and the first checkpoint is the best: the posteriors, and what this process would fit."""
        callback = laplace(tune=None, name="best")
        checkpoint = ModelCheckpoint(self.peer.folder / "best", monitor="step", mode="min", save_top_k=2)
        model, loader = Classifier(lr=0.05), DataLoader(labelled(36), BATCH, shuffle=True)
        fit = self.trainer(callback, checkpoint, enable_checkpointing=True, limit_val_batches=0, max_epochs=2)
        fit.fit(model, loader)
        plain = DataLoader(labelled(36), BATCH)
        self.results["best/memory"] = [callback.posterior.precision.logdet(), alone(model, plain)]
        tested = fit.test(model, DataLoader(labelled(12, 5), BATCH), ckpt_path="best", verbose=False)
        self.results["best/best"] = [callback.posterior.precision.logdet(), alone(model, plain)]
        self.results["best/test"] = tested[0]["test_nll_best"]
        resumed = laplace(tune=None, name="resumed")  # with nothing left to train
        self.trainer(resumed, max_epochs=2).fit(model, loader, ckpt_path=checkpoint._last_checkpoint_saved)
        self.results["best/resumed"] = [resumed.posterior.precision.logdet(), alone(model, plain)]

    def stream(self) -> None:
        """Data that cannot be indexed."""
        callback = laplace()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.trainer(callback).fit(Still(), DataLoader(Stream(), BATCH))
        self.results["stream"] = {
            "n_data": callback.posterior.n_data,
            "warnings": [str(each.message) for each in caught if "cannot be indexed" in str(each.message)],
        }


def run(peer: Peer, cases: list[str]) -> dict[str, Any]:
    """The results of this process."""
    scenarios = Scenarios(peer)
    for case in cases:
        if case in OTHERS:
            getattr(scenarios, case)()
        else:
            kind, n = case.split(":")
            scenarios.posteriors(kind, int(n))
    return scenarios.results


QUANTITIES = (
    "n_data",
    "logdet",
    "prior",
    "evidence",
    "effective parameters",
    "functional covariance",
    "prediction",
    "novelty",
    "known novelty",
    "samples",
    "sampled prediction",
)
EVERY = [f"{kind}:{n}" for kind in LOADERS for n in (11, 64, 101)]
SMALL = [case for case in EVERY if case.endswith(":11")]
WORLDS = [
    pytest.param((2, [*SMALL, "shuffled:101", *OTHERS]), id="2 processes"),
    pytest.param((3, ["shuffled:11", "subset:11", "limited:11", "one_example", "evaluation"]), id="3 processes"),
    pytest.param((2, [*EVERY, *OTHERS]), id="2 processes, every case", marks=pytest.mark.slow),
    pytest.param((3, [*EVERY, *OTHERS]), id="3 processes, every case", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any], Path]:
    """Results of one process, of each of several, and the folder of the latter."""
    size, cases = request.param
    return alone_and_together(run, tmp_path_factory, size, cases)


def skip_without(key: str, alone: dict[str, Any]) -> None:
    if key not in alone:
        pytest.skip("asked of two processes, and of three in the slow tests")


def same(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    for quantity in QUANTITIES:
        torch.testing.assert_close(
            found[quantity], expected[quantity], rtol=1e-7, atol=1e-9, msg=lambda m, q=quantity: f"{where}, {q}: {m}"
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_process_has_the_posterior_of_one_alone(world: Any, name: str) -> None:
    alone, ranks, _ = world
    keys = [key for key in alone if key.endswith(f"/{name}")]
    assert len(keys) >= 3
    for key in keys:
        for rank in ranks:
            same(rank[key], alone[key], key)


def test_every_process_keeps_the_training_points_of_one_alone(world: Any) -> None:
    alone, ranks, _ = world
    keys = [key for key in alone if key.endswith("/points")]
    assert len(keys) >= 3
    for key in keys:
        expected = alone[key]["points"]
        assert len(expected["index"]) == 4
        for rank in ranks:
            points = rank[key]["points"]
            for part in ("x", "index"):
                assert torch.equal(points[part], expected[part]), key
            torch.testing.assert_close(points["prediction"], expected["prediction"], rtol=1e-7, atol=1e-9)


def test_each_example_is_counted_once(world: Any) -> None:
    alone, ranks, _ = world
    for key in [key for key in alone if key.endswith("/ggn")]:
        kind, n = key.removesuffix("/ggn").split(":")
        expected = {"subset": int(n) // 2}.get(kind, int(n))
        assert [rank[key]["n_data"] for rank in ranks] == [expected] * len(ranks), key


def test_the_iterated_evidence_adds_up_the_passes_of_all(world: Any) -> None:
    alone, ranks, _ = world
    skip_without("iterated 1", alone)
    for key in ("iterated 11", "iterated 1"):
        assert alone[key]["prior"].shape == (3,)
        assert alone[key]["prior"][1] == alone[key]["prior"][2] != alone[key]["prior"][0]
        for rank in ranks:
            same(rank[key], alone[key], key)


def test_a_regression_gets_the_prior_noise_and_tails_of_one_process(world: Any) -> None:
    alone, ranks, _ = world
    skip_without("regression", alone)
    for rank in ranks:
        for key, (numbers, df) in alone["regression"].items():
            torch.testing.assert_close(
                rank["regression"][key][0], numbers, rtol=1e-6, atol=0, msg=lambda m, k=key: k + m
            )
            assert rank["regression"][key][1] == df


def test_fewer_examples_than_processes(world: Any) -> None:
    alone, ranks, _ = world
    assert alone["one"]["n_data"] == 1
    for rank in ranks:
        same(rank["one"], alone["one"], "one example")


def test_a_grid_is_scored_on_all_validation_data_by_all_processes(world: Any) -> None:
    alone, ranks, _ = world
    for rank in ranks:
        same(rank["grid"], alone["grid"], "grid")


@pytest.mark.parametrize("kind", ["plain", "shuffled", "subset", "batches"])
def test_padding_is_not_scored(world: Any, kind: str) -> None:
    alone, ranks, _ = world
    of_first = {"test_nll_map/dataloader_idx_0", "test_nll_grid/dataloader_idx_0"}
    of_second = {
        f"test_ood_{number}_{score}/dataloader_idx_1"
        for number in ("auroc", "aupr_out", "fpr95")
        for score in ("entropy_map", "confidence_map", "energy_map", "mutual_information_grid", "novelty_grid")
    }
    assert of_first | of_second <= alone[f"test/{kind}"].keys()
    for rank in ranks:
        assert rank[f"test/{kind}"] == pytest.approx(alone[f"test/{kind}"], rel=1e-6)


def test_validation_is_scored_as_by_one_process(world: Any) -> None:
    alone, ranks, _ = world
    ours = {key: value for key, value in alone["val"].items() if key != "val_loss"}
    assert "val_nll_grid" in ours
    for rank in ranks:
        assert {key: rank["val"][key] for key in ours} == pytest.approx(ours, rel=1e-6)


def test_each_process_predicts_its_own_share_once(world: Any) -> None:
    alone, ranks, _ = world
    for place, rank in enumerate(ranks):
        share = alone["predict"][place :: len(ranks)]
        torch.testing.assert_close(rank["predict"], share, rtol=1e-7, atol=1e-9)


def test_the_checkpoint_and_the_file_hold_the_posterior(world: Any) -> None:
    alone, ranks, _ = world
    files = ranks[0]["files"]
    assert all(rank["files"] == files for rank in ranks)
    model = Still.load_from_checkpoint(files["checkpoint"]).double()
    state = torch.load(files["checkpoint"], weights_only=True)["callbacks"]["LaplaceCallback[grid]"]["posterior"]
    for posterior in (
        GaussianPosterior.load(files["posterior"], model),
        GaussianPosterior.from_state_dict(model, state),
    ):
        torch.testing.assert_close(
            posterior.functional(X)[1], alone["grid"]["functional covariance"], rtol=1e-7, atol=1e-9
        )


def test_rank_zero_draws_the_pictures_once(world: Any) -> None:
    _, _, folder = world
    names = sorted(path.name.rsplit("_", 1)[0] for path in (folder / "figures").iterdir())
    ood = ["test_ood_entropy_grid_1", "test_ood_entropy_map_1", "test_ood_novelty_grid_1"]
    assert names == [*ood, "test_reliability_grid", "test_reliability_map"]


def test_data_that_cannot_be_indexed_count_as_often_as_processes_read_them(world: Any) -> None:
    alone, ranks, _ = world
    skip_without("stream", alone)
    assert alone["stream"] == {"n_data": len(labelled(11)), "warnings": []}
    assert [rank["stream"]["n_data"] for rank in ranks] == [11 * len(ranks)] * len(ranks)
    (warning,) = [warning for rank in ranks for warning in rank["stream"]["warnings"]]  # of rank zero
    assert "examples that several loaders return count several times" in warning


def test_memory_and_the_best_checkpoint_have_posteriors_of_their_own_weights(world: Any) -> None:
    """Both use rank zero's statistics of batch norms; each process has different ones."""
    alone, ranks, _ = world
    skip_without("best/memory", alone)
    for rank in ranks:
        for which in ("best/memory", "best/best", "best/resumed"):
            torch.testing.assert_close(*rank[which], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(rank[which], ranks[0][which], rtol=1e-9, atol=1e-9)
        assert abs(rank["best/memory"][0] - rank["best/best"][0]) > 1e-3
        assert rank["best/test"] == ranks[0]["best/test"]
