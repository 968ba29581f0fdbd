"""`posterior.deploy(x)`: predictions as one `nn.Module` that `torch.export` and ONNX can export.

`predict` checks values while it runs, and for most posteriors it needs a backward pass; neither can be exported. Two
predictives need only tensor operations: the plain network with its temperature, and the linearised network of a
posterior over the weights `[W b]` of a last linear layer. With the layer's inputs `a` and `ã = [a 1]`, the Jacobian of
the outputs is `∂f_c/∂[W b]_d = 1[c = d] ã`, so their covariance is

    Σ = E_G diag(V (E_Aᵀã)²) E_Gᵀ     if P⁻¹ = (E_G ⊗ E_A) diag(V) (E_G ⊗ E_A)ᵀ    (Kronecker, EKFAC, diagonal)
    Σ = ZᵀZ,  Z_kc = Σ_i R_kci ã_i    for any other P⁻¹ = RᵀR                       (full, low rank)

and the likelihood integrates over it in closed form. The novelty is a function of `ã`, too.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import flag
from lightning_bayes.likelihoods import ClassPredictive
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.output import network_name, output_of, unwrap_output
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord, predictive_option
from lightning_bayes.posterior.at_mean import outputs
from lightning_bayes.posterior.gaussian import Calibration, GaussianPosterior, PosteriorError, implements
from lightning_bayes.predictive.novelty import LastLayer, last_layer
from lightning_bayes.predictive.predict import CLOSED_FORM, Integral, OutputLaw, has_many_outputs, is_plain, n_outputs
from lightning_bayes.structures.diagonal import Diagonal
from lightning_bayes.structures.factor import Factor
from lightning_bayes.structures.kronecker import Kronecker, PerOutput

LARGEST = 4096  # weights of a root R, a square matrix
TOLERANCE = 1e-3  # of the covariances of the example, relative to the largest entry
PLAIN = "or deploy the plain network, deploy(x, 'map')"


@implements("deploy")
def deploy(
    posterior: GaussianPosterior,
    x: Any,
    predictive: PredictiveWord | PredictiveOption = "glm",
    calibrated: bool = True,
) -> Deployed:
    option = predictive_option(predictive)
    flag("calibrated", calibrated)
    if isinstance(posterior.network, inputs.PartialNetwork):
        raise PosteriorError("deploy needs the whole network, but it is sharded: load the posterior for a plain copy")
    outputs(posterior, x)  # raises for other weights, and for an x that the network cannot be run on
    if isinstance(inputs.contained(posterior.network, x), inputs.Container):
        raise PosteriorError(
            f"a deployed network takes tensors, or a tuple or dict of them, but x is a {type(x).__name__}: use predict"
        )
    calibration = posterior.calibration_of(option.kind, option.link) if calibrated else None
    calibration = calibration or Calibration(option.kind, "")
    if option.kind == "map" or is_plain(posterior):
        return Deployed(posterior, x, calibration)
    if option.kind != "glm":
        raise PosteriorError(f"predictive={option.kind!r} cannot be deployed: use 'glm' for a last layer, {PLAIN}")
    if _linear_layer(posterior.network, posterior.subset) is None:
        raise PosteriorError(
            "a posterior can be deployed if it covers all weights of one linear last layer, because others need a "
            f"backward pass for each prediction: fit subset='last_layer', {PLAIN}"
        )
    deployed = Deployed(posterior, x, calibration, _closed_link(posterior, x, option.link or calibration.link))
    with torch.inference_mode(False), torch.no_grad():
        f, a = deployed.outputs(inputs.to_device(x, posterior.device))
        if f.ndim > 2 or a.shape[1] > 1 or not _agrees(deployed.law(f, a).covariance, posterior.functional(x)[1]):
            raise PosteriorError(
                f"{network_name(posterior.network)} does not return one row of outputs of its last layer for each "
                f"example, unchanged, so their covariance has no closed form: fit a network that does, {PLAIN}"
            )
    return deployed


def _agrees(covariance: Tensor | None, expected: Tensor) -> bool:
    assert covariance is not None
    if covariance.numel() != expected.numel():
        return False
    distance = (covariance.reshape(expected.shape) - expected).abs().amax()
    return bool(distance <= TOLERANCE * expected.abs().amax())


def _closed_link(posterior: GaussianPosterior, x: Any, link: str) -> str:
    """The link of `predict`, if it has a closed form."""
    likelihood = posterior.likelihood
    many_classes = likelihood.chooses_one_class and n_outputs(posterior, x) > CLOSED_FORM
    draws = many_classes or (likelihood.has_probs and has_many_outputs(posterior, x))
    chosen = likelihood.choose_link(link or ("mc" if draws else None))
    if chosen != "mc":
        return chosen
    closed = [word for word in likelihood.links if word != "mc"]
    way_out = f"calibrate it with GLM(link={closed[0]!r}) and deploy with this option, " if closed else ""
    raise PosteriorError(
        f"this posterior predicts an average of random draws, which has no closed form: {way_out}{PLAIN}"
    )


def _linear_layer(network: nn.Module, subset: Subset) -> str | None:
    """The name of the linear layer whose weight, and bias if it has one, the subset consists of."""
    path = subset.names[0].rpartition(".")[0]
    layer = network.get_submodule(path)
    own = [f"{path}.{name}".lstrip(".") for name, _ in layer.named_parameters(recurse=False)]
    is_whole = isinstance(layer, nn.Linear) and subset.mask is None and list(subset.names) == own
    return path if is_whole else None


class Deployed(nn.Module):
    """A copy of the network, with the tensors that its predictions need.

    `forward(x)` takes one input in the form that `posterior.predict` takes, and returns tensors by name: `probs`, or
    for a regression `mean`, `variance`, `epistemic` and, for a Student-t, `df`. If the posterior has them, also
    `novelty` and `novelty_p`.
    """

    def __init__(self, posterior: GaussianPosterior, x: Any, calibration: Calibration, link: str = "") -> None:
        super().__init__()
        network, last = unwrap_output(posterior.network), last_layer(posterior, x)
        self.network = copy.deepcopy(network).to(posterior.device).requires_grad_(False)
        self.layer: str | None = None  # the layer whose inputs are needed
        self.covariance: _Covariance | None = None
        self.novelty: _Novelty | None = None
        self._output, self._likelihood = output_of(posterior.network), posterior.likelihood
        self._calibration, self._link = calibration, link
        with torch.inference_mode(False), torch.no_grad():
            if link:
                self.layer, self.covariance = _linear_layer(network, posterior.subset), _Covariance(posterior)
            if isinstance(last, LastLayer) and (layer := _linear_layer(network, last.layer)) is not None:
                self.layer, self.novelty = layer, _Novelty(last, posterior.known_novelty)
        self.eval()

    def forward(self, x: Any) -> dict[str, Tensor]:
        f, a = self.outputs(x)
        calibration, law = self._calibration, self.law(f, a)
        predictive = law.tempered(calibration.output_temperature).integrate(Integral(self._likelihood, self._link))
        if isinstance(predictive, ClassPredictive):
            T = calibration.probs_temperature
            out = {"probs": predictive.probs if T == 1 else predictive.tempered(T).probs}
        else:
            predictive = predictive.tempered(calibration.variance_factor**0.5)
            out = {"mean": predictive.mean, "variance": predictive.variance, "epistemic": predictive.epistemic}
            if not math.isinf(calibration.df):
                out["df"] = torch.full_like(predictive.mean, calibration.df)
        return out if self.novelty is None else {**out, **self.novelty(a)}

    def outputs(self, x: Any) -> tuple[Tensor, Tensor]:
        """The network's output `f`, and the inputs `ã` of the layer, if they are needed.  # [B, ...], [B, T, I]"""
        args, kwargs = inputs.arguments(self.network, x)
        if self.layer is None:
            f = self._output(self.network(*args, **kwargs))
            return f, f
        layer, seen = self.network.get_submodule(self.layer), []
        hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            f = self._output(self.network(*args, **kwargs))
        finally:
            hook.remove()
        a = torch.cat([t.unsqueeze(1) if t.ndim == 2 else t.flatten(1, -2) for t in seen], 1)
        return f, a if layer.bias is None else torch.cat([a, torch.ones_like(a[..., :1])], -1)

    def law(self, f: Tensor, a: Tensor) -> OutputLaw:
        """The distribution of the outputs, before any temperature."""
        return OutputLaw(f) if self.covariance is None else self.covariance(f, a)


class _Covariance(nn.Module):
    """The Gaussian over outputs, from the network's outputs and the inputs `ã` of its last layer."""

    left: Tensor | None  # E_G [O, r]
    right: Tensor | None  # E_A [I, n]
    variances: Tensor | None  # V [r, n]
    root: Tensor | None  # R [k, O, I]
    shift: Tensor | None  # of the mean of [W b], for a refined posterior [O, I]

    def __init__(self, posterior: GaussianPosterior) -> None:
        super().__init__()
        subset, P = posterior.subset, posterior.precision
        parts = torch.arange(P.size, device="cpu").split([shape.numel() for shape in subset.shapes])
        places = torch.cat([part.view(subset.shapes[0][0], -1) for part in parts], 1)  # of the entries of [W b] [O, I]
        first, *others = P.parameter_blocks(subset)
        left = right = variances = root = None
        block, is_whole = first.matrix, not others and torch.equal(first.places, places.flatten())
        if is_whole and isinstance(block, Kronecker) and not isinstance(block, PerOutput):
            left, right = _frame(block.left), _frame(block.right)
            variances = block.left.expand(block.right.expand(block.values.reciprocal(), -1), -2)[0]
        elif isinstance(P, Diagonal):
            variances = P.inverse_diagonal()[places.to(P.device)]
        elif P.size <= LARGEST:
            root = P.root_solve(torch.eye(P.size, dtype=P.dtype, device=P.device))[:, places.to(P.device)]
        else:
            raise PosteriorError(
                f"a posterior over {P.size:,} weights is too large to be deployed, unless its layer is a Kronecker "
                f"product: fit structure='kron', {PLAIN}"
            )
        shift = None if posterior.shift is None else posterior.shift[places.to(P.device)]
        for name, t in {"left": left, "right": right, "variances": variances, "root": root, "shift": shift}.items():
            self.register_buffer(name, t)

    def forward(self, f: Tensor, a: Tensor) -> OutputLaw:
        a = a.squeeze(1)  # [B, I]
        if self.root is not None:
            a = a.to(self.root.dtype)
            Z = torch.einsum("koi,bi->bko", self.root, a)
            covariance = Z.mT @ Z
        else:
            assert self.variances is not None
            a = a.to(self.variances.dtype)
            rotated = a if self.right is None else a @ self.right
            variances = rotated.square() @ self.variances.mT  # [B, r]
            E = torch.eye(variances.shape[1], dtype=a.dtype, device=a.device) if self.left is None else self.left
            covariance = (E * variances.unsqueeze(1)) @ E.mT
        mean = f.to(a.dtype) if self.shift is None else f + (a @ self.shift.mT).view_as(f)
        return OutputLaw(mean, covariance)


class _Novelty(nn.Module):
    """`Σ_j ã_j² ρ/(μ_j + ρ) / ‖a‖²`, and its p-value among held-out inputs; see `novelty`."""

    frame: Tensor  # Q, or a frame [I, n]
    shares: Tensor  # ρ/(μ + ρ) [n]
    known: Tensor | None  # [N]

    def __init__(self, last: LastLayer, known: Tensor | None) -> None:
        super().__init__()
        factor = last.factor
        self.register_buffer("frame", _frame(factor))
        self.register_buffer("shares", factor.expand(last.prior / (factor.spectrum + last.prior), -1)[0])
        self.register_buffer("known", known)

    def forward(self, a: Tensor) -> dict[str, Tensor]:
        a = a.to(self.frame.dtype)
        left = (a @ self.frame).square() @ self.shares
        novelty = (left / a.square().sum(-1).clamp(min=torch.finfo(a.dtype).tiny)).mean(-1)
        if self.known is None:
            return {"novelty": novelty}
        as_novel = (self.known.to(novelty) >= novelty.unsqueeze(1)).sum(1)
        return {"novelty": novelty, "novelty_p": (1 + as_novel).to(novelty) / (len(self.known) + 1)}


def _frame(factor: Factor) -> Tensor:
    """The matrix with which `factor.rotate` multiplies.  # [d, n]"""
    identity = torch.eye(factor.size, dtype=factor.values.dtype, device=factor.values.device)
    return factor.rotate(identity).reshape(factor.size, -1)
