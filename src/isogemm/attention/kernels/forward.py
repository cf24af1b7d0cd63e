"""The forward: a program walks the keys of a tile of rows, or one split of them, which a second launch adds.

A tile's rows are queries and heads of a group: row r is token r // G, head r % G. So a group loads its keys once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.attention import configs
from isogemm.attention.configs import Config, Problem
from isogemm.attention.kernels.common import (
    LOG2E,
    first_query,
    is_inside,
    key_range,
    key_rows,
    keys_of,
    load_mask,
    load_rows,
    logits,
    operand,
    packed_sequence,
    product,
    quotient,
    row_sums,
    visible,
)
from isogemm.core.kernels import pdl_option, start_launch
from isogemm.core.launch import Launch
from isogemm.core.problems import next_power_of_two

_LOADED = tl.constexpr(16)  # partial results that are loaded before the first is added


@triton.jit
def rows_of(
    program, cu_q_ptr, B, T, together, slots, KIND: tl.constexpr, G: tl.constexpr, HKV: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """A program's sequence and key head, its block of rows, the sequence's first token in q, and its tokens.

    The last blocks come first, since causal queries at the end see most keys; and `together` key heads after another,
    so that their keys stay in the cache.
    """
    if KIND == "dense":
        blocks = tl.cdiv(T * G, BM)
        turn = program // (together * blocks)
        member = program - turn * together * blocks
        members = tl.minimum(together, B * HKV - turn * together)
        block = blocks - 1 - member // members
        pair = turn * together + member % members
        b = pair // HKV
        return b, pair % HKV, block, b.to(tl.int64) * T, T
    else:
        b, block = packed_sequence(slots - 1 - program // HKV, cu_q_ptr, B, G, BM)
        token = tl.load(cu_q_ptr + b)
        return b, program % HKV, block, token.to(tl.int64), tl.load(cu_q_ptr + b + 1) - token


@triton.jit
def _new_state(BM: tl.constexpr, BV: tl.constexpr):
    """Running maximum, sum of weights, and weighted values, of no keys."""
    return tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM, BV], tl.float32)


@triton.jit
def _finite(top):
    """The maximum that scores are taken off; 0 where there are none, since -inf - -inf is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def add_split(state, top, total, acc):
    """Add a split's state to that of the splits before."""
    top_before, total_before, acc_before = state
    higher = tl.maximum(top_before, top)
    base = _finite(higher)
    before = tl.exp2(top_before - base)
    share = tl.exp2(top - base)
    acc_before = acc_before * before[:, None]
    acc = tl.fma(acc, tl.broadcast_to(share[:, None], acc.shape), acc_before)
    return higher, tl.fma(total, share, total_before * before), acc


@triton.jit
def _walk(
    q, k_ptr, v_ptr, table_ptr, mask_ptr, b, hk, head, token, query, low_query, high_query, rows_live, begin, end, at,
    first, last, k_strides, v_strides, mask_strides, table_stride, c, scale, softcap,
    KIND: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    GENERAL: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The state of the keys at positions begin .. end - 1 of one split; begin is a multiple of BN.

    at: index in the buffer of position 0.
    """
    top, total, acc = _new_state(BM, BV)
    for n in tl.range(begin, end, BN, num_stages=STAGES):
        key = n + tl.arange(0, BN)
        held = (key >= first) & (key < last)
        k_rows = key_rows(
            k_ptr, b, hk, key + at, held, table_ptr, table_stride, k_strides[0], k_strides[1], k_strides[2], KIND,
            PAGE, INDEX,
        )  # fmt: skip
        v_rows = key_rows(
            v_ptr, b, hk, key + at, held, table_ptr, table_stride, v_strides[0], v_strides[1], v_strides[2], KIND,
            PAGE, INDEX,
        )  # fmt: skip
        k = operand(load_rows(k_rows, held, D, BD), PRECISION)  # [BN, BD]
        y = product(q, tl.trans(k), tl.zeros([BM, BN], tl.float32), PRECISION)
        added = None
        if MASK == "added":
            live = rows_live[:, None] & held[None, :]
            added = load_mask(
                mask_ptr, b, head, token, key + at, live, mask_strides[0], mask_strides[1], mask_strides[2],
                mask_strides[3], MASK,
            )  # fmt: skip
        y = logits(y, added, scale, softcap, GENERAL, SOFTCAP)  # [BM, BN]
        if MASK == "bool":
            live = rows_live[:, None] & held[None, :]
            taken = load_mask(
                mask_ptr, b, head, token, key + at, live, mask_strides[0], mask_strides[1], mask_strides[2],
                mask_strides[3], MASK,
            )  # fmt: skip
            y = tl.where(taken, y, float("-inf"))
        if not is_inside(low_query, high_query, n, first, last, BN, CAUSAL, LEFT, RIGHT):
            seen = visible(query[:, None], key[None, :], first, last, CAUSAL, LEFT, RIGHT)
            y = tl.where(seen, y, float("-inf"))
        higher = tl.maximum(top, tl.max(y, 1) * c)
        base = _finite(higher)
        p = tl.exp2(tl.fma(y, c, tl.broadcast_to(-base[:, None], y.shape)))
        shrink = tl.exp2(top - base)
        total = tl.fma(total, shrink, row_sums(p))
        v = operand(load_rows(v_rows, held, DV, BV), PRECISION)  # [BN, BV]
        acc = acc * shrink[:, None]
        acc = product(operand(p, PRECISION).to(v.dtype), v, acc, PRECISION)
        top = higher
    return top, total, acc


@triton.jit
def _without_padding(state, query, starts_ptr, CAUSAL: tl.constexpr):
    """The state, of no keys for rows of padding; a causal mask has hidden them from those."""
    top, total, acc = state
    if not CAUSAL and starts_ptr is not None:
        padding = query < first_query(starts_ptr, CAUSAL)
        top = tl.where(padding, float("-inf"), top)
        total = tl.where(padding, 0.0, total)
        acc = tl.where(padding[:, None], 0.0, acc)
    return top, total, acc


@triton.jit
def _finish(
    state, sinks_ptr, o_ptr, lse_ptr, b, token_start, token, head, live, o_stride_b, o_stride_t, o_stride_h,
    H: tl.constexpr, KIND: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Take in the sinks, normalise and store rows [R, BV]."""
    top, total, acc = state
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        base = _finite(higher)
        before = tl.exp2(top - base)
        total = tl.fma(total, before, tl.exp2(sink - base))
        acc = acc * before[:, None]
        top = higher
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    inverse = tl.div_rn(1.0, divisor)
    o = quotient(acc, divisor[:, None], inverse[:, None]) + 0.0  # a sum of nothing has no sign
    if KIND == "dense":
        rows = o_ptr + b.to(tl.int64) * o_stride_b + token.to(INDEX) * o_stride_t + head.to(INDEX) * o_stride_h
    else:
        rows = o_ptr + (token_start + token) * o_stride_t + head.to(INDEX) * o_stride_h
    column = tl.arange(0, BV)
    kept = live[:, None] & (column < DV)[None, :]
    tl.store(rows[:, None] + column[None, :], o.to(o_ptr.dtype.element_ty), mask=kept)
    if lse_ptr is not None:
        lse = tl.where(empty, float("inf"), top + tl.log2(divisor))
        tl.store(lse_ptr + (token_start + token) * H + head, lse, mask=live)


@triton.jit
def _split_range(split, begin, end, first, BN: tl.constexpr, SPLIT: tl.constexpr):
    """Positions of a sequence's split-th split that a tile needs, from a multiple of BN on."""
    start = (first // SPLIT + split) * SPLIT
    return tl.maximum(start, begin // BN * BN), tl.minimum(start + SPLIT, end)


@triton.jit(do_not_specialize=["B", "T", "S", "together", "slots", "splits"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, sinks_ptr, o_ptr, lse_ptr, partial_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, starts_ptr,
    offsets_ptr, table_ptr,
    B, T, S, together, slots, splits,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    o_stride_b, o_stride_t, o_stride_h, mask_stride_b, mask_stride_h, mask_stride_t, mask_stride_s, table_stride,
    c, scale, softcap,
    KIND: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, GENERAL: tl.constexpr, SOFTCAP: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    program = tl.program_id(0)
    split = 0
    if SIDE_BY_SIDE:
        split = program % splits
        program = program // splits
    b, hk, block, token_start, tokens = rows_of(program, cu_q_ptr, B, T, together, slots, KIND, G, HKV, BM)
    begin_row = block * BM
    if begin_row < tokens * G:
        index, first, last = keys_of(b, S, cu_k_ptr, lengths_ptr, starts_ptr, offsets_ptr, KIND)
        row = begin_row + tl.arange(0, BM)
        live = row < tokens * G
        token = row // G
        head = hk * G + row % G
        query = last - tokens + token  # positions
        low_query = last - tokens + begin_row // G
        high_query = last - tokens + tl.minimum((begin_row + BM - 1) // G, tokens - 1)
        begin, end = key_range(low_query, high_query, first, last, CAUSAL, LEFT, RIGHT)
        if KIND == "dense":
            q_rows = q_ptr + b.to(tl.int64) * q_stride_b + token.to(INDEX) * q_stride_t + head.to(INDEX) * q_stride_h
        else:
            q_rows = q_ptr + (token_start + token) * q_stride_t + head.to(INDEX) * q_stride_h
        q = operand(load_rows(q_rows, live, D, BD), PRECISION)  # [BM, BD]
        k_strides = (k_stride_b, k_stride_t, k_stride_h)
        v_strides = (v_stride_b, v_stride_t, v_stride_h)
        mask_strides = (mask_stride_b, mask_stride_h, mask_stride_t, mask_stride_s)
        at = index - first
        if SIDE_BY_SIDE:
            low, high = _split_range(split, begin, end, first, BN, SPLIT)
            if low < high:
                top, total, acc = _walk(
                    q, k_ptr, v_ptr, table_ptr, mask_ptr, b, hk, head, token, query, low_query, high_query, live, low,
                    high, at, first, last, k_strides, v_strides, mask_strides, table_stride, c, scale, softcap, KIND,
                    PAGE, D, DV, BM, BN, BD, BV, CAUSAL, LEFT, RIGHT, GENERAL, SOFTCAP, MASK, PRECISION, INDEX, STAGES,
                )  # fmt: skip
                top, total, acc = _without_padding((top, total, acc), query, starts_ptr, CAUSAL)
                cell = tl.program_id(0).to(tl.int64)
                cells = tl.num_programs(0).to(tl.int64)
                within = tl.arange(0, BM)
                column = tl.arange(0, BV)
                rows = partial_ptr + cell * (BM * BV) + within * BV
                tl.store(rows[:, None] + column[None, :], acc, mask=live[:, None])
                weights = partial_ptr + cells * (BM * BV) + cell * (2 * BM) + within
                tl.store(weights, top, mask=live)
                tl.store(weights + BM, total, mask=live)
        else:
            state = _new_state(BM, BV)
            for s in range(begin // SPLIT, tl.cdiv(end, SPLIT)):
                low = tl.maximum(s * SPLIT, begin // BN * BN)
                high = tl.minimum(s * SPLIT + SPLIT, end)
                top, total, acc = _walk(
                    q, k_ptr, v_ptr, table_ptr, mask_ptr, b, hk, head, token, query, low_query, high_query, live, low,
                    high, at, first, last, k_strides, v_strides, mask_strides, table_stride, c, scale, softcap, KIND,
                    PAGE, D, DV, BM, BN, BD, BV, CAUSAL, LEFT, RIGHT, GENERAL, SOFTCAP, MASK, PRECISION, INDEX, STAGES,
                )  # fmt: skip
                top, total, acc = _without_padding((top, total, acc), query, starts_ptr, CAUSAL)
                state = add_split(state, top, total, acc)
            _finish(
                state, sinks_ptr, o_ptr, lse_ptr, b, token_start, token, head, live, o_stride_b, o_stride_t,
                o_stride_h, G * HKV, KIND, DV, BV, INDEX,
            )  # fmt: skip


@triton.jit(do_not_specialize=["B", "T", "S", "together", "slots", "splits"])
def _merge_kernel(
    partial_ptr, sinks_ptr, o_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, starts_ptr, offsets_ptr,
    B, T, S, together, slots, splits, o_stride_b, o_stride_t, o_stride_h,
    KIND: tl.constexpr, G: tl.constexpr, HKV: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BV: tl.constexpr, SPLIT: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    INDEX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the splits of one row, in ascending order."""
    start_launch(PDL)
    within = tl.program_id(0) % BM
    program = tl.program_id(0) // BM
    b, hk, block, token_start, tokens = rows_of(program, cu_q_ptr, B, T, together, slots, KIND, G, HKV, BM)
    begin_row = block * BM
    if begin_row + within < tokens * G:
        _, first, last = keys_of(b, S, cu_k_ptr, lengths_ptr, starts_ptr, offsets_ptr, KIND)
        low_query = last - tokens + begin_row // G
        high_query = last - tokens + tl.minimum((begin_row + BM - 1) // G, tokens - 1)
        begin, end = key_range(low_query, high_query, first, last, CAUSAL, LEFT, RIGHT)
        cells = (tl.num_programs(0) // BM).to(tl.int64) * splits
        column = tl.arange(0, BV)[None, :]
        top_before, total_before, acc_before = _new_state(1, BV)
        one = tl.arange(0, 1)
        for start in range(begin // SPLIT - first // SPLIT, tl.cdiv(end, SPLIT) - first // SPLIT, _LOADED):
            for step in tl.static_range(_LOADED):
                low, high = _split_range(start + step, begin, end, first, BN, SPLIT)
                there = low < high
                cell = program.to(tl.int64) * splits + start + step
                acc = tl.load(partial_ptr + (cell * BM + within) * BV + column, mask=there, other=0.0)
                weights = partial_ptr + cells * (BM * BV) + cell * (2 * BM) + within + one
                top = tl.load(weights, mask=there, other=float("-inf"))
                total = tl.load(weights + BM, mask=there, other=0.0)
                top_before, total_before, acc_before = add_split(
                    (top_before, total_before, acc_before), top, total, acc
                )
        row = begin_row + within + one
        _finish(
            (top_before, total_before, acc_before), sinks_ptr, o_ptr, lse_ptr, b, token_start, row // G,
            hk * G + row % G, row >= 0, o_stride_b, o_stride_t, o_stride_h, G * HKV, KIND, DV, BV, INDEX,
        )  # fmt: skip


KERNELS = _attention_kernel, _merge_kernel


def describe_forward(problem: Problem, config: Config) -> Launch:
    """Launch on q, k, v, mask, sinks, o, lse, partial, cu_q, cu_k, lengths, starts, offsets and block table.

    lse [B, T, H] or [tokens, H] and o are written; or, with config.split, partial, of `configs.partial_elements`.
    Absent tensors are None.
    """
    constants: dict[str, object] = {
        "KIND": problem.kind, "PAGE": problem.page, "G": problem.group, "HKV": problem.kv_heads, "D": problem.head,
        "DV": problem.value_head, "BM": config.block_m, "BN": problem.order.block_n,
        "BD": next_power_of_two(problem.head, 16), "BV": next_power_of_two(problem.value_head, 16),
        "SPLIT": problem.order.split, "CAUSAL": problem.causal, "LEFT": problem.left, "RIGHT": problem.right,
        "GENERAL": problem.is_general, "SOFTCAP": bool(problem.softcap), "MASK": problem.mask,
        "PRECISION": problem.precision, "INDEX": _index(problem), "SIDE_BY_SIDE": config.split,
        "STAGES": config.num_stages, "PDL": config.pdl,
    }  # fmt: skip
    scalars = (
        *_sizes(problem, config), *problem.q_strides, *problem.k_strides, *problem.v_strides, *problem.o_strides,
        *problem.mask_strides, problem.table_stride, *problem.factors, problem.softcap,
    )  # fmt: skip
    programs = configs.row_blocks(problem, config.block_m) * problem.kv_heads
    programs *= problem.most_splits if config.split else 1
    return Launch(_attention_kernel, programs, scalars, constants, _options(problem, config))


def describe_merge(problem: Problem, config: Config) -> Launch:
    """Launch on partial, sinks, o, lse, cu_q, cu_k, lengths, starts and offsets, after a forward with config.split."""
    constants: dict[str, object] = {
        "KIND": problem.kind, "G": problem.group, "HKV": problem.kv_heads, "DV": problem.value_head,
        "BM": config.block_m, "BN": problem.order.block_n, "BV": next_power_of_two(problem.value_head, 16),
        "SPLIT": problem.order.split, "CAUSAL": problem.causal, "LEFT": problem.left, "RIGHT": problem.right,
        "INDEX": _index(problem), "PDL": config.pdl,
    }  # fmt: skip
    scalars = (*_sizes(problem, config), *problem.o_strides)
    programs = configs.row_blocks(problem, config.block_m) * problem.kv_heads * config.block_m
    options = _options(problem, config) | {"num_warps": 1, "num_stages": 1}
    return Launch(_merge_kernel, programs, scalars, constants, options)


def _sizes(problem: Problem, config: Config) -> tuple[int, ...]:
    slots = configs.row_blocks(problem, config.block_m)
    together = configs.heads_together(problem)
    return problem.sequences, problem.queries, problem.keys, together, slots, problem.most_splits


def _index(problem: Problem) -> tl.dtype:
    return tl.int64 if problem.wide else tl.int32


def _options(problem: Problem, config: Config) -> dict[str, object]:
    options: dict[str, object] = {
        "num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False,
    }  # fmt: skip
    return options | pdl_option(config.pdl)
