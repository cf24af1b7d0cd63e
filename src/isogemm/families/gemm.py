"""The gemm family's entry: its cases and its demo. Its checks are in `gemm_checks`."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from isogemm.bench import timer
from isogemm.bench.cases import Case, CaseRun, Thunk
from isogemm.bench.demo import DemoResult
from isogemm.bench.views import FamilyView, number_type
from isogemm.core import device as devices
from isogemm.core import tables
from isogemm.core.dispatch import dispatch_log
from isogemm.families import demos
from isogemm.families.ahead import run_ahead
from isogemm.families.base import Family, Usability
from isogemm.families.gemm_checks import CHECKS, ahead_of_checks, assert_accurate
from isogemm.families.trials import sampled
from isogemm.gemm import configs, op
from isogemm.gemm.api import linear, warmup
from isogemm.gemm.configs import Problem
from isogemm.gemm.problem import dtype_name
from isogemm.testing.poison import poisoned_allocations

WEIGHTS = (  # n, k
    (12288, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (32000, 4096), (128256, 4096), (1024, 4096),
    (6144, 4096), (2048, 2048), (5120, 5120), (8192, 8192),
)  # fmt: skip
OTHER_WEIGHTS = (  # of public models, none of them among the tuned ones
    (1536, 8960), (8960, 1536), (2048, 11008), (11008, 2048), (3584, 18944), (18944, 3584), (5120, 13824),
    (13824, 5120), (10240, 8192), (896, 4864), (4864, 896), (576, 1536), (1536, 576), (49152, 576), (2304, 2048),
    (3072, 8192), (8192, 3072), (4608, 3584), (2560, 10240), (3840, 15360), (7168, 2048), (2048, 7168), (1280, 5120),
    (1600, 6400), (50304, 768),
)  # fmt: skip
OTHER_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
TOKENS = tuple(2**i for i in range(14))  # 1 .. 8192
THINNED = (1, 16, 64, 256, 1024, 4096)  # of the other dtypes: every other one of TOKENS, about
IEEE_WEIGHTS = ((4096, 4096), (1024, 4096), (4096, 14336), (8192, 8192))  # its calls are long
TRAINING = (256, 512, 1024, 2048, 4096, 8192)
CPU_WEIGHTS = ((1024, 1024), (4096, 1024), (1024, 4096), (1000, 1000))
CPU_TOKENS = (1, 8, 128, 512)
MICRO_BATCH = 8192

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def usability(device: torch.device) -> Sequence[Usability]:
    if device.type != "cuda":
        return [Usability(True, "gemm/cpu", "sums in one order whatever the batch; any precision is computed as ieee")]
    arch = devices.facts(device).arch
    reason = configs.usable(arch)
    if not reason and importlib.util.find_spec("triton") is None:
        reason = "Triton is not installed"
    tiles = f"tiles measured on {arch}"
    if not tables.measured("gemm", arch):
        known = ", ".join(tables.architectures("gemm"))
        tiles = f"safe default tiles: nothing was measured on {arch}, only on {known}"
    plain = Problem(4096, 4096, 4096, "bfloat16", "bfloat16", "ieee", (4096, 1), (1, 4096), (4096, 1), arch=arch)
    absent = "" if any(config.kernel == "tma" for config in configs.candidates(plain)) else f"{arch} has no TMA"
    return [
        Usability(not (reason or absent), "gemm/tma", reason or absent or f"compiled for {arch}; {tiles}"),
        Usability(not reason, "gemm/pointer", reason or f"compiled for {arch}; {tiles}"),
    ]


# bench


@dataclass(frozen=True)
class _Operation:
    """An operation of a layer with an [n, k] weight on m tokens, and the product that it is."""

    shapes: Callable[[int, int, int], tuple[tuple[int, int], tuple[int, int]]]  # (m, n, k) -> its two operands'
    product: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # operands -> [M, K], [K, N]
    isogemm: Product
    with_grad: bool = False


def _product(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return op.product(grad, weight, None, None, None)


def _weight_grad(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return op.weight_grad(grad, x, None, x.dtype, None)


_FORWARD = _Operation(lambda m, n, k: ((m, k), (n, k)), lambda x, weight: (x, weight.t()), linear)
OPERATIONS = {
    "linear": _FORWARD,
    "linear other": _FORWARD,  # on OTHER_WEIGHTS
    "linear grad": _Operation(_FORWARD.shapes, _FORWARD.product, linear, with_grad=True),  # the forward of training
    "dX": _Operation(lambda m, n, k: ((m, n), (n, k)), lambda grad, weight: (grad, weight), _product),
    "dW": _Operation(lambda m, n, k: ((m, n), (m, k)), lambda grad, x: (grad.t(), x), _weight_grad),
}


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    if quick:
        (n, k), tokens = ((4096, 4096), (1, 64, 1024)) if device.type == "cuda" else ((512, 512), (1, 64))
        points = [("linear", m, number) for number in (("float32", "ieee"), ("bfloat16", "")) for m in tokens]
        points += [(name, tokens[-1], ("bfloat16", "")) for name in ("dX", "dW")]
        return [_case(name, m, n, k, *number, most_sets=8) for name, m, number in points]
    if device.type != "cuda":
        return [
            case
            for dtype, precision in (("float32", "ieee"), ("bfloat16", ""))
            for name in ("linear", "dX", "dW")
            for case in _grid(name, dtype, precision, CPU_WEIGHTS, CPU_TOKENS if name == "linear" else CPU_TOKENS[-2:])
        ]
    return [
        *_grid("linear", "bfloat16", "", WEIGHTS, TOKENS),
        *_grid("linear other", "bfloat16", "", OTHER_WEIGHTS, OTHER_TOKENS),
        *_grid("linear grad", "bfloat16", "", WEIGHTS[1:2], (1, 64, 1024)),
        *_grid("dX", "bfloat16", "", WEIGHTS, TRAINING),
        *_grid("dW", "bfloat16", "", WEIGHTS, TRAINING),
        *(_main_grad_case(tokens, 1024, 1024) for tokens in (65536, 524288)),
        *_grid("linear", "float32", "tf32", WEIGHTS, THINNED),
        *_grid("linear", "float16", "", WEIGHTS, THINNED),
        *_grid("dX", "float16", "", WEIGHTS, THINNED[-3:]),
        *_grid("dW", "float16", "", WEIGHTS, THINNED[-3:]),
        *_grid("linear", "float32", "ieee", IEEE_WEIGHTS, THINNED),
    ]


def ahead_of_cases(device: torch.device, cases: Sequence[Case]) -> None:
    run_ahead(_compile, device, list(_weights(cases).items()))


def _weights(cases: Sequence[Case]) -> dict[tuple[int, int, str, str], bool]:
    """(n, k, dtype, precision) of the cases, and whether a gradient is among them."""
    found: dict[tuple[int, int, str, str], bool] = {}
    for case in cases:
        n, k, dtype, precision = (case.params.get(name, "") for name in ("n", "k", "dtype", "precision"))
        key = int(n), int(k), str(dtype), str(precision)
        found[key] = found.get(key, False) or not case.op.startswith("linear")
    return found


def _compile(device: str, job: tuple[tuple[int, int, str, str], bool]) -> None:
    (n, k, dtype, precision), backward = job
    like = torch.empty((n, k), dtype=getattr(torch, dtype), device=device)
    warmup(like, tokens=max(TOKENS), backward=backward, precision=precision or None)


def _grid(
    name: str, dtype: str, precision: str, weights: Sequence[tuple[int, int]], tokens: Sequence[int]
) -> Iterator[Case]:
    return (_case(name, m, n, k, dtype, precision) for n, k in weights for m in tokens)


def _case(name: str, m: int, n: int, k: int, dtype: str, precision: str = "", most_sets: int = 2048) -> Case:
    operation, element = OPERATIONS[name], getattr(torch, dtype)
    size = float(element.itemsize * (m * k + n * k + m * n))
    params: dict[str, int | str] = {"m": m, "n": n, "k": k, "dtype": dtype}
    if precision:
        params["precision"] = precision

    def build(device: torch.device) -> CaseRun:
        if device.type == "cuda" and precision:  # both variants follow torch's setting, as a user's calls do
            torch.backends.cuda.matmul.fp32_precision = precision

        def operand(shape: tuple[int, int]) -> torch.Tensor:
            return torch.randn(shape, dtype=element, device=device, requires_grad=operation.with_grad)

        first, second = operation.shapes(m, n, k)
        sets = [(operand(first), operand(second)) for _ in range(timer.rotations(size, device, most_sets))]
        products = [operation.product(*operands) for operands in sets]
        variants = {
            "isogemm": [_thunk(operation.isogemm, *operands) for operands in sets],
            "torch": [_thunk(torch.mm, *views) for views in products],
        }
        if name == "linear" and dtype == "bfloat16" and device.type == "cuda":
            from isogemm.bench import fixed_tile

            variants["fixed tile"] = [_thunk(fixed_tile.mm, *views) for views in products]

        def check() -> dict[str, float]:
            a, b = products[0]
            return _errors(variants, a.detach(), b.detach(), precision)

        with dispatch_log() as log:
            variants["isogemm"][0]()
        info = {"path": log[0].path, "config": log[0].config}
        return CaseRun(variants, check, info, cpu_time=name != "linear other")  # that of "linear": the same calls

    return Case("gemm", name, params, 2.0 * m * n * k, size, build)


def _thunk(function: Product, a: torch.Tensor, b: torch.Tensor) -> Thunk:
    return lambda: function(a, b)


def _errors(variants: dict[str, list[Thunk]], a: torch.Tensor, b: torch.Tensor, precision: str) -> dict[str, float]:
    """The largest error of each variant in units of |A| |B|, within its bound; of 64 rows and 1024 columns at most.

    Every element is written: the outputs are poisoned, and the whole of each must be finite.
    """
    rng = random.Random(0)
    rows, columns = (sampled(size, most, rng, a.device) for size, most in ((len(a), 64), (b.shape[1], 1024)))
    left, right = a[rows], b[:, columns]
    found = {}
    for name, thunks in variants.items():
        with poisoned_allocations():
            whole = thunks[0]().detach()
        if not bool(whole.isfinite().all()):
            raise AssertionError(f"{name}: NaN or Inf in the result of finite operands")
        found[name] = whole[rows][:, columns]
    errors = {}
    for name, result in found.items():
        torchs = None if precision == "tf32" and name != "torch" else found["torch"]
        errors[name] = assert_accurate(result, left, right, precision, torchs=torchs, what=name).max_scaled
    return errors


def _main_grad_case(tokens: int, n: int, k: int, dtype: str = "bfloat16", micro_batch: int = MICRO_BATCH) -> Case:
    """The weight's gradient accumulated into fp32 over micro-batches; its error is that of the whole, in rms."""
    element = getattr(torch, dtype)
    params: dict[str, int | str] = {"m": micro_batch, "n": n, "k": k, "dtype": dtype, "tokens": tokens}
    size = float(element.itemsize * tokens * (n + k) + 8 * n * k * (tokens // micro_batch))

    def build(device: torch.device) -> CaseRun:
        grad, x = (torch.randn((tokens, width), dtype=element, device=device) for width in (n, k))
        parts = list(zip(torch.split(grad, micro_batch), torch.split(x, micro_batch), strict=True))
        total = torch.zeros((n, k), device=device)
        ways = {"isogemm": _accumulate, "torch": _torch_accumulate}

        def thunk(add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> Thunk:
            def run() -> torch.Tensor:
                for part in parts:
                    add(total, *part)
                return total

            return run

        def check() -> dict[str, float]:
            exact = torch.zeros((n, k), dtype=torch.float64, device=device)
            for one, other in parts:
                exact += one.double().t() @ other.double()
            errors = {}
            for name, way in ways.items():
                total.zero_()
                errors[name] = float((thunk(way)().double() - exact).norm() / exact.norm())
            ours, most = errors["isogemm"], 2 * errors["torch"]
            if not ours <= most:
                raise AssertionError(f"error {ours:.2e}, expected at most twice torch's, {most:.2e}")
            return errors

        with dispatch_log() as log:
            _accumulate(total, *parts[0])
        return CaseRun(
            {name: [thunk(way)] for name, way in ways.items()}, check, {"path": log[0].path, "config": log[0].config}
        )

    return Case("gemm", "main_grad", params, 2.0 * tokens * n * k, size, build)


def _accumulate(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
    op.weight_grad(grad, x, total, torch.float32, None)


def _torch_accumulate(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
    """With beta = 1, in the library's own call; elsewhere in fp32."""
    if total.is_cuda:
        torch.addmm(total, grad.t(), x, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(grad.t().float(), x.float())


# demo


def demo(device: torch.device) -> DemoResult:
    """A linear layer on 64 rows."""
    size, dtype, precision = (4096, torch.bfloat16, "") if device.type == "cuda" else (1024, torch.float32, "ieee")
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn((rows, size), dtype=dtype, device=device, generator=generator) for rows in (64, size))
    layers: dict[str, Product] = {"isogemm": linear, "torch": torch.nn.functional.linear}
    thunks = {name: _thunk(layer, x, weight) for name, layer in layers.items()}

    def rows_of(layer: Product) -> demos.Compute:
        return lambda rows: layer(x[rows], weight)

    return demos.result(
        f"linear [64, {size}] x [{size}, {size}], {number_type({'dtype': dtype_name(dtype), 'precision': precision})}",
        demos.count_changes({name: rows_of(layer) for name, layer in layers.items()}, "rows", batch=64, sizes=(1, 3)),
        lambda: _errors({name: [thunk] for name, thunk in thunks.items()}, x, weight.t(), precision),
        "|x| |weight|",
        thunks,
        "F.linear",
        device,
    )


FAMILY = Family(
    name="gemm",
    summary="matmul and linear whose rows have the same bits in any batch, forward and backward",
    usability=usability,
    checks=CHECKS,
    cases=cases,
    demo=demo,
    ahead_of_checks=ahead_of_checks,
    ahead_of_cases=ahead_of_cases,
    view=FamilyView("gemm", "Invariant GEMM", ("n", "k"), column="m"),
)
