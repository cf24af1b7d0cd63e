"""Operands of tf32x3: a float32 number as the sum of two TF32 numbers, in registers or written by a pass."""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import pdl_option, round_to_tf32, start_launch
from isogemm.core.launch import Launch
from isogemm.gemm import configs
from isogemm.gemm.configs import Config, Problem
from isogemm.gemm.kernels.handover import has_sm
from isogemm.gemm.kernels.tiles import multiple

_ROWS, _KS = 64, 64  # of a program


@triton.jit
def round_by_instruction(x):
    """`round_to_tf32`, in one instruction where there is one: on an H200 all 2^32 numbers but NaNs are the same."""
    if has_sm(90):
        return tl.inline_asm_elementwise(
            "cvt.rn.tf32.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return round_to_tf32(x)


@triton.jit
def split_tf32(x):
    """x as the sum of two TF32 numbers; an infinity is its own large part."""
    large = round_by_instruction(x)
    small = round_by_instruction(x - large)
    return large, tl.where(tl.abs(large) == float("inf"), 0.0, small)


@triton.jit(do_not_specialize=["rows", "K"])
def _split_kernel(
    x, halves, rows, K, stride_row, stride_k, ld,
    UNITS: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr, KS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """halves[0] + halves[1] = x [rows, K]: both [rows, ld], contiguous along k as TMA and wgmma want them."""
    rows = multiple(rows, UNITS[0])
    K = multiple(K, UNITS[1])
    stride_row = multiple(stride_row, UNITS[2])
    stride_k = multiple(stride_k, UNITS[3])
    ld = multiple(ld, 4)
    start_launch(PDL)
    across = tl.cdiv(K, KS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) % across * KS + tl.arange(0, KS)
    live = (row < rows)[:, None]
    source = x + (row.to(INDEX) * stride_row)[:, None] + (k.to(INDEX) * stride_k)[None, :]
    large, small = split_tf32(tl.load(source, mask=live & (k < K)[None, :], other=0.0))
    at = (row.to(INDEX) * ld)[:, None] + k.to(INDEX)[None, :]
    written = live & (k < ld)[None, :]
    tl.store(halves + at, large, mask=written)
    tl.store(halves + rows.to(INDEX) * ld + at, small, mask=written)


def describe_split(problem: Problem, config: Config, operand: configs.Operand) -> Launch:
    """The launch that splits an operand; its addresses are the operand and its halves."""
    rows, strides = (problem.m, problem.a_strides) if operand == "a" else (problem.n, problem.b_strides[::-1])
    ld = configs.halves_ld(problem)
    reach = max(2 * rows * ld, rows * strides[0] + problem.k * strides[1])
    along = [configs.unit(size) if stride == 1 else 1 for size, stride in zip((rows, problem.k), strides, strict=True)]
    constants: dict[str, object] = {
        "UNITS": (*along, *map(configs.unit, strides)),
        "INDEX": tl.int64 if reach >= 2**31 else tl.int32, "ROWS": _ROWS, "KS": _KS, "PDL": config.pdl,
    }  # fmt: skip
    programs = -(-rows // _ROWS) * -(-problem.k // _KS)
    options = {"num_warps": 4, "enable_fp_fusion": False} | pdl_option(config.pdl)
    return Launch(_split_kernel, programs, (rows, problem.k, *strides, ld), constants, options)
