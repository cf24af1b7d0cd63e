"""The kernels of the GEMM family and their launchers.

Every output element is one fp32 sum that walks k in ascending order. A chunked walk starts a new sum at every multiple
of the chunk and adds the finished ones in ascending order, one fp32 addition each, wherever they wait: in
registers, in the output, in memory of the program's own, or for a second kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from isogemm.core.launch import BoundKernel, TensorMap, bind
from isogemm.gemm import configs
from isogemm.gemm.configs import BiasGradConfig, BiasGradProblem, Config, Problem

_WIDE = 2**31  # elements an int32 offset does not reach
_ADDED_AT_ONCE = 1024


@triton.jit
def _multiple(value, UNIT: tl.constexpr):
    """The same value, seen by the compiler to be a multiple of UNIT: wide loads of rows that allow them."""
    return value // UNIT * UNIT


@triton.jit
def _round_to_tf32(x):
    """To nearest, ties to even, as the copy engine does; the tensor core would truncate."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, float("nan"))


@triton.jit
def _split_tf32(x):
    """x as the sum of two TF32 numbers; an infinity is its own large part."""
    large = _round_to_tf32(x)
    small = _round_to_tf32(x - large)
    return large, tl.where(tl.abs(large) == float("inf"), 0.0, small)


@triton.jit
def _added(block, acc):
    """acc + block; as a fused multiply-add, since Triton would make one longer chain of a plain sum with a dot."""
    return tl.fma(block, tl.full(block.shape, 1.0, tl.float32), acc)


@triton.jit
def _multiply(a, b, acc, PRECISION: tl.constexpr, A_ROUNDED: tl.constexpr, B_ROUNDED: tl.constexpr):
    """acc + a b, in ascending k.

    ieee and tf32x3 add finished blocks: a tensor core's own sum truncates, and a long chain rounds as often.
    """
    if PRECISION == "tf32":
        if not A_ROUNDED:
            a = _round_to_tf32(a)
        if not B_ROUNDED:
            b = _round_to_tf32(b)
        return tl.dot(a, b, acc, input_precision="tf32")
    elif PRECISION == "tf32x3":
        a_large, a_small = _split_tf32(a)
        b_large, b_small = _split_tf32(b)
        block = tl.dot(a_small, b_large, input_precision="tf32")
        block = tl.dot(a_large, b_small, block, input_precision="tf32")
        return _added(tl.dot(a_large, b_large, block, input_precision="tf32"), acc)
    elif PRECISION == "ieee":
        return _added(tl.dot(a, b, input_precision="ieee"), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _load(
    source, first, k, rows, K, stride_row, stride_k, k_inner, stride_k_outer,
    ROWS: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, K_CONTIGUOUS: tl.constexpr, TRANSPOSED: tl.constexpr,
    MASK_K: tl.constexpr, K_LEVELS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Rows first .. first + ROWS - 1 of an operand at k .. k + BK - 1: [ROWS, BK], or [BK, ROWS] if TRANSPOSED."""
    if TMA:
        if K_CONTIGUOUS:
            tile = source.load([first, k])
        else:
            tile = source.load([k, first])
        if K_CONTIGUOUS == TRANSPOSED:
            tile = tile.T
        return tile
    else:
        row = first + tl.arange(0, ROWS)
        ks = k + tl.arange(0, BK)
        if K_LEVELS == 1:
            k_offset = ks.to(INDEX) * stride_k
        else:
            k_offset = (ks // k_inner).to(INDEX) * stride_k_outer + (ks % k_inner).to(INDEX) * stride_k
        row_offset = row.to(INDEX) * stride_row
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


@triton.jit
def _column_parts(x, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    """x [BM, BN] as PARTS neighbours [BM, BN // PARTS]: what leaves the registers at once."""
    if PARTS == 1:
        return (x,)
    else:
        left, right = tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))
        return _column_parts(left, BM, BN // 2, PARTS // 2) + _column_parts(right, BM, BN // 2, PARTS // 2)


@triton.jit
def _place(at, m_tiles, n_tiles, GROUP: tl.constexpr):
    """Row and column of the at-th tile: GROUP rows of tiles at a time, whose operands stay in the cache."""
    group = at // (GROUP * n_tiles)
    height = min(m_tiles - group * GROUP, GROUP)
    within = at % (GROUP * n_tiles)
    return group * GROUP + within % height, within // height


@triton.jit
def _write(
    total, c, bias, rows, cols, m, n, M, N, stride_cm, stride_cn,
    C_TMA: tl.constexpr, BIAS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Add the bias, round once, store."""
    if BIAS == "n":
        total += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    elif BIAS == "m":
        total += tl.load(bias + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    if C_TMA:
        c.store([m, n], total.to(c.dtype))
    else:
        at = rows.to(INDEX)[:, None] * stride_cm + cols.to(INDEX)[None, :] * stride_cn
        tl.store(c + at, total.to(c.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def _finish(
    acc, c, bias, kept_here, m, n, first_chunk, last_chunk, M, N, stride_cm, stride_cn,
    BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, C_TMA: tl.constexpr,
    BIAS: tl.constexpr, WALK: tl.constexpr, ACCUMULATE: tl.constexpr, INDEX: tl.constexpr, BARRIER: tl.constexpr,
):  # fmt: skip
    """What becomes of the sums acc [BM, BN] at (m, n) at the end of a chunk, WIDTH columns at a time."""
    sums = _column_parts(acc, BM, BN, BN // WIDTH)
    rows = m + tl.arange(0, BM)
    for part in tl.static_range(BN // WIDTH):
        at = n + part * WIDTH
        cols = at + tl.arange(0, WIDTH)
        total = sums[part]
        if WALK == "partials":
            _write(total, c, bias, rows, cols, m, at, M, N, stride_cm, stride_cn, C_TMA, "", INDEX)
        elif WALK == "scratch":
            kept = kept_here + (tl.arange(0, BM)[:, None] * BN + (part * WIDTH + tl.arange(0, WIDTH)[None, :]))
            if first_chunk:
                total += 0.0
            else:
                total += tl.load(kept)
            if last_chunk:
                _write(total, c, bias, rows, cols, m, at, M, N, stride_cm, stride_cn, C_TMA, BIAS, INDEX)
            else:
                tl.store(kept, total)
                if BARRIER:
                    tl.debug_barrier()  # another thread may be the one to load it
        else:
            if ACCUMULATE or WALK == "in place":
                live = (rows < M)[:, None] & (cols < N)[None, :]
                if not ACCUMULATE:
                    live = live & (not first_chunk)
                before = rows.to(INDEX)[:, None] * stride_cm + cols.to(INDEX)[None, :] * stride_cn
                total += tl.load(c + before, mask=live, other=0.0)
            else:
                total += 0.0  # a sum that underflowed to -0 is +0, as one with more padding is
            _write(total, c, bias, rows, cols, m, at, M, N, stride_cm, stride_cn, C_TMA, BIAS, INDEX)
            if WALK == "in place" and BARRIER:
                tl.debug_barrier()


@triton.jit(do_not_specialize=["M", "N", "K", "batch", "batch_inner", "k_inner"])
def _gemm_kernel(
    a, b, b_rest, c, bias, scratch, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    k_inner, stride_ak_outer, stride_bk_outer,
    batch, batch_inner, stride_ab_outer, stride_ab, stride_bb_outer, stride_bb,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    A_TMA: tl.constexpr, B_TMA: tl.constexpr, C_TMA: tl.constexpr,
    A_K_CONTIGUOUS: tl.constexpr, B_K_CONTIGUOUS: tl.constexpr,
    UNITS: tl.constexpr, BIAS: tl.constexpr, WALK: tl.constexpr, CHUNK: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr, INDEX: tl.constexpr,
    BN_REST: tl.constexpr, PERSISTENT: tl.constexpr, MASK_K: tl.constexpr, K_LEVELS: tl.constexpr,
    BATCHED: tl.constexpr, EARLY_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Any operands; a program for every tile, or a few programs that take them in turn.

    A tile is BN + BN_REST wide: two sums side by side, since each must be a power of two.
    """
    M = _multiple(M, UNITS[0])
    N = _multiple(N, UNITS[1])
    K = _multiple(K, UNITS[2])
    if not A_TMA:
        stride_am = _multiple(stride_am, UNITS[3])
        stride_ak = _multiple(stride_ak, UNITS[4])
    if not B_TMA:
        stride_bk = _multiple(stride_bk, UNITS[5])
        stride_bn = _multiple(stride_bn, UNITS[6])
    if not C_TMA:
        stride_cm = _multiple(stride_cm, UNITS[7])
        stride_cn = _multiple(stride_cn, UNITS[8])
    m_tiles = tl.cdiv(M, BM)
    n_tiles = tl.cdiv(N, BN + BN_REST)
    tiles = m_tiles * n_tiles
    if WALK == "partials":
        tiles *= tl.cdiv(K, CHUNK)
    if BATCHED:
        tiles *= batch
    if EARLY_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    for tile in tl.range(program, tiles if PERSISTENT else program + 1, tl.num_programs(0)):
        layer = tile // (m_tiles * n_tiles)  # of the batch, or of the chunks
        row, column = _place(tile % (m_tiles * n_tiles), m_tiles, n_tiles, GROUP)
        a_from = a
        b_from = b
        c_to = c
        if BATCHED:
            outer = (layer // batch_inner).to(tl.int64)
            inner = (layer % batch_inner).to(tl.int64)
            a_from = a + (outer * stride_ab_outer + inner * stride_ab)
            b_from = b + (outer * stride_bb_outer + inner * stride_bb)
        if BATCHED or WALK == "partials":
            c_to = c + layer.to(tl.int64) * M * N
        begin_first = layer * CHUNK if WALK == "partials" else 0
        begin_end = begin_first + 1 if WALK == "one" or WALK == "partials" else K
        if WALK == "registers":
            total = tl.zeros((BM, BN), dtype=tl.float32)
        for begin in tl.range(begin_first, begin_end, CHUNK if CHUNK > 0 else 1):
            end = min(begin + CHUNK, K) if CHUNK > 0 else K
            n = column * (BN + BN_REST)
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            if BN_REST > 0:
                acc_rest = tl.zeros((BM, BN_REST), dtype=tl.float32)
            for k in tl.range(begin, end, BK):
                a_tile = _load(
                    a_from, row * BM, k, M, K, stride_am, stride_ak, k_inner, stride_ak_outer,
                    BM, BK, A_TMA, A_K_CONTIGUOUS, False, MASK_K, K_LEVELS, INDEX,
                )  # fmt: skip
                b_tile = _load(
                    b_from, n, k, N, K, stride_bn, stride_bk, k_inner, stride_bk_outer,
                    BN, BK, B_TMA, B_K_CONTIGUOUS, True, MASK_K, K_LEVELS, INDEX,
                )  # fmt: skip
                acc = _multiply(a_tile, b_tile, acc, PRECISION, A_TMA, B_TMA)
                if BN_REST > 0:
                    rest_tile = _load(
                        b_rest, n + BN, k, N, K, stride_bn, stride_bk, k_inner, stride_bk_outer,
                        BN_REST, BK, B_TMA, B_K_CONTIGUOUS, True, MASK_K, K_LEVELS, INDEX,
                    )  # fmt: skip
                    acc_rest = _multiply(a_tile, rest_tile, acc_rest, PRECISION, A_TMA, B_TMA)
            kept = scratch
            kept_rest = scratch
            if WALK == "scratch":
                kept = scratch + program.to(tl.int64) * (BM * (BN + BN_REST))
                kept_rest = kept + BM * BN
            if WALK == "registers":
                total += acc
            else:
                _finish(
                    acc, c_to, bias, kept, row * BM, n, begin == 0, end == K, M, N, stride_cm, stride_cn,
                    BM, BN, WIDTH, C_TMA, BIAS, WALK, ACCUMULATE, INDEX, True,
                )  # fmt: skip
            if BN_REST > 0:
                _finish(
                    acc_rest, c_to, bias, kept_rest, row * BM, n + BN, begin == 0, end == K, M, N, stride_cm, stride_cn,
                    BM, BN_REST, WIDTH, C_TMA, BIAS, WALK, ACCUMULATE, INDEX, True,
                )  # fmt: skip
        if WALK == "registers":
            _finish(
                total, c_to, bias, scratch, row * BM, column * BN, True, True, M, N, stride_cm, stride_cn,
                BM, BN, WIDTH, C_TMA, BIAS, "one", False, INDEX, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M", "N", "K"])
def _stream_kernel(
    a, b, c, bias, scratch, M, N, K, stride_cm, stride_cn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    C_TMA: tl.constexpr, A_K_CONTIGUOUS: tl.constexpr, B_K_CONTIGUOUS: tl.constexpr,
    UNITS: tl.constexpr, BIAS: tl.constexpr, WALK: tl.constexpr, CHUNK: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Operands by TMA; a few programs, each with one endless loop through the k of its tiles.

    The next tile's operands are on their way while this one's result is written.
    """
    M = _multiple(M, UNITS[0])
    N = _multiple(N, UNITS[1])
    if not C_TMA:
        stride_cm = _multiple(stride_cm, UNITS[7])
        stride_cn = _multiple(stride_cn, UNITS[8])
    m_tiles = tl.cdiv(M, BM)
    n_tiles = tl.cdiv(N, BN)
    blocks = tl.cdiv(K, BK)
    tiles = m_tiles * n_tiles
    if WALK == "partials":
        tiles *= tl.cdiv(K, CHUNK)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    kept = scratch if WALK != "scratch" else scratch + program.to(tl.int64) * (BM * BN)
    tile = program - programs
    block = blocks - 1
    begin = 0
    steps = tl.cdiv(tiles - program, programs) * blocks
    if WALK == "partials":  # a tile is one chunk of one place; the last chunk may be shorter
        CHUNK_BLOCKS: tl.constexpr = CHUNK // BK
        last_blocks = blocks - (tl.cdiv(K, CHUNK) - 1) * CHUNK_BLOCKS
        of_place = m_tiles * n_tiles
        short = tl.maximum(tl.cdiv(tiles - program, programs) - tl.cdiv(tiles - of_place - program, programs), 0)
        steps = (tl.cdiv(tiles - program, programs) - short) * CHUNK_BLOCKS + short * last_blocks
        block = CHUNK_BLOCKS - 1
        blocks = CHUNK_BLOCKS
    layer = 0
    m = 0
    n = 0
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in tl.range(0, steps):
        block = tl.where(block == blocks - 1, 0, block + 1)
        if block == 0:
            tile += programs
            layer = tile // (m_tiles * n_tiles)
            row, column = _place(tile % (m_tiles * n_tiles), m_tiles, n_tiles, GROUP)
            m = row * BM
            n = column * BN
            if WALK == "partials":
                begin = layer * CHUNK
                blocks = tl.minimum(tl.cdiv(K - begin, BK), CHUNK // BK)
        k = begin + block * BK
        a_tile = _load(a, m, k, M, K, 0, 0, 0, 0, BM, BK, True, A_K_CONTIGUOUS, False, False, 1, INDEX)
        b_tile = _load(b, n, k, N, K, 0, 0, 0, 0, BN, BK, True, B_K_CONTIGUOUS, True, False, 1, INDEX)
        acc = _multiply(a_tile, b_tile, acc, PRECISION, True, True)
        last = block == blocks - 1
        ends = last
        if WALK == "in place" or WALK == "scratch":
            ends = last | ((block + 1) % (CHUNK // BK) == 0)
        if ends:  # no barrier: its own loads and stores agree on threads, and one would end the overlap
            first = k < CHUNK
            c_to = c
            if WALK == "partials":
                c_to = c + layer.to(tl.int64) * M * N
            _finish(
                acc, c_to, bias, kept, m, n, first, last, M, N, stride_cm, stride_cn,
                BM, BN, WIDTH, C_TMA, BIAS, WALK, ACCUMULATE, INDEX, False,
            )  # fmt: skip
            acc = tl.zeros((BM, BN), dtype=tl.float32)


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


@triton.jit(do_not_specialize=["T", "N", "t_inner"])
def _bias_grad_kernel(
    grad, out, T, N, stride_t, stride_n, stride_out, t_inner, stride_t_outer,
    UNITS: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, LEVELS: tl.constexpr,
    ACCUMULATE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """out = (out or 0) + the sums of CHUNK rows of grad each, from first to last; a dot with ones fixes their order."""
    N = _multiple(N, UNITS[0])
    stride_t = _multiple(stride_t, UNITS[1])
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    live = n < N
    if ACCUMULATE:
        total = tl.load(out + n.to(INDEX) * stride_out, mask=live, other=0.0)
    else:
        total = tl.zeros((BN,), dtype=tl.float32)
    ones = tl.full((16, BT), 1.0, dtype=grad.dtype.element_ty)
    first = (tl.arange(0, 16) == 0)[:, None]
    for begin in tl.range(0, T, CHUNK):
        acc = tl.zeros((16, BN), dtype=tl.float32)
        for t in tl.range(begin, min(begin + CHUNK, T), BT):
            tile = _load(
                grad, tl.program_id(0) * BN, t, N, T, stride_n, stride_t, t_inner, stride_t_outer,
                BN, BT, False, False, True, True, LEVELS, INDEX,
            )  # fmt: skip
            acc = _added(tl.dot(ones, tile, input_precision="ieee"), acc)
        total += tl.sum(tl.where(first, acc, 0.0), axis=0)  # one row of sixteen equal ones
    tl.store(out + n.to(INDEX) * stride_out, total.to(out.dtype.element_ty), mask=live)


@dataclass(frozen=True)
class Launch:
    """All that a launch needs but the addresses."""

    kernel: Any
    programs: int
    scalars: tuple[int | None, ...]  # None: the kernel has no use for it here
    constants: dict[str, object]
    options: dict[str, object]
    maps: tuple[TensorMap | None, ...] = ()  # for each address: how TMA sees the tensor there, or None


def describe_gemm(problem: Problem, config: Config) -> Launch:
    """The launch that computes `problem` with `config`; its addresses are a, b, (b again), c, bias and scratch memory.

    A swapped configuration's a and b change places. In a walk by partials, c is their memory.
    """
    walk = configs.walk(problem, config)
    a_tma, b_tma = configs.reads_a_by_tma(problem, config), configs.reads_b_by_tma(problem, config)
    c_tma = configs.writes_c_by_tma(problem, config)
    seen = problem
    if config.swapped:
        seen, a_tma, b_tma = problem.transposed(), b_tma, a_tma
    if walk == "partials":
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
    )
    constants: dict[str, object] = {
        "GROUP": config.group, "C_TMA": c_tma, "A_K_CONTIGUOUS": a_by_k, "B_K_CONTIGUOUS": b_by_k, "UNITS": units,
        "BIAS": "" if not seen.bias or walk == "partials" else "m" if config.swapped else "n",
        "WALK": walk, "CHUNK": seen.chunk, "ACCUMULATE": seen.accumulate and walk != "partials",
        "PRECISION": seen.precision if seen.dtype == "float32" else "",
        "INDEX": tl.int64 if _reach(seen) >= _WIDE else tl.int32,
    }  # fmt: skip
    blocks: dict[str, object] = {"BM": config.block_m, "BN": config.block_n}
    a_block, b_block = (config.block_m, config.block_k), (config.block_n, config.block_k)
    rounded = seen.precision == "tf32"
    a_map = _operand_map((seen.m, am), (seen.k, ak), a_block, rounded) if a_tma else None
    b_map = _operand_map((seen.n, bn), (seen.k, bk), b_block, rounded) if b_tma else None
    c_map = TensorMap((seen.m, seen.n), (cm, cn), (config.block_m, configs.width(problem, config))) if c_tma else None
    c_scalars = (None, None) if c_tma else (cm, cn)
    programs, options = configs.programs(problem, config), _options(config)
    blocks |= {"BK": config.block_k, "WIDTH": configs.width(problem, config)}
    if config.kernel == "stream":
        scalars = (seen.m, seen.n, seen.k, *c_scalars)
        return Launch(_stream_kernel, programs, scalars, blocks | constants, options, (a_map, b_map, c_map))
    rest = _operand_map((seen.n, bn), (seen.k, bk), (config.rest_n, config.block_k), rounded) if config.rest_n else None
    batched, levels = seen.batch > 1, 2 if seen.k_inner else 1
    constants = {"GROUP": constants.pop("GROUP"), "A_TMA": a_tma, "B_TMA": b_tma} | constants
    constants |= {
        "BN_REST": config.rest_n, "PERSISTENT": config.persistent, "MASK_K": seen.k % config.block_k != 0,
        "K_LEVELS": levels, "BATCHED": batched, "EARLY_LAUNCH": config.early_launch,
    }  # fmt: skip
    scalars = (
        seen.m, seen.n, seen.k, *((None, None) if a_tma else (am, ak)), *((None, None) if b_tma else (bk, bn)),
        *c_scalars,
        *((seen.k_inner, *seen.k_outer_strides) if levels > 1 else (None,) * 3),
        *((seen.batch, seen.batch_inner, *seen.a_batch_strides, *seen.b_batch_strides) if batched else (None,) * 6),
    )  # fmt: skip
    return Launch(_gemm_kernel, programs, scalars, blocks | constants, options, (a_map, b_map, rest, c_map))


def describe_add_partials(problem: Problem) -> Launch:
    """The launch that adds the partial sums; its addresses are the partials, c and bias."""
    constants: dict[str, object] = {
        "ACCUMULATE": problem.accumulate, "BIAS": problem.bias, "BLOCK": _ADDED_AT_ONCE,
    }  # fmt: skip
    return Launch(
        _add_partials_kernel,
        -(-problem.m * problem.n // _ADDED_AT_ONCE),
        (problem.m, problem.n, problem.chunks, *problem.c_strides),
        constants,
        {"num_warps": 4, "enable_fp_fusion": False},
    )


def describe_bias_grad(problem: BiasGradProblem) -> Launch:
    """The launch that sums [t, n] over t; its addresses are the gradient and the sum."""
    config = BiasGradConfig()
    constants: dict[str, object] = {
        "UNITS": (configs.unit(problem.n), configs.unit(problem.strides[0])), "CHUNK": problem.chunk,
        "BN": config.block_n, "BT": config.block_t, "LEVELS": 2 if problem.t_inner else 1,
        "ACCUMULATE": problem.accumulate,
        "INDEX": tl.int64 if problem.reach >= _WIDE else tl.int32,
    }  # fmt: skip
    scalars = (
        problem.t, problem.n, *problem.strides, problem.out_stride,
        *((problem.t_inner, problem.t_outer) if problem.t_inner else (None, None))
    )  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False}
    return Launch(_bias_grad_kernel, -(-problem.n // config.block_n), scalars, constants, options)


def bind_launch(launch: Launch, addressed: tuple[torch.Tensor | None, ...]) -> BoundKernel:
    """Compile on the current device for tensors like these, in the order of the launch's addresses."""
    return bind(launch.kernel, (*_arguments(launch, addressed), *launch.scalars), launch.constants, launch.options)


def launch(launch: Launch, addressed: tuple[torch.Tensor | None, ...]) -> None:
    """Through Triton's own JIT: where nothing can be bound, as in its interpreter."""
    arguments = (*_arguments(launch, addressed), *launch.scalars)
    launch.kernel[(launch.programs,)](*arguments, **launch.constants, **launch.options)


def _arguments(launch: Launch, addressed: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
    maps = (*launch.maps, *(None,) * (len(addressed) - len(launch.maps)))
    return tuple(
        tensor if seen is None else TensorDescriptor(tensor, list(seen.shape), list(seen.strides), list(seen.block))
        for tensor, seen in zip(addressed, maps, strict=True)
    )


def _operand_map(row: tuple[int, int], k: tuple[int, int], block: tuple[int, int], rounded: bool) -> TensorMap:
    """Of (size, stride) along the rows and along k: the contiguous axis comes last."""
    (rows, row_stride), (ks, k_stride) = row, k
    if k_stride == 1:
        return TensorMap((rows, ks), (row_stride, 1), block, rounded)
    return TensorMap((ks, rows), (k_stride, 1), block[::-1], rounded)


def _options(config: Config) -> dict[str, object]:
    options: dict[str, object] = {
        "num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False,
    }  # fmt: skip
    if config.early_launch:
        options["launch_pdl"] = True
    return options


def _reach(problem: Problem) -> int:
    """The largest offset inside a matrix, in elements."""
    strides = (problem.a_strides, problem.b_strides[::-1], problem.c_strides)
    sizes = ((problem.m, problem.k), (problem.n, problem.k), (problem.m, problem.n))
    outer = -(-problem.k // problem.k_inner) * max(problem.k_outer_strides) if problem.k_inner else 0
    return outer + max(
        sum(size * stride for size, stride in zip(size, stride, strict=True))
        for size, stride in zip(sizes, strides, strict=True)
    )
