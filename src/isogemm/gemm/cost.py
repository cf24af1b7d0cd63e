"""How long a product takes with a configuration: a model with ten coefficients for each configuration. Pure.

    us = c0 + c1 turns + c2 results + c3 flushes + c4 activated + c5 gradients
         + hypot(c6 latency, c7 arithmetic, c8 cache, c9 memory)

What overlaps is a root of squares, what does not is added. `terms` computes the quantities from the sizes,
`benchmarks/tune.py gemm` fits the coefficients to measured times, and the tables keep them by architecture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from isogemm.gemm import configs
from isogemm.gemm.configs import Config, Problem

TERMS = 10
ADDED = 6  # the first terms; the others overlap

_REGISTERS = 65536  # of a multiprocessor
_SHARED_MEMORY = 228 << 10  # bytes, likewise
_RESERVED = 1024  # bytes of shared memory that each program takes besides its own
_WARPS = 64
_MOST_PROGRAMS = 16
_OTHER_REGISTERS = 64  # of a thread, besides its sums


def microseconds(terms: Sequence[float], coefficients: Sequence[float]) -> float:
    """Predicted time."""
    parts = [coefficient * term for coefficient, term in zip(coefficients, terms, strict=True)]
    return sum(parts[:ADDED]) + math.hypot(*parts[ADDED:])


def terms(problem: Problem, config: Config) -> tuple[float, ...]:
    """What each coefficient is multiplied by, each of the order of one in a launch of a few microseconds."""
    accumulation, e = configs.accumulation(problem, config), problem.epilogue
    rows, columns = configs.tile(problem, config)
    tiles, k, area = -(-problem.m // rows) * -(-problem.n // columns), problem.k, config.block_m * config.columns
    flushed, partials = 0.0, 0.0  # finished chunks that wait in registers or the cache; in memory
    if accumulation == "partials":
        tiles, k, partials = tiles * problem.chunks, problem.chunk, 8e-6 * problem.m * problem.n * problem.chunks / 4
    elif accumulation != "one":
        flushed = problem.chunks
    busiest = -(-tiles // problem.sm_count)  # tiles of the multiprocessor that has most
    turns = -(-tiles // (problem.sm_count * residents(problem, config)))  # of them one after another
    results = busiest * area / 4e4
    item, out_item = configs.ITEMSIZE[problem.dtype], configs.ITEMSIZE[problem.out_dtype]
    read = (problem.weights * problem.n + problem.m) * problem.k * item
    return (
        1.0,
        turns,
        results,
        results * flushed + partials,
        results if e.activation and not e.gradient else 0.0,
        results * (1 + e.gated) if e.gradient else 0.0,
        turns * k / config.block_k,  # latency: blocks of k that a program waits for
        busiest * k * area / 3e6,  # arithmetic
        tiles * (config.block_m + config.columns) * k * item / 5e6,  # cache: operands of all tiles
        (read + problem.m * problem.n * out_item) / 4e6,  # memory: every operand once
    )


def residents(problem: Problem, config: Config) -> int:
    """Programs that a multiprocessor runs side by side."""
    if config.persistent:
        return config.residents
    threads = 32 * config.num_warps
    registers = min(255, config.block_m * config.columns // threads + _OTHER_REGISTERS)
    shared = configs.shared_memory(problem, config) + _RESERVED
    fits = _SHARED_MEMORY // shared, _REGISTERS // (registers * threads), _WARPS // config.num_warps
    return max(1, min(_MOST_PROGRAMS, *fits))
