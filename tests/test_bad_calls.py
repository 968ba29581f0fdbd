"""Every call that cannot work ends in one clear sentence of ours, and leaves the user's network as it was."""

import inspect
import sys

import pytest
from bad_calls import TABLES, Table, Things, clearness


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Things:
    shared = Things(tmp_path_factory.mktemp("bad_calls"))
    shared.forget()
    return shared


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.of)
def test_bad_calls_end_in_a_clear_sentence(table: Table, things: Things) -> None:
    """One sentence, raised by a line of the package, with the words that name the culprit and the way out."""
    problems = {}
    for row in table.rows:
        if problem := clearness(row, things):
            problems[str(row)] = problem
        things.check_untouched()
        things.forget()
    assert problems == {}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.of)
def test_every_argument_is_in_the_catalogue(table: Table) -> None:
    """A new argument needs a row, or a reason why anything goes."""
    names = table.signature if isinstance(table.signature, list) else inspect.signature(table.signature).parameters
    known = {row.argument for row in table.rows} | set(table.anything)
    assert [name for name in names if name not in (*known, "self", "kwargs", "options")] == []


def test_every_public_call_has_a_table() -> None:
    """Except option objects, of which `tests/options` has one."""
    import lightning_bayes
    from lightning_bayes import metrics, options, plots

    ours = {table.of.removeprefix("plots.") for table in TABLES}
    without = {
        "GaussianPosterior": "made by a fit; its methods have tables",
        "LaplacePosterior": "made by a fit; its methods have tables",
        "MeasurementPosterior": "made by fit_measurements; its methods have tables",
        "Prediction": "made by predict; its methods have tables",
        "Conformal": "made by conformalize and Conformal.fit; its methods have tables",
        "Reconstruction": "made by encode and reconstruct",
        "Bernoulli": "no arguments",
        "HeteroscedasticGaussian": "no arguments",
        "VariationalInferenceMixin": "the same arguments as VariationalLaplaceMixin",
        "VariationalLastLayerMixin": "the same arguments as VariationalLaplaceMixin",
        "LogSigmaMultiplierMixin": "in the table of VariationalLaplaceMixin",
        "BayesWarning": "a warning",
        "MetricInputError": "an error",
        "ReliabilityBins": "made by reliability_bins",
        "functional": "a module",
    }
    public = [*lightning_bayes.__all__, *metrics.__all__, *metrics.functional.__all__, *plots.__all__]
    assert [name for name in public if name not in ours | set(without) | set(options.__all__)] == []


def test_pictures_need_matplotlib_when_the_callback_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_bayes import LaplaceCallback

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    LaplaceCallback(plots=False)
    with pytest.raises(ModuleNotFoundError, match="Plots need matplotlib"):
        LaplaceCallback(plots=True)
