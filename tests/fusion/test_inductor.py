"""Fusion under torch.compile, on the CPU: graphs before and after the pass, and Inductor from end to end."""

import copy
import math
import operator
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensor_cases import NEARBY, nearby
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.fusion.inductor import FusionPass, compile_fusion, fuse
from isogemm.fusion.report import Report
from isogemm.gemm import api
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

FUSED = (api.linear, api.matmul_fused, api.mlp)
M, K, N = 7, 9, 5
X, W, WEIGHT, BIAS, FULL = (M, K), (K, N), (N, K), (N,), (M, N)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    assert not isinstance(config.pre_grad_custom_pass, FusionPass)


class Fusing:
    """A backend that fuses and runs what is left: as it stands, or through AOTAutograd."""

    def __init__(self, then=lambda gm, inputs: gm.forward):
        self.then, self.report, self.targets, self.graphs = then, Report(), [], []

    def __call__(self, gm, inputs):
        fuse(gm.graph, self.report)
        gm.graph.lint()
        gm.recompile()
        nodes = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
        self.targets += [node.target for node in nodes]
        self.graphs.append(gm.graph)
        for node in nodes:
            if node.target in FUSED:
                assert isinstance(node.meta["example_value"], torch.Tensor)
        return self.then(gm, inputs)

    @property
    def calls(self):
        return [target.__name__ for target in self.targets if target in FUSED]

    @property
    def steps(self):
        return [entry.steps for entry in self.report.fused.elements()]

    @property
    def reasons(self):
        return [entry.reason for entry in self.report.left.elements()]


def _leaves(*shapes, dtype=torch.float32):
    return [
        make_data("normal", shape, seed=seed, dtype=dtype, device="cpu").requires_grad_()
        for seed, shape in enumerate(shapes)
    ]


def _gradients(function, inputs):
    result = function(*inputs)
    return [result, *torch.autograd.grad(result.double().square().sum(), inputs, allow_unused=True)]


def _check(function, *inputs, backend=None):
    """Values and gradients at most twice as far from float64 as torch's own (and `nearby`); the backend that fused."""
    backend = Fusing() if backend is None else backend
    actual = _gradients(torch.compile(function, backend=backend, fullgraph=True), inputs)
    torchs, exact = _by_torch(function, inputs)
    near = [_by_torch(function, [nearby(each, which).requires_grad_() for each in inputs]) for which in range(NEARBY)]
    for place, (got, same, reference) in enumerate(zip(actual, torchs, exact, strict=True)):
        assert (got is None) == (same is None)
        if got is not None:
            assert got.shape == same.shape
            found = [(got, same, reference)]
            found += [(right[place].to(got.dtype), theirs[place], right[place]) for theirs, right in near]
            assert_no_worse_than_torch(*(torch.stack(each).detach() for each in zip(*found, strict=True)), ulps=4)
    return backend


def _by_torch(function, inputs):
    """Values and gradients, and the same in float64."""
    wide = [each.detach().double().requires_grad_() for each in inputs]
    return _gradients(function, inputs), _gradients(function, wide)


SPELLINGS = {  # name: (function, shapes, steps)
    "three operators": (lambda x, w, b: torch.relu(x @ w + b), (X, W, BIAS), "bias relu"),
    "bias first": (lambda x, w, b: (b + torch.matmul(x, w)).relu(), (X, W, BIAS), "bias relu"),
    "methods": (lambda x, w, b: x.matmul(w).add(b).tanh(), (X, W, BIAS), "bias tanh"),
    "in place": (lambda x, w, b: x.mm(w).add_(b).relu_(), (X, W, BIAS), "bias relu"),
    "augmented": (lambda x, w, b: _augmented(x, w, b), (X, W, BIAS), "bias relu"),
    "inplace=True": (lambda x, w: F.relu(torch.mm(x, w), True), (X, W), "relu"),
    "addmm": (lambda b, x, w: F.gelu(torch.addmm(b, x, w)), (BIAS, X, W), "bias gelu"),
    "addmm of c": (lambda c, x, w: torch.addmm(c, x, w, beta=0.5, alpha=2).tanh(), (FULL, X, W), "alpha c tanh"),
    "linear": (lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), (X, WEIGHT, BIAS), "bias gelu_tanh"),
    "linear by name": (lambda x, w, b: F.silu(F.linear(input=x, weight=w, bias=b)), (X, WEIGHT, BIAS), "bias silu"),
    "batches": (lambda x, w, b: F.leaky_relu(x @ w + b, 0.2), ((2, 3, K), W, BIAS), "bias leaky_relu"),
    "residual": (lambda x, w, r: x @ w + r, (X, W, FULL), "residual"),
    "residual first": (lambda x, w, b, r: r + F.linear(x, w, b), (X, WEIGHT, BIAS, FULL), "bias residual"),
    "after the activation": (lambda x, w, r: torch.relu(x @ w) + r, (X, W, FULL), "relu residual"),
    "two sums": (lambda x, w, r, s: x @ w + r + s, (X, W, FULL, FULL), "c residual"),
    "c": (lambda x, w, b, c: torch.tanh(torch.add(x @ w, c, alpha=-2) + b), (X, W, BIAS, FULL), "bias c tanh"),
    "subtracted from": (lambda x, w, c: torch.relu(c - x @ w), (X, W, FULL), "alpha c relu"),
    "scaled": (lambda x, w, b: 0.5 * (x @ w) / 4 + b, (X, W, BIAS), "alpha bias"),
    "scaled by a tensor": (lambda x, w, s: (x @ w) * s, (X, W, ()), "alpha"),
    "rows and columns": (lambda x, w, r, c: x @ w * r * c, (X, W, (M, 1), BIAS), "row_scale col_scale"),
    "column bias": (lambda x, w, b: torch.relu(x @ w + b), (X, W, (M, 1)), "column bias,relu"),
    "column of a linear": (lambda x, w, b: torch.relu(F.linear(x, w) + b), (X, WEIGHT, (M, 1)), "column bias,relu"),
    "wide bias": (lambda x, w, b: torch.relu(x @ w + b), (X, W, (1, N)), "bias relu"),
    "squared relu": (lambda x, w: torch.relu(x @ w) ** 2, (X, W), "relu2"),
    "relu times itself": (lambda x, w: (h := torch.relu(x @ w)) * h, (X, W), "relu2"),
    "quick_gelu": (lambda x, w: (h := x @ w) * torch.sigmoid(1.702 * h), (X, W), "quick_gelu"),
    "silu": (lambda x, w, b, r: torch.sigmoid(h := x @ w + b) * h + r, (X, W, BIAS, FULL), "bias silu residual"),
    "gelu": (lambda x, w: (h := x @ w) * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0))), (X, W), "gelu"),
    "gelu_tanh": (lambda x, w, b: _new_gelu(F.linear(x, w, b)), (X, WEIGHT, BIAS), "bias gelu_tanh"),
    "gate": (lambda x, w, u: F.silu(x @ w) * (x @ u), (X, W, W), "swiglu"),
    "gate last": (lambda x, w, u, b: (x @ u + b) * F.gelu(x @ w), (X, W, W, BIAS), "bias_up geglu"),
    "gate of linears": (
        lambda x, w, b, u, a, r: r + torch.relu(F.linear(x, w, b)) * F.linear(x, u, a),
        (X, WEIGHT, BIAS, WEIGHT, BIAS, FULL),
        "bias bias_up reglu residual",
    ),
    "isogemm's own": (lambda x, w, b: torch.relu(isogemm.linear(x, w, b)), (X, WEIGHT, BIAS), "bias relu"),
    "isogemm.mm": (lambda x, w, b: isogemm.mm(x, w) + b, (X, W, BIAS), "bias"),
    "transposed weight": (lambda x, w, b: torch.relu(x @ w.t() + b), (X, WEIGHT, BIAS), "bias relu"),
}  # fmt: skip


def _new_gelu(x):
    """As Hugging Face's models write it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _augmented(x, w, b):
    y = x @ w
    y += b
    return F.relu(y, inplace=True)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name):
    """One call in the place of all, with the values and gradients of all."""
    function, shapes, steps = SPELLINGS[name]
    backend = _check(function, *_leaves(*shapes))
    assert backend.steps == [tuple(steps.split("," if "," in steps else " "))]
    assert len(backend.calls) == 1
    left = {getattr(target, "__name__", target) for target in backend.targets} - {backend.calls[0]}
    assert left <= {"t", "squeeze", "flatten"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["linear", "residual first", "gate of linears"])
def test_dtype(name, dtype):
    function, shapes, _ = SPELLINGS[name]
    backend = _check(function, *_leaves(*shapes, dtype=dtype))
    assert len(backend.calls) == 1


@pytest.mark.parametrize("name", ["three operators", "gate of linears", "rows and columns", "column bias"])
def test_training_through_aot_autograd(name):
    """The traced call is the registered operator, with its own gradient."""
    function, shapes, _ = SPELLINGS[name]
    backend = _check(function, *_leaves(*shapes), backend=Fusing(aot_eager))
    assert len(backend.calls) == 1


MLP = (X, (11, K), (11,), (N, 11), (N,), FULL)


def test_two_layers_are_one_node():
    def function(x, up, b, down, c, r):
        return r + F.linear(F.gelu(F.linear(x, up, b)), down, c)

    backend = _check(function, *_leaves(*MLP), backend=Fusing(aot_eager))
    assert backend.calls == ["mlp"]
    (steps,) = backend.steps
    assert steps == ("bias", "gelu", "linear [7, 11] x [5, 11] float32", "bias", "residual")


def test_three_layers():
    """The first has an activation after it and no layer that ends a pair; the others are one."""

    def function(x, first, second, third):
        return torch.relu(torch.relu(x @ first) @ second) @ third

    backend = _check(function, *_leaves(X, (K, 11), (11, 13), (13, N)))
    assert backend.calls == ["matmul_fused", "mlp"]


def test_gated_layers_are_one_node():
    def function(x, gate, up, down):
        return (F.silu(x @ gate) * (x @ up)) @ down

    backend = _check(function, *_leaves(X, (K, 11), (K, 11), (11, N)))
    assert backend.calls == ["mlp"]


def _flat(x, w, b):
    """A layer as GPT-2 writes it."""
    return torch.addmm(b, x.view(-1, x.size(-1)), w).view(*x.shape[:-1], -1)


FLAT = {  # name: (function, shapes, steps)
    "residual": (lambda x, w, b, r: torch.relu(_flat(x, w, b)) + r, (BIAS, (2, 3, N)), "bias relu residual"),
    "rows": (lambda x, w, b, r: (x.flatten(0, 1) @ w).view(2, 3, N) * r + b, (BIAS, (2, 3, 1)), "row_scale bias"),
    "nothing": (lambda x, w, b, r: _flat(x, w, b) / r, (BIAS, (2, 3, N)), ""),
}


@pytest.mark.parametrize("name", FLAT)
def test_flat_rows(name):
    """The view that gives rows their dimensions back is repeated on the result."""
    function, shapes, steps = FLAT[name]
    backend = _check(function, *_leaves((2, 3, K), W, *shapes))
    assert backend.steps == ([tuple(steps.split())] if steps else [])


def test_flat_layers_are_one_node():
    def function(x, up, b, down, c):
        return x + _flat(_new_gelu(_flat(x, up, b)), down, c)

    backend = Fusing(aot_eager)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for shape in ((2, 3, K), (5, 4, K)):
        inputs = _leaves(shape, (K, 11), (11,), (11, K), (K,))
        torch._dynamo.mark_dynamic(inputs[0], 0)
        torch._dynamo.mark_dynamic(inputs[0], 1)
        for got, same in zip(_gradients(compiled, inputs), _gradients(function, inputs), strict=True):
            torch.testing.assert_close(got, same, rtol=1e-4, atol=1e-4)
    assert backend.calls == ["mlp"]


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down_proj, self.act_fn = nn.Linear(16, 8, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Mixer(nn.Module):
    """A block of an MLP-Mixer: tokens, then channels."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.tokens, self.channels = (
            nn.Sequential(nn.Linear(n, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, n)) for n in (6, 8)
        )

    def forward(self, x):
        x = x + self.tokens(self.norms[0](x).mT).mT
        return x + self.channels(self.norms[1](x))


MODULES = {  # name: (module, calls)
    "relu in place": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True)), ["linear"]),
    "gelu": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU("tanh"), nn.Linear(16, 8)), ["mlp"]),
    "llama": (Llama, ["mlp"]),
    "mixer": (Mixer, ["mlp", "mlp"]),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), ["mlp"]),
}


@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    make, calls = MODULES[name]
    torch.manual_seed(0)
    module = make()
    x = _leaves((2, 6, 8))[0]
    inputs = [x, *module.parameters()]
    backend = Fusing()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    actual = _gradients(lambda *given: compiled(given[0]), inputs)
    expected = _gradients(lambda *given: module(given[0]), inputs)
    for got, same in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, same, rtol=1e-4, atol=1e-5)  # sums of 12 rows in another order
    assert backend.calls == calls


LEFT = {  # name: (function, shapes, part of the reason)
    "read twice": (lambda x, w: torch.relu(h := x @ w) + h.sum(), (X, W), "read 2 times"),
    "returned as well": (lambda x, w: (torch.relu(h := x @ w), h)[0] + h[0], (X, W), "read 2 times"),
    "batched right operand": (lambda x, w: torch.relu(x @ w), ((2, M, K), (2, K, N)), "3 dimensions"),
    "vector": (lambda x, w: torch.relu(x @ w), ((K,), W), "1 dimension"),
    "broadcast to more rows": (lambda x, w, r: x @ w + r, (X, W, (2, M, N)), "neither a bias nor"),
    "to itself": (lambda x, w: (h := x @ w) + h, (X, W), "to itself"),
    "bias after the activation": (lambda x, w, b: torch.relu(x @ w) + b, (X, W, BIAS), "late"),
    "factor after the bias": (lambda x, w, b: F.linear(x, w, b) * 2, (X, WEIGHT, BIAS), "after the sum"),
    "divides": (lambda x, w: 1 / (x @ w), (X, W), "divides"),
    "another tensor's size": (lambda x, w, r: (x @ w) * r, (X, W, FULL), "its own shape"),
    "number": (lambda x, w: x @ w + 1.0, (X, W), "number"),
    "gate of other inputs": (lambda x, y, w: F.silu(x @ w) * (y @ w), (X, X, W), "different left operands"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_with_a_reason(name):
    function, shapes, reason = LEFT[name]
    backend = _check(function, *_leaves(*shapes))
    assert any(reason in each for each in backend.reasons), backend.reasons


def test_plain_products_are_no_candidates():
    backend = _check(lambda x, w, b: F.linear(x, w, b).view(-1).exp(), *_leaves(X, WEIGHT, BIAS))
    assert not backend.calls
    assert not backend.report.left


def test_what_comes_before_the_second_reader_is_fused():
    def function(x, w, b):
        h = x @ w + b
        return torch.relu(h) + h.sum()

    backend = _check(function, *_leaves(X, W, BIAS))
    assert backend.steps == [("bias",)]
    assert backend.reasons == ["the value before relu is read 2 times"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w, wide: torch.relu(x @ w + wide[0]), "the addend is float32 and the product bfloat16"),
        (lambda x, w, wide: x @ w + wide, "the addend is float32"),
        (lambda x, w, wide: (x @ w).add_(wide), "the addend is float32"),
        (lambda x, w, wide: (x @ w) * wide[0], "the factor is float32"),
    ],
)
def test_promotion(function, reason):
    """torch's dtype, whatever the operands'."""
    x, w = _leaves(X, W, dtype=torch.bfloat16)
    wide = _leaves(FULL)[0]
    backend = Fusing()
    result = torch.compile(function, backend=backend, fullgraph=True)(x, w, wide)
    assert result.dtype == function(x, w, wide).dtype
    assert not backend.calls
    assert reason in backend.reasons[0]


def test_integers_are_left():
    x, backend = torch.ones(3, 3, dtype=torch.int64), Fusing()
    torch.compile(lambda x: torch.relu(x @ x), backend=backend, fullgraph=True)(x)
    assert backend.reasons == ["int64 is not fused"]


def _between(change):
    def function(x, w, b):
        x, b = x.clone(), b.clone()
        h = x @ w
        change(x, b)
        return torch.relu(h + b) * x.sum()

    return function


@pytest.mark.parametrize(
    "change",
    [
        lambda x, b: x.mul_(2),
        lambda x, b: operator.iadd(x, 1),
        lambda x, b: x[0].zero_(),
        lambda x, b: x.__setitem__(0, 1.0),
        lambda x, b: torch.neg(b, out=b),
        lambda x, b: F.relu(x, True),
        lambda x, b: F.dropout(x.view(-1), 0.0, True, True),
        lambda x, b: F.batch_norm(torch.ones(4, N), b, torch.ones(N), training=True),
        lambda x, b: torch.batch_norm(torch.ones(4, N), None, None, b, torch.ones(N), True, 0.1, 1e-5, False),
        lambda x, b: torch.instance_norm(torch.ones(4, N, 3), None, None, b, torch.ones(N), True, 0.1, 1e-5, False),
    ],
)
def test_modified_in_between(change):
    """The product reads its operand as it was, the rest sees the change."""
    function, inputs, backend = _between(change), [each.detach() for each in _leaves(X, W, BIAS)], Fusing()
    result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(result, function(*inputs))
    assert not backend.calls
    assert "may modify an operand" in backend.reasons[0]


def test_a_formula_with_options_is_left():
    """h * sigmoid(h), by a quotient that is rounded: nearly right on the sample, and no silu."""

    def function(x, w):
        h = x @ w
        return h * (torch.div(torch.sigmoid(h), 1e-12, rounding_mode="floor") * 1e-12)

    x, w = (each.detach() for each in _leaves(X, W))
    backend = Fusing()
    torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(x, w), function(x, w))
    assert not backend.calls


def test_modified_through_another_input():
    def function(x, row, w):
        h = x @ w
        row.mul_(2)
        return torch.relu(h)

    x, w = (each.detach() for each in _leaves(X, W))
    expected = function(x.clone(), x.clone()[0], w)
    backend, x = Fusing(), x.clone()
    result = torch.compile(function, backend=backend, fullgraph=True)(x, x[0], w)
    torch.testing.assert_close(result, expected)
    assert not backend.calls


def test_a_change_before_or_elsewhere_does_not_matter():
    def function(x, w, b):
        x, other = x.clone(), b.clone()
        x.mul_(2)
        h = x @ w
        other.mul_(3)
        return torch.relu(h + b) * other

    backend = _check(function, *_leaves(X, W, BIAS))
    assert backend.steps == [("bias", "relu")]


def test_the_chain_ends_before_a_change():
    def function(x, w, b, r):
        r = r.clone()
        h = torch.relu(x @ w + b)
        r.mul_(2)
        x = x.clone()
        return h + r

    backend = _check(function, *_leaves(X, W, BIAS, FULL))
    assert backend.steps == [("bias", "relu")]
    assert "mul_ may modify" in backend.reasons[0]


def test_what_is_left_of_a_gate():
    def function(x, w, u):
        x = x.clone()
        gate = F.silu(x @ w)
        x.mul_(2)
        return gate * (x @ u)

    inputs, backend = [each.detach() for each in _leaves(X, W, W)], Fusing()
    torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(*inputs), function(*inputs))
    assert backend.steps == [("silu",)]
    assert sum("mul_ may modify" in reason for reason in backend.reasons) == 1


def test_into_another_tensor_in_place():
    def function(x, w, r):
        r = r.clone()
        r += x @ w
        return r

    backend = _check(function, *_leaves(X, W, FULL))
    assert not backend.calls
    assert backend.reasons == ["it goes into another tensor in place"]


def test_modes_are_barriers():
    def function(x, w):
        h = x @ w
        with torch.no_grad():
            y = torch.relu(h)
        return y + x.sum()

    backend = _check(function, *_leaves(X, W))
    assert not backend.calls


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("dtype", "steps"), [(torch.float32, ("bias", "gelu")), (torch.bfloat16, ("bias", "gelu", "residual"))], ids=str
)
def test_autocast(inside, dtype, steps):
    """In the graph or around it: the operands of the product are cast, those of a sum are torch's to promote."""

    def plain(x, w, b, r):
        return r + F.gelu(F.linear(x, w, b))

    def function(x, w, b, r):
        if not inside:
            return plain(x, w, b, r)
        with torch.autocast("cpu", torch.bfloat16):
            return plain(x, w, b, r)

    inputs, backend = [*_leaves(X, WEIGHT, BIAS), *_leaves(FULL, dtype=dtype)], Fusing(aot_eager)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
        expected = function(*inputs)
    assert backend.steps == [steps]
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)  # torch rounds twice to 8 bits


def test_autocast_of_two_layers():
    def function(x, up, b, down, c):
        return F.linear(F.gelu(F.linear(x, up, b)), down, c)

    inputs, backend = _leaves(*MLP[:-1]), Fusing(aot_eager)
    with torch.autocast("cpu", torch.bfloat16):
        result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
        expected = function(*inputs)
    assert backend.calls == ["mlp"]
    reference = function(*(each.detach().double() for each in inputs))
    assert_no_worse_than_torch(result.detach(), expected.detach(), reference)
    for got, leaf in zip(torch.autograd.grad(result.float().sum(), inputs), inputs, strict=True):
        assert got.dtype == leaf.dtype


@pytest.mark.parametrize("name", ["three operators", "residual", "gate of linears", "batches", "rows and columns"])
def test_one_graph_for_any_number_of_rows(name):
    function, shapes, _ = SPELLINGS[name]
    backend = Fusing(aot_eager)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    rows = shapes[0][0]
    for m in (8, 11, 64, 2):
        inputs = _leaves(*((m, *shape[1:]) if len(shape) > 1 and shape[0] == rows else shape for shape in shapes))
        for each in inputs:
            if each.ndim > 1 and each.shape[0] == m and each.shape not in (W, WEIGHT):
                torch._dynamo.mark_dynamic(each, 0)
        for got, same in zip(_gradients(compiled, inputs), _gradients(function, inputs), strict=True):
            torch.testing.assert_close(got, same, rtol=1e-4, atol=1e-4)
    assert len(backend.graphs) == len(backend.calls) == 1


def test_sizes_that_are_only_equal_are_not_made_the_same():
    """No guard is added by looking: a residual that torch broadcasts or not stays torch's."""
    backend = Fusing()
    compiled = torch.compile(lambda x, w, b: torch.relu(x @ w + b), backend=backend, fullgraph=True, dynamic=True)
    for n in (5, 6):
        inputs = _leaves((4, 9), (9, n), (n,))
        torch.testing.assert_close(compiled(*inputs), torch.relu(inputs[0] @ inputs[1] + inputs[2]))
    assert len(backend.graphs) == 1


OPERATIONS = (  # on two [N, N] values and an [N] vector
    lambda p, q, v: p @ q,
    lambda p, q, v: p @ q,
    lambda p, q, v: F.linear(p, q, v),
    lambda p, q, v: p + v,
    lambda p, q, v: p + v[:, None],
    lambda p, q, v: p + q,
    lambda p, q, v: p - q,
    lambda p, q, v: p * q,
    lambda p, q, v: 0.5 * p,
    lambda p, q, v: torch.relu(p),
    lambda p, q, v: F.silu(p),
    lambda p, q, v: p * torch.sigmoid(p),
    lambda p, q, v: p.add_(q),
    lambda p, q, v: p.mul_(0.5),
    lambda p, q, v: F.relu(p, inplace=True),
    lambda p, q, v: p.t().mul_(2).t(),
    lambda p, q, v: p[0].zero_().expand(N, N),
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 2), st.integers(0, 3)), min_size=3, max_size=12
    )
)
def test_any_program(program):
    """Of operations on the values made last, views and changes in place among them; float64, so a wrong one shows."""

    def function(x, w, v):
        values = [x.clone(), w.clone(), x + w, w + v]
        for index, first, second in program:
            values.append(OPERATIONS[index](values[-1 - first], values[-1 - second], v))
        return values[-1]

    inputs = [each.detach() / 4 for each in _leaves((N, N), (N, N), (N,), dtype=torch.float64)]
    try:
        expected = function(*inputs)
    except RuntimeError:  # what was expanded is not written to
        assume(False)
    torch._dynamo.reset()
    result = torch.compile(function, backend=Fusing(), fullgraph=True)(*inputs)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_dropout():
    """Other numbers than torch's, from the same generator."""
    x, w = _leaves((64, K), (K, 512))
    backend = Fusing(aot_eager)
    compiled = torch.compile(lambda x, w: F.dropout(F.relu(x @ w), 0.25), backend=backend, fullgraph=True)
    torch.manual_seed(3)
    first, second = compiled(x, w), compiled(x, w)
    torch.manual_seed(3)
    again = compiled(x, w)
    assert backend.steps == [("relu", "dropout")]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    kept, positive = first != 0, F.relu(x @ w) > 1e-6
    assert abs(kept[positive].float().mean().item() - 0.75) < 0.02  # 6 standard deviations of 16k draws
    torch.testing.assert_close(first[kept], (F.relu(x @ w) / 0.75)[kept], rtol=1e-4, atol=1e-6)
    (dx,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(dx, (kept / 0.75) @ w.detach().t(), rtol=1e-3, atol=1e-3)


def test_dropout_with_torchs_numbers():
    backend = Fusing()
    with config.patch(fallback_random=True):
        torch.compile(lambda x, w: F.dropout(x @ w), backend=backend, fullgraph=True)(*_leaves(X, W))
    assert not backend.calls
    assert "fallback_random" in backend.reasons[0]


def test_dropout_in_evaluation_is_nothing():
    backend = _check(lambda x, w, r: F.dropout(F.linear(x, w), 0.5, False) + r, *_leaves(X, WEIGHT, FULL))
    assert backend.steps == [("residual",)]


def test_transforms_are_left_alone():
    x, w = _leaves((3, *X), W)
    function = torch.func.vmap(lambda x: torch.relu(x @ w))
    backend = Fusing()
    result = torch.compile(function, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(result, function(x))
    assert backend.reasons == ["the graph is of torch.func or forward-mode AD"]


def test_sizes_known_at_run_time_only():
    def function(x, w, b, mask):
        return torch.relu(x[mask] @ w + b)

    inputs, backend = [*(each.detach() for each in _leaves(X, W, BIAS)), torch.arange(M) % 2 == 0], Fusing(aot_eager)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for mask in (inputs[-1], ~inputs[-1], inputs[-1] & False):
            torch.testing.assert_close(compiled(*inputs[:-1], mask), function(*inputs[:-1], mask))
    assert len(backend.graphs) == 1
    assert backend.steps == [("bias", "relu")]


# From end to end.


def _block(x, up, b, down, c):
    return x + torch.relu(x @ up + b) @ down + c


BLOCK = ((16, 8), (8, 24), (24,), (24, 8), (8,))


def test_training_with_inductor_on_any_number_of_rows():
    counters.clear()
    with compile_fusion() as report, isogemm.dispatch_log() as log:
        compiled = torch.compile(_block, fullgraph=True)
        for m in (16, 9, 30):
            inputs = _leaves((m, 8), *BLOCK[1:])
            torch._dynamo.mark_dynamic(inputs[0], 0)
            for got, same in zip(_gradients(compiled, inputs), _gradients(_block, inputs), strict=True):
                torch.testing.assert_close(got, same, rtol=1e-4, atol=1e-3)
    (fused,) = report.fused
    assert fused.steps == ("bias", "relu", "matmul [s77, 24] x [24, 8] float32", "bias", "residual")
    assert {"fused", "weight_grad", "bias_grad"} <= {entry.op for entry in log}
    assert counters["stats"]["unique_graphs"] == 1


class Counting(CustomGraphPass):
    """Somebody else's pass: it sees the graph as Dynamo made it."""

    seen = 0

    def __call__(self, graph):
        type(self).seen += sum(node.target is torch.relu for node in graph.nodes)

    def uuid(self):
        return "counting"


def _relu(x, w):
    return torch.relu(x @ w)


def _compile_relu():
    torch._dynamo.reset()
    counters.clear()
    inputs = [each.detach() for each in _leaves(X, W)]
    torch.testing.assert_close(torch.compile(_relu, fullgraph=True)(*inputs), _relu(*inputs))
    return counters["aot_autograd"]


def test_caches_know_fused_graphs_from_others():
    """Off, on, off, on: each time from a cache where it was seen before, and never the other's graph."""
    with fresh_cache():
        first = [dict(_compile_relu())]
        with compile_fusion() as report:
            first.append(dict(_compile_relu()))
        assert all(each.get("autograd_cache_miss") == 1 for each in first)
        assert dict(_compile_relu()).get("autograd_cache_hit") == 1
        with compile_fusion() as again:
            assert dict(_compile_relu()).get("autograd_cache_hit") == 1
    assert report.fused.total() == again.fused.total() == 1


def test_on_and_off():
    before = config.get_config_copy()
    fusion = compile_fusion()
    assert isinstance(config.pre_grad_custom_pass, FusionPass)
    with compile_fusion(False):
        assert config.pre_grad_custom_pass is None
    assert config.pre_grad_custom_pass.report is fusion.report
    second = compile_fusion()  # a new report, one pass
    assert second.report is not fusion.report
    assert config.pre_grad_custom_pass.before is None
    compile_fusion(False)
    assert config.get_config_copy() == before


def test_somebody_elses_pass_stays_and_goes_first():
    Counting.seen = 0
    other = Counting()
    with config.patch(pre_grad_custom_pass=other), fresh_cache():
        with compile_fusion() as report:
            assert config.pre_grad_custom_pass.uuid()[1:] == ("counting",)
            _compile_relu()
        assert config.pre_grad_custom_pass is other
        compile_fusion()
        compile_fusion(False)
        assert config.pre_grad_custom_pass is other
    assert report.fused.total() == 1
    assert Counting.seen == 1


def test_pass_in_a_caches_key():
    """torch 2.11 pickles it: the same for the same code, whatever it has done."""
    fresh, used = FusionPass(), FusionPass()
    used.report.add_left("a", "b")
    assert pickle.dumps(fresh) == pickle.dumps(used)
    assert fresh.uuid() == used.uuid()
    assert FusionPass(Counting()).uuid() != fresh.uuid()
    assert FusionPass(lambda graph: None).uuid() is None
    assert isinstance(copy.deepcopy(used), FusionPass)


def test_inside_a_checkpoint():
    """The mask is drawn once, whatever is computed again."""

    def function(x, w):
        return checkpoint(lambda x: F.dropout(torch.relu(x @ w)), x, use_reentrant=False)

    x, w = _leaves(X, W)
    with compile_fusion() as report:
        result = torch.compile(function, fullgraph=True)(x, w)
        dx, dw = torch.autograd.grad(result.sum(), (x, w))
    assert [entry.steps for entry in report.fused] == [("relu", "dropout")]
    above = 2.0 * (result != 0)
    torch.testing.assert_close(dx, above @ w.t())
    torch.testing.assert_close(dw, x.t() @ above)
