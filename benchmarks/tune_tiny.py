"""Measure where the tiny kernels beat torch.bmm on this GPU, and write src/isogemm/tiny/gate.py.

    PYTHONPATH=src python3 benchmarks/tune_tiny.py --raw tune_tiny.jsonl [--numbers ieee tf32 half] [--decide]

A cell of the gate is measured at its corner, cells between 32 and 48 at 42 too, in a small and a large batch. A kernel
gets a cell where it wins everywhere in it; of two winners, the faster. ieee float32, whose bits both kernels share, may
take one for small batches and the other for large ones. A cell without a measurement takes the next larger one's.
--decide measures nothing and writes the gate from all the --raw files, of two measurements the newer.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median

import torch

from isogemm.bench import timer
from isogemm.tiny import configs, kernels, op
from isogemm.tiny.configs import Problem

EDGES = (8, 16, 32, 48, 64)
REPRESENTATIVES = {48: (42, 48)}
LAYOUTS = ("nn", "nt", "tn")
NUMBERS = {"ieee": ("float32", "ieee"), "tf32": ("float32", "tf32"), "half": ("bfloat16", "ieee")}
BATCHES = (512, 16384)
GATE = Path(op.__file__).parent / "gate.py"
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
        launch = kernels.describe_bmm(target, configs.choose(target, name))
        bound = kernels.bind_bmm(out[0], operands[0][0], operands[0][1], launch)

        def call(x, y, z, bound=bound, launch=launch):
            bound(0, launch.programs, x.data_ptr(), y.data_ptr(), z.data_ptr(), *launch.scalars)
            return z

        out[0].fill_(torch.nan)
        error = (call(*operands[0])[:64].double() - exact).abs().max().item()
        if not error <= 0.05 * math.sqrt(k):
            raise AssertionError(f"{name} {target}: error {error}")
        variants[name] = [lambda o=o, call=call: call(*o) for o in operands]
    with op.torch_precision(target.precision if target.dtype == "float32" else None):
        times = timer.measure(variants, device, repeats=4, warmup=1)
    return {name: median(raw) for name, raw in times.items()}


def cell(size: int) -> int:
    return next(edge for edge in EDGES if size <= edge)


def verdict(rows: list[dict], number: str) -> str:
    """The letter of a cell measured by these rows: of what wins everywhere, the fastest."""
    small, large = ([row for row in rows if (row["batch"] > BATCHES[0]) == later] for later in (False, True))
    ways = {"r": won(rows, "registers"), "d": won(rows, "dot")}
    if number == "ieee":  # two kernels for one cell only where it shows
        ways["b"] = [ratio / 1.01 for ratio in won(small, "dot") + won(large, "registers")]
    ways = {letter: ratios for letter, ratios in ways.items() if min(ratios) >= WIN}
    return max(ways, key=lambda letter: math.prod(ways[letter]), default=".")


def won(rows: list[dict], name: str) -> list[float]:
    return [row["us"]["torch"] / row["us"].get(name, math.inf) for row in rows]


def decide(rows: list[dict]) -> dict[tuple[str, str, int, int, int], str]:
    measured: dict[tuple[str, str, int, int, int], list[dict]] = {}
    newest = {tuple(v for name, v in row.items() if name != "us"): row for row in rows}
    for row in newest.values():
        place = (row["number"], row["layout"], cell(row["m"]), cell(row["n"]), cell(row["k"]))
        measured.setdefault(place, []).append(row)
    letters = {}
    for number, layout, m, n, k in product(NUMBERS, LAYOUTS, EDGES, EDGES, EDGES):
        larger = (EDGES[EDGES.index(size) :] for size in (m, n, k))
        found = next(place for place in product([number], [layout], *larger) if place in measured)
        letters[number, layout, m, n, k] = verdict(measured[found], number)
    return letters


def gate_source(letters: dict[tuple[str, str, int, int, int], str]) -> str:
    doc = GATE.read_text(encoding="utf-8").split('"""')[1]
    lines = [f'"""{doc}"""', "", f"EDGES = {EDGES}", "", "# fmt: off", "TABLES = {"]
    for number, layout in product(NUMBERS, LAYOUTS):
        lines.append(f'    ("{number}", "{layout}"): (')
        for m in EDGES:
            strings = ('"' + "".join(letters[number, layout, m, n, k] for k in EDGES) + '"' for n in EDGES)
            lines.append(f"        ({', '.join(strings)}),")
        lines.append("    ),")
    return "\n".join([*lines, "}", "# fmt: on", ""])


def sweep(numbers: list[str], layouts: list[str], raw: Path, workers: int) -> None:
    start = time.perf_counter()
    sizes = [size for edge in EDGES for size in REPRESENTATIVES.get(edge, (edge,))]
    shapes = [shape for shape in product(sizes, sizes, sizes) if len({42, 48} & set(shape)) < 2]  # not both
    places = list(product(numbers, layouts, shapes))
    facts = torch.cuda.get_device_properties(0)
    arch, sm_count = f"sm_{facts.major}{facts.minor}", facts.multi_processor_count
    jobs = [
        (number, layout, batch, *shape, arch, sm_count, kernel)
        for number, layout, shape in places
        for batch in BATCHES
        for kernel in candidates(number, *shape)
    ]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for failure in filter(None, pool.map(precompile, jobs, chunksize=8)):
            print("failed:", failure)
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - start:.0f} s", flush=True)
    with raw.open("a", encoding="utf-8") as file:
        for (number, layout, (m, n, k)), batch in product(places, BATCHES):
            target = problem(number, layout, batch, m, n, k, arch, sm_count)
            times = measure(target, list(candidates(number, m, n, k)))
            row = {"number": number, "layout": layout, "batch": batch, "m": m, "n": n, "k": k, "us": times}
            file.write(json.dumps(row) + "\n")
    print(f"measured {len(places)} shapes in {time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--raw", type=Path, nargs="+", required=True, help="measured times, JSONL; the first is added to"
    )
    parser.add_argument("--numbers", nargs="+", choices=list(NUMBERS), default=list(NUMBERS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--decide", action="store_true", help="write the gate from the raw files")
    parser.add_argument("--workers", type=int, default=max(1, multiprocessing.cpu_count() - 1))
    options = parser.parse_args()
    if not options.decide:
        sweep(options.numbers, options.layouts, options.raw[0], options.workers)
        return
    rows = [json.loads(line) for path in options.raw for line in path.read_text(encoding="utf-8").splitlines()]
    GATE.write_text(gate_source(decide(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
