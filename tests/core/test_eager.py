"""What tells calls apart that may go straight to their kernel."""

import pytest
import torch

from isogemm.core.eager import likeness


def _tensors():
    return [torch.zeros(2, 3), torch.nn.Parameter(torch.zeros(4, 4)), torch.zeros(5, dtype=torch.bool)]


@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight, mask: (x.double(), weight, mask),
        lambda x, weight, mask: (x[:1], weight, mask),
        lambda x, weight, mask: (x[None], weight, mask),
        lambda x, weight, mask: (x.to("meta"), weight, mask),
        lambda x, weight, mask: (x.to_sparse(), weight, mask),
        lambda x, weight, mask: (torch._neg_view(x), weight, mask),
        lambda x, weight, mask: (torch._efficientzerotensor(2, 3), weight, mask),
        lambda x, weight, mask: (x.as_subclass(type("Other", (torch.Tensor,), {})), weight, mask),
        lambda x, weight, mask: (x.requires_grad_(), weight, mask),
        lambda x, weight, mask: (x, weight.detach(), mask),
        lambda x, weight, mask: (x, torch.nn.Parameter(weight.detach().t()), mask),
        lambda x, weight, mask: (x, weight.requires_grad_(False), mask),
        lambda x, weight, mask: (x, None, mask),
    ],
)
def test_tensors_that_are_not_alike(change):
    is_like = likeness(_tensors())
    assert is_like(*_tensors())
    assert not is_like(*change(*_tensors()))


def test_a_parameter_whose_memory_is_laid_out_anew():
    x, weight, mask = _tensors()
    is_like = likeness([x, weight, mask])
    weight.data = torch.ones(4, 4)
    assert is_like(x, weight, mask)
    weight.data = weight.data.t()
    assert not is_like(x, weight, mask)


def test_a_tensor_in_two_places():
    x, weight, mask = _tensors()
    other = torch.nn.Parameter(torch.ones(4, 4))
    tied, apart = likeness([x, weight, weight, mask]), likeness([x, weight, other, mask])
    assert tied(x, weight, weight, mask)
    assert tied(x, other, other, mask)
    assert not tied(x, weight, other, mask)
    assert not tied(x, weight, weight)
    assert apart(x, other, weight, mask)
    assert not apart(x, weight, weight, mask)


def test_special_tensors_are_like_none():
    assert likeness([torch.zeros(2, 3).to_sparse()]) is None
    assert likeness([torch._neg_view(torch.zeros(2, 3))]) is None
