"""`GaussianWeights`: the Gaussian `q` over a module's weights, with its prior, its part of the loss, and its state.

    q(w_λ) = N(μ_λ, σ_λ²)                                     (Variational Laplace paper, eq. (2))
    KL_λ = ½ ((σ_λ² + μ_λ²)/s_λ² − 1 + log(s_λ²/σ_λ²))        (eq. (12), from the prior N(0, s_λ²))

μ are the network's own parameters; the parameters log σ are added, and start at `log s − 3`. The loss of an example
gets `(β/N) Σ_λ KL_λ`. (The printed eq. (30) has σ² where eq. (12) has the prior's s².)

The prior's standard deviation `s` of a parameter is a number or a word:

- `"he"`: `s = √(2/fan_in)`, the scale of He initialisation. A bias uses the fan-in of its layer's weight; a layer
  without a matrix (the scale and shift of a norm) has `s = 1`.
- `"weight_decay"`: a mean negative log-likelihood over `N` examples with the penalty `wd/2 ‖μ‖²` has the prior
  `s = 1/√(N·wd)`. This `s` is known only when training starts; until then log σ has the value for "he".

A name pattern is `"net.0.weight"`, `"*.bias"`, or the name of a module, which matches all of its parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bayes.arguments import format_names, format_value, is_positive
from lightning_bayes.likelihoods.outputs import widen
from lightning_bayes.mixins.training_step import Gradients, StepChecks, with_known_gradient, without_wrong
from lightning_bayes.network import Subset, private
from lightning_bayes.network.messages import warn
from lightning_bayes.network.output import Output, wrap_output
from lightning_bayes.network.private import uncompiled
from lightning_bayes.network.subset import flat, parts
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.at_mean import fingerprint
from lightning_bayes.structures import Diagonal
from lightning_bayes.trainer.data import count_examples
from lightning_bayes.trainer.module import network_of

if TYPE_CHECKING:
    from lightning_bayes.mixins.variational import VariationalOptions

BELOW_PRIOR = 3.0  # log σ starts at log s − 3, section 5.1 of the Variational Laplace paper
PRIOR_STDS = ("he", "weight_decay")
MIXIN_FIRST = "name the mixin before your module, as in class Bayes(VariationalLaplaceMixin, LitNet)"
Value = TypeVar("Value")


class VariationalError(RuntimeError):
    """A module that cannot be made variational; the message says what to change."""


class PatternError(ValueError):
    """A pattern that matches no parameter."""


class PriorStdError(ValueError):
    """A prior standard deviation that is invalid or unknown."""


class GaussianWeights:
    """The Gaussian `q` of a module with initialised layers, its part of the loss, and its state."""

    def __init__(self, module: LightningModule, options: VariationalOptions) -> None:
        self.module, self.options = module, options
        self.n_data = options.n_data  # N; None before training starts, if N must be counted
        self.read_as = Output(options.network.output, options.network.class_dim)  # completed by the first batch
        self.draws = 0  # number of random draws so far
        self.called_vl_loss = False  # whether `vl_loss` was called in the current training step
        self.checks = StepChecks(module, options.likelihood)
        self.checked_kinks = False  # whether the module was searched for kinks in the current fit
        weights = self._candidates()
        stds, self.decayed = find_priors(options.prior_std, weights, self.network)
        self.prior_std = {name: s for name, s in stds.items() if name not in self.decayed}  # the known s
        start = {name: math.log(s) - BELOW_PRIOR for name, s in stds.items()}
        self.log_sigma = LogSigma({n: torch.full_like(p.detach(), start[n]) for n, p in weights.items()})

    def _candidates(self) -> dict[str, nn.Parameter]:
        """The trainable weights of the network by their names in the module, except the deterministic ones."""
        kind = type(self.module).__name__
        if hasattr(self.module, "log_sigma"):
            raise VariationalError(f"{kind} already has an attribute log_sigma, which the mixin needs: rename it")
        inside = {id(p) for p in self.network.parameters()}
        weights = {name: p for name, p in self.module.named_parameters() if id(p) in inside and p.requires_grad}
        for name, p in weights.items():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise VariationalError(
                    f"{name} has no shape before the first batch: run one through the lazy layers in __init__"
                )
        weights = {name: p for name, p in weights.items() if p.is_floating_point()}
        if not weights:
            raise VariationalError(
                f"{kind} has no trainable weights when the mixin looks for them: create the layers in the "
                f"__init__ of your module, and {MIXIN_FIRST}"
            )
        patterns = self.options.deterministic
        check_patterns(patterns, weights, "deterministic")
        weights = {name: p for name, p in weights.items() if not any(matches(name, pattern) for pattern in patterns)}
        if not weights:
            raise VariationalError("every weight is deterministic: remove some from variational's 'deterministic'")
        return weights

    # -- the weights and their posterior -------------------------------------------------------------------------------

    @property
    def network(self) -> nn.Module:
        return network_of(self.module, self.options.network.name)

    @property
    def trainer(self) -> Trainer | None:
        """The module's Trainer, if it has one."""
        if self.module.fabric is not None:
            return None
        try:
            return self.module.trainer
        except RuntimeError:  # Lightning raises if the module is not attached
            return None

    def pairs(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """`(μ, log σ)` by name, for the weights that are not frozen."""
        weights = dict(self.module.named_parameters())
        return {n: (weights[n], log_σ) for n, log_σ in self.log_sigma.items() if weights[n].requires_grad}

    def trainable(self) -> list[nn.Parameter]:
        """All trainable parameters except log σ."""
        log_σ = {id(p) for p in self.log_sigma.parameters()}
        return [p for p in self.module.parameters() if p.requires_grad and id(p) not in log_σ]

    def posterior(self) -> GaussianPosterior:
        network = wrap_output(uncompiled(self.network), self.read_as)
        log_σ = {id(μ): l for μ, l in self.pairs().values()}
        weights = {name: p for name, p in network.named_parameters() if id(p) in log_σ}
        with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be differentiated later
            mean = torch.cat([widen(p.detach()).reshape(-1) for p in weights.values()])
            precision = torch.cat([(-2 * widen(log_σ[id(p)].detach())).exp().reshape(-1) for p in weights.values()])
            return GaussianPosterior(
                network=network,
                subset=Subset(tuple(weights), tuple(p.shape for p in weights.values())),
                likelihood=self.options.likelihood,
                mean=mean,
                precision=Diagonal(precision),
                n_data=self.n_data or 0,
                fingerprint=fingerprint(network),
            )

    # -- the KL divergence in the loss ---------------------------------------------------------------------------------

    @property
    def kl_weight(self) -> float:
        """`β/N`, the weight of the KL divergence in the loss of an example."""
        if self.n_data is None:
            raise VariationalError(
                "the number of training examples is not known before training starts: set variational={'n_data': …}"
            )
        return self.options.beta / self.n_data

    def kl(self) -> Tensor:
        """`Σ_λ D_KL(q(w_λ) ‖ p(w_λ))`, eq. (12), with a graph."""
        return torch.stack([kl_divergence(μ, log_σ, self._s(n)) for n, (μ, log_σ) in self.pairs().items()]).sum()

    @torch.no_grad()
    def add_kl(self, value: Tensor, gradients: Gradients, is_wrong: Tensor) -> tuple[Tensor, Tensor]:
        """The KL divergence, and the loss `value + β/N · KL`. The gradient of this loss is the sum of the given
        `gradients` of `value` and the gradients of the KL divergence; all of it is zero if the step is wrong."""
        pairs = self.pairs()
        if not pairs:
            kl, gradients = value.new_zeros(()), without_wrong(gradients, is_wrong)
        else:
            μ, log_σ = ([pair[which] for pair in pairs.values()] for which in (0, 1))
            kl, of_μ, of_log_σ = kl_with_gradients(μ, log_σ, [self._s(name) for name in pairs], self.kl_weight)
            sums = dict(zip([*μ, *log_σ], [*parts(of_μ, μ), *parts(of_log_σ, log_σ)], strict=True))
            both = [p for p in sums if p in gradients]
            if both:
                private.foreach_add_([sums[p] for p in both], [gradients[p] for p in both])
            for vector in (of_μ, of_log_σ):
                vector.masked_fill_(is_wrong, 0)
            gradients = without_wrong({p: g for p, g in gradients.items() if p not in sums}, is_wrong) | sums
        with torch.enable_grad():
            return kl, with_known_gradient(value + self.kl_weight * kl, gradients)

    def _s(self, name: str) -> float:
        """The prior's standard deviation of a weight."""
        if name not in self.prior_std:
            raise PriorStdError(
                f"prior_std='weight_decay' of {name} is not known before training: run trainer.fit, or give a number"
            )
        return self.prior_std[name]

    def log(self, S: int, nll: Tensor, kl: Tensor, squared_gradient: Tensor | None = None) -> None:
        """Log means over the examples of an epoch. The ELBO is per example, `(1/N) L`."""
        trainer = self.trainer
        if trainer is None or trainer.barebones or not trainer.training:
            return
        nll, kl = nll.detach(), kl.detach()
        ell = -nll if squared_gradient is None else -nll - squared_gradient.detach()
        terms = {"kl": kl, "ell": ell, "elbo": ell - self.kl_weight * kl}
        if squared_gradient is not None:
            terms["squared_gradient"] = squared_gradient.detach()
        for name, value in terms.items():
            self.module.log(f"train_{name}", value, on_step=False, on_epoch=True, batch_size=S, sync_dist=True)

    # -- the start of training, and checkpoints ------------------------------------------------------------------------

    def begin(self, trainer: Trainer) -> None:
        """Set N from the data, and a prior of "weight_decay" from the optimizers."""
        self.checked_kinks, self.checks = False, StepChecks(self.module, self.options.likelihood)
        if self.options.n_data is None:
            self.n_data = count_examples(trainer, "set variational={'n_data': …}")
        assert self.n_data is not None
        pairs = self.pairs()
        decayed = {name: pairs[name][0] for name in self.decayed if name in pairs}
        others = set(self.module.parameters()) - set(decayed.values()) - set(self.log_sigma.parameters())
        known = {name for name in decayed if name in self.prior_std}  # from a checkpoint or an earlier fit
        prior_std = from_weight_decay(trainer.optimizers, decayed, others, self.n_data, known)
        with torch.no_grad():
            for name in prior_std.keys() - known:
                self.log_sigma[name].fill_(math.log(prior_std[name]) - BELOW_PRIOR)
        self.prior_std.update(prior_std)
        warn_of_optimizers(trainer.optimizers, pairs)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint stores in addition to the parameters."""
        from_decay = {name: self.prior_std[name] for name in self.decayed if name in self.prior_std}
        output = asdict(self.read_as)
        return {"n_data": self.n_data, "draws": self.draws, "prior_std": from_decay, "output": output}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The state is empty if the checkpoint was written before the module became variational."""
        self.draws = state.get("draws", 0)
        self.read_as = Output(**state.get("output", asdict(self.read_as)))
        if self.options.n_data is None:
            self.n_data = state.get("n_data")
        self.prior_std.update({n: s for n, s in state.get("prior_std", {}).items() if n in self.decayed})

    def add_missing_log_sigma(self, weights: dict[str, Tensor]) -> None:
        """Add log σ to the `weights` of a checkpoint that was written before the module became variational."""
        own = {f"log_sigma.{key}": value for key, value in self.log_sigma.state_dict().items()}
        missing = [key for key in own if key not in weights]
        if missing:
            warn(
                f"the checkpoint has no log σ for {len(missing)} of {len(own)} parameters: they start at the prior's "
                f"standard deviation times e^−{BELOW_PRIOR:g}"
            )
            weights.update({key: own[key] for key in missing})


def kl_divergence(μ: Tensor, log_σ: Tensor, s: float) -> Tensor:
    """`Σ_λ D_KL(N(μ, σ²) ‖ N(0, s²))`, eq. (12).

    >>> kl_divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]), 1.0)
    tensor(0.5000)
    """
    μ, log_σ = widen(μ), widen(log_σ)
    return 0.5 * (((2 * log_σ).exp() + μ.square()) / s**2 - 1 - 2 * (log_σ - math.log(s))).sum()


def kl_with_gradients(
    μ: Sequence[Tensor], log_σ: Sequence[Tensor], s: Sequence[float], weight: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of `kl_divergence` over several tensors, and its gradients `μ/s²` and `σ²/s² − 1` times `weight`, each as
    one vector, without a graph and in few passes over the weights.

    >>> kl_with_gradients([torch.tensor([1.0])], [torch.tensor([0.0])], [1.0])
    (tensor(0.5000), tensor([1.]), tensor([0.]))
    """
    distance, of_μ = widen(flat(log_σ)), widen(flat(μ))  # log σ/s and μ/s
    private.foreach_sub_(parts(distance, log_σ), [math.log(t) for t in s])
    private.foreach_div_(parts(of_μ, μ), list(s))
    distance *= 2
    of_log_σ = torch.expm1(distance)
    twice = torch.dot(of_μ, of_μ) + distance.neg_().add_(of_log_σ).sum()
    private.foreach_mul_(parts(of_μ, μ), [weight / t for t in s])
    return 0.5 * twice, of_μ, of_log_σ.mul_(weight)


# -- log σ and name patterns ------------------------------------------------------------------------------------------


class LogSigma(nn.Module):
    """The parameters log σ, as a mapping from the dotted names of the weights.

    `nn.ParameterDict` allows no dots in keys. The state dict has slashes instead, as in `log_sigma.net/0/weight`.

    >>> import torch
    >>> log_sigma = LogSigma({"net.0.weight": torch.zeros(2, 3)})
    >>> log_sigma["net.0.weight"].shape, list(dict(log_sigma.named_parameters()))
    (torch.Size([2, 3]), ['net/0/weight'])
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._encoded = {name: encode(name) for name in values}
        for name, value in values.items():
            self.register_parameter(self._encoded[name], nn.Parameter(value))

    def __getitem__(self, name: str) -> nn.Parameter:
        if name not in self._encoded:
            raise KeyError(f"no log σ for {name!r}: there is no such parameter, or it is frozen or deterministic")
        return self.get_parameter(self._encoded[name])

    def __contains__(self, name: object) -> bool:
        return name in self._encoded

    def __iter__(self) -> Iterator[str]:
        return iter(self._encoded)

    def __len__(self) -> int:
        return len(self._encoded)

    def keys(self) -> KeysView[str]:
        return self._encoded.keys()

    def values(self) -> ValuesView[nn.Parameter]:
        return dict(self.items()).values()

    def items(self) -> ItemsView[str, nn.Parameter]:
        return {name: self[name] for name in self._encoded}.items()


def encode(name: str) -> str:
    """A name without dots. A parameter of the top module gets a leading slash, because a parameter called `values`
    would hide the method of that name.

    >>> encode("net.0.weight"), encode("values")
    ('net/0/weight', '/values')
    """
    return name.replace(".", "/") if "." in name else f"/{name}"


def matches(name: str, pattern: str) -> bool:
    """Whether a parameter's name matches a pattern.

    >>> matches("net.0.weight", "*.weight"), matches("net.0.weight", "net.0"), matches("net.0.weight", "net")
    (True, True, True)
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def by_pattern(given: Mapping[str, Value], names: Iterable[str], argument: str) -> dict[str, Value]:
    """The value of each name that matches a pattern. If several patterns match, the most specific one counts."""
    names = list(names)
    check_patterns(given, names, argument)
    most_specific_first = sorted(given, key=lambda pattern: len(re.sub(r"\[[^]]*\]|[*?]", "", pattern)), reverse=True)
    values = {name: next((given[p] for p in most_specific_first if matches(name, p)), None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def check_patterns(patterns: Iterable[str], names: Iterable[str], argument: str) -> None:
    names = list(names)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise PatternError(
                f"no parameter matches the pattern {pattern!r} of {argument}; names are {format_names(names)}"
            )


# -- the prior --------------------------------------------------------------------------------------------------------


def find_priors(
    given: float | str | Mapping[str, float | str], weights: Mapping[str, nn.Parameter], network: nn.Module
) -> tuple[dict[str, float], tuple[str, ...]]:
    """`s` of each weight of `network`, and the names of the weights that take `s` from weight decay. These weights have
    a provisional `s` until training starts."""
    fan_in = _fan_ins(weights, network)
    patterns = given if isinstance(given, Mapping) else {"*": given}
    values = by_pattern({pattern: _check_prior_std(value) for pattern, value in patterns.items()}, weights, "prior_std")
    missing = [name for name in weights if name not in values]
    if missing:
        raise PriorStdError(
            f"prior_std has no entry for {format_names(missing)}: add a pattern for the rest, as in {{'*': 1.0}}"
        )
    stds = {name: math.sqrt(2 / fan_in[name]) if isinstance(value, str) else value for name, value in values.items()}
    return stds, tuple(name for name, value in values.items() if value == "weight_decay")


def from_weight_decay(
    optimizers: list[Optimizer],
    weights: Mapping[str, nn.Parameter],
    others: Collection[nn.Parameter],
    n_data: int,
    known: Collection[str],
) -> dict[str, float]:
    """`s = 1/√(N·wd)` of `weights`. Their weight decay becomes zero, because the KL divergence replaces it. Weights
    whose prior is already `known` need no weight decay. The weight decay of the parameters in `others` must not
    change."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if group.get("weight_decay")]
    decay = {p: float(group["weight_decay"]) for group in groups for p in group["params"]}
    without = [name for name, p in weights.items() if p not in decay and name not in known]
    if without:
        raise PriorStdError(
            f"prior_std='weight_decay', but no optimizer has a weight decay for {format_names(without)}: set "
            "weight_decay in the optimizer, or pass a number as prior_std"
        )
    own = set(weights.values())
    for group in groups:
        members = set(group["params"])
        if members & own and members & set(others):
            raise PriorStdError(
                "prior_std='weight_decay' turns the weight decay of a param group into a prior, but one group also "
                "has parameters with another prior or none: put those into a separate param group"
            )
        if members & own:
            group["weight_decay"] = 0.0
    return {name: 1 / math.sqrt(n_data * decay[p]) for name, p in weights.items() if p in decay}


def warn_of_optimizers(optimizers: list[Optimizer], weights: Mapping[str, tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Warn about weight decay on `(μ, log σ)`, and about log σ that no optimizer trains."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    decayed = {p for group in groups if group.get("weight_decay") for p in group["params"]}
    twice = [name for name, pair in weights.items() if decayed & set(pair)]
    if twice:
        warn(
            f"the optimizer has a weight decay for {format_names(twice)} or its log σ, but the KL divergence already "
            "pulls both to the prior: set it to zero, or use variational={'prior_std': 'weight_decay'} to turn it into "
            "the prior"
        )
    trained = {p for group in groups for p in group["params"]}
    untrained = [name for name, (_, log_σ) in weights.items() if log_σ not in trained]
    if untrained and trained:
        warn(
            f"no optimizer has log σ of {format_names(untrained)}: give it self.parameters(), or also derive from "
            "LogSigmaMultiplierMixin, which adds them"
        )


def _fan_ins(weights: Mapping[str, nn.Parameter], network: nn.Module) -> dict[str, float]:
    """The fan-in of each weight: inputs per output of its layer. It is 2 for a layer without a matrix, so that "he"
    gives `s = 1`."""
    names = {id(p): name for name, p in weights.items()}
    fan_ins: dict[str, float] = {}
    for layer in network.modules():
        own = list(layer.parameters(recurse=False))
        matrix = next((p for p in own if p.ndim > 1), None)
        for p in own:
            source = p if p.ndim > 1 else matrix
            if id(p) in names:
                fan_ins.setdefault(names[id(p)], 2.0 if source is None else float(source.shape[1:].numel()))
    return fan_ins


def _check_prior_std(value: Any) -> float | str:
    if isinstance(value, str) and value in PRIOR_STDS:
        return value
    if not is_positive(value):
        words = ", ".join(map(repr, PRIOR_STDS))
        raise PriorStdError(f"prior_std must be a positive number or one of {words}, got {format_value(value)}")
    return float(value)
