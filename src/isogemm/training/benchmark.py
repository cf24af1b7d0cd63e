"""Cases and demo of PatchTST: whole training steps of its official configurations, torch's model and accelerated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from isogemm.bench import demo as demos
from isogemm.bench.cases import Case, CaseRun, Params, Thunk, make_params
from isogemm.bench.cases.encoder import COMPILED, Stack
from isogemm.bench.demo import DemoResult
from isogemm.bench.timer import peak_bytes
from isogemm.bench.views import FamilyView
from isogemm.core import private
from isogemm.core.dispatch import dispatch_log
from isogemm.integrations.patchtst import accelerate
from isogemm.training.model import Forecaster
from isogemm.training.series import Windows, cut, synthetic, synthetic_rows
from isogemm.training.steps import Objective
from isogemm.verify.parallel import run_in_processes
from isogemm.verify.precision import set_fp32_precision
from isogemm.verify.trials import training_step
from isogemm_options import PRESETS, Config

OP = "whole training step"
_SHAPE = ("layers", "batch", "channels", "patches", "d_model", "nhead", "dim_feedforward")
VIEW = FamilyView("patchtst", "PatchTST", ("preset", *_SHAPE), column="", against=True, steps=True)
_TIMES_TORCH = 4.0  # of torch's error in a gradient: a step's are sums of tens of thousands of rows, in other orders
_MOST_ERROR = 1e-4  # of what fp32 rounds


class Step:
    """A model's step on one batch: forecast, loss, gradients and AdamW."""

    def __init__(self, model: nn.Module, config: Config, windows: Windows, starts: Tensor) -> None:
        self.model, self.windows, self.starts = model, windows, starts
        autocast = torch.bfloat16 if config.precision == "bf16" else None
        self._objective: Callable[..., Tensor] = Objective(model, windows, autocast)
        if config.compiles:
            self._objective = torch.compile(self._objective, dynamic=False)
        self._position = torch.zeros(1, dtype=torch.int64, device=starts.device)
        on_gpu = starts.is_cuda
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=on_gpu, capturable=on_gpu
        )

    def run(self) -> Tensor:
        loss = self.gradients()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss

    def gradients(self) -> Tensor:
        """Write the parameters' gradients; returns the loss."""
        loss = self._objective(self.windows.values, self.starts[None], self._position)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    if device.type != "cuda":
        return [_case("reference", "ieee", compiled=False, batch=4)]
    names = ["reference"] if quick else list(PRESETS)
    return [_case(name, precision, compiled=not quick) for precision in ("tf32", "bf16") for name in names]


def compile_cases(device: torch.device, cases: Sequence[Case]) -> None:
    run_in_processes(_compile, device, [dict(case.params) for case in cases])


def _compile(device: str, params: Params) -> None:
    """Compile isogemm's kernels, and what torch.compile makes: its caches are on disk as well."""
    given = _config(str(params["preset"]), str(params["precision"]), int(params["batch"]))
    with private.find("torch._inductor:config").patch(compile_threads=1):  # every core has a process already
        for step in _steps(given, torch.device(device), compiled=True).values():
            step.run()


def _config(preset: str, precision: str, batch: int = 0) -> Config:
    config = PRESETS[preset].config
    return replace(config, precision=precision, batch=batch or config.batch)


def _steps(config: Config, device: torch.device, *, compiled: bool) -> dict[str, Step]:
    """Steps of each variant: models with the same weights on the same batch."""
    if device.type == "cuda":
        set_fp32_precision("tf32" if config.precision == "tf32" else "ieee")
    sizes = config.model
    rows = synthetic_rows(max(4 * config.batch, 10 * (sizes.inputs + sizes.horizon)), sizes.inputs + sizes.horizon)
    windows = cut(synthetic(rows, sizes.channels, config.seed), sizes.inputs, sizes.horizon).to(device)
    starts = torch.randperm(4 * config.batch, generator=torch.Generator().manual_seed(0))[: config.batch].to(device)
    torch.manual_seed(0)
    model = Forecaster(sizes).to(device)
    backends = {"isogemm": "isogemm", "torch": "compile" if compiled else "torch"}
    if device.type == "cuda":
        backends |= {"isogemm + compile": "isogemm", "torch eager": "torch"} if compiled else {"torch eager": "torch"}
    steps = {}
    if compiled:
        torch.compiler.reset()
    for name, backend in backends.items():
        its_own = copy.deepcopy(model)
        if backend == "isogemm":
            accelerate(its_own)
        rest = name == "isogemm + compile"
        steps[name] = Step(its_own, replace(config, backend=backend, compile_rest=rest), windows, starts)
    return steps


def _case(preset: str, precision: str, *, compiled: bool = True, batch: int = 0) -> Case:
    config = _config(preset, precision, batch)
    sizes = config.model
    stack = Stack(
        sizes.layers, config.batch * sizes.channels, sizes.patches, sizes.d_model, sizes.nhead, sizes.dim_feedforward
    )
    shape = (sizes.layers, config.batch, sizes.channels, sizes.patches, *(getattr(sizes, name) for name in _SHAPE[4:]))
    dtype = "bfloat16" if precision == "bf16" else "float32"
    params = make_params(dtype, precision, preset=preset, **dict(zip(_SHAPE, shape, strict=True)))

    def build(device: torch.device) -> CaseRun:
        steps = _steps(config, device, compiled=compiled)
        with dispatch_log() as log:
            steps["isogemm"].run()
        served = next((entry for entry in log if entry.op == "encoder_layer"), None)
        info = {"path": served.path if served else "", "torch call": "torch eager", "samples": str(config.batch)}
        if device.type == "cuda":
            info["torch call"] = COMPILED if compiled else "graph"
            for name, step in steps.items():
                step.run()
                info[f"{name} peak MiB"] = f"{peak_bytes(step.run, device) / 2**20:.1f}"
        variants: dict[str, list[Thunk]] = {name: [step.run] for name, step in steps.items()}
        return CaseRun(variants, partial(_errors, config, device), info, eager=("torch eager",))

    return Case("patchtst", OP, params, stack.flops, stack.bytes(2 if precision == "bf16" else 4), build)


def _errors(config: Config, device: torch.device) -> dict[str, float]:
    """Return each variant's largest gradient error against fp64, relative to the gradient's norm; without dropout."""
    whole = replace(config, model=replace(config.model, dropout=0.0))
    steps = _steps(whole, device, compiled=False)
    exact = _exact(steps["torch"])
    norms = [float(right.norm()) for right in exact]
    sizes = [max(norm, 1e-3 * max(norms)) for norm in norms]
    errors = {}
    for name in ("isogemm", "torch"):
        steps[name].gradients()
        differences = (mine.double() - right for mine, right in zip(_grads(steps[name].model), exact, strict=True))
        errors[name] = max(float(each.norm()) / size for each, size in zip(differences, sizes, strict=True))
    if errors["isogemm"] > max(_TIMES_TORCH * errors["torch"], _MOST_ERROR):
        raise AssertionError(f"gradients: error {errors['isogemm']:.1e}, torch's {errors['torch']:.1e}")
    return errors


def _exact(step: Step) -> list[Tensor]:
    model, windows = copy.deepcopy(step.model).double(), step.windows
    batch = windows.all[step.starts].double()
    loss = functional.mse_loss(model(batch[..., : windows.inputs]), batch[..., windows.inputs :])
    loss.backward()  # type: ignore[no-untyped-call]
    return _grads(model)


def _grads(model: nn.Module) -> list[Tensor]:
    return [cast(Tensor, each.grad) for each in model.parameters() if each.requires_grad]


def demo(device: torch.device) -> DemoResult:
    """A forecaster's training step, torch's and accelerated; and its encoder, alone and batched."""
    gpu = device.type == "cuda"
    config = _config("reference", "tf32" if gpu else "ieee", 64 if gpu else 4)
    steps = _steps(config, device, compiled=False)
    batch = config.batch * config.model.channels
    generator = torch.Generator(device).manual_seed(0)
    shape = batch, config.model.patches, config.model.d_model
    x, grad = (torch.randn(shape, device=device, generator=generator) for _ in range(2))

    both = {name: steps[name] for name in ("isogemm", "torch")}
    encoders = {name: copy.deepcopy(cast(Forecaster, step.model).encoder).eval() for name, step in both.items()}
    title = f"PatchTST, {OP}, {config.batch} windows x {config.model.channels} channels, fp32 {config.precision}"
    items = "sequences through its encoder (result and gradient)"
    note = (
        "PatchTST's embedding and head stay torch's: their bits are not promised. With BatchNorm, a result in training "
        "depends on its batch by definition."
    )

    def compute(encoder: nn.Module, some: slice) -> Tensor:
        return torch.cat(training_step(encoder, [x[some]], grad[some]), dim=-1)

    bits = demos.count_changes(encoders, compute, items, batch=batch, sizes=(1, 3), compared=64)
    thunks = {name: step.run for name, step in both.items()}
    errors = partial(_errors, config, device)
    return demos.result(title, bits, errors, "norm of each gradient", thunks, "the same model, eager", device, note)
