"""Attention of short heads on tensor cores."""

from isogemm.attention.kernels.mma import backward, forward

KERNELS = forward.KERNEL, backward.KERNEL
