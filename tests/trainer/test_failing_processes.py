"""Where one process fails beside something that all do together, all of them say so at once."""

from pathlib import Path

from failing_worker import CASES, SENTENCE
from helpers.processes import launched, results

SAID = {
    **dict.fromkeys(CASES, SENTENCE),
    **dict.fromkeys(("a label", "a label of a sharded network"), "7"),
    "the shapes of points": "different shapes",
    **dict.fromkeys(("put_posterior", "put_calibrations", "callback_state"), "missing.ckpt"),
    "the posterior's file": "posteriors",
}


def test_all_processes_end_with_the_same_sentence(tmp_path: Path) -> None:
    with launched(str(Path(__file__).with_name("failing_worker.py")), tmp_path, 2) as processes:
        first, second = results(tmp_path, processes)
    for name, sentence in SAID.items():
        own, other = first[name]["message"], second[name]["message"]
        assert sentence in own, (name, own, other)
        assert sentence in other, (name, own, other)
        assert [m.startswith("ProcessError: process ") for m in (own, other)].count(True) == 1, (name, own, other)
        assert max(first[name]["seconds"], second[name]["seconds"]) < 15, name
