"""Every public call, as a function of the device that the network is on; data come from a loader, on the CPU.

Each returns tensors and numbers, which must be those of the CPU.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from helpers.options import predictive_of
from helpers.tensors import seeded
from torch import Tensor, nn

from lightning_bayes import (
    GLM,
    IVON,
    Augmented,
    Bernoulli,
    Categorical,
    Conformal,
    DeepEnsemble,
    Diag,
    Gaussian,
    GaussianPosterior,
    HeteroscedasticGaussian,
    Kron,
    LaplacePosterior,
    LinearMeasurement,
    LowRank,
    Prediction,
    Subnetwork,
    Tuning,
    evaluate,
    fit_l2m,
    fit_laplace,
    fit_measurements,
    mc_dropout,
    metrics,
)
from lightning_bayes.likelihoods import Likelihood

Case = Callable[[torch.device], Any]
CPU = torch.device("cpu")
N, FEATURES, OUTPUTS = 11, 4, 3
STRUCTURES = ("full", "diag", "kron", "ekfac", "lowrank")
LIKELIHOODS: dict[str, Likelihood] = {
    "classification": Categorical(),
    "binary": Bernoulli(),
    "regression": Gaussian(0.6),
    "heteroscedastic": HeteroscedasticGaussian(),
}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.empty(shape, device="cpu").normal_(generator=torch.Generator("cpu").manual_seed(seed))


X = drawn(5, FEATURES, seed=7)


def network(task: str = "classification", seed: int = 0) -> nn.Module:
    """On the CPU, whatever the default device."""
    with torch.device("cpu"):
        net = nn.Sequential(
            nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 2 if task == "heteroscedastic" else OUTPUTS)
        )
    return filled(net, seed)


def filled(net: nn.Module, seed: int = 0) -> nn.Module:
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(drawn(*p.shape, seed=100 * seed + i) * 0.7)
    return net


def batches(task: str = "classification", seed: int = 1, n: int = N) -> list[tuple[Tensor, Tensor]]:
    x, f = drawn(n, FEATURES, seed=seed), drawn(n, OUTPUTS, seed=seed + 1000)
    targets = {"classification": f.argmax(1), "binary": (f > 0).float(), "regression": f, "heteroscedastic": f[:, 0]}
    return list(zip(x.split(4), targets[task].split(4), strict=True))


def laplace(
    device: torch.device, task: str = "classification", structure: str = "kron", seed: int = 0, **options: Any
) -> LaplacePosterior:
    option = LowRank(rank=6) if structure == "lowrank" else structure
    options = {"prior_precision": 2.0, **options}
    return fit_laplace(network(task, seed).to(device), batches(task), LIKELIHOODS[task], structure=option, **options)


def values(prediction: Prediction) -> dict[str, Tensor]:
    named = {f.name: getattr(prediction, f.name) for f in fields(prediction)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def described(posterior: GaussianPosterior) -> dict[str, Any]:
    x = X.to(posterior.device)
    mean, covariance = posterior.functional(x)
    return {
        "mean": posterior.mean,
        "precision": posterior.precision.to_dense(),
        "outputs": mean,
        "covariance": covariance,
        **({"δ": posterior.prior_precision} if isinstance(posterior, LaplacePosterior) else {}),
        **values(posterior.predict(x, generator=seeded())),
    }


# -- fits --------------------------------------------------------------------------------------------------------------


def fitted(device: torch.device, task: str, structure: str, **options: Any) -> Any:
    posterior = laplace(device, task, structure, **options)
    numbers = {"evidence": posterior.log_marginal_likelihood(), "γ": posterior.effective_parameters}
    return {**described(posterior), **numbers}


def convolutional(device: torch.device, structure: str, **options: Any) -> Any:
    with torch.device("cpu"):
        layers = [nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()]
        net = filled(nn.Sequential(*layers, nn.Linear(18, OUTPUTS))).eval()
    data = [(drawn(n, 1, 3, 3, seed=n), drawn(n, OUTPUTS, seed=n + 9).argmax(1)) for n in (4, 3)]
    posterior = fit_laplace(net.to(device), data, "classification", prior_precision=2.0, structure=structure, **options)
    return posterior.functional(drawn(3, 1, 3, 3, seed=0).to(device))


def of_measurements(device: torch.device, by_functions: bool) -> Any:
    A = drawn(2, OUTPUTS, seed=4).to(device)
    functions = (lambda x: x @ A.mT.to(x.dtype), lambda y: y @ A.to(y.dtype))
    likelihood = LinearMeasurement(functions if by_functions else A, 0.3)
    data = [(x, drawn(len(x), 2, seed=5)) for x, _ in batches()]
    posterior = fit_laplace(network().to(device), data, likelihood, prior_precision=2.0, structure="full")
    return posterior.functional(X.to(device)), posterior.log_marginal_likelihood(noise_std=0.4)


def l2m(device: torch.device) -> Any:
    net = network().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 0.02)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
        optimizer.step()
    posterior = fit_l2m(net, optimizer, n_data=N, batch_size=N / 3, loss_scale=1.0)
    return {**described(posterior), "evidence": posterior.with_log_likelihood(batches()).log_marginal_likelihood()}


def ivon(device: torch.device) -> Any:
    net = network().to(device)
    optimizer = IVON(net.parameters(), n_data=N, betas=(0.8, 0.9))
    for x, y in batches():
        optimizer.zero_grad()
        with optimizer.sampled():
            nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
        optimizer.step()
    return described(optimizer.posterior(net))


def after_another(device: torch.device) -> Any:
    before = laplace(device, "classification", "full", seed=1)
    return described(laplace(device, "classification", "full", prior=before, prior_precision=1.5))


def updated(device: torch.device, structure: str) -> Any:
    option: Any = Kron(updatable=True) if structure == "kron" else structure
    return described(laplace(device, "classification", option).update(batches(seed=5)))


def refined(device: torch.device, method: str) -> Any:
    return described(laplace(device, "classification", "full").refine(batches(), method, passes=20, samples=8))


def tuned(device: torch.device, method: str | Tuning, task: str, structure: str = "kron") -> Any:
    iterates = isinstance(method, Tuning) and method.iterate
    loader = batches(task, seed=3) if method in ("auto", "grid") else batches(task) if iterates else None
    posterior = laplace(device, task, structure).tune_prior(method, loader)
    noise = posterior.likelihood.tunable_noise
    return {**described(posterior), "σ": torch.as_tensor(1.0 if noise is None else noise)}


# -- use ---------------------------------------------------------------------------------------------------------------


def predicted(device: torch.device, task: str, predictive: str, link: str | None, **options: Any) -> Any:
    points = {"gp": 5} if predictive == "gp" else {}
    posterior = laplace(device, task, **points)
    return values(
        posterior.predict(X.to(device), predictive_of(predictive, link=link, samples=8), generator=seeded(), **options)
    )


def novel(device: torch.device, structure: str) -> Any:
    return laplace(device, "classification", structure).novelty(X.to(device))


def deployed(device: torch.device, structure: str) -> Any:
    posterior = laplace(device, "classification", structure, subset="last_layer")
    return posterior.deploy(X.to(device))(X.to(device))


def weights(device: torch.device, structure: str) -> Any:
    posterior = laplace(device, "classification", structure)
    θ = posterior.sample(3, seeded())
    function = posterior.sample_function(seeded(), n=2)
    return θ, posterior.log_prob(θ), posterior.penalty(posterior.network), function(X.to(device))


def acquired(device: torch.device) -> Any:
    x = X.to(device).requires_grad_()
    prediction = laplace(device, "regression").predict(x, differentiable=True)
    (gradient,) = torch.autograd.grad(prediction.variance.sum(), x)
    return gradient


def stored(device: torch.device, structure: str) -> Any:
    posterior = laplace(device, "regression", structure, gp=4)
    with TemporaryDirectory() as folder:
        posterior.save(Path(folder) / "posterior.pt")
        loaded = GaussianPosterior.load(Path(folder) / "posterior.pt", network("regression").to(device))
    of_state = GaussianPosterior.from_state_dict(network("regression").to(device), posterior.state_dict())
    assert loaded.device == of_state.device == device
    return described(loaded), described(of_state)


def moved(device: torch.device, structure: str) -> Any:
    """To the CPU, and from there."""
    there = laplace(device, "classification", structure, gp=4).to("cpu")
    back = laplace(CPU, "classification", structure, gp=4).to(device)
    assert back.mean.device == device
    process = values(back.predict(X.to(device), "gp", generator=seeded()))
    return described(there), described(back), str(there.summary()), process


def calibrated(device: torch.device, task: str, of: str = "outputs") -> Any:
    posterior = laplace(device, task).calibrate(batches(task, seed=3), GLM(samples=8), of=of)
    return values(posterior.predict(X.to(device), generator=seeded()))


def conformal(device: torch.device, task: str, method: str = "aps", per_class: bool = False) -> Any:
    """From a loader; and from predictions on the device with targets on the CPU."""
    posterior, level = laplace(device, task), 0.5 if per_class else 0.7  # there are few examples of each class
    of_loader = posterior.conformalize(batches(task, seed=3), level, method, GLM(samples=8), per_class=per_class)
    x, y = (torch.cat(parts) for parts in zip(*batches(task, seed=3), strict=True))
    of_prediction = Conformal.fit(
        posterior.predict(x.to(device), generator=seeded()), y, level, method, per_class=per_class
    )
    return of_loader.quantile, of_loader.predict(X.to(device)), of_prediction.quantile


def ensemble(device: torch.device, task: str) -> Any:
    members = DeepEnsemble([laplace(device, task), laplace(device, task, "diag", seed=1)], member_weights=[1.0, 3.0])
    predictions = [members.predict(X.to(device), p, generator=seeded()) for p in ("glm", "bnn", "map")]
    return list(map(values, predictions)), evaluate(members, batches(task, seed=3))


def dropout(device: torch.device, task: str) -> Any:
    """A CPU generator's masks are the same on all devices."""
    with torch.device("cpu"):
        layers = [nn.Linear(FEATURES, 5), nn.AlphaDropout(0.2), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, OUTPUTS)]
        net = filled(nn.Sequential(*layers))
    predictor = mc_dropout(net.to(device), LIKELIHOODS[task], samples=6).calibrate(batches(task, seed=3))
    return values(predictor.predict(X.to(device), generator=seeded()))


def views(device: torch.device, task: str) -> Any:
    views = Augmented(laplace(device, task), [lambda x: x, lambda x: x.flip(1)])
    predictions = [views.predict(X.to(device), p, generator=seeded()) for p in ("glm", "bnn", "map")]
    return list(map(values, predictions)), evaluate(views, batches(task, seed=3))


def copies(device: torch.device) -> Any:
    """The second device cannot train a batch norm: its kernels do not write running statistics."""
    members = DeepEnsemble.from_samples(laplace(device), batches(), 3, generator=seeded())
    return values(members.predict(X.to(device), "map"))


def autoencoder(device: torch.device) -> Any:
    with torch.device("cpu"):
        parts = {"encoder": nn.Linear(FEATURES, 2), "decoder": nn.Linear(2, FEATURES)}
        net = filled(nn.Sequential(OrderedDict(parts)))
    data = [(x, x) for x, _ in batches()]
    posterior = fit_laplace(net.to(device), data, Gaussian(0.6), prior_precision=2.0, structure="diag")
    reconstruction = posterior.reconstruct(X.to(device), generator=seeded(), samples=5)
    return [getattr(reconstruction, f.name) for f in fields(reconstruction)]


def evaluated(device: torch.device, task: str) -> Any:
    return evaluate(laplace(device, task), batches(task, seed=3))


def measured(device: torch.device, prior: str, **options: Any) -> Any:
    with torch.device("cpu"):
        layers = [nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 3, padding=1)]
        net = filled(nn.Sequential(*layers)).to(device)
    A, y = drawn(6, 25, seed=1).to(device), drawn(6, seed=2).to(device)
    x = drawn(1, 1, 5, 5, seed=3).to(device)
    posterior = fit_measurements(net, x, y, LinearMeasurement(A, 0.3), prior, **options)
    generators = (torch.Generator(device), torch.Generator("cpu"))
    return (
        posterior.image(),
        posterior.functional() if posterior.kernel is not None else None,
        posterior.log_marginal_likelihood(),
        posterior.tune(steps=3).noise_std,
        [posterior.sample(2, generator.manual_seed(0)) for generator in generators],
    )


METRICS: dict[str, tuple[Any, str]] = {
    "nll": (metrics.NegativeLogLikelihood, "probs"),
    "brier": (metrics.BrierScore, "probs"),
    "decomposition": (partial(metrics.BrierDecomposition, num_classes=OUTPUTS, n_bins=3), "probs"),
    "ece": (metrics.CalibrationError, "probs"),
    "ece of equal mass": (partial(metrics.CalibrationError, n_bins=3, binning="mass"), "probs"),
    "gaussian nll": (metrics.GaussianNLL, "moments"),
    "crps": (metrics.GaussianCRPS, "moments"),
    "coverage": (metrics.IntervalCoverage, "moments"),
    "regression calibration": (metrics.RegressionCalibrationError, "moments"),
    "ood": (metrics.OODDetection, "score"),
    "risk coverage": (metrics.RiskCoverage, "score"),
}


def scored(device: torch.device, name: str) -> Any:
    make, kind = METRICS[name]
    metric = make().to(device)
    for seed in (1, 2):
        f, label = drawn(9, OUTPUTS, seed=seed), drawn(9, OUTPUTS, seed=seed + 50).argmax(1)
        batch: Iterable[Tensor] = {
            "probs": (f.softmax(1), label),
            "moments": (f, f.exp(), f + drawn(9, OUTPUTS, seed=seed + 60)),
            "score": (f[:, 0], label > 0),
        }[kind]
        metric.update(*(t.to(device) for t in batch))
    return metric.compute(), metric.to("cpu").compute()


CASES: dict[str, Case] = {
    **{f"fit {s} {t}": partial(fitted, task=t, structure=s) for s in STRUCTURES for t in LIKELIHOODS},
    **{
        f"fit {s} {c}": partial(fitted, task="classification", structure=s, curvature=c)
        for s in ("full", "diag", "kron")
        for c in ("fisher_mc", "empirical_fisher")
    },
    **{f"fit diag {h}": partial(fitted, task="binary", structure=Diag(method=h)) for h in ("approx", "mixed")},
    **{f"fit damped {d}": partial(fitted, task="regression", structure=Kron(damping=d)) for d in ("glm", "ritter")},
    "fit kron of rank 2": partial(fitted, task="classification", structure=Kron(rank=2)),
    "fit last layer": partial(fitted, task="classification", structure="full", subset="last_layer"),
    **{f"fit of a convolution, {s}": partial(convolutional, structure=s) for s in STRUCTURES},
    "fit of a convolution, reduce": partial(convolutional, structure=Kron(weight_sharing="reduce")),
    **{
        f"fit of a subnetwork, {by}": partial(fitted, task="regression", structure="full", subset=Subnetwork(7, by))
        for by in ("magnitude", "random", "laplace_diag")
    },
    "fit of measurements": partial(of_measurements, by_functions=False),
    "fit of measurements by functions": partial(of_measurements, by_functions=True),
    "fit l2m": l2m,
    "fit ivon": ivon,
    "fit after another": after_another,
    **{f"update {s}": partial(updated, structure=s) for s in ("full", "kron", "diag")},
    **{f"refine {m}": partial(refined, method=m) for m in ("laplace", "variational")},
    **{
        f"tune {m} {t}": partial(tuned, method=m, task=t)
        for m in ("auto", "marglik", "mackay", "linear", "grid")
        for t in ("classification", "regression")
    },
    "tune each layer": partial(tuned, method=Tuning("marglik", groups="layers"), task="regression"),
    "tune full": partial(tuned, method=Tuning("linear", iterate=True), task="classification", structure="full"),
    **{
        f"predict {p} {link or ''} {t}": partial(predicted, task=t, predictive=p, link=link)
        for t, likelihood in LIKELIHOODS.items()
        for p in ("glm", "gp", "bnn", "map")
        for link in (likelihood.links if p == "glm" else (None,))
        if not (p == "gp" and t == "heteroscedastic")
    },
    "predict without shares": partial(predicted, task="classification", predictive="glm", link="probit", split=False),
    **{f"novelty {s}": partial(novel, structure=s) for s in STRUCTURES},
    **{f"deploy {s}": partial(deployed, structure=s) for s in STRUCTURES},
    **{f"weights {s}": partial(weights, structure=s) for s in STRUCTURES},
    "gradient in x": acquired,
    **{f"store {s}": partial(stored, structure=s) for s in STRUCTURES},
    **{f"move {s}": partial(moved, structure=s) for s in STRUCTURES},
    **{f"calibrate {t}": partial(calibrated, task=t) for t in LIKELIHOODS},
    "calibrate probs": partial(calibrated, task="classification", of="probs"),
    **{f"conformal {t}": partial(conformal, task=t) for t in LIKELIHOODS},
    **{f"conformal {m}": partial(conformal, task="classification", method=m) for m in ("raps", "lac")},
    **{f"conformal {m}": partial(conformal, task="regression", method=m) for m in ("cqr", "cqr_asymmetric")},
    "conformal per class": partial(conformal, task="binary", per_class=True),
    **{f"ensemble {t}": partial(ensemble, task=t) for t in ("classification", "regression")},
    **{f"dropout {t}": partial(dropout, task=t) for t in ("classification", "regression")},
    **{f"views {t}": partial(views, task=t) for t in ("classification", "regression")},
    "copies at weight samples": copies,
    "autoencoder": autoencoder,
    **{f"evaluate {t}": partial(evaluated, task=t) for t in LIKELIHOODS},
    **{f"measure {p}": partial(measured, prior=p) for p in ("gaussian", "filters", "tv")},
    "measure by products": partial(measured, prior="gaussian", exact_up_to=0),
    **{f"metric {m}": partial(scored, name=m) for m in METRICS},
}


def assert_same(actual: Any, wanted: Any, **tolerance: float) -> None:
    if isinstance(wanted, dict):
        assert actual.keys() == wanted.keys()
        actual, wanted = list(actual.values()), list(wanted.values())
    if isinstance(wanted, (list, tuple)):
        assert len(actual) == len(wanted)
        for one, two in zip(actual, wanted, strict=True):
            assert_same(one, two, **tolerance)
    elif isinstance(wanted, Tensor) and wanted.is_floating_point():
        torch.testing.assert_close(actual.cpu().to(wanted), wanted, equal_nan=True, **tolerance)
    elif isinstance(wanted, Tensor):
        assert torch.equal(actual.cpu(), wanted)
    elif isinstance(wanted, float):
        assert actual == pytest.approx(wanted, rel=tolerance["rtol"], abs=tolerance["atol"])
    else:
        assert actual == wanted
