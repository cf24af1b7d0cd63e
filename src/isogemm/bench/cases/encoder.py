"""Cases and demo of the encoder family."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from isogemm.bench import demo as demos
from isogemm.bench.cases import Case, CaseRun, Params, Thunk, make_params, served_by, use_precision
from isogemm.bench.demo import DemoResult
from isogemm.bench.timer import peak_bytes
from isogemm.bench.views import FamilyView
from isogemm.core import private
from isogemm.nn import EncoderLayer
from isogemm.verify.encoder import measures
from isogemm.verify.parallel import run_in_processes
from isogemm.verify.poison import poisoned_allocations
from isogemm.verify.trials import assert_step_accurate, training_step

VIEW = FamilyView(
    "encoder", "Encoder layer", ("layers", "sequences", "tokens", "d_model", "nhead", "dim_feedforward"),
    against=True, steps=True,
)  # fmt: skip
OP = "training step"
COMPILED, CAPTURED = "compile + graph", "graph"
_EXACT_ELEMENTS = 1 << 22  # elements of x in one pass of the fp64 model
_ULPS = 16  # allowed beside torch's error: fp32 sums over a hundred thousand rows

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Stack:
    """A stack of layers: pre-norm, gelu, no mask."""

    layers: int
    sequences: int
    tokens: int
    d_model: int
    nhead: int
    dim_feedforward: int

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens

    @property
    def weights(self) -> int:
        """Elements of a layer's weights."""
        return 4 * self.d_model**2 + 2 * self.d_model * self.dim_feedforward

    @property
    def flops(self) -> float:
        """FLOP of the products, forward and backward: each product has two more for its gradients."""
        attention = 4 * self.rows * self.tokens * self.d_model
        return 3.0 * self.layers * (2 * self.rows * self.weights + attention)

    def bytes(self, itemsize: int) -> float:
        """Least traffic: per layer x and y forward; x, dy and dx backward; weights twice and their gradients."""
        return float(self.layers * itemsize * (5 * self.rows * self.d_model + 3 * self.weights))

    def model(self, device: torch.device, dtype: torch.dtype) -> nn.Sequential:
        """Make torch's model, in training mode."""
        made = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    self.d_model, self.nhead, self.dim_feedforward, dropout=0.0, activation="gelu",
                    batch_first=True, norm_first=True, device=device, dtype=dtype,
                )
                for _ in range(self.layers)
            )
        )  # fmt: skip
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.ndim == 1:  # torch begins with zeros and ones
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return made


STACKS = (
    Stack(2, 1280, 5, 64, 4, 256),
    Stack(3, 896, 42, 16, 4, 128),
    Stack(3, 896, 42, 128, 16, 256),
    Stack(3, 2688, 42, 128, 16, 256),
    Stack(3, 64, 64, 128, 16, 512),
    Stack(1, 448, 21, 96, 6, 384),  # this and the next are composed
    Stack(1, 128, 64, 384, 6, 1536),
    Stack(1, 64, 64, 768, 12, 3072),
)
QUICK = Stack(1, 1280, 5, 64, 4, 256)
CPU_STACKS = (Stack(2, 256, 5, 64, 4, 256), Stack(2, 64, 42, 16, 4, 128), Stack(2, 16, 42, 128, 16, 256))
CPU_QUICK = Stack(1, 32, 5, 32, 4, 64)
CPU_DEMO = Stack(1, 32, 5, 64, 4, 256)


@dataclass
class Training:
    """A batch and a model's parameters; every step writes their gradients from scratch."""

    x: Tensor
    grad: Tensor
    parameters: Sequence[Tensor]

    def clear(self) -> None:
        for leaf in (self.x, *self.parameters):
            leaf.grad = None

    def step(self, model: Model) -> Tensor:
        self.clear()
        out = model(self.x)
        out.backward(self.grad)  # type: ignore[no-untyped-call]
        return out.detach()

    def results(self, model: Model) -> list[Tensor]:
        """The output and every gradient."""
        out = self.step(model)
        gradients = [cast(Tensor, leaf.grad) for leaf in (self.x, *self.parameters)]
        self.clear()
        return [out, *gradients]

    def peak_bytes(self, model: Model) -> int:
        def step() -> None:
            self.step(model)
            self.clear()

        return peak_bytes(step, self.x.device)

    def kept_bytes(self, model: Model) -> int:
        """Bytes that the forward saves for the backward, without the result."""
        self.clear()
        before = torch.cuda.memory_allocated(self.x.device)
        out = model(self.x)
        return torch.cuda.memory_allocated(self.x.device) - before - out.untyped_storage().nbytes()


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    gpu = device.type == "cuda"
    numbers = (("float32", "tf32" if gpu else "ieee"), ("bfloat16", ""))
    if quick:
        return [_case(QUICK if gpu else CPU_QUICK, *number, compiled=False) for number in numbers]
    return [_case(stack, *number) for number in numbers for stack in (STACKS if gpu else CPU_STACKS)]


def compile_cases(device: torch.device, cases: Sequence[Case]) -> None:
    run_in_processes(_compile, device, [dict(case.params) for case in cases])


def _compile(device: str, params: Params) -> None:
    """Compile isogemm's kernels, and what torch.compile makes: its caches are on disk as well."""
    stack, where = _stack(params), torch.device(device)
    use_precision(str(params.get("precision", "")), where)
    training, _, models = _models(stack, getattr(torch, str(params["dtype"])), where, compiled=stack in STACKS)
    with private.find("torch._inductor:config").patch(compile_threads=1):  # every core has a process already
        for model in models.values():
            training.step(model)


def _stack(params: Params) -> Stack:
    return Stack(*(int(params[name]) for name in VIEW.shape))


def _models(
    stack: Stack, dtype: torch.dtype, device: torch.device, *, compiled: bool
) -> tuple[Training, nn.Sequential, dict[str, Model]]:
    """Return a batch, torch's model and the models to measure, all with the same parameters."""
    eager = stack.model(device, dtype)
    shape = (stack.sequences, stack.tokens, stack.d_model)
    x, grad = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    layers = (EncoderLayer.from_torch(cast(nn.TransformerEncoderLayer, layer)) for layer in eager)
    models: dict[str, Model] = {"isogemm": nn.Sequential(*layers), "torch": eager}
    if device.type == "cuda":
        models["torch eager"] = eager
        if compiled:
            torch.compiler.reset()
            models["torch"] = torch.compile(eager, dynamic=False, fullgraph=True)
    return Training(x.requires_grad_(), grad, list(eager.parameters())), eager, models


def _case(stack: Stack, dtype: str, precision: str = "", *, compiled: bool = True) -> Case:
    """Forward and backward; on a GPU in one CUDA graph, and eagerly as well."""
    element = getattr(torch, dtype)

    def build(device: torch.device) -> CaseRun:
        use_precision(precision, device)
        training, eager, models = _models(stack, element, device, compiled=compiled)
        variants: dict[str, list[Thunk]] = {name: [partial(training.step, model)] for name, model in models.items()}
        info = served_by(variants["isogemm"][0]) | {"torch call": "torch eager"}
        if device.type == "cuda":
            info["torch call"] = COMPILED if compiled else CAPTURED
            variants["isogemm eager"] = variants["isogemm"]
            for name, model in models.items():
                info[f"{name} peak MiB"] = f"{training.peak_bytes(model) / 2**20:.1f}"
                info[f"{name} kept bytes"] = f"{training.kept_bytes(model) / (stack.layers * stack.rows):.0f}"
        return CaseRun(
            variants, lambda: _errors(training, eager, models, precision), info, eager=("isogemm eager", "torch eager")
        )

    params = make_params(dtype, precision, **asdict(stack))
    return Case("encoder", OP, params, stack.flops, stack.bytes(element.itemsize), build)


def _errors(training: Training, eager: nn.Sequential, models: Mapping[str, Model], precision: str) -> dict[str, float]:
    """The largest error of the result and the gradients of each variant, relative to their norms.

    Each is within its bound by torch's errors at that precision; torch's own variants are within twice that.
    """
    names = ["the result", "x", *(name for name, _ in eager.named_parameters())]
    exact = _exact(training, eager)
    dtype = training.x.dtype
    torchs = measures(lambda: training.results(eager), dtype, precision, training.x.device)
    errors = {}
    for name, model in models.items():
        times = 1 if name == "isogemm" else 2
        with poisoned_allocations() if name == "isogemm" else nullcontext():  # torch's memory comes from elsewhere
            found = training.results(model)
        allowed = [(times * factor, results) for factor, results in torchs]
        ulps = _ULPS if dtype == torch.float32 else 1
        errors[name] = assert_step_accurate(found, allowed, exact, names, ulps=(ulps, ulps), what=f"{name}, ")
    return errors


def _exact(training: Training, eager: nn.Sequential) -> list[Tensor]:
    """Compute the output and gradients in fp64, some sequences at a time."""
    model, x = copy.deepcopy(eager).double(), training.x
    parameters = list(model.parameters())
    at_once = max(1, _EXACT_ELEMENTS // max(1, x[0].numel()))
    outs, gradients = [], []
    for part, grad in zip(torch.split(x.detach(), at_once), torch.split(training.grad, at_once), strict=True):
        leaf = part.double().requires_grad_()
        out = model(leaf)
        out.backward(grad.double())
        outs.append(out.detach())
        gradients.append(cast(Tensor, leaf.grad))
    return [torch.cat(outs), torch.cat(gradients), *(cast(Tensor, each.grad) for each in parameters)]


def demo(device: torch.device) -> DemoResult:
    """A layer, forward and backward."""
    stack, precision = (QUICK, "tf32") if device.type == "cuda" else (CPU_DEMO, "ieee")
    use_precision(precision, device)
    training, eager, models = _models(stack, torch.float32, device, compiled=False)
    models = {name: models[name] for name in ("isogemm", "torch")}
    title = f"encoder layer, {OP} [{stack.sequences}, {stack.tokens}, {stack.d_model}], fp32 {precision}"
    items, unit = "sequences (result and gradient)", "norm of the result and of each gradient"

    def compute(model: Model, some: slice) -> Tensor:
        return torch.cat(training_step(model, [training.x[some]], training.grad[some]), dim=-1)

    bits = demos.count_changes(models, compute, items, batch=stack.sequences, sizes=(1, 3), compared=32)
    thunks = {name: partial(training.step, model) for name, model in models.items()}
    errors = partial(_errors, training, eager, models, precision)
    return demos.result(title, bits, errors, unit, thunks, "torch's layer, eager", device)
