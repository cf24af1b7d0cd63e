"""The CPU backend's blocks: what they cannot change."""

import pytest
import torch

from isogemm.loss import configs, cpu
from isogemm.loss.configs import Blocks, How
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

ALL = How(softcap=4.0, temperature=0.7, entropy=True, mean=True, lse=True)
CHUNK = 1024


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype)


def _head(dtype, tokens=1100, k=24, vocabulary=2100):
    targets = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(3))
    targets[1::5] = -100
    return (
        _normal(tokens, k, dtype=dtype), _normal(vocabulary, k, seed=1, dtype=dtype), targets,
        _normal(vocabulary, seed=2, dtype=dtype),
    )  # fmt: skip


def _gradients(head, values, stats, totals=(None, None)):
    hidden, weight, _, bias = head
    into = [torch.full_like(each, torch.nan) for each in (hidden, weight, bias)]
    grad = _normal(4, len(hidden), seed=4)
    cpu.backward(grad, *head, values, stats, ALL, CHUNK, tuple(into), totals)
    return into


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_tokens_change_nothing(dtype, monkeypatch):
    head = _head(dtype)
    values, stats = cpu.forward(*head, ALL)
    gradients = _gradients(head, values, stats)
    monkeypatch.setattr(configs, "CPU_LOGITS", 7 * 2100)
    monkeypatch.setattr(configs, "cpu_gradient_blocks", lambda tokens, vocabulary: Blocks(CHUNK, vocabulary))
    again = cpu.forward(*head, ALL)
    for got, right in zip((*again, *_gradients(head, *again)), (values, stats, *gradients), strict=True):
        assert_bitwise_equal(got, right)


def test_blocks_of_the_vocabulary_change_no_gradient_of_the_weight(monkeypatch):
    head = _head(torch.float32)
    values, stats = cpu.forward(*head, ALL)
    _, *gradients = _gradients(head, values, stats)
    monkeypatch.setattr(configs, "CPU_COLUMNS", 1024)
    of_hidden, *cut = _gradients(head, values, stats)
    for got, right in zip(cut, gradients, strict=True):
        assert_bitwise_equal(got, right)
    assert of_hidden.isfinite().all()


def test_totals_are_added_to():
    head = _head(torch.float32)
    values, stats = cpu.forward(*head, ALL)
    _, *gradients = _gradients(head, values, stats)
    totals = tuple(map(torch.zeros_like, gradients))
    _gradients(head, values, stats, totals)
    for got, right in zip(totals, gradients, strict=True):
        assert_bitwise_equal(got, right)
