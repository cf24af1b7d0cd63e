"""Compilation on all cores: work done in other processes for what it leaves in Triton's cache."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch

_PROCESS_BYTES = 8 << 30  # device memory per process

Job = TypeVar("Job")


def run_in_processes(function: Callable[[str, Job], object], device: torch.device, jobs: Sequence[Job]) -> None:
    """Call `function(str(device), job)` for every job, on all cores; nothing where the device is a CPU.

    Exceptions are dropped: the later call that repeats the work raises them again.
    """
    if device.type != "cuda" or not jobs:
        return
    room = torch.cuda.mem_get_info(device)[0] // _PROCESS_BYTES
    workers = max(1, min(len(jobs), os.cpu_count() or 1, room))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(function, str(device), job) for job in jobs]:
            with suppress(Exception):
                future.result()
