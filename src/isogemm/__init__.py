"""GEMM kernels for PyTorch: same bits at any batch size, fewer launches, at vendor speed or better."""

from isogemm import epilogues, fusion, nn
from isogemm.core.dispatch import dispatch_log
from isogemm.fusion import autofuse
from isogemm.gemm.api import linear, matmul, matmul_fused, mm, warmup
from isogemm.tiny.api import bmm

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "autofuse",
    "bmm",
    "dispatch_log",
    "epilogues",
    "fusion",
    "linear",
    "matmul",
    "matmul_fused",
    "mm",
    "nn",
    "warmup",
]
