"""The launches of a fused layer's batch norms: number 1 or 2, of the rows that a name stands for.

A norm of the batch's statistics needs all rows before the first of its results, so the launches around it end there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from isogemm.encoder import configs_batch_norm
from isogemm.encoder.configs import TILE_ROWS, Layer
from isogemm.encoder.parameters import EncoderDropout
from isogemm.encoder.schedule import Part, Step

if TYPE_CHECKING:
    from isogemm.core.launch import Launch

_PROJECTION = EncoderDropout._fields.index("projection")


class BatchNormSteps:
    """slots, sums: how many of the tiles' sums the norms' tiles have, and which sums those are."""

    def __init__(self, layer: Layer, eps: float, slots: int, sums: Sequence[str]) -> None:
        self._layer, self._eps, self._slots, self._sums = layer, eps, slots, sums
        self._groups = configs_batch_norm.groups(layer.rows)

    def parts(self) -> dict[str, Part]:
        d = self._layer.d_model
        return {
            "moments": Part(torch.float32, -(-self._layer.rows // TILE_ROWS) * 3 * d),
            "groups": Part(torch.float32, self._groups * 3 * d),
            "coefficients": Part(torch.float32, 2 * d),
            "statistics1": Part(torch.float32, 4 * d, "statistics"),
            "statistics2": Part(torch.float32, 4 * d, "statistics", 4 * d),
        }

    def statistics(self, number: int, of: str) -> list[Step]:
        """Those of the batch, or made of the running ones."""
        running = (f"mean{number}", f"var{number}")
        steps: list[Step] = []
        moments = ""
        if self._layer.from_batch:
            running, moments = ("", ""), "moments"
            steps.append(self._step("moments", number, (of, moments)))
            if self._groups:
                steps.append(self._step("group_moments", number, (moments, "groups")))
                moments = "groups"
        arguments = (moments, *running, f"g{number}", f"statistics{number}")
        steps.append(self._step("statistics", number, arguments, self._eps, height=self._height))
        return steps

    def normalise(self, number: int, of: str, to: str) -> Step:
        return self._step("normalise", number, (of, f"statistics{number}", f"s{number}", to))

    def through(self, number: int, grad: str, of: str, to: str, around: str = "", dropped: str = "") -> list[Step]:
        """From the gradient of a norm's result to that of its input, to which `around` is added; on the way, the tiles'
        sums for the gradients of weight and bias. dropped: what out_proj's dropout leaves of it."""
        statistics, sums = f"statistics{number}", "attention sums" if to == "dx" else "feedforward sums"
        places = (self._slots, len(self._sums), self._sums.index(f"g{number}"))
        steps = [self._step("gradient_sums", number, (grad, of, statistics, sums), *places)]
        coefficients = ""
        if self._layer.from_batch:
            coefficients = "coefficients"
            if self._groups:
                steps.append(self._step("group_sums", number, (sums, "groups"), *places))
                sums, places = "groups", (1, 2, 0)
            arguments = (sums, statistics, coefficients, "", "")
            steps.append(self._step("coefficients", number, arguments, *places, height=self._height))
        seed, p = ("seed", self._layer.dropout.projection) if dropped else ("", 0.0)
        last = (grad, of, statistics, coefficients, around, to, dropped, seed)
        return [*steps, self._step("batch_norm_backward", number, last, p, _PROJECTION)]

    def dropped(self, of: str, to: str) -> Step:
        """What out_proj's dropout leaves."""
        return self._step("dropped", 0, (of, "seed", to), self._layer.dropout.projection, _PROJECTION)

    @property
    def _height(self) -> int:
        """Rows of one of the moments or sums that are combined last."""
        return configs_batch_norm.GROUP_ROWS if self._groups else TILE_ROWS

    def _step(self, name: str, number: int, arguments: tuple[str, ...], *args: Any, **options: Any) -> Step:
        return Step((name, number), partial(self._describe, f"describe_{name}", *args, **options), arguments)

    def _describe(self, name: str, *args: Any, **options: Any) -> Launch:
        from isogemm.encoder import kernels_batch_norm

        describe = getattr(kernels_batch_norm, name)
        launch: Launch = describe(self._layer.rows, self._layer.d_model, *args, early=self._layer.early, **options)
        return launch
