"""One of several processes that fit five examples, and add six more."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.networks import made, mlp
from helpers.tensors import real

from lightning_bayes import Categorical, fit_laplace
from lightning_bayes.network import Processes

folder, world = Path(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo", rank=rank, world_size=world)
processes = Processes.current()
network, x, y = made(mlp), real(11, 3), torch.arange(11) % 3
answers = {}
for structure in ("full", "diag", "kron"):
    for curvature in ("ggn", "fisher_mc"):
        first, second = ([(x[part], y[part])] for part in (slice(rank, 5, world), slice(5 + rank, 11, world)))
        words = {"curvature": curvature, "processes": processes, "updatable": True}
        posterior = fit_laplace(network, first, Categorical(), structure, **words)
        posterior = posterior.update(second, processes=processes)
        answers[f"{structure} {curvature}"] = posterior.precision.to_dense()
        answers[f"evidence {structure} {curvature}"] = posterior.log_marginal_likelihood()
torch.save(answers, folder / f"rank{rank}.pt")
dist.destroy_process_group()
