from types import SimpleNamespace

import pytest
import torch

from isogemm.core import device as devices
from isogemm.verify import checks, encoder, fused, gemm, tiny
from isogemm.verify.checks import Check, CheckResult
from isogemm.verify.compare import compare_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def run(count, trial):
    """Run a check of this trial on one thread."""

    def setting(seed, device):
        return SimpleNamespace(seed=seed, device=device, threads=1)

    return Check(setting, "rows", "a row is a row", trial, "four rows").run(CPU, count)


def test_result_states():
    assert CheckResult("x", 3, 0, 0).passed
    assert not CheckResult("x", 3, 1, 9).passed
    assert not CheckResult("x", 0, 0, 0).passed
    skipped = CheckResult("x", 0, 0, 0, skipped="no GPU")
    assert not skipped.passed
    assert skipped.skipped == "no GPU"


def test_a_check_counts_and_keeps_the_first_failure():
    ones = torch.ones(4)

    def trial(each):
        yield compare_bits(ones, ones)
        if each.seed == 1:
            yield compare_bits(ones, torch.tensor([1.0, 2.0, 1.0, 2.0]))
            yield compare_bits(ones, torch.zeros(4))
        if each.seed == 2:
            raise ValueError("no such config")

    result = run(4, trial)
    assert (result.trials, result.failures, result.differing) == (4, 2, 6)
    assert not result.passed
    assert result.detail.startswith("trial 1: 2 of 4 elements differ (50.00%), first at (1,)")


def test_a_check_reports_exceptions_and_mismatches():
    def raising(each):
        if each.seed == 1:
            raise AssertionError("seed is one")
        yield from ()

    result = run(3, raising)
    assert (result.failures, result.differing) == (1, 0)
    assert result.detail == "trial 1: AssertionError: seed is one"
    mismatch = run(1, lambda each: iter([compare_bits(torch.ones(2), torch.ones(3))]))
    assert not mismatch.passed
    assert "shape (3,)" in mismatch.detail


def test_a_check_without_failure_says_what_was_covered():
    result = run(2, lambda each: iter(()))
    assert result.passed
    assert result.detail == "four rows; 1 threads"


@pytest.mark.parametrize("module", [gemm, fused, tiny, encoder], ids=lambda module: module.__name__)
def test_every_trial_of_a_gpu_is_compiled_ahead(module, monkeypatch):
    jobs = []
    monkeypatch.setattr(checks, "run_in_processes", lambda function, device, found: jobs.extend(found))
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch="sm_90"))
    checks.compile_ahead(module, CUDA, 2)
    on_gpu = [place for place, each in enumerate(module.CHECKS) if not each.cpu_only]
    assert jobs == [(module.__name__, seed, place) for seed in range(2) for place in on_gpu]
    checks._rehearse("cpu", (module.__name__, 0, len(module.CHECKS) - 1))


def test_nothing_is_compiled_for_a_gpu_without_kernels(monkeypatch):
    monkeypatch.setattr(checks, "run_in_processes", lambda *args: pytest.fail("compiled"))
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch="sm_75"))
    checks.compile_ahead(gemm, CUDA, 2)
