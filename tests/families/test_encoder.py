from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from isogemm.bench import runner, store, tables
from isogemm.core import device as devices
from isogemm.encoder.parameters import ACTIVATIONS
from isogemm.families import encoder, encoder_checks
from isogemm.families.encoder_checks import Setting
from isogemm.gemm import op
from isogemm.testing import compare_bits, products_of_tf32

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CHECKS = {check.name: check for check in encoder.FAMILY.checks}
BIT_CHECKS = ["sequences", "dx", "right-padding"]
SMALL = encoder.Stack(2, 12, 5, 16, 4, 24)

encoder_layer = encoder_checks.encoder_layer


@pytest.fixture(autouse=True)
def one_thread():
    """On small layers threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# doctor


def test_usability(monkeypatch):
    (on_cpu,) = encoder.usability(CPU)
    assert (on_cpu.usable, on_cpu.kernel) == (True, "encoder/composed")
    for arch, usable in (("sm_80", True), ("sm_75", False)):
        monkeypatch.setattr(devices, "facts", lambda device, arch=arch: SimpleNamespace(arch=arch))
        found = encoder.usability(CUDA)
        assert [(each.kernel, each.usable) for each in found] == [
            ("encoder/fused", usable),
            ("encoder/composed", usable),
        ]
        assert arch in found[0].reason
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch="sm_90"))
    monkeypatch.setattr(encoder.importlib.util, "find_spec", lambda name: None)
    assert {(each.usable, each.reason) for each in encoder.usability(CUDA)} == {(False, "Triton is not installed")}


# verify


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_on_the_cpu(name):
    """One of them in all the trials that the command runs: every setting of theirs has a contract."""
    result = CHECKS[name].run(CPU, 20 if name == "accuracy" else 8)
    assert result.name == name
    assert result.passed, result.detail


def test_default_trials_meet_every_option():
    settings = [Setting(seed, CPU) for seed in range(20)]
    assert {each.options["activation"] for each in settings} == set(ACTIVATIONS)
    assert {each.options["norm"] for each in settings} == {"layer_norm", "rms_norm"}
    for option in ("norm_first", "is_causal"):
        assert {each.options[option] for each in settings} == {True, False}
    assert {each.mask for each in settings} == {"", "bool", "float"}
    assert {each.separate for each in settings} == {True, False}
    assert len({(each.dtype, each.precision, each.kind) for each in settings}) == 20
    assert {each.shape for each in settings} > set(encoder_checks._CPU_SHAPES)


def test_trials_of_a_gpu_meet_every_shape():
    shapes = {Setting(seed, CUDA).shape for seed in range(20)}
    assert shapes > set(encoder_checks.ENCODER_SHAPES)
    assert all(shape.tokens <= encoder_checks.LONGEST for shape in shapes)


def test_a_trial_is_its_seed():
    one, other = (Setting(7, CPU) for _ in range(2))
    assert (one.shape, one.options, one.layouts) == (other.shape, other.options, other.layouts)
    assert compare_bits(one.forward(5)[0], other.forward(5)[0]).equal
    for left, right in zip(one.parameters().named(), other.parameters().named(), strict=True):
        assert left[0] == right[0]
        assert compare_bits(left[1], right[1]).equal


def test_a_row_carries_the_mask_of_its_sequence():
    each = next(s for s in (Setting(seed, CPU) for seed in range(20)) if s.mask == "float")
    rows = each.rows(5)
    x, mask = each.sequences(rows)
    assert mask.shape == x.shape[:2] == (5, each.shape.tokens)
    assert mask.isneginf().any()
    for one, other in zip((x, mask), each.sequences(rows.flip(0)), strict=True):
        assert compare_bits(one.flip(0), other).equal


def last_bit_follows(condition):
    """encoder_layer with a last bit that follows its input, as no contract allows; in its gradient as well."""

    def layer(x, params, **how):
        out = encoder_layer(x, params, **how)
        return Scaled.apply(out, 1 + 2 * torch.finfo(x.dtype).eps) if condition(x) else out

    return layer


class Scaled(torch.autograd.Function):
    """The tensor and its gradient times a number."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


@pytest.mark.parametrize("name", ["sequences", "dx"])
def test_checks_see_bits_that_follow_the_batch_size(name, monkeypatch):
    monkeypatch.setattr(encoder_checks, "encoder_layer", last_bit_follows(lambda x: len(x) % 2))
    result = CHECKS[name].run(CPU, 2)
    assert result.failures == 2
    assert result.differing


@pytest.mark.parametrize("name", ["sequences", "dx"])
def test_checks_see_bits_that_follow_the_neighbours(name, monkeypatch):
    monkeypatch.setattr(encoder_checks, "encoder_layer", last_bit_follows(lambda x: len(x) and x[-1, -1, -1] > 0))
    assert CHECKS[name].run(CPU, 2).failures == 2


@pytest.mark.parametrize("name", BIT_CHECKS)
def test_checks_see_bits_that_follow_time(name, monkeypatch):
    calls = []
    monkeypatch.setattr(encoder_checks, "encoder_layer", last_bit_follows(lambda x: calls.append(0) or len(calls) % 3))
    assert CHECKS[name].run(CPU, 2).failures == 2


def test_right_padding_sees_bits_that_follow_the_length(monkeypatch):
    monkeypatch.setattr(encoder_checks, "encoder_layer", last_bit_follows(lambda x: x.shape[1] == 128))
    assert CHECKS["right-padding"].run(CPU, 2).failures == 2


def test_right_padding_sees_keys_that_are_not_left_out(monkeypatch):
    def layer(x, params, *, key_padding_mask, **how):
        return encoder_layer(x, params, key_padding_mask=None, **how)

    monkeypatch.setattr(encoder_checks, "encoder_layer", layer)
    each = next(seed for seed in range(20) if not Setting(seed, CPU).options["is_causal"])
    assert CHECKS["right-padding"].run(CPU, each + 1).failures


def test_parameters_gradients_see_cuts_that_change_bits(monkeypatch):
    """torch sums the tokens of a call in an order of its own."""

    def weight_grad(grad, x, total, dtype, precision):
        partial = grad.float().flatten(0, -2).mT @ x.float().flatten(0, -2)
        return partial.to(dtype) if total is None else total.add_(partial)

    monkeypatch.setattr(op, "weight_grad", weight_grad)
    assert CHECKS["parameters' gradients"].run(CPU, 3).failures


def test_parameters_gradients_see_sequences_that_have_no_gradient(monkeypatch):
    """As if the last sequence's place in the sum were another for an odd number of them."""
    monkeypatch.setattr(encoder_checks, "encoder_layer", last_bit_follows(lambda x: x.shape[0] % 2))
    assert CHECKS["parameters' gradients"].run(CPU, 3).failures


def test_accuracy_sees_a_bad_result(monkeypatch):
    monkeypatch.setattr(encoder_checks, "encoder_layer", lambda *args, **how: encoder_layer(*args, **how) * 1.05)
    result = CHECKS["accuracy"].run(CPU, 3)
    assert result.failures == 3
    assert "result: " in result.detail


@pytest.mark.parametrize(
    "name", ["x", "in_proj_weight", "out_proj_bias", "linear1_weight", "linear2_bias", "norm1_weight", "norm2_bias"]
)
def test_accuracy_sees_a_wrong_gradient(name, monkeypatch):
    def layer(x, params, **how):
        def halved(tensor):
            return 0.5 * (tensor + tensor.detach())

        if name == "x":
            return encoder_layer(halved(x), params, **how)
        if getattr(params, name) is None:
            return encoder_layer(x, params, **how)
        given = getattr(params, name)
        wrong = tuple(map(halved, given)) if isinstance(given, tuple) else halved(given)
        return encoder_layer(x, params._replace(**{name: wrong}), **how)

    monkeypatch.setattr(encoder_checks, "encoder_layer", layer)
    result = CHECKS["accuracy"].run(CPU, 8)
    assert result.failures
    assert f"{name}: " in result.detail


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


def test_errors_are_allowed_by_the_worst_of_torchs():
    exact = torch.ones(100, dtype=torch.float64)
    ieee, tf32 = (exact.float() + error for error in (1e-6, 1e-3))
    torchs = [(4.0, ieee), (2.0, tf32)]
    error = encoder_checks.assert_accurate(exact.float() + 1.9e-3, torchs, exact, what="y")
    assert error == pytest.approx(1.9e-3, rel=1e-2)
    with pytest.raises(AssertionError, match=r"y: error of an element 2.10e-03, expected at most 2.00e-03"):
        encoder_checks.assert_accurate(exact.float() + 2.1e-3, torchs, exact, what="y")
    one_off = exact.float()
    one_off[3] += 1
    with pytest.raises(AssertionError, match=r"error of an element 1.00e\+00"):
        encoder_checks.assert_accurate(one_off, torchs, exact, what="y")
    with pytest.raises(AssertionError, match="nan"):
        encoder_checks.assert_accurate(torch.full((100,), torch.nan), torchs, exact, what="y")


# bench


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
    assert store.loads(store.dumps(row)) == row
    made = tables.tables([row], [encoder.FAMILY.view])
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


def test_what_is_compiled_ahead(monkeypatch):
    jobs = []
    monkeypatch.setattr(encoder, "run_ahead", lambda function, device, found: jobs.extend(found))
    cases = encoder.cases(CPU, True)
    encoder.ahead_of_cases(CUDA, cases)
    assert len(jobs) == len(cases)
    for job in jobs:
        encoder._compile("cpu", job)


def test_demo_is_a_layer():
    shown = encoder.demo(CPU)
    assert shown.ok
    assert (shown.bits.compared, shown.bits.isogemm) == (2 * 2 * 32 * 5 * 64, 0)  # the result and the gradient of x
    assert shown.accuracy.isogemm < 1e-5
    assert shown.isogemm_us > 0
