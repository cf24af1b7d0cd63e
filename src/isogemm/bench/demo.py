"""A family's demo: changed bits, errors and times beside torch's, and the tables that show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from isogemm.bench import timer
from isogemm.bench.cases import Thunk
from isogemm.verify.compare import compare_bits

Function = TypeVar("Function")

BITS = "Bits: elements that change with the batch"
BITS_TEXT = (
    "The same rows, matrices or sequences are computed in one batch, then in others. "
    "Counted: output elements whose bits change."
)
ACCURACY = "Accuracy: largest relative error against fp64"
CPU_BANNER = "This is a CPU. isogemm's CPU path is for correctness and development; its speed figures are for GPUs."


@dataclass(frozen=True)
class Bits:
    """Number of output elements that change with their batch."""

    how: str  # what was computed, and in which batches
    compared: int
    torch: int
    isogemm: int


@dataclass(frozen=True)
class Accuracy:
    """The largest error of each against fp64."""

    unit: str  # what the errors are relative to
    torch: float
    isogemm: float


@dataclass(frozen=True)
class DemoResult:
    """One operation of a family, compared with torch on one device."""

    title: str
    bits: Bits | None = None
    no_promise: str = ""  # why there are no bits to count
    accuracy: Accuracy | None = None
    torch_call: str = ""  # what is timed beside isogemm
    torch_us: float = math.nan
    isogemm_us: float = math.nan
    note: str = ""  # what is not promised
    failure: str = ""  # what went wrong, besides bits

    @property
    def failures(self) -> list[str]:
        found = [self.failure] if self.failure else []
        if self.bits is not None and self.bits.isogemm:
            found.insert(0, f"isogemm changed {self.bits.isogemm:,} of {self.bits.compared:,} elements, expected 0")
        return found

    @property
    def ok(self) -> bool:
        return not self.failures


def count_changes(
    functions: Mapping[str, Function], compute: Callable[[Function, slice], Tensor], items: str, *, batch: int,
    sizes: Sequence[int], compared: int | None = None,
) -> Bits:  # fmt: skip
    """Compute a whole batch, then its first items in smaller batches; count the elements whose bits change.

    Args:
        functions: "torch" and "isogemm".
        compute: gives a function's results [items, ...] for a slice of the batch.
        items: what a batch is made of, in words, such as "rows".
        batch: number of items in the whole batch.
        sizes: sizes of the smaller batches.
        compared: number of items computed again, all of them by default.
    """
    count = batch if compared is None else compared
    changed, elements = {}, 0
    for name, function in functions.items():
        whole = compute(function, slice(0, batch))[:count]
        changed[name] = 0
        for size in sizes:
            starts = range(0, count, size)
            again = torch.cat([compute(function, slice(start, min(start + size, count))) for start in starts])
            changed[name] += compare_bits(again, whole).count
        elements = len(sizes) * whole.numel()
    ways = " and ".join("alone" if size == 1 else f"in batches of {size}" for size in sizes)
    how = f"{count:,} {items}: {ways}, against a batch of {batch:,}"
    return Bits(how, elements, changed["torch"], changed["isogemm"])


def result(
    title: str, bits: Bits | str, errors: Callable[[], Mapping[str, float]], unit: str, thunks: Mapping[str, Thunk],
    torch_call: str, device: torch.device, note: str = "",
) -> DemoResult:  # fmt: skip
    """Measure the errors and the times of "torch" and "isogemm".

    Args:
        title: the operation and its shape.
        bits: what `count_changes` found, or why nothing is promised.
        errors: the largest errors against fp64; raises AssertionError where isogemm's exceeds its bound.
        unit: what the errors are relative to.
        thunks: what is timed.
        torch_call: what torch's thunk calls.
        note: what is not promised.
    """
    accuracy, failure = None, ""
    try:
        found = errors()
        accuracy = Accuracy(unit, found["torch"], found["isogemm"])
    except AssertionError as error:
        failure = str(error)
    variants = {name: [thunk] for name, thunk in thunks.items()}
    times = timer.measure(variants, device, repeats=10 if device.type == "cuda" else 5)
    counted, no_promise = (bits, "") if isinstance(bits, Bits) else (None, bits)
    torch_us, isogemm_us = (median(times[name]) for name in ("torch", "isogemm"))
    return DemoResult(title, counted, no_promise, accuracy, torch_call, torch_us, isogemm_us, note, failure)


Shown = Sequence[tuple[str, DemoResult]]  # by family
Grid = tuple[list[str], list[list[str]]]  # columns and lines


def bits_table(shown: Shown) -> Grid:
    lines = []
    for family, result in shown:
        cells = [f"not promised: {result.no_promise}" if result.no_promise else "failed", "", "", ""]
        if bits := result.bits:
            cells = [bits.how, f"{bits.compared:,}", changed_text(bits.torch, bits.compared), f"{bits.isogemm:,}"]
        lines.append([family, result.title, *cells])
    return ["family", "operation", "computed", "elements", "changed by torch", "by isogemm"], lines


def accuracy_table(shown: Shown) -> Grid:
    lines = [
        [family, found.unit, f"{found.torch:.1e}", f"{found.isogemm:.1e}"]
        for family, result in shown
        if (found := result.accuracy) is not None
    ]
    return ["family", "relative to", "torch", "isogemm"], lines


def speed_table(shown: Shown) -> Grid:
    lines = []
    for family, result in shown:
        if not math.isnan(result.torch_us):
            times = map(time_text, (result.torch_us, result.isogemm_us))
            lines.append([family, result.torch_call, *times, f"{result.torch_us / result.isogemm_us:.2f}x"])
    return ["family", "compared with", "torch", "isogemm", "torch / isogemm"], lines


def time_text(us: float) -> str:
    return f"{us:.1f} us" if us < 1e4 else f"{us / 1e3:,.1f} ms"


def total(shown: Shown) -> Bits:
    """Sum the counts of all families."""
    found = [result.bits for _, result in shown if result.bits is not None]
    sums = (sum(getattr(each, name) for each in found) for name in ("compared", "torch", "isogemm"))
    return Bits("in all", *sums)


def total_text(shown: Shown) -> str:
    bits = total(shown)
    return f"Of {bits.compared:,} elements compared, torch changed {bits.torch:,} and isogemm {bits.isogemm:,}."


def notes(shown: Shown) -> list[str]:
    return [f"{family}: {result.note}" for family, result in shown if result.note]


def failures_table(shown: Shown) -> Grid:
    return ["", "family", "what"], [["FAIL", family, each] for family, result in shown for each in result.failures]


def changed_text(changed: int, compared: int) -> str:
    """Text such as "120,892 (92%)"; a share is never rounded to 0% or 100%."""
    if changed in (0, compared):
        return f"{changed:,}" if not changed else f"{changed:,} (100%)"
    share = 100 * changed / compared
    return f"{changed:,} ({'<1' if share < 1 else '>99' if share > 99 else f'{share:.0f}'}%)"
