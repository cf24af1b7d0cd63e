"""Times the tiny kernels against torch.bmm.

A cell of the table is measured at its corner, cells between 32 and 48 at 42 too, in a small and a large batch. A kernel
gets a cell where it wins everywhere in it; of two winners, the faster. ieee float32, whose bits both kernels share, may
take one for small batches and the other for large ones. A cell without a measurement takes the next larger one's. Of
two measurements the newer counts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from isogemm.bench import timer
from isogemm.core.precision import of_cuda_products
from isogemm.core.tables import Table
from isogemm.tiny import configs, kernels, op
from isogemm.tiny.configs import EDGES, Problem
from isogemm.tuning.gemm import ARITHMETIC
from tuners import common

REPRESENTATIVES = {48: (42, 48)}
LAYOUTS = ("nn", "nt", "tn")
NUMBERS = {name: ARITHMETIC[name] for name in ("ieee", "tf32", "half")}
BATCHES = (512, 16384)
WIN = 1.03  # below this a win is within what shapes away from the corner lose


def problem(number: str, layout: str, batch: int, m: int, n: int, k: int, arch: str, sm_count: int) -> Problem:
    dtype, precision = NUMBERS[number]
    a = (m * k, k, 1) if layout[0] == "n" else (m * k, 1, m)
    b = (k * n, n, 1) if layout[1] == "n" else (k * n, 1, k)
    return Problem(batch, m, n, k, dtype, precision, a, b, arch=arch, sm_count=sm_count)


def candidates(number: str, m: int, n: int, k: int) -> Iterator[str]:
    """The kernels with a chance: measured before, registers lose large products and dot loses padded ones."""
    if m * n * k <= (48**3 if number == "ieee" else 32**3):
        yield "registers"
    if m * n * k >= 1024:
        yield "dot"


def precompile(job: tuple[str, str, int, int, int, int, str, int, str]) -> str:
    *place, kernel = job
    target = problem(*place)
    launch = kernels.describe_bmm(target, configs.choose(target, kernel))
    dtype = getattr(torch, target.dtype)
    try:
        launch.kernel.warmup(dtype, dtype, dtype, *launch.scalars, grid=(1,), **launch.constants, **launch.options)
    except Exception as error:
        return f"{target} {kernel}: {error}"
    return ""


def measure(target: Problem, names: list[str]) -> dict[str, float]:
    """Median microseconds of torch and of each kernel, inputs cold."""
    device = torch.device("cuda")
    dtype = getattr(torch, target.dtype)
    batch, m, n, k = target.batch, target.m, target.n, target.k
    sets = timer.rotations(dtype.itemsize * (m * k + k * n + m * n) * batch, device, most=48)
    a = torch.randn(sets, batch * m * k, device=device, dtype=dtype)
    b = torch.randn(sets, batch * k * n, device=device, dtype=dtype)
    out = torch.empty(sets, batch, m, n, device=device, dtype=dtype)
    operands = [
        (x.as_strided((batch, m, k), target.a_strides, x.storage_offset()),
         y.as_strided((batch, k, n), target.b_strides, y.storage_offset()), z)
        for x, y, z in zip(a, b, out, strict=True)
    ]  # fmt: skip
    variants = {"torch": [lambda x=x, y=y, z=z: torch.bmm(x, y, out=z) for x, y, z in operands]}
    exact = torch.matmul(operands[0][0][:64].double(), operands[0][1][:64].double())
    for name in names:
        plan = op.tiny_plan(target, configs.choose(target, name), device)

        def call(x, y, z, plan=plan):
            return plan.run((x, y), z)

        out[0].fill_(torch.nan)
        error = (call(*operands[0])[:64].double() - exact).abs().max().item()
        if not error <= 0.05 * math.sqrt(k):
            raise AssertionError(f"{name} {target}: error {error}")
        variants[name] = [lambda o=o, call=call: call(*o) for o in operands]
    with of_cuda_products(target.precision if target.dtype == "float32" else None):
        times = timer.measure(variants, device, repeats=4, warmup=1)
    return {name: median(raw) for name, raw in times.items()}


def cell(size: int) -> int:
    return next(edge for edge in EDGES if size <= edge)


def verdict(rows: list[dict[str, Any]], number: str) -> str:
    """The winner of a cell measured by these rows: of what wins everywhere, the fastest."""
    small, large = ([row for row in rows if (row["batch"] > BATCHES[0]) == later] for later in (False, True))
    ways = {"registers": won(rows, "registers"), "dot": won(rows, "dot")}
    if number == "ieee":  # two kernels for one cell only where it shows
        ways["by batch"] = [ratio / 1.01 for ratio in won(small, "dot") + won(large, "registers")]
    ways = {way: ratios for way, ratios in ways.items() if min(ratios) >= WIN}
    return max(ways, key=lambda way: math.prod(ways[way]), default="torch")


def won(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row["us"]["torch"] / row["us"].get(name, math.inf) for row in rows]


def tables(rows: list[dict[str, Any]], arch: str) -> dict[str, Table]:
    measured: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    newest = {tuple(v for name, v in row.items() if name != "us"): row for row in rows}
    for row in newest.values():
        place = (row["number"], row["layout"], cell(row["m"]), cell(row["n"]), cell(row["k"]))
        measured.setdefault(place, []).append(row)

    def winner(number: str, layout: str, *sizes: int) -> str:
        larger = (EDGES[EDGES.index(size) :] for size in sizes)
        found = next(place for place in product([number], [layout], *larger) if place in measured)
        return verdict(measured[found], number)

    cells = product(NUMBERS, LAYOUTS, EDGES, EDGES)
    return {"tiny": {place: tuple((k, winner(*place, k)) for k in EDGES) for place in cells}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--numbers", nargs="+", choices=list(NUMBERS), default=list(NUMBERS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)


def points(options: argparse.Namespace) -> list[tuple[str, str, int, int, int, int]]:
    """Arithmetic, layout, batch, m, n, k."""
    sizes = [size for edge in EDGES for size in REPRESENTATIVES.get(edge, (edge,))]
    shapes = [shape for shape in product(sizes, sizes, sizes) if len({42, 48} & set(shape)) < 2]  # not both
    places = product(options.numbers, options.layouts, shapes, BATCHES)
    return [(number, layout, batch, *shape) for number, layout, shape, batch in places]


def sweep(options: argparse.Namespace, raw: Path) -> None:
    places = [(*point, options.arch, options.sm_count) for point in points(options)]
    jobs = [(*place, kernel) for place in places for kernel in candidates(place[0], *place[3:6])]
    common.compile_ahead(precompile, jobs, options.workers)
    for place in places:
        number, layout, batch, m, n, k = place[:6]
        times = measure(problem(*place), list(candidates(number, m, n, k)))
        row = {"number": number, "layout": layout, "batch": batch, "m": m, "n": n, "k": k, "us": times}
        common.append(raw, row)
