"""`isogemm.nn.Linear`: torch.nn.Linear through `isogemm.linear`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from isogemm.core.errors import require_precision
from isogemm.epilogues import spec
from isogemm.gemm.api import linear, plain_linear
from isogemm.gemm.op import require_out_dtype, require_some_out_dtype
from isogemm.nn.sharing import module_obstacle, needs_its_forward, parameter, parameter_obstacle, shared, shown_name


class Linear(torch.nn.Linear):
    """torch.nn.Linear whose output rows depend, bit for bit, on the input row and the weights alone.

    Args:
        in_features, out_features, bias, device, dtype: those of torch.nn.Linear. The state_dict is torch's.
        activation, activation_args: applied in the same launch, see isogemm.matmul_fused; not gated (see MLP).
        precision: of float32 inputs, see isogemm.linear.
        out_dtype: of the output, see isogemm.linear.
    """

    activation: str | None
    activation_args: dict[str, float]
    precision: str | None
    out_dtype: torch.dtype | None
    is_swapped: bool = False  # `isogemm.nn.swap` put it in the place of a torch.nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        activation_args: Mapping[str, float] | None = None,
        precision: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        set_options(self, activation, activation_args, precision, out_dtype)

    @classmethod
    def from_torch(
        cls,
        module: torch.nn.Linear,
        *,
        activation: str | None = None,
        activation_args: Mapping[str, float] | None = None,
        precision: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Self:
        """Make a Linear that shares the module's parameters, hooks and other attributes."""
        if not isinstance(module, torch.nn.Linear):
            raise TypeError(f"module is a {type(module).__name__}; expected a torch.nn.Linear")
        if reason := obstacle(module):
            raise ValueError(f"module cannot become an isogemm.nn.Linear: {reason}")
        require_out_dtype(out_dtype, module.weight.dtype)
        made = shared(cls, module, ("is_swapped",))
        set_options(made, activation, activation_args, precision, out_dtype)
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        if self.activation is None:
            return plain_linear(input, weight, bias, self.out_dtype, self.precision)
        return linear(
            input, weight, bias, activation=self.activation, activation_args=self.activation_args,
            out_dtype=self.out_dtype, precision=self.precision,
        )  # fmt: skip

    _get_name = shown_name

    def extra_repr(self) -> str:
        activation = self.activation and in_words(self.activation, self.activation_args)
        options = {"activation": activation, "precision": self.precision, "out_dtype": self.out_dtype}
        chosen = (f"{name}={value}" for name, value in options.items() if value is not None)
        return ", ".join((super().extra_repr(), *chosen))


def set_options(
    module: Any,
    activation: str | None,
    activation_args: Mapping[str, float] | None,
    precision: str | None,
    out_dtype: torch.dtype | None,
) -> None:
    """Check and set the options that `Linear` and `MLP` share."""
    if activation is not None:
        entry = spec.activation(activation)
        if entry.gate and isinstance(module, Linear):
            raise ValueError(f"activation is {activation!r}, which is gated by a second weight: isogemm.nn.MLP has it")
        spec.argument_values(entry, activation_args)
    elif activation_args:
        raise ValueError(f"activation_args is {dict(activation_args)} without an activation")
    require_precision(precision, torch.float32)  # the name alone: the dtype is known when called
    require_some_out_dtype(out_dtype)
    module.activation, module.activation_args = activation, dict(activation_args or {})
    module.precision, module.out_dtype = precision, out_dtype


def in_words(activation: str, arguments: Mapping[str, float]) -> str:
    """Format an activation: relu, leaky_relu(negative_slope=0.2)."""
    listed = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"{activation}({listed})" if listed else activation


def as_torch(module: Linear) -> torch.nn.Linear:
    """Make a torch.nn.Linear of the same parameters, hooks and other attributes, without the activation."""
    return shared(torch.nn.Linear, module, ("activation", "activation_args", "precision", "out_dtype", "is_swapped"))


def read_past_forward(module: torch.nn.Module, activated: bool = False) -> str:
    """Say what is lost if a caller reads a linear's weight and bias and does not call it; empty if nothing.

    activated: the caller computes the activation too.
    """
    if isinstance(module, Linear) and module.out_dtype is not None:
        return f"has an out_dtype, {module.out_dtype}"
    if isinstance(module, Linear) and module.activation is not None and not activated:
        return f"has an activation, {in_words(module.activation, module.activation_args)}"
    return needs_its_forward(module, _FORWARDS)


_FORWARDS = (Linear.forward, torch.nn.Linear.forward)


def obstacle(module: torch.nn.Linear) -> str:
    """Say why an isogemm.nn.Linear of the same parameters would compute something else; empty if it would not."""
    if type(module).forward not in (torch.nn.Linear.forward, Linear.forward):
        return f"{type(module).__name__} has a forward of its own"
    if isinstance(module, Linear) and module.activation is not None:
        return f"it has an activation, {in_words(module.activation, module.activation_args)}"
    return module_obstacle(module) or parameter_obstacle(module, "weight", "bias")
