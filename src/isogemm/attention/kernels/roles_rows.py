"""Rows of queries, values and results, for the warpgroups of the forward with roles."""

from __future__ import annotations

import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from isogemm.attention.kernels.common import LOG2E, quotient

_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global  # since Triton 3.9, before
ROWS = gl.constexpr(64)  # of a warpgroup


@gluon.jit
def finite(top):
    """The maximum that scores are taken off; 0 where there are none, since -inf - -inf is NaN."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def columns(rows, like):
    """A number for each row, beside every column of `like`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    return gl.convert_layout(rows, LAYOUT, assert_trivial=True)[:, None]


@gluon.jit
def _store(o, o_tile, value, b, hk, row, tokens, o_start, o_stride_t, o_stride_h, G: gl.constexpr,
           DV: gl.constexpr, BV: gl.constexpr, INDEX: gl.constexpr, STAGED: gl.constexpr):  # fmt: skip
    """Store rows [64, BV]: by TMA through shared memory, or by addresses."""
    if STAGED:
        tma.store_wait(0)  # what was stored before has been read
        o_tile.reshape([ROWS, BV]).store(value.to(o.dtype))
        fence_async_shared()
        _tma_store(o, [b, hk, row // G, 0, 0], o_tile)
    else:
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, value.type.layout))
        column = gl.arange(0, BV, gl.SliceLayout(0, value.type.layout))
        at = o_start + (rows // G).to(INDEX) * o_stride_t
        at += (hk * G + rows % G).to(INDEX) * o_stride_h
        kept = (rows < tokens * G)[:, None] & (column < DV)[None, :]
        gl.store(o + at[:, None] + column[None, :], value.to(o.dtype.element_ty), mask=kept)


@gluon.jit
def finish(
    top, total, acc, sinks, o, lse, o_tile, b, hk, row, token_start, tokens, o_start, o_stride_t, o_stride_h,
    DV: gl.constexpr, BV: gl.constexpr, G: gl.constexpr, HKV: gl.constexpr, INDEX: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """Take in the sinks, normalise and store rows [64, BV]."""
    rows = row + gl.arange(0, ROWS, top.type.layout)
    head = hk * G + rows % G
    live = rows < tokens * G
    if sinks is not None:
        sink = gl.load(sinks + head, mask=live, other=0.0).to(gl.float32) * LOG2E
        higher = gl.maximum(top, sink)
        base = finite(higher)
        before = gl.exp2(top - base)
        total = gl.fma(total, before, gl.exp2(sink - base))
        acc = acc * columns(before, acc)
        top = higher
    empty = total == 0.0
    divisor = gl.where(empty, 1.0, total)
    if lse is not None:
        at = (token_start.to(gl.int64) + rows // G) * (G * HKV) + head
        gl.store(lse + at, gl.where(empty, float("inf"), top + gl.log2(divisor)), mask=live)
    inverse = gl.broadcast(columns(gl.div_rn(1.0, divisor), acc), acc)[0]
    acc = quotient(acc, gl.broadcast(columns(divisor, acc), acc)[0], inverse) + 0.0  # a sum of nothing has no sign
    _store(o, o_tile, acc, b, hk, row, tokens, o_start, o_stride_t, o_stride_h, G, DV, BV, INDEX, STAGED)


@gluon.jit
def fetch(q, q_tile, hk, row, tokens, q_start, q_stride_t, q_stride_h, G: gl.constexpr, D: gl.constexpr,
           BD: gl.constexpr, INDEX: gl.constexpr):  # fmt: skip
    """Queries [64, BD] into shared memory, by addresses: heads of a group that no box of TMA is filled with."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BD, BD // 8], [4, 1], [1, 0])
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BD, gl.SliceLayout(0, LAYOUT))
    at = q_start + (hk * G + rows % G).to(INDEX) * q_stride_h + (rows // G).to(INDEX) * q_stride_t
    kept = (rows < tokens * G)[:, None] & (column < D)[None, :]
    values = gl.load(q + at[:, None] + column[None, :], mask=kept, other=0.0)
    tl.debug_barrier()  # the warpgroup has read the queries before
    q_tile.store(values)
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def clear(v_tile, key, begin, end, BN: gl.constexpr, BV: gl.constexpr):
    """Make values zero that are not the sequence's: times a weight of 0 they might be NaN."""
    if (key < begin) | (key + BN > end):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
        keys = (key + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT)))[:, None]
        values = v_tile.load(LAYOUT)
        v_tile.store(gl.where((keys >= begin) & (keys < end), values, gl.zeros_like(values)))
        fence_async_shared()
        tl.debug_barrier()
