"""Helpers for the problems of several families. Pure: no device, no tensors."""

from __future__ import annotations

import math

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def sm(arch: str) -> int:
    """90 for sm_90; 0 for another vendor's architecture."""
    return int(arch.removeprefix("sm_")) if arch.startswith("sm_") else 0


def usable(arch: str) -> str:
    """Empty where the kernels compile: sm_80 and later, and gfx942; else the reason why not."""
    return "" if sm(arch) >= 80 or arch == "gfx942" else f"the kernels need sm_80 or later, or gfx942; this is {arch}"


def layout_letter(inner: int, outer: int) -> str:
    """BLAS's name for an operand with these strides: n, t, or x where no axis is contiguous."""
    return "n" if inner == 1 else "t" if outer == 1 else "x"


def unit(size: int) -> int:
    """The largest power of two up to 16 that divides a size or stride: what the compiler may assume of it."""
    return math.gcd(size, 16)


def power_of_two(*sizes: int) -> bool:
    return all(size > 0 and size & (size - 1) == 0 for size in sizes)


def next_power_of_two(size: int, least: int) -> int:
    """The smallest power of two that is at least `size` and `least`, itself a power of two."""
    return max(least, 1 << (size - 1).bit_length())
