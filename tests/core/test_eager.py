"""What tells calls apart that may go straight to their kernel, and what is kept for those that are alike."""

import pytest
import torch

from isogemm.core.eager import KnownCalls, likeness


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


def test_what_is_known_is_bounded():
    weight, known = torch.randn(8, 16), KnownCalls(most_alike=8)
    known._cache._most = 4
    for rows in range(1, 12):
        known.keep(((rows, 16), "ieee"), (torch.randn(rows, 16), weight), object())
        assert len(known._cache) <= 4
    for _ in range(30):
        known.keep((1, "ieee"), (torch.randn(3, 16), weight), object())
        assert all(len(found) <= 8 for found in known._cache.values())


def test_others_stay_known_where_many_are_alike():
    weight, plan, known = torch.randn(8, 16), object(), KnownCalls()
    first, newest = torch.randn(3, 16), torch.randn(3, 40)[:, :16]
    known.keep((0, "ieee"), (first, weight), plan)
    for width in range(20, 44, 4):
        known.keep((1, "ieee"), (torch.randn(3, width)[:, :16], weight), plan)
    assert known.find((0, "ieee"), (first, weight)) is plan
    assert known.find((1, "ieee"), (newest, weight)) is plan
    assert known.find((2, "ieee"), (newest, weight)) is None


def test_calls_of_many_layouts_are_known():
    """Such as the last tokens of sequences of many lengths: their sizes are the same, their strides are not."""
    weight, known = torch.randn(8, 16), KnownCalls(most_alike=8)
    views = [torch.randn(3, tokens, 16)[:, -1] for tokens in range(1, 30)]
    for view in views:
        known.keep((1, "ieee"), (view, weight), view)
    for view in views:
        assert known.find((1, "ieee"), (view, weight)) is view
    assert known.find((1, "ieee"), (torch.randn(3, 30, 16)[:, -1], weight)) is None
    assert known.find((1, "ieee"), (views[0].to_sparse(), weight)) is None
    assert known.find((1, "ieee"), (views[0].numpy(), weight)) is None


def test_what_cannot_be_hashed_is_not_known():
    x, known = torch.randn(3, 16), KnownCalls()
    known.keep(([],), (x,), object())
    assert known.find(([],), (x,)) is None
