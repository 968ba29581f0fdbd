"""Unknown inputs and rejection: which predictions to act on, and which to pass to a person.

A network that has seen 200 images of the digits 0–7 gets known digits, 8 and 9, and letters, and may decline to answer.
It answers above a confidence threshold, which is chosen on held-out digits: of the known digits that it answers, at
most 2 % are wrong, with 90 % certainty. This guarantee holds for each method; the methods differ in how many known
digits they answer, and how many unknown inputs they answer by mistake. A second table keeps 95 % of the known digits,
with 90 % certainty, by confidence or by `novelty_p`, the share of validation digits that are at least as novel. No
threshold guarantees anything about unknown inputs. Results are means over three networks.

    python recipes/rejection.py    # a minute; table and pictures go to outputs/rejection/
"""

from dataclasses import dataclass
from functools import partial

import lightning as L
import torch
from digits import KNOWN, Digits, Predictor, auroc, draw_scores, read_digits
from lit_digits import LitDigits
from matplotlib.figure import Figure
from program import QUIET, averaged, progress, start
from torch.utils.data import DataLoader

from lightning_bayes import GaussianPosterior, LaplaceCallback, metrics

RISK, COVERAGE, DELTA = 0.02, 0.95, 0.1


@dataclass(frozen=True)
class Settings:
    networks: int = 3
    epochs: int = 60
    n_train: int = 200


def train(digits: Digits, seed: int, epochs: int, tune: str) -> GaussianPosterior:
    """Train as usual, with a posterior. `tune="auto"` chooses the prior on validation images; "marglik" chooses it by
    the evidence, which makes the posterior wider. Both fit their temperature on the validation images."""
    L.seed_everything(seed, verbose=False)
    laplace = LaplaceCallback(tune=tune, progress=False)
    trainer = L.Trainer(max_epochs=epochs, callbacks=[laplace], accelerator="cpu", **QUIET)
    loaders = DataLoader(digits.train, 20, shuffle=True), DataLoader(digits.validation, 100)
    trainer.fit(LitDigits(classes=KNOWN), *loaders)
    return laplace.posterior


def judge(predict: Predictor, digits: Digits) -> dict[str, float]:
    """Every second test image chooses the threshold, which is applied to the others and to unknown inputs."""
    x, y = digits.test.tensors
    held_out, known = predict(x[::2]), predict(x[1::2])
    threshold = metrics.functional.threshold_for_risk(held_out.confidence, held_out.label == y[::2], RISK, DELTA)
    answered, right = known.confidence > threshold, known.label == y[1::2]
    row = {"accuracy": right, "answered": answered, "wrong of answered": ~right[answered]}
    row |= {f"{name} answered": predict(x).confidence > threshold for name, x in digits.unknown.items()}
    scores = {name: float(which.float().mean()) for name, which in row.items()}
    scores["AURC"] = float(metrics.functional.risk_coverage(known.confidence, right))
    return scores | {f"AUROC {name}": auroc(known.entropy, predict(x).entropy) for name, x in digits.unknown.items()}


def screen(predict: Predictor, score: str, digits: Digits) -> dict[str, float]:
    """The shares of inputs above a threshold that needs no labels."""
    x = digits.test.tensors[0]
    threshold = metrics.functional.threshold_for_coverage(getattr(predict(x[::2]), score), COVERAGE, DELTA)
    rows = {"known digits": x[1::2], **digits.unknown}
    return {f"{name} kept": float((getattr(predict(x), score) > threshold).float().mean()) for name, x in rows.items()}


def draw_curves(methods: dict[str, Predictor], digits: Digits) -> Figure:
    """Plot answers in order of confidence, most confident first; on the right, any answer for a letter is wrong."""
    (x, y), letters = digits.test.tensors, digits.unknown["letters"]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    axes = figure.subplots(1, 2)
    for name, predict in methods.items():
        known, unknown = predict(x), predict(letters)
        right, confidence = known.label == y, torch.cat([known.confidence, unknown.confidence])
        all_right = torch.cat([right, torch.zeros(len(letters), dtype=torch.bool)])
        for ax, case in zip(axes, [(known.confidence, right), (confidence, all_right)], strict=True):
            ax.plot(*metrics.functional.risk_coverage_curve(*case), label=name)
    for ax, title in zip(axes, ("known digits", "known digits and letters"), strict=True):
        ax.axhline(RISK, color="grey", linestyle=":")
        ax.set(title=title, xlabel="share answered", ylabel="share of wrong answers")
    axes[0].legend()
    return figure


def main() -> None:
    scales = {"default": Settings(), "fast": Settings(networks=1, epochs=15)}
    run, table, screens = start(__doc__, "rejection", scales, threads=1), {}, {}
    digits = read_digits(run.settings.n_train)
    for seed in progress(run.seeds(run.settings.networks), "networks"):
        methods = {}
        for name, tune in (("Laplace", "auto"), ("Laplace, evidence", "marglik")):
            words = (digits, seed, run.settings.epochs, tune)
            posterior = run.posterior(f"{seed} {tune}", LitDigits(classes=KNOWN), train, *words)
            methods.setdefault("MAP", partial(posterior.predict, predictive="map", calibrated=False))
            methods[name] = posterior.predict
        for name, predict in methods.items():
            table.setdefault(name, []).append(judge(predict, digits))
        for name, score in (("MAP", "confidence"), ("Laplace", "confidence"), ("Laplace", "novelty_p")):
            screens.setdefault(f"{name}, {score}", []).append(screen(methods[name], score, digits))
    for title, rows_of in (("table", table), ("screens", screens)):
        run.save_table(title, {name: averaged(rows) for name, rows in rows_of.items()})
    run.save_picture("curves", draw_curves(methods, digits))
    images, panels = (digits.test.tensors[0], digits.unknown["letters"]), (("MAP", "entropy"), ("Laplace", "novelty"))
    scores = {f"{name}: {score}": [getattr(methods[name](x), score) for x in images] for name, score in panels}
    run.save_picture("scores", draw_scores(scores, "known digits and letters"))


if __name__ == "__main__":
    main()
