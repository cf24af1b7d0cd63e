"""What the families' tuners share: kinds of arithmetic, and kernels compiled ahead in parallel processes."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import TypeVar

ARITHMETIC = {  # by its name in the tables: dtype, precision
    "half": ("bfloat16", "ieee"),
    "tf32": ("float32", "tf32"),
    "tf32x3": ("float32", "tf32x3"),
    "ieee": ("float32", "ieee"),
}

Job = TypeVar("Job")


def compile_ahead(compile_one: Callable[[Job], str], jobs: Sequence[Job], workers: int) -> list[str]:
    """Fill Triton's cache in parallel processes; `compile_one` returns why a job failed, or nothing."""
    with _without_script():
        with _pool(workers) as pool:
            results = list(pool.map(compile_one, jobs, chunksize=4))
        # After an illegal access nothing works in a process any more: what failed is tried again, each in a new one.
        again = [index for index, failure in enumerate(results) if failure]
        with _pool(workers, max_tasks_per_child=1) as pool:
            for index, failure in zip(again, pool.map(compile_one, [jobs[index] for index in again]), strict=True):
                results[index] = failure
    return results


def _pool(workers: int, max_tasks_per_child: int | None = None) -> ProcessPoolExecutor:
    """Processes that leave Ctrl-C to this one."""
    return ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN),
        max_tasks_per_child=max_tasks_per_child,
    )  # fmt: skip


@contextmanager
def _without_script() -> Iterator[None]:
    """Keep new processes from running the user's script again, which may have no `if __name__ == "__main__"`."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
