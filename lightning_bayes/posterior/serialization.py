"""Posteriors as plain dictionaries of tensors, numbers and strings, which `torch.load(weights_only=True)` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_bayes.arguments import instance
from lightning_bayes.curvature import Curvature
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import UnknownLikelihoodError
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.borrowed import unwrap
from lightning_bayes.network.checks import check_network
from lightning_bayes.network.gathered_layer import gathered_for, ungathered
from lightning_bayes.network.output import Output, output_of, viewed
from lightning_bayes.posterior.calibration import Calibration
from lightning_bayes.posterior.files import describe
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError, check_parameters
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior import Prior
from lightning_bayes.posterior.training_points import TrainingPoints
from lightning_bayes.structures import Structure

Part = TypeVar("Part")
FORMAT = 2
READABLE = (1, 2)  # 1 has another fingerprint (see `same_weights`), and no squared error
_COMMON = ("names", "shapes", "mask", "likelihood", "mean", "n_data", "fingerprint", "type")
_OF_LAPLACE = ("curvature", "kind", "n_outputs", "log_likelihood", "prior_precision", "temperature", "damping")


def to_state(posterior: GaussianPosterior) -> dict[str, Any]:
    subset = posterior.subset
    state: dict[str, Any] = {
        "format": FORMAT,
        "type": type(posterior).__name__,
        "names": list(subset.names),
        "shapes": [list(shape) for shape in subset.shapes],
        "mask": subset.mask,
        "likelihood": posterior.likelihood.to_state(),
        "mean": posterior.mean,
        "n_data": int(posterior.n_data),
        "fingerprint": posterior.fingerprint,
        "calibrations": [asdict(calibration) for calibration in posterior.calibrations],
        "used_data": dict(posterior.used_data),
        "shift": posterior.shift,
        "output": asdict(output_of(ungathered(posterior.network))),
    }
    if not isinstance(posterior, LaplacePosterior):
        return {**state, "precision": posterior.precision.to_state()}
    curvature = posterior.curvature
    return {
        **state,
        "curvature": curvature.structure.to_state(),
        "kind": curvature.kind,
        "n_outputs": curvature.n_outputs,
        "log_likelihood": curvature.log_likelihood,
        "gradient": curvature.gradient,
        "squared_error": curvature.squared_error,
        "normalised": None if curvature.normalised is None else list(curvature.normalised),
        "weight_sharing": curvature.weight_sharing,
        "hessian": curvature.hessian,
        "samples": curvature.samples,
        "seed": curvature.seed,
        "prior_precision": posterior.prior_precision,
        "prior": posterior.prior.to_state(),
        "temperature": float(posterior.temperature),
        "damping": posterior.damping,
        "points": None if posterior.points is None else posterior.points.to_state(),
    }


@torch.inference_mode(False)  # inference tensors could not be differentiated later
def from_state(network: nn.Module, state: dict[str, Any], likelihood: Likelihood | None = None) -> GaussianPosterior:
    kind = state.get("format") if isinstance(state, Mapping) else None
    if kind not in READABLE:
        raise PosteriorError(
            f"the state holds no posterior that this version reads (format {kind!r}): it is {describe(state)}"
        )
    if state.get("type") == "ShardedPosterior":
        from lightning_bayes.posterior.sharded import ShardedPosterior

        return ShardedPosterior.from_state_dict(check_network(unwrap(network)), state, likelihood)
    network, state = check_network(unwrap(network)), inputs.to_device(dict(state), torch.device("cpu"))
    newer: dict[str, Any] = {
        "squared_error": None,
        "gradient": None,
        "calibrations": [],
        "shift": None,
        "normalised": None,
        "weight_sharing": "expand",
        "hessian": "exact",
        "samples": 1,
        "seed": 0,
        "prior": {},
        "points": None,
        "used_data": {},
        "output": {},
    }  # than some files
    state = {**newer, **state}
    network = viewed(network, Output(**state["output"]))
    matrix = "curvature" if state.get("type") == "LaplacePosterior" else "precision"
    for key in (*_COMMON, *(_OF_LAPLACE if matrix == "curvature" else ("precision",))):
        if key not in state:
            raise PosteriorError(f"the state of the posterior is not complete: it has no {key!r}; save it again")
    if likelihood is not None:
        instance("likelihood", likelihood, Likelihood, "a Likelihood, or None for the one that was saved")
    subset = Subset(tuple(state["names"]), tuple(torch.Size(s) for s in state["shapes"]), state["mask"])
    check_parameters(network, subset)
    network = gathered_for(network, subset.names)
    structure = _read(Structure.from_state, state[matrix], "matrix")
    prior = _read(Prior.from_state, state["prior"], "prior")
    _check_numbers(state, subset, structure, matrix, prior)
    device = next(iter(subset.parameters(network).values())).device
    mean, structure = state["mean"].to(device), structure.to(device)
    likelihood = likelihood or likelihood_from(state["likelihood"], device)
    n_data, fingerprint = state["n_data"], state["fingerprint"].cpu()
    calibrations = tuple(Calibration(**calibration) for calibration in state["calibrations"])
    if matrix == "precision":
        posterior = GaussianPosterior(network, subset, likelihood, mean, structure, n_data, fingerprint, calibrations)
        return replace(posterior, used_data=state["used_data"])
    log_likelihood = state["log_likelihood"]
    if log_likelihood is not None and log_likelihood.isnan():  # older files, where it is not known
        log_likelihood = None
    curvature = Curvature(
        structure=structure,
        subset=subset,
        likelihood=likelihood,
        kind=state["kind"],
        n_data=n_data,
        n_outputs=state["n_outputs"],
        log_likelihood=log_likelihood,
        squared_error=state["squared_error"],
        gradient=None if state["gradient"] is None else state["gradient"].to(device),
        normalised=None if state["normalised"] is None else tuple(state["normalised"]),
        weight_sharing=state["weight_sharing"],
        hessian=state["hessian"],
        samples=state["samples"],
        seed=state["seed"],
        output=output_of(network),
    )
    prior_precision, temperature, damping = state["prior_precision"].to(device), state["temperature"], state["damping"]
    posterior = LaplacePosterior.around(
        network, mean, fingerprint, curvature, prior_precision, temperature, damping, prior
    )
    shift = None if state["shift"] is None else state["shift"].to(device)
    points = TrainingPoints.from_state(state["points"])
    used_data = state["used_data"]
    return replace(posterior, calibrations=calibrations, shift=shift, points=points, used_data=used_data)


def _read(from_state: Callable[[Any], Part], state: Any, what: str) -> Part:
    try:
        return from_state(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PosteriorError(
            f"the state of the posterior is not complete: its {what} cannot be read ({error!r}); save it again"
        ) from None


def _check_numbers(state: dict[str, Any], subset: Subset, structure: Structure, matrix: str, prior: Prior) -> None:
    sizes = {
        "mean": state["mean"].numel(),
        matrix: structure.size,
        "prior's mean": None if prior.mean is None else prior.mean.numel(),
        "prior": None if prior.precision is None else prior.precision.size,
    }
    for what, size in sizes.items():
        if size not in (None, subset.size):
            raise PosteriorError(
                f"the state of the posterior does not fit itself: its {what} is of {size} weights, but the parameters "
                f"it names have {subset.size}; save it again"
            )
    for what in ("mean", matrix, "prior_precision", "prior"):
        if inputs.has_nonfinite(state.get(what)):
            raise PosteriorError(
                f"the {what.replace('_', ' ')} of the posterior holds NaN or infinity: fit the posterior again, to "
                "weights and data that are finite"
            )


def likelihood_from(state: dict[str, Any], device: torch.device) -> Likelihood:
    try:
        return Likelihood.from_state(inputs.to_device(state, device))
    except UnknownLikelihoodError:
        raise PosteriorError(
            f"the posterior was fitted with {state['name']}, a likelihood of your own: pass likelihood="
        ) from None
