"""Gradients of products on the CPU: finite differences, errors against float64, strides, in-place changes."""

import functools
import gc
import itertools
import weakref

import hypothesis
import pytest
import strategies
import torch
from cpu_tensors import CONTRACT, HALVES, normal
from hypothesis import strategies as st
from token_sums import result_and_gradients
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cpu"


def _leaves(*shapes, dtype=torch.float64):
    return tuple(normal(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes))


PRODUCTS = {  # name: (function, shapes of its inputs)
    "mm": (isogemm.mm, ((3, 4), (4, 2))),
    "dot": (isogemm.matmul, ((4,), (4,))),
    "matrix-vector": (isogemm.matmul, ((3, 4), (4,))),
    "vector-matrix": (isogemm.matmul, ((4,), (4, 2))),
    "batch-vector": (isogemm.matmul, ((2, 3, 4), (4,))),
    "vector-batch": (isogemm.matmul, ((4,), (2, 4, 3))),
    "batch-matrix": (isogemm.matmul, ((2, 3, 4), (4, 2))),
    "matrix-batch": (isogemm.matmul, ((3, 4), (2, 4, 2))),
    "batches": (isogemm.matmul, ((2, 3, 4), (2, 4, 2))),
    "shared a": (isogemm.matmul, ((1, 3, 4), (2, 4, 2))),
    "shared b": (isogemm.matmul, ((2, 3, 4), (1, 4, 2))),
    "broadcast both": (isogemm.matmul, ((2, 1, 2, 3), (2, 3, 2))),
    "linear": (isogemm.linear, ((3, 4), (2, 4))),
    "linear with bias": (isogemm.linear, ((3, 4), (2, 4), (2,))),
    "linear of a vector": (isogemm.linear, ((4,), (2, 4), (2,))),
    "linear of a batch": (isogemm.linear, ((2, 3, 4), (2, 4), (2,))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_gradcheck(name):
    function, shapes = PRODUCTS[name]
    inputs = _leaves(*shapes)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


# The product is linear in each operand: a step of 1/2 leaves no truncation error, only rounding, below 1e-5 here.
FP32 = {"eps": 0.5, "atol": 1e-4, "rtol": 1e-4}


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # gradcheck would rather have f64
@pytest.mark.parametrize("name", PRODUCTS)
def test_finite_differences_of_the_backend(name):
    function, shapes = PRODUCTS[name]
    inputs = _leaves(*shapes, dtype=torch.float32)
    assert gradcheck(function, inputs, **FP32)
    assert gradgradcheck(function, inputs, **FP32)


def _assert_gradients(ours, theirs, inputs, grad, **options):
    """Forward and gradients no worse than torch's."""
    result, actual = result_and_gradients(ours, inputs, grad)
    torch_result, expected = result_and_gradients(theirs, inputs, grad)
    reference, exact = result_and_gradients(theirs, inputs, grad, torch.float64)
    scale, sizes = result_and_gradients(theirs, [x.abs() for x in inputs], grad.abs(), torch.float64)
    assert_no_worse_than_torch(result, torch_result, reference, scale=scale, what="forward", **options)
    for name, got, other, right, size in zip("123", actual, expected, exact, sizes, strict=False):
        assert_no_worse_than_torch(got, other, right, scale=size, what=f"gradient of input {name}", **options)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("sizes", [(17, 65, 33), (100, 127, 63), (300, 17, 63), (1000, 63, 65)], ids=str)
def test_linear_no_worse_than_torch(sizes, dtype):
    m, k, n = sizes
    inputs = [normal(m, k, seed=0, dtype=dtype), normal(n, k, seed=1, dtype=dtype), normal(n, seed=2, dtype=dtype)]
    _assert_gradients(isogemm.linear, F.linear, inputs, normal(m, n, seed=3, dtype=dtype))


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((5, 17, 65), (65, 33)), ((17, 65), (5, 65, 33)), ((5, 1, 17, 33), (3, 33, 9)), ((5, 17, 63), (63,))],
    ids=str,
)
def test_matmul_no_worse_than_torch(a_shape, b_shape, dtype):
    inputs = [normal(*a_shape, seed=0, dtype=dtype), normal(*b_shape, seed=1, dtype=dtype)]
    grad = normal(*torch.matmul(*inputs).shape, seed=2, dtype=dtype)
    _assert_gradients(isogemm.matmul, torch.matmul, inputs, grad)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_of_a_float32_output(dtype):
    """dX, dW and db come in the inputs' dtype, from a gradient that is float32 and has more than 16 bits to lose."""
    inputs = [normal(65, 127, seed=0, dtype=dtype), normal(33, 127, seed=1, dtype=dtype)]
    inputs.append(normal(33, seed=2, dtype=dtype))
    ours = functools.partial(isogemm.linear, out_dtype=torch.float32)
    for grad in (normal(65, 33, seed=3), 3.0 * normal(65, 33, seed=3, dtype=dtype).float()):
        result, actual = result_and_gradients(ours, inputs, grad)
        assert result.dtype == torch.float32
        _, exact = result_and_gradients(F.linear, inputs, grad, torch.float64)
        _, sizes = result_and_gradients(F.linear, [x.abs() for x in inputs], grad.abs(), torch.float64)
        for got, right, size in zip(actual, exact, sizes, strict=True):
            assert got.dtype == dtype
            # The gradient may be rounded to the inputs' dtype for the dot, and the result is, each half an ulp.
            assert bool(((got.double() - right).abs() <= 2 * torch.finfo(dtype).eps * size).all())


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_gradients_of_any_stride(dtype):
    """Expanded by sum(), transposed, sliced: the bits of the same gradient in order."""
    x, weight, bias = (normal(*shape, seed=9, dtype=dtype).requires_grad_() for shape in ((4, 9, 33), (17, 33), (17,)))
    plain = torch.ones(4, 9, 17, dtype=dtype)
    expected = torch.autograd.grad(isogemm.linear(x, weight, bias), (x, weight, bias), plain)
    grads = {"expanded": torch.ones((), dtype=dtype).expand(4, 9, 17), "swapped": plain.transpose(0, 1).contiguous()}
    grads["swapped"] = grads["swapped"].transpose(0, 1)
    grads |= {name: with_layout(plain, name) for name in ("transposed", "sliced", "strided", "misaligned")}
    for name, grad in grads.items():
        with poisoned_allocations():
            actual = torch.autograd.grad(isogemm.linear(x, weight, bias), (x, weight, bias), grad)
        for got, same in zip(actual, expected, strict=True):
            assert_bitwise_equal(got, same, name)
    total = torch.autograd.grad(isogemm.linear(x, weight, bias).sum(), (x, weight, bias))
    for got, same in zip(total, expected, strict=True):
        assert_bitwise_equal(got, same, "sum")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "misaligned"])
def test_gradients_for_inputs_of_any_stride(layout, dtype):
    inputs = (normal(33, 65, seed=0, dtype=dtype), normal(17, 65, seed=1, dtype=dtype), normal(17, seed=2, dtype=dtype))
    grad = normal(33, 17, seed=3, dtype=dtype)
    _, expected = result_and_gradients(isogemm.linear, inputs, grad)
    views = [with_layout(x, layout).requires_grad_() for x in inputs[:2]] + [inputs[2].clone().requires_grad_()]
    with poisoned_allocations():
        actual = torch.autograd.grad(isogemm.linear(*views), views, grad)
    for got, same in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, same)


def test_gradients_through_views_and_expansions():
    """A weight tied by expand or slicing gets the sum that autograd makes of it."""
    base = normal(6, 5, dtype=torch.float64).requires_grad_()
    x = normal(3, 5, seed=1, dtype=torch.float64)

    def loss(linear):
        return (linear(x, base[::2]) @ linear(x, base[:1].expand(3, 5)).T).sum()

    torch.testing.assert_close(
        torch.autograd.grad(loss(isogemm.linear), base), torch.autograd.grad(loss(F.linear), base)
    )


@pytest.mark.parametrize("needed", list(itertools.product([True, False], repeat=3))[:-1], ids=str)
def test_only_some_inputs_need_gradients(needed):
    inputs = [normal(7, 9), normal(5, 9, seed=1), normal(5, seed=2)]
    grad = normal(7, 5, seed=3)
    _, expected = result_and_gradients(isogemm.linear, inputs, grad)
    for x, need in zip(inputs, needed, strict=True):
        x.requires_grad_(need)
    isogemm.linear(*inputs).backward(grad)
    for x, need, same in zip(inputs, needed, expected, strict=True):
        assert (x.grad is not None) == need
        if need:
            assert_bitwise_equal(x.grad, same)


def test_grad_accumulates_as_usual():
    weight = normal(5, 9).requires_grad_()
    for seed in (1, 2):
        isogemm.linear(normal(7, 9, seed=seed), weight).sum().backward()
    parts = [torch.autograd.grad(isogemm.linear(normal(7, 9, seed=seed), weight).sum(), weight)[0] for seed in (1, 2)]
    assert_bitwise_equal(weight.grad, parts[0] + parts[1])
    assert not hasattr(weight, "grad_added_to_main_grad")


def test_an_operand_changed_in_place_is_noticed():
    x, weight = normal(7, 9), normal(5, 9).requires_grad_()
    result = isogemm.linear(x, weight)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_backward_twice_needs_the_graph():
    x, weight = normal(7, 9), normal(5, 9).requires_grad_()
    result = isogemm.linear(x, weight).sum()
    result.backward(retain_graph=True)
    first = weight.grad.clone()
    result.backward()
    assert_bitwise_equal(weight.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        result.backward()


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(data=st.data())
def test_gradients_of_any_shape_and_stride(data):
    m, n, k = (data.draw(strategies.sizes(100, min_size=0), label=name) for name in "mnk")
    dtype = data.draw(strategies.float_dtypes(), label="dtype")
    inputs = [
        data.draw(strategies.tensor_cases(shape, dtype=dtype, kinds=["normal"]), label=name).build(DEVICE)
        for name, shape in (("x", (m, k)), ("weight", (n, k)), ("bias", (n,)))
    ]
    grad = data.draw(strategies.tensor_cases((m, n), dtype=dtype, kinds=["normal"]), label="grad").build(DEVICE)
    leaves = [x.requires_grad_() for x in inputs]
    with poisoned_allocations():
        actual = torch.autograd.grad(isogemm.linear(*leaves), leaves, grad)
    _, exact = result_and_gradients(F.linear, leaves, grad, torch.float64)
    _, sizes = result_and_gradients(F.linear, [x.detach().abs() for x in leaves], grad.abs(), torch.float64)
    info = torch.finfo(dtype)
    for got, right, size in zip(actual, exact, sizes, strict=True):
        # Up to 100 roundings of an fp32 sum, one to the dtype; below its normal numbers that one is absolute.
        allowed = (100 * 2**-23 + info.eps) * size + info.eps * info.smallest_normal
        assert bool(((got.double() - right).abs() <= allowed).all())


def test_a_passing_weight_is_not_kept_alive():
    base = torch.randn(7, 8, requires_grad=True)
    weight = base * 2
    out = isogemm.linear(torch.randn(5, 8), weight)
    alive = weakref.ref(weight)
    out.sum().backward()
    del weight
    gc.collect()
    assert alive() is None
    assert out.shape == (5, 7)
