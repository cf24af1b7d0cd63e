"""The forward for few rows on Hopper, by warps with roles: some load keys and values ahead, four compute.

The bits are those of `forward`. Programs are persistent: each has as many splits as the others, one after another
through sequences and heads, and loads go on from one to the next. A program that begins inside a tile writes each
split's sums to scratch memory first; the one that has the tile's beginning comes to it last, and adds them. Programs
have their splits in descending order, so that each waits only for programs that were started before.

Four blocks of keys are scored at once, each by one warp; their weights go through shared memory to all four, which
multiply them by values one block after another.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from isogemm.attention import configs
from isogemm.attention.configs import Config, Problem
from isogemm.attention.kernels.common import (
    LOG2E,
    first_query,
    is_inside,
    key_range,
    key_rows,
    keys_of,
    logits,
    quotient,
    row_sums,
    visible,
)
from isogemm.core.kernels import pdl_option, start_launch
from isogemm.core.launch import Launch
from isogemm.core.plan import STAMP
from isogemm.core.problems import next_power_of_two

_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # since Triton 3.9, before
# Shared memory seen in another dtype and layout; public since Triton 3.9.
_view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
_WARPS = gl.constexpr(4)  # that compute, and the blocks of keys that they score at once
_LOADED_ROWS = gl.constexpr(64)  # that are loaded by one copy
_LOADED_AHEAD = gl.constexpr(64)  # rows of other programs' sums that are loaded before the first is added


@gluon.jit
def _finite(top):
    """The maximum that scores are taken off; 0 where there are none, since -inf - -inf is NaN."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def _columns(rows, like):
    """A number for each row, beside every column of `like`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    return gl.convert_layout(rows, LAYOUT, assert_trivial=True)[:, None]


@gluon.jit
def _sequence(
    b, T, S, cu_q, cu_k, lengths, starts, offsets, KIND: gl.constexpr, G: gl.constexpr, BM: gl.constexpr,
    SPLIT: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Sequence b: where its keys begin in the buffer, their first position, one past the last, its first token in q
    and its tokens, its blocks of rows, and its first split and one past the last: at least one."""
    index, first, last = keys_of(b, S, cu_k, lengths, starts, offsets, KIND)
    if KIND == "dense":
        token = b * T
        tokens = b * 0 + T
    else:
        token = gl.load(cu_q + b)
        tokens = gl.load(cu_q + b + 1) - token
    begin, end = key_range(last - tokens, last - 1, first, last, CAUSAL, LEFT, RIGHT)
    low = begin // SPLIT
    high = gl.maximum((end + SPLIT - 1) // SPLIT, low + 1)
    return index, first, last, token, tokens, (tokens * G + BM - 1) // BM, low, high


@gluon.jit
def _share(
    B, T, S, cu_q, cu_k, lengths, starts, offsets, KIND: gl.constexpr, G: gl.constexpr, HKV: gl.constexpr,
    BM: gl.constexpr, BB: gl.constexpr, SPLIT: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """This program's place in the order of work, the splits that each program has, how many are its own, and its
    first: the sequence and the number of splits of it that come before.

    EVEN: whether all sequences have as many splits. Else BB is at least B.
    """
    place = gl.num_programs(0) - 1 - gl.program_id(0)
    if EVEN:
        _, _, _, _, _, blocks, low, high = _sequence(
            0, T, S, cu_q, cu_k, lengths, starts, offsets, KIND, G, BM, SPLIT, CAUSAL, LEFT, RIGHT
        )
        each = blocks * HKV * (high - low)
        total = B * each
        share = gl.cdiv(total, gl.num_programs(0))
        item = place * share
        b = item // each
        rest = item - b * each
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([BB // 128 if BB > 128 else 1], [32], [4], [0])
        some = gl.arange(0, BB, LAYOUT)
        _, _, _, _, _, blocks, low, high = _sequence(
            gl.minimum(some, B - 1), T, S, cu_q, cu_k, lengths, starts, offsets, KIND, G, BM, SPLIT, CAUSAL, LEFT, RIGHT
        )
        ends = gl.associative_scan(gl.where(some < B, blocks * HKV * (high - low), 0), 0, _add)
        total = gl.max(ends, 0)
        share = gl.cdiv(total, gl.num_programs(0))
        item = place * share
        before = ends <= item
        b = gl.sum(before.to(gl.int32), 0)
        rest = item - gl.max(gl.where(before, ends, 0), 0)
    return place, share, gl.minimum(share, total - item), b, rest


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _next(slot, phase, SLOTS: gl.constexpr):
    """The next buffer, and the parity of its barriers' phase."""
    wraps = slot == SLOTS - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _fill(
    tile, ready, ptr, b, hk, n, low, high, at, table, stride_b, stride_t, stride_h, table_stride, SPREAD: gl.constexpr,
    KIND: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, INDEX: gl.constexpr,
    LOADERS: gl.constexpr,
):  # fmt: skip
    """Start to load the keys or values at positions n .. n + 4 * BN - 1; zeros outside of low .. high - 1.

    SPREAD: whether the four blocks' keys take turns, eight at a time, which gives each warp a block of scores.
    """
    BW: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BW, BW // 8], [LOADERS, 1], [1, 0])
    column = gl.arange(0, BW, gl.SliceLayout(0, LAYOUT))
    for part in gl.static_range(_WARPS * BN // _LOADED_ROWS):
        row = part * _LOADED_ROWS + gl.arange(0, _LOADED_ROWS, gl.SliceLayout(1, LAYOUT))
        if SPREAD:
            row = row // 8 % _WARPS * BN + row // (8 * _WARPS) * 8 + row % 8
        key = n + row
        held = (key >= low) & (key < high)
        rows = key_rows(
            ptr, b, hk, key + at, held, table, table_stride, stride_b, stride_t, stride_h, KIND, PAGE, INDEX
        )
        kept = held[:, None]
        if D != BW:
            kept = kept & (column < D)[None, :]
        some = tile.slice(part * _LOADED_ROWS, _LOADED_ROWS)
        _copy(some, rows[:, None] + column[None, :], mask=kept)
    async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def _load(
    k, v, tiles, ready, free, cu_q, cu_k, lengths, starts, offsets, table, T, S, count, b, rest,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, table_stride,
    KIND: gl.constexpr, PAGE: gl.constexpr, G: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, INDEX: gl.constexpr, SLOTS: gl.constexpr, LOADERS: gl.constexpr,
):  # fmt: skip
    """The loading warps: fill each buffer as soon as it has been read."""
    slot = 0
    phase = 1
    while count > 0:
        index, first, last, _, tokens, blocks, low_split, high_split = _sequence(
            b, T, S, cu_q, cu_k, lengths, starts, offsets, KIND, G, BM, SPLIT, CAUSAL, LEFT, RIGHT
        )
        splits = high_split - low_split
        tile = rest // splits
        if tile < blocks * HKV:
            hk = tile // blocks
            row = tile % blocks * BM
            low_query = last - tokens + row // G
            high_query = last - tokens + gl.minimum((row + BM - 1) // G, tokens - 1)
            begin, end = key_range(low_query, high_query, first, last, CAUSAL, LEFT, RIGHT)
            start = rest - tile * splits
            stop = gl.minimum(splits, start + count)
            for split in range(low_split + start, low_split + stop):
                low = gl.maximum(split * SPLIT, begin)
                high = gl.minimum(split * SPLIT + SPLIT, end)
                for n in range(low // (_WARPS * BN) * (_WARPS * BN), high, _WARPS * BN):
                    mbarrier.wait(free.index(slot), phase)
                    _fill(
                        tiles.index(slot), ready.index(slot), k, b, hk, n, low, high, index - first, table, k_stride_b,
                        k_stride_t, k_stride_h, table_stride, True, KIND, PAGE, D, BN, INDEX, LOADERS,
                    )  # fmt: skip
                    slot, phase = _next(slot, phase, SLOTS)
                    mbarrier.wait(free.index(slot), phase)
                    _fill(
                        tiles.index(slot), ready.index(slot), v, b, hk, n, low, high, index - first, table, v_stride_b,
                        v_stride_t, v_stride_h, table_stride, False, KIND, PAGE, DV, BN, INDEX, LOADERS,
                    )  # fmt: skip
                    slot, phase = _next(slot, phase, SLOTS)
            count -= stop - start
            rest += stop - start
        else:
            b += 1
            rest = 0


@gluon.jit
def _fetch(
    q, q_tile, b, hk, row, token_start, tokens, q_stride_b, q_stride_t, q_stride_h, KIND: gl.constexpr, G: gl.constexpr,
    D: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Load a tile's queries into shared memory."""
    BW: gl.constexpr = q_tile.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BW, BW // 8], [_WARPS, 1], [1, 0])
    rows = row + gl.arange(0, q_tile.shape[0], gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BW, gl.SliceLayout(0, LAYOUT))
    at = (hk * G + rows % G).to(INDEX) * q_stride_h
    if KIND == "dense":
        at = b.to(gl.int64) * q_stride_b + (rows // G).to(INDEX) * q_stride_t + at
    else:
        at = (token_start + rows // G).to(gl.int64) * q_stride_t + at
    kept = (rows < tokens * G)[:, None] & (column < D)[None, :]
    q_tile.store(gl.load(q + at[:, None] + column[None, :], mask=kept, other=0.0))


@gluon.jit
def _keep(partial, weights_ptr, cell, top, total, acc, live, ROWS: gl.constexpr):
    """Write a split's sums to a cell of scratch memory."""
    BW: gl.constexpr = acc.shape[1]
    within = gl.arange(0, acc.shape[0], top.type.layout)
    column = gl.arange(0, BW, gl.SliceLayout(0, acc.type.layout))
    kept = live & (within < ROWS)
    rows = partial + cell * (ROWS * BW) + within * BW
    gl.store(rows[:, None] + column[None, :], acc, mask=kept[:, None])
    gl.store(weights_ptr + cell * (2 * ROWS) + within, top, mask=kept)
    gl.store(weights_ptr + cell * (2 * ROWS) + ROWS + within, total, mask=kept)


@gluon.jit
def _add_split(top, total, acc, top_before, total_before, acc_before):
    """Add a split's maximum, weight and sums to those of the splits before, as `forward.add_split` does."""
    higher = gl.maximum(top_before, top)
    base = _finite(higher)
    before = gl.exp2(top_before - base)
    share = gl.exp2(top - base)
    acc_before = acc_before * _columns(before, acc)
    acc = gl.fma(acc, gl.broadcast(_columns(share, acc), acc)[0], acc_before)
    return higher, gl.fma(total, share, total_before * before), acc


@gluon.jit
def _step(
    top, total, acc, q_tile, p_tile, tops, totals, tiles, ready, free, slot, phase, n, query, low_query, high_query,
    first, last, c, scale, softcap,
    BN: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, GENERAL: gl.constexpr,
    SOFTCAP: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Add four blocks of keys from position n on."""
    BM: gl.constexpr = acc.shape[0]
    BW: gl.constexpr = acc.shape[1]
    KEYS: gl.constexpr = _WARPS * BN
    INNER: gl.constexpr = 8192 // KEYS  # elements of a head that are multiplied at once
    MMA: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    LEFT_SIDE: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT_SIDE: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    mbarrier.wait(ready.index(slot), phase)
    k_tile = tiles.index(slot)
    y = gl.zeros((BM, KEYS), gl.float32, MMA)
    for d in gl.static_range(0, BW, INNER):
        part = k_tile.slice(d, INNER, dim=1).permute((1, 0)).load(RIGHT_SIDE)
        y = mma_v2(q_tile.slice(d, INNER, dim=1).load(LEFT_SIDE), part, y)
    tl.debug_barrier()
    mbarrier.arrive(free.index(slot))
    slot, phase = _next(slot, phase, SLOTS)
    y = logits(y, None, scale, softcap, GENERAL, SOFTCAP)
    if not is_inside(low_query, high_query, n, first, last, KEYS, CAUSAL, LEFT, RIGHT):
        column = gl.arange(0, KEYS, gl.SliceLayout(0, MMA))
        key = n + column // 8 % _WARPS * BN + column // (8 * _WARPS) * 8 + column % 8
        y = gl.where(visible(query[:, None], key[None, :], first, last, CAUSAL, LEFT, RIGHT), y, float("-inf"))
    y = y.reshape([BM, BN // 8, _WARPS, 8]).permute((0, 2, 1, 3)).reshape([BM, _WARPS, BN])
    BLOCK: gl.constexpr = gl.SliceLayout(2, y.type.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    _view(tops, gl.float32, [_WARPS, BM], PLAIN).store((gl.max(y, 2) * c).permute((1, 0)))
    own = gl.arange(0, _WARPS, gl.SliceLayout(0, BLOCK))
    base = gl.convert_layout(top, gl.SliceLayout(1, BLOCK), assert_trivial=True)[:, None]
    base = gl.broadcast(base, own[None, :])[0]
    for block in gl.static_range(_WARPS):
        other = tops.index(block).load(gl.SliceLayout(1, BLOCK))[:, None]
        base = gl.maximum(base, gl.where(own[None, :] >= block, other, float("-inf")))
    base = _finite(base)
    p = gl.exp2(gl.fma(y, gl.full_like(y, c), gl.broadcast(-base[:, :, None], y)[0]))
    sums = row_sums(p.reshape([BM * _WARPS, BN])).reshape([BM, _WARPS])
    _view(totals, gl.float32, [_WARPS, BM], PLAIN).store(sums.permute((1, 0)))
    p_tile.store(p.to(tiles.dtype).permute((1, 0, 2)).reshape([_WARPS * BM, BN]))
    mbarrier.wait(ready.index(slot), phase)
    v_tile = tiles.index(slot)
    for block in gl.static_range(_WARPS):
        higher = gl.maximum(top, tops.index(block).load(ROW))
        shrink = gl.exp2(top - _finite(higher))
        total = gl.fma(total, shrink, totals.index(block).load(ROW))
        acc = acc * shrink[:, None]
        weights = p_tile.slice(block * BM, BM).load(LEFT_SIDE)
        acc = mma_v2(weights, v_tile.slice(block * BN, BN).load(RIGHT_SIDE), acc)
        top = higher
    tl.debug_barrier()
    mbarrier.arrive(free.index(slot))
    slot, phase = _next(slot, phase, SLOTS)
    return top, total, acc, slot, phase


@gluon.jit
def _set_flag(flag, stamp):
    """Let the program that waits for `stamp` see all that these warps have written."""
    tl.debug_barrier()
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first st.release.gpu.global.b64 [$1], $2;
        mov.b64 $0, $2;
        }""",
        "=l,l,l", [flag, stamp], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _await_flags(flags, stamps, waits):
    """Wait for flags where `waits` is not 0, then clear them: a replayed graph's stamp is the same every time."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred waits, other;
        .reg .b64 seen;
        setp.ne.s32 waits, $3, 0;
        again: @waits ld.acquire.gpu.global.b64 seen, [$1];
        setp.ne.and.b64 other, seen, $2, waits;
        @other bra again;
        @waits st.global.b64 [$1], 0;
        mov.b64 $0, $2;
        }""",
        "=&l,l,l,r", [flags, stamps, waits], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _gather(
    top_before, total_before, acc_before, partial, weights_ptr, flags, stamp, item, items, share, cells, live,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Add the next items' sums, which other programs have written, in ascending order."""
    BW: gl.constexpr = acc_before.shape[1]
    AHEAD: gl.constexpr = _LOADED_AHEAD // (ROWS if ROWS > 4 else 4)
    LAYOUT: gl.constexpr = acc_before.type.layout
    some = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    for step in range(0, items, 128):
        other = item + step + some
        cell = other // share * cells + other % share
        waits = (step + some < items).to(gl.int32)
        _await_flags(flags + cell, gl.full_like(cell, stamp, dtype=gl.int64), waits)
    tl.debug_barrier()
    within = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BW, gl.SliceLayout(0, LAYOUT))
    for step in range(0, items, AHEAD):
        for each in gl.static_range(AHEAD):
            other = item + step + each
            cell = (other // share * cells + other % share).to(gl.int64)
            there = live & (step + each < items)
            top = gl.load(weights_ptr + cell * (2 * ROWS) + within, mask=there, other=float("-inf"))
            total = gl.load(weights_ptr + cell * (2 * ROWS) + ROWS + within, mask=there, other=0.0)
            rows = partial + cell * (ROWS * BW) + within * BW
            acc = gl.load(rows[:, None] + column[None, :], mask=there[:, None], other=0.0)
            top_before, total_before, acc_before = _add_split(top, total, acc, top_before, total_before, acc_before)
    return top_before, total_before, acc_before


@gluon.jit
def _finish(
    top, total, acc, sinks, o, lse, b, token_start, token, head, live, o_stride_b, o_stride_t, o_stride_h,
    H: gl.constexpr, KIND: gl.constexpr, DV: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Take in the sinks, normalise and store rows."""
    if sinks is not None:
        sink = gl.load(sinks + head, mask=live, other=0.0).to(gl.float32) * LOG2E
        higher = gl.maximum(top, sink)
        base = _finite(higher)
        before = gl.exp2(top - base)
        total = gl.fma(total, before, gl.exp2(sink - base))
        acc = acc * _columns(before, acc)
        top = higher
    empty = total == 0.0
    divisor = gl.where(empty, 1.0, total)
    inverse = gl.broadcast(_columns(gl.div_rn(1.0, divisor), acc), acc)[0]
    value = quotient(acc, gl.broadcast(_columns(divisor, acc), acc)[0], inverse) + 0.0  # a sum of nothing has no sign
    if KIND == "dense":
        rows = o + b.to(gl.int64) * o_stride_b + token.to(INDEX) * o_stride_t + head.to(INDEX) * o_stride_h
    else:
        rows = o + (token_start + token).to(gl.int64) * o_stride_t + head.to(INDEX) * o_stride_h
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    kept = live[:, None] & (column < DV)[None, :]
    gl.store(rows[:, None] + column[None, :], value.to(o.dtype.element_ty), mask=kept)
    if lse is not None:
        at = (token_start + token).to(gl.int64) * H + head
        gl.store(lse + at, gl.where(empty, float("inf"), top + gl.log2(divisor)), mask=live)


@gluon.jit
def _attend(
    q, sinks, o, lse, partial, tiles, q_tile, p_tile, tops, totals, ready, free, cu_q, cu_k, lengths, starts, offsets,
    stamp, T, S, cells, place, share, count, b, rest, q_stride_b, q_stride_t, q_stride_h, o_stride_b, o_stride_t,
    o_stride_h, c, scale, softcap,
    KIND: gl.constexpr, G: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BM: gl.constexpr,
    ROWS: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, GENERAL: gl.constexpr, SOFTCAP: gl.constexpr, INDEX: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The computing warps."""
    BW: gl.constexpr = q_tile.shape[1]
    KEYS: gl.constexpr = _WARPS * BN
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, _WARPS], [16, 8])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    O_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BW, BW // 4], [_WARPS, 1], [1, 0])
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    most = gl.num_programs(0).to(gl.int64) * cells
    weights_ptr = partial + most * (ROWS * BW)
    flags = (partial + most * (ROWS * BW + 2 * ROWS)).to(gl.pointer_type(gl.int64), bitcast=True)
    slot = 0
    phase = 0
    done = 0
    while done < count:
        _, first, last, token_start, tokens, blocks, low_split, high_split = _sequence(
            b, T, S, cu_q, cu_k, lengths, starts, offsets, KIND, G, BM, SPLIT, CAUSAL, LEFT, RIGHT
        )
        splits = high_split - low_split
        tile = rest // splits
        if tile < blocks * HKV:
            hk = tile // blocks
            row = tile % blocks * BM
            low_query = last - tokens + row // G
            high_query = last - tokens + gl.minimum((row + BM - 1) // G, tokens - 1)
            begin, end = key_range(low_query, high_query, first, last, CAUSAL, LEFT, RIGHT)
            start = rest - tile * splits
            stop = gl.minimum(splits, start + count - done)
            _fetch(q, q_tile, b, hk, row, token_start, tokens, q_stride_b, q_stride_t, q_stride_h, KIND, G, D, INDEX)
            rows = row + gl.arange(0, BM, ROW)
            live = rows < tokens * G
            query = last - tokens + rows // G
            top_before = gl.full((BM,), float("-inf"), gl.float32, ROW)
            total_before = gl.zeros((BM,), gl.float32, ROW)
            acc_before = gl.zeros((BM, BW), gl.float32, MMA)
            for number in range(start, stop):
                split = low_split + number
                low = gl.maximum(split * SPLIT, begin)
                high = gl.minimum(split * SPLIT + SPLIT, end)
                top = gl.full((BM,), float("-inf"), gl.float32, ROW)
                total = gl.zeros((BM,), gl.float32, ROW)
                acc = gl.zeros((BM, BW), gl.float32, MMA)
                for n in range(low // KEYS * KEYS, high, KEYS):
                    top, total, acc, slot, phase = _step(
                        top, total, acc, q_tile, p_tile, tops, totals, tiles, ready, free, slot, phase, n, query,
                        low_query, high_query, first, last, c, scale, softcap, BN, CAUSAL, LEFT, RIGHT, GENERAL,
                        SOFTCAP, SLOTS,
                    )  # fmt: skip
                if not CAUSAL and starts is not None:
                    padding = query < first_query(starts, CAUSAL)
                    top = gl.where(padding, float("-inf"), top)
                    total = gl.where(padding, 0.0, total)
                    acc = gl.where(padding[:, None], 0.0, acc)
                if start == 0:
                    top_before, total_before, acc_before = _add_split(
                        top, total, acc, top_before, total_before, acc_before
                    )
                else:
                    cell = (place * cells + done + number - start).to(gl.int64)
                    _keep(partial, weights_ptr, cell, top, total, acc, live, ROWS)
                    _set_flag(flags + cell, stamp)
            if start == 0:
                # The rows that may be live, spread over all threads.
                sums = _view(p_tile, gl.float32, [BM, BW], SUMS)
                sums.store(acc_before)
                tops.index(0).store(top_before)
                totals.index(0).store(total_before)
                few = row + gl.arange(0, ROWS, gl.SliceLayout(1, O_LAYOUT))
                kept = few < tokens * G
                top_all, total_all, acc_all = _gather(
                    tops.index(0).slice(0, ROWS).load(gl.SliceLayout(1, O_LAYOUT)),
                    totals.index(0).slice(0, ROWS).load(gl.SliceLayout(1, O_LAYOUT)),
                    sums.slice(0, ROWS).load(O_LAYOUT),
                    partial, weights_ptr, flags, stamp, place * share + done + stop, splits - stop, share, cells, kept,
                    ROWS,
                )  # fmt: skip
                _finish(
                    top_all, total_all, acc_all, sinks, o, lse, b, token_start, few // G, hk * G + few % G, kept,
                    o_stride_b, o_stride_t, o_stride_h, G * HKV, KIND, DV, INDEX,
                )  # fmt: skip
            done += stop - start
            rest += stop - start
        else:
            b += 1
            rest = 0


@gluon.jit(do_not_specialize=["stamp", "B", "T", "S", "cells"])
def _decode_kernel(
    q, k, v, mask, sinks, o, lse, partial, cu_q, cu_k, lengths, starts, offsets, table,
    stamp, B, T, S, cells,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    o_stride_b, o_stride_t, o_stride_h, table_stride, c, scale, softcap,
    KIND: gl.constexpr, PAGE: gl.constexpr, G: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BM: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr, BW: gl.constexpr, BB: gl.constexpr, SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, GENERAL: gl.constexpr, SOFTCAP: gl.constexpr,
    INDEX: gl.constexpr, EVEN: gl.constexpr, SLOTS: gl.constexpr, LOADERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = k.dtype.element_ty
    ROWS_OF_16: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(DTYPE, [SLOTS, _WARPS * BN, BW], ROWS_OF_16)
    q_tile = gl.allocate_shared_memory(DTYPE, [BM, BW], ROWS_OF_16)
    p_tile = gl.allocate_shared_memory(DTYPE, [_WARPS * BM, BN], ROWS_OF_16)
    tops = gl.allocate_shared_memory(gl.float32, [_WARPS, BM], PLAIN)
    totals = gl.allocate_shared_memory(gl.float32, [_WARPS, BM], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=32 * LOADERS)
        mbarrier.init(free.index(slot), count=1)
    start_launch(PDL)
    place, share, count, b, rest = _share(
        B, T, S, cu_q, cu_k, lengths, starts, offsets, KIND, G, HKV, BM, BB, SPLIT, CAUSAL, LEFT, RIGHT, EVEN
    )
    gl.warp_specialize(
        [
            (_attend, (
                q, sinks, o, lse, partial, tiles, q_tile, p_tile, tops, totals, ready, free, cu_q, cu_k, lengths,
                starts, offsets, stamp, T, S, cells, place, share, count, b, rest, q_stride_b, q_stride_t, q_stride_h,
                o_stride_b, o_stride_t, o_stride_h, c, scale, softcap, KIND, G, HKV, D, DV, BM, ROWS, BN, SPLIT, CAUSAL,
                LEFT, RIGHT, GENERAL, SOFTCAP, INDEX, SLOTS,
            )),
            (_load, (
                k, v, tiles, ready, free, cu_q, cu_k, lengths, starts, offsets, table, T, S, count, b, rest,
                k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, table_stride, KIND, PAGE, G,
                HKV, D, DV, BM, BN, SPLIT, CAUSAL, LEFT, RIGHT, INDEX, SLOTS, LOADERS,
            )),
        ],
        worker_num_warps=[LOADERS],
        worker_num_regs=[232],
    )  # fmt: skip


KERNELS = (_decode_kernel,)


def _programs(problem: Problem, config: Config) -> tuple[int, int]:
    """Number of programs, and of cells of scratch memory that each may need."""
    items = configs.row_blocks(problem, config.block_m) * problem.kv_heads * problem.most_splits
    programs = max(1, min(items, problem.sm_count))
    return programs, min(problem.most_splits, -(-items // programs))


def _sizes(problem: Problem, config: Config) -> tuple[int, int]:
    """Rows that may be live, and the width of a tile."""
    rows = problem.queries * problem.group if problem.kind == "dense" else config.block_m
    width = next_power_of_two(max(problem.head, problem.value_head), 64)
    return min(config.block_m, next_power_of_two(rows, 1)), width


def partial_elements(problem: Problem, config: Config) -> int:
    """float32 elements of scratch memory: what programs hand over, and their flags."""
    programs, cells = _programs(problem, config)
    rows, width = _sizes(problem, config)
    return programs * cells * (rows * (width + 2) + 2)


def describe_decode(problem: Problem, config: Config, loaders: int = 4) -> Launch:
    """Launch on the tensors of `forward.describe_forward`, without a mask; partial is of `partial_elements`."""
    programs, cells = _programs(problem, config)
    rows, width = _sizes(problem, config)
    even = problem.kind == "dense" and not any(problem.placed)
    constants: dict[str, object] = {
        "KIND": problem.kind, "PAGE": problem.page, "G": problem.group, "HKV": problem.kv_heads, "D": problem.head,
        "DV": problem.value_head, "BM": config.block_m, "ROWS": rows, "BN": problem.order.block_n, "BW": width,
        "BB": 1 if even else next_power_of_two(problem.sequences, 128), "SPLIT": problem.order.split,
        "CAUSAL": problem.causal, "LEFT": problem.left, "RIGHT": problem.right, "GENERAL": problem.is_general,
        "SOFTCAP": bool(problem.softcap), "INDEX": tl.int64 if problem.wide else tl.int32,
        "EVEN": even, "SLOTS": config.num_stages, "LOADERS": loaders,
        "PDL": config.pdl,
    }  # fmt: skip
    scalars = (
        STAMP, problem.sequences, problem.queries, problem.keys, cells, *problem.q_strides, *problem.k_strides,
        *problem.v_strides, *problem.o_strides, problem.table_stride, *problem.factors, problem.softcap,
    )  # fmt: skip
    options: dict[str, object] = {"num_warps": _WARPS.value, "num_stages": 1, "enable_fp_fusion": False}
    return Launch(_decode_kernel, programs, scalars, constants, options | pdl_option(config.pdl))
