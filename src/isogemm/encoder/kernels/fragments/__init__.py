"""The fused layer's kernels by fragments: a warp keeps sixteen narrow rows in `mma.sync` fragments."""

from isogemm.encoder.kernels.fragments.backward import describe_feedforward_backward, describe_input_grad
from isogemm.encoder.kernels.fragments.forward import describe_feedforward, describe_out_project, describe_project
from isogemm.encoder.kernels.fragments.weight_grads import describe_weight_grads

__all__ = [
    "describe_feedforward", "describe_feedforward_backward", "describe_input_grad", "describe_out_project",
    "describe_project", "describe_weight_grads",
]  # fmt: skip
