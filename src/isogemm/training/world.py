"""The processes of a run: one, or those that torchrun started."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed


class FailedElsewhere(Exception):
    """Another process of the run failed, and reports why."""


@dataclass(frozen=True)
class World:
    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process reports and writes."""
        return self.rank == 0

    def share(self, batches: Tensor) -> Tensor:
        """Return this process's part of every batch: [batches, batch] -> [batches, batch / size]."""
        return batches.chunk(self.size, 1)[self.rank]

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.size

    def sum(self, values: Tensor) -> Tensor:
        if self.size > 1:
            values = values.clone()
            distributed.all_reduce(values)
        return values

    def of_each(self, value: Any) -> list[Any]:
        """Gather every process's value, in the order of ranks."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise in all processes if one raises in this block, so that none waits. No collective may run inside."""
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = self.of_each(failure is not None)
        if failure is not None:
            raise failure
        if True in failed:
            raise FailedElsewhere(f"process {failed.index(True)} failed")

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast the leading process's values."""
        if self.size > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, 0)


@contextmanager
def entered(device: torch.device) -> Iterator[World]:
    """Join the processes of torchrun, if it started this one: by NCCL with a GPU each, by gloo on the CPU."""
    gpu = device.type == "cuda"
    if not (distributed.is_available() and distributed.is_torchelastic_launched()):
        with torch.cuda.device(device) if gpu else nullcontext():
            yield World(device)
        return
    import_module("torch.distributed.nn")  # imported later, its functions would keep the group as a default argument
    distributed.init_process_group("nccl" if gpu else "gloo")
    try:
        if gpu:
            device = torch.device("cuda", distributed.get_node_local_rank())
            torch.cuda.set_device(device)
        yield World(device, distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()
        # DistributedDataParallel keeps the group in a cycle. What is left of it at exit aborts the process: a thread of
        # gloo's that frees a tensor then waits for an interpreter that has ended.
        gc.collect()
