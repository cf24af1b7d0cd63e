"""Gradients accumulated into main_grad over micro-batches."""

import itertools

import torch

from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations
from promises.rows import map_rows


def accumulate(parameters, step, count, cuts, start):
    """The main_grads after a backward for each of the micro-batches that `cuts` makes of `count` rows."""
    for each in parameters.values():
        each.main_grad = torch.zeros(each.shape, device=each.device)
    if start is not None:
        for name, each in parameters.items():
            each.main_grad.copy_(start[name])
    for first, last in itertools.pairwise([0, *cuts, count]):
        with poisoned_allocations():
            step(first, last)
    for name, each in parameters.items():
        assert each.grad is None, name
        assert each.grad_added_to_main_grad is True, name
    return map_rows(parameters, lambda each: each.main_grad)


def assert_same(actual, expected, what):
    for name, each in expected.items():
        assert_bitwise_equal(actual[name], each, f"{name}, {what}")


def starts(parameters):
    """main_grads to begin with: zeros, and what earlier micro-batches could have left."""
    yield None
    yield {
        name: make_data("normal", tuple(each.shape), seed=70 + i, device=each.device)
        for i, (name, each) in enumerate(parameters.items())
    }
