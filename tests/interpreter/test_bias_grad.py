"""The kernels of bias gradients on the CPU, against fp64."""

import pytest
import torch
from gemm_launches import GUARD, assert_close

from isogemm.gemm import gradient_problems
from isogemm.gemm.gradient_problems import BiasGradProblem
from isogemm.gemm.kernels import gradients as kernels
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data, with_layout

BIAS_GRADS = {  # the gradient's layout, or a [t_outer, t_inner] one; the sum's stride
    "contiguous": (lambda grad: grad, 1),
    "transposed": (lambda grad: with_layout(grad, "transposed"), 1),
    "sliced": (lambda grad: with_layout(grad, "sliced"), 1),
    "strided output": (lambda grad: grad, 3),
    "two levels": (lambda grad: grad.view(-1, 3, grad.shape[1]).transpose(0, 1).contiguous().transpose(0, 1), 1),
}


def _start(n):
    return make_data("normal", (n,), seed=7)


@pytest.mark.parametrize("accumulated", [False, True], ids=["", "accumulated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", BIAS_GRADS)
@pytest.mark.parametrize("size", [(3, 1), (390, 40)], ids=str)
def test_bias_grad(size, layout, dtype, accumulated):
    """Chunks of 256 rows: a part of one, and 256 + 134."""
    t, n = size
    arrange, out_stride = BIAS_GRADS[layout]
    flat = make_data("normal", (t, n), seed=0, dtype=dtype)
    grad = arrange(flat)
    levels = {"t_inner": 3, "t_outer": grad.stride(0)} if grad.dim() == 3 else {}
    out_dtype = torch.float32 if accumulated else dtype
    problem = BiasGradProblem(
        t, n, str(dtype).removeprefix("torch."), str(out_dtype).removeprefix("torch."), grad.stride()[-2:], 256,
        out_stride=out_stride, accumulate=accumulated, **levels,
    )  # fmt: skip
    buffer = torch.full((GUARD + n * out_stride + GUARD,), torch.nan, dtype=out_dtype)
    out = buffer[GUARD:-GUARD:out_stride]
    start = torch.zeros(n) if not accumulated else out.copy_(_start(n)).clone()
    kernels.describe_bias_grad(problem).run(grad, out)
    assert_close(out, torch.ones(1, t), flat, start[None], reference=None)
    assert int(buffer.isnan().sum()) == buffer.numel() - n


@pytest.mark.parametrize("accumulated", [False, True], ids=["", "accumulated"])
@pytest.mark.parametrize("layout", BIAS_GRADS)
def test_bias_grad_by_chunks_side_by_side(layout, accumulated, monkeypatch):
    """The bits of chunks one after another; the last of eleven has two rows."""
    t, n = 642, 40
    arrange, out_stride = BIAS_GRADS[layout]
    grad = arrange(make_data("normal", (t, n), seed=0))
    levels = {"t_inner": 3, "t_outer": grad.stride(0)} if grad.dim() == 3 else {}
    problem = BiasGradProblem(
        t, n, "float32", "float32", grad.stride()[-2:], 64, out_stride=out_stride, accumulate=accumulated, **levels
    )
    assert problem.split
    found, expected = (_start(n).repeat_interleave(out_stride)[::out_stride] for _ in range(2))
    sums_buffer = torch.full((GUARD + problem.chunks * n + GUARD,), torch.nan)
    sums = sums_buffer[GUARD:-GUARD]
    kernels.describe_bias_grad(problem).run(grad, sums)
    assert int(sums_buffer.isnan().sum()) == 2 * GUARD
    adding = kernels.describe_chunk_sums(problem.chunks, n, 1, out_stride, accumulated)
    adding.run(sums, found)
    monkeypatch.setattr(gradient_problems, "_SPLIT_CHUNKS", 100)
    kernels.describe_bias_grad(problem).run(grad, expected)
    assert_bitwise_equal(found, expected)
