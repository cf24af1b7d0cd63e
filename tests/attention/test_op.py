"""The operators of attention: saved tensors, the sinks' gradient over tokens, and what they refuse."""

import pytest
import torch

import isogemm
from isogemm.attention import op
from isogemm.gemm.configs import BIAS_CHUNK
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

OPTIONS = None, None, None, None, None, None, None, None, True, -1, -1, None, 0.0, None  # after q, k, v


def operands(batch=2, tokens=20, heads=4):
    return [make_data("normal", (batch, heads, tokens, 16), seed=seed) for seed in range(3)]


def trained(inputs, sinks, grad):
    leaves = [x.clone().requires_grad_() for x in inputs]
    isogemm.attention(*leaves, causal=True, sinks=sinks).backward(grad)
    return [x.grad for x in leaves]


def test_micro_batches_of_the_sinks_have_the_bits_of_one_pass():
    """Cut at multiples of the chunk of a sum over tokens, into main_grad."""
    tokens = BIAS_CHUNK // 8
    inputs, grad = operands(24, tokens), make_data("normal", (24, 4, tokens, 16), seed=5)
    totals = []
    for cuts in ((), (8,), (8, 16)):
        sinks = make_data("normal", (4,), seed=9).requires_grad_()
        sinks.main_grad = torch.ones(4)
        parts = zip(*(x.tensor_split(cuts) for x in (*inputs, grad)), strict=True)
        for *some, above in parts:
            trained(some, sinks, above)
        assert sinks.grad is None
        totals.append(sinks.main_grad)
    assert_bitwise_equal(totals[1], totals[0])
    assert_bitwise_equal(totals[2], totals[0])


def test_main_grad_and_grad_agree():
    inputs, grad = operands(), make_data("normal", (2, 4, 20, 16), seed=5)
    sinks, other = (make_data("normal", (4,), seed=9).requires_grad_() for _ in range(2))
    other.main_grad = torch.zeros(4)
    for each in (sinks, other):
        trained(inputs, each, grad)
    assert_bitwise_equal(other.main_grad, sinks.grad)


def test_an_operator_without_lse_has_no_gradient():
    inputs = [x.requires_grad_() for x in operands()]
    o, lse = torch.ops.isogemm.attention(*inputs, *OPTIONS, None, None, False)
    assert lse.numel() == 0
    with pytest.raises(RuntimeError, match="with_lse"):
        o.sum().backward()


def test_no_second_derivative():
    inputs = [x.requires_grad_() for x in operands()]
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(isogemm.attention(*inputs).sum(), inputs, create_graph=True)


def test_log_sums():
    """Natural logarithms on the CPU; +inf where a query sees nothing."""
    q, k, v = operands()
    starts = torch.tensor([0, 7])
    _, lse = op.attention(q, k, v, None, None, None, starts, *OPTIONS[4:], True)
    assert lse.shape == (2, 20, 4)
    assert bool((lse[1, :7] == torch.inf).all())
    scores = (q[0] @ k[0].mT / 4).masked_fill(torch.ones(20, 20).triu(1) > 0, -torch.inf)
    torch.testing.assert_close(lse[0], scores.logsumexp(-1).T)


def test_operands_are_read_where_they_lie():
    q, k, v = operands()
    assert op.readable(op.Call(q, k, v, *OPTIONS))[:3] == (q, k, v)
    turned = op.readable(op.Call(q, k.mT.contiguous().mT, v, *OPTIONS))
    assert turned.k.stride(-1) == 1
    assert_bitwise_equal(turned.k, k)


def test_a_frozen_operand_gets_no_gradient():
    q, k, v = operands()
    q.requires_grad_()
    isogemm.attention(q, k, v).sum().backward()
    assert q.grad is not None
    assert k.grad is None
