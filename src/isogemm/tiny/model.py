"""A model of the time of torch.bmm and of the entries of `configs.MENU`, fitted to measured times. Pure: no device.

    us = coefficients . terms

The terms are work: what one program waits for, whatever the batch, and what an SM's share of the batch has to load,
multiply and store. No coefficient is negative, so that a shape far from the measured ones gets a plausible time.
`benchmarks/tune.py tiny` fits the coefficients and keeps them by architecture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from isogemm.core.problems import ITEMSIZE, next_power_of_two

if TYPE_CHECKING:
    from isogemm.tiny.configs import DotConfig, Problem, RegistersConfig, WholeConfig


def predicted(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    """Microseconds."""
    return sum(map(float.__mul__, coefficients, terms))


def terms(problem: Problem, config: RegistersConfig | DotConfig | WholeConfig | None) -> tuple[float, ...]:
    """Quantities of work, which take time in proportion; config None: of torch.bmm."""
    if config is None:
        once, each = _of_torch(problem)
    elif config.kernel == "registers":
        once, each = _of_registers(problem, config)
    else:
        once, each = _of_blocks(problem, config)
    share = problem.batch / problem.sm_count
    m, n, k = problem.m, problem.n, problem.k
    moved = ITEMSIZE[problem.dtype] * (m * k + k * n + m * n)
    return (1.0, *map(float, once), share * moved, *(share * work for work in each))


def _of_torch(problem: Problem) -> tuple[Sequence[float], Sequence[float]]:
    """cuBLAS has tiles of several sizes, and other kernels for rows that are not aligned."""
    m, n, k = problem.m, problem.n, problem.k
    tile_m, tile_n, tile_k = (next_power_of_two(size, 16) for size in (m, n, k))
    product = tile_m * tile_n * tile_k
    a_wide, b_wide, c_wide = _wide(problem)
    odd, along_m, along_k = min(a_wide, b_wide) == 1, problem.layout[0] == "t", problem.layout[1] == "t"
    once = tile_k, product, tile_k * odd
    each = (
        1, tile_m * tile_k, tile_k * tile_n, tile_m * tile_n, product,
        tile_m * tile_k / a_wide, tile_k * tile_n / b_wide, tile_m * tile_n / c_wide,
        _up(m, 32) * _up(n, 32) * _up(k, 8), max(tile_m, 32) * max(tile_n, 32) * tile_k, 64 * 64 * tile_k,
        along_k, along_k * tile_k * tile_n, along_m, along_m * tile_m * tile_k, odd, odd * product,
    )  # fmt: skip
    return once, each


def _of_registers(problem: Problem, config: RegistersConfig) -> tuple[Sequence[float], Sequence[float]]:
    """Each thread loads its own operands: what matters is loads and sums per thread, and threads."""
    m, n, k = problem.m, problem.n, problem.k
    columns = config.cols * config.vec
    threads = -(-m // config.rows) * -(-n // columns)
    a_loads, b_loads = config.rows * k / config.a_vec, config.cols * k / config.b_vec
    a_wide, b_wide, c_wide = _wide(problem)
    sums = config.rows * columns
    once = k, a_loads + b_loads, sums * k, -(-k // config.unroll)
    each = (
        threads, threads * a_loads, threads * b_loads, threads * config.rows * config.cols, threads * sums * k,
        m * k / a_wide, k * n / b_wide, m * n / c_wide,
        threads * a_loads * (problem.layout[0] != "n"), threads * b_loads * (problem.layout[1] == "t"),
        threads * sums * (sums > 16),
    )  # fmt: skip
    return once, each


def _of_blocks(problem: Problem, config: DotConfig | WholeConfig) -> tuple[Sequence[float], Sequence[float]]:
    """Blocks go through shared memory, padded; A along m and B along k, transposed there, take other ways."""
    m, n = next_power_of_two(problem.m, 16), next_power_of_two(problem.n, 8)
    if config.kernel == "whole":
        m, n = _up(problem.m, config.unit_m), _up(problem.n, config.unit_n)
    k = _up(problem.k, 16)
    a, b, c = (size / wide for size, wide in zip((m * k, k * n, m * n), _wide(problem), strict=True))
    along_m, along_k = problem.layout[0] == "t", problem.layout[1] == "t"
    once = k, m * n * k, a, b, m * n
    each = (
        1, m * k, k * n, m * n, m * n * k, a, b, c, k,
        along_k * k * n, along_m * m * k, along_k * b, along_m * a,
    )  # fmt: skip
    return once, each


def _wide(problem: Problem) -> tuple[int, int, int]:
    """Elements of A, B and C in the widest load that every row's start is aligned for."""
    widest = 16 // ITEMSIZE[problem.dtype]
    a_row = problem.k if problem.layout[0] == "n" else problem.m
    b_row = problem.n if problem.layout[1] == "n" else problem.k
    return math.gcd(a_row, widest), math.gcd(b_row, widest), math.gcd(problem.n, widest)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
