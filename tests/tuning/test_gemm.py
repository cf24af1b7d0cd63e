"""Points are what calls ask for, candidates are legal, and a config with other bits does not count."""

from dataclasses import replace

import pytest
import torch

from isogemm.epilogues.operands import PLACES, TENSORS, Epilogue, Operands
from isogemm.gemm import configs, fused, op
from isogemm.gemm.configs import Config
from isogemm.tuning import gemm
from isogemm.tuning.gemm import ARITHMETIC, Call, Point

T, N, K = 48, 64, 32


def _asked(kind, number):
    """The problem of a call of this kind, as the library describes it."""
    pytest.importorskip("triton")
    dtype, precision = ARITHMETIC[number]
    dtype = getattr(torch, dtype)
    x, grad, weight = (torch.zeros(shape, dtype=dtype) for shape in ((T, K), (T, N), (N, K)))
    if kind == "dx":
        return op.problem_of(grad, weight, precision=precision)
    if kind == "dw":
        return op.problem_of(grad.mT, x, precision=precision, chunk=configs.token_chunk(N, K, str(dtype)))
    if kind == "main_grad":
        chunk = configs.token_chunk(N, K, str(dtype))
        return op.problem_of(grad.mT, x, precision=precision, chunk=chunk, total=torch.zeros(N, K))
    if kind == "linear":
        return op.problem_of(x, weight.mT, precision=precision)
    gated = kind.startswith("gated")
    operands = Operands(activation="swiglu" if gated else "gelu")
    if kind in ("activated", "gated"):
        return fused.problem_of(x, weight.mT, weight.mT if gated else None, operands, precision=precision)
    hidden = op.problem_of(grad, weight, precision=precision)  # of the layer before, as fused.hidden_grad has it
    return replace(hidden, epilogue=Epilogue(activation=operands.activation, gradient="pre"))


@pytest.mark.parametrize("number", ARITHMETIC)
@pytest.mark.parametrize("kind", gemm.KINDS)
def test_a_point_s_key_is_that_of_the_call(kind, number):
    asked = _asked(kind, number)
    sizes = (asked.m, asked.n) if kind in ("dw", "main_grad") else (asked.n, asked.k)
    point = Point(kind, number, T, N, K)
    assert point.key == (asked.number, asked.kind, *sizes)
    problem = point.problem
    assert (problem.m, problem.n, problem.k) == (asked.m, asked.n, asked.k)
    assert (problem.a_strides, problem.b_strides) == (asked.a_strides, asked.b_strides)
    assert (problem.out_dtype, problem.accumulate) == (asked.out_dtype, asked.accumulate)
    assert (asked.kind == "tn accumulated") == (kind == "main_grad")


@pytest.mark.parametrize("number", ARITHMETIC)
@pytest.mark.parametrize("kind", gemm.KINDS)
@pytest.mark.parametrize(("n", "k"), [(1536, 8960), (4096, 1024)])
def test_a_point_s_chunk_is_that_of_the_call(n, k, kind, number):
    """Also of a weight whose k is cut in two."""
    pytest.importorskip("triton")
    dtype, precision = ARITHMETIC[number]
    x, grad, weight = (
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape in ((T, k), (T, n), (n, k))
    )
    chunk = Point(kind, number, T, n, k).problem.chunk
    if kind in ("dw", "main_grad"):
        assert chunk == configs.token_chunk(n, k, dtype)
        return
    asked = (x, weight.mT) if kind in gemm.FORWARD else (grad, weight)
    assert chunk == op.problem_of(*asked, precision=precision, chunk=None).chunk
    assert bool(chunk) == (kind in gemm.FORWARD and k > 2 * n and number in ("half", "tf32x3"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("number", ARITHMETIC)
@pytest.mark.parametrize("kind", gemm.KINDS)
def test_there_are_legal_candidates_everywhere(kind, number, arch):
    for tokens in (1, 16, 100, 4096):
        point = Point(kind, number, tokens, 4096, 1024, arch)
        made = gemm.candidates(point)
        assert len(set(map(str, made))) == len(made) > 1
        assert [configs.illegal(point.problem, config) for config in made] == [""] * len(made)


@pytest.mark.parametrize(("arch", "early"), [("sm_80", False), ("sm_89", False), ("sm_90", True), ("gfx942", False)])
def test_launches_begin_early_only_where_the_gpu_can(arch, early):
    """Elsewhere the instructions do not assemble: all such candidates would fail."""
    made = [gemm.candidates(Point("linear", "half", tokens, 4096, 1024, arch)) for tokens in (1, 64, 4096)]
    assert all(any(config.pdl for config in each) == early for each in made)


def test_ways_to_fill_the_gpu_are_tried():
    few = gemm.candidates(Point("dw", "half", 16384, 512, 512))
    assert {config.parallel_chunks for config in few} == {"", "partials", "gathered", "queued"}
    many = gemm.candidates(Point("dw", "half", 16384, 8192, 8192))
    assert {config.parallel_chunks for config in many if not config.swapped} <= {"", "partials"}
    assert {config.balanced for config in gemm.candidates(Point("linear", "half", 4096, 4096, 1024))} == {True, False}


@pytest.mark.parametrize(
    ("number", "arch", "tokens", "tried"),
    [
        ("half", "sm_90", 128, True), ("half", "sm_90", 4096, True), ("half", "sm_90", 127, False),
        ("half", "sm_90", 1, False), ("half", "sm_80", 4096, False), ("half", "sm_100", 4096, False),
        ("half", "gfx942", 4096, False), *((number, "sm_90", 4096, False) for number in ("tf32", "tf32x3", "ieee")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["linear", "dx", *gemm.EPILOGUES])
def test_roles_are_tried_for_16_bits_on_hopper_from_128_rows_on(kind, number, arch, tokens, tried):
    made = gemm.candidates(Point(kind, number, tokens, 4096, 1024, arch))
    assert any(config.kernel == "roles" for config in made) == tried


@pytest.mark.parametrize(("n", "tried"), [(128, True), (120, False)])
def test_the_rows_of_a_weight_gradient_are_the_weight_s(n, tried):
    made = gemm.candidates(Point("dw", "half", 4096, n, 1024))
    assert any(config.kernel == "roles" for config in made) == tried


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", [kind for kind in gemm.KINDS if kind != "main_grad"])
def test_roles_have_one_wave_of_programs_or_are_persistent(kind, half):
    ways, widths = set(), set()
    for tokens, n, k in ((256, 1280, 2048), (512, 1280, 5120), (4096, 4096, 4096), (16384, 512, 1024)):
        point = Point(kind, "half", tokens, n, k, half=half)
        problem = point.problem
        for config in gemm.candidates(point):
            if config.kernel != "roles":
                continue
            assert config.parallel_chunks in ("", "gathered")
            assert config.pdl == (not config.persistent)
            assert configs.accumulation(problem, config) != "scratch"
            tiles = configs.tile_count(replace(problem, chunk=0), config)
            most = 2 * problem.sm_count if config.parallel_chunks else problem.sm_count
            assert tiles > problem.sm_count if config.persistent else tiles <= most
            ways.add("persistent" if config.persistent else config.parallel_chunks)
            widths.add(config.columns)
    assert ways >= {"persistent", ""}
    assert 128 in widths


def test_roles_with_a_rest_gather_chunks():
    few = gemm.candidates(Point("linear", "half", 512, 1280, 5120))
    roles = [config for config in few if config.kernel == "roles" and config.parallel_chunks == "gathered"]
    assert {config.rest_n for config in roles} == {0, 16, 32, 64}


def test_kernels_are_listed_once():
    pytest.importorskip("triton")
    points = [Point("linear", "half", tokens, n, 4096) for tokens in (1024, 2048) for n in (4096, 8192)]
    chosen = {point: gemm.candidates(point) for point in points}
    found = gemm.jobs(chosen)
    assert len(found) < sum(map(len, chosen.values()))
    of_first = {config for problem, config in gemm.jobs({points[0]: chosen[points[0]]}).values()}
    assert gemm.canonical(points[0].problem) in of_first
    assert gemm.jobs({point: [] for point in points}).keys() <= found.keys()


class _Plan:
    """Writes what it was made with; an exception is raised."""

    def __init__(self, *results):
        self.results = results

    def run(self, inputs, out):
        second = inputs[3 + PLACES["second"]]
        for each, result in zip((out, second), self.results, strict=False):
            if isinstance(result, Exception):
                raise result
            each[: len(result)] = result


def test_a_config_counts_only_with_the_canonical_bits(monkeypatch):
    point = Point("gated gradient", "half", 4, 8, 16)
    right, second = torch.randn(4, 16), torch.randn(4, 16)
    right[0, 0] = 0.0
    off = right.clone()
    off.view(torch.int32)[3, 5] ^= 1
    negative_zero = right.clone()
    negative_zero[0, 0] = -0.0
    made = {
        "same": _Plan(right, second),
        "a bit": _Plan(off, second),
        "a zero's sign": _Plan(negative_zero, second),
        "unwritten": _Plan(right[:3], second),
        "second": _Plan(right, second + 1),
        "second unwritten": _Plan(right),
        "launch": _Plan(RuntimeError("no resources")),
        "compile": ValueError("no tile"),
    }
    chosen = [Config(16 << index, 16, 32, 4, 1) for index in range(len(made))]
    plans = dict(zip(chosen, made.values(), strict=True)) | {gemm.canonical(point.problem): _Plan(right, second)}

    def plan(problem, config):
        if isinstance(plans[config], Exception):
            raise plans[config]
        return plans[config]

    monkeypatch.setattr(gemm, "plan", plan)
    read = [None] * len(TENSORS)
    read[PLACES["second"]] = torch.empty(4, 16)
    call = Call(torch.empty(4, 8), torch.empty(8, 16), None, read, torch.empty(4, 16), None)
    found, differing = gemm._checked(point.problem, call, chosen)
    names = dict(zip(map(str, chosen), made, strict=True))
    assert [names[each] for each in found] == ["same"]
    assert [names[each.partition(":")[0]] for each in differing] == [name for name in made if name != "same"]
    assert [each.partition(": ")[2] for each in differing[-3:]] == ["other bits", "RuntimeError", "ValueError"]


def test_every_config_of_a_main_grad_adds_to_the_same_total(monkeypatch):
    """What one config has added to is not what the next one adds to."""
    point = Point("main_grad", "half", 4, 8, 16)
    start, product = torch.randn(8, 16), torch.randn(8, 16)

    class Adding:
        def __init__(self, *summands):
            self.summands = summands

        def run(self, inputs, out):
            for each in self.summands:
                out += each

    made = {
        "once": Adding(product),
        "twice": Adding(product, product),
        "not at all": Adding(),
        "again": Adding(product),
    }
    chosen = [Config(16 << index, 16, 32, 4, 1) for index in range(len(made))]
    plans = dict(zip(chosen, made.values(), strict=True)) | {gemm.canonical(point.problem): Adding(product)}
    monkeypatch.setattr(gemm, "plan", lambda problem, config: plans[config])
    out = torch.full((8, 16), torch.nan)
    call = Call(torch.empty(4, 8).mT, torch.empty(4, 16), None, [None] * len(TENSORS), out, start)
    found, differing = gemm._checked(point.problem, call, chosen)
    names = dict(zip(map(str, chosen), made, strict=True))
    assert [names[each] for each in found] == ["once", "again"]
    assert [names[each.partition(":")[0]] for each in differing] == ["twice", "not at all"]
    call.reset()
    assert torch.equal(out, start)


def test_results_are_poisoned_where_nothing_is_added_to():
    read = [None] * len(TENSORS)
    read[PLACES["second"]] = torch.zeros(4, 16)
    call = Call(torch.empty(4, 8), torch.empty(8, 16), None, read, torch.zeros(4, 16), None)
    call.reset()
    assert all(bool(each.isnan().all()) for each in call.results)
    assert len(call.results) == 2
