"""Gradients of products with an epilogue, on the CPU: finite differences, fp64, what is kept, main_grad, dropout."""

import functools
import itertools

import pytest
import torch
import triton
from fused_forms import fused_form
from gradients import (
    CONTRACT,
    Kept,
    assert_gradients,
    assert_gradients_no_worse,
    gradients_of,
    make_leaves,
    make_tensors,
    normal,
    plain_linear,
    plain_mlp,
)
from torch.nn import functional as F

import isogemm
from isogemm.epilogues import random, register, spec
from isogemm.gemm import configs
from isogemm.gemm.api import mlp
from isogemm.gemm.fused import new_seed
from isogemm.verify.activations import ACTIVATION_FORMS as ACTIVATIONS
from isogemm.verify.activations import GATE_FORMS as GATED
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cpu"


M, K, N = 3, 4, 5
SHAPES = {"a": (M, K), "b": (K, N), "bias": (N,), "c": (M, N), "residual": (M, N), "row_scale": (M,)}
SHAPES |= {"col_scale": (N,), "alpha": (), "beta": ()}


def _shapes(*names):
    return {name: SHAPES[name] for name in ("a", "b", *names)}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_of_activations(activation):
    assert_gradients(isogemm.matmul_fused, make_leaves(_shapes()), activation=activation)
    assert_gradients(isogemm.matmul_fused, make_leaves(_shapes("bias", "residual")), activation=activation)


COMBINATIONS = {  # name: (tensors, options)
    "bias": (("bias",), {}),
    "residual": (("residual",), {}),
    "alpha": (("alpha",), {}),
    "alpha, a number": ((), {"alpha": 0.7}),
    "c": (("c",), {"beta": -1.3}),
    "c and beta": (("c", "beta"), {}),
    "row_scale": (("row_scale",), {}),
    "col_scale": (("col_scale",), {}),
    "scales, relu": (("row_scale", "col_scale"), {"activation": "relu"}),
    "scales by a number, tanh": (("row_scale", "col_scale"), {"activation": "tanh", "alpha": 0.3}),
    "c, silu": (("c", "beta", "bias"), {"activation": "silu"}),
    "all, gelu": (tuple(SHAPES)[2:], {"activation": "gelu"}),
    "all, none": (tuple(SHAPES)[2:], {}),
    "dropout": ((), {"dropout_p": 0.4}),
    "dropout, bias, relu": (("bias",), {"activation": "relu", "dropout_p": 0.4}),
    "dropout, tanh, residual": (("bias", "residual"), {"activation": "tanh", "dropout_p": 0.4}),
    "all, dropout, sigmoid": (tuple(SHAPES)[2:], {"activation": "sigmoid", "dropout_p": 0.4}),
    "slope": (("bias",), {"activation": "leaky_relu", "activation_args": {"negative_slope": -0.3}}),
    "eager": (("bias", "residual"), {"activation": "gelu", "rounding": "eager"}),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_gradcheck_of_combinations(name):
    names, options = COMBINATIONS[name]
    assert_gradients(isogemm.matmul_fused, make_leaves(_shapes(*names)), **options)


def test_gradcheck_of_a_bias_along_rows():
    shapes = _shapes("residual") | {"bias": (M,)}
    for activation in (None, "relu", "gelu", "tanh"):
        assert_gradients(isogemm.matmul_fused, make_leaves(shapes), bias_dim=-2, activation=activation)


def test_gradcheck_with_leading_sizes():
    shapes = {"a": (2, M, K), "b": (K, N), "bias": (2, M), "c": (2, M, N), "row_scale": (2, M), "residual": (2, M, N)}
    assert_gradients(isogemm.matmul_fused, make_leaves(shapes), bias_dim=-2, beta=0.5, activation="gelu", dropout_p=0.3)
    shapes = {"x": (2, M, K), "weight": (N, K), "bias": (N,), "row_scale": (2, M), "residual": (2, M, N)}
    assert_gradients(isogemm.linear, make_leaves(shapes), activation="silu")
    vector = {"x": (K,), "weight": (N, K), "bias": (N,), "c": (N,), "row_scale": (), "residual": (N,)}
    assert_gradients(isogemm.linear, make_leaves(vector), beta=0.5, activation="silu")


GATE_SHAPES = {"x": (M, K), "weight": (N, K), "weight_up": (N, K)}


@pytest.mark.parametrize("activation", GATED)
def test_gradcheck_of_gates(activation):
    assert_gradients(isogemm.linear, make_leaves(GATE_SHAPES), activation=activation)
    shapes = GATE_SHAPES | {"bias": (N,), "bias_up": (N,), "residual": (M, N)}
    assert_gradients(isogemm.linear, make_leaves(shapes), activation=activation)
    assert_gradients(isogemm.linear, make_leaves(shapes), activation=activation, dropout_p=0.4)
    for one in ("bias", "bias_up"):
        assert_gradients(isogemm.linear, make_leaves(GATE_SHAPES | {one: (N,)}), activation=activation)


@triton.jit
def _declared(acc, col, row, first, second):  # its torch form is what runs here
    return acc * first + second


AUX = {"scalar": (), "columns": (N,), "rows": (M, 1), "row of one": (1, N), "matrix": (M, N)}


@pytest.fixture
def wave(monkeypatch):
    monkeypatch.setattr(spec, "REGISTERED", {})
    register(
        "wave", _declared, lambda acc, col, row, first, second: torch.sin(acc) * first + second * acc * (col + row)
    )
    register("unread", _declared, lambda acc, col, row, first, second: acc * first)
    register("constant", _declared, lambda acc, col, row, first, second: first + second + 0 * col + 0 * row)


def _with_aux(a, b, first, second, **keywords):
    return isogemm.matmul_fused(a, b, aux=(first, second), **keywords)


@pytest.mark.usefixtures("wave")
@pytest.mark.parametrize(("first", "second"), list(itertools.product(AUX, AUX)))
def test_gradcheck_of_the_users(first, second):
    shapes = _shapes() | {"first": AUX[first], "second": AUX[second]}
    assert_gradients(_with_aux, make_leaves(shapes), epilogue="wave")


@pytest.mark.usefixtures("wave")
def test_gradcheck_of_the_users_with_the_rest():
    shapes = _shapes("bias", "residual", "row_scale") | {"first": (N,), "second": (M, N)}
    assert_gradients(_with_aux, make_leaves(shapes), epilogue="wave", dropout_p=0.4)
    for name in ("unread", "constant"):
        leaves = make_leaves(shapes)
        result = _with_aux(**leaves, epilogue=name)
        gradients = torch.autograd.grad(result.sum(), leaves.values(), allow_unused=True)
        for leaf, gradient in zip(leaves.values(), gradients, strict=True):
            assert gradient is None or gradient.shape == leaf.shape


@pytest.mark.usefixtures("wave")
def test_aux_that_need_no_gradient():
    leaves = make_leaves(_shapes() | {"first": (N,), "second": (M, N)})
    expected = torch.autograd.grad(_with_aux(**leaves, epilogue="wave").sum(), leaves.values())
    for fixed in leaves:
        others = {name: leaf.detach() if name == fixed else leaf for name, leaf in leaves.items()}
        result = _with_aux(**others, epilogue="wave").sum()
        wanted = [name for name in leaves if name != fixed]
        gradients = torch.autograd.grad(result, [leaves[name] for name in wanted])
        for name, got, same in zip(leaves, expected, expected, strict=True):
            if name != fixed:
                got = gradients[wanted.index(name)]
            assert_bitwise_equal(got, same, name)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu"])
@pytest.mark.parametrize("trained", [("x", "weight", "bias"), ("bias",), ("weight", "bias")], ids=" ".join)
def test_second_derivatives_are_there_where_torch_s_are(activation, trained):
    """Those of relu by its bias are zero, not missing."""
    shapes = {"x": (3, 8), "weight": (4, 8), "bias": (4,)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def twice(function, dtype):
        leaves = {name: each.to(dtype).requires_grad_(name in trained) for name, each in tensors.items()}
        wanted = [leaves[name] for name in trained]
        first = torch.autograd.grad(function(leaves).sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), wanted)

    def exact(leaves):
        z = torch.nn.functional.linear(leaves["x"], leaves["weight"], leaves["bias"])
        return getattr(torch.nn.functional, activation)(z)

    ours = twice(lambda leaves: isogemm.linear(**leaves, activation=activation), torch.float32)
    for got, right in zip(ours, twice(exact, torch.float64), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-5)


# In the dtypes of the contract, against fp64.


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_activations_no_worse_than_torch(activation, dtype):
    m, k, n = 65, 100, 33
    tensors = make_tensors({"a": (m, k), "b": (k, n), "bias": (n,), "residual": (m, n)}, dtype)
    tensors["a"] = tensors["a"] / 8
    assert_gradients_no_worse(
        isogemm.matmul_fused, fused_form, tensors, normal(m, n, seed=9, dtype=dtype), activation=activation
    )


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_scales_no_worse_than_torch(dtype):
    m, k, n = 65, 100, 33
    shapes = {
        "a": (m, k),
        "b": (k, n),
        "bias": (m,),
        "c": (m, n),
        "row_scale": (m,),
        "col_scale": (n,),
        "alpha": (),
        "beta": (),
    }
    tensors = make_tensors(shapes, dtype)
    tensors["a"] = tensors["a"] / 8
    grad = normal(m, n, seed=9, dtype=dtype)
    assert_gradients_no_worse(isogemm.matmul_fused, fused_form, tensors, grad, bias_dim=-2, activation="gelu")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", GATED)
def test_gates_no_worse_than_torch(activation, dtype):
    m, k, n = 65, 100, 33
    shapes = {"x": (m, k), "weight": (n, k), "weight_up": (n, k), "bias": (n,), "bias_up": (n,), "residual": (m, n)}
    tensors = make_tensors(shapes, dtype)
    tensors["x"] = tensors["x"] / 8
    grad = normal(m, n, seed=9, dtype=dtype)
    assert_gradients_no_worse(isogemm.linear, plain_linear, tensors, grad, activation=activation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_operands_and_results_in_float32(dtype):
    """Every gradient comes in the dtype of its tensor."""
    m, k, n = 17, 40, 9
    tensors = make_tensors({"a": (m, k), "b": (k, n), "bias": (n,)}, dtype)
    shapes = {"c": (m, n), "residual": (m, n), "row_scale": (m,), "col_scale": (n,), "alpha": (), "beta": ()}
    tensors |= make_tensors(shapes, torch.float32)
    tensors["a"] = tensors["a"] / 8
    grad = normal(m, n, seed=9)
    options = {"activation": "gelu", "out_dtype": torch.float32}
    actual = gradients_of(isogemm.matmul_fused, tensors, grad, **options)
    exact = gradients_of(fused_form, tensors, grad, torch.float64, activation="gelu")
    for name, right in exact.items():
        assert actual[name].dtype == tensors[name].dtype
        # z is kept and the gradient taken to the products in 16 bits: each within half an ulp of the largest.
        assert float((actual[name].double() - right).abs().max()) <= 4 * torch.finfo(dtype).eps * float(
            right.abs().max()
        )
    assert_bitwise_equal(actual["residual"], grad)


NEEDED = list(itertools.product([True, False], repeat=5))[:-1]


@pytest.mark.parametrize("needed", NEEDED, ids=lambda needed: "".join("-x"[each] for each in needed))
def test_only_some_need_gradients(needed):
    shapes = {"x": (7, 9), "weight": (5, 9), "bias": (5,), "residual": (7, 5), "row_scale": (7,)}
    tensors, grad = make_tensors(shapes, torch.float32), normal(7, 5, seed=9)
    expected = gradients_of(isogemm.linear, tensors, grad, activation="gelu")
    leaves = {name: each.requires_grad_(need) for (name, each), need in zip(tensors.items(), needed, strict=True)}
    isogemm.linear(**leaves, activation="gelu").backward(grad)
    for (name, leaf), need in zip(leaves.items(), needed, strict=True):
        assert (leaf.grad is not None) == need
        if need:
            assert_bitwise_equal(leaf.grad, expected[name], name)


CALLS = {  # name: (function, shapes, options)
    "bias, relu": (isogemm.linear, {"x": (7, 9), "weight": (5, 9), "bias": (5,)}, {"activation": "relu"}),
    "gelu, residual": (isogemm.linear, {"x": (7, 9), "weight": (5, 9), "residual": (7, 5)}, {"activation": "gelu"}),
    "swiglu": (isogemm.linear, {"x": (7, 9), "weight": (5, 9), "weight_up": (5, 9)}, {"activation": "swiglu"}),
    "dropout": (isogemm.linear, {"x": (7, 9), "weight": (5, 9)}, {"activation": "tanh", "dropout_p": 0.5}),
    "mlp": (mlp, {"x": (7, 9), "weight": (8, 9), "weight_down": (5, 8)}, {"hidden_dropout_p": 0.5, "dropout_p": 0.5}),
    "mlp relu": (mlp, {"x": (7, 9), "weight": (8, 9), "weight_down": (5, 8)}, {"activation": "relu"}),
    "mlp swiglu": (
        mlp, {"x": (7, 9), "weight": (8, 9), "weight_down": (5, 8), "weight_up": (8, 9)}, {"activation": "swiglu"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_backward_twice_needs_the_graph(name):
    function, shapes, options = CALLS[name]
    leaves = make_leaves(shapes, torch.float32)
    result = function(**leaves, **options)
    loss = result.square().sum()
    first = torch.autograd.grad(loss, leaves.values(), retain_graph=True)
    for got, same in zip(torch.autograd.grad(loss, leaves.values()), first, strict=True):
        assert_bitwise_equal(got, same, "the same masks too")
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves.values())


@pytest.mark.parametrize("name", CALLS)
def test_the_forward_is_that_of_inference(name):
    function, shapes, options = CALLS[name]
    leaves = make_leaves(shapes, torch.bfloat16)
    results = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        torch.manual_seed(2)
        with mode():
            results.append(function(**leaves, **options))
    assert [each.requires_grad for each in results] == [True, False, False]
    for result in results[1:]:
        assert_bitwise_equal(result, results[0].detach())


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_any_stride(name):
    function, shapes, options = CALLS[name]
    leaves = make_leaves(shapes, torch.bfloat16)
    plain = torch.ones(7, 5, dtype=torch.bfloat16)
    grads = {"plain": plain, "expanded": plain[:1, :1].expand(7, 5)}
    grads |= {layout: with_layout(plain, layout) for layout in ("transposed", "sliced", "strided", "misaligned")}
    found = {}
    for layout, grad in grads.items():
        torch.manual_seed(2)
        with poisoned_allocations():
            found[layout] = torch.autograd.grad(function(**leaves, **options), leaves.values(), grad)
        for got, same in zip(found[layout], found["plain"], strict=True):
            assert_bitwise_equal(got, same, layout)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "misaligned"])
def test_inputs_of_any_stride(name, layout):
    function, shapes, options = CALLS[name]
    tensors, grad = make_tensors(shapes, torch.bfloat16), normal(7, 5, seed=9, dtype=torch.bfloat16)
    torch.manual_seed(2)
    expected = gradients_of(function, tensors, grad, **options)
    views = {name: with_layout(each, layout if each.ndim > 1 else "strided") for name, each in tensors.items()}
    leaves = {name: view.requires_grad_() for name, view in views.items()}
    torch.manual_seed(2)
    with poisoned_allocations():
        actual = torch.autograd.grad(function(**leaves, **options), leaves.values(), grad)
    for each, got in zip(leaves, actual, strict=True):
        assert_bitwise_equal(got, expected[each], each)


@pytest.mark.parametrize("name", CALLS)
def test_an_operand_changed_in_place_is_noticed(name):
    function, shapes, options = CALLS[name]
    for changed in ("x", "weight", "weight_up", "weight_down"):
        if changed in shapes:
            leaves = make_leaves(shapes, torch.float32)
            result = function(**leaves, **options)
            with torch.no_grad():
                leaves[changed].add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()


def test_a_result_changed_in_place_is_noticed_where_it_is_read():
    """tanh keeps its result."""
    x, weight = normal(7, 9), normal(5, 9).requires_grad_()
    result = isogemm.linear(x, weight, activation="tanh")
    result.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_a_result_may_be_changed_in_place_where_it_is_not_read(name):
    """As that of torch's own operations, of which it is no view."""
    function, shapes, options = CALLS[name]
    leaves = make_leaves(shapes, torch.float32)
    torch.manual_seed(2)
    expected = torch.autograd.grad((2 * function(**leaves, **options)).sum(), leaves.values())
    torch.manual_seed(2)
    result = function(**leaves, **options)
    result.mul_(2)
    for got, same in zip(torch.autograd.grad(result.sum(), leaves.values()), expected, strict=True):
        assert_bitwise_equal(got, same)


@pytest.mark.parametrize("sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_empty(sizes, dtype):
    m, k, n = sizes
    shapes = {"a": (2, m, k), "b": (k, n), "bias": (n,), "c": (2, m, n), "row_scale": (2, m), "col_scale": (n,)}
    shapes |= {"alpha": (), "beta": (), "residual": (2, m, n)}
    tensors, grad = make_tensors(shapes, dtype), torch.ones(2, m, n, dtype=dtype)
    with poisoned_allocations():
        actual = gradients_of(isogemm.matmul_fused, tensors, grad, activation="relu")
    expected = gradients_of(fused_form, tensors, grad, activation="relu")
    for name, same in expected.items():
        torch.testing.assert_close(actual[name], same, msg=lambda text, name=name: f"{name}: {text}")
    shapes = {"x": (2, m, k), "weight": (n, k), "weight_up": (n, k), "bias": (n,), "weight_down": (6, n)}
    tensors, grad = make_tensors(shapes, dtype), torch.ones(2, m, 6, dtype=dtype)
    with poisoned_allocations():
        actual = gradients_of(mlp, tensors, grad, activation="swiglu")
    expected = gradients_of(plain_mlp, tensors, grad, activation="swiglu")
    for name, same in expected.items():
        torch.testing.assert_close(actual[name], same, msg=lambda text, name=name: f"mlp, {name}: {text}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient_at_nan_and_at_kinks(activation):
    """What torch makes of them: relu lets a NaN's gradient pass, and has none at zero."""
    special = torch.tensor([torch.nan, 0.0, -0.0, 3.0, -3.0, 40.0, -40.0])
    bias, theirs = special.clone().requires_grad_(), special.clone().requires_grad_()
    result = isogemm.linear(torch.zeros(1, 2), torch.zeros(7, 2), bias, activation=activation)
    (actual,) = torch.autograd.grad(result.sum(), bias)
    (expected,) = torch.autograd.grad(ACTIVATIONS[activation](theirs + 0.0).sum(), theirs)
    torch.testing.assert_close(actual, expected, equal_nan=True)


# The contract: rows of dX follow nothing but their row, dW and db the tokens in order.


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize(
    "activation", ["relu", "gelu", "silu", "tanh", "leaky_relu", "swiglu", "mlp gelu", "mlp swiglu", "mlp relu"]
)
def test_a_row_of_dx_follows_nothing_but_itself(activation, dtype):
    k, n = 65, 33
    options = {"weight": normal(n, k, seed=1, dtype=dtype), "bias": normal(n, seed=2, dtype=dtype)}
    function, activation = (mlp, activation[4:]) if activation.startswith("mlp") else (isogemm.linear, activation)
    options |= {"weight_up": normal(n, k, seed=3, dtype=dtype)} if activation in GATED else {}
    options |= {"weight_down": normal(n, n, seed=4, dtype=dtype)} if function is mlp else {}
    x, grad = normal(256, k, seed=5, dtype=dtype), normal(256, n, seed=6, dtype=dtype)

    def rows(at):
        leaf = x[at].clone().requires_grad_()
        return torch.autograd.grad(function(leaf, **options, activation=activation), leaf, grad[at])[0]

    whole = rows(slice(None))
    for m in (1, 2, 7, 17, 100, 255):
        assert_bitwise_equal(rows(slice(0, m)), whole[:m], f"{m} rows")
    assert_bitwise_equal(torch.cat([rows(slice(0, 100)), rows(slice(100, 256))]), whole, "as 100 + 156")
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    assert_bitwise_equal(rows(order), whole[order], "permuted")


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


# Dropout: the backward's mask is the forward's.


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_the_backward_has_the_forward_s_mask(dtype):
    """Zero exactly where the output was dropped, scaled elsewhere. x and weight are positive."""
    m, k, n, p = 65, 8, 100, 0.3
    x, weight = torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype)
    c = torch.ones(m, n, dtype=dtype, requires_grad=True)
    for activation in (None, "relu", "gelu", "leaky_relu"):
        result = isogemm.linear(x, weight, beta=1.0, c=c, activation=activation, dropout_p=p)
        (grad,) = torch.autograd.grad(result.sum(), c)
        assert torch.equal(grad == 0, result == 0)
        assert 0 < int((result == 0).sum()) < m * n
        kept = grad[grad != 0].double()
        assert float((kept - 1 / (1 - p)).abs().max()) < 2 * torch.finfo(dtype).eps + 1e-4
    residual = torch.ones(m, n, dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(isogemm.linear(x, weight, residual=residual, dropout_p=p).sum(), residual)
    assert torch.equal(grad, torch.ones_like(grad)), "the residual is not dropped"


def test_masks_are_the_torch_form_s():
    """Forward and gradients are those of torch with the mask that `random.kept` says, of the seed that was drawn."""
    m, k, n, p = 33, 20, 17, 0.4
    tensors = make_tensors({"a": (m, k), "b": (k, n), "bias": (n,), "residual": (m, n)}, torch.float64)
    grad = normal(m, n, seed=9, dtype=torch.float64)
    torch.manual_seed(3)
    mask = random.kept(new_seed(torch.device(DEVICE)), m, n, p) * random.scale(p)

    def plain(a, b, bias, residual):
        return residual + mask * F.gelu(a @ b + bias)

    torch.manual_seed(3)
    actual = gradients_of(isogemm.matmul_fused, tensors, grad, activation="gelu", dropout_p=p)
    for name, right in gradients_of(plain, tensors, grad).items():
        torch.testing.assert_close(actual[name], right)


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh", "swiglu"])
def test_nothing_passes_a_dropout_of_all(activation):
    shapes = GATE_SHAPES if activation in GATED else {"x": (M, K), "weight": (N, K)}
    leaves = make_leaves(shapes | {"bias": (N,)}, torch.float32)
    result = isogemm.linear(**leaves, activation=activation, dropout_p=1.0)
    for gradient in torch.autograd.grad(result.sum(), leaves.values()):
        assert not bool(gradient.any())


# What is kept for the backward.


ROWS, WIDTH = 40, 100
SIZES = {  # of what is kept besides the operands: bytes for a 16-bit problem [40, 100], and whether the result is
    "relu": (ROWS * 13, False),  # a bit each
    "leaky_relu": (ROWS * 13, False),
    "tanh": (0, True),
    "sigmoid": (0, True),
    "gelu": (ROWS * WIDTH * 2, False),
    "gelu_tanh": (ROWS * WIDTH * 2, False),
    "quick_gelu": (ROWS * WIDTH * 2, False),
    "silu": (ROWS * WIDTH * 2, False),
    "relu2": (ROWS * WIDTH * 2, False),
    None: (0, False),
}


def _layer(*names):
    shapes = {
        "x": (ROWS, 64),
        "weight": (WIDTH, 64),
        "bias": (WIDTH,),
        "residual": (ROWS, WIDTH),
        "weight_up": (WIDTH, 64),
    }
    return make_leaves({name: shapes[name] for name in ("x", "weight", *names)}, torch.bfloat16)


@pytest.mark.parametrize("activation", SIZES)
def test_what_is_kept(activation):
    size, result = SIZES[activation]
    kept = Kept(isogemm.linear, _layer("bias", "residual" if activation is None else "bias"), activation=activation)
    assert (kept.bytes, kept.result) == (size, result)
    dropped = Kept(isogemm.linear, _layer("bias"), activation=activation, dropout_p=0.1)
    if not result:
        assert dropped.bytes == size + 8, "and the seed"


def test_what_gates_keep():
    """Both factors before the activation, and nothing of the product."""
    for activation in GATED:
        assert Kept(isogemm.linear, _layer("weight_up"), activation=activation).bytes == 2 * ROWS * WIDTH * 2


def test_nothing_is_kept_without_need():
    layer = {name: leaf.detach() for name, leaf in _layer("bias").items()}
    residual = normal(ROWS, WIDTH, dtype=torch.bfloat16).requires_grad_()
    for activation in ("relu", "gelu"):
        assert Kept(isogemm.linear, layer, activation=activation).bytes == 0
        kept = Kept(isogemm.linear, layer | {"residual": residual}, activation=activation)
        assert kept.bytes == 0, "the residual alone is differentiated"
    assert Kept(mlp, layer | {"weight_down": normal(8, WIDTH, dtype=torch.bfloat16)}).bytes == 0


FIXED = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _first_order(function, inputs, **options):
    return torch.autograd.grad(function(*inputs).sum(), inputs, **options)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: isogemm.matmul_fused(x, x, activation="gelu"),
        lambda x: isogemm.linear(x, x.T, c=2 * x, beta=1.0),
        lambda x: isogemm.linear(x, FIXED, row_scale=x.norm(dim=-1), activation="tanh"),
        lambda x: isogemm.linear(FIXED, x, weight_up=x, activation="swiglu"),
    ],
    ids=["both operands", "addend", "scale", "both weights"],
)
def test_operands_made_from_each_other(function):
    """With a graph of the gradient or without, each path counts once."""
    x = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (plain,) = _first_order(function, [x])
    (with_graph,) = _first_order(function, [x], create_graph=True)
    torch.testing.assert_close(with_graph, plain)
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


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


def test_gradients_of_float32_operands_are_not_rounded():
    x, weight = torch.randn(3, 16).bfloat16(), torch.randn(5, 16).bfloat16()
    c = torch.randn(3, 5, requires_grad=True)
    grad = torch.randn(3, 5)
    result = isogemm.linear(x, weight, c=c, beta=1.0, out_dtype=torch.float32)
    assert torch.equal(torch.autograd.grad(result, c, grad)[0], grad)


def test_registered_again_before_the_backward():
    @triton.jit
    def doubled(acc, col, row):
        return acc * 2

    isogemm.epilogues.register("registered_twice", doubled, lambda acc, col, row: acc * 2)
    a = torch.randn(3, 4, requires_grad=True)
    result = isogemm.matmul_fused(a, torch.randn(4, 5), epilogue="registered_twice")
    isogemm.epilogues.register("registered_twice", doubled, lambda acc, col, row: acc * 5)
    with pytest.raises(RuntimeError, match=r"registered_twice.*registered again"):
        result.sum().backward()


def test_dropped_infinities_are_zero():
    torch.manual_seed(0)
    x = torch.full((64, 16), torch.inf)
    result = isogemm.linear(x, torch.ones(8, 16), dropout_p=0.5)
    assert not result.isnan().any()
    assert bool((result == 0).any() and (result == torch.inf).any())
