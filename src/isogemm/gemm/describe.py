"""From tensors to problems: merged leading sizes, strides and alignment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isogemm.core import device as devices
from isogemm.epilogues.operands import Epilogue
from isogemm.gemm import configs
from isogemm.gemm.configs import Problem
from isogemm.gemm.gradient_problems import BiasGradProblem


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, precision: str | None, chunk: int | None = None
) -> Problem | None:
    """Describe [*, M, K] @ [*, K, N] of the same leading sizes; None where those have more than two levels.

    chunk: of Problem; None for `accumulation_chunk`.
    """
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    (am, ak), (bk, bn) = a.stride()[-2:], b.stride()[-2:]
    levels = _levels(a.shape[:-2], a.stride()[:-2], b.stride()[:-2])
    while levels and levels[-1][2] == 0 and (m == 1 or levels[-1][1] == m * am):  # all rows of one matrix
        size, stride, _ = levels.pop()
        m, am = m * size, stride if m == 1 else am
    if len(levels) > 2:
        return None
    batch, (inner, a_inner, b_inner) = math.prod(size for size, *_ in levels), levels[-1] if levels else (1, 0, 0)
    _, a_outer, b_outer = levels[0] if len(levels) == 2 else (1, 0, 0)
    facts = devices.facts(a.device)
    problem = Problem(
        m=m, n=n, k=k, dtype=dtype_name(a.dtype), out_dtype=dtype_name(out_dtype), precision=precision or "ieee",
        a_strides=_matrix_strides((m, k), (am, ak)), b_strides=_matrix_strides((n, k), (bn, bk))[::-1],
        c_strides=(n, 1),
        a_aligned=aligned(a), b_aligned=aligned(b), batch=batch, batch_inner=inner,
        a_batch_strides=(a_outer, a_inner), b_batch_strides=(b_outer, b_inner),
        epilogue=Epilogue(bias="n" if bias is not None else ""), tma=_tma(), arch=facts.arch,
        sm_count=facts.sm_count, gpu=facts.name,
    )  # fmt: skip
    return replace(problem, chunk=configs.accumulation_chunk(problem) if chunk is None else chunk)


def weight_grad(
    grad: Tensor, x: Tensor, total: Tensor | None, dtype: torch.dtype, precision: str | None, chunk: int
) -> Problem:
    """Describe grad^T x, a product over the tokens, which have one or two levels (`by_token`)."""
    n, k = grad.shape[-1], x.shape[-1]
    levels = _levels(grad.shape[:-1], grad.stride()[:-1], x.stride()[:-1]) or [(1, n, k)]
    inner, g_token, x_token = levels[-1]
    _, g_outer, x_outer = levels[0] if len(levels) == 2 else (1, 0, 0)
    tokens = math.prod(grad.shape[:-1])
    facts = devices.facts(x.device)
    return Problem(
        m=n, n=k, k=tokens, dtype=dtype_name(x.dtype), out_dtype=dtype_name(dtype if total is None else torch.float32),
        precision=precision or "ieee", a_strides=_matrix_strides((tokens, n), (g_token, grad.stride(-1)))[::-1],
        b_strides=_matrix_strides((tokens, k), (x_token, x.stride(-1))),
        c_strides=(k, 1) if total is None else (total.stride(0), total.stride(1)),
        a_aligned=aligned(grad), b_aligned=aligned(x), c_aligned=total is None or aligned(total),
        k_inner=inner if len(levels) == 2 else 0, k_outer_strides=(g_outer, x_outer),
        chunk=chunk, accumulate=total is not None, tma=_tma(), arch=facts.arch, sm_count=facts.sm_count,
        gpu=facts.name,
    )  # fmt: skip


def bias_grad(grad: Tensor, total: Tensor | None, dtype: torch.dtype) -> BiasGradProblem:
    """Describe the sum of a gradient over its tokens; nothing is empty."""
    levels = _levels(grad.shape[:-1], grad.stride()[:-1])
    n = grad.shape[-1]
    (t, t_stride), outer = levels[-1] if levels else (1, n), levels[0][1] if len(levels) > 1 else 0
    out_dtype = dtype if total is None else total.dtype
    return BiasGradProblem(
        t=grad.numel() // n, n=n, dtype=dtype_name(grad.dtype), out_dtype=dtype_name(out_dtype),
        strides=(t_stride, grad.stride(-1)), chunk=configs.BIAS_CHUNK, t_inner=t if len(levels) > 1 else 0,
        t_outer=outer, out_stride=1 if total is None else total.stride(0), accumulate=total is not None,
        aligned=aligned(grad), out_aligned=total is None or aligned(total), arch=devices.facts(grad.device).arch,
    )  # fmt: skip


def by_token(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Make tensors contiguous if their leading sizes have more than the two levels that a kernel takes."""
    if grad.ndim > 3 and len(_levels(grad.shape[:-1], grad.stride()[:-1], x.stride()[:-1])) > 2:
        return grad.contiguous(), x.contiguous()
    return grad, x


def flat(x: Tensor) -> Tensor:
    """View [*, N] as [tokens, N], also with empty sizes."""
    return x.reshape(rows(x), x.shape[-1])


def rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    longer = [shape for shape in shapes if shape]
    if len(longer) < 2:
        return tuple(*longer)
    return tuple(torch.broadcast_shapes(*longer))  # type: ignore[no-untyped-call]  # it imports sympy: 0.4 s


def aligned(x: Tensor) -> bool:
    """Whether x is aligned to 16 bytes, as TMA and wide loads need."""
    return x.data_ptr() % 16 == 0


def layout(x: Tensor | None) -> tuple[Any, ...] | None:
    """All of a tensor that a plan depends on."""
    return None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.get_device())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _levels(sizes: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """(size, stride, stride, ...) of leading dimensions, outermost first, merged where every tensor allows it."""
    levels: list[tuple[int, ...]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if levels and all(outer == size * step for outer, step in zip(levels[-1][1:], steps, strict=True)):
            levels[-1] = (levels[-1][0] * size, *steps)
        else:
            levels.append((size, *steps))
    return levels


def _matrix_strides(sizes: tuple[int, int], strides: tuple[int, int]) -> tuple[int, int]:
    """Strides of (rows, columns). For a size of 1, whose stride means nothing, that of a contiguous matrix."""
    (rows, columns), (row, column) = sizes, strides
    if columns == 1:
        column = 1 if row != 1 else rows
    if rows == 1:
        row = columns if column == 1 else 1
    return row, column


def _tma() -> bool:
    from isogemm.core.launch import descriptors_usable

    return descriptors_usable()
