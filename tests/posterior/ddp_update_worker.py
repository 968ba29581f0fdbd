"""One of several processes that fit five examples, and add six more."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.networks import made, mlp
from helpers.tensors import real

from lightning_bayes import Categorical, Kron, fit_laplace
from lightning_bayes.network import Processes


def main(folder: Path, world: int, rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    network, x, y = made(mlp), real(11, 3), torch.arange(11) % 3
    first, second = ([(x[part], y[part])] for part in (slice(rank, 5, world), slice(5 + rank, 11, world)))
    words: dict[str, Any] = {"processes": Processes.current()}
    answers = {}
    for structure in ("full", "diag", "kron"):
        option = Kron(updatable=True) if structure == "kron" else structure
        for curvature in ("ggn", "fisher_mc"):
            posterior = fit_laplace(network, first, Categorical(), curvature=curvature, structure=option, **words)
            posterior = posterior.update(second, processes=Processes.current())
            answers[f"{structure} {curvature}"] = posterior.precision.to_dense()
            answers[f"evidence {structure} {curvature}"] = posterior.log_marginal_likelihood()
    one = posterior.update([(x[:1], y[:1])] if rank == 0 else [], processes=Processes.current(), probe=x[:1])
    answers["n_data"] = torch.tensor(one.n_data)  # an example for one of them alone
    torch.save(answers, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["LOCAL_RANK"]))
