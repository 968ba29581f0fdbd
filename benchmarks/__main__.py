"""`python -m benchmarks`: measure every case in a process of its own, and print one table of ratios per topic."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import torch

from benchmarks import (
    curvature,
    dense,
    diagonal,
    distributed,
    evidence,
    input_gradients,
    l2m,
    lora,
    online_step,
    peers,
    predictive,
    subnetwork,
    variational,
)
from benchmarks.isolate import GB, Failure, Job, Limits, Outcome, cores, run
from benchmarks.report import memory, number

TOPICS = {
    "curvature": curvature,
    "predictive": predictive,
    "dense": dense,
    "distributed": distributed,
    "variational": variational,
    "l2m": l2m,
    "online_step": online_step,
    "diagonal": diagonal,
    "evidence": evidence,
    "input_gradients": input_gradients,
    "subnetwork": subnetwork,
    "lora": lora,
}


def main() -> int:
    arguments = _arguments()
    jobs = [job for topic in TOPICS.values() for job in topic.jobs(arguments.quick)]
    pattern = f"*{arguments.only}*".lower()
    jobs = [job for job in jobs if fnmatch(job.name.lower(), pattern) and (arguments.peers or not _is_peer(job))]
    if not jobs:
        print(f"no case matches {arguments.only!r}", file=sys.stderr)
        return 2
    seconds = arguments.timeout or (30.0 if arguments.quick else 300.0)
    text = _conditions(arguments.quick, arguments.threads)
    outcomes = _measure(jobs, Limits(seconds, arguments.memory_gb * GB, arguments.threads))
    for name, topic in TOPICS.items():
        of_topic = {job: outcome for job, outcome in outcomes.items() if job.startswith(f"{name}/")}
        if of_topic:
            text += f"\n\n## {topic.TITLE}\n\n{(topic.__doc__ or '').strip()}\n\n{topic.report(of_topic)}"
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    failed = [job for job in jobs if not _is_peer(job) and isinstance(outcomes[job.name], Failure)]
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="cases whose name has this in it, e.g. 'MLP/*/ours'"
    )
    parser.add_argument("--quick", action="store_true", help="fewer examples and repeats: a smoke test, not numbers")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave the peers out")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the tables to this Markdown file")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="per case, default 300, quick 30")
    parser.add_argument(
        "--threads", type=int, default=cores(), help="default all cores; 1 on a machine in use by others"
    )
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB
    parser.add_argument(
        "--memory-gb", type=float, default=0.75 * physical, metavar="GB", help="per case, default 3/4 of the machine's"
    )
    return parser.parse_args()


def _is_peer(job: Job) -> bool:
    return job.name.rsplit("/", 1)[-1] in peers.BACKENDS + peers.LIBRARIES


def _measure(jobs: list[Job], limits: Limits) -> dict[str, Outcome]:
    """Every job in turn, with a line of progress for each."""
    outcomes: dict[str, Outcome] = {}
    for count, job in enumerate(jobs, start=1):
        print(f"[{count}/{len(jobs)}] {job.name} … ", end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        outcome = outcomes[job.name] = run(job, limits)
        if isinstance(outcome, Failure):
            summary = f"{outcome.kind} ({outcome.reason})"
        else:
            summary = f"{number(outcome.seconds)} s, ratio {number(outcome.ratio)}, {memory(outcome)}"
        print(f"{summary} [{time.perf_counter() - start:.0f} s]", file=sys.stderr, flush=True)
    return outcomes


def _conditions(quick: bool, threads: int) -> str:
    """What the numbers depend on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, **peers.installed()}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    load = os.getloadavg()[0]
    lines = ["# Benchmarks", "", f"{threads} of {cores()} cores; {listed}."]
    lines += [
        "Times are ratios to a plain forward+backward epoch of the same network and examples, measured in turn in one "
        "process. Memory is the process's peak resident set, in brackets what the work added to it."
    ]
    lines += [f"**Not an idle machine** (load {load:.1f}): only rough."] if load > 0.5 else []
    lines += ["**Quick run**: a smoke test; the numbers mean little."] if quick else []
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
