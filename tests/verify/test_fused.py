from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from isogemm.bench import timer
from isogemm.core import device as devices
from isogemm.epilogues import ACTIVATIONS, random
from isogemm.gemm import api, configs, op, selection
from isogemm.gemm import fused as served
from isogemm.verify import fused as fused_checks
from isogemm.verify.compare import compare_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CHECKS = {check.name: check for check in fused_checks.CHECKS}


@pytest.fixture(autouse=True)
def light(monkeypatch):
    """On the CPU rotation only takes time, and threads wait for each other."""
    monkeypatch.setattr(timer, "rotations", lambda size, device, most: 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_on_the_cpu(name):
    result = CHECKS[name].run(CPU, 13)
    assert result.name == name
    assert result.passed or result.skipped == "there are no tiles to choose from on the CPU", result.detail


def test_an_activation_that_follows_its_place_fails(monkeypatch):
    """Whatever else the trials draw: every one is tried in float32."""
    for name in ("gelu", "sigmoid", "geglu"):
        entry = ACTIVATIONS[name]

        def misplaced(z, torchs=entry.torch):
            return torchs(z) * (1 + 1e-3 * (torch.arange(len(z)) > 40)[:, None])

        with monkeypatch.context() as patched:
            patched.setitem(ACTIVATIONS, name, replace(entry, torch=misplaced))
            assert CHECKS["activations"].run(CPU, 1).failures == 1


def test_activations_are_not_tried_alone_on_a_gpu(monkeypatch):
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch="sm_90"))
    assert "the other checks run" in CHECKS["activations"].run(CUDA, 1).skipped


def test_default_trials_meet_every_activation_with_and_without_the_rest():
    settings = [fused_checks.Setting(seed, CPU) for seed in range(20)]
    assert {each.activation for each in settings} == {*ACTIVATIONS, ""}
    plain = [each for each in settings if not each.gated]
    for met in ([each.biased for each in settings], [each.scaled for each in plain], [bool(e.beta) for e in plain]):
        assert set(met) == {True, False}
    for met in ([bool(e.widths["residual"]) for e in settings], [e.by_row for e in plain if e.biased]):
        assert set(met) == {True, False}
    for name in ("alpha", "beta"):
        assert {type(getattr(each, name)) for each in plain} == {float, torch.Tensor}
    assert sum(each.registered for each in settings) == 1


def test_a_row_carries_what_belongs_to_it():
    each = next(s for s in (fused_checks.Setting(seed, CPU) for seed in range(20)) if s.beta and s.scaled)
    rows = each.packed(torch.randn(5, each.k).to(each.dtype))
    tokens = each.tokens_of(rows)
    assert (tokens.c.shape, tokens.row_scale.shape) == ((5, each.n), (5,))
    for one, other in zip(tokens, each.tokens_of(rows.flip(0)), strict=True):
        assert one is None or compare_bits(one.flip(0), other).equal


def last_bit_follows(condition):
    """linear with a last bit that follows its input, as no contract allows."""

    def linear(x, *args, **how):
        out = api.linear(x, *args, **how)
        return torch.nextafter(out, torch.full_like(out, torch.inf)) if condition(x) else out

    return linear


def test_rows_sees_bits_that_follow_the_batch_size(monkeypatch):
    monkeypatch.setattr(fused_checks, "linear", last_bit_follows(lambda x: len(x) % 2))
    assert CHECKS["rows"].run(CPU, 2).failures == 2


def test_rows_sees_a_residual_of_another_row(monkeypatch):
    def linear(x, *args, residual=None, **how):
        return api.linear(x, *args, residual=None if residual is None else residual.roll(1, 0), **how)

    monkeypatch.setattr(fused_checks, "linear", linear)
    settings = (fused_checks.Setting(seed, CPU) for seed in range(8))
    first = next(each.seed for each in settings if each.widths["residual"] and not each.by_row)
    assert CHECKS["rows"].run(CPU, first + 1).failures == 1


def test_dx_sees_bits_that_follow_the_batch_size(monkeypatch):
    monkeypatch.setattr(op, "product", lambda a, b, *how: (a.double() @ b.double()).to(a.dtype) + len(a))
    assert CHECKS["dX"].run(CPU, 1).failures == 1


def test_weight_gradients_see_cuts_that_change_bits(monkeypatch):
    def weight_grad(grad, x, total, dtype, precision):
        partial = grad.float().mT @ x.float()
        return partial.to(dtype) if total is None else total.add_(partial)

    monkeypatch.setattr(op, "weight_grad", weight_grad)
    assert CHECKS["dW, db"].run(CPU, 3).failures


def test_dropout_sees_another_mask(monkeypatch):
    def kept(seed, m, n, p):
        return random.kept(seed, m + 1, n, p)[1:]

    monkeypatch.setattr(fused_checks, "random", SimpleNamespace(kept=kept, scale=random.scale))
    assert CHECKS["dropout"].run(CPU, 3).failures == 3


def test_eager_rounding_sees_one_rounding(monkeypatch):
    def linear(x, *args, rounding="once", **how):
        return api.linear(x, *args, **how)

    monkeypatch.setattr(fused_checks, "linear", linear)
    assert CHECKS["eager rounding"].run(CPU, 3).failures


def test_accuracy_sees_a_bad_epilogue(monkeypatch):
    def linear(x, *args, **how):
        return api.linear(x, *args, **how) * 1.01

    monkeypatch.setattr(fused_checks, "linear", linear)
    result = CHECKS["accuracy"].run(CPU, 3)
    assert result.failures == 3
    assert "relu: " in result.detail


class Halved(torch.autograd.Function):
    """The tensor, and half of its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


@pytest.mark.parametrize("place", ["x", "weight", "bias", "weight_up", "bias_up"])
@pytest.mark.parametrize("layers", ["linear", "mlp"])
def test_accuracy_sees_a_wrong_gradient(layers, place, monkeypatch):
    right = getattr(api, layers)

    def linear(x, weight, bias=None, **how):
        operands = {"x": x, "weight": weight, "bias": bias, **how}
        if operands.get(place) is not None:
            operands[place] = Halved.apply(operands[place])
        return right(**operands)

    def mlp(x, weight, weight_down, bias=None, **how):
        return linear(x, weight, bias, weight_down=weight_down, **how)

    monkeypatch.setattr(fused_checks, layers, {"linear": linear, "mlp": mlp}[layers])
    result = CHECKS["accuracy"].run(CPU, 14)
    assert result.failures
    assert f", {place}: error " in result.detail or f", mlp's {place}: error " in result.detail


def test_accuracy_sees_wrong_gradients_of_a_bias_by_rows(monkeypatch):
    def matmul_fused(a, b, *, bias, **how):
        return api.matmul_fused(Halved.apply(a), b, bias=bias, **how)

    monkeypatch.setattr(fused_checks, "matmul_fused", matmul_fused)
    assert ", x: error " in CHECKS["accuracy"].run(CPU, 14).detail


def test_accuracy_sees_a_wrong_mlp(monkeypatch):
    monkeypatch.setattr(fused_checks, "mlp", lambda *args, **how: api.mlp(*args, **how) / 2)
    assert "relu, mlp's result: error " in CHECKS["accuracy"].run(CPU, 1).detail


@pytest.mark.parametrize("scale", [0.5, 1 + 2**-6])
def test_dropout_sees_another_scale(scale, monkeypatch):
    def linear(*args, dropout_p=0.0, **how):
        return api.linear(*args, dropout_p=dropout_p, **how) * (scale if dropout_p else 1)

    monkeypatch.setattr(fused_checks, "linear", linear)
    assert CHECKS["dropout"].run(CPU, 3).failures == 3


@pytest.mark.parametrize("wrong", [None, "b"])
def test_any_tile_compares_configurations(wrong, monkeypatch):
    calls = []

    def gemm(x, b, b_up, fusion, *, out_dtype, precision, config):
        calls.append(config)
        out = served.fused(served.Call(x, b, b_up, fusion, by_rows=False, out_dtype=out_dtype, precision=precision))[0]
        return -out if config == wrong else out

    monkeypatch.setattr(served, "problem_of", lambda *operands, out_dtype, precision: "problem")
    monkeypatch.setattr(served, "gemm", gemm)
    monkeypatch.setattr(configs, "canonical", lambda problem: "canonical")
    monkeypatch.setattr(selection, "candidates", lambda problem: ["canonical", "a", "b"])
    for seed in range(14):
        calls.clear()
        same = [diff.equal for diff in fused_checks._any_tile(fused_checks.Setting(seed, CPU))]
        assert sorted(same) == [wrong is None, True]
        assert calls[0] == "canonical"
        assert sorted(calls) == ["a", "b", "canonical"]
    monkeypatch.setattr(selection, "candidates", lambda problem: list("acdefghij"))
    assert len(list(fused_checks._any_tile(fused_checks.Setting(0, CPU)))) == 6
