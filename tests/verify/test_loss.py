from __future__ import annotations

import pytest
import torch

from isogemm.loss import api
from isogemm.verify import loss as checks

CPU = torch.device("cpu")
CHECKS = {check.name: check for check in checks.CHECKS}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_checks_pass_on_the_cpu(check):
    result = check.run(CPU, 3)
    assert result.name == check.name
    assert result.passed or "whole rows" in result.skipped, result.detail


@pytest.mark.parametrize("name", ["as logits", "needle", "rows"])
def test_checks_notice_a_batch(name, monkeypatch):
    """A last bit that depends on whether the number of tokens is odd."""
    right = api.linear_logprob

    def linear_logprob(hidden, *args, return_entropy=False, **options):
        found = right(hidden, *args, return_entropy=return_entropy, **options)
        off = 1 + len(hidden) % 2 * 2**-23
        return tuple(each * off for each in found) if return_entropy else found * off

    monkeypatch.setattr(checks, "linear_logprob", linear_logprob)
    assert not CHECKS[name].run(CPU, 3).passed


def test_a_row_has_its_own_target():
    each = checks.Setting(1, CPU)
    rows, _ = each.operands(200, each.k, each.n)
    targets = each.targets(rows)
    assert torch.equal(each.targets(rows[50:]), targets[50:])
    assert ((targets == checks.IGNORED) | ((targets >= 0) & (targets < each.n))).all()
