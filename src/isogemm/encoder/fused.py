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
from isogemm.encoder.gradients import Gradients
from isogemm.encoder.op import placed, refuse_second_derivative
from isogemm.encoder.parameters import EncoderParameters, Options
from isogemm.encoder.plan import SEPARATE, STACKED, Plan, kept_size
from isogemm.encoder.schedule import addresses_of
from isogemm.gemm.autograd import is_accumulated, main_grad_of, parameter
from isogemm.gemm.op import require_total
from isogemm.gemm.problem import dtype_name

_MOST_PLANS = 1024
_NAMES = {
    "wq": "in_proj_weight", "wk": "in_proj_weight[1]", "wv": "in_proj_weight[2]", "wo": "out_proj_weight",
    "w1": "linear1_weight", "w2": "linear2_weight", "g1": "norm1_weight", "g2": "norm2_weight",
    "bq": "in_proj_bias", "bk": "in_proj_bias[1]", "bv": "in_proj_bias[2]", "bo": "out_proj_bias",
    "b1": "linear1_bias", "b2": "linear2_bias", "s1": "norm1_bias", "s2": "norm2_bias",
}  # fmt: skip
_Parameters = Sequence[Tensor | None]  # in the order of plan.STACKED or SEPARATE


def unserved(x: Tensor, params: EncoderParameters, options: Options) -> str:
    """Why the fused kernels cannot serve, empty where they can."""
    if not x.numel():
        return "there are no tokens"
    bias = params.in_proj_bias
    if isinstance(bias, tuple) and len({each is None for each in bias}) > 1:
        return "q, k and v do not all have a bias"
    if len({each.dtype for _, each in params.named()}) > 1:
        return "the parameters are of several dtypes"
    return configs.unserved(x.shape[-2], x.shape[-1], options.nhead, dtype_name(options.operand))


def encoder_layer(x: Tensor, params: EncoderParameters, mask: Tensor | None, options: Options) -> Tensor:
    """Of x [S, T, D], contiguous; differentiable once."""
    parameters, stacked = params.flat(), _is_stacked(params)
    if through_dispatcher(x, *[each for each in parameters if each is not None]):
        return _dispatched(x, parameters, mask, stacked, options)
    return Kind(x, parameters, stacked, options).launched(x, parameters, mask)


def kind_of(x: Tensor, params: EncoderParameters, options: Options) -> Kind:
    return Kind(x, params.flat(), _is_stacked(params), options)


class Kind:
    """What calls whose tensors differ in nothing but memory have in common."""

    __slots__ = ("differentiable", "lasting", "options", "plans", "stacked")

    def __init__(self, x: Tensor, parameters: _Parameters, stacked: bool, options: Options) -> None:
        self.stacked, self.options = stacked, options
        self.differentiable = any(each is not None and each.requires_grad for each in (x, *parameters))
        # No parameter is a passing tensor, of which a graph may keep alive no more than it saves.
        self.lasting = all(each is None or type(each) is torch.nn.Parameter for each in parameters)
        self.plans: dict[tuple[int, ...], Plan] = {}  # by addresses from which nothing is to be moved

    def launched(self, x: Tensor, parameters: _Parameters, mask: Tensor | None) -> Tensor:
        """encoder_layer of tensors of this kind to which torch has nothing to say but autograd."""
        if self.differentiable and torch.is_grad_enabled():
            return cast(Tensor, _apply(self, x, mask, *parameters))
        return _Call(x, mask, parameters, self).forward(keep=False)[0]


_FIRST = 3  # of the parameters among the Function's arguments


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: Kind, x: Tensor, mask: Tensor | None, *parameters: Tensor | None) -> Tensor:
        call = _Call(x, mask, parameters, kind)
        y, kept = call.forward(keep=True)
        ctx.save_for_backward(x, mask, kept, *parameters)
        ctx.call = kind, (call.plan, call.addresses)
        ctx.owners = parameters if kind.lasting else [parameter(each) for each in parameters]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("encoder_layer")
        x, mask, kept, *parameters = ctx.saved_tensors
        needed = ctx.needs_input_grad
        call = _Call(x, mask, parameters, *ctx.call)
        if [each for each in ctx.owners if getattr(each, "main_grad", None) is not None]:
            dx, gradients = _accumulate(ctx, call, dy, kept)
        else:
            into = call.plan.gradients(needed[_FIRST:])
            dx, gradients = call.backward(dy, kept, into), into.tensors
        return None, dx if needed[1] else None, None, *gradients


# Not torch's own `apply`, which looks for torch.func's wrappers in every argument: those go through the dispatcher.
_apply: Any = super(torch.autograd.Function, _Layer).apply


def _accumulate(ctx: Any, call: _Call, dy: Tensor, kept: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Into the main_grads of the parameters whose gradients this backward is to accumulate."""
    needed, place = ctx.needs_input_grad, 0 if call.given[0] is None else 1
    totals = [main_grad_of(each) for each in ctx.owners]
    for i, each in enumerate(call.given[1:]):
        place += each is not None
        if totals[i] is not None and not is_accumulated(ctx, _FIRST + i, place):
            totals[i] = None
    dx, gradients = call.accumulate(dy, kept, totals, needed[_FIRST:])
    for owner, total in zip(ctx.owners, totals, strict=True):
        if total is not None:
            owner.grad_added_to_main_grad = True
    return dx, gradients


class _Call:
    """One layer's call on its tensors, made dense and aligned where they are not."""

    __slots__ = ("addresses", "given", "plan", "x")

    def __init__(
        self, x: Tensor, mask: Tensor | None, parameters: _Parameters, kind: Kind,
        forward: tuple[Plan, tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        """forward: in a backward, the plan of its forward, and the addresses that it was made for."""
        self.x, self.given = placed(x), (mask, *parameters)
        self.addresses = addresses_of(self.given)
        if forward is None:
            plan = kind.plans.get(self.addresses)
        else:
            plan = forward[0] if forward[1] == self.addresses else None
        self.plan = self._find(kind, keep=forward is None) if plan is None else plan

    def _find(self, kind: Kind, keep: bool) -> Plan:
        """Moves the parameters that are not dense and aligned; else the plan is kept for these addresses."""
        mask, *parameters = self.given
        dense = all(each is None or each.is_contiguous() for each in parameters)
        moved = not dense or any(address % 16 for address in self.addresses[1:])
        if moved:
            self.given = (mask, *[None if each is None else placed(each) for each in parameters])
            self.addresses = addresses_of(self.given)
        plan = _plan(self.x, mask, self.given[1:], self.addresses, kind.stacked, kind.options)
        if keep and not moved:
            if len(kind.plans) >= _MOST_PLANS:
                kind.plans.clear()
            kind.plans[self.addresses] = plan
        return plan

    def forward(self, keep: bool) -> tuple[Tensor, Tensor | None]:
        """y, and what a backward needs (keep)."""
        return self.plan.forward(self.x, self.given, self.addresses, keep)

    def backward(self, dy: Tensor, kept: Tensor, gradients: Gradients) -> Tensor:
        """dx; the parameters' gradients are written or added to `gradients`."""
        return self.plan.backward(placed(dy), self.x, self.given, self.addresses, kept, gradients)

    def accumulate(
        self, dy: Tensor, kept: Tensor, totals: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """dx, and the gradients that are wanted, each in memory of its own: None where one is added to its total."""
        into, added, later = self._into(totals, wanted)
        dx = self.backward(dy, kept, Gradients.of(into, added))
        for finish in later:
            finish()
        return dx, [None if total is not None else each for total, each in zip(totals, into, strict=True)]

    def _into(
        self, totals: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> tuple[list[Tensor | None], tuple[bool, ...], list[Callable[[], object]]]:
        """What the launches write to or add to, which of them, and what is then left to do with the totals."""
        into: list[Tensor | None] = [None] * len(totals)
        added = [False] * len(totals)
        later: list[Callable[[], object]] = []
        seen: list[Tensor] = []
        for place, (of, total, want) in enumerate(zip(self.given[1:], totals, wanted, strict=True)):
            if of is None or not want:
                continue
            if total is None:
                into[place] = torch.empty_like(of)
                continue
            require_total(f"params.{_NAMES[self.plan.names[place]]}.main_grad", total, of.shape, of.device)
            if any(total is other for other in seen):  # of a parameter in two places, whose sums must not meet
                sums = into[place] = torch.empty(of.shape, dtype=torch.float32, device=of.device)
                later.append(partial(total.add_, sums))
                continue
            seen.append(total)
            dense = into[place] = total.contiguous()
            added[place] = True
            if dense is not total:
                later.append(partial(total.copy_, dense))
        return into, tuple(added), later


def _is_stacked(params: EncoderParameters) -> bool:
    return not isinstance(params.in_proj_weight, tuple)


def _layer(
    x: Tensor, mask: Tensor | None, parameters: _Parameters, stacked: bool, options: Options, arch: int = 0
) -> Layer:
    sequences, tokens, d_model = x.shape
    wo, w1 = _of_products(parameters, stacked)
    return Layer(
        sequences, tokens, d_model, options.nhead, w1.shape[0], dtype_name(x.dtype), dtype_name(options.operand),
        dtype_name(wo.dtype), options.precision or "", options.norm, options.norm_first, options.activation,
        options.is_causal, "" if mask is None else "additive" if mask.is_floating_point() else "bool",
        (0, 0) if mask is None else cast("tuple[int, int]", mask.stride()), stacked, arch >= 90, arch >= 80, arch == 90,
    )  # fmt: skip


def _of_products(parameters: _Parameters, stacked: bool) -> tuple[Tensor, Tensor]:
    """out_proj's and linear1's weights."""
    first = 1 if stacked else 3
    return cast(Tensor, parameters[first]), cast(Tensor, parameters[first + 1])


def _arch(device: torch.device) -> int:
    """NVIDIA's number; 0 for others, and 80 where kernels are interpreted."""
    if device.type != "cuda":
        return 80
    arch = devices.facts(device).arch
    return int(arch.removeprefix("sm_")) if arch.startswith("sm_") else 0


_plans: dict[tuple[Any, ...], Plan] = {}


def _plan(
    x: Tensor, mask: Tensor | None, parameters: _Parameters, addresses: tuple[int, ...], stacked: bool, options: Options
) -> Plan:
    """By all that the launches depend on, Triton's specialisation of the arguments included."""
    wo, w1 = _of_products(parameters, stacked)
    key = (
        x.shape, x.dtype, x.get_device(), options, stacked, wo.dtype, w1.shape[0],
        None if mask is None else (mask.dtype, mask.stride()),
        tuple([each and each % 16 + 1 for each in addresses]),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        layer = _layer(x, mask, parameters, stacked, options, _arch(x.device))
        biases = parameters[(STACKED if stacked else SEPARATE).index("bq")] is not None
        plan = _plans[key] = Plan(layer, x.device, options.eps, biases)
    return plan


# registration with torch.library, for torch.compile, fake tensors and dispatch modes


def _dispatched(x: Tensor, parameters: _Parameters, mask: Tensor | None, stacked: bool, options: Options) -> Tensor:
    places = [place for place, each in enumerate(parameters) if each is not None]
    present = [cast(Tensor, parameters[place]) for place in places]
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


def _placed_in(places: Sequence[int], stacked: bool, present: Sequence[Tensor | None]) -> _Parameters:
    parameters: list[Tensor | None] = [None] * len(STACKED if stacked else SEPARATE)
    for place, each in zip(places, present, strict=True):
        parameters[place] = each
    return parameters


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
) -> tuple[Tensor, Tensor | None]:
    parameters = _placed_in(places, stacked, params)
    return _Call(x, mask, parameters, Kind(x, parameters, stacked, Options(*options))).forward(keep=True)


def _encoder_layer_fake(
    x: Tensor, params: Sequence[Tensor], places: Sequence[int], mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    stacked, options = rest[3], Options(*rest[4:])
    layer = _layer(x, mask, _placed_in(places, stacked, params), stacked, options)
    return torch.empty_like(x), x.new_empty(kept_size(layer), dtype=torch.uint8)


def _encoder_layer_backward(
    dy: Tensor,
    x: Tensor,
    kept: Tensor,
    params: Sequence[Tensor],
    places: Sequence[int],
    mask: Tensor | None,
    stacked: bool,
    *options: Any,
) -> list[Tensor]:
    """dx, and the gradients of the parameters."""
    dx, gradients = _backward(dy, x, kept, params, [None] * len(params), places, mask, stacked, options)
    return [dx, *cast("list[Tensor]", gradients)]


def _encoder_layer_backward_fake(
    dy: Tensor, x: Tensor, kept: Tensor, params: Sequence[Tensor], *rest: Any
) -> list[Tensor]:
    return [torch.empty_like(x), *(each.new_empty(each.shape) for each in params)]


def _encoder_layer_backward_into(
    dx: Tensor,
    into: Sequence[Tensor],
    owners: Sequence[Tensor],
    of_params: Sequence[int],
    dy: Tensor,
    x: Tensor,
    kept: Tensor,
    params: Sequence[Tensor],
    places: Sequence[int],
    mask: Tensor | None,
    stacked: bool,
    *options: Any,
) -> None:
    """The same, written to `dx` and `into`; added to what is there for the parameters that have an owner."""
    totals = [each if index in of_params else None for index, each in enumerate(into)]
    of_x, gradients = _backward(dy, x, kept, params, totals, places, mask, stacked, options)
    dx.copy_(of_x)
    for each, found in zip(into, gradients, strict=True):
        if found is not None:
            each.copy_(found)
    for owner in owners:
        owner.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def _backward(
    dy: Tensor, x: Tensor, kept: Tensor, params: Sequence[Tensor], totals: Sequence[Tensor | None],
    places: Sequence[int], mask: Tensor | None, stacked: bool, options: Sequence[Any],
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    parameters = _placed_in(places, stacked, params)
    call = _Call(x, mask, parameters, Kind(x, parameters, stacked, Options(*options)))
    wanted = [each is not None for each in parameters]
    dx, gradients = call.accumulate(dy, kept, _placed_in(places, stacked, totals), wanted)
    return dx, [gradients[place] for place in places]


_OPTIONS = (
    "int nhead, bool norm_first, str activation, str norm, float eps, bool is_causal, str? precision, "
    "ScalarType operand"
)
_KEPT = "Tensor dy, Tensor x, Tensor kept, Tensor[] params, int[] places, Tensor? mask, bool stacked"
# torch.library is not typed.
_library: Any = torch.library.Library("isogemm", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _function, _fake in (
    (
        "encoder_layer(Tensor x, Tensor[] params, int[] places, Tensor? mask, Tensor[] owners, Tensor[] totals, "
        f"int[] of_params, bool stacked, {_OPTIONS}) -> (Tensor, Tensor)",
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
        ctx.save_for_backward(x, mask, output[1], *params)
        # Not saved tensors: another micro-batch's backward may change a total before this one's does.
        ctx.owners, ctx.totals = owners, dict(zip(of_params, totals, strict=True))
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, dy: Tensor, *rest: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative("encoder_layer")
        x, mask, kept, *params = ctx.saved_tensors
        arguments = (dy, x, kept, params, ctx.places, mask, ctx.stacked, *ctx.options)
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
