import torch

from isogemm.verify.checks import Check, CheckResult, run_trials, skip
from isogemm.verify.compare import compare_bits


def test_result_states():
    assert CheckResult("x", 3, 0, 0).passed
    assert not CheckResult("x", 3, 1, 9).passed
    assert not CheckResult("x", 0, 0, 0).passed
    skipped = skip("x", "no GPU")
    assert not skipped.passed
    assert skipped.skipped == "no GPU"


def test_run_trials_counts_and_keeps_the_first_failure():
    ones = torch.ones(4)

    def trial(seed):
        yield compare_bits(ones, ones)
        if seed == 1:
            yield compare_bits(ones, torch.tensor([1.0, 2.0, 1.0, 2.0]))
            yield compare_bits(ones, torch.zeros(4))
        if seed == 2:
            raise ValueError("no such config")

    result = run_trials("rows", 4, trial, covered="four rows")
    assert (result.trials, result.failures, result.differing) == (4, 2, 6)
    assert not result.passed
    assert result.detail.startswith("trial 1: 2 of 4 elements differ (50.00%), first at (1,)")


def test_run_trials_reports_exceptions_and_mismatches():
    def raising(seed):
        if seed == 1:
            raise AssertionError("seed is one")

    result = run_trials("rows", 3, raising)
    assert (result.failures, result.differing) == (1, 0)
    assert result.detail == "trial 1: AssertionError: seed is one"
    mismatch = run_trials("rows", 1, lambda seed: [compare_bits(torch.ones(2), torch.ones(3))])
    assert not mismatch.passed
    assert "shape (3,)" in mismatch.detail


def test_check_runs():
    check = Check(
        "ones", "one is one", lambda device, trials: run_trials("ones", trials, lambda seed: None, covered="all")
    )
    result = check.run(torch.device("cpu"), 2)
    assert result.passed
    assert result.detail == "all"
