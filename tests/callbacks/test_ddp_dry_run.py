"""The dry run on several processes: each looks at its own batch, and none waits for another."""

from pathlib import Path

from helpers.processes import launched

WORKER = str(Path(__file__).with_name("ddp_dry_run_worker.py"))


def test_an_error_on_one_process_is_said_and_leaves_none_hanging(tmp_path: Path) -> None:
    with launched(WORKER, tmp_path, 2) as processes:
        said = ["".join(process.communicate(timeout=120)) for process in processes]
    assert all("the first fit is over" in text for text in said), said[0]
    assert all(process.returncode for process in processes)
    assert "Categorical got the target 10" in said[1]
