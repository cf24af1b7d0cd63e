"""Where the graph pass may not move a product: operands that change, other dtypes, modes and autocast."""

import operator

import pytest
import torch
from graph_fusing import BIAS, FULL, WEIGHT, Fusing, N, W, X, check_fused, make_leaves
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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
    x, w = make_leaves(X, W, dtype=torch.bfloat16)
    wide = make_leaves(FULL)[0]
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
    function, inputs, backend = _between(change), [each.detach() for each in make_leaves(X, W, BIAS)], Fusing()
    result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(result, function(*inputs))
    assert not backend.calls
    assert "may modify an operand" in backend.reasons[0]


def test_a_formula_with_options_is_left():
    """h * sigmoid(h), by a quotient that is rounded: nearly right on the sample, and no silu."""

    def function(x, w):
        h = x @ w
        return h * (torch.div(torch.sigmoid(h), 1e-12, rounding_mode="floor") * 1e-12)

    x, w = (each.detach() for each in make_leaves(X, W))
    backend = Fusing()
    torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(x, w), function(x, w))
    assert not backend.calls


def test_modified_through_another_input():
    def function(x, row, w):
        h = x @ w
        row.mul_(2)
        return torch.relu(h)

    x, w = (each.detach() for each in make_leaves(X, W))
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

    backend = check_fused(function, *make_leaves(X, W, BIAS))
    assert backend.steps == [("bias", "relu")]


def test_the_chain_ends_before_a_change():
    def function(x, w, b, r):
        r = r.clone()
        h = torch.relu(x @ w + b)
        r.mul_(2)
        x = x.clone()
        return h + r

    backend = check_fused(function, *make_leaves(X, W, BIAS, FULL))
    assert backend.steps == [("bias", "relu")]
    assert "mul_ may modify" in backend.reasons[0]


def test_what_is_left_of_a_gate():
    def function(x, w, u):
        x = x.clone()
        gate = F.silu(x @ w)
        x.mul_(2)
        return gate * (x @ u)

    inputs, backend = [each.detach() for each in make_leaves(X, W, W)], Fusing()
    torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(*inputs), function(*inputs))
    assert backend.steps == [("silu",)]
    assert sum("mul_ may modify" in reason for reason in backend.reasons) == 1


def test_into_another_tensor_in_place():
    def function(x, w, r):
        r = r.clone()
        r += x @ w
        return r

    backend = check_fused(function, *make_leaves(X, W, FULL))
    assert not backend.calls
    assert backend.reasons == ["it goes into another tensor in place"]


def test_modes_are_barriers():
    def function(x, w):
        h = x @ w
        with torch.no_grad():
            y = torch.relu(h)
        return y + x.sum()

    backend = check_fused(function, *make_leaves(X, W))
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

    inputs, backend = [*make_leaves(X, WEIGHT, BIAS), *make_leaves(FULL, dtype=dtype)], Fusing(aot_eager)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
        expected = function(*inputs)
    assert backend.steps == [steps]
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)  # torch rounds twice to 8 bits
