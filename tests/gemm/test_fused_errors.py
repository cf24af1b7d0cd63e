"""Wrong arguments of products with an epilogue: each error names its argument before anything is computed."""

import functools
import inspect
import math

import pytest
import torch
import triton

import isogemm
from isogemm.epilogues import register, spec
from isogemm.gemm.api import mlp


@triton.jit
def _device_one(acc, col, row, first):
    return acc + first


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(spec, "REGISTERED", {})


# Errors. Every one names its argument and comes before anything is computed.

A, B, W, BIAS = torch.ones(3, 4), torch.ones(4, 5), torch.ones(5, 4), torch.ones(5)
SQUARE = torch.ones(3, 5)
EITHER = (TypeError, ValueError)
WRONG = {  # name: (keywords of linear, error, what the message says of what argument)
    "activation unknown": ({"activation": "rleu"}, ValueError, "activation is 'rleu'.*relu"),
    "activation a function": ({"activation": torch.relu}, EITHER, "activation is .*relu"),
    "activation_args unknown": (
        {"activation": "leaky_relu", "activation_args": {"slope": 1.0}}, ValueError,
        "activation_args .*'slope'.*negative_slope",
    ),
    "activation_args of none": (
        {"activation": "relu", "activation_args": {"a": 1.0}}, ValueError, "activation_args .*'a'",
    ),
    "activation_args alone": (
        {"activation_args": {"negative_slope": 1.0}, "residual": SQUARE}, ValueError, "activation_args ",
    ),
    "activation_args no number": (
        {"activation": "leaky_relu", "activation_args": {"negative_slope": "steep"}}, EITHER, "activation_args .*steep",
    ),
    "weight_up without a gate": ({"activation": "relu", "weight_up": W}, ValueError, ".*weight_up"),
    "weight_up without activation": ({"weight_up": W}, ValueError, ".*weight_up"),
    "gate without weight_up": ({"activation": "swiglu"}, ValueError, "activation is 'swiglu'.*weight_up"),
    "weight_up shape": ({"activation": "swiglu", "weight_up": torch.ones(6, 4)}, ValueError, ".*weight_up .*6"),
    "weight_up rank": ({"activation": "swiglu", "weight_up": BIAS}, ValueError, ".*weight_up "),
    "weight_up dtype": ({"activation": "swiglu", "weight_up": W.half()}, EITHER, ".*weight_up .*float16"),
    "weight_up device": ({"activation": "swiglu", "weight_up": W.to("meta")}, ValueError, ".*weight_up .*meta"),
    "weight_up no tensor": ({"activation": "swiglu", "weight_up": 1.0}, TypeError, ".*weight_up .*float"),
    "bias_up alone": ({"activation": "relu", "bias_up": BIAS}, ValueError, "bias_up "),
    "bias_up shape": ({"activation": "swiglu", "weight_up": W, "bias_up": BIAS[:4]}, ValueError, ".*bias_up .*4"),
    "bias_up dtype": ({"activation": "swiglu", "weight_up": W, "bias_up": BIAS.half()}, EITHER, ".*bias_up .*float16"),
    "bias shape": ({"activation": "relu", "bias": BIAS[:4]}, ValueError, ".*bias .*4"),
    "bias dtype": ({"activation": "relu", "bias": BIAS.half()}, EITHER, ".*bias .*float16"),
    "bias no tensor": ({"activation": "relu", "bias": 1.0}, TypeError, "bias .*float"),
    "residual shape": ({"residual": SQUARE[:2]}, ValueError, r"residual .*\[2, 5\].*\[3, 5\]"),
    "residual to be broadcast": ({"residual": BIAS}, ValueError, r"residual .*\[5\].*\[3, 5\]"),
    "residual dtype": ({"residual": SQUARE.half()}, EITHER, "residual .*float16"),
    "residual device": ({"residual": SQUARE.to("meta")}, ValueError, "residual .*meta"),
    "residual no tensor": ({"residual": 1.0}, TypeError, "residual .*float"),
    "c shape": ({"c": SQUARE.T, "beta": 1.0}, ValueError, r"c .*\[5, 3\].*\[3, 5\]"),
    "c dtype": ({"c": SQUARE.half(), "beta": 1.0}, EITHER, "c .*float16"),
    "c no tensor": ({"c": 2.0, "beta": 1.0}, TypeError, "c .*float"),
    "beta without c": ({"beta": 1.0}, ValueError, "beta .*c"),
    "beta tensor without c": ({"beta": torch.tensor(1.0)}, ValueError, "beta .*c"),
    "beta rank": ({"beta": torch.ones(1), "c": SQUARE}, ValueError, r"beta .*\[1\]"),
    "beta no number": ({"beta": "one", "c": SQUARE}, EITHER, "beta .*(str|one)"),
    "alpha rank": ({"alpha": torch.ones(2)}, ValueError, r"alpha .*\[2\]"),
    "alpha dtype": ({"alpha": torch.tensor(1)}, EITHER, "alpha .*int64"),
    "alpha no number": ({"alpha": "one"}, EITHER, "alpha .*(str|one)"),
    "alpha none": ({"alpha": None}, EITHER, "alpha .*None"),
    "row_scale shape": ({"row_scale": BIAS}, ValueError, r"row_scale .*\[5\].*\[3\]"),
    "row_scale dtype": ({"row_scale": torch.ones(3).half()}, EITHER, "row_scale .*float16"),
    "row_scale no tensor": ({"row_scale": 1.0}, TypeError, "row_scale .*float"),
    "col_scale shape": ({"col_scale": BIAS[:3]}, ValueError, r"col_scale .*\[3\].*\[5\]"),
    "col_scale dtype": ({"col_scale": BIAS.long()}, EITHER, "col_scale .*int64"),
    "dropout_p negative": ({"dropout_p": -0.1}, ValueError, "dropout_p .*-0.1"),
    "dropout_p above one": ({"dropout_p": 1.5}, ValueError, "dropout_p .*1.5"),
    "dropout_p nan": ({"dropout_p": math.nan}, ValueError, "dropout_p .*nan"),
    "dropout_p no number": ({"dropout_p": "half"}, EITHER, "dropout_p .*(str|half)"),
    "rounding": ({"rounding": "twice"}, ValueError, "rounding is 'twice'.*once.*eager"),
    "epilogue unknown": ({"epilogue": "nobody"}, ValueError, "epilogue is 'nobody'"),
    "aux without epilogue": ({"aux": (BIAS,)}, ValueError, "aux .*epilogue"),
    "aux with an activation": ({"aux": (BIAS,), "activation": "relu"}, ValueError, "aux .*epilogue"),
    "out_dtype": ({"activation": "relu", "out_dtype": torch.float16}, EITHER, "out_dtype .*float16"),
    "precision": ({"activation": "relu", "precision": "fp8"}, ValueError, "precision .*fp8"),
    "weight shape": ({"activation": "relu", "weight": B}, ValueError, "x and weight .*4.*5"),
    "weight dtype": ({"activation": "relu", "weight": W.half()}, EITHER, "x and weight .*float16"),
}  # fmt: skip
for _name, _value in {
    "alpha": 2.0, "beta": 1.0, "row_scale": torch.ones(3), "col_scale": BIAS,
}.items():  # fmt: skip
    _keywords = {"activation": "swiglu", "weight_up": W, _name: _value} | ({"c": SQUARE} if _name == "beta" else {})
    WRONG[f"{_name} with a gate"] = (
        _keywords,
        ValueError,
        "(c|beta) .*gated" if _name == "beta" else f"{_name} .*gated",
    )


def _assert_refused(error, message, function, *args, **keywords):
    with isogemm.dispatch_log() as log, pytest.raises(error, match=f"^{message}"):
        function(*args, **keywords)
    assert not log, "something was computed first"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    keywords, error, message = WRONG[name]
    _assert_refused(error, message, isogemm.linear, **{"x": A, "weight": W} | keywords)


WRONG_MATMULS = {  # of matmul_fused alone
    "a rank": ({"a": A[0]}, ValueError, r"a .*\[4\]"),
    "a no tensor": ({"a": None}, TypeError, "a .*NoneType"),
    "b rank": ({"b": B[None]}, ValueError, r"b .*\[1, 4, 5\]"),
    "b no tensor": ({"b": [1.0]}, TypeError, "b .*list"),
    "k": ({"b": W, "activation": "relu"}, ValueError, "a and b .*4.*5"),
    "dtypes": ({"b": B.half(), "activation": "relu"}, EITHER, "a and b .*float32.*float16"),
    "of integers": ({"a": A.long(), "b": B.long()}, EITHER, "a .*int64"),
    "a gate": ({"activation": "swiglu"}, ValueError, "activation is 'swiglu'"),
    "bias_dim": ({"bias": BIAS, "bias_dim": 0}, ValueError, "bias_dim is 0"),
    "bias_dim positive": ({"bias": BIAS, "bias_dim": 1}, ValueError, "bias_dim is 1"),
    "column bias shape": ({"bias": BIAS, "bias_dim": -2}, ValueError, r".*bias .*\[5\].*\[3\]"),
    "column bias dtype": ({"bias": torch.ones(3).half(), "bias_dim": -2}, EITHER, ".*bias .*float16"),
    "bias rank": ({"bias": SQUARE}, ValueError, r"bias .*\[3, 5\]"),
}


@pytest.mark.parametrize("name", WRONG_MATMULS)
def test_wrong_arguments_of_matmul_fused(name):
    keywords, error, message = WRONG_MATMULS[name]
    _assert_refused(error, message, isogemm.matmul_fused, **{"a": A, "b": B} | keywords)


@pytest.mark.usefixtures("registry")
def test_wrong_aux():
    register("add", _device_one, lambda acc, col, row, first: acc + first)
    refused = functools.partial(_assert_refused, function=isogemm.matmul_fused, a=A, b=B, epilogue="add")
    refused(ValueError, "aux has 0 tensors.*'add' reads 1")
    refused(ValueError, "aux has 2 tensors.*'add' reads 1", aux=(BIAS, BIAS))
    refused(ValueError, r"aux\[0\] .*\[4\]", aux=(torch.ones(4),))
    refused(ValueError, r"aux\[0\] .*\[2, 3, 5\]", aux=(torch.ones(2, 3, 5),))
    refused(EITHER, r"aux\[0\] .*float16", aux=(BIAS.half(),))
    refused(EITHER, r"aux\[0\] .*int64", aux=(BIAS.long(),))
    refused(TypeError, r"aux\[0\] .*float", aux=(1.0,))
    refused(ValueError, r".*aux\[0\] .*meta", aux=(BIAS.to("meta"),))
    refused(ValueError, "activation is 'relu' and epilogue 'add'", aux=(BIAS,), activation="relu")
    refused(ValueError, "activation_args ", aux=(BIAS,), activation_args={"negative_slope": 1.0})


DOWN = torch.ones(7, 5)
WRONG_MLPS = {
    "weight_down shape": ({"weight_down": DOWN.T}, ValueError, r"weight_down .*\[5, 7\].*5"),
    "weight_down rank": ({"weight_down": BIAS}, ValueError, "weight_down "),
    "weight_down no tensor": ({"weight_down": None}, TypeError, "weight_down .*NoneType"),
    "weight_down dtype": ({"weight_down": DOWN.half()}, EITHER, ".*weight_down .*float16"),
    "bias_down shape": ({"bias_down": BIAS}, ValueError, ".*bias_down .*5"),
    "bias_down dtype": ({"bias_down": torch.ones(7).half()}, EITHER, ".*bias_down .*float16"),
    "bias shape": ({"bias": BIAS[:4]}, ValueError, ".*bias .*4"),
    "weight_up missing": ({"activation": "swiglu"}, ValueError, ".*weight_up"),
    "weight_up with no gate": ({"weight_up": W}, ValueError, ".*weight_up"),
    "bias_up alone": ({"bias_up": BIAS}, ValueError, "bias_up "),
    "activation unknown": ({"activation": "rleu"}, ValueError, "activation is 'rleu'"),
    "activation none": ({"activation": None}, EITHER, "activation is None"),
    "hidden_dropout_p": ({"hidden_dropout_p": 2.0}, ValueError, "hidden_dropout_p .*2"),
    "dropout_p": ({"dropout_p": -1.0}, ValueError, "dropout_p .*-1"),
    "residual shape": ({"residual": SQUARE}, ValueError, r"residual .*\[3, 5\].*\[3, 7\]"),
    "residual dtype": ({"residual": torch.ones(3, 7).half()}, EITHER, "residual .*float16"),
    "out_dtype": ({"out_dtype": torch.float16}, EITHER, "out_dtype .*float16"),
    "precision": ({"precision": "fp8"}, ValueError, "precision .*fp8"),
    "x shape": ({"x": SQUARE}, ValueError, "x and weight .*5.*4"),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", WRONG_MLPS)
def test_wrong_arguments_of_mlp(name, training):
    keywords, error, message = WRONG_MLPS[name]
    weight = W.clone().requires_grad_(training)
    _assert_refused(error, message, mlp, **{"x": A, "weight": weight, "weight_down": DOWN} | keywords)


def test_options_are_keywords():
    with pytest.raises(TypeError):
        isogemm.matmul_fused(A, B, BIAS)
    with pytest.raises(TypeError):
        isogemm.linear(A, W, BIAS, "relu")
    with pytest.raises(TypeError):
        mlp(A, W, DOWN, BIAS)


@pytest.mark.parametrize("name", ["residual", "c", "row_scale", "col_scale", "weight_up", "bias_up"])
@pytest.mark.parametrize("wrong", [0, False, "", (), {}])
def test_what_is_no_tensor_is_refused_though_it_is_false(name, wrong):
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    with pytest.raises(TypeError, match=f"{name} is a {type(wrong).__name__}"):
        isogemm.linear(x, weight, **{name: wrong})


def test_keywords_of_the_other_function_are_refused():
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    with pytest.raises(TypeError, match=r"linear\(\) got an unexpected keyword argument 'bias_dim'"):
        isogemm.linear(x, weight, bias_dim=-2)
    with pytest.raises(TypeError, match=r"matmul_fused\(\) got an unexpected keyword argument 'weight_up'"):
        isogemm.matmul_fused(x, weight.mT, weight_up=weight.mT, activation="swiglu")
    with pytest.raises(TypeError, match=r"linear\(\) got an unexpected keyword argument 'activations'"):
        isogemm.linear(x, weight, activations=None)
    with pytest.raises(TypeError, match=r"aux\[0\] is a NoneType"):
        isogemm.linear(x, weight, activation="relu", aux=(None,))


@pytest.mark.parametrize("function", [isogemm.linear, isogemm.matmul_fused])
def test_signatures_show_the_epilogue(function):
    parameters = inspect.signature(function).parameters
    assert parameters["activation"].annotation == "str | None"
    assert (parameters["alpha"].default, parameters["rounding"].default) == (1, "once")
    assert [*parameters][-2:] == ["out_dtype", "precision"]
