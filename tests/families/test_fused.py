from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from isogemm.bench import runner, store, tables, timer
from isogemm.core import device as devices
from isogemm.epilogues import ACTIVATIONS, random
from isogemm.families import fused, fused_checks
from isogemm.gemm import configs, op
from isogemm.gemm import fused as served
from isogemm.testing import compare_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CHECKS = {check.name: check for check in fused.FAMILY.checks}
SMALL = (33, 48, 40)


@pytest.fixture(autouse=True)
def light(monkeypatch):
    """On the CPU rotation only takes time, and threads wait for each other."""
    monkeypatch.setattr(timer, "rotations", lambda size, device, most: 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# doctor


def test_usability(monkeypatch):
    (on_cpu,) = fused.usability(CPU)
    assert (on_cpu.usable, on_cpu.kernel) == (True, "fused/cpu")
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch="sm_80"))
    found = fused.usability(CUDA)
    assert [(each.kernel, each.usable) for each in found] == [("fused/tma", False), ("fused/pointer", True)]


# verify


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
    settings = [fused_checks._Setting(seed, CPU) for seed in range(20)]
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
    each = next(s for s in (fused_checks._Setting(seed, CPU) for seed in range(20)) if s.beta and s.scaled)
    rows = each.packed(torch.randn(5, each.k).to(each.dtype))
    tokens = each.tokens_of(rows)
    assert (tokens.c.shape, tokens.row_scale.shape) == ((5, each.n), (5,))
    for one, other in zip(tokens, each.tokens_of(rows.flip(0)), strict=True):
        assert one is None or compare_bits(one.flip(0), other).equal


def last_bit_follows(condition):
    """linear with a last bit that follows its input, as no contract allows."""

    def linear(x, *args, **how):
        out = fused.linear(x, *args, **how)
        return torch.nextafter(out, torch.full_like(out, torch.inf)) if condition(x) else out

    return linear


def test_rows_sees_bits_that_follow_the_batch_size(monkeypatch):
    monkeypatch.setattr(fused_checks, "linear", last_bit_follows(lambda x: len(x) % 2))
    assert CHECKS["rows"].run(CPU, 2).failures == 2


def test_rows_sees_a_residual_of_another_row(monkeypatch):
    def linear(x, *args, residual=None, **how):
        return fused.linear(x, *args, residual=None if residual is None else residual.roll(1, 0), **how)

    monkeypatch.setattr(fused_checks, "linear", linear)
    settings = (fused_checks._Setting(seed, CPU) for seed in range(8))
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
        return fused.linear(x, *args, **how)

    monkeypatch.setattr(fused_checks, "linear", linear)
    assert CHECKS["eager rounding"].run(CPU, 3).failures


def test_accuracy_sees_a_bad_epilogue(monkeypatch):
    def linear(x, *args, **how):
        return fused.linear(x, *args, **how) * 1.01

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
    right = getattr(fused, layers)

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
        return fused.matmul_fused(Halved.apply(a), b, bias=bias, **how)

    monkeypatch.setattr(fused_checks, "matmul_fused", matmul_fused)
    assert ", x: error " in CHECKS["accuracy"].run(CPU, 14).detail


def test_accuracy_sees_a_wrong_mlp(monkeypatch):
    monkeypatch.setattr(fused_checks, "mlp", lambda *args, **how: fused.mlp(*args, **how) / 2)
    assert "relu, mlp's result: error " in CHECKS["accuracy"].run(CPU, 1).detail


@pytest.mark.parametrize("scale", [0.5, 1 + 2**-6])
def test_dropout_sees_another_scale(scale, monkeypatch):
    def linear(*args, dropout_p=0.0, **how):
        return fused.linear(*args, dropout_p=dropout_p, **how) * (scale if dropout_p else 1)

    monkeypatch.setattr(fused_checks, "linear", linear)
    assert CHECKS["dropout"].run(CPU, 3).failures == 3


@pytest.mark.parametrize("wrong", [None, "b"])
def test_any_tile_compares_configurations(wrong, monkeypatch):
    calls = []

    def gemm(x, b, b_up, fusion, *, out_dtype, precision, config):
        calls.append(config)
        out = served.fused(x, b, b_up, fusion, out_dtype, precision, "", by_rows=False)[0]
        return -out if config == wrong else out

    monkeypatch.setattr(served, "describe", lambda *operands, out_dtype, precision: "problem")
    monkeypatch.setattr(served, "gemm", gemm)
    monkeypatch.setattr(configs, "canonical", lambda problem: "canonical")
    monkeypatch.setattr(configs, "candidates", lambda problem: ["canonical", "a", "b"])
    for seed in range(14):
        calls.clear()
        same = [diff.equal for diff in fused_checks._any_tile(fused_checks._Setting(seed, CPU))]
        assert sorted(same) == [wrong is None, True]
        assert calls[0] == "canonical"
        assert sorted(calls) == ["a", "b", "canonical"]
    monkeypatch.setattr(configs, "candidates", lambda problem: list("acdefghij"))
    assert len(list(fused_checks._any_tile(fused_checks._Setting(0, CPU)))) == 6


# bench


def test_the_grid_on_a_gpu():
    cases = fused.cases(CUDA, False)
    assert len({case.label for case in cases}) == len(cases)
    counts = {name: sum(case.op == name for case in cases) for name in dict.fromkeys(case.op for case in cases)}
    assert counts == {
        "bias relu": 24, "bias gelu_tanh": 24, "swiglu": 4, "mlp gelu": 1, "mlp swiglu": 1, "autofuse": 1,
        "bias gelu": 8, "compiled gelu_tanh": 8, "compiled relu": 8,
    }  # fmt: skip
    last_compiled = max(index for index, case in enumerate(cases) if case.op.startswith("compiled"))
    assert last_compiled < min(index for index, case in enumerate(cases) if case.params.get("precision") == "tf32")
    block = next(case for case in cases if case.op == "mlp swiglu")
    assert block.flops == 3 * 3 * 2 * 4096 * 4096 * 14336


@pytest.mark.parametrize("name", ["bias relu", "bias gelu_tanh", "bias gelu", "swiglu"])
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("bfloat16", "")])
def test_a_case_is_checked_and_timed(name, dtype, precision):
    run = runner.Runner(CPU, repeats=1)
    (row,) = run.rows([fused._case(name, SMALL, dtype, precision)])
    assert run.failures == []
    assert row.flops == (4 if name == "swiglu" else 2) * 33 * 48 * 40
    peers = {"bias relu": {"eager", "three ops"}, "swiglu": set()}.get(name, {"three ops"})
    assert set(row.times_us) == set(row.error) == {"isogemm", "torch"} | peers
    assert row.info["path"] == "cpu"
    assert store.loads(store.dumps(row)) == row


def test_torch_is_its_own_fused_call_where_it_computes_the_same():
    calls = {
        (name, on_gpu): fused.operation(f"bias {name}", on_gpu=on_gpu).torch_call
        for name in ("relu", "gelu_tanh", "gelu")
        for on_gpu in (True, False)
    }
    fused_calls = {key for key, call in calls.items() if call == "_addmm_activation"}
    assert fused_calls == {("relu", True), ("relu", False), ("gelu_tanh", True)}


def test_compute_bound_shapes_are_measured_against_the_plain_product(monkeypatch):
    bound = [2 * m * n * k / (m * k + n * k + n + m * n) >= fused.COMPUTE_BOUND for m, n, k in fused.SHAPES]
    assert bound == [True, True, False, True, False, True, False, False]
    monkeypatch.setattr(fused, "COMPUTE_BOUND", 0)
    run = fused._case("bias relu", SMALL, "bfloat16").build(CPU)
    assert run.check()["plain"] > 0
    assert compare_bits(run.variants["plain"][0](), run.variants["plain"][0]()).equal


@pytest.mark.parametrize("name", fused.BLOCKS)
def test_a_block_is_trained(name):
    run = runner.Runner(CPU, repeats=1)
    (row,) = run.rows([fused._block_case(name, SMALL, "bfloat16")])
    assert run.failures == []
    assert set(row.times_us) == set(row.error) == {"isogemm", "torch"}
    assert 0 < row.error["isogemm"] < 2**-7


def test_autofuse_is_measured_beside_plain_code_and_the_calls_it_becomes():
    run = runner.Runner(CPU, repeats=1)
    rows = list(run.rows([fused._autofuse_case("float32", "ieee")]))
    assert run.failures == []
    assert set(rows[0].times_us) == {"isogemm", "torch", "fused calls"}
    assert "| 4 x relu(x @ b + bias), fp32 ieee |" in tables.tables(rows, [fused.FAMILY.view])["fused-deferred"]


def test_quick_cases_run_on_a_cpu():
    run = runner.Runner(CPU, repeats=1)
    rows = list(run.rows(fused.cases(CPU, True)))
    assert run.failures == []
    assert {row.op for row in rows} == {"bias relu", "bias gelu_tanh", "swiglu", *fused.BLOCKS, "autofuse"}
    made = tables.tables(rows, [fused.FAMILY.view])
    document = "<!-- figures:fused-headline -->\n<!-- /figures -->\n<!-- figures:fused-speedup -->\n<!-- /figures -->\n"
    assert "over three ops" in tables.rendered(document, made)


def test_cases_of_a_cpu_are_its_own():
    assert max(case.flops for case in fused.cases(CPU, False)) < 1e10


def test_a_wrong_result_is_not_timed():
    x, weight, bias = torch.randn(200, 30), torch.randn(2000, 30), torch.randn(2000)
    layer = fused_checks.Layer(weight, bias, activation="relu")
    right = torch.relu(F.linear(x, weight, bias))
    assert fused._errors({"isogemm": lambda: right, "torch": lambda: right}, layer, x, "ieee")["isogemm"] < 1e-6
    for name in ("isogemm", "eager"):
        with pytest.raises(AssertionError, match=rf"{name}: .* exceed"):
            fused._errors({name: lambda: F.linear(x, weight, bias)}, layer, x, "ieee")
    unwritten = right.clone()
    unwritten[150, 1500] = torch.nan
    with pytest.raises(AssertionError, match="isogemm: NaN"):
        fused._errors({"isogemm": lambda: unwritten}, layer, x, "ieee")


def test_a_wrong_gradient_is_not_timed():
    block = fused.BLOCKS["mlp gelu"]
    operands = [torch.randn(shape).requires_grad_() for shape in block.shapes(*SMALL)]

    def detached(x, weight, bias, *down):
        return block.torch(x, weight, bias.detach() + 0.5 * (bias - bias.detach()), *down)

    grad = torch.randn(SMALL[0], SMALL[2])
    with pytest.raises(AssertionError, match="gradient 2: error 5"):
        fused._block_errors({"isogemm": detached, "torch": block.torch}, operands, grad)


def test_one_wrong_element_is_not_timed():
    """Too small for the norm to show it."""
    block = fused.BLOCKS["mlp gelu"]
    operands = [torch.randn(shape, dtype=torch.bfloat16) for shape in block.shapes(512, 48, 256)]

    def patched(*given):
        out = block.torch(*given)
        return torch.where(
            torch.arange(out.numel()).view(out.shape) == 1000, out + 0.05 * out.detach().abs().max(), out
        )

    with pytest.raises(AssertionError, match="the result, an element: error"):
        fused._block_errors(
            {"isogemm": patched, "torch": block.torch}, operands, torch.randn(512, 256, dtype=torch.bfloat16)
        )


def test_a_tuned_compilation_is_a_case_of_its_own(monkeypatch):
    modes = []

    def compiled(function, *, mode, dynamic, fullgraph):
        modes.append(mode)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    run = runner.Runner(CPU, repeats=1)
    (row,) = run.rows([fused._case("compiled relu", SMALL, "bfloat16")])
    assert run.failures == []
    assert set(row.times_us) == set(row.error) == {"isogemm", "torch", "compiled"}
    assert modes == [row.info["compiled mode"]] == [fused.TUNED]


def test_what_is_compiled_ahead(monkeypatch):
    jobs = []
    monkeypatch.setattr(fused, "run_ahead", lambda function, device, found: jobs.extend(found))
    cases = fused.cases(CPU, True)
    fused.ahead_of_cases(CUDA, cases)
    assert len(jobs) == len(cases)
    for job in jobs:
        fused._compile("cpu", job)


def test_demo_is_fused_calls():
    shown = fused.demo(CPU)
    assert shown.ok
    assert (shown.bits.compared, shown.bits.isogemm) == (2 * 64 * 1024, 0)
    assert shown.accuracy.isogemm < 1e-6
    assert shown.isogemm_us > 0
