from __future__ import annotations

import pytest
import torch

from isogemm.encoder.parameters import ACTIVATIONS
from isogemm.gemm import op
from isogemm.verify import encoder as encoder_checks
from isogemm.verify import trials
from isogemm.verify.compare import compare_bits
from isogemm.verify.encoder import Setting

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CHECKS = {check.name: check for check in encoder_checks.CHECKS}
BIT_CHECKS = ["sequences", "dx", "right-padding"]

encoder_layer = encoder_checks.encoder_layer


@pytest.fixture(autouse=True)
def one_thread():
    """On small layers threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def test_errors_are_allowed_by_the_worst_of_torchs():
    exact = torch.ones(100, dtype=torch.float64)
    ieee, tf32 = (exact.float() + error for error in (1e-6, 1e-3))
    torchs = [(4.0, [ieee]), (2.0, [tf32])]

    def judged(found):
        return trials.assert_step_accurate([found], torchs, [exact], ["y"])

    error = judged(exact.float() + 1.9e-3)
    assert error == pytest.approx(1.9e-3, rel=1e-2)
    with pytest.raises(AssertionError, match=r"y: error of an element 2.10e-03, expected at most 2.00e-03"):
        judged(exact.float() + 2.1e-3)
    one_off = exact.float()
    one_off[3] += 1
    with pytest.raises(AssertionError, match=r"error of an element 1.00e\+00"):
        judged(one_off)
    with pytest.raises(AssertionError, match="nan"):
        judged(torch.full((100,), torch.nan))
