"""Gradients of products with an epilogue: dz first, in one pass or in the GEMM above, then the products.

What is saved of an activation is listed in `epilogues.spec`: a bit per element, the result itself, or the
pre-activation. Of the operands those are kept that a wanted gradient reads (`_READ_BY`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.compiler import is_compiling

from isogemm.core.eager import through_dispatcher
from isogemm.epilogues import spec
from isogemm.gemm import autograd, configs, cpu, fused, fused_op, op
from isogemm.gemm import fused_forms as forms
from isogemm.gemm.fused_forms import Fusion
from isogemm.gemm.fused_op import Call
from isogemm.gemm.problem import resolve_precision

TENSORS = Call._fields[:11]  # the differentiable arguments, but aux
_X, _WEIGHT, _BIAS, _RESIDUAL = map(TENSORS.index, ("x", "weight", "bias", "residual"))
OWNED = ("weight", "bias", "weight_up", "bias_up")  # parameters, which may have a main_grad


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
        needs = needed_by(ctx)
        result, saved = call.run(fusion, _save(fusion, _wants_dz(needs)))
        passed = result.new_empty(0) if _wants_dz(needs) and fusion.saved == "mask" else None
        kept = _keep(ctx, call, fusion, needs, result, saved, passed)
        ctx.set_materialize_grads(False)
        return result, saved if kept is saved and ctx.kind == "pre" else passed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, of_saved: torch.Tensor | None) -> tuple[Any, ...]:
        return None, *of_present(ctx, _gradients(ctx, grad, of_saved, needed_by(ctx)))


def needed_by(ctx: Any) -> tuple[bool, ...]:
    """Which gradients are wanted, of a call's tensors and aux; none of those that are not there."""
    needs = iter(ctx.needs_input_grad[1:])
    return *[there and next(needs) for there in ctx.present], *needs


def of_present(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
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
    wanted = {name for name, need in zip(TENSORS, needs, strict=False) if need}
    return tuple(not wanted.isdisjoint(_READ_BY.get(name, ())) for name in TENSORS)


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


class Flat(torch.autograd.Function):
    """x, with a path to `passed` along which zeros go: a derivative that is zero, and not missing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passed: torch.Tensor) -> torch.Tensor:
        ctx.shape = passed.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], grads[0].new_zeros(ctx.shape)


def _gradients(
    ctx: Any, grad: torch.Tensor | None, of_saved: torch.Tensor | None, needs: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of all tensors of the call, in order; None where not needed, and where added to a main_grad.

    of_saved: that of the pre-activation, where a second derivative comes through it.
    """
    needed = dict(zip(TENSORS, needs, strict=False))
    of_aux = list(needs[len(TENSORS) :])
    dtypes = dict(zip(TENSORS, ctx.dtypes, strict=True))
    found: dict[str, torch.Tensor | None] = dict.fromkeys(TENSORS)
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
    owners = main_grads_of(call, needed, ctx.weight_shape)
    sums = fusion.bias_dim == -1 and (needed["bias"] or needed["bias_up"])
    if passed is not None and of_saved is not None:
        of_saved = of_saved.new_zeros(ctx.shape)
    dz = Dz(cast(torch.Tensor, of_saved), None, [None for _ in of_aux])
    if grad is not None:
        dz = _of_pre_activation(grad, saved, ctx.kind, fusion, dtype, of_aux, sums)
        if passed is not None and is_differentiated():
            dz = dz._replace(value=cast(Any, Flat).apply(dz.value, passed))
    if of_saved is not None:
        value = of_saved if grad is None else dz.value + of_saved
        dz = dz._replace(value=value.to(dtype), sums=None)
    if fusion.gated:
        found |= of_both_weights(call, dz, needed, owners)
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


def main_grads_of(call: Call, needed: dict[str, bool], weight_shape: Sequence[int]) -> dict[str, autograd.Accumulated]:
    """The parameters that this backward adds to the main_grad of; all are checked before any is touched."""
    owners: dict[str, autograd.Accumulated] = {}
    for name, given in zip(OWNED, zip(call.owners, call.main_grads, strict=True), strict=True):
        owner, total = owners[name] = autograd.given_or_accumulated(given, needed[name])
        if needed[name] and owner is not None and total is not None:
            shape = weight_shape if "weight" in name else weight_shape[:1]
            op.require_total(f"{name}.main_grad", total, shape, owner.device)
    return owners


class Dz(NamedTuple):
    """dz, its sums over blocks of rows where they came with it, and the gradients of a registered epilogue's aux."""

    value: torch.Tensor
    sums: torch.Tensor | None
    of_aux: Sequence[torch.Tensor | None]
    together: int = 1  # how many of the sums make a chunk

    def half(self, index: int) -> Dz:
        """That of the gate or of up."""
        return Dz(self.value[index], None if self.sums is None else self.sums[index], (), self.together)

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
) -> Dz:
    if fusion.epilogue:
        assert saved is not None
        gradients: Sequence[torch.Tensor | None]
        if is_differentiated():
            dz, *gradients = forms.epilogue_grad(grad, saved, fusion, dtype, of_aux, create_graph=True)
            return Dz(cast(torch.Tensor, dz), None, gradients)
        arguments = (grad, saved, dtype, fusion.aux, fusion.seed, fusion.dropout_p, fusion.epilogue, of_aux)
        if through_dispatcher(grad, saved):
            dz, *gradients = torch.ops.isogemm.epilogue_grad(*arguments)
        else:
            dz, *gradients = fused_op.epilogue_gradients(*arguments)
        return Dz(dz, None, [found if want else None for found, want in zip(gradients, of_aux, strict=True)])
    nothing = [None for _ in of_aux]
    if not (fusion.activation or fusion.dropout_p):
        return Dz(grad, None, nothing)
    return activation_grad(grad, saved, kind, fusion, dtype, sums)._replace(of_aux=nothing)


def is_differentiated() -> bool:
    """In a backward: whether its gradients are to have gradients, and so are computed in torch's operations."""
    return torch.is_grad_enabled() and not is_compiling()


def activation_grad(
    grad: torch.Tensor, saved: torch.Tensor | None, kind: str, fusion: Fusion, dtype: torch.dtype, sums: bool
) -> Dz:
    if is_differentiated():
        return Dz(forms.activation_grad(grad, saved, kind, fusion, dtype), None, ())
    if through_dispatcher(grad):
        of_forward = fused_op.gradient_call(saved, kind, fusion)
        dz, partial = torch.ops.isogemm.activation_grad(grad, dtype, sums, *of_forward)
        return Dz(dz, partial if sums and grad.is_cuda and dtype is not torch.float64 else None, ())
    return Dz(*fused.activation_grad(grad, saved, kind, fusion, dtype, sums), ())


def of_both_weights(
    call: Call, dz: Dz, needed: dict[str, bool], owners: dict[str, autograd.Accumulated]
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


def no_gradient(argument: object) -> object:
    """As register_autograd wants it: a list for a list of tensors, or of nothing."""
    listed = isinstance(argument, list) and all(isinstance(each, torch.Tensor) for each in argument)
    return [None] * len(cast(list[object], argument)) if listed else None


def _register() -> None:
    """The operators' autograd: the same gradients, through the operators."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        call = Call.of_operator(inputs)
        call = call._replace(precision=resolve_precision(call.x, call.precision))
        ctx.structure = [no_gradient(each) for each in inputs]
        needs = ctx.needs_input_grad[: 11 + len(call.aux)]  # here, unlike there, of each tensor in a list
        kept = _keep(ctx, call, call.fusion, needs, *output)
        if kept is not output[1] or ctx.kind != "pre":
            ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: torch.Tensor | None, of_saved: torch.Tensor | None) -> tuple[Any, ...]:
        needs, of_aux = ctx.needs_input_grad[:11], ctx.needs_input_grad[11]
        gradients = _gradients(ctx, grad, of_saved, (*needs, *of_aux))
        return *gradients[:11], list(gradients[11:]), *ctx.structure[12:]

    register: Any = torch.library.register_autograd
    register("isogemm::fused", backward, setup_context=keep)


_register()
