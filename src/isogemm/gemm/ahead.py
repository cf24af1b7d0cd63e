"""Compiling ahead: every kernel that calls with some weights will need, before the first of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from isogemm.core.eager import autocast_dtype
from isogemm.gemm import configs, op, plan
from isogemm.gemm.configs import BiasGradProblem, Problem
from isogemm.gemm.problem import aligned


def warmup(
    weights: torch.Tensor | Iterable[torch.Tensor] | torch.nn.Module,
    tokens: int,
    backward: bool,
    bias: bool,
    out_dtype: torch.dtype | None,
    precision: str | None,
) -> int:
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}; expected at least 1")
    before = plan.compiled()
    seen: set[tuple[object, ...]] = set()
    for weight, biased in _each(weights, bias):
        key = (weight.shape, weight.stride(), weight.dtype, weight.device, aligned(weight), biased)
        if not weight.is_cuda or weight.dtype not in op.SERVED or key in seen:
            continue  # nothing is compiled for the CPU and for float64
        seen.add(key)
        forward = _forward(weight, biased, out_dtype, precision)
        for problem in (*_every(forward, tokens), *(_gradients(forward, tokens) if backward else ())):
            plan.plan_for(problem, configs.choose(problem), weight.device)
        if backward and biased:
            for accumulate in (False, True):
                plan.bias_grad_plan(_bias_gradient(forward, accumulate), weight.device)
    return plan.compiled() - before


def _each(
    weights: torch.Tensor | Iterable[torch.Tensor] | torch.nn.Module, bias: bool
) -> Iterator[tuple[torch.Tensor, bool]]:
    if isinstance(weights, torch.nn.Module):
        for module in weights.modules():
            if isinstance(module, torch.nn.Linear):
                yield module.weight, module.bias is not None
        return
    for weight in (weights,) if isinstance(weights, torch.Tensor) else weights:
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            raise ValueError(f"weights: got {_describe(weight)}; expected [N, K] tensors or a module")
        yield weight, bias


def _describe(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _forward(weight: torch.Tensor, bias: bool, out_dtype: torch.dtype | None, precision: str | None) -> Problem:
    """Of one token."""
    x = torch.empty((1, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    op.validate_linear(x, weight, None, out_dtype, precision)
    problem = op.describe(x, weight.mT, out_dtype=out_dtype, precision=precision)
    cast = autocast_dtype(weight.device)
    if cast is not None:  # the copies that autocast makes are contiguous
        dtype = str(cast).removeprefix("torch.")
        wide = out_dtype is torch.float32
        problem = replace(problem, dtype=dtype, out_dtype="float32" if wide else dtype, b_strides=(1, problem.k))
    return replace(problem, bias=bias, chunk=configs.walk_chunk(problem.k, problem.dtype, problem.out_dtype))


def _every(problem: Problem, tokens: int) -> Iterator[Problem]:
    """The problem at every number of tokens where another kernel may begin."""
    for edge in configs.token_edges(problem, tokens):
        yield replace(problem, m=edge)


def _gradients(forward: Problem, tokens: int) -> Iterator[Problem]:
    """dX, and dW with and without a main_grad."""
    n, k, dtype = forward.n, forward.k, forward.dtype
    bk, bn = forward.b_strides
    dx = replace(
        forward, n=k, k=n, out_dtype=dtype, a_strides=(n, 1), b_strides=(bn, bk), c_strides=(k, 1), bias=False,
        chunk=configs.walk_chunk(n, dtype, dtype),
    )  # fmt: skip
    yield from _every(dx, tokens)
    dw = replace(
        forward, m=n, n=k, k=1, out_dtype=dtype, a_strides=(1, n), b_strides=(k, 1), c_strides=(k, 1), b_aligned=True,
        bias=False, chunk=configs.token_chunk(n, k, dtype),
    )  # fmt: skip
    for edge in configs.token_edges(dw, tokens):
        yield replace(dw, k=edge)
        yield replace(dw, k=edge, out_dtype="float32", accumulate=True)


def _bias_gradient(forward: Problem, accumulate: bool) -> BiasGradProblem:
    return BiasGradProblem(
        t=1, n=forward.n, dtype=forward.dtype, out_dtype="float32" if accumulate else forward.dtype,
        strides=(forward.n, 1), chunk=configs.BIAS_CHUNK, accumulate=accumulate, arch=forward.arch,
    )  # fmt: skip
