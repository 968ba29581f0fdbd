"""Tables 1 and 2 of the Variational Laplace paper beside the results of `tables.py`, and which of the paper's
statements hold there."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean, median

from recipes.papers.claims import Claim, verdict
from recipes.papers.variational_laplace.preact_resnet import STAGES, PreActResNet
from recipes.papers.variational_laplace.results import METHODS, SCORES, Results
from recipes.program import markdown, spread, standard_error

PAPER: dict[str, dict[str, tuple[float, float, float]]] = {  # test NLL, accuracy and ECE of table 1
    "CIFAR10": {
        "VL": (0.23, 0.924, 0.017),
        "VI (mean)": (0.37, 0.911, 0.053),
        "VI (10 samples)": (0.35, 0.902, 0.044),
        "MAP": (0.43, 0.908, 0.058),
    },
    "CIFAR100": {
        "VL": (1.00, 0.714, 0.024),
        "VI (mean)": (1.29, 0.688, 0.100),
        "VI (10 samples)": (1.49, 0.673, 0.026),
        "MAP": (1.61, 0.675, 0.159),
    },
    "SVHN": {
        "VL": (0.14, 0.971, 0.009),
        "VI (mean)": (0.16, 0.963, 0.012),
        "VI (10 samples)": (0.22, 0.955, 0.022),
        "MAP": (0.24, 0.957, 0.028),
    },
    "FashionMNIST": {
        "VL": (0.16, 0.946, 0.010),
        "VI (mean)": (0.23, 0.940, 0.034),
        "VI (10 samples)": (0.29, 0.936, 0.016),
        "MAP": (0.29, 0.936, 0.096),
    },
}
PAPER_SECONDS = {"VL": 114.9, "VI": 43.2, "MAP": 41.8}  # seconds per epoch of CIFAR-10 on the paper's GPUs, table 2


def report(folder: Path) -> str:
    """The report as Markdown, from the CSVs of the folder."""
    results = Results.read(folder)
    parts = ["# Variational Laplace: tables 1 and 2, figures 1 and 2", describe(results)]
    if not results.datasets:
        return "\n\n".join([*parts, "Unfinished: no seed has all its trainings yet."])
    for dataset in results.datasets:
        parts.append(f"## {dataset}")
        if (seeds := results.seeds(dataset)) < results.settings["seeds"]:
            parts.append(f"Unfinished: {seeds} of {results.settings['seeds']} seeds.")
        parts += [
            "Table 1: test images, at the β of the best mean validation NLL (*: the first or last β of the sweep). "
            "The paper's number is beside each of ours.",
            table_1(results, dataset),
            "The same as the paper reports it, the best of each number over β on the test images:",
            table_of_best(results, dataset),
            "Figure 1 as numbers:",
            table_of_betas(results, dataset),
            "Figure 2 as numbers; ELBO per example at the first fall of the learning rate and at the end, and how far "
            "log σ has moved on average:",
            table_of_multipliers(results, dataset),
            verdict(claims(results, dataset)),
        ]
    parts += ["## Table 2", "Processor seconds per epoch, the median of all:", table_2(results)]
    parts += ["Pictures: `figure_1.png`, `figure_2.png`."]
    return "\n\n".join(parts)


def describe(results: Results) -> str:
    s = results.settings
    depth = 2 + 2 * len(STAGES) * s["blocks"]
    sizes = [
        sum(p.numel() for p in PreActResNet(channels, 10, s["width"], s["stride"], s["blocks"]).parameters())
        for channels in (1, 3)
    ]
    n_train, n_test = (f"{n:,}" if (n := s[name]) is not None else "all other" for name in ("n_train", "n_test"))
    seeds = s["seeds"]
    text = (
        f"PreActResNet-{depth} with softplus, width {s['width']}, first stride {s['stride']} ({sizes[0]:,} weights for "
        f"grey images, {sizes[1]:,} for colours); {n_train} training images, {s['n_validation']:,} for validation, "
        f"{n_test} for the test; {s['epochs']} epochs, batches of {s['batch']}, Adam with learning rate {s['lr']:g}, "
        f"divided by 10 after half and three quarters; {seeds} seed{'s' * (seeds > 1)}; "
        f"± is the standard error of the mean over seeds."
    )
    if s["n_train"] is not None:
        reach = s["lr"] * -(-s["n_train"] // s["batch"]) * (s["epochs"] // 2)
        text += (
            f" With multiplier 1, log σ can move by at most {reach:.2g} before the learning rate falls (the paper: 4), "
            "and starts 3 below the prior."
        )
    return text


# -- tables ------------------------------------------------------------------------------------------------------------


def table_1(results: Results, dataset: str) -> str:
    rows = []
    for method in METHODS:
        β = results.beta(dataset, method)
        edge = "*" if β in (results.betas[0], results.betas[-1]) else ""
        rows.append([method, f"{β:g}{edge}"])
        for place, score in enumerate(SCORES):
            rows[-1] += [spread(results.chosen(dataset, method, score)), _paper(dataset, method, place)]
    return markdown(["", "β", *(name for score in SCORES.values() for name in (score, "paper"))], rows)


def table_of_best(results: Results, dataset: str) -> str:
    rows = []
    for method in METHODS:
        rows.append([method])
        for place, score in enumerate(SCORES):
            choose = max if score == "acc" else min
            values = {β: results.scores(dataset, method, score, β) for β in results.betas}
            β = choose(values, key=lambda β: mean(values[β]))
            rows[-1] += [f"{spread(values[β])} (β {β:g})", _paper(dataset, method, place)]
    return markdown(["", *(name for score in SCORES.values() for name in (score, "paper"))], rows)


def table_of_betas(results: Results, dataset: str) -> str:
    rows = [
        [method, f"{β:g}", spread(results.scores(dataset, method, "nll", β, split="validation"))]
        + [spread(results.scores(dataset, method, score, β)) for score in SCORES]
        for method in METHODS
        for β in results.betas
    ]
    return markdown(["", "β", "validation NLL", *SCORES.values()], rows)


def table_of_multipliers(results: Results, dataset: str) -> str:
    rows = []
    for β in results.settings["multiplier_betas"]:
        for method in ("VI", "VL"):
            for m in results.multipliers:
                elbo, moved = (results.curves(dataset, method, β, m, what) for what in ("elbo", "log_sigma_moved"))
                row = [method, f"{β:g}", f"{m:g}", spread([c[_fall(results)] for c in elbo])]
                row += [spread([c[-1] for c in elbo]), spread([c[-1] for c in moved], 2)]
                for score in ("nll", "acc"):
                    row.append(spread(results.scores(dataset, _at_mean(method), score, β, m)))
                samples = results.scores(dataset, "VI (10 samples)", "nll", β, m) if method == "VI" else None
                rows.append([*row, samples and spread(samples)])
    columns = ["", "β", "multiplier", "ELBO, first fall", "ELBO, end", "log σ moved"]
    return markdown([*columns, "NLL at the mean", "accuracy at the mean", "NLL, 10 samples"], rows)


def table_2(results: Results) -> str:
    """A table of the time per epoch, also relative to MAP's."""
    seconds = {m: median(row["seconds"] for row in results.epoch_rows if row["method"] == m) for m in PAPER_SECONDS}
    rows = [
        [m, f"{value:.2f}", f"{value / seconds['MAP']:.2f}", f"{p:.1f}", f"{p / PAPER_SECONDS['MAP']:.2f}"]
        for (m, value), p in zip(seconds.items(), PAPER_SECONDS.values(), strict=True)
    ]
    return markdown(["", "seconds", "of MAP's", "paper: seconds", "of MAP's"], rows)


def _paper(dataset: str, method: str, place: int) -> str | None:
    if dataset not in PAPER:
        return None
    return f"{PAPER[dataset][method][place]:.3f}"


# -- statements --------------------------------------------------------------------------------------------------------


def claims(results: Results, dataset: str) -> list[Claim]:
    stated = [best(results, dataset, "VL", score) for score in SCORES]
    if dataset in PAPER:
        stated += [order(results, dataset, score) for score in SCORES]
    stated += [at_many_betas(results, dataset, score) for score in SCORES]
    if len(results.multipliers) > 1:
        for β in results.settings["multiplier_betas"]:
            stated += early_stopping(results, dataset, β)
    return stated


def best(results: Results, dataset: str, method: str, score: str) -> Claim:
    values = {m: results.chosen(dataset, m, score) for m in METHODS}
    others = [m for m in METHODS if m != method]
    rival = max(others, key=lambda m: _sign(score) * mean(values[m]))
    gains = [_sign(score) * (a - b) for a, b in zip(values[method], values[rival], strict=True)]
    numbers = f"{spread(values[method])}; {rival}: {spread(values[rival])}; better by {gained(gains)}"
    return Claim(f"{method} has the best {SCORES[score]}", mean(gains) > 0, numbers)


def order(results: Results, dataset: str, score: str) -> Claim:
    """Compare every pair of methods that have different numbers in the paper."""
    place, sign = list(SCORES).index(score), _sign(score)
    papers = {m: sign * PAPER[dataset][m][place] for m in METHODS}
    values = {m: [sign * value for value in results.chosen(dataset, m, score)] for m in METHODS}
    ours = {m: mean(values[m]) for m in METHODS}
    pairs = [(a, b) for a, b in combinations(METHODS, 2) if papers[a] != papers[b]]
    kept = sum((papers[a] > papers[b]) == (ours[a] > ours[b]) for a, b in pairs)
    ranked = sorted(METHODS, key=lambda m: -ours[m])
    gaps = [[a - b for a, b in zip(values[m], values[n], strict=True)] for m, n in pairwise(ranked)]
    best_first = ", ".join([ranked[0], *(f"{spread(gap)} before {m}" for gap, m in zip(gaps, ranked[1:], strict=True))])
    statement = f"the order of methods by {SCORES[score]} is {', '.join(sorted(METHODS, key=lambda m: -papers[m]))}"
    return Claim(statement, kept == len(pairs), f"{kept} of {len(pairs)} pairs; here: {best_first}")


def at_many_betas(results: Results, dataset: str, score: str) -> Claim:
    def mean_of(method: str, β: float) -> float:
        return _sign(score) * mean(results.scores(dataset, method, score, β))

    won = [β for β in results.betas if mean_of("VL", β) > max(mean_of(m, β) for m in METHODS if m != "VL")]
    numbers = f"{len(won)} of {len(results.betas)}: {', '.join(f'{β:g}' for β in won) or 'none'}"
    statement = f"for many values of β, VL has a better {SCORES[score]} than VI and MAP at the same β"
    return Claim(statement, 2 * len(won) >= len(results.betas), numbers)


def early_stopping(results: Results, dataset: str, β: float) -> list[Claim]:
    """The statements of section 5.1."""
    slow, fast = results.multipliers[0], results.settings["multiplier"]
    largest = results.multipliers[-1]
    elbo = {method: {m: results.curves(dataset, method, β, m) for m in results.multipliers} for method in ("VI", "VL")}
    nll = {
        method: {m: results.scores(dataset, method, "nll", β, m) for m in results.multipliers} for method in METHODS[:3]
    }
    stated, gains = [], {}
    for method, curves in elbo.items():
        pairs = zip(curves[fast], curves[slow], strict=True)
        gains[method] = [a[-1] - b[-1] for a, b in pairs]
        stated.append(
            Claim(
                f"β = {β:g}: with multiplier {slow:g} {method} stops early, and {fast:g} ends with a higher ELBO",
                mean(gains[method]) > 0,
                f"higher by {gained(gains[method])}",
            )
        )
        if method == "VI":
            at_end = [mean(curve[-1] for curve in curves[m]) for m in results.multipliers]
            numbers = ", ".join(f"× {m:g}: {value:.3f}" for m, value in zip(results.multipliers, at_end, strict=True))
            text = f"β = {β:g}: the larger the multiplier, the higher the ELBO of VI in the end"
            stated.append(Claim(text, at_end == sorted(at_end), numbers))
    vi, vl = mean(gains["VI"]), mean(gains["VL"])
    stated.append(Claim(f"β = {β:g}: VL stops less early than VI", vl < vi, f"ELBO higher by {vl:.3f}; VI: {vi:.3f}"))
    for method in ("VI (mean)", "VI (10 samples)"):
        losses = [a - b for a, b in zip(nll[method][largest], nll[method][slow], strict=True)]
        statement = f"β = {β:g}: from multiplier {slow:g} to {largest:g} the test NLL of {method} gets worse"
        stated.append(Claim(statement, mean(losses) > 0, f"by {gained(losses)}"))
    ranges = {m: max(map(mean, v.values())) - min(map(mean, v.values())) for m, v in nll.items()}
    stated.append(
        Claim(
            f"β = {β:g}: the test NLL of VL depends less on the multiplier than that of VI",
            ranges["VL"] < min(ranges["VI (mean)"], ranges["VI (10 samples)"]),
            "largest minus smallest: " + ", ".join(f"{m} {value:.3f}" for m, value in ranges.items()),
        )
    )
    return stated


def gained(gains: list[float]) -> str:
    """Differences of two training runs with the same seed: the mean, and whether it exceeds the noise."""
    text = f"{spread(gains)}, in {sum(gain > 0 for gain in gains)} of {len(gains)} seeds"
    if len(gains) > 1 and abs(mean(gains)) < 2 * standard_error(gains):
        text += ", less than two standard errors"
    return text


def _sign(score: str) -> int:
    """1 if larger is better, otherwise −1."""
    return 1 if score == "acc" else -1


def _at_mean(method: str) -> str:
    return "VI (mean)" if method == "VI" else method


def _fall(results: Results) -> int:
    """The index of the last epoch with the first learning rate."""
    return max(1, results.settings["epochs"] // 2) - 1
