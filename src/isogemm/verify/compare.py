"""Bit-for-bit comparison of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class BitDiff:
    """The difference of two tensors in their bits.

    `mismatch` says in words that shapes or dtypes differ; then every element counts as differing.
    """

    count: int
    total: int
    coordinate: tuple[int, ...] | None = None  # first difference in row-major order
    actual: str = ""  # value (bits) there
    expected: str = ""
    mismatch: str = ""

    @property
    def equal(self) -> bool:
        return self.count == 0 and not self.mismatch

    def __str__(self) -> str:
        if self.mismatch:
            return self.mismatch
        if self.count == 0:
            return f"all {self.total} elements have the same bits"
        share = f"{self.count} of {self.total} elements differ ({self.count / self.total:.2%})"
        return f"{share}, first at {self.coordinate}: got {self.actual}, expected {self.expected}"


def compare_bits(actual: Tensor, expected: Tensor) -> BitDiff:
    """Compare bit patterns: -0 differs from 0, one NaN payload from another.

    Any dtype and strides. `expected` is brought to the device of `actual`.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        got, wanted = (f"{each.dtype} of shape {tuple(each.shape)}" for each in (actual, expected))
        total = max(actual.numel(), expected.numel())
        return BitDiff(total, total, mismatch=f"got {got}, expected {wanted}")
    differs = _as_int(actual) != _as_int(expected.to(actual.device))
    if actual.dtype == torch.complex128:
        differs = differs.any(-1)
    count, total = int(differs.sum()), actual.numel()
    if count == 0:
        return BitDiff(count=0, total=total)
    first = differs.flatten().to(torch.uint8).argmax()
    coordinate = tuple(int(at) for at in torch.unravel_index(first, actual.shape))
    return BitDiff(count, total, coordinate, _describe(actual[coordinate]), _describe(expected[coordinate]))


def assert_bitwise_equal(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Raise AssertionError with the count and the first differing element; `what` names the property."""
    __tracebackhide__ = True
    diff = compare_bits(actual, expected)
    if not diff.equal:
        raise AssertionError(f"{what}: {diff}" if what else str(diff))


def _as_int(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex128:  # no 16-byte integer: two of 8 on a new last axis
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_INT_OF_SIZE[tensor.element_size()])


def _describe(element: Tensor) -> str:
    words = _as_int(element).flatten().tolist()
    bits = 8 * element.element_size() // len(words)
    pattern = "".join(f"{word & ((1 << bits) - 1):0{bits // 4}x}" for word in words)
    return f"{element.item()!r} (0x{pattern})"
