"""From problems to plans: the launches of products, weight gradients and token sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from isogemm.core.dispatch import Dispatch
from isogemm.core.plan import INPUTS, OUT, SCRATCH, Place, Plan, Seen, make_step
from isogemm.gemm import configs, selection
from isogemm.gemm.configs import Config, Problem
from isogemm.gemm.gradient_problems import ActivationGradProblem, BiasGradProblem

# The places of a product's inputs: the operands, a gated activation's second weight, what the epilogue reads.
_A, _B, _B_UP, _READ = range(INPUTS, INPUTS + 4)
_HALVES = {"a": -2, "b": -1}  # places of what a pass makes of an operand, in scratch memory


def plan_for(problem: Problem, device: torch.device) -> Plan:
    """Plan of a problem without a batch, from its description alone; compiles its kernels if needed."""
    return gemm_plan("matmul", (problem.m, problem.n), getattr(torch, problem.out_dtype), device, problem)


def gemm_plan(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    problem: Problem,
    config: Config | None = None,
    read: Sequence[Seen | None] = (),
) -> Plan:
    """Plan of inputs (a, b, second weight, *read); read: how Triton sees these, by default the bias alone.

    config: used instead of the one that would be chosen.
    """
    from isogemm.gemm.kernels import products as kernels
    from isogemm.gemm.kernels.halves import describe_split

    _require_usable(name, problem)
    source = ""
    if config is None:
        config, source = selection.choose(problem)
    elif reason := configs.illegal(problem, config):
        raise ValueError(f"config {config} for problem {problem}: {reason}")
    accumulation = configs.accumulation(problem, config)
    operand, sums, bytes_ = getattr(torch, problem.dtype), (torch.float32, True), configs.workspace(problem, config)
    a: Place = (operand, problem.a_aligned), _A
    b: Place = (operand, problem.b_aligned), _B
    second: Place | None = None
    if problem.weights > 1:
        if configs.reads_b_by_tma(problem, config):
            b = b[0], _B, _B_UP
        else:
            second = b[0], _B_UP
    steps = []
    whole = {"a": a, "b": b}
    for split in filter(config.splits, configs.OPERANDS):
        halves: Place = (torch.float32, True), _HALVES[split]
        launch = describe_split(problem, config, split)
        steps.append(make_step(launch, (whole[split], halves), device))
        whole[split] = halves
    left, right = (whole["b"], whole["a"]) if config.swapped else (whole["a"], whole["b"])
    result: Place = (dtype, problem.c_aligned), OUT
    scratch: Place = sums, SCRATCH
    rest = () if config.kernel == "stream" else (right if config.rest_n else second,)
    if problem.epilogue.bias and not read:
        read = ((operand, False),)
    reads: list[Place | None] = [seen and (seen, _READ + index) for index, seen in enumerate(read)]
    if accumulation == "partials":
        epilogue = [None] * kernels.SLOTS
        adding = (scratch, result, reads[0] if reads else None)
        steps += [
            make_step(kernels.describe_gemm(problem, config), (left, right, *rest, scratch, None, *epilogue), device),
            make_step(kernels.describe_add_partials(problem), adding, device),
        ]
    else:
        reads += [None] * (kernels.SLOTS - len(reads))
        kept = scratch if configs.chunk_bytes(problem, config) else None
        places = (left, right, *rest, result, kept, *reads)
        steps.append(make_step(kernels.describe_gemm(problem, config), places, device))
    served = Dispatch(name, "gemm", str(problem), str(config), "", source)
    parts = configs.halves_at(problem, config)[:2] if config.split else ()
    return Plan.of(served, shape, dtype, device, steps, bytes_ // 4, parts)


def bias_grad_plan(problem: BiasGradProblem, device: torch.device) -> Plan:
    """Plan of the input (gradient,)."""
    from isogemm.gemm.kernels import gradients as kernels

    _require_usable("bias_grad", problem)
    operand, dtype = getattr(torch, problem.dtype), getattr(torch, problem.out_dtype)
    grad: Place = (operand, problem.aligned), INPUTS
    summing = kernels.describe_bias_grad(problem)
    scratch = problem.chunks * problem.n if problem.split else 0
    if problem.split:
        sums: Place = (torch.float32, False), SCRATCH
        adding = kernels.describe_chunk_sums(problem.chunks, problem.n, 1, problem.out_stride, problem.accumulate)
        steps = [make_step(summing, (grad, sums), device), make_step(adding, (sums, ((dtype, False), OUT)), device)]
    else:
        steps = [make_step(summing, (grad, ((dtype, problem.out_aligned), OUT)), device)]
    served = Dispatch("bias_grad", "gemm", str(problem), "", "")
    return Plan.of(served, (problem.n,), dtype, device, steps, scratch)


def activation_grad_plan(
    problem: ActivationGradProblem, shape: Sequence[int], device: torch.device, seen: Sequence[Seen | None]
) -> Plan:
    """Plan of the inputs (gradient, what was saved, seed, sums), which Triton sees as `seen`."""
    from isogemm.gemm.kernels import gradients as kernels

    _require_usable("activation_grad", problem)
    dtype = getattr(torch, problem.dtype)
    grad, saved, seed, sums = (each and (each, INPUTS + index) for index, each in enumerate(seen))
    places = (grad, saved, seed, ((dtype, True), OUT), sums)
    step = make_step(kernels.describe_activation_grad(problem), cast("Sequence[Place | None]", places), device)
    return Plan.of(Dispatch("activation_grad", "gemm", str(problem), "", ""), shape, dtype, device, [step])


def chunk_sums_plan(
    count: int, n: int, together: int, dtype: torch.dtype, stride: int | None, device: torch.device
) -> Plan:
    """Plan of the input [count, n] sums, `together` to a chunk; with `stride`, added to a total with that stride."""
    from isogemm.gemm.kernels import gradients as kernels

    launch = kernels.describe_chunk_sums(count, n, together, stride or 1, stride is not None)
    step = make_step(launch, (((torch.float32, False), INPUTS), ((dtype, False), OUT)), device)
    return Plan.of(Dispatch("bias_grad", "gemm", f"[{count},{n}] sums", "", ""), (n,), dtype, device, [step])


def _require_usable(name: str, problem: Problem | BiasGradProblem | ActivationGradProblem) -> None:
    if reason := configs.usable(problem.arch):
        raise RuntimeError(f"isogemm.{name} {problem}: {reason}")
