"""Attention of short heads on tensor cores."""

from isogemm.encoder.attention.kernels.mma import backward, forward

KERNELS = forward.KERNEL, backward.KERNEL
