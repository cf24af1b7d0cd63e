"""From a problem to the configuration that serves it: no device, no tensors, but the user's file, read once.

In this order: what `isogemm tune` measured on this GPU, what was measured for the same weight, a model of a
configuration's time, what `isogemm tune` measured for other numbers of tokens, rules. The choice cannot change a bit of
the result.

The model has twelve coefficients for each configuration:

    us = c0 + c1 turns + c2 results + c3 flushes + c4 activated + c5 gradients + c6 ragged
         + hypot(c7 latency, c8 arithmetic, c9 cache, c10 memory, c11 ingest)

Terms that overlap are a root of squares, the others are added. `terms` computes the quantities from the sizes,
`benchmarks/tune.py gemm` fits the coefficients to measured times, and the tables keep them by architecture.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from isogemm.core import tables, tuned
from isogemm.gemm import configs
from isogemm.gemm.configs import Config, Problem, canonical, default, fitted, illegal

Steps = tuple[tuple[int, Config], ...]  # (tokens up to, config), ascending
Source = Literal["tuned", "table", "model", "default"]

# Numbers of tokens for which the model is evaluated; any other is rounded up to one of these.
_GRID = (
    *(1 << power for power in range(6)), 64, 96, 128, 192, *range(256, 2048, 128), *range(2048, 8192, 512),
    *(eighths << power for power in range(10, 20) for eighths in range(8, 16)),
)  # fmt: skip
_FEWER = 8  # where nothing else is known, a tuned step serves from more than this part of its number of tokens on
_MANY = 2048  # tokens from which on, likewise, the largest step serves any larger number
_NEAR = 1.003  # of configurations this close, the first of the menu serves: fewer kernels to compile

_ONE_TILE = 64  # tokens: up to so many the weight's bytes count, and not how tiles divide them
ADDED = 7  # terms of the model that are added; the others overlap
_REGISTERS = 65536  # of a multiprocessor
_SHARED_MEMORY = 228 << 10  # bytes, likewise
_RESERVED = 1024  # bytes of shared memory that each program takes besides its own
_WARPS = 64
_MOST_PROGRAMS = 16
_OTHER_REGISTERS = 64  # of a thread, besides its sums


class Choice(NamedTuple):
    config: Config
    source: Source  # where it came from


class Measured(NamedTuple):
    """A configuration of the model's menu."""

    config: Config
    above: int  # m of the problems that it was measured for: more than this
    most: int  # and at most this; 0: any
    sums: Literal["one", "several", "both"]  # how many sums a result of those problems is
    coefficients: tuple[float, ...]


def choose(problem: Problem) -> Choice:
    """The configuration that serves a problem."""
    for config, source in _wanted(problem):
        usable_here = fitted(problem, config)
        if not illegal(problem, usable_here):
            return Choice(usable_here, source)
    raise ValueError(f"no configuration serves {problem}: {illegal(problem, fitted(problem, canonical(problem)))}")


def _wanted(problem: Problem) -> Iterator[Choice]:
    tokens, measured = _tokens(problem), _tuned(problem)
    known: tuple[tuple[Source, Steps], ...] = ("tuned", measured), ("table", _table(problem))
    for source, steps in known:
        for most, config in steps:
            if _fewer(most) < tokens <= most:
                yield Choice(config, source)
    modelled = _modelled(_with_tokens(problem, _GRID[min(bisect.bisect_left(_GRID, tokens), len(_GRID) - 1)]))
    if modelled:
        yield Choice(modelled, "model")
    for most, config in measured:
        if most // _FEWER < tokens <= most or (tokens > most == measured[-1][0] and most >= _MANY):
            yield Choice(config, "tuned")
    yield Choice(default(problem), "default")
    yield Choice(canonical(problem), "default")


def _fewer(most: int) -> int:
    """More tokens than this, up to `most`, are served by what was measured for so many: others make other tiles."""
    return most // 2 if most <= _ONE_TILE else most * 7 // 8


@functools.lru_cache(4096)
def _modelled(problem: Problem) -> Config | None:
    return fastest(problem, menu(problem))


def fastest(problem: Problem, measured: Iterable[Measured]) -> Config | None:
    """The configuration with the shortest predicted time; None if none serves the problem."""
    close = within(_NEAR, problem, measured)
    return close[0] if close else None


def within(factor: float, problem: Problem, measured: Iterable[Measured]) -> list[Config]:
    """The configurations whose predicted time is at most `factor` times the shortest, in their order."""
    predicted = []
    for each in measured:
        if not each.above < problem.m <= (each.most or problem.m):
            continue
        usable_here = fitted(problem, each.config)
        if not illegal(problem, usable_here):
            # Other operand layouts, another grid or number of sums, or more tiles that wait, than it was measured for.
            sums = "several" if problem.chunks > 1 else "one"
            changed = _form(usable_here) != _form(each.config) or each.sums not in (sums, "both")
            side_by_side = usable_here.parallel_chunks in ("queued", "gathered")
            changed = changed or (side_by_side and not configs.few_tiles(problem, usable_here))
            us = microseconds(problem, usable_here, each.coefficients)
            predicted.append((changed, us, each.config))
    among, least, _ = min(predicted, key=lambda each: each[:2], default=(False, 0.0, None))
    return [config for changed, us, config in predicted if changed == among and us <= factor * least]


def _form(config: Config) -> tuple[object, ...]:
    """What a config's coefficients are measured for, and `configs.fitted` may change."""
    return config.kernel, config.persistent, config.alternating, config.balanced


def microseconds(problem: Problem, config: Config, coefficients: Sequence[float]) -> float:
    """Predicted time."""
    parts = [coefficient * term for coefficient, term in zip(coefficients, terms(problem, config), strict=True)]
    return sum(parts[:ADDED]) + math.hypot(*parts[ADDED:])


def terms(problem: Problem, config: Config) -> tuple[float, ...]:
    """The model's terms, one per coefficient, each of the order of one in a launch of a few microseconds."""
    accumulation, e = configs.accumulation(problem, config), problem.epilogue
    rows, columns = configs.tile(problem, config)
    tiles, k, area = -(-problem.m // rows) * -(-problem.n // columns), problem.k, config.block_m * config.columns
    flushed, moved = 0.0, 0.0  # finished chunks that wait in registers or the cache; what others read, add or split
    if config.parallel_chunks:
        tiles, k = tiles * problem.chunks, problem.chunk
    if accumulation == "partials":
        moved = 8e-6 * problem.m * problem.n * problem.chunks / 4
    elif config.parallel_chunks:  # one program of a place reads them one after another
        places = -(-tiles // problem.chunks)
        moved = (problem.chunks - 1) * area / 4e4 * -(-places // problem.sm_count)
    elif accumulation != "one":
        flushed = problem.chunks
    side_by_side = problem.sm_count * residents(problem, config)
    busiest: float = -(-tiles // problem.sm_count)  # tiles of the SM that has most
    turns: float = -(-tiles // side_by_side)  # how many of them run one after another
    if config.balanced:
        busiest, turns = max(1.0, tiles / problem.sm_count), max(1.0, tiles / side_by_side)
    results = busiest * area / 4e4
    item, out_item = configs.ITEMSIZE[problem.dtype], configs.ITEMSIZE[problem.out_dtype]
    a_copies, b_copies = (1 + config.splits(operand) for operand in configs.OPERANDS)  # that the product reads
    read = (a_copies * problem.m + b_copies * problem.weights * problem.n) * problem.k * item
    moved += 3e-6 * ((a_copies - 1) * problem.m + (b_copies - 1) * problem.n) * problem.k  # read, and two halves
    tile_read = (a_copies * rows + b_copies * problem.weights * columns) * k * item
    return (
        1.0,
        turns,
        results,
        results * flushed + moved,
        results if e.activation and not e.gradient else 0.0,
        results * (1 + e.gated) if e.gradient else 0.0,
        results if problem.c_strides[0] * out_item % 16 else 0.0,  # ragged rows of C: no wide stores, and no TMA
        turns * k / config.block_k,  # latency: blocks of k that a program waits for
        busiest * k * area / 3e6,  # arithmetic
        tiles * tile_read / 5e6,  # cache: operands of all tiles
        (read + problem.m * problem.n * out_item) / 4e6,  # memory: every operand once
        busiest * tile_read / 1e5,  # ingest: operands of the tiles of the busiest multiprocessor
    )


def residents(problem: Problem, config: Config) -> int:
    """Programs that an SM runs side by side."""
    if config.persistent:
        return config.residents
    threads = 32 * config.num_warps
    registers = min(255, config.block_m * config.columns // threads + _OTHER_REGISTERS)
    shared = configs.shared_memory(problem, config) + _RESERVED
    fits = _SHARED_MEMORY // shared, _REGISTERS // (registers * threads), _WARPS // config.num_warps
    return max(1, min(_MOST_PROGRAMS, *fits))


def token_edges(problem: Problem, most: int) -> list[int]:
    """Numbers of tokens, up to `most`, at which the choice for problems like this one may change.

    Tokens are the rows of A; in a weight gradient, its k.
    """
    in_table = [size for size, _ in _table(problem)]
    edges = {*_GRID, *in_table, *map(_fewer, in_table)}
    weight = {*_weight(problem)}
    for (_, _, *sizes), steps in tuned.load("gemm", problem.gpu).items():
        if not weight.isdisjoint(sizes):  # this weight, or another one of its layer: they are warmed up together
            edges.update(size for tokens, _ in steps for size in (tokens // _FEWER, _fewer(tokens), tokens))
    edges = {size for size in edges if size < most} | {most}
    if problem.layout == "tn":  # one chunk or several, and a last block that is full or not
        edges.update(size for chunks in (1, 2) for size in (problem.chunk * chunks, problem.chunk * chunks + 1))
        blocks = {config.block_k for config in candidates(problem)}
        edges.update({size // block * block for size in edges for block in blocks}, {size - 1 for size in edges})
    return sorted(size for size in edges if 0 < size <= most)


def candidates(problem: Problem) -> tuple[Config, ...]:
    """Every configuration that may serve problems of this kind: all give the same bits."""
    found = [canonical(problem), default(problem), *(config for _, config in _tuned(problem))]
    if problem.batch == 1:
        by_weight = _tables(problem.arch, problem.number, problem.kind)
        found += [config for steps in by_weight.values() for _, config in steps]
    found += [each.config for each in menu(problem)]
    usable_here = (fitted(problem, config) for config in found)
    return tuple(dict.fromkeys(config for config in usable_here if not illegal(problem, config)))


def menu(problem: Problem) -> tuple[Measured, ...]:
    """The configurations whose time the model predicts."""
    if problem.batch > 1:
        return ()
    return _menu(problem.arch, *model_key(problem)) or _menu(problem.arch, problem.number, problem.layout)


def model_key(problem: Problem) -> tuple[str, str]:
    """Key of the model's coefficients: arithmetic, layout, whether it is an activation's gradient, or accumulated."""
    of = " gradient" * bool(problem.epilogue.gradient) + " accumulated" * problem.accumulate
    return problem.number, problem.layout + of


def _weight(problem: Problem) -> tuple[int, int]:
    """The sizes by which the tables know a weight."""
    return (problem.m, problem.n) if problem.layout == "tn" else (problem.n, problem.k)


def _tokens(problem: Problem) -> int:
    return problem.k if problem.layout == "tn" else problem.m


def _with_tokens(problem: Problem, tokens: int) -> Problem:
    return replace(problem, k=tokens) if problem.layout == "tn" else replace(problem, m=tokens)


def _tuned(problem: Problem) -> Steps:
    """What the user measured for this weight. Without a table or a model a step serves more: `_FEWER`, `_MANY`."""
    if problem.batch > 1:
        return ()
    steps = tuned.load("gemm", problem.gpu).get((problem.number, problem.kind, *_weight(problem)), ())
    return tuple((tokens, Config(*values)) for tokens, values in steps)


def _table(problem: Problem) -> Steps:
    """The table's steps for this weight."""
    known = _tables(problem.arch, problem.number, problem.kind) if problem.batch == 1 else {}
    return known.get(_weight(problem), ())


@functools.cache
def _tables(arch: str, number: str, kind: str) -> dict[tuple[int, int], Steps]:
    """Measured configurations by weight; empty if there are none."""
    if not tables.measured("gemm", arch):
        return {}
    return {
        (n, k): tuple((tokens, Config(*values)) for tokens, values in steps)
        for (*of, n, k), steps in tables.load("gemm", arch).items()
        if of == [number, kind]
    }


@functools.cache
def _menu(arch: str, *key: str) -> tuple[Measured, ...]:
    if not tables.measured("gemm", arch):
        return ()
    return tuple(
        Measured(Config(*values), above, most, sums, coefficients)
        for values, above, most, sums, coefficients in tables.load("gemm", arch, "MODEL").get(key, ())
    )
