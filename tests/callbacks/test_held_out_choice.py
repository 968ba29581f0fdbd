"""Tuning, calibration and held-out scores on a Trainer's validation data."""

import csv
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_cases import Classifier, Regressor, held_out, labelled, measured, train_loader
from callback_cases import trainer as make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import GLM, L2MCallback, LaplaceCallback, LaplacePosterior, fit_laplace
from lightning_bayes.predictive.auto import survey
from lightning_bayes.predictive.held_out import Scoring
from lightning_bayes.trainer import held_out_choice as choices


class Counting(TensorDataset):
    """How often each example was read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        type(self).reads += 1
        return super().__getitem__(index)


def validation(n: int = 120) -> DataLoader[Any]:
    return DataLoader(labelled(n, seed=5), batch_size=32)


def test_the_posterior_is_that_of_tune_prior_on_the_validation_data(tmp_path: Path) -> None:
    callback, model = LaplaceCallback(), Classifier()
    make_trainer(tmp_path, callback).fit(model, train_loader(), validation())
    posterior = callback.posterior
    assert isinstance(posterior, LaplacePosterior)
    model.eval()
    again = posterior.with_prior(1.0).tune_prior("auto", validation())
    torch.testing.assert_close(posterior.prior_precision, again.prior_precision)
    assert posterior.calibrations == again.calibrations
    assert posterior.calibrations[0].link == "pairwise"
    x = torch.randn(3, 4)
    torch.testing.assert_close(callback.predict(x).probs, again.predict(x).probs)


def test_three_passes_over_validation_data_at_most_and_none_over_training_data(tmp_path: Path) -> None:
    """Two: one to choose, one to score the choice of each half on the other; and one of the training data for the fit,
    beside a probe of three."""
    train, val = Counting(*labelled(37).tensors), type("Held", (Counting,), {})(*labelled(60, seed=5).tensors)
    callback, model = LaplaceCallback(), Classifier()
    trainer = make_trainer(tmp_path, callback, max_epochs=1)
    trainer.fit(model, DataLoader(train, 8), DataLoader(val, 16))
    Counting.reads, type(val).reads = 0, 0
    callback.fit_now(trainer, model, trainer.train_dataloader)
    assert type(val).reads <= 3 * 60
    assert Counting.reads <= 37 + 5 * 3  # the fit; a probe, and four looks at whether it stays the same
    type(val).reads = 0
    LaplaceCallback(tune="marglik", calibrate=None).fit_now(trainer, model, trainer.train_dataloader)
    assert type(val).reads == 0


def test_it_says_and_logs_what_it_brings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback, logger = LaplaceCallback(), CSVLogger(tmp_path)
    with caplog.at_level(logging.INFO):
        make_trainer(tmp_path, callback, logger=logger).fit(Classifier(), train_loader(), validation())
    line = next(record.message for record in caplog.records if "two-fold" in record.message)
    for who in ("MAP nll", "MAP + temperature nll", "laplace nll", "ece"):
        assert who in line
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    for name in ("held_out_nll_map", "held_out_nll_map_tempered", "held_out_nll_laplace", "held_out_ece_laplace"):
        assert name in header


@pytest.mark.parametrize(
    ("words", "chosen_by_evidence"),
    [({}, False), ({"tune": "grid"}, False), ({"tune": None}, False), ({"tune": "marglik"}, True), ("no data", True)],
)
def test_loggers_get_what_a_person_reads_and_the_evidence_of_a_prior_that_it_chose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, words: Any, chosen_by_evidence: bool
) -> None:
    data = [train_loader()] if words == "no data" else [train_loader(), validation()]
    callback, logger = LaplaceCallback(**({} if words == "no data" else words)), CSVLogger(tmp_path)
    with caplog.at_level(logging.INFO):
        make_trainer(tmp_path, callback, logger=logger).fit(Classifier(), *data)
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    scores = {f"held_out_{metric}_{who}" for metric in ("nll", "ece") for who in ("map", "map_tempered", "laplace")}
    expected = {"prior_precision_laplace"} | (set() if words == "no data" else scores)
    expected |= {"log_evidence_laplace"} if chosen_by_evidence else set()
    assert set(header) - {"epoch", "step", "val_loss"} == expected
    (line,) = [record.message for record in caplog.records if "n_data 37" in record.message]
    assert "effective_parameters" in line
    assert ("log_evidence" in line) == chosen_by_evidence


def test_the_scores_of_a_checkpoints_weights_are_said_and_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those in the log are of the weights in memory."""

    class Told(Classifier):
        def on_train_epoch_end(self) -> None:
            self.log("at", float(self.current_epoch))

    callback, logger = LaplaceCallback(), CSVLogger(tmp_path)
    first = ModelCheckpoint(tmp_path / "checkpoints", monitor="at", mode="min", filename="first")
    with caplog.at_level(logging.INFO):
        make_trainer(tmp_path, callback, first, logger=logger, enable_checkpointing=True).fit(
            Told(), train_loader(), validation()
        )
    lines = [record.message for record in caplog.records if "two-fold" in record.message]
    assert [line.partition(":")[0] for line in lines] == ["laplace", "laplace of first.ckpt"]
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    (value,) = [row["held_out_nll_laplace"] for row in rows if row.get("held_out_nll_laplace")]
    assert f"laplace nll {float(value):.4g}," in lines[0]
    assert f"laplace nll {float(value):.4g}," not in lines[1]


def test_halves_choose_for_each_other() -> None:
    """By hand: the choice of even examples is scored on odd ones, and vice versa."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = labelled(40).tensors
    posterior = fit_laplace(network, [(x.double(), y)])
    x, y = labelled(61, seed=5).tensors
    data = [(x[:20].double(), y[:20]), (x[20:21].double(), y[20:21]), (x[21:].double(), y[21:])]
    choice = survey(posterior, data, Scoring(of="probs"), tune=True, calibrate=True)
    scores = choices.two_fold(choice, data)
    expected, plain, tempered = [], [], []
    for half in (0, 1):
        rows = slice(half, None, 2)
        chosen = choice.on(slice(1 - half, None, 2))
        p = chosen.predict(x[rows].double()).probs
        expected.append(-p.log()[torch.arange(len(p)), y[rows]])
        plain.append(nn.functional.cross_entropy(network(x[rows].double()), y[rows], reduction="none"))
        T = choice.plain_on(slice(1 - half, None, 2)).output_temperature
        tempered.append(nn.functional.cross_entropy(network(x[rows].double()) / T, y[rows], reduction="none"))
    for found, parts in ((scores.posterior, expected), (scores.plain, plain), (scores.tempered, tempered)):
        assert found["nll"] == pytest.approx(float(torch.cat(parts).detach().mean()), rel=1e-6)


def test_it_warns_where_the_posterior_does_not_help(recwarn: pytest.WarningsRecorder) -> None:
    worse = choices.HeldOutScores({"nll": 0.2}, {"nll": 0.19}, {"nll": 0.5}, 0.1)
    compared = r"beyond MAP . temperature \(held-out NLL 0.5, MAP 0.2, MAP . temperature 0.19\)"
    with pytest.warns(UserWarning, match=rf"does not improve.* {compared}, and the posterior was kept: .*ve='map'"):
        worse.say("laplace")
    with pytest.warns(UserWarning, match=rf"{compared}, and the plain network was chosen: .* tune='marglik'"):
        worse.say("laplace", plain="the plain network")
    recwarn.clear()
    choices.HeldOutScores({"nll": 0.2}, {"nll": 0.19}, {"nll": 0.195}, 0.001).say("laplace")
    choices.HeldOutScores({"nll": 0.2}, {"nll": 0.19}, {"nll": 0.5}, 0.2).say("laplace")
    assert not recwarn.list


def test_it_says_that_the_plain_network_was_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The network is underconfident, so without a temperature any variance makes it worse."""
    torch.manual_seed(0)
    x, new = (labelled(400, seed).tensors[0] for seed in (5, 6))
    callback, model = LaplaceCallback(calibrate=None), Classifier(lr=0.02)
    train, val = (DataLoader(TensorDataset(part, part[:, :3].argmax(1)), 16) for part in (x, new))
    with caplog.at_level(logging.INFO):
        make_trainer(tmp_path, callback, max_epochs=3).fit(model, train, val)
    line = next(record.message for record in caplog.records if "two-fold" in record.message)
    assert "; the plain network was chosen: the posterior adds nothing here" in line
    assert not callback.predict(x).epistemic.any()


def test_without_validation_data_the_evidence_decides_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = LaplaceCallback()
    with caplog.at_level(logging.INFO):
        make_trainer(tmp_path, callback).fit(Classifier(), train_loader())
    assert "no held-out data: the evidence chooses the prior" in caplog.text
    posterior = callback.posterior
    assert posterior.calibrations == ()
    expected = posterior.with_prior(1.0).tune_prior("linear")
    torch.testing.assert_close(posterior.prior_precision, expected.prior_precision)


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (DataLoader(TensorDataset(torch.randn(60, 4), torch.ones(60).long()), 16), "contain only one class"),
        (DataLoader(TensorDataset(torch.full((60, 4), torch.nan), torch.arange(60) % 3), 16), "NaN"),
        (DataLoader(TensorDataset(torch.randn(60, 4), torch.arange(60) % 3 + 5), 16), "the target"),
    ],
    ids=["one class", "nan", "unknown classes"],
)
def test_validation_data_that_cannot_be_used_are_said_and_not_used(
    tmp_path: Path, loader: DataLoader[Any], sentence: str
) -> None:
    class Careless(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

    callback = LaplaceCallback()
    with pytest.warns(UserWarning, match=f"validation data are not used to tune or calibrate: .*{sentence}"):
        make_trainer(tmp_path, callback).fit(Careless(), train_loader(), loader)
    assert callback.posterior.calibrations == ()
    assert callback.posterior.predict(torch.randn(2, 4)).probs.isfinite().all()


def test_a_regression_gets_noise_prior_and_coverage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback, model = LaplaceCallback("regression"), Regressor()
    data = DataLoader(measured(40), 8, shuffle=True), DataLoader(measured(80, seed=3), 16)
    with caplog.at_level(logging.INFO):
        make_trainer(tmp_path, callback).fit(model, *data)
    expected = fit_laplace(model, data[0], "regression").tune_prior("auto", data[1])
    torch.testing.assert_close(callback.posterior.likelihood.noise_std, expected.likelihood.noise_std)
    assert "coverage" in next(record.message for record in caplog.records if "two-fold" in record.message)
    assert callback.posterior.calibrations == ()  # the factor is in the noise


@pytest.mark.parametrize("words", [{"tune": "marglik"}, {"tune": None}, {"tune": "grid"}, {"calibrate": None}])
def test_tuning_and_calibration_are_apart(tmp_path: Path, words: dict[str, Any]) -> None:
    callback = LaplaceCallback(**words)
    make_trainer(tmp_path, callback).fit(Classifier(), train_loader(), validation())
    calibrated = words.get("calibrate", "auto") is not None
    assert len(callback.posterior.calibrations) == int(calibrated)
    if words.get("tune", "auto") is None:
        assert float(callback.posterior.prior_precision) == 1.0
    if not calibrated:  # the prior is the best one for the link of predictions that stay without a temperature
        again = callback.posterior.with_prior(1.0).tune_prior("auto", validation(), calibrate=None)
        torch.testing.assert_close(callback.posterior.prior_precision, again.prior_precision)


def test_a_temperature_of_the_outputs_by_name(tmp_path: Path) -> None:
    callback = LaplaceCallback(calibrate="outputs", predictive=GLM(link="probit"))
    make_trainer(tmp_path, callback).fit(Classifier(), train_loader(), validation())
    (calibration,) = callback.posterior.calibrations
    assert (calibration.link, calibration.probs_temperature) == ("probit", 1.0)
    assert calibration.output_temperature != 1.0


def test_l2m_is_tuned_on_validation_data_and_else_keeps_its_weight_decay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Decayed(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2, weight_decay=0.02)

    tuned, kept = L2MCallback(), L2MCallback()
    make_trainer(tmp_path, tuned).fit(Decayed(), train_loader(), validation())
    with caplog.at_level(logging.INFO):
        make_trainer(tmp_path, kept).fit(Decayed(), train_loader())
    assert tuned.posterior.calibrations
    assert not kept.posterior.calibrations
    torch.testing.assert_close(kept.posterior.prior_precision.mean(), torch.tensor(37 * 0.02))
    assert "the prior is kept" in caplog.text


def test_checkpoints_hold_the_calibration(tmp_path: Path) -> None:
    callback, model = LaplaceCallback(), Classifier()
    trainer = make_trainer(tmp_path, callback, enable_checkpointing=True)
    trainer.fit(model, train_loader(), validation())
    fresh = LaplaceCallback()
    other = Classifier()
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    checked = make_trainer(tmp_path, fresh, enable_checkpointing=True)
    checked.test(other, held_out(), ckpt_path=path, verbose=False)
    assert fresh.posterior.calibrations == callback.posterior.calibrations


def test_limited_validation_data_are_limited_here_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = choices.validation_data

    def watched(*arguments: Any) -> Any:
        data = original(*arguments)
        assert data is not None
        seen.extend(len(y) for _, y in data)
        return data

    monkeypatch.setattr(choices, "validation_data", watched)
    make_trainer(tmp_path, LaplaceCallback(), limit_val_batches=2).fit(Classifier(), train_loader(), validation())
    assert sum(seen) == 64


def test_the_plain_network_gets_its_temperature_and_test_scores_it_without(tmp_path: Path) -> None:
    callback, model = LaplaceCallback(predictive="map"), Classifier()
    trainer = make_trainer(tmp_path, callback)
    trainer.fit(model, train_loader(), validation())
    (calibration,) = callback.posterior.calibrations
    assert calibration.predictive == "map"
    assert calibration.output_temperature != 1.0
    scores = trainer.test(model, held_out(), verbose=False)[0]
    x, y = labelled(11, seed=5).tensors
    plain = float(nn.functional.cross_entropy(model.eval()(x), y).detach())
    assert scores["test_nll_map"] == pytest.approx(plain, rel=1e-5)
    assert scores["test_nll_laplace"] != pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_hardly_any_validation_data_do_not_end_a_fit(tmp_path: Path, n: int) -> None:
    class Careless(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

    for likelihood, module, data in (("classification", Careless(), labelled), ("regression", Regressor(), measured)):
        callback = LaplaceCallback(likelihood)
        val = DataLoader(data(n, seed=5), batch_size=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_trainer(tmp_path, callback).fit(module, DataLoader(data(37), 8), val)
        prediction = callback.posterior.predict(torch.randn(2, 4))
        assert prediction.entropy.isfinite().all()


@pytest.mark.filterwarnings("ignore:Total length of")  # Lightning's own
@pytest.mark.parametrize("nothing", [[], {}, [[]]], ids=["list", "dict", "nested"])
def test_an_empty_collection_of_validation_loaders_is_none(tmp_path: Path, nothing: Any) -> None:
    class Unvalidated(Classifier):
        def val_dataloader(self) -> Any:
            return nothing

    priors = []
    for model in (Unvalidated(), Classifier()):
        torch.manual_seed(0)
        model.load_state_dict(Classifier().state_dict())
        torch.manual_seed(0)
        make_trainer(tmp_path, callback := LaplaceCallback()).fit(model, DataLoader(labelled(37), 8))
        priors.append(callback.posterior.prior_precision)
        again = callback.fit_now(None, model, DataLoader(labelled(37), 8), val_dataloader=nothing)
        priors.append(again.prior_precision)
    assert len({float(prior) for prior in priors}) == 1
    callback = LaplaceCallback(tune="grid")
    with pytest.raises(RuntimeError, match="tune='grid' needs validation data"):
        make_trainer(tmp_path, callback).fit(Unvalidated(), DataLoader(labelled(37), 8))
    with pytest.raises(RuntimeError, match="tune='grid' needs validation data"):
        callback.fit_now(None, Classifier(), DataLoader(labelled(37), 8), val_dataloader=nothing)


def test_l2m_keeps_its_weight_decay_where_validation_data_cannot_be_used(tmp_path: Path) -> None:
    class Decayed(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2, weight_decay=0.02)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

    callback = L2MCallback()
    one_class = DataLoader(TensorDataset(torch.randn(60, 4), torch.ones(60).long()), 16)
    with pytest.warns(UserWarning, match="validation data are not used"):
        make_trainer(tmp_path, callback).fit(Decayed(), train_loader(), one_class)
    torch.testing.assert_close(callback.posterior.prior_precision.mean(), torch.tensor(37 * 0.02))
