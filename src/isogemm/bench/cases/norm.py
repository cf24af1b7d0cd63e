"""Cases and demo of the norm family: norms, softmaxes and embedding, forward alone and with the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from isogemm.bench import demo as demos
from isogemm.bench import timer
from isogemm.bench.cases import Case, CaseRun, Thunk, make_params, on_poison, rotated, served_by
from isogemm.bench.demo import DemoResult
from isogemm.bench.views import FamilyView, number_type
from isogemm.norm.api import embedding, layer_norm, log_softmax, rms_norm, softmax
from isogemm.verify.parallel import run_in_processes
from isogemm.verify.trials import assert_step_accurate, training_step

VIEW = FamilyView("norm", "Norms and softmaxes", ("rows", "d"), column="", against=True)

STEP = " step"  # an operation with its backward
SHAPES = ((8192, 4096), (16384, 4096), (8192, 8192), (32768, 2048), (4096, 16384))  # rows, columns
VOCABULARIES = ((4096, 32768), (2048, 128256), (2048, 151936), (8192, 50304))  # of the softmaxes
OTHER_SHAPES = ((5000, 3072), (300, 1280), (7, 896), (1, 4096), (64, 8192), (65536, 128), (2048, 50257))  # untuned
EMBEDDINGS = ((8192, 4096, 128256), (8192, 1024, 50304))  # tokens, columns, vocabulary
QUICK = ((4096, 4096), (128, 2048))
CPU_SHAPES = ((512, 1024), (64, 4096))

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class _Operation:
    """An operation on x [rows, d] and further operands, by isogemm and by torch."""

    isogemm: Function
    in_torch: Function
    torch_call: str
    further: int = 0  # operands [d]
    residual: bool = False

    def operands(self, rows: int, d: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        shapes = [(rows, d)] * (1 + self.residual) + [(d,)] * self.further
        return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]

    def moved(self, step: bool) -> int:
        """Passes over [rows, d]: of x and the result, of a residual, the sum and its addition, of the gradients."""
        return (11 if step else 7) if self.residual else (5 if step else 2)


def _residual_in_torch(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    summed = x + residual
    return F.rms_norm(summed, summed.shape[-1:], weight, 1e-6) + summed


def _residual(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Both results are used, as a model uses them."""
    y, summed = rms_norm(x, weight, residual=residual)
    return y + summed


OPERATIONS = {
    "rms_norm": _Operation(
        rms_norm, lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6), "F.rms_norm", further=1
    ),
    "layer_norm": _Operation(
        layer_norm, lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias), "F.layer_norm", further=2
    ),
    "softmax": _Operation(softmax, lambda x: F.softmax(x, -1), "F.softmax"),
    "log_softmax": _Operation(log_softmax, lambda x: F.log_softmax(x, -1), "F.log_softmax"),
}
RESIDUAL = "rms_norm residual"  # and one more addition: the result plus the sum
ALL = OPERATIONS | {
    RESIDUAL: _Operation(_residual, _residual_in_torch, "x + residual, F.rms_norm", further=1, residual=True)
}


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    if quick or device.type != "cuda":
        shapes = QUICK if device.type == "cuda" else CPU_SHAPES
        return [_case(name + of, *shape, "bfloat16", most=8) for name in ALL for of in ("", STEP) for shape in shapes]
    return [
        *_grid(OPERATIONS, SHAPES, compiled=True),
        *_grid(("softmax", "log_softmax"), VOCABULARIES, compiled=True),
        *_grid((RESIDUAL,), SHAPES[:2], compiled=True),
        *_grid(OPERATIONS, OTHER_SHAPES),
        *(_embedding_case(*each, "bfloat16") for each in EMBEDDINGS),
        *_grid(OPERATIONS, SHAPES[:1], "float32"),
    ]


def _grid(
    names: Sequence[str] | Mapping[str, _Operation], shapes: Sequence[tuple[int, int]], dtype: str = "bfloat16", *,
    compiled: bool = False,
) -> Iterator[Case]:  # fmt: skip
    return (
        _case(name + of, *shape, dtype, compiled=compiled) for name in names for of in ("", STEP) for shape in shapes
    )


def compile_cases(device: torch.device, cases: Sequence[Case]) -> None:
    run_in_processes(_compile, device, [(case.op, dict(case.params)) for case in cases if case.op != "embedding step"])


def _compile(device: str, job: tuple[str, dict[str, int | str]]) -> None:
    name, params = job
    operation = ALL[name.removesuffix(STEP)]
    rows, d = int(params["rows"]), int(params["d"])
    operands = operation.operands(rows, d, getattr(torch, str(params["dtype"])), torch.device(device))
    if name.endswith(STEP):
        training_step(operation.isogemm, operands, torch.zeros_like(operands[0]))
    else:
        operation.isogemm(*operands)


def _case(name: str, rows: int, d: int, dtype: str, *, compiled: bool = False, most: int = 2048) -> Case:
    operation, element, step = ALL[name.removesuffix(STEP)], getattr(torch, dtype), name.endswith(STEP)
    size = float(element.itemsize * rows * d * operation.moved(step))

    def build(device: torch.device) -> CaseRun:
        functions = {"isogemm": operation.isogemm, "torch": operation.in_torch}
        info = {"torch call": operation.torch_call}
        if compiled and device.type == "cuda":
            torch.compiler.reset()
            functions["compiled"] = torch.compile(operation.in_torch, dynamic=False, fullgraph=True)
        sets = [operation.operands(rows, d, element, device) for _ in range(timer.rotations(size, device, most))]
        grad = torch.randn((rows, d), dtype=element, device=device)
        variants = rotated(functions, sets)
        if step:
            variants = {
                way: [_first(function, operands, grad) for operands in sets] for way, function in functions.items()
            }
        if "compiled" in variants:
            variants["compiled"][0]()  # compiles: not while allocations are poisoned
        info |= served_by(variants["isogemm"][0])
        return CaseRun(variants, lambda: _errors(functions, sets[0], grad, step), info)

    return Case("norm", name, make_params(dtype, rows=rows, d=d), 0.0, size, build)


def _first(function: Function, operands: Sequence[Tensor], grad: Tensor) -> Thunk:
    return lambda: training_step(function, operands, grad)[0]


def _errors(
    functions: Mapping[str, Function], operands: Sequence[Tensor], grad: Tensor, step: bool
) -> dict[str, float]:
    """The largest error of the results of each variant, relative to their norms; at most twice torch's and an ulp."""

    def results(function: Function, operands: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
        return training_step(function, operands, grad) if step else [function(*operands)]

    exact = results(functions["torch"], [each.double() for each in operands], grad.double())
    found = {name: on_poison(name, partial(results, each, operands, grad)) for name, each in functions.items()}
    names = ["the result", *(f"gradient {index}" for index in range(len(exact) - 1))]
    return {
        name: assert_step_accurate(
            each, [(2, found["torch"] if name == "isogemm" else each)], exact, names, ulps=(1, 0), least=0.5
        )
        for name, each in found.items()
    }


def _embedding_case(tokens: int, d: int, vocabulary: int, dtype: str) -> Case:
    """Forward and backward; half of the tokens are of a hundred ids."""
    element = getattr(torch, dtype)
    size = float(element.itemsize * d * (3 * tokens + vocabulary))

    def build(device: torch.device) -> CaseRun:
        generator = torch.Generator(device).manual_seed(0)
        ids = torch.randint(vocabulary, (tokens,), device=device, generator=generator)
        ids[::2] = torch.randint(100, (tokens - tokens // 2,), device=device, generator=generator)[: len(ids[::2])]
        weight, grad = (torch.randn((rows, d), dtype=element, device=device) for rows in (vocabulary, tokens))
        functions = {"isogemm": partial(embedding, ids), "torch": partial(F.embedding, ids)}
        variants = {name: [_first(function, [weight], grad)] for name, function in functions.items()}
        return CaseRun(variants, lambda: _errors(functions, [weight], grad, True), served_by(variants["isogemm"][0]))

    params = make_params(dtype, rows=tokens, d=d) | {"vocabulary": vocabulary}
    return Case("norm", "embedding step", params, 0.0, size, build)


def demo(device: torch.device) -> DemoResult:
    """The log-softmax of rows as long as a vocabulary."""
    (rows, d), dtype = ((512, 128256), "bfloat16") if device.type == "cuda" else ((64, 5000), "float32")
    x = torch.randn(
        (rows, d), dtype=getattr(torch, dtype), device=device, generator=torch.Generator(device).manual_seed(0)
    )
    functions: dict[str, Function] = {"isogemm": log_softmax, "torch": ALL["log_softmax"].in_torch}
    thunks: dict[str, Thunk] = {name: partial(function, x) for name, function in functions.items()}
    title = f"log_softmax [{rows}, {d}], {number_type(make_params(dtype))}"
    bits = demos.count_changes(functions, lambda function, part: function(x[part]), "rows", batch=rows, sizes=(1, 3))
    errors = partial(_errors, functions, [x], torch.zeros_like(x), False)
    return demos.result(title, bits, errors, "the result", thunks, "F.log_softmax", device)
