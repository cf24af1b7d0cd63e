"""One declaration makes an operator in eager mode, for the dispatcher, with fakes and gradients."""

import pytest
import torch
from dispatching import ThroughOperators
from torch._subclasses import FakeTensorMode

from isogemm.core import operator
from isogemm.core.operator import Operator

CALLS = []


def _run(x, other, factor):
    CALLS.append("run")
    return x * factor if other is None else x * factor + other


def _keep(ctx, inputs, output):
    ctx.factor, ctx.has_other = inputs[2], inputs[1] is not None


def _backward(ctx, grad):
    CALLS.append("backward")
    return grad * ctx.factor, grad if ctx.has_other else None, None


@pytest.fixture(scope="module")
def scaled():
    """An operator that is there for these tests alone."""
    library = torch.library.Library("isogemm", "FRAGMENT")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "_library", library)
        yield Operator(
            "scaled_in_test(Tensor x, Tensor? other, float factor) -> Tensor", _run,
            lambda x, other, factor: torch.empty_like(x), keep=_keep, backward=_backward, refused="scaled",
        )  # fmt: skip
    library._destroy()


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


@pytest.mark.parametrize("mode", [None, ThroughOperators])
@pytest.mark.parametrize("has_other", [False, True])
def test_results_and_gradients(mode, has_other, scaled):
    x = torch.randn(3, requires_grad=True)
    other = torch.randn(3, requires_grad=True) if has_other else None
    if mode is None:
        y = scaled(x, other, 2.0)
    else:
        with mode():
            y = scaled(x, other, 2.0)
    y.backward(torch.ones(3))
    assert torch.equal(y.detach(), x.detach() * 2 + (other.detach() if has_other else 0))
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert not has_other or torch.equal(other.grad, torch.ones(3))
    assert CALLS == ["run", "backward"]


def test_no_graph_where_no_gradient_is_wanted(scaled):
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert scaled(x, None, 2.0).grad_fn is None
    assert scaled(x.detach(), None, 2.0).grad_fn is None


def test_fakes_do_not_run_it(scaled):
    with FakeTensorMode() as mode:
        fake = scaled(mode.from_tensor(torch.zeros(3, 4)), None, 2.0)
    assert fake.shape == (3, 4)
    assert scaled(torch.zeros(3, 4, device="meta"), None, 2.0).shape == (3, 4)
    assert not CALLS


def test_it_is_registered(scaled):
    assert scaled.op is torch.ops.isogemm.scaled_in_test
    torch.library.opcheck(scaled.op.default, (torch.randn(3, requires_grad=True), None, 2.0))


def test_transforms_are_refused_by_the_public_name(scaled):
    with pytest.raises(RuntimeError, match=r"isogemm\.scaled has no rule"):
        torch.vmap(lambda x: scaled(x, None, 2.0))(torch.randn(2, 3))
