"""How a module takes over the parameters of another, and what would be lost by it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import Any, TypeVar

import torch

_Made = TypeVar("_Made", bound=torch.nn.Module)

# A module's own dicts, which are copied. Hooks' dicts are shared: a handle removes its hook from both modules.
_HOLDINGS = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class PastForwards(torch.nn.Module):
    """A module that computes with its submodules' parameters itself: `swap` leaves these submodules alone."""


def shared(cls: type[_Made], module: torch.nn.Module, without: Container[str] = ()) -> _Made:
    """Make a `cls` that shares the module's parameters, submodules, hooks and attributes except those in `without`."""
    made = cls.__new__(cls)
    made.__dict__.update({name: each for name, each in module.__dict__.items() if name not in without})
    made.__dict__.update({name: copy.copy(module.__dict__[name]) for name in _HOLDINGS})
    return made


def shown_name(module: torch.nn.Module) -> str:
    """Return the name in print(model), which tells isogemm's modules from torch's of the same name."""
    kind = type(module)
    return f"isogemm.nn.{kind.__name__}" if kind.__module__.startswith("isogemm.nn.") else kind.__name__


def module_obstacle(module: torch.nn.Module) -> str:
    """Say why a module of another class would not be called as this one is; empty if it would."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (as accelerate does to place devices)"
    if module._compiled_call_impl is not None:
        return "it is compiled: do this before compiling"
    if any(getattr(hook, "with_module", False) for hook in module._load_state_dict_pre_hooks.values()):
        return "it has a load_state_dict pre-hook, which is bound to the module"
    return ""


def parameter_obstacle(module: torch.nn.Module, *names: str) -> str:
    """Say why the module's parameters cannot be taken over as they are; empty if they can."""
    for name in names:
        if name not in module._parameters:
            return f"its {name} is made from other parameters (parametrization, weight norm, pruning): swap first"
        parameter = module._parameters[name]
        if parameter is None:
            continue
        # Sharding sets the parameters of the modules it saw; FSDP marks those it flattened.
        if type(parameter) is not torch.nn.Parameter or hasattr(parameter, "_fsdp_flattened"):
            return f"its {name} is a {type(parameter).__name__} of a sharded or quantized model: swap first"
        if not parameter.is_floating_point() or parameter.is_quantized:
            return f"its dtype is {parameter.dtype}"
    return ""


def needs_its_forward(module: torch.nn.Module, forwards: Container[Callable[..., Any]] | None = None) -> str:
    """Say what is lost if one of `forwards` (None: its class's) is computed without calling the module."""
    if (forwards is not None and type(module).forward not in forwards) or "forward" in module.__dict__:
        return f"is a {type(module).__name__} with a forward of its own"
    if module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks:
        return "has hooks"
    return ""


def parameter(module: torch.nn.Module, name: str) -> Any:
    """Return the attribute or None, from `_parameters` first: 12 attributes of modules take 6 us to find."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name, None)
