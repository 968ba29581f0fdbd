"""The methods by name: each maps a trained network to a predictor. A new method is one more entry.

"default" is `LaplaceCallback(likelihood=…)` on a Trainer with validation data, "default, no validation" is the same
without validation data, and "L2M" is `L2MCallback(likelihood=…)`. The other names list their settings: structure,
tuning and the link for classes.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.practice.scores import Classes, Predicted, Predictor, Reals, of_posterior, score
from benchmarks.practice.subject import Subject
from benchmarks.practice.training import EVALUATION_BATCH, make_trainer
from lightning_bayes import GLM, L2MCallback, LaplaceCallback, SWAGCallback, Tuning, mc_dropout
from lightning_bayes.posterior import PosteriorError

MAP, TEMPERATURE, ENSEMBLE, PEER = "MAP", "MAP + temperature", "ensemble of 5", "laplace-torch"
STUDENT = "MAP + Student-t"
DEFAULT, UNVALIDATED, MARGLIK, L2M = "default", "default, no validation", "kron marglik probit", "L2M"
LAST_LAYER = "last layer auto"
TEMPERATURES = torch.logspace(-1.5, 1.5, 601)


class NotApplicable(Exception):
    """Raised if a method does not apply to a setup, with the reason."""


def measure(name: str, subject: Subject) -> dict[str, float]:
    """Return all numbers of one method on one setup. The cost covers the fit, but not the predictions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these warnings would appear hundreds of times
        subject.restart()
        predictor = METHODS[name](subject)
        cost = subject.cost()
        return {**score(predictor, subject.task), **cost}


def plain(subject: Subject) -> Predictor:
    """The plain network; for a regression, with the training RMSE as its noise."""
    σ = subject.train_rmse() if subject.is_regression else 1.0
    return _point(subject, σ)


def temperature(subject: Subject) -> Predictor:
    """Fit one number on validation data: a temperature on the logits, or the noise of a regression."""
    f, y = subject.validation_outputs(), subject.task.val.y
    if subject.is_regression:
        return _point(subject, float((f - y).square().mean().sqrt()))
    losses = torch.stack([F.cross_entropy(f.double() / T, y) for T in TEMPERATURES])
    return _point(subject, float(TEMPERATURES[losses.argmin()]))


def student_t(subject: Subject) -> Predictor:
    """The plain network, with variance and degrees of freedom fitted to validation data."""
    if not subject.is_regression:
        raise NotApplicable("classes have no noise")
    calibrated = subject.fit().calibrate(subject.val, "map")
    return of_posterior(lambda x: calibrated.predict(x, "map"))


def _point(subject: Subject, number: float, network: Any = None) -> Predictor:
    """The outputs as predictions, with a noise or a temperature."""

    def predictor(x: Tensor) -> Predicted:
        f = subject.outputs(x, network).double()  # in float32, the probability of a class could be zero
        return Reals(f, torch.full_like(f, number**2)) if subject.is_regression else Classes((f / number).softmax(1))

    return predictor


def ensemble(subject: Subject) -> Predictor:
    """The mixture of several training runs; for regressions, the Gaussian with its moments."""
    members = [module.net for module in subject.trained.members]
    if len(members) < 2:
        raise NotApplicable("no ensemble was trained for this setup")
    part = subject.task.train
    noises = [1.0] * len(members)
    if subject.is_regression:
        noises = [float((subject.outputs(part.x, net) - part.y).square().mean().sqrt()) for net in members]
    predictors = [_point(subject, σ, net) for σ, net in zip(noises, members, strict=True)]

    def predictor(x: Tensor) -> Predicted:
        parts = [predict(x) for predict in predictors]
        if not subject.is_regression:
            return Classes(torch.stack([p.probs for p in parts]).mean(0))  # type: ignore[union-attr]
        means, variances = (torch.stack([getattr(p, name) for p in parts]) for name in ("mean", "variance"))
        return Reals(means.mean(0), variances.mean(0) + means.var(0, correction=0))

    return predictor


def default(subject: Subject) -> Predictor:
    callback = LaplaceCallback(likelihood=subject.setup.kind, progress=False)
    trainer = make_trainer([callback])
    trainer.validate(subject.trained.module, subject.val, verbose=False)  # the Trainer now has validation data
    subject.restart()
    callback.fit_now(trainer, subject.trained.module, subject.train)
    return of_posterior(callback.predict)


def default_without_validation(subject: Subject) -> Predictor:
    callback = LaplaceCallback(likelihood=subject.setup.kind, progress=False)
    callback.fit_now(None, subject.trained.module, subject.train)
    return of_posterior(callback.predict)


def l2m(subject: Subject) -> Predictor:
    if subject.setup.training.optimizer == "sgd":
        raise NotApplicable("SGD keeps no second moment")
    callback = L2MCallback(likelihood=subject.setup.kind)
    trainer = make_trainer([callback])
    trainer.validate(subject.trained.module, subject.val, verbose=False)
    subject.restart()
    # The counts that the callback would have collected during training, in the checkpoint's format.
    counted = {"steps": 1.0, "squares": subject.mean_inverse_batch(), "sums": 1.0, "n_targets": 1}
    callback.load_state_dict({"posterior": None, "batches": {"n_data": len(subject.task.train), **counted}})
    trainer.optimizers = [subject.optimizer()]
    callback.fit_now(trainer, subject.trained.module)
    return of_posterior(callback.predict)


def dropout(calibrate: bool) -> Callable[[Subject], Predictor]:
    """MC dropout of a network that has dropout; for a regression, with the training RMSE as its noise."""

    def method(subject: Subject) -> Predictor:
        likelihood = subject.likelihood(subject.train_rmse() if subject.is_regression else None)
        try:
            predictor = mc_dropout(subject.network, likelihood)
        except PosteriorError as error:
            raise NotApplicable("the network has no dropout") from error
        predictor = predictor.calibrate(subject.val, of="probs") if calibrate else predictor
        return of_posterior(lambda x: predictor.predict(x, generator=torch.Generator().manual_seed(0)))

    return method


def swag(rank: int) -> Callable[[Subject], Predictor]:
    """Train a copy for another quarter of the epochs, with about forty snapshots of the weights, and calibrate."""

    def method(subject: Subject) -> Predictor:
        module, batch = copy.deepcopy(subject.trained.module).train(), subject.setup.training.batch_size
        epochs, steps = max(1, module.epochs // 4), math.ceil(len(subject.task.train) / batch)
        every = max(1, epochs * steps // 40)
        callback = SWAGCallback(subject.setup.kind, rank=rank, start=0, every_n_steps=every, progress=False)
        L.seed_everything(subject.setup.seed, verbose=False)
        train = DataLoader(subject.train.dataset, batch, shuffle=True)
        make_trainer([callback], max_epochs=epochs).fit(module, train, subject.val)
        return of_posterior(callback.predict)

    return method


def laplace(
    structure: str = "kron",
    tune: str = "auto",
    link: str | None = None,
    subset: str = "all",
    calibrate: str | None = None,
) -> Callable[[Subject], Predictor]:
    """Our posterior with these arguments of `fit_laplace`, `tune_prior` and `predict`."""

    def method(subject: Subject) -> Predictor:
        if subject.is_regression and link is not None and tune != "marglik":
            raise NotApplicable("a regression has no link")
        posterior = subject.fit(structure, subset)
        tuned = (
            posterior.tune_prior(tune, loader=subject.val, predictive=GLM(link=link))
            if tune in ("grid", "auto")
            else posterior.tune_prior(tune)
        )
        if calibrate is not None:
            tuned = tuned.calibrate(subject.val, GLM(link=link), of=calibrate)
        return of_posterior(lambda x: tuned.predict(x, GLM(link=link), generator=torch.Generator().manual_seed(0)))

    return method


def known_noise(subject: Subject) -> Predictor:
    """For a regression, take the training RMSE as noise, and tune the prior by the evidence."""
    if not subject.is_regression:
        raise NotApplicable("classes have no noise")
    tuned = subject.fit(noise_std=subject.train_rmse()).tune_prior(Tuning("marglik", noise=False))
    return of_posterior(tuned.predict)


def laplace_torch(subject: Subject) -> Predictor:
    """laplace-torch's default: last layer, Kronecker, a prior chosen by its marginal likelihood, and probit. For a
    regression, the noise is also tuned, as in its documentation."""
    try:
        from laplace import Laplace
    except ImportError as error:
        raise NotApplicable("laplace-torch is not installed") from error
    approximation: Any = Laplace(subject.network, subject.setup.kind)
    approximation.fit(subject.train)
    if subject.is_regression:
        _tune_peer(approximation)
    else:
        approximation.optimize_prior_precision(method="marglik")

    def predictor(x: Tensor) -> Predicted:
        parts = [approximation(part) for part in x.split(EVALUATION_BATCH)]
        if not subject.is_regression:
            return Classes(torch.cat([p.detach() for p in parts]))
        mean = torch.cat([m.detach() for m, _ in parts])
        variance = torch.cat([v.detach().reshape(-1, 1) for _, v in parts])
        return Reals(mean, variance + approximation.sigma_noise.detach().square())

    return predictor


def _tune_peer(approximation: Any, steps: int = 100) -> None:
    log_prior, log_sigma = (torch.zeros(1, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-approximation.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
        optimizer.step()


WITHOUT_US = (MAP, TEMPERATURE, ENSEMBLE, PEER)  # their results do not depend on this package
METHODS: dict[str, Callable[[Subject], Predictor]] = {
    MAP: plain,
    TEMPERATURE: temperature,
    STUDENT: student_t,
    ENSEMBLE: ensemble,
    DEFAULT: default,
    UNVALIDATED: default_without_validation,
    MARGLIK: laplace(tune="marglik", link="probit"),
    "kron linear": laplace(tune="linear"),
    "kron grid probit": laplace(tune="grid", link="probit"),
    "kron grid": laplace(tune="grid"),
    "kron marglik, outputs calibrated": laplace(tune="marglik", calibrate="outputs"),
    "kron marglik, probs calibrated": laplace(tune="marglik", calibrate="probs"),
    "kron auto probit": laplace(link="probit"),
    "kron auto mc": laplace(link="mc"),
    "diag auto": laplace("diag"),
    "ekfac auto": laplace("ekfac"),
    "ekfac marglik probit": laplace("ekfac", tune="marglik", link="probit"),
    LAST_LAYER: laplace(subset="last_layer"),
    "training RMSE, marglik": known_noise,
    L2M: l2m,
    "SWAG, rank 20": swag(20),
    "SWAG, diagonal": swag(0),
    "MC dropout": dropout(calibrate=False),
    "MC dropout, calibrated": dropout(calibrate=True),
    PEER: laplace_torch,
}
