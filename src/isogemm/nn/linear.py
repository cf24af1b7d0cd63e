"""`isogemm.nn.Linear`: torch.nn.Linear through `isogemm.linear`."""

from __future__ import annotations

import copy
from typing import Self

import torch

from isogemm.core.errors import require_precision
from isogemm.gemm.api import linear

# A module's own dicts of what it holds. Hooks' dicts are shared instead: a handle removes its hook from both.
_HOLDINGS = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class Linear(torch.nn.Linear):
    """torch.nn.Linear whose output rows depend, bit for bit, on the input row and the weights alone.

    Args:
        in_features, out_features, bias, device, dtype: as of torch.nn.Linear; so is the state_dict.
        precision: of float32 inputs, see isogemm.linear.
        out_dtype: of the output, see isogemm.linear.
    """

    precision: str | None
    out_dtype: torch.dtype | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_numerics(precision, out_dtype)

    @classmethod
    def from_torch(
        cls, module: torch.nn.Linear, *, precision: str | None = None, out_dtype: torch.dtype | None = None
    ) -> Self:
        """A Linear that shares the module's parameters, hooks and other attributes."""
        if not isinstance(module, torch.nn.Linear):
            raise TypeError(f"module is a {type(module).__name__}; expected a torch.nn.Linear")
        if reason := obstacle(module):
            raise ValueError(f"module cannot become an isogemm.nn.Linear: {reason}")
        made = cls.__new__(cls)
        made.__dict__.update(module.__dict__)
        made.__dict__.update({name: copy.copy(module.__dict__[name]) for name in _HOLDINGS})
        made._set_numerics(precision, out_dtype)
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias, out_dtype=self.out_dtype, precision=self.precision)

    def extra_repr(self) -> str:
        numerics = {"precision": self.precision, "out_dtype": self.out_dtype}
        chosen = (f"{name}={value}" for name, value in numerics.items() if value is not None)
        return ", ".join((super().extra_repr(), *chosen))

    def _set_numerics(self, precision: str | None, out_dtype: torch.dtype | None) -> None:
        require_precision(precision, torch.float32)  # the name alone: the dtype is known when called
        self.precision = precision
        self.out_dtype = out_dtype


def obstacle(module: torch.nn.Linear) -> str:
    """Why an isogemm.nn.Linear of the same parameters would not do what the module does; empty if it would."""
    if type(module).forward not in (torch.nn.Linear.forward, Linear.forward):
        return f"{type(module).__name__} has a forward of its own"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (as accelerate does to place devices)"
    if module._compiled_call_impl is not None:
        return "it is compiled: swap first, then compile"
    for name in ("weight", "bias"):
        if name not in module._parameters:
            return f"its {name} is made from other parameters (parametrization, weight norm, pruning): swap first"
        parameter = module._parameters[name]
        if parameter is None:
            continue
        # Sharding sets the parameters of the modules it saw; FSDP marks those it flattened.
        if type(parameter) is not torch.nn.Parameter or hasattr(parameter, "_fsdp_flattened"):
            return f"its {name} is a {type(parameter).__name__} of a sharded or quantized model: swap first"
    if not module.weight.is_floating_point() or module.weight.is_quantized:
        return f"its dtype is {module.weight.dtype}"
    if any(getattr(hook, "with_module", False) for hook in module._load_state_dict_pre_hooks.values()):
        return "it has a load_state_dict pre-hook, which is bound to the module"
    return ""
