"""Operations for PyTorch whose results have the same bits at any batch size: products, attention, norms, losses."""

from isogemm import epilogues, fusion, nn
from isogemm.attention.api import attention, attention_varlen
from isogemm.core.dispatch import dispatch_log
from isogemm.encoder.api import encoder_chunk, encoder_layer
from isogemm.encoder.parameters import EncoderDropout, EncoderParameters, RunningStatistics
from isogemm.fusion import autofuse
from isogemm.gemm.api import linear, matmul, matmul_fused, mm, token_chunk, warmup
from isogemm.loss.api import linear_cross_entropy, linear_logprob
from isogemm.norm.api import embedding, layer_norm, log_softmax, rms_norm, softmax
from isogemm.tiny.api import bmm
from isogemm.tuning.api import tune

__version__ = "0.1.0"

__all__ = [
    "EncoderDropout",
    "EncoderParameters",
    "RunningStatistics",
    "__version__",
    "attention",
    "attention_varlen",
    "autofuse",
    "bmm",
    "dispatch_log",
    "embedding",
    "encoder_chunk",
    "encoder_layer",
    "epilogues",
    "fusion",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_logprob",
    "log_softmax",
    "matmul",
    "matmul_fused",
    "mm",
    "nn",
    "rms_norm",
    "softmax",
    "token_chunk",
    "tune",
    "warmup",
]
