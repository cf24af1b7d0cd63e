"""The forward of attention by warps with roles: one loads keys and values, two warpgroups compute 64 rows each.

The bits are those of `forward`. A step is 128 keys: one block, or two where blocks have 64 keys. A warpgroup issues the
products of a step's scores together with those of the last values before, so that the tensor cores work while it takes
exponentials; the first block's values are multiplied under the second block's. Programs are persistent, so the loads of
the next tile never stop.
It is written in Gluon, Triton's language with explicit layouts, since Triton's own compiler does not part warps on
Hopper.
"""

from __future__ import annotations

from dataclasses import replace

import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from isogemm.attention import configs
from isogemm.attention.configs import Config, Problem
from isogemm.attention.kernels.common import is_inside, key_range, keys_of, logits, packed_sequence, row_sums, visible
from isogemm.attention.kernels.roles_rows import ROWS as _ROWS
from isogemm.attention.kernels.roles_rows import clear, columns, fetch, finish, finite
from isogemm.core.launch import Launch, TensorMap
from isogemm.core.problems import next_power_of_two

_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # since Triton 3.9, before
_GROUPS = gl.constexpr(2)  # warpgroups that compute
_LOADER_REGISTERS = gl.constexpr(24)
_REGISTERS = gl.constexpr(240)  # of a thread that computes
_STEP = 128  # keys whose scores are one product


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The next buffer, and the parity of its barriers' phase."""
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _count(items, CAUSAL: gl.constexpr):
    """Number of this program's tiles."""
    programs = gl.num_programs(0)
    rounds = items // programs
    place = gl.program_id(0)
    if CAUSAL:
        place = gl.where(rounds % 2 == 1, programs - 1 - place, place)
    return rounds + (place < items - rounds * programs).to(gl.int32)


@gluon.jit
def _tile(
    turn, cu_q, cu_k, lengths, starts, offsets, B, T, S, together, STEP: gl.constexpr, KIND: gl.constexpr,
    G: gl.constexpr, HKV: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """This program's turn-th tile: sequence, key head, first row, the sequence's first token and their number, the
    index of position 0 in the buffer, the positions with keys, and the steps over these, at least one.

    Causal tiles come in descending order of their keys, and every other round the programs take them in reverse.
    A packed problem has `together` slots, of which some may have no rows.
    """
    ROWS: gl.constexpr = _ROWS * _GROUPS
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if CAUSAL:
        place = gl.where(turn % 2 == 1, programs - 1 - place, place)
    index = turn * programs + place
    if KIND == "dense":
        blocks = gl.cdiv(T * G, ROWS)
        team = index // (together * blocks)
        member = index - team * together * blocks
        members = gl.minimum(together, B * HKV - team * together)
        row = (blocks - 1 - member // members) * ROWS
        pair = team * together + member % members
        b = pair // HKV
        hk = pair % HKV
        token_start = b * T
        tokens = T
    else:
        b, block = packed_sequence(together - 1 - index // HKV, cu_q, B, G, ROWS)
        hk = index % HKV
        row = block * ROWS
        token_start = gl.load(cu_q + b).to(gl.int32)
        tokens = gl.load(cu_q + b + 1).to(gl.int32) - token_start
    at, begin, end = keys_of(b, S, cu_k, lengths, starts, offsets, KIND)
    low_query = end - tokens + row // G
    high_query = end - tokens + gl.minimum((row + ROWS - 1) // G, tokens - 1)
    low, high = key_range(low_query, high_query, begin, end, CAUSAL, LEFT, RIGHT)
    first = gl.where(low < high, low // STEP, gl.cdiv(end, STEP))  # of no keys: a step beyond the last
    last = gl.maximum(gl.cdiv(high, STEP), first + 1)
    return b, hk, row, token_start, tokens, at - begin, begin, end, first, last


@gluon.jit
def _load(
    q, k, v, cu_q, cu_k, lengths, starts, offsets, q_tiles, k_tiles, v_tiles, q_ready, q_free, ready, free,
    B, T, S, together, items, KIND: gl.constexpr, BN: gl.constexpr, PARTS: gl.constexpr, BD: gl.constexpr,
    BV: gl.constexpr, G: gl.constexpr, HKV: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, STAGES: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """The loading warp: fill each buffer as soon as it has been read.

    A buffer has a step's keys, the values of the last block before, and those of its own blocks but the last.
    """
    STEP: gl.constexpr = BN * PARTS
    BYTES: gl.constexpr = k.dtype.primitive_bitwidth // 8
    K_BYTES: gl.constexpr = STEP * BD * BYTES
    V_BYTES: gl.constexpr = BN * BV * BYTES
    slot = 0
    phase = 1
    q_slot = 0
    q_phase = 1
    for turn in range(_count(items, CAUSAL)):
        b, hk, row, _, tokens, at, _, _, first, last = _tile(
            turn, cu_q, cu_k, lengths, starts, offsets, B, T, S, together, STEP, KIND, G, HKV, CAUSAL, LEFT, RIGHT
        )
        if KIND != "dense":
            b = 0
            last = gl.where(row < tokens * G, last, first - 1)
        if QUERIES > 0:
            for which in gl.static_range(_GROUPS):
                place = q_slot * _GROUPS + which
                mbarrier.wait(q_free.index(place), q_phase)
                mbarrier.expect(q_ready.index(place), _ROWS * BD * BYTES)
                token = (row + which * _ROWS) // G
                _tma_load(q, [b, hk, token, 0, 0], q_ready.index(place), q_tiles.index(place))
            q_slot, q_phase = _next(q_slot, q_phase, QUERIES)
        for step in range(first, last + 1):
            full = ready.index(slot)
            key = at + step * STEP
            last_values = v_tiles.index(PARTS * slot + PARTS - 1)
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(full, K_BYTES + (PARTS - 1) * V_BYTES, pred=step == first)
            mbarrier.expect(full, K_BYTES + PARTS * V_BYTES, pred=(step > first) & (step < last))
            mbarrier.expect(full, V_BYTES, pred=step == last)
            _tma_load(k, [b, hk, key, 0], full, k_tiles.index(slot), pred=step < last)
            if PARTS == 2:
                _tma_load(v, [b, hk, key, 0], full, v_tiles.index(2 * slot), pred=step < last)
            _tma_load(v, [b, hk, key - BN, 0], full, last_values, pred=step > first)
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _now(total):
    """The same numbers, which ptxas does not compute later: it would first wait for products that still run."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never;
        .reg .u32 nowhere;
        mov.u32 nowhere, 0;
        setp.lt.f32 never, $1, 0f00000000;
        @never st.shared.f32 [nowhere], $1;
        mov.b32 $0, $1;
        }""",
        "=f,f", [total], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _row_max(x):
    """Maximum of [R, C] over its columns: first by halves, which needs no chain."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    if COLUMNS == 8:
        return gl.max(x, 1)
    else:
        return _row_max(gl.max(gl.reshape(x, [ROWS, 2, COLUMNS // 2]), axis=1))


@gluon.jit
def _weights(
    y, top, total, query, low_query, high_query, key, begin, end, c, scale, softcap,
    BN: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, GENERAL: gl.constexpr,
    SOFTCAP: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Weights of a block's raw scores, the new maximum and sum of weights, and what sums so far shrink by."""
    y = logits(y, None, scale, softcap, GENERAL, SOFTCAP)
    if not is_inside(low_query, high_query, key, begin, end, BN, CAUSAL, LEFT, RIGHT):
        keys = key + gl.arange(0, BN, gl.SliceLayout(0, y.type.layout))
        y = gl.where(visible(query[:, None], keys[None, :], begin, end, CAUSAL, LEFT, RIGHT), y, float("-inf"))
    most = gl.convert_layout(_row_max(y), top.type.layout, assert_trivial=True)
    higher = gl.maximum(top, most * c)
    base = finite(higher)
    p = gl.exp2(gl.fma(y, gl.full_like(y, c), gl.broadcast(-base[:, None], y)[0]))
    shrink = gl.exp2(top - base)
    added = gl.convert_layout(row_sums(p), top.type.layout, assert_trivial=True)
    return p.to(DTYPE), higher, gl.fma(total, shrink, added), shrink


@gluon.jit
def _add_split(top, total, acc, top_before, total_before, acc_before):
    """Add a split's maximum, weight and sums to those of the splits before, as `forward.add_split` does."""
    higher = gl.maximum(top_before, top)
    base = finite(higher)
    before = gl.exp2(top_before - base)
    share = gl.exp2(top - base)
    acc_before = acc_before * columns(before, acc)
    acc = gl.fma(acc, gl.broadcast(columns(share, acc), acc)[0], acc_before)
    return higher, gl.fma(total, share, total_before * before), acc


@gluon.jit
def _blocks(y, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The scores of a step's first block, and of its last one."""
    if PARTS == 1:
        return y, y
    else:
        y = gl.permute(gl.reshape(y, [y.shape[0], 2, y.shape[1] // 2]), (0, 2, 1))
        first, last = gl.split(y)
        first = gl.convert_layout(first, LAYOUT, assert_trivial=True)
        return first, gl.convert_layout(last, LAYOUT, assert_trivial=True)


@gluon.jit
def _attend(
    q, sinks, o, lse, cu_q, cu_k, lengths, starts, offsets, q_tiles, k_tiles, v_tiles, o_tiles, q_ready, q_free,
    ready, free, B, T, S, together, items, q_stride_b, q_stride_t, q_stride_h, o_stride_b, o_stride_t, o_stride_h, c,
    scale, softcap, WHICH: gl.constexpr, KIND: gl.constexpr, BN: gl.constexpr, PARTS: gl.constexpr,
    SPLIT: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BD: gl.constexpr, BV: gl.constexpr, G: gl.constexpr,
    HKV: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, GENERAL: gl.constexpr,
    SOFTCAP: gl.constexpr, INDEX: gl.constexpr, STAGES: gl.constexpr, QUERIES: gl.constexpr, CLEAR: gl.constexpr,
):  # fmt: skip
    """A warpgroup's part: half of each tile's rows."""
    STEP: gl.constexpr = BN * PARTS
    STEP_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    row_in_group = gl.arange(0, _ROWS, gl.SliceLayout(1, SCORES))
    no_scores = gl.zeros((_ROWS, STEP), gl.float32, STEP_SCORES)
    slot = 0
    phase = 0
    for turn in range(_count(items, CAUSAL)):
        b, hk, row, token_start, tokens, _, begin, end, first, last = _tile(
            turn, cu_q, cu_k, lengths, starts, offsets, B, T, S, together, STEP, KIND, G, HKV, CAUSAL, LEFT, RIGHT
        )
        if row < tokens * G:
            row += WHICH * _ROWS
            query = end - tokens + (row + row_in_group) // G
            low_query = end - tokens + row // G
            high_query = end - tokens + (row + _ROWS - 1) // G
            if KIND == "dense":
                q_start = b.to(gl.int64) * q_stride_b
                o_start = b.to(gl.int64) * o_stride_b
            else:
                q_start = token_start.to(gl.int64) * q_stride_t
                o_start = token_start.to(gl.int64) * o_stride_t
            if QUERIES > 0:
                q_place = turn % QUERIES * _GROUPS + WHICH
                q_tile = q_tiles.index(q_place).reshape([_ROWS, BD])
                mbarrier.wait(q_ready.index(q_place), turn // QUERIES & 1)
            else:
                q_tile = q_tiles.index(WHICH)
                fetch(q, q_tile, hk, row, tokens, q_start, q_stride_t, q_stride_h, G, D, BD, INDEX)
            top = gl.full((_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros((_ROWS,), gl.float32, gl.SliceLayout(1, SCORES))
            acc = gl.zeros((_ROWS, BV), gl.float32, SUMS)
            top_before = top
            total_before = total
            acc_before = acc

            mbarrier.wait(ready.index(slot), phase)
            k_tile = k_tiles.index(slot).reshape([STEP, BD]).permute((1, 0))
            v_tile = v_tiles.index(PARTS * slot).reshape([BN, BV])
            if CLEAR and PARTS == 2:
                clear(v_tile, first * STEP, begin, end, BN, BV)
            y = warpgroup_mma(q_tile, k_tile, no_scores, use_acc=False, is_async=True)
            y = warpgroup_mma_wait(0, deps=(y,))
            y, y_last = _blocks(y, PARTS, SCORES)
            weights, top, total, shrink = _weights(
                y, top, total, query, low_query, high_query, first * STEP, begin, end, c, scale, softcap, BN,
                CAUSAL, LEFT, RIGHT, GENERAL, SOFTCAP, k_tiles.dtype,
            )  # fmt: skip
            p = gl.convert_layout(weights, WEIGHTS, assert_trivial=True)
            if PARTS == 2:
                sums = warpgroup_mma(p, v_tile, acc, is_async=True)
                weights, top, total, shrink = _weights(
                    y_last, top, total, query, low_query, high_query, first * STEP + BN, begin, end, c, scale, softcap,
                    BN, CAUSAL, LEFT, RIGHT, GENERAL, SOFTCAP, k_tiles.dtype,
                )  # fmt: skip
                total = _now(total)
                acc, p = warpgroup_mma_wait(0, deps=(sums, p))
                acc = acc * columns(shrink, acc)
                p = gl.convert_layout(weights, WEIGHTS, assert_trivial=True)
            mbarrier.arrive(free.index(slot))
            slot, phase = _next(slot, phase, STAGES)
            for step in range(first + 1, last):
                mbarrier.wait(ready.index(slot), phase)
                k_tile = k_tiles.index(slot).reshape([STEP, BD]).permute((1, 0))
                v_before = v_tiles.index(PARTS * slot + PARTS - 1).reshape([BN, BV])  # of the last block before
                v_tile = v_tiles.index(PARTS * slot).reshape([BN, BV])
                if CLEAR:
                    clear(v_before, step * STEP - BN, begin, end, BN, BV)
                    if PARTS == 2:
                        clear(v_tile, step * STEP, begin, end, BN, BV)
                y = warpgroup_mma(q_tile, k_tile, no_scores, use_acc=False, is_async=True)
                sums = warpgroup_mma(p, v_before, acc, is_async=True)
                y = warpgroup_mma_wait(1, deps=(y,))
                y, y_last = _blocks(y, PARTS, SCORES)
                renews = step * STEP % SPLIT == 0
                weights, higher, heavier, shrink = _weights(
                    y, gl.where(renews, float("-inf"), top), gl.where(renews, 0.0, total), query, low_query, high_query,
                    step * STEP, begin, end, c, scale, softcap, BN, CAUSAL, LEFT, RIGHT, GENERAL, SOFTCAP,
                    k_tiles.dtype,
                )  # fmt: skip
                heavier = _now(heavier)
                acc, p = warpgroup_mma_wait(0, deps=(sums, p))
                if renews:
                    top_before, total_before, acc_before = _add_split(
                        top, total, acc, top_before, total_before, acc_before
                    )
                    acc = gl.zeros((_ROWS, BV), gl.float32, SUMS)
                top = higher
                total = heavier
                acc = acc * columns(shrink, acc)
                p = gl.convert_layout(weights, WEIGHTS, assert_trivial=True)
                if PARTS == 2:
                    sums = warpgroup_mma(p, v_tile, acc, is_async=True)
                    weights, top, total, shrink = _weights(
                        y_last, top, total, query, low_query, high_query, step * STEP + BN, begin, end, c, scale,
                        softcap, BN, CAUSAL, LEFT, RIGHT, GENERAL, SOFTCAP, k_tiles.dtype,
                    )  # fmt: skip
                    total = _now(total)
                    acc, p = warpgroup_mma_wait(0, deps=(sums, p))
                    acc = acc * columns(shrink, acc)
                    p = gl.convert_layout(weights, WEIGHTS, assert_trivial=True)
                mbarrier.arrive(free.index(slot))
                slot, phase = _next(slot, phase, STAGES)
            if QUERIES > 0:
                mbarrier.arrive(q_free.index(q_place))
            mbarrier.wait(ready.index(slot), phase)
            v_before = v_tiles.index(PARTS * slot + PARTS - 1).reshape([BN, BV])
            if CLEAR:
                clear(v_before, last * STEP - BN, begin, end, BN, BV)
            sums = warpgroup_mma(p, v_before, acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=(sums, p))
            mbarrier.arrive(free.index(slot))
            slot, phase = _next(slot, phase, STAGES)
            top, total, acc = _add_split(top, total, acc, top_before, total_before, acc_before)
            finish(
                top, total, acc, sinks, o, lse, o_tiles.index(WHICH), b, hk, row, token_start, tokens, o_start,
                o_stride_t, o_stride_h, DV, BV, G, HKV, INDEX, QUERIES > 0,
            )  # fmt: skip
    if QUERIES > 0:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["B", "T", "S", "together"])
def _roles_kernel(
    q, k, v, mask, sinks, o, lse, partial, cu_q, cu_k, lengths, starts, offsets, table,
    B, T, S, together,
    q_stride_b, q_stride_t, q_stride_h, o_stride_b, o_stride_t, o_stride_h, c, scale, softcap,
    KIND: gl.constexpr, G: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr,
    PARTS: gl.constexpr, BD: gl.constexpr, BV: gl.constexpr, SPLIT: gl.constexpr, CAUSAL: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, GENERAL: gl.constexpr, SOFTCAP: gl.constexpr, INDEX: gl.constexpr,
    STAGES: gl.constexpr, QUERIES: gl.constexpr, CLEAR: gl.constexpr,
):  # fmt: skip
    """Attention of dense or packed sequences. PARTS: blocks of keys per step, 1 or 2. CLEAR: whether a block may have
    keys that are not its sequence's. QUERIES: buffers of a tile's queries; 0 where TMA neither reads q nor writes o.
    """
    DTYPE: gl.constexpr = k.dtype
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN * PARTS, BD], k.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES * PARTS, 1, 1, BN, BV], v.layout)
    if QUERIES > 0:
        q_tiles = gl.allocate_shared_memory(DTYPE, [QUERIES * _GROUPS, 1, 1, _ROWS // G, G, BD], q.layout)
        o_tiles = gl.allocate_shared_memory(DTYPE, [_GROUPS, 1, 1, _ROWS // G, G, BV], o.layout)
    else:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, BD], DTYPE)
        q_tiles = gl.allocate_shared_memory(DTYPE, [_GROUPS, _ROWS, BD], LAYOUT)
        o_tiles = q_tiles
    BARRIERS: gl.constexpr = _GROUPS * (QUERIES if QUERIES > 0 else 1)
    q_ready = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(BARRIERS):
        mbarrier.init(q_ready.index(slot), count=1)
        mbarrier.init(q_free.index(slot), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=_GROUPS)
    fence_async_shared()
    if KIND == "dense":
        items = B * HKV * gl.cdiv(T * G, _ROWS * _GROUPS)
    else:
        items = together * HKV
    gl.warp_specialize(
        [
            (_attend, (
                q, sinks, o, lse, cu_q, cu_k, lengths, starts, offsets, q_tiles, k_tiles, v_tiles, o_tiles, q_ready,
                q_free, ready, free, B, T, S, together, items, q_stride_b, q_stride_t, q_stride_h, o_stride_b,
                o_stride_t, o_stride_h, c, scale, softcap, 0, KIND, BN, PARTS, SPLIT, D, DV, BD, BV, G, HKV, CAUSAL,
                LEFT, RIGHT, GENERAL, SOFTCAP, INDEX, STAGES, QUERIES, CLEAR,
            )),
            (_attend, (
                q, sinks, o, lse, cu_q, cu_k, lengths, starts, offsets, q_tiles, k_tiles, v_tiles, o_tiles, q_ready,
                q_free, ready, free, B, T, S, together, items, q_stride_b, q_stride_t, q_stride_h, o_stride_b,
                o_stride_t, o_stride_h, c, scale, softcap, 1, KIND, BN, PARTS, SPLIT, D, DV, BD, BV, G, HKV, CAUSAL,
                LEFT, RIGHT, GENERAL, SOFTCAP, INDEX, STAGES, QUERIES, CLEAR,
            )),
            (_load, (
                q, k, v, cu_q, cu_k, lengths, starts, offsets, q_tiles, k_tiles, v_tiles, q_ready, q_free, ready, free,
                B, T, S, together, items, KIND, BN, PARTS, BD, BV, G, HKV, CAUSAL, LEFT, RIGHT, STAGES, QUERIES,
            )),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


KERNELS = (_roles_kernel,)


def describe_roles_forward(problem: Problem, config: Config) -> Launch:
    """Launch on the tensors of `forward.describe_forward`: q, k, v, o and, if there are, sinks and lse."""
    block_n, split = problem.order
    parts = _STEP // block_n
    head, value_head = (next_power_of_two(size, 64) for size in (problem.head, problem.value_head))
    by_boxes = configs.queries_by_tma(problem)
    queries = 0
    maps: list[TensorMap | None] = [None] * 6
    if by_boxes:
        queries = 2
        maps[0] = _row_map(problem, problem.q_strides, problem.head, head)
        maps[5] = _row_map(problem, problem.o_strides, problem.value_head, value_head)
    maps[1] = _key_map(problem, problem.k_strides, problem.head, head, _STEP)
    maps[2] = _key_map(problem, problem.v_strides, problem.value_head, value_head, block_n)
    constants: dict[str, object] = {
        "KIND": problem.kind, "G": problem.group, "HKV": problem.kv_heads, "D": problem.head,
        "DV": problem.value_head, "BN": block_n, "PARTS": parts, "BD": head, "BV": value_head, "SPLIT": split,
        "CAUSAL": problem.causal, "LEFT": problem.left, "RIGHT": problem.right, "GENERAL": problem.is_general,
        "SOFTCAP": bool(problem.softcap), "INDEX": tl.int64 if problem.wide else tl.int32,
        "STAGES": config.num_stages, "QUERIES": queries,
        "CLEAR": problem.kind != "dense" or any(problem.placed[:2]),
    }  # fmt: skip
    pairs = problem.sequences * problem.kv_heads
    together = -(-pairs // max(1, -(-pairs // configs.heads_together(problem))))
    if problem.kind != "dense":
        together = configs.row_blocks(problem, config.block_m)
    sizes = problem.sequences, problem.queries, problem.keys, together
    scalars = (*sizes, *problem.q_strides, *problem.o_strides, *problem.factors, problem.softcap)
    programs = min(problem.sm_count, configs.row_blocks(problem, config.block_m) * problem.kv_heads)
    options: dict[str, object] = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    return Launch(_roles_kernel, programs, scalars, constants, options, maps=tuple(maps))


def _key_map(problem: Problem, strides: tuple[int, int, int], size: int, block: int, keys: int) -> TensorMap:
    """Keys or values: sequence, head, key, column; beyond the last ones are zeros."""
    shape = problem.sequences if problem.kind == "dense" else 1, problem.kv_heads, problem.keys, size
    return _laid_out(shape, (strides[0], strides[2], strides[1], 1), (1, 1, keys, block), problem)


def _row_map(problem: Problem, strides: tuple[int, int, int], size: int, block: int) -> TensorMap:
    """Queries or results: sequence, key head, token, head of the group, column."""
    group = problem.group
    shape = problem.sequences, problem.kv_heads, problem.queries, group, size
    steps = strides[0], group * strides[2], strides[1], strides[2], 1
    return _laid_out(shape, steps, (1, 1, _ROWS.value // group, group, block), problem)


def _laid_out(shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], problem: Problem) -> TensorMap:
    """A map with the layout of its blocks in shared memory; the stride of an axis of 1 is of no account."""
    strides = (*(step if size > 1 else 8 for size, step in zip(shape[:-1], strides, strict=False)), 1)
    seen = TensorMap(shape, strides, block)
    return replace(seen, layout=gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, problem.dtype)))
