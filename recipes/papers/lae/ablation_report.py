"""The results of `ablation`: each row beside the authors' configuration, and the predictions of theory."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from recipes.papers.claims import Claim
from recipes.papers.lae.scores import SCORES
from recipes.program import Row, markdown, read_rows, spread

N, CHANNELS = 55_000, 64
AUTHORS = "the authors' configuration"
EQUAL = 5000.0  # the authors' newest code tests with this precision, because it does not load H
STEP = 0.05  # a change of an AUROC that counts as a difference


def report(folder: Path) -> str:
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))["settings"]
    rows: dict[str, list[Row]] = {}
    for row in read_rows(folder / "rows.csv"):
        rows.setdefault(row["row"], []).append(row)
    n_seeds = max(map(len, rows.values()), default=0)
    parts = [
        f"FashionMNIST → MNIST, online LAE: {settings['n_train']:,} of {N:,} images of {settings['pixels']} × "
        f"{settings['pixels']} pixels, {settings['channels']} of {CHANNELS} channels, at most {settings['epochs']} "
        f"epochs, {settings['hessian']} Hessian unless a row says otherwise, {settings['samples']} sampled networks, "
        f"AUROC on {settings['n_valid']:,} validation images and as many of MNIST; mean ± standard error over "
        f"{n_seeds} seed{'s' * (n_seeds != 1)}. The paper's figure 9 has no numbers in its text.",
        _rows(rows),
        '"start left" is the part of H₀ that is not forgotten at the end; "determined" is the share of weights whose '
        'precision comes mostly from the data; "brightness" is the rank correlation of output σ with the mean pixel. '
        "Errors are ‖x − f(x)‖² inside, of a sampled network and of the mean network. In the last two columns, all "
        f"weights of the trained network have the same precision, {EQUAL:.0f}, instead of the learned one.",
        "Without any network:",
        markdown(["score", "AUROC"], [[r["score"], r["AUROC"]] for r in read_rows(folder / "baselines.csv")], 3),
    ]
    if len(rows) > 1 and AUTHORS in rows:
        parts += [differences(rows)]
    without_network = max(r["AUROC"] for r in read_rows(folder / "baselines.csv"))
    checked = [
        f"- {'holds' if c.holds else 'does not hold'}: {c.statement} ({c.numbers})"
        for c in predictions(rows, without_network)
    ]
    parts += ["What was expected:", "\n".join(checked)]
    curve = read_rows(folder / "curve.csv")
    curve = [r for r in curve if r["step"].rsplit(" epoch ", 1)[0] == curve[0]["step"].rsplit(" epoch ", 1)[0]]
    columns = ["epoch", "error", *SCORES]
    parts += [f"{AUTHORS[0].upper()}{AUTHORS[1:]} in the course of training (curve.png):"]
    parts += [markdown(columns, [[r[name] for name in columns] for r in curve], 3)]
    return "\n\n".join(parts)


def _rows(rows: dict[str, list[Row]]) -> str:
    columns = ["", "error", "mean network", *SCORES, "brightness", "start left", "determined", "epochs"]
    columns += [f"{score}, equal variances" for score in SCORES[2:]]
    lines = []
    for name, of_row in rows.items():

        def both(key: str, digits: int = 3, of_row: list[Row] = of_row) -> str:
            return spread([r[key] for r in of_row], digits)

        line = [name, both("error", 2), both("error of the mean network", 2), *(both(score) for score in SCORES)]
        line += [f"{mean(r['output σ and brightness'] for r in of_row):.2f}"]
        line += [f"{mean(r['start left'] for r in of_row):.1e}", f"{mean(r['determined'] for r in of_row):.2f}"]
        line += [f"{mean(r['epochs'] for r in of_row):.0f}"]
        lines.append([*line, *(both(f"{score}, equal variances") for score in SCORES[2:])])
    return markdown(columns, lines)


def differences(rows: dict[str, list[Row]]) -> str:
    """Changes that move an AUROC consistently: differences between runs with the same seed."""
    first = {r["seed"]: r for r in rows[AUTHORS]}
    lines = []
    for name, of_row in rows.items():
        if name == AUTHORS:
            continue
        moved = []
        for score in SCORES:
            changes = [r[score] - first[r["seed"]][score] for r in of_row if r["seed"] in first]
            if changes and min(abs(c) for c in changes) > STEP and len({c > 0 for c in changes}) == 1:
                moved.append(f"{score} {mean(changes):+.2f}")
        lines.append(f"- {name}: {', '.join(moved) or 'nothing'}")
    head = f"What a row changes by more than {STEP} with every seed, in the same direction:"
    return "\n".join([head, "", *lines])


def predictions(rows: dict[str, list[Row]], without_network: float) -> list[Claim]:
    """The predictions of theory, and whether they hold for the available rows."""
    average = {
        name: {key: mean(r[key] for r in of_row) for key in of_row[0] if isinstance(of_row[0][key], float)}
        for name, of_row in rows.items()
    }
    claims = []
    if row := average.get("memory factor 1e-4 (paper)"):
        numbers = f"{row['start left']:.2f} of the start is left; AUROC {row['output σ']:.3f}"
        holds = row["output σ"] < 0.5
        claims.append(Claim("while the start is remembered, output σ is larger inside than outside", holds, numbers))
    equal = {score: [row[f"{score}, equal variances"] for row in average.values()] for score in SCORES[2:]}
    if average:
        numbers = ", ".join(f"{score}: AUROC at most {max(values):.3f}" for score, values in equal.items())
        holds = all(max(values) < 0.5 for values in equal.values())
        claims.append(Claim("with equal variances σ is larger inside than outside, in every row", holds, numbers))
    for name in ("without the factor ½", "summed loss"):
        if name in average and AUTHORS in average:
            changes = [average[name][score] - average[AUTHORS][score] for score in SCORES]
            numbers = ", ".join(f"{score} {change:+.3f}" for score, change in zip(SCORES, changes, strict=True))
            text = f"{name}: no AUROC changes by more than {STEP}"
            claims.append(Claim(text, all(abs(change) <= STEP for change in changes), numbers))
    if AUTHORS in average:
        best = max(average[AUTHORS][score] for score in SCORES)
        numbers = f"{best:.3f} and {without_network:.3f}"
        claims.append(Claim(f"{AUTHORS} beats every score without a network", best > without_network, numbers))
    return claims


def picture(folder: Path) -> Figure:
    """Plot the AUROC by epoch for every seed."""
    figure = Figure(figsize=(9, 3.4), layout="constrained", dpi=110)
    rows = read_rows(folder / "curve.csv")
    steps = dict.fromkeys(r["step"].rsplit(" epoch ", 1)[0] for r in rows)
    for ax, score in zip(figure.subplots(1, 2, sharey=True), SCORES[2:], strict=True):
        for step in steps:
            points = [(r["epoch"], r[score]) for r in rows if r["step"].rsplit(" epoch ", 1)[0] == step]
            ax.plot(*zip(*points, strict=True), color="#D55E00", marker="o", linewidth=1.6)
        ax.axhline(0.5, color="black", linewidth=0.6)
        ax.set(title=f"{score}, {AUTHORS}", xlabel="epoch", xscale="log", ylabel="AUROC", ylim=(0, 1))
    return figure
