"""A first program: small networks that know eight digits, and inputs that are none of them.

Five networks train on the digits 0–7 as usual, with one more callback. Then they see what they were never trained on:
the digits 8 and 9, letters, tiles of photographs, and noise. A method raises an alarm if a score exceeds a threshold:
the entropy of the plain network (MAP), the entropy or mutual information of an ensemble of all five, the entropy or
novelty of the Laplace posterior at default settings. 5 % of the validation digits exceed the threshold of a single
score, 2.5 % that of each of two. Inputs, scores and sizes were chosen on other networks (`--seed 20`).

    python recipes/quickstart.py    # half a minute; table, picture and posteriors go to outputs/quickstart/
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import lightning as L
import torch
from digits import KNOWN, Digits, Predictor, draw_alarms, other_inputs, read_digits, score
from program import QUIET, Run, averaged, progress, start
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_bayes import DeepEnsemble, GaussianPosterior, LaplaceCallback


@dataclass(frozen=True)
class Settings:
    networks: int = 5
    epochs: int = 60


class DigitNet(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.layers = nn.Sequential(*hidden, nn.Linear(128, KNOWN))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def train(run: Run, digits: Digits, seed: int) -> GaussianPosterior:
    """Train as usual. The callback adds one exact pass over the data and chooses the prior on validation images."""
    L.seed_everything(seed, verbose=False)
    laplace = LaplaceCallback("classification", save=str(run.output / f"posterior_{seed}.pt"), progress=False)
    trainer = L.Trainer(max_epochs=run.settings.epochs, callbacks=[laplace], accelerator="cpu", **QUIET)
    trainer.fit(DigitNet(), DataLoader(digits.train, 32, shuffle=True), DataLoader(digits.validation, 100))
    return laplace.posterior


def methods_of(posteriors: list[GaussianPosterior], digits: Digits) -> dict[str, tuple[list[Predictor], list[str]]]:
    """For each method, a predictor of each network or one for all of them, and the scores that raise its alarm."""
    validation = DataLoader(digits.validation, 100)
    tempered = [posterior.calibrate(validation, predictive="map") for posterior in posteriors]
    ensemble = partial(DeepEnsemble(posteriors).predict, predictive="map")
    return {
        "MAP": ([partial(p.predict, predictive="map", calibrated=False) for p in posteriors], ["entropy"]),
        "MAP + temperature": ([partial(p.predict, predictive="map") for p in tempered], ["entropy"]),
        "Laplace": ([p.predict for p in posteriors], ["entropy", "novelty"]),
        f"ensemble of {len(posteriors)}": ([ensemble], ["entropy", "mutual_information"]),
    }


def alarm_of(predict: Predictor, scores: list[str], digits: Digits) -> Callable[[Tensor], Tensor]:
    """A function that raises an alarm if one of the scores exceeds its threshold.  # [B, 64] -> bool [B]"""
    known = predict(digits.validation.tensors[0])
    thresholds = {name: getattr(known, name).quantile(1 - 0.05 / len(scores)) for name in scores}
    return lambda x: torch.stack([getattr(predict(x), name) > t for name, t in thresholds.items()]).any(0)


def judge(predict: Predictor, scores: list[str], digits: Digits) -> dict[str, float]:
    """Scores of the probabilities of known digits, and the share of each kind of input that raises an alarm."""
    (x, y), alarm = digits.test.tensors, alarm_of(predict, scores, digits)
    kinds = {"false alarms": x, **digits.unknown}
    return score(predict(x).probs, y) | {kind: float(alarm(x).float().mean()) for kind, x in kinds.items()}


def verdict(table: dict[str, dict[str, float]]) -> str:
    plain, tempered, laplace, _ = table.values()
    gap = laplace["NLL"] - tempered["NLL"]
    size = "as good as" if abs(gap) < 0.005 else "better than" if gap < 0 else "worse than"
    alarms = ", ".join(f"{kind} {plain[kind]:.0%} → {laplace[kind]:.0%}" for kind in list(plain)[3:])
    return f"Laplace's probabilities are {size} a temperature's. Alarms, MAP → Laplace: {alarms}."


def main() -> None:
    run = start(__doc__, "quickstart", {"default": Settings(), "fast": Settings(2, 2)}, threads=1)
    digits, seeds = read_digits(), progress(run.seeds(run.settings.networks), "trainings")
    digits.unknown.update(other_inputs())
    methods = methods_of([run.posterior(f"{seed}", DigitNet(), train, run, digits, seed) for seed in seeds], digits)
    table = {name: averaged([judge(p, scores, digits) for p in group]) for name, (group, scores) in methods.items()}
    run.save_table("table", table)
    print(f"\n{verdict(table)}")
    plain, (laplace, scores) = methods["MAP"][0], methods["Laplace"]
    run.save_picture("unknown", draw_alarms(plain[0], alarm_of(laplace[0], scores, digits), digits), dpi=150)


if __name__ == "__main__":
    main()
