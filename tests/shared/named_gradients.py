"""Gradients of a function of named tensors, and their errors beside torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.poison import poisoned_allocations

Function = Callable[..., torch.Tensor]
Tensors = Mapping[str, torch.Tensor]


def gradients_of(
    function: Function, tensors: Tensors, grad: torch.Tensor, dtype: torch.dtype | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Of every tensor, given as an argument of its name, in `dtype` where that is given."""
    leaves = {name: each.detach().to(dtype or each.dtype).requires_grad_() for name, each in tensors.items()}
    result = function(**leaves, **options)
    found = torch.autograd.grad(result, list(leaves.values()), grad.to(result.dtype))
    return dict(zip(leaves, found, strict=True))


def assert_gradients_no_worse(
    ours: Function, theirs: Function, tensors: Tensors, grad: torch.Tensor, **options: Any
) -> None:
    """Of `ours`, against `theirs` in the tensors' dtypes and in float64: `assert_no_worse_than_torch`."""
    with poisoned_allocations():
        actual = gradients_of(ours, tensors, grad, **options)
    expected = gradients_of(theirs, tensors, grad, **options)
    exact = gradients_of(theirs, tensors, grad, torch.float64, **options)
    for name, right in exact.items():
        assert actual[name].dtype == tensors[name].dtype
        ulps = 1 if right.ndim else 8  # the error of one sum is a draw, not a largest of many
        assert_no_worse_than_torch(actual[name], expected[name], right, ulps=ulps, what=f"gradient of {name}")
