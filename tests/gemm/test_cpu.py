"""The CPU backend of the invariant GEMM: bits of rows, the chunked order of gradients, accuracy, any input."""

import functools
import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nonfinite import assert_same_nonfinite
from strategies import float_dtypes, seeds, sizes
from tensor_cases import FLOAT_DTYPES
from torch.utils._python_dispatch import TorchDispatchMode

import isogemm
from isogemm.gemm import cpu
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import DATA_KINDS, LAYOUTS, make_data, make_operands, with_layout
from isogemm.verify.poison import poisoned_allocations

# Both sides of every boundary: 16 rows or columns, 64 rows, 384 of K, 512 columns.
WEIGHTS = [(1, 1), (3, 17), (17, 3), (15, 385), (63, 65), (127, 384), (1000, 127), (513, 1000)]
HEIGHTS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127)


@pytest.fixture(params=["any height", "one height"])
def height(request, monkeypatch):
    """As the library is, and as it would be if a row's bits followed the height of the call."""
    if request.param == "one height":
        monkeypatch.setattr(cpu, "_is_any_height", lambda threads: False)


@pytest.fixture(autouse=True)
def threads(request):
    """One, unless the test asks for others: the tests run beside each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)


on_one_and_two_threads = pytest.mark.parametrize("threads", [1, 2], ids=["1 thread", "2 threads"], indirect=True)


def _linear(x, weight, bias=None, out_dtype=None):
    return cpu.product(x, weight.mT, bias, out_dtype or x.dtype)


def _case(m, n, k, dtype=torch.float32, kind="normal", seed=0):
    x, b = make_operands(kind, (m, k), (k, n), seed=seed, dtype=dtype)
    return x, b.mT.contiguous(), make_data("normal", (n,), seed=seed + 1, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
@on_one_and_two_threads
@pytest.mark.usefixtures("height")
def test_rows_alone_and_in_any_batch(n, k, dtype):
    """The needle: rows at both ends and in the middle, in batches of every kind of height."""
    x, weight, bias = _case(200, n, k, dtype)
    whole = _linear(x, weight, bias)
    for m in HEIGHTS:
        for start in (0, 200 - m):
            rows = slice(start, start + m)
            assert_bitwise_equal(_linear(x[rows], weight, bias), whole[rows], f"rows {start} to {start + m} of 200")


@pytest.mark.parametrize("kind", DATA_KINDS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_rows_in_any_order(dtype, kind):
    x, weight, bias = _case(150, 100, 1000, dtype, kind)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    for out_dtype in {dtype, torch.float32}:
        expected = _linear(x, weight, bias, out_dtype)
        assert_bitwise_equal(_linear(x[order], weight, bias, out_dtype), expected[order])


def test_rows_past_the_tallest_call():
    x, weight, bias = _case(cpu._MOST + 5, 17, 400)
    whole = _linear(x, weight, bias)
    assert_bitwise_equal(torch.cat([_linear(part, weight, bias) for part in x.split(100)]), whole)


def test_zeros_keep_their_sign():
    """A product of signed zeros is where kernels that start by a multiplication differ from those that add."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30])
    x, weight = (values[torch.randint(6, shape, generator=generator)] for shape in ((130, 40), (50, 40)))
    x[:, 3:] *= 0
    whole = _linear(x, weight)
    for m in HEIGHTS:
        assert_bitwise_equal(_linear(x[-m:], weight), whole[-m:], f"{m} rows")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 8, 100])
@pytest.mark.usefixtures("height")
def test_neighbours_do_not_matter(m, dtype):
    """Random, huge, Inf and NaN rows after the request's own, as padding leaves them, and before."""
    x, weight, bias = _case(m, 65, 500, dtype)
    alone = _linear(x, weight, bias)
    random = make_data("wide", (28, 500), seed=9, dtype=dtype)
    for other in (random, random * torch.inf, torch.full_like(random, torch.nan), torch.zeros_like(random)):
        assert_bitwise_equal(_linear(torch.cat([x, other]), weight, bias)[:m], alone)
        assert_bitwise_equal(_linear(torch.cat([other, x]), weight, bias)[28:], alone)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [1, 20, 100])
def test_memory_does_not_matter(m, layout, dtype):
    """Strides and alignment of x and bias, and alignment of the weight; its strides too where the height is free."""
    x, weight, bias = _case(m, 67, 401, dtype)
    expected = _linear(x, weight, bias)
    assert_bitwise_equal(_linear(with_layout(x, layout), weight, bias), expected, "x")
    if cpu._is_any_height(1) or layout in ("sliced", "misaligned"):
        assert_bitwise_equal(_linear(x, with_layout(weight, layout), bias), expected, "weight")
    if layout != "transposed":
        assert_bitwise_equal(_linear(x, weight, with_layout(bias, layout)), expected, "bias")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_batch_dimensions(dtype):
    """Broadcast as in torch.matmul; a row has the bits it has in a plain product."""
    a, b = make_operands("normal", (2, 3, 5, 20), (3, 20, 33), seed=0, dtype=dtype)
    result = cpu.product(a, b, None, dtype)
    assert result.shape == (2, 3, 5, 33)
    for i in range(2):
        for j in range(3):
            assert_bitwise_equal(result[i, j], cpu.product(a[i, j], b[j], None, dtype))
    for shared in (b[0], b[:1], b[:1, None][0]):
        expected = torch.stack([_linear(rows, b[0].mT) for rows in a.flatten(0, 1)]).view(2, 3, 5, 33)
        assert_bitwise_equal(cpu.product(a, shared, None, dtype), expected)
    assert_bitwise_equal(cpu.product(a[0, 0], b, None, dtype)[1], cpu.product(a[0, 0], b[1], None, dtype))
    assert_bitwise_equal(cpu.product(a[0, 0], b[:1, None], None, dtype)[0, 0], cpu.product(a[0, 0], b[0], None, dtype))


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((0, 4), (4, 5)),
        ((3, 4), (4, 0)),
        ((3, 0), (0, 5)),
        ((100, 0), (0, 20)),
        ((0, 3, 4), (4, 5)),
        ((0, 3, 4), (1, 4, 5)),
        ((2, 3, 0), (2, 0, 5)),
        ((0, 0), (0, 0)),
    ],
)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_empty_sizes(dtype, a_shape, b_shape):
    a, b = torch.ones(a_shape, dtype=dtype), torch.ones(b_shape, dtype=dtype)
    bias = torch.full(b_shape[-1:], 2.0, dtype=dtype)
    with poisoned_allocations():
        plain, biased = (cpu.product(a, b, addend, dtype) for addend in (None, bias))
    assert_bitwise_equal(plain, torch.matmul(a, b))
    assert_bitwise_equal(biased, torch.matmul(a, b) + bias)


@pytest.mark.parametrize("kind", DATA_KINDS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 17), (65, 63), (127, 385), (100, 1000), (16, 4097)])
def test_accuracy(n, k, dtype, kind):
    x, weight, bias = _case(100, n, k, dtype, kind)
    scale = x.double().abs() @ weight.double().abs().mT
    exact = x.double() @ weight.double().mT
    assert_no_worse_than_torch(_linear(x, weight), x @ weight.mT, exact, scale=scale)
    with_bias = torch.nn.functional.linear(x, weight, bias)
    assert_no_worse_than_torch(_linear(x, weight, bias), with_bias, exact + bias, scale=scale + bias.abs())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 20, 100])
def test_one_rounding(m, dtype):
    """The bias is added before it."""
    x, weight, bias = _case(m, 600, 400, dtype)
    assert_bitwise_equal(_linear(x, weight, bias), _linear(x, weight, bias, torch.float32).to(dtype))
    assert_bitwise_equal(_linear(x, weight, bias), (_linear(x, weight, None, torch.float32) + bias).to(dtype))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 100])
def test_nonfinite(m, dtype):
    x, weight, _ = _case(m, 40, 400, dtype)
    x[0, 5], weight[3, 7], weight[4, 390] = torch.inf, torch.nan, -torch.inf
    assert_same_nonfinite(_linear(x, weight), x.double() @ weight.double().mT)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_inputs_are_left_alone(dtype):
    x, weight, bias = (y.requires_grad_() for y in _case(1, 64, 64, dtype))
    before = [y.detach().clone() for y in (x, weight, bias)]
    result = _linear(x, weight, bias)
    assert not result.requires_grad
    assert _linear(x[:, :0], weight[:, :0]).data_ptr() != x.data_ptr()
    for now, then in zip((x, weight, bias), before, strict=True):
        assert_bitwise_equal(now, then)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_threads_do_not_matter(dtype):
    """Not promised, but so where a call of any height has the same bits."""
    if not all(map(cpu._is_any_height, (1, 2))):
        pytest.skip("this library's bits follow the height of the call")
    x, weight, bias = _case(100, 300, 1000, dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append((_linear(x, weight, bias), cpu.weight_grad(x, x, None, torch.float32, 64)))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert_bitwise_equal(one, two)


@settings(max_examples=40, deadline=None)
@given(n=sizes(130), k=sizes(1000), m=sizes(130), dtype=float_dtypes(), seed=seeds(), data=st.data())
def test_any_row_of_any_product(n, k, m, dtype, seed, data):
    x, weight, bias = _case(m, n, k, dtype, data.draw(st.sampled_from(DATA_KINDS)), seed)
    row = data.draw(st.integers(0, m - 1))
    stop = data.draw(st.integers(row + 1, m))
    whole = _linear(x, weight, bias)
    assert_bitwise_equal(_linear(x[row : row + 1], weight, bias), whole[row : row + 1])
    assert_bitwise_equal(_linear(x[row:stop], weight, bias), whole[row:stop])


def _token_case(tokens, n, k, dtype, kind="normal"):
    grad, x = make_operands(kind, (n, tokens), (tokens, k), seed=3, dtype=dtype)
    return grad.mT.contiguous(), x


GRADIENTS = {
    "weight": lambda grad, x, total, dtype, chunk: cpu.weight_grad(grad, x, total, dtype, chunk),
    "bias": lambda grad, x, total, dtype, chunk: cpu.bias_grad(grad, total, dtype, chunk),
}
SHAPE = {"weight": lambda n, k: (n, k), "bias": lambda n, k: (n,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 40), (65, 15)])
@pytest.mark.parametrize("chunk", [64, 512])
@pytest.mark.parametrize("which", GRADIENTS)
@on_one_and_two_threads
@pytest.mark.usefixtures("height")
def test_micro_batches(which, chunk, n, k, dtype):
    """Cut at any multiple of the chunk; trailing zero rows; a total that starts at zero, or not."""
    grad, x = _token_case(1100, n, k, dtype)
    gradient = GRADIENTS[which]
    start = make_data("normal", SHAPE[which](n, k), seed=5)
    whole = gradient(grad, x, start.clone(), dtype, chunk)
    for cuts in ([chunk], [64 * chunk], [chunk, 2 * chunk]):
        total = start.clone()
        for grads, rows in zip(grad.tensor_split(cuts), x.tensor_split(cuts), strict=True):
            assert gradient(grads, rows, total, dtype, chunk) is total
        assert_bitwise_equal(total, whole, f"cut at {cuts}")
    zeros = torch.zeros_like(start)
    assert_bitwise_equal(gradient(grad, x, None, dtype, chunk), gradient(grad, x, zeros, dtype, chunk).to(dtype))
    for tokens in (1, 2, 15, 17, 1025):
        expected = gradient(grad[:tokens], x[:tokens], None, torch.float32, chunk)
        for padding in (1, 14, 16, 300):
            longer = (torch.cat([y[:tokens], y.new_zeros(padding, y.shape[1])]) for y in (grad, x))
            assert_bitwise_equal(gradient(*longer, None, torch.float32, chunk), expected, f"{tokens} + {padding}")


@pytest.mark.parametrize("which", GRADIENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_from_any_memory(layout, which):
    operands = _token_case(300, 33, 20, torch.bfloat16)
    awkward = (with_layout(y, layout) for y in operands)
    with poisoned_allocations():
        result = GRADIENTS[which](*awkward, None, torch.float32, 128)
    assert_bitwise_equal(result, GRADIENTS[which](*operands, None, torch.float32, 128))


@pytest.mark.parametrize("kind", DATA_KINDS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 17, 63, 65, 127, 1000, 3000])
def test_gradients_accuracy(tokens, dtype, kind):
    grad, x = _token_case(tokens, 40, 33, dtype, kind)
    exact, scale = grad.double().mT @ x.double(), grad.double().mT.abs() @ x.double().abs()
    for out_dtype in {dtype, torch.float32}:
        theirs = (grad.mT @ x) if out_dtype == dtype else grad.float().mT @ x.float()
        assert_no_worse_than_torch(cpu.weight_grad(grad, x, None, out_dtype, 1024), theirs, exact, scale=scale)
    grads = grad.double()
    theirs = grad.sum(0, dtype=torch.float32).to(dtype)
    ours = cpu.bias_grad(grad, None, dtype, 1024)
    assert_no_worse_than_torch(ours, theirs, grads.sum(0), scale=grads.abs().sum(0))


@pytest.mark.parametrize(("tokens", "n", "k"), [(0, 3, 4), (5, 0, 4), (5, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_empty_gradients(dtype, tokens, n, k):
    grad, x = torch.ones(tokens, n, dtype=dtype), torch.ones(tokens, k, dtype=dtype)
    with poisoned_allocations():
        assert_bitwise_equal(cpu.weight_grad(grad, x, None, dtype, 64), torch.zeros(n, k, dtype=dtype))
        assert_bitwise_equal(cpu.bias_grad(grad, None, dtype, 64), torch.full((n,), float(tokens), dtype=dtype))
        total = torch.full((n, k), 3.0)
        assert_bitwise_equal(cpu.weight_grad(grad, x, total, dtype, 64), torch.full((n, k), 3.0))


# Calls [m, k] @ [k, n] of the probe: the weight left and few rows of x, x left and more rows, weights of all widths.
PROBED = [(256, 16), (256, 17), (256, 33), (64, 256), (65, 256), (100, 256), (200, 256)]
PROBED += [(200, 16), (200, 17), (200, 33), (200, 65), (200, 600)]


@pytest.mark.parametrize("size", PROBED, ids=str)
def test_the_probe_sees_a_library_whose_bits_follow_the_size(size, monkeypatch):
    """One that cuts K in calls of this size alone."""
    if not cpu._is_any_height(1):
        pytest.skip("this machine's own library is one")
    mm = torch.mm

    def cut(x, y):
        if (len(x), y.shape[1]) == size:
            return mm(x[:, :100], y[:100]) + mm(x[:, 100:], y[100:])
        return mm(x, y)

    monkeypatch.setattr(torch, "mm", cut)
    assert not cpu._is_any_height.__wrapped__(1)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("bad", [(32,), cpu._FIXED])
@pytest.mark.usefixtures("height")
def test_the_probe_sees_a_library_whose_bits_follow_the_place(bad, beta, monkeypatch):
    """One whose last rows are another sum, in calls of these heights: another one serves, or each row alone."""
    monkeypatch.setattr(cpu, "_is_any_height", lambda threads: False)
    addmm = torch.Tensor.addmm_

    def misplaced(sums, x, b, **options):
        result = addmm(sums, x, b, **options)
        if len(x) in bad and options.get("beta", 1.0) == beta:
            result[-3:] += 1e-3
        return result

    cpu._rows_and_height.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "addmm_", misplaced)
            found = cpu._rows_and_height(torch.get_num_threads(), 400, 17)
            assert found == ((1, 16) if bad == cpu._FIXED else (48, 48))
            x, weight, bias = _case(70, 17, 400)
            whole = _linear(x, weight, bias)
            for rows in (slice(0, 1), slice(69, 70), slice(30, 50)):
                assert_bitwise_equal(_linear(x[rows], weight, bias), whole[rows])
    finally:
        cpu._rows_and_height.cache_clear()
    assert_no_worse_than_torch(
        whole,
        torch.nn.functional.linear(x, weight, bias),
        torch.nn.functional.linear(x.double(), weight.double(), bias.double()),
    )


class _Calls(TorchDispatchMode):
    """The shapes (m, k, n) of the library's products."""

    def __init__(self):
        super().__init__()
        cpu._is_any_height(torch.get_num_threads())  # so that its own calls are not among them
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = [each for each in args if isinstance(each, torch.Tensor)][-2:]
            self.shapes.append((*left.shape, right.shape[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("height")
def test_calls_are_of_sizes_that_were_measured(dtype):
    """At most 384 of K and at least 16 rows and columns, in which the library was found to sum in one chain."""
    for m, n, k in itertools.product((1, 15, 64, 1100), (1, 15, 65), (1, 17, 384, 385, 1000)):
        x, weight, bias = _case(m, n, k, dtype)
        with _Calls() as calls:
            _linear(x, weight, bias)
        assert calls.shapes
        for rows, walked, columns in calls.shapes:
            assert min(rows, columns) >= 16, (m, n, k)
            assert walked <= 384, (m, n, k)


@pytest.mark.parametrize("chunk", [32, 64, 1024])
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 1, 1), (17, 40, 3), (63, 3, 40), (65, 17, 33), (1100, 20, 5)])
@pytest.mark.usefixtures("height")
def test_weight_gradients_are_padded(tokens, n, k, chunk):
    """To 16 outputs each way, and tokens in chains of a multiple of 16 up to 64: longer ones were not as exact."""
    grad, x = _token_case(tokens, n, k, torch.float32)
    with _Calls() as calls:
        cpu.weight_grad(grad, x, None, torch.float32, chunk)
    step = min(64, chunk)
    assert len(calls.shapes) == sum(-(-min(chunk, tokens - at) // step) for at in range(0, tokens, chunk))
    for rows, walked, columns in calls.shapes:
        assert (rows, columns) == (max(n, 16), max(k, 16))
        assert walked % 16 == 0
        assert walked <= step


THREADS = [1, 2, 3, 4, 8, 16]


@pytest.mark.parametrize("threads", THREADS, indirect=True)
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "silu"])
def test_rows_with_an_activation_on_any_number_of_threads(activation):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 16, generator=generator) for rows in (100, 200))
    call = functools.partial(isogemm.linear, weight=weight, activation=activation)
    leaf, grad = x.clone().requires_grad_(), torch.randn(100, 200, generator=generator)
    whole = call(leaf)
    (dx,) = torch.autograd.grad(whole, leaf, grad)
    for row in (0, 12, 33, 50, 62, 66, 75, 93, 99):
        one = slice(row, row + 1)
        alone = call(part := x[one].clone().requires_grad_())
        assert_bitwise_equal(alone.detach(), whole[one].detach(), f"row {row}")
        assert_bitwise_equal(torch.autograd.grad(alone, part, grad[one])[0], dx[one], f"dx of row {row}")


@pytest.mark.parametrize("threads", THREADS, indirect=True)
def test_rows_and_gradients_on_any_number_of_threads():
    x, weight, bias = _case(200, 513, 400)
    whole = _linear(x, weight, bias)
    for m in (1, 16, 65, 127):
        assert_bitwise_equal(_linear(x[-m:], weight, bias), whole[-m:], f"{m} rows")
    grad, tokens = _token_case(300, 300, 40, torch.float32)
    for which, gradient in GRADIENTS.items():
        total = torch.zeros(SHAPE[which](300, 40))
        for part in (slice(0, 128), slice(128, None)):
            gradient(grad[part], tokens[part], total, torch.float32, 128)
        assert_bitwise_equal(total, gradient(grad, tokens, None, torch.float32, 128), which)


# In a process of its own: torch chooses its vector unit when it starts, and MKL its own.
ON_OTHER_UNITS = """
import torch, isogemm

generator = torch.Generator().manual_seed(0)
normal = lambda *shape: torch.randn(shape, generator=generator)
cases = [(normal(100, 16), normal(200, 16)), (normal(70, 384), normal(17, 384)), (normal(70, 400), normal(600, 400))]
for threads in (1, 2, 3, 4, 8, 16):
    torch.set_num_threads(threads)
    for x, weight in cases:
        x, weight, grad = x.requires_grad_(), weight.requires_grad_(), torch.ones(len(x), len(weight))
        for activation in (None, "gelu_tanh", "gelu", "silu", "sigmoid", "quick_gelu"):
            call = lambda rows: isogemm.linear(rows, weight, activation=activation)
            whole = call(x)
            dx, dw = torch.autograd.grad(whole, (x, weight), grad)
            every = torch.cat([call(row[None]) for row in x.detach()])
            alone = [call(row[None]) for row in x[::7]]
            of_rows = [torch.autograd.grad(each, x, grad[:1])[0][7 * at] for at, each in enumerate(alone)]
            turned = x.detach().t().contiguous().t()
            (turned_dw,) = torch.autograd.grad(call(turned), weight, grad)
            same = torch.equal(every, whole), torch.equal(torch.stack(of_rows), dx[::7])
            print(all((*same, torch.equal(turned_dw, dw))))
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.parametrize("mkl", ["AVX2", "COMPATIBLE"])
def test_rows_on_other_vector_units(mkl):
    """MKL_CBWR binds MKL on any x86; MKL_ENABLE_INSTRUCTIONS on Intel's alone."""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": mkl, "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    command = [sys.executable, "-c", ON_OTHER_UNITS]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *same, capability = found.stdout.split()
    assert same == ["True"] * 108
    assert capability in ("AVX2", "DEFAULT")


@pytest.mark.parametrize("threads", [1, 3, 4, 8], indirect=True)
@pytest.mark.parametrize("turned", ["grad", "x"])
def test_weight_gradients_of_other_strides(turned):
    """Where a call has one height, it has one layout too."""
    given = {"grad": make_data("normal", (600, 385), seed=0), "x": make_data("normal", (600, 65), seed=1)}
    expected = cpu.weight_grad(*given.values(), None, torch.float32, 1024)
    given[turned] = given[turned].t().contiguous().t()
    assert_bitwise_equal(cpu.weight_grad(*given.values(), None, torch.float32, 1024), expected)


@pytest.mark.parametrize("threads", [1, 8], indirect=True)
def test_the_height_is_found_under_autocast_as_outside():
    """It is found once, wherever the first call stands."""
    with torch.autocast("cpu", torch.bfloat16):
        inside = cpu._is_any_height.__wrapped__(torch.get_num_threads())
    assert inside == cpu._is_any_height.__wrapped__(torch.get_num_threads())


def test_a_precision_that_could_not_be_set_leaves_no_trace(monkeypatch):
    ieee, setting = cpu._Ieee(), torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    try:
        setting.fp32_precision = "bf16"
        with monkeypatch.context() as patched:
            patched.setattr(cpu, "overridden", lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ieee.__enter__()
        with ieee:
            assert setting.fp32_precision == "ieee"
        assert setting.fp32_precision == "bf16"
    finally:
        setting.fp32_precision = before


@pytest.mark.parametrize(("n", "k"), [(1, 1024), (3, 40), (40, 3), (1, 8), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_gradient_is_no_part_of_more_memory(n, k, dtype):
    """Few rows or columns are padded for the sum."""
    weight = torch.randn(n, k, dtype=dtype, requires_grad=True)
    (found,) = torch.autograd.grad(isogemm.linear(torch.randn(5, k, dtype=dtype), weight).sum(), weight)
    assert found.untyped_storage().nbytes() == n * k * dtype.itemsize
    assert found.stride() == (k, 1)
