"""Gradients of `mlp`: two layers in one call.

In eager mode each part of the backward is a node of its own, so that what it read is freed once it has run. `_Through`
computes the gradient of z, then `_Down` those of the second layer, and `_Hidden` those of the first.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from isogemm.core.device import resolve_precision
from isogemm.core.eager import refuse_transforms, through_dispatcher
from isogemm.core.operator import Operator
from isogemm.epilogues import random
from isogemm.epilogues.operands import Operands
from isogemm.gemm import autograd, configs, cpu, fused, fused_autograd, fused_op
from isogemm.gemm import torch_forms as forms
from isogemm.gemm.fused import Call
from isogemm.gemm.fused_autograd import OWNED, TENSORS, Dz, ZeroPath, is_differentiated


def validate(hidden: Call, down: Call) -> None:
    """Raise where an argument of either layer does not fit."""
    if not hidden.operands.activation:
        raise ValueError("activation is None; expected one")
    fused.validate(hidden, _HIDDEN_NAMES)
    h = hidden.x.new_empty(1).expand(hidden.shape)  # as the hidden value
    fused.validate(down._replace(x=h), _DOWN_NAMES)


def run(hidden: Call, down: Call) -> Tensor:
    """Run both validated layers; down.x is replaced by the result of `hidden`."""
    tensors = [each for each in (*hidden.tensors[:5], *down.tensors[1:]) if each is not None]
    operands = hidden.operands
    differentiated = torch.is_grad_enabled() and True in [each.requires_grad for each in tensors]
    if through_dispatcher(*tensors):
        refuse_transforms("nn.MLP", *tensors)
        return cast(Tensor, mlp_operator.op(*_arguments(hidden, down, differentiated))[0])
    if not differentiated:
        h, _ = fused.fused(hidden)
        return fused.fused(down._replace(x=h))[0]
    hidden = hidden._replace(precision=resolve_precision(hidden.x, hidden.precision))
    down = down._replace(precision=hidden.precision)
    first, second, through = cast(Any, _Hidden), cast(Any, _Down), cast(Any, _Through)
    of_first = hidden.tensors[:5]
    if any(each is not None and each.requires_grad for each in of_first):
        h, z, wide = first.apply(hidden, *of_first)
    else:
        h, z, wide = fused.fused(hidden)[0], None, None
    result = second.apply(down, operands, h, z, wide, down.weight, down.operands.bias)
    return cast(Tensor, through.apply(down, operands, result, z, wide, down.weight, down.operands.residual))


_HIDDEN_NAMES: fused.Names = ("x", "weight", "bias", "hidden_dropout_p")
_DOWN_NAMES: fused.Names = ("x", "weight_down", "bias_down", "dropout_p")


def _arguments(hidden: Call, down: Call, save: bool) -> tuple[Any, ...]:
    """The operator's arguments."""
    owners, main_grads = autograd.with_main_grad(*hidden.owners, *down.owners[:2])
    first, second = hidden.operands, down.operands
    return (
        hidden.x, hidden.weight, hidden.weight_up, first.bias, first.bias_up, down.weight, second.bias, second.residual,
        first.seed, second.seed, first.activation, first.arguments, first.dropout_p, second.dropout_p, save, owners,
        main_grads, down.out_dtype, hidden.precision,
    )  # fmt: skip


class _Hidden(torch.autograd.Function):
    """(dropout(act(z)), z, None); for relu the first two are the same. The gradient is that of z.

    Where z is kept in float32: (dropout(act(z)), place, z). The engine casts a gradient to the dtype of its tensor, so
    dz goes to `place`, which has its dtype and shape, and one element.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        operands = call.operands
        h, z = fused.fused(call, operands.saved_hidden)
        of_x, of_weight, of_weight_up = ctx.needs_input_grad[1:4]
        ctx.save_for_backward(
            call.x if of_weight or of_weight_up else None, *((call.weight, call.weight_up) if of_x else (None, None))
        )
        ctx.weight_shape = call.weight.shape
        ctx.call = Call._make((None, None, None, _without_tensors(operands), *call[4:]))
        ctx.set_materialize_grads(False)
        if z is None or z.dtype is h.dtype:
            ctx.mark_non_differentiable(h)
            return h, h.view_as(h) if z is None else z, None
        ctx.mark_non_differentiable(h, z)
        return h, h.new_empty_strided(z.shape, (0,) * z.ndim), z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if grads[1] is None:
            return (None,) * 6
        x, weight, weight_up = ctx.saved_tensors
        call = ctx.call._replace(x=x, weight=weight, weight_up=weight_up)
        needed = dict.fromkeys(TENSORS, False) | dict(zip(TENSORS, ctx.needs_input_grad[1:], strict=False))
        owners = fused_autograd.main_grads_of(call, needed, ctx.weight_shape)
        dz = _with_row_sums(grads[1])
        found = _of_layer(call, dz, dz.value.dtype, needed, owners)
        return None, *map(found.get, TENSORS[:5])


class _Wide(torch.autograd.Function):
    """z in float32, whose gradient goes to its `place` (see _Hidden)."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, wide: Tensor) -> Tensor:
        return wide.view_as(wide)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def _differentiable_z(z: Tensor, wide: Tensor | None = None) -> Tensor:
    return z if wide is None else cast(Tensor, cast(Any, _Wide).apply(z, wide))


def _of_layer(
    call: Call, dz: Dz, dtype: torch.dtype, needed: dict[str, bool], owners: dict[str, autograd.Accumulated]
) -> dict[str, Tensor | None]:
    """The gradients of a layer's tensors from dz; that of x last, when the workspace of the weight's is free again."""
    if call.operands.gated:
        return fused_autograd.of_both_weights(call, dz, needed, owners)
    found: dict[str, Tensor | None] = {}
    value = dz.value.to(dtype)
    if needed["weight"]:
        found["weight"] = autograd.of_weight(value, call.x, call.precision, owners["weight"])
    if needed["bias"]:
        found["bias"] = dz.of_bias(dtype, owners["bias"])
    if needed["x"]:
        found["x"] = autograd.by_rows(value, call.weight, call.precision)
    return found


class _Down(torch.autograd.Function):
    """The second layer, applied to h; its gradient is that of h @ weight.T + bias, before dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        first: Operands,
        h: Tensor,
        z: Tensor | None,
        wide: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(h if ctx.needs_input_grad[5] else None, first.seed)
        ctx.dtype = h.dtype
        # Alive if a second derivative may be computed; otherwise they should be freed before h.
        ctx.z = [weakref.ref(each) for each in (z, wide) if each is not None]
        ctx.first, ctx.shape = _without_tensors(first), weight.shape
        ctx.call = Call._make((None, None, None, Operands(), *call[4:]))
        return fused.fused(call._replace(x=h))[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, seed = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[5:7]
        if torch.is_grad_enabled() and ctx.needs_input_grad[3] and needs_weight:  # h must be a function of z
            kept = [each() for each in ctx.z]
            if any(each is None for each in kept):
                raise RuntimeError(
                    "a second derivative of mlp under saved-tensor hooks (a checkpoint): call isogemm.linear twice"
                )
            h = _recomputed_hidden(_differentiable_z(*kept), ctx.first._replace(seed=seed), ctx.dtype)
        needed = dict.fromkeys(TENSORS, False) | {"weight": needs_weight, "bias": needs_bias}
        owners = fused_autograd.main_grads_of(ctx.call, needed, ctx.shape, layer="_down")
        found = _of_layer(ctx.call._replace(x=h), Dz(grads[0], None, ()), ctx.dtype, needed, owners)
        return None, None, None, None, None, found.get("weight"), found.get("bias")


class _Through(torch.autograd.Function):
    """The result itself; its gradient goes to the second layer's product, to z and to the residual."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        first: Operands,
        result: Tensor,
        z: Tensor | None,
        wide: Tensor | None,
        weight: Tensor,
        residual: Tensor | None,
    ) -> Tensor:
        read = (z, wide, weight, first.seed) if ctx.needs_input_grad[3] else (None,) * 4
        ctx.save_for_backward(*read, call.operands.seed)
        ctx.first, ctx.dropout_p, ctx.precision = _without_tensors(first), call.operands.dropout_p, call.precision
        ctx.sums = any(bias is not None and bias.requires_grad for bias in (first.bias, first.bias_up))
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.mark_dirty(result)  # makes it this node's output, not a view
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, wide, weight, seed, down_seed = ctx.saved_tensors
        refuse_transforms("nn.MLP's gradient", grads[0])
        above = _before_dropout(grads[0], down_seed, ctx.dropout_p)
        dz = None
        if ctx.needs_input_grad[3]:
            dz = _hidden_grad(above, weight, z, wide, ctx.first._replace(seed=seed), ctx.precision, ctx.sums)
        of_residual = grads[0].to(ctx.residual_dtype) if ctx.needs_input_grad[6] else None
        return None, None, above, dz, None, None, of_residual


def _before_dropout(grad: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """The gradient of a dropout's argument."""
    dropout = Operands(seed=seed, dropout_p=p)
    return fused_autograd.activation_grad(grad, None, "", dropout, grad.dtype, False).value if p else grad


def _without_tensors(first: Operands) -> Operands:
    """The operands that the derivative reads, without tensors."""
    return first._replace(bias=None, bias_up=None, seed=None)


class _RowSums(NamedTuple):
    """Sums that dz carries through autograd, as its attribute `row_sums`."""

    sums: Tensor
    version: int  # dz's version when they were computed


def _hidden_grad(
    grad: Tensor, weight: Tensor, z: Tensor, wide: Tensor | None, first: Operands, precision: str | None, sums: bool
) -> Tensor:
    """dz, with its row sums as an attribute, which `_with_row_sums` reads in the next node."""
    if is_differentiated():
        sums_dtype = cpu.sums_dtype(weight.dtype)
        out_dtype = sums_dtype if sums_dtype is not weight.dtype else None
        above = autograd.matmul(grad.to(weight.dtype), weight, out_dtype, precision)
        z = _differentiable_z(z, wide)
        dz = forms.activation_grad(above, z, first.saved_hidden, first, weight.dtype)
        return cast(Tensor, cast(Any, ZeroPath).apply(dz, z))  # relu's derivative has no graph to z
    z = z if wide is None else wide
    dz, partial = fused.hidden_grad(grad, weight, z, first.saved_hidden, first, precision, sums)
    if partial is not None and not dz.is_inference():  # an inference tensor has no version
        dz.row_sums = _RowSums(partial, dz._version)  # type: ignore[attr-defined]
    return dz


def _with_row_sums(dz: Tensor) -> Dz:
    """dz with the sums it carries, unless it was changed since, or another tensor came, such as a hook's."""
    carried: _RowSums | None = getattr(dz, "row_sums", None)
    sums = carried.sums if carried is not None and carried.version == dz._version else None
    return Dz(dz, sums, (), configs.BIAS_BLOCKS)


def _recomputed_hidden(z: Tensor, first: Operands, dtype: torch.dtype) -> Tensor:
    """Recompute dropout(act(z)), differentiable."""
    wide = z.to(cpu.sums_dtype(dtype))
    gate, up = (wide[0], wide[1]) if first.gated else (wide, None)
    if first.saved_hidden == "out":  # z is after dropout and its scale, whose signs relu keeps
        wide = torch.relu(gate)
        scale = random.scale(first.dropout_p) if first.dropout_p else 1.0
        return (wide.detach() + (wide - wide.detach()) * scale).to(dtype)
    return forms.after_activation(gate, up, first).to(dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, down = fused_op.mlp_calls(*inputs)
    first, second = hidden.operands, down.operands
    _, h, z = output
    of_x, of_weight, of_weight_up, *_, of_weight_down, _, _ = ctx.needs_input_grad[:_COUNT]
    of_first = True in ctx.needs_input_grad[:5]
    ctx.save_for_backward(
        hidden.x if of_weight or of_weight_up else None,
        hidden.weight if of_x else None,
        hidden.weight_up if of_x else None,
        down.weight if of_first else None,
        h if of_weight_down else None,
        (h if hidden.save == "out" else z) if of_first else None,
        first.seed if of_first else None,
        second.seed,
    )
    ctx.dtype = h.dtype
    ctx.structure = [fused_autograd.no_gradient(each) for each in inputs]
    ctx.residual_dtype = None if second.residual is None else second.residual.dtype
    ctx.hidden = Call._make((None, None, None, _without_tensors(first), *hidden[4:]))
    ctx.precision, ctx.dropout_p = resolve_precision(hidden.x, hidden.precision), second.dropout_p
    ctx.given = list(zip((*hidden.owners, *down.owners), (*hidden.main_grads, *down.main_grads), strict=True))
    ctx.mark_non_differentiable(h, z)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *of_kept: Tensor | None) -> tuple[Any, ...]:
    x, weight, weight_up, weight_down, h, z, seed, down_seed = ctx.saved_tensors
    needed = dict.fromkeys(TENSORS, False) | dict(zip(_TENSORS, ctx.needs_input_grad, strict=False))
    if is_differentiated():
        raise RuntimeError("isogemm::mlp has no second derivative through the dispatcher; call isogemm.linear twice")
    above = _before_dropout(grad, down_seed, ctx.dropout_p)
    wanted = (needed[name] for name in (*OWNED, "weight_down", "bias_down"))
    accumulated = list(map(autograd.given_or_accumulated, ctx.given, wanted))
    found: dict[str, Tensor | None] = {}
    if needed["residual"]:
        found["residual"] = grad.to(ctx.residual_dtype)
    if any(needed[name] for name in _TENSORS[:5]):
        hidden = ctx.hidden._replace(x=x, weight=weight, weight_up=weight_up, precision=ctx.precision)
        first, sums = hidden.operands._replace(seed=seed), needed["bias"] or needed["bias_up"]
        of_forward = fused_op.of_forward(first)
        value, partial = fused_op.hidden_grad.op(
            above, weight_down, ctx.precision, sums, z, first.saved_hidden, *of_forward
        )
        dz = Dz(value, partial if sums and value.dtype is not torch.float64 else None, (), configs.BIAS_BLOCKS)
        owners = dict(zip(OWNED, accumulated[:4], strict=True))
        found |= _of_layer(hidden, dz, value.dtype, needed, owners)
    if needed["weight_down"]:
        found["weight_down"] = autograd.of_weight(above.to(ctx.dtype), h, ctx.precision, accumulated[4])
    if needed["bias_down"]:
        found["bias_down"] = autograd.of_bias(above, ctx.dtype, accumulated[5])
    return *(found.get(name) for name in _TENSORS), *ctx.structure[_COUNT:]


# The operator's first arguments.
_TENSORS = ("x", "weight", "weight_up", "bias", "bias_up", "weight_down", "bias_down", "residual")
_COUNT = len(_TENSORS)

mlp_operator = Operator(fused_op.MLP_SCHEMA, fused_op.run_mlp, fused_op.mlp_fake, keep=_keep, backward=_backward)
