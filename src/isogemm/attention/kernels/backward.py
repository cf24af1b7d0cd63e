"""The backward of attention: a launch for the gradient of q, by blocks of rows, and one for k's and v's, by keys.

P = exp2(c x - lse) are the forward's weights again, from its raw scores x = q k^T. With delta the row sums of do * o,
dP = -delta + do v^T (the sum starts at -delta), and dS = P dP; dq = scale dS k, dk = scale dS^T q, dv = P^T do. Every
element is one sum in ascending order of its keys, or of its rows (row r is token r // G, head r % G of the group): no
tile affects it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.attention import configs
from isogemm.attention.configs import BackwardConfig, BackwardProblem, BackwardTile, Problem
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
    row_sums,
    tanh,
    visible,
)
from isogemm.attention.kernels.forward import rows_of
from isogemm.core.launch import Launch, TensorMap
from isogemm.core.problems import next_power_of_two

_PADDED = tl.constexpr(configs.PADDED_ROWS)


@triton.jit
def keys_block(program, cu_k_ptr, B, S, together, KIND: tl.constexpr, HKV: tl.constexpr, BN: tl.constexpr):
    """A program's sequence and key head, its block of keys, where the sequence's keys begin in the buffer, and the end
    of those that it writes.

    The first blocks come first, since most causal queries see them. The last sequence of a packed problem also has
    the keys behind it.
    """
    if KIND == "dense":
        blocks = tl.cdiv(S, BN)
        turn = program // (together * blocks)
        member = program - turn * together * blocks
        members = tl.minimum(together, B * HKV - turn * together)
        pair = turn * together + member % members
        return pair // HKV, pair % HKV, member // members, 0, S
    else:
        b, block = packed_sequence(program // HKV, cu_k_ptr, B, 1, BN)
        end = tl.load(cu_k_ptr + b + 1)
        return b, program % HKV, block, tl.load(cu_k_ptr + b), tl.where(b == B - 1, S, end)


@triton.jit
def row_addresses(
    ptr, b, token_start, token, head, stride_b, stride_t, stride_h, KIND: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Addresses of rows of q, o, do or dq; token counts from the sequence's first."""
    if KIND == "dense":
        base = ptr + b.to(tl.int64) * stride_b
    else:
        base = ptr + token_start * stride_t
    return base + (token.to(INDEX) * stride_t + head.to(INDEX) * stride_h)


@triton.jit
def statistics_of(ptr, b, hk, token_start, B, T, KIND: tl.constexpr, G: tl.constexpr, HKV: tl.constexpr):
    """Where the log-sums and the deltas of a sequence's rows begin: key head by key head, rows in order.

    Those of a dense sequence end with a whole block of _PADDED rows.
    """
    if KIND == "dense":
        rows = tl.cdiv(T * G, _PADDED).to(tl.int64) * _PADDED
        start = ptr + (b * HKV + hk) * rows
        return start, start + B * HKV * rows
    else:
        start = ptr + (hk.to(tl.int64) * T + token_start) * G
        return start, start + T.to(tl.int64) * (G * HKV)


@triton.jit
def _statistic(rows, live, other, KIND: tl.constexpr, PLACED: tl.constexpr):
    """A log-sum or a delta of each row. Rows behind a dense sequence have some too, up to a whole block."""
    if KIND == "dense" and not PLACED:
        return tl.load(rows)
    else:
        return tl.load(rows, mask=live, other=other)


@triton.jit
def _weights(
    x, added, taken, before, m, n, first, last, lse, c, scale, softcap,
    BY_KEYS: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, GENERAL: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The forward's weights of raw scores x, zero where a key is not seen; lse broadcasts.

    x is of rows from m on and keys at positions from n on, [BM, BN], or BY_KEYS [BN, BM]; before: token 0's position.
    """
    y = logits(x, added, scale, softcap, GENERAL, SOFTCAP)
    if taken is not None:
        y = tl.where(taken, y, float("-inf"))
    BM: tl.constexpr = y.shape[1 if BY_KEYS else 0]
    low_query = before + m // G
    high_query = before + (m + BM - 1) // G
    if not is_inside(low_query, high_query, n, first, last, BN, CAUSAL, LEFT, RIGHT):
        query = before + (m + tl.arange(0, BM)) // G
        key = n + tl.arange(0, BN)
        if BY_KEYS:
            seen = visible(query[None, :], key[:, None], first, last, CAUSAL, LEFT, RIGHT)
        else:
            seen = visible(query[:, None], key[None, :], first, last, CAUSAL, LEFT, RIGHT)
        y = tl.where(seen, y, float("-inf"))
    return tl.exp2(tl.fma(y, c, tl.broadcast_to(-lse, y.shape)))


@triton.jit
def _through_softcap(ds, x, scale, softcap):
    """The gradient of scaled scores, from that of soft-capped ones."""
    t = tanh(tl.div_rn(x * scale, softcap))
    return ds * (1.0 - t * t)


@triton.jit(do_not_specialize=["B", "T", "S", "together", "slots"])
def _query_gradients_kernel(
    q_ptr, k, v, mask_ptr, sinks_ptr, o_ptr, lse_ptr, do_ptr, statistics_ptr, dq_ptr, of_sinks_ptr, of_mask_ptr,
    cu_q_ptr, cu_k_ptr, lengths_ptr, starts_ptr, offsets_ptr,
    B, T, S, together, slots,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    o_stride_b, o_stride_t, o_stride_h, do_stride_b, do_stride_t, do_stride_h, dq_stride_b, dq_stride_t, dq_stride_h,
    mask_stride_b, mask_stride_h, mask_stride_t, mask_stride_s, c, scale, softcap,
    KIND: tl.constexpr, G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, GENERAL: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    INDEX: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b, hk, block, token_start, tokens = rows_of(
        tl.program_id(0), cu_q_ptr, B, T, together, slots, KIND, G, HKV, BM
    )  # fmt: skip
    begin_row = block * BM
    written = tokens
    if KIND == "packed":
        written = tl.where(b == B - 1, (T - token_start).to(tl.int32), tokens)  # with the rows behind the last sequence
    if begin_row < written * G:
        index, first, last = keys_of(b, S, cu_k_ptr, lengths_ptr, starts_ptr, offsets_ptr, KIND)
        row = begin_row + tl.arange(0, BM)
        token = row // G
        head = hk * G + row % G
        query = last - tokens + token  # positions
        kept = row < written * G
        live = (row < tokens * G) & (query >= first_query(starts_ptr, CAUSAL))
        place = (token_start + token) * (G * HKV) + head
        lse = tl.load(lse_ptr + place, mask=live, other=float("inf"))
        if MASK != "":
            live = live & (lse < float("inf"))
        do_rows = row_addresses(do_ptr, b, token_start, token, head, do_stride_b, do_stride_t, do_stride_h, KIND, INDEX)
        o_rows = row_addresses(o_ptr, b, token_start, token, head, o_stride_b, o_stride_t, o_stride_h, KIND, INDEX)
        do = load_rows(do_rows, live, DV, BV)  # [BM, BV]
        o = load_rows(o_rows, live, DV, BV)
        delta = row_sums(do.to(tl.float32) * o.to(tl.float32))
        delta = tl.where(lse < float("inf"), delta, 0.0)
        lse_to, delta_to = statistics_of(statistics_ptr, b, hk, token_start, B, T, KIND, G, HKV)
        padded = kept
        if KIND == "dense":
            padded = row < tl.cdiv(T * G, _PADDED) * _PADDED
        tl.store(lse_to + row, lse, mask=padded)
        tl.store(delta_to + row, delta, mask=padded)
        if of_sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * LOG2E
            tl.store(of_sinks_ptr + place, 0.0 - tl.exp2(sink - lse) * delta, mask=kept)
        if dq_ptr is not None:
            low_query = last - tokens + begin_row // G
            high_query = last - tokens + tl.minimum((begin_row + BM - 1) // G, tokens - 1)
            begin, end = key_range(low_query, high_query, first, last, CAUSAL, LEFT, RIGHT)
            if KIND == "packed":
                end = tl.where(begin_row < tokens * G, end, begin)
            q_rows = row_addresses(q_ptr, b, token_start, token, head, q_stride_b, q_stride_t, q_stride_h, KIND, INDEX)
            q = operand(load_rows(q_rows, live, D, BD), PRECISION)  # [BM, BD]
            do = operand(do, PRECISION)
            acc = tl.zeros([BM, BD], tl.float32)
            for n in tl.range(begin // BN * BN, end, BN, num_stages=STAGES):
                key = n + tl.arange(0, BN)
                held = (key >= first) & (key < last)
                at = key - first + index
                if TMA:
                    key_tile = tl.reshape(k.load([b, n, hk, 0]), (BN, BD))
                    value_tile = tl.reshape(v.load([b, n, hk, 0]), (BN, BV))
                else:
                    k_rows = key_rows(k, b, hk, at, held, None, 0, k_stride_b, k_stride_t, k_stride_h, KIND, 0, INDEX)
                    v_rows = key_rows(v, b, hk, at, held, None, 0, v_stride_b, v_stride_t, v_stride_h, KIND, 0, INDEX)
                    key_tile = operand(load_rows(k_rows, held, D, BD), PRECISION)  # [BN, BD]
                    value_tile = operand(load_rows(v_rows, held, DV, BV), PRECISION)  # [BN, BV]
                x = product(q, tl.trans(key_tile), tl.zeros([BM, BN], tl.float32), PRECISION)  # [BM, BN]
                dp = product(do, tl.trans(value_tile), tl.broadcast_to(-delta[:, None], [BM, BN]), PRECISION)
                added = None
                taken = None
                if MASK != "":
                    masked = load_mask(
                        mask_ptr, b, head, token, at, live[:, None] & held[None, :], mask_stride_b, mask_stride_h,
                        mask_stride_t, mask_stride_s, MASK,
                    )  # fmt: skip
                    if MASK == "bool":
                        taken = masked
                    else:
                        added = masked
                p = _weights(
                    x, added, taken, last - tokens, begin_row, n, first, last, lse[:, None], c, scale, softcap, False,
                    G, BN, CAUSAL, LEFT, RIGHT, GENERAL, SOFTCAP,
                )  # fmt: skip
                ds = p * dp
                if of_mask_ptr is not None:
                    cells = of_mask_ptr + ((b * (G * HKV) + head).to(tl.int64) * T + token)[:, None] * S + at[None, :]
                    tl.store(cells, ds + 0.0, mask=kept[:, None] & held[None, :])  # no -0
                if SOFTCAP:
                    ds = _through_softcap(ds, x, scale, softcap)
                acc = product(operand(ds, PRECISION).to(key_tile.dtype), key_tile, acc, PRECISION)
            dq_rows = row_addresses(
                dq_ptr, b, token_start, token, head, dq_stride_b, dq_stride_t, dq_stride_h, KIND, INDEX
            )  # fmt: skip
            column = tl.arange(0, BD)
            dq = tl.where(live[:, None], acc * scale, 0.0)
            cells = dq_rows[:, None] + column[None, :]
            tl.store(cells, dq.to(dq_ptr.dtype.element_ty), mask=kept[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize=["B", "T", "S", "together"])
def _key_gradients_kernel(
    q, do, k_ptr, v_ptr, mask_ptr, statistics_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, starts_ptr,
    offsets_ptr,
    B, T, S, together,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    do_stride_b, do_stride_t, do_stride_h, dk_stride_b, dk_stride_t, dk_stride_h, dv_stride_b, dv_stride_t, dv_stride_h,
    mask_stride_b, mask_stride_h, mask_stride_t, mask_stride_s, c, scale, softcap,
    KIND: tl.constexpr, G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, GENERAL: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    INDEX: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b, hk, block, start, limit = keys_block(tl.program_id(0), cu_k_ptr, B, S, together, KIND, HKV, BN)
    begin_key = start + block * BN
    if begin_key < limit:
        index, first, last = keys_of(b, S, cu_k_ptr, lengths_ptr, starts_ptr, offsets_ptr, KIND)
        if KIND == "dense":
            token_start = b.to(tl.int64) * T
            tokens = T
        else:
            token_start = tl.load(cu_q_ptr + b).to(tl.int64)
            tokens = (tl.load(cu_q_ptr + b + 1) - token_start).to(tl.int32)
        at = begin_key + tl.arange(0, BN)  # in the buffer
        n = begin_key - index + first  # position of the first key
        key = n + tl.arange(0, BN)
        held = (key >= first) & (key < last)
        k_rows = key_rows(k_ptr, b, hk, at, held, None, 0, k_stride_b, k_stride_t, k_stride_h, KIND, 0, INDEX)
        v_rows = key_rows(v_ptr, b, hk, at, held, None, 0, v_stride_b, v_stride_t, v_stride_h, KIND, 0, INDEX)
        k = operand(load_rows(k_rows, held, D, BD), PRECISION)  # [BN, BD]
        v = operand(load_rows(v_rows, held, DV, BV), PRECISION)  # [BN, BV]
        low_key = tl.maximum(n, first)
        high_key = tl.minimum(n + BN, last) - 1
        before = last - tokens  # position of token 0
        low_query = tl.maximum(before, first_query(starts_ptr, CAUSAL))
        high_query = last - 1
        if CAUSAL:
            low_query = tl.maximum(low_query, low_key)
        if RIGHT >= 0:
            low_query = tl.maximum(low_query, low_key - RIGHT)
        if LEFT >= 0:
            high_query = tl.minimum(high_query, high_key + LEFT)
        begin_row = (low_query - before) * G
        end_row = (high_query - before + 1) * G
        end_row = tl.where(low_key <= high_key, end_row, begin_row)
        lse_from, delta_from = statistics_of(statistics_ptr, b, hk, token_start, B, T, KIND, G, HKV)
        dk = tl.zeros([BN, BD], tl.float32)
        dv = tl.zeros([BN, BV], tl.float32)
        # Where there may be padding, blocks of rows begin at that of position 0, so that sums have one order.
        PLACED: tl.constexpr = starts_ptr is not None or lengths_ptr is not None
        origin = 0
        if PLACED:
            origin = tl.maximum(first_query(starts_ptr, CAUSAL) - before, 0) * G
        for m in tl.range(origin + (begin_row - origin) // BM * BM, end_row, BM, num_stages=STAGES):
            row = m + tl.arange(0, BM)
            token = row // G
            head = hk * G + row % G
            live = (row < tokens * G) & (before + token >= first_query(starts_ptr, CAUSAL))
            if MASK != "":
                live = live & (_statistic(lse_from + row, live, float("inf"), KIND, PLACED) < float("inf"))
            if TMA:
                q_tile = tl.reshape(q.load([b, m // G, hk * G, 0]), (BM, BD))
                do_tile = tl.reshape(do.load([b, m // G, hk * G, 0]), (BM, BV))
            else:
                q_rows = row_addresses(q, b, token_start, token, head, q_stride_b, q_stride_t, q_stride_h, KIND, INDEX)
                do_rows = row_addresses(
                    do, b, token_start, token, head, do_stride_b, do_stride_t, do_stride_h, KIND, INDEX
                )  # fmt: skip
                q_tile = operand(load_rows(q_rows, live, D, BD), PRECISION)  # [BM, BD]
                do_tile = operand(load_rows(do_rows, live, DV, BV), PRECISION)  # [BM, BV]
            x = product(k, tl.trans(q_tile), tl.zeros([BN, BM], tl.float32), PRECISION)  # [BN, BM]
            delta = _statistic(delta_from + row, live, 0.0, KIND, PLACED)
            dp = product(v, tl.trans(do_tile), tl.broadcast_to(-delta[None, :], [BN, BM]), PRECISION)
            added = None
            taken = None
            if MASK != "":
                masked = load_mask(
                    mask_ptr, b, head, token, at, live[:, None] & held[None, :], mask_stride_b, mask_stride_h,
                    mask_stride_t, mask_stride_s, MASK,
                )  # fmt: skip
                if MASK == "bool":
                    taken = tl.trans(masked)
                else:
                    added = tl.trans(masked)
            lse = _statistic(lse_from + row, live, float("inf"), KIND, PLACED)
            p = _weights(
                x, added, taken, before, m, n, first, last, lse[None, :], c, scale, softcap, True, G, BN, CAUSAL,
                LEFT, RIGHT, GENERAL, SOFTCAP,
            )  # fmt: skip
            dv = product(operand(p, PRECISION).to(do_tile.dtype), do_tile, dv, PRECISION)
            ds = p * dp
            if SOFTCAP:
                ds = _through_softcap(ds, x, scale, softcap)
            dk = product(operand(ds, PRECISION).to(q_tile.dtype), q_tile, dk, PRECISION)
        kept = at < limit
        dk_rows = key_rows(dk_ptr, b, hk, at, kept, None, 0, dk_stride_b, dk_stride_t, dk_stride_h, KIND, 0, INDEX)
        dv_rows = key_rows(dv_ptr, b, hk, at, kept, None, 0, dv_stride_b, dv_stride_t, dv_stride_h, KIND, 0, INDEX)
        column = tl.arange(0, BD)
        dk = tl.where(held[:, None], dk * scale, 0.0).to(dk_ptr.dtype.element_ty)
        tl.store(dk_rows[:, None] + column[None, :], dk, mask=kept[:, None] & (column < D)[None, :])
        column = tl.arange(0, BV)
        dv = tl.where(held[:, None], dv, 0.0).to(dv_ptr.dtype.element_ty)
        tl.store(dv_rows[:, None] + column[None, :], dv, mask=kept[:, None] & (column < DV)[None, :])


KERNELS = _query_gradients_kernel, _key_gradients_kernel


def describe_query_gradients(problem: BackwardProblem, config: BackwardConfig) -> Launch:
    """Launch on q, k, v, mask, sinks, o, lse, do, statistics (out), dq (out), of_sinks (out), of_mask (out), cu_q,
    cu_k, lengths, starts and offsets; the launch of `describe_key_gradients` reads the statistics.

    lse is the forward's. statistics has `configs.statistics_elements`, float32. of_sinks: float32 [B, T, H] or [tokens,
    H], what is to be summed over the tokens for the gradient of the sinks. of_mask: float32 [B, H, T, S], full of
    zeros, gets the gradient of an added mask before its sums over broadcast axes. Outputs that are not wanted, dq too,
    and absent tensors are None.
    """
    forward, tile = problem.forward, config.query
    slots = configs.row_blocks(forward, tile.rows)
    sizes = (forward.sequences, forward.queries, forward.keys, configs.heads_together(forward), slots)
    strides = (
        *forward.q_strides, *forward.k_strides, *forward.v_strides, *forward.o_strides, *problem.do_strides,
        *problem.dq_strides, *forward.mask_strides,
    )  # fmt: skip
    scalars = (*sizes, *strides, *forward.factors, forward.softcap)
    maps: tuple[TensorMap | None, ...] = ()
    if tile.tma:
        seen = (forward.sequences, forward.keys, forward.kv_heads)
        block = (1, tile.keys, 1)
        k_map = _tensor_map(seen, forward.head, forward.k_strides, block)
        maps = (None, k_map, _tensor_map(seen, forward.value_head, forward.v_strides, block))
    programs = slots * forward.kv_heads
    return Launch(_query_gradients_kernel, programs, scalars, _constants(problem, tile), _options(tile), maps)


def describe_key_gradients(problem: BackwardProblem, config: BackwardConfig) -> Launch:
    """Launch on q, do, k, v, mask, statistics, dk (out), dv (out), cu_q, cu_k, lengths, starts and offsets, after that
    of `describe_query_gradients`. All of dk and dv is written."""
    forward, tile = problem.forward, config.key
    slots = forward.keys // tile.keys + forward.sequences
    if forward.kind == "dense":
        slots = forward.sequences * -(-forward.keys // tile.keys)
    sizes = (forward.sequences, forward.queries, forward.keys, _heads_together(forward))
    strides = (
        *forward.q_strides, *forward.k_strides, *forward.v_strides, *problem.do_strides, *problem.dk_strides,
        *problem.dv_strides, *forward.mask_strides,
    )  # fmt: skip
    scalars = (*sizes, *strides, *forward.factors, forward.softcap)
    maps: tuple[TensorMap | None, ...] = ()
    if tile.tma:
        seen = (forward.sequences, forward.queries, forward.heads)
        block = (1, tile.rows // forward.group, forward.group)
        q_map = _tensor_map(seen, forward.head, forward.q_strides, block)
        maps = (q_map, _tensor_map(seen, forward.value_head, problem.do_strides, block))
    programs = slots * forward.kv_heads
    return Launch(_key_gradients_kernel, programs, scalars, _constants(problem, tile), _options(tile), maps)


def _tensor_map(
    sizes: tuple[int, int, int], head: int, strides: tuple[int, int, int], block: tuple[int, int, int]
) -> TensorMap:
    """[sequence, token, head, element], which a block has in the order of its rows."""
    unit = next_power_of_two(head, 16)
    known = tuple(unit if size == 1 else stride for size, stride in zip(sizes, strides, strict=True))
    return TensorMap((*sizes, head), (*known, 1), (*block, unit))


def _heads_together(problem: Problem) -> int:
    """Number of (sequence, key head) pairs whose programs run next to each other, so that their rows stay in L2."""
    per_head = problem.queries * problem.group * (problem.head + problem.value_head) * problem.itemsize
    return max(1, min(problem.sequences * problem.kv_heads, configs.CACHED // max(per_head, 1)))


def _constants(problem: BackwardProblem, tile: BackwardTile) -> dict[str, object]:
    forward = problem.forward
    return {
        "KIND": forward.kind, "G": forward.group, "HKV": forward.kv_heads, "D": forward.head,
        "DV": forward.value_head, "BM": tile.rows, "BN": tile.keys, "BD": next_power_of_two(forward.head, 16),
        "BV": next_power_of_two(forward.value_head, 16), "CAUSAL": forward.causal, "LEFT": forward.left,
        "RIGHT": forward.right, "GENERAL": forward.is_general, "SOFTCAP": bool(forward.softcap),
        "MASK": forward.mask, "PRECISION": forward.precision, "INDEX": _index(problem),
        "TMA": tile.tma, "STAGES": tile.num_stages,
    }  # fmt: skip


def _index(problem: BackwardProblem) -> tl.dtype:
    return tl.int64 if problem.wide else tl.int32


def _options(tile: BackwardTile) -> dict[str, object]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}
