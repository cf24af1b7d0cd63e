"""A fused layer's call: what it allocates and launches, forward and backward.

Saved for the backward: x, o and the log-sums; with the norms last, the sum before the last norm; in a layer split at
norms, s; and q and k if they are returned. The rest is recomputed. Two scratch buffers share memory if no launch needs
both.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from isogemm.core import device as devices
from isogemm.encoder import configs, layout
from isogemm.encoder.attention.configs import MOST_FACTORS, Attention
from isogemm.encoder.batch_norm_steps import BatchNormSteps
from isogemm.encoder.buffers import ADDED_INPUTS, SEPARATE, STACKED, TILE_SUMS, Buffers, Pair, Partials, parameter_shape
from isogemm.encoder.configs import Layer, WeightSums
from isogemm.encoder.gradients import Division, Gradients
from isogemm.encoder.schedule import Argument, Buffer, Schedule, Step, spans

if TYPE_CHECKING:
    from isogemm.core.launch import Launch

_MOST_GRADIENTS = 16  # that one launch adds up


class Results(NamedTuple):
    """A forward's results; None for those that a layer does not have."""

    y: Tensor  # [S, T, D]
    kept: Tensor | None = None  # saved for the backward, if asked for
    scores: Tensor | None = None  # [S, H, T, T]
    statistics: Tensor | None = None  # of both batch norms [2, 4, D]
    qk: Tensor | None = None  # the layer's queries and keys [2, H, S, T, d]


class IncomingGrads(NamedTuple):
    """Gradients of a layer's results."""

    dy: Tensor
    d_scores: Tensor | None
    d_qk: Tensor | None


class SavedForBackward(NamedTuple):
    """What a forward saves for its backward."""

    kept: Tensor
    statistics: Tensor | None
    qk: Tensor | None


def choose_formulation(layer: Layer, kernel: str, sm_count: int) -> tuple[str, Any]:
    """The formulation of a kernel (a module of `encoder.kernels`) and its config."""
    if kernel == "weight_grads":
        by_fragments = layer.fragments and layer.precision == "tf32"
        return ("fragments", None) if by_fragments else ("tiles", configs.choose(layer).weight_grads)
    if layer.fragments:
        return "fragments", configs.row_warps(layer, sm_count)
    group = getattr(configs.choose_warpgroup(layer), kernel, None)
    return ("warpgroups", group) if group else ("tiles", getattr(configs.choose(layer), kernel))


class Plan:
    """The launches of one layer on one device; `biases`: whether q, k and v have them."""

    def __init__(self, layer: Layer, device: torch.device, eps: float, biases: bool) -> None:
        self.layer, self.eps, self.device = layer, eps, device
        self.index = device.index or 0
        self.biases = biases
        self.names = STACKED if layer.stacked else SEPARATE
        self.buffers = Buffers(layer)
        self._norms = BatchNormSteps(layer, eps, self.buffers)
        self._kept, self._kept_size = self.buffers.kept.offsets()
        self._divisions: dict[tuple[bool, ...], Division] = {}
        self._forwards = {keep: self._forward_schedule(keep) for keep in (True, False)}
        self._backwards: dict[object, tuple[Schedule, int]] = {}

    def forward(
        self, x: Tensor, given: Sequence[Tensor | None], addresses: tuple[int, ...] = (), keep: bool = False
    ) -> Results:
        """given: the extra inputs and the parameters; addresses: of those, if known."""
        schedule, size = self._forwards[keep]
        layer = self.layer
        y = torch.empty_like(x)
        kept = torch.empty(self._kept_size, dtype=torch.uint8, device=self.device) if keep else None
        work = torch.empty(size, dtype=torch.uint8, device=self.device)
        operand: torch.dtype = getattr(torch, layer.operand)
        scores = statistics = qk = None
        if layer.scores:
            shape = (layer.sequences, layer.nhead, layer.tokens, layer.tokens)
            scores = torch.empty(shape, dtype=operand, device=self.device)
        if layer.returns_qk:
            qk = torch.empty(layer.shape_of_factor, dtype=operand, device=self.device)
        if layer.batch_norm:
            statistics = torch.empty((2, 4, layer.d_model), dtype=torch.float32, device=self.device)
        rest = (x, y, kept, work, scores, statistics, qk)
        schedule.run([*given, *rest], addresses)
        return Results(y, kept, scores, statistics, qk)

    def backward(
        self, incoming: IncomingGrads, saved: SavedForBackward, x: Tensor, given: Sequence[Tensor | None],
        addresses: tuple[int, ...], gradients: Gradients,
    ) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
        """Returns dx and the gradients of the inputs in ADDED; writes or adds the parameters' to `gradients`."""
        scores, qk = incoming.d_scores is not None, incoming.d_qk is not None
        key = scores, qk, gradients.kind
        found = self._backwards.get(key)
        if found is None:
            found = self._backwards[key] = self._backward_schedule(gradients, scores, qk)
        schedule, size = found
        dx = torch.empty_like(x)
        work = torch.empty(size, dtype=torch.uint8, device=self.device)
        of_added = [None if each is None else torch.empty_like(each) for each in given[ADDED_INPUTS]]
        rest = (*incoming, x, *saved, dx, work, *of_added, *gradients.memory)
        schedule.run([*given, *rest], addresses)
        return dx, of_added

    def gradients(self, wanted: tuple[bool, ...]) -> Gradients:
        """Uninitialised memory for the wanted gradients."""
        division = self._divisions.get(wanted)
        if division is None:
            pairs = zip(self.names, wanted, strict=True)
            shapes = [parameter_shape(self.layer, name) if want else None for name, want in pairs]
            division = self._divisions[wanted] = Division(shapes, getattr(torch, self.layer.weights))
        return division.allocated(self.device)

    # the schedules

    def _forward_schedule(self, keep: bool) -> tuple[Schedule, int]:
        b = self.buffers
        steps = [*self._attention_forward(keep), *self._feedforward_forward(keep)]
        needed = spans(steps)
        if keep:
            needed = {buffer: span for buffer, span in needed.items() if buffer not in self._kept}
        offsets, size = layout.sharing(needed)
        placed = {b.work: offsets} | ({b.kept_tensor: self._kept} if keep else {})
        given = (b.x, b.y, b.kept_tensor, b.work, b.scores, b.statistics, b.qk.tensor)
        return self._schedule(steps, given, placed), size

    def _attention_forward(self, keep: bool) -> list[Step]:
        """Steps up to o; if s is in memory, up to s."""
        layer, b = self.layer, self.buffers
        steps: list[Step] = []
        if self._attended is b.normed:
            steps += [*self._norms.statistics(1, b.x), self._norms.normalise(1, b.x, b.normed)]
        packed = b.kept.packed if layer.packed_weights else None
        steps += [
            self._step(
                "project",
                (self._attended, *self._row_norm, *b.wqkv, *b.bqkv, b.q, None, b.wo, None, b.w1, b.w2, packed,
                 self._apart_v),
                transpose=keep,
            ),
            Step(
                partial(self._describe_attention, False, layer.scores),
                (b.q, b.k, b.v, b.mask, b.previous if layer.previous else None,
                 b.seed if layer.dropout.attention else None, b.kept.o, b.kept.lse, b.scores if layer.scores else None,
                 *(self._factors(b.factors) if layer.factors else ())),
            ),
        ]  # fmt: skip
        if layer.split_at_norm:
            residual, norm = (self._attended, self._row_norm) if layer.residual_normed else (b.x, (None, None))
            # Weights packed for warpgroups are in another order.
            weight = b.wo if configs.choose_warpgroup(layer).project else b.operands.wo
            arguments = (residual, b.kept.o, weight, b.bo, *norm, self._seed, b.kept.s)
            steps.append(self._step("out_project", arguments))
        return steps

    def _feedforward_forward(self, keep: bool) -> list[Step]:
        layer, b = self.layer, self.buffers
        middle, last = b.norms[self._middle], b.norms[2]
        norms: tuple[Argument, ...] = (middle.weight, middle.bias, None, None)
        fed: Argument = b.y
        before, after = [], []
        if layer.norm_last:
            norms = (middle.weight, middle.bias, last.weight, last.bias)
        if layer.batch_norm:
            before = self._norms.statistics(self._middle, b.kept.s)
            norms = (middle.statistics, middle.bias, None, None)
            if not layer.norm_first:
                fed = b.kept.total
                after = [*self._norms.statistics(2, fed), self._norms.normalise(2, fed, b.y)]
        total = b.kept.total if keep and layer.norm_last else None
        arguments = (*self._sum, b.operands.w1, b.b1, b.operands.w2, b.b2, *norms, fed, total, self._seed)
        return [*before, self._step("feedforward", arguments), *after]

    def _backward_schedule(
        self, gradients: Gradients, d_scores: bool = False, d_qk: bool = False
    ) -> tuple[Schedule, int]:
        b = self.buffers
        memory, into = gradients.buffers(self.names)
        steps = [
            *self._feedforward_backward(),
            *self._attention_backward(d_scores, d_qk),
            self._sum_chunks(gradients, into),
        ]
        if not any(into):
            partials = b.feedforward_partials.buffer, b.attention_partials.buffer
            steps = [step for step in steps if not any(each in partials for each in step.arguments)]
        needed = {buffer: span for buffer, span in spans(steps).items() if buffer not in self._kept}
        dx = needed.pop(b.dx)._replace(last=len(steps))  # until it is written, its memory is free
        in_dx, _ = layout.sharing({b.dx: dx} | needed, dx.size)
        offsets, size = layout.sharing({buffer: span for buffer, span in needed.items() if buffer not in in_dx})
        placed = {b.kept_tensor: self._kept, b.dx: in_dx, b.work: offsets}
        given = (
            b.dy, b.d_scores, b.d_qk.tensor, b.x, b.kept_tensor, b.statistics, b.qk.tensor, b.dx, b.work, b.d_previous,
            *(pair.tensor for pair in b.d_factors), *memory,
        )  # fmt: skip
        return self._schedule(steps, given, placed), size

    def _feedforward_backward(self) -> list[Step]:
        """Steps from dy to ds, the gradient of s, and those of the feed-forward's weight gradients."""
        layer, b = self.layer, self.buffers
        dropout, middle = layer.dropout, b.norms[self._middle]
        norms = (
            middle.statistics if layer.batch_norm else middle.weight, middle.bias,
            b.norms[2].weight if layer.norm_last else None,
        )  # fmt: skip
        dlast, dlast_t = b.dlast if layer.norm_last else None, b.dlast_t if layer.transposed else None
        dlast_dropped = b.dlast_dropped if (dropout.output or layer.cast) and not layer.transposed else None
        grad = b.dy
        steps: list[Step] = []
        if layer.batch_norm and not layer.norm_first:
            grad = b.dlast
            steps += self._norms.backward(2, b.dy, b.kept.total, grad)
        arguments = (
            *self._sum, b.operands.w1, b.b1, b.operands.w1_t, b.operands.w2_t, *norms, grad,
            b.kept.total if layer.norm_last else None, b.u, b.act, b.dz, dlast,
            b.d_normed if layer.batch_norm else b.ds, b.feedforward_sums,
            *(() if layer.fragments else (dlast_t,)), self._seed, dlast_dropped,
        )  # fmt: skip
        steps.append(self._step("feedforward_backward", arguments))
        if layer.batch_norm:
            around = b.dy if layer.norm_first and not layer.residual_normed else None
            dropped = b.ds_dropped if dropout.projection else None
            steps += self._norms.backward(self._middle, b.d_normed, b.kept.s, b.ds, around, dropped)
        elif dropout.projection:
            steps.append(self._norms.dropped(b.ds, b.ds_dropped))
        d, f = layer.d_model, layer.dim_feedforward
        products = (b.dz, b.u, dlast_t or dlast_dropped or dlast or grad, b.act, b.feedforward_sums)
        steps.append(self._weight_grads((f, d, d, f), products, b.feedforward_partials))
        return steps

    def _attention_backward(self, d_scores: bool, d_qk: bool) -> list[Step]:
        """Steps from ds to dx, and those of the projections' weight gradients."""
        layer, b, attended = self.layer, self.buffers, self._attended
        ds = b.ds_dropped if layer.dropout.projection else b.ds  # the gradient of out_proj's result
        again = (b.operands.wqkv,) * 3 if layer.packed_weights else b.wqkv
        wo_t = b.operands.wo_t
        if configs.choose_warpgroup(layer).project:  # which takes the weights as they are
            again, wo_t = b.wqkv, b.wo
        n = b.n if layer.row_norm or layer.transposed or layer.cast else None
        ds_operand = b.ds_operand if layer.transposed or layer.cast else None
        o_t = b.o_t if layer.transposed else None
        factors: tuple[Argument, ...] = ()
        if layer.factors or d_qk:
            qk_grads = (b.d_qk.queries, b.d_qk.keys) if d_qk else (None, None)
            factors = (*self._factors(b.factors), *self._factors(b.d_factors), *qk_grads)
        steps: list[Step] = []
        if attended is b.normed:
            steps.append(self._norms.normalise(1, b.x, b.normed))
        steps += [
            self._step(
                "project",
                (attended, *self._row_norm, *again, *b.bqkv, None if layer.returns_qk else b.q, ds, wo_t, b.do,
                 None, None, None, self._apart_v),
                backward=True, transpose=True,
            ),
            Step(
                partial(self._describe_attention, True, d_scores, d_qk),
                (b.q, b.k, b.v, b.mask, b.previous if layer.previous else None,
                 b.seed if layer.dropout.attention else None, b.kept.o, b.kept.lse, b.do,
                 b.d_scores if d_scores else None, b.dq, b.dk, b.dv, b.d_previous if layer.previous else None,
                 *factors),
            ),
            self._step(
                "input_grad",
                (attended, *self._row_norm, b.operands.wqkv_t, b.dqkv, ds, n,
                 b.d_normed if attended is b.normed else b.dx, b.attention_sums,
                 *(() if layer.fragments else (b.kept.o, ds_operand, o_t)), None if ds is b.ds else b.ds),
            ),
        ]  # fmt: skip
        if attended is b.normed:
            around = None if layer.residual_normed else b.ds
            steps += self._norms.backward(1, b.d_normed, b.x, b.dx, around)
        d = layer.d_model
        products = (b.dqkv, n or attended, ds_operand or ds, o_t or b.kept.o, b.attention_sums)
        steps.append(self._weight_grads((3 * d, d, d, d), products, b.attention_partials))
        return steps

    def _weight_grads(
        self, shapes: tuple[int, int, int, int], arguments: tuple[Argument, ...], partials: Partials
    ) -> Step:
        added = tuple(place for place, each in enumerate(TILE_SUMS) if each in partials.offsets)
        sums = WeightSums(shapes, tuple(partials.offsets.values())[:4], partials.size, added)
        return self._step("weight_grads", (*arguments, partials.buffer), sums=sums)

    def _sum_chunks(self, gradients: Gradients, into: Sequence[Argument]) -> Step:
        """Step that adds up the chunks' partial sums to the parameters' gradients."""
        none = [None] * (_MOST_GRADIENTS - len(into))
        segments = [
            None if each is None else (*self._sum_of(name), each.numel(), added)
            for name, each, added in zip(self.names, gradients.tensors, gradients.added, strict=True)
        ]
        partials = self.buffers.feedforward_partials, self.buffers.attention_partials
        describe = partial(self._describe_sum, [*segments, *none], [each.size for each in partials])
        return Step(describe, (*(each.buffer for each in partials), *into, *none))

    def _sum_of(self, name: str) -> tuple[int, int]:
        """Which partial sums (0 or 1) hold a parameter's gradient, and its offset there."""
        d, feedforward = self.layer.d_model, self.buffers.feedforward_partials.offsets
        attention = self.buffers.attention_partials.offsets
        if name in feedforward:
            return 0, feedforward[name]
        if name[1] in "qkv":
            return 1, attention[f"{name[0]}qkv"] + "qkv".index(name[1]) * (d * d if name[0] == "w" else d)
        return 1, attention[name]

    def _schedule(
        self, steps: Sequence[Step], given: Sequence[Buffer], placed: Mapping[Buffer, Mapping[Buffer, int]]
    ) -> Schedule:
        given = (*self.buffers.extra.values(), *self.buffers.parameters.values(), *given)
        return Schedule(steps, given, placed, self.index)

    @property
    def _attended(self) -> Buffer:
        """What the projections read: x, or the batch norm of x."""
        return self.buffers.normed if self.layer.batch_norm and self.layer.norm_first else self.buffers.x

    @property
    def _row_norm(self) -> tuple[Argument, Argument]:
        """Weight and bias of the norm that the projection launches compute themselves."""
        norm = self.buffers.norms[1]
        return (norm.weight, norm.bias) if self.layer.row_norm else (None, None)

    @property
    def _sum(self) -> tuple[Argument, ...]:
        """The feed-forward launches' arguments for s: s itself, or x, o and out_proj."""
        b = self.buffers
        return (b.kept.s, None, None, None) if self.layer.split_at_norm else (b.x, b.kept.o, b.operands.wo, b.bo)

    @property
    def _seed(self) -> Argument:
        """The seed, if a row kernel applies dropout."""
        return self.buffers.seed if any(self.layer.dropout[1:]) else None

    @property
    def _middle(self) -> int:
        """Number (1 or 2) of the norm before the feed-forward."""
        return 2 if self.layer.norm_first else 1

    @property
    def _apart_v(self) -> Argument:
        """v, if it is not stored behind k."""
        return self.buffers.v if self.layer.returns_qk else None

    def _factors(self, pairs: Sequence[Pair]) -> tuple[Argument, ...]:
        """Queries and keys of the layer's factors, padded with None to as many as attention takes."""
        found = [each for pair in pairs[: self.layer.factors] for each in (pair.queries, pair.keys)]
        return (*found, *[None] * (2 * MOST_FACTORS - len(found)))

    # the launches, described when first needed

    def _step(self, kernel: str, arguments: tuple[Argument, ...], **options: Any) -> Step:
        """options: of `kernels.common.Call`."""
        return Step(partial(self._describe, kernel, **options), arguments)

    def _describe(self, kernel: str, **options: Any) -> Launch:
        from isogemm.encoder.kernels.common import Call

        call = Call(self.eps, devices.facts(self.device).sm_count, self.biases, **options)
        formulation, config = choose_formulation(self.layer, kernel, call.sm_count)
        module = importlib.import_module(f"isogemm.encoder.kernels.{formulation}")
        launch: Launch = module.describe(kernel, self.layer, config, call)
        return launch

    def _describe_sum(self, segments: Sequence[tuple[int, int, int, bool] | None], sizes: Sequence[int]) -> Launch:
        from isogemm.encoder.kernels.chunk_sums import describe_sum_chunks

        return describe_sum_chunks(self.layer, segments, sizes)

    def _describe_attention(self, backward: bool, scores: bool, added: bool = False) -> Launch:
        """scores: whether scores (in a backward, their gradient) are in memory; added: whether d_qk is given."""
        from isogemm.encoder.attention import kernels

        layer = self.layer
        width = 3 * layer.d_model
        read = (layer.head if layer.by_head else width,) * 3
        written = (layer.ld if layer.transposed else width,) * 3 if backward else ()
        problem = Attention(
            layer.sequences, layer.tokens, layer.nhead, layer.head, layer.operand, layer.precision or "ieee",
            read + written, layer.causal, layer.mask, layer.mask_strides,
            kernels.backend(), layer.pdl, layer.by_head, backward and layer.transposed,
            layer.dropout.attention, layer.previous, scores, layer.factors, added, layer.arch,
        )  # fmt: skip
        return kernels.describe(problem)
