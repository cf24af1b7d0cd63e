"""What tests of gradients share: operands, plain forms in torch, errors beside torch's, and what a call keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from cpu_tensors import normal
from fused_forms import fused_form
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from isogemm.verify.activations import GATE_FORMS
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.poison import poisoned_allocations

Function = Callable[..., torch.Tensor]
Tensors = Mapping[str, torch.Tensor]


def make_leaves(shapes, dtype=torch.float64):
    return {
        name: normal(*shape, seed=i, dtype=dtype).requires_grad_() for i, (name, shape) in enumerate(shapes.items())
    }


def make_tensors(shapes, dtype):
    return {name: normal(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def assert_gradients(function, leaves, **options):
    """Compare first and second derivatives with finite differences."""

    def call(*tensors):
        torch.manual_seed(0)  # for a mask that stays
        return function(**dict(zip(leaves, tensors, strict=True)), **options)

    assert gradcheck(call, tuple(leaves.values()), fast_mode=True)
    assert gradgradcheck(call, tuple(leaves.values()), fast_mode=True)


def plain_linear(x, weight, *, weight_up=None, bias_up=None, activation=None, residual=None, bias=None):
    if weight_up is None:
        return fused_form(x, weight.mT, bias=bias, activation=activation, residual=residual)
    value = GATE_FORMS[activation](F.linear(x, weight, bias)) * F.linear(x, weight_up, bias_up)
    return value if residual is None else residual + value


def plain_mlp(x, weight, weight_down, *, bias_down=None, residual=None, **first):
    return plain_linear(plain_linear(x, weight, **first), weight_down, bias=bias_down, residual=residual)


class Kept:
    """How many bytes a call keeps besides its operands and its result, and whether it keeps its result."""

    def __init__(self, function, operands, **options):
        storages = {each.untyped_storage().data_ptr() for each in operands.values()}
        kept = {}

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = function(**operands, **options)
        own = result.untyped_storage().data_ptr()
        self.result = own in kept
        self.bytes = sum(size for at, size in kept.items() if at not in storages and at != own)


def gradients_of(
    function: Function, tensors: Tensors, grad: torch.Tensor, dtype: torch.dtype | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """For every tensor, given as an argument of its name, in `dtype` where that is given."""
    leaves = {name: each.detach().to(dtype or each.dtype).requires_grad_() for name, each in tensors.items()}
    result = function(**leaves, **options)
    found = torch.autograd.grad(result, list(leaves.values()), grad.to(result.dtype))
    return dict(zip(leaves, found, strict=True))


def assert_gradients_no_worse(
    ours: Function, theirs: Function, tensors: Tensors, grad: torch.Tensor, **options: Any
) -> None:
    """Compare gradients with those of `theirs`, in the tensors' dtypes and in float64."""
    with poisoned_allocations():
        actual = gradients_of(ours, tensors, grad, **options)
    expected = gradients_of(theirs, tensors, grad, **options)
    exact = gradients_of(theirs, tensors, grad, torch.float64, **options)
    for name, right in exact.items():
        assert actual[name].dtype == tensors[name].dtype
        ulps = 1 if right.ndim else 8  # the error of one sum is a draw, not a largest of many
        assert_no_worse_than_torch(actual[name], expected[name], right, ulps=ulps, what=f"gradient of {name}")
