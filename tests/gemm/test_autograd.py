"""Gradients on the CPU: finite differences, fp64, the chunked order of dW and db, main_grad."""

import functools
import gc
import itertools
import weakref

import hypothesis
import pytest
import strategies
import torch
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import isogemm
from isogemm.gemm import configs
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data, with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cpu"
CONTRACT = [torch.float32, torch.bfloat16, torch.float16]
HALVES = [torch.bfloat16, torch.float16]


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=DEVICE)


def _leaves(*shapes, dtype=torch.float64):
    return tuple(_normal(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes))


def _chunk(n, k, dtype):
    return configs.token_chunk(n, k, str(dtype).removeprefix("torch."))


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


def _gradients(function, inputs, grad, dtype=None):
    """Gradients with respect to copies of `inputs`, in `dtype` where it is given."""
    leaves = tuple(x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs)
    result = function(*leaves)
    return result.detach(), torch.autograd.grad(result, leaves, grad.to(result.dtype))


def _assert_gradients(ours, theirs, inputs, grad, **options):
    """Forward and gradients no worse than torch's."""
    result, actual = _gradients(ours, inputs, grad)
    torch_result, expected = _gradients(theirs, inputs, grad)
    reference, exact = _gradients(theirs, inputs, grad, torch.float64)
    scale, sizes = _gradients(theirs, [x.abs() for x in inputs], grad.abs(), torch.float64)
    assert_no_worse_than_torch(result, torch_result, reference, scale=scale, what="forward", **options)
    for name, got, other, right, size in zip("123", actual, expected, exact, sizes, strict=False):
        assert_no_worse_than_torch(got, other, right, scale=size, what=f"gradient of input {name}", **options)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("sizes", [(17, 65, 33), (100, 127, 63), (300, 17, 63), (1000, 63, 65)], ids=str)
def test_linear_no_worse_than_torch(sizes, dtype):
    m, k, n = sizes
    inputs = [_normal(m, k, seed=0, dtype=dtype), _normal(n, k, seed=1, dtype=dtype), _normal(n, seed=2, dtype=dtype)]
    _assert_gradients(isogemm.linear, F.linear, inputs, _normal(m, n, seed=3, dtype=dtype))


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((5, 17, 65), (65, 33)), ((17, 65), (5, 65, 33)), ((5, 1, 17, 33), (3, 33, 9)), ((5, 17, 63), (63,))],
    ids=str,
)
def test_matmul_no_worse_than_torch(a_shape, b_shape, dtype):
    inputs = [_normal(*a_shape, seed=0, dtype=dtype), _normal(*b_shape, seed=1, dtype=dtype)]
    grad = _normal(*torch.matmul(*inputs).shape, seed=2, dtype=dtype)
    _assert_gradients(isogemm.matmul, torch.matmul, inputs, grad)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_of_a_float32_output(dtype):
    """dX, dW and db come in the inputs' dtype, from a gradient that is float32 and has more than 16 bits to lose."""
    inputs = [_normal(65, 127, seed=0, dtype=dtype), _normal(33, 127, seed=1, dtype=dtype)]
    inputs.append(_normal(33, seed=2, dtype=dtype))
    ours = functools.partial(isogemm.linear, out_dtype=torch.float32)
    for grad in (_normal(65, 33, seed=3), 3.0 * _normal(65, 33, seed=3, dtype=dtype).float()):
        result, actual = _gradients(ours, inputs, grad)
        assert result.dtype == torch.float32
        _, exact = _gradients(F.linear, inputs, grad, torch.float64)
        _, sizes = _gradients(F.linear, [x.abs() for x in inputs], grad.abs(), torch.float64)
        for got, right, size in zip(actual, exact, sizes, strict=True):
            assert got.dtype == dtype
            # The gradient may be rounded to the inputs' dtype for the dot, and the result is, each half an ulp.
            assert bool(((got.double() - right).abs() <= 2 * torch.finfo(dtype).eps * size).all())


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_gradients_of_any_stride(dtype):
    """Expanded by sum(), transposed, sliced: the bits of the same gradient in order."""
    x, weight, bias = (_normal(*shape, seed=9, dtype=dtype).requires_grad_() for shape in ((4, 9, 33), (17, 33), (17,)))
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
    inputs = (
        _normal(33, 65, seed=0, dtype=dtype),
        _normal(17, 65, seed=1, dtype=dtype),
        _normal(17, seed=2, dtype=dtype),
    )
    grad = _normal(33, 17, seed=3, dtype=dtype)
    _, expected = _gradients(isogemm.linear, inputs, grad)
    views = [with_layout(x, layout).requires_grad_() for x in inputs[:2]] + [inputs[2].clone().requires_grad_()]
    with poisoned_allocations():
        actual = torch.autograd.grad(isogemm.linear(*views), views, grad)
    for got, same in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, same)


def test_gradients_through_views_and_expansions():
    """A weight tied by expand or slicing gets the sum that autograd makes of it."""
    base = _normal(6, 5, dtype=torch.float64).requires_grad_()
    x = _normal(3, 5, seed=1, dtype=torch.float64)

    def loss(linear):
        return (linear(x, base[::2]) @ linear(x, base[:1].expand(3, 5)).T).sum()

    torch.testing.assert_close(
        torch.autograd.grad(loss(isogemm.linear), base), torch.autograd.grad(loss(F.linear), base)
    )


@pytest.mark.parametrize("needed", list(itertools.product([True, False], repeat=3))[:-1], ids=str)
def test_only_some_inputs_need_gradients(needed):
    inputs = [_normal(7, 9), _normal(5, 9, seed=1), _normal(5, seed=2)]
    grad = _normal(7, 5, seed=3)
    _, expected = _gradients(isogemm.linear, inputs, grad)
    for x, need in zip(inputs, needed, strict=True):
        x.requires_grad_(need)
    isogemm.linear(*inputs).backward(grad)
    for x, need, same in zip(inputs, needed, expected, strict=True):
        assert (x.grad is not None) == need
        if need:
            assert_bitwise_equal(x.grad, same)


def test_grad_accumulates_as_usual():
    weight = _normal(5, 9).requires_grad_()
    for seed in (1, 2):
        isogemm.linear(_normal(7, 9, seed=seed), weight).sum().backward()
    parts = [torch.autograd.grad(isogemm.linear(_normal(7, 9, seed=seed), weight).sum(), weight)[0] for seed in (1, 2)]
    assert_bitwise_equal(weight.grad, parts[0] + parts[1])
    assert not hasattr(weight, "grad_added_to_main_grad")


def test_an_operand_changed_in_place_is_noticed():
    x, weight = _normal(7, 9), _normal(5, 9).requires_grad_()
    result = isogemm.linear(x, weight)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_backward_twice_needs_the_graph():
    x, weight = _normal(7, 9), _normal(5, 9).requires_grad_()
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
    _, exact = _gradients(F.linear, leaves, grad, torch.float64)
    _, sizes = _gradients(F.linear, [x.detach().abs() for x in leaves], grad.abs(), torch.float64)
    info = torch.finfo(dtype)
    for got, right, size in zip(actual, exact, sizes, strict=True):
        # Up to 100 roundings of an fp32 sum, one to the dtype; below its normal numbers that one is absolute.
        allowed = (100 * 2**-23 + info.eps) * size + info.eps * info.smallest_normal
        assert bool(((got.double() - right).abs() <= allowed).all())


WEIGHTS = [(8, 16), (33, 65), (1, 127)]  # N, K


def _training(n, k, tokens, dtype):
    weight, bias = _normal(n, k, seed=1, dtype=dtype), _normal(n, seed=2, dtype=dtype)
    return _normal(tokens, k, seed=0, dtype=dtype), weight, bias, _normal(tokens, n, seed=3, dtype=dtype)


def _accumulate(x, weight, bias, grad, cuts=(), main_grads=None):
    """main_grad of weight and bias after a backward over each part of the tokens, cut at `cuts`."""
    weight, bias = weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    weight.main_grad, bias.main_grad = main_grads or (torch.zeros(weight.shape), torch.zeros(bias.shape))
    weight.main_grad, bias.main_grad = weight.main_grad.clone(), bias.main_grad.clone()
    for start, stop in itertools.pairwise([0, *cuts, len(x)]):
        isogemm.linear(x[start:stop], weight, bias).backward(grad[start:stop])
    return weight.main_grad, bias.main_grad


def _assert_same(actual, expected, what):
    for name, got, same in zip(("dW", "db"), actual, expected, strict=True):
        assert_bitwise_equal(got, same, f"{name}, {what}")


def test_chunks():
    """A power of two of at most 4096 tokens, by the weight alone."""
    sizes = (1, 3, 64, 1000, 4096, 14336, 128256)
    for n, k, dtype in itertools.product(sizes, sizes, ("bfloat16", "float16", "float32")):
        chunk = configs.token_chunk(n, k, dtype)
        assert 16 <= chunk <= 4096
        assert chunk & (chunk - 1) == 0
        assert chunk % configs.BIAS_CHUNK == 0


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_totals_are_the_partials_in_order(n, k, dtype):
    """total = 0, then total += partial, ascending: an fp32 add for each chunk of C tokens, the last one short."""
    chunk = _chunk(n, k, dtype)
    x, weight, bias, grad = _training(n, k, 3 * chunk + 37, dtype)
    whole = _accumulate(x, weight, bias, grad)
    totals = [torch.zeros(n, k), torch.zeros(n)]
    for i, step in enumerate((chunk, configs.BIAS_CHUNK)):
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            totals[i] = totals[i] + _accumulate(x[part], weight, bias, grad[part])[i]
    _assert_same(whole, totals, "the sum of the chunks' own")
    fresh = _gradients(isogemm.linear, (x, weight, bias), grad)[1][1:]
    _assert_same(fresh, [total.to(dtype) for total in whole], "without main_grad: rounded once")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_micro_batches_have_the_bits_of_one_pass(n, k, dtype):
    chunk = _chunk(n, k, dtype)
    x, weight, bias, grad = _training(n, k, 3 * chunk + 37, dtype)
    before = _normal(n, k, seed=7), _normal(n, seed=8)
    for main_grads in (None, before):
        whole = _accumulate(x, weight, bias, grad, main_grads=main_grads)
        for cuts in ([1], [2], [1, 2], [1, 3], [1, 2, 3]):
            parts = _accumulate(x, weight, bias, grad, [cut * chunk for cut in cuts], main_grads)
            _assert_same(parts, whole, f"cut at {cuts} chunks")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("padding", [1, 100, 4096])
def test_trailing_zero_rows_change_nothing(padding, dtype):
    n, k = 8, 16
    chunk = _chunk(n, k, dtype)
    for tokens in (5, chunk, chunk + 37):
        x, weight, bias, grad = _training(n, k, tokens, dtype)
        whole = _accumulate(x, weight, bias, grad)
        zeros = torch.zeros(padding, n, dtype=dtype)
        for tail in (torch.zeros(padding, k, dtype=dtype), _normal(padding, k, seed=5, dtype=dtype)):
            padded = _accumulate(torch.cat([x, tail]), weight, bias, torch.cat([grad, zeros]))
            _assert_same(padded, whole, f"{padding} more tokens after {tokens}")
        fresh = _gradients(isogemm.linear, (x, weight, bias), grad)[1][1:]
        longer = torch.cat([x, torch.zeros(padding, k, dtype=dtype)])
        again = _gradients(isogemm.linear, (longer, weight, bias), torch.cat([grad, zeros]))[1][1:]
        _assert_same(again, fresh, f"{padding} more tokens after {tokens}, without main_grad")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_gradients_repeat(dtype):
    arguments = _training(33, 65, 5000, dtype)
    first = _accumulate(*arguments)
    for _ in range(3):
        _assert_same(_accumulate(*arguments), first, "run again")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_every_token_counts_once(dtype):
    """Whole numbers: any order is exact, so the sum shows what was read."""
    n, k = 3, 5
    for tokens in (1, 15, 16, 17, 1023, 1025, 4095, 4097, 9000):
        x = torch.arange(tokens * k).remainder(5).view(tokens, k).to(dtype)
        grad = torch.arange(tokens * n).remainder(3).sub(1).view(tokens, n).to(dtype)
        dw, db = _accumulate(x, torch.zeros(n, k, dtype=dtype), torch.zeros(n, dtype=dtype), grad)
        assert torch.equal(dw, (grad.double().T @ x.double()).float())
        assert torch.equal(db, grad.double().sum(0).float())


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_batch_dimensions_are_tokens(dtype):
    x, weight, bias, grad = _training(8, 16, 6 * 50, dtype)
    flat = _accumulate(x, weight, bias, grad)
    for shape in ((6, 50), (2, 3, 50), (1, 300)):
        batched = _accumulate_whole(x.view(*shape, 16), weight, bias, grad.view(*shape, 8))
        _assert_same(batched, flat, f"tokens as {shape}")


def _accumulate_whole(x, weight, bias, grad):
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    weight.main_grad, bias.main_grad = torch.zeros(weight.shape), torch.zeros(bias.shape)
    isogemm.linear(x, weight, bias).backward(grad)
    return weight.main_grad, bias.main_grad


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("tokens", [64, 9000])
def test_main_grad_no_worse_than_torch(tokens, dtype):
    x, weight, bias, grad = _training(17, 33, tokens, dtype)
    dw, db = _accumulate(x, weight, bias, grad)
    exact, size = grad.double().T @ x.double(), grad.double().abs().T @ x.double().abs()
    factor = 2 if dtype == torch.float32 else 4
    assert_no_worse_than_torch(dw, grad.float().T @ x.float(), exact, scale=size, factor=factor)
    sums, sizes = grad.double().sum(0), grad.double().abs().sum(0)
    # A chunk of db is one sum of up to 4096 terms; torch sums in a tree.
    assert bool(((db.double() - sums).abs() <= 4096 * 2**-24 * sizes).all())


def _parameters(dtype=torch.bfloat16, main_dtype=torch.float32):
    weight = torch.nn.Parameter(_normal(5, 9, seed=1, dtype=dtype))
    bias = torch.nn.Parameter(_normal(5, seed=2, dtype=dtype))
    weight.main_grad, bias.main_grad = torch.zeros(5, 9, dtype=main_dtype), torch.zeros(5, dtype=main_dtype)
    return weight, bias


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_main_grad_takes_the_gradient(dtype):
    weight, bias = _parameters(dtype)
    places = weight.main_grad, bias.main_grad
    x = _normal(2, 7, 9, dtype=dtype).requires_grad_()
    grad = _normal(2, 7, 5, seed=3, dtype=dtype)
    isogemm.linear(x, weight, bias).backward(grad)
    _, (dx, dw, db) = _gradients(isogemm.linear, (x, weight, bias), grad)
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
        x, grad = _normal(7, 9, seed=seed, dtype=dtype), _normal(7, 5, seed=seed + 4, dtype=dtype)
        isogemm.linear(x, weight, bias).backward(grad)
        parts.append(_accumulate(x, weight, bias, grad))
    assert_bitwise_equal(weight.main_grad, parts[0][0] + parts[1][0])
    assert_bitwise_equal(bias.main_grad, parts[0][1] + parts[1][1])


def test_main_grad_of_one_of_the_two():
    for without in ("weight", "bias"):
        named = dict(zip(("weight", "bias"), _parameters(), strict=True))
        del named[without].main_grad
        isogemm.linear(_normal(7, 9, dtype=torch.bfloat16), **named).sum().backward()
        for name, parameter in named.items():
            assert (parameter.grad is not None) == (name == without)
            assert getattr(parameter, "grad_added_to_main_grad", False) == (name != without)


def test_main_grad_that_is_none_counts_as_absent():
    weight, bias = _parameters()
    weight.main_grad = None
    isogemm.linear(_normal(7, 9, dtype=torch.bfloat16), weight, bias).sum().backward()
    assert weight.grad is not None


def test_a_frozen_weight_keeps_its_main_grad():
    weight, bias = _parameters()
    weight.requires_grad_(False)
    x = _normal(7, 9, dtype=torch.bfloat16).requires_grad_()
    isogemm.linear(x, weight, bias).sum().backward()
    assert x.grad is not None
    assert torch.count_nonzero(weight.main_grad) == 0
    assert torch.count_nonzero(bias.main_grad) == 5
    assert not getattr(weight, "grad_added_to_main_grad", False)


def test_main_grad_through_mm_and_matmul_is_left_alone():
    """Only linear has a weight."""
    weight, _ = _parameters()
    x = _normal(7, 9, dtype=torch.bfloat16)
    for function in (isogemm.mm, isogemm.matmul):
        weight.grad = None
        function(x, weight.T).sum().backward()
        assert weight.grad is not None
        assert torch.count_nonzero(weight.main_grad) == 0


def test_a_weight_used_twice():
    weight, bias = _parameters(torch.float32)
    x, y = _normal(7, 9), _normal(3, 9, seed=4)
    (isogemm.linear(x, weight, bias).sum() + isogemm.linear(y, weight, bias).sum()).backward()
    exact = torch.cat([x, y]).double().sum(0).expand(5, 9)
    torch.testing.assert_close(weight.main_grad.double(), exact, rtol=1e-5, atol=1e-5)  # ten terms
    assert bias.main_grad.tolist() == [10.0] * 5


def test_main_grad_of_any_stride():
    weight, bias = _parameters(torch.float32)
    isogemm.linear(_normal(7, 9), weight, bias).square().sum().backward()
    other, _ = _parameters(torch.float32)
    other.main_grad = torch.zeros(9, 5).T
    isogemm.linear(_normal(7, 9), other, bias).square().sum().backward()
    assert_bitwise_equal(other.main_grad, weight.main_grad)


@pytest.mark.parametrize("shape", [(0, 9), (0, 0, 9)])
def test_no_tokens_add_nothing_to_main_grad(shape):
    weight, bias = _parameters()
    weight.main_grad, bias.main_grad = _normal(5, 9, seed=7), _normal(5, seed=8)
    before = weight.main_grad.clone(), bias.main_grad.clone()
    isogemm.linear(torch.zeros(shape, dtype=torch.bfloat16), weight, bias).sum().backward()
    _assert_same((weight.main_grad, bias.main_grad), before, "no tokens")
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
        isogemm.linear(_normal(7, 9, dtype=torch.bfloat16), **named).sum().backward()
    for key, parameter in named.items():
        if key != name:
            assert_bitwise_equal(parameter.main_grad, before[key])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_main_grad_under_autocast(dtype):
    """The bits of the cast product, in the float32 weight's own main_grad."""
    weight, bias = _parameters(torch.float32)
    x, grad = _normal(7, 9), _normal(7, 5, seed=3, dtype=dtype)
    for passes in (1, 2):
        with torch.autocast("cpu", dtype):
            result = isogemm.linear(x, weight, bias)
        assert result.dtype == dtype
        result.backward(grad)
        assert weight.grad is None
        assert bias.grad is None
        dw, db = _accumulate(x.to(dtype), weight.to(dtype), bias.to(dtype), grad)
        assert_bitwise_equal(weight.main_grad, passes * dw)
        assert_bitwise_equal(bias.main_grad, passes * db)
    assert weight.grad_added_to_main_grad
    assert bias.grad_added_to_main_grad


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_main_grad_under_checkpointing(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    expected = _parameters()
    x = _normal(7, 9, dtype=torch.bfloat16).requires_grad_()
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


@pytest.mark.parametrize(
    ("grad", "x", "message"),
    [
        (torch.ones(8, 4), torch.ones(9, 6), "same tokens"),
        (torch.ones(8, 4), torch.ones(8, 6, dtype=torch.bfloat16), "same dtype"),
    ],
)
def test_token_sums_are_validated(grad, x, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.isogemm.weight_grad(grad, x)
    with pytest.raises(ValueError, match=message):
        torch.ops.isogemm.add_weight_grad(torch.zeros(4, 6), grad, x, torch.zeros(4, 6))


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
