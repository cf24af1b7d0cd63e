"""Work done in other processes for what it leaves in Triton's cache: one core would compile for minutes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch

_ROOM = 8 << 30  # bytes of device memory for a process

Job = TypeVar("Job")


def run_ahead(function: Callable[[str, Job], object], device: torch.device, jobs: Sequence[Job]) -> None:
    """Call `function` with the device's name and each of the jobs, on all cores.

    What one raises is left to the call that comes upon it again. Nothing is compiled for a CPU: there nothing is done.
    """
    if device.type != "cuda" or not jobs:
        return
    room = torch.cuda.mem_get_info(device)[0] // _ROOM
    workers = max(1, min(len(jobs), os.cpu_count() or 1, room))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(function, str(device), job) for job in jobs]:
            with suppress(Exception):
                future.result()
