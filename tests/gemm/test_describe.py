"""From tensors to problems: which leading sizes are merged, and what is read off strides and addresses."""

import pytest
import torch

from isogemm.gemm import configs, describe


@pytest.fixture(autouse=True)
def without_tma(monkeypatch):
    """On any machine."""
    monkeypatch.setattr(describe, "_tma", lambda: False)


def _product(a, b):
    return describe.product(a, b, None, a.dtype, "ieee", 0)


def _walked(problem):
    """[batch, M, K] and [batch, K, N] index by index, as a kernel reads them: offsets into a's and b's memory."""
    batches = range(problem.batch)
    levels = [divmod(each, problem.batch_inner) for each in batches]
    found = []
    for (outer, inner), (rows, columns), (row, column) in (
        (problem.a_batch_strides, (problem.m, problem.k), problem.a_strides),
        (problem.b_batch_strides, (problem.k, problem.n), problem.b_strides),
    ):
        matrix = torch.arange(rows)[:, None] * row + torch.arange(columns) * column
        found.append(torch.stack([matrix + high * outer + low * inner for high, low in levels]))
    return found


def _numbered(*shape):
    """Each element is its own offset."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


CASES = {  # name: (a, b, the batch that is left)
    "matrices": (_numbered(3, 4), _numbered(4, 5), 1),
    "transposed": (_numbered(4, 3).T, _numbered(5, 4).T, 1),
    "rows of a batch": (_numbered(2, 3, 4), _numbered(4, 5).expand(2, 4, 5), 1),
    "rows of two levels": (_numbered(2, 6, 3, 4), _numbered(4, 5).expand(2, 6, 4, 5), 1),
    "rows apart": (_numbered(2, 9, 4)[:, :3], _numbered(4, 5).expand(2, 4, 5), 2),
    "one row each": (_numbered(6, 1, 4), _numbered(4, 5).expand(6, 4, 5), 1),
    "a batch": (_numbered(6, 3, 4), _numbered(6, 4, 5), 6),
    "two levels merged": (_numbered(2, 3, 3, 4), _numbered(2, 3, 4, 5), 6),
    "two levels": (_numbered(2, 1, 3, 4).expand(2, 3, 3, 4), _numbered(1, 3, 4, 5).expand(2, 3, 4, 5), 6),
    "sizes of one": (_numbered(1, 2, 1, 3, 4), _numbered(1, 2, 1, 4, 5), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_finds_every_element(name):
    a, b, batch = CASES[name]
    problem = _product(a, b)
    assert problem.batch == batch
    at_a, at_b = _walked(problem)
    assert torch.equal(at_a.flatten(), a.flatten().long())
    every = b.expand(*a.shape[:-2], *b.shape[-2:]).reshape(-1, *b.shape[-2:]).long()
    assert torch.equal(at_b.expand(len(every), -1, -1), every)


def test_more_levels_than_a_kernel_walks():
    a = torch.zeros(2, 2, 2, 3, 4).transpose(0, 2)[:, :, ::2].expand(2, 2, 1, 3, 4)
    b = torch.zeros(9, 9, 9, 4, 5)[:2, :2, :3:2]
    assert _product(a.expand(2, 2, 2, 3, 4), b) is None


def test_alignment_is_of_16_bytes():
    memory = torch.zeros(64)
    for first, is_aligned in ((0, True), (1, False), (4, True)):
        assert describe.aligned(memory[first:]) == is_aligned
        problem = _product(memory[first : first + 12].view(3, 4), torch.zeros(4, 5))
        assert (problem.a_aligned, problem.b_aligned) == (is_aligned, True)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 4)])
def test_weight_gradients_walk_all_tokens(shape):
    grad, x = torch.zeros(*shape, 5), torch.zeros(*shape, 7)
    problem = describe.weight_grad(grad, x, None, torch.float32, "ieee", 64)
    assert (problem.m, problem.n, problem.k, problem.k_inner) == (5, 7, grad[..., 0].numel(), 0)
    assert (problem.a_strides, problem.b_strides, problem.accumulate) == ((1, 5), (7, 1), False)
    sums = describe.bias_grad(grad, None, torch.float32)
    assert (sums.t, sums.n, sums.t_inner, sums.chunk) == (grad[..., 0].numel(), 5, 0, configs.BIAS_CHUNK)


def test_weight_gradients_of_two_levels():
    """Sequences that lie apart; more levels are copied first."""
    grad, x = torch.zeros(2, 9, 5)[:, :3], torch.zeros(2, 3, 7)
    problem = describe.weight_grad(grad, x, torch.zeros(5, 7), torch.float32, "ieee", 64)
    assert (problem.k, problem.k_inner, problem.k_outer_strides) == (6, 3, (45, 21))
    assert problem.accumulate
    assert describe.by_token(grad, x)[0] is grad
    deep = torch.zeros(2, 4, 9, 5)[:, :2, :3]
    copied, _ = describe.by_token(deep, torch.zeros(2, 2, 3, 7))
    assert copied.is_contiguous()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 5), (5,)])
def test_flat(shape):
    x = torch.zeros(shape)
    assert describe.flat(x).shape == (describe.rows(x), shape[-1])


@pytest.mark.parametrize(
    "shapes", [((), ()), ((2,), ()), ((), (2, 3)), ((2, 1), (3,)), ((4,), (1,)), ((0,), ()), ((1, 0), (5, 1))]
)
def test_leading_sizes_broadcast_as_torch_s(shapes):
    assert describe.broadcast(*shapes) == tuple(torch.broadcast_shapes(*shapes))
    assert describe.broadcast(*map(torch.Size, shapes)) == tuple(torch.broadcast_shapes(*shapes))
