"""The kernels of the GEMM family and their launchers.

Every output element is one fp32 sum over k in ascending order. A chunked one starts a new sum at every multiple of the
chunk. The finished sums are added in ascending order, one fp32 addition each, wherever they are kept: in registers, in
the output, in scratch memory of the program, or in a buffer for a second kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from isogemm.core.kernels import pdl_option, start_launch
from isogemm.core.launch import Launch, TensorMap
from isogemm.core.plan import STAMP
from isogemm.epilogues import device, operands, spec
from isogemm.epilogues.operands import Epilogue
from isogemm.gemm import configs
from isogemm.gemm.configs import Config, Problem
from isogemm.gemm.kernels.epilogue import biases, finish
from isogemm.gemm.kernels.halves import round_by_instruction, split_tf32
from isogemm.gemm.kernels.handover import (
    await_flag,
    await_turn,
    gather,
    keep,
    kept_sums,
    pass_turn,
    set_flag,
    shared_slots,
)  # fmt: skip
from isogemm.gemm.kernels.roles import laid_out, roles_kernel
from isogemm.gemm.kernels.tiles import balanced_share, inside, multiple, multiples, place

_ADDED_AT_ONCE = 1024


@triton.jit
def _added(block, acc):
    """acc + block, as a fused multiply-add: Triton would merge a plain sum into the dot, as one longer chain."""
    return tl.fma(block, tl.full(block.shape, 1.0, tl.float32), acc)


@triton.jit
def multiply(
    a, b, acc, PRECISION: tl.constexpr, A_ROUNDED: tl.constexpr, B_ROUNDED: tl.constexpr,
    A_SPLIT: tl.constexpr = False, B_SPLIT: tl.constexpr = False, SWAPPED: tl.constexpr = False,
):  # fmt: skip
    """acc + a b, in ascending k.

    ieee and tf32x3 add finished blocks: a tensor core's own sum truncates, and a long chain rounds as often.
    A_SPLIT, B_SPLIT: a, b is its two halves. SWAPPED: the small products change places, as the operands did.
    """
    if PRECISION == "tf32":
        if not A_ROUNDED:
            a = round_by_instruction(a)
        if not B_ROUNDED:
            b = round_by_instruction(b)
        return tl.dot(a, b, acc, input_precision="tf32")
    elif PRECISION == "tf32x3":
        a_large, a_small = a if A_SPLIT else split_tf32(a)
        b_large, b_small = b if B_SPLIT else split_tf32(b)
        if SWAPPED:
            block = tl.dot(a_large, b_small, input_precision="tf32")
            block = tl.dot(a_small, b_large, block, input_precision="tf32")
        else:
            block = tl.dot(a_small, b_large, input_precision="tf32")
            block = tl.dot(a_large, b_small, block, input_precision="tf32")
        return _added(tl.dot(a_large, b_large, block, input_precision="tf32"), acc)
    elif PRECISION == "ieee":
        return _added(tl.dot(a, b, input_precision="ieee"), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def load_tile(
    source, first, k, rows, K, stride_row, stride_k, k_inner, stride_k_outer,
    ROWS: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, K_CONTIGUOUS: tl.constexpr, TRANSPOSED: tl.constexpr,
    MASK_K: tl.constexpr, K_LEVELS: tl.constexpr, INDEX: tl.constexpr, PAIRED: tl.constexpr, to_second,
    SPLIT: tl.constexpr = False,
):  # fmt: skip
    """Rows first .. first + ROWS - 1 of an operand at k .. k + BK - 1: [ROWS, BK], or [BK, ROWS] if TRANSPOSED.

    PAIRED: ROWS // 2 rows of one matrix, then as many of another, `to_second` elements away (TMA: one map of both).
    SPLIT: the large and the small halves, of which there is one map.
    """
    if SPLIT:
        large = tl.reshape(source.load([0, first, k]), (ROWS, BK))
        small = tl.reshape(source.load([1, first, k]), (ROWS, BK))
        if TRANSPOSED:
            large, small = large.T, small.T
        return large, small
    elif TMA:
        if PAIRED:
            tile = tl.reshape(source.load([0, first, k]), (ROWS, BK))
        elif K_CONTIGUOUS:
            tile = source.load([first, k])
        else:
            tile = source.load([k, first])
        if K_CONTIGUOUS == TRANSPOSED:
            tile = tile.T
        return tile
    else:
        if PAIRED:
            row = first + tl.arange(0, ROWS) % (ROWS // 2)
        else:
            row = first + tl.arange(0, ROWS)
        ks = k + tl.arange(0, BK)
        if K_LEVELS == 1:
            k_offset = ks.to(INDEX) * stride_k
        else:
            k_offset = (ks // k_inner).to(INDEX) * stride_k_outer + (ks % k_inner).to(INDEX) * stride_k
        row_offset = row.to(INDEX) * stride_row
        if PAIRED:
            row_offset += (tl.arange(0, ROWS) // (ROWS // 2)).to(tl.int64) * to_second
        if TRANSPOSED:
            live = (row < rows)[None, :]
            if MASK_K:
                live = live & (ks < K)[:, None]
            return tl.load(source + (k_offset[:, None] + row_offset[None, :]), mask=live, other=0.0)
        else:
            live = (row < rows)[:, None]
            if MASK_K:
                live = live & (ks < K)[None, :]
            return tl.load(source + (row_offset[:, None] + k_offset[None, :]), mask=live, other=0.0)


@triton.jit(do_not_specialize=["M", "N", "K", "batch", "batch_inner", "k_inner", "stamp", "dropped"])
def _gemm_kernel(
    a, b, b_rest, c, scratch,
    e0, e1, e2, e3, e4, e5, e6, e7, e8, e9, e10, e11, e12, e13, e14, e15, e16, e17, e18, e19,
    M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    k_inner, stride_ak_outer, stride_bk_outer,
    batch, batch_inner, stride_ab_outer, stride_ab, stride_bb_outer, stride_bb,
    stride_e0, stride_e1, stride_e2, stride_e3, stride_e4, stride_e5, stride_e6, stride_e7, stride_e8, stride_e9,
    stride_e10, stride_e11, stamp, alpha_value, beta_value, dropped, kept_scale,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    A_TMA: tl.constexpr, B_TMA: tl.constexpr, C_TMA: tl.constexpr,
    A_K_CONTIGUOUS: tl.constexpr, B_K_CONTIGUOUS: tl.constexpr,
    UNITS: tl.constexpr, ACCUMULATION: tl.constexpr, CHUNK: tl.constexpr, ACCUMULATE: tl.constexpr,
    INSIDE: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr, SWAPPED: tl.constexpr, UP_FIRST: tl.constexpr,
    E: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, A_SPLIT: tl.constexpr, B_SPLIT: tl.constexpr,
    BN_REST: tl.constexpr, PERSISTENT: tl.constexpr, MASK_K: tl.constexpr, K_LEVELS: tl.constexpr,
    BATCHED: tl.constexpr, PDL: tl.constexpr, PARALLEL: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """C = A B for any operands; one program per tile, or a few persistent programs.

    A tile is BN + BN_REST wide: two sums side by side, since each must be a power of two. Where two weights are
    paired, each has half of BN (of BM, if swapped); b_rest is then the second.

    PARALLEL: a program per chunk of a tile. "partials": another kernel adds the sums. "queued": each program waits
    until the chunk before is added, adds its own sums, and says so. "gathered": the last chunk's program waits for
    the others' sums and adds all. Programs start in ascending order, so one that is waited for runs already.
    """
    e = (e0, e1, e2, e3, e4, e5, e6, e7, e8, e9, e10, e11, e12, e13, e14, e15, e16, e17, e18, e19)
    steps = (
        stride_e0, stride_e1, stride_e2, stride_e3, stride_e4, stride_e5, stride_e6, stride_e7, stride_e8, stride_e9,
        stride_e10, stride_e11,
    )  # fmt: skip
    numbers = (alpha_value, beta_value, dropped, kept_scale)
    A_PAIRED: tl.constexpr = E.paired and SWAPPED
    B_PAIRED: tl.constexpr = E.paired and not SWAPPED
    TILE_M: tl.constexpr = BM // 2 if A_PAIRED else BM
    TILE_N: tl.constexpr = BN // 2 if B_PAIRED else BN + BN_REST
    BIASED: tl.constexpr = BN // 2 if B_PAIRED else BN
    M = multiple(M, UNITS[0])
    N = multiple(N, UNITS[1])
    K = multiple(K, UNITS[2])
    stride_am, stride_ak = multiples(stride_am, stride_ak, UNITS[3], UNITS[4], A_TMA)
    stride_bk, stride_bn = multiples(stride_bk, stride_bn, UNITS[5], UNITS[6], B_TMA)
    stride_cm, stride_cn = multiples(stride_cm, stride_cn, UNITS[7], UNITS[8], C_TMA)
    m_tiles = tl.cdiv(M, TILE_M)
    n_tiles = tl.cdiv(N, TILE_N)
    to_second = 0
    if E.paired and not (A_TMA if SWAPPED else B_TMA):
        first = a if SWAPPED else b
        to_second = (b_rest.to(tl.int64) - first.to(tl.int64)) // (first.dtype.element_ty.primitive_bitwidth // 8)
        to_second = multiple(to_second, UNITS[9])
    places = m_tiles * n_tiles
    tiles = places
    if PARALLEL != "":
        tiles *= tl.cdiv(K, CHUNK)
    if BATCHED:
        tiles *= batch
    start_launch(PDL)
    program = tl.program_id(0)
    for tile in tl.range(program, tiles if PERSISTENT else program + 1, tl.num_programs(0)):
        layer = tile // places  # of the batch, or of the chunks
        row, column = place(tile % places, m_tiles, n_tiles, GROUP)
        m = inside(row * TILE_M, M, TILE_M, UNITS[0], INSIDE and A_TMA)
        n = inside(column * TILE_N, N, TILE_N, UNITS[1], INSIDE and B_TMA)
        loaded = biases(e, m if SWAPPED else n, M if SWAPPED else N, TILE_M if SWAPPED else BIASED, E)
        if BN_REST > 0:
            loaded_rest = loaded if SWAPPED else biases(e, n + BN, N, BN_REST, E)
        a_from = a
        b_from = b
        c_to = c
        if BATCHED:
            outer = (layer // batch_inner).to(tl.int64)
            inner = (layer % batch_inner).to(tl.int64)
            a_from = a + (outer * stride_ab_outer + inner * stride_ab)
            b_from = b + (outer * stride_bb_outer + inner * stride_bb)
        if BATCHED or PARALLEL == "partials":
            c_to = c + layer.to(tl.int64) * M * N
        begin_first = layer * CHUNK if PARALLEL != "" else 0
        begin_end = begin_first + 1 if ACCUMULATION == "one" or PARALLEL != "" else K
        if ACCUMULATION == "registers":
            total = tl.zeros((BM, BN), dtype=tl.float32)
            total_rest = tl.zeros((BM, BN_REST if BN_REST > 0 else 1), dtype=tl.float32)
        for begin in tl.range(begin_first, begin_end, CHUNK if CHUNK > 0 else 1):
            end = min(begin + CHUNK, K) if CHUNK > 0 else K
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            acc_rest = tl.zeros((BM, BN_REST if BN_REST > 0 else 1), dtype=tl.float32)
            for k in tl.range(begin, end, BK):
                a_tile = load_tile(
                    a_from, m, k, M, K, stride_am, stride_ak, k_inner, stride_ak_outer,
                    BM, BK, A_TMA, A_K_CONTIGUOUS, False, MASK_K, K_LEVELS, INDEX, A_PAIRED, to_second, A_SPLIT,
                )  # fmt: skip
                b_tile = load_tile(
                    b_from, n, k, N, K, stride_bn, stride_bk, k_inner, stride_bk_outer,
                    BN, BK, B_TMA, B_K_CONTIGUOUS, True, MASK_K, K_LEVELS, INDEX, B_PAIRED, to_second, B_SPLIT,
                )  # fmt: skip
                acc = multiply(a_tile, b_tile, acc, PRECISION, A_TMA, B_TMA, A_SPLIT, B_SPLIT, SWAPPED)
                if BN_REST > 0:
                    rest_tile = load_tile(
                        b_rest, n + BN, k, N, K, stride_bn, stride_bk, k_inner, stride_bk_outer,
                        BN_REST, BK, B_TMA, B_K_CONTIGUOUS, True, MASK_K, K_LEVELS, INDEX, False, 0, B_SPLIT,
                    )  # fmt: skip
                    acc_rest = multiply(a_tile, rest_tile, acc_rest, PRECISION, A_TMA, B_TMA, A_SPLIT, B_SPLIT, SWAPPED)
            AREA: tl.constexpr = BM * (BN + BN_REST)
            kept = scratch
            kept_rest = scratch
            if ACCUMULATION == "scratch" or PARALLEL == "queued" or PARALLEL == "gathered":
                kept, kept_rest, flag = shared_slots(
                    scratch, program, tile, places, K, CHUNK, BM * BN, AREA, ACCUMULATION, PARALLEL
                )  # fmt: skip
            whole = True
            if PARALLEL == "queued":
                await_turn(flag, stamp, layer)
            elif PARALLEL == "gathered":
                whole = end == K
                acc = gather(
                    acc, scratch, kept, flag, tile % places, places, layer, whole, stamp, c, m, n, M, N, stride_cm,
                    stride_cn, BM, BN, GATHERED, ACCUMULATE, INDEX,
                )  # fmt: skip
            if ACCUMULATION == "registers":
                total += acc
                total_rest += acc_rest
            elif whole:
                finish(
                    acc, c_to, kept, e, loaded, steps, numbers, m, n, begin == 0, end == K, M, N, stride_cm, stride_cn,
                    BM, BN, WIDTH, C_TMA, SWAPPED, UP_FIRST, E, ACT, SLOPE, ACCUMULATION, ACCUMULATE, INDEX, True,
                )  # fmt: skip
                if BN_REST > 0:
                    finish(
                        acc_rest, c_to, kept_rest, e, loaded_rest, steps, numbers, m, n + BN, begin == 0, end == K,
                        M, N, stride_cm, stride_cn, BM, BN_REST, WIDTH, C_TMA, SWAPPED, UP_FIRST, E, ACT, SLOPE,
                        ACCUMULATION, ACCUMULATE, INDEX, True,
                    )  # fmt: skip
            if PARALLEL == "queued":
                pass_turn(flag, stamp, layer, end == K)
        if ACCUMULATION == "registers":
            finish(
                total, c_to, scratch, e, loaded, steps, numbers, m, n, True, True, M, N, stride_cm, stride_cn,
                BM, BN, WIDTH, C_TMA, SWAPPED, UP_FIRST, E, ACT, SLOPE, ACCUMULATION, False, INDEX, False,
            )  # fmt: skip
            if BN_REST > 0:
                finish(
                    total_rest, c_to, scratch, e, loaded_rest, steps, numbers, m, n + BN, True, True, M, N, stride_cm,
                    stride_cn, BM, BN_REST, WIDTH, C_TMA, SWAPPED, UP_FIRST, E, ACT, SLOPE, ACCUMULATION, False, INDEX,
                    False,
                )  # fmt: skip


@triton.jit(do_not_specialize=["M", "N", "K", "stamp", "dropped"])
def _stream_kernel(
    a, b, c, scratch,
    e0, e1, e2, e3, e4, e5, e6, e7, e8, e9, e10, e11, e12, e13, e14, e15, e16, e17, e18, e19,
    M, N, K, stride_cm, stride_cn,
    stride_e0, stride_e1, stride_e2, stride_e3, stride_e4, stride_e5, stride_e6, stride_e7, stride_e8, stride_e9,
    stride_e10, stride_e11, stamp, alpha_value, beta_value, dropped, kept_scale,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    C_TMA: tl.constexpr, A_K_CONTIGUOUS: tl.constexpr, B_K_CONTIGUOUS: tl.constexpr,
    UNITS: tl.constexpr, ACCUMULATION: tl.constexpr, CHUNK: tl.constexpr, ACCUMULATE: tl.constexpr,
    INSIDE: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr, SWAPPED: tl.constexpr, UP_FIRST: tl.constexpr,
    E: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, A_SPLIT: tl.constexpr, B_SPLIT: tl.constexpr,
    BALANCED: tl.constexpr,
):  # fmt: skip
    """C = A B with operands by TMA; a few persistent programs, each with one loop over the k of all its tiles.

    The next tile's operands are loaded while this one's result is stored.

    BALANCED: the tiles of the last wave and of the one before are divided evenly, in blocks of k. A program may begin a
    tile that the next program ends: it does so first, leaves the sums in scratch memory and sets a flag to `stamp`. The
    next program goes on from these sums, as its last tile, so it hardly waits. Their order over k stays the same.
    """
    e = (e0, e1, e2, e3, e4, e5, e6, e7, e8, e9, e10, e11, e12, e13, e14, e15, e16, e17, e18, e19)
    steps = (
        stride_e0, stride_e1, stride_e2, stride_e3, stride_e4, stride_e5, stride_e6, stride_e7, stride_e8, stride_e9,
        stride_e10, stride_e11,
    )  # fmt: skip
    numbers = (alpha_value, beta_value, dropped, kept_scale)
    A_PAIRED: tl.constexpr = E.paired and SWAPPED
    B_PAIRED: tl.constexpr = E.paired and not SWAPPED
    TILE_M: tl.constexpr = BM // 2 if A_PAIRED else BM
    TILE_N: tl.constexpr = BN // 2 if B_PAIRED else BN
    M = multiple(M, UNITS[0])
    N = multiple(N, UNITS[1])
    stride_cm, stride_cn = multiples(stride_cm, stride_cn, UNITS[7], UNITS[8], C_TMA)
    m_tiles = tl.cdiv(M, TILE_M)
    n_tiles = tl.cdiv(N, TILE_N)
    blocks = tl.cdiv(K, BK)
    tiles = m_tiles * n_tiles
    if ACCUMULATION == "partials":
        tiles *= tl.cdiv(K, CHUNK)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    kept = scratch if ACCUMULATION != "scratch" else scratch + program.to(tl.int64) * (BM * BN)
    tile = program - programs
    block = blocks - 1
    begin = 0
    turns = tl.cdiv(tiles - program, programs) * blocks
    if ACCUMULATION == "partials":  # a tile is one chunk of one place; the last chunk may be shorter
        CHUNK_BLOCKS: tl.constexpr = CHUNK // BK
        last_blocks = blocks - (tl.cdiv(K, CHUNK) - 1) * CHUNK_BLOCKS
        of_place = m_tiles * n_tiles
        short = tl.maximum(tl.cdiv(tiles - program, programs) - tl.cdiv(tiles - of_place - program, programs), 0)
        turns = (tl.cdiv(tiles - program, programs) - short) * CHUNK_BLOCKS + short * last_blocks
        block = CHUNK_BLOCKS - 1
        blocks = CHUNK_BLOCKS
    if BALANCED:
        whole, begins, ends_at = balanced_share(tiles, blocks)
        turns = whole * blocks + ends_at - begins
        last_item = whole - 1 + ends_at // blocks - begins // blocks
        item = tl.where(ends_at % blocks == 0, -1, -2)  # -1: the tile that it only begins
        stop = block + 1  # of the item
        flags = (scratch + programs.to(tl.int64) * (BM * BN)).to(tl.pointer_type(tl.int64), bitcast=True) + program
    layer = 0
    m = 0
    n = 0
    BIASED: tl.constexpr = TILE_M if SWAPPED else TILE_N
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if ACCUMULATION == "registers":
        total = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in tl.range(0, turns):
        if BALANCED:
            starts = block == stop - 1
        else:
            starts = block == blocks - 1
        block = tl.where(starts, 0, block + 1)
        if starts:
            if BALANCED:
                item += 1
                if (item >= 0) & (item < whole):
                    tile = program + item * programs
                else:
                    of_divided = ends_at // blocks - tl.maximum(item - whole + 1, 0)
                    tile = whole * programs + of_divided
                    block = tl.maximum(begins - of_divided * blocks, 0)
                stop = tl.where(item < 0, ends_at % blocks, blocks)
            else:
                tile += programs
            layer = tile // (m_tiles * n_tiles)
            row, column = place(tile % (m_tiles * n_tiles), m_tiles, n_tiles, GROUP)
            m = inside(row * TILE_M, M, TILE_M, UNITS[0], INSIDE)
            n = inside(column * TILE_N, N, TILE_N, UNITS[1], INSIDE)
            if ACCUMULATION == "partials":
                begin = layer * CHUNK
                blocks = tl.minimum(tl.cdiv(K - begin, BK), CHUNK // BK)
        k = begin + block * BK
        a_tile = load_tile(
            a, m, k, M, K, 0, 0, 0, 0, BM, BK, True, A_K_CONTIGUOUS, False, False, 1, INDEX, A_PAIRED, 0, A_SPLIT
        )
        b_tile = load_tile(
            b, n, k, N, K, 0, 0, 0, 0, BN, BK, True, B_K_CONTIGUOUS, True, False, 1, INDEX, B_PAIRED, 0, B_SPLIT
        )
        acc = multiply(a_tile, b_tile, acc, PRECISION, True, True, A_SPLIT, B_SPLIT, SWAPPED)
        last = block == (stop if BALANCED else blocks) - 1
        ends = last
        if ACCUMULATION == "in place" or ACCUMULATION == "scratch" or ACCUMULATION == "registers":
            ends = last | ((block + 1) % (CHUNK // BK) == 0)
        stores = last if ACCUMULATION == "registers" else ends
        if BALANCED:
            stores = item >= 0
        if ends:  # no barrier: its own loads and stores agree on threads, and one would end the overlap
            first = k < CHUNK
            c_to = c
            if ACCUMULATION == "partials":
                c_to = c + layer.to(tl.int64) * M * N
            loaded = biases(e, m if SWAPPED else n, M if SWAPPED else N, BIASED, E)
            if BALANCED:
                if item < 0:
                    keep(acc, scratch + program.to(tl.int64) * (BM * BN), BM, BN)
                    set_flag(flags, stamp)
            if ACCUMULATION == "registers":
                acc += total
                total = acc
            if stores:
                finish(
                    acc, c_to, kept, e, loaded, steps, numbers, m, n, first, last, M, N, stride_cm, stride_cn,
                    BM, BN, WIDTH, C_TMA, SWAPPED, UP_FIRST, E, ACT, SLOPE, ACCUMULATION, ACCUMULATE, INDEX, False,
                )  # fmt: skip
                if ACCUMULATION == "registers":
                    total = tl.zeros((BM, BN), dtype=tl.float32)
            begun = tl.zeros((BM, BN), dtype=tl.float32)
            if BALANCED:
                if (item == last_item - 1) & (begins % blocks > 0):
                    await_flag(flags - 1, stamp)
                    begun = kept_sums(scratch + (program.to(tl.int64) - 1) * (BM * BN), acc, BM, BN)
            acc = begun


@triton.jit(do_not_specialize=["M", "N", "chunks"])
def _add_partials_kernel(
    partials, c, bias, M, N, chunks, stride_cm, stride_cn,
    ACCUMULATE: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """c = (c or 0) + partials[0] + partials[1] + ... (+ bias), from left to right."""
    size = M.to(tl.int64) * N
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    row = at // N
    col = at % N
    c_ptrs = c + (row * stride_cm + col * stride_cn)
    if ACCUMULATE:
        total = tl.load(c_ptrs, mask=live, other=0.0)
    else:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
    for chunk in tl.range(0, chunks):
        total += tl.load(partials + (chunk * size + at), mask=live, other=0.0)
    if BIAS:
        total += tl.load(bias + col, mask=live, other=0.0).to(tl.float32)
    tl.store(c_ptrs, total.to(c.dtype.element_ty), mask=live)


# How many tensors and strides the kernels take for an epilogue: `epilogues.operands` says which they are.
SLOTS, STRIDE_SLOTS = 20, 12


def describe_gemm(problem: Problem, config: Config) -> Launch:
    """The launch that computes `problem` with `config`.

    Its tensors are a, b, (b's rest, or the second weight), c, scratch memory and what the epilogue reads and writes
    (`operands.TENSORS`). An operand that a pass splits is given as its halves. A swapped configuration's a and b change
    places. Accumulated by partials, c is their memory.
    Its numbers are alpha, beta, the dropout's threshold and its scale.
    """
    accumulation = configs.accumulation(problem, config)
    a_tma, b_tma = configs.reads_a_by_tma(problem, config), configs.reads_b_by_tma(problem, config)
    c_tma = configs.writes_c_by_tma(problem, config)
    seen = configs.as_read(problem, config)
    a_split, b_split = config.splits("a"), config.splits("b")
    if config.swapped:
        seen, a_tma, b_tma, a_split, b_split = seen.transposed(), b_tma, a_tma, b_split, a_split
    if accumulation == "partials":
        seen = replace(seen, c_strides=(1, problem.n) if config.swapped else (problem.n, 1))
    (am, ak), (bk, bn), (cm, cn) = seen.a_strides, seen.b_strides, seen.c_strides
    a_by_k, b_by_k = ak == 1, bk == 1
    # No kernel is compiled for a number of tokens. A weight's sizes are worth it, where they bound wide loads.
    tokens_are_n = config.swapped
    units = (
        1 if not tokens_are_n and a_by_k else configs.unit(seen.m),
        1 if tokens_are_n and b_by_k else configs.unit(seen.n),
        configs.unit(seen.k) if a_by_k or b_by_k else 1,
        *map(configs.unit, (am, ak, bk, bn, cm, cn)),
        16 // configs.ITEMSIZE[seen.dtype] if problem.b_aligned else 1,  # between two weights, both aligned
    )
    epilogue = problem.epilogue if accumulation != "partials" else Epilogue()
    act, slope = activation_functions(epilogue)
    constants: dict[str, object] = {
        "GROUP": config.group, "C_TMA": c_tma, "A_K_CONTIGUOUS": a_by_k, "B_K_CONTIGUOUS": b_by_k, "UNITS": units,
        "ACCUMULATION": accumulation, "CHUNK": seen.chunk, "ACCUMULATE": seen.accumulate and accumulation != "partials",
        "INSIDE": configs.tiles_move(problem, config), "PRECISION": seen.precision if seen.dtype == "float32" else "",
        "INDEX": index_type(_reach(seen)),
        "SWAPPED": config.swapped, "UP_FIRST": problem.up_first and (b_tma if not config.swapped else a_tma),
        "E": epilogue, "ACT": act, "SLOPE": slope, "A_SPLIT": a_split, "B_SPLIT": b_split,
    }  # fmt: skip
    blocks: dict[str, object] = {"BM": config.block_m, "BN": config.block_n}
    roles = config.kernel == "roles"
    groups = configs.ROLE_GROUPS if roles else 1
    rows = config.block_m // (1 if config.alternating else groups)  # of an operand's tile, and of the result's
    a_block, b_block = (rows, config.block_k), (config.block_n, config.block_k)
    rounded = seen.precision == "tf32"
    a_map = _operand_map((seen.m, am), (seen.k, ak), a_block, rounded) if a_tma else None
    b_map = _operand_map((seen.n, bn), (seen.k, bk), b_block, rounded) if b_tma else None
    a_map, b_map = _halved(a_map) if a_split else a_map, _halved(b_map) if b_split else b_map
    if epilogue.paired:
        a_map, b_map = (_paired(a_map), b_map) if config.swapped else (a_map, _paired(b_map))
    c_map = TensorMap((seen.m, seen.n), (cm, cn), (rows, configs.width(problem, config))) if c_tma else None
    c_scalars = (None, None) if c_tma else (cm, cn)
    programs, options = configs.programs(problem, config), _options(config)
    host, dropout = epilogue.alpha == "host", epilogue.dropout
    numbers = (
        1.0 if host else None, 1.0 if epilogue.beta == "host" else None,
        1 if dropout else None, 1.0 if dropout else None,
    )  # fmt: skip
    blocks |= {"BK": config.block_k, "WIDTH": configs.width(problem, config)}
    if config.kernel == "stream":
        scalars = (seen.m, seen.n, seen.k, *c_scalars, *_read_scalars(problem), STAMP if config.balanced else None)
        constants["BALANCED"] = config.balanced
        maps = (a_map, b_map, c_map)
        return Launch(_stream_kernel, programs, scalars, blocks | constants, options, maps, numbers)
    rest = _operand_map((seen.n, bn), (seen.k, bk), (config.rest_n, config.block_k), rounded) if config.rest_n else None
    rest = _halved(rest) if b_split else rest
    if roles:
        scalars = (seen.m, seen.n, seen.k, *_read_scalars(problem), STAMP if config.waits else None)
        for name in ("C_TMA", "ACCUMULATE", "PRECISION", "SWAPPED", "A_SPLIT", "B_SPLIT"):
            del constants[name]
        constants |= {
            "BN_REST": config.rest_n, "STAGES": config.num_stages, "ALTERNATING": config.alternating,
            "TEAM": configs.team(problem) if config.balanced else 0, "PDL": config.pdl,
        }  # fmt: skip
        options |= {"num_warps": config.num_warps // groups, "num_stages": 1}  # of the warps that launch the others
        maps = (*(laid_out(each, seen.dtype) for each in (a_map, b_map, rest)), laid_out(c_map, seen.out_dtype))
        return Launch(roles_kernel, programs, scalars, blocks | constants, options, maps, numbers)
    batched, levels = seen.batch > 1, 2 if seen.k_inner else 1
    constants = {"GROUP": constants.pop("GROUP"), "A_TMA": a_tma, "B_TMA": b_tma} | constants
    constants |= {
        "BN_REST": config.rest_n, "PERSISTENT": config.persistent, "MASK_K": seen.k % config.block_k != 0,
        "K_LEVELS": levels, "BATCHED": batched, "PDL": config.pdl, "PARALLEL": config.parallel_chunks,
        "GATHERED": min(seen.chunks, 3) if config.parallel_chunks == "gathered" else 0,
    }  # fmt: skip
    scalars = (
        seen.m, seen.n, seen.k, *((None, None) if a_tma else (am, ak)), *((None, None) if b_tma else (bk, bn)),
        *c_scalars,
        *((seen.k_inner, *seen.k_outer_strides) if levels > 1 else (None,) * 3),
        *((seen.batch, seen.batch_inner, *seen.a_batch_strides, *seen.b_batch_strides) if batched else (None,) * 6),
        *_read_scalars(problem), STAMP if config.waits else None,
    )  # fmt: skip
    return Launch(_gemm_kernel, programs, scalars, blocks | constants, options, (a_map, b_map, rest, c_map), numbers)


def describe_add_partials(problem: Problem) -> Launch:
    """The launch that adds the partial sums; its addresses are the partials, c and bias."""
    constants: dict[str, object] = {
        "ACCUMULATE": problem.accumulate, "BIAS": problem.epilogue.bias == "n", "BLOCK": _ADDED_AT_ONCE,
    }  # fmt: skip
    return Launch(
        _add_partials_kernel,
        -(-problem.m * problem.n // _ADDED_AT_ONCE),
        (problem.m, problem.n, problem.chunks, *problem.c_strides),
        constants,
        {"num_warps": 4, "enable_fp_fusion": False},
    )


def _operand_map(row: tuple[int, int], k: tuple[int, int], block: tuple[int, int], rounded: bool) -> TensorMap:
    """The TMA map of an operand, by (size, stride) along its rows and along k; the contiguous axis comes last."""
    (rows, row_stride), (ks, k_stride) = row, k
    if k_stride == 1:
        return TensorMap((rows, ks), (row_stride, 1), block, rounded)
    return TensorMap((ks, rows), (k_stride, 1), block[::-1], rounded)


def _paired(seen: TensorMap | None) -> TensorMap | None:
    """The map of two matrices as one: how far the second is from the first is known with their addresses."""
    if seen is None:
        return None
    rows, k = seen.block
    return replace(seen, shape=(2, *seen.shape), strides=(0, *seen.strides), block=(2, rows // 2, k))


def _halved(seen: TensorMap | None) -> TensorMap | None:
    """The map of an operand's large and small halves, which lie one after the other."""
    if seen is None:
        return None
    return replace(
        seen, shape=(2, *seen.shape), strides=(seen.shape[0] * seen.strides[0], *seen.strides), block=(1, *seen.block)
    )


def index_type(reach: int) -> Any:
    """The type of offsets up to `reach` elements."""
    return tl.int64 if reach >= 2**31 else tl.int32


def activation_functions(epilogue: Epilogue) -> tuple[Any, Any]:
    """The device forms that an epilogue calls: of its value, and of the activation's derivative."""
    if epilogue.user:
        return spec.registered(epilogue.user).function, None
    if not epilogue.activation:
        return None, None
    name = spec.ACTIVATIONS[epilogue.activation].gate or epilogue.activation
    if not epilogue.gradient and epilogue.saves != "mask":
        return getattr(device, name), None
    by_output = epilogue.gradient == "out" and hasattr(device, f"{name}_of_output")
    return getattr(device, name), getattr(device, f"{name}_{'of_output' if by_output else 'derivative'}")


def _read_scalars(problem: Problem) -> tuple[int | None, ...]:
    """Strides of what an epilogue reads: of the rows of each matrix, then of each aux tensor."""
    return (*problem.read_strides, *(None,) * (STRIDE_SLOTS - len(problem.read_strides)))


def _options(config: Config) -> dict[str, object]:
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False}
    return options | pdl_option(config.pdl)


def _reach(problem: Problem) -> int:
    """The largest offset inside a matrix, in elements."""
    strides = (problem.a_strides, problem.b_strides[::-1], problem.c_strides)
    sizes = ((problem.m, problem.k), (problem.n, problem.k), (problem.m, problem.n))
    outer = -(-problem.k // problem.k_inner) * max(problem.k_outer_strides) if problem.k_inner else 0
    largest = max(problem.m, problem.n)  # which is m and which n depends on the tile
    matrices = [stride or 0 for stride in problem.read_strides[: len(operands.MATRICES)]]
    aux = [stride or 0 for stride in problem.read_strides[len(operands.MATRICES) :]]
    read = largest * max(*matrices, *map(sum, zip(aux[::2], aux[1::2], strict=True)), 0, 0) + largest
    return outer + max(
        read,
        *(
            sum(size * stride for size, stride in zip(size, stride, strict=True))
            for size, stride in zip(sizes, strides, strict=True)
        ),
    )
