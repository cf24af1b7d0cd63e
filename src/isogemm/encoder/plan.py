"""A fused layer's call: what it allocates and launches, forward and backward.

Kept for the backward, per token: x, o and log-sums (with the norms last the sum before the last one, in a parted layer
s, and q and k that are a result); the rest is computed again. Launches and the parts of memory that they pass on are
tables: a part lies where none that is needed with it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from isogemm.core import device as devices
from isogemm.encoder import configs, configs_attention, layout
from isogemm.encoder.batch_norm_steps import BatchNormSteps
from isogemm.encoder.configs import SHORT_HEAD, Layer
from isogemm.encoder.configs_attention import MOST_FACTORS, Attention
from isogemm.encoder.gradients import Division, Gradients
from isogemm.encoder.schedule import Bound, Part, Schedule, Step, addresses_of, spans

if TYPE_CHECKING:
    from isogemm.core.launch import Launch

# The parameters in the order of EncoderParameters, with one in_proj or three.
STACKED = ("wq", "wo", "w1", "w2", "g1", "g2", "bq", "bo", "b1", "b2", "s1", "s2")
SEPARATE = ("wq", "wk", "wv", "wo", "w1", "w2", "g1", "g2", "bq", "bk", "bv", "bo", "b1", "b2", "s1", "s2")
_MOST_GRADIENTS = 16  # that one launch adds up
_TILES_AT_ONCE = 2  # of a walk over rows, on a multiprocessor
_TILE_SUMS = ("g1", "s1", "g2", "s2", "b2", "bo")  # of rows, in the order in which a tile leaves them


class Given(NamedTuple):
    """A call's tensors besides x and the parameters."""

    mask: Tensor | None = None
    seed: Tensor | None = None  # of its dropout, int64, of one element
    previous: Tensor | None = None  # scores of the layer before [S, H, T, T], contiguous
    factor0: Tensor | None = None  # queries and keys of the first layer [2, H, S, T, d]: factors of scores
    factor1: Tensor | None = None
    factor2: Tensor | None = None
    factor3: Tensor | None = None
    mean1: Tensor | None = None  # running statistics of its batch norms
    var1: Tensor | None = None
    mean2: Tensor | None = None
    var2: Tensor | None = None

    @property
    def read_again(self) -> tuple[Tensor | None, ...]:
        """In a backward."""
        return tuple(self)[: _ADDED.stop]

    @property
    def added(self) -> tuple[Tensor | None, ...]:
        """To the scores, and differentiable."""
        return tuple(self)[_ADDED]


GIVEN = Given._fields
_ADDED = slice(GIVEN.index("previous"), GIVEN.index("previous") + 1 + MOST_FACTORS)
ADDED = GIVEN[_ADDED]


class Forward(NamedTuple):
    """y [S, T, D]; what a backward needs of the rest, where it was asked for; and other results of the layer."""

    y: Tensor
    kept: Tensor | None
    scores: Tensor | None  # [S, H, T, T]
    statistics: Tensor | None  # of both batch norms [2, 4, D]
    own: Tensor | None  # its queries and keys [2, H, S, T, d]


class Above(NamedTuple):
    """The gradients that come to a layer."""

    dy: Tensor
    d_scores: Tensor | None
    d_own: Tensor | None


class Left(NamedTuple):
    """What a forward left for its backward."""

    kept: Tensor
    statistics: Tensor | None
    own: Tensor | None


class Plan:
    """Of one layer on one device; `biases`: whether q, k and v have them."""

    def __init__(self, layer: Layer, device: torch.device, eps: float, biases: bool) -> None:
        self.layer, self.eps, self.device = layer, eps, device
        self.index = device.index or 0
        self.configs, self.groups = configs.choose(layer), configs.choose_warpgroup(layer)
        self.biases = biases
        self._tile_rows = (
            configs.FRAGMENT_ROWS if layer.fragments
            else configs.GROUP_ROWS if self.groups.feedforward_backward
            else self.configs.tile_rows
        )  # fmt: skip
        self._norms = BatchNormSteps(layer, eps, configs.TILE_ROWS // self._tile_rows, _TILE_SUMS)
        self.names = STACKED if layer.stacked else SEPARATE
        self._bound: Bound = {}
        self._weights: torch.dtype = getattr(torch, layer.weights)
        d, f = layer.d_model, layer.dim_feedforward
        first = 2 if layer.norm_first else 0  # of the sums that are complete when linear1's and linear2's are taken
        self._partials = (  # of a chunk: what the feed-forward's backward leaves, and what the rest does
            _laid_out(w1=f * d, b1=f, w2=d * f, **dict.fromkeys(_TILE_SUMS[first:5], d)),
            _laid_out(wqkv=3 * d * d, bqkv=3 * d, wo=d * d, **dict.fromkeys((*_TILE_SUMS[:first], "bo"), d)),
        )
        self._parts = kept_parts(layer) | self._passing_parts()
        kept = _sizes(kept_parts(layer))
        self._kept, self._kept_size = layout.in_a_row(kept)
        self._divisions: dict[tuple[bool, ...], Division] = {}
        self._forwards = {keep: self._forward_schedule(keep) for keep in (True, False)}
        self._backwards: dict[object, tuple[Schedule, int]] = {}

    def forward(self, x: Tensor, given: Sequence[Tensor | None], addresses: tuple[int, ...], keep: bool) -> Forward:
        """given: what `GIVEN` names, and the parameters."""
        schedule, size = self._forwards[keep]
        layer = self.layer
        y = torch.empty_like(x)
        kept = torch.empty(self._kept_size, dtype=torch.uint8, device=self.device) if keep else None
        work = torch.empty(size, dtype=torch.uint8, device=self.device)
        operand: torch.dtype = getattr(torch, layer.operand)
        scores = statistics = own = None
        if layer.scores:
            shape = (layer.sequences, layer.nhead, layer.tokens, layer.tokens)
            scores = torch.empty(shape, dtype=operand, device=self.device)
        if layer.own_factors:
            own = torch.empty(layer.shape_of_factor, dtype=operand, device=self.device)
        if layer.batch_norm:
            statistics = torch.empty((2, 4, layer.d_model), dtype=torch.float32, device=self.device)
        rest = (x, y, kept, work, scores, statistics, own)
        schedule.run(addresses + addresses_of(rest), given, rest)
        return Forward(y, kept, scores, statistics, own)

    def backward(
        self, above: Above, left: Left, x: Tensor, given: Sequence[Tensor | None], addresses: tuple[int, ...],
        gradients: Gradients,
    ) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
        """dx, and those of what `ADDED` names; the parameters' gradients are written or added to `gradients`."""
        scores, own = above.d_scores is not None, above.d_own is not None
        key = scores, own, gradients.kind
        found = self._backwards.get(key)
        if found is None:
            found = self._backwards[key] = self._backward_schedule(gradients, scores, own)
        schedule, size = found
        dx = torch.empty_like(x)
        work = torch.empty(size, dtype=torch.uint8, device=self.device)
        of_added = [None if each is None else torch.empty_like(each) for each in given[_ADDED]]
        rest = (*above, x, *left, dx, work, *of_added, *gradients.memory)
        schedule.run(addresses + addresses_of(rest), given, rest)
        return dx, of_added

    def gradients(self, wanted: tuple[bool, ...]) -> Gradients:
        """Unwritten memory for the gradients that are wanted."""
        division = self._divisions.get(wanted)
        if division is None:
            shapes = [self._shape(name) if want else None for name, want in zip(self.names, wanted, strict=True)]
            division = self._divisions[wanted] = Division(shapes, self._weights)
        return division.allocated(self.device)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter."""
        d, f = self.layer.d_model, self.layer.dim_feedforward
        in_proj = 3 * d if self.layer.stacked else d
        weights = {"wq": (in_proj, d), "wk": (d, d), "wv": (d, d), "wo": (d, d), "w1": (f, d), "w2": (d, f)}
        return weights.get(name) or {"bq": (in_proj,), "b1": (f,)}.get(name, (d,))

    # the tables: parts of memory, and launches

    def _passing_parts(self) -> dict[str, Part]:
        """Of what the launches pass on, as many elements as they have."""
        layer = self.layer
        d, f, rows = layer.d_model, layer.dim_feedforward, layer.ld if layer.turned else layer.rows
        of_x, operand = getattr(torch, layer.dtype), getattr(torch, layer.operand)
        column = layer.ld if layer.turned else 1  # from one of dqkv to the next
        next_part = layer.rows * d if layer.by_head else d  # from q to k, and to v
        slots = -(-layer.rows // configs.TILE_ROWS) * (configs.TILE_ROWS // self._tile_rows)
        square, long = d * d, d * f
        parts = {
            "qkv": Part(operand, layer.rows * 3 * d),
            "q": Part(operand, layer.rows * 3 * d, "qkv"),
            "k": Part(operand, layer.rows * 3 * d - next_part, "qkv", next_part),
            "v": Part(operand, layer.rows * 3 * d - 2 * next_part, "qkv", 2 * next_part),
            "u": Part(operand, rows * d),
            "act": Part(operand, rows * f),
            "dz": Part(operand, rows * f),
            "dlast": Part(of_x, layer.rows * d),
            "dlast_turned": Part(operand, rows * d),
            "feedforward sums": Part(torch.float32, slots * 6 * d),
            "attention sums": Part(torch.float32, slots * 6 * d),
            "feedforward partials": Part(torch.float32, layer.chunks * self._partials[0][1]),
            "attention partials": Part(torch.float32, layer.chunks * self._partials[1][1]),
            "do": Part(operand, layer.rows * d),
            "dqkv": Part(operand, rows * 3 * d),
            "dq": Part(operand, rows * 3 * d, "dqkv"),
            "dk": Part(operand, rows * 3 * d - column * d, "dqkv", column * d),
            "dv": Part(operand, rows * 3 * d - 2 * column * d, "dqkv", 2 * column * d),
            "n": Part(operand, rows * d),
            "ds operand": Part(operand, rows * d),
            "o_turned": Part(operand, rows * d),
            "dx": Part(of_x, layer.rows * d),
            # Turned, its last reader is what writes dx, row by row.
            "ds": Part(of_x, layer.rows * d, "dx" if layer.turned else ""),
            "ds dropped": Part(of_x, layer.rows * d),
            "dlast left": Part(operand, layer.rows * d),
            "normed": Part(of_x, layer.rows * d),
            "d_normed": Part(of_x, layer.rows * d),
        } | self._norms.parts()
        for factor in (*ADDED[1:], "own") if layer.by_head else ():
            for of in (factor, f"d_{factor}"):
                parts |= {
                    f"{of} queries": Part(operand, layer.rows * d, of),
                    f"{of} keys": Part(operand, layer.rows * d, of, layer.rows * d),
                }
        if layer.own_factors:
            parts |= {"q": parts["own queries"], "k": parts["own keys"], "v": Part(operand, layer.rows * d)}
        if layer.stacked:  # three times the same
            for name, of, size in (
                ("wk", "wq", 3 * square),
                ("wv", "wq", 3 * square),
                ("bk", "bq", 3 * d),
                ("bv", "bq", 3 * d),
            ):
                parts[name] = Part(self._weights, size, of)
        at, _ = _laid_out(
            wo=square, w1=long, w2=long, wqkv=3 * square,
            w2_turned=long, w1_turned=long, wo_turned=square, wqkv_turned=3 * square,
        )  # fmt: skip
        return parts | {
            f"ready {name}": Part(operand, _ready_size(layer) - first, "ready", first) for name, first in at.items()
        }

    def _forward_schedule(self, keep: bool) -> tuple[Schedule, int]:
        layer = self.layer
        norm1 = ("g1", "s1") if layer.row_norm else ("", "")
        wo, w1, w2 = map(self._weight, ("wo", "w1", "w2"))
        seed = "seed" if any(layer.dropout[1:]) else ""
        attending = "normed" if layer.batch_norm and layer.norm_first else "x"
        steps: list[Step] = []
        if attending == "normed":
            steps += [*self._norms.statistics(1, "x"), self._norms.normalise(1, "x", "normed")]
        steps += [
            Step(
                ("project", keep), partial(self._describe_project, False, keep),
                (attending, *norm1, "wq", "wk", "wv", "bq", "bk", "bv", "q", "", "wo", "", "w1", "w2",
                 "ready" if layer.ready else "", self._own_v),
            ),
            Step(
                "attention", self._describe_attention,
                ("q", "k", "v", "mask", "previous" if layer.previous else "",
                 "seed" if layer.dropout.attention else "", "o", "lse", "scores" if layer.scores else "",
                 *(self._factors("") if layer.factors else ())),
            ),
        ]  # fmt: skip
        of_s: tuple[str, ...] = ("x", "o", wo, "bo")
        if layer.parted:
            residual = attending if layer.residual_normed else "x"
            norm = norm1 if layer.residual_normed else ("", "")
            weight = "wo" if self.groups.project else wo  # what is prepared for warpgroups is in their order
            arguments = (residual, "o", weight, "bo", *norm, seed, "s")
            steps.append(Step("out_project", self._describe_out_project, arguments))
            of_s = ("s", "", "", "")
        middle, last = (2, 0) if layer.norm_first else (1, 2)
        norms: tuple[str, ...] = (
            f"g{middle}",
            f"s{middle}",
            *((f"g{last}", f"s{last}") if layer.norm_last else ("", "")),
        )
        fed = "y"
        if layer.batch_norm:
            steps += self._norms.statistics(middle, "s")
            norms = (f"statistics{middle}", f"s{middle}", "", "")
            fed = "total" if last else "y"
        steps.append(
            Step(
                ("feedforward", keep), self._describe_feedforward,
                (*of_s, w1, "b1", w2, "b2", *norms, fed, "total" if keep and layer.norm_last else "", seed),
            )
        )  # fmt: skip
        if fed == "total":
            steps += [*self._norms.statistics(2, "total"), self._norms.normalise(2, "total", "y")]
        needed = spans(steps, self._parts)
        if keep:
            needed = {name: span for name, span in needed.items() if name not in self._kept}
        offsets, size = layout.sharing(needed)
        buffers = {"work": offsets} | ({"kept": self._kept} if keep else {})
        return self._schedule(steps, ("x", "y", "kept", "work", "scores", "statistics", "own"), buffers), size

    def _backward_schedule(
        self, gradients: Gradients, d_scores: bool = False, d_own: bool = False
    ) -> tuple[Schedule, int]:
        layer, d, f = self.layer, self.layer.d_model, self.layer.dim_feedforward
        turned, norm_last, dropout = layer.turned, layer.norm_last, layer.dropout
        norm1 = ("g1", "s1") if layer.row_norm else ("", "")
        wo, w1, w1_turned, w2_turned = map(self._weight, ("wo", "w1", "w1_turned", "w2_turned"))
        wqkv, wo_turned, wqkv_turned = map(self._weight, ("wqkv", "wo_turned", "wqkv_turned"))
        again: tuple[str, ...] = (wqkv,) * 3 if layer.ready else ("wq", "wk", "wv")
        if self.groups.project:  # which takes the weights as they are
            again, wo_turned = ("wq", "wk", "wv"), "wo"
        middle = 2 if layer.norm_first else 1
        norms = (f"statistics{middle}" if layer.batch_norm else f"g{middle}", f"s{middle}", "g2" if norm_last else "")
        of_s = ("s", "", "", "") if layer.parted else ("x", "o", wo, "bo")
        seed = "seed" if any(dropout[1:]) else ""
        dlast, dlast_turned = "dlast" if norm_last else "", "dlast_turned" if turned else ""
        dlast_left = "dlast left" if (dropout.output or layer.cast) and not turned else ""
        attending = "normed" if layer.batch_norm and layer.norm_first else "x"
        n = "n" if layer.row_norm or turned or layer.cast else ""
        ds = "ds dropped" if dropout.projection else "ds"  # the gradient of out_proj's result
        ds_operand, o_turned = "ds operand" if turned or layer.cast else "", "o_turned" if turned else ""
        into = tuple(
            "" if each is None else f"d{name}" for name, each in zip(self.names, gradients.tensors, strict=True)
        )
        into += ("",) * (_MOST_GRADIENTS - len(into))
        given, parts = gradients.given([f"d{name}" for name in self.names])
        factors: tuple[str, ...] = ()
        if layer.factors or d_own:
            of_own = ("d_own queries", "d_own keys") if d_own else ("", "")
            factors = (*self._factors(""), *self._factors("d_"), *of_own)
        above = "dy"
        steps: list[Step] = []
        if layer.batch_norm and not layer.norm_first:
            above = "dlast"
            steps += self._norms.through(2, "dy", "total", above)
        steps.append(
            Step(
                "feedforward_backward", self._describe_feedforward_backward,
                (*of_s, w1, "b1", w1_turned, w2_turned, *norms, above, "total" if norm_last else "",
                 "u", "act", "dz", dlast, "d_normed" if layer.batch_norm else "ds", "feedforward sums",
                 *(() if layer.fragments else (dlast_turned,)), seed, dlast_left),
            )
        )  # fmt: skip
        if layer.batch_norm:
            around = "dy" if layer.norm_first and not layer.residual_normed else ""
            dropped = ds if dropout.projection else ""
            steps += self._norms.through(middle, "d_normed", "s", "ds", around, dropped)
        elif dropout.projection:
            steps.append(self._norms.dropped("ds", ds))
        steps.append(
            Step(
                "feedforward weights",
                partial(self._describe_weight_grads, (f, d, d, f), 0),
                ("dz", "u", dlast_turned or dlast_left or dlast or above, "act", "feedforward sums",
                 "feedforward partials"),
            )
        )  # fmt: skip
        if attending == "normed":
            steps.append(self._norms.normalise(1, "x", "normed"))
        steps += [
            Step(
                "project again", partial(self._describe_project, True, True),
                (attending, *norm1, *again, "bq", "bk", "bv", "" if layer.own_factors else "q", ds, wo_turned, "do",
                 "", "", "", self._own_v),
            ),
            Step(
                ("attention_backward", d_scores, d_own),
                partial(self._describe_attention_backward, d_scores, d_own),
                ("q", "k", "v", "mask", "previous" if layer.previous else "", "seed" if dropout.attention else "",
                 "o", "lse", "do", "d_scores" if d_scores else "", "dq", "dk", "dv",
                 "d_previous" if layer.previous else "", *factors),
            ),
            Step(
                "input_grad", self._describe_input_grad,
                (attending, *norm1, wqkv_turned, "dqkv", ds, n, "d_normed" if attending == "normed" else "dx",
                 "attention sums", *(() if layer.fragments else ("o", ds_operand, o_turned)),
                 "" if ds == "ds" else "ds"),
            ),
        ]  # fmt: skip
        if attending == "normed":
            around = "" if layer.residual_normed else "ds"
            steps += self._norms.through(1, "d_normed", "x", "dx", around)
        steps += [
            Step(
                "attention weights",
                partial(self._describe_weight_grads, (3 * d, d, d, d), 1),
                ("dqkv", n or attending, ds_operand or ds, o_turned or "o", "attention sums", "attention partials"),
            ),
            Step(
                ("sum", gradients.kind),
                partial(self._describe_sum, self._segments(gradients)),
                ("feedforward partials", "attention partials", *into),
            ),
        ]
        if not any(into):
            steps = [step for step in steps if not any("partials" in name for name in step.arguments)]
        needed = {name: span for name, span in spans(steps, self._parts).items() if name not in self._kept}
        dx = needed.pop("dx")._replace(last=len(steps))  # which before it is written has room for others
        in_dx, _ = layout.sharing({"dx": dx} | needed, dx.size)
        offsets, size = layout.sharing({name: span for name, span in needed.items() if name not in in_dx})
        buffers = {"kept": self._kept, "dx": in_dx, "work": offsets}
        of_added = [f"d_{name}" for name in ADDED]
        results = (*Above._fields, "x", *Left._fields, "dx", "work", *of_added, *given)
        return self._schedule(steps, results, buffers, parts), size

    def _schedule(
        self, steps: Sequence[Step], given: Sequence[str], buffers: Mapping[str, Mapping[str, int]],
        parts: dict[str, Part] | None = None,
    ) -> Schedule:  # fmt: skip
        given = (*GIVEN, *self.names, *given)
        return Schedule(steps, given, self._parts | (parts or {}), buffers, self.index, self._bound)

    @property
    def _own_v(self) -> str:
        """What a projection takes besides: v's place where that is not behind k."""
        return "v" if self.layer.own_factors else ""

    def _factors(self, of: str) -> tuple[str, ...]:
        """Queries and keys of as many earlier layers as attention takes, or with "d_" their gradients."""
        given = ADDED[1 : 1 + self.layer.factors]
        found = [f"{of}{name} {which}" for name in given for which in ("queries", "keys")]
        return (*found, *[""] * (2 * MOST_FACTORS - len(found)))

    def _segments(self, gradients: Gradients) -> list[tuple[int, int, int, bool] | None]:
        found: list[tuple[int, int, int, bool] | None] = [
            None if each is None else (*self._sum_of(name), each.numel(), more)
            for name, each, more in zip(self.names, gradients.tensors, gradients.added, strict=True)
        ]
        return found + [None] * (_MOST_GRADIENTS - len(found))

    def _sum_of(self, name: str) -> tuple[int, int]:
        """Which partials a chunk's part in a parameter's gradient is among, and where it lies there."""
        d, (feedforward, attention) = self.layer.d_model, (offsets for offsets, _ in self._partials)
        if name in feedforward:
            return 0, feedforward[name]
        if name[1] in "qkv":
            return 1, attention[f"{name[0]}qkv"] + "qkv".index(name[1]) * (d * d if name[0] == "w" else d)
        return 1, attention[name]

    def _weight(self, name: str) -> str:
        """A weight as products read it: prepared, or as it is."""
        plain = {"wqkv": "wq"}.get(name.removesuffix("_turned"), name.removesuffix("_turned"))
        return f"ready {name}" if self.layer.ready else plain

    # the launches, described when first needed

    def _describe_project(self, backward: bool, turn: bool) -> Launch:
        from isogemm.encoder import kernels, kernels_rows_forward

        layer, sm_count = self.layer, devices.facts(self.device).sm_count
        if layer.fragments:
            split = self._warps == 1
            return kernels_rows_forward.describe_project_rows(
                layer, self._warps, self.eps, self.biases, backward, turn, split
            )
        parts = configs.projected_parts(layer, backward)
        if group := self.groups.project:
            from isogemm.encoder import kernels_warpgroup_forward

            walkers = configs.walkers(layer, configs.FRAGMENT_ROWS * group.warps, len(parts), group.at_once * sm_count)
            return kernels_warpgroup_forward.describe_project_warpgroup(
                layer, group, self.eps, walkers, self.biases, backward, turn
            )  # fmt: skip
        config = self.configs.project
        blocks = len(parts) * -(-layer.d_model // config.block)
        walkers = configs.walkers(layer, config.rows, blocks, _TILES_AT_ONCE * sm_count)
        return kernels.describe_project(layer, config, self.eps, walkers, self.biases, backward, turn)

    def _describe_out_project(self) -> Launch:
        from isogemm.encoder import kernels, kernels_rows_forward

        if self.layer.fragments:
            return kernels_rows_forward.describe_out_project_rows(self.layer, self._warps, self.eps)
        ready = self.layer.ready and not self.groups.project
        return kernels.describe_out_project(self.layer, self.configs.out_project, self.eps, ready)

    def _describe_feedforward(self) -> Launch:
        from isogemm.encoder import kernels, kernels_rows_forward

        if self.layer.fragments:
            return kernels_rows_forward.describe_feedforward_rows(self.layer, self._warps, self.eps)
        if group := self.groups.feedforward:
            from isogemm.encoder import kernels_warpgroup_forward

            return kernels_warpgroup_forward.describe_feedforward_warpgroup(self.layer, group, self.eps)
        return kernels.describe_feedforward(self.layer, self.configs.feedforward, self.eps)

    def _describe_feedforward_backward(self) -> Launch:
        from isogemm.encoder import kernels, kernels_rows_backward

        if self.layer.fragments:
            return kernels_rows_backward.describe_feedforward_backward_rows(self.layer, self._warps, self.eps)
        if group := self.groups.feedforward_backward:
            from isogemm.encoder import kernels_warpgroup_backward

            return kernels_warpgroup_backward.describe_feedforward_backward_warpgroup(self.layer, group, self.eps)
        config = self.configs.feedforward_backward
        return kernels.describe_feedforward_backward(self.layer, config, self._tile_rows, self.eps)

    def _describe_input_grad(self) -> Launch:
        from isogemm.encoder import kernels, kernels_rows_backward

        if self.layer.fragments:
            return kernels_rows_backward.describe_input_grad_rows(self.layer, self._warps, self.eps)
        if group := self.groups.input_grad:
            from isogemm.encoder import kernels_warpgroup_backward

            return kernels_warpgroup_backward.describe_input_grad_warpgroup(self.layer, group, self.eps)
        return kernels.describe_input_grad(self.layer, self.configs.input_grad, self._tile_rows, self.eps)

    def _describe_weight_grads(self, shapes: Sequence[int], which: int) -> Launch:
        from isogemm.encoder import kernels, kernels_weight_rows

        layer, (offsets, size) = self.layer, self._partials[which]
        into = list(offsets.values())[:4]
        added = tuple(place for place, name in enumerate(_TILE_SUMS) if name in offsets)
        if layer.fragments and layer.precision == "tf32":
            return kernels_weight_rows.describe_weight_grads_rows(layer, shapes, into, size, added)
        config = self.configs.weight_grads
        return kernels.describe_weight_grads(layer, config, self._tile_rows, shapes, into, size, added)

    @property
    def _warps(self) -> int:
        return configs.row_warps(self.layer, devices.facts(self.device).sm_count)

    def _describe_sum(self, segments: Sequence[tuple[int, int, int, bool] | None]) -> Launch:
        from isogemm.encoder import kernels

        return kernels.describe_sum_chunks(self.layer, segments, [size for _, size in self._partials])

    def _describe_attention(self) -> Launch:
        return describe_attention(self._attention(backward=False, scores=self.layer.scores))

    def _describe_attention_backward(self, d_scores: bool, d_own: bool) -> Launch:
        return describe_attention_backward(self._attention(backward=True, scores=d_scores, added=d_own))

    def _attention(self, backward: bool, scores: bool, added: bool = False) -> Attention:
        layer = self.layer
        width = 3 * layer.d_model
        read = (layer.head if layer.by_head else width,) * 3
        written = (layer.ld if layer.turned else width,) * 3 if backward else ()
        return Attention(
            layer.sequences, layer.tokens, layer.nhead, layer.head, layer.operand, layer.precision or "ieee",
            read + written, layer.causal, layer.mask, layer.mask_strides,
            backend(), layer.early, layer.by_head, backward and layer.turned,
            layer.dropout.attention, layer.previous, scores, layer.factors, added,
        )  # fmt: skip


def backend() -> str:
    return "hip" if torch.version.hip else "cuda"


def describe_attention(problem: Attention) -> Launch:
    """The forward's launch, by the size of the heads."""
    from isogemm.encoder import kernels_attention_dot, kernels_attention_forward, kernels_attention_mma_forward

    if configs_attention.fits_mma(problem):
        return kernels_attention_mma_forward.describe_attention_mma(problem, configs_attention.choose_mma(problem))
    if problem.head <= SHORT_HEAD:
        return kernels_attention_forward.describe_attention(problem, configs_attention.choose_registers(problem))
    return kernels_attention_dot.describe_attention_dot(problem, configs_attention.choose(problem))


def describe_attention_backward(problem: Attention) -> Launch:
    from isogemm.encoder import kernels_attention_backward, kernels_attention_dot, kernels_attention_mma_backward

    if configs_attention.fits_mma(problem):
        config_mma = configs_attention.choose_mma(problem)
        return kernels_attention_mma_backward.describe_attention_mma_backward(problem, config_mma)
    if problem.head <= SHORT_HEAD:
        config = configs_attention.choose_registers_backward(problem)
        return kernels_attention_backward.describe_attention_backward(problem, config)
    config_dot = configs_attention.choose_backward(problem)
    return kernels_attention_dot.describe_attention_dot_backward(problem, config_dot)


def _laid_out(**sizes: int) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += size
    return offsets, end


def kept_parts(layer: Layer) -> dict[str, Part]:
    """What a forward leaves for its backward, in one buffer."""
    of_x, operand = getattr(torch, layer.dtype), getattr(torch, layer.operand)
    parts = {"o": Part(operand, layer.rows * layer.d_model), "lse": Part(torch.float32, layer.rows * layer.nhead)}
    if layer.parted:
        parts["s"] = Part(of_x, layer.rows * layer.d_model)
    if not layer.norm_first:
        parts["total"] = Part(of_x, layer.rows * layer.d_model)  # the sum before the last norm
    if layer.ready or layer.narrow:
        parts["ready"] = Part(operand, _ready_size(layer))  # the weights as operands, and their transposes
    return parts


def kept_size(layer: Layer) -> int:
    return layout.in_a_row(_sizes(kept_parts(layer)))[1]


def _ready_size(layer: Layer) -> int:
    return 8 * layer.d_model * layer.d_model + 4 * layer.d_model * layer.dim_feedforward


def _sizes(parts: Mapping[str, Part]) -> dict[str, int]:
    return {name: part.size for name, part in parts.items()}
