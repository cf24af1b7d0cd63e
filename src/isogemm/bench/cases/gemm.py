"""Cases and demo of the gemm family."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from isogemm.bench import demo as demos
from isogemm.bench import timer
from isogemm.bench.cases import (
    Case,
    CaseRun,
    Thunk,
    finite_results,
    first,
    make_params,
    rotated,
    served_by,
    use_precision,
)
from isogemm.bench.demo import DemoResult
from isogemm.bench.views import FamilyView, number_type
from isogemm.gemm import op
from isogemm.gemm.api import linear, warmup
from isogemm.verify.gemm import assert_accurate
from isogemm.verify.parallel import run_in_processes
from isogemm.verify.trials import sampled

VIEW = FamilyView("gemm", "Invariant GEMM", ("n", "k"), column="m")

WEIGHTS = (  # n, k
    (12288, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (32000, 4096), (128256, 4096), (1024, 4096),
    (6144, 4096), (2048, 2048), (5120, 5120), (8192, 8192),
)  # fmt: skip
OTHER_WEIGHTS = (  # of public models, none of them among the tuned ones
    (1536, 8960), (8960, 1536), (2048, 11008), (11008, 2048), (3584, 18944), (18944, 3584), (5120, 13824),
    (13824, 5120), (10240, 8192), (896, 4864), (4864, 896), (576, 1536), (1536, 576), (49152, 576), (2304, 2048),
    (3072, 8192), (8192, 3072), (4608, 3584), (2560, 10240), (3840, 15360), (7168, 2048), (2048, 7168), (1280, 5120),
    (1600, 6400), (50304, 768), (17920, 5120), (5120, 17920), (12800, 4096), (4096, 12800), (6912, 2560), (2560, 6912),
    (960, 2560), (2560, 960), (7168, 18432), (1536, 7168), (9728, 2560), (8192, 5120), (14336, 3584), (4544, 18176),
    (3584, 14336),
)  # fmt: skip
RAGGED_WEIGHTS = ((51866, 1280),)  # whose results have rows of no multiple of 16 bytes
OTHER_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BETWEEN = (24, 200, 777, 1500, 3000)  # tokens of a third of them
FP32_WEIGHTS = ((1024, 1024), (2048, 2048), (4096, 4096), (3000, 2000), (14336, 4096))  # for ieee's place, tf32x3
TOKENS = tuple(2**i for i in range(14))  # 1 .. 8192
THINNED = (1, 16, 64, 256, 1024, 4096)  # of the other dtypes: every other one of TOKENS, about
IEEE_WEIGHTS = ((4096, 4096), (1024, 4096), (4096, 14336), (8192, 8192))  # few: ieee calls are slow
TRAINING = (256, 512, 1024, 2048, 4096, 8192)
CPU_WEIGHTS = ((1024, 1024), (4096, 1024), (1024, 4096), (1000, 1000))
CPU_TOKENS = (1, 8, 128, 512)
MICRO_BATCH = 8192

Product = Callable[[Tensor, Tensor], Tensor]
Precise = Callable[[Tensor, Tensor, str | None], Tensor]  # with isogemm's precision; None for torch's


@dataclass(frozen=True)
class _Operation:
    """An operation of a layer with an [n, k] weight on m tokens, and the matrix product that it is."""

    shapes: Callable[[int, int, int], tuple[tuple[int, int], tuple[int, int]]]  # (m, n, k) -> its two operands'
    product: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # operands -> [M, K], [K, N]
    isogemm: Precise
    with_grad: bool = False


_FORWARD = _Operation(
    lambda m, n, k: ((m, k), (n, k)), lambda x, weight: (x, weight.t()),
    lambda x, weight, precision: linear(x, weight, precision=precision),
)  # fmt: skip
OPERATIONS = {
    "linear": _FORWARD,
    "linear grad": replace(_FORWARD, with_grad=True),  # the forward of training
    "dX": _Operation(
        lambda m, n, k: ((m, n), (n, k)), lambda grad, weight: (grad, weight),
        lambda grad, weight, precision: op.product(grad, weight, None, None, precision),
    ),
    "dW": _Operation(
        lambda m, n, k: ((m, n), (m, k)), lambda grad, x: (grad.t(), x),
        lambda grad, x, precision: op.weight_grad(grad, x, None, x.dtype, precision),
    ),
}  # fmt: skip
OTHER = " other"  # an operation on OTHER_WEIGHTS
RAGGED = " ragged"  # on RAGGED_WEIGHTS
OPERATIONS |= {name + of: OPERATIONS[name] for name in ("linear", "dX", "dW") for of in (OTHER, RAGGED)}


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
        *_grid("linear" + OTHER, "bfloat16", "", OTHER_WEIGHTS, OTHER_TOKENS),
        *_grid("linear" + OTHER, "bfloat16", "", OTHER_WEIGHTS[:39:3], BETWEEN),
        *_grid("dX" + OTHER, "bfloat16", "", OTHER_WEIGHTS, THINNED[-3:]),
        *_grid("dW" + OTHER, "bfloat16", "", OTHER_WEIGHTS, THINNED[-3:]),
        *_grid("linear" + RAGGED, "bfloat16", "", RAGGED_WEIGHTS, (*OTHER_TOKENS, *BETWEEN)),
        *_grid("dX" + RAGGED, "bfloat16", "", RAGGED_WEIGHTS, THINNED[-3:]),
        *_grid("dW" + RAGGED, "bfloat16", "", RAGGED_WEIGHTS, THINNED[-3:]),
        *_grid("linear grad", "bfloat16", "", WEIGHTS[1:2], (1, 64, 1024)),
        *_grid("dX", "bfloat16", "", WEIGHTS, TRAINING),
        *_grid("dW", "bfloat16", "", WEIGHTS, TRAINING),
        *(_main_grad_case(tokens, 1024, 1024) for tokens in (65536, 524288)),
        *(_main_grad_case(65536, n, k) for n, k in ((2048, 2048), (4096, 1024), (4096, 4096), (1536, 8960))),
        *_grid("linear", "float32", "tf32", WEIGHTS, THINNED),
        *_grid("linear", "float16", "", WEIGHTS, THINNED),
        *_grid("dX", "float16", "", WEIGHTS, THINNED[-3:]),
        *_grid("dW", "float16", "", WEIGHTS, THINNED[-3:]),
        *_grid("linear", "float32", "ieee", IEEE_WEIGHTS, THINNED),
        *_grid("linear", "float32", "tf32x3", FP32_WEIGHTS, (64, 1024, 4096)),
        *_grid("dX", "float32", "tf32x3", FP32_WEIGHTS[:4], (1024, 4096)),
        *_grid("dW", "float32", "tf32x3", FP32_WEIGHTS[:4], (1024, 4096)),
    ]


def compile_cases(device: torch.device, cases: Sequence[Case]) -> None:
    run_in_processes(_compile, device, list(_weights(cases).items()))


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

    def build(device: torch.device) -> CaseRun:
        asked = "tf32x3" if precision == "tf32x3" else None  # torch has none like it: its ieee is beside it
        use_precision("ieee" if asked else precision, device)

        def isogemm(left: Tensor, right: Tensor) -> Tensor:
            return operation.isogemm(left, right, asked)

        def operand(shape: tuple[int, int]) -> Tensor:
            return torch.randn(shape, dtype=element, device=device, requires_grad=operation.with_grad)

        left, right = operation.shapes(m, n, k)
        sets = [(operand(left), operand(right)) for _ in range(timer.rotations(size, device, most_sets))]
        products = [operation.product(*operands) for operands in sets]
        variants = rotated({"isogemm": isogemm}, sets) | rotated({"torch": torch.mm}, products)
        if name == "linear" and dtype == "bfloat16" and device.type == "cuda":
            from isogemm.bench import fixed_tile

            variants |= rotated({"fixed tile": fixed_tile.mm}, products)

        def check() -> dict[str, float]:
            a, b = products[0]
            return _errors(first(variants), a.detach(), b.detach(), precision)

        info = served_by(variants["isogemm"][0])
        return CaseRun(
            variants, check, info, cpu_time=not name.endswith((OTHER, RAGGED))
        )  # those without it have the same calls

    return Case("gemm", name, make_params(dtype, precision, m=m, n=n, k=k), 2.0 * m * n * k, size, build)


def _errors(thunks: Mapping[str, Thunk], a: Tensor, b: Tensor, precision: str) -> dict[str, float]:
    """The largest error of each variant in units of |A| |B|, within its bound; of 64 rows and 1024 columns at most."""
    rng = random.Random(0)
    rows, columns = (sampled(size, most, rng, a.device) for size, most in ((len(a), 64), (b.shape[1], 1024)))
    left, right = a[rows], b[:, columns]
    found = {name: whole[rows][:, columns] for name, whole in finite_results(thunks)}
    errors = {}
    for name, result in found.items():
        torchs = None if precision == "tf32" and name != "torch" else found["torch"]
        errors[name] = assert_accurate(result, left, right, precision, torchs=torchs, what=name)
    return errors


def _main_grad_case(tokens: int, n: int, k: int, micro_batch: int = MICRO_BATCH) -> Case:
    """A bfloat16 weight's gradient, accumulated into fp32 over micro-batches; the error is the rms of the total."""
    params = make_params("bfloat16", m=micro_batch, n=n, k=k) | {"tokens": tokens}
    size = float(2 * tokens * (n + k) + 8 * n * k * (tokens // micro_batch))

    def build(device: torch.device) -> CaseRun:
        grad, x = (torch.randn((tokens, width), dtype=torch.bfloat16, device=device) for width in (n, k))
        parts = list(zip(torch.split(grad, micro_batch), torch.split(x, micro_batch), strict=True))
        total = torch.zeros((n, k), device=device)
        ways = {"isogemm": _accumulate, "torch": _torch_accumulate}

        def added(add: Callable[[Tensor, Tensor, Tensor], object]) -> Tensor:
            for part in parts:
                add(total, *part)
            return total

        def check() -> dict[str, float]:
            exact = torch.zeros((n, k), dtype=torch.float64, device=device)
            for one, other in parts:
                exact += one.double().t() @ other.double()
            errors = {}
            for name, way in ways.items():
                total.zero_()
                errors[name] = float((added(way).double() - exact).norm() / exact.norm())
            ours, most = errors["isogemm"], 2 * errors["torch"]
            if not ours <= most:
                raise AssertionError(f"error {ours:.2e}, expected at most twice torch's, {most:.2e}")
            return errors

        info = served_by(partial(_accumulate, total, *parts[0]))
        return CaseRun({name: [partial(added, way)] for name, way in ways.items()}, check, info)

    return Case("gemm", "main_grad", params, 2.0 * tokens * n * k, size, build)


def _accumulate(total: Tensor, grad: Tensor, x: Tensor) -> None:
    op.weight_grad(grad, x, total, torch.float32, None)


def _torch_accumulate(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Accumulate with torch: by one addmm call on a GPU, in fp32 elsewhere."""
    if total.is_cuda:
        torch.addmm(total, grad.t(), x, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(grad.t().float(), x.float())


def demo(device: torch.device) -> DemoResult:
    """A linear layer on 64 rows."""
    size, dtype, precision = (4096, "bfloat16", "") if device.type == "cuda" else (1024, "float32", "ieee")
    generator = torch.Generator(device).manual_seed(0)
    element = getattr(torch, dtype)
    x, weight = (torch.randn((rows, size), dtype=element, device=device, generator=generator) for rows in (64, size))
    layers: dict[str, Product] = {"isogemm": linear, "torch": torch.nn.functional.linear}
    thunks: dict[str, Thunk] = {name: partial(layer, x, weight) for name, layer in layers.items()}
    title = f"linear [64, {size}] x [{size}, {size}], {number_type(make_params(dtype, precision))}"
    bits = demos.count_changes(layers, lambda layer, rows: layer(x[rows], weight), "rows", batch=64, sizes=(1, 3))
    errors = partial(_errors, thunks, x, weight.t(), precision)
    return demos.result(title, bits, errors, "|x| |weight|", thunks, "F.linear", device)
