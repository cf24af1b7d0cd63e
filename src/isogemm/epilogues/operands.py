"""The operands of an epilogue, each stated once.

    out = residual + dropout(act(alpha * row_scale * col_scale * (a @ b) + beta * c + bias))

A tensor operand is a field of `Operands`. From the fields are made: the operator's schema, the validation, the order in
which the kernels take tensors and strides, and the names under which autograd returns gradients. `Arguments` are the
keywords of the public functions, `Epilogue` what is compiled into a kernel.

To add an operand: a field here (and its keyword in `Arguments`, its flag in `Epilogue`), its arithmetic on the device
in `gemm/kernels/epilogue.py`, and its arithmetic and gradient in torch's operations in `gemm/torch_forms.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_args, get_type_hints

import torch
from torch import Tensor

from isogemm.epilogues.spec import ACTIVATIONS, MOST_AUX

Optional = Tensor | None


class Operands(NamedTuple):
    """What a call's epilogue reads. A tensor operand is annotated with its shape: n, m, mn or "" for a scalar."""

    bias: Annotated[Optional, "n"] = None  # with bias_dim -2: m
    bias_up: Annotated[Optional, "n"] = None  # of a gated activation's second product
    c: Annotated[Optional, "mn"] = None
    residual: Annotated[Optional, "mn"] = None
    row_scale: Annotated[Optional, "m"] = None
    col_scale: Annotated[Optional, "n"] = None
    alpha: Annotated[Optional, ""] = None  # where it is a tensor
    beta: Annotated[Optional, ""] = None
    aux: tuple[Tensor, ...] = ()  # what a registered epilogue reads
    seed: Optional = None  # of the dropout
    alpha_value: float = 1.0
    beta_value: float = 0.0
    dropout_p: float = 0.0
    activation: str = ""
    arguments: tuple[float, ...] = ()  # of the activation
    epilogue: str = ""  # the name of a registered one, in the activation's place
    bias_dim: int = -1
    eager: bool = False  # rounded after each operation

    @property
    def gated(self) -> bool:
        return bool(self.activation) and bool(ACTIVATIONS[self.activation].gate)

    @property
    def saved(self) -> str:
        """What the backward reads of the forward: "", mask, out or pre."""
        if self.epilogue:
            return "pre"
        if not self.activation:
            return ""
        kind = ACTIVATIONS[self.activation].saved
        # The result is the activation's alone if nothing follows it.
        return "pre" if kind == "out" and (self.dropout_p or self.residual is not None) else kind

    @property
    def saved_hidden(self) -> str:
        """The same for an mlp's first layer, whose result is kept: it shows relu's sign, even after dropout."""
        return "out" if self.activation == "relu" else "pre"

    def paired(self, shape: Sequence[int]) -> Sequence[int]:
        """The shape of a gradient or pre-activation: of both factors, where the activation is gated."""
        return (2, *shape) if self.gated else shape

    def compiled(self, dtype: torch.dtype, precision: str | None, save: str) -> Epilogue:
        """The part that is compiled into a kernel whose result has this dtype."""
        exact = self.eager or (dtype is torch.float32 and precision != "tf32")
        return Epilogue(
            bias="" if self.bias is None else "n" if self.bias_dim == -1 else "m",
            bias_up=self.bias_up is not None,
            alpha="device" if self.alpha is not None else "host" if self.alpha_value != 1 else "",
            row_scale=self.row_scale is not None,
            col_scale=self.col_scale is not None,
            beta="device" if self.beta is not None else "host" if self.beta_value else "",
            activation=self.activation,
            arguments=self.arguments,
            user=self.epilogue,
            aux=len(self.aux),
            exact=exact and bool(self.activation),
            eager=self.eager and dtype is not torch.float32,
            saves=save,  # type: ignore[arg-type]
            dropout=self.dropout_p > 0,
            residual=self.residual is not None,
        )

    def of_gradient(self, kind: str, exact: bool, sums: bool = False) -> Epilogue:
        """The part of the gradient of dropout(act(z)) that is compiled into a kernel; kind: what `saved` says."""
        return Epilogue(
            activation=self.activation, arguments=self.arguments, exact=exact, dropout=self.dropout_p > 0,
            gradient=kind, sums=sums,  # type: ignore[arg-type]
        )  # fmt: skip


class Arguments(TypedDict, total=False):
    """The keywords of `linear` and `matmul_fused` that make an epilogue; `DEFAULTS` has their defaults."""

    activation: str | None
    activation_args: Mapping[str, float] | None
    alpha: float | Tensor
    beta: float | Tensor | None
    c: Tensor | None
    row_scale: Tensor | None
    col_scale: Tensor | None
    dropout_p: float
    residual: Tensor | None
    epilogue: str | None
    aux: Sequence[Tensor]
    rounding: str


DEFAULTS: dict[str, Any] = dict.fromkeys(Arguments.__annotations__) | {
    "alpha": 1, "dropout_p": 0, "aux": (), "rounding": "once"
}  # fmt: skip

_HINTS = get_type_hints(Operands, include_extras=True)
SHAPES: dict[str, str] = {name: hint.__metadata__[0] for name, hint in _HINTS.items() if hasattr(hint, "__metadata__")}
DIFFERENTIABLE = tuple(SHAPES)  # of the operands, but aux

# The tensors that a kernel's epilogue takes, and the strides: of the rows of each matrix, then of rows and columns of
# each aux tensor. `saved` is what a forward leaves for its backward, `second` a gated gradient's second result.
TENSORS = (*SHAPES, "seed", "saved", "second", *(f"aux{index}" for index in range(MOST_AUX)), "row_sums")
PLACES = {name: place for place, name in enumerate(TENSORS)}
MATRICES = tuple(name for name, shape in SHAPES.items() if shape == "mn")
VECTORS = tuple(name for name, shape in SHAPES.items() if shape in ("m", "n"))
STRIDES = len(MATRICES) + 2 * MOST_AUX

_SCHEMA_TYPES = {
    Optional: "Tensor?", tuple[Tensor, ...]: "Tensor[]", tuple[float, ...]: "float[]", float: "float", str: "str",
    int: "int", bool: "bool",
}  # fmt: skip
SCHEMA = ", ".join(
    f"{_SCHEMA_TYPES[get_args(hint)[0] if hasattr(hint, '__metadata__') else hint]} {name}"
    for name, hint in _HINTS.items()
)


@dataclass(frozen=True)
class Epilogue:
    """What a kernel does with its sums, as far as it is compiled in: not the operands, and not the numbers.

    With `gradient`: the sums times dropout's gradient and the activation's derivative.
    """

    bias: Literal["", "n", "m"] = ""
    bias_up: bool = False
    alpha: Literal["", "host", "device"] = ""
    row_scale: bool = False
    col_scale: bool = False
    beta: Literal["", "host", "device"] = ""  # and with it c
    activation: str = ""
    arguments: tuple[float, ...] = ()
    user: str = ""  # a registered epilogue's name
    aux: int = 0
    exact: bool = False  # torch's own forms
    eager: bool = False  # rounded after each operation
    saves: Literal["", "mask", "pre"] = ""
    dropout: bool = False
    residual: bool = False
    gradient: Literal["", "mask", "out", "pre"] = ""  # what the derivative is read from
    sums: bool = False  # also write the gradient's sums over rows

    @property
    def gated(self) -> bool:
        return bool(self.activation) and bool(ACTIVATIONS[self.activation].gate)

    @property
    def paired(self) -> bool:
        """Whether a tile holds two products side by side."""
        return self.gated and not self.gradient

    @property
    def bias_first(self) -> bool:
        """Whether biases are added right after the sums, so that they can be loaded before these are complete."""
        between = self.alpha or self.row_scale or self.col_scale or self.beta or self.eager
        return (self.bias == "n" or self.bias_up) and not between

    @property
    def plain(self) -> bool:
        """Whether there is nothing but a bias along n, which every kernel adds."""
        return self == Epilogue(bias=self.bias) and self.bias != "m"


NOTHING = Epilogue()
