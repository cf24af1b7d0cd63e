"""The fused layer's kernels by tiles: a program keeps a tile of rows on the chip. For any GPU and number type."""

from isogemm.encoder.kernels.tiles.backward import (
    describe_feedforward_backward,
    describe_input_grad,
    describe_weight_grads,
)
from isogemm.encoder.kernels.tiles.forward import describe_feedforward, describe_out_project, describe_project

__all__ = [
    "describe_feedforward", "describe_feedforward_backward", "describe_input_grad", "describe_out_project",
    "describe_project", "describe_weight_grads",
]  # fmt: skip
