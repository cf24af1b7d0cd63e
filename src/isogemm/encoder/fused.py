"""The fused layer: one call forward and one backward, through an autograd Function or the registered operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from isogemm.core import device as devices
from isogemm.core.eager import through_dispatcher
from isogemm.encoder import configs
from isogemm.encoder.configs import Layer
from isogemm.encoder.op import placed, refuse_second_derivative
from isogemm.encoder.parameters import EncoderParameters, Options
from isogemm.encoder.plan import Plan, Saved, Slots
from isogemm.gemm.autograd import is_accumulated, main_grad_of, parameter
from isogemm.gemm.op import require_total
from isogemm.gemm.problem import dtype_name

_MOST_PLANS = 1024
_NAMES = (
    "in_proj_weight", "in_proj_weight[1]", "in_proj_weight[2]", "in_proj_bias", "in_proj_bias[1]", "in_proj_bias[2]",
    "out_proj_weight", "out_proj_bias", "linear1_weight", "linear1_bias", "linear2_weight",
    "norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias", "linear2_bias",
)  # fmt: skip


def unserved(x: Tensor, params: EncoderParameters, mask: Tensor | None, options: Options) -> str:
    """Why the fused kernels cannot serve, empty where they can."""
    if not x.numel():
        return "there are no tokens"
    bias = params.in_proj_bias
    if isinstance(bias, tuple) and len({each is None for each in bias}) > 1:
        return "q, k and v do not all have a bias"
    if len({each.dtype for _, each in params.named()}) > 1:
        return "the parameters are of several dtypes"
    return configs.unserved(_layer(x, _slots(params), mask, _is_stacked(params), options))


def encoder_layer(x: Tensor, params: EncoderParameters, mask: Tensor | None, options: Options) -> Tensor:
    """Of x [S, T, D], contiguous; differentiable once."""
    slots, stacked = _slots(params), _is_stacked(params)
    places = _places(slots, stacked)
    present = [cast(Tensor, slots[place]) for place in places]
    if through_dispatcher(x, *present):
        if not is_compiling():  # what torch has only noted down, a negation, it does not resolve in lists
            present = [torch.resolve_neg(each) for each in present]
        totals = [
            (place, each)
            for place, each in enumerate(present)
            if each.requires_grad and main_grad_of(parameter(each)) is not None
        ]
        accumulated = [each for _, each in totals], [main_grad_of(each) for _, each in totals], [i for i, _ in totals]
        arguments = (present, places, mask, *accumulated, stacked, *options)
        return cast(Tensor, torch.ops.isogemm.encoder_layer(x, *arguments)[0])
    if torch.is_grad_enabled() and (x.requires_grad or any(each.requires_grad for each in present)):
        return cast(Tensor, cast(Any, _Layer).apply(options, places, stacked, x, *present, mask))
    return _forward(x, slots, mask, stacked, options, keep=False)[0]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, places: Sequence[int], stacked: bool, x: Tensor, *rest: Any) -> Tensor:
        *present, mask = rest
        y, saved = _forward(x, _placed_in(places, stacked, present), mask, stacked, options, keep=True)
        ctx.save_for_backward(x, mask, *saved, *present)
        ctx.options, ctx.places, ctx.stacked = options, places, stacked
        ctx.owners = [parameter(each) for each in present]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("encoder_layer")
        x, mask, o, lse, total, ready, *present = ctx.saved_tensors
        totals = [
            main_grad_of(owner) if is_accumulated(ctx, 4 + i, 1 + i) else None for i, owner in enumerate(ctx.owners)
        ]
        slots = _placed_in(ctx.places, ctx.stacked, present)
        saved = Saved(o, lse, total, ready)
        dx, gradients = _backward(dy, x, slots, mask, saved, totals, ctx.stacked, ctx.options)
        for owner, main_grad in zip(ctx.owners, totals, strict=True):
            if main_grad is not None:
                owner.grad_added_to_main_grad = True
        needed = ctx.needs_input_grad
        return (
            None, None, None, dx if needed[3] else None,
            *(each if needed[4 + i] else None for i, each in enumerate(gradients)), None,
        )  # fmt: skip


def _slots(params: EncoderParameters) -> Slots:
    weight, bias = params.in_proj_weight, params.in_proj_bias
    weights = weight if isinstance(weight, tuple) else (weight,) * 3
    biases = bias if isinstance(bias, tuple) else (bias,) * 3
    return Slots(
        *weights, *biases, params.out_proj_weight, params.out_proj_bias, params.linear1_weight, params.linear1_bias,
        params.linear2_weight, params.norm1_weight, params.norm1_bias, params.norm2_weight, params.norm2_bias,
        params.linear2_bias,
    )  # fmt: skip


def _is_stacked(params: EncoderParameters) -> bool:
    return not isinstance(params.in_proj_weight, tuple)


def _places(slots: Slots, stacked: bool) -> list[int]:
    """Of every parameter that is there: a stacked in_proj in the first of its three."""
    left_out = (1, 2, 4, 5) if stacked else ()
    return [place for place, each in enumerate(slots) if each is not None and place not in left_out]


def _placed_in(places: Sequence[int], stacked: bool, present: Sequence[Tensor]) -> Slots:
    optional: list[Tensor | None] = [None] * len(Slots._fields)
    for place, each in zip(places, present, strict=True):
        optional[place] = each
    if stacked:
        optional[1:3], optional[4:6] = [optional[0]] * 2, [optional[3]] * 2
    return Slots(*cast(Any, optional))


def _layer(x: Tensor, slots: Slots, mask: Tensor | None, stacked: bool, options: Options) -> Layer:
    sequences, tokens, d_model = x.shape
    return Layer(
        sequences, tokens, d_model, options.nhead, slots.w1.shape[0], dtype_name(x.dtype), dtype_name(options.operand),
        dtype_name(slots.wo.dtype), options.precision or "", options.norm, options.norm_first, options.activation,
        options.is_causal, "" if mask is None else "bool" if mask.dtype is torch.bool else "additive",
        (0, 0) if mask is None else cast("tuple[int, int]", mask.stride()), stacked,
        _overlaps(x.device),
    )  # fmt: skip


def _overlaps(device: torch.device) -> bool:
    arch = devices.facts(device).arch if device.type == "cuda" else ""
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90


_plans: dict[tuple[Any, ...], Plan] = {}


def _plan(x: Tensor, slots: Slots, mask: Tensor | None, stacked: bool, options: Options) -> Plan:
    """By all that the launches depend on, Triton's specialisation of the arguments included."""
    key = (
        x.shape, x.dtype, x.get_device(), options, None if mask is None else (mask.dtype, mask.stride()),
        tuple(None if each is None else each.data_ptr() & 15 for each in slots), stacked,
        slots.wo.dtype, slots.w1.shape[0],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = Plan(_layer(x, slots, mask, stacked, options), x.device, options.eps, slots)
    return plan


def _forward(
    x: Tensor, slots: Slots, mask: Tensor | None, stacked: bool, options: Options, keep: bool
) -> tuple[Tensor, Saved]:
    x, slots = placed(x), _dense(slots)
    with torch.cuda.device(x.device):
        return _plan(x, slots, mask, stacked, options).forward(x, _as_bytes(mask), slots, keep)


def _backward(
    dy: Tensor, x: Tensor, slots: Slots, mask: Tensor | None, saved: Saved, totals: Sequence[Tensor | None],
    stacked: bool, options: Options,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """dx, and the gradients of the parameters that are there: None where one is added to its total."""
    into: list[Tensor | None] = [None] * len(slots)
    added = [False] * len(slots)
    later: list[Callable[[], object]] = []  # what is left to do with totals that no launch can add to
    seen: list[Tensor] = []
    places = _places(slots, stacked)
    for place, total in zip(places, totals, strict=True):
        of = cast(Tensor, slots[place])
        if total is None:
            into[place] = torch.empty(of.shape, dtype=of.dtype, device=of.device)
            continue
        require_total(f"params.{_NAMES[place]}.main_grad", total, of.shape, of.device)
        if any(total is other for other in seen):  # of a parameter in two places, whose sums must not meet
            sums = into[place] = torch.empty(of.shape, dtype=torch.float32, device=of.device)
            later.append(partial(total.add_, sums))
            continue
        seen.append(total)
        into[place], added[place] = total.contiguous(), True
        if not total.is_contiguous():
            later.append(partial(total.copy_, cast(Tensor, into[place])))
    x, dy, slots = placed(x), placed(dy), _dense(slots)
    with torch.cuda.device(x.device):
        plan = _plan(x, slots, mask, stacked, options)
        dx = plan.backward(dy, x, _as_bytes(mask), slots, saved, into, added)
    for finish in later:
        finish()
    gradients = [None if total is not None else into[place] for place, total in zip(places, totals, strict=True)]
    return dx, gradients


def _dense(slots: Slots) -> Slots:
    if all(each is None or each.is_contiguous() for each in slots):
        return slots
    dense = {id(each): each.contiguous() for each in slots if each is not None}
    return Slots(*cast(Any, [None if each is None else dense[id(each)] for each in slots]))


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    return mask.view(torch.uint8) if mask is not None and mask.dtype is torch.bool else mask


# registration with torch.library, for torch.compile, fake tensors and dispatch modes


def _encoder_layer(
    x: Tensor,
    params: Sequence[Tensor],
    places: Sequence[int],
    mask: Tensor | None,
    owners: Sequence[Tensor],
    totals: Sequence[Tensor],
    of_params: Sequence[int],
    stacked: bool,
    *options: Any,
) -> tuple[Tensor, ...]:
    y, saved = _forward(x, _placed_in(places, stacked, params), mask, stacked, Options(*options), keep=True)
    return y, saved.o, saved.lse, *(x.new_empty(0) if each is None else each for each in saved[2:])


def _encoder_layer_fake(x: Tensor, params: Sequence[Tensor], places: Sequence[int], *rest: Any) -> tuple[Tensor, ...]:
    stacked, given = rest[4], Options(*rest[5:])
    slots = _placed_in(places, stacked, params)
    d, f = x.shape[-1], slots.w1.shape[0]
    prepared = given.precision == "tf32" or slots.wo.dtype is not given.operand or not stacked
    return (
        torch.empty_like(x),
        x.new_empty(x.shape, dtype=given.operand),
        x.new_empty((*x.shape[:2], given.nhead), dtype=torch.float32),
        x.new_empty(0) if given.norm_first else torch.empty_like(x),
        x.new_empty(8 * d * d + 4 * d * f, dtype=given.operand) if prepared else x.new_empty(0),
    )


def _encoder_layer_backward(
    dy: Tensor,
    x: Tensor,
    o: Tensor,
    lse: Tensor,
    total: Tensor,
    ready: Tensor,
    params: Sequence[Tensor],
    places: Sequence[int],
    mask: Tensor | None,
    stacked: bool,
    *options: Any,
) -> list[Tensor]:
    """dx, and the gradients of the parameters."""
    slots, saved = _placed_in(places, stacked, params), _saved(o, lse, total, ready)
    dx, gradients = _backward(dy, x, slots, mask, saved, [None] * len(params), stacked, Options(*options))
    return [dx, *cast("list[Tensor]", gradients)]


def _encoder_layer_backward_fake(dy: Tensor, x: Tensor, *args: Any) -> list[Tensor]:
    return [torch.empty_like(x), *(each.new_empty(each.shape) for each in args[4])]


def _encoder_layer_backward_into(
    dx: Tensor,
    into: Sequence[Tensor],
    owners: Sequence[Tensor],
    of_params: Sequence[int],
    dy: Tensor,
    x: Tensor,
    o: Tensor,
    lse: Tensor,
    total: Tensor,
    ready: Tensor,
    params: Sequence[Tensor],
    places: Sequence[int],
    mask: Tensor | None,
    stacked: bool,
    *options: Any,
) -> None:
    """The same, written to `dx` and `into`; added to what is there for the parameters that have an owner."""
    slots, saved = _placed_in(places, stacked, params), _saved(o, lse, total, ready)
    totals = [each if index in of_params else None for index, each in enumerate(into)]
    of_x, gradients = _backward(dy, x, slots, mask, saved, totals, stacked, Options(*options))
    dx.copy_(of_x)
    for each, found in zip(into, gradients, strict=True):
        if found is not None:
            each.copy_(found)
    for owner in owners:
        owner.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def _saved(o: Tensor, lse: Tensor, total: Tensor, ready: Tensor) -> Saved:
    return Saved(o, lse, total if total.numel() else None, ready if ready.numel() else None)


_OPTIONS = (
    "int nhead, bool norm_first, str activation, str norm, float eps, bool is_causal, str? precision, "
    "ScalarType operand"
)
_KEPT = (
    "Tensor dy, Tensor x, Tensor o, Tensor lse, Tensor total, Tensor ready, Tensor[] params, int[] places, "
    "Tensor? mask, bool stacked"
)
# torch.library is not typed.
_library: Any = torch.library.Library("isogemm", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _function, _fake in (
    (
        "encoder_layer(Tensor x, Tensor[] params, int[] places, Tensor? mask, Tensor[] owners, Tensor[] totals, "
        f"int[] of_params, bool stacked, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _encoder_layer,
        _encoder_layer_fake,
    ),
    (
        f"encoder_layer_backward({_KEPT}, {_OPTIONS}) -> Tensor[]",
        _encoder_layer_backward,
        _encoder_layer_backward_fake,
    ),
    (
        "encoder_layer_backward_into(Tensor(a!) dx, Tensor(b!)[] into, Tensor[] owners, int[] of_params, "
        f"{_KEPT}, {_OPTIONS}) -> ()",
        _encoder_layer_backward_into,
        lambda *args: None,
    ),
):
    _library.define(_schema)
    _name = _schema.partition("(")[0]
    _library.impl(_name, _function, "CUDA")
    torch.library.register_fake(f"isogemm::{_name}", _fake, lib=_library)


def _register_autograd() -> None:
    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, params, ctx.places, mask, owners, totals, of_params, ctx.stacked, *ctx.options = inputs
        ctx.save_for_backward(x, mask, *output[1:], *params)
        # Not saved tensors: another micro-batch's backward may change a total before this one's does.
        ctx.owners, ctx.totals = owners, dict(zip(of_params, totals, strict=True))
        ctx.mark_non_differentiable(*output[1:])

    def backward(ctx: Any, dy: Tensor, *rest: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative("encoder_layer")
        x, mask, o, lse, total, ready, *params = ctx.saved_tensors
        arguments = (dy, x, o, lse, total, ready, params, ctx.places, mask, ctx.stacked, *ctx.options)
        if ctx.totals:
            dx = torch.empty_like(x)
            into = [ctx.totals.get(index, each.new_empty(each.shape)) for index, each in enumerate(params)]
            torch.ops.isogemm.encoder_layer_backward_into(dx, into, ctx.owners, list(ctx.totals), *arguments)
            found = [None if index in ctx.totals else each for index, each in enumerate(into)]
        else:
            dx, *found = torch.ops.isogemm.encoder_layer_backward(*arguments)
        nothing = [None] * len(ctx.owners)  # torch wants a list for a list of tensors, and takes an empty one for that
        return dx, found, None, None, nothing, nothing, None if nothing else [], None, *(None,) * len(ctx.options)

    register: Any = torch.library.register_autograd
    register("isogemm::encoder_layer", backward, setup_context=keep)


_register_autograd()
