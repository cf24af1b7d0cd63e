"""The activations, each stated once: name, torch form, derivative and what the backward reads; registered epilogues.

The device form of an entry is the function of the same name in `device`. A torch form uses torch's operations and those
of `elementary`, which replace torch's on the CPU. It is also what `rounding="eager"` computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from isogemm.epilogues import elementary

Form = Callable[..., Tensor]

_QUICK = 1.702  # of quick_gelu


@dataclass(frozen=True)
class Activation:
    """act(z), or act(gate) * up.

    saved: what the backward reads: a bit per element (mask), the result (out) or the pre-activation (pre).
    """

    name: str
    torch: Form  # of z and the arguments; of the gate, where gated
    derivative: Form  # at z
    saved: Literal["mask", "out", "pre"]
    of_output: Form | None = None  # the derivative, from the result alone
    arguments: Mapping[str, float] = field(default_factory=dict)  # and their defaults
    gate: str = ""  # the activation of the gate, where there is one
    functions: tuple[Callable[..., Any], ...] = ()  # torch's functions and methods for it
    modules: tuple[type[Module], ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)  # what those are called with for this activation
    has_torchs_bits: bool = True  # the exact device form has the bits of one torch operation
    levels_off: bool = True  # the derivative is constant on either side of float16's range


def _relu_derivative(z: Tensor) -> Tensor:
    return (~(z <= 0)).to(z.dtype)  # torch lets a NaN's gradient pass


def _quick_gelu(z: Tensor) -> Tensor:
    return z * elementary.sigmoid(_QUICK * z)


def _quick_gelu_derivative(z: Tensor) -> Tensor:
    gate = elementary.sigmoid(_QUICK * z)
    return gate + _QUICK * z * gate * (1 - gate)


def _tanh_of_output(y: Tensor) -> Tensor:
    return 1 - y * y


def _sigmoid_of_output(y: Tensor) -> Tensor:
    return y * (1 - y)


def _leaky_relu_derivative(z: Tensor, negative_slope: float = 0.01) -> Tensor:
    return torch.where(z > 0, torch.ones_like(z), torch.full_like(z, negative_slope))


_PLAIN = (
    Activation(
        "relu", torch.relu, _relu_derivative, "mask", _relu_derivative,
        functions=(torch.relu, torch.Tensor.relu, F.relu), modules=(torch.nn.ReLU,), options={"inplace": False},
    ),
    Activation(
        "gelu", elementary.gelu, elementary.gelu_derivative, "pre",
        functions=(F.gelu,), modules=(torch.nn.GELU,), options={"approximate": "none"}, has_torchs_bits=False,
    ),
    Activation(
        "gelu_tanh", elementary.gelu_tanh, elementary.gelu_tanh_derivative, "pre",
        functions=(F.gelu,), modules=(torch.nn.GELU,), options={"approximate": "tanh"},
    ),
    Activation("quick_gelu", _quick_gelu, _quick_gelu_derivative, "pre", has_torchs_bits=False),
    Activation(
        "silu", elementary.silu, elementary.silu_derivative, "pre",
        functions=(F.silu,), modules=(torch.nn.SiLU,), options={"inplace": False},
    ),
    Activation(
        "tanh", elementary.tanh, lambda z: _tanh_of_output(elementary.tanh(z)), "out", _tanh_of_output,
        functions=(torch.tanh, torch.Tensor.tanh, F.tanh), modules=(torch.nn.Tanh,),
    ),
    Activation(
        "sigmoid", elementary.sigmoid, lambda z: _sigmoid_of_output(elementary.sigmoid(z)), "out", _sigmoid_of_output,
        functions=(torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, torch.special.expit), modules=(torch.nn.Sigmoid,),
    ),
    Activation(
        "relu2", lambda z: torch.square(torch.relu(z)), lambda z: 2 * torch.relu(z), "pre", levels_off=False
    ),
    Activation(
        "leaky_relu", F.leaky_relu, _leaky_relu_derivative, "mask", arguments={"negative_slope": 0.01},
        functions=(F.leaky_relu,), modules=(torch.nn.LeakyReLU,), options={"inplace": False},
    ),
)  # fmt: skip
_GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}

ACTIVATIONS: dict[str, Activation] = {entry.name: entry for entry in _PLAIN}
ACTIVATIONS |= {
    name: Activation(
        name,
        ACTIVATIONS[gate].torch,
        ACTIVATIONS[gate].derivative,
        "pre",
        gate=gate,
        has_torchs_bits=ACTIVATIONS[gate].has_torchs_bits,
        levels_off=False,  # each factor's derivative has the other's value
    )
    for name, gate in _GATES.items()
}


@dataclass(frozen=True)
class UserEpilogue:
    """A registered epilogue: `function` on the device, `torch` elsewhere and for gradients."""

    name: str
    function: Any  # @triton.jit (acc, col, row, *aux): fp32 tiles that broadcast to acc's
    torch: Form  # (acc, col, row, *aux)
    aux: int  # how many


REGISTERED: dict[str, UserEpilogue] = {}
MOST_AUX = 4


def register(name: str, function: Any, torch_form: Form) -> UserEpilogue:
    """Register an epilogue of your own for `matmul_fused(..., epilogue=name, aux=...)`, in place of the activation.

    Args:
        name: an identifier, not an activation's.
        function: @triton.jit function (acc, col, row, *aux) of fp32 tiles: the pre-activation [BM, BN], its column and
            row numbers and the aux tensors there, all broadcasting to acc. It may not mix elements (no reductions),
            since the tile's shape may change.
        torch_form: the same for whole tensors, differentiable. The CPU runs it, and gradients are computed from it.

    Registering a name again replaces its epilogue.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in ACTIVATIONS:
        raise ValueError(f"name is {name!r}; expected an identifier that is no activation's")
    if not callable(torch_form):
        raise TypeError(f"torch_form is a {type(torch_form).__name__}; expected a function (acc, col, row, *aux)")
    names = list(getattr(function, "arg_names", ()))  # of a Triton function
    if len(names) < 3:
        raise TypeError(f"function is {function!r}; expected a @triton.jit function (acc, col, row, *aux)")
    if len(names) - 3 > MOST_AUX:
        raise ValueError(f"function takes {len(names) - 3} aux tensors; at most {MOST_AUX} are passed")
    parameters = inspect.signature(torch_form).parameters.values()
    any_number = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    if len(parameters) != len(names) and not any_number:
        raise ValueError(f"torch_form does not take what function does: ({', '.join(names)})")
    entry = REGISTERED[name] = UserEpilogue(name, function, torch_form, len(names) - 3)
    return entry


def activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation is {name!r}; accepted: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def levels_off(name: str) -> bool:
    """`Activation.levels_off`; False for "", a registered epilogue, where it is unknown."""
    return bool(name) and ACTIVATIONS[name].levels_off


def registered(name: str) -> UserEpilogue:
    if name not in REGISTERED:
        raise ValueError(
            f"epilogue is {name!r}; registered: {', '.join(REGISTERED) or 'none yet (isogemm.epilogues.register)'}"
        )
    return REGISTERED[name]


def argument_values(entry: Activation, given: Mapping[str, float] | None) -> tuple[float, ...]:
    """The values of an activation's arguments, given or default, in the entry's order."""
    if not given:
        return tuple(entry.arguments.values())
    for name, value in given.items():
        if name not in entry.arguments:
            raise ValueError(
                f"activation_args has {name!r}; {entry.name} takes {', '.join(entry.arguments) or 'no arguments'}"
            )
        if not isinstance(value, int | float):
            raise TypeError(f"activation_args has {name} = {value!r}; expected a number")
    return tuple(float(given.get(name, default)) for name, default in entry.arguments.items())


_BY_FUNCTION: dict[Any, list[Activation]] = {}
_BY_MODULE: dict[type[torch.nn.Module], list[Activation]] = {}
for _entry in _PLAIN:
    for _function in _entry.functions:
        _BY_FUNCTION.setdefault(_function, []).append(_entry)
    for _module in _entry.modules:
        _BY_MODULE.setdefault(_module, []).append(_entry)

# The positional parameters after the input of those that are C functions.
_POSITIONAL: dict[Any, tuple[str, ...]] = {
    F.gelu: ("approximate",),
    F.relu: ("inplace",),
    F.silu: ("inplace",),
    F.leaky_relu: ("negative_slope", "inplace"),
}


def recognise(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, dict[str, float]] | None:
    """Return the activation that a torch function or method computes, and its arguments; None if it is none."""
    entries = _BY_FUNCTION.get(function)
    if entries is None or not args:
        return None
    positional = zip(_POSITIONAL.get(function, ()), args[1:], strict=False)
    given = {**dict(positional), **kwargs}
    if len(args) - 1 > len(_POSITIONAL.get(function, ())):
        return None
    return _matching(entries, given)


def of_module(module: torch.nn.Module) -> tuple[str, dict[str, float]] | None:
    """Return the activation that a module computes, and its arguments; None if it is none."""
    entries = _BY_MODULE.get(type(module))
    if entries is None:
        return None
    return _matching(entries, {name: getattr(module, name) for name in options_of(type(module))})


def options_of(kind: type[torch.nn.Module]) -> set[str]:
    """The attributes that tell which activation a module is; not `inplace`, which makes no difference here."""
    return {name for entry in _BY_MODULE.get(kind, ()) for name in (*entry.options, *entry.arguments)} - {"inplace"}


def _matching(entries: Sequence[Activation], given: Mapping[str, Any]) -> tuple[str, dict[str, float]] | None:
    for entry in entries:
        defaults: dict[str, Any] = {"inplace": False, "approximate": "none"}
        known = {*entry.options, *entry.arguments}
        if given.keys() <= known and all(
            given.get(name, defaults[name]) == value for name, value in entry.options.items()
        ):
            return entry.name, {name: given[name] for name in entry.arguments if name in given}
    return None
