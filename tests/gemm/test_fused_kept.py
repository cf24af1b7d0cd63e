"""What products with an epilogue keep for the backward, on the CPU: bytes, and dropout's mask."""

import pytest
import torch
from cpu_tensors import CONTRACT, normal
from gradients import Kept, gradients_of, make_leaves, make_tensors
from torch.nn import functional as F

import isogemm
from isogemm.epilogues import random
from isogemm.gemm.api import mlp
from isogemm.gemm.fused import new_seed
from isogemm.verify.activations import GATE_FORMS as GATED

DEVICE = "cpu"


M, K, N = 3, 4, 5


GATE_SHAPES = {"x": (M, K), "weight": (N, K), "weight_up": (N, K)}


# Dropout: the backward's mask is the forward's.


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_the_backward_has_the_forward_s_mask(dtype):
    """Zero exactly where the output was dropped, scaled elsewhere. x and weight are positive."""
    m, k, n, p = 65, 8, 100, 0.3
    x, weight = torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype)
    c = torch.ones(m, n, dtype=dtype, requires_grad=True)
    for activation in (None, "relu", "gelu", "leaky_relu"):
        result = isogemm.linear(x, weight, beta=1.0, c=c, activation=activation, dropout_p=p)
        (grad,) = torch.autograd.grad(result.sum(), c)
        assert torch.equal(grad == 0, result == 0)
        assert 0 < int((result == 0).sum()) < m * n
        kept = grad[grad != 0].double()
        assert float((kept - 1 / (1 - p)).abs().max()) < 2 * torch.finfo(dtype).eps + 1e-4
    residual = torch.ones(m, n, dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(isogemm.linear(x, weight, residual=residual, dropout_p=p).sum(), residual)
    assert torch.equal(grad, torch.ones_like(grad)), "the residual is not dropped"


def test_masks_are_the_torch_form_s():
    """Forward and gradients are those of torch with the mask that `random.kept` says, of the seed that was drawn."""
    m, k, n, p = 33, 20, 17, 0.4
    tensors = make_tensors({"a": (m, k), "b": (k, n), "bias": (n,), "residual": (m, n)}, torch.float64)
    grad = normal(m, n, seed=9, dtype=torch.float64)
    torch.manual_seed(3)
    mask = random.kept(new_seed(torch.device(DEVICE)), m, n, p) * random.scale(p)

    def plain(a, b, bias, residual):
        return residual + mask * F.gelu(a @ b + bias)

    torch.manual_seed(3)
    actual = gradients_of(isogemm.matmul_fused, tensors, grad, activation="gelu", dropout_p=p)
    for name, right in gradients_of(plain, tensors, grad).items():
        torch.testing.assert_close(actual[name], right)


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh", "swiglu"])
def test_nothing_passes_a_dropout_of_all(activation):
    shapes = GATE_SHAPES if activation in GATED else {"x": (M, K), "weight": (N, K)}
    leaves = make_leaves(shapes | {"bias": (N,)}, torch.float32)
    result = isogemm.linear(**leaves, activation=activation, dropout_p=1.0)
    for gradient in torch.autograd.grad(result.sum(), leaves.values()):
        assert not bool(gradient.any())


# What is kept for the backward.


ROWS, WIDTH = 40, 100
SIZES = {  # of what is kept besides the operands: bytes for a 16-bit problem [40, 100], and whether the result is
    "relu": (ROWS * 13, False),  # a bit each
    "leaky_relu": (ROWS * 13, False),
    "tanh": (0, True),
    "sigmoid": (0, True),
    "gelu": (ROWS * WIDTH * 2, False),
    "gelu_tanh": (ROWS * WIDTH * 2, False),
    "quick_gelu": (ROWS * WIDTH * 2, False),
    "silu": (ROWS * WIDTH * 2, False),
    "relu2": (ROWS * WIDTH * 2, False),
    None: (0, False),
}


def _layer(*names):
    shapes = {
        "x": (ROWS, 64),
        "weight": (WIDTH, 64),
        "bias": (WIDTH,),
        "residual": (ROWS, WIDTH),
        "weight_up": (WIDTH, 64),
    }
    return make_leaves({name: shapes[name] for name in ("x", "weight", *names)}, torch.bfloat16)


@pytest.mark.parametrize("activation", SIZES)
def test_what_is_kept(activation):
    size, result = SIZES[activation]
    kept = Kept(isogemm.linear, _layer("bias", "residual" if activation is None else "bias"), activation=activation)
    assert (kept.bytes, kept.result) == (size, result)
    dropped = Kept(isogemm.linear, _layer("bias"), activation=activation, dropout_p=0.1)
    if not result:
        assert dropped.bytes == size + 8, "and the seed"


def test_what_gates_keep():
    """Both factors before the activation, and nothing of the product."""
    for activation in GATED:
        assert Kept(isogemm.linear, _layer("weight_up"), activation=activation).bytes == 2 * ROWS * WIDTH * 2


def test_nothing_is_kept_without_need():
    layer = {name: leaf.detach() for name, leaf in _layer("bias").items()}
    residual = normal(ROWS, WIDTH, dtype=torch.bfloat16).requires_grad_()
    for activation in ("relu", "gelu"):
        assert Kept(isogemm.linear, layer, activation=activation).bytes == 0
        kept = Kept(isogemm.linear, layer | {"residual": residual}, activation=activation)
        assert kept.bytes == 0, "the residual alone is differentiated"
    assert Kept(mlp, layer | {"weight_down": normal(8, WIDTH, dtype=torch.bfloat16)}).bytes == 0
