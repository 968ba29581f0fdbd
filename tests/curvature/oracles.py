"""Slow and obviously right: one example, one output, one backward pass at a time; everything written out by hand."""

from __future__ import annotations

import copy
from typing import Any

import torch
from helpers.oracles import call
from networks import Case
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call, jacrev

from lightning_bayes.curvature import Curvature
from lightning_bayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def block(M: Tensor, places: Tensor) -> Tensor:
    return M[places.unsqueeze(-1), places]


def example(x: Any, n: int) -> Any:
    """The n-th example as a batch of one."""
    if isinstance(x, dict):
        return {key: value[n : n + 1] for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(value[n : n + 1] for value in x)
    return x[n : n + 1]


def subset(network: nn.Module, names: list[str] | None = None) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A copy in eval mode in which the named (or all trainable) parameters, and no others, have gradients, which are
    derivatives."""
    network = copy.deepcopy(network).eval()
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            module.scale_grad_by_freq = False
    wanted = names or [name for name, p in network.named_parameters() if p.requires_grad]
    for name, p in network.named_parameters():
        p.requires_grad_(name in wanted)
    return network, {name: p for name, p in network.named_parameters() if name in wanted}


def flat_gradient(f: Tensor, parameters: dict[str, nn.Parameter]) -> Tensor:
    """# scalar -> [P]"""
    grads = torch.autograd.grad(f, list(parameters.values()), retain_graph=True, allow_unused=True)
    found = zip(parameters.values(), grads, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g.to_dense()).flatten() for p, g in found])


def jacobian(network: nn.Module, x_n: Any, parameters: dict[str, nn.Parameter]) -> tuple[Tensor, Tensor]:
    """The output of one example and its Jacobian, output by output.  # [C, *positions], [outputs, P]"""
    f = call(network, x_n).squeeze(0)
    return f.detach(), torch.stack([flat_gradient(output, parameters) for output in f.flatten()])


def check_exact(case: Case, H: Tensor, *sizes: int, **options: Any) -> Curvature:
    """The full matrix is `H`, and the diagonal its diagonal."""
    full, diagonal = (case.fit(structure, *sizes, **options) for structure in ("full", "diag"))
    close(full.structure.to_dense(), H)
    close(diagonal.structure.diagonal(), H.diagonal())
    return full


def covariances(network: nn.Module, x: Any, B: int, P: Tensor) -> Tensor:
    """`J P⁻¹ Jᵀ` of each of `B` examples.  # [B, C, C]"""
    network, parameters = subset(network)
    J = torch.stack([jacobian(network, example(x, n), parameters)[1] for n in range(B)])
    return J @ torch.linalg.solve(P, J.mT)


def output_fisher(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """`Λ` of one example over its flattened outputs.  # f [C, *positions] -> [outputs, outputs]"""
    if isinstance(likelihood, Bernoulli):
        p = 1 / (1 + torch.exp(-f))
        return torch.diag((p * (1 - p)).flatten())
    if isinstance(likelihood, Gaussian):
        σ = torch.as_tensor(likelihood.noise_std, dtype=f.dtype)
        σ = σ.reshape(-1, *[1] * (f.ndim - 1)) if σ.ndim else σ
        return torch.diag((1 / (σ**2).expand_as(f)).flatten())
    if isinstance(likelihood, HeteroscedasticGaussian):
        D = len(f) // 2
        return torch.diag(torch.cat([torch.exp(-f[D:]).flatten(), torch.full_like(f[:D], 0.5).flatten()]))
    assert isinstance(likelihood, Categorical)
    C, R = f.shape[0], f[0].numel()
    Λ = torch.zeros(C, R, C, R, dtype=f.dtype)
    logits, labels = f.reshape(C, R), y.reshape(R)
    for r in range(R):
        if labels[r] != likelihood.ignore_index:
            p = torch.exp(logits[:, r]) / torch.exp(logits[:, r]).sum()
            Λ[:, r, :, r] = torch.diag(p) - torch.outer(p, p)
    return Λ.reshape(C * R, C * R)


def ggn(case: Case, names: list[str] | None = None) -> Tensor:
    """`Σₙ JₙᵀΛₙJₙ`.  # [P, P]"""
    network, parameters = subset(case.network, names)
    total = torch.zeros(())
    for n in range(len(case.y)):
        f, J = jacobian(network, example(case.x, n), parameters)
        total = total + J.mT @ output_fisher(case.likelihood, f, case.y[n]) @ J
    return total


def ggn_of_classes(f: Tensor, network: nn.Module) -> Tensor:
    """`Σₙ JₙᵀΛₙJₙ` of the class scores `f` that the network gave for all examples together.  # [N, C] -> [P, P]"""
    J, p = jacobian_of(f, network), f.detach().softmax(1)
    return torch.einsum("nap,nab,nbq->pq", J, torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1), J)


def jacobian_of(f: Tensor, network: nn.Module) -> Tensor:
    """# [N, ...] -> [N, ..., P]"""
    parameters = dict(network.named_parameters())
    return torch.stack([flat_gradient(out, parameters) for out in f.flatten()]).reshape(*f.shape, -1)


def log_density(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """`log p(y | f)` of one example, by torch.distributions."""
    if isinstance(likelihood, Categorical):
        labels = y.flatten()
        seen = labels != likelihood.ignore_index
        if not seen.any():
            return 0 * f.sum()
        return torch.distributions.Categorical(logits=f.reshape(len(f), -1).mT[seen]).log_prob(labels[seen]).sum()
    if isinstance(likelihood, Bernoulli):
        return torch.distributions.Bernoulli(logits=f).log_prob(y).sum()
    if isinstance(likelihood, Gaussian):
        σ = torch.as_tensor(likelihood.noise_std, dtype=f.dtype)
        return torch.distributions.Normal(f, σ.reshape(-1, *[1] * (f.ndim - 1)) if σ.ndim else σ).log_prob(y).sum()
    D = len(f) // 2
    return torch.distributions.Normal(f[:D], torch.exp(0.5 * f[D:])).log_prob(y).sum()


def empirical_fisher(case: Case, names: list[str] | None = None) -> tuple[Tensor, Tensor]:
    """`Σₙ ∇log p(yₙ) ∇log p(yₙ)ᵀ` and `Σₙ log p(yₙ)`.  # [P, P], scalar"""
    network, parameters = subset(case.network, names)
    total, log_likelihood = torch.zeros(()), torch.zeros(())
    for n in range(len(case.y)):
        log_p = log_density(case.likelihood, call(network, example(case.x, n)).squeeze(0), case.y[n])
        gradient = flat_gradient(log_p, parameters)
        total, log_likelihood = total + torch.outer(gradient, gradient), log_likelihood + log_p.detach()
    return total, log_likelihood


def positions_of(network: nn.Module, name: str) -> Tensor:
    """Where a parameter lies in the concatenation of all trainable ones, in its own shape."""
    start = 0
    for other, p in network.named_parameters():
        if other == name:
            return torch.arange(start, start + p.numel()).reshape(p.shape)
        start += p.numel() if p.requires_grad else 0
    raise KeyError(name)


def places(network: nn.Module, names: list[str]) -> Tensor:
    """Where these parameters lie in the concatenation of all trainable ones."""
    return torch.cat([positions_of(network, name).flatten() for name in names])


def kfac(case: Case, sharing: str = "expand", kind: str = "ggn") -> dict[str, tuple[Tensor, Tensor]]:
    """For every Linear, (transposed) convolution and Embedding: the places of its block in the flat vector, and the
    block, of the exact GGN ("ggn") or of the examples' own gradients ("empirical_fisher").

    `A = Σₙₜ aaᵀ / (N·T)` and `G = Σₙₖₜ ggᵀ` ("expand"), or `A = Σₙ āāᵀ / N` of means and `G = Σₙₖ ḡḡᵀ` of sums over
    positions ("reduce"); the block is `G ⊗ A`. What a position sees is read off the layer itself, which is linear in
    its weight: `a[t]` is the derivative of `z[t]` with respect to it.
    """
    network, _ = subset(case.network)
    layers = {name: m for name, m in network.named_modules() if _inputs_rule(m) is not None}
    calls: dict[str, list[tuple[Tensor, Any]]] = {name: [] for name in layers}
    for name, module in layers.items():
        module.register_forward_hook(
            lambda m, args, z, name=name: calls[name].append((args[0].detach(), get_gradient_edge(z)))
        )
    sums: dict[str, list[Any]] = {name: [0, 0, 0] for name in layers}
    for n in range(len(case.y)):
        for earlier in calls.values():
            earlier.clear()
        f = call(network, example(case.x, n)).squeeze(0)
        seen = {name: list(here) for name, here in calls.items()}  # checkpointing runs layers again later
        if kind == "ggn":
            values, vectors = torch.linalg.eigh(output_fisher(case.likelihood, f.detach(), case.y[n]))
            roots = (vectors * values.clamp(min=0).sqrt()).mT  # [K, outputs]
        else:
            leaf = f.detach().requires_grad_()
            roots = torch.autograd.grad(log_density(case.likelihood, leaf, case.y[n]), leaf)[0].reshape(1, -1)
        for name, module in layers.items():
            a = torch.cat([_inputs_rule(module)(module, x) for x, _ in seen[name]], dim=1)  # [G, T, I]
            if getattr(module, "bias", None) is not None:
                a = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)
            each = [
                torch.cat(
                    [
                        _output_rows(module, g)
                        for g in torch.autograd.grad(f.flatten(), [z for _, z in seen[name]], root, retain_graph=True)
                    ],
                    dim=1,
                )
                for root in roots
            ]  # K of [G, T, O]
            if getattr(module, "padding_idx", None) is not None:  # positions that reach no weight
                tokens = torch.cat([x.flatten() for x, _ in seen[name]]) != module.padding_idx
                each = [g * tokens.unsqueeze(-1) for g in each]
                a = a if sharing == "reduce" else a[:, tokens]
            if sharing == "reduce":
                a, each = a.mean(1, keepdim=True), [g.sum(1, keepdim=True) for g in each]
            sums[name][0] += a.mT @ a
            sums[name][1] += sum(g.mT @ g for g in each)
            sums[name][2] += a.shape[1]
    return {
        name: (
            _places(network, name, module),
            torch.block_diag(*(torch.kron(g, a) for a, g in zip(A / rows, G, strict=True))),
        )
        for name, module in layers.items()
        for A, G, rows in [sums[name]]
    }


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _inputs_rule(module: nn.Module) -> Any:
    if isinstance(module, nn.Linear):
        return lambda _, x: x.reshape(1, -1, x.shape[-1])
    if isinstance(module, nn.Embedding):
        return _embedding_inputs
    return _convolution_inputs if isinstance(module, CONVOLUTIONS + TRANSPOSED) else None


def _embedding_inputs(module: nn.Embedding, tokens: Tensor) -> Tensor:
    a = torch.zeros(1, tokens.numel(), module.num_embeddings, dtype=module.weight.dtype)
    for t, token in enumerate(tokens.flatten().tolist()):
        if token != module.padding_idx:
            a[0, t, token] = 1
    return a


def _convolution_inputs(module: Any, x: Tensor) -> Tensor:
    """# [rows, C, *S] -> [G, T, I], T = (row, pixel), I = (input channel of the group, kernel offset)"""
    if len(x) > 1:
        return torch.cat([_convolution_inputs(module, x[n : n + 1]) for n in range(len(x))], dim=1)
    weight = module.weight.detach()
    plain = copy.deepcopy(module)
    plain._forward_hooks.clear()
    J = jacrev(lambda w: functional_call(plain, {"weight": w}, (x,))[0])(weight)  # [O, *L, *weight.shape]
    G, O = module.groups, module.out_channels // module.groups
    J = J.reshape(module.out_channels, -1, *weight.shape[:2], weight[0, 0].numel())  # [O, T, w0, w1, k]
    groups = []
    for g in range(G):
        o = g * O  # the first output channel of the group: all of them see the same
        if isinstance(module, TRANSPOSED):
            C = module.in_channels // G
            groups.append(J[o, :, g * C : (g + 1) * C, 0].flatten(1))
        else:
            groups.append(J[o, :, o].flatten(1))
    return torch.stack(groups)


def _output_rows(module: Any, g: Tensor) -> Tensor:
    """# gradient of the layer's output for one example -> [G, T, O]"""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return g.reshape(1, -1, g.shape[-1])
    return torch.cat([row.flatten(1).unflatten(0, (module.groups, -1)).mT for row in g], dim=1)


def _places(network: nn.Module, name: str, module: Any) -> Tensor:
    """The flat positions of `[W b]`, group by group and row by row."""
    dot = f"{name}." if name else ""
    weight = positions_of(network, f"{dot}weight")
    if isinstance(module, nn.Embedding):
        return weight.mT.flatten()
    G = getattr(module, "groups", 1)
    if isinstance(module, TRANSPOSED):
        rows = weight.unflatten(0, (G, -1)).transpose(1, 2).flatten(0, 1).flatten(1)  # [G·O, C/G·k]
    else:
        rows = weight.flatten(1)
    if module.bias is not None:
        rows = torch.cat([rows, positions_of(network, f"{dot}bias").unsqueeze(-1)], dim=-1)
    return rows.flatten()
