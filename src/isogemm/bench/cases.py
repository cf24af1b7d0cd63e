"""A benchmark case: what is measured, against what, and how it is checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from isogemm.core.precision import overridden

Thunk = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One point: an operation at one problem, on inputs that `build` makes on a device."""

    family: str
    op: str
    params: Mapping[str, int | str]  # batch, m, n, k, dtype, precision, layout, cache, ...
    flops: float  # least arithmetic
    bytes: float  # least memory traffic
    build: Callable[[torch.device], CaseRun]

    @property
    def label(self) -> str:
        """The case on one line, for progress and failures."""
        return " ".join([self.family, self.op, *(f"{k}={v}" for k, v in self.params.items())])


@dataclass
class CaseRun:
    """A case with its inputs in place."""

    variants: dict[str, list[Thunk]]  # "isogemm", "torch", ...: one thunk per rotated input set
    check: Callable[[], dict[str, float]]  # against fp64 on poisoned outputs: errors by variant, or raises
    info: dict[str, str]  # the path and config that served it
    eager: Collection[str] = ()  # variants to time as they are launched, not as a CUDA graph
    cpu_time: bool = True  # whether to measure the CPU time of a call as well


@contextmanager
def fp32_precision(precision: str) -> Iterator[None]:
    """torch's fp32 matmul precision set to "ieee" or "tf32"; as it is for ""."""
    if not precision:
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # this one was never changed, the newer setting was
        before = "highest"
    with overridden("cuda", precision), overridden("mkldnn", "ieee"):
        set_fp32_precision(precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def set_fp32_precision(precision: str) -> None:
    """For torch and isogemm alike: by both of torch's setters, whose getters raise where they disagree."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cuda.matmul.fp32_precision = precision
