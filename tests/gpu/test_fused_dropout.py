"""Dropout and the user's own epilogues of fused products on a GPU."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from fused_forms import doubled, fused_form
from fused_gpu_cases import NUMBERS, SHORT, fused_operands, normal, run_fused

import isogemm
from isogemm.epilogues import random, register, spec
from isogemm.gemm.fused import new_seed
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import with_layout

DEVICE = "cuda"


# Dropout


def _mask(seed, rows, columns, p):
    """For the first call after torch.manual_seed(seed), by the torch form."""
    torch.manual_seed(seed)
    return random.kept(new_seed(torch.device(DEVICE)), rows, columns, p)


@pytest.mark.parametrize(
    "sizes", [(1, 8, 4096), (17, 8, 1003), (300, 64, 384), (1000, 8, 65), (4096, 64, 512)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masks_are_the_torch_form_s(sizes, dtype):
    m, k, n = sizes
    p, mask = 0.3, _mask(7, m, n, 0.3)
    x, weight = (torch.ones(shape, dtype=dtype, device=DEVICE) for shape in ((m, k), (n, k)))
    torch.manual_seed(7)
    result = isogemm.linear(x, weight, dropout_p=p)
    assert torch.equal(result != 0, mask)
    assert_bitwise_equal(result, torch.where(mask, k * random.scale(p), 0.0).to(dtype))
    torch.manual_seed(7)
    gated = isogemm.linear(x, weight, weight_up=weight, activation="reglu", dropout_p=p)
    assert torch.equal(gated != 0, mask)
    torch.manual_seed(7)
    again = isogemm.matmul_fused(x, weight.T, dropout_p=p, rounding="eager")
    assert torch.equal(again != 0, mask)


def test_dropout_statistics():
    p, m, n = 0.4, 2048, 4096
    x, weight = (torch.ones(shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((m, 16), (n, 16)))
    torch.manual_seed(1)
    result = isogemm.linear(x, weight, dropout_p=p, out_dtype=torch.float32)
    kept = (result != 0).double()
    for rate, count in ((kept.mean(), m * n), (kept.mean(0), m), (kept.mean(1), n)):
        assert float((rate - (1 - p)).abs().max()) < 5.5 * (p * (1 - p) / count) ** 0.5
    assert float(result.double().mean()) == pytest.approx(16, rel=1e-3)
    assert float(result.double().var()) == pytest.approx(256 * p / (1 - p), rel=1e-2)
    assert float(result.max()) == pytest.approx(16 / (1 - p), rel=1e-4)


def test_dropout_is_of_the_activation_before_the_residual():
    operands = fused_operands(("bias", "residual"), 130, 256, 200, torch.bfloat16)
    mask = _mask(11, 130, 200, 0.25)
    torch.manual_seed(11)
    result = isogemm.matmul_fused(**operands, activation="gelu", dropout_p=0.25)
    assert_bitwise_equal(result[~mask], operands["residual"][~mask], "what is dropped is the residual alone")
    double = doubled(operands)
    value = fused_form(double["a"], double["b"], bias=double["bias"], activation="gelu")
    torch.testing.assert_close(result, (double["residual"] + mask * random.scale(0.25) * value).bfloat16())
    for p, expected in ((1.0, operands["residual"]), (0.0, isogemm.matmul_fused(**operands, activation="gelu"))):
        assert_bitwise_equal(isogemm.matmul_fused(**operands, activation="gelu", dropout_p=p), expected, f"p = {p}")


# Epilogues of the user's own


@triton.jit
def _wave(acc, col, row, first, second):
    return tl.sin(acc) * first + second * (col - row)


@triton.jit
def _where(acc, col, row):
    return acc + row * 100 + col


@triton.jit
def _clamped(acc, col, row, bound):
    return tl.minimum(tl.maximum(acc, -bound), bound)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(spec, "REGISTERED", {})
    register("wave", _wave, lambda acc, col, row, first, second: torch.sin(acc) * first + second * (col - row))
    register("where", _where, lambda acc, col, row: acc + row * 100 + col)
    register("clamped", _clamped, lambda acc, col, row, bound: torch.minimum(torch.maximum(acc, -bound), bound))


AUX = {"scalar": (), "one": (1,), "columns": (200,), "rows": (130, 1), "row of one": (1, 200), "matrix": (130, 200)}


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(AUX, 2)))
def test_an_epilogue_of_the_users(first, second):
    operands = fused_operands(("bias", "residual"), 130, 64, 200, torch.bfloat16)
    operands["a"] = operands["a"] / 8
    aux = [normal(*AUX[name], seed=30 + i) for i, name in enumerate((first, second))]
    result = run_fused(operands, epilogue="wave", aux=aux)
    col, row = torch.arange(200, device=DEVICE)[None, :], torch.arange(130, device=DEVICE)[:, None]

    def plain(operands, aux):
        z = operands["a"] @ operands["b"] + operands["bias"]
        return operands["residual"] + (torch.sin(z) * aux[0] + aux[1] * (col - row))

    reference = plain(doubled(operands), [each.double() for each in aux])
    assert_no_worse_than_torch(result, plain(operands, aux), reference)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("number", SHORT)
def test_epilogues_of_the_users_in_a_batch(number):
    dtype, precision = NUMBERS[number]
    zeros = torch.zeros(2, 30, 16, dtype=dtype, device=DEVICE)
    result = isogemm.matmul_fused(
        zeros, torch.zeros(16, 24, dtype=dtype, device=DEVICE), epilogue="where",
        out_dtype=torch.float32, precision=precision,
    )  # fmt: skip
    expected = torch.arange(60, device=DEVICE).view(2, 30, 1) * 100.0 + torch.arange(24, device=DEVICE)
    assert_bitwise_equal(result, expected)
    operands = fused_operands(("bias",), 30, 64, 48, dtype, batch=(2,))
    for shape in ((), (48,), (30, 1), (2, 30, 48), (2, 1, 1)):
        bound = normal(*shape, seed=8, dtype=dtype).abs()
        result = isogemm.matmul_fused(**operands, epilogue="clamped", aux=[bound], precision=precision)
        plain = isogemm.matmul_fused(**operands, precision=precision)
        assert_bitwise_equal(result, torch.minimum(torch.maximum(plain, -bound), bound), f"bound {shape}")
        for layout in ("strided", "sliced") if shape else ():
            view = isogemm.matmul_fused(
                **operands, epilogue="clamped", aux=[with_layout(bound, layout)], precision=precision
            )
            assert_bitwise_equal(view, result, layout)


@pytest.mark.usefixtures("registry")
def test_registered_again_it_replaces_the_former():
    """At once, though a kernel of the former was compiled."""
    operands = fused_operands((), 130, 64, 200, torch.bfloat16)
    before = isogemm.matmul_fused(**operands, epilogue="where")
    register("where", _clamped, lambda acc, col, row, bound: torch.minimum(torch.maximum(acc, -bound), bound))
    bound = torch.ones((), dtype=torch.bfloat16, device=DEVICE)
    after = isogemm.matmul_fused(**operands, epilogue="where", aux=[bound])
    assert_bitwise_equal(after, isogemm.matmul_fused(**operands).clamp(-1, 1))
    assert not torch.equal(before, after)
