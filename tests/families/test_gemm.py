from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from isogemm.bench import runner, store, timer
from isogemm.core import device as devices
from isogemm.families import gemm, gemm_checks, trials
from isogemm.gemm import op
from isogemm.gemm.tables.sm_90 import TABLE
from isogemm.testing import compare_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CHECKS = {check.name: check for check in gemm.FAMILY.checks}
THREADS = trials.THREADS
ROW_CHECKS = ["needle", "prefill cuts", "padding", "permutation"]


@pytest.fixture(autouse=True)
def few_input_sets(monkeypatch):
    """On the CPU rotation only takes time."""
    monkeypatch.setattr(timer, "rotations", lambda size, device, most: 2)


# doctor


@pytest.mark.parametrize(
    ("arch", "usable", "reason"),
    [
        ("sm_90", (True, True), "tiles measured on sm_90"),
        ("sm_100", (True, True), "safe default tiles: nothing was measured on sm_100, only on sm_90"),
        ("sm_80", (False, True), "safe default tiles"),
        ("gfx942", (False, True), "safe default tiles"),
        ("sm_75", (False, False), "sm_75"),
    ],
)
def test_usability_on_a_gpu(arch, usable, reason, monkeypatch):
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch=arch))
    found = gemm.usability(CUDA)
    assert [each.kernel for each in found] == ["gemm/tma", "gemm/pointer"]
    assert tuple(each.usable for each in found) == usable
    assert reason in found[1].reason


def test_usability_without_triton(monkeypatch):
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch="sm_90"))
    monkeypatch.setattr(gemm.importlib.util, "find_spec", lambda name: None)
    assert {(each.usable, each.reason) for each in gemm.usability(CUDA)} == {(False, "Triton is not installed")}


def test_the_cpu_is_served():
    (found,) = gemm.usability(CPU)
    assert (found.usable, found.kernel) == (True, "gemm/cpu")


# verify


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_checks_pass_on_the_cpu(check):
    result = check.run(CPU, 5)
    assert result.name == check.name
    assert result.passed or result.skipped == "there are no tiles to choose from on the CPU", result.detail


def test_default_trials_meet_every_number_with_every_kind_of_data():
    settings = [gemm_checks._Setting(seed, CPU) for seed in range(20)]
    assert len({(trial.dtype, trial.precision, trial.kind) for trial in settings}) == 20
    assert set(trials.CPU.edges) <= {m for trial in settings[:4] for m in trial.batch_sizes()}


def test_a_trial_is_its_seed():
    one, other = (gemm_checks._Setting(7, CPU) for _ in range(2))
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

    result = trials.Trials("name", "what", trial, "covered").check(gemm_checks._Setting).run(CPU, 20)
    assert {threads for dtype, threads in seen if dtype == torch.float32} == {1, 2, 3, 4, 8, 16}
    assert (result.failures, torch.get_num_threads()) == (1, before)


@pytest.mark.parametrize(("own", "trials_run", "said"), [(1, 1, "1"), (6, 20, "1, 2, 3, 4, 6, 8, 16")])
def test_threads_are_those_that_ran(own, trials_run, said, monkeypatch):
    """The process's own number among them."""
    monkeypatch.setattr(trials, "THREADS", THREADS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: own)
    check = trials.Trials("name", "what", lambda each: iter(()), "covered").check(gemm_checks._Setting)
    assert check.run(CPU, trials_run).detail == f"covered; {said} threads"


def last_bit_follows(condition):
    """linear with a last bit that follows its input, as no contract allows."""
    right = gemm.linear

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
        out = gemm.linear(x, weight, bias, **how)
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
        return gemm.linear(x, weight, bias, **how) * 1.01

    monkeypatch.setattr(gemm_checks, "linear", linear)
    result = CHECKS["accuracy"].run(CPU, 3)
    assert result.failures == 3
    assert "forward" in result.detail


# bench


def test_the_grid_on_a_gpu():
    cases = gemm.cases(CUDA, False)
    assert len({case.label for case in cases}) == len(cases)
    forward = [case for case in cases if case.op == "linear" and case.params["dtype"] == "bfloat16"]
    assert len(forward) == 11 * 14
    assert any(case.params["m"] == case.params["n"] == case.params["k"] == 8192 for case in forward)
    for name in ("dX", "dW"):
        chosen = [case for case in cases if case.op == name and case.params["dtype"] == "bfloat16"]
        assert len(chosen) == 11 * 6
        assert min(case.params["m"] for case in chosen) == 256
    assert [case.params["tokens"] for case in cases if case.op == "main_grad"] == [65536, 524288]


@pytest.mark.parametrize("name", gemm.OPERATIONS)
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("bfloat16", "")])
def test_a_case_is_checked_and_timed(name, dtype, precision):
    run = runner.Runner(CPU, repeats=1)
    (row,) = run.rows([gemm._case(name, 70, 48, 33, dtype, precision)])
    assert run.failures == []
    assert row.flops == 2 * 70 * 48 * 33
    assert set(row.times_us) == set(row.error) == {"isogemm", "torch"}
    assert row.info["path"] == "cpu"
    assert store.loads(store.dumps(row)) == row


def test_quick_cases_run_on_a_cpu():
    run = runner.Runner(CPU, repeats=1)
    rows = list(run.rows(gemm.cases(CPU, True)))
    assert run.failures == []
    assert {row.op for row in rows} == {"linear", "dX", "dW"}


def test_cases_of_a_cpu_are_its_own():
    assert max(case.flops for case in gemm.cases(CPU, False)) < 1e10


def test_main_grad_is_measured_with_its_error():
    run = runner.Runner(CPU, repeats=1)
    (row,) = run.rows([gemm._main_grad_case(3000, 32, 16, micro_batch=1024)])
    assert run.failures == []
    assert 0 < row.error["isogemm"] < 1e-5
    assert row.params["tokens"] == 3000


def test_a_wrong_result_is_not_timed():
    a, b = torch.randn(200, 30), torch.randn(30, 2000)
    right, wrong = a @ b, (a @ b).where(torch.rand(200, 2000) < 0.9, 0.0)
    variants = {"torch": [lambda: right], "isogemm": [lambda: right]}
    assert gemm._errors(variants, a, b, "ieee")["isogemm"] < 1e-6
    with pytest.raises(AssertionError, match=r"isogemm: .* exceed"):
        gemm._errors({**variants, "isogemm": [lambda: wrong]}, a, b, "ieee")
    unwritten = right.clone()
    unwritten[150, 1500] = torch.nan
    with pytest.raises(AssertionError, match="isogemm: NaN"):
        gemm._errors({**variants, "isogemm": [lambda: unwritten]}, a, b, "ieee")


def test_what_is_compiled_ahead():
    cases = [
        gemm._case("linear", 1, 64, 32, "bfloat16"),
        gemm._case("dX", 256, 64, 32, "bfloat16"),
        gemm._case("linear", 16, 64, 32, "float32", "tf32"),
    ]
    assert gemm._weights(cases) == {(64, 32, "bfloat16", ""): True, (64, 32, "float32", "tf32"): False}


def test_other_weights_are_not_the_tuned_ones():
    tuned = {(n, k) for number, kind, n, k in TABLE if (number, kind) == ("half", "nt")}
    assert not tuned & set(gemm.OTHER_WEIGHTS)
    cases = [case for case in gemm.cases(CUDA, False) if case.op == "linear other"]
    assert len(cases) == 25 * 8
    assert not any(case.op == "linear other" for case in gemm.cases(CUDA, True))
    assert not gemm._case("linear other", 1, 8, 8, "bfloat16").build(CPU).cpu_time


def test_demo_shows_the_same_bits():
    shown = gemm.demo(CPU)
    assert shown.ok
    assert (shown.bits.compared, shown.bits.isogemm) == (2 * 64 * 1024, 0)
    assert shown.bits.how == "64 rows: alone and in batches of 3, against a batch of 64"
    assert 0 < shown.accuracy.isogemm < 1e-6
    assert shown.isogemm_us > 0


def test_demo_sees_bits_that_follow_the_batch_size(monkeypatch):
    monkeypatch.setattr(gemm, "linear", last_bit_follows(lambda x: len(x) == 1))
    shown = gemm.demo(CPU)
    assert shown.bits.isogemm == (64 + 1) * 1024  # the last row is alone in its batch of 3 as well
    assert not shown.ok
    assert shown.failures == ["isogemm changed 66,560 of 131,072 elements, expected 0"]


def test_demo_sees_a_bad_product(monkeypatch):
    right = gemm.linear
    monkeypatch.setattr(gemm, "linear", lambda x, weight: 1.01 * right(x, weight))
    shown = gemm.demo(CPU)
    assert shown.bits.isogemm == 0
    assert not shown.ok
    assert "isogemm" in shown.failure
