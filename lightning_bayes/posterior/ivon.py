"""`IVON`: an optimizer that learns a Gaussian over the weights (Shen et al. 2024, algorithm 1).

Improved variational online Newton minimises `λ·E_q[ℓ(θ)] + KL(q ‖ p)` over the mean `m` and the variance `σ²` of
`q = N(m, diag σ²)`, with the mean loss `ℓ` over the data and the prior `p = N(0, 1/(λδ))`. A step evaluates the loss at
a sample and uses its gradient `ĝ` for both:

    θ ~ N(m, σ²),    σ² = 1 / (λ(h + δ)),    λ = N / temperature
    ĝ = ∇ℓ(θ),       ĥ = ĝ·(θ − m) / σ²                              (the reparameterisation trick)
    g ← β₁ g + (1 − β₁) ĝ
    h ← β₂ h + (1 − β₂) ĥ + ½ (1 − β₂)² (h − ĥ)² / (h + δ)
    m ← m − lr·(h₀ + δ) · clip((g / (1 − β₁ᵗ) + δ m) / (h + δ), ±ξ)

With `u = h + δ`, the update of `h` is

    u ← u·(1 + x + x²/2),    x = (1 − β₂)(ĥ − h) / u = (1 − β₂)(λ ĝ·(θ − m) − 1 + δ / u).

The factor is at least ½, so the precision `λu` stays positive whatever `ĥ` is, also after rounding. (`h` itself can
fall below zero, down to `−δ`.) The optimizer stores `u`. Several samples enter by the average of `ĝ·(θ − m)`.

All processes and all accumulated batches of a step use the same samples. So the gradient that reaches the step, which
is averaged over processes, accumulated and unscaled, is the gradient at the sample, and its product with `θ − m` is
exact. If each process drew its own sample, the products would have to be averaged over processes as well, and the
result would depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bayes.arguments import between, count, not_negative, positive, seed
from lightning_bayes.curvature import Curvature
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.network import Processes, Subset
from lightning_bayes.network.borrowed import at_weights, check_network, numbered_generator
from lightning_bayes.network.private import (
    foreach_add_,
    foreach_addcmul_,
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_div_,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
    foreach_reciprocal,
    foreach_sqrt_,
)
from lightning_bayes.network.processes import distributed, is_sharded, local, reshard
from lightning_bayes.network.subset import flat, parts
from lightning_bayes.posterior.at_mean import fingerprint
from lightning_bayes.posterior.gaussian import GaussianPosterior
from lightning_bayes.posterior.moments import OptimizerError
from lightning_bayes.posterior.sharded import ShardedPosterior
from lightning_bayes.structures import Diagonal

Moves = dict[nn.Parameter, Tensor]  # θ − m of each parameter, or of this process's shard of it


class IVON(Optimizer):
    """An optimizer whose result is a posterior. The loss must be the mean negative log-likelihood of a batch.

    In Lightning, return it from `configure_optimizers` and give the Trainer an `IVONCallback`. In a loop of your own,
    compute the gradient at a sample:

        with optimizer.sampled():
            loss_fn(network(x), y).backward()
        optimizer.step()

    Args:
        params: the parameters, or parameter groups with different options.
        lr: the learning rate, multiplied by `h₀ + δ`, so that the first step is one of SGD at this rate.
        n_data: `N`, the number of training examples; `IVONCallback` counts them if it is None.
        betas: `(β₁, β₂)`, the decay of the averages of gradients and of the Hessian.
        weight_decay: `δ`, the precision of the prior divided by `λ`. It has the meaning of L2 weight decay.
        hess_init: `h₀`, the initial Hessian of the mean loss.
        clip_radius: `ξ`, the limit of each entry of a step before its multiplication by the learning rate.
        temperature: a number below 1 makes the posterior narrower ("cold"). If the loss is `c` times the mean negative
            log-likelihood, `c` is the temperature that corrects for it.
        seed: the seed of the samples. The global random state is not used.
    """

    _moves: Moves  # the only sample of this step, until it is multiplied
    _products: dict[nn.Parameter, Tensor]  # the average of ĝ·(θ − m)
    _n_samples: int
    _earlier: dict[nn.Parameter, Tensor | None]  # the gradients before the current context

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        *,
        n_data: int | None = None,
        betas: tuple[float, float] = (0.9, 0.99999),
        weight_decay: float = 1e-4,
        hess_init: float = 1.0,
        clip_radius: float | None = None,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "n_data": n_data, "betas": betas, "weight_decay": weight_decay, "hess_init": hess_init,
            "clip_radius": clip_radius, "temperature": temperature, "seed": seed, "draws": 0,
        }  # fmt: skip
        self.forget()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.forget()

    # -- samples -----------------------------------------------------------------------------------------------------

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Put a sample into the parameters, and restore the mean when the context ends, also after an exception. The
        backward pass must end inside.

        `step` uses the average over all contexts with a gradient since the last step. With a `GradScaler`, use one
        context for each step.
        """
        moves = self.draw()
        self._earlier = {p: p.grad for p in moves}
        for p in moves:
            p.grad = None
        try:
            with at_weights(nn.Module(), moves):
                yield
            self._add_sample(moves)
        except BaseException:
            for p in moves:
                p.grad = self._earlier.get(p)
            raise
        finally:
            self._earlier = {}

    @torch.no_grad()
    def draw(self) -> Moves:
        """Draw `θ − m`. Each call draws another sample, which depends only on the seed and the number of samples so
        far."""
        moves: Moves = {}
        generators: dict[Any, torch.Generator] = {}
        for group in self.param_groups:
            number, λ = group["draws"], _λ(group)
            group["draws"] += 1
            trained = [p for p in group["params"] if p.requires_grad]
            noises = []
            for p in trained:
                u = local(self._state_of(p, group)["u"])
                key = (u.device, place := _place(p))
                if key not in generators:  # shards and devices must not repeat each other's noise
                    generators[key] = numbered_generator(u.device, group["seed"], number, len(generators), *place)
                generator = generators[key]
                noise = torch.randn(u.shape, generator=generator, dtype=u.dtype, device=generator.device)
                noises.append(noise.to(u.device))
            if trained:
                σ = foreach_mul([local(self.state[p]["u"]) for p in trained], λ)
                foreach_sqrt_(σ)
                foreach_div_(noises, σ)
            moves.update(zip(trained, noises, strict=True))
        return moves

    def _state_of(self, p: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            dtype = torch.promote_types(p.dtype, torch.float32)  # 16 bits cannot hold an average with β₂ near 1
            state["step"] = 0
            state["g"] = torch.zeros_like(p, dtype=dtype)
            state["u"] = torch.full_like(p, group["hess_init"] + group["weight_decay"], dtype=dtype)
        return state

    @torch.no_grad()
    def _add_sample(self, moves: Moves) -> None:
        """Replace the gradients by the average over samples, and add the products of this sample."""
        new = {p: p.grad for p in moves}
        for p in moves:
            p.grad = self._earlier.get(p)
        if all(grad is None for grad in new.values()):  # only an evaluation
            return
        if self._n_samples == 1:
            self._multiply()  # by the gradient of the first sample alone
        self._n_samples += 1
        share = 1 / self._n_samples
        for p, grad in new.items():
            if self._n_samples > 1 and p.grad is not None:
                p.grad.mul_(1 - share)
            if grad is not None:
                grad = grad if self._n_samples == 1 else grad.mul_(share)
                p.grad = grad if p.grad is None else p.grad.add_(grad)
        if self._n_samples == 1:
            self._moves = moves  # multiplied in `step`, when a `GradScaler` has unscaled the gradient
            return
        for product in self._products.values():
            product.mul_(1 - share)
        for p, grad in new.items():
            if grad is not None:
                self.add_product(p, local(grad), moves[p])

    def multiply(self, moves: Moves) -> None:
        """Set the products `ĝ·(θ − m)` of a step whose gradients belong to the one sample `moves`."""
        self.forget()
        self._moves = moves
        self._multiply()

    @torch.no_grad()
    def _multiply(self) -> None:
        for p, move in self._moves.items():
            if p.grad is not None:
                self.add_product(p, local(p.grad), move)
        self._moves = {}

    @torch.no_grad()
    def add_product(self, p: nn.Parameter, grad: Tensor, move: Tensor) -> None:
        """Add the product of a gradient at a sample, which may be one of several samples or accumulated batches."""
        if grad.is_sparse:
            raise OptimizerError("IVON does not support sparse gradients: create the embedding with sparse=False")
        if p in self._products:
            self._products[p].addcmul_(grad.to(move), move)
        else:
            self._products[p] = grad * move

    @torch.no_grad()
    def reduce(self, processes: Processes, scale: Tensor | float = 1.0) -> None:
        """Average the products over processes, and divide them by the factor by which the loss was scaled."""
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        products = [self._products.get(p, torch.zeros_like(self.state[p]["u"])) for p in trained]
        if processes.size > 1 and products:
            total = flat(products)
            processes.sum_([total])
            products = parts(total, products)
        self._products = {p: t.div_(scale * processes.size) for p, t in zip(trained, products, strict=True)}

    def forget(self) -> None:
        """Forget the samples since the last step."""
        self._moves, self._products, self._n_samples, self._earlier = {}, {}, 0, {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.forget()

    # -- the step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the mean and the Hessian. A `closure` computes the gradient, inside `sampled()`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._multiply()
        products = self._products
        self.forget()
        if not products:
            self._check_no_gradient()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p in products and p.grad is not None]
            if trained:
                self._update(group, trained, [products[p] for p in trained])
        return loss

    def _check_no_gradient(self) -> None:
        """Raise if there are gradients, which then belong to no sample."""
        for group in self.param_groups:
            # A step at a rate of zero is how torch.distributed.checkpoint creates the state
            trained = [p for p in group["params"] if p.requires_grad and p.grad is not None]
            if trained and group["lr"] != 0:
                raise OptimizerError(
                    "IVON needs gradients at a sample of the weights: run the backward pass inside `with "
                    "optimizer.sampled():`, or in Lightning add IVONCallback to the Trainer's callbacks"
                )
            for p in trained:
                self._state_of(p, group)

    def _update(self, group: dict[str, Any], trained: list[nn.Parameter], products: list[Tensor]) -> None:
        states, (β1, β2), δ = [self.state[p] for p in trained], group["betas"], group["weight_decay"]
        m, g, u = ([local(t) for t in ts] for ts in (trained, [s["g"] for s in states], [s["u"] for s in states]))
        for state in states:
            state["step"] += 1
        gradients = [local(p.grad) for p in trained if p.grad is not None]  # of all of them
        foreach_lerp_(g, [grad.to(t) for grad, t in zip(gradients, g, strict=True)], 1 - β1)
        # u ← u·(1 + x + x²/2)
        x = foreach_reciprocal(u)
        foreach_mul_(x, (1 - β2) * δ)
        foreach_add_(x, products, alpha=(1 - β2) * _λ(group))
        foreach_add_(x, β2 - 1)
        factor = foreach_mul(x, 0.5)
        foreach_add_(factor, 1.0)
        foreach_mul_(x, factor)
        foreach_addcmul_(u, u, x)
        # m ← m − lr·(h₀ + δ)·clip((g/(1 − β₁ᵗ) + δm)/u)
        step = foreach_mul(g, [1 / (1 - β1 ** state["step"]) for state in states])
        foreach_add_(step, m, alpha=δ)
        foreach_div_(step, u)
        if group["clip_radius"] is not None:
            foreach_clamp_min_(step, -group["clip_radius"])
            foreach_clamp_max_(step, group["clip_radius"])
        foreach_add_(m, step, alpha=-float(group["lr"]) * (group["hess_init"] + δ))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # PyTorch has converted the state to the dtype of the parameters
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for n, p in zip(numbers, [p for group in self.param_groups for p in group["params"]], strict=True):
            if n in state_dict["state"]:
                self.state[p].update({k: state_dict["state"][n][k].to(p.device, copy=True) for k in ("g", "u")})

    # -- the posterior -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def posterior(self, network: nn.Module, likelihood: str | Likelihood = "classification") -> GaussianPosterior:
        """`N(m, 1/(λ(h + δ)))` over the network's parameters that this optimizer trains. All other weights are
        fixed."""
        likelihood, network = resolve(likelihood), check_network(network)
        reshard(network)
        groups = {p: group for group in self.param_groups for p in group["params"] if p.requires_grad}
        weights = {name: p for name, p in network.named_parameters() if p in groups and self.state.get(p)}
        if not weights:
            raise OptimizerError("IVON has drawn no sample of this network's weights: train it first")
        subset = Subset(tuple(weights), tuple(p.shape for p in weights.values()))
        n_data = groups[next(iter(weights.values()))]["n_data"]

        def vector(of: Callable[[nn.Parameter], Tensor]) -> Tensor:
            return torch.cat([of(p).reshape(-1) for p in weights.values()])

        with torch.inference_mode(False):
            precision = vector(lambda p: local(self.state[p]["u"]) * _λ(groups[p]))
            if is_sharded(network):
                prior = vector(lambda p: torch.full_like(local(self.state[p]["u"]), _prior_precision(groups[p])))
                curvature = Curvature(
                    structure=Diagonal(precision - prior), subset=subset, likelihood=likelihood, kind="ivon",
                    n_data=n_data, n_outputs=0,
                )  # fmt: skip
                return ShardedPosterior.from_curvature(network, curvature, prior)
            mean = vector(lambda p: p.detach().to(self.state[p]["u"].dtype))
            return GaussianPosterior(
                network, subset, likelihood, mean, Diagonal(precision), n_data, fingerprint(network)
            )


def _check(group: dict[str, Any]) -> None:
    not_negative("lr", float(group["lr"]) if isinstance(group["lr"], Tensor) else group["lr"])
    if group["n_data"] is not None:
        count("n_data", group["n_data"])
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers (β₁, β₂), got {betas!r}")
    for β in betas:
        between("betas", β, 0, 1)
    if betas[0] == 1:
        raise ValueError("betas[0] must be less than 1, or the mean would never move")
    not_negative("weight_decay", group["weight_decay"])
    positive("hess_init", group["hess_init"])
    positive("clip_radius", 1 if group["clip_radius"] is None else group["clip_radius"])
    positive("temperature", group["temperature"])
    seed("seed", group["seed"])


def _λ(group: dict[str, Any]) -> float:
    if group["n_data"] is None:
        raise OptimizerError(
            "IVON needs the number of training examples, the scale of its posterior: pass n_data=, or in Lightning add "
            "IVONCallback, which counts them"
        )
    return group["n_data"] / group["temperature"]


def _prior_precision(group: dict[str, Any]) -> float:
    if group["weight_decay"] == 0:
        raise OptimizerError("the posterior of a sharded network needs a prior: pass IVON a weight_decay above 0")
    return _λ(group) * group["weight_decay"]


def _place(p: nn.Parameter) -> tuple[int, ...]:
    """Which shard of a distributed parameter this process has; empty for other parameters."""
    placed = distributed(p)
    if placed is None:
        return ()
    coordinate = placed.device_mesh.get_coordinate() or ()
    return tuple(n for n, placement in zip(coordinate, placed.placements, strict=True) if placement.is_shard())
