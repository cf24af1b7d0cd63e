"""Attention of short heads in fp32 registers."""

from isogemm.attention.kernels.registers import backward, forward

KERNELS = forward.KERNEL, backward.KERNEL
