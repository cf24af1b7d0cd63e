"""Gradients of products with an epilogue: dz first, in one pass or in the GEMM above, then the products.

What is saved of an activation is listed in `epilogues.spec`: a bit per element, the result itself, or the
pre-activation. Of the operands those are kept that a wanted gradient reads (`_READ_BY`).
"""

from __future__ import annotations

import functools
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
_X, _WEIGHT, _BIAS, _RESIDUAL = map(_TENSORS.index, ("x", "weight", "bias", "residual"))
_OWNED = ("weight", "bias", "weight_up", "bias_up")  # parameters, which may have a main_grad


def run(call: Call) -> torch.Tensor:
    """The result of a validated call, by the way that torch needs."""
    tensors = [each for each in call[:11] if each is not None]
    tensors += call.aux
    if through_dispatcher(*tensors):
        autograd.refuse_transforms("linear" if call.by_rows else "matmul_fused", *tensors)
        needs = [each is not None and each.requires_grad for each in (*call[:11], *call.aux)]
        wanted = torch.is_grad_enabled() and _wants_dz(needs)
        owners, main_grads = autograd.with_main_grad(*call.owners)
        call = call._replace(save=_save(call.fusion, wanted), owners=owners, main_grads=main_grads)
        return cast(torch.Tensor, torch.ops.isogemm.fused(*call)[0])
    if torch.is_grad_enabled() and True in [each.requires_grad for each in tensors]:
        precision = resolve_precision(call.x, call.precision)
        if precision is not call.precision:
            call = call._replace(precision=precision)
        return cast(torch.Tensor, cast(Any, _Fused).apply(call, *tensors)[0])
    return call.run(call.fusion, "")[0]


class _Fused(torch.autograd.Function):
    """Takes a call and those of its tensors that are there; gives the result, and the pre-activation where it is kept.

    The pre-activation is a result so that a second derivative passes through it. Where its signs are kept, which have
    none, an empty tensor stands for it: the second derivative is zero, as torch's, and not missing.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        fusion = call.fusion
        ctx.present = [each is not None for each in call[:11]]
        needs = _needs(ctx)
        result, saved = call.run(fusion, _save(fusion, _wants_dz(needs)))
        passed = result.new_empty(0) if _wants_dz(needs) and fusion.saved == "mask" else None
        kept = _keep(ctx, call, fusion, needs, result, saved, passed)
        ctx.set_materialize_grads(False)
        return result, saved if kept is saved and ctx.kind == "pre" else passed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, of_saved: torch.Tensor | None) -> tuple[Any, ...]:
        return None, *_of_present(ctx, _gradients(ctx, grad, of_saved, _needs(ctx)))


def _needs(ctx: Any) -> tuple[bool, ...]:
    """Which gradients are wanted, of a call's tensors and aux; none of those that are not there."""
    needs = iter(ctx.needs_input_grad[1:])
    return *[there and next(needs) for there in ctx.present], *needs


def _of_present(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Those of the tensors that are there."""
    return itertools.compress(gradients, itertools.chain(ctx.present, itertools.repeat(True)))


def _wants_dz(needs: Sequence[bool]) -> bool:
    """Whether a gradient is wanted that passes the activation: any but the residual's."""
    return True in needs[:_RESIDUAL] or True in needs[_RESIDUAL + 1 :]


def _save(fusion: Fusion, wanted: bool) -> str:
    """What the forward writes besides its result."""
    kind = fusion.saved
    return kind if wanted and kind != "out" else ""


# Which gradients read an argument's value. Those of the scales compute the product again.
_READ_BY = {
    "x": ("weight", "weight_up", "alpha", "row_scale", "col_scale"),
    "weight": ("x", "alpha", "row_scale", "col_scale"),
    "weight_up": ("x",),
    "c": ("beta",),
    "beta": ("c",),
    "alpha": ("x", "weight", "row_scale", "col_scale"),
    "row_scale": ("x", "weight", "alpha", "col_scale"),
    "col_scale": ("x", "weight", "alpha", "row_scale"),
}


@functools.cache
def _is_read(needs: tuple[bool, ...]) -> tuple[bool, ...]:
    """Whether the backward reads each of a call's tensors."""
    wanted = {name for name, need in zip(_TENSORS, needs, strict=False) if need}
    return tuple(not wanted.isdisjoint(_READ_BY.get(name, ())) for name in _TENSORS)


def _keep(
    ctx: Any,
    call: Call,
    fusion: Fusion,
    needs: tuple[bool, ...],
    result: torch.Tensor,
    saved: torch.Tensor | None,
    passed: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Keep what the gradients that are wanted read: no more. Gives what is kept of the activation.

    passed: what a second derivative of zero passes through.
    """
    ctx.dtypes = [each if each is None else each.dtype for each in call[:11]]
    ctx.weight_shape = call.columns[0].shape[::-1]
    ctx.registered = spec.REGISTERED.get(call.epilogue)
    ctx.kind = fusion.saved if _wants_dz(needs) else ""
    read = [each if is_read else None for each, is_read in zip(call[:11], _is_read(needs[:11]), strict=True)]
    kept = {"": None, "out": result}.get(ctx.kind, saved)
    if fusion.gated and kept is not None and not (needs[_X] or needs[_WEIGHT] or needs[_BIAS]):
        kept = kept[:1].clone()  # the gradient of up reads the gate alone
    aux, seed = (call.aux, call.seed) if _wants_dz(needs) else ((), None)
    ctx.save_for_backward(*read, kept, passed, seed, *aux)
    ctx.rest, ctx.shape = call[13:], result.shape
    return kept


def _kept(ctx: Any) -> tuple[Call, torch.Tensor | None, torch.Tensor | None]:
    """The call, with those of its tensors that were kept, and what was of the activation."""
    (*tensors,) = ctx.saved_tensors
    read, (saved, passed, seed), aux = tensors[:11], tensors[11:14], tensors[14:]
    return Call._make((*read, tuple(aux), seed, *ctx.rest)), saved, passed


class _Flat(torch.autograd.Function):
    """x, of which `passed` is an argument with no effect."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passed: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], grads[0].new_empty(0)


def _gradients(
    ctx: Any, grad: torch.Tensor | None, of_saved: torch.Tensor | None, needs: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of all tensors of the call, in order; None where not needed, and where added to a main_grad.

    of_saved: that of the pre-activation, where a second derivative comes through it.
    """
    needed = dict(zip(_TENSORS, needs, strict=False))
    of_aux = list(needs[len(_TENSORS) :])
    dtypes = dict(zip(_TENSORS, ctx.dtypes, strict=True))
    found: dict[str, torch.Tensor | None] = dict.fromkeys(_TENSORS)
    if needed["residual"] and grad is not None:
        found["residual"] = grad.to(dtypes["residual"])
    if not _wants_dz(needs) or (grad is None and of_saved is None):
        return *found.values(), *(None for _ in of_aux)
    call, saved, passed = _kept(ctx)
    if spec.REGISTERED.get(call.epilogue) is not ctx.registered:
        raise RuntimeError(f"epilogue {call.epilogue!r} was registered again between the forward and its backward")
    fusion, dtype = call.fusion, dtypes["x"]
    if fusion.gated and saved is not None:
        saved = saved.expand(2, *saved.shape[1:])
    owners = _accumulated(call, needed, ctx.weight_shape)
    sums = fusion.bias_dim == -1 and (needed["bias"] or needed["bias_up"])
    if passed is not None and of_saved is not None:
        of_saved = of_saved.new_zeros(ctx.shape)
    dz = _Dz(cast(torch.Tensor, of_saved), None, [None for _ in of_aux])
    if grad is not None:
        dz = _of_pre_activation(grad, saved, ctx.kind, fusion, dtype, of_aux, sums)
        if passed is not None and _is_differentiated():
            dz = dz._replace(value=cast(Any, _Flat).apply(dz.value, passed))
    if of_saved is not None:
        value = of_saved if grad is None else dz.value + of_saved
        dz = dz._replace(value=value.to(dtype), sums=None)
    if fusion.gated:
        found |= _of_both_weights(call, dz, needed, owners)
        return *found.values(), *dz.of_aux
    rounded = dz.value.to(dtype)
    if needed["bias"]:
        if fusion.bias_dim == -1:
            found["bias"] = dz.of_bias(dtype, owners["bias"])
        else:
            found["bias"] = _over_columns(dz.value).to(dtype)
    found |= _of_addend(call, dz.value, needed, dtypes)
    found |= _of_scales(call, dz.value, needed, dtypes)
    if not (needed["x"] or needed["weight"]):
        return *found.values(), *dz.of_aux
    scaled = _scaled(call, rounded)
    if needed["x"]:
        found["x"] = autograd.by_rows(scaled, call.columns[0].mT, call.precision)
    if needed["weight"]:
        if call.by_rows:
            found["weight"] = autograd.of_weight(scaled, call.x, call.precision, owners["weight"])
        else:
            found["weight"] = autograd.weight_grad(call.x, scaled, call.precision)
    return *found.values(), *dz.of_aux


def _accumulated(call: Call, needed: dict[str, bool], weight_shape: Sequence[int]) -> dict[str, autograd.Accumulated]:
    """The parameters that this backward adds to the main_grad of; all are checked before any is touched."""
    owners: dict[str, autograd.Accumulated] = {}
    for name, given in zip(_OWNED, zip(call.owners, call.main_grads, strict=True), strict=True):
        owner, total = owners[name] = autograd.given_or_accumulated(given, needed[name])
        if needed[name] and owner is not None and total is not None:
            shape = weight_shape if "weight" in name else weight_shape[:1]
            op.require_total(f"{name}.main_grad", total, shape, owner.device)
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
        gradients: Sequence[torch.Tensor | None]
        if _is_differentiated():
            dz, *gradients = forms.epilogue_grad(grad, saved, fusion, dtype, of_aux, create_graph=True)
            return _Dz(cast(torch.Tensor, dz), None, gradients)
        arguments = (grad, saved, dtype, fusion.aux, fusion.seed, fusion.dropout_p, fusion.epilogue, of_aux)
        if through_dispatcher(grad, saved):
            dz, *gradients = torch.ops.isogemm.epilogue_grad(*arguments)
        else:
            dz, *gradients = fused_op.epilogue_gradients(*arguments)
        return _Dz(dz, None, [found if want else None for found, want in zip(gradients, of_aux, strict=True)])
    nothing = [None for _ in of_aux]
    if not (fusion.activation or fusion.dropout_p):
        return _Dz(grad, None, nothing)
    return _activation_grad(grad, saved, kind, fusion, dtype, sums)._replace(of_aux=nothing)


def _is_differentiated() -> bool:
    """In a backward: whether its gradients are to have gradients, and so are computed in torch's operations."""
    return torch.is_grad_enabled() and not is_compiling()


def _activation_grad(
    grad: torch.Tensor, saved: torch.Tensor | None, kind: str, fusion: Fusion, dtype: torch.dtype, sums: bool
) -> _Dz:
    if _is_differentiated():
        return _Dz(forms.activation_grad(grad, saved, kind, fusion, dtype), None, ())
    if through_dispatcher(grad):
        of_forward = fused_op.gradient_call(saved, kind, fusion)
        dz, partial = torch.ops.isogemm.activation_grad(grad, dtype, sums, *of_forward)
        return _Dz(dz, partial if sums and grad.is_cuda and dtype is not torch.float64 else None, ())
    return _Dz(*fused.activation_grad(grad, saved, kind, fusion, dtype, sums), ())


def _of_both_weights(
    call: Call, dz: _Dz, needed: dict[str, bool], owners: dict[str, autograd.Accumulated]
) -> dict[str, torch.Tensor | None]:
    """The gradients of both weights and biases in act(gate) * up, whose dz is [2, ..., N]; all of one dtype."""
    found: dict[str, torch.Tensor | None] = {}
    gate, up = dz.half(0), dz.half(1)
    for half, weight, bias in ((gate, "weight", "bias"), (up, "weight_up", "bias_up")):
        if needed[weight]:
            found[weight] = autograd.of_weight(half.value, call.x, call.precision, owners[weight])
        if needed[bias]:
            found[bias] = half.of_bias(dz.value.dtype, owners[bias])
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


_Dtypes = dict[str, torch.dtype]  # of the call's tensors


def _of_addend(
    call: Call, dz: torch.Tensor, needed: dict[str, bool], dtypes: _Dtypes
) -> dict[str, torch.Tensor | None]:
    """Gradients of c and beta, from dz."""
    found: dict[str, torch.Tensor | None] = {}
    if needed["c"]:
        found["c"] = (dz * (call.beta_value if call.beta is None else call.beta)).to(dtypes["c"])
    if needed["beta"]:
        assert call.c is not None
        wide = cpu.sums_dtype(dz.dtype)
        found["beta"] = (dz.to(wide) * call.c.to(wide)).sum().to(dtypes["beta"])
    return found


def _of_scales(
    call: Call, dz: torch.Tensor, needed: dict[str, bool], dtypes: _Dtypes
) -> dict[str, torch.Tensor | None]:
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
        found[name] = reductions[name](of_others).to(dtypes[name])
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
    of_first = [each for each in hidden[:5] if each is not None]
    if True in [each.requires_grad for each in of_first]:
        h, z, wide = first.apply(hidden, *of_first)
    else:
        h, z, wide = hidden.run(fusion, "")[0], None, None
    result = second.apply(down, fusion, h, z, wide, down.weight, down.bias)
    return cast(torch.Tensor, through.apply(down, fusion, result, z, wide, down.weight, down.residual))


_HIDDEN_NAMES: fused.Names = ("x", "weight", "bias", "hidden_dropout_p")
_DOWN_NAMES: fused.Names = ("x", "weight_down", "bias_down", "dropout_p")


def _one_call(hidden: Call, down: Call, save: bool) -> MlpCall:
    owners, main_grads = autograd.with_main_grad(*hidden.owners, *down.owners[:2])
    return MlpCall(
        *hidden[:5], down.weight, down.bias, down.residual, hidden.seed, down.seed, hidden.activation, hidden.arguments,
        hidden.dropout_p, down.dropout_p, save, owners, main_grads, down.out_dtype, hidden.precision,
    )  # fmt: skip


class _Hidden(torch.autograd.Function):
    """(dropout(act(z)), z, None); for relu the first two are the same. The gradient is that of z.

    Where z is kept in float32: (dropout(act(z)), place, z). The engine casts a gradient to the dtype of its tensor, so
    dz goes to `place`, which has its dtype and shape, and one element.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        fusion = call.fusion
        h, z = call.run(fusion, fusion.saved_hidden if fusion.saved_hidden != "out" else "")
        ctx.present = [each is not None for each in call[:5]]
        of_x, of_weight, of_weight_up, *_ = _needs(ctx)
        ctx.save_for_backward(
            call.x if of_weight or of_weight_up else None, *((call.weight, call.weight_up) if of_x else (None, None))
        )
        ctx.weight_shape = call.weight.shape
        ctx.call = call._replace(**dict.fromkeys(_TENSORS[:5]))  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        if z is None or z.dtype is h.dtype:
            ctx.mark_non_differentiable(h)
            return h, h.view_as(h) if z is None else z, None
        ctx.mark_non_differentiable(h, z)
        return h, h.new_empty_strided(z.shape, (0,) * z.ndim), z

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if grads[1] is None:
            return (None,) * (1 + sum(ctx.present))
        x, weight, weight_up = ctx.saved_tensors
        call = ctx.call._replace(x=x, weight=weight, weight_up=weight_up)
        needed = dict.fromkeys(_TENSORS, False) | dict(zip(_TENSORS, _needs(ctx), strict=False))
        owners = _accumulated(call, needed, ctx.weight_shape)
        found = of_first_layer(call, _handed_on(grads[1]), needed, owners)
        return None, *_of_present(ctx, [found.get(name) for name in _TENSORS[:5]])


class _Wide(torch.autograd.Function):
    """z in float32, whose gradient is that of its place (see _Hidden)."""

    @staticmethod
    def forward(ctx: Any, place: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        return wide.view_as(wide)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


def _differentiable_z(z: torch.Tensor, wide: torch.Tensor | None) -> torch.Tensor:
    return z if wide is None else cast(torch.Tensor, cast(Any, _Wide).apply(z, wide))


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
        found["bias"] = dz.of_bias(dz.value.dtype, owners["bias"])
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
        z: torch.Tensor | None,
        wide: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(h if ctx.needs_input_grad[5] else None, first.seed)
        ctx.dtype = h.dtype
        # Alive where a second derivative may be asked for; else they are to go before h does.
        ctx.z = [each if each is None else weakref.ref(each) for each in (z, wide)]
        ctx.first, ctx.owners, ctx.shape = first._replace(seed=None), call.owners, weight.shape
        ctx.precision = call.precision
        return call._replace(x=h).run(call.fusion, "")[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, seed = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[5:7]
        if torch.is_grad_enabled() and ctx.needs_input_grad[3] and needs_weight:  # h is to be a function of z
            z, wide = (each and each() for each in ctx.z)
            if z is None:
                raise RuntimeError(
                    "a second derivative of mlp under saved-tensor hooks (a checkpoint): call isogemm.linear twice"
                )
            h = _again(_differentiable_z(z, wide), ctx.first._replace(seed=seed), ctx.dtype)
        owners = list(map(autograd.accumulated, ctx.owners[:2], (needs_weight, needs_bias)))
        for (_, total), name, shape in zip(owners, ("weight", "bias"), (ctx.shape, ctx.shape[:1]), strict=True):
            if total is not None:
                op.require_total(f"{name}_down.main_grad", total, shape, grads[0].device)
        grad = grads[0]
        dw = autograd.of_weight(grad.to(ctx.dtype), h, ctx.precision, owners[0]) if needs_weight else None
        db = autograd.of_bias(grad, ctx.dtype, owners[1]) if needs_bias else None
        return None, None, None, None, None, dw, db


class _Through(torch.autograd.Function):
    """The result itself; its gradient goes to the second layer's product, to z and to the residual."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        first: Fusion,
        result: torch.Tensor,
        z: torch.Tensor | None,
        wide: torch.Tensor | None,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        read = (z, wide, weight, first.seed) if ctx.needs_input_grad[3] else (None,) * 4
        ctx.save_for_backward(*read, call.seed)
        ctx.first, ctx.dropout_p, ctx.precision = first._replace(seed=None), call.dropout_p, call.precision
        ctx.sums = any(bias is not None and bias.requires_grad for bias in (first.bias, first.bias_up))
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.mark_dirty(result)  # which makes it this node's own, not a view
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        z, wide, weight, seed, down_seed = ctx.saved_tensors
        above = grads[0]
        if ctx.dropout_p:
            dropout = Fusion(seed=down_seed, dropout_p=ctx.dropout_p)
            above = _activation_grad(above, None, "", dropout, above.dtype, False).value
        dz = None
        if ctx.needs_input_grad[3]:
            dz = _hidden_grad(above, weight, z, wide, ctx.first._replace(seed=seed), ctx.precision, ctx.sums)
        of_residual = grads[0].to(ctx.residual_dtype) if ctx.needs_input_grad[6] else None
        return None, None, above, dz, None, None, of_residual


class _RowSums(NamedTuple):
    """What dz carries along the engine's edge, as its attribute `row_sums`."""

    sums: torch.Tensor
    version: int  # dz's, when they were made


def _hidden_grad(
    grad: torch.Tensor,
    weight: torch.Tensor,
    z: torch.Tensor,
    wide: torch.Tensor | None,
    first: Fusion,
    precision: str | None,
    sums: bool,
) -> torch.Tensor:
    """dz, for `_handed_on` at the other end of the engine's edge."""
    if _is_differentiated():
        sums_dtype = cpu.sums_dtype(weight.dtype)
        out_dtype = sums_dtype if sums_dtype is not weight.dtype else None
        above = autograd.matmul(grad.to(weight.dtype), weight, out_dtype, precision)
        return forms.activation_grad(above, _differentiable_z(z, wide), first.saved_hidden, first, weight.dtype)
    z = z if wide is None else wide
    dz, partial = fused.hidden_grad(grad, weight, z, first.saved_hidden, first, precision, sums)
    if partial is not None and not dz.is_inference():  # which has no version
        dz.row_sums = _RowSums(partial, dz._version)  # type: ignore[attr-defined]
    return dz


def _handed_on(dz: torch.Tensor) -> _Dz:
    """dz with the sums it carries, unless it was changed since, or is another tensor: a sum, or a hook's."""
    carried: _RowSums | None = getattr(dz, "row_sums", None)
    sums = carried.sums if carried is not None and carried.version == dz._version else None
    return _Dz(dz, sums, (), configs.BIAS_BLOCKS)


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
        needs = ctx.needs_input_grad[: 11 + len(call.aux)]  # here, unlike there, of each tensor in a list
        kept = _keep(ctx, call, call.fusion, needs, *output)
        if kept is not output[1] or ctx.kind != "pre":
            ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: torch.Tensor | None, of_saved: torch.Tensor | None) -> tuple[Any, ...]:
        needs, of_aux = ctx.needs_input_grad[:11], ctx.needs_input_grad[11]
        gradients = _gradients(ctx, grad, of_saved, (*needs, *of_aux))
        return *gradients[:11], list(gradients[11:]), *ctx.structure[12:]

    def keep_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        call = MlpCall(*inputs)
        _, h, z = output
        needs = ctx.needs_input_grad[:8]
        of_x, of_weight, of_weight_up, *_, of_weight_down, _, _ = needs
        first = True in needs[:5]
        ctx.save_for_backward(
            call.x if of_weight or of_weight_up else None,
            call.weight if of_x else None,
            call.weight_up if of_x else None,
            call.weight_down if first else None,
            h if of_weight_down else None,
            (z if call.written else h) if first else None,
            call.seed if first else None,
            call.down_seed,
        )
        ctx.dtype = h.dtype
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
        if _is_differentiated():
            raise RuntimeError(
                "isogemm::mlp has no second derivative through the dispatcher; call isogemm.linear twice"
            )
        first = call.hidden._replace(seed=seed)
        above = grad
        if call.dropout_p:
            dropout = Fusion(seed=down_seed, dropout_p=call.dropout_p)
            above = _activation_grad(grad, None, "", dropout, grad.dtype, False).value
        given = zip(call.owners, call.main_grads, strict=True)
        wanted = (needed[name] for name in (*_OWNED, "weight_down", "bias_down"))
        accumulated = list(map(autograd.given_or_accumulated, given, wanted))
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
            found["weight_down"] = autograd.of_weight(above.to(ctx.dtype), h, call.precision, accumulated[4])
        if needed["bias_down"]:
            found["bias_down"] = autograd.of_bias(above, ctx.dtype, accumulated[5])
        return *(found.get(name) for name in names), *ctx.structure[len(names) :]

    register: Any = torch.library.register_autograd
    register("isogemm::fused", backward, setup_context=keep)
    register("isogemm::mlp", mlp_backward, setup_context=keep_mlp)


_register()
