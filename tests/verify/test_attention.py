from __future__ import annotations

import pytest
import torch

from isogemm.verify import attention as checks

CPU = torch.device("cpu")
CHECKS = {check.name: check for check in checks.CHECKS}


@pytest.fixture(autouse=True)
def short_sequences(monkeypatch):
    monkeypatch.setattr(checks.Setting, "length", lambda each: each.rng.choice((1, 17, 63, 65, 129)))


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_on_the_cpu(name):
    result = CHECKS[name].run(CPU, 4)
    assert result.passed or result.skipped == "there are no tiles to choose from on the CPU", result.detail


def test_default_trials_meet_every_dtype_and_option():
    settings = [checks.Setting(seed, CPU) for seed in range(20)]
    assert len({(each.dtype, each.precision) for each in settings}) == len(checks.NUMBERS)
    for option in ("window", "softcap", "sinks", "scale"):
        assert len({each.how[option] is None for each in settings}) == 2, option


def last_bit_follows(condition):
    """attention with a last bit that follows its input, as no contract allows."""
    right = checks.attention

    def attention(q, k, v, **how):
        o = right(q, k, v, **how)
        return torch.nextafter(o, torch.full_like(o, torch.inf)) if condition(q, k, how) else o

    return attention


BROKEN = {
    "batch": lambda q, k, how: len(q) > 1,
    "padding": lambda q, k, how: how.get("kv_starts") is not None,
    "prefill cuts": lambda q, k, how: q.shape[2] != k.shape[2],
    "decode": lambda q, k, how: q.shape[2] == 1,
    "gradients": lambda q, k, how: len(q) > 1,
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_depends_on_its_surroundings_is_seen(name, monkeypatch):
    monkeypatch.setattr(checks, "attention", last_bit_follows(BROKEN[name]))
    result = CHECKS[name].run(CPU, 2)
    assert result.failures
    assert result.differing


def test_an_error_above_torchs_is_seen(monkeypatch):
    right = checks.attention
    monkeypatch.setattr(
        checks, "attention", lambda q, k, v, **how: right(q, k, v, **how) * (1 + 0.05 * (q.dtype != torch.float64))
    )
    assert CHECKS["accuracy"].run(CPU, 2).failures == 2
