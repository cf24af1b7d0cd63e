"""The graph pass on any program, on sizes that are not known, on dropout and transforms."""

import pytest
import torch
from graph_fusing import BIAS, FULL, WEIGHT, Fusing, K, M, N, W, X, check_fused, make_leaves
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor import config
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_sizes_that_are_only_equal_are_not_made_the_same():
    """No guard is added by looking: a residual that torch broadcasts or not stays torch's."""
    backend = Fusing()
    compiled = torch.compile(lambda x, w, b: torch.relu(x @ w + b), backend=backend, fullgraph=True, dynamic=True)
    for n in (5, 6):
        inputs = make_leaves((4, 9), (9, n), (n,))
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
    """Programs of operations on the last values, with views and in-place changes; float64, so a wrong one shows."""

    def function(x, w, v):
        values = [x.clone(), w.clone(), x + w, w + v]
        for index, first, second in program:
            values.append(OPERATIONS[index](values[-1 - first], values[-1 - second], v))
        return values[-1]

    inputs = [each.detach() / 4 for each in make_leaves((N, N), (N, N), (N,), dtype=torch.float64)]
    try:
        expected = function(*inputs)
    except RuntimeError:  # what was expanded is not written to
        assume(False)
    torch._dynamo.reset()
    result = torch.compile(function, backend=Fusing(), fullgraph=True)(*inputs)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_dropout():
    """Other numbers than torch's, from the same generator."""
    x, w = make_leaves((64, K), (K, 512))
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
        torch.compile(lambda x, w: F.dropout(x @ w), backend=backend, fullgraph=True)(*make_leaves(X, W))
    assert not backend.calls
    assert "fallback_random" in backend.reasons[0]


def test_dropout_in_evaluation_is_nothing():
    backend = check_fused(lambda x, w, r: F.dropout(F.linear(x, w), 0.5, False) + r, *make_leaves(X, WEIGHT, FULL))
    assert backend.steps == [("residual",)]


def test_transforms_are_left_alone():
    x, w = make_leaves((3, *X), W)
    function = torch.func.vmap(lambda x: torch.relu(x @ w))
    backend = Fusing()
    result = torch.compile(function, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(result, function(x))
    assert backend.reasons == ["the graph is of torch.func or forward-mode AD"]


def test_sizes_known_at_run_time_only():
    def function(x, w, b, mask):
        return torch.relu(x[mask] @ w + b)

    inputs, backend = (
        [*(each.detach() for each in make_leaves(X, W, BIAS)), torch.arange(M) % 2 == 0],
        Fusing(aot_eager),
    )
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for mask in (inputs[-1], ~inputs[-1], inputs[-1] & False):
            torch.testing.assert_close(compiled(*inputs[:-1], mask), function(*inputs[:-1], mask))
    assert len(backend.graphs) == 1
    assert backend.steps == [("bias", "relu")]
