"""One of several processes that fit Kronecker factors by their rows, and by a few eigenpairs."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from factor_cases import THRESHOLDS, cnn, data

from lightning_bayes import Kron, fit_laplace
from lightning_bayes.network import Processes


def main(folder: Path, world: int, rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for module, name, value in THRESHOLDS:
        setattr(module, name, value)
    network, answers = cnn(), {}
    for n in (1, 3, 7):  # none for one of them; few rows over all; few on one and not over all
        x, y = data(n)
        own = [(x[rank::world], y[rank::world])] if rank < n else []
        for rank_of_factors in (None, 3, "auto"):
            words = {"structure": Kron(rank=rank_of_factors), "processes": Processes.current(), "probe": x[:1]}
            posterior = fit_laplace(network, own, "classification", **words)
            for block in posterior.curvature.structure.blocks:
                for found in (block.left, block.right):
                    answers.setdefault(f"ranks {n} {rank_of_factors}", []).append(found.values.shape[-1])
            answers[f"{n} {rank_of_factors}"] = posterior.precision.to_dense()
            answers[f"draw {n} {rank_of_factors}"] = posterior.sample(2, torch.Generator().manual_seed(1))
    torch.save(answers, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["LOCAL_RANK"]))
