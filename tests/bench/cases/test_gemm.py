from __future__ import annotations

import json

import pytest
import torch

from isogemm.bench import runner, store, timer
from isogemm.bench.cases import gemm
from isogemm.gemm.tables.sm_90 import TABLE

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def few_input_sets(monkeypatch):
    """On the CPU rotation only takes time."""
    monkeypatch.setattr(timer, "rotations", lambda size, device, most: 2)


def last_bit_follows(condition):
    """linear with a last bit that follows its input, as no contract allows."""
    right = gemm.linear

    def linear(x, weight, bias=None, **how):
        out = right(x, weight, bias, **how)
        return torch.nextafter(out, torch.full_like(out, torch.inf)) if condition(x) else out

    return linear


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
    assert [case.params["tokens"] for case in cases if case.op == "main_grad"] == [65536, 524288, *[65536] * 4]
    split = {case.op for case in cases if case.params.get("precision") == "tf32x3"}
    assert split == {"linear", "dX", "dW"}


@pytest.mark.parametrize("name", gemm.OPERATIONS)
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("bfloat16", "")])
def test_a_case_is_checked_and_timed(name, dtype, precision):
    run = runner.Runner(CPU, repeats=1)
    (row,) = run.rows([gemm._case(name, 70, 48, 33, dtype, precision)])
    assert run.failures == []
    assert row.flops == 2 * 70 * 48 * 33
    assert set(row.times_us) == set(row.error) == {"isogemm", "torch"}
    assert row.info["path"] == "cpu"
    assert store.parse(json.loads(store.dumps(row))) == row


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
    variants = {"torch": lambda: right, "isogemm": lambda: right}
    assert gemm._errors(variants, a, b, "ieee")["isogemm"] < 1e-6
    with pytest.raises(AssertionError, match=r"isogemm: .* exceed"):
        gemm._errors({**variants, "isogemm": lambda: wrong}, a, b, "ieee")
    unwritten = right.clone()
    unwritten[150, 1500] = torch.nan
    with pytest.raises(AssertionError, match="isogemm: NaN"):
        gemm._errors({**variants, "isogemm": lambda: unwritten}, a, b, "ieee")


def test_what_is_compiled_in_processes():
    cases = [
        gemm._case("linear", 1, 64, 32, "bfloat16"),
        gemm._case("dX", 256, 64, 32, "bfloat16"),
        gemm._case("linear", 16, 64, 32, "float32", "tf32"),
    ]
    assert gemm._weights(cases) == {(64, 32, "bfloat16", ""): True, (64, 32, "float32", "tf32"): False}


def test_other_weights_are_not_the_tuned_ones():
    tuned = {(n, k) for number, kind, n, k in TABLE if (number, kind) == ("half", "nt")}
    assert not tuned & {*gemm.OTHER_WEIGHTS, *gemm.RAGGED_WEIGHTS}
    cases = [case for case in gemm.cases(CUDA, False) if case.op == "linear other"]
    assert len(gemm.OTHER_WEIGHTS) == len({*gemm.OTHER_WEIGHTS}) == 40
    assert len(cases) == 40 * 11 + 13 * 5
    gradients = {case.label for case in gemm.cases(CUDA, False) if case.op in ("dX other", "dW other")}
    assert len(gradients) == 2 * 40 * 3
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
