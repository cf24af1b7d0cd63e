"""The fused layer: one call forward and one backward, through an autograd Function or the registered operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from isogemm.core import device as devices
from isogemm.core.eager import through_dispatcher
from isogemm.core.operator import Operator, refuse_second_derivative
from isogemm.core.plan import Cache, placed
from isogemm.encoder import configs
from isogemm.encoder.attention.configs import MOST_FACTORS
from isogemm.encoder.buffers import ADDED, EXTRA, SEPARATE, STACKED, ExtraInputs, kept_size
from isogemm.encoder.configs import Layer
from isogemm.encoder.gradients import Gradients
from isogemm.encoder.parameters import EncoderDropout, EncoderParameters, Options
from isogemm.encoder.plan import IncomingGrads, Plan, Results, SavedForBackward
from isogemm.encoder.schedule import addresses_of
from isogemm.gemm.autograd import accumulated, given_or_accumulated, main_grad_of, parameter
from isogemm.gemm.describe import dtype_name
from isogemm.gemm.op import is_added, require_total

_NAMES = {
    "wq": "in_proj_weight", "wk": "in_proj_weight[1]", "wv": "in_proj_weight[2]", "wo": "out_proj_weight",
    "w1": "linear1_weight", "w2": "linear2_weight", "g1": "norm1_weight", "g2": "norm2_weight",
    "bq": "in_proj_bias", "bk": "in_proj_bias[1]", "bv": "in_proj_bias[2]", "bo": "out_proj_bias",
    "b1": "linear1_bias", "b2": "linear2_bias", "s1": "norm1_bias", "s2": "norm2_bias",
}  # fmt: skip
_Parameters = Sequence[Tensor | None]  # in the order of plan.STACKED or SEPARATE


def unserved(x: Tensor, params: EncoderParameters, options: Options, factors: int = 0) -> str:
    """Why the fused kernels cannot serve; empty if they can."""
    if not x.numel():
        return "there are no tokens"
    bias = params.in_proj_bias
    if isinstance(bias, tuple) and len({each is None for each in bias}) > 1:
        return "q, k and v do not all have a bias"
    if len({each.dtype for _, each in params.named()}) > 1:
        return "the parameters are of several dtypes"
    if factors or options.return_factors:
        if factors > MOST_FACTORS:
            return f"scores are given as {factors} layers' factors; attention takes in at most {MOST_FACTORS}"
        if options.return_scores:
            return "scores are given by factors and are a result"
        return unserved_factors(x, params, options.nhead, options.operand, options.precision)
    return configs.unserved(x.shape[-2], x.shape[-1], options.nhead, dtype_name(options.operand))


def unserved_factors(
    x: Tensor, params: EncoderParameters, nhead: int, operand: torch.dtype, precision: str | None
) -> str:
    """Why the fused kernels cannot take or return scores by factors, by the layer's sizes; empty if they can."""
    d_model, number = x.shape[-1], dtype_name(operand)
    sizes = d_model, nhead, params.linear1_weight.shape[0]
    if _arch(x.device) < 80 or not configs.takes_factors(*sizes, number, precision or ""):
        return "factors are for even heads up to 16, in TF32 or 16 bits; in narrow layers for multiples of 4"
    return configs.unserved(x.shape[-2], d_model, nhead, number)


def encoder_layer(x: Tensor, params: EncoderParameters, given: ExtraInputs, options: Options) -> Results:
    """Run the fused layer on x [S, T, D], contiguous; differentiable once."""
    parameters, stacked = params.flat(), _is_stacked(params)
    if through_dispatcher(x, *[each for each in (*given, *parameters) if each is not None]):
        return _dispatched(x, parameters, given, stacked, options)
    return Kind(x, parameters, given, stacked, options).launched(x, parameters, given)


def kind_of(x: Tensor, params: EncoderParameters, given: ExtraInputs, options: Options) -> Kind:
    return Kind(x, params.flat(), given, _is_stacked(params), options)


class Kind:
    """What is shared by calls whose tensors differ only in their addresses."""

    __slots__ = ("differentiable", "lasting", "names", "options", "plans", "stacked")

    def __init__(self, x: Tensor, parameters: _Parameters, given: ExtraInputs, stacked: bool, options: Options) -> None:
        self.stacked, self.options = stacked, options
        tensors = (x, *given.added, *parameters)
        self.differentiable = any(each is not None and each.requires_grad for each in tensors)
        # Whether a graph may keep all parameters alive: of temporary tensors it may keep only what it saves.
        self.lasting = all(each is None or type(each) is torch.nn.Parameter for each in parameters)
        self.plans: Cache[Plan] = Cache(1024, listed=False)  # by addresses, if no tensor had to be copied
        # results besides y
        self.names = [
            *["scores"] * options.return_scores,
            *["statistics"] * (options.norm == "batch_norm"),
            *["qk"] * options.return_factors,
        ]

    def launched(self, x: Tensor, parameters: _Parameters, given: ExtraInputs) -> Results:
        """Fast path of encoder_layer: plain tensors of this kind, no dispatch mode."""
        if not (self.differentiable and torch.is_grad_enabled()):
            return _Call(x, given, parameters, self).forward(keep=False)
        if not self.names:
            return Results(_apply(self, given, x, *given.added, *parameters))
        y, *more = _apply(self, given, x, *given.added, *parameters)
        return Results(y, **dict(zip(self.names, more, strict=True)))


_FIRST = 3 + len(ADDED)  # index of the first parameter among the Function's arguments


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: Kind, given: ExtraInputs, x: Tensor, *tensors: Tensor | None) -> Any:
        parameters = tensors[len(ADDED) :]
        call = _Call(x, given, parameters, kind)
        results = call.forward(keep=True)
        saved = results.kept, results.statistics, results.qk
        ctx.save_for_backward(x, *saved, *given.read_again, *parameters)
        ctx.call = kind, (call.plan, call.addresses)
        ctx.running = given[len(given.read_again) :]
        ctx.owners = parameters if kind.lasting else [parameter(each) for each in parameters]
        if not kind.names:
            return results.y
        ctx.set_materialize_grads(False)
        if results.statistics is not None:
            ctx.mark_non_differentiable(results.statistics)
        return results.y, *[getattr(results, name) for name in kind.names]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *more: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("encoder_layer")
        x, kept, statistics, qk, *tensors = ctx.saved_tensors
        saved = SavedForBackward(kept, statistics, qk)
        again = len(EXTRA) - len(ctx.running)
        needed = ctx.needs_input_grad
        kind, of_forward = ctx.call
        call = _Call(x, ExtraInputs(*tensors[:again], *ctx.running), tensors[again:], kind, of_forward)
        grads = dict(zip(kind.names, more, strict=True))
        incoming = IncomingGrads(torch.zeros_like(x) if dy is None else dy, grads.get("scores"), grads.get("qk"))
        wanted = needed[_FIRST:]
        gradients: Sequence[Tensor | None]
        if [each for each in ctx.owners if getattr(each, "main_grad", None) is not None]:
            totals = [accumulated(owner, want)[1] for owner, want in zip(ctx.owners, wanted, strict=True)]
            dx, of_added, gradients = call.accumulate(incoming, saved, totals, wanted)
            for owner, total in zip(ctx.owners, totals, strict=True):
                if total is not None:
                    owner.grad_added_to_main_grad = True
        else:
            into = call.plan.gradients(wanted)
            dx, of_added = call.backward(incoming, saved, into)
            gradients = into.tensors
        found = [each if need else None for each, need in zip((dx, *of_added), needed[2:_FIRST], strict=True)]
        return None, None, *found, *gradients


# Not torch's own `apply`, which looks for torch.func's wrappers in every argument: those go through the dispatcher.
_apply: Any = super(torch.autograd.Function, _Layer).apply


_OfTensors = Sequence[Tensor | None]  # gradients


class _Call:
    """A layer's call: its tensors, copied if they are not dense and aligned, and its plan."""

    __slots__ = ("addresses", "given", "parameters", "plan", "x")

    def __init__(
        self, x: Tensor, given: ExtraInputs, parameters: _Parameters, kind: Kind,
        forward: tuple[Plan, tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        """forward: in a backward, the forward's plan and the addresses that it was made for."""
        self.x, self.given, self.parameters = placed(x), given, parameters
        self.addresses = addresses_of((*given, *parameters))
        if forward is None:
            plan = kind.plans.get(self.addresses)
        else:
            plan = forward[0] if forward[1] == self.addresses else None
        self.plan = self._find(kind, keep=forward is None) if plan is None else plan

    def _find(self, kind: Kind, keep: bool) -> Plan:
        """Copy what is not dense and aligned, and find the plan; cached by address if nothing was copied."""
        mask, *others = self.given
        tensors = [*others, *self.parameters]
        dense = all(each is None or each.is_contiguous() for each in tensors)
        moved = not dense or any(address % 16 for address in self.addresses[1:])
        if moved:
            tensors = [None if each is None else placed(each) for each in tensors]
            self.given, self.parameters = ExtraInputs(mask, *tensors[: len(others)]), tensors[len(others) :]
            self.addresses = addresses_of((*self.given, *self.parameters))
        plan = _plan(self.x, self.given, self.parameters, self.addresses, kind.stacked, kind.options)
        if keep and not moved:
            kind.plans.keep(self.addresses, plan)
        return plan

    def forward(self, keep: bool) -> Results:
        """keep: also save what a backward needs."""
        return self.plan.forward(self.x, (*self.given, *self.parameters), self.addresses, keep)

    def backward(
        self, incoming: IncomingGrads, saved: SavedForBackward, gradients: Gradients
    ) -> tuple[Tensor, _OfTensors]:
        """Returns dx and the gradients of the inputs in ADDED; writes or adds the parameters' to `gradients`."""
        others = [None if each is None else placed(each) for each in incoming[1:]]
        given = (*self.given, *self.parameters)
        return self.plan.backward(
            IncomingGrads(placed(incoming.dy), *others), saved, self.x, given, self.addresses, gradients
        )

    def accumulate(
        self, incoming: IncomingGrads, saved: SavedForBackward, totals: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> tuple[Tensor, _OfTensors, list[Tensor | None]]:
        """Run the backward; a parameter's gradient is added to its total, if it has one.

        Returns dx, the gradients of the inputs in ADDED, and of the wanted parameters without a total, a tensor each.
        """
        into, added, later = self._into(totals, wanted)
        dx, of_added = self.backward(incoming, saved, Gradients.of(into, added))
        for finish in later:
            finish()
        gradients = [None if total is not None else each for total, each in zip(totals, into, strict=True)]
        return dx, of_added, gradients

    def _into(
        self, totals: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> tuple[list[Tensor | None], tuple[bool, ...], list[Callable[[], object]]]:
        """Tensors that the launches write, whether they add to each, and what to call afterwards."""
        into: list[Tensor | None] = [None] * len(totals)
        added = [False] * len(totals)
        later: list[Callable[[], object]] = []
        seen: list[Tensor] = []
        for place, (of, total, want) in enumerate(zip(self.parameters, totals, wanted, strict=True)):
            if of is None or not want:
                continue
            if total is None:
                into[place] = torch.empty_like(of)
                continue
            require_total(f"params.{_NAMES[self.plan.names[place]]}.main_grad", total, of.shape, of.device)
            if any(total is other for other in seen):  # one parameter in two places: add to it afterwards
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
    x: Tensor, given: ExtraInputs, parameters: _Parameters, stacked: bool, options: Options, arch: int = 0
) -> Layer:
    sequences, tokens, d_model = x.shape
    wo, w1 = _of_products(parameters, stacked)
    mask = given.mask
    return Layer(
        sequences, tokens, d_model, options.nhead, w1.shape[0], dtype_name(x.dtype), dtype_name(options.operand),
        dtype_name(wo.dtype), options.precision or "", options.norm, options.norm_first, options.activation,
        options.is_causal, "" if mask is None else "additive" if mask.is_floating_point() else "bool",
        (0, 0) if mask is None else cast("tuple[int, int]", mask.stride()), stacked, arch >= 90, arch >= 80, arch == 90,
        options.residual_normed, options.dropout, options.from_batch, given.previous is not None, options.return_scores,
        sum(each is not None for each in given.added[1:]), options.return_factors,
    )  # fmt: skip


def _of_products(parameters: _Parameters, stacked: bool) -> tuple[Tensor, Tensor]:
    """out_proj's and linear1's weights."""
    first = 1 if stacked else 3
    return cast(Tensor, parameters[first]), cast(Tensor, parameters[first + 1])


def _arch(device: torch.device) -> int:
    """NVIDIA's architecture number; 0 for other GPUs, 80 where kernels are interpreted."""
    arch = devices.facts(device).arch
    return int(arch.removeprefix("sm_")) if arch.startswith("sm_") else 0 if arch.startswith("gfx") else 80


_arch._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as core.device.matmul_precision


_plans: Cache[Plan] = Cache(1024)


def _plan(
    x: Tensor, given: ExtraInputs, parameters: _Parameters, addresses: tuple[int, ...], stacked: bool, options: Options
) -> Plan:
    """Find or make the plan. The key is all that the launches depend on, Triton's specialisation included."""
    wo, w1 = _of_products(parameters, stacked)
    mask = given.mask
    key = (
        x.shape, x.dtype, x.get_device(), options, stacked, wo.dtype, w1.shape[0],
        None if mask is None else (mask.dtype, mask.stride()),
        tuple([None if each is None else each.dtype for each in given[len(given.read_again) :]]),
        tuple([each and each % 16 + 1 for each in addresses]),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        layer = _layer(x, given, parameters, stacked, options, _arch(x.device))
        layer = replace(layer, arch=devices.facts(x.device).arch)
        biases = parameters[(STACKED if stacked else SEPARATE).index("bq")] is not None
        plan = _plans.keep(key, Plan(layer, x.device, options.eps, biases))
    return plan


def _dispatched(x: Tensor, parameters: _Parameters, given: ExtraInputs, stacked: bool, options: Options) -> Results:
    places = [place for place, each in enumerate(parameters) if each is not None]
    present = [cast(Tensor, parameters[place]) for place in places]
    if not is_compiling():  # torch does not resolve a tensor's lazy negation inside a list
        present = [torch.resolve_neg(each) for each in present]
    totals = [
        (place, each)
        for place, each in enumerate(present)
        if each.requires_grad and main_grad_of(parameter(each)) is not None
    ]
    accumulated = [each for _, each in totals], [main_grad_of(each) for _, each in totals], [i for i, _ in totals]
    arguments = (present, places, *given, *accumulated, stacked, *options)
    y, _, scores, statistics, qk = encoder_layer_operator.op(x, *arguments)
    return Results(
        y, None, scores if options.return_scores else None, statistics if options.norm == "batch_norm" else None,
        qk if options.return_factors else None,
    )  # fmt: skip


class _Arguments(NamedTuple):
    """A layer's tensors and options, as its operators take them."""

    x: Tensor
    params: Sequence[Tensor]  # those that are not None
    places: Sequence[int]  # theirs in STACKED or SEPARATE
    given: ExtraInputs
    stacked: bool
    options: Options

    @classmethod
    def of(cls, x: Tensor, params: Sequence[Tensor], places: Sequence[int], *rest: Any) -> _Arguments:
        *given, stacked = rest[: -len(Options._fields)]
        options = Options(*rest[-len(Options._fields) :])
        options = options._replace(dropout=EncoderDropout(*options.dropout))
        return cls(x, params, places, ExtraInputs(*given), stacked, options)

    def placed(self, present: Sequence[Tensor | None]) -> _Parameters:
        """Tensors that belong to `params`, one for each of STACKED or SEPARATE."""
        parameters: list[Tensor | None] = [None] * len(STACKED if self.stacked else SEPARATE)
        for place, each in zip(self.places, present, strict=True):
            parameters[place] = each
        return parameters

    def call(self) -> _Call:
        parameters = self.placed(self.params)
        kind = Kind(self.x, parameters, self.given, self.stacked, self.options)
        return _Call(self.x, self.given, parameters, kind)


_FORWARD_OWNERS = slice(3 + len(EXTRA), 6 + len(EXTRA))  # owners, totals and of_params among the forward's arguments


def _forward_arguments(args: Sequence[Any]) -> _Arguments:
    return _Arguments.of(*args[: _FORWARD_OWNERS.start], *args[_FORWARD_OWNERS.stop :])


def _encoder_layer(*args: Any) -> tuple[Tensor, ...]:
    layer = _forward_arguments(args)
    return tuple(layer.x.new_empty(0) if each is None else each for each in layer.call().forward(keep=True))


def _encoder_layer_fake(*args: Any) -> tuple[Tensor, ...]:
    x, params, _, given, stacked, options = arguments = _forward_arguments(args)
    layer = _layer(x, given, arguments.placed(params), stacked, options)
    sequences, tokens, d_model = x.shape
    scores = (sequences, options.nhead, tokens, tokens) if layer.scores else (0,)
    statistics = (2, 4, d_model) if layer.batch_norm else (0,)
    qk = layer.shape_of_factor if layer.returns_qk else (0,)
    return (
        x.new_empty(x.shape),
        x.new_empty(kept_size(layer), dtype=torch.uint8),
        x.new_empty(scores, dtype=options.operand if layer.scores else None),
        x.new_empty(statistics, dtype=torch.float32 if layer.batch_norm else None),
        x.new_empty(qk, dtype=options.operand if layer.returns_qk else None),
    )


def _backward(
    totals: Sequence[Tensor | None], dy: Tensor, d_scores: Tensor | None, d_qk: Tensor | None, kept: Tensor,
    statistics: Tensor, qk: Tensor, *rest: Any,
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:  # fmt: skip
    """Gradients of x, of the inputs in ADDED that are given, and of `params`: None if added to its total."""
    layer = _Arguments.of(*rest)
    call, options = layer.call(), layer.options
    saved = SavedForBackward(
        kept, statistics if options.norm == "batch_norm" else None, qk if options.return_factors else None
    )
    wanted = [each is not None for each in call.parameters]
    dx, of_added, gradients = call.accumulate(
        IncomingGrads(dy, d_scores, d_qk), saved, layer.placed(totals), wanted
    )  # fmt: skip
    return dx, [each for each in of_added if each is not None], [gradients[place] for place in layer.places]


def _encoder_layer_backward(*args: Any) -> list[Tensor]:
    """Gradients of x, of the inputs in ADDED, and of the parameters."""
    dx, of_added, gradients = _backward([None] * len(args[7]), *args)
    return [dx, *of_added, *cast("list[Tensor]", gradients)]


def _encoder_layer_backward_fake(*args: Any) -> list[Tensor]:
    x, params, _, given, *_ = _Arguments.of(*args[6:])
    return [each.new_empty(each.shape) for each in (x, *given.added, *params) if each is not None]


def _encoder_layer_backward_into(
    dx: Tensor, of_added: Sequence[Tensor], into: Sequence[Tensor], owners: Sequence[Tensor], of_params: Sequence[int],
    *args: Any,
) -> None:  # fmt: skip
    """`_encoder_layer_backward`, written to `dx`, `of_added` and `into`; added for parameters with an owner."""
    added = {index: owner for index, owner in zip(of_params, owners, strict=True) if is_added("a parameter", owner)}
    totals = [each if index in added else None for index, each in enumerate(into)]
    of_x, found_of_added, gradients = _backward(totals, *args)
    dx.copy_(of_x)
    for each, of_one in zip(of_added, found_of_added, strict=True):
        each.copy_(of_one)
    for index, found in enumerate(gradients):
        if found is not None and index not in of_params:
            into[index].copy_(found)
    for owner in added.values():
        owner.grad_added_to_main_grad = True  # type: ignore[attr-defined]


_OPTIONS = (
    "int nhead, bool norm_first, bool residual_normed, str activation, str norm, float eps, bool is_causal, "
    "str? precision, ScalarType operand, float[] dropout, bool from_batch, bool return_scores, bool return_factors"
)
_GIVEN = ", ".join(f"Tensor? {name}" for name in EXTRA)
_READ_AGAIN = EXTRA[: len(ExtraInputs().read_again)]
_KEPT = (
    "Tensor dy, Tensor? d_scores, Tensor? d_qk, Tensor kept, Tensor statistics, Tensor qk, Tensor x, "
    f"Tensor[] params, int[] places, {', '.join(f'Tensor? {name}' for name in _READ_AGAIN)}, bool stacked"
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, params, ctx.places, *rest = inputs
    given, (owners, totals, of_params, ctx.stacked, *ctx.options) = rest[: len(EXTRA)], rest[len(EXTRA) :]
    _, kept, _, statistics, qk = output
    ctx.save_for_backward(kept, statistics, qk, x, *ExtraInputs(*given).read_again, *params)
    # Not saved tensors: another micro-batch's backward may change a total before this one's does.
    ctx.owners, ctx.totals = owners, dict(zip(of_params, totals, strict=True))
    ctx.mark_non_differentiable(kept, statistics)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, *more: Tensor | None) -> tuple[Any, ...]:
    refuse_second_derivative("encoder_layer")
    kept, statistics, qk, x, *saved = ctx.saved_tensors
    again, params = saved[: len(_READ_AGAIN)], saved[len(_READ_AGAIN) :]
    given, options = ExtraInputs(*again), Options(*ctx.options)
    _, d_scores, _, d_qk = more
    incoming = IncomingGrads(
        torch.zeros_like(x) if dy is None else dy,
        d_scores if options.return_scores else None,
        d_qk if options.return_factors else None,
    )
    saved = SavedForBackward(kept, statistics, qk)
    arguments = (*incoming, *saved, x, params, ctx.places, *again, ctx.stacked, *ctx.options)
    added = [each for each in given.added if each is not None]
    totals = {
        index: (owner, total)
        for (index, given_total), owner in zip(ctx.totals.items(), ctx.owners, strict=True)
        if (total := given_or_accumulated((owner, given_total), True)[1]) is not None
    }
    if totals:
        dx, of_added = torch.empty_like(x), [torch.empty_like(each) for each in added]
        into = [
            totals[index][1] if index in totals else each.new_empty(each.shape) for index, each in enumerate(params)
        ]
        owners = [owner for owner, _ in totals.values()]
        encoder_layer_backward_into.op(dx, of_added, into, owners, list(totals), *arguments)
        found = [None if index in totals else each for index, each in enumerate(into)]
    else:
        dx, *found = encoder_layer_backward.op(*arguments)
        of_added, found = found[: len(added)], found[len(added) :]
    present = iter(of_added)
    of_given = {name: next(present) for name in ADDED if getattr(given, name) is not None}
    nothing = [None] * len(ctx.owners)  # torch wants a list for a list of tensors, and takes an empty one for that
    accumulated: tuple[Any, ...] = (nothing, nothing, None if nothing else [])
    of_each = [of_given.get(name) for name in EXTRA]
    return dx, found, None, *of_each, *accumulated, None, *(None,) * len(ctx.options)


encoder_layer_operator = Operator(
    f"encoder_layer(Tensor x, Tensor[] params, int[] places, {_GIVEN}, Tensor[] owners, Tensor[] totals, "
    f"int[] of_params, bool stacked, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _encoder_layer,
    _encoder_layer_fake,
    keep=_keep,
    backward=_gradients,
    devices=("CUDA",),
)
encoder_layer_backward = Operator(
    f"encoder_layer_backward({_KEPT}, {_OPTIONS}) -> Tensor[]",
    _encoder_layer_backward,
    _encoder_layer_backward_fake,
    devices=("CUDA",),
)
encoder_layer_backward_into = Operator(
    "encoder_layer_backward_into(Tensor(a!) dx, Tensor(b!)[] of_added, Tensor(c!)[] into, Tensor[] owners, "
    f"int[] of_params, {_KEPT}, {_OPTIONS}) -> ()",
    _encoder_layer_backward_into,
    lambda *args: None,
    devices=("CUDA",),
)
