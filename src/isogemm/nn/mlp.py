"""`isogemm.nn.MLP`: two linear layers and the activation between them, plain or gated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch

from isogemm.epilogues import spec
from isogemm.gemm.api import mlp
from isogemm.gemm.op import require_out_dtype
from isogemm.nn.linear import Linear, in_words, read_past_forward, set_options
from isogemm.nn.sharing import shown_name


class MLP(torch.nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) with a gated activation: two launches, with a fused backward.

    Args:
        in_features, hidden_features: sizes of x, and between the layers.
        out_features: in_features where None.
        activation, activation_args: see isogemm.matmul_fused; gated: "swiglu", "geglu", "reglu".
        bias: of every layer.
        hidden_dropout_p, dropout_p: after the activation and after `down`, in training mode.
        precision, out_dtype: see isogemm.linear.
        device, dtype: of the parameters, which are initialised as torch.nn.Linear's.

    `gate`, `up` and `down` hold the parameters, which may be parametrized or tied, but their forwards do not run. Where
    these would be needed (hooks, another module in their place) the call raises RuntimeError.
    """

    gate: Linear | None
    up: Linear
    down: Linear
    activation: str
    activation_args: dict[str, float]
    precision: str | None
    out_dtype: torch.dtype | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str = "gelu",
        activation_args: Mapping[str, float] | None = None,
        bias: bool = True,
        hidden_dropout_p: float = 0.0,
        dropout_p: float = 0.0,
        precision: str | None = None,
        out_dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        set_options(self, activation, activation_args, precision, out_dtype)
        self._set_dropout(hidden_dropout_p, dropout_p)
        out_features = in_features if out_features is None else out_features
        gated = bool(spec.activation(activation).gate)
        self.gate = Linear(in_features, hidden_features, bias, device, dtype) if gated else None
        self.up = Linear(in_features, hidden_features, bias, device, dtype)
        self.down = Linear(hidden_features, out_features, bias, device, dtype)

    @classmethod
    def from_linears(
        cls,
        up: torch.nn.Linear,
        down: torch.nn.Linear,
        gate: torch.nn.Linear | None = None,
        *,
        activation: str,
        activation_args: Mapping[str, float] | None = None,
        hidden_dropout_p: float = 0.0,
        dropout_p: float = 0.0,
        precision: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Self:
        """Make an MLP that shares the parameters of linears, each taken by `Linear.from_torch`.

        For a Llama block: MLP.from_linears(up_proj, down_proj, gate_proj, activation="swiglu").
        """
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        set_options(made, activation, activation_args, precision, out_dtype)
        made._set_dropout(hidden_dropout_p, dropout_p)
        if bool(spec.activation(activation).gate) != (gate is not None):
            gated = ", ".join(entry.name for entry in spec.ACTIVATIONS.values() if entry.gate)
            raise ValueError(
                f"activation is {activation!r} {'without' if gate is None else 'with'} gate; gated ones: {gated}"
            )
        made.gate = None if gate is None else _shared("gate", gate)
        made.up = _shared("up", up)
        made.down = _shared("down", down)
        if made.gate is not None and made.gate.weight.shape != made.up.weight.shape:
            raise ValueError(f"gate is {gate}; expected the sizes of up, {up}")
        if made.down.in_features != made.up.out_features:
            raise ValueError(f"down is {down}; expected in_features={up.out_features}, as up is {up}")
        require_out_dtype(out_dtype, made.down.weight.dtype)
        made.training = up.training
        return made

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Compute x [..., in_features] -> [..., out_features]; `residual` is added in the same launch."""
        gate, up, down = self.gate, self.up, self.down
        for name, layer in (("gate", gate), ("up", up), ("down", down)):
            if layer is not None and (reason := read_past_forward(layer)):
                raise RuntimeError(f"{name} {reason}, but MLP reads only its weight; use isogemm.nn.Linear layers")
        first, second = (up, None) if gate is None else (gate, up)
        return mlp(
            x,
            first.weight,
            down.weight,
            bias=first.bias,
            bias_down=down.bias,
            weight_up=None if second is None else second.weight,
            bias_up=None if second is None else second.bias,
            activation=self.activation,
            activation_args=self.activation_args,
            hidden_dropout_p=self.hidden_dropout_p if self.training else 0.0,
            dropout_p=self.dropout_p if self.training else 0.0,
            residual=residual,
            out_dtype=self.out_dtype,
            precision=self.precision,
        )

    _get_name = shown_name

    def extra_repr(self) -> str:
        options = {
            "activation": in_words(self.activation, self.activation_args),
            "hidden_dropout_p": self.hidden_dropout_p or None,
            "dropout_p": self.dropout_p or None,
            "precision": self.precision,
            "out_dtype": self.out_dtype,
        }
        return ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)

    def _set_dropout(self, hidden_dropout_p: float, dropout_p: float) -> None:
        for name, p in (("hidden_dropout_p", hidden_dropout_p), ("dropout_p", dropout_p)):
            if not 0 <= p <= 1:
                raise ValueError(f"{name} is {p}; expected a probability")
        self.hidden_dropout_p, self.dropout_p = hidden_dropout_p, dropout_p


def _shared(name: str, module: torch.nn.Linear) -> Linear:
    try:
        made = Linear.from_torch(module)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if reason := read_past_forward(module):
        raise ValueError(f"{name} {reason}, but MLP reads only its weight")
    return made
