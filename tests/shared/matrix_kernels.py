"""Kernels for the tests of the compile matrix: sound, spilling, oversized and broken ones."""

import triton
import triton.language as tl
from compile_matrix import CompileJob


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0)


@triton.jit
def matmul(a, b, c, K, stride, BLOCK: tl.constexpr, PRECISION: tl.constexpr = "ieee", ACT: tl.constexpr = None):
    index = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        x = tl.load(a + index[:, None] * K + (k + index[None, :]) * stride)
        y = tl.load(b + (k + index[:, None]) * BLOCK + index[None, :])
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    if ACT is not None:
        acc = ACT(acc)
    tl.store(c + index[:, None] * BLOCK + index[None, :], acc)


@triton.jit
def axpy(x, y, n):
    index = tl.program_id(0) * 128 + tl.arange(0, 128)
    inside = index < n
    result = tl.load(x + index, mask=inside) * 3.0 + tl.load(y + index, mask=inside)
    tl.store(y + index, result, mask=inside)


@triton.jit
def spilling(x, y):
    index = tl.arange(0, 4096)
    value = tl.load(x + index)
    total = tl.sum(value)
    tl.store(y + index, value * total)


@triton.jit
def broken(x):
    tl.store(x, undefined_name)  # noqa: F821


FUSED, UNFUSED = {"enable_fp_fusion": True}, {"enable_fp_fusion": False}
POINTERS = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "K": "i32"}
ALIGNED = {"a": 16, "b": 16, "c": 16, "K": 16}

AXPY = CompileJob("axpy", axpy, {"x": "*fp32", "y": "*fp32", "n": "i32"}, options=FUSED)
AXPY_UNFUSED = CompileJob("unfused axpy", axpy, {"x": "*fp32", "y": "*fp32", "n": "i32"}, options=UNFUSED)
MATMUL = CompileJob(
    "matmul",
    matmul,
    POINTERS,
    {"stride": 1, "BLOCK": 64, "ACT": relu},
    ALIGNED,
    num_stages=2,
    options=UNFUSED,
    uses={"sm_80": ["mma"], "sm_90": ["wgmma"], "sm_100": ["tcgen05"], "gfx942": ["mfma"]},
)
OVERSIZED = CompileJob("oversized", matmul, POINTERS, {"stride": 1, "BLOCK": 256}, ALIGNED, 8, 3, UNFUSED)
SPILLING = CompileJob(  # 128 values per thread on NVIDIA in 32 registers, 64 per lane on AMD in 64
    "spilling",
    spilling,
    {"x": "*fp32", "y": "*fp32"},
    num_warps=1,
    options={"maxnreg": 32, "waves_per_eu": 8, **UNFUSED},
)
BROKEN = CompileJob("broken", broken, {"x": "*fp32"}, options=UNFUSED)

GOOD = [AXPY, MATMUL]


def bad():
    return [AXPY, SPILLING, BROKEN]
