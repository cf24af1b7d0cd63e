"""Gradients of products with an epilogue: dz first, in one pass or in the GEMM above, then the products.

`epilogues.spec` lists what is saved for an activation: a bit per element, the result itself, or the pre-activation. An
operand is kept if a needed gradient reads it (`torch_forms.READ_BY`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from isogemm.core.device import resolve_precision
from isogemm.core.eager import refuse_transforms, through_dispatcher
from isogemm.core.operator import Operator
from isogemm.epilogues import spec
from isogemm.epilogues.operands import DIFFERENTIABLE, Operands
from isogemm.gemm import autograd, configs, cpu, fused, fused_op, op
from isogemm.gemm import torch_forms as forms
from isogemm.gemm.fused import Call

TENSORS = ("x", "weight", "weight_up", *DIFFERENTIABLE)  # of a call, but aux
_COUNT = len(TENSORS)
_X, _WEIGHT, _BIAS, _RESIDUAL = map(TENSORS.index, ("x", "weight", "bias", "residual"))
_AFTER_BIASES = TENSORS[TENSORS.index("c") :]
OWNED = ("weight", "bias", "weight_up", "bias_up")  # parameters, which may have a main_grad


def run(call: Call) -> Tensor:
    """Run a validated call: through the dispatcher, with autograd, or directly."""
    tensors = [each for each in call.tensors if each is not None]
    tensors += call.operands.aux
    if through_dispatcher(*tensors):
        refuse_transforms("linear" if call.by_rows else "matmul_fused", *tensors)
        needs = [each is not None and each.requires_grad for each in (*call.tensors, *call.operands.aux)]
        wanted = torch.is_grad_enabled() and _wants_dz(needs)
        owners, main_grads = autograd.with_main_grad(*call.owners)
        call = call._replace(save=_save(call.operands, wanted), owners=owners, main_grads=main_grads)
        return cast(Tensor, fused_operator.op(*call.arguments)[0])
    if torch.is_grad_enabled() and True in [each.requires_grad for each in tensors]:
        precision = resolve_precision(call.x, call.precision)
        if precision is not call.precision:
            call = call._replace(precision=precision)
        return cast(Tensor, cast(Any, _Fused).apply(call, *call.tensors, *call.operands.aux)[0])
    return fused.fused(call)[0]


class _Fused(torch.autograd.Function):
    """Takes a call and its tensors; returns the result, and the pre-activation if it is kept.

    The pre-activation is returned so that a second derivative passes through it. Where only its signs are kept, an
    empty tensor replaces it, so that the second derivative is zero, as in torch, and not missing.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        operands, needs = call.operands, ctx.needs_input_grad[1:]
        result, saved = fused.fused(call, _save(operands, _wants_dz(needs)))
        passed = result.new_empty(0) if _wants_dz(needs) and operands.saved == "mask" else None
        kept = _keep(ctx, call, needs, result, saved, passed)
        ctx.set_materialize_grads(False)
        return result, saved if kept is saved and ctx.kind == "pre" else passed

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_saved: Tensor | None) -> tuple[Any, ...]:
        return None, *_gradients(ctx, grad, of_saved, ctx.needs_input_grad[1:])


def _wants_dz(needs: Sequence[bool]) -> bool:
    """Whether a gradient is needed that passes the activation: any but the residual's."""
    return True in needs[:_RESIDUAL] or True in needs[_RESIDUAL + 1 :]


def _save(operands: Operands, wanted: bool) -> str:
    """What the forward saves."""
    return operands.saved if wanted else ""


@functools.cache
def _is_read(needs: tuple[bool, ...]) -> tuple[bool, ...]:
    """Whether the backward reads each of a call's tensors."""
    wanted = {name for name, need in zip(TENSORS, needs, strict=False) if need}
    return tuple(not wanted.isdisjoint(forms.READ_BY.get(name, ())) for name in TENSORS)


def _keep(
    ctx: Any, call: Call, needs: tuple[bool, ...], result: Tensor, saved: Tensor | None, passed: Tensor | None = None
) -> Tensor | None:
    """Save only what the needed gradients read. Return what is saved for the activation.

    passed: the tensor to which a second derivative of zero goes.
    """
    operands, tensors = call.operands, call.tensors
    ctx.dtypes = [each if each is None else each.dtype for each in tensors]
    ctx.weight_shape = call.weight.shape if call.by_rows else call.weight.shape[::-1]
    ctx.registered = spec.REGISTERED.get(operands.epilogue)
    ctx.kind = operands.saved if _wants_dz(needs) else ""
    read = [each if is_read else None for each, is_read in zip(tensors, _is_read(needs[:_COUNT]), strict=True)]
    kept = {"": None, "out": result}.get(ctx.kind, saved)
    if operands.gated and kept is not None and not (needs[_X] or needs[_WEIGHT] or needs[_BIAS]):
        kept = kept[:1].clone()  # the gradient of up reads the gate alone
    aux, seed = (operands.aux, operands.seed) if _wants_dz(needs) else ((), None)
    ctx.save_for_backward(*read, kept, passed, seed, *aux)
    ctx.operands, ctx.rest, ctx.shape = operands[_NUMBERS:], call[4:], result.shape
    return kept


_NUMBERS = Operands._fields.index("seed") + 1  # the place where the operands' tensors end


def _kept(ctx: Any) -> tuple[Call, Tensor | None, Tensor | None]:
    """The call with the tensors that were saved, what was saved for the activation, and `passed`."""
    (*tensors,) = ctx.saved_tensors
    read, (saved, passed, seed), aux = tensors[:_COUNT], tensors[_COUNT : _COUNT + 3], tensors[_COUNT + 3 :]
    operands = Operands._make((*read[3:], tuple(aux), seed, *ctx.operands))
    return Call._make((*read[:3], operands, *ctx.rest)), saved, passed


class ZeroPath(torch.autograd.Function):
    """The identity of x, with a zero gradient for `passed`: its derivative is zero, not missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Tensor) -> Tensor:
        ctx.shape = passed.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_zeros(ctx.shape)


def _gradients(
    ctx: Any, grad: Tensor | None, of_saved: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of all tensors of the call, in order; None where not needed, and where added to a main_grad.

    of_saved: that of the pre-activation, where a second derivative comes through it.
    """
    needed = dict(zip(TENSORS, needs, strict=False))
    of_aux = list(needs[len(TENSORS) :])
    dtypes = dict(zip(TENSORS, ctx.dtypes, strict=True))
    found: dict[str, Tensor | None] = dict.fromkeys(TENSORS)
    if needed["residual"] and grad is not None:
        found["residual"] = grad.to(dtypes["residual"])
    if not _wants_dz(needs) or (grad is None and of_saved is None):
        return *found.values(), *(None for _ in of_aux)
    call, saved, passed = _kept(ctx)
    operands, dtype = call.operands, dtypes["x"]
    if spec.REGISTERED.get(operands.epilogue) is not ctx.registered:
        raise RuntimeError(f"epilogue {operands.epilogue!r} was registered again between the forward and its backward")
    if operands.gated and saved is not None:
        saved = saved.expand(2, *saved.shape[1:])
    owners = main_grads_of(call, needed, ctx.weight_shape)
    sums = operands.bias_dim == -1 and (needed["bias"] or needed["bias_up"])
    if passed is not None and of_saved is not None:
        of_saved = of_saved.new_zeros(ctx.shape)
    dz = Dz(cast(Tensor, of_saved), None, [None for _ in of_aux])
    if grad is not None:
        dz = _of_pre_activation(grad, saved, ctx.kind, operands, dtype, of_aux, sums)
        if passed is not None and is_differentiated():
            dz = dz._replace(value=cast(Any, ZeroPath).apply(dz.value, passed))
    if of_saved is not None:
        value = of_saved if grad is None else dz.value + of_saved
        dz = dz._replace(value=value.to(dtype), sums=None)
    found |= gradients_of(call, dz, needed, dtypes, owners)
    return *found.values(), *dz.of_aux


def main_grads_of(
    call: Call, needed: dict[str, bool], weight_shape: Sequence[int], layer: str = ""
) -> dict[str, autograd.Accumulated]:
    """The parameters to whose main_grad this backward adds; all are checked before any is changed.

    layer: follows a parameter's name in error messages.
    """
    owners: dict[str, autograd.Accumulated] = {}
    for name, given in zip(OWNED, zip(call.owners, call.main_grads, strict=True), strict=True):
        owner, total = owners[name] = autograd.given_or_accumulated(given, needed[name])
        if needed[name] and owner is not None and total is not None:
            shape = weight_shape if "weight" in name else weight_shape[:1]
            op.require_total(f"{name}{layer}.main_grad", total, shape, owner.device)
    return owners


class Dz(NamedTuple):
    """dz, its sums over blocks of rows if known, and the gradients of a registered epilogue's aux."""

    value: Tensor
    sums: Tensor | None
    of_aux: Sequence[Tensor | None]
    together: int = 1  # sums per chunk

    def half(self, index: int) -> Dz:
        """The part of the gate (0) or of up (1)."""
        return Dz(self.value[index], None if self.sums is None else self.sums[index], (), self.together)

    def of_bias(self, dtype: torch.dtype, accumulated: autograd.Accumulated) -> Tensor | None:
        sums = self.sums
        if sums is None:
            if self.together == 1 or self.value.dtype is torch.float64 or not self.value.numel():
                return autograd.of_bias(self.value, dtype, accumulated)
            sums = cpu.row_sums(_rows(self.value), configs.BIAS_ROWS)  # the sums were lost: compute them with torch
        if sums.requires_grad and (accumulated[0] is None or accumulated[1] is None):
            return sum(cpu.row_sums(sums, self.together), torch.zeros_like(sums[0])).to(dtype)
        return of_sums(sums, self.together, dtype, accumulated)


def of_sums(sums: Tensor, together: int, dtype: torch.dtype, accumulated: autograd.Accumulated) -> Tensor | None:
    """A [N] gradient from its sums over blocks of rows; None where it was added to a main_grad."""
    added = _add_chunk_sums(accumulated, sums, together)
    return None if added else fused_op.chunk_sums(sums, together, dtype)


_add_chunk_sums = autograd.MainGradAdder(
    "chunk_sums", "bias", "Tensor partial, int together",
    shape=lambda partial, together: partial.shape[-1:],
    compute=lambda main_grad, partial, together: fused.chunk_sums(partial, together, main_grad, torch.float32),
)  # fmt: skip


def _of_pre_activation(
    grad: Tensor, saved: Tensor | None, kind: str, operands: Operands, dtype: torch.dtype, of_aux: list[bool],
    sums: bool,
) -> Dz:  # fmt: skip
    if operands.epilogue:
        assert saved is not None
        gradients: Sequence[Tensor | None]
        if is_differentiated():
            dz, *gradients = forms.epilogue_grad(grad, saved, operands, dtype, of_aux, create_graph=True)
            return Dz(cast(Tensor, dz), None, gradients)
        arguments = (grad, saved, dtype, operands.aux, operands.seed, operands.dropout_p, operands.epilogue, of_aux)
        dz, *gradients = fused_op.epilogue_grad(*arguments)
        return Dz(dz, None, [found if want else None for found, want in zip(gradients, of_aux, strict=True)])
    nothing = [None for _ in of_aux]
    if not (operands.activation or operands.dropout_p):
        return Dz(grad, None, nothing)
    return activation_grad(grad, saved, kind, operands, dtype, sums)._replace(of_aux=nothing)


def is_differentiated() -> bool:
    """Whether a backward runs under create_graph: it then uses torch's operations."""
    return torch.is_grad_enabled() and not is_compiling()


def activation_grad(
    grad: Tensor, saved: Tensor | None, kind: str, operands: Operands, dtype: torch.dtype, sums: bool
) -> Dz:
    if is_differentiated():
        return Dz(forms.activation_grad(grad, saved, kind, operands, dtype), None, ())
    if through_dispatcher(grad):
        dz, partial = fused_op.activation_grad.op(grad, dtype, sums, saved, kind, *fused_op.of_forward(operands))
        return Dz(dz, partial if sums and grad.is_cuda and dtype is not torch.float64 else None, ())
    return Dz(*fused.activation_grad(grad, saved, kind, operands, dtype, sums), ())


def gradients_of(
    call: Call, dz: Dz, needed: dict[str, bool], dtypes: dict[str, Any], owners: dict[str, autograd.Accumulated]
) -> dict[str, Tensor | None]:
    """The gradients of a call's tensors from dz, where needed; None where added to a main_grad."""
    if call.operands.gated:
        return of_both_weights(call, dz, needed, owners)
    operands, dtype = call.operands, dtypes["x"]
    found: dict[str, Tensor | None] = {}
    if needed["bias"]:
        if operands.bias_dim == -1:
            found["bias"] = dz.of_bias(dtype, owners["bias"])
        else:
            found["bias"] = _over_columns(dz.value).to(dtype)
    if any(needed[name] for name in _AFTER_BIASES):
        product = functools.partial(_product, call)
        found |= forms.operand_gradients(operands, dz.value, needed, dtypes, product, autograd.bias_grad, _over_columns)
    if not (needed["x"] or needed["weight"]):
        return found
    scaled = forms.scaled(dz.value.to(dtype), operands)
    if needed["x"]:
        weight = call.weight if call.by_rows else call.weight.mT  # [N, K]
        found["x"] = autograd.by_rows(scaled, weight, call.precision)
    if needed["weight"]:
        if call.by_rows:
            found["weight"] = autograd.of_weight(scaled, call.x, call.precision, owners["weight"])
        else:
            found["weight"] = autograd.weight_grad(call.x, scaled, call.precision)
    return found


def of_both_weights(
    call: Call, dz: Dz, needed: dict[str, bool], owners: dict[str, autograd.Accumulated]
) -> dict[str, Tensor | None]:
    """The gradients of x, both weights and both biases in act(gate) * up, from dz [2, ..., N]; all of one dtype."""
    found: dict[str, Tensor | None] = {}
    gate, up = dz.half(0), dz.half(1)
    for half, weight, bias in ((gate, "weight", "bias"), (up, "weight_up", "bias_up")):
        if needed[weight]:
            found[weight] = autograd.of_weight(half.value, call.x, call.precision, owners[weight])
        if needed[bias]:
            found[bias] = half.of_bias(dz.value.dtype, owners[bias])
    if needed["x"]:
        assert call.weight_up is not None
        of_gate = autograd.by_rows(gate.value, call.weight, call.precision)
        operands = Operands(c=of_gate, beta_value=1.0)
        found["x"] = run(Call(up.value, call.weight_up, None, operands, False, precision=call.precision))
    return found


def _product(call: Call, dtype: torch.dtype | None) -> Tensor:
    """Recompute the product itself."""
    return autograd.matmul(_rows(call.x), call.columns[0], dtype, call.precision)


def _over_columns(x: Tensor) -> Tensor:
    """Sum [..., N] -> [...] in the order of a bias's gradient: independent of the other rows."""
    return autograd.bias_grad(_rows(x).mT).view(x.shape[:-1])


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def no_gradient(argument: object) -> object:
    """No gradient, as register_autograd wants it: a list for a list of tensors or an empty one."""
    listed = isinstance(argument, list) and all(isinstance(each, Tensor) for each in argument)
    return [None] * len(cast(list[object], argument)) if listed else None


def _keep_call(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = Call.of_operator(inputs)
    call = call._replace(precision=resolve_precision(call.x, call.precision))
    ctx.structure = [no_gradient(each) for each in inputs]
    needs = ctx.needs_input_grad[: _COUNT + len(call.operands.aux)]  # here, unlike there, of each tensor in a list
    kept = _keep(ctx, call, needs, *output)
    if kept is not output[1] or ctx.kind != "pre":
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, of_saved: Tensor | None) -> tuple[Any, ...]:
    needs, of_aux = ctx.needs_input_grad[:_COUNT], ctx.needs_input_grad[_COUNT]
    gradients = _gradients(ctx, grad, of_saved, (*needs, *of_aux))
    return *gradients[:_COUNT], list(gradients[_COUNT:]), *ctx.structure[_COUNT + 1 :]


fused_operator = Operator(
    fused_op.FUSED_SCHEMA, fused_op.run_fused, fused_op.fused_fake, keep=_keep_call, backward=_backward
)
