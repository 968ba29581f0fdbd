"""The memory of a posterior and of its fit, on one process and on two that share the weights:
`python -m benchmarks.shard_memory`.

*Held* is the size of the posterior's tensors in bytes, each storage once. *Peak* is the largest total of tensors that a
fit (for L2M, with two steps of Adam) has allocated and not freed, without the existing weights. Both are measured in
the first process.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from lightning_bayes.structures import Structure

BYTES, CLASSES, EXAMPLES, BATCH = 4, 10, 64, 32
WIDTH = 512
WAYS = ("diag", "l2m", "last_layer full", "last_layer kron")
DEPTHS = (16, 48)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    print("| network | way | processes | weights, MB | held, MB | held, formula | peak, MB |")
    print("|---|---|---|---|---|---|---|")
    for depth in parser.parse_args().depths:
        for way in WAYS:
            for world in (1, 2):
                print(_row(depth, way, world), flush=True)


def network(depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [(64, WIDTH), *[(WIDTH, WIDTH)] * depth, (WIDTH, 64), (64, CLASSES)]
    return nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh())))[:-1]


def formula(way: str, weights: int, world: int) -> int:
    """Bytes of the posterior's mean, curvature and precision and, if it is not sharded, the loss's gradient."""
    d, C = 64 + 1, CLASSES
    last = d * C
    if way == "l2m":
        return BYTES * 3 * weights // world
    if way == "diag":
        return BYTES * (3 * weights // world + (weights if world == 1 else 0))
    # A full precision is stored as curvature and prior; both share the eigenvectors of a Kronecker block.
    own = {"full": last**2, "kron": d * d + d + C * C + C, "diag": 2 * last}[way.split()[1]]
    return BYTES * (2 * last + own)


def _row(depth: int, way: str, world: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        workers = [context.Process(target=_worker, args=(rank, world, depth, way, folder)) for rank in range(world)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        weights, held, peak = map(int, Path(folder, "bytes").read_text().split())
    numbers = (weights, held, formula(way, weights // BYTES, world), peak)
    cells = " | ".join(f"{number / 1e6:.3g}" for number in numbers)
    return f"| {depth} layers | {way} | {world} | {cells} |"


def _worker(rank: int, world: int, depth: int, way: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    net = network(depth)
    weights = sum(p.numel() for p in net.parameters())
    if world > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    x, y = torch.randn(EXAMPLES, 64)[rank::world], torch.randint(CLASSES, (EXAMPLES,))[rank::world]
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        posterior = _fit(net, batches, way, rank, world)
    peak = _peak(profile)
    if rank == 0:
        Path(folder, "bytes").write_text(f"{BYTES * weights} {_held(posterior)} {peak}")
    dist.barrier()
    dist.destroy_process_group()


def _fit(net: nn.Module, batches: list[Any], way: str, rank: int, world: int) -> Any:
    from lightning_bayes import fit_laplace
    from lightning_bayes.curvature.sharded_diagonal import ShardedDiagonalSum
    from lightning_bayes.likelihoods import Categorical
    from lightning_bayes.network import Processes
    from lightning_bayes.network.gathered_layer import gathered
    from lightning_bayes.posterior import ShardedPosterior, fit_l2m

    processes = Processes(rank, world)
    if way == "l2m":
        optimizer = torch.optim.Adam(net.parameters(), weight_decay=1e-2)
        for x, y in batches:
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        return fit_l2m(net, optimizer, n_data=EXAMPLES, batch_size=BATCH)
    if way == "diag" and world > 1:
        total = ShardedDiagonalSum(net, Categorical(), "fisher_mc", 1, 0, processes)
        for x, y in batches:
            total.add(x, y)
        return ShardedPosterior.from_curvature(net, total.finish(), 1.0)
    if way == "diag":
        return fit_laplace(net, batches, structure="diag", curvature="fisher_mc")
    structure = way.split()[1]
    words: dict[str, Any] = {"structure": structure, "subset": "last_layer", "processes": processes}
    if world == 1:
        return fit_laplace(net, batches, **words)
    layer = gathered(net, batches[0][0])
    features = [(layer.features(x), y) for x, y in batches]
    return fit_laplace(layer, features, probe=features[0][0], **words)


def _held(thing: Any) -> int:
    """Bytes of all tensors that a posterior references, except those of its network; each storage counts once."""
    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                if field.name not in ("network", "plans", "subset", "shards"):
                    visit(getattr(value, field.name))
        elif isinstance(value, Structure):
            visit([part for name, part in vars(value).items() if name != "shards"])
        elif isinstance(value, (tuple, list)):
            for part in value:
                visit(part)

    visit(thing)
    return sum(storages.values())


def _peak(profile: Any) -> int:
    """Tracks the largest total size of live tensors."""
    memory = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())))


if __name__ == "__main__":
    main()
