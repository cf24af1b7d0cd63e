"""What the GPU's loop launches, on a GPU where nothing runs; tests/interpreter/test_loss.py runs it."""

import pytest
import torch

pytest.importorskip("triton")

from idle_gpu import idle_gpu  # noqa: F401

import isogemm
from isogemm.loss import plan
from isogemm.loss.configs import Blocks, How


@pytest.fixture(autouse=True)
def simulated_gpu(idle_gpu):  # noqa: F811
    """Every test has one."""


def _head(tokens, k, vocabulary, dtype=torch.bfloat16):
    targets = torch.zeros(tokens, dtype=torch.int64)
    return torch.empty(tokens, k, dtype=dtype), torch.empty(vocabulary, k, dtype=dtype), targets, None


def test_a_token_has_three_launches():
    with isogemm.dispatch_log() as log:
        plan.forward(*_head(1, 64, 50257), How())
    assert [each.path for each in log] == ["gemm", "loss", "loss"]


def test_slices_of_a_weight_are_summed_as_the_whole_weight():
    """Alone, the slices would be long narrow weights, whose sums over k are cut in two."""
    head, how = _head(2, 10240, 5000, torch.float32), How(precision="tf32x3")
    with isogemm.dispatch_log() as log:
        plan.forward(*head, how, Blocks(2, 1024))
    products = [each.problem for each in log if each.path == "gemm"]
    assert len(products) == 5
    assert not [each for each in products if "chunk" in each]
    with isogemm.dispatch_log() as log:
        isogemm.linear(head[0], head[1][:1024], precision="tf32x3")
    assert "chunk 5120" in log[0].problem


def test_results_of_the_forward_are_summed_as_float32():
    with isogemm.dispatch_log() as log:
        values, stats = plan.forward(*(head := _head(64, 4096, 5000)), How())
        plan.backward(values, *head, values, stats, How(), 4096, (torch.empty_like(head[0]), None, None), (None, None))
    first, second, of_hidden = (each.problem for each in log if each.path == "gemm")
    assert "chunk 1024" in first
    assert "chunk" not in second
    assert "bfloat16" in of_hidden


def test_a_frozen_weight_has_no_product():
    head = _head(64, 256, 1000)
    values, stats = plan.forward(*head, How())
    for wanted, count in (((None, torch.empty_like(head[1]), None), 2), ((None, None, None), 1)):
        with isogemm.dispatch_log() as log:
            plan.backward(values, *head, values, stats, How(), 1024, wanted, (None, None))
        assert len([each for each in log if each.path == "gemm"]) == count


def test_a_slice_of_a_larger_head_has_the_larger_heads_chunk():
    """Whatever was planned before."""
    for vocabulary, chunk in ((100, 1024), (1024 * 128 + 100, 4096)):
        head = _head(64, 128, vocabulary)
        values, stats = torch.zeros(1, 64), torch.zeros(2, 64)
        into = None, torch.empty_like(head[1]), None
        with isogemm.dispatch_log() as log:
            plan.backward(values, *head, values, stats, How(), chunk, into, (None, None), Blocks(64, 16384))
        assert f"[100,128,64] bfloat16 tn chunk {chunk}" in [each.problem for each in log if each.op == "weight_grad"]
