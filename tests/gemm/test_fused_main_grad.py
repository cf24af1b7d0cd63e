"""`main_grad` of the parameters of products with an epilogue, on the CPU."""

import functools
import itertools

import pytest
import torch
from cpu_tensors import CONTRACT, normal
from gradients import gradients_of
from torch.nn import functional as F

import isogemm
from isogemm.gemm import configs
from isogemm.gemm.api import mlp
from isogemm.verify.compare import assert_bitwise_equal


def _parameters(names, shapes, dtype):
    made = {}
    for seed, name in enumerate(names):
        made[name] = torch.nn.Parameter(normal(*shapes[name], seed=seed, dtype=dtype))
        made[name].main_grad = torch.zeros(shapes[name])
    return made


TRAINED = {
    "relu": (isogemm.linear, ("weight", "bias"), {"activation": "relu"}),
    "gelu": (isogemm.linear, ("weight", "bias"), {"activation": "gelu"}),
    "swiglu": (isogemm.linear, ("weight", "bias", "weight_up", "bias_up"), {"activation": "swiglu"}),
    "alpha": (isogemm.linear, ("weight", "bias"), {"activation": "silu", "alpha": 0.5}),
    "mlp gelu": (mlp, ("weight", "bias", "weight_down", "bias_down"), {"activation": "gelu"}),
    "mlp relu": (mlp, ("weight", "bias", "weight_down", "bias_down"), {"activation": "relu"}),
    "mlp swiglu": (
        mlp, ("weight", "bias", "weight_up", "bias_up", "weight_down", "bias_down"), {"activation": "swiglu"},
    ),
}  # fmt: skip
WIDTHS = {"weight": (24, 17), "weight_up": (24, 17), "bias": (24,), "bias_up": (24,)}
WIDTHS |= {"weight_down": (24, 24), "bias_down": (24,)}


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_main_grad(name, dtype):
    """Added to, in fp32; no gradient is given to the parameter; rounded it is the gradient that would be."""
    function, names, options = TRAINED[name]
    parameters = _parameters(names, WIDTHS, dtype)
    x, grad = normal(50, 17, seed=7, dtype=dtype), normal(50, 24, seed=8, dtype=dtype)
    plain = {each: parameter.detach().clone() for each, parameter in parameters.items()}
    expected = gradients_of(functools.partial(function, x), plain, grad, **options)
    function(x, **parameters, **options).backward(grad)
    for each, parameter in parameters.items():
        assert parameter.grad is None, each
        assert parameter.grad_added_to_main_grad is True, each
        assert parameter.main_grad.dtype == torch.float32
        assert_bitwise_equal(parameter.main_grad.to(dtype), expected[each], f"{each}: rounded once")
    once = {each: parameter.main_grad.clone() for each, parameter in parameters.items()}
    function(x, **parameters, **options).backward(grad)
    for each, parameter in parameters.items():
        torch.testing.assert_close(parameter.main_grad, 2 * once[each], msg=f"{each}: accumulated")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_micro_batches_have_the_bits_of_one_pass(name, dtype):
    """dW and db of the weight and of weight_up, cut at multiples of their chunk; and trailing rows without gradient."""
    function, names, options = TRAINED[name]
    shapes = {
        "weight": (8, 16),
        "weight_up": (8, 16),
        "bias": (8,),
        "bias_up": (8,),
        "weight_down": (8, 8),
        "bias_down": (8,),
    }
    chunk = max(configs.token_chunk(*shape, str(dtype).removeprefix("torch.")) for shape in ((8, 16), (8, 8)))
    tokens = 2 * chunk + 37
    x, grad = normal(tokens, 16, seed=7, dtype=dtype), normal(tokens, 8, seed=8, dtype=dtype)

    def accumulated(x, grad, cuts=()):
        parameters = _parameters(names, shapes, dtype)
        for start, stop in itertools.pairwise([0, *cuts, len(x)]):
            function(x[start:stop], **parameters, **options).backward(grad[start:stop])
        return {each: parameter.main_grad for each, parameter in parameters.items()}

    whole = accumulated(x, grad)
    for cuts in ([chunk], [2 * chunk], [chunk, 2 * chunk]):
        for each, total in accumulated(x, grad, cuts).items():
            assert_bitwise_equal(total, whole[each], f"{each}, cut at {cuts}")
    padded = accumulated(torch.cat([x, x[:100]]), torch.cat([grad, torch.zeros(100, 8, dtype=dtype)]))
    for each, total in padded.items():
        assert_bitwise_equal(total, whole[each], f"{each}, with rows whose gradient is zero")


@pytest.mark.parametrize("name", TRAINED)
def test_main_grad_under_autocast(name):
    function, names, options = TRAINED[name]
    parameters = _parameters(names, WIDTHS, torch.float32)
    x, grad = normal(50, 17, seed=7), normal(50, 24, seed=8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        function(x, **parameters, **options).backward(grad)
    half = {each: torch.nn.Parameter(parameter.detach().bfloat16()) for each, parameter in parameters.items()}
    for parameter in half.values():
        parameter.main_grad = torch.zeros(parameter.shape)
    function(x.bfloat16(), **half, **options).backward(grad)
    for each, parameter in parameters.items():
        assert parameter.grad is None
        assert_bitwise_equal(parameter.main_grad, half[each].main_grad, each)


@pytest.mark.parametrize("name", TRAINED)
def test_main_grad_of_frozen_parameters_is_left_alone(name):
    function, names, options = TRAINED[name]
    for frozen in names:
        parameters = _parameters(names, WIDTHS, torch.float32)
        parameters[frozen].requires_grad_(False)
        function(normal(50, 17, seed=7), **parameters, **options).sum().backward()
        for each, parameter in parameters.items():
            assert bool(parameter.main_grad.any()) == (each != frozen), f"{each}, {frozen} frozen"


def test_a_wrong_main_grad_is_refused_before_any_is_touched():
    for name, (function, names, options) in TRAINED.items():
        for wrong in names:
            parameters = _parameters(names, WIDTHS, torch.float32)
            parameters[wrong].main_grad = torch.zeros(3)
            result = function(normal(50, 17, seed=7), **parameters, **options)
            with pytest.raises((ValueError, RuntimeError), match=rf"{wrong}\.main_grad"):
                result.sum().backward()
            if function is not mlp:  # whose two layers go one after the other
                for each, parameter in parameters.items():
                    assert not bool(parameter.main_grad.any()), f"{name}: {each}, {wrong} wrong"


def test_one_weight_in_both_places():
    """weight_up may be the weight itself: it takes both gradients."""
    x, weight = normal(7, 9), normal(5, 9, seed=1)
    shared, theirs = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    isogemm.linear(x, shared, weight_up=shared, activation="swiglu").sum().backward()
    (F.silu(F.linear(x, theirs)) * F.linear(x, theirs)).sum().backward()
    torch.testing.assert_close(shared.grad, theirs.grad)
    tied = torch.nn.Parameter(weight.clone())
    tied.main_grad = torch.zeros(5, 9)
    isogemm.linear(x, tied, weight_up=tied, activation="swiglu").sum().backward()
    total = tied.main_grad if tied.grad is None else tied.main_grad + tied.grad
    torch.testing.assert_close(total, theirs.grad)


def test_autocast_of_a_parameter_in_float32():
    """What a second layer meets: x in autocast's dtype, its weight not yet."""
    x, weight = torch.randn(3, 4).bfloat16(), torch.randn(5, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = isogemm.linear(x, weight, activation="relu")
    assert result.dtype is torch.bfloat16
    result.float().sum().backward()
    assert weight.grad.dtype is torch.float32


def test_matmul_fused_leaves_a_main_grad_alone():
    """As matmul does: a main_grad is a linear's."""
    a, b = torch.randn(3, 4), torch.nn.Parameter(torch.randn(4, 4))
    b.main_grad = torch.zeros(4, 4)
    isogemm.matmul_fused(a, b, activation="relu").sum().backward()
    assert b.grad is not None
    assert not b.main_grad.any()
