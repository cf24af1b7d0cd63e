"""The kernels of the tiny family and their launchers.

All kernels add over k in ascending order, into one fp32 sum per element, and give the same bits for ieee float32.
`registers` multiplies in fp32 for any precision: exact for 16-bit operands, for float32 at least what was asked for.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from isogemm.core.kernels import pdl_option, round_to_tf32, start_launch
from isogemm.core.launch import Launch
from isogemm.tiny.configs import K_STEP, Config, DotConfig, Problem, WholeConfig, parts, programs, unit


@triton.jit
def _aligned(stride_batch, stride_row, stride_column, UNITS: tl.constexpr):
    """The same strides, known to the compiler as multiples of UNITS: 16-byte loads where rows are 48 bytes apart."""
    return (
        stride_batch // UNITS[0] * UNITS[0],
        stride_row // UNITS[1] * UNITS[1],
        stride_column // UNITS[2] * UNITS[2],
    )


@triton.jit
def _columns(x, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """The VEC columns of x [BLOCK, VEC], each [BLOCK], in order."""
    if VEC == 1:
        return (tl.reshape(x, [BLOCK]),)
    elif VEC == 2:
        return tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, [BLOCK, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        return x0, x1, x2, x3


@triton.jit
def _registers_steps(
    acc, a_ptrs, b_ptrs, m, n, live, k, stride_am, stride_ak, stride_bk, stride_bn,
    M: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr, A_VEC: tl.constexpr, B_VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add k .. k + STEPS - 1 to each thread's ROWS * COLS sums [BLOCK, VEC]; all loads come before the arithmetic."""
    M_STEP: tl.constexpr = (M + ROWS - 1) // ROWS
    N_STEP: tl.constexpr = (N + COLS * VEC - 1) // (COLS * VEC) * VEC
    b = ()  # per column, STEPS of [BLOCK, VEC]
    for col in tl.static_range(COLS):
        b_live = live[:, None]
        if N % (COLS * VEC) != 0:
            b_live = b_live & (n + col * N_STEP < N)
        for s in tl.static_range(0, STEPS, B_VEC):
            at = b_ptrs + ((k + s) * stride_bk + col * N_STEP * stride_bn)
            if B_VEC == 1:
                b = b + (tl.load(at, mask=b_live, other=0.0),)
            else:
                loaded = tl.load(at + tl.arange(0, B_VEC)[None, :] * stride_bk, mask=b_live, other=0.0)
                columns = _columns(loaded, BLOCK, B_VEC)
                for t in tl.static_range(B_VEC):
                    b = b + (columns[t][:, None],)
    a = ()  # per row, STEPS of [BLOCK]
    for row in tl.static_range(ROWS):
        a_live = live[:, None]
        if M % ROWS != 0:
            a_live = a_live & (m + row * M_STEP < M)[:, None]
        for s in tl.static_range(0, STEPS, A_VEC):
            at = a_ptrs + ((k + s) * stride_ak + row * M_STEP * stride_am)
            loaded = tl.load(at[:, None] + tl.arange(0, A_VEC)[None, :] * stride_ak, mask=a_live, other=0.0)
            a = a + _columns(loaded, BLOCK, A_VEC)
    sums = ()
    for row in tl.static_range(ROWS):
        for col in tl.static_range(COLS):
            total = acc[row * COLS + col]
            for s in tl.static_range(STEPS):
                x, y = tl.broadcast(a[row * STEPS + s].to(tl.float32)[:, None], b[col * STEPS + s].to(tl.float32))
                total = tl.fma(x, y, total)
            sums = sums + (total,)
    return sums


@triton.jit(do_not_specialize=["batch"])
def _registers_kernel(
    a_ptr, b_ptr, c_ptr, batch, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    A_UNITS: tl.constexpr, B_UNITS: tl.constexpr, INDEX: tl.constexpr, PDL: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr, A_VEC: tl.constexpr, B_VEC: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One thread per (matrix, row group, column group), the batch flattened: no padding, no shared memory, no barrier.
    # A tuple of sums, not a tensor: a tensor's layout would send the operands through shared memory.
    M_STEP: tl.constexpr = (M + ROWS - 1) // ROWS
    N_GROUPS: tl.constexpr = (N + COLS * VEC - 1) // (COLS * VEC)
    stride_ab, stride_am, stride_ak = _aligned(stride_ab, stride_am, stride_ak, A_UNITS)
    stride_bb, stride_bk, stride_bn = _aligned(stride_bb, stride_bk, stride_bn, B_UNITS)
    thread = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    matrix = thread // (M_STEP * N_GROUPS)
    tile = (thread - matrix * (M_STEP * N_GROUPS)).to(tl.int32)
    m = (tile // N_GROUPS).to(INDEX)  # [BLOCK]
    n = (tile % N_GROUPS).to(INDEX)[:, None] * VEC + tl.arange(0, VEC)[None, :]  # [BLOCK, VEC]
    live = matrix < batch
    a_ptrs = a_ptr + (matrix * stride_ab + m * stride_am)
    b_ptrs = b_ptr + (matrix[:, None] * stride_bb + n * stride_bn)
    acc = ()
    for _ in tl.static_range(ROWS * COLS):
        acc = acc + (tl.zeros((BLOCK, VEC), dtype=tl.float32),)
    start_launch(PDL)
    k = tl.zeros((), dtype=INDEX)
    TAIL: tl.constexpr = K % UNROLL
    for _ in range(K // UNROLL):
        acc = _registers_steps(
            acc, a_ptrs, b_ptrs, m, n, live, k, stride_am, stride_ak, stride_bk, stride_bn,
            M, N, UNROLL, ROWS, COLS, VEC, A_VEC, B_VEC, BLOCK,
        )  # fmt: skip
        k += UNROLL
    if TAIL > 0:
        acc = _registers_steps(
            acc, a_ptrs, b_ptrs, m, n, live, k, stride_am, stride_ak, stride_bk, stride_bn,
            M, N, TAIL, ROWS, COLS, VEC, A_VEC, B_VEC, BLOCK,
        )  # fmt: skip
    c_ptrs = c_ptr + (matrix[:, None] * (M * N) + m[:, None] * N + n)
    for row in tl.static_range(ROWS):
        for col in tl.static_range(COLS):
            c_live = live[:, None]
            if M % ROWS != 0:
                c_live = c_live & (m + row * M_STEP < M)[:, None]
            if N % (COLS * VEC) != 0:
                c_live = c_live & (n + col * N_GROUPS * VEC < N)
            total = acc[row * COLS + col]
            if K % 16 != 0:
                total += 0.0  # as the dot kernel's padding does: a product that underflowed to -0 becomes +0
            at = c_ptrs + (row * M_STEP * N + col * N_GROUPS * VEC)
            tl.store(at, total.to(c_ptr.dtype.element_ty), mask=c_live)


@triton.jit(do_not_specialize=["batch"])
def _dot_kernel(
    a_ptr, b_ptr, c_ptr, batch, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    A_UNITS: tl.constexpr, B_UNITS: tl.constexpr, INDEX: tl.constexpr, PDL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    N_TILES: tl.constexpr = (N + BN - 1) // BN
    TILES: tl.constexpr = (M + BM - 1) // BM * N_TILES
    stride_ab, stride_am, stride_ak = _aligned(stride_ab, stride_am, stride_ak, A_UNITS)
    stride_bb, stride_bk, stride_bn = _aligned(stride_bb, stride_bk, stride_bn, B_UNITS)
    program = tl.program_id(0)
    tile = program % TILES
    matrix = (program // TILES).to(tl.int64)
    m = (tile // N_TILES) * BM + tl.arange(0, BM).to(INDEX)
    n = (tile % N_TILES) * BN + tl.arange(0, BN).to(INDEX)
    a_ptr += matrix * stride_ab
    b_ptr += matrix * stride_bb
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    start_launch(PDL)
    for start in tl.range(0, K, BK):
        k = start + tl.arange(0, BK).to(INDEX)
        a_live = (m[:, None] < M) & (k[None, :] < K)
        b_live = (k[:, None] < K) & (n[None, :] < N)
        a = tl.load(a_ptr + (m[:, None] * stride_am + k[None, :] * stride_ak), mask=a_live, other=0.0)  # [BM, BK]
        b = tl.load(b_ptr + (k[:, None] * stride_bk + n[None, :] * stride_bn), mask=b_live, other=0.0)  # [BK, BN]
        if PRECISION == "tf32":
            a = round_to_tf32(a)
            b = round_to_tf32(b)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    c_ptrs = c_ptr + (matrix * (M * N) + m[:, None] * N + n[None, :])
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _ordered(x):
    """The same values; loads before it are issued before any of its values is used.

    Triton would stage each block through shared memory right after its load, and wait for memory once per block.
    """
    if x.dtype.primitive_bitwidth == 32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def _load_part(
    ptr, live, stride_row, stride_column, INDEX: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_PARTS: tl.constexpr, COLUMN_PARTS: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Load part ROW of the rows and part COLUMN of the columns of each matrix [ROWS, COLUMNS]; zeros outside."""
    row = (ROW_PARTS[ROW][0] + tl.arange(0, ROW_PARTS[ROW][1])).to(INDEX)[:, None]
    column = (COLUMN_PARTS[COLUMN][0] + tl.arange(0, COLUMN_PARTS[COLUMN][1])).to(INDEX)[None, :]
    if ROW_PARTS[ROW][0] + ROW_PARTS[ROW][1] > ROWS:
        live = live & (row < ROWS)
    if COLUMN_PARTS[COLUMN][0] + COLUMN_PARTS[COLUMN][1] > COLUMNS:
        live = live & (column < COLUMNS)
    return tl.load(ptr + (row * stride_row + column * stride_column), mask=live, other=0.0)


@triton.jit
def _operand(x, ORDERED: tl.constexpr, PRECISION: tl.constexpr):
    if ORDERED:
        x = _ordered(x)
    if PRECISION == "tf32":
        x = round_to_tf32(x)
    return x


@triton.jit(do_not_specialize=["batch"])
def _whole_kernel(
    a_ptr, b_ptr, c_ptr, batch, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    A_UNITS: tl.constexpr, B_UNITS: tl.constexpr, INDEX: tl.constexpr, PDL: tl.constexpr,
    M_PARTS: tl.constexpr, N_PARTS: tl.constexpr, K_PARTS: tl.constexpr, MATRICES: tl.constexpr,
    ORDERED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # All loads come before the arithmetic: one wait for memory. Parts pad 42 rows to 32 + 16 instead of 64.
    stride_ab, stride_am, stride_ak = _aligned(stride_ab, stride_am, stride_ak, A_UNITS)
    stride_bb, stride_bk, stride_bn = _aligned(stride_bb, stride_bk, stride_bn, B_UNITS)
    start_launch(PDL)
    matrix = tl.program_id(0).to(tl.int64)
    if MATRICES > 1:
        matrix = matrix * MATRICES + tl.arange(0, MATRICES)[:, None, None]  # [MATRICES, 1, 1]
    live = matrix < batch
    a_ptrs = a_ptr + matrix * stride_ab
    b_ptrs = b_ptr + matrix * stride_bb
    c_ptrs = c_ptr + matrix * (M * N)
    a, b = (), ()  # per part of k: a block of A per part of m, one of B per part of n
    for s in tl.static_range(len(K_PARTS)):
        for i in tl.static_range(len(M_PARTS)):
            part = _load_part(a_ptrs, live, stride_am, stride_ak, INDEX, M, K, M_PARTS, K_PARTS, i, s)
            a = a + (part,)  # [(MATRICES,) m, k]
        for j in tl.static_range(len(N_PARTS)):
            part = _load_part(b_ptrs, live, stride_bk, stride_bn, INDEX, K, N, K_PARTS, N_PARTS, s, j)
            b = b + (part,)  # [(MATRICES,) k, n]
    x, y = (), ()
    for at in tl.static_range(len(K_PARTS) * len(M_PARTS)):
        x = x + (_operand(a[at], ORDERED, PRECISION),)
    for at in tl.static_range(len(K_PARTS) * len(N_PARTS)):
        y = y + (_operand(b[at], ORDERED, PRECISION),)
    for i in tl.static_range(len(M_PARTS)):
        m = (M_PARTS[i][0] + tl.arange(0, M_PARTS[i][1]))[:, None]
        for j in tl.static_range(len(N_PARTS)):
            n = (N_PARTS[j][0] + tl.arange(0, N_PARTS[j][1]))[None, :]
            acc = tl.dot(x[i], y[j], input_precision=PRECISION)  # [(MATRICES,) m, n]
            for s in tl.static_range(1, len(K_PARTS)):
                acc = tl.dot(x[s * len(M_PARTS) + i], y[s * len(N_PARTS) + j], acc, input_precision=PRECISION)
            tl.store(c_ptrs + (m * N + n), acc.to(c_ptr.dtype.element_ty), mask=live & (m < M) & (n < N))


def describe_bmm(problem: Problem, config: Config) -> Launch:
    """The launch that computes `problem` with `config`."""
    offsets = (
        (problem.m - 1) * problem.a_strides[1] + (problem.k - 1) * problem.a_strides[2],
        (problem.k - 1) * problem.b_strides[1] + (problem.n - 1) * problem.b_strides[2],
    )
    constants: dict[str, object] = {
        "M": problem.m,
        "N": problem.n,
        "K": problem.k,
        "A_UNITS": tuple(map(unit, problem.a_strides)),
        "B_UNITS": tuple(map(unit, problem.b_strides)),
        "INDEX": tl.int64 if max(offsets) >= 2**31 else tl.int32,
        "PDL": config.pdl,
    }
    options = {"num_warps": config.num_warps, "enable_fp_fusion": False} | pdl_option(config.pdl)
    kernel: Any
    if isinstance(config, DotConfig):
        kernel = _dot_kernel
        constants.update(BM=config.block_m, BN=config.block_n, BK=config.block_k, PRECISION=problem.precision)
        options["num_stages"] = config.num_stages
    elif isinstance(config, WholeConfig):
        kernel = _whole_kernel
        constants.update(
            M_PARTS=parts(problem.m, config.unit_m), N_PARTS=parts(problem.n, config.unit_n),
            K_PARTS=parts(problem.k, K_STEP, config.block_k), MATRICES=config.matrices,
            ORDERED=config.ordered, PRECISION=problem.precision,
        )  # fmt: skip
        options["num_stages"] = 1
    else:
        kernel = _registers_kernel
        constants.update(
            ROWS=config.rows, COLS=config.cols, VEC=config.vec, A_VEC=config.a_vec, B_VEC=config.b_vec,
            UNROLL=config.unroll, BLOCK=32 * config.num_warps,
        )  # fmt: skip
        options["num_stages"] = 1
    scalars = (problem.batch, *problem.a_strides, *problem.b_strides)
    return Launch(kernel, programs(problem, config), scalars, constants, options)


def launch_bmm(out: Tensor, a: Tensor, b: Tensor, problem: Problem, config: Config) -> None:
    """out[i] = a[i] b[i]; out [batch, m, n] is contiguous."""
    describe_bmm(problem, config).run(a, b, out)
