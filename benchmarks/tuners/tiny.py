"""Times the tiny kernels against torch.bmm.

A cell of the table is measured at its corner, cells between 32 and 48 at 42 too, in a small and a large batch. A kernel
gets a cell where it wins everywhere in it; of two winners, the faster. ieee float32, whose bits both kernels share, may
take one for small batches and the other for large ones. A cell without a measurement takes the next larger one's. Of
two measurements the newer counts.

Rows of the whole menu (they say what was served then, and with which configurations) are for the model, which replaces
the cells where it has been fitted.
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
from isogemm.tiny import model as model_
from isogemm.tiny.configs import EDGES, WIN, Problem
from isogemm.tuning.gemm import ARITHMETIC
from tuners import common

REPRESENTATIVES = {48: (42, 48)}
LAYOUTS = ("nn", "nt", "tn")
NUMBERS = {name: ARITHMETIC[name] for name in ("ieee", "tf32", "half")}
BATCHES = (512, 16384)
LEAST = 40  # measurements of an entry that is fitted
FOLDS = 12  # of shapes, each left out once
RIDGE = 0.3  # weight of the coefficients' squares; leaving shapes out decided


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
    rows = [row for row in rows if "configs" not in row]  # those of the menu are the model's
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


Samples = list[tuple[Problem, dict[str, float]]]  # microseconds of torch and of the menu's entries


def samples(rows: list[dict[str, Any]], arch: str) -> Samples:
    """The newest times of every problem; rows name a configuration by its entry or as it prints."""
    found: dict[Problem, dict[str, float]] = {}
    for row in rows:
        sizes = row["batch"], row["m"], row["n"], row["k"]
        place = problem(row["number"], row["layout"], *sizes, arch, sm_count=132)
        named = {"torch": "torch"} | {entry: str(build(place)) for entry, build in configs.MENU.items()}
        times = {entry: row["us"].get(entry, row["us"].get(name)) for entry, name in named.items()}
        found.setdefault(place, {}).update({entry: us for entry, us in times.items() if us})
    return list(found.items())


def fit(measured: Samples, number: str) -> tuple[tuple[str, int, int, tuple[float, ...]], ...]:
    """Coefficients of every entry that was measured often enough, by ridge regression."""
    fitted = []
    for entry in ("torch", *configs.MENU):
        own = [(place, us[entry]) for place, us in measured if configs.arithmetic(place) == number and entry in us]
        x = torch.tensor([model_.features(place, place.layout) for place, _ in own], dtype=torch.float64)
        y = torch.tensor([math.log(us / model_.base(place)) for place, us in own], dtype=torch.float64)
        if len(own) >= LEAST:
            solved = torch.linalg.solve(x.T @ x + RIDGE * torch.eye(x.shape[1], dtype=torch.float64), x.T @ y)
            fitted.append((entry, 0, 0, tuple(round(c, 4) for c in solved.tolist())))
    return tuple(fitted)


def model(rows: list[dict[str, Any]], arch: str) -> dict[str, Any]:
    """The model, where the menu was measured."""
    if not any("configs" in row for row in rows):
        return {}
    measured = samples(rows, arch)
    return {number: fit(measured, number) for number in NUMBERS}


def report(rows: list[dict[str, Any]], arch: str) -> str:
    """What the model chooses for shapes left out of its fit: torch's time over the chosen one's, and over the best."""
    measured = samples(rows, arch)
    shapes = sorted({(row["m"], row["n"], row["k"]) for row in rows if "configs" in row})
    lines: list[str] = []
    gains: dict[str, list[tuple[float, float, Problem, str]]] = {number: [] for number in NUMBERS}
    for fold in range(FOLDS):
        out = set(shapes[fold::FOLDS])
        kept = [(place, us) for place, us in measured if (place.m, place.n, place.k) not in out]
        models = {number: fit(kept, number) for number in NUMBERS}
        for place, us in measured:
            if (place.m, place.n, place.k) in out and len(us) > 3:
                number = configs.arithmetic(place)
                entry = configs.fastest(place, models[number]) or "torch"
                gains[number].append(
                    (us["torch"] / us.get(entry, us["torch"]), us["torch"] / min(us.values()), place, entry)
                )
    for number, found in gains.items():
        for name, large in (("all", None), ("batch <= 1024", False), ("batch > 1024", True)):
            some = [gain for gain in found if large is None or (gain[2].batch > 1024) == large]
            if not some:
                continue
            chosen, best = (math.prod(gain[at] for gain in some) ** (1 / len(some)) for at in (0, 1))
            lines.append(f"{number:5} {name:14} {len(some):4} points: chosen {chosen:.2f}x, best {best:.2f}x of torch")
        worst = sorted(found, key=lambda gain: gain[0] / gain[1])[:5]
        lines += [f"  {gain[2]}: {gain[3]} {gain[0]:.2f}x, best {gain[1]:.2f}x" for gain in worst]
    return "\n".join(lines)


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
