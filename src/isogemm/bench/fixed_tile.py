"""A batch-invariant GEMM as users have it today, to be measured beside isogemm: one tile, whatever M is.

Every row is computed by the same 128x128x64 tile in the same order, so its bits do not follow the batch; a batch of
one row pays for 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
GROUP = 8  # rows of tiles that share their columns of B in the L2 cache
OPTIONS = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": True}


@triton.jit
def _mm_kernel(
    a, b, out, M, N, K, a_row, a_col, b_row, b_col, out_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP
    group = min(tiles_m - first, GROUP)
    tile_m = first + tile % (GROUP * tiles_n) % group
    tile_n = tile % (GROUP * tiles_n) // group
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    steps = tl.arange(0, BLOCK_K)
    a_tile = a + (rows % M)[:, None] * a_row + steps[None, :] * a_col  # [BLOCK_M, BLOCK_K]
    b_tile = b + steps[:, None] * b_row + (cols % N)[None, :] * b_col  # [BLOCK_K, BLOCK_N]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = tl.load(a_tile, mask=steps[None, :] < K - start, other=0.0)
        right = tl.load(b_tile, mask=steps[:, None] < K - start, other=0.0)
        sums = tl.dot(left, right, sums)
        a_tile += BLOCK_K * a_col
        b_tile += BLOCK_K * b_row
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(out + rows[:, None] * out_row + cols[None, :], sums.to(out.dtype.element_ty), mask=inside)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] @ [K, N] of 16-bit tensors, any strides, all sizes at least 1."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    _mm_kernel[(triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N),)](
        a, b, out, m, n, k, *a.stride(), *b.stride(), n, BLOCK_M, BLOCK_N, BLOCK_K, GROUP,
        **OPTIONS,
    )  # fmt: skip
    return out
