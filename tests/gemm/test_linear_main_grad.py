"""`main_grad` of isogemm.linear's parameters on the CPU: what is added to it, and when."""

import pytest
import torch
from cpu_tensors import CONTRACT, HALVES, normal
from token_sums import accumulate, assert_same, result_and_gradients

import isogemm
from isogemm.verify.compare import assert_bitwise_equal


def _parameters(dtype=torch.bfloat16, main_dtype=torch.float32):
    weight = torch.nn.Parameter(normal(5, 9, seed=1, dtype=dtype))
    bias = torch.nn.Parameter(normal(5, seed=2, dtype=dtype))
    weight.main_grad, bias.main_grad = torch.zeros(5, 9, dtype=main_dtype), torch.zeros(5, dtype=main_dtype)
    return weight, bias


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_main_grad_takes_the_gradient(dtype):
    weight, bias = _parameters(dtype)
    places = weight.main_grad, bias.main_grad
    x = normal(2, 7, 9, dtype=dtype).requires_grad_()
    grad = normal(2, 7, 5, seed=3, dtype=dtype)
    isogemm.linear(x, weight, bias).backward(grad)
    _, (dx, dw, db) = result_and_gradients(isogemm.linear, (x, weight, bias), grad)
    assert weight.grad is None
    assert bias.grad is None
    assert weight.grad_added_to_main_grad is True
    assert bias.grad_added_to_main_grad is True
    assert weight.main_grad is places[0]
    assert bias.main_grad is places[1]
    assert_bitwise_equal(x.grad, dx)
    assert_bitwise_equal(weight.main_grad.to(dtype), dw)
    assert_bitwise_equal(bias.main_grad.to(dtype), db)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_second_backward_accumulates(dtype):
    weight, bias = _parameters(dtype)
    parts = []
    for seed in (3, 4):
        x, grad = normal(7, 9, seed=seed, dtype=dtype), normal(7, 5, seed=seed + 4, dtype=dtype)
        isogemm.linear(x, weight, bias).backward(grad)
        parts.append(accumulate(x, weight, bias, grad))
    assert_bitwise_equal(weight.main_grad, parts[0][0] + parts[1][0])
    assert_bitwise_equal(bias.main_grad, parts[0][1] + parts[1][1])


def test_main_grad_of_one_of_the_two():
    for without in ("weight", "bias"):
        named = dict(zip(("weight", "bias"), _parameters(), strict=True))
        del named[without].main_grad
        isogemm.linear(normal(7, 9, dtype=torch.bfloat16), **named).sum().backward()
        for name, parameter in named.items():
            assert (parameter.grad is not None) == (name == without)
            assert getattr(parameter, "grad_added_to_main_grad", False) == (name != without)


def test_main_grad_that_is_none_counts_as_absent():
    weight, bias = _parameters()
    weight.main_grad = None
    isogemm.linear(normal(7, 9, dtype=torch.bfloat16), weight, bias).sum().backward()
    assert weight.grad is not None


def test_a_frozen_weight_keeps_its_main_grad():
    weight, bias = _parameters()
    weight.requires_grad_(False)
    x = normal(7, 9, dtype=torch.bfloat16).requires_grad_()
    isogemm.linear(x, weight, bias).sum().backward()
    assert x.grad is not None
    assert torch.count_nonzero(weight.main_grad) == 0
    assert torch.count_nonzero(bias.main_grad) == 5
    assert not getattr(weight, "grad_added_to_main_grad", False)


def test_main_grad_through_mm_and_matmul_is_left_alone():
    """Only linear has a weight."""
    weight, _ = _parameters()
    x = normal(7, 9, dtype=torch.bfloat16)
    for function in (isogemm.mm, isogemm.matmul):
        weight.grad = None
        function(x, weight.T).sum().backward()
        assert weight.grad is not None
        assert torch.count_nonzero(weight.main_grad) == 0


def test_a_weight_used_twice():
    weight, bias = _parameters(torch.float32)
    x, y = normal(7, 9), normal(3, 9, seed=4)
    (isogemm.linear(x, weight, bias).sum() + isogemm.linear(y, weight, bias).sum()).backward()
    exact = torch.cat([x, y]).double().sum(0).expand(5, 9)
    torch.testing.assert_close(weight.main_grad.double(), exact, rtol=1e-5, atol=1e-5)  # ten terms
    assert bias.main_grad.tolist() == [10.0] * 5


def test_main_grad_of_any_stride():
    weight, bias = _parameters(torch.float32)
    isogemm.linear(normal(7, 9), weight, bias).square().sum().backward()
    other, _ = _parameters(torch.float32)
    other.main_grad = torch.zeros(9, 5).T
    isogemm.linear(normal(7, 9), other, bias).square().sum().backward()
    assert_bitwise_equal(other.main_grad, weight.main_grad)


@pytest.mark.parametrize("shape", [(0, 9), (0, 0, 9)])
def test_no_tokens_add_nothing_to_main_grad(shape):
    weight, bias = _parameters()
    weight.main_grad, bias.main_grad = normal(5, 9, seed=7), normal(5, seed=8)
    before = weight.main_grad.clone(), bias.main_grad.clone()
    isogemm.linear(torch.zeros(shape, dtype=torch.bfloat16), weight, bias).sum().backward()
    assert_same((weight.main_grad, bias.main_grad), before, "no tokens")
    assert weight.grad is None
    assert weight.grad_added_to_main_grad


@pytest.mark.parametrize(
    ("name", "main_grad", "says"),
    [
        ("weight", torch.zeros(5, 9, dtype=torch.bfloat16), "bfloat16"),
        ("weight", torch.zeros(5, 9, dtype=torch.float64), "float64"),
        ("weight", torch.zeros(9, 5), r"\[9, 5\]"),
        ("weight", torch.zeros(45), r"\[45\]"),
        ("weight", torch.zeros(5, 9, device="meta"), "meta"),
        ("weight", "a string", "str"),
        ("bias", torch.zeros(5, dtype=torch.float16), "float16"),
        ("bias", torch.zeros(4), r"\[4\]"),
    ],
    ids=["bf16", "f64", "transposed", "flat", "elsewhere", "no tensor", "bias in fp16", "bias too short"],
)
def test_wrong_main_grad(name, main_grad, says):
    named = dict(zip(("weight", "bias"), _parameters(), strict=True))
    before = {key: parameter.main_grad.clone() for key, parameter in named.items()}
    named[name].main_grad = main_grad
    with pytest.raises((ValueError, TypeError), match=rf"^{name}\.main_grad .*{says}"):
        isogemm.linear(normal(7, 9, dtype=torch.bfloat16), **named).sum().backward()
    for key, parameter in named.items():
        if key != name:
            assert_bitwise_equal(parameter.main_grad, before[key])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_main_grad_under_autocast(dtype):
    """The bits of the cast product, in the float32 weight's own main_grad."""
    weight, bias = _parameters(torch.float32)
    x, grad = normal(7, 9), normal(7, 5, seed=3, dtype=dtype)
    for passes in (1, 2):
        with torch.autocast("cpu", dtype):
            result = isogemm.linear(x, weight, bias)
        assert result.dtype == dtype
        result.backward(grad)
        assert weight.grad is None
        assert bias.grad is None
        dw, db = accumulate(x.to(dtype), weight.to(dtype), bias.to(dtype), grad)
        assert_bitwise_equal(weight.main_grad, passes * dw)
        assert_bitwise_equal(bias.main_grad, passes * db)
    assert weight.grad_added_to_main_grad
    assert bias.grad_added_to_main_grad


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_main_grad_under_checkpointing(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    expected = _parameters()
    x = normal(7, 9, dtype=torch.bfloat16).requires_grad_()
    isogemm.linear(x, *expected).square().sum().backward()
    dx, x.grad = x.grad, None
    actual = _parameters()
    checkpoint(lambda x: isogemm.linear(x, *actual), x, use_reentrant=use_reentrant).square().sum().backward()
    assert_bitwise_equal(x.grad, dx)
    for got, same in zip(actual, expected, strict=True):
        assert got.grad is None
        assert_bitwise_equal(got.main_grad, same.main_grad)


def _layer_with_main_grad():
    weight = torch.nn.Parameter(torch.randn(7, 8))
    weight.main_grad = torch.zeros(7, 8)
    x = torch.randn(5, 8, requires_grad=True)
    return x, weight, isogemm.linear(x, weight).sum()


def test_main_grad_is_left_alone_where_no_weight_gradient_is_asked_for():
    x, weight, loss = _layer_with_main_grad()
    torch.autograd.grad(loss, [x], retain_graph=True)
    loss.backward(inputs=[x], retain_graph=True)
    assert not weight.main_grad.any()
    (returned,) = torch.autograd.grad(loss, [weight], retain_graph=True)
    assert not weight.main_grad.any()
    loss.backward(inputs=[weight])
    assert_bitwise_equal(weight.main_grad, returned)
    assert weight.grad is None
