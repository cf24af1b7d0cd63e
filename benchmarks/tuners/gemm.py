"""Times the GEMM family's configurations. One counts only where its result is bit for bit the canonical one's."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import Counter
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from isogemm.core.tables import Table
from isogemm.gemm.configs import LONGEST_SUM
from isogemm.tuning.gemm import ARITHMETIC, EPILOGUES, FORWARD, KINDS, Bench, Point, candidates, jobs, precompile
from tuners import common, cost

WEIGHTS = (  # n, k of public models; `isogemm.bench.cases.gemm.OTHER_WEIGHTS` are kept out of it
    (12288, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (32000, 4096), (128256, 4096), (1024, 4096),
    (6144, 4096), (2048, 2048), (5120, 5120), (8192, 8192), (512, 2048), (3072, 768), (768, 3072),
    (256, 1024), (2560, 9728), (4096, 1024), (1024, 256), (11008, 4096), (2048, 768),
    (768, 768), (384, 384), (384, 96), (96, 384), (2048, 8192), (8192, 2048), (16384, 2048), (3584, 3584), (512, 3584),
    (4608, 4096), (22016, 4096), (4096, 11008), (28672, 4096), (9216, 3072), (3072, 3072), (16384, 3072), (1152, 1152),
    (6912, 1152), (2304, 768), (1280, 1280), (7168, 16384), (4096, 512), (24576, 1536), (151936, 896), (50257, 768),
)  # fmt: skip
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--numbers", nargs="+", choices=list(ARITHMETIC), default=["half"])
    parser.add_argument("--tokens", nargs="+", type=int, help="of gradients by default 256 and more")
    parser.add_argument("--weights", nargs="+", type=int, help="indices into WEIGHTS")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")


def points(options: argparse.Namespace) -> list[Point]:
    weights = WEIGHTS if options.weights is None else [WEIGHTS[index] for index in options.weights]
    return [
        Point(kind, number, tokens, n, k, options.arch, options.sm_count)
        for number in options.numbers
        for kind in options.kinds
        for n, k in weights
        for tokens in options.tokens or TOKENS
        if options.tokens or kind in FORWARD or tokens >= 256
    ]


def sweep(options: argparse.Namespace, raw: Path) -> None:
    begun = time.perf_counter()
    chosen = {point: candidates(point) for point in points(options)}
    common.compile_ahead(precompile, list(jobs(chosen).values()), options.workers)
    bench = Bench()
    for point, made in chosen.items():
        if time.perf_counter() - begun > options.seconds:
            print(f"stopped before {point}", flush=True)
            return
        try:
            result = bench.measure(point, made)
        except Exception as error:
            print("failed:", point, type(error).__name__, str(error)[-300:], flush=True)
            continue
        row = {"kind": point.kind, "number": point.number, "tokens": point.tokens, "n": point.n, "k": point.k}
        common.append(raw, row | {"sm_count": point.sm_count, "chunk": point.problem.chunk} | asdict(result))


NEAR = 1.015  # configurations this close to the best share a point: fewer kernels to compile


def samples(rows: list[dict[str, Any]], arch: str) -> list[cost.Sample]:
    """Times of what was recorded, for the model's fit: a config's mean share of torch's time, of torch's mean time."""
    found = []
    for point, ratios in measured(rows, arch).items():
        times = {each: ratios["torch"] * ratios[str(each)] for each in candidates(point) if str(each) in ratios}
        if times:
            found.append(cost.Sample(point.problem, (point.n, point.k), times))
    return found


def measured(rows: list[dict[str, Any]], arch: str) -> dict[Point, dict[str, float]]:
    """Mean times of configs over torch's in the same run, since the chip's clock differs from run to run; and torch's
    mean time, in microseconds."""
    found: dict[Point, dict[str, list[float]]] = {}
    for row in rows:
        point = _point(row, arch)
        for name, us in row["us"].items() if _as_now(row, point) else ():
            ratio = us if name == "torch" else us / row["us"]["torch"]
            found.setdefault(point, {}).setdefault(name, []).append(ratio)
    return {point: {name: statistics.mean(each) for name, each in us.items()} for point, us in found.items()}


def model(rows: list[dict[str, Any]], arch: str) -> dict[tuple[str, str], tuple[Any, ...]]:
    """The model of a configuration's time, as plain values."""
    return {
        key: tuple((astuple(each.config), each.above, each.most, each.sums, each.coefficients) for each in menu)
        for key, menu in cost.model(samples(rows, arch)).items()
    }


def _point(row: dict[str, Any], arch: str) -> Point:
    sizes = row["tokens"], row["n"], row["k"]
    return Point(row["kind"], row["number"], *sizes, arch, row.get("sm_count", 132))


def _as_now(row: dict[str, Any], point: Point) -> bool:
    """Whether it was measured with the chunks of today; rows without a chunk are older than the cut of k in two."""
    problem = point.problem
    older = problem.chunk if point.of_tokens or problem.k > LONGEST_SUM else 0
    return bool(row.get("chunk", older) == problem.chunk)


def tables(rows: list[dict[str, Any]], arch: str) -> dict[str, Table]:
    """By arithmetic, kind of problem, weight and tokens: a configuration near the best, of as few as will do."""
    near: dict[Point, set[str]] = {}
    for point, ratios in measured(rows, arch).items():
        known = set(map(str, candidates(point)))  # of an older file, only what still is one counts
        means = {name: ratios[name] for name in known & ratios.keys()}
        if len(means) < cost.LEAST_TRIED:
            continue
        near[point] = {name for name, mean in means.items() if mean <= NEAR * min(means.values())}
    chosen: dict[Point, str] = {}
    for followed in (False, True):  # what is measured of epilogues does not change the plain tables
        points = {point for point in near if (point.kind in EPILOGUES) is followed}
        while open_points := points - chosen.keys():
            counts = Counter(name for point in open_points for name in near[point])
            name = max(sorted(counts), key=counts.__getitem__)
            chosen.update((point, name) for point in open_points if name in near[point])
    table: dict[tuple[Any, ...], list[tuple[int, Any]]] = {}
    for point in sorted(chosen, key=lambda point: (point.number, point.kind, point.n, point.k, point.tokens)):
        named = {str(config): config for config in candidates(point)}
        table.setdefault(point.key, []).append((point.tokens, astuple(named[chosen[point]])))
    return {"gemm": {key: tuple(steps) for key, steps in table.items()}}
