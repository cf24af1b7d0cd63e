"""Gradients by the GEMM kernels: finite differences, fp64, the chunked order of dW and db, main_grad."""

import functools
import itertools

import pytest
import torch
from torch.nn import functional as F

import isogemm
from isogemm.gemm import configs, op, selection
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import DATA_KINDS, make_data, with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"
NUMBERS = {"bf16": (torch.bfloat16, None), "ieee": (torch.float32, "ieee"), "tf32": (torch.float32, "tf32")}

# The product is linear in each operand: a step of 1/2 leaves no truncation error, only rounding, below 1e-5 here.
FP32 = {"eps": 0.5, "atol": 1e-4, "rtol": 1e-4}


def _normal(*shape, seed=0, dtype=torch.bfloat16, kind="normal"):
    return make_data(kind, shape, seed=seed, dtype=dtype, device=DEVICE)


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # gradcheck would rather have f64
def test_finite_differences_of_the_kernels():
    inputs = [_normal(*shape, dtype=torch.float32).requires_grad_() for shape in ((3, 7), (5, 7), (5,))]
    with isogemm.dispatch_log() as log:
        assert torch.autograd.gradcheck(isogemm.linear, inputs, **FP32)
        assert torch.autograd.gradgradcheck(isogemm.linear, inputs, **FP32)
    assert {entry.path for entry in log} == {"gemm"}


def test_gradcheck_in_float64():
    inputs = [_normal(*shape, dtype=torch.float64).requires_grad_() for shape in ((3, 7), (5, 7), (5,))]
    assert torch.autograd.gradcheck(isogemm.linear, inputs)
    assert torch.autograd.gradgradcheck(isogemm.linear, inputs)
    a, b = (_normal(*shape, dtype=torch.float64).requires_grad_() for shape in ((2, 1, 3, 4), (3, 4, 2)))
    assert torch.autograd.gradcheck(isogemm.matmul, (a, b))


def _gradients(function, inputs, grad, dtype=None):
    leaves = tuple(x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs)
    result = function(*leaves)
    return torch.autograd.grad(result, leaves, grad.to(result.dtype))


def _assert_no_worse(ours, theirs, inputs, grad):
    with poisoned_allocations():
        actual = _gradients(ours, inputs, grad)
    expected = _gradients(theirs, inputs, grad)
    exact = _gradients(theirs, inputs, grad, torch.float64)
    sizes = _gradients(theirs, [x.abs() for x in inputs], grad.abs(), torch.float64)
    for i, (got, other, right, size) in enumerate(zip(actual, expected, exact, sizes, strict=True)):
        assert_no_worse_than_torch(got, other, right, scale=size, what=f"gradient of input {i}")


@pytest.mark.parametrize(
    ("number", "sizes"), [*((number, (300, 1024, 768)) for number in NUMBERS), ("bf16", (17, 127, 65))], ids=str
)
def test_linear_no_worse_than_torch(number, sizes):
    m, k, n = sizes
    dtype, precision = NUMBERS[number]
    torch.backends.cuda.matmul.fp32_precision = precision or "ieee"  # put back after the test
    inputs = [_normal(m, k, dtype=dtype), _normal(n, k, seed=1, dtype=dtype), _normal(n, seed=2, dtype=dtype)]
    linear = functools.partial(isogemm.linear, precision=precision)
    _assert_no_worse(linear, F.linear, inputs, _normal(m, n, seed=3, dtype=dtype))


@pytest.mark.parametrize(("a_shape", "b_shape"), [((5, 1, 17, 64), (3, 64, 40)), ((17, 64), (5, 64, 40))], ids=str)
def test_broadcast_operands_no_worse_than_torch(a_shape, b_shape):
    inputs = [_normal(*a_shape), _normal(*b_shape, seed=1)]
    grad = _normal(*torch.matmul(*inputs).shape, seed=2)
    _assert_no_worse(isogemm.matmul, torch.matmul, inputs, grad)


def test_gradients_of_any_stride():
    inputs = [_normal(4, 16, 64).requires_grad_(), _normal(48, 64).requires_grad_(), _normal(48).requires_grad_()]
    plain = torch.ones(4, 16, 48, dtype=torch.bfloat16, device=DEVICE)
    expected = torch.autograd.grad(isogemm.linear(*inputs), inputs, plain)
    grads = {"expanded": plain[:1, :1, :1].expand_as(plain)}
    grads |= {name: with_layout(plain, name) for name in ("transposed", "misaligned")}
    for name, grad in grads.items():
        with poisoned_allocations():
            actual = torch.autograd.grad(isogemm.linear(*inputs), inputs, grad)
        for got, same in zip(actual, expected, strict=True):
            assert_bitwise_equal(got, same, name)


def test_backward_keeps_the_precision_of_the_forward():
    inputs = [_normal(64, 128, dtype=torch.float32).requires_grad_(), _normal(96, 128, dtype=torch.float32)]
    inputs[1].requires_grad_()
    grad = _normal(64, 96, dtype=torch.float32)
    expected = torch.autograd.grad(isogemm.linear(*inputs, precision="tf32"), inputs, grad)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    result = isogemm.linear(*inputs)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    for got, same in zip(torch.autograd.grad(result, inputs, grad), expected, strict=True):
        assert_bitwise_equal(got, same)


def _chunk(n, k, dtype):
    return configs.token_chunk(n, k, str(dtype).removeprefix("torch."))


def _training(n, k, tokens, dtype=torch.bfloat16, kind="normal"):
    x, grad = _normal(tokens, k, dtype=dtype, kind=kind), _normal(tokens, n, seed=3, dtype=dtype, kind=kind)
    return x, _normal(n, k, seed=1, dtype=dtype), _normal(n, seed=2, dtype=dtype), grad


def _accumulate(x, weight, bias, grad, cuts=(), precision=None, main_grads=None):
    """main_grad of weight and bias after a backward over each part of the tokens, cut at `cuts`."""
    weight, bias = weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    before = main_grads or (torch.zeros_like(weight, dtype=torch.float32), torch.zeros_like(bias, dtype=torch.float32))
    weight.main_grad, bias.main_grad = (tensor.detach().clone() for tensor in before)
    for start, stop in itertools.pairwise([0, *cuts, len(x)]):
        isogemm.linear(x[start:stop], weight, bias, precision=precision).backward(grad[start:stop])
    assert weight.grad is None
    assert bias.grad is None
    return weight.main_grad, bias.main_grad


def _assert_same(actual, expected, what):
    for name, got, same in zip(("dW", "db"), actual, expected, strict=True):
        assert_bitwise_equal(got, same, f"{name}, {what}")


TRAINED = [("bf16", 96, 160), ("bf16", 4096, 4096), ("bf16", 33, 65), ("tf32", 96, 160)]


@pytest.mark.parametrize(("number", "n", "k"), TRAINED)
def test_chunked_order(number, n, k):
    """Partials of C tokens, each one walk, added in ascending order by one fp32 add each; wherever they were cut."""
    dtype, precision = NUMBERS[number]
    chunk = _chunk(n, k, dtype)
    x, weight, bias, grad = _training(n, k, 2 * chunk + 37, dtype)
    with isogemm.dispatch_log() as log:
        whole = _accumulate(x, weight, bias, grad, precision=precision)
    assert {entry.path for entry in log} == {"gemm"}
    total = torch.zeros(n, k, device=DEVICE)
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        total = total + op.gemm(grad[part].T, x[part], out_dtype=torch.float32, precision=precision)
    assert_bitwise_equal(whole[0], total, "dW, the sum of the chunks' products")

    for cuts in ([1], [2], [1, 2]):
        parts = _accumulate(x, weight, bias, grad, [cut * chunk for cut in cuts], precision)
        _assert_same(parts, whole, f"micro-batches cut at {cuts} chunks")
    zeros = torch.zeros(100, n, dtype=dtype, device=DEVICE)
    padded = _accumulate(torch.cat([x, x[:100]]), weight, bias, torch.cat([grad, zeros]), precision=precision)
    _assert_same(padded, whole, "100 trailing rows whose gradient is zero")
    for _ in range(5):
        _assert_same(_accumulate(x, weight, bias, grad, precision=precision), whole, "again")

    linear = functools.partial(isogemm.linear, precision=precision)
    fresh = _gradients(linear, (x, weight, bias), grad)[1:]
    _assert_same(fresh, [tensor.to(dtype) for tensor in whole], "without main_grad: rounded once")


def test_accumulation_starts_from_what_is_there():
    n, k = 96, 160
    chunk = _chunk(n, k, torch.bfloat16)
    x, weight, bias, grad = _training(n, k, 2 * chunk)
    before = _normal(n, k, seed=7, dtype=torch.float32), _normal(n, seed=8, dtype=torch.float32)
    whole = _accumulate(x, weight, bias, grad, main_grads=before)
    parts = _accumulate(x, weight, bias, grad, [chunk], main_grads=before)
    _assert_same(parts, whole, "two micro-batches")
    total = before[0]
    for part in (slice(0, chunk), slice(chunk, None)):
        total = total + op.gemm(grad[part].T, x[part], out_dtype=torch.float32)
    assert_bitwise_equal(whole[0], total)


@pytest.mark.parametrize("kind", DATA_KINDS)
def test_every_configuration_of_a_weight_gradient(kind):
    """Chunks one after the other or side by side, into a total that is not zero."""
    n, k = 256, 384
    chunk = _chunk(n, k, torch.bfloat16)
    x, _, _, grad = _training(n, k, 2 * chunk + 100, kind=kind)
    before = _normal(n, k, seed=7, dtype=torch.float32)
    problem = op.problem_of(grad.T, x, chunk=chunk, total=before)
    expected = op.gemm(grad.T, x, chunk=chunk, total=before.clone(), config=configs.canonical(problem))
    for config in selection.candidates(problem):
        result = op.gemm(grad.T, x, chunk=chunk, total=before.clone(), config=config)
        assert_bitwise_equal(result, expected, str(config))


def test_tokens_of_two_levels():
    """A batch that is not one block of rows in memory: the bits of the same tokens in order."""
    x, weight, bias, grad = _training(48, 64, 6 * 50)
    flat = _accumulate(x, weight, bias, grad)
    x, grad = (tensor.view(6, 50, -1).transpose(0, 1).contiguous().transpose(0, 1) for tensor in (x, grad))
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    weight.main_grad, bias.main_grad = torch.zeros_like(flat[0]), torch.zeros_like(flat[1])
    isogemm.linear(x, weight, bias).backward(grad)
    _assert_same((weight.main_grad, bias.main_grad), flat, "tokens of two levels")


def test_every_token_counts_once():
    """Whole numbers: any order is exact, so the sum shows what was read."""
    n, k = 40, 24
    for tokens in (1, 15, 1023, 1025, 5000):
        x = torch.arange(tokens * k, device=DEVICE).remainder(5).view(tokens, k).bfloat16()
        grad = torch.arange(tokens * n, device=DEVICE).remainder(3).sub(1).view(tokens, n).bfloat16()
        dw, db = _accumulate(x, _normal(n, k), _normal(n), grad)
        assert torch.equal(dw, (grad.double().T @ x.double()).float())
        assert torch.equal(db, grad.double().sum(0).float())


@pytest.mark.parametrize("tokens", [2**16, 2**19])
def test_long_accumulation_no_worse_than_cublas(tokens):
    """main_grad over micro-batches of 8192 tokens, against cuBLAS accumulating the same with beta = 1."""
    n, k = 256, 256
    x, weight, bias, grad = _training(n, k, tokens)
    dw, _ = _accumulate(x, weight, bias, grad, range(8192, tokens, 8192))
    theirs = torch.zeros(n, k, device=DEVICE)
    for g, t in zip(grad.split(8192), x.split(8192), strict=True):
        theirs = torch.addmm(theirs, g.T, t, out_dtype=torch.float32)
    exact = torch.zeros(n, k, dtype=torch.float64, device=DEVICE)
    for g, t in zip(grad.split(2**16), x.split(2**16), strict=True):
        exact += g.double().T @ t.double()
    ours, other = ((result.double() - exact).square().mean().sqrt() for result in (dw, theirs))
    assert float(ours) <= 2 * float(other)


@pytest.mark.parametrize("main_grad", [True, False])
def test_workspace_is_bounded(main_grad):
    """No more than 64 MB beside the results."""
    x, weight, bias, grad = _training(4096, 4096, 4 * 4096)
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    if main_grad:
        weight.main_grad, bias.main_grad = (torch.zeros_like(p, dtype=torch.float32) for p in (weight, bias))

    def backward():
        isogemm.linear(x, weight, bias).backward(grad)

    backward()
    weight.grad = bias.grad = None
    result = isogemm.linear(x, weight, bias)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result.backward(grad)
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    results = 0 if main_grad else weight.nbytes + bias.nbytes
    assert taken <= results + configs.WORKSPACE + 4096  # and what autograd itself notes


def test_main_grad_under_autocast_and_of_frozen_weights():
    weight, bias = torch.nn.Parameter(_normal(48, 64, dtype=torch.float32)), _normal(48, dtype=torch.float32)
    weight.main_grad = torch.zeros_like(weight)
    x, grad = _normal(33, 64, dtype=torch.float32), _normal(33, 48)
    with torch.autocast(DEVICE, torch.bfloat16):
        result = isogemm.linear(x, weight, bias)
    result.backward(grad)
    expected, _ = _accumulate(x.bfloat16(), weight.bfloat16(), bias.bfloat16(), grad)
    assert_bitwise_equal(weight.main_grad, expected)
    assert weight.grad is None
    assert weight.grad_added_to_main_grad is True
    weight.requires_grad_(False)
    x.requires_grad_()
    isogemm.linear(x, weight, bias).sum().backward()
    assert_bitwise_equal(weight.main_grad, expected)


@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_main_grad_of_any_stride(layout):
    """A view into a trainer's one large buffer; what lies around it stays as it is."""
    x, weight, bias, grad = _training(48, 64, 300)
    expected = _accumulate(x, weight, bias, grad)
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    places = (
        with_layout(torch.zeros(48, 64, device=DEVICE), layout),
        with_layout(torch.zeros(48, device=DEVICE), "strided"),
    )
    weight.main_grad, bias.main_grad = places
    storages = [torch.empty(0, device=DEVICE).set_(place.untyped_storage()) for place in places]
    around = [int(storage.isnan().sum()) for storage in storages]
    isogemm.linear(x, weight, bias).backward(grad)
    _assert_same(places, expected, layout)
    assert [int(storage.isnan().sum()) for storage in storages] == around
