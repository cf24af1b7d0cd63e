"""Gradients of products with an epilogue: dz first, in one pass or in the GEMM above, then the products.

What is saved is listed in `epilogues.spec`: a bit per element, the result itself, or the pre-activation in the
operands' dtype. Gradients of scales (alpha, row_scale, col_scale) compute the product again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.compiler import is_compiling

from isogemm.core.eager import through_dispatcher
from isogemm.epilogues import random, spec
from isogemm.gemm import autograd, configs, cpu, fused, fused_op, op
from isogemm.gemm import fused_forms as forms
from isogemm.gemm.fused_forms import Fusion
from isogemm.gemm.fused_op import Call, MlpCall
from isogemm.gemm.problem import resolve_precision

_TENSORS = Call._fields[:11]  # the differentiable arguments, but aux
_BIAS, _C, _RESIDUAL = map(_TENSORS.index, ("bias", "c", "residual"))
_OWNED = ("weight", "bias", "weight_up", "bias_up")  # parameters, which may have a main_grad


def run(call: Call) -> torch.Tensor:
    """The result of a validated call, by the way that torch needs."""
    tensors = [each for each in call[:11] if each is not None]
    tensors += call.aux
    if through_dispatcher(*tensors):
        autograd.refuse_transforms("linear" if call.by_rows else "matmul_fused", *tensors)
        differentiated = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        owners, main_grads = autograd.with_main_grad(*call.owners)
        save = _save(call.fusion, differentiated)
        call = call._replace(save=save, owners=owners, main_grads=main_grads)
        return cast(torch.Tensor, torch.ops.isogemm.fused(*call)[0])
    if torch.is_grad_enabled() and True in [each.requires_grad for each in tensors]:
        precision = resolve_precision(call.x, call.precision)
        if precision is not call.precision:
            call = call._replace(precision=precision)
        return cast(torch.Tensor, cast(Any, _Fused).apply(call, *tensors))
    return call.run(call.fusion, "")[0]


class _Fused(torch.autograd.Function):
    """Of a call and its tensors, those that are there."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> torch.Tensor:
        fusion = call.fusion
        ctx.present = [each is not None for each in call[:11]]
        needs = _needs(ctx)
        result, saved = call.run(fusion, _save(fusion, True in needs[:_RESIDUAL] or True in needs[_RESIDUAL + 1 :]))
        _keep(ctx, call, fusion, result, saved)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_of_present(ctx, _gradients(ctx, grads[0], _needs(ctx), _engine_accumulates))


def _needs(ctx: Any) -> list[bool]:
    """Which gradients are wanted, of a call's tensors and aux; none of those that are not there."""
    needs = iter(ctx.needs_input_grad[1:])
    return [there and next(needs) for there in ctx.present] + list(needs)


def _of_present(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Those of the tensors that are there."""
    return itertools.compress(gradients, itertools.chain(ctx.present, itertools.repeat(True)))


def _save(fusion: Fusion, differentiated: bool) -> str:
    """What the forward writes besides its result."""
    kind = fusion.saved
    return kind if differentiated and kind != "out" else ""


def _keep(ctx: Any, call: Call, fusion: Fusion, result: torch.Tensor, saved: torch.Tensor | None) -> None:
    """What of the tensors is read again, and the rest of the call without them."""
    ctx.residual_dtype = None if call.residual is None else call.residual.dtype
    ctx.c_dtype = None if call.c is None else call.c.dtype
    ctx.registered = spec.REGISTERED.get(call.epilogue)
    ctx.kind = fusion.saved
    read = list(call[:11])
    read[_RESIDUAL] = None
    if not (fusion.activation or fusion.epilogue):
        read[_BIAS] = None
        if call.beta is None:
            read[_C] = None
    ctx.save_for_backward(*read, result if ctx.kind == "out" else saved, call.seed, *call.aux)
    ctx.rest = call[13:]


class _Kept(NamedTuple):
    call: Call
    saved: torch.Tensor | None


def _kept(ctx: Any) -> _Kept:
    (*tensors,) = ctx.saved_tensors
    read, saved, seed, aux = tensors[:11], tensors[11], tensors[12], tensors[13:]
    return _Kept(Call._make((*read, tuple(aux), seed, *ctx.rest)), saved)


def _gradients(
    ctx: Any, grad: torch.Tensor, needs: Sequence[bool], accumulates: _Accumulates | None
) -> tuple[torch.Tensor | None, ...]:
    """Of every tensor of the call, in order; None where not needed, and where added to a main_grad."""
    call, saved = _kept(ctx)
    needed = dict(zip(_TENSORS, needs, strict=False))
    of_aux = list(needs[len(_TENSORS) :])
    found: dict[str, torch.Tensor | None] = dict.fromkeys(_TENSORS)
    if needed["residual"]:
        found["residual"] = grad.to(ctx.residual_dtype)
    if not any((*(want for name, want in needed.items() if name != "residual"), *of_aux)):
        return *found.values(), *(None for _ in of_aux)
    if spec.REGISTERED.get(call.epilogue) is not ctx.registered:
        raise RuntimeError(f"epilogue {call.epilogue!r} was registered again between the forward and its backward")
    if torch.is_grad_enabled() and not is_compiling():
        twice, aux_gradients = _differentiable(call, grad, needed, of_aux, ctx.c_dtype)
        return *(found | twice).values(), *aux_gradients
    fusion, x = call.fusion, call.x
    owners = _accumulated(ctx, call, needed, accumulates)
    sums = fusion.bias_dim == -1 and (needed["bias"] or needed["bias_up"])
    dz = _of_pre_activation(grad, saved, ctx.kind, fusion, x.dtype, of_aux, sums)
    if fusion.gated:
        found |= _of_both_weights(call, dz, needed, owners)
        return *found.values(), *dz.of_aux
    rounded = dz.value.to(x.dtype)
    if needed["bias"]:
        if fusion.bias_dim == -1:
            found["bias"] = dz.of_bias(x.dtype, owners["bias"])
        else:
            found["bias"] = _over_columns(dz.value).to(x.dtype)
    found |= _of_addend(call, dz.value, needed, ctx.c_dtype)
    found |= _of_scales(call, dz.value, needed)
    scaled = _scaled(call, rounded)
    if needed["x"]:
        found["x"] = autograd.by_rows(scaled, call.columns[0].mT, call.precision)
    if needed["weight"]:
        if call.by_rows:
            found["weight"] = autograd.of_weight(scaled, x, call.precision, owners["weight"])
        else:
            found["weight"] = autograd.weight_grad(x, scaled, call.precision)
    return *found.values(), *dz.of_aux


_Accumulates = Callable[[Any, str], bool]


def _engine_accumulates(ctx: Any, name: str) -> bool:
    """Whether the engine is to accumulate the gradient of an argument of a Function after the call."""
    index = _TENSORS.index(name)
    place = sum(ctx.present[:index])
    return ctx.present[index] and autograd.is_accumulated(ctx, 1 + place, place)


def _accumulated(
    ctx: Any, call: Call, needed: dict[str, bool], accumulates: _Accumulates | None
) -> dict[str, autograd.Accumulated]:
    """The parameters that this backward adds to the main_grad of; all are checked before any is touched."""
    owners: dict[str, autograd.Accumulated] = {}
    n, k = call.columns[0].shape[::-1]
    for name, owner, main_grad in zip(_OWNED, call.owners, call.main_grads, strict=True):
        if accumulates is not None:
            main_grad = autograd.main_grad_of(owner) if accumulates(ctx, name) else None
        if needed[name] and main_grad is not None:
            op.require_total(f"{name}.main_grad", main_grad, (n, k) if "weight" in name else (n,), call.weight.device)
        owners[name] = owner, main_grad
    return owners


class _Dz(NamedTuple):
    """dz, its sums over blocks of rows where they came with it, and the gradients of a registered epilogue's aux."""

    value: torch.Tensor
    sums: torch.Tensor | None
    of_aux: Sequence[torch.Tensor | None]
    together: int = 1  # how many of the sums make a chunk

    def half(self, index: int) -> _Dz:
        """That of the gate or of up."""
        return _Dz(self.value[index], None if self.sums is None else self.sums[index], (), self.together)

    def of_bias(self, dtype: torch.dtype, accumulated: autograd.Accumulated) -> torch.Tensor | None:
        sums = self.sums
        if sums is None:
            if self.together == 1 or self.value.dtype is torch.float64 or not self.value.numel():
                return autograd.of_bias(self.value, dtype, accumulated)
            sums = cpu.row_sums(
                _rows(self.value), configs.BIAS_ROWS
            )  # lost on the way: the same, in torch's operations
        if sums.requires_grad and (accumulated[0] is None or accumulated[1] is None):
            return sum(cpu.row_sums(sums, self.together), torch.zeros_like(sums[0])).to(dtype)
        return of_sums(sums, self.together, dtype, accumulated)


def of_sums(
    sums: torch.Tensor, together: int, dtype: torch.dtype, accumulated: autograd.Accumulated
) -> torch.Tensor | None:
    """A [N] gradient from its sums over blocks of rows; None where it was added to a main_grad."""
    owner, main_grad = accumulated
    direct = not through_dispatcher(sums)
    if owner is None or main_grad is None:
        if direct:
            return fused.chunk_sums(sums, together, None, dtype)
        return cast(torch.Tensor, torch.ops.isogemm.chunk_sums(sums, together, dtype))
    add = fused_op.add_chunk_sums if direct else torch.ops.isogemm.add_chunk_sums
    add(main_grad, sums, together, owner)
    return None


def _of_pre_activation(
    grad: torch.Tensor,
    saved: torch.Tensor | None,
    kind: str,
    fusion: Fusion,
    dtype: torch.dtype,
    of_aux: list[bool],
    sums: bool,
) -> _Dz:
    if fusion.epilogue:
        assert saved is not None
        arguments = (grad, saved, fusion.aux, fusion.seed, fusion.dropout_p, fusion.epilogue, of_aux)
        if through_dispatcher(grad, saved):
            dz, *gradients = torch.ops.isogemm.epilogue_grad(*arguments)
        else:
            dz, *gradients = fused_op.epilogue_gradients(*arguments)
        return _Dz(dz, None, [found if want else None for found, want in zip(gradients, of_aux, strict=True)])
    nothing = [None for _ in of_aux]
    if not (fusion.activation or fusion.dropout_p):
        return _Dz(grad, None, nothing)
    return _activation_grad(grad, saved, kind, fusion, dtype, sums)._replace(of_aux=nothing)


def _activation_grad(
    grad: torch.Tensor, saved: torch.Tensor | None, kind: str, fusion: Fusion, dtype: torch.dtype, sums: bool
) -> _Dz:
    if through_dispatcher(grad):
        of_forward = fused_op.gradient_call(saved, kind, fusion)
        dz, partial = torch.ops.isogemm.activation_grad(grad, dtype, sums, *of_forward)
        return _Dz(dz, partial if sums and grad.is_cuda and dtype is not torch.float64 else None, ())
    return _Dz(*fused.activation_grad(grad, saved, kind, fusion, dtype, sums), ())


def _of_both_weights(
    call: Call, dz: _Dz, needed: dict[str, bool], owners: dict[str, autograd.Accumulated]
) -> dict[str, torch.Tensor | None]:
    """Of act(gate) * up, dz [2, ..., N]."""
    found: dict[str, torch.Tensor | None] = {}
    gate, up = dz.half(0), dz.half(1)
    for half, weight, bias in ((gate, "weight", "bias"), (up, "weight_up", "bias_up")):
        if needed[weight]:
            found[weight] = autograd.of_weight(half.value, call.x, call.precision, owners[weight])
        if needed[bias]:
            found[bias] = half.of_bias(call.weight.dtype, owners[bias])
    if needed["x"]:
        assert call.weight_up is not None
        of_gate = autograd.by_rows(gate.value, call.weight, call.precision)
        of_up = plain_call(up.value, call.weight_up, call.precision)
        found["x"] = run(of_up._replace(c=of_gate, beta_value=1.0, by_rows=False))
    return found


def plain_call(x: torch.Tensor, weight: torch.Tensor, precision: str | None) -> Call:
    """A call without an epilogue."""
    nothing = (None,) * 9
    return Call(
        x, weight, *nothing, (), None, 1.0, 0.0, 0.0, "", (), "", -1, False, True, "", (None,) * 4, (None,) * 4,
        None, precision,
    )  # fmt: skip


def _of_addend(
    call: Call, dz: torch.Tensor, needed: dict[str, bool], dtype: torch.dtype | None
) -> dict[str, torch.Tensor | None]:
    """Of beta c; dtype: c's."""
    found: dict[str, torch.Tensor | None] = {}
    if needed["c"]:
        found["c"] = (dz * (call.beta_value if call.beta is None else call.beta)).to(dtype)
    if needed["beta"]:
        assert call.c is not None
        assert call.beta is not None
        wide = cpu.sums_dtype(dz.dtype)
        found["beta"] = (dz.to(wide) * call.c.to(wide)).sum().to(call.beta.dtype)
    return found


def _of_scales(call: Call, dz: torch.Tensor, needed: dict[str, bool]) -> dict[str, torch.Tensor | None]:
    """Of alpha, row_scale and col_scale, by the product computed again."""
    names = [name for name in ("alpha", "row_scale", "col_scale") if needed[name]]
    if not names:
        return {}
    wide = cpu.sums_dtype(dz.dtype)
    product = autograd.matmul(_rows(call.x), call.columns[0], wide if wide is not dz.dtype else None, call.precision)
    weighed = dz.to(wide) * product.view(dz.shape)
    factors: dict[str, Any] = {
        "alpha": call.alpha_value if call.alpha is None else call.alpha.to(wide),
        "row_scale": 1 if call.row_scale is None else call.row_scale.to(wide)[..., None],
        "col_scale": 1 if call.col_scale is None else call.col_scale.to(wide),
    }
    reductions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "alpha": torch.sum,
        "row_scale": _over_columns,
        "col_scale": autograd.bias_grad,
    }
    found: dict[str, torch.Tensor | None] = {}
    for name in names:
        of_others = weighed
        for other, factor in factors.items():
            if other != name and not (isinstance(factor, int | float) and factor == 1):
                of_others = of_others * factor
        found[name] = reductions[name](of_others).to(cast(torch.Tensor, getattr(call, name)).dtype)
    return found


def _scaled(call: Call, dz: torch.Tensor) -> torch.Tensor:
    """That of the product itself: times alpha, row_scale and col_scale."""
    fusion = call.fusion
    if fusion.alpha is None and fusion.alpha_value == 1 and fusion.row_scale is None and fusion.col_scale is None:
        return dz
    plain = Fusion(
        row_scale=fusion.row_scale, col_scale=fusion.col_scale, alpha=fusion.alpha, alpha_value=fusion.alpha_value
    )
    return forms.before_activation(dz.to(cpu.sums_dtype(dz.dtype)), None, plain)[0].to(dz.dtype)


def _over_columns(x: torch.Tensor) -> torch.Tensor:
    """[..., N] -> [...], in the order of a bias's gradient: independent of the rows around."""
    return autograd.bias_grad(_rows(x).mT).view(x.shape[:-1])


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _differentiable(
    call: Call, grad: torch.Tensor, needed: dict[str, bool], of_aux: list[bool], c_dtype: torch.dtype | None
) -> tuple[dict[str, torch.Tensor | None], list[torch.Tensor | None]]:
    """The gradients as functions that have gradients: by computing the epilogue again in torch's operations.

    Of aliases: one operand may be made from another, which is for the engine to follow.
    """
    aliases = {name: each.view_as(each) for name in _TENSORS if (each := getattr(call, name)) is not None}
    call = call._replace(**aliases, aux=tuple(each.view_as(each) for each in call.aux))
    wide = cpu.sums_dtype(call.x.dtype)
    sums, up = (
        None if b is None else autograd.matmul(call.x, b, wide if wide is not call.x.dtype else None, call.precision)
        for b in call.columns
    )
    fusion = call.fusion._replace(residual=None)
    value = forms.after_activation(*forms.before_activation(cast(torch.Tensor, sums), up, fusion), fusion)
    found: dict[str, torch.Tensor | None] = {}
    if not (fusion.activation or fusion.epilogue):  # linear in these, which were not kept
        found = _of_sum(call, grad, needed, fusion, c_dtype)
    names = [name for name in _TENSORS if name != "residual" and needed[name] and name not in found]
    wanted = [each for each, want in zip(call.aux, of_aux, strict=True) if want]
    inputs = [*(getattr(call, name) for name in names), *wanted]
    gradients = iter(
        torch.autograd.grad(value, inputs, grad.to(value.dtype), create_graph=True, allow_unused=True) if inputs else ()
    )
    found |= {name: next(gradients) for name in names}
    return found, [next(gradients) if want else None for want in of_aux]


def _of_sum(
    call: Call, grad: torch.Tensor, needed: dict[str, bool], fusion: Fusion, c_dtype: torch.dtype | None
) -> dict[str, torch.Tensor | None]:
    """Of a bias and an addend that nothing follows but dropout."""
    above = grad.to(cpu.sums_dtype(call.x.dtype))
    if fusion.dropout_p:
        above = forms.dropped(above, fusion)
    found: dict[str, torch.Tensor | None] = {}
    if needed["bias"]:
        summed = autograd.bias_grad(above) if fusion.bias_dim == -1 else _over_columns(above)
        found["bias"] = summed.to(call.x.dtype)
    if call.beta is None:
        found |= _of_addend(call, above, needed | {"beta": False}, c_dtype)
    return found


# Two layers. In eager mode each part of the backward is a node of its own, so that what it read is let go when it is
# done: `_Through` takes the gradient to z, `_Down` then gives those of the second layer, and `_Hidden` of the first.


def run_mlp(hidden: Call, down: Call) -> torch.Tensor:
    """`down` of the result of `hidden`; down.x is yet to be that."""
    tensors = [each for each in (*hidden[:5], *down[1:11]) if each is not None]
    fusion = hidden.fusion
    if not fusion.activation:
        raise ValueError("activation is None; expected one")
    fused.validate(hidden.x, *hidden.columns, fusion, None, hidden.precision, _HIDDEN_NAMES)
    h = hidden.x.new_empty(1).expand(*hidden.x.shape[:-1], hidden.columns[0].shape[-1])  # like the one to come
    fused.validate(h, *down.columns, down.fusion, down.out_dtype, down.precision, _DOWN_NAMES)
    differentiated = torch.is_grad_enabled() and True in [each.requires_grad for each in tensors]
    if through_dispatcher(*tensors):
        autograd.refuse_transforms("nn.MLP", *tensors)
        return cast(torch.Tensor, torch.ops.isogemm.mlp(*_one_call(hidden, down, differentiated))[0])
    if not differentiated:
        h, _ = hidden.run(fusion, "")
        return down._replace(x=h).run(down.fusion, "")[0]
    hidden = hidden._replace(precision=resolve_precision(hidden.x, hidden.precision))
    down = down._replace(precision=hidden.precision)
    first, second, through = cast(Any, _Hidden), cast(Any, _Down), cast(Any, _Through)
    h, z = first.apply(hidden, *(each for each in hidden[:5] if each is not None))
    result = second.apply(down, fusion, h, z, down.weight, down.bias)
    return cast(torch.Tensor, through.apply(down, fusion, result, z, down.weight, down.residual))


_HIDDEN_NAMES: fused.Names = ("x", "weight", "bias", "hidden_dropout_p")
_DOWN_NAMES: fused.Names = ("x", "weight_down", "bias_down", "dropout_p")


def _one_call(hidden: Call, down: Call, save: bool) -> MlpCall:
    owners, main_grads = autograd.with_main_grad(*hidden.owners, *down.owners[:2])
    return MlpCall(
        *hidden[:5], down.weight, down.bias, down.residual, hidden.seed, down.seed, hidden.activation, hidden.arguments,
        hidden.dropout_p, down.dropout_p, save, owners, main_grads, down.out_dtype, hidden.precision,
    )  # fmt: skip


class _Hidden(torch.autograd.Function):
    """(dropout(act(z)), z); for relu both are the same. The gradient is that of z."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fusion = call.fusion
        h, z = call.run(fusion, fusion.saved_hidden if fusion.saved_hidden != "out" else "")
        ctx.present = [each is not None for each in call[:5]]
        _, of_weight, of_weight_up, *_ = _needs(ctx)
        ctx.save_for_backward(call.x if of_weight or of_weight_up else None, call.weight, call.weight_up)
        ctx.call = call._replace(**dict.fromkeys(_TENSORS[:5]))  # type: ignore[arg-type]
        ctx.mark_non_differentiable(h)
        ctx.set_materialize_grads(False)
        return h, h.view_as(h) if z is None else z

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if grads[1] is None:
            return (None,) * (1 + sum(ctx.present))
        x, weight, weight_up = ctx.saved_tensors
        call = ctx.call._replace(x=x, weight=weight, weight_up=weight_up)
        needed = dict.fromkeys(_TENSORS, False) | dict(zip(_TENSORS, _needs(ctx), strict=False))
        owners = _accumulated(ctx, call, needed, _engine_accumulates)
        found = of_first_layer(call, _handed_on(grads[1]), needed, owners)
        return None, *_of_present(ctx, [found.get(name) for name in _TENSORS[:5]])


def of_first_layer(
    call: Call, dz: _Dz, needed: dict[str, bool], owners: dict[str, autograd.Accumulated]
) -> dict[str, torch.Tensor | None]:
    """Of x, the weights and the biases, by dz."""
    if call.fusion.gated:
        return _of_both_weights(call, dz, needed, owners)
    found: dict[str, torch.Tensor | None] = {}
    if needed["weight"]:
        found["weight"] = autograd.of_weight(dz.value, call.x, call.precision, owners["weight"])
    if needed["bias"]:
        found["bias"] = dz.of_bias(call.weight.dtype, owners["bias"])
    if needed["x"]:
        found["x"] = autograd.by_rows(dz.value, call.weight, call.precision)
    return found


class _Down(torch.autograd.Function):
    """The second layer, h given; the gradient is that of h @ weight.T + bias, before its dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        first: Fusion,
        h: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(h if ctx.needs_input_grad[4] else None, first.seed)
        ctx.dtype = h.dtype
        ctx.z = weakref.ref(z)  # alive where a second derivative may be asked for; else it is to go before h does
        ctx.first, ctx.owners, ctx.shape = first._replace(seed=None), call.owners, weight.shape
        ctx.precision = call.precision
        return call._replace(x=h).run(call.fusion, "")[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, seed = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[4:6]
        if torch.is_grad_enabled() and ctx.needs_input_grad[3] and needs_weight:  # h is to be a function of z
            z = ctx.z()
            if z is None:
                raise RuntimeError(
                    "a second derivative of mlp under saved-tensor hooks (a checkpoint): call isogemm.linear twice"
                )
            h = _again(z, ctx.first._replace(seed=seed), ctx.dtype)
        owners = [
            (owner, autograd.main_grad_of(owner) if autograd.is_accumulated(ctx, index, index - 2) else None)
            for index, owner in ((4, ctx.owners[0]), (5, ctx.owners[1]))
        ]
        for (_, total), name, shape in zip(owners, ("weight", "bias"), (ctx.shape, ctx.shape[:1]), strict=True):
            if total is not None:
                op.require_total(f"{name}_down.main_grad", total, shape, grads[0].device)
        grad = grads[0]
        dw = autograd.of_weight(grad.to(ctx.dtype), h, ctx.precision, owners[0]) if needs_weight else None
        db = autograd.of_bias(grad, ctx.dtype, owners[1]) if needs_bias else None
        return None, None, None, None, dw, db


class _Through(torch.autograd.Function):
    """The result itself; its gradient goes to the second layer's product, to z and to the residual."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        first: Fusion,
        result: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(z, weight, first.seed, call.seed)
        ctx.first, ctx.dropout_p, ctx.precision = first._replace(seed=None), call.dropout_p, call.precision
        ctx.sums = any(bias is not None and bias.requires_grad for bias in (first.bias, first.bias_up))
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.mark_dirty(result)  # which makes it this node's own, not a view
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        z, weight, seed, down_seed = ctx.saved_tensors
        above = grads[0]
        if ctx.dropout_p:
            above = _dropout_grad(above, Fusion(seed=down_seed, dropout_p=ctx.dropout_p))
        dz = None
        if ctx.needs_input_grad[3]:
            dz = _hidden_grad(above, weight, z, ctx.first._replace(seed=seed), ctx.precision, ctx.sums)
        of_residual = grads[0].to(ctx.residual_dtype) if ctx.needs_input_grad[5] else None
        return None, None, above, dz, None, of_residual


class _RowSums(NamedTuple):
    """What dz carries along the engine's edge, as its attribute `row_sums`."""

    sums: torch.Tensor
    version: int  # dz's, when they were made


def _hidden_grad(
    grad: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, first: Fusion, precision: str | None, sums: bool
) -> torch.Tensor:
    """dz, for `_handed_on` at the other end of the engine's edge."""
    if torch.is_grad_enabled() and not is_compiling():
        wide = cpu.sums_dtype(weight.dtype)
        above = autograd.matmul(grad.to(weight.dtype), weight, wide if wide is not weight.dtype else None, precision)
        if first.dropout_p:
            above = forms.dropped(above, first)
        slope = forms.derivative(z, first.saved_hidden, first, above.shape[-1], wide)
        return (above * slope).to(weight.dtype)
    dz, partial = fused.hidden_grad(grad, weight, z, first.saved_hidden, first, precision, sums)
    if partial is not None and not dz.is_inference():  # which has no version
        dz.row_sums = _RowSums(partial, dz._version)  # type: ignore[attr-defined]
    return dz


def _handed_on(dz: torch.Tensor) -> _Dz:
    """dz with the sums it carries, unless it was changed since, or is another tensor: a sum, or a hook's."""
    carried: _RowSums | None = getattr(dz, "row_sums", None)
    sums = carried.sums if carried is not None and carried.version == dz._version else None
    return _Dz(dz, sums, (), configs.BIAS_BLOCKS)


def _dropout_grad(grad: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    if torch.is_grad_enabled() and not is_compiling():
        return forms.dropped(grad, fusion)
    return _activation_grad(grad, None, "", fusion, grad.dtype, False).value


def _again(z: torch.Tensor, first: Fusion, dtype: torch.dtype) -> torch.Tensor:
    """dropout(act(z)), differentiable."""
    wide = z.to(cpu.sums_dtype(dtype))
    gate, up = (wide[0], wide[1]) if first.gated else (wide, None)
    if first.saved_hidden == "out":  # dropout has been, with its scale, which relu lets through
        wide = torch.relu(gate)
        scale = random.scale(first.dropout_p) if first.dropout_p else 1.0
        return (wide.detach() + (wide - wide.detach()) * scale).to(dtype)
    return forms.after_activation(gate, up, first).to(dtype)


def _no_gradient(argument: object) -> object:
    """As register_autograd wants it: a list for a list of tensors, or of nothing."""
    listed = isinstance(argument, list) and all(isinstance(each, torch.Tensor) for each in argument)
    return [None] * len(cast(list[object], argument)) if listed else None


def _register() -> None:
    """The operators' autograd: the same gradients, through the operators."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        call = Call.of_operator(inputs)
        call = call._replace(precision=resolve_precision(call.x, call.precision))
        ctx.structure = [_no_gradient(each) for each in inputs]
        _keep(ctx, call, call.fusion, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: torch.Tensor, of_saved: torch.Tensor | None) -> tuple[Any, ...]:
        needs, of_aux = ctx.needs_input_grad[:11], ctx.needs_input_grad[11]
        gradients = _gradients(ctx, grad, [*needs, *of_aux], None)
        return *gradients[:11], list(gradients[11:]), *ctx.structure[12:]

    def keep_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        call = MlpCall(*inputs)
        _, h, z = output
        ctx.save_for_backward(
            call.x,
            call.weight,
            call.weight_up,
            call.weight_down,
            h,
            z if call.written else h,
            call.seed,
            call.down_seed,
        )
        ctx.structure = [_no_gradient(each) for each in inputs]
        ctx.residual_dtype = None if call.residual is None else call.residual.dtype
        ctx.call = call._replace(**dict.fromkeys(MlpCall._fields[:10]))  # type: ignore[arg-type]
        ctx.call = ctx.call._replace(precision=resolve_precision(call.x, call.precision))
        ctx.mark_non_differentiable(h, z)
        ctx.set_materialize_grads(False)

    def mlp_backward(ctx: Any, grad: torch.Tensor, *of_kept: torch.Tensor | None) -> tuple[Any, ...]:
        x, weight, weight_up, weight_down, h, z, seed, down_seed = ctx.saved_tensors
        call: MlpCall = ctx.call
        names = MlpCall._fields[:8]
        needed = dict(zip(names, ctx.needs_input_grad, strict=False))
        if torch.is_grad_enabled() and not is_compiling():
            raise RuntimeError(
                "isogemm::mlp has no second derivative through the dispatcher; call isogemm.linear twice"
            )
        first = call.hidden._replace(seed=seed)
        above = grad
        if call.dropout_p:
            dropout = Fusion(seed=down_seed, dropout_p=call.dropout_p)
            above = _activation_grad(grad, None, "", dropout, grad.dtype, False).value
        accumulated = list(zip(call.owners, call.main_grads, strict=True))
        found: dict[str, torch.Tensor | None] = {}
        if needed["residual"]:
            found["residual"] = grad.to(ctx.residual_dtype)
        if any(needed[name] for name in names[:5]):
            of_forward = fused_op.gradient_call(z, first.saved_hidden, first)
            sums = needed["bias"] or needed["bias_up"]
            value, partial = torch.ops.isogemm.hidden_grad(above, weight_down, call.precision, sums, *of_forward)
            dz = _Dz(value, partial if sums and value.dtype is not torch.float64 else None, (), configs.BIAS_BLOCKS)
            hidden = plain_call(x, weight, call.precision)
            hidden = hidden._replace(weight_up=weight_up, activation=call.activation)
            found |= of_first_layer(hidden, dz, needed, dict(zip(_OWNED, accumulated[:4], strict=True)))
        if needed["weight_down"]:
            found["weight_down"] = autograd.of_weight(above.to(h.dtype), h, call.precision, accumulated[4])
        if needed["bias_down"]:
            found["bias_down"] = autograd.of_bias(above, h.dtype, accumulated[5])
        return *(found.get(name) for name in names), *ctx.structure[len(names) :]

    register: Any = torch.library.register_autograd
    register("isogemm::fused", backward, setup_context=keep)
    register("isogemm::mlp", mlp_backward, setup_context=keep_mlp)


_register()
