"""Calls that go to a plan without being looked at again: only those that are like an earlier one in all that counts."""

import pytest
import torch
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from isogemm import linear
from isogemm.core.eager import KnownCalls
from isogemm.core.precision import overridden
from isogemm.gemm import api


class Plan:
    def __init__(self):
        self.runs = 0

    def run(self, inputs):
        self.runs += 1
        x, weight, _, bias = inputs
        return torch.nn.functional.linear(x, weight, bias)


@pytest.fixture
def call(monkeypatch):
    """Tensors of a call without a gradient, and the plan that is known for it."""
    x, weight, bias = torch.randn(3, 16), torch.nn.Parameter(torch.randn(8, 16)), torch.nn.Parameter(torch.randn(8))
    plan = Plan()
    with torch.no_grad():
        known = KnownCalls()
        known.keep((x.shape, weight.shape, False, None, "ieee"), (x, weight, bias), plan)
    monkeypatch.setattr(api, "_known_plans", known)
    return x, weight, bias, plan


def test_is_served(call):
    x, weight, bias, plan = call
    with torch.no_grad():
        linear(x, weight, bias, precision="ieee")
        linear(torch.randn(3, 16), torch.nn.Parameter(torch.randn(8, 16)), bias, precision="ieee")
        assert plan.runs == 2
        linear(x, weight.detach().clone().requires_grad_(), bias, precision="ieee")  # of another type
    assert plan.runs == 2


class Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.ops.isogemm.linear.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "change",
    ["gradients", "of x", "dtype", "strides", "address", "rows", "precision", "out_dtype", "no bias", "autocast",
     "mode", "vmap", "forward AD", "subclass", "negative", "tracing", "fake"],
)  # fmt: skip
def test_nothing_else_is(call, change):
    x, weight, bias, plan = call
    options = {"precision": "ieee"}
    wanted = torch.nn.functional.linear(x, weight, bias)
    with torch.set_grad_enabled(change in ("gradients", "of x")):
        match change:
            case "gradients":
                assert linear(x, weight, bias, **options).requires_grad
            case "of x":
                x.requires_grad_()
                assert linear(x, weight.detach(), bias.detach(), **options).requires_grad
            case "dtype":
                linear(x.double(), torch.nn.Parameter(weight.double()), torch.nn.Parameter(bias.double()))
            case "strides":
                assert torch.allclose(linear(x.t().contiguous().t(), weight, bias, **options), wanted, atol=1e-5)
            case "address":
                away = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
                assert torch.allclose(linear(away, weight, bias, **options), wanted, atol=1e-5)
            case "rows":
                linear(torch.randn(4, 16), weight, bias, **options)
            case "precision":
                linear(x, weight, bias)
            case "out_dtype":
                linear(x, weight, bias, out_dtype=torch.float32, **options)
            case "no bias":
                linear(x, weight, **options)
            case "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    assert linear(x, weight, bias).dtype is torch.bfloat16
                    assert linear(x, weight, bias, **options).dtype is torch.bfloat16
            case "mode":
                with Counting() as mode:
                    linear(x, weight, bias, **options)
                assert mode.calls == 1
            case "vmap":
                with pytest.raises(RuntimeError, match="no rule"):
                    vmap(lambda row: linear(row, weight, bias, **options))(x[None])
            case "forward AD":
                with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="no rule"):
                    linear(torch.autograd.forward_ad.make_dual(x, x), weight, bias, **options)
            case "subclass":
                linear(x.as_subclass(type("Sub", (torch.Tensor,), {})), weight, bias, **options)
            case "negative":
                assert torch.allclose(linear(torch._neg_view(-x), weight, bias, **options), wanted, atol=1e-5)
            case "tracing":
                graph = torch.jit.trace(lambda *tensors: linear(*tensors, **options), (x, weight, bias)).graph
                assert "isogemm::linear" in str(graph)
            case "fake":
                with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    fakes = [mode.from_tensor(each) for each in (x, weight, bias)]
                    assert linear(*fakes, **options).shape == (3, 8)
    assert plan.runs == 0


def test_a_plan_is_known_from_the_second_call_on(monkeypatch):
    x, weight, plan = torch.randn(3, 16), torch.randn(8, 16), Plan()
    plans = {}
    monkeypatch.setattr(api, "_known_plans", KnownCalls())
    monkeypatch.setattr(api, "plans", plans)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(api.op, "linear", lambda *args: torch.nn.functional.linear(*args[:3]))
    with torch.no_grad():
        linear(x, weight, precision="ieee")
        assert plan.runs == 0
        plans[api.op.plan_key("linear", x, weight, None, None, "ieee")] = plan
        linear(x, weight, precision="ieee")
        linear(x, weight, precision="ieee")
        assert plan.runs == 1


def test_a_plan_is_known_for_one_setting_of_torchs_precision(monkeypatch):
    """For float32 products without a precision of their own, which depend on it."""
    x, weight, plan = torch.randn(3, 16), torch.randn(8, 16), Plan()
    known = KnownCalls()
    known.keep((x.shape, weight.shape, True, None, None), (x, weight), plan)
    monkeypatch.setattr(api, "_known_plans", known)
    with torch.no_grad():
        linear(x, weight)
        assert plan.runs == 1
        with overridden("cuda", "tf32"):
            linear(x, weight)
        assert plan.runs == 1
        linear(x, weight)
    assert plan.runs == 2


@pytest.mark.parametrize("trained", ["x", "bias"])
def test_a_gradient_of_one_tensor_is_not_skipped(monkeypatch, trained):
    tensors = {"x": torch.randn(3, 16), "weight": torch.randn(8, 16), "bias": torch.randn(8)}
    tensors[trained].requires_grad_()
    x, weight, _ = tensors.values()
    plan, known = Plan(), KnownCalls()
    monkeypatch.setattr(api, "_known_plans", known)
    with torch.no_grad():
        known.keep((x.shape, weight.shape, False, None, "ieee"), tuple(tensors.values()), plan)
        linear(**tensors, precision="ieee")
    assert plan.runs == 1
    assert linear(**tensors, precision="ieee").requires_grad
    assert plan.runs == 1
