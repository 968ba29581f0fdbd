"""Many small regression networks, trained by AdamW side by side as one batched computation.

AdamW updates each weight separately, so the networks and the optimizer's state equal those of separate training runs:
`member` returns one of them as an ordinary network with an ordinary optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils.data import TensorDataset

from recipes.program import progress

BATCH = 32
State = dict[str, Any]  # tensors by name; the first dimension is the network


def make_network(n_inputs: int, width: int = 50) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_inputs, width), nn.ReLU(), nn.Linear(width, 1))


def make_optimizer(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def train_side_by_side(parts: Sequence[TensorDataset], steps: int, seed: int, what: str = "training") -> State:
    """Train a network for each of several training sets, on squared error with a learning rate that falls to zero."""
    torch.manual_seed(seed)
    x, y = (nn.utils.rnn.pad_sequence([p.tensors[i] for p in parts], batch_first=True) for i in (0, 1))  # [K, N, ·]
    networks = [make_network(x.shape[2]) for _ in parts]
    parameters, _ = stack_module_state(networks)  # [K, …] each

    def error(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(networks[0], own, (x,)) - y).square().mean()

    adamw, sizes = make_optimizer(parameters.values()), torch.tensor([len(part) for part in parts])
    rate = torch.optim.lr_scheduler.LambdaLR(adamw, lambda t: 1 - t / steps)
    each = torch.arange(len(parts))[:, None]
    for rows in progress(_batches(sizes, steps), what):
        adamw.zero_grad()
        vmap(error)(parameters, x[each, rows], y[each, rows]).sum().backward()
        adamw.step()
        rate.step()
    kept = {name: adamw.state[p] for name, p in parameters.items()}
    return {
        "parameters": {name: p.detach() for name, p in parameters.items()},
        **{key: {name: state[key] for name, state in kept.items()} for key in ("exp_avg", "exp_avg_sq")},
        "step": float(steps),
    }


def member(state: State, k: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """Network k and its optimizer."""
    own = {name: p[k].clone() for name, p in state["parameters"].items()}
    network = make_network(own["0.weight"].shape[1]).eval()
    network.load_state_dict(own)
    adamw = make_optimizer(network.parameters())
    buffers = {
        n: {
            "step": torch.tensor(state["step"]),
            **{key: state[key][name][k].clone() for key in ("exp_avg", "exp_avg_sq")},
        }
        for n, name in enumerate(own)
    }
    adamw.load_state_dict({"state": buffers, "param_groups": adamw.state_dict()["param_groups"]})
    return network, adamw


def _batches(sizes: Tensor, steps: int) -> Iterator[Tensor]:
    """Rows of each network's data, reshuffled in each epoch, without incomplete batches.  # [K, B]"""
    in_epoch = int(sizes.min()) // BATCH * BATCH
    beyond = torch.arange(int(sizes.max())) >= sizes[:, None]  # [K, N]

    def epoch() -> Sequence[Tensor]:
        order = torch.rand(beyond.shape).masked_fill(beyond, 2.0).argsort(1)  # [K, N]
        return order[:, :in_epoch].split(BATCH, dim=1)

    return islice(chain.from_iterable(epoch() for _ in range(steps)), steps)
