"""The registry of epilogues: values, derivatives, torch's spellings of them, the user's own."""

import math

import pytest
import torch
import triton
from torch import nn
from torch.nn import functional as F

from isogemm.epilogues import ACTIVATIONS, of_module, recognise, register, spec

DEFINITIONS = {  # written out, in fp64
    "relu": lambda z: torch.where(z > 0, z, 0 * z),
    "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "quick_gelu": lambda z: z / (1 + torch.exp(-1.702 * z)),
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "tanh": lambda z: (torch.exp(2 * z) - 1) / (torch.exp(2 * z) + 1),
    "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
    "relu2": lambda z: torch.where(z > 0, z * z, 0 * z),
    "leaky_relu": lambda z, negative_slope=0.01: torch.where(z > 0, z, negative_slope * z),
}
GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
PLAIN = list(DEFINITIONS)


def test_names():
    assert set(ACTIVATIONS) == set(DEFINITIONS) | set(GATES)
    assert all(entry.name == name for name, entry in ACTIVATIONS.items())
    assert {name: entry.gate for name, entry in ACTIVATIONS.items() if entry.gate} == GATES
    assert {entry.saved for entry in ACTIVATIONS.values()} <= {"mask", "out", "pre"}
    assert ACTIVATIONS["relu"].saved == "mask"
    assert {name: dict(entry.arguments) for name, entry in ACTIVATIONS.items() if entry.arguments} == {
        "leaky_relu": {"negative_slope": 0.01}
    }


@pytest.mark.parametrize("name", PLAIN)
def test_every_entry_has_a_device_form(name):
    from isogemm.epilogues import device

    assert isinstance(getattr(device, name), triton.JITFunction)


def _grid():
    """No kink among them."""
    return torch.cat([torch.linspace(-9, 9, 2000), torch.tensor([1e-30, -1e-30, 1e-8, -1e-8])]).double()


@pytest.mark.parametrize("name", PLAIN)
def test_value(name):
    torch.testing.assert_close(ACTIVATIONS[name].torch(_grid()), DEFINITIONS[name](_grid()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", GATES)
def test_value_of_a_gate(name):
    entry = ACTIVATIONS[name]
    torch.testing.assert_close(entry.torch(_grid()), DEFINITIONS[GATES[name]](_grid()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivative(name):
    entry = ACTIVATIONS[name]
    z = _grid().requires_grad_()
    (slope,) = torch.autograd.grad(DEFINITIONS[entry.gate or name](z).sum(), z)
    torch.testing.assert_close(entry.derivative(z.detach()), slope, rtol=1e-11, atol=1e-13)
    if entry.of_output is not None:
        value = entry.torch(z.detach())
        torch.testing.assert_close(entry.of_output(value), slope, rtol=1e-6, atol=1e-13)  # 1 - y y cancels


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivative_where_torch_has_to_choose(name):
    """At a kink, at zeros, far out, and at NaN: what autograd makes of the torch form."""
    entry = ACTIVATIONS[name]
    z = torch.tensor([0.0, -0.0, 50.0, -50.0, 1e4, -1e4, torch.nan], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(entry.torch(z).sum(), z)
    torch.testing.assert_close(entry.derivative(z.detach()), slope, equal_nan=True)


@pytest.mark.parametrize("slope", [0.2, 0.0, -0.5, 3.0])
def test_arguments(slope):
    entry, z = ACTIVATIONS["leaky_relu"], _grid().requires_grad_()
    value = DEFINITIONS["leaky_relu"](z, slope)
    torch.testing.assert_close(entry.torch(z, slope), value)
    torch.testing.assert_close(entry.derivative(z, slope), torch.autograd.grad(value.sum(), z)[0])


X = torch.linspace(-3, 3, 24, dtype=torch.float64)
CALLS = {  # name: (function, arguments after the input, keywords, what it is)
    "torch.relu": (torch.relu, (), {}, ("relu", {})),
    "Tensor.relu": (torch.Tensor.relu, (), {}, ("relu", {})),
    "F.relu": (F.relu, (), {}, ("relu", {})),
    "F.relu not in place": (F.relu, (), {"inplace": False}, ("relu", {})),
    "F.relu not in place, by position": (F.relu, (False,), {}, ("relu", {})),
    "F.gelu": (F.gelu, (), {}, ("gelu", {})),
    "F.gelu none": (F.gelu, (), {"approximate": "none"}, ("gelu", {})),
    "F.gelu tanh": (F.gelu, (), {"approximate": "tanh"}, ("gelu_tanh", {})),
    "F.silu": (F.silu, (), {}, ("silu", {})),
    "F.silu by position": (F.silu, (False,), {}, ("silu", {})),
    "torch.tanh": (torch.tanh, (), {}, ("tanh", {})),
    "Tensor.tanh": (torch.Tensor.tanh, (), {}, ("tanh", {})),
    "F.tanh": (F.tanh, (), {}, ("tanh", {})),
    "torch.sigmoid": (torch.sigmoid, (), {}, ("sigmoid", {})),
    "Tensor.sigmoid": (torch.Tensor.sigmoid, (), {}, ("sigmoid", {})),
    "F.sigmoid": (F.sigmoid, (), {}, ("sigmoid", {})),
    "torch.special.expit": (torch.special.expit, (), {}, ("sigmoid", {})),
    "F.leaky_relu": (F.leaky_relu, (), {}, ("leaky_relu", {})),
    "F.leaky_relu slope": (F.leaky_relu, (0.2,), {}, ("leaky_relu", {"negative_slope": 0.2})),
    "F.leaky_relu keyword": (F.leaky_relu, (), {"negative_slope": 0.3}, ("leaky_relu", {"negative_slope": 0.3})),
    "F.leaky_relu both": (F.leaky_relu, (0.2, False), {}, ("leaky_relu", {"negative_slope": 0.2})),
    "F.relu in place": (F.relu, (), {"inplace": True}, None),
    "F.relu in place, by position": (F.relu, (True,), {}, None),
    "F.silu in place": (F.silu, (True,), {}, None),
    "F.leaky_relu in place": (F.leaky_relu, (0.2, True), {}, None),
    "torch.relu_": (torch.relu_, (), {}, None),
    "Tensor.relu_": (torch.Tensor.relu_, (), {}, None),
    "torch.tanh out": (torch.tanh, (), {"out": torch.empty(24, dtype=torch.float64)}, None),
    "F.relu6": (F.relu6, (), {}, None),
    "F.elu": (F.elu, (), {}, None),
    "F.hardswish": (F.hardswish, (), {}, None),
    "torch.exp": (torch.exp, (), {}, None),
    "torch.add": (torch.add, (1,), {}, None),
}


@pytest.mark.parametrize("name", CALLS)
def test_recognise(name):
    """And where something is recognised, it computes what the call does."""
    function, more, keywords, expected = CALLS[name]
    found = recognise(function, (X, *more), keywords)
    assert found == expected
    if found is not None:
        activation, arguments = found
        torch.testing.assert_close(ACTIVATIONS[activation].torch(X, **arguments), function(X, *more, **keywords))


def test_options_that_torch_would_refuse_are_not_recognised():
    assert recognise(F.gelu, (X,), {"approximate": "erf"}) is None
    assert recognise(torch.relu, (X, 1), {}) is None
    assert recognise(F.relu, (X, False, 1), {}) is None
    assert recognise(torch.tanh, (X,), {"inplace": False}) is None
    assert recognise(torch.relu, (), {}) is None


class Doubled(nn.ReLU):
    def forward(self, x):
        return 2 * super().forward(x)


MODULES = [
    (nn.ReLU(), ("relu", {})),
    (nn.ReLU(inplace=True), ("relu", {})),  # of a value that nothing else sees
    (nn.GELU(), ("gelu", {})),
    (nn.GELU(approximate="tanh"), ("gelu_tanh", {})),
    (nn.SiLU(), ("silu", {})),
    (nn.SiLU(inplace=True), ("silu", {})),
    (nn.Tanh(), ("tanh", {})),
    (nn.Sigmoid(), ("sigmoid", {})),
    (nn.LeakyReLU(), ("leaky_relu", {"negative_slope": 0.01})),
    (nn.LeakyReLU(0.2), ("leaky_relu", {"negative_slope": 0.2})),
    (nn.ReLU6(), None),
    (nn.ELU(), None),
    (nn.Identity(), None),
    (nn.Linear(3, 3), None),
    (nn.Sequential(nn.ReLU()), None),
    (Doubled(), None),
]


@pytest.mark.parametrize(("module", "expected"), MODULES, ids=[str(module) for module, _ in MODULES])
def test_of_module(module, expected):
    found = of_module(module)
    assert found == expected
    if found is not None:
        torch.testing.assert_close(ACTIVATIONS[found[0]].torch(X, **found[1]), module(X.clone()))


@triton.jit
def plain(acc, col, row):
    return acc * 2


@triton.jit
def with_two(acc, col, row, first, second):
    return acc * first + second


@triton.jit
def with_five(acc, col, row, a, b, c, d, e):
    return acc + a + b + c + d + e


@triton.jit
def too_few(acc, col):
    return acc


@pytest.fixture
def registry(monkeypatch):
    """An empty one, and the former after the test."""
    monkeypatch.setattr(spec, "REGISTERED", {})
    return spec.REGISTERED


def test_register(registry):
    entry = register("double", plain, lambda acc, col, row: acc * 2)
    assert (entry.name, entry.aux, entry.function) == ("double", 0, plain)
    assert spec.registered("double") is entry
    again = register("double", with_two, lambda acc, col, row, first, second: acc * first + second)
    assert again.aux == 2
    assert spec.registered("double") is again, "registered again, it replaces the former"


def _form(acc, col, row):
    return acc


WRONG = {  # name: (arguments, error, what the message starts with)
    "an activation's name": (("relu", plain, _form), ValueError, "name is 'relu'"),
    "a gated one's name": (("swiglu", plain, _form), ValueError, "name is 'swiglu'"),
    "no identifier": (("my epilogue", plain, _form), ValueError, "name is 'my epilogue'"),
    "empty name": (("", plain, _form), ValueError, "name is ''"),
    "no string": ((3, plain, _form), (TypeError, ValueError), "name is 3"),
    "torch form not callable": (("mine", plain, None), TypeError, "torch_form is a NoneType"),
    "function not of Triton": (("mine", _form, _form), TypeError, "function is"),
    "function no function": (("mine", None, _form), TypeError, "function is None"),
    "function of two": (("mine", too_few, _form), TypeError, "function is"),
    "more aux than are passed": (("mine", with_five, lambda *args: args[0]), ValueError, "function takes 5 aux"),
    "forms of different arguments": (("mine", with_two, _form), ValueError, "torch_form"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_registrations(name, registry):
    arguments, error, message = WRONG[name]
    with pytest.raises(error, match=f"^{message}"):
        register(*arguments)
    assert registry == {}
