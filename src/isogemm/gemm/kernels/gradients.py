"""The kernels of a backward besides products: dz, the gradient before an activation, and db, a sum over tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.launch import Launch
from isogemm.gemm import configs
from isogemm.gemm.gradient_problems import BIAS_BLOCK_N, BIAS_BLOCK_T, ActivationGradProblem, BiasGradProblem
from isogemm.gemm.kernels.epilogue import (
    is_kept,
    read_matrix,
    slope_at,
    slope_of_bits,
    store_result,
    sum_by_halves,
    unpacked,
)
from isogemm.gemm.kernels.products import activation_functions, index_type, load_tile, multiple

_SUMMED_AT_ONCE = 128  # columns of a program of one warp: no thread waits for another
_NO_OVERLAP = 1  # stages for loads by element: Triton would put them into shared memory by columns, in one bank


@triton.jit
def _column_sums(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum x [ROWS, COLUMNS] to [COLUMNS], by halves."""
    return tl.reshape(sum_by_halves(tl.reshape(x, (1, ROWS, COLUMNS)), 1, ROWS, COLUMNS), (COLUMNS,))


@triton.jit(do_not_specialize=["count", "N"])
def _chunk_sums_kernel(
    sums, out, count, N, stride_out, TOGETHER: tl.constexpr, ACCUMULATE: tl.constexpr, BN: tl.constexpr
):
    """out = (out or 0) + chunk + chunk + ..., from left to right, where TOGETHER sums [N] make a chunk, by halves."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    live = n < N
    if ACCUMULATE:
        total = tl.load(out + n.to(tl.int64) * stride_out, mask=live, other=0.0)
    else:
        total = tl.zeros((BN,), dtype=tl.float32)
    LOADS: tl.constexpr = 8 if TOGETHER == 1 else 1  # in flight
    for first in tl.range(0, count, TOGETHER, loop_unroll_factor=LOADS):
        at = (first + tl.arange(0, TOGETHER))[:, None]
        tile = tl.load(sums + (at.to(tl.int64) * N + n[None, :]), mask=(at < count) & live[None, :], other=0.0)
        total += _column_sums(tile, TOGETHER, BN) + 0.0  # a sum of -0 becomes +0, as with rows of zeros after it
    tl.store(out + n.to(tl.int64) * stride_out, total.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["T", "N", "t_inner"])
def _bias_grad_kernel(
    grad, out, T, N, stride_t, stride_n, stride_out, t_inner, stride_t_outer,
    UNITS: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
    LEVELS: tl.constexpr, ACCUMULATE: tl.constexpr, SPLIT: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """out = (out or 0) + the sums of CHUNK rows of grad each, from first to last; SPLIT: out [chunks, N] = those sums.

    Within a chunk the rows BT apart are added from first to last, then those BT sums by halves.
    """
    N = multiple(N, UNITS[0])
    stride_t = multiple(stride_t, UNITS[1])
    n_first = tl.program_id(0) % tl.cdiv(N, BN) * BN
    n = n_first + tl.arange(0, BN)
    live = n < N
    at = out + n.to(INDEX) * stride_out
    if ACCUMULATE:
        total = tl.load(at, mask=live, other=0.0)
    else:
        total = tl.zeros((BN,), dtype=tl.float32)
    if SPLIT:
        chunk = (tl.program_id(0) // tl.cdiv(N, BN)).to(INDEX)
        at += chunk.to(tl.int64) * N
        first = chunk * CHUNK
        last = min(first + CHUNK, T)
    else:
        first = 0
        last = T
    for begin in tl.range(first, last, CHUNK):
        acc = tl.zeros((BT, BN), dtype=tl.float32)
        for t in tl.range(begin, min(begin + CHUNK, T), BT, num_stages=STAGES):
            tile = load_tile(
                grad, n_first, t, N, T, stride_n, stride_t, t_inner, stride_t_outer,
                BN, BT, False, False, True, True, LEVELS, INDEX, False, 0,
            )  # fmt: skip
            acc += tile.to(tl.float32)
        total += _column_sums(acc, BT, BN)
    tl.store(at, total.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["T", "N", "dropped"])
def _activation_grad_kernel(
    grad, saved, seed, dz, sums, T, N, stride_grad, dropped, kept_scale,
    UNITS: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
    SUMS: tl.constexpr, E: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """dz = dropout's gradient of grad times the activation's derivative, for a chunk of rows of BN columns.

    SUMS: and each chunk's sum over its rows, in the order of `_bias_grad_kernel`.
    """
    N = multiple(N, UNITS[0])
    stride_grad = multiple(stride_grad, UNITS[1])
    DTYPE: tl.constexpr = dz.dtype.element_ty
    n = tl.program_id(0) % tl.cdiv(N, BN) * BN
    chunk = tl.program_id(0) // tl.cdiv(N, BN)
    col = (n + tl.arange(0, BN))[None, :]
    acc = tl.zeros((BT, BN), dtype=tl.float32)
    acc_up = tl.zeros((BT, BN), dtype=tl.float32)
    for t in tl.range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, T), BT, num_stages=STAGES):
        row = (t + tl.arange(0, BT))[:, None]
        above = read_matrix(grad, row, col, T, N, stride_grad, INDEX)
        if E.dropout:
            kept = is_kept(tl.load(seed), t, n, row, col, dropped, BT, BN, False)
            above = tl.where(kept, above * kept_scale, 0.0)
        if E.gradient == "mask":
            slope, other = slope_of_bits(unpacked(saved, t, n, T, N, BT, BN, INDEX), SLOPE, E)
            value = above * slope
        elif E.activation != "":
            slope, other = slope_at(row, col, T, N, saved, ACT, SLOPE, E, INDEX)
            value = above * slope
        else:
            value = above
        store_result(value, dz, t, n, row, col, T, N, N, 1, False, INDEX)
        if SUMS:
            acc += value.to(DTYPE).to(tl.float32)
        if E.gated:
            of_up = above * other
            store_result(of_up, dz + T.to(tl.int64) * N, t, n, row, col, T, N, N, 1, False, INDEX)
            if SUMS:
                acc_up += of_up.to(DTYPE).to(tl.float32)
    if SUMS:
        at = sums + (chunk.to(tl.int64) * N + n + tl.arange(0, BN))
        live = n + tl.arange(0, BN) < N
        tl.store(at, _column_sums(acc, BT, BN), mask=live)
        if E.gated:
            at += tl.cdiv(T, CHUNK).to(tl.int64) * N
            tl.store(at, _column_sums(acc_up, BT, BN), mask=live)


def describe_chunk_sums(count: int, n: int, together: int, stride: int, accumulate: bool) -> Launch:
    """The launch that adds [count, n] sums, `together` of them in a chunk; its addresses are those and their sum."""
    constants: dict[str, object] = {"TOGETHER": together, "ACCUMULATE": accumulate, "BN": _SUMMED_AT_ONCE}
    options: dict[str, object] = {"num_warps": 1, "enable_fp_fusion": False}
    return Launch(_chunk_sums_kernel, -(-n // _SUMMED_AT_ONCE), (count, n, stride), constants, options)


def describe_bias_grad(problem: BiasGradProblem) -> Launch:
    """The launch that sums [t, n] over t; its addresses are the gradient and the sum, or its chunks' sums."""
    split = problem.split
    constants: dict[str, object] = {
        "UNITS": (configs.unit(problem.n), configs.unit(problem.strides[0])), "CHUNK": problem.chunk,
        "BN": BIAS_BLOCK_N, "BT": BIAS_BLOCK_T, "STAGES": 6 if problem.vectors else _NO_OVERLAP,
        "LEVELS": 2 if problem.t_inner else 1, "ACCUMULATE": problem.accumulate and not split, "SPLIT": split,
        "INDEX": index_type(problem.reach),
    }  # fmt: skip
    scalars = (
        problem.t, problem.n, *problem.strides, 1 if split else problem.out_stride,
        *((problem.t_inner, problem.t_outer) if problem.t_inner else (None, None))
    )  # fmt: skip
    options = {"num_warps": 4, "enable_fp_fusion": False}
    programs = -(-problem.n // BIAS_BLOCK_N) * (problem.chunks if split else 1)
    return Launch(_bias_grad_kernel, programs, scalars, constants, options)


def describe_activation_grad(problem: ActivationGradProblem) -> Launch:
    """The launch that computes dz; its addresses are the gradient, what was saved, the seed, dz and the sums."""
    act, slope = activation_functions(problem.epilogue)
    constants: dict[str, object] = {
        "UNITS": (configs.unit(problem.n), configs.unit(problem.stride)), "CHUNK": problem.chunk,
        "BN": problem.block_n, "BT": BIAS_BLOCK_T,
        "STAGES": 3 if problem.sums and problem.vectors else _NO_OVERLAP, "SUMS": problem.sums, "E": problem.epilogue,
        "ACT": act, "SLOPE": slope, "INDEX": index_type(problem.reach),
    }  # fmt: skip
    programs = -(-problem.n // problem.block_n) * -(-problem.t // problem.chunk)
    numbers = (1, 1.0) if problem.epilogue.dropout else (None, None)
    options = {"num_warps": 8, "enable_fp_fusion": False}
    scalars = (problem.t, problem.n, problem.stride)
    return Launch(_activation_grad_kernel, programs, scalars, constants, options, numbers=numbers)
