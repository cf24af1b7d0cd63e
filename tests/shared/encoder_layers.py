"""Small encoder layers of isogemm's and torch's."""

import torch
from tensor_cases import nearby
from torch.nn import TransformerEncoderLayer

from isogemm.encoder.api import encoder_layer
from isogemm.encoder.parameters import EncoderParameters
from isogemm.nn import EncoderLayer
from isogemm.verify.inputs import make_data

SEQUENCES, TOKENS, D, HEADS, F_ = 5, 7, 16, 4, 24
LENGTHS = torch.tensor([7, 3, 1, 7, 5])
PADDED = torch.arange(TOKENS) >= LENGTHS[:, None]


def make_layer(kind=EncoderLayer, dropout=0.0, **options):
    """With parameters that are none of the neutral ones that biases and norms start from."""
    torch.manual_seed(0)
    layer = kind(D, HEADS, F_, dropout, **({"batch_first": True} | options))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return layer


def make_torch_layer(**options):
    return make_layer(TransformerEncoderLayer, **options)


def make_input(sequences=SEQUENCES, tokens=TOKENS, dtype=torch.float32, seed=0):
    return make_data("normal", (sequences, tokens, D), seed=seed, dtype=dtype)


def call_function(layer, x, **options):
    """isogemm.encoder_layer with the layer's parameters."""
    norms = (layer.norm1, layer.norm2)
    params = EncoderParameters(
        layer.self_attn.in_proj_weight, layer.self_attn.out_proj.weight, layer.linear1.weight, layer.linear2.weight,
        *(norm.weight for norm in norms), layer.self_attn.in_proj_bias, layer.self_attn.out_proj.bias,
        layer.linear1.bias, layer.linear2.bias, *(getattr(norm, "bias", None) for norm in norms),
    )  # fmt: skip
    return encoder_layer(x, params, nhead=HEADS, **options)


def train(layer, dtype=torch.float32, near=None, **masks):
    """The result and the gradients of x and the parameters, all of the unpadded tokens alone."""
    x = make_input() if near is None else nearby(make_input(), near)
    x = x.to(dtype).requires_grad_()
    layer.zero_grad()
    result = layer(x, **masks).masked_fill(PADDED[..., None], 0)
    result.backward(make_input(seed=1).to(dtype))
    return [result.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]
