"""The README's table of promises on a GPU: see tests/shared/promises."""

import promises
import pytest
import torch
from promises import Sizes

from isogemm.verify.encoder_reference import EncoderShape

PRE = {"norm_first": True, "activation": "gelu"}

SCALE = promises.Scale(
    device="cuda",
    rows=(8, 512),
    weights=(
        Sizes(4096, 4096),
        Sizes(8960, 1536),
        Sizes(16500, 65),
        Sizes(1000, 127, "transposed", "wide"),
        Sizes(1, 3),
    ),
    few_weights=(Sizes(1000, 127, "transposed"),),
    batches=(1, 3, 17, 127, 1000),
    positions=(3, 17, 4096),
    gradient_weights=(Sizes(1000, 127), Sizes(1536, 1408), Sizes(17, 3, "transposed")),
    encoders=(
        (EncoderShape(300, 42, 16, 4, 128), PRE),
        (EncoderShape(65, 5, 64, 4, 256), {"activation": "relu"}),
        (EncoderShape(33, 17, 48, 3, 100), {**PRE, "norm": "rms_norm", "is_causal": True}),
        (EncoderShape(65, 42, 16, 4, 128), {"norm": "batch_norm", "activation": "gelu"}),
    ),
    encoder_gradients=((EncoderShape(0, 42, 16, 4, 128), PRE), (EncoderShape(0, 33, 512, 8, 640), PRE)),
    attentions=((1100, 128, {}), (700, 64, {"window": 100, "softcap": 20.0})),
)
FEW = {"tf32": ("linear", "matmul_fused", "nn_mlp"), "fp16": ("linear",), "ieee": ("linear",), "tf32x3": ("linear",)}
NUMBERS = ("bf16", "tf32", "fp16", "ieee", "tf32x3")


@pytest.fixture
def scale():
    """Sizes; what a test allocated is given back, since several processes may share the GPU."""
    yield SCALE
    torch.cuda.empty_cache()


@pytest.fixture(params=promises.product_cases(("bf16",), FEW), ids="-".join)
def product(request):
    return request.param


@pytest.fixture(params=NUMBERS)
def number(request):
    return request.param


class TestPromises(promises.Promises, promises.TinyPromises):
    pass
