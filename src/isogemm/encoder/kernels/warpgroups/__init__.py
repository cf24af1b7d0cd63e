"""The fused layer's kernels by Hopper's warpgroups, in Gluon: a warpgroup keeps 64 rows in registers."""

from isogemm.encoder.kernels.warpgroups.backward import describe_feedforward_backward, describe_input_grad
from isogemm.encoder.kernels.warpgroups.forward import describe_feedforward, describe_project

__all__ = ["describe_feedforward", "describe_feedforward_backward", "describe_input_grad", "describe_project"]
