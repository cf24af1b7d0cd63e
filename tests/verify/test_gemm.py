from __future__ import annotations

import pytest
import torch

from isogemm.bench import timer
from isogemm.gemm import api, op
from isogemm.verify import gemm as gemm_checks
from isogemm.verify import trials
from isogemm.verify.checks import Check
from isogemm.verify.compare import compare_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CHECKS = {check.name: check for check in gemm_checks.CHECKS}
THREADS = trials.THREADS
ROW_CHECKS = ["needle", "prefill cuts", "padding", "permutation"]


@pytest.fixture(autouse=True)
def few_input_sets(monkeypatch):
    """On the CPU rotation only takes time."""
    monkeypatch.setattr(timer, "rotations", lambda size, device, most: 2)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_checks_pass_on_the_cpu(check):
    result = check.run(CPU, 5)
    assert result.name == check.name
    assert result.passed or result.skipped == "there are no tiles to choose from on the CPU", result.detail


def test_default_trials_meet_every_number_with_every_kind_of_data():
    settings = [gemm_checks.Setting(seed, CPU) for seed in range(20)]
    assert len({(trial.dtype, trial.precision, trial.kind) for trial in settings}) == 20
    assert set(trials.CPU.edges) <= {m for trial in settings[:4] for m in trial.batch_sizes()}


def test_a_trial_is_its_seed():
    one, other = (gemm_checks.Setting(7, CPU) for _ in range(2))
    assert (one.n, one.k, one.layouts, one.batch_sizes()) == (other.n, other.k, other.layouts, other.batch_sizes())
    assert compare_bits(one.forward(5)[0], other.forward(5)[0]).equal


def test_default_trials_meet_every_number_of_threads(monkeypatch):
    """In float32, and in all three families: they share the numbering."""
    monkeypatch.setattr(trials, "THREADS", THREADS)
    before, seen = torch.get_num_threads(), []

    def trial(each):
        seen.append((each.dtype, torch.get_num_threads()))
        if each.seed == 3:
            raise RuntimeError("a trial that fails")
        yield from ()

    result = Check(gemm_checks.Setting, "name", "what", trial, "covered").run(CPU, 20)
    assert {threads for dtype, threads in seen if dtype == torch.float32} == {1, 2, 3, 4, 8, 16}
    assert (result.failures, torch.get_num_threads()) == (1, before)


@pytest.mark.parametrize(("own", "trials_run", "said"), [(1, 1, "1"), (6, 20, "1, 2, 3, 4, 6, 8, 16")])
def test_threads_are_those_that_ran(own, trials_run, said, monkeypatch):
    """The process's own number among them."""
    monkeypatch.setattr(trials, "THREADS", THREADS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: own)
    check = Check(gemm_checks.Setting, "name", "what", lambda each: iter(()), "covered")
    assert check.run(CPU, trials_run).detail == f"covered; {said} threads"


def last_bit_follows(condition):
    """linear with a last bit that follows its input, as no contract allows."""
    right = api.linear

    def linear(x, weight, bias=None, **how):
        out = right(x, weight, bias, **how)
        return torch.nextafter(out, torch.full_like(out, torch.inf)) if condition(x) else out

    return linear


@pytest.mark.parametrize("name", ROW_CHECKS[:3])
def test_row_checks_see_bits_that_follow_the_batch_size(name, monkeypatch):
    monkeypatch.setattr(gemm_checks, "linear", last_bit_follows(lambda x: len(x) % 2))
    result = CHECKS[name].run(CPU, 5)
    assert result.failures
    assert result.differing


@pytest.mark.parametrize("name", ROW_CHECKS)
def test_row_checks_see_bits_that_follow_the_neighbours(name, monkeypatch):
    def linear(x, weight, bias=None, **how):
        out = api.linear(x, weight, bias, **how)
        return out.where(x[:1, :1].isfinite() & (x[:1, :1] > 0), torch.nextafter(out, torch.zeros_like(out)))

    monkeypatch.setattr(gemm_checks, "linear", linear)
    assert CHECKS[name].run(CPU, 5).failures


def test_run_to_run_sees_bits_that_follow_time(monkeypatch):
    calls = []
    monkeypatch.setattr(gemm_checks, "linear", last_bit_follows(lambda x: calls.append(x) or len(calls) % 2))
    assert CHECKS["run to run"].run(CPU, 2).failures == 2


def test_dx_sees_bits_that_follow_the_batch_size(monkeypatch):
    def product(a, b, *how):
        return torch.matmul(a.double(), b.double()).float() + len(a)

    monkeypatch.setattr(op, "product", product)
    assert CHECKS["dX"].run(CPU, 2).failures == 2


def test_weight_gradients_see_cuts_that_change_bits(monkeypatch):
    """torch sums the tokens of a call in an order of its own."""

    def weight_grad(grad, x, total, dtype, precision):
        partial = grad.float().mT @ x.float()
        return partial.to(dtype) if total is None else total.add_(partial)

    monkeypatch.setattr(op, "weight_grad", weight_grad)
    assert CHECKS["dW, db"].run(CPU, 5).failures


def test_accuracy_sees_a_bad_product(monkeypatch):
    def linear(x, weight, bias=None, **how):
        return api.linear(x, weight, bias, **how) * 1.01

    monkeypatch.setattr(gemm_checks, "linear", linear)
    result = CHECKS["accuracy"].run(CPU, 3)
    assert result.failures == 3
    assert "forward" in result.detail
