"""The gradient of an embedding's weight, from its tokens sorted by id, which keeps them in order.

A piece is what one id has in one chunk of tokens: its rows are added from zero, in order. Then an id's pieces are added
to its total, in order. Pieces of LONG rows or more are summed first, by programs of their own, into scratch memory; at
most one of them begins in each window of LONG places.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.launch import Launch
from isogemm.norm.configs import EMBEDDING_CHUNK

_CHUNK = tl.constexpr(EMBEDDING_CHUNK)
_LONG = tl.constexpr(32)
_AT_ONCE = tl.constexpr(8)  # rows in flight
_COLUMNS = 1024
LONG = 32


@triton.jit
def _piece(ids_ptr, order_ptr, at, T):
    """Id and chunk of places in the sorted order; -1 outside of it."""
    live = (at >= 0) & (at < T)
    id = tl.load(ids_ptr + at, mask=live, other=-1)
    return id, tl.where(live, tl.load(order_ptr + at, mask=live, other=0) // _CHUNK, -1)


@triton.jit
def _piece_end(ids_ptr, order_ptr, at, id, chunk, T):
    """The first place after `at` that is not of its piece."""
    end = at + 1
    found = False
    while not found:
        places = end + tl.arange(0, _LONG)
        other_id, other_chunk = _piece(ids_ptr, order_ptr, places, T)
        same = (other_id == id) & (other_chunk == chunk)
        count = tl.sum(same.to(tl.int32), axis=0)  # a piece is contiguous
        end += count
        found = count < _LONG
    return end


@triton.jit
def _sum_rows(grad_ptr, order_ptr, begin, end, column, D):
    """Add rows of grad in the sorted order, from zero."""
    acc = tl.zeros(column.shape, tl.float32)
    for first in tl.range(begin, end, _AT_ONCE):
        for place in tl.static_range(_AT_ONCE):
            at = first + place
            token = tl.load(order_ptr + at, mask=at < end, other=0).to(tl.int64)
            acc += tl.load(grad_ptr + token * D + column, mask=(at < end) & (column < D), other=0.0).to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["T"])
def _long_pieces_kernel(
    grad_ptr, ids_ptr, order_ptr, sums_ptr, ends_ptr, T, D: tl.constexpr, ACROSS: tl.constexpr, BN: tl.constexpr
):
    """sums [windows, D] and ends [windows]: of the long piece that begins in each window."""
    window = tl.program_id(0) // ACROSS
    column = tl.program_id(0) % ACROSS * BN + tl.arange(0, BN)
    places = window * _LONG + tl.arange(0, _LONG)
    id, chunk = _piece(ids_ptr, order_ptr, places, T)
    id_before, chunk_before = _piece(ids_ptr, order_ptr, places - 1, T)
    id_after, chunk_after = _piece(ids_ptr, order_ptr, places + (_LONG - 1), T)
    begins = (id != id_before) | (chunk != chunk_before)
    is_long = begins & (id == id_after) & (chunk == chunk_after) & (id >= 0)
    begin = tl.max(tl.where(is_long, places, -1), axis=0)
    if begin >= 0:
        of_id, of_chunk = _piece(ids_ptr, order_ptr, begin, T)
        end = _piece_end(ids_ptr, order_ptr, begin, of_id, of_chunk, T)
        tl.store(ends_ptr + window, end)
        sums = _sum_rows(grad_ptr, order_ptr, begin, end, column, D)
        tl.store(sums_ptr + window.to(tl.int64) * D + column, sums, mask=column < D)


@triton.jit(do_not_specialize=["T", "vocabulary", "padding"])
def _embedding_backward_kernel(
    grad_ptr, ids_ptr, order_ptr, sums_ptr, ends_ptr, out_ptr, T, vocabulary, padding, stride_row, stride_column,
    D: tl.constexpr, ACROSS: tl.constexpr, ACCUMULATE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[id] = (out[id] or 0) + piece + piece + ..., in order, by the program where the id begins."""
    at = tl.program_id(0) // ACROSS
    column = tl.program_id(0) % ACROSS * BN + tl.arange(0, BN)
    id = tl.load(ids_ptr + at)
    before = tl.load(ids_ptr + at - 1, mask=at > 0, other=-1)
    if (id != before) & (id != padding) & (id >= 0) & (id < vocabulary):
        to = out_ptr + id.to(tl.int64) * stride_row + column.to(tl.int64) * stride_column
        total = tl.zeros((BN,), tl.float32)
        if ACCUMULATE:
            total = tl.load(to, mask=column < D, other=0.0)
        lives = True
        while lives:
            chunk = tl.load(order_ptr + at) // _CHUNK
            last = at + (_LONG - 1)
            last_id, last_chunk = _piece(ids_ptr, order_ptr, last, T)
            if (last_id == id) & (last_chunk == chunk):
                end = tl.load(ends_ptr + at // _LONG)
                total += tl.load(sums_ptr + (at // _LONG).to(tl.int64) * D + column, mask=column < D, other=0.0)
            else:
                end = _piece_end(ids_ptr, order_ptr, at, id, chunk, T).to(tl.int32)
                total += _sum_rows(grad_ptr, order_ptr, at, end, column, D)
            at = end
            lives = tl.load(ids_ptr + at, mask=at < T, other=-1) == id
        tl.store(to, total.to(out_ptr.dtype.element_ty), mask=column < D)


def describe_long_pieces(tokens: int, d: int) -> Launch:
    """Launch on grad, the sorted ids and their tokens; the sums and ends of long pieces, one for each LONG tokens."""
    constants, across = _constants(d)
    return Launch(_long_pieces_kernel, -(-tokens // LONG) * across, (tokens,), constants, _options(constants))


def describe_embedding_backward(
    tokens: int, vocabulary: int, d: int, padding: int, strides: tuple[int, int], accumulate: bool
) -> Launch:
    """Launch on what `describe_long_pieces` takes, and the weight's gradient, which is 0 where no id points."""
    constants, across = _constants(d)
    scalars = (tokens, vocabulary, padding, *strides)
    ordered = {"D": d, "ACROSS": across, "ACCUMULATE": accumulate, "BN": constants["BN"]}
    return Launch(_embedding_backward_kernel, tokens * across, scalars, ordered, _options(constants))


def _constants(d: int) -> tuple[dict[str, object], int]:
    columns = min(_COLUMNS, 1 << max(d - 1, 0).bit_length())
    across = -(-d // columns)
    return {"D": d, "ACROSS": across, "BN": columns}, across


def _options(constants: dict[str, object]) -> dict[str, object]:
    columns = constants["BN"]
    assert isinstance(columns, int)
    return {"num_warps": max(1, columns // 256), "num_stages": 1, "enable_fp_fusion": False}
