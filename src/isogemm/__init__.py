"""GEMM kernels for PyTorch whose results have the same bits at any batch size."""

from isogemm import epilogues, fusion, nn
from isogemm.core.dispatch import dispatch_log
from isogemm.encoder.api import encoder_chunk, encoder_layer
from isogemm.encoder.parameters import EncoderDropout, EncoderParameters, RunningStatistics
from isogemm.fusion import autofuse
from isogemm.gemm.api import linear, matmul, matmul_fused, mm, token_chunk, warmup
from isogemm.tiny.api import bmm
from isogemm.tuning.api import tune

__version__ = "0.1.0"

__all__ = [
    "EncoderDropout",
    "EncoderParameters",
    "RunningStatistics",
    "__version__",
    "autofuse",
    "bmm",
    "dispatch_log",
    "encoder_chunk",
    "encoder_layer",
    "epilogues",
    "fusion",
    "linear",
    "matmul",
    "matmul_fused",
    "mm",
    "nn",
    "token_chunk",
    "tune",
    "warmup",
]
