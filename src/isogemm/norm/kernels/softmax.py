"""Softmax and log-softmax of rows: the parts of a row's sum, which other families share, and the kernels.

A row is cut into blocks of SOFTMAX_BLOCK columns from its first; columns beyond its last are -inf. Each block has its
maximum m and the sum s of exp(x - m), by halves. The row's M is the largest m, and its L the sum of s * exp(m - M), by
halves over the blocks. So the bits of M and L depend on the row alone, whatever the tile.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from isogemm.core.launch import Launch
from isogemm.norm.configs import SoftmaxConfig
from isogemm.norm.kernels.sums import block_columns, block_offsets, sum_by_halves

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """exp(x) as every softmax here computes it: one rounded product, then exp2."""
    return tl.exp2(x * _LOG2_E)


@triton.jit
def finite_maximum(m):
    """m, and 0 where it is -inf: nothing there is finite, and every exp(x - 0) is 0."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def block_max_sum(x):
    """m and s [R] of a block x fp32 [R, SOFTMAX_BLOCK] of each of R rows; -inf where a row has no column."""
    m = tl.max(x, axis=1)
    terms = exp(x - finite_maximum(m)[:, None])
    return m, tl.reshape(sum_by_halves(terms, 1), (x.shape[0],))


@triton.jit
def combine(m, s):
    """M and L [R] of rows from m and s [R, B] of their blocks, B a power of two; m = -inf, s = 0 beyond the last."""
    largest = tl.max(m, axis=1)
    terms = s * exp(m - finite_maximum(largest)[:, None])
    return largest, tl.reshape(sum_by_halves(terms, 1), (m.shape[0],))


@triton.jit
def _tile(first, V, R: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, C: tl.constexpr):
    """Offsets and which elements exist [R * B, Q, C], of B blocks from `first` of each of R rows."""
    row = (tl.arange(0, R * B) // B)[:, None, None]
    column = first * (Q * C) + block_columns(B, R * B, Q, C)
    return block_offsets(row, V, column), column < V


@triton.jit
def _to_blocks(of_rows, B: tl.constexpr):
    """[R] -> [R * B, 1]: a row's number for each of its blocks."""
    R: tl.constexpr = of_rows.shape[0]
    return tl.reshape(tl.broadcast_to(of_rows[:, None], (R, B)), (R * B, 1))


@triton.jit
def _result(x, largest, total, LOG: tl.constexpr):
    """The (log-)softmax of x from its row's M and L."""
    if LOG:
        return (x - largest) - tl.log(total)
    else:
        return exp(x - largest) * tl.div_rn(1.0, total)


@triton.jit
def _dx(grad, y, total, LOG: tl.constexpr):
    """The gradient of x from that of y, and the row's sum of grad (LOG) or of grad * y."""
    if LOG:
        return grad - exp(y) * total
    else:
        return y * (grad - total)


@triton.jit(do_not_specialize=["rows", "V"])
def _softmax_kernel(
    x_ptr, out_ptr, rows, V,
    UNIT: tl.constexpr, LOG: tl.constexpr, R: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """R whole rows of B blocks."""
    V = V // UNIT * UNIT
    row = tl.program_id(0).to(tl.int64) * R
    at, live = _tile(0, V, R, B, Q, C)
    live = live & ((tl.arange(0, R * B) // B)[:, None, None] < rows - row)
    x = tl.load(x_ptr + row * V + at, mask=live, other=float("-inf")).to(tl.float32)  # [RB, Q, C]
    x = tl.reshape(x, (R * B, Q * C))
    m, s = block_max_sum(x)
    largest, total = combine(tl.reshape(m, (R, B)), tl.reshape(s, (R, B)))
    y = _result(x, _to_blocks(largest, B), _to_blocks(total, B), LOG)
    tl.store(out_ptr + row * V + at, tl.reshape(y, (R * B, Q, C)).to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows", "V"])
def _long_softmax_kernel(
    x_ptr, out_ptr, rows, V,
    UNIT: tl.constexpr, LOG: tl.constexpr, STEPS: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A row in up to STEPS steps of B blocks, twice: first its M and L, then backwards, from the cache, the result."""
    V = V // UNIT * UNIT
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * V
    out_ptr += row * V
    maxima = tl.full((STEPS, B), float("-inf"), tl.float32)
    sums = tl.zeros((STEPS, B), tl.float32)
    steps = tl.cdiv(V, B * Q * C)
    for step in tl.range(0, steps, num_stages=STAGES):
        at, live = _tile(step * B, V, 1, B, Q, C)
        x = tl.load(x_ptr + at, mask=live, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        m, s = block_max_sum(tl.reshape(x, (B, Q * C)))
        here = (tl.arange(0, STEPS) == step)[:, None]
        maxima = tl.where(here, m[None, :], maxima)
        sums = tl.where(here, s[None, :], sums)
    largest, total = combine(tl.reshape(maxima, (1, STEPS * B)), tl.reshape(sums, (1, STEPS * B)))
    for back in tl.range(0, steps, num_stages=STAGES):
        at, live = _tile((steps - 1 - back) * B, V, 1, B, Q, C)
        x = tl.load(x_ptr + at, mask=live, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
        y = _result(x, largest[:, None, None], total[:, None, None], LOG)
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=live, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["rows", "V"])
def _softmax_backward_kernel(
    grad_ptr, y_ptr, dx_ptr, rows, V,
    UNIT: tl.constexpr, LOG: tl.constexpr, R: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """R whole rows of B blocks."""
    V = V // UNIT * UNIT
    row = tl.program_id(0).to(tl.int64) * R
    at, live = _tile(0, V, R, B, Q, C)
    live = live & ((tl.arange(0, R * B) // B)[:, None, None] < rows - row)
    grad = tl.load(grad_ptr + row * V + at, mask=live, other=0.0).to(tl.float32)  # [RB, Q, C]
    y = tl.load(y_ptr + row * V + at, mask=live, other=0.0).to(tl.float32)
    terms = tl.reshape(grad if LOG else grad * y, (R * B, Q * C))
    total = sum_by_halves(tl.reshape(sum_by_halves(terms, 1), (R, B)), 1)
    total = tl.reshape(tl.broadcast_to(total, (R, B)), (R * B, 1, 1))
    tl.store(dx_ptr + row * V + at, _dx(grad, y, total, LOG).to(dx_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows", "V"])
def _long_softmax_backward_kernel(
    grad_ptr, y_ptr, dx_ptr, rows, V,
    UNIT: tl.constexpr, LOG: tl.constexpr, STEPS: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A row in up to STEPS steps of B blocks, twice: first its sum, then backwards, from the cache, its gradient."""
    V = V // UNIT * UNIT
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * V
    y_ptr += row * V
    dx_ptr += row * V
    sums = tl.zeros((STEPS, B), tl.float32)
    steps = tl.cdiv(V, B * Q * C)
    for step in tl.range(0, steps, num_stages=STAGES):
        at, live = _tile(step * B, V, 1, B, Q, C)
        terms = tl.load(grad_ptr + at, mask=live, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if not LOG:
            terms *= tl.load(y_ptr + at, mask=live, other=0.0, eviction_policy="evict_last").to(tl.float32)
        s = tl.reshape(sum_by_halves(tl.reshape(terms, (B, Q * C)), 1), (B,))
        sums = tl.where((tl.arange(0, STEPS) == step)[:, None], s[None, :], sums)
    total = sum_by_halves(tl.reshape(sums, (1, STEPS * B)), 1)[:, :, None]
    for back in tl.range(0, steps, num_stages=STAGES):
        at, live = _tile((steps - 1 - back) * B, V, 1, B, Q, C)
        grad = tl.load(grad_ptr + at, mask=live, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = tl.load(y_ptr + at, mask=live, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dx = _dx(grad, y, total, LOG).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + at, dx, mask=live, eviction_policy="evict_first")


def describe_softmax(rows: int, v: int, log: bool, config: SoftmaxConfig) -> Launch:
    """Launch on x and the result."""
    return _describe(_long_softmax_kernel if config.steps else _softmax_kernel, rows, v, log, config)


def describe_softmax_backward(rows: int, v: int, log: bool, config: SoftmaxConfig) -> Launch:
    """Launch on the result's gradient, the result and dx."""
    return _describe(_long_softmax_backward_kernel if config.steps else _softmax_backward_kernel, rows, v, log, config)


def _describe(kernel: Any, rows: int, v: int, log: bool, config: SoftmaxConfig) -> Launch:
    tile = {"B": config.blocks, "Q": config.across, "C": config.columns}
    constants: dict[str, object] = {"UNIT": config.unit, "LOG": log}
    if config.steps:
        constants |= {"STEPS": config.steps, **tile, "STAGES": config.num_stages}
    else:
        constants |= {"R": config.rows, **tile}
    options = {"num_warps": config.num_warps, "num_stages": 1, "enable_fp_fusion": False}
    return Launch(kernel, -(-rows // config.rows), (rows, v), constants, options)
