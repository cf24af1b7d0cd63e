"""Plain code inside and outside of an `isogemm.autofuse` block."""

import threading

import torch

from isogemm.fusion import autofuse


def leaves_of(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (6, 8), "w": (8, 5), "w3": (8, 5), "b": (5,), "col": (6, 1), "r": (6, 5), "s": ()}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def square_leaves(dtype=torch.float32):
    """Operands whose shapes alone do not tell them apart; none requires a gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (6, 6), "w": (6, 6), "w3": (6, 6), "b": (6,), "col": (6, 1), "r": (6, 6), "s": ()}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def gradients_of(result, leaves):
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    return torch.autograd.grad((result * weights).sum(), list(leaves.values()), allow_unused=True)


def assert_same(left, right):
    if left is None or right is None:
        assert left is right
    else:
        torch.testing.assert_close(left, right)


def assert_as_plain(compute, dtype=torch.float32):
    """The report of `compute` fused, having checked values and gradients against the plain run."""
    leaves = leaves_of(dtype)
    with autofuse() as report:
        fused = compute(**leaves)
    assert type(fused) is torch.Tensor
    plain = compute(**leaves)
    assert fused.dtype == plain.dtype
    assert_same(fused, plain)
    for left, right in zip(gradients_of(fused, leaves), gradients_of(plain, leaves), strict=True):
        assert_same(left, right)
    return report


def steps_of(report):
    return [entry.steps for entry in report.fused.elements()]


def augmented(z, b):
    z += b
    return z


def in_another_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
