"""Which backward adds to a main_grad: one that accumulates, and no other, for every function that has parameters."""

import contextlib

import pytest
import torch
from dispatching import ThroughOperators

import isogemm
from isogemm.gemm.api import mlp
from isogemm.verify.inputs import make_data

SHAPES = {"weight": (24, 16), "bias": (24,), "weight_up": (24, 16), "bias_up": (24,)}
SHAPES |= {"weight_down": (24, 24), "bias_down": (24,)}
LAYER, GATE = ("weight", "bias"), ("weight", "bias", "weight_up", "bias_up")
CASES = {
    "linear": (isogemm.linear, LAYER, {}),
    "gelu": (isogemm.linear, LAYER, {"activation": "gelu"}),
    "relu": (isogemm.linear, LAYER, {"activation": "relu"}),
    "swiglu": (isogemm.linear, GATE, {"activation": "swiglu"}),
    "mlp": (mlp, (*LAYER, "weight_down", "bias_down"), {"activation": "gelu"}),
    "mlp swiglu": (mlp, (*GATE, "weight_down", "bias_down"), {"activation": "swiglu"}),
}


MODES = {
    "eager": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "operators": ThroughOperators,
}


def _normal(*shape, seed=0):
    return make_data("normal", shape, seed=seed, device="cpu")


class Trained:
    def __init__(self, name, *, main_grads=True):
        self.function, names, self.options = CASES[name]
        self.x = _normal(7, 16, seed=9).requires_grad_()
        self.parameters = {
            each: torch.nn.Parameter(_normal(*SHAPES[each], seed=seed)) for seed, each in enumerate(names)
        }
        for each in self.parameters.values() if main_grads else ():
            each.main_grad = torch.zeros(each.shape)

    def loss(self):
        return self.function(self.x, **self.parameters, **self.options).float().square().sum()

    def gradients(self, **options):
        return torch.autograd.grad(self.loss(), list(self.parameters.values()), **options)

    def touched(self):
        return {
            name
            for name, each in self.parameters.items()
            if each.main_grad.any() or getattr(each, "grad_added_to_main_grad", False)
        }


def _assert_same(found, expected):
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_autograd_grad_returns_gradients_and_adds_nothing(name, mode):
    trained, plain = Trained(name), Trained(name, main_grads=False)
    with MODES[mode]():
        _assert_same(trained.gradients(), plain.gradients())
        torch.autograd.grad(trained.loss(), trained.x)
        trained.loss().backward(inputs=[trained.x])
    assert not trained.touched()
    assert all(each.grad is None for each in trained.parameters.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_backward_adds_to_those_it_accumulates(name, mode):
    right = Trained(name, main_grads=False)
    with MODES[mode]():
        expected = dict(zip(right.parameters, right.gradients(), strict=True))
    for wanted in (None, *right.parameters):
        trained = Trained(name)
        with MODES[mode]():
            trained.loss().backward(inputs=None if wanted is None else [trained.parameters[wanted]])
        assert trained.touched() == (set(trained.parameters) if wanted is None else {wanted})
        for each, parameter in trained.parameters.items():
            assert parameter.grad is None
            if wanted in (None, each):
                of_cast = mode == "autocast"  # rounded where there is no main_grad
                torch.testing.assert_close(
                    parameter.main_grad, expected[each], rtol=2**-8 if of_cast else 0, atol=2**-8 if of_cast else 0
                )


@pytest.mark.parametrize("mode", ["eager", "autocast"])
@pytest.mark.parametrize("name", CASES)
def test_create_graph_gives_gradients_with_a_graph(name, mode):
    """In `.grad`, or returned: a main_grad holds no graph."""
    trained, plain = Trained(name), Trained(name, main_grads=False)
    with MODES[mode]():
        expected = plain.gradients()
        returned = trained.gradients(create_graph=True)
        trained.loss().backward(create_graph=True)
    assert not trained.touched()
    for each, found, right in zip(trained.parameters.values(), returned, expected, strict=True):
        assert found.requires_grad
        assert each.grad.requires_grad
        torch.testing.assert_close(found.detach(), right, rtol=2**-6, atol=2**-6 * right.abs().max().item())
        torch.testing.assert_close(each.grad, found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_hooks_see_the_gradient_and_may_change_it(name, mode):
    """It then goes to `.grad`: a main_grad is added to before a hook could say what."""
    trained, plain = Trained(name), Trained(name, main_grads=False)
    hooked = next(iter(trained.parameters))
    trained.parameters[hooked].register_hook(lambda grad: grad * 0.5)
    with MODES[mode]():
        trained.loss().backward()
        plain.loss().backward()
    assert trained.touched() == {*trained.parameters} - {hooked}
    _assert_same([trained.parameters[hooked].grad], [plain.parameters[hooked].grad * 0.5])


def test_a_compiled_backward_has_no_gradient_for_hooks():
    trained = Trained("linear")
    trained.parameters["weight"].register_hook(lambda grad: grad)
    loss = torch.compile(trained.loss, backend="aot_eager")()
    with pytest.raises(RuntimeError, match="the weight has a main_grad and a hook"):
        loss.backward()


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_backward(name):
    """It adds where it accumulates, and refuses what torch.autograd.grad is to return, before any is added."""
    torch._dynamo.reset()
    trained, plain = Trained(name), Trained(name)
    compiled = torch.compile(trained.function, backend="aot_eager", fullgraph=True)
    trained.function = compiled
    torch.autograd.grad(trained.loss(), trained.x)
    assert not trained.touched()
    for parameter in trained.parameters.values():
        with pytest.raises(RuntimeError, match="main_grad"):
            torch.autograd.grad(trained.loss(), parameter)
        assert not trained.touched()
    trained.loss().backward()
    plain.loss().backward()
    for name, parameter in plain.parameters.items():
        torch.testing.assert_close(trained.parameters[name].main_grad, parameter.main_grad, rtol=0, atol=0)


def test_a_weight_that_is_computed_passes_its_gradient_on():
    """It has no `.grad` to accumulate into, and so no main_grad either."""
    base = _normal(24, 16).requires_grad_()
    for options in ({}, {"activation": "gelu"}):
        weight = base * 2
        weight.main_grad = torch.zeros(24, 16)
        (found,) = torch.autograd.grad(isogemm.linear(_normal(7, 16, seed=1), weight, **options).sum(), base)
        assert found.any()
        assert not weight.main_grad.any()
