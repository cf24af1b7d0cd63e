"""Which graphs the pass under torch.compile fuses, on the CPU: before and after it."""

import math

import pytest
import torch
from graph_fusing import BIAS, FULL, WEIGHT, Fusing, K, M, N, W, X, check_fused, gradients_by, make_leaves
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

import isogemm
from isogemm.verify.errors import assert_no_worse_than_torch

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
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
    """The form in Hugging Face's models."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _augmented(x, w, b):
    y = x @ w
    y += b
    return F.relu(y, inplace=True)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name):
    """One call in the place of all, with the values and gradients of all."""
    function, shapes, steps = SPELLINGS[name]
    backend = check_fused(function, *make_leaves(*shapes))
    assert backend.steps == [tuple(steps.split("," if "," in steps else " "))]
    assert len(backend.calls) == 1
    left = {getattr(target, "__name__", target) for target in backend.targets} - {backend.calls[0]}
    assert left <= {"t", "squeeze", "flatten"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["linear", "residual first", "gate of linears"])
def test_dtype(name, dtype):
    function, shapes, _ = SPELLINGS[name]
    backend = check_fused(function, *make_leaves(*shapes, dtype=dtype))
    assert len(backend.calls) == 1


@pytest.mark.parametrize("name", ["three operators", "gate of linears", "rows and columns", "column bias"])
def test_training_through_aot_autograd(name):
    """The traced call is the registered operator, with its own gradient."""
    function, shapes, _ = SPELLINGS[name]
    backend = check_fused(function, *make_leaves(*shapes), backend=Fusing(aot_eager))
    assert len(backend.calls) == 1


MLP = (X, (11, K), (11,), (N, 11), (N,), FULL)


def test_two_layers_are_one_node():
    def function(x, up, b, down, c, r):
        return r + F.linear(F.gelu(F.linear(x, up, b)), down, c)

    backend = check_fused(function, *make_leaves(*MLP), backend=Fusing(aot_eager))
    assert backend.calls == ["mlp"]
    (steps,) = backend.steps
    assert steps == ("bias", "gelu", "linear [7, 11] x [5, 11] float32", "bias", "residual")


def test_three_layers():
    """The first has an activation after it and no layer that ends a pair; the others are one."""

    def function(x, first, second, third):
        return torch.relu(torch.relu(x @ first) @ second) @ third

    backend = check_fused(function, *make_leaves(X, (K, 11), (11, 13), (13, N)))
    assert backend.calls == ["matmul_fused", "mlp"]


def test_dropout_between_layers_is_in_their_node():
    """With probability 1: any other draws other masks than torch."""

    def function(x, up, down, c):
        return F.linear(F.dropout(torch.relu(F.linear(x, up)), 1.0), down, c)

    backend = check_fused(function, *make_leaves(X, (11, K), (N, 11), BIAS))
    assert backend.calls == ["mlp"]
    assert backend.steps == [("relu", "dropout", "linear [7, 11] x [5, 11] float32", "bias")]


def test_gated_layers_are_one_node():
    def function(x, gate, up, down):
        return (F.silu(x @ gate) * (x @ up)) @ down

    backend = check_fused(function, *make_leaves(X, (K, 11), (K, 11), (11, N)))
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
    backend = check_fused(function, *make_leaves((2, 3, K), W, *shapes))
    assert backend.steps == ([tuple(steps.split())] if steps else [])


def test_flat_layers_are_one_node():
    def function(x, up, b, down, c):
        return x + _flat(_new_gelu(_flat(x, up, b)), down, c)

    backend = Fusing(aot_eager)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for shape in ((2, 3, K), (5, 4, K)):
        inputs = make_leaves(shape, (K, 11), (11,), (11, K), (K,))
        torch._dynamo.mark_dynamic(inputs[0], 0)
        torch._dynamo.mark_dynamic(inputs[0], 1)
        for got, same in zip(gradients_by(compiled, inputs), gradients_by(function, inputs), strict=True):
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
    x = make_leaves((2, 6, 8))[0]
    inputs = [x, *module.parameters()]
    backend = Fusing()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    actual = gradients_by(lambda *given: compiled(given[0]), inputs)
    expected = gradients_by(lambda *given: module(given[0]), inputs)
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
    "columns first": (lambda x, w, r: r.t() + x @ w, (X, W, (N, M)), "another layout"),
    "gate of other inputs": (lambda x, y, w: F.silu(x @ w) * (y @ w), (X, X, W), "different left operands"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_with_a_reason(name):
    function, shapes, reason = LEFT[name]
    backend = check_fused(function, *make_leaves(*shapes))
    assert any(reason in each for each in backend.reasons), backend.reasons


def test_plain_products_are_no_candidates():
    backend = check_fused(lambda x, w, b: F.linear(x, w, b).view(-1).exp(), *make_leaves(X, WEIGHT, BIAS))
    assert not backend.calls
    assert not backend.report.left


def test_what_comes_before_the_second_reader_is_fused():
    def function(x, w, b):
        h = x @ w + b
        return torch.relu(h) + h.sum()

    backend = check_fused(function, *make_leaves(X, W, BIAS))
    assert backend.steps == [("bias",)]
    assert backend.reasons == ["the value before relu is read 2 times"]


@pytest.mark.parametrize("name", ["three operators", "residual", "gate of linears", "batches", "rows and columns"])
def test_one_graph_for_any_number_of_rows(name):
    function, shapes, _ = SPELLINGS[name]
    backend = Fusing(aot_eager)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    rows = shapes[0][0]
    for m in (8, 11, 64, 2):
        inputs = make_leaves(*((m, *shape[1:]) if len(shape) > 1 and shape[0] == rows else shape for shape in shapes))
        for each in inputs:
            if each.ndim > 1 and each.shape[0] == m and each.shape not in (W, WEIGHT):
                torch._dynamo.mark_dynamic(each, 0)
        for got, same in zip(gradients_by(compiled, inputs), gradients_by(function, inputs), strict=True):
            torch.testing.assert_close(got, same, rtol=1e-4, atol=1e-4)
    assert len(backend.graphs) == len(backend.calls) == 1


def test_autocast_of_two_layers():
    def function(x, up, b, down, c):
        return F.linear(F.gelu(F.linear(x, up, b)), down, c)

    inputs, backend = make_leaves(*MLP[:-1]), Fusing(aot_eager)
    with torch.autocast("cpu", torch.bfloat16):
        result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
        expected = function(*inputs)
    assert backend.calls == ["mlp"]
    reference = function(*(each.detach().double() for each in inputs))
    assert_no_worse_than_torch(result.detach(), expected.detach(), reference)
    for got, leaf in zip(torch.autograd.grad(result.float().sum(), inputs), inputs, strict=True):
        assert got.dtype == leaf.dtype
