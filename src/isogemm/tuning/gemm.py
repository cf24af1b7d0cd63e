"""Points of the GEMM family, the configs worth a trial at each, and their times on the current GPU.

A config counts only where its result has the canonical config's bits.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from isogemm.bench import timer
from isogemm.core.plan import Plan, Seen
from isogemm.core.precision import of_cuda_products
from isogemm.core.problems import sm
from isogemm.epilogues.operands import PLACES, TENSORS, Epilogue
from isogemm.gemm import configs
from isogemm.gemm.configs import Config, Problem
from isogemm.gemm.plan import gemm_plan
from isogemm.verify.compare import compare_bits

Job = tuple[Problem, Config]  # to compile

ARITHMETIC = {  # by its name in the tables: dtype, precision
    "half": ("bfloat16", "ieee"),
    "tf32": ("float32", "tf32"),
    "tf32x3": ("float32", "tf32x3"),
    "ieee": ("float32", "ieee"),
}
EPILOGUES = {  # kind of problem: the epilogue measured for it
    "activated": Epilogue(bias="n", activation="gelu_tanh"),
    "gated": Epilogue(activation="swiglu"),
    "gradient": Epilogue(activation="gelu", gradient="pre"),  # of the hidden layer, in the product that gives it
    "gated gradient": Epilogue(activation="swiglu", gradient="pre"),
}
KINDS = ("linear", "dx", "dw", "main_grad", *EPILOGUES)  # main_grad: dw, added to a float32 total
OTHER_BITS = "other bits"  # the reason for a config that breaks the contract
FORWARD = ("linear", "activated", "gated")  # x [tokens, k] times the weight's transpose; the others are gradients


@dataclass(frozen=True)
class Point:
    """What is measured: a kind of product, of a weight [n, k], for a number of tokens."""

    kind: str
    number: str
    tokens: int
    n: int
    k: int
    arch: str = "sm_90"
    sm_count: int = 132
    gpu: str = ""
    half: str = "bfloat16"  # which of the 16-bit types, which share their tables

    def __str__(self) -> str:
        return f"{self.kind} {self.number} {self.tokens} tokens, weight {self.n} x {self.k}"

    @property
    def problem(self) -> Problem:
        dtype, precision = self.dtype, ARITHMETIC[self.number][1]
        t, n, k = self.tokens, self.n, self.k
        if self.of_tokens:
            sizes, strides = (n, k, t), ((1, n), (k, 1), (k, 1))
        elif self.kind in FORWARD:
            sizes, strides = (t, n, k), ((k, 1), (1, k), (n, 1))
        else:
            sizes, strides = (t, k, n), ((n, 1), (k, 1), (k, 1))
        problem = Problem(
            *sizes, dtype, dtype, precision, *strides, epilogue=EPILOGUES.get(self.kind, Epilogue()), arch=self.arch,
            sm_count=self.sm_count, gpu=self.gpu,
        )  # fmt: skip
        if self.kind == "main_grad":
            problem = replace(problem, out_dtype="float32", accumulate=True)
        chunk = configs.token_chunk(n, k, dtype) if self.of_tokens else configs.accumulation_chunk(problem)
        return replace(problem, chunk=chunk)

    @property
    def of_tokens(self) -> bool:
        """Whether it is a sum over the tokens."""
        return self.kind in ("dw", "main_grad")

    @property
    def dtype(self) -> str:
        return self.half if self.number == "half" else "float32"

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Key of the tables' entry that it is measured for."""
        problem = self.problem
        sizes = (problem.m, problem.n) if self.of_tokens else (problem.n, problem.k)
        return problem.number, problem.kind, *sizes


def candidates(point: Point) -> list[Config]:
    """The legal configs that are worth a trial, whatever the tables have."""
    problem = point.problem
    made = _small(problem) if problem.m <= 16 else _medium(problem) if problem.m <= 128 else _large(problem)
    if problem.m >= 128:
        made = itertools.chain(made, _with_roles(problem))
    if problem.number in ("ieee", "tf32x3"):
        made = _fma(problem) if problem.number == "ieee" else _split(problem)
    elif problem.number == "tf32" and problem.layout != "nt":
        made = _small(problem) if problem.m <= 16 else _across(problem)
    chosen: list[Config] = []
    for config in made:
        if sm(problem.arch) < 90:
            config = replace(config, pdl=False)  # neither launches nor assembles there
        if problem.chunks > 1:
            if configs.few_tiles(problem, config) and not config.persistent:
                chosen.append(replace(config, parallel_chunks="gathered"))
                if point.of_tokens:
                    chosen.append(replace(config, parallel_chunks="queued"))
            if point.of_tokens:
                chosen.append(replace(config, parallel_chunks="partials", pdl=False))
            if configs.accumulation(problem, config) == "scratch":
                config = replace(config, persistent=True, pdl=False)
        elif config.kernel == "stream" and configs.balances(problem, config) and config.parts == 2:
            chosen.append(replace(config, balanced=True))  # stored in more parts, waiting costs more
        chosen.append(config)
    if point.kind in EPILOGUES:  # these would spill registers with so wide a tile
        chosen = [config for config in chosen if not (config.rest_n and config.num_warps == 4)]
    fitted = (configs.fitted(problem, config) for config in chosen)
    return list(dict.fromkeys(config for config in fitted if not configs.illegal(problem, config)))


def _small(problem: Problem) -> Iterator[Config]:
    """Few tokens: swapped operands, the weight's tile on the left and the tokens as columns."""
    wide = 2 if problem.dtype != "float32" else 1
    columns = 8 if problem.m <= 8 else 16
    for block_m, block_k, warps, stages in (
        (16, 256, 2, 4), (16, 256, 1, 5), (32, 256, 2, 4), (32, 128, 2, 5), (64, 128, 2, 4), (64, 128, 4, 4),
        (64, 64, 4, 6),
        (128, 64, 4, 5), (128, 64, 8, 4), (16, 128, 2, 6), (32, 256, 4, 4),
    ):  # fmt: skip
        if (block_m, columns, block_k, warps) != (16, 16, 256, 2):  # the model takes it for faster than it is
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
            (128, 128, 16, 8),
            (128, 128, 32, 8),
            (128, 128, 64, 8),
        ):
            if block_m <= problem.m:
                yield Config(block_m, block_n, 32 * wide, warps, 5, "tma", rest_n=rest, pdl=True)


def _large(problem: Problem) -> Iterator[Config]:
    wide = 2 if problem.dtype != "float32" else 1
    block_k = 32 * wide
    stream = Config(128, 256, block_k, 8, 3, "stream", persistent=True)
    yield from (replace(stream, parts=2), replace(stream, parts=4, num_stages=4))
    yield from (replace(stream, kernel=kernel, block_n=128, num_stages=5, parts=2) for kernel in ("stream", "tma"))
    yield replace(stream, kernel="tma", parts=2)
    yield replace(stream, block_n=128, num_stages=4)
    yield replace(stream, block_n=128, num_warps=4, num_stages=5, parts=2)
    yield replace(stream, block_n=128, num_warps=4, parts=4, residents=2)
    for block_m, block_n, rest, warps, stages in (
        (128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 32, 8, 4), (128, 128, 16, 8, 4), (128, 128, 64, 4, 4),
        (128, 64, 32, 4, 5),
        (64, 128, 64, 4, 4), (128, 64, 16, 4, 5), (64, 256, 64, 4, 3),
    ):  # fmt: skip
        yield Config(block_m, block_n, block_k, warps, stages, "tma", rest_n=rest, pdl=True)
    if problem.m * problem.n > 64 * 132 * 128 * 128:
        return
    for block_m, block_n, depth, warps, stages in (
        (128, 128, 1, 4, 5), (128, 128, 1, 8, 5), (128, 64, 2, 4, 4), (64, 128, 2, 4, 4), (64, 256, 1, 4, 4),
        (128, 64, 1, 4, 6),
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


def _with_roles(problem: Problem) -> Iterator[Config]:
    """Tiles of 128 rows and several widths."""
    for block_n, rest, stages, parts in (
        (64, 0, 8, 1), (64, 16, 7, 1), (64, 32, 6, 1), (128, 0, 5, 1), (128, 32, 5, 1), (128, 64, 4, 1), (256, 0, 4, 2),
    ):  # fmt: skip
        made = Config(128, block_n, 64, 8, stages, "roles", parts=parts, rest_n=rest)
        if configs.fitted(problem, made).columns != made.columns:  # too wide, or no rest, for this problem
            continue
        if made.columns >= 128 or configs.tile_count(problem, made) <= problem.sm_count:
            yield made
    tile = Config(128, 128, 64, 8, 5, "roles", persistent=True)
    if configs.tile_count(problem, tile) > problem.sm_count:
        if problem.chunks <= 1:
            tile = replace(tile, num_stages=6, parts=2, alternating=True)
            yield tile
        yield replace(tile, group=12, balanced=True)


def _across(problem: Problem) -> Iterator[Config]:
    """TF32 operands not contiguous along k: wgmma would need a transposed copy, single warps read them in place."""
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
    """ieee: block_k is fixed; operands pass through registers."""
    if problem.m <= 16:
        for block_m, warps, stages in ((16, 2, 8), (32, 4, 8), (32, 2, 8), (64, 4, 8), (64, 2, 6)):
            yield Config(block_m, 8 if problem.m <= 8 else 16, 16, warps, stages, swapped=True, pdl=True)
        return
    for block_m, block_n, warps, stages in ((128, 64, 4, 2), (64, 64, 2, 4), (64, 64, 4, 4), (32, 64, 2, 5)):
        if block_m <= 2 * problem.m:
            yield Config(block_m, block_n, 16, warps, stages)
            yield Config(block_m, block_n, 16, warps, stages, swapped=True)


def _split(problem: Problem) -> Iterator[Config]:
    """tf32x3: three products of operand halves, which a pass writes to memory or the product makes in registers."""
    for block_m, block_n, warps, stages in (
        (16, 32, 2, 5), (16, 64, 4, 5), (16, 128, 4, 4), (32, 64, 4, 4), (64, 64, 4, 4), (64, 128, 4, 3),
        (64, 128, 8, 3),
        (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 3),
    ):  # fmt: skip
        if block_m <= max(16, 2 * problem.m):
            yield Config(block_m, block_n, 32, warps, stages)
            yield Config(block_m, block_n, 32, warps, stages, "tma")
    if problem.m <= 256:  # the weight's tile on the left, from where wgmma reads registers
        for block_m, block_n, warps in ((64, 16, 4), (64, 32, 4), (64, 64, 4), (128, 64, 8)):
            if block_n <= max(16, problem.m):
                few = Config(block_m, block_n, 32, warps, 4, "tma", swapped=True, pdl=True)
                yield from (few, replace(few, split="a"), replace(few, kernel="pointer"))
    if problem.m > 64:
        for block_m, block_n, warps, stages in ((128, 128, 8, 3), (128, 64, 4, 2), (64, 128, 4, 2), (64, 64, 4, 3)):
            yield Config(block_m, block_n, 32, warps, stages, "tma", split="both", parts=4, pdl=True)
        left = Config(64, 128, 32, 4, 3, "tma", swapped=True, parts=4, pdl=True)
        yield from (left, replace(left, split="a"))
        wide = Config(128, 128, 32, 8, 2, "tma", split="both", parts=4, pdl=True)
        yield from (replace(wide, rest_n=64), replace(wide, rest_n=128))
        yield replace(wide, num_stages=3, kernel="stream", persistent=True, pdl=False)


def plan(problem: Problem, config: Config) -> Plan:
    """Plan on the current GPU, as `Call.run` wants it."""
    dtype, out_dtype = (getattr(torch, name) for name in (problem.dtype, problem.out_dtype))
    device = torch.device("cuda", torch.cuda.current_device())
    read: list[Seen | None] = [None] * len(TENSORS)
    names: dict[str, object] = {"bias": problem.epilogue.bias, "saved": problem.epilogue.gradient}
    names["second"] = problem.epilogue.gated and problem.epilogue.gradient
    for name, is_read in names.items():
        read[PLACES[name]] = (dtype, name != "bias") if is_read else None
    return gemm_plan("tuned", (problem.m, problem.n), out_dtype, device, problem, config, read)


def canonical(problem: Problem) -> Config:
    """The config whose bits all others must have."""
    return configs.fitted(problem, configs.canonical(problem))


def jobs(chosen: Mapping[Point, Collection[Config]]) -> dict[tuple[object, ...], Job]:
    """The kernels that measuring these configs needs, each once."""
    from isogemm.gemm.kernels import products as kernels

    found: dict[tuple[object, ...], Job] = {}
    for point, made in chosen.items():
        problem = point.problem
        for config in (*made, canonical(problem)):
            launch = kernels.describe_gemm(problem, config)
            found.setdefault((*launch.constants.values(), *launch.options.values()), (problem, config))
    return found


def precompile(job: Job, index: int | None = None) -> str:
    """Compile a kernel; return why it failed, or "". index: the GPU; None for the current one."""
    problem, config = job
    try:
        if index is not None:
            torch.cuda.set_device(index)
        plan(problem, config)
    except Exception as error:
        return f"{problem} {config}: {type(error).__name__}: {str(error)[-300:]}"
    return ""


class Operands:
    """Weights of one shape, enough of them that each is cold in cache at its turn, and tokens for them."""

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        self.n, self.k, self.dtype = n, k, dtype
        self.sets = max(2, timer.rotations(n * k * dtype.itemsize, torch.device("cuda"), most=64))
        self.weights = torch.randn(self.sets, n, k, device="cuda", dtype=dtype)

    def calls(self, point: Point) -> list[Call]:
        t, problem = point.tokens, point.problem
        x = torch.randn(t, self.k, device="cuda", dtype=self.dtype)
        grad = torch.randn(t, self.n, device="cuda", dtype=self.dtype)
        pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
        if point.of_tokens:
            pairs = [(grad.mT, x, None)]
        elif point.kind == "gated":
            pairs = [(x, gate.mT, up.mT) for gate, up in zip(self.weights[::2], self.weights[1::2], strict=False)]
        elif point.kind in FORWARD:
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
        out_dtype = getattr(torch, problem.out_dtype)
        start = torch.randn(shape, device="cuda") if problem.accumulate else None
        return [Call(*pair, read, torch.empty(shape, device="cuda", dtype=out_dtype), start) for pair in pairs]


@dataclass(frozen=True)
class Call:
    """One product's tensors."""

    a: torch.Tensor
    b: torch.Tensor
    b_up: torch.Tensor | None
    read: list[torch.Tensor | None]
    out: torch.Tensor
    start: torch.Tensor | None  # what the product is added to

    @property
    def results(self) -> tuple[torch.Tensor, ...]:
        """All tensors that a launch writes."""
        second = self.read[PLACES["second"]]
        return (self.out,) if second is None else (self.out, second)

    def reset(self) -> None:
        """Make the results what they are before a launch; NaN where it must write."""
        for each in self.results:
            each.fill_(torch.nan)
        if self.start is not None:
            self.out.copy_(self.start)

    def run(self, plan: Plan) -> None:
        plan.run((self.a, self.b, self.b_up, *self.read), self.out)

    def run_torch(self) -> None:
        """Run torch's plain product, which every epilogue is compared with."""
        if self.start is not None:
            torch.addmm(self.out, self.a, self.b, out_dtype=torch.float32, out=self.out)
            return
        torch.mm(self.a, self.b, out=self.out)
        if self.b_up is not None:
            torch.mm(self.a, self.b_up, out=self.out)


@dataclass(frozen=True)
class Measured:
    """The times of a point, in microseconds a call, of "torch" and of each config by its str."""

    us: dict[str, float]
    differing: list[str]  # configs that do not count, each with the reason: other bits, or an error's name


class Bench:
    """Measures points on the current GPU; a weight's operands are kept until another weight's turn."""

    def __init__(self) -> None:
        self._operands: Operands | None = None

    def measure(self, point: Point, chosen: Sequence[Config]) -> Measured:
        """Time torch and every config that has the canonical one's bits, in turn and on cold weights."""
        precision = "tf32" if point.number == "tf32" else "ieee"
        with of_cuda_products(precision), torch.random.fork_rng([torch.cuda.current_device()]):
            calls = self._operands_of(point).calls(point)
            plans, differing = _checked(point.problem, calls[0], chosen)
            variants: dict[str, list[Any]] = {"torch": [call.run_torch for call in calls]}
            variants |= {name: [partial(call.run, plan) for call in calls] for name, plan in plans.items()}
            times = timer.measure(variants, calls[0].out.device, repeats=7, warmup=1)
        return Measured({name: round(statistics.median(raw), 3) for name, raw in times.items()}, differing)

    def _operands_of(self, point: Point) -> Operands:
        wanted = point.n, point.k, getattr(torch, point.dtype)
        kept = self._operands
        if kept is None or (kept.n, kept.k, kept.dtype) != wanted:
            kept = self._operands = None  # its memory, before the next is allocated
            torch.cuda.empty_cache()
            kept = self._operands = Operands(*wanted)
        return kept


def _checked(problem: Problem, call: Call, chosen: Sequence[Config]) -> tuple[dict[str, Plan], list[str]]:
    """Plans, by the config's str, of the configs with the canonical one's bits; and what differs or fails."""
    call.reset()
    call.run(plan(problem, canonical(problem)))
    wanted = [each.clone() for each in call.results]
    plans: dict[str, Plan] = {}
    differing = []
    for config in chosen:
        call.reset()
        try:
            made = plan(problem, config)
            call.run(made)
            same = all(compare_bits(*pair).equal for pair in zip(call.results, wanted, strict=True))
        except Exception as error:
            differing.append(f"{config}: {type(error).__name__}")
            continue
        if same:
            plans[str(config)] = made
        else:
            differing.append(f"{config}: {OTHER_BITS}")
    return plans, differing
