"""Epilogues of the user's own on the CPU, where their torch form is computed."""

import itertools

import pytest
import torch
import triton
from cpu_tensors import CONTRACT, integers, normal
from fused_cases import fused_operands
from fused_forms import doubled, fused_form

import isogemm
from isogemm.epilogues import register, spec
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch


def _double(value):
    return value.double() if isinstance(value, torch.Tensor) else value


# Epilogues of the user's own. On the CPU their torch form is computed; the device form is only declared.


@triton.jit
def _device_plain(acc, col, row):
    return acc


@triton.jit
def _device_one(acc, col, row, first):
    return acc + first


@triton.jit
def _device_two(acc, col, row, first, second):
    return acc * first + second


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(spec, "REGISTERED", {})


AUX = {"scalar": (), "one": (1,), "columns": (47,), "rows": (33, 1), "row of one": (1, 47), "matrix": (33, 47)}


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(AUX, 2)))
def test_an_epilogue_of_the_users(first, second, dtype):
    def form(acc, col, row, first, second):
        return torch.sin(acc) * first + second * (col - row)

    register("wave", _device_two, form)
    operands = fused_operands(("bias", "residual"), 33, 20, 47, dtype)
    aux = [normal(*AUX[name], seed=30 + i, dtype=dtype) for i, name in enumerate((first, second))]
    result = isogemm.matmul_fused(**operands, epilogue="wave", aux=aux)
    col, row = torch.arange(47)[None, :], torch.arange(33)[:, None]

    def plain(operands, aux):
        z = operands["a"] @ operands["b"] + operands["bias"]
        return operands["residual"] + (torch.sin(z) * aux[0] + aux[1] * (col - row))

    reference = plain(doubled(operands), [_double(each) for each in aux])
    assert_no_worse_than_torch(result, plain(operands, aux), reference)
    as_linear = isogemm.linear(operands["a"], operands["b"].T, operands["bias"], residual=operands["residual"],
                               epilogue="wave", aux=aux)  # fmt: skip
    assert_bitwise_equal(as_linear, result)


@pytest.mark.usefixtures("registry")
def test_rows_and_columns_are_numbered_through_a_batch():
    register("where", _device_plain, lambda acc, col, row: acc + row * 100 + col)
    a, b = torch.zeros(2, 3, 4), torch.zeros(4, 5)
    expected = torch.arange(6).view(2, 3, 1) * 100.0 + torch.arange(5)
    torch.testing.assert_close(isogemm.matmul_fused(a, b, epilogue="where"), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("registry")
def test_an_epilogue_after_all_that_comes_before_it():
    """alpha, scales, c and bias first; then its value is dropped and the residual added."""
    register("negative", _device_plain, lambda acc, col, row: -acc)
    operands = fused_operands(
        ("bias", "c", "residual", "row_scale", "col_scale"), 9, 4, 11, torch.float32, make=integers
    )
    result = isogemm.matmul_fused(**operands, alpha=3.0, beta=-2.0, epilogue="negative")
    residual = operands.pop("residual")
    expected = residual - fused_form(**operands, alpha=3.0, beta=-2.0)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    dropped = isogemm.matmul_fused(**operands, residual=residual, epilogue="negative", dropout_p=1.0)
    torch.testing.assert_close(dropped, residual, rtol=0, atol=0)


@pytest.mark.usefixtures("registry")
def test_registered_again_it_replaces_the_former():
    a, b = normal(3, 4), normal(4, 5)
    register("mine", _device_plain, lambda acc, col, row: acc + 1)
    first = isogemm.matmul_fused(a, b, epilogue="mine")
    register("mine", _device_plain, lambda acc, col, row: acc + 2)
    torch.testing.assert_close(isogemm.matmul_fused(a, b, epilogue="mine"), first + 1)
    register("mine", _device_one, lambda acc, col, row, first: acc * first)
    one = torch.full((), 2.0)
    torch.testing.assert_close(isogemm.matmul_fused(a, b, epilogue="mine", aux=[one]), 2 * isogemm.mm(a, b))
