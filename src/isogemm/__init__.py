"""GEMM kernels for PyTorch: same bits at any batch size, fewer launches, at vendor speed or better."""

from isogemm import nn
from isogemm.core.dispatch import dispatch_log
from isogemm.gemm.api import linear, matmul, mm, warmup
from isogemm.tiny.api import bmm

__version__ = "0.1.0"

__all__ = ["__version__", "bmm", "dispatch_log", "linear", "matmul", "mm", "nn", "warmup"]
