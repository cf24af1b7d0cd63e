"""A row of a product with an epilogue has the same bits in any batch, on the CPU."""

import functools

import pytest
import torch
from cpu_tensors import CONTRACT, normal
from fused_cases import fused_operands

import isogemm
from isogemm.gemm.api import mlp
from isogemm.verify.activations import ACTIVATION_FORMS as ACTIVATIONS
from isogemm.verify.activations import GATE_FORMS as GATED
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data


# Each a function of x [..., K] and of the rows of the residual that go with it.
def _invariant_calls(k, n, dtype):
    weight, up = normal(n, k, seed=1, dtype=dtype), normal(n, k, seed=2, dtype=dtype)
    bias, bias_up = normal(n, seed=3, dtype=dtype), normal(n, seed=4, dtype=dtype)
    calls = {}
    for activation in ACTIVATIONS:
        keywords = {"activation": activation, "bias": bias}
        calls[activation] = functools.partial(isogemm.linear, weight=weight, **keywords)
    for activation in GATED:
        keywords = {"activation": activation, "bias": bias, "weight_up": up, "bias_up": bias_up}
        calls[activation] = functools.partial(isogemm.linear, weight=weight, **keywords)
    calls["eager"] = functools.partial(isogemm.linear, weight=weight, bias=bias, activation="gelu", rounding="eager")
    calls["scaled"] = functools.partial(isogemm.linear, weight=weight, col_scale=bias_up, alpha=0.3, activation="gelu")
    down = normal(n, n, seed=5, dtype=dtype)
    for activation, second in (("gelu", None), ("swiglu", up)):
        keywords = {"weight": weight, "weight_down": down, "bias": bias, "weight_up": second, "activation": activation}
        calls[f"mlp {activation}"] = functools.partial(mlp, **keywords)
    return calls


CALLS = list(_invariant_calls(3, 3, torch.float32))


@functools.cache
def _problem(k, n, dtype):
    rows = normal(512, k, seed=10, dtype=dtype), normal(512, n, seed=11, dtype=dtype)
    others = make_data("wide", (28, k), seed=12, dtype=dtype), make_data("wide", (28, n), seed=13, dtype=dtype)
    return *rows, *others, _invariant_calls(k, n, dtype)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_row_follows_nothing_but_itself(name, dtype):
    k, n = 127, 65
    x, residual, noise, other, calls = _problem(k, n, dtype)
    call = calls[name]
    whole = call(x, residual=residual)
    for row in (0, 1, 255, 511):
        rows = slice(row, row + 1)
        assert_bitwise_equal(call(x[rows], residual=residual[rows]), whole[rows], f"row {row} alone")
        assert_bitwise_equal(call(x[row], residual=residual[row]), whole[row], f"row {row} as a vector")
    cut = [call(x[rows], residual=residual[rows]) for rows in (slice(0, 100), slice(100, 256))]
    assert_bitwise_equal(torch.cat(cut), whole[:256], "256 rows as 100 + 156")
    padded = call(torch.cat([x[:100], noise]), residual=torch.cat([residual[:100], other]))
    assert_bitwise_equal(padded[:100], whole[:100], "100 rows beside 28 others")
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    assert_bitwise_equal(call(x[order], residual=residual[order]), whole[order], "rows permuted")
    for shape in ((2, 256), (4, 8, 16), (512, 1)):
        batched = call(x.view(*shape, k), residual=residual.view(*shape, n))
        assert_bitwise_equal(batched, whole.view(*shape, n), f"rows as {shape}")
    sick = x[:64].clone()
    sick[1::2] = torch.tensor([torch.nan, torch.inf], dtype=dtype).repeat(16)[:, None]
    assert_bitwise_equal(call(sick, residual=residual[:64])[::2], whole[:64:2], "beside NaN and infinities")


@pytest.mark.parametrize("name", CALLS)
def test_every_number_of_rows(name):
    x, _, _, _, calls = _problem(17, 9, torch.float32)
    whole = calls[name](x)
    for m in range(1, 301, 1 if name in ("gelu", "silu", "swiglu") else 13):
        assert_bitwise_equal(calls[name](x[:m]), whole[:m], f"{m} rows")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_a_row_with_operands_of_its_own(dtype):
    """row_scale, c and a bias along rows go with the row."""
    names = ("column bias", "c", "residual", "row_scale", "col_scale")
    operands = fused_operands(names, 300, 64, 33, dtype)
    call = functools.partial(isogemm.matmul_fused, beta=0.5, activation="gelu")
    whole = call(**operands)
    for m in (1, 2, 7, 100, 257):
        part = {name: operands[name][:m] for name in ("a", "bias", "c", "residual", "row_scale")}
        assert_bitwise_equal(call(**operands | part), whole[:m], f"{m} rows")


def test_bits_do_not_follow_the_number_of_threads():
    x, residual, _, _, calls = _problem(127, 65, torch.float32)
    found = torch.get_num_threads()
    try:
        for name in ("gelu", "silu", "tanh", "swiglu", "mlp gelu"):
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(calls[name](x, residual=residual))
            assert_bitwise_equal(results[1], results[0], name)
            assert_bitwise_equal(results[2], results[0], name)
    finally:
        torch.set_num_threads(found)
