"""Attention of short heads on tensor cores, by fragments of `mma.sync`."""

from isogemm.attention.kernels.mma.backward import describe_attention_backward
from isogemm.attention.kernels.mma.forward import describe_attention

__all__ = ["describe_attention", "describe_attention_backward"]
