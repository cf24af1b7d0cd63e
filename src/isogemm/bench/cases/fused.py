"""Cases and demo of the fused family."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
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
    on_poison,
    rotated,
    served_by,
    use_precision,
)  # fmt: skip
from isogemm.bench.demo import DemoResult
from isogemm.bench.timer import peak_bytes
from isogemm.bench.views import FamilyView, number_type
from isogemm.core import private
from isogemm.epilogues import ACTIVATIONS
from isogemm.fusion.lazy import autofuse
from isogemm.gemm.api import linear, matmul_fused, mlp
from isogemm.verify.fused import Layer, Tokens, assert_accurate
from isogemm.verify.parallel import run_in_processes
from isogemm.verify.trials import assert_step_accurate, sampled, training_step

VIEW = FamilyView("fused", "Fused epilogues", ("m", "n", "k"), column="m", against=True)

SHAPES = (  # m, n, k
    (8192, 4096, 1024), (4096, 4096, 4096), (32768, 1024, 256), (2048, 3072, 768), (512, 3072, 768),
    (16384, 11008, 4096), (64, 4096, 4096), (1, 14336, 4096),
)  # fmt: skip
GATED = ((4096, 14336, 4096), (64, 14336, 4096), (1, 14336, 4096), (8192, 4096, 1024))
BLOCK = (4096, 14336, 4096)  # tokens, hidden, width
DEFERRED = (16, 256, 256)
CPU_SHAPES = ((512, 1024, 1024), (64, 4096, 1024), (1, 4096, 1024))
COMPUTE_BOUND = 800  # FLOP per element moved: twice where an H200's measured ceilings meet, in 16 bits and in TF32
TUNED = "max-autotune-no-cudagraphs"

Forward = Callable[..., Tensor]  # takes x and further operands


@dataclass(frozen=True)
class _Operation:
    """One computation of x [m, k] and further operands, by isogemm, by torch and by others."""

    shapes: Callable[[int, int, int], Sequence[tuple[int, ...]]]  # (m, n, k) -> the operands', x's first
    isogemm: Forward
    torch: Forward
    torch_call: str
    products: int = 1  # number of m x n x k products
    calls: int = 1  # times that the operands are read and the result is written
    peers: Mapping[str, Forward] = field(default_factory=dict)
    layer: Callable[..., Layer] = Layer  # takes the operands without x; not of BLOCKS
    info: Mapping[str, str] = field(default_factory=dict)


def _biased(activation: str, *, on_gpu: bool) -> _Operation:
    act, addmm_activation = ACTIVATIONS[activation].torch, private.find("torch:_addmm_activation")
    peers: dict[str, Forward] = {
        "eager": lambda x, weight, bias: act(F.linear(x, weight, bias)),
        "three ops": lambda x, weight, bias: act(x @ weight.t() + bias),
    }

    def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        result: Tensor = addmm_activation(bias, x, weight.t(), use_gelu=activation != "relu")
        return result

    has_call = activation == "relu" or (activation == "gelu_tanh" and on_gpu)  # on a CPU torch's gelu is erf
    if has_call and addmm_activation is not None:
        in_torch, call = fused, "_addmm_activation"
    else:
        in_torch, call = peers.pop("eager"), f"{activation}(linear)"
    return _Operation(
        lambda m, n, k: ((m, k), (n, k), (n,)),
        lambda x, weight, bias: linear(x, weight, bias, activation=activation),
        in_torch, call, peers=peers, layer=partial(Layer, activation=activation),
    )  # fmt: skip


def _plain_code(x: Tensor, b: Tensor, bias: Tensor) -> list[Tensor]:
    """Keep all results until the end: a deferred tensor that nobody holds is never computed."""
    return [torch.relu(x @ b + bias) for _ in range(4)]


def _deferred(x: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    with autofuse():
        results = _plain_code(x, b, bias)
    return results[-1]


_SWIGLU = _Operation(
    lambda m, n, k: ((m, k), (n, k), (n, k)),
    lambda x, gate, up: linear(x, gate, weight_up=up, activation="swiglu"),
    lambda x, gate, up: F.silu(x @ gate.t()) * (x @ up.t()),
    "silu(mm) * mm",
    products=2,
    layer=lambda gate, up: Layer(gate, weight_up=up, activation="swiglu"),
)
BLOCKS = {  # m tokens, hidden n, width k
    "mlp gelu": _Operation(
        lambda m, n, k: ((m, k), (n, k), (n,), (k, n), (k,)),
        lambda x, w, bias, down, bias_down: mlp(x, w, down, bias=bias, bias_down=bias_down, activation="gelu"),
        lambda x, w, bias, down, bias_down: F.linear(F.gelu(F.linear(x, w, bias)), down, bias_down),
        "eager",
        products=2,
    ),
    "mlp swiglu": _Operation(
        lambda m, n, k: ((m, k), (n, k), (n, k), (k, n)),
        lambda x, gate, up, down: mlp(x, gate, down, weight_up=up, activation="swiglu"),
        lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
        "eager",
        products=3,
    ),
}
_AUTOFUSE = _Operation(
    lambda m, n, k: ((m, k), (k, n), (n,)),
    _deferred,
    lambda x, b, bias: _plain_code(x, b, bias)[-1],
    "4 x relu(x @ b + bias)",
    products=4,
    calls=4,
    peers={"fused calls": lambda x, b, bias: [matmul_fused(x, b, bias=bias, activation="relu") for _ in range(4)][-1]},
    layer=lambda b, bias: Layer(b.mT, bias, activation="relu"),
    info={"deferred": str(4 * 3)},  # operations of _plain_code
)


def operation(name: str, *, on_gpu: bool) -> _Operation:
    """The operation that a case of this name measures."""
    named = {"swiglu": _SWIGLU, "autofuse": _AUTOFUSE, **BLOCKS}
    return named[name] if name in named else _biased(name.split()[-1], on_gpu=on_gpu)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    if quick:
        return list(_quick_cases(device))
    if device.type != "cuda":
        names: tuple[str, ...] = ("relu", "gelu_tanh", "gelu")
        return [
            *_biased_cases(names, CPU_SHAPES, "float32", "ieee"),
            *_biased_cases(names, CPU_SHAPES, "bfloat16"),
            *(_case("swiglu", shape, "bfloat16") for shape in CPU_SHAPES),
            *(_block_case(name, (512, 1024, 256), "float32", "ieee") for name in BLOCKS),
            _autofuse_case("float32", "ieee"),
        ]
    names = ("relu", "gelu_tanh")
    return [  # a run that is cut short has what matters most
        *_biased_cases(names, SHAPES, "bfloat16"),
        *(_case("swiglu", shape, "bfloat16") for shape in GATED),
        *(_block_case(name, BLOCK, "bfloat16") for name in BLOCKS),
        _autofuse_case("bfloat16"),
        *_biased_cases(("gelu",), SHAPES, "bfloat16"),
        *_biased_cases(names, SHAPES, "float16"),
        # Before TF32 is set: Inductor of torch 2.11 does not compile in a process where fp32_precision was.
        # By shape: torch.compile tunes for up to 25 s, and remembers the product for the second activation.
        *(_case(f"compiled {name}", shape, "bfloat16") for shape in SHAPES for name in reversed(names)),
        *_biased_cases(names, SHAPES, "float32", "tf32"),
    ]


def _biased_cases(
    activations: Sequence[str], shapes: Sequence[tuple[int, int, int]], dtype: str, precision: str = "", **how: int
) -> Iterator[Case]:
    return (_case(f"bias {name}", shape, dtype, precision, **how) for name in activations for shape in shapes)


def _quick_cases(device: torch.device) -> Iterator[Case]:
    gpu = device.type == "cuda"
    shapes = ((4096, 4096, 4096), (64, 4096, 4096)) if gpu else ((64, 512, 256), (1, 512, 256))
    for dtype, precision in (("bfloat16", ""), ("float32", "tf32" if gpu else "ieee")):
        yield from _biased_cases(("relu", "gelu_tanh"), shapes, dtype, precision, most_sets=8)
    yield _case("swiglu", shapes[0], "bfloat16", most_sets=8)
    for name in BLOCKS:
        yield _block_case(name, (1024, 4096, 1024) if gpu else (64, 256, 64), "bfloat16", compiled=False)
    yield _autofuse_case("bfloat16") if gpu else _autofuse_case("float32", "ieee")


def compile_cases(device: torch.device, cases: Sequence[Case]) -> None:
    run_in_processes(_compile, device, [(case.op, dict(case.params)) for case in cases])


def _compile(device: str, job: tuple[str, dict[str, int | str]]) -> None:
    name, params = job
    chosen = operation(name, on_gpu=True)
    use_precision(str(params.get("precision", "")), torch.device(device))
    m, n, k = (int(params[name]) for name in ("m", "n", "k"))
    dtype = getattr(torch, str(params["dtype"]))
    operands = [torch.zeros(each, dtype=dtype, device=device) for each in chosen.shapes(m, n, k)]
    if name in BLOCKS:
        training_step(chosen.isogemm, operands, torch.zeros_like(operands[0]))
        return
    chosen.isogemm(*operands)
    if name.startswith("bias "):
        linear(*operands[:2])


def _operands(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, fan_in: int) -> list[Tensor]:
    """Make x of variance 1, and weights that keep the variance, so that no activation saturates."""
    first, *others = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    return [first, *(each * (fan_in**-0.5 if each.ndim > 1 else 1.0) for each in others)]


def _case(name: str, shape: tuple[int, int, int], dtype: str, precision: str = "", *, most_sets: int = 2048) -> Case:
    m, n, k = shape
    element = getattr(torch, dtype)
    on_any = operation(name, on_gpu=True)
    shapes, flops = on_any.shapes(m, n, k), 2.0 * m * n * k * on_any.products
    moved = on_any.calls * (m * n + sum(map(math.prod, shapes)))
    size = float(element.itemsize * moved)

    def build(device: torch.device) -> CaseRun:
        on_gpu = device.type == "cuda"
        use_precision(precision, device)
        chosen = operation(name, on_gpu=on_gpu)
        functions = {"isogemm": chosen.isogemm, "torch": chosen.torch, **chosen.peers}
        info = {"torch call": chosen.torch_call, **chosen.info}
        if name.startswith("bias ") and flops / moved >= COMPUTE_BOUND:
            functions["plain"] = lambda x, weight, bias: linear(x, weight)
        if name.startswith("compiled "):
            torch.compiler.reset()
            tuned = torch.compile(functions.get("eager", chosen.torch), mode=TUNED, dynamic=False, fullgraph=True)
            functions = {"isogemm": chosen.isogemm, "torch": chosen.torch, "compiled": tuned}
            info["compiled mode"] = TUNED
        sets = [_operands(shapes, element, device, k) for _ in range(timer.rotations(size, device, most_sets))]
        variants = rotated(functions, sets)
        if "compiled" in variants:
            variants["compiled"][0]()  # compiles: not while allocations are poisoned
        info |= served_by(variants["isogemm"][0])
        x, *others = sets[0]
        return CaseRun(variants, partial(_errors, first(variants), chosen.layer(*others), x, precision), info)

    return Case("fused", name, make_params(dtype, precision, m=m, n=n, k=k), flops, size, build)


def _errors(thunks: Mapping[str, Thunk], layer: Layer, x: Tensor, precision: str) -> dict[str, float]:
    """The largest error of each variant in units of |x| |weight|; of 64 rows and 1024 columns at most.

    isogemm's is within its bound, and the others' within twice that: they compute the same.
    """
    rng = random.Random(0)
    rows, columns = (sampled(size, most, rng, x.device) for size, most in ((len(x), 64), (len(layer.weight), 1024)))
    bias, up = (None if each is None else each[columns] for each in (layer.bias, layer.weight_up))
    part = replace(layer, weight=layer.weight[columns], bias=bias, weight_up=up)
    errors = {}
    for name, whole in finite_results(thunks):
        expected = Layer(part.weight) if name == "plain" else part
        factor = 2 if name == "isogemm" else 4
        found = whole[rows][:, columns]
        errors[name] = assert_accurate(found, expected, Tokens(x[rows]), precision, factor=factor, what=name)
    return errors


def _block_case(
    name: str, shape: tuple[int, int, int], dtype: str, precision: str = "", *, compiled: bool = True
) -> Case:
    """Forward and backward; on a GPU in one CUDA graph. Peak memory is without the operands."""
    m, n, k = shape
    chosen, element = BLOCKS[name], getattr(torch, dtype)
    shapes = chosen.shapes(m, n, k)
    size = float(element.itemsize * (2 * sum(map(math.prod, shapes)) + 2 * m * k))  # operands, gradients, out and dout

    def build(device: torch.device) -> CaseRun:
        use_precision(precision, device)
        functions = {"isogemm": chosen.isogemm, "torch": chosen.torch}
        info = {"torch call": chosen.torch_call}
        if compiled and device.type == "cuda":
            torch.compiler.reset()
            functions["compiled"] = torch.compile(chosen.torch, dynamic=False, fullgraph=True)
            info["compiled mode"] = "default"
        sets = [_operands(shapes, element, device, k) for _ in range(timer.rotations(size, device, 8))]
        grad = torch.randn((m, k), dtype=element, device=device)
        steps = {each: [_first(function, one, grad) for one in sets] for each, function in functions.items()}
        info |= served_by(steps["isogemm"][0])
        if device.type == "cuda":
            info |= {f"{each} peak MiB": f"{peak_bytes(step[0], device) / 2**20:.0f}" for each, step in steps.items()}

        return CaseRun(steps, lambda: _block_errors(functions, sets[0], grad), info)

    return Case(
        "fused", name, make_params(dtype, precision, m=m, n=n, k=k), 6.0 * m * n * k * chosen.products, size, build
    )


def _first(function: Forward, operands: Sequence[Tensor], grad: Tensor) -> Thunk:
    return lambda: training_step(function, operands, grad)[0]


def _block_errors(functions: Mapping[str, Forward], operands: Sequence[Tensor], grad: Tensor) -> dict[str, float]:
    """The largest error of the result and the gradients of each variant, relative to their norms.

    isogemm's is at most twice torch's or half an ulp, each; the largest error of an element, twice torch's and one ulp.
    """
    exact = training_step(functions["torch"], [each.double() for each in operands], grad.double())
    found = {
        name: on_poison(name, partial(training_step, function, operands, grad)) for name, function in functions.items()
    }
    names = ["the result", *(f"gradient {index}" for index in range(len(operands)))]
    allowed = {name: found["torch"] if name == "isogemm" else results for name, results in found.items()}
    return {
        name: assert_step_accurate(each, [(2, allowed[name])], exact, names, ulps=(1, 0), least=0.5)
        for name, each in found.items()
    }


def _autofuse_case(dtype: str, precision: str = "") -> Case:
    """Small products, so that CPU time dominates: under autofuse, as plain code, and as the fused calls."""
    return _case("autofuse", DEFERRED, dtype, precision, most_sets=1)


def demo(device: torch.device) -> DemoResult:
    """relu(x @ weight.T + bias), one call against three operations."""
    on_gpu = device.type == "cuda"
    (m, n, k), dtype, precision = ((4096,) * 3, "bfloat16", "") if on_gpu else ((256, 1024, 256), "float32", "ieee")
    chosen = _biased("relu", on_gpu=on_gpu)
    layers = {"isogemm": chosen.isogemm, "torch": chosen.peers["three ops"]}
    x, *others = operands = _operands(chosen.shapes(m, n, k), getattr(torch, dtype), device, k)
    thunks: dict[str, Thunk] = {name: partial(layer, *operands) for name, layer in layers.items()}
    title = f"relu(x @ weight.T + bias) [{m}, {k}] x [{k}, {n}], {number_type(make_params(dtype, precision))}"
    bits = demos.count_changes(
        layers, lambda layer, rows: layer(x[rows], *others), "rows", batch=m, sizes=(1, 3), compared=64
    )
    errors = partial(_errors, thunks, chosen.layer(*others), x, precision)
    return demos.result(title, bits, errors, "|x| |weight|", thunks, "three operations", device)
