"""What the families' tuners share: kinds of arithmetic, and kernels compiled ahead in parallel processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from isogemm.verify.parallel import in_processes

ARITHMETIC = {  # by its name in the tables: dtype, precision
    "half": ("bfloat16", "ieee"),
    "tf32": ("float32", "tf32"),
    "tf32x3": ("float32", "tf32x3"),
    "ieee": ("float32", "ieee"),
}

Job = TypeVar("Job")


def compile_ahead(compile_one: Callable[[Job], str], jobs: Sequence[Job], workers: int) -> list[str]:
    """Fill Triton's cache in parallel processes; `compile_one` returns why a job failed, or nothing."""
    results = in_processes(compile_one, jobs, workers)
    # After an illegal access nothing works in a process any more: what failed is tried again, each in a new one.
    again = [index for index, failure in enumerate(results) if failure]
    failures = in_processes(compile_one, [jobs[index] for index in again], workers, max_tasks_per_child=1)
    for index, failure in zip(again, failures, strict=True):
        results[index] = failure
    return results
