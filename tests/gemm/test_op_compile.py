"""The GEMM operations under torch.compile, opcheck, autocast and activation checkpointing, on the CPU."""

import copy

import pytest
import torch
from layouts import assert_fakes_agree
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

DEVICE = "cpu"
HALVES = [torch.bfloat16, torch.float16]
CONTRACT = [torch.float32, *HALVES]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=DEVICE)


def _leaves(*shapes, dtype=torch.float32):
    return [_normal(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def _operators():
    """Calls of every registered operator: name, arguments."""
    x, weight, bias = _normal(2, 17, 9), _normal(5, 9, seed=1), _normal(5, seed=2)
    grad, none = _normal(2, 17, 5, seed=3), (None,) * 4
    main_grads = weight, _normal(5, 9, seed=4), bias, _normal(5, seed=5)
    half, half_weight = x.bfloat16(), weight.bfloat16()
    return {
        "matmul": [
            (x, weight.T),
            (x, weight.T, None, "tf32"),
            (half, half_weight.T, torch.float32),
            (x[:, None], grad[:, None, :9].mT.contiguous().mT),
            (x.double(), weight.double().T),
        ],
        "linear": [
            (x, weight, bias, *none, None, None),
            (x[0, 0], weight, None, *none, None, None),
            (half, half_weight, None, *none, torch.float32, None),
            (x.transpose(0, 1), weight, bias, *none, None, "ieee"),
            (x, weight, bias, *main_grads, None, None),
        ],
        "weight_grad": [(grad, x), (grad, x, "ieee"), (grad.transpose(0, 1), x.transpose(0, 1)), (grad[0, 0], x[0, 0])],
        "bias_grad": [(grad,), (grad[0, 0],), (grad.double(),)],
        "add_weight_grad": [(_normal(5, 9, seed=6), weight, grad, x), (_normal(9, 5).T, weight, grad, x, "ieee")],
        "add_bias_grad": [(_normal(5, seed=7), bias, grad)],
    }


OPERATORS = _operators()


def test_every_operator_is_checked():
    registered = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if "isogemm::" in name}
    fused = {"fused", "mlp", "activation_grad", "hidden_grad", "epilogue_grad", "chunk_sums", "add_chunk_sums"}
    of_others = ("encoder", "batch_norm", "update_running", "attention", "row_norm", "softmax", "log_softmax")
    of_others += ("embedding", "add_embedding", "linear_logprob", "norm_weight_sums", "add_norm", "add_row_norm")
    others = {name for name in registered if name.startswith(of_others)}
    assert registered - {"bmm"} - fused - others == set(OPERATORS)  # those are checked in tests of their own


@pytest.mark.parametrize("name", [name for name in OPERATORS if not name.startswith("add_")])
def test_fakes_of_any_strides(name):
    for arguments in OPERATORS[name]:
        assert_fakes_agree(getattr(torch.ops.isogemm, name).default, arguments)


@pytest.mark.parametrize(("name", "case"), [(name, i) for name, calls in OPERATORS.items() for i in range(len(calls))])
def test_opcheck(name, case):
    """As it stands, and, where it has a derivative, with what it differentiates requiring one."""
    operator, arguments = getattr(torch.ops.isogemm, name).default, OPERATORS[name][case]
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    if name == "linear" and arguments[4] is not None:
        return  # opcheck asks torch.autograd.grad, which a compiled main_grad refuses: test_main_grad.py
    differentiated = {"linear": 3, "matmul": 2, "weight_grad": 2, "bias_grad": 1}.get(name, 0)
    for i, argument in enumerate(arguments[:differentiated]):
        if argument is not None:
            argument = argument.detach().clone().requires_grad_()
        arguments = (*arguments[:i], argument, *arguments[i + 1 :])
    torch.library.opcheck(operator, arguments)


CALLS = {  # name: (function, shapes of its inputs)
    "mm": (isogemm.mm, ((17, 9), (9, 5))),
    "matmul": (isogemm.matmul, ((2, 17, 9), (9, 5))),
    "matmul vector": (isogemm.matmul, ((17, 9), (9,))),
    "matmul broadcast": (isogemm.matmul, ((2, 1, 7, 9), (3, 9, 5))),
    "linear": (isogemm.linear, ((17, 9), (5, 9))),
    "linear bias": (isogemm.linear, ((2, 17, 9), (5, 9), (5,))),
    "linear vector": (isogemm.linear, ((9,), (5, 9), (5,))),
}


def _loss(function, inputs):
    result = function(*inputs)
    return result, torch.autograd.grad(result.float().square().sum(), inputs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in CALLS), ("matmul", torch.float32), ("linear bias", torch.float64)],
    ids=str,
)
def test_compiled_has_the_bits_of_eager(name, dtype):
    """Forward and training, as one graph."""
    function, shapes = CALLS[name]
    inputs = _leaves(*shapes, dtype=dtype)
    expected, gradients = _loss(function, inputs)
    result, compiled = _loss(torch.compile(function, fullgraph=True, backend="aot_eager"), inputs)
    assert_bitwise_equal(result, expected)
    assert result.stride() == expected.stride()
    for got, same in zip(compiled, gradients, strict=True):
        assert_bitwise_equal(got, same)
    with torch.no_grad():
        assert_bitwise_equal(torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs), expected)


def _block(x, up, down, bias):
    return x + isogemm.linear(torch.relu(isogemm.linear(x, up)), down, bias)


def test_compiled_by_inductor():
    inputs = _leaves((17, 9), (24, 9), (9, 24), (9,))
    expected, gradients = _loss(_block, inputs)
    result, compiled = _loss(torch.compile(_block, fullgraph=True), inputs)
    torch.testing.assert_close(result, expected)
    for got, same in zip(compiled, gradients, strict=True):
        torch.testing.assert_close(got, same)


@pytest.mark.parametrize("training", [False, True])
def test_one_graph_for_any_number_of_rows(training):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(isogemm.linear, fullgraph=True, backend=counter)
    weight, bias = (_normal(*shape, seed=1).requires_grad_(training) for shape in ((5, 9), (5,)))
    for m in (8, 11, 300, 2, 1024):
        x = _normal(m, 9)
        torch._dynamo.mark_dynamic(x, 0)
        result = compiled(x, weight, bias)
        assert_bitwise_equal(result, isogemm.linear(x, weight, bias))
        if training:
            actual = torch.autograd.grad(result.sum(), (weight, bias))
            expected = torch.autograd.grad(isogemm.linear(x, weight, bias).sum(), (weight, bias))
            for got, same in zip(actual, expected, strict=True):
                assert_bitwise_equal(got, same)
    assert counter.frame_count == 1


def test_one_graph_for_any_batch_and_sequence():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(isogemm.linear, fullgraph=True, dynamic=True, backend=counter)
    weight = _normal(5, 9, seed=1)
    for shape in ((3, 7, 9), (4, 100, 9), (31, 2, 9)):
        x = _normal(*shape)
        assert_bitwise_equal(compiled(x, weight), isogemm.linear(x, weight))
    assert counter.frame_count == 1


@pytest.mark.parametrize("function", [isogemm.mm, isogemm.matmul])
def test_one_graph_for_any_size(function):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for m, k, n in ((3, 4, 5), (30, 7, 11), (8, 100, 2)):
        a, b = _normal(m, k), _normal(k, n)
        assert_bitwise_equal(compiled(a, b), function(a, b))
    assert counter.frame_count == 1


@pytest.mark.parametrize("keywords", [{"out_dtype": torch.float32}, {"out_dtype": None}], ids=str)
def test_options_in_a_graph(keywords):
    def function(x, weight):
        return isogemm.linear(x, weight, **keywords)

    x, weight = _normal(7, 9, dtype=torch.bfloat16), _normal(5, 9, dtype=torch.bfloat16)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_bitwise_equal(compiled(x, weight), function(x, weight))


def test_precision_in_a_graph():
    compiled = torch.compile(isogemm.mm, fullgraph=True, backend="aot_eager")
    a, b = _normal(7, 9), _normal(9, 5)
    assert_bitwise_equal(compiled(a, b, precision="tf32"), isogemm.mm(a, b))


def test_errors_in_a_graph_name_the_argument():
    compiled = torch.compile(isogemm.linear, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="x and weight"):
        compiled(_normal(7, 9), _normal(5, 8))


def _with_main_grad(dtype=torch.bfloat16):
    weight = torch.nn.Parameter(_normal(5, 9, seed=1, dtype=dtype))
    bias = torch.nn.Parameter(_normal(5, seed=2, dtype=dtype))
    weight.main_grad, bias.main_grad = _normal(5, 9, seed=3), _normal(5, seed=4)
    return weight, bias


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_main_grad_in_a_graph(backend):
    """Accumulated at each call, in the tensor that is there at that call, as in eager."""
    compiled = torch.compile(isogemm.linear, fullgraph=True, backend=backend)
    actual, expected = _with_main_grad(), _with_main_grad()
    for step in range(3):
        x = _normal(2, 7, 9, seed=5 + step, dtype=torch.bfloat16).requires_grad_()
        compiled(x, *actual).sum().backward()
        dx, x.grad = x.grad, None
        isogemm.linear(x, *expected).sum().backward()
        assert_bitwise_equal(dx, x.grad)
        for got, same in zip(actual, expected, strict=True):
            assert got.grad is None
            assert got.grad_added_to_main_grad is True
            assert_bitwise_equal(got.main_grad, same.main_grad, f"step {step}")


def test_main_grad_of_a_compiled_module():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = _with_main_grad()

        def forward(self, x):
            return isogemm.linear(x, self.weight, self.bias).relu()

    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(2):
        compiled(_normal(7, 9, seed=step, dtype=torch.bfloat16)).sum().backward()
    expected = Model()
    for step in range(2):
        expected(_normal(7, 9, seed=step, dtype=torch.bfloat16)).sum().backward()
    for got, same in zip(model.parameters(), expected.parameters(), strict=True):
        assert got.grad is None
        assert_bitwise_equal(got.main_grad, same.main_grad)


def test_main_grad_in_a_graph_under_autocast():
    def step(x, weight, bias):
        with torch.autocast("cpu", torch.bfloat16):
            return isogemm.linear(x, weight, bias)

    actual, expected = _with_main_grad(torch.float32), _with_main_grad(torch.float32)
    x = _normal(7, 9)
    torch.compile(step, fullgraph=True, backend="aot_eager")(x, *actual).sum().backward()
    step(x, *expected).sum().backward()
    for got, same in zip(actual, expected, strict=True):
        assert got.grad is None
        assert_bitwise_equal(got.main_grad, same.main_grad)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast(dtype, compiled):
    """The dtypes of F.linear and torch.matmul, and the bits of the cast operands."""

    def ours(x, weight, bias):
        with torch.autocast("cpu", dtype):
            return isogemm.linear(x, weight, bias), isogemm.matmul(x, weight.T), isogemm.mm(x, weight.T)

    def theirs(x, weight, bias):
        with torch.autocast("cpu", dtype):
            return F.linear(x, weight, bias), torch.matmul(x, weight.T), torch.mm(x, weight.T)

    inputs = _leaves((17, 9), (5, 9), (5,))
    results = (torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours)(*inputs)
    for result, expected in zip(results, theirs(*inputs), strict=True):
        assert result.dtype == expected.dtype == dtype
    x, weight, bias = (tensor.detach().to(dtype) for tensor in inputs)
    assert_bitwise_equal(results[0], isogemm.linear(x, weight, bias))
    assert_bitwise_equal(results[1], isogemm.mm(x, weight.T))
    assert_bitwise_equal(results[2], results[1])
    sum(result.float().sum() for result in results).backward()
    assert [tensor.grad.dtype for tensor in inputs] == [torch.float32] * 3


def test_autocast_takes_what_torch_takes():
    """Operands of two dtypes, an fp32 output, an fp32 word about precision; float64 is left alone."""
    x, weight = _normal(17, 9), _normal(5, 9, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = isogemm.linear(x, weight.bfloat16())
        wide = isogemm.linear(x, weight, out_dtype=torch.float32)
        precise = isogemm.linear(x, weight, precision="tf32")
        double = isogemm.linear(x.double(), weight.double())
        with torch.autocast("cpu", enabled=False):
            plain = isogemm.linear(x, weight)
    expected = isogemm.linear(x.bfloat16(), weight.bfloat16())
    assert_bitwise_equal(mixed, expected)
    assert_bitwise_equal(precise, expected)
    assert_bitwise_equal(wide, isogemm.linear(x.bfloat16(), weight.bfloat16(), out_dtype=torch.float32))
    assert double.dtype == torch.float64
    assert_bitwise_equal(plain, isogemm.linear(x, weight))


def test_backward_outside_autocast_has_the_bits_of_inside():
    inputs = _leaves((17, 9), (5, 9), (5,))
    gradients = []
    for inside in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = isogemm.linear(*inputs).float().square().sum()
            if inside:
                gradients.append(torch.autograd.grad(loss, inputs))
        if not inside:
            gradients.append(torch.autograd.grad(loss, inputs))
    for got, same in zip(*gradients, strict=True):
        assert_bitwise_equal(got, same)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing(use_reentrant, autocast):
    """Recomputed, the bits are those of the first time."""
    inputs = _leaves((17, 9), (24, 9), (9, 24), (9,))

    def gradients(function):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = function(*inputs)
        return result, *torch.autograd.grad(result.float().square().sum(), inputs)

    def saved(*arguments):
        return checkpoint(_block, *arguments, use_reentrant=use_reentrant)

    if use_reentrant:  # which knows .backward() alone
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = saved(*inputs)
        result.float().square().sum().backward()
        actual = result, *(tensor.grad for tensor in inputs)
    else:
        actual = gradients(saved)
    for got, same in zip(actual, gradients(_block), strict=True):
        assert_bitwise_equal(got, same)


def test_checkpointing_in_a_graph():
    def saved(*arguments):
        return checkpoint(_block, *arguments, use_reentrant=False)

    inputs = _leaves((17, 9), (24, 9), (9, 24), (9,))
    expected, gradients = _loss(_block, inputs)
    result, actual = _loss(torch.compile(saved, fullgraph=True, backend="aot_eager"), inputs)
    assert_bitwise_equal(result, expected)
    for got, same in zip(actual, gradients, strict=True):
        assert_bitwise_equal(got, same)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Parameter(_normal(24, 9, seed=1)), torch.nn.Parameter(_normal(9, 24, seed=2))
        self.bias = torch.nn.Parameter(_normal(9, seed=3))

    def forward(self, x):
        return _block(x, self.up, self.down, self.bias)


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


def test_the_log_changes_no_graph():
    compiled = torch.compile(isogemm.linear, fullgraph=True, backend="aot_eager")
    x, weight = _normal(7, 9), _normal(5, 9)
    with isogemm.dispatch_log() as log:
        result = compiled(x, weight)
        compiled(x, weight)
    assert_bitwise_equal(result, isogemm.linear(x, weight))
    assert [entry.op for entry in log] == ["matmul"] * 2
