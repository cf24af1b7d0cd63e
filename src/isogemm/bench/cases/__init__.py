"""A benchmark case: what is measured, against what, and how it is checked. The families' cases are the modules here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from isogemm.core.dispatch import dispatch_log
from isogemm.verify.poison import poisoned_allocations
from isogemm.verify.precision import set_fp32_precision

Thunk = Callable[[], Tensor]
Params = Mapping[str, int | str]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Case:
    """One point: an operation at one problem, on inputs that `build` makes on a device."""

    family: str
    op: str
    params: Params  # batch, m, n, k, dtype, precision, layout, cache, ...
    flops: float  # least arithmetic
    bytes: float  # least memory traffic
    build: Callable[[torch.device], CaseRun]

    @property
    def label(self) -> str:
        """The case on one line, for progress and failures."""
        return " ".join([self.family, self.op, *(f"{k}={v}" for k, v in self.params.items())])


@dataclass
class CaseRun:
    """A case whose inputs are made: what to time and how to check it."""

    variants: dict[str, list[Thunk]]  # "isogemm", "torch", ...: one thunk per rotated input set
    check: Callable[[], dict[str, float]]  # against fp64 on poisoned outputs: errors by variant, or raises
    info: dict[str, str]  # the path and config that served it
    eager: Collection[str] = ()  # variants to time as they are launched, not as a CUDA graph
    cpu_time: bool = True  # whether to measure the CPU time of a call as well


def make_params(dtype: str, precision: str = "", **sizes: int | str) -> dict[str, int | str]:
    return {**sizes, "dtype": dtype, **({"precision": precision} if precision else {})}


def use_precision(precision: str, device: torch.device) -> None:
    """Set torch's fp32 precision, which all variants read, as a user's calls do."""
    if device.type == "cuda" and precision:
        set_fp32_precision(precision)


def served_by(thunk: Callable[[], object]) -> dict[str, str]:
    """Return the path and config that serve a call, for `CaseRun.info`."""
    with dispatch_log() as log:
        thunk()
    return {"path": log[0].path, "config": log[0].config}


def rotated(functions: Mapping[str, Callable[..., Tensor]], sets: Sequence[Sequence[Tensor]]) -> dict[str, list[Thunk]]:
    """Make the variants of a case: each function bound to every set of operands."""
    return {name: [partial(function, *operands) for operands in sets] for name, function in functions.items()}


def first(variants: Mapping[str, Sequence[Thunk]]) -> dict[str, Thunk]:
    """Return each variant's call on the first set of operands."""
    return {name: thunks[0] for name, thunks in variants.items()}


def finite_results(thunks: Mapping[str, Thunk]) -> Iterator[tuple[str, Tensor]]:
    """Yield the variants' results on poisoned memory; AssertionError if an element is not finite (not written, say)."""
    for name, thunk in thunks.items():
        result = on_poison(name, thunk).detach()
        if not bool(result.isfinite().all()):
            raise AssertionError(f"{name}: NaN or Inf in the result of finite operands")
        yield name, result


def on_poison(name: str, call: Callable[[], Result]) -> Result:
    """Call a variant with poisoned allocations, except "compiled" ones, which allocate in another way."""
    if name == "compiled":
        return call()
    with poisoned_allocations():
        return call()
