"""What the families' demos share: the elements that change with the batch, errors and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from isogemm.bench import timer
from isogemm.bench.cases import Thunk
from isogemm.bench.demo import Accuracy, Bits, DemoResult
from isogemm.testing.compare import compare_bits

Compute = Callable[[slice], torch.Tensor]  # some items of a batch -> their results, [items, ...]


def count_changes(
    compute: Mapping[str, Compute], items: str, *, batch: int, sizes: Sequence[int], compared: int | None = None
) -> Bits:
    """Compute a whole batch, then its first items in smaller batches; count the elements whose bits change.

    Args:
        compute: by "torch" and "isogemm".
        items: what a batch is made of, in words, such as "rows".
        batch: number of items in the whole batch.
        sizes: of the smaller batches.
        compared: number of items computed again, all of them by default.
    """
    count = batch if compared is None else compared
    changed, elements = {}, 0
    for name, function in compute.items():
        whole = function(slice(0, batch))[:count]
        starts = [range(0, count, size) for size in sizes]
        again = [
            torch.cat([function(slice(start, min(start + size, count))) for start in each])
            for size, each in zip(sizes, starts, strict=True)
        ]
        changed[name] = sum(compare_bits(each, whole).count for each in again)
        elements = len(again) * whole.numel()
    ways = " and ".join("alone" if size == 1 else f"in batches of {size}" for size in sizes)
    how = f"{count:,} {items}: {ways}, against a batch of {batch:,}"
    return Bits(how, elements, changed["torch"], changed["isogemm"])


def result_and_gradient(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, grad: torch.Tensor) -> Compute:
    """What a model gives of some sequences x [sequences, tokens, width], beside the gradient of those."""

    def compute(sequences: slice) -> torch.Tensor:
        leaf = x.detach()[sequences].requires_grad_()
        out = model(leaf)
        (found,) = torch.autograd.grad(out, leaf, grad[sequences])
        return torch.cat([out.detach(), found], dim=-1)

    return compute


def result(
    title: str,
    bits: Bits | str,
    errors: Callable[[], Mapping[str, float]],
    unit: str,
    thunks: Mapping[str, Thunk],
    torch_call: str,
    device: torch.device,
    note: str = "",
) -> DemoResult:
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
    times = timer.measure(
        {name: [thunk] for name, thunk in thunks.items()}, device, repeats=10 if device.type == "cuda" else 5
    )
    return DemoResult(
        title,
        bits=bits if isinstance(bits, Bits) else None,
        no_promise="" if isinstance(bits, Bits) else bits,
        accuracy=accuracy,
        torch_call=torch_call,
        torch_us=median(times["torch"]),
        isogemm_us=median(times["isogemm"]),
        note=note,
        failure=failure,
    )
