"""Warnings, reports and details: where they appear, and that nothing in the package speaks in another way."""

import inspect
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.training import LitNet, loader, trainer

import lightning_bayes
from lightning_bayes import BayesWarning, L2MCallback
from lightning_bayes.network.messages import detail, inform, warn

ROOT = Path(lightning_bayes.__file__).parent
OTHER_WAYS = r"rank_zero_(warn|info)|warnings\.warn\(|getLogger|rank_zero_only|\bprint\(|sys\.std(out|err)"


def test_a_warning_names_the_users_line(tmp_path: Path) -> None:
    run = trainer(tmp_path, L2MCallback(progress=False), gradient_clip_val=1.0, max_epochs=1)
    with pytest.warns(BayesWarning, match="gradients are clipped") as said:
        run.fit(LitNet(), loader(n=23))
    (clipped,) = (warning for warning in said if "clipped" in str(warning.message))
    source, start = inspect.getsourcelines(test_a_warning_names_the_users_line)
    assert clipped.filename == __file__
    assert "run.fit" in source[clipped.lineno - start]


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_only_the_first_process_speaks(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for other in ("RANK", "LOCAL_RANK"):  # a Trainer may have set them
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, "1")
    warn("an error in a test, if it appeared")
    inform("not said")
    with pytest.warns(BayesWarning, match="of rank 1"):
        warn("of rank %d", 1, from_all=True)
    monkeypatch.setenv(variable, "0")
    inform("said")
    assert caplog.messages == ["said"]


def test_details_are_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    detail("not %s", "shown")
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        detail("it is %s", "shown")
    assert caplog.messages == ["it is shown"]


@pytest.mark.parametrize("configured", [True, False])
def test_reports_are_written_once(configured: bool) -> None:
    """By the program's own handler, if it has one, and otherwise to stderr."""
    setup = "import logging; logging.basicConfig(format='own: %(message)s'); " if configured else ""
    code = f"{setup}from lightning_bayes.network.messages import inform; inform('a report')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines() == ["own: a report" if configured else "a report"]
    assert not ran.stdout


def test_a_level_set_before_the_import_stays() -> None:
    setup = "import logging; logging.getLogger('lightning_bayes').setLevel(logging.ERROR)"
    code = f"{setup}; from lightning_bayes.network.messages import inform; inform('a report')"
    assert not subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr


def test_there_is_no_other_way_to_speak() -> None:
    files = [path for path in ROOT.rglob("*.py") if path.name != "messages.py"]
    assert [str(path) for path in files if re.search(OTHER_WAYS, path.read_text(encoding="utf-8"))] == []
