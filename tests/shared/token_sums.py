"""Weight and bias gradients of isogemm.linear."""

import itertools

import torch

import isogemm
from isogemm.verify.compare import assert_bitwise_equal


def result_and_gradients(function, inputs, grad, dtype=None):
    """Gradients with respect to copies of `inputs`, in `dtype` where it is given."""
    leaves = tuple(x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs)
    result = function(*leaves)
    return result.detach(), torch.autograd.grad(result, leaves, grad.to(result.dtype))


def accumulate(x, weight, bias, grad, cuts=(), main_grads=None):
    """main_grad of weight and bias after a backward over each part of the tokens, cut at `cuts`."""
    weight, bias = weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    weight.main_grad, bias.main_grad = main_grads or (torch.zeros(weight.shape), torch.zeros(bias.shape))
    weight.main_grad, bias.main_grad = weight.main_grad.clone(), bias.main_grad.clone()
    for start, stop in itertools.pairwise([0, *cuts, len(x)]):
        isogemm.linear(x[start:stop], weight, bias).backward(grad[start:stop])
    return weight.main_grad, bias.main_grad


def assert_same(actual, expected, what):
    for name, got, same in zip(("dW", "db"), actual, expected, strict=True):
        assert_bitwise_equal(got, same, f"{name}, {what}")
