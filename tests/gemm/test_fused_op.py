"""Fused products under torch.compile, opcheck, fake tensors, autocast, export and checkpointing, on the CPU."""

import copy

import pytest
import torch
import triton
from dispatching import ThroughOperators
from layouts import assert_fakes_agree
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.epilogues import register, spec
from isogemm.gemm.api import mlp
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

DEVICE = "cpu"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@triton.jit
def _declared(acc, col, row, first, second):
    return acc * first + second


def _wave(acc, col, row, first, second):
    return torch.sin(acc) * first + second


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(spec, "REGISTERED", {})
    register("wave", _declared, _wave)


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=DEVICE)


def _leaves(shapes, dtype=torch.float32):
    return [_normal(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


# The operators, in full: their arguments stand here once.

FUSED = dict.fromkeys(("weight_up", "bias", "bias_up", "c", "residual", "row_scale", "col_scale", "alpha", "beta"))
FUSED |= {"aux": [], "seed": None, "alpha_value": 1.0, "beta_value": 0.0, "dropout_p": 0.0, "activation": ""}
FUSED |= {"arguments": [], "epilogue": "", "bias_dim": -1, "eager": False, "by_rows": True, "save": ""}
FUSED |= {"owners": [None] * 4, "main_grads": [None] * 4, "out_dtype": None, "precision": None}
MLP = dict.fromkeys(("weight_up", "bias", "bias_up", "weight_down", "bias_down", "residual", "seed", "down_seed"))
MLP |= {"activation": "gelu", "arguments": [], "hidden_dropout_p": 0.0, "dropout_p": 0.0, "save": True}
MLP |= {"owners": [None] * 6, "main_grads": [None] * 6, "out_dtype": None, "precision": None}


def _fused(x, weight, **changed):
    assert changed.keys() <= FUSED.keys()
    return x, weight, *(FUSED | changed).values()


def _mlp(x, weight, **changed):
    assert changed.keys() <= MLP.keys()
    return x, weight, *(MLP | changed).values()


def _operators():
    """Calls of every operator: name, arguments."""
    x, weight, up, bias = _normal(2, 17, 9), _normal(11, 9, seed=1), _normal(11, 9, seed=2), _normal(11, seed=3)
    square, rows, down = _normal(2, 17, 11, seed=4), _normal(2, 17, seed=5), _normal(5, 11, seed=6)
    seed = torch.tensor([42])
    dropped = {"seed": seed, "dropout_p": 0.3}
    mask = torch.randint(0, 256, (2, 17, 2), dtype=torch.uint8)
    half = x.bfloat16(), weight.bfloat16()
    return {
        "fused": [
            _fused(x, weight, bias=bias, activation="relu", save="mask"),
            _fused(x, weight, bias=bias, activation="gelu", save="pre", residual=square, **dropped),
            _fused(x, weight, weight_up=up, bias=bias, bias_up=bias, activation="swiglu", save="pre"),
            _fused(x, weight.T.contiguous(), by_rows=False, bias=rows, bias_dim=-2, activation="tanh"),
            _fused(x, weight, c=square, alpha=torch.tensor(0.5), beta=torch.tensor(2.0), activation="silu", save="pre"),
            _fused(x, weight, row_scale=rows, col_scale=bias, alpha_value=0.5, eager=True),
            _fused(x, weight, aux=[bias, square], epilogue="wave", save="pre"),
            _fused(x, weight, activation="leaky_relu", arguments=[0.2], save="mask"),
            _fused(*half, activation="gelu", save="pre", out_dtype=torch.float32, residual=square),
            _fused(x.double(), weight.double(), activation="gelu", save="pre"),
        ],
        "mlp": [
            _mlp(x, weight, bias=bias, weight_down=down),
            _mlp(x, weight, weight_up=up, weight_down=down, activation="swiglu", residual=_normal(2, 17, 5, seed=7)),
            _mlp(x, weight, weight_down=down, activation="relu", seed=seed, hidden_dropout_p=0.3),
            _mlp(x, weight, weight_down=down, down_seed=seed, dropout_p=0.3, save=False),
        ],
        "activation_grad": [
            (square, torch.float32, True, square, "pre", None, 0.0, "gelu", []),
            (square, torch.bfloat16, False, mask, "mask", seed, 0.3, "relu", []),
            (square, torch.float32, False, mask, "mask", None, 0.0, "leaky_relu", [0.2]),
            (square, torch.float32, False, square, "out", None, 0.0, "tanh", []),
            (square, torch.float32, True, torch.stack([square, square]), "pre", None, 0.0, "swiglu", []),
            (square, torch.float32, False, None, "", seed, 0.3, "", []),
        ],
        "chunk_sums": [(_normal(3, 5), 1, torch.float32), (_normal(19, 5), 16, torch.bfloat16)],
        "hidden_grad": [
            (_normal(2, 17, 5), down, None, False, square, "pre", None, 0.0, "gelu", []),
            (_normal(2, 17, 5), down, "ieee", True, square, "out", seed, 0.3, "relu", []),
            (_normal(2, 17, 5), down, None, True, torch.stack([square, square]), "pre", seed, 0.3, "swiglu", []),
            (_normal(2, 17, 5).double(), down.double(), None, True, square.double(), "pre", None, 0.0, "gelu", []),
        ],
        "epilogue_grad": [
            (square, square, torch.float32, [bias, square], None, 0.0, "wave", [True, True]),
            (square, square, torch.bfloat16, [bias, square], seed, 0.3, "wave", [False, True]),
        ],
    }


OPERATORS = _operators()
DIFFERENTIATED = {"fused": 11, "mlp": 8}  # of the first arguments, and aux


@pytest.mark.parametrize("name", OPERATORS)
def test_fakes_of_any_strides(name):
    for arguments in OPERATORS[name]:
        assert_fakes_agree(getattr(torch.ops.isogemm, name).default, arguments)


@pytest.mark.parametrize(("name", "case"), [(name, i) for name, calls in OPERATORS.items() for i in range(len(calls))])
def test_opcheck(name, case):
    """As it stands, and, where it has a derivative, with what it differentiates requiring one."""
    operator, arguments = getattr(torch.ops.isogemm, name).default, OPERATORS[name][case]
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    if name == "mlp" and not arguments[14]:  # nothing was saved for a derivative
        return
    arguments = list(arguments)
    for i in range(DIFFERENTIATED.get(name, 0)):
        if arguments[i] is not None:
            arguments[i] = arguments[i].detach().clone().requires_grad_()
    if name == "fused":
        arguments[11] = [each.detach().clone().requires_grad_() for each in arguments[11]]
    torch.library.opcheck(operator, tuple(arguments))


CALLS = {  # name: (function, shapes of its inputs)
    "relu": (lambda x, w, b: isogemm.linear(x, w, b, activation="relu"), ((17, 9), (11, 9), (11,))),
    "gelu, residual": (
        lambda x, w, b, r: isogemm.linear(x, w, b, activation="gelu", residual=r),
        ((2, 17, 9), (11, 9), (11,), (2, 17, 11)),
    ),
    "tanh of a vector": (lambda x, w: isogemm.linear(x, w, activation="tanh"), ((9,), (11, 9))),
    "swiglu": (
        lambda x, w, u, b: isogemm.linear(x, w, b, weight_up=u, activation="swiglu"),
        ((17, 9), (11, 9), (11, 9), (11,)),
    ),
    "leaky_relu": (
        lambda a, b: isogemm.matmul_fused(a, b, activation="leaky_relu", activation_args={"negative_slope": 0.2}),
        ((17, 9), (9, 11)),
    ),
    "scales": (
        lambda a, b, r, c: isogemm.matmul_fused(a, b, row_scale=r, col_scale=c, alpha=0.5, activation="silu"),
        ((17, 9), (9, 11), (17,), (11,)),
    ),
    "alpha and beta": (
        lambda a, b, c, s, t: isogemm.matmul_fused(a, b, c=c, alpha=s, beta=t),
        ((17, 9), (9, 11), (17, 11), (), ()),
    ),
    "column bias": (
        lambda a, b, c: isogemm.matmul_fused(a, b, bias=c, bias_dim=-2, activation="relu2"),
        ((2, 17, 9), (9, 11), (2, 17)),
    ),
    "eager": (lambda x, w, b: isogemm.linear(x, w, b, activation="gelu", rounding="eager"), ((17, 9), (11, 9), (11,))),
    "wave": (
        lambda a, b, f, s: isogemm.matmul_fused(a, b, epilogue="wave", aux=(f, s)),
        ((17, 9), (9, 11), (11,), (17, 1)),
    ),
    "mlp": (lambda x, w, d, b: mlp(x, w, d, bias=b, activation="gelu"), ((2, 17, 9), (11, 9), (5, 11), (11,))),
    "mlp relu": (lambda x, w, d, r: mlp(x, w, d, residual=r, activation="relu"), ((17, 9), (11, 9), (5, 11), (17, 5))),
    "mlp swiglu": (
        lambda x, w, u, d: mlp(x, w, d, weight_up=u, activation="swiglu"),
        ((17, 9), (11, 9), (11, 9), (5, 11)),
    ),
}


def _loss(function, inputs):
    result = function(*inputs)
    return result, torch.autograd.grad(result.float().square().sum(), inputs)


@pytest.mark.parametrize("name", CALLS)
def test_compiled_has_the_bits_of_eager(name):
    """Forward and training, as one graph."""
    function, shapes = CALLS[name]
    inputs = _leaves(shapes, torch.bfloat16)
    expected, gradients = _loss(function, inputs)
    result, compiled = _loss(torch.compile(function, fullgraph=True, backend="aot_eager"), inputs)
    assert_bitwise_equal(result, expected)
    assert result.stride() == expected.stride()
    for i, (got, same) in enumerate(zip(compiled, gradients, strict=True)):
        assert_bitwise_equal(got, same, f"gradient of input {i}")


@pytest.mark.parametrize("name", ["relu", "swiglu", "mlp"])
def test_compiled_inference(name):
    function, shapes = CALLS[name]
    inputs = _leaves(shapes)
    with torch.no_grad():
        expected = function(*inputs)
        assert_bitwise_equal(torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs), expected)


def test_compiled_by_inductor():
    """With torch's own operations around it, which inductor fuses as it likes."""

    def block(x, w, b, d, e):
        hidden = isogemm.linear(torch.tanh(x), w, b, activation="relu")
        return x + isogemm.linear(hidden * 2, d, e, residual=x)

    inputs = _leaves(((17, 9), (24, 9), (24,), (9, 24), (9,)))
    expected, gradients = _loss(block, inputs)
    result, compiled = _loss(torch.compile(block, fullgraph=True), inputs)
    close = {"rtol": 1e-5, "atol": 1e-4}  # its tanh is another
    torch.testing.assert_close(result, expected, **close)
    for got, same in zip(compiled, gradients, strict=True):
        torch.testing.assert_close(got, same, **close)


DYNAMIC = {
    "relu": lambda x, weight, up, down: isogemm.linear(x, weight, activation="relu"),
    "gelu": lambda x, weight, up, down: isogemm.linear(x, weight, activation="gelu"),
    "swiglu": lambda x, weight, up, down: isogemm.linear(x, weight, weight_up=up, activation="swiglu"),
    "mlp": lambda x, weight, up, down: mlp(x, weight, down, weight_up=up, activation="swiglu"),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_one_graph_for_any_number_of_rows(name):
    function, counter = DYNAMIC[name], CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    weights = _leaves(((11, 9), (11, 9), (9, 11)))
    for m in (8, 11, 300, 2):
        x = _normal(m, 9)
        torch._dynamo.mark_dynamic(x, 0)
        result, expected = compiled(x, *weights), function(x, *weights)
        assert_bitwise_equal(result, expected, f"{m} rows")
        actual = torch.autograd.grad(result.sum(), weights, allow_unused=True)
        for got, same in zip(actual, torch.autograd.grad(expected.sum(), weights, allow_unused=True), strict=True):
            assert (got is None) == (same is None)
            if same is not None:
                assert_bitwise_equal(got, same, f"{m} rows")
    assert counter.frame_count == 1


def test_one_graph_for_any_size():
    counter = CompileCounterWithBackend("aot_eager")

    def function(a, b, bias, residual):
        return isogemm.matmul_fused(a, b, bias=bias, residual=residual, activation="silu")

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    first = 0
    for m, k, n in ((3, 4, 5), (30, 7, 11), (8, 100, 2)):
        operands = _normal(m, k), _normal(k, n), _normal(n), _normal(m, n)
        assert_bitwise_equal(compiled(*operands), function(*operands))
        first = first or counter.frame_count  # torch may start over, once, over the numbers among the defaults
    assert counter.frame_count == first


@pytest.mark.parametrize("name", CALLS)
def test_training_in_a_dispatch_mode(name):
    """Where torch listens to every operation, as its counters and tracers do."""
    function, shapes = CALLS[name]
    inputs = _leaves(shapes, torch.bfloat16)
    expected, gradients = _loss(function, inputs)
    with ThroughOperators():
        result, listened = _loss(function, inputs)
    assert_bitwise_equal(result, expected)
    for got, same in zip(listened, gradients, strict=True):
        assert_bitwise_equal(got, same)


def _with_main_grad(*shapes):
    parameters = [torch.nn.Parameter(_normal(*shape, seed=i, dtype=torch.bfloat16)) for i, shape in enumerate(shapes)]
    for parameter in parameters:
        parameter.main_grad = torch.ones(parameter.shape)
    return parameters


@pytest.mark.parametrize("name", ["swiglu", "mlp"])
def test_main_grad_in_a_graph(name):
    shapes = ((11, 9), (11, 9), (11,), (11,), *(((5, 11), (5,)) if name == "mlp" else ()))

    def function(x, weight, up, bias, bias_up, *down):
        more = {"weight_up": up, "bias": bias, "bias_up": bias_up, "activation": "swiglu"}
        return mlp(x, weight, down[0], bias_down=down[1], **more) if down else isogemm.linear(x, weight, **more)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = _normal(17, 9, seed=9, dtype=torch.bfloat16)
    actual, expected = _with_main_grad(*shapes), _with_main_grad(*shapes)
    for _ in range(2):
        compiled(x, *actual).sum().backward()
        function(x, *expected).sum().backward()
    for got, same in zip(actual, expected, strict=True):
        assert got.grad is None
        assert got.grad_added_to_main_grad is True
        assert_bitwise_equal(got.main_grad, same.main_grad)


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_dropout_in_a_graph(name):
    """Another mask at each call; the seed is torch's; the backward has the forward's mask."""

    def function(x, weight, c):
        if name == "mlp":
            return mlp(x, weight, weight.T, residual=c, activation="relu", hidden_dropout_p=0.5, dropout_p=0.5)
        return isogemm.linear(x, weight, beta=1.0, c=c, activation="relu", dropout_p=0.5)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, weight = torch.ones(40, 9), torch.ones(30, 9)
    c = torch.ones(40, 9 if name == "mlp" else 30, requires_grad=True)
    torch.manual_seed(4)
    first, second = compiled(x, weight, c), compiled(x, weight, c)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert_bitwise_equal(compiled(x, weight, c), first)
    if name == "linear":
        (grad,) = torch.autograd.grad(second.sum(), c)
        assert torch.equal(grad == 0, second == 0)


@pytest.mark.parametrize("message", ["activation is 'rleu'", "residual has shape", "dropout_p is 2"])
def test_errors_in_a_graph_name_the_argument(message):
    def function(x, weight):
        activation = "rleu" if "rleu" in message else "relu"
        residual = weight if "residual" in message else None
        return isogemm.linear(x, weight, activation=activation, residual=residual, dropout_p=2.0 * ("drop" in message))

    with pytest.raises(Exception, match=message):
        torch.compile(function, fullgraph=True, backend="aot_eager")(_normal(7, 9), _normal(5, 9))


@pytest.mark.parametrize("name", CALLS)
def test_tensors_without_memory(name):
    function, shapes = CALLS[name]
    inputs = [tensor.detach() for tensor in _leaves(shapes, torch.bfloat16)]
    expected = function(*inputs)
    meta = function(*(tensor.to("meta") for tensor in inputs))
    assert (meta.shape, meta.dtype, meta.device.type) == (expected.shape, expected.dtype, "meta")
    mode = FakeTensorMode()
    fake = [mode.from_tensor(tensor) for tensor in inputs]
    with mode:
        result = function(*fake)
    assert (result.shape, result.dtype, result.stride()) == (expected.shape, expected.dtype, expected.stride())


AUTOCAST = ["relu", "gelu, residual", "swiglu", "column bias", "mlp", "mlp swiglu"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name, dtype):
    """Operands of the products and biases are cast, as F.linear's are; a residual is added as it is."""
    function, shapes = CALLS[name]
    inputs = _leaves(shapes)
    with torch.autocast(DEVICE, dtype):
        result = function(*inputs)
    assert result.dtype == dtype
    cast = [each.detach().to(dtype) for each in inputs]
    if "residual" in name:
        cast[-1] = inputs[-1].detach()
    assert_bitwise_equal(result, function(*cast))
    gradients = torch.autograd.grad(result.float().square().mean(), inputs)
    assert [each.dtype for each in gradients] == [torch.float32] * len(inputs)
    with torch.autocast(DEVICE, dtype):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    assert_bitwise_equal(compiled, result)


def test_autocast_leaves_float64_alone():
    x, weight = _normal(7, 9, dtype=torch.float64), _normal(5, 9, dtype=torch.float64)
    with torch.autocast(DEVICE, torch.bfloat16):
        result = isogemm.linear(x, weight, activation="gelu")
    torch.testing.assert_close(result, F.gelu(F.linear(x, weight)))
    with torch.autocast(DEVICE, torch.bfloat16):
        wide = isogemm.linear(x.float(), weight.float(), activation="gelu", out_dtype=torch.float32, precision="tf32")
    expected = isogemm.linear(x.bfloat16(), weight.bfloat16(), activation="gelu", out_dtype=torch.float32)
    assert_bitwise_equal(wide, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    """Recomputed, the bits and the masks are those of the first time."""

    def block(x, w, b, d):
        hidden = isogemm.linear(x, w, b, activation="gelu", dropout_p=0.3)
        return mlp(isogemm.linear(hidden, d), w, d, bias=b, hidden_dropout_p=0.3, dropout_p=0.3)

    def gradients(function):
        inputs = _leaves(((17, 9), (24, 9), (24,), (9, 24)))
        torch.manual_seed(6)
        function(*inputs).square().sum().backward()
        return [each.grad for each in inputs]

    expected = gradients(block)
    actual = gradients(lambda *inputs: checkpoint(block, *inputs, use_reentrant=use_reentrant))
    for got, same in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, same)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        shapes = {"gate": (24, 9), "up": (24, 9), "down": (9, 24), "bias": (9,)}
        for seed, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, torch.nn.Parameter(_normal(*shape, seed=seed) / 4))

    def forward(self, x):
        x = isogemm.linear(x, self.down.T, activation="relu") @ self.down.T
        return mlp(x, self.gate, self.down, weight_up=self.up, bias_down=self.bias, activation="swiglu", residual=x)


def test_exported():
    model = Mlp()
    rows = torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(model, (_normal(17, 9),), dynamic_shapes=({0: rows},))
    for m in (17, 300):
        x = _normal(m, 9, seed=m)
        assert_bitwise_equal(exported.module()(x), model(x))


def test_a_compiled_model_trains_as_an_eager_one():
    eager = Mlp()
    compiled = copy.deepcopy(eager)
    step = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for model, forward in ((eager, eager), (compiled, step)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for seed in range(3):
            optimizer.zero_grad()
            forward(_normal(17, 9, seed=seed)).square().mean().backward()
            optimizer.step()
    for got, same in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert_bitwise_equal(got, same)


@pytest.mark.parametrize("name", ["relu", "swiglu", "mlp"])
def test_forward_mode_and_vmap_are_refused(name):
    function, shapes = CALLS[name]
    inputs = [each.detach() for each in _leaves(shapes)]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        with pytest.raises(RuntimeError, match="has no rule for forward-mode AD"):
            function(dual, *inputs[1:])
    with pytest.raises(RuntimeError, match=r"has no rule for .*torch\.func transforms"):
        torch.vmap(function, in_dims=(0, *(None for _ in inputs[1:])))(*inputs)


def test_the_log_changes_no_graph():
    function, shapes = CALLS["relu"]
    inputs = _leaves(shapes)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with isogemm.dispatch_log() as log:
        result = compiled(*inputs)
        compiled(*inputs)
    assert_bitwise_equal(result, function(*inputs))
    assert len(log) == 2
