import pytest
import torch

from isogemm.verify import norm
from isogemm.verify.norm import CHECKS

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_checks_pass(check):
    result = check.run(CPU, 4)
    assert result.passed or result.skipped == check.gpu_only != "", result


def test_a_row_that_follows_its_batch_is_seen(monkeypatch):
    def softmax(x, *rest):
        return right(x, *rest) + x.shape[0] % 2

    right = norm.softmax
    monkeypatch.setattr(norm, "softmax", softmax)
    each = norm.Setting(2, CPU)
    assert each.name == "softmax"
    assert not all(diff.equal for diff in norm._batch_invariance(each))


def test_a_total_that_follows_its_micro_batches_is_seen(monkeypatch):
    right = norm.embedding
    monkeypatch.setattr(norm, "embedding", lambda ids, weight: right(ids, weight) * len(ids))
    assert not all(diff.equal for diff in norm._micro_batches(norm.Setting(2, CPU)))
