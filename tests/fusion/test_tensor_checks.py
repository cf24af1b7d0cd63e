"""Which tensors are deferred, and which calls are taken to write their arguments."""

import ctypes

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from deferring import assert_same, augmented, leaves_of, steps_of

from isogemm.fusion import autofuse
from isogemm.fusion.deferred import Deferred


def test_no_plain_operands():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with autofuse() as report:
        torch.relu(x.to_sparse() @ w)
        torch.relu(torch._neg_view(x) @ w)
        torch.relu(x.to("meta") @ w.to("meta"))
        assert type(torch.relu(x.to(torch.complex64).real @ w)) is Deferred
    assert {entry.reason for entry in report.left} >= {"an operand is no plain strided tensor"}
    assert report.left.total() == 3


def test_main_grad_stays_torchs_business():
    leaves = leaves_of()
    weight = leaves["w"].detach().t().contiguous().requires_grad_()
    weight.main_grad = torch.zeros_like(weight)
    with autofuse():
        y = torch.relu(F.linear(leaves["x"], weight))
    y.sum().backward()
    assert weight.grad is not None
    assert not weight.main_grad.any()


def _leaked():
    """Wrappers that outlived their transforms."""
    found = []
    torch.vmap(lambda row: found.append(row) or row)(torch.ones(6, 6, 6))
    torch.func.grad(lambda x: found.append(x) or x.sum())(torch.ones(6, 6))
    return found


def _made_in_inference_mode():
    with torch.inference_mode():
        return torch.ones(6, 6)


NOT_PLAIN = {
    "negated": lambda: torch._neg_view(torch.ones(6, 6)),
    "zeros": lambda: torch._efficientzerotensor((6, 6)),
    "functional": lambda: torch._to_functional_tensor(torch.ones(6, 6)),
    "batched": lambda: _leaked()[0],
    "tracking": lambda: _leaked()[1],
    "inference": _made_in_inference_mode,
    "meta": lambda: torch.ones(6, 6, device="meta"),
    "sparse": lambda: torch.ones(6, 6).to_sparse(),
    "compressed": lambda: torch.ones(6, 6).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)]),
    "subclass": lambda: torch.ones(6, 6).as_subclass(type("Mine", (torch.Tensor,), {})),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_is_no_plain_tensor_is_never_an_operand(kind):
    x, w = torch.ones(6, 6), torch.ones(6, 6)
    with autofuse():
        torch.relu(x @ w + x)  # known, of plain tensors
    odd = NOT_PLAIN[kind]()
    for call in (lambda: odd @ w, lambda: x @ odd, lambda: x @ w + odd, lambda: odd + x @ w, lambda: x @ w * odd):
        try:
            expected = call()
        except (RuntimeError, NotImplementedError, TypeError) as failure:
            with autofuse(), pytest.raises(type(failure)):
                call()
            continue
        with autofuse():
            result = call()
            assert type(result) is not Deferred
        assert (result.shape, result.dtype, result.layout) == (expected.shape, expected.dtype, expected.layout)


def test_empty_operands():
    for _ in range(2):
        with autofuse() as report:
            y = torch.relu(torch.ones(0, 6) @ torch.ones(6, 4) + torch.ones(4))
        assert y.shape == (0, 4)
        assert steps_of(report) == [("bias", "relu")]


CHANGES = {
    "add_": lambda t: t.add_(1),
    "augmented": lambda t: augmented(t, 1),
    "setitem": lambda t: t.__setitem__(0, 7.0),
    "view": lambda t: t.view(-1).mul_(2),
    "slice": lambda t: t[..., :1].zero_(),
    "data": lambda t: t.data.add_(1),
    "assigned data": lambda t: setattr(t, "data", torch.ones_like(t)),
    "detached": lambda t: t.detach().add_(1),
    "out": lambda t: torch.add(torch.ones_like(t), 1, out=t),
    "copy_": lambda t: t.copy_(torch.ones_like(t)),
    "foreach": lambda t: torch._foreach_add_([t], 1.0),
    "functional": lambda t: F.relu(t, inplace=True),
    "operator": lambda t: torch.ops.aten.add_.Tensor(t, 1),
    "init": lambda t: torch.nn.init.zeros_(t),
    "positional": lambda t: F.leaky_relu(t, 0.5, True),
    "batch_norm": lambda t: F.batch_norm(torch.randn(4, t.shape[-1]), _last(t), torch.ones(t.shape[-1]), training=True),
    "torch.batch_norm": lambda t: torch.batch_norm(
        torch.randn(4, t.shape[-1]), None, None, _last(t), torch.ones(t.shape[-1]), True, 0.1, 1e-5, False
    ),
    "batch_norm operator": lambda t: torch.ops.aten.native_batch_norm(
        torch.randn(4, t.shape[-1]), None, None, _last(t), torch.ones(t.shape[-1]), True, 0.1, 1e-5
    ),
    "batch_norm of no public name": lambda t: torch._batch_norm_impl_index(
        torch.randn(4, t.shape[-1]), None, None, _last(t), torch.ones(t.shape[-1]), True, 0.1, 1e-5, False
    ),
    "by its schema": lambda t: torch._native_batch_norm_legit(
        torch.randn(4, t.shape[-1]), None, None, _last(t), torch.ones(t.shape[-1]), True, 0.1, 1e-5
    ),
    "instance_norm": lambda t: F.instance_norm(torch.randn(4, t.shape[-1], 3), _last(t), torch.ones(t.shape[-1])),
    "embedding": lambda t: F.embedding(torch.tensor([0]), torch.atleast_2d(t), max_norm=0.1),
    "embedding_bag": lambda t: F.embedding_bag(torch.tensor([[0]]), torch.atleast_2d(t), max_norm=0.1),
    "optimizer": lambda t: _step_of_sgd(t),
    # By others, who were given the memory.
    "numpy": lambda t: t.numpy().fill(3),
    "__array__": lambda t: np.asarray(t).fill(3),
    "__dlpack__": lambda t: torch.from_dlpack(t).fill_(3),
    "untyped_storage": lambda t: t.untyped_storage().fill_(1),
    "storage": lambda t: t.storage().fill_(3),
    "data_ptr": lambda t: ctypes.memset(t.data_ptr(), 1, t.nbytes),  # as C++ code and Triton kernels' launches have it
    "deferred": lambda t: t.copy_(torch.ones(t.shape[0], 3) @ torch.ones(3, t.shape[-1])) if t.ndim == 2 else t.add_(1),
}


def _last(t):
    """A row of t, as a buffer."""
    return t if t.ndim == 1 else t[-1]


def _step_of_sgd(t):
    t.grad = torch.ones_like(t)
    torch.optim.SGD([t], lr=0.5).step()


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("operand", ["x", "w", "b", "r"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_inside_the_block_come_after(change, operand):
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
    expected = torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]) + leaves["r"]
    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]) + leaves["r"]
        CHANGES[change](leaves[operand])
    torch.testing.assert_close(y, expected)
    assert not torch.equal(leaves[operand], leaves_of()[operand])


@pytest.mark.parametrize("shape", [(0, 8), (6, 0)])
@pytest.mark.parametrize("change", ["add_", "setitem", "out", "copy_", "resize"])
def test_changes_of_an_empty_operand_come_after(change, shape):
    x, w = torch.empty(shape), torch.randn(shape[1], 8)
    with autofuse():
        y = torch.relu(x @ w)
        if change == "resize":
            x.resize_(3, 3)
        elif change == "setitem":
            x[:] = 1
        else:
            CHANGES[change](x)
        assert_same(y, torch.zeros(shape[0], 8))


def test_lazy_modules_are_made_inside_a_block():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LazyLinear(4))
    with autofuse():
        result = model(torch.ones(2, 8))
    torch.testing.assert_close(result, model(torch.ones(2, 8)))
