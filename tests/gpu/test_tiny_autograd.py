"""Gradients on the GPU: the formulas in f64, the kernels by finite differences in f32."""

import pytest
import torch

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_operands
from isogemm.verify.poison import poisoned_allocations

SHARING = {"neither": (3, 3), "a": (1, 3), "b": (3, 1)}

# The product is linear in each operand: a step of 1/2 leaves no truncation error, only rounding. Sums of 7 products of
# normal data round off by less than 1e-5; the gradients of the second order add as much again.
FP32 = {"eps": 0.5, "atol": 1e-4, "rtol": 1e-4}


def _leaves(sharing, dtype, m=3, k=7, n=5):
    a_batch, b_batch = SHARING[sharing]
    a, b = make_operands("normal", (a_batch, m, k), (b_batch, k, n), seed=0, dtype=dtype, device="cuda")
    return a.requires_grad_(), b.requires_grad_()


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # gradcheck would rather have f64
@pytest.mark.parametrize("sharing", ["neither", "b"])
def test_finite_differences_of_the_kernels(forced, sharing):
    a, b = _leaves(sharing, torch.float32)
    with isogemm.dispatch_log() as log:
        assert torch.autograd.gradcheck(isogemm.bmm, (a, b), **FP32)
        assert torch.autograd.gradgradcheck(isogemm.bmm, (a, b), **FP32)
    assert {entry.path for entry in log} == {"tiny"}


@pytest.mark.parametrize("sharing", SHARING)
def test_gradcheck_in_float64(sharing):
    a, b = _leaves(sharing, torch.float64)
    for function in (isogemm.bmm, torch.ops.isogemm.bmm):
        assert torch.autograd.gradcheck(function, (a, b))
        assert torch.autograd.gradgradcheck(function, (a, b))


@pytest.mark.parametrize(
    ("sharing", "dtype"),
    [("neither", torch.float32), ("a", torch.float32), ("b", torch.float32), ("b", torch.bfloat16)],
    ids=str,
)
def test_gradients_against_float64(forced, sharing, dtype):
    a_batch, b_batch = (1 if size == 1 else 64 for size in SHARING[sharing])
    shapes = (a_batch, 12, 20), (b_batch, 20, 16)
    a, b = make_operands("normal", *shapes, seed=1, dtype=dtype, device="cuda")
    grad = torch.randn(64, 12, 16, device="cuda").to(dtype)
    a, b = a.requires_grad_(), b.requires_grad_()
    with poisoned_allocations():
        actual = torch.autograd.grad(isogemm.bmm(a, b), (a, b), grad)
    a64, b64 = (x.detach().double().requires_grad_() for x in (a, b))
    reference = torch.autograd.grad(torch.matmul(a64, b64), (a64, b64), grad.double())
    sizes = tuple(x.detach().abs().requires_grad_() for x in (a64, b64))
    magnitude = torch.autograd.grad(torch.matmul(*sizes), sizes, grad.double().abs())
    for got, exact, size in zip(actual, reference, magnitude, strict=True):
        assert got.dtype == dtype
        # The longest sum has 64 * 16 terms (tensor cores truncate: 2^-22 each); one rounding to the dtype.
        allowed = (1024 * 2**-22 + torch.finfo(dtype).eps) * size
        assert bool(((got.double() - exact).abs() <= allowed).all())


def test_backward_takes_the_gate_with_views(forced):
    """dA = dC B^T and dB = A^T dC, as strided views: nt and tn, no transposes in memory."""
    a, b = make_operands("normal", (64, 12, 20), (64, 20, 16), seed=2, device="cuda")
    a, b = a.requires_grad_(), b.requires_grad_()
    result = isogemm.bmm(a, b)
    with isogemm.dispatch_log() as log:
        torch.autograd.grad(result, (a, b), torch.ones_like(result))
    assert [(entry.path, entry.problem) for entry in log] == [
        ("tiny", "[64; 12,20,16] float32/ieee nt"),
        ("tiny", "[64; 20,16,12] float32/ieee tn"),
    ]


def test_backward_keeps_the_precision_of_the_forward(forced):
    a, b = (x.requires_grad_() for x in make_operands("normal", (64, 12, 20), (64, 20, 16), seed=3, device="cuda"))
    grad = torch.ones(64, 12, 16, device="cuda")
    expected = torch.autograd.grad(isogemm.bmm(a, b, precision="tf32"), (a, b), grad)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    result = isogemm.bmm(a, b)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    with isogemm.dispatch_log() as log:
        actual = torch.autograd.grad(result, (a, b), grad)
    assert all("float32/tf32" in entry.problem for entry in log)
    for got, same in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, same)


def test_expanded_and_unused_gradients(forced):
    """sum().backward() hands in a gradient of stride 0; an operand that needs none costs no launch."""
    a, b = make_operands("normal", (64, 12, 20), (64, 20, 16), seed=4, device="cuda")
    a.requires_grad_()
    result = isogemm.bmm(a, b)
    with isogemm.dispatch_log() as log:
        result.sum().backward()
    assert len(log) == 1
    expected = b.double().sum(2)[:, None, :].expand(64, 12, 20)
    assert bool(((a.grad.double() - expected).abs() <= 1e-5 * 16).all())  # 16 normal terms
