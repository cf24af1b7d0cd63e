"""The launches of every module of isogemm.nn, and of a swapped model's layers: a plain linear layer is one product."""

import pytest
import torch

import isogemm
from isogemm.nn import MLP, EncoderLayer, Linear, swap
from isogemm.verify.inputs import make_data

K, N = 64, 128
LIKE = {"device": "cuda", "dtype": torch.bfloat16}

MODULES = {  # the module, the log's operations of its forward, its launches
    "plain": (lambda: Linear(K, N, bias=False, **LIKE), ["matmul"], 1),
    "bias": (lambda: Linear(K, N, **LIKE), ["matmul"], 1),
    "out_dtype": (lambda: Linear(K, N, out_dtype=torch.float32, **LIKE), ["matmul"], 1),
    "activation": (lambda: Linear(K, N, activation="gelu", **LIKE), ["fused"], 1),
    "mlp": (lambda: MLP(K, N, **LIKE), ["fused"] * 2, 2),
    "gated mlp": (lambda: MLP(K, N, activation="swiglu", **LIKE), ["fused"] * 2, 2),
    "swapped": (lambda: _swapped(torch.nn.Linear(K, N, **LIKE)), ["matmul"], 1),
    "swapped and folded": (lambda: _swapped(torch.nn.Linear(K, N, **LIKE), torch.nn.GELU()), ["fused"], 1),
}


def _swapped(*modules):
    model = torch.nn.Sequential(*modules)
    swap(model)
    return model


@pytest.mark.parametrize("name", MODULES)
def test_launches(name, on_device):
    make, operations, launches = MODULES[name]
    module = make()
    x = make_data("normal", (4, 32, K), seed=0, **LIKE)
    for trained in (False, True):
        x.requires_grad_(trained)
        with torch.set_grad_enabled(trained):
            module(x)
            with isogemm.dispatch_log() as log:
                module(x)
            assert [(entry.op, entry.path) for entry in log] == [(each, "gemm") for each in operations]
            names = on_device(lambda: module(x))
            assert len(names) == launches, names


def test_the_backward_of_a_plain_linear(on_device):
    """dX, dW and db: three kernels, and none of torch's."""
    module = Linear(K, N, **LIKE)
    x = make_data("normal", (4, 32, K), seed=0, **LIKE).requires_grad_()
    grad = make_data("normal", (4, 32, N), seed=1, **LIKE)

    def step():
        x.grad = module.weight.grad = module.bias.grad = None
        module(x).backward(grad)

    step()
    with isogemm.dispatch_log() as log:
        step()
    assert sorted(entry.op for entry in log) == ["bias_grad", "matmul", "matmul", "weight_grad"]
    names = on_device(step)
    assert not [name for name in names if "at::" in name or name.startswith(("Memcpy", "Memset"))], names


def test_an_encoder_layer_is_served_by_the_fused_kernels():
    layer = EncoderLayer(K, 4, N, dropout=0.0, **LIKE)
    x = make_data("normal", (32, 16, K), seed=0, **LIKE)
    with torch.no_grad(), isogemm.dispatch_log() as log:
        layer(x)
    assert [(entry.op, entry.path) for entry in log] == [("encoder_layer", "fused")]
