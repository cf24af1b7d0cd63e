"""Attention of short heads in fp32 registers."""

from isogemm.attention.kernels.registers.backward import describe_attention_backward
from isogemm.attention.kernels.registers.forward import describe_attention

__all__ = ["describe_attention", "describe_attention_backward"]
