from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from figures import tables
from isogemm.bench import runner, store, timer
from isogemm.bench.cases import fused
from isogemm.verify import fused as fused_checks
from isogemm.verify.compare import compare_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SMALL = (33, 48, 40)


@pytest.fixture(autouse=True)
def light(monkeypatch):
    """On the CPU rotation only takes time, and threads wait for each other."""
    monkeypatch.setattr(timer, "rotations", lambda size, device, most: 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    assert store.parse(json.loads(store.dumps(row))) == row


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
    assert "| 4 x relu(x @ b + bias), fp32 ieee |" in tables.tables(rows, [fused.VIEW])["fused-deferred"]


def test_quick_cases_run_on_a_cpu():
    run = runner.Runner(CPU, repeats=1)
    rows = list(run.rows(fused.cases(CPU, True)))
    assert run.failures == []
    assert {row.op for row in rows} == {"bias relu", "bias gelu_tanh", "swiglu", *fused.BLOCKS, "autofuse"}
    made = tables.tables(rows, [fused.VIEW])
    assert "over three ops" in made["fused-headline"]
    assert "over three ops" in made["fused-speedup"]


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
    with pytest.raises(AssertionError, match="gradient 2: error of an element"):
        fused._block_errors({"isogemm": detached, "torch": block.torch}, operands, grad)


def test_half_an_ulp_of_the_norm_is_allowed_beside_an_exact_result():
    """Where torch is exact by chance, twice its error is nothing."""
    x = torch.ones(64, 32)

    def off(every):
        ulps = torch.zeros(x.numel())
        ulps[::every] = torch.finfo(x.dtype).eps
        return lambda given: given * (1 + ulps.view(x.shape))

    errors = fused._block_errors({"isogemm": off(16), "torch": torch.clone}, [x], torch.ones_like(x))
    assert errors["torch"] == 0 < errors["isogemm"] < torch.finfo(x.dtype).eps / 2
    with pytest.raises(AssertionError, match="the result: norm of the errors"):
        fused._block_errors({"isogemm": off(1), "torch": torch.clone}, [x], torch.ones_like(x))


def test_one_wrong_element_is_not_timed():
    """Too small for the norm to show it."""
    block = fused.BLOCKS["mlp gelu"]
    operands = [torch.randn(shape, dtype=torch.bfloat16) for shape in block.shapes(512, 48, 256)]

    def patched(*given):
        out = block.torch(*given)
        return torch.where(
            torch.arange(out.numel()).view(out.shape) == 1000, out + 0.05 * out.detach().abs().max(), out
        )

    with pytest.raises(AssertionError, match="the result: error of an element"):
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


def test_what_is_compiled_in_processes(monkeypatch):
    jobs = []
    monkeypatch.setattr(fused, "run_in_processes", lambda function, device, found: jobs.extend(found))
    cases = fused.cases(CPU, True)
    fused.compile_cases(CUDA, cases)
    assert len(jobs) == len(cases)
    for job in jobs:
        fused._compile("cpu", job)


def test_demo_is_fused_calls():
    shown = fused.demo(CPU)
    assert shown.ok
    assert (shown.bits.compared, shown.bits.isogemm) == (2 * 64 * 1024, 0)
    assert shown.accuracy.isogemm < 1e-6
    assert shown.isogemm_us > 0
