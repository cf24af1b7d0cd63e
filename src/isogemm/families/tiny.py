"""The tiny family's entry: its checks, its cases, its demo."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from isogemm.bench import timer
from isogemm.bench.cases import Case, CaseRun, Thunk
from isogemm.bench.demo import Bits, DemoResult
from isogemm.bench.views import FamilyView
from isogemm.core import device as devices
from isogemm.core import tables
from isogemm.core.dispatch import dispatch_log
from isogemm.core.precision import of_cuda_products
from isogemm.families import demos
from isogemm.families.base import Family, Usability
from isogemm.gemm.reference import round_to_tf32
from isogemm.testing.cases import DATA_KINDS, make_operands
from isogemm.testing.checks import Check, CheckResult, run_trials, skip
from isogemm.testing.compare import BitDiff, compare_bits
from isogemm.testing.error import assert_no_worse_than_torch
from isogemm.testing.poison import poisoned_allocations
from isogemm.tiny import configs, op, reference
from isogemm.tiny.api import bmm
from isogemm.tiny.configs import Config, DotConfig, Problem, RegistersConfig

SHAPES = (  # m, n, k
    (12, 12, 64), (12, 64, 12), (16, 16, 16), (32, 32, 32), (64, 64, 64), (42, 42, 8), (42, 8, 42), (42, 42, 4),
    (5, 5, 16), (5, 16, 5), (3, 5, 7), (48, 24, 40), (8, 8, 8), (64, 64, 16),
)  # fmt: skip
BATCHES = (256, 1024, 14336, 65536)
NUMBERS = (("float32", "ieee"), ("float32", "tf32"), ("bfloat16", ""))
RANDOM_SHAPES = 60  # besides the chosen ones: what the gate gives where nobody looked


def usability(device: torch.device) -> Sequence[Usability]:
    arch = devices.facts(device).arch
    reason = "not on a GPU: torch.bmm serves" if device.type != "cuda" else configs.usable(arch)
    if not reason and importlib.util.find_spec("triton") is None:
        reason = "Triton is not installed"
    served = f"compiled for {arch}"
    if not tables.measured("tiny", arch):
        served += f"; gate measured on {', '.join(tables.architectures('tiny'))}"
    return [Usability(not reason, f"tiny/{kernel}", reason or served) for kernel in configs.KERNELS]


def operands(
    batch: int,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    layout: str,
    device: torch.device,
    seed: int,
    kind: str = "normal",
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [batch, m, k] and B [batch, k, n]; t in `layout` for a transposed view."""
    a, b = make_operands(kind, (batch, m, k), (batch, k, n), seed=seed, dtype=dtype, device=device)
    return _laid_out(a, layout[0]), _laid_out(b, layout[1])


def _laid_out(x: torch.Tensor, letter: str) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2) if letter == "t" else x


# verify


def _random_problem(rng: random.Random) -> tuple[int, int, int, torch.dtype, str, str]:
    sizes = [rng.choice((1, 3, 5, 8, 12, 16, 17, 31, 32, 42, 48, 63, 64)) for _ in range(3)]
    dtype = rng.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16))
    precision = rng.choice(("ieee", "tf32", "tf32x3")) if dtype is torch.float32 else ""
    return sizes[0], sizes[1], sizes[2], dtype, precision, rng.choice(("nn", "nt", "tn", "tt"))


def _products(a: torch.Tensor, b: torch.Tensor, precision: str) -> dict[str, torch.Tensor]:
    """What the public call gives and, whatever the gate says, each kernel."""
    problem = op.describe(a, b, precision)
    with poisoned_allocations():
        products = {kernel: _product(a, b, problem, configs.choose(problem, kernel)) for kernel in configs.KERNELS}
        with dispatch_log() as log:
            public = bmm(a, b, precision=precision or None)
    return products | {"bmm": public} if log[0].path == "tiny" else products


def _product(a: torch.Tensor, b: torch.Tensor, problem: Problem, config: Config) -> torch.Tensor:
    from isogemm.tiny import kernels

    out = torch.empty((problem.batch, problem.m, problem.n), dtype=a.dtype, device=a.device)
    with torch.cuda.device(a.device):
        kernels.launch_bmm(out, a, b, problem, config)
    return out


def _check_batch(device: torch.device, trials: int) -> CheckResult:
    name = "batch invariance"

    def trial(seed: int) -> Iterator[BitDiff]:
        rng = random.Random(seed)
        m, n, k, dtype, precision, layout = _random_problem(rng)
        batch = rng.choice((3, 37, 1000, 65536))
        a, b = operands(batch, m, n, k, dtype, layout, device, seed, rng.choice(DATA_KINDS))
        at = rng.randrange(batch - 1)
        alone = _products(a[at : at + 2], b[at : at + 2], precision)
        for way, whole in _products(a, b, precision).items():
            yield compare_bits(alone[way], whole[at : at + 2])

    return _on_gpu(name, device) or run_trials(name, trials, trial, covered="batch 2 in 3 .. 65536, any position")


def _check_runs(device: torch.device, trials: int) -> CheckResult:
    name = "run to run"

    def trial(seed: int) -> Iterator[BitDiff]:
        rng = random.Random(seed)
        m, n, k, dtype, precision, layout = _random_problem(rng)
        a, b = operands(4096, m, n, k, dtype, layout, device, seed)
        first = _products(a, b, precision)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):  # other work on the chip at the same time
            load = torch.randn(4096, 4096, device=device)
            for _ in range(8):
                load = torch.sin(load @ load)
        for _ in range(3):
            for way, again in _products(a, b, precision).items():
                yield compare_bits(again, first[way])
        torch.cuda.synchronize(device)

    return _on_gpu(name, device) or run_trials(name, trials, trial, covered="4 runs, other work beside")


def _check_configs(device: torch.device, trials: int) -> CheckResult:
    name = "any tile"

    def trial(seed: int) -> Iterator[BitDiff]:
        rng = random.Random(seed)
        m, n, k, dtype, precision, layout = _random_problem(rng)
        a, b = operands(64, m, n, k, dtype, layout, device, seed, rng.choice(DATA_KINDS))
        problem = op.describe(a, b, precision)
        canonical = _products(a, b, precision)
        for kernel in configs.KERNELS:
            configurations = variants(configs.choose(problem, kernel))
            others = [config for config in configurations if not configs.illegal(problem, config)]
            for config in rng.sample(others, min(2, len(others))):
                yield compare_bits(_product(a, b, problem, config), canonical[kernel])
        if precision == "ieee" and tables.measured("tiny", problem.arch):  # there the gate may change kernels
            yield compare_bits(canonical["registers"], canonical["dot"])

    return _on_gpu(name, device) or run_trials(
        name, trials, trial, covered="two other tiles of each kernel; in ieee, both kernels"
    )


def variants(config: Config) -> list[Config]:
    """Configurations of the same kernel that must give the same bits."""
    if isinstance(config, DotConfig):
        return [
            replace(config, block_m=bm, block_n=bn, block_k=bk, num_warps=warps, num_stages=stages)
            for bm in (16, 32)
            for bn in (8, 16, 32)
            for bk in (16, 32, 64)
            for warps, stages in ((1, 1), (2, 3), (4, 2))
        ]
    assert isinstance(config, RegistersConfig)
    return [
        replace(config, rows=rows, cols=cols, vec=vec, b_vec=b_vec, unroll=unroll, num_warps=warps)
        for rows in (1, 2, 4)
        for cols in (1, 2)
        for vec, b_vec in ((1, 1), (config.vec, config.b_vec))
        for unroll in (4, 8)
        for warps in (1, 4)
    ]


def _check_accuracy(device: torch.device, trials: int) -> CheckResult:
    name = "accuracy"

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        m, n, k, dtype, precision, layout = _random_problem(rng)
        a, b = operands(50, m, n, k, dtype, layout, device, seed, rng.choice(DATA_KINDS))
        _accuracy(a, b, precision)

    return _on_gpu(name, device) or run_trials(
        name, trials, trial, covered="twice torch's error and one ulp, against fp64"
    )


def _accuracy(a: torch.Tensor, b: torch.Tensor, precision: str) -> tuple[float, float]:
    """The largest errors of isogemm and of torch, in units of |A| |B|, isogemm's within its bound.

    The product is of the whole batch, on poisoned memory; compared are its first and last matrices.
    """
    with poisoned_allocations():
        whole = bmm(a, b, precision=precision or None)
    errors = []
    for part in (slice(0, 128), slice(-128, None)):
        x, y, ours = a[part], b[part], whole[part]
        # cuBLAS takes TF32 or not as it likes; the exact product of rounded operands is TF32's own error.
        if precision == "tf32":
            torchs = reference.bmm(round_to_tf32(x), round_to_tf32(y)).float()
        else:
            with of_cuda_products(precision or None):
                torchs = torch.bmm(x, y)
        found = assert_no_worse_than_torch(ours, torchs, reference.bmm(x, y), scale=reference.bmm_scale(x, y))
        errors.append((found.actual.max_scaled, found.torch.max_scaled))
    return max(ours for ours, _ in errors), max(torchs for _, torchs in errors)


def _on_gpu(name: str, device: torch.device) -> CheckResult | None:
    reason = "" if device.type == "cuda" else "not on a GPU: torch.bmm serves, which promises nothing about bits"
    reason = reason or configs.usable(devices.facts(device).arch)
    return skip(name, reason) if reason else None


# bench


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    if quick:
        points = ((12, 12, 64), (42, 42, 8), (8, 8, 8))
        return [_case(256, *shape, "float32", "ieee", "nn", "cold") for shape in points]
    chosen = [
        _case(batch, *shape, dtype, precision, "nn", cache)
        for dtype, precision in NUMBERS
        for cache in (("cold", "hot") if precision == "ieee" else ("cold",))
        for shape in SHAPES
        for batch in BATCHES
    ]
    return [*chosen, *_random_cases()]


def _random_cases() -> Iterator[Case]:
    rng = random.Random(2)
    for index in range(RANDOM_SHAPES):
        dtype, precision = NUMBERS[index % len(NUMBERS)]
        m, n, k = (rng.randint(1, configs.MAX_SIZE) for _ in range(3))
        batch = rng.choice((300, 3000, 30000))
        yield _case(batch, m, n, k, dtype, precision, rng.choice(("nn", "nt", "tn")), "cold", name="bmm random")


def _case(
    batch: int, m: int, n: int, k: int, dtype: str, precision: str, layout: str, cache: str, name: str = "bmm"
) -> Case:
    element = getattr(torch, dtype)
    size = element.itemsize * (m * k + k * n + m * n) * batch
    params: dict[str, int | str] = {"batch": batch, "m": m, "n": n, "k": k, "dtype": dtype}
    if precision:
        params["precision"] = precision
    params.update(layout=layout, cache=cache)

    def build(device: torch.device) -> CaseRun:
        sets = timer.rotations(size, device, most=512) if cache == "cold" else 1
        pairs = list(_rotated(sets, batch, m, n, k, element, layout, device))

        if device.type == "cuda":  # both variants follow torch's setting, as a user's calls do
            torch.backends.cuda.matmul.fp32_precision = precision or "ieee"

        def check() -> dict[str, float]:
            ours, torchs = _accuracy(*pairs[0], precision)
            return {"isogemm": ours, "torch": torchs}

        with dispatch_log() as log:
            bmm(*pairs[0])
        functions: dict[str, Callable[..., torch.Tensor]] = {"isogemm": bmm, "torch": torch.bmm}
        thunks = {name: [_thunk(function, a, b) for a, b in pairs] for name, function in functions.items()}
        return CaseRun(thunks, check, {"path": log[0].path, "config": log[0].config})

    return Case("tiny", name, params, 2.0 * batch * m * n * k, float(size), build)


def _rotated(
    sets: int, batch: int, m: int, n: int, k: int, dtype: torch.dtype, layout: str, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Operand pairs of their own memory, cut from one random buffer at 256-byte steps."""
    a_size, b_size = (-(-batch * size // 128) * 128 for size in (m * k, k * n))
    buffer = torch.randn(sets * (a_size + b_size), device=device, dtype=dtype)
    for at in range(0, buffer.numel(), a_size + b_size):
        a, b = buffer[at : at + batch * m * k], buffer[at + a_size : at + a_size + batch * k * n]
        yield _view(a, batch, m, k, layout[0]), _view(b, batch, k, n, layout[1])


def _view(x: torch.Tensor, batch: int, rows: int, columns: int, letter: str) -> torch.Tensor:
    return x.view(batch, columns, rows).transpose(1, 2) if letter == "t" else x.view(batch, rows, columns)


# demo


def demo(device: torch.device) -> DemoResult:
    """Attention scores of a small model: 1024 products of 12 x 64 and 64 x 12."""
    batch, precision = 1024, "ieee"
    a, b = operands(batch, 12, 12, 64, torch.float32, "nn", device, seed=0)
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "isogemm": lambda a, b: bmm(a, b, precision=precision),
        "torch": torch.bmm,
    }
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = precision

    def matrices_of(function: Callable[..., torch.Tensor]) -> demos.Compute:
        return lambda matrices: function(a[matrices], b[matrices])

    def errors() -> dict[str, float]:
        ours, torchs = _accuracy(a, b, precision)
        return {"isogemm": ours, "torch": torchs}

    with dispatch_log() as log:
        functions["isogemm"](a, b)
    bits: Bits | str = "torch.bmm serves this call, and promises nothing about bits"
    if device.type != "cuda":
        bits = "on a CPU isogemm.bmm is torch.bmm, which promises nothing about bits"
    elif log[0].path == "tiny":  # alone, a matrix has torch's bits
        compute = {name: matrices_of(function) for name, function in functions.items()}
        bits = demos.count_changes(compute, "matrices", batch=batch, sizes=(2, 7))
    return demos.result(
        "bmm [1024, 12, 64] x [1024, 64, 12], fp32 ieee",
        bits,
        errors,
        "|A| |B|",
        {name: _thunk(function, a, b) for name, function in functions.items()},
        "torch.bmm",
        device,
    )


def _thunk(function: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> Thunk:
    return lambda: function(a, b)


FAMILY = Family(
    name="tiny",
    summary="strided-batched GEMM of matrices up to 64, one launch",
    usability=usability,
    checks=(
        Check("batch invariance", "a matrix has the same bits in any batch, at any position", _check_batch),
        Check("run to run", "a call has the same bits every time", _check_runs),
        Check("any tile", "every configuration of a kernel gives the same bits", _check_configs),
        Check("accuracy", "the error is at most twice torch's and one ulp", _check_accuracy),
    ),
    cases=cases,
    demo=demo,
    view=FamilyView("tiny", "Tiny batched GEMM", ("m", "n", "k")),
)
