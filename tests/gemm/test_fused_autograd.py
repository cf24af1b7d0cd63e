"""Gradients of products with an epilogue, on the CPU: finite differences, errors against float64, strides."""

import itertools

import pytest
import torch
import triton
from cpu_tensors import CONTRACT, normal
from fused_forms import fused_form
from gradients import (
    assert_gradients,
    assert_gradients_no_worse,
    gradients_of,
    make_leaves,
    make_tensors,
    plain_linear,
    plain_mlp,
)

import isogemm
from isogemm.epilogues import register, spec
from isogemm.gemm.api import mlp
from isogemm.verify.activations import ACTIVATION_FORMS as ACTIVATIONS
from isogemm.verify.activations import GATE_FORMS as GATED
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import with_layout
from isogemm.verify.poison import poisoned_allocations

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
