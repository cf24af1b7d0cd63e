"""Runs jobs in other processes, on all cores, to fill Triton's cache."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import TypeVar

import torch

_MOST_PROCESSES = 16  # each takes seconds to start
_PROCESS_BYTES = 8 << 30  # device memory of a process that runs cases or trials

Job = TypeVar("Job")


def run_in_processes(function: Callable[[str, Job], object], device: torch.device, jobs: Sequence[Job]) -> None:
    """Call `function(str(device), job)` for every job, on all cores; nothing where the device is a CPU.

    Exceptions are dropped: the later call that repeats the work raises them again.
    """
    if device.type == "cuda" and jobs:
        in_processes(partial(_try, function, str(device)), jobs, process_count(len(jobs), device, _PROCESS_BYTES))


def process_count(jobs: int, device: torch.device, process_bytes: int) -> int:
    """Number of processes for the jobs: what the cores and the free device memory allow, at least 1."""
    room = torch.cuda.mem_get_info(device)[0] // process_bytes
    return max(1, min(jobs, os.cpu_count() or 1, _MOST_PROCESSES, room))


def in_processes(
    function: Callable[[Job], str], jobs: Sequence[Job], workers: int, max_tasks_per_child: int | None = None
) -> list[str]:
    """Return the results of all jobs. If a process dies, unfinished jobs give "a process died"."""
    results: list[str] = []
    ignored = signal.SIGINT, signal.SIG_IGN  # Ctrl-C is for this process
    context = multiprocessing.get_context("spawn")
    with _without_script(), ProcessPoolExecutor(
        workers, context, signal.signal, ignored, max_tasks_per_child=max_tasks_per_child
    ) as pool, suppress(BrokenProcessPool):  # fmt: skip
        try:
            results.extend(future.result() for future in [pool.submit(function, job) for job in jobs])
        except KeyboardInterrupt:  # not after what they compile: a second one, meanwhile, would leave the pool hanging
            for process in list(pool._processes.values()):
                process.kill()
            raise
    return results + ["a process died"] * (len(jobs) - len(results))


def retried_in_processes(function: Callable[[Job], str], jobs: Sequence[Job], workers: int) -> list[str]:
    """Return why each job failed, or "". What failed is tried again in a process of its own.

    After an illegal access nothing works in a process any more, so that later jobs fail too.
    """
    results = in_processes(function, jobs, workers)
    again = [index for index, failure in enumerate(results) if failure]
    failures = in_processes(function, [jobs[index] for index in again], workers, max_tasks_per_child=1)
    for index, failure in zip(again, failures, strict=True):
        results[index] = failure
    return results


def _try(function: Callable[[str, Job], object], device: str, job: Job) -> str:
    with suppress(Exception):
        function(device, job)
    return ""


@contextmanager
def _without_script() -> Iterator[None]:
    """Keep new processes from running the user's script again, which may have no `if __name__ == "__main__"`."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
