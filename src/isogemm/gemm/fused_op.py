"""The operators of products with an epilogue, for torch.compile, fake tensors and dispatch modes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isogemm.core.operator import Operator
from isogemm.epilogues.operands import SCHEMA, Operands
from isogemm.gemm import configs, fused
from isogemm.gemm import torch_forms as forms
from isogemm.gemm.fused import Call


def run_fused(*args: Any) -> tuple[Tensor, Tensor]:
    call = Call.of_operator(args)
    result, saved = fused.fused(call, call.save)
    return result, call.x.new_empty(0) if saved is None else saved


def fused_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = Call.of_operator(args)
    fused.validate(call)
    saved = fused.saved_like(call.x, call.shape, call.save, call.operands)
    return call.x.new_empty(call.shape, dtype=call.dtype), call.x.new_empty(0) if saved is None else saved


def mlp_calls(
    x: Tensor, weight: Tensor, weight_up: Tensor | None, bias: Tensor | None, bias_up: Tensor | None,
    weight_down: Tensor, bias_down: Tensor | None, residual: Tensor | None, seed: Tensor | None,
    down_seed: Tensor | None, activation: str, arguments: Sequence[float], hidden_dropout_p: float, dropout_p: float,
    save: bool, owners: Sequence[Tensor | None], main_grads: Sequence[Tensor | None],
    out_dtype: torch.dtype | None, precision: str | None,
) -> tuple[Call, Call]:  # fmt: skip
    """The two layers of the operator isogemm::mlp, from its arguments; x stands for the second one's."""
    first = Operands(
        bias, bias_up, seed=seed, dropout_p=hidden_dropout_p, activation=activation, arguments=tuple(arguments)
    )
    second = Operands(bias_down, residual=residual, seed=down_seed, dropout_p=dropout_p)
    kept = first.saved_hidden if save else ""
    return (
        Call(x, weight, weight_up, first, True, kept, owners[:4], main_grads[:4], None, precision),
        Call(x, weight_down, None, second, True, "", owners[4:], main_grads[4:], out_dtype, precision),
    )


def run_mlp(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the hidden value and its pre-activation; the latter two empty if not kept."""
    hidden, down = mlp_calls(*args)
    h, z = fused.fused(hidden, hidden.save)
    result, _ = fused.fused(down._replace(x=h))
    return result, h if hidden.save else h.new_empty(0), h.new_empty(0) if z is None else z


def mlp_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden, down = mlp_calls(*args)
    fused.validate(hidden)
    h = hidden.x.new_empty(hidden.shape)
    down = down._replace(x=h)
    fused.validate(down)
    z = fused.saved_like(h, hidden.shape, hidden.save, hidden.operands)
    result = h.new_empty(down.shape, dtype=down.dtype)
    return result, h if hidden.save else h.new_empty(0), h.new_empty(0) if z is None else z


def of_forward(operands: Operands) -> tuple[Any, ...]:
    """The last arguments of isogemm::activation_grad and ::hidden_grad: what they read of the forward's epilogue."""
    return operands.seed, operands.dropout_p, operands.activation, list(operands.arguments)


def _forward_operands(seed: Tensor | None, dropout_p: float, activation: str, arguments: Sequence[float]) -> Operands:
    return Operands(seed=seed, dropout_p=dropout_p, activation=activation, arguments=tuple(arguments))


def _activation_grad(
    grad: Tensor, dtype: torch.dtype, sums: bool, saved: Tensor | None, kind: str, *forward: Any
) -> tuple[Tensor, Tensor]:
    return _with_sums(*fused.activation_grad(grad, saved, kind, _forward_operands(*forward), dtype, sums))


def _hidden_grad(
    grad: Tensor, weight: Tensor, precision: str | None, sums: bool, saved: Tensor, kind: str, *forward: Any
) -> tuple[Tensor, Tensor]:
    return _with_sums(*fused.hidden_grad(grad, weight, saved, kind, _forward_operands(*forward), precision, sums))


def _with_sums(dz: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    return dz, dz.new_empty(0, dtype=torch.float32) if sums is None else sums


def _activation_grad_fake(
    grad: Tensor, dtype: torch.dtype, sums: bool, saved: Tensor | None, kind: str, *forward: Any
) -> tuple[Tensor, Tensor]:
    height = configs.BIAS_CHUNK if sums and grad.device.type == "cuda" else 0
    return _gradient_fake(grad, grad.shape, dtype, height, _forward_operands(*forward))


def _hidden_grad_fake(
    grad: Tensor, weight: Tensor, precision: str | None, sums: bool, saved: Tensor, kind: str, *forward: Any
) -> tuple[Tensor, Tensor]:
    shape, height = (*grad.shape[:-1], weight.shape[-1]), configs.BIAS_ROWS if sums else 0
    return _gradient_fake(weight, shape, weight.dtype, height, _forward_operands(*forward))


def _gradient_fake(
    like: Tensor, shape: Sequence[int], dtype: torch.dtype, height: int, operands: Operands
) -> tuple[Tensor, Tensor]:
    """dz of this shape, and its sums over blocks of `height` rows; empty where that is 0, and for float64."""
    dz = like.new_empty(operands.paired(shape), dtype=dtype)
    if not height or dtype is torch.float64:
        return _with_sums(dz, None)
    blocks = (math.prod(shape[:-1]) + height - 1) // height
    return dz, like.new_empty(operands.paired((blocks, shape[-1])), dtype=torch.float32)


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
