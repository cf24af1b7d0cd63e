"""The operators of products with an epilogue, for torch.compile, fake tensors and dispatch modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isogemm.core.operator import Operator
from isogemm.epilogues.operands import DIFFERENTIABLE, SCHEMA, Operands
from isogemm.gemm import configs, describe, fused
from isogemm.gemm import torch_forms as forms


class Call(NamedTuple):
    """A product with an epilogue. The operator isogemm::fused takes its fields, with `operands` unpacked."""

    x: Tensor  # [..., K]
    weight: Tensor
    weight_up: Tensor | None = None
    operands: Operands = Operands()
    by_rows: bool = True  # the weights are [N, K], else [K, N]
    save: str = ""
    owners: Sequence[Tensor | None] = (None,) * 4  # of the main_grads of weight, bias, weight_up and bias_up
    main_grads: Sequence[Tensor | None] = (None,) * 4
    out_dtype: torch.dtype | None = None
    precision: str | None = None

    @classmethod
    def of_operator(cls, args: Sequence[Any]) -> Call:
        """Make a call from the operator's arguments, whose tuples have become lists."""
        given = [tuple(each) if isinstance(each, list) else each for each in args]
        return cls._make((*given[:3], Operands._make(given[3:_AFTER]), *given[_AFTER:]))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The operator's arguments."""
        return *self[:3], *self.operands, *self[4:]

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The differentiable arguments, except aux."""
        return *self[:3], *self.operands[: len(DIFFERENTIABLE)]

    @property
    def columns(self) -> tuple[Tensor, Tensor | None]:
        """The weights as [K, N]."""
        return fused.columns(self.weight, self.weight_up, self.by_rows)

    def run(self, save: str) -> tuple[Tensor, Tensor | None]:
        """The result and what was saved."""
        return fused.fused(
            self.x, self.weight, self.weight_up, self.operands, self.out_dtype, self.precision, save,
            by_rows=self.by_rows,
        )  # fmt: skip


_AFTER = 3 + len(Operands._fields)  # the place after the operands among the operator's arguments


def run_fused(*args: Any) -> tuple[Tensor, Tensor]:
    call = Call.of_operator(args)
    result, saved = call.run(call.save)
    return result, call.x.new_empty(0) if saved is None else saved


def fused_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = Call.of_operator(args)
    x, operands = call.x, call.operands
    fused.validate(x, *call.columns, operands, call.out_dtype, call.precision, fused.names_of(call.by_rows))
    shape = (*x.shape[:-1], call.columns[0].shape[-1])
    saved = fused.saved_like(x, shape, call.save, operands)
    return x.new_empty(shape, dtype=call.out_dtype or x.dtype), x.new_empty(0) if saved is None else saved


class MlpCall(NamedTuple):
    """The arguments of the operator isogemm::mlp."""

    x: Tensor
    weight: Tensor
    weight_up: Tensor | None
    bias: Tensor | None
    bias_up: Tensor | None
    weight_down: Tensor
    bias_down: Tensor | None
    residual: Tensor | None
    seed: Tensor | None
    down_seed: Tensor | None
    activation: str
    arguments: Sequence[float]
    hidden_dropout_p: float
    dropout_p: float
    save: bool
    owners: Sequence[Tensor | None]  # of the main_grads of weight, bias, weight_up, bias_up, and those below
    main_grads: Sequence[Tensor | None]
    out_dtype: torch.dtype | None
    precision: str | None

    @property
    def hidden(self) -> Operands:
        return Operands(
            self.bias, self.bias_up, seed=self.seed, dropout_p=self.hidden_dropout_p, activation=self.activation,
            arguments=tuple(self.arguments),
        )  # fmt: skip

    @property
    def down(self) -> Operands:
        return Operands(self.bias_down, residual=self.residual, seed=self.down_seed, dropout_p=self.dropout_p)

    @property
    def written(self) -> str:
        """What the first layer saves besides its result."""
        kind = self.hidden.saved_hidden
        return kind if self.save and kind != "out" else ""


def run_mlp(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the hidden value and its pre-activation; the latter two empty if not kept."""
    call = MlpCall(*args)
    h, z = fused.fused(
        call.x, call.weight, call.weight_up, call.hidden, None, call.precision, call.written, by_rows=True
    )
    result, _ = fused.fused(h, call.weight_down, None, call.down, call.out_dtype, call.precision, "", by_rows=True)
    return result, h if call.save else call.x.new_empty(0), call.x.new_empty(0) if z is None else z


def mlp_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = MlpCall(*args)
    x, shape = call.x, (*call.x.shape[:-1], call.weight.shape[0])
    up = None if call.weight_up is None else call.weight_up.mT
    fused.validate(x, call.weight.mT, up, call.hidden, None, call.precision)
    h = x.new_empty(shape)
    fused.validate(h, call.weight_down.mT, None, call.down, call.out_dtype, call.precision)
    z = fused.saved_like(x, shape, call.written, call.hidden)
    result = x.new_empty((*shape[:-1], call.weight_down.shape[0]), dtype=call.out_dtype or x.dtype)
    return result, h if call.save else x.new_empty(0), x.new_empty(0) if z is None else z


class GradientCall(NamedTuple):
    """The last arguments of isogemm::activation_grad and ::hidden_grad: the forward's epilogue."""

    saved: Tensor | None
    kind: str
    seed: Tensor | None
    dropout_p: float
    activation: str
    arguments: Sequence[float]

    @property
    def operands(self) -> Operands:
        return Operands(
            seed=self.seed, dropout_p=self.dropout_p, activation=self.activation, arguments=tuple(self.arguments)
        )


def gradient_call(saved: Tensor | None, kind: str, operands: Operands) -> GradientCall:
    return GradientCall(saved, kind, operands.seed, operands.dropout_p, operands.activation, list(operands.arguments))


def _activation_grad(grad: Tensor, dtype: torch.dtype, sums: bool, *args: Any) -> tuple[Tensor, Tensor]:
    call = GradientCall(*args)
    dz, partial = fused.activation_grad(grad, call.saved, call.kind, call.operands, dtype, sums)
    return dz, dz.new_empty(0, dtype=torch.float32) if partial is None else partial


def _activation_grad_fake(grad: Tensor, dtype: torch.dtype, sums: bool, *args: Any) -> tuple[Tensor, Tensor]:
    operands = GradientCall(*args).operands
    dz = grad.new_empty((2, *grad.shape) if operands.gated else grad.shape, dtype=dtype)
    if not (sums and grad.device.type == "cuda") or dtype is torch.float64:
        return dz, grad.new_empty(0, dtype=torch.float32)
    chunks = (describe.rows(grad) + configs.BIAS_CHUNK - 1) // configs.BIAS_CHUNK
    shape = (2, chunks, grad.shape[-1]) if operands.gated else (chunks, grad.shape[-1])
    return dz, grad.new_empty(shape, dtype=torch.float32)


def _hidden_grad(grad: Tensor, weight: Tensor, precision: str | None, sums: bool, *args: Any) -> tuple[Tensor, Tensor]:
    call = GradientCall(*args)
    assert call.saved is not None
    dz, partial = fused.hidden_grad(grad, weight, call.saved, call.kind, call.operands, precision, sums)
    return dz, dz.new_empty(0, dtype=torch.float32) if partial is None else partial


def _hidden_grad_fake(
    grad: Tensor, weight: Tensor, precision: str | None, sums: bool, *args: Any
) -> tuple[Tensor, Tensor]:
    gated, n = GradientCall(*args).operands.gated, weight.shape[-1]
    shape = (*grad.shape[:-1], n)
    dz = weight.new_empty((2, *shape) if gated else shape)
    if not sums or weight.dtype is torch.float64:
        return dz, weight.new_empty(0, dtype=torch.float32)
    blocks = (describe.rows(grad) + configs.BIAS_ROWS - 1) // configs.BIAS_ROWS
    return dz, weight.new_empty((2, blocks, n) if gated else (blocks, n), dtype=torch.float32)


def _epilogue_grad(
    grad: Tensor,
    saved: Tensor,
    dtype: torch.dtype,
    aux: Sequence[Tensor],
    seed: Tensor | None,
    dropout_p: float,
    epilogue: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    operands = Operands(seed=seed, dropout_p=dropout_p, epilogue=epilogue, aux=tuple(aux))
    found = forms.epilogue_grad(grad, saved, operands, dtype, wanted)
    return [
        like.new_empty(0) if gradient is None else _apart_from(grad, gradient)
        for gradient, like in zip(found, (saved, *aux), strict=True)
    ]


def _apart_from(grad: Tensor, gradient: Tensor) -> Tensor:
    """A gradient that does not share grad's memory: an operator may not return its input."""
    return gradient.clone() if gradient.data_ptr() == grad.data_ptr() else gradient


def _epilogue_grad_fake(
    grad: Tensor, saved: Tensor, dtype: torch.dtype, aux: Sequence[Tensor], *rest: Any
) -> list[Tensor]:
    of_aux = (each.new_empty(each.shape if want else 0) for each, want in zip(aux, rest[-1], strict=True))
    return [saved.new_empty(saved.shape, dtype=dtype), *of_aux]


FUSED_SCHEMA = (
    f"fused(Tensor x, Tensor weight, Tensor? weight_up, {SCHEMA}, bool by_rows, str save, Tensor?[] owners, "
    "Tensor?[] main_grads, ScalarType? out_dtype, str? precision) -> (Tensor, Tensor)"
)
MLP_SCHEMA = (
    "mlp(Tensor x, Tensor weight, Tensor? weight_up, Tensor? bias, Tensor? bias_up, Tensor weight_down, "
    "Tensor? bias_down, Tensor? residual, Tensor? seed, Tensor? down_seed, str activation, float[] arguments, "
    "float hidden_dropout_p, float dropout_p, bool save, Tensor?[] owners, Tensor?[] main_grads, "
    "ScalarType? out_dtype, str? precision) -> (Tensor, Tensor, Tensor)"
)
_OF_FORWARD = "Tensor? saved, str kind, Tensor? seed, float dropout_p, str activation, float[] arguments"

activation_grad = Operator(
    f"activation_grad(Tensor grad, ScalarType dtype, bool sums, {_OF_FORWARD}) -> (Tensor, Tensor)",
    _activation_grad,
    _activation_grad_fake,
)
chunk_sums = Operator(
    "chunk_sums(Tensor partial, int together, ScalarType dtype) -> Tensor",
    lambda partial, together, dtype: fused.chunk_sums(partial, together, None, dtype),
    lambda partial, together, dtype: partial.new_empty(partial.shape[-1:], dtype=dtype),
)
hidden_grad = Operator(
    f"hidden_grad(Tensor grad, Tensor weight, str? precision, bool sums, {_OF_FORWARD}) -> (Tensor, Tensor)",
    _hidden_grad,
    _hidden_grad_fake,
)
epilogue_grad = Operator(
    "epilogue_grad(Tensor grad, Tensor saved, ScalarType dtype, Tensor[] aux, Tensor? seed, float dropout_p, "
    "str epilogue, bool[] wanted) -> Tensor[]",
    _epilogue_grad,
    _epilogue_grad_fake,
)
