"""Attention of short heads in fp32 registers."""

from isogemm.encoder.attention.kernels.registers import backward, forward

KERNELS = forward.KERNEL, backward.KERNEL
