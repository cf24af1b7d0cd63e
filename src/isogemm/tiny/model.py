"""A model of the time of torch.bmm and of each entry of `configs.MENU`, fitted to measured times. Pure: no device.

    log(us / base) = coefficients . features, base = a launch + the time of moving the operands once

The features are the sizes, what padding adds to them and which rows are misaligned, each once for small batches and
once for large ones. `benchmarks/tune.py tiny` fits the coefficients and keeps them by architecture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from isogemm.core.problems import ITEMSIZE

if TYPE_CHECKING:
    from isogemm.tiny.configs import Problem

_LAUNCH_US = 1.5
_SM_BYTES_PER_US = 32e3  # of an SM's share of memory bandwidth


def base(problem: Problem) -> float:
    """Microseconds of a launch and of moving the operands once."""
    return _LAUNCH_US + _moving(problem)


def predicted(problem: Problem, layout: str, coefficients: Sequence[float]) -> float:
    """Microseconds, as if the operands had `layout`."""
    return base(problem) * math.exp(sum(c * x for c, x in zip(coefficients, features(problem, layout), strict=True)))


def features(problem: Problem, layout: str) -> tuple[float, ...]:
    m, n, k = problem.m, problem.n, problem.k
    rows = (k if layout[0] == "n" else m), (n if layout[1] == "n" else k), n  # length of a row of A, B and C
    wide = 16 // ITEMSIZE[problem.dtype]
    misaligned = [math.log2(wide / math.gcd(row, wide)) / 3 for row in rows]
    padding = [math.log(max(8, 1 << (size - 1).bit_length()) / size) for size in (m, n, k)]
    sizes = [math.log(size / 16) for size in (m, n, k)]
    interactions = sizes[0] * sizes[1], sizes[2] ** 2, min(sizes[:2])
    shape = [1.0, *sizes, *padding, *misaligned, float(max(misaligned[:2]) > 0), *interactions]
    large = _moving(problem) / base(problem)
    return tuple(weight * x for weight in (1 - large, large) for x in shape)


def _moving(problem: Problem) -> float:
    m, n, k = problem.m, problem.n, problem.k
    size = ITEMSIZE[problem.dtype] * problem.batch * (m * k + k * n + m * n)
    return size / (_SM_BYTES_PER_US * problem.sm_count)
