"""A process group of the second device, as strict as NCCL: contiguous tensors of the device. Gloo does the rest."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from second_device import NAME
from torch import Tensor

BACKEND = "second_group"


class Done(dist._Work):
    """Work that has ended already."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class DeviceGroup(dist.ProcessGroup):
    @property
    def _device_types(self) -> list[torch.device]:  # where objects are sent
        return [torch.device(NAME)]

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Done:
        means = opts is not None and opts.reduceOp == dist.ReduceOp.AVG  # also of whole numbers, which Gloo refuses
        done = self._run(tensors, lambda host: self._gloo.allreduce(host, _summing(opts)))
        for t in tensors if means else []:
            t.div_(self.size(), rounding_mode=None if t.is_floating_point() else "trunc")
        return done

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Done:
        for t in tensors:
            self.allreduce([t], opts)
        return Done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Done:
        return self._run(tensors, lambda host: self._gloo.broadcast(host, opts))

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Done:
        n = len(outputs[0])
        return self._run([*outputs[0], *tensors], lambda host: self._gloo.allgather([host[:n]], host[n:]))

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Done:
        return self._run([output, tensor], lambda host: self._gloo._allgather_base(host[0], host[1]))

    all_gather_single = _allgather_base  # its later name

    def barrier(self, opts: Any = None) -> Done:
        self._gloo.barrier().wait()
        return Done(None)

    def _run(self, tensors: list[Tensor], work: Callable[[list[Tensor]], Any]) -> Done:
        for t in tensors:
            if t.device.type != NAME:
                raise RuntimeError(f"No backend type associated with device type {t.device.type}")
            if not t.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        host = [t.cpu() for t in tensors]
        work(host).wait()
        for t, value in zip(tensors, host, strict=True):
            t.copy_(value)
        return Done(tensors)


def _summing(opts: Any) -> Any:
    if opts is not None and opts.reduceOp != dist.ReduceOp.AVG:
        return opts
    return dist.AllreduceOptions()


def register() -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # PyTorch's flight recorder is not for groups in Python

    def create(store: Any, rank: int, size: int, timeout: Any) -> DeviceGroup:
        return DeviceGroup(store, rank, size, timeout)

    dist.Backend.register_backend(BACKEND, create, devices=[NAME])
