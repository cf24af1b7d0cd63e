"""The launches of a fused layer's batch norms, number 1 and 2.

A norm by the batch's statistics needs all rows before its first result, so the launches around it end there.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from isogemm.encoder.buffers import TILE_SUMS, Buffers
from isogemm.encoder.configs import Layer, tile_rows
from isogemm.encoder.parameters import EncoderDropout
from isogemm.encoder.schedule import Argument, Buffer, Step
from isogemm.norm.configs import TILE_ROWS, groups

if TYPE_CHECKING:
    from isogemm.core.launch import Launch

_PROJECTION = EncoderDropout._fields.index("projection")


class BatchNormSteps:
    def __init__(self, layer: Layer, eps: float, buffers: Buffers) -> None:
        self._layer, self._eps, self._buffers = layer, eps, buffers
        self._groups = groups(layer.rows)

    def statistics(self, number: int, of: Argument) -> list[Step]:
        """Steps that compute a norm's statistics, from the batch or from the running ones."""
        norm, steps = self._buffers.norms[number], []
        moments: Argument = None
        if self._layer.from_batch:
            moments = self._buffers.moments
            steps.append(self._step("moments", (of, moments)))
            if self._groups:
                steps.append(self._step("group_moments", (moments, self._buffers.groups)))
                moments = self._buffers.groups
        running = (None, None) if self._layer.from_batch else (norm.mean, norm.var)
        arguments = (moments, *running, norm.weight, norm.statistics)
        return [*steps, self._step("statistics", arguments, eps=self._eps)]

    def normalise(self, number: int, of: Argument, to: Argument) -> Step:
        norm = self._buffers.norms[number]
        return self._step("normalise", (of, norm.statistics, norm.bias, to))

    def backward(
        self, number: int, grad: Buffer, of: Argument, to: Buffer, around: Argument = None, dropped: Argument = None
    ) -> list[Step]:
        """Steps from `grad`, the gradient of a norm's result, to that of its input, with `around` added.

        They also write the tiles' sums for the gradients of weight and bias. dropped: the result after out_proj's
        dropout.
        """
        buffers, statistics = self._buffers, self._buffers.norms[number].statistics
        sums = buffers.attention_sums if to is buffers.dx else buffers.feedforward_sums
        slots, which = TILE_ROWS // tile_rows(self._layer), TILE_SUMS.index(f"g{number}")
        places = {"SLOTS": slots, "WIDTH": len(TILE_SUMS), "WHICH": which}
        steps = [self._step("gradient_sums", (grad, of, statistics, sums), **places)]
        coefficients: Argument = None
        if self._layer.from_batch:
            coefficients = buffers.coefficients
            if self._groups:
                steps.append(self._step("group_sums", (sums, buffers.groups), **places))
                sums, places = buffers.groups, {}
            arguments = (sums, statistics, coefficients, None, None)
            steps.append(self._step("coefficients", arguments, **places))
        seed, p = (buffers.seed, self._layer.dropout.projection) if dropped else (None, 0.0)
        last = (grad, of, statistics, coefficients, around, to, dropped, seed)
        return [*steps, self._step("batch_norm_backward", last, p=p, PLACE=_PROJECTION)]

    def dropped(self, of: Buffer, to: Buffer) -> Step:
        """Step that applies out_proj's dropout."""
        p = self._layer.dropout.projection
        return self._step("dropped", (of, self._buffers.seed, to), p=p, PLACE=_PROJECTION)

    def _step(self, name: str, arguments: tuple[Argument, ...], **options: Any) -> Step:
        return Step(partial(self._describe, name, **options), arguments)

    def _describe(self, name: str, **options: Any) -> Launch:
        from isogemm.norm.kernels import batch_norm

        return batch_norm.describe(name, self._layer.rows, self._layer.d_model, pdl=self._layer.pdl, **options)
