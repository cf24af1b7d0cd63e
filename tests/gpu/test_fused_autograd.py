"""Gradients of fused products by the kernels: fp64, the contract of dX, dW and db, masks, main_grad, memory."""

import functools
import itertools

import float16_range
import pytest
import torch
import triton
import triton.language as tl
from gradients import assert_gradients_no_worse, gradients_of
from torch.nn import functional as F

import isogemm
from isogemm.epilogues import random, register, spec
from isogemm.gemm import configs
from isogemm.gemm.api import mlp
from isogemm.gemm.fused import new_seed
from isogemm.verify.activations import ACTIVATION_FORMS as ACTIVATIONS
from isogemm.verify.activations import GATE_FORMS as GATED
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data, with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"
NUMBERS = {
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
}


def _normal(*shape, seed=0, dtype=torch.bfloat16):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=DEVICE)


def _tensors(shapes, dtype):
    """Tensors of about the size they have in a network: sums of K products of about 1."""
    made = {name: _normal(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}
    return {name: each / each.shape[-1] ** 0.5 if "weight" in name else each for name, each in made.items()}


def _plain(x, weight, *, bias=None, bias_dim=-1, activation=None, weight_up=None, bias_up=None, residual=None, c=None,
           beta=0.0, alpha=1.0, row_scale=None, col_scale=None):  # fmt: skip
    z = F.linear(x, weight) * alpha
    z = z if row_scale is None else z * row_scale[..., None]
    z = z if col_scale is None else z * col_scale
    z = z if c is None else z + beta * c
    z = z if bias is None else z + (bias if bias_dim == -1 else bias[..., None])
    if weight_up is not None:
        z = GATED[activation](z) * F.linear(x, weight_up, bias_up)
    elif activation is not None:
        z = ACTIVATIONS[activation](z)
    return z if residual is None else residual + z


def _plain_mlp(x, weight, weight_down, *, bias_down=None, residual=None, **first):
    return _plain(_plain(x, weight, **first), weight_down, bias=bias_down, residual=residual)


def _assert_no_worse(ours, theirs, tensors, grad, precision=None, **options):
    torch.backends.cuda.matmul.fp32_precision = precision or "ieee"  # put back after the test
    ours = functools.partial(ours, precision=precision)
    assert_gradients_no_worse(ours, theirs, tensors, grad, **options)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_activations_no_worse_than_torch(activation, number):
    dtype, precision = NUMBERS[number]
    for m, k, n in ((300, 512, 384), (17, 127, 65))[: 2 if number == "bf16" else 1]:
        tensors = _tensors({"x": (m, k), "weight": (n, k), "bias": (n,), "residual": (m, n)}, dtype)
        grad = _normal(m, n, seed=9, dtype=dtype)
        _assert_no_worse(isogemm.linear, _plain, tensors, grad, precision, activation=activation)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("activation", GATED)
def test_gates_no_worse_than_torch(activation, number):
    dtype, precision = NUMBERS[number]
    for m, k, n in ((300, 512, 384), (17, 127, 65))[: 2 if number == "bf16" else 1]:
        shapes = {"x": (m, k), "weight": (n, k), "weight_up": (n, k), "bias": (n,), "bias_up": (n,), "residual": (m, n)}
        grad = _normal(m, n, seed=9, dtype=dtype)
        _assert_no_worse(isogemm.linear, _plain, _tensors(shapes, dtype), grad, precision, activation=activation)


@pytest.mark.parametrize(
    ("activation", "number"),
    [*((name, "bf16") for name in (*ACTIVATIONS, *GATED)), *itertools.product(["gelu", "swiglu"], list(NUMBERS)[1:])],
)
def test_mlp_no_worse_than_torch(activation, number):
    dtype, precision = NUMBERS[number]
    for m, k, h, n in ((300, 256, 512, 192), (17, 63, 127, 65))[: 2 if number == "bf16" else 1]:
        shapes = {
            "x": (m, k),
            "weight": (h, k),
            "weight_down": (n, h),
            "bias": (h,),
            "bias_down": (n,),
            "residual": (m, n),
        }
        shapes |= {"weight_up": (h, k), "bias_up": (h,)} if activation in GATED else {}
        grad = _normal(m, n, seed=9, dtype=dtype)
        _assert_no_worse(mlp, _plain_mlp, _tensors(shapes, dtype), grad, precision, activation=activation)


@pytest.mark.parametrize("number", ["bf16", "ieee"])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_scales_no_worse_than_torch(activation, number):
    dtype, precision = NUMBERS[number]
    m, k, n = 130, 256, 200
    shapes = {"x": (m, k), "weight": (n, k), "bias": (n,), "c": (m, n), "row_scale": (m,), "col_scale": (n,)}
    shapes |= {"alpha": (), "beta": (), "residual": (m, n)}
    grad = _normal(m, n, seed=9, dtype=dtype)
    _assert_no_worse(isogemm.linear, _plain, _tensors(shapes, dtype), grad, precision, activation=activation)


def test_a_bias_along_rows_no_worse_than_torch():
    tensors = _tensors({"x": (130, 256), "weight": (200, 256), "bias": (130,)}, torch.bfloat16)

    def ours(x, weight, bias, precision=None, **options):
        return isogemm.matmul_fused(x, weight.T, bias=bias, precision=precision, **options)

    _assert_no_worse(ours, _plain, tensors, _normal(130, 200, seed=9), bias_dim=-2, activation="relu")


@triton.jit
def _wave(acc, col, row, first, second):
    return tl.sin(acc) * first + second * acc


@pytest.fixture
def wave(monkeypatch):
    monkeypatch.setattr(spec, "REGISTERED", {})
    register("wave", _wave, lambda acc, col, row, first, second: torch.sin(acc) * first + second * acc)


@pytest.mark.usefixtures("wave")
@pytest.mark.parametrize("shapes", list(itertools.combinations([(), (200,), (130, 1), (130, 200)], 2)), ids=str)
def test_epilogues_of_the_users_no_worse_than_torch(shapes):
    tensors = _tensors({"x": (130, 256), "weight": (200, 256)}, torch.bfloat16)
    tensors |= {name: _normal(*shape, seed=5 + i) for i, (name, shape) in enumerate(zip("fs", shapes, strict=True))}

    def ours(x, weight, f, s, precision=None):
        return isogemm.linear(x, weight, epilogue="wave", aux=(f, s))

    def theirs(x, weight, f, s):
        z = F.linear(x, weight)
        return torch.sin(z) * f + s * z

    _assert_no_worse(ours, theirs, tensors, _normal(130, 200, seed=9))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_second_derivatives(activation):
    """For the kernels, in IEEE fp32, against fp64."""
    shapes = {"x": (33, 48), "weight": (40, 48), "bias": (40,)} | (
        {"weight_up": (40, 48)} if activation in GATED else {}
    )
    tensors = _tensors(shapes, torch.float32)

    def twice(function, dtype):
        leaves = {name: each.to(dtype).requires_grad_() for name, each in tensors.items()}
        result = function(**leaves, activation=activation).sum()
        first = torch.autograd.grad(result, leaves.values(), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), leaves.values())

    ours = twice(functools.partial(isogemm.linear, precision="ieee"), torch.float32)
    for name, got, right in zip(tensors, ours, twice(_plain, torch.float64), strict=True):
        error = (got.double() - right).abs().max() / right.abs().max().clamp_min(1e-30)
        assert float(error) < 1e-4 or not bool(right.any()), name


CALLS = {  # name: (function, shapes, options)
    "relu": (isogemm.linear, {"x": (300, 256), "weight": (192, 256), "bias": (192,)}, {"activation": "relu"}),
    "gelu": (isogemm.linear, {"x": (300, 256), "weight": (192, 256), "bias": (192,)}, {"activation": "gelu"}),
    "tanh": (isogemm.linear, {"x": (300, 256), "weight": (192, 256)}, {"activation": "tanh"}),
    "swiglu": (
        isogemm.linear, {"x": (300, 256), "weight": (192, 256), "weight_up": (192, 256)}, {"activation": "swiglu"},
    ),
    "dropout": (isogemm.linear, {"x": (300, 256), "weight": (192, 256)}, {"activation": "gelu", "dropout_p": 0.3}),
    "mlp": (
        mlp, {"x": (300, 256), "weight": (320, 256), "weight_down": (192, 320), "bias": (320,)},
        {"hidden_dropout_p": 0.3, "dropout_p": 0.3},
    ),
    "mlp relu": (mlp, {"x": (300, 256), "weight": (320, 256), "weight_down": (192, 320)}, {"activation": "relu"}),
    "mlp swiglu": (
        mlp, {"x": (300, 256), "weight": (320, 256), "weight_up": (320, 256), "weight_down": (192, 320)},
        {"activation": "swiglu"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_any_stride(name):
    function, shapes, options = CALLS[name]
    tensors, grad = _tensors(shapes, torch.bfloat16), _normal(300, 192, seed=9)
    torch.manual_seed(2)
    expected = gradients_of(function, tensors, grad, **options)
    for layout in ("transposed", "sliced", "strided", "misaligned"):
        torch.manual_seed(2)
        with poisoned_allocations():
            actual = gradients_of(function, tensors, with_layout(grad, layout), **options)
        for each, same in expected.items():
            assert_bitwise_equal(actual[each], same, f"{each}, grad {layout}")
        views = {
            each: with_layout(tensor, layout if tensor.ndim > 1 else "strided") for each, tensor in tensors.items()
        }
        leaves = {each: view.requires_grad_() for each, view in views.items()}
        torch.manual_seed(2)
        with poisoned_allocations():
            found = torch.autograd.grad(function(**leaves, **options), leaves.values(), grad)
        for each, got in zip(leaves, found, strict=True):
            assert_bitwise_equal(got, expected[each], f"{each}, inputs {layout}")


@pytest.mark.parametrize("name", CALLS)
def test_repeats(name):
    """The graph kept, and another one: the same bits, masks and all."""
    function, shapes, options = CALLS[name]
    leaves = {each: tensor.requires_grad_() for each, tensor in _tensors(shapes, torch.bfloat16).items()}
    grad = _normal(300, 192, seed=9)
    torch.manual_seed(2)
    result = function(**leaves, **options)
    first = torch.autograd.grad(result, leaves.values(), grad, retain_graph=True)
    again = torch.autograd.grad(result, leaves.values(), grad)
    torch.manual_seed(2)
    new = torch.autograd.grad(function(**leaves, **options), leaves.values(), grad)
    for got, other, same in zip(again, new, first, strict=True):
        assert_bitwise_equal(got, same)
        assert_bitwise_equal(other, same)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "tanh"])  # which keeps its result
def test_a_result_may_be_changed_in_place(name):
    function, shapes, options = CALLS[name]
    leaves = {each: tensor.requires_grad_() for each, tensor in _tensors(shapes, torch.bfloat16).items()}
    grad = _normal(300, 192, seed=9)
    torch.manual_seed(2)
    expected = torch.autograd.grad(2 * function(**leaves, **options), leaves.values(), grad)
    torch.manual_seed(2)
    result = function(**leaves, **options)
    result.mul_(2)
    for got, same in zip(torch.autograd.grad(result, leaves.values(), grad), expected, strict=True):
        assert_bitwise_equal(got, same)


@pytest.mark.parametrize("number", ["bf16", "tf32"])
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("dropout", "mlp")])
def test_a_row_of_dx_follows_nothing_but_itself(name, number):
    dtype, precision = NUMBERS[number]
    function, shapes, options = CALLS[name]
    tensors = _tensors(shapes, dtype)
    x, grad = _normal(600, 256, seed=8, dtype=dtype), _normal(600, 192, seed=9, dtype=dtype)
    fixed = {each: tensor for each, tensor in tensors.items() if each != "x"}

    def rows(at):
        leaf = x[at].clone().requires_grad_()
        result = function(leaf, **fixed, **options, precision=precision)
        return torch.autograd.grad(result, leaf, grad[at])[0]

    whole = rows(slice(None))
    for m in (1, 2, 7, 16, 17, 64, 100, 129, 256, 300, 513):
        assert_bitwise_equal(rows(slice(0, m)), whole[:m], f"{m} rows")
    assert_bitwise_equal(torch.cat([rows(slice(0, 100)), rows(slice(100, 600))]), whole, "as 100 + 500")
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert_bitwise_equal(rows(order), whole[order], "permuted")


TRAINED = {
    "relu": (isogemm.linear, ("weight", "bias"), {"activation": "relu"}),
    "gelu": (isogemm.linear, ("weight", "bias"), {"activation": "gelu"}),
    "swiglu": (isogemm.linear, ("weight", "bias", "weight_up", "bias_up"), {"activation": "swiglu"}),
    "mlp gelu": (mlp, ("weight", "bias", "weight_down", "bias_down"), {"activation": "gelu"}),
    "mlp relu": (mlp, ("weight", "bias", "weight_down", "bias_down"), {"activation": "relu"}),
    "mlp swiglu": (
        mlp, ("weight", "bias", "weight_up", "bias_up", "weight_down", "bias_down"), {"activation": "swiglu"},
    ),
}  # fmt: skip
WIDTHS = {"weight": (96, 160), "weight_up": (96, 160), "bias": (96,), "bias_up": (96,)}
WIDTHS |= {"weight_down": (128, 96), "bias_down": (128,)}


def _parameters(names, dtype):
    made = {}
    for seed, name in enumerate(names):
        shape = WIDTHS[name]
        made[name] = torch.nn.Parameter(_normal(*shape, seed=seed, dtype=dtype) / shape[-1] ** 0.5)
        made[name].main_grad = torch.zeros(shape, device=DEVICE)
    return made


def _accumulated(name, x, grad, cuts=(), precision=None):
    function, names, options = TRAINED[name]
    parameters = _parameters(names, x.dtype)
    for start, stop in itertools.pairwise([0, *cuts, len(x)]):
        result = function(x[start:stop], **parameters, **options, precision=precision)
        result.backward(grad[start:stop, : result.shape[-1]])
    for parameter in parameters.values():
        assert parameter.grad is None
        assert parameter.grad_added_to_main_grad is True
    return {each: parameter.main_grad for each, parameter in parameters.items()}


@pytest.mark.parametrize("number", ["bf16", "tf32"])
@pytest.mark.parametrize("name", TRAINED)
def test_main_grad_and_micro_batches(name, number):
    """Cut where the walk may be cut, the totals have the bits of one pass; rounded they are the plain gradients."""
    dtype, precision = NUMBERS[number]
    function, names, options = TRAINED[name]
    weights = {WIDTHS[each] for each in names if each.startswith("weight")}
    chunk = max(configs.token_chunk(*shape, str(dtype).removeprefix("torch.")) for shape in weights)
    tokens = 2 * chunk + 37
    x, grad = _normal(tokens, 160, seed=7, dtype=dtype), _normal(tokens, 128, seed=8, dtype=dtype)
    whole = _accumulated(name, x, grad, precision=precision)
    for cuts in ([chunk], [2 * chunk], [chunk, 2 * chunk]):
        for each, total in _accumulated(name, x, grad, cuts, precision).items():
            assert_bitwise_equal(total, whole[each], f"{each}, cut at {cuts}")
    zeros = torch.zeros(100, 128, dtype=dtype, device=DEVICE)
    padded = _accumulated(name, torch.cat([x, x[:100]]), torch.cat([grad, zeros]), precision=precision)
    for each, total in padded.items():
        assert_bitwise_equal(total, whole[each], f"{each}, with rows whose gradient is zero")
    plain = {each: parameter.detach() for each, parameter in _parameters(names, dtype).items()}
    width = 128 if function is mlp else 96
    fresh = gradients_of(functools.partial(function, x, precision=precision), plain, grad[:, :width], **options)
    for each, total in whole.items():
        assert_bitwise_equal(fresh[each], total.to(dtype), f"{each}, without main_grad: rounded once")


def test_main_grad_under_autocast():
    function, names, options = TRAINED["mlp swiglu"]
    parameters = _parameters(names, torch.float32)
    x, grad = _normal(300, 160, seed=7, dtype=torch.float32), _normal(300, 128, seed=8)
    with torch.autocast(DEVICE, torch.bfloat16):
        result = function(x, **parameters, **options)
    result.backward(grad)
    half = {each: torch.nn.Parameter(parameter.detach().bfloat16()) for each, parameter in parameters.items()}
    for parameter in half.values():
        parameter.main_grad = torch.zeros(parameter.shape, device=DEVICE)
    function(x.bfloat16(), **half, **options).backward(grad)
    for each, parameter in parameters.items():
        assert_bitwise_equal(parameter.main_grad, half[each].main_grad, each)


@pytest.mark.parametrize("name", ["gelu", "mlp swiglu"])
def test_autograd_grad_under_autocast_leaves_main_grads_alone(name):
    function, names, options = TRAINED[name]
    parameters = _parameters(names, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        result = function(_normal(300, 160, seed=7, dtype=torch.float32), **parameters, **options)
    found = torch.autograd.grad(result.float().sum(), list(parameters.values()))
    for each, gradient in zip(parameters.values(), found, strict=True):
        assert gradient.any()
        assert not each.main_grad.any()


# float16


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_pre_activations_beyond_float16(activation):
    """Finite results have right gradients; a layer alone, and in an mlp, whose hidden values are in range."""
    x, weight, weight_up = float16_range.operands(DEVICE, 192, 160, 64)
    inputs = [x, weight, weight_up] if activation in GATED else [x, weight]
    form = float16_range.torch_form(activation)

    def layer(x, weight, weight_up=None):
        return isogemm.linear(x, weight, weight_up=weight_up, activation=activation, out_dtype=torch.float32)

    grad = torch.full((192, 160), 1e-5, device=DEVICE)
    result, found = float16_range.gradients(layer, inputs, grad)
    assert result.isfinite().all()
    float16_range.assert_gradients_right(found, form, inputs, grad, activation)
    if activation in GATED:
        weight_up[:, 0], weight_up[:, 1:] = 0, weight_up[:, 1:] / 16
    else:
        weight.copy_(torch.where(weight.abs() > 300, -weight.abs(), weight))
        x.copy_(torch.where(x.abs() > 300, x.abs(), x))
    down = _normal(8, 160, seed=3, dtype=torch.float16) / 64

    def both(x, weight, weight_up=None):
        return mlp(x, weight, down, weight_up=weight_up, activation=activation, out_dtype=torch.float32)

    grad = torch.full((192, 8), 1e-4, device=DEVICE)
    result, found = float16_range.gradients(both, inputs, grad)
    assert result.isfinite().all()
    float16_range.assert_gradients_right(found, form, inputs, grad.double() @ down.double(), f"mlp {activation}")


# Dropout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "leaky_relu"])
def test_the_backward_has_the_forward_s_mask(activation, dtype):
    """Zero exactly where the output was dropped, for a few rows and for many. x and weight are positive."""
    p = 0.3
    for m, k, n in ((1, 8, 4096), (300, 16, 1003), (2000, 64, 384)):
        x, weight = (torch.ones(shape, dtype=dtype, device=DEVICE) for shape in ((m, k), (n, k)))
        c = torch.ones(m, n, dtype=dtype, device=DEVICE, requires_grad=True)
        torch.manual_seed(m)
        mask = random.kept(new_seed(torch.device(DEVICE)), m, n, p)
        torch.manual_seed(m)
        result = isogemm.linear(x, weight, beta=1.0, c=c, activation=activation, dropout_p=p)
        (grad,) = torch.autograd.grad(result, c, torch.ones_like(result))
        assert torch.equal(result != 0, mask)
        assert torch.equal(grad != 0, mask)
        assert float((grad[mask].double() - random.scale(p)).abs().max()) <= torch.finfo(dtype).eps * 2


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_mlp_with_dropout(activation):
    """As torch, with the masks of the two seeds that were drawn."""
    m, k, h, n, p, q = 300, 128, 256, 192, 0.3, 0.4
    shapes = {"x": (m, k), "weight": (h, k), "weight_down": (n, h), "bias": (h,), "bias_down": (n,), "residual": (m, n)}
    shapes |= {"weight_up": (h, k)} if activation in GATED else {}
    tensors, grad = _tensors(shapes, torch.bfloat16), _normal(m, n, seed=9)
    torch.manual_seed(3)
    seeds = [new_seed(torch.device(DEVICE)) for _ in range(2)]
    inside = random.kept(seeds[0], m, h, p) * random.scale(p)
    last = random.kept(seeds[1], m, n, q) * random.scale(q)

    def plain(x, weight, weight_down, bias, bias_down, residual, weight_up=None):
        hidden = _plain(x, weight, bias=bias, weight_up=weight_up, activation=activation) * inside.to(x.dtype)
        return residual + F.linear(hidden, weight_down, bias_down) * last.to(x.dtype)

    torch.manual_seed(3)
    actual = gradients_of(mlp, tensors, grad, activation=activation, hidden_dropout_p=p, dropout_p=q)
    expected, exact = gradients_of(plain, tensors, grad), gradients_of(plain, tensors, grad, torch.float64)
    for name, right in exact.items():
        assert_no_worse_than_torch(actual[name], expected[name], right, what=f"gradient of {name}")


# Memory


def _requested():
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize(
    ("activation", "each"), [("relu", 1 / 8), ("leaky_relu", 1 / 8), ("tanh", 0), ("gelu", 2), ("silu", 2)]
)
def test_what_is_kept(activation, each):
    """Bytes an element, besides the result and the operands."""
    m, n = 1024, 2048
    x, weight = _normal(m, 256), _normal(n, 256, seed=1).requires_grad_()
    isogemm.linear(x, weight, activation=activation)
    before = _requested()
    result = isogemm.linear(x, weight, activation=activation)
    kept = _requested() - before - result.nbytes
    assert kept == pytest.approx(m * n * each, abs=4096)


def _peak(step):
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    step()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_peak_memory_of_mlp_is_below_eager_s(activation):
    """Forward and backward of 4096 tokens, 1024 -> 4096 -> 1024."""
    m, k, h = 4096, 1024, 4096
    shapes = {"x": (m, k), "weight": (h, k), "weight_down": (k, h), "bias": (h,), "bias_down": (k,)}
    shapes |= {"weight_up": (h, k)} if activation in GATED else {}
    leaves = {name: each.requires_grad_() for name, each in _tensors(shapes, torch.bfloat16).items()}
    grad = _normal(m, k, seed=9)

    def step(function):
        for leaf in leaves.values():
            leaf.grad = None
        function(**leaves, activation=activation).backward(grad)

    def eager(x, weight, weight_down, bias, bias_down, activation, weight_up=None):
        hidden = F.linear(x, weight, bias)
        hidden = (
            ACTIVATIONS[activation](hidden) if weight_up is None else GATED[activation](hidden) * F.linear(x, weight_up)
        )
        return F.linear(hidden, weight_down, bias_down)

    ours, theirs = (_peak(functools.partial(step, function)) for function in (mlp, eager))
    assert ours < theirs


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_a_frozen_layer_keeps_no_x(activation):
    """Which may be changed in place before the backward."""
    m, n, k = 1024, 64, 2048
    leaf, weight = _normal(m, k).requires_grad_(), _normal(n, k, seed=1)

    def layer():
        x = leaf.clone()
        result = isogemm.linear(x, weight, activation=activation)
        x.detach().add_(1)
        return result

    layer()
    before = _requested()
    result = layer()
    assert _requested() - before < 3 * m * n * 2 < m * k * 2
    result.sum().backward()
