from __future__ import annotations

import json

import pytest
import torch

from figures import tables
from isogemm.bench import runner, store
from isogemm.bench.cases import encoder
from isogemm.verify.compare import compare_bits
from isogemm.verify.encoder_reference import products_of_tf32

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SMALL = encoder.Stack(2, 12, 5, 16, 4, 24)


@pytest.fixture(autouse=True)
def one_thread():
    """On small layers threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_grid_on_a_gpu():
    cases = encoder.cases(CUDA, False)
    stacks = len(encoder.STACKS)
    assert len({case.label for case in cases}) == len(cases) == 2 * stacks
    assert [case.params["dtype"] for case in cases] == ["float32"] * stacks + ["bfloat16"] * stacks
    assert {case.params.get("precision") for case in cases} == {"tf32", None}
    assert encoder._stack(cases[2].params) == encoder.STACKS[2]
    assert "encoder training step layers=2 sequences=1280 tokens=5 d_model=64" in cases[0].label


def test_the_arithmetic_of_a_stack():
    """2 layers of 1280 x 5 tokens, D 64, F 256: 4 D^2 + 2 D F weights; scores and values over 5 keys."""
    stack = encoder.STACKS[0]
    products, attention = 2 * 6400 * (4 * 64**2 + 2 * 64 * 256), 4 * 1280 * 4 * 5**2 * 16
    assert stack.flops == 3 * 2 * (products + attention)
    assert 0.25 < encoder.STACKS[2].flops / 349e12 * 1e3 < 0.3  # ms at an H200's TF32 rate


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("bfloat16", "")])
def test_a_case_is_checked_and_timed(dtype, precision):
    run = runner.Runner(CPU, repeats=1)
    (row,) = run.rows([encoder._case(SMALL, dtype, precision)])
    assert run.failures == []
    assert set(row.times_us) == set(row.error) == {"isogemm", "torch"}
    assert 0 < row.error["isogemm"] < (1e-6 if precision else 2**-5)
    assert (row.info["path"], row.info["torch call"]) == ("composed", "torch eager")
    assert store.parse(json.loads(store.dumps(row))) == row
    made = tables.tables([row], [encoder.VIEW])
    assert "| 2x12x5x16x4x24 |" in made["encoder-steps"]
    assert "torch eager, ms" in made["encoder-steps"]


@pytest.mark.parametrize("compiled", [True, False])
def test_on_a_gpu_steps_are_captured_and_eager(compiled, monkeypatch):
    modes = []

    def compile(model, **how):
        modes.append(how)
        return model.forward

    def on_the_cpu(stack, dtype, device, *, compiled):
        training, eager, models = make(stack, dtype, CPU, compiled=False)
        models["torch eager"] = eager
        if compiled:
            models["torch"] = torch.compile(eager, dynamic=False, fullgraph=True)
        return training, eager, models

    make = encoder._models
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(encoder, "_models", on_the_cpu)
    monkeypatch.setattr(encoder, "peak_bytes", lambda step, device: step() or 3 << 20)
    allocated = iter([0, 10_000] * 3)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    run = encoder._case(SMALL, "bfloat16", compiled=compiled).build(CUDA)
    assert set(run.variants) == {"isogemm", "isogemm eager", "torch", "torch eager"}
    assert set(run.eager) == {"isogemm eager", "torch eager"}
    assert run.info["torch call"] == (encoder.COMPILED if compiled else encoder.CAPTURED)
    assert run.info["isogemm peak MiB"] == "3.0"
    assert run.info["isogemm kept bytes"] == f"{(10_000 - 2 * 12 * 5 * 16) / (2 * 12 * 5):.0f}"
    assert modes == [{"dynamic": False, "fullgraph": True}] * compiled
    assert set(run.check()) == {"isogemm", "torch", "torch eager"}


def test_quick_cases_run_on_a_cpu():
    run = runner.Runner(CPU, repeats=1)
    rows = list(run.rows(encoder.cases(CPU, True)))
    assert run.failures == []
    assert [row.op for row in rows] == ["training step"] * 2


def test_cases_of_a_cpu_are_its_own():
    assert max(case.flops for case in encoder.cases(CPU, False)) < 1e10


def test_a_step_writes_the_gradients_anew():
    training, eager, _ = encoder._models(SMALL, torch.float32, CPU, compiled=False)
    first = training.results(eager)
    training.step(eager)
    training.step(eager)
    for one, leaf in zip(first[1:], (training.x, *training.parameters), strict=True):
        assert compare_bits(leaf.grad, one).equal


def test_models_share_their_parameters():
    training, eager, models = encoder._models(SMALL, torch.float32, CPU, compiled=False)
    assert set(models) == {"isogemm", "torch"}
    ours = list(models["isogemm"].parameters())
    assert [id(each) for each in ours] == [id(each) for each in eager.parameters()]
    assert [id(each) for each in training.parameters] == [id(each) for each in ours]


def test_the_fp64_model_in_parts_is_the_whole(monkeypatch):
    training, eager, _ = encoder._models(SMALL, torch.float32, CPU, compiled=False)
    whole = encoder._exact(training, eager)
    monkeypatch.setattr(encoder, "_EXACT_ELEMENTS", 5 * 5 * 16)
    for one, other in zip(encoder._exact(training, eager), whole, strict=True):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("wrong", ["the result", "x", "1.norm2.bias"])
def test_a_wrong_step_is_not_timed(wrong):
    training, eager, models = encoder._models(SMALL, torch.float32, CPU, compiled=False)
    right = models["isogemm"]

    def model(x):
        if wrong == "the result":
            return right(x) * 1.001
        leaf = x if wrong == "x" else right[1].norm2.bias
        return right(x) + 0.01 * (leaf - leaf.detach())

    with pytest.raises(AssertionError, match=rf"isogemm, {wrong}: "):
        encoder._errors(training, eager, {**models, "isogemm": model}, "ieee")


def test_what_is_compiled_in_processes(monkeypatch):
    jobs = []
    monkeypatch.setattr(encoder, "run_in_processes", lambda function, device, found: jobs.extend(found))
    cases = encoder.cases(CPU, True)
    encoder.compile_cases(CUDA, cases)
    assert len(jobs) == len(cases)
    for job in jobs:
        encoder._compile("cpu", job)


def test_demo_is_a_layer():
    shown = encoder.demo(CPU)
    assert shown.ok
    assert (shown.bits.compared, shown.bits.isogemm) == (2 * 2 * 32 * 5 * 64, 0)  # the result and the gradient of x
    assert shown.accuracy.isogemm < 1e-5
    assert shown.isogemm_us > 0


def test_tf32_is_measured_by_products_of_rounded_operands():
    """Forward and backward, attention's products among them."""
    model = SMALL.model(CPU, torch.float32)
    x = torch.randn(12, 5, 16)
    training = encoder.Training(x.requires_grad_(), torch.randn(12, 5, 16), list(model.parameters()))
    exact = encoder._exact(training, model)
    with products_of_tf32():
        rounded = training.results(model)
    for place, (one, right) in enumerate(zip(rounded, exact, strict=True)):
        error = float((one - right).norm() / right.norm())
        last_bias = place == len(exact) - 5  # the last linear2.bias: a sum of what is given
        assert (error < 1e-6) if last_bias else (2**-15 < error < 2**-9), place
