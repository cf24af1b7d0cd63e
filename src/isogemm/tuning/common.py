"""What the families' tuners share: kinds of arithmetic, and kernels compiled ahead in parallel processes."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
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
        results = _in_processes(compile_one, jobs, workers)
        # After an illegal access nothing works in a process any more: what failed is tried again, each in a new one.
        again = [index for index, failure in enumerate(results) if failure]
        failures = _in_processes(compile_one, [jobs[index] for index in again], workers, max_tasks_per_child=1)
        for index, failure in zip(again, failures, strict=True):
            results[index] = failure
    return results


def _in_processes(
    compile_one: Callable[[Job], str], jobs: Sequence[Job], workers: int, max_tasks_per_child: int | None = None
) -> list[str]:
    """The results of all jobs. A process that dies takes the unfinished jobs with it."""
    results: list[str] = []
    ignored = signal.SIGINT, signal.SIG_IGN  # Ctrl-C is for this process
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, context, signal.signal, ignored, max_tasks_per_child=max_tasks_per_child
    ) as pool, suppress(BrokenProcessPool):  # fmt: skip
        try:
            results.extend(future.result() for future in [pool.submit(compile_one, job) for job in jobs])
        except KeyboardInterrupt:  # not after what they compile: a second one, meanwhile, would leave the pool hanging
            for process in list(pool._processes.values()):
                process.kill()
            raise
    return results + ["a process died"] * (len(jobs) - len(results))


@contextmanager
def _without_script() -> Iterator[None]:
    """Keep new processes from running the user's script again, which may have no `if __name__ == "__main__"`."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
