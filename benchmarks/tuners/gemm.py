"""Times the GEMM family's configurations. One counts only where its result is bit for bit the canonical one's."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isogemm.bench import timer
from isogemm.core.plan import Plan
from isogemm.core.tables import Table
from isogemm.epilogues.operands import PLACES, TENSORS, Epilogue
from isogemm.gemm import configs
from isogemm.gemm.configs import Config, Problem
from isogemm.gemm.kernels import products as kernels
from isogemm.gemm.plan import gemm_plan
from tuners import common, cost
from tuners.common import NUMBERS

WEIGHTS = (  # n, k of public models; `isogemm.bench.cases.gemm.OTHER_WEIGHTS` are kept out of it
    (12288, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (32000, 4096), (128256, 4096), (1024, 4096),
    (6144, 4096), (2048, 2048), (5120, 5120), (8192, 8192), (512, 2048), (3072, 768), (768, 3072),
    (256, 1024), (2560, 9728), (4096, 1024), (1024, 256), (11008, 4096), (2048, 768),
    (768, 768), (384, 384), (384, 96), (96, 384), (2048, 8192), (8192, 2048), (16384, 2048), (3584, 3584), (512, 3584),
    (4608, 4096), (22016, 4096), (4096, 11008), (28672, 4096), (9216, 3072), (3072, 3072), (16384, 3072), (1152, 1152),
    (6912, 1152), (2304, 768), (1280, 1280), (7168, 16384), (4096, 512), (24576, 1536), (151936, 896), (50257, 768),
)  # fmt: skip
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
EPILOGUES = {  # what stands for a kind of epilogue: its kind of problem
    "activated": Epilogue(bias="n", activation="gelu_tanh"),
    "gated": Epilogue(activation="swiglu"),
    "gradient": Epilogue(activation="gelu", gradient="pre"),  # of the hidden layer, in the product that gives it
    "gated gradient": Epilogue(activation="swiglu", gradient="pre"),
}
KINDS = ("linear", "dx", "dw", *EPILOGUES)


@dataclass(frozen=True)
class Point:
    kind: str
    number: str
    tokens: int
    n: int
    k: int
    arch: str = "sm_90"
    sm_count: int = 132

    def __str__(self) -> str:
        return f"{self.kind} {self.number} {self.tokens} tokens, weight {self.n} x {self.k}"

    @property
    def problem(self) -> Problem:
        dtype, precision = NUMBERS[self.number]
        t, n, k = self.tokens, self.n, self.k
        if self.kind == "dw":
            sizes, strides, chunk = (n, k, t), ((1, n), (k, 1), (k, 1)), configs.token_chunk(n, k, dtype)
        elif self.kind in ("linear", "activated", "gated"):
            sizes, strides, chunk = (t, n, k), ((k, 1), (1, k), (n, 1)), configs.accumulation_chunk(k, dtype, dtype)
        else:
            sizes, strides, chunk = (t, k, n), ((n, 1), (k, 1), (k, 1)), configs.accumulation_chunk(n, dtype, dtype)
        return Problem(
            *sizes, dtype, dtype, precision, *strides, chunk=chunk, epilogue=EPILOGUES.get(self.kind, Epilogue()),
            arch=self.arch, sm_count=self.sm_count,
        )  # fmt: skip


def candidates(point: Point) -> list[Config]:
    problem = point.problem
    made = _small(problem) if problem.m <= 16 else _medium(problem) if problem.m <= 128 else _large(problem)
    if problem.number in ("ieee", "tf32x3"):
        made = _fma(problem) if problem.number == "ieee" else _split(problem)
    elif problem.number == "tf32" and problem.layout != "nt":
        made = _small(problem) if problem.m <= 16 else _across(problem)
    chosen = []
    for config in made:
        if problem.chunks > 1:
            waits = problem.out_dtype != "float32"  # chunks in scratch memory
            config = replace(config, persistent=config.persistent or waits, pdl=False)
            chosen.append(replace(config, parallel_chunks=True))
        chosen.append(config)
    if point.kind in EPILOGUES:  # which would spill registers with so wide a tile
        chosen = [config for config in chosen if not (config.rest_n and config.num_warps == 4)]
    fitted = (configs.fitted(problem, config) for config in chosen)
    return list(dict.fromkeys(config for config in fitted if not configs.illegal(problem, config)))


def _small(problem: Problem) -> Iterator[Config]:
    """The weight's tile is the left operand, the tokens a few columns."""
    wide = 2 if problem.dtype != "float32" else 1
    columns = 8 if problem.m <= 8 else 16
    for block_m, block_k, warps, stages in (
        (16, 256, 2, 4), (16, 256, 1, 5), (32, 256, 2, 4), (32, 128, 2, 5), (64, 128, 2, 4), (64, 128, 4, 4),
        (64, 64, 4, 6),
        (128, 64, 4, 5), (128, 64, 8, 4), (16, 128, 2, 6), (32, 256, 4, 4),
    ):  # fmt: skip
        yield Config(block_m, columns, block_k * wide, warps, stages, swapped=True, pdl=True)
    yield Config(32, columns, 256 * wide, 2, 4, swapped=True)
    yield Config(64, max(columns, 16), 64 * wide, 4, 6, "tma", swapped=True, pdl=True)
    yield Config(64, max(columns, 16), 128 * wide, 4, 4, "tma", swapped=True, pdl=True)
    yield Config(128, max(columns, 16), 64 * wide, 4, 5, "tma", swapped=True, pdl=True)


def _medium(problem: Problem) -> Iterator[Config]:
    wide = 2 if problem.dtype != "float32" else 1
    least = 16 if problem.n <= 4096 else 32
    columns = [size for size in (16, 32, 64, 128) if least <= size <= problem.m or size == 32]
    for block_n in columns:
        for block_m, block_k, warps, stages in (
            (64, 64, 4, 5), (64, 128, 4, 4), (128, 32, 4, 6), (128, 64, 4, 4), (128, 64, 8, 4), (64, 32, 4, 8),
        ):  # fmt: skip
            for kernel in ("tma", "pointer"):
                if kernel == "pointer" and block_n == 128:
                    continue
                yield Config(block_m, block_n, block_k * wide, warps, stages, kernel, swapped=True, pdl=True)
    if problem.m >= 64:
        for block_m, block_n in ((64, 128), (64, 256), (128, 128), (128, 256)):
            if block_m <= problem.m:
                for warps in (4, 8) if block_m * block_n <= 128 * 128 else (8,):
                    yield Config(block_m, block_n, 32 * wide, warps, 4, "tma", pdl=True)
        for block_m, block_n, rest, warps in (
            (64, 128, 64, 4),
            (64, 64, 32, 4),
            (128, 64, 32, 4),
            (128, 32, 16, 4),
            (64, 128, 32, 4),
        ):
            if block_m <= problem.m:
                yield Config(block_m, block_n, 32 * wide, warps, 5, "tma", rest_n=rest, pdl=True)


def _large(problem: Problem) -> Iterator[Config]:
    wide = 2 if problem.dtype != "float32" else 1
    block_k = 32 * wide
    stream = Config(128, 256, block_k, 8, 3, "stream", persistent=True)
    for parts, group in ((1, 8), (2, 8), (2, 4), (2, 16), (4, 8)):
        yield replace(stream, parts=parts, group=group)
    yield replace(stream, parts=4, num_stages=4)
    yield replace(stream, block_m=256, block_n=128, parts=2)
    yield Config(128, 256, block_k, 8, 3, "tma", persistent=True, parts=2)
    for block_m, block_n, warps, stages, residents in (
        (128, 128, 8, 5, 1), (128, 128, 4, 5, 1), (128, 128, 4, 3, 2), (128, 128, 8, 3, 2), (64, 256, 4, 4, 1),
        (128, 64, 4, 2, 3),
    ):  # fmt: skip
        tile = replace(stream, block_m=block_m, block_n=block_n, num_warps=warps, num_stages=stages)
        for parts in (2, 4) if residents == 2 else (1, 2):
            yield replace(tile, residents=residents, parts=parts)
    for block_m, block_n, rest, warps, stages in (
        (128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 32, 8, 4), (128, 128, 64, 4, 4), (128, 64, 32, 4, 5),
        (64, 128, 64, 4, 4), (128, 64, 16, 4, 5), (64, 256, 64, 4, 3),
    ):  # fmt: skip
        yield Config(block_m, block_n, block_k, warps, stages, "tma", rest_n=rest, pdl=True)
    if problem.m * problem.n > 64 * 132 * 128 * 128:
        return
    for block_m, block_n, depth, warps, stages in (
        (128, 128, 1, 4, 5), (128, 64, 2, 4, 4), (64, 128, 2, 4, 4), (64, 256, 1, 4, 4), (128, 64, 1, 4, 6),
        (64, 64, 2, 4, 5), (64, 128, 1, 4, 3), (64, 64, 1, 4, 4),
    ):  # fmt: skip
        yield Config(block_m, block_n, block_k * depth, warps, stages, "tma", pdl=True)
    for block_m, block_n, depth, warps, stages in (
        (128, 64, 2, 4, 4),
        (128, 32, 2, 4, 4),
        (64, 64, 2, 4, 5),
        (128, 128, 1, 4, 5),
    ):
        yield Config(block_m, block_n, block_k * depth, warps, stages, "tma", swapped=True, pdl=True)


def _across(problem: Problem) -> Iterator[Config]:
    """TF32 that is not along k in memory: warpgroups would have it turned first, single warps read it as it lies."""
    for block_m, block_n, block_k, warps, stages in (
        (64, 64, 32, 2, 4), (64, 64, 64, 2, 2), (32, 128, 32, 4, 4), (32, 64, 32, 2, 5), (64, 32, 32, 2, 5),
        (32, 256, 32, 4, 3), (32, 32, 32, 1, 6), (128, 128, 32, 8, 3), (64, 64, 32, 4, 3),
    ):  # fmt: skip
        yield Config(block_m, block_n, block_k, warps, stages, "tma", pdl=True)
    yield Config(32, 128, 32, 4, 4, "tma", swapped=True, pdl=True)
    yield Config(64, 64, 32, 2, 4, "stream", persistent=True, residents=3)
    for parts, block_k in itertools.product((1, 2, 4) if problem.epilogue.gradient else (1,), (32, 16)):
        wide = Config(64, 128, block_k, 2, 96 // block_k, "tma", pdl=True, parts=parts)
        yield from (wide, replace(wide, swapped=True), replace(wide, block_m=128, block_n=64))
        yield replace(wide, kernel="stream", persistent=True, residents=2, pdl=False)
        yield Config(64, 64, 32, 2, 4, "tma", pdl=True, parts=parts)


def _fma(problem: Problem) -> Iterator[Config]:
    """ieee: block_k is pinned; operands pass through registers."""
    if problem.m <= 16:
        for block_m, warps, stages in ((16, 2, 8), (32, 4, 8), (32, 2, 8), (64, 4, 8), (64, 2, 6)):
            yield Config(block_m, 8 if problem.m <= 8 else 16, 16, warps, stages, swapped=True, pdl=True)
        return
    for block_m, block_n, warps, stages in ((128, 64, 4, 2), (64, 64, 2, 4), (64, 64, 4, 4), (32, 64, 2, 5)):
        if block_m <= 2 * problem.m:
            yield Config(block_m, block_n, 16, warps, stages)
            yield Config(block_m, block_n, 16, warps, stages, swapped=True)


def _split(problem: Problem) -> Iterator[Config]:
    """tf32x3: three products of halves that are made in registers."""
    for block_m, block_n, warps, stages in (
        (16, 32, 2, 5), (16, 64, 4, 5), (16, 128, 4, 4), (32, 64, 4, 4), (64, 64, 4, 4), (64, 128, 4, 3),
        (64, 128, 8, 3),
        (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 3),
    ):  # fmt: skip
        if block_m <= max(16, 2 * problem.m):
            yield Config(block_m, block_n, 32, warps, stages)
            yield Config(block_m, block_n, 32, warps, stages, "tma")


def plan(problem: Problem, config: Config) -> Plan:
    dtype, device = getattr(torch, problem.dtype), torch.device("cuda", 0)
    read: list[tuple[torch.dtype, bool] | None] = [None] * len(TENSORS)
    names = {"bias": problem.epilogue.bias, "saved": problem.epilogue.gradient}
    names["second"] = problem.epilogue.gated and problem.epilogue.gradient
    for name, is_read in names.items():
        read[PLACES[name]] = (dtype, name != "bias") if is_read else None
    return gemm_plan("tuned", (problem.m, problem.n), dtype, device, problem, config, read)


def precompile(job: tuple[Problem, Config]) -> str:
    problem, config = job
    try:
        plan(problem, config)
    except Exception as error:
        return f"{problem} {config}: {type(error).__name__}: {str(error)[-300:]}"
    return ""


class Operands:
    """Weights of one shape, enough of them to be cold when their turn comes, and tokens to go with them."""

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        self.n, self.k, self.dtype = n, k, dtype
        size = n * k * dtype.itemsize
        self.sets = max(2, min(64, math.ceil(4 * torch.cuda.get_device_properties(0).L2_cache_size / size)))
        self.weights = torch.randn(self.sets, n, k, device="cuda", dtype=dtype)

    def calls(self, point: Point) -> list[Call]:
        """The point's products."""
        t, problem = point.tokens, point.problem
        x = torch.randn(t, self.k, device="cuda", dtype=self.dtype)
        grad = torch.randn(t, self.n, device="cuda", dtype=self.dtype)
        if point.kind == "dw":
            pairs = [(grad.mT, x, None)]
        elif point.kind == "gated":
            pairs = [(x, *pair.mT) for pair in self.weights[: self.sets // 2 * 2].unflatten(0, (-1, 2))]
        elif point.kind in ("linear", "activated"):
            pairs = [(x, weight.mT, None) for weight in self.weights]
        else:
            pairs = [(grad, weight, None) for weight in self.weights]
        read: list[torch.Tensor | None] = [None] * len(TENSORS)
        shape, gradient = (problem.m, problem.n), problem.epilogue.gradient
        if problem.epilogue.bias:
            read[PLACES["bias"]] = torch.randn(self.n, device="cuda", dtype=self.dtype)
        if gradient:
            both = (2, *shape) if problem.epilogue.gated else shape
            read[PLACES["saved"]] = torch.randn(both, device="cuda", dtype=self.dtype)
        if gradient and problem.epilogue.gated:
            read[PLACES["second"]] = torch.empty(shape, device="cuda", dtype=self.dtype)
        return [Call(*pair, read, torch.empty(shape, device="cuda", dtype=self.dtype)) for pair in pairs]


@dataclass(frozen=True)
class Call:
    a: torch.Tensor
    b: torch.Tensor
    b_up: torch.Tensor | None
    read: list[torch.Tensor | None]
    out: torch.Tensor

    def run(self, plan: Plan) -> None:
        plan.run((self.a, self.b, self.b_up, *self.read), self.out)

    def run_torch(self) -> None:
        """The bare product: what every epilogue is compared with."""
        torch.mm(self.a, self.b, out=self.out)
        if self.b_up is not None:
            torch.mm(self.a, self.b_up, out=self.out)


def measure(point: Point, operands: Operands, chosen: list[Config]) -> dict[str, Any]:
    """Microseconds per call of torch and of every configuration with the canonical one's bits."""
    calls = operands.calls(point)
    problem = point.problem
    torch.backends.cuda.matmul.fp32_precision = "tf32" if point.number == "tf32" else "ieee"
    first = calls[0]
    first.run(plan(problem, configs.fitted(problem, configs.canonical(problem))))
    wanted = first.out.clone()
    variants = {"torch": [call.run_torch for call in calls]}
    differing = []
    for config in chosen:
        try:
            planned = plan(problem, config)
        except Exception as error:
            differing.append(f"{config}: {type(error).__name__}")
            continue
        first.out.fill_(float("nan"))
        first.run(planned)
        if common.same_bits(first.out, wanted):
            variants[str(config)] = [partial(call.run, planned) for call in calls]
        else:
            differing.append(str(config))
    times = timer.measure(variants, first.out.device, repeats=7, warmup=1)
    return {"us": {name: round(statistics.median(raw), 3) for name, raw in times.items()}, "differing": differing}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--numbers", nargs="+", choices=list(NUMBERS), default=["half"])
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
        if options.tokens or kind in ("linear", "activated", "gated") or tokens >= 256
    ]


def sweep(options: argparse.Namespace, raw: Path) -> None:
    begun = time.perf_counter()
    chosen = {point: candidates(point) for point in points(options)}
    jobs: dict[Any, tuple[Problem, Config]] = {}
    for point, made in chosen.items():
        problem = point.problem
        for config in (*made, configs.fitted(problem, configs.canonical(problem))):
            launch = kernels.describe_gemm(problem, config)
            jobs.setdefault((*launch.constants.values(), *launch.options.values()), (problem, config))
    common.compile_ahead(precompile, list(jobs.values()), options.workers)
    operands = None
    for point, made in chosen.items():
        if time.perf_counter() - begun > options.seconds:
            print(f"stopped before {point}", flush=True)
            return
        dtype = getattr(torch, NUMBERS[point.number][0])
        if operands is None or (operands.n, operands.k, operands.dtype) != (point.n, point.k, dtype):
            operands = None
            torch.cuda.empty_cache()
            operands = Operands(point.n, point.k, dtype)
        try:
            result = measure(point, operands, made)
        except Exception as error:
            print("failed:", point, type(error).__name__, str(error)[-300:], flush=True)
            continue
        row = {"kind": point.kind, "number": point.number, "tokens": point.tokens, "n": point.n, "k": point.k}
        common.append(raw, row | {"sm_count": point.sm_count} | result)


NEAR = 1.015  # configurations this close to the best share a point: fewer kernels to compile


def samples(rows: list[dict[str, Any]], arch: str) -> list[cost.Sample]:
    """Mean times of what was recorded, for the model's fit."""
    found: dict[Point, dict[str, list[float]]] = {}
    for row in rows:
        for name, us in row["us"].items():
            found.setdefault(_point(row, arch), {}).setdefault(name, []).append(us)
    return [
        cost.Sample(point.problem, (point.n, point.k), times)
        for point, us in found.items()
        if (times := {each: statistics.mean(us[str(each)]) for each in candidates(point) if str(each) in us})
    ]


def model(rows: list[dict[str, Any]], arch: str) -> dict[tuple[str, str], tuple[Any, ...]]:
    """The model of a configuration's time, as plain values."""
    return {
        key: tuple((astuple(each.config), each.above, each.most, each.coefficients) for each in menu)
        for key, menu in cost.model(samples(rows, arch)).items()
    }


def _point(row: dict[str, Any], arch: str) -> Point:
    sizes = row["tokens"], row["n"], row["k"]
    return Point(row["kind"], row["number"], *sizes, arch, row.get("sm_count", 132))


def tables(rows: list[dict[str, Any]], arch: str) -> dict[str, Table]:
    """By arithmetic, kind of problem, weight and tokens: a configuration near the best, of as few as will do."""
    measured: dict[Point, dict[str, list[float]]] = {}
    for row in rows:
        point = _point(row, arch)
        known = set(map(str, candidates(point)))  # of an older file, only what still is one counts
        for name in known & row["us"].keys():
            measured.setdefault(point, {}).setdefault(name, []).append(row["us"][name] / row["us"]["torch"])
    near: dict[Point, set[str]] = {}
    for point, ratios in measured.items():
        means = {name: statistics.mean(values) for name, values in ratios.items()}
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
        problem = point.problem
        named = {str(config): config for config in candidates(point)}
        sizes = (problem.m, problem.n) if point.kind == "dw" else (problem.n, problem.k)
        step = point.tokens, astuple(named[chosen[point]])
        table.setdefault((problem.number, problem.kind, *sizes), []).append(step)
    return {"gemm": {key: tuple(steps) for key, steps in table.items()}}
