"""The kernel whose warps have roles has the canonical config's bits, whatever runs before, beside or after it."""

import functools
from dataclasses import replace

import pytest
import torch
from role_tiles import ALTERNATING, BALANCED, FEW, GATHERED, GATHERING, NARROW, ONCE, REST, ROLES, TILES, UNEVEN, WIDE

from isogemm.gemm import configs, op
from isogemm.gemm.plan import gemm_plan
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data, make_operands, with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"
ROWS = (1, 63, 64, 65, 127, 128, 129, 300, 1000)
SIZES = ((8, 136), (40, 200), (72, 264), (1000, 520))  # K, N: of one kernel; no tile has such columns, or block such k


@functools.lru_cache(maxsize=4)
def _operands(m, k, n, kind="normal", dtype=torch.bfloat16):
    """a [m, k] and b [k, n]."""
    return make_operands(kind, (m, k), (k, n), seed=3, dtype=dtype, device=DEVICE)


@pytest.fixture(autouse=True)
def free_memory():
    yield
    _operands.cache_clear()


def _gemm(a, b, config, **how):
    """The fp32 sums, in memory that was NaN, and with scratch memory of NaN."""
    with poisoned_allocations():
        return op.gemm(a, b, config=config, **{"out_dtype": torch.float32} | how)


def _canonical(a, b, **how):
    problem = op.problem_of(a, b, **{"out_dtype": torch.float32} | how)
    return replace(configs.canonical(problem), persistent=problem.chunks > 1)


def _served(a, b, config, **how):
    """The config with as many stages as fit."""
    problem = op.problem_of(a, b, **{"out_dtype": torch.float32} | how)
    while configs.illegal(problem, config).startswith("takes"):
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def _assert_close(result, a, b):
    """Within 4 times cuBLAS's error of the product in fp64."""
    exact, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    theirs = torch.mm(a, b, out_dtype=torch.float32)
    assert_no_worse_than_torch(result, theirs, exact, scale=scale, factor=4)


@pytest.mark.parametrize("name", TILES)
def test_every_tile_at_every_edge(name):
    for k, n in (*SIZES, *[(64, 1024)] * (name in FEW)):
        a, b = _operands(max(ROWS), k, n)
        b = with_layout(b, "transposed")
        expected = _gemm(a, b, _canonical(a, b))
        _assert_close(expected, a, b)
        for m in ROWS:
            result = _gemm(a[:m], b, _served(a[:m], b, TILES[name]))
            assert_bitwise_equal(result, expected[:m], f"{m} rows, k {k}, {n} columns")
            if m == 300 and name in FEW:
                rounded = _gemm(a[:m], b, TILES[name], out_dtype=None)
                assert_bitwise_equal(rounded, expected[:m].bfloat16(), f"rounded, k {k}, {n} columns")


LAYOUTS = {
    "nn": ("contiguous", "contiguous"), "tn": ("transposed", "contiguous"), "tt": ("transposed", "transposed"),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["256", "128+64", "64+16", "16 columns"])
def test_layouts(name, layout):
    for m, k, n in ((8, 40, 136), (136, 72, 200), (1000, 1000, 520)):
        a, b = (with_layout(x, each) for x, each in zip(_operands(m, k, n), LAYOUTS[layout], strict=True))
        expected = _gemm(a, b, _canonical(a, b))
        result = _gemm(a, b, _served(a, b, TILES[name]))
        assert_bitwise_equal(result, expected, f"[{m}, {k}] by {n}")


@pytest.mark.parametrize("kind", ["wide", "cancelling"])
def test_hard_data(kind):
    for dtype in (torch.bfloat16, torch.float16):
        a, b = _operands(300, 1000, 520, kind, dtype)
        expected = _gemm(a, b, _canonical(a, b))
        _assert_close(expected, a, b)
        for config in (ROLES, REST):
            assert_bitwise_equal(_gemm(a, b, config), expected, f"{dtype} {config}")


def test_nothing_of_neighbours_in_memory():
    """Rows that lie apart, with NaN between them and behind the last."""
    a, b = _operands(300, 1000, 520)
    expected = _gemm(a, b, _canonical(a, b))
    around = [torch.full((size + 8, width + 24), torch.nan, dtype=a.dtype, device=DEVICE)
              for size, width in ((300, 1000), (1000, 520), (520, 1000))]  # fmt: skip
    left, right, transposed = (each[: x.shape[0], : x.shape[1]].copy_(x)
                               for each, x in zip(around, (a, b, b.T), strict=True))  # fmt: skip
    for other in (right, transposed.T):
        for config in (ROLES, REST, WIDE):
            result = _gemm(left, other, _served(left, other, config))
            assert_bitwise_equal(result, expected, f"{config} {other.stride()}")


def test_signed_zeros_and_nonfinite_neighbours():
    choice = torch.tensor([-1.0, -0.0, 0.0, 1.0], dtype=torch.bfloat16, device=DEVICE)
    drawn = torch.Generator(DEVICE).manual_seed(9)
    a, b = (
        choice[torch.randint(0, 4, shape, generator=drawn, device=DEVICE)] for shape in ((300, 72), (72, 136))
    )  # fmt: skip
    a[7], a[200] = -0.0, 0.0
    a[1::4], a[3::4] = torch.nan, torch.inf
    for each in ({}, {"chunk": 32}):
        expected = _gemm(a, b, _canonical(a, b, **each), **each)[::2]
        for config in (ROLES, REST, replace(REST, parallel_chunks="gathered")):
            served = configs.fitted(op.problem_of(a, b, out_dtype=torch.float32, **each), config)
            assert served.kernel == "roles"
            assert_bitwise_equal(_gemm(a, b, served, **each)[::2], expected, f"{served} {each}")


def _results(m, n, dtype):
    """A result's memory by name: what lies outside of the view is NaN."""
    whole = torch.full((m + 2, n + 24), torch.nan, dtype=dtype, device=DEVICE)
    yield "rows apart", whole, whole[:m, :n]
    whole = torch.full_like(whole, torch.nan)
    yield "unaligned", whole, whole[1 : m + 1, 1 : n + 1]
    whole = torch.full((m, n + 3), torch.nan, dtype=dtype, device=DEVICE)
    yield "odd rows", whole, whole[:, :n]
    whole = torch.full((n + 8, m + 1), torch.nan, dtype=dtype, device=DEVICE)
    yield "by columns", whole, whole[:n, :m].T


@pytest.mark.parametrize("name", FEW)
def test_results_anywhere_in_memory(name):
    """By TMA, or by another kernel: all of the view and nothing else is written."""
    a, b = _operands(300, 72, 264)
    expected = _gemm(a, b, _canonical(a, b))
    for dtype in (torch.bfloat16, torch.float32):
        for where, whole, view in _results(300, 264, dtype):
            problem = replace(
                op.problem_of(a, b, out_dtype=dtype), c_strides=view.stride(), c_aligned=view.data_ptr() % 16 == 0
            )
            config = configs.fitted(problem, TILES[name])
            plan = gemm_plan("matmul", view.shape, dtype, a.device, problem, config)
            assert_bitwise_equal(plan.run((a, b, None, None), view), expected.to(dtype), f"{where} {dtype}")
            view.fill_(0.0)
            beside = int(whole.isnan().sum())
            assert beside == whole.numel() - view.numel(), f"{where} {dtype}: written beside the result"


IN_REGISTERS = {
    "in registers": ROLES, "in registers, once": ONCE, "in registers, 128+64": REST,
    "in registers, 64+16": TILES["64+16"],
}  # fmt: skip
CHUNKED = ((300, 200, 1608), (129, 264, 2040), (1000, 136, 5000))  # M, N, K of chunks of 1024: 2, 2 and 5


@pytest.mark.parametrize("name", [*GATHERING, *IN_REGISTERS])
def test_chunks(name):
    """Over and over, beside another stream: scratch memory has what earlier launches left."""
    config, beside = (GATHERING | IN_REGISTERS)[name], torch.cuda.Stream()
    for m, n, k in CHUNKED:
        a, b = _operands(m, k, n)
        expected = _gemm(a, b, _canonical(a, b, chunk=1024), chunk=1024)
        exact = a.double() @ b.double()
        assert float((expected - exact).abs().max()) <= 1e-4 * float(exact.abs().max())
        served = _served(a, b, config, chunk=1024)
        beside.wait_stream(torch.cuda.current_stream())
        for _ in range(10):
            with torch.cuda.stream(beside):
                other = op.gemm(a, b, config=served, chunk=1024, out_dtype=torch.float32)
            result = op.gemm(a, b, config=served, chunk=1024, out_dtype=torch.float32)
            assert_bitwise_equal(result, expected, f"[{m}, {k}] by {n}")
            beside.synchronize()
            assert_bitwise_equal(other, expected, f"[{m}, {k}] by {n}, beside")
        assert_bitwise_equal(_gemm(a, b, served, chunk=1024), expected, "poisoned")
        if name in FEW:
            rounded = _gemm(a, b, served, chunk=1024, out_dtype=None)
            assert_bitwise_equal(rounded, expected.bfloat16(), "rounded")


@pytest.mark.parametrize("chunks", [2, 3, 31, 32])
def test_as_many_chunks_as_are_gathered(chunks):
    a, b = _operands(300, 64 * chunks - 24, 264)
    expected = _gemm(a, b, _canonical(a, b, chunk=64), chunk=64)
    for config in (GATHERED, GATHERING["128+64"]):
        assert_bitwise_equal(_gemm(a, b, config, chunk=64), expected, str(config))


def test_many_tiles_a_program_again_and_again():
    """200 launches of 3 and 4 ragged tiles a program; buffers and their phases go on from tile to tile."""
    a, b = _operands(2331, 520, 3080)
    b = with_layout(b, "transposed")
    expected = _gemm(a, b, _canonical(a, b))
    alternating = ALTERNATING, replace(ALTERNATING, num_stages=2), replace(ALTERNATING, block_n=64, rest_n=32)
    for config in (ROLES, replace(ROLES, num_stages=3, group=1), replace(ROLES, num_stages=2), WIDE, *alternating):
        served = _served(a, b, config)
        for _ in range(50):
            assert_bitwise_equal(op.gemm(a, b, config=served, out_dtype=torch.float32), expected, str(served))


def test_one_program_for_all_tiles():
    a, b = _operands(700, 1000, 520)
    expected = _gemm(a, b, _canonical(a, b))
    for sm_count in (1, 7):
        for config in (ROLES, replace(REST, persistent=True, pdl=False)):
            plan = _plan_on(sm_count, a, b, config)
            assert_bitwise_equal(plan.run((a, b, None, None)), expected, f"{config} by {sm_count}")


def _plan_on(sm_count, a, b, config, **how):
    """A plan for a GPU of so many multiprocessors."""
    problem = replace(op.problem_of(a, b, **{"out_dtype": torch.float32} | how), sm_count=sm_count)
    while configs.illegal(problem, config).startswith("takes"):
        config = replace(config, num_stages=config.num_stages - 1)
    assert configs.illegal(problem, config) == ""
    return gemm_plan("matmul", (a.shape[0], b.shape[1]), torch.float32, a.device, problem, config)


@pytest.mark.parametrize("name", BALANCED)
def test_shares_of_any_length(name):
    """Teams of 1 to 12 programs, and k of one block or many: tiles that two programs sum have the bits of one."""
    for k in (8, 64, 200, 1608):
        a, b = _operands(1000, k, 1032)  # 72 tiles of 128 x 128
        expected = _gemm(a, b, _canonical(a, b))
        for config in (BALANCED[name], replace(BALANCED[name], balanced=False)):
            for sm_count in (1, 2, 7, 13, 24, 36):
                plan = _plan_on(sm_count, a, b, config)
                for _ in range(3):
                    with poisoned_allocations():
                        result = plan.run((a, b, None, None))
                    assert_bitwise_equal(result, expected, f"{config} by {sm_count}, k {k}")


@pytest.mark.parametrize("name", ["shared", "shared 128+64"])
def test_shares_of_chunks(name):
    """What is handed over is the total of finished chunks and the sum of one that is not, or that just is."""
    for k, chunk in ((1608, 1024), (2048, 1024), (1000, 64), (192, 64)):
        a, b = _operands(1000, k, 1032)
        expected = _gemm(a, b, _canonical(a, b, chunk=chunk), chunk=chunk)
        for sm_count in (1, 2, 7, 13, 24, 36):
            plan = _plan_on(sm_count, a, b, BALANCED[name], chunk=chunk)
            for _ in range(3):
                with poisoned_allocations():
                    result = plan.run((a, b, None, None))
                assert_bitwise_equal(result, expected, f"{sm_count} programs, k {k}, chunk {chunk}")


@pytest.mark.parametrize("name", ["shared", "alternating", "shared, chunks"])
def test_uneven_grids_again_and_again(name):
    """On all multiprocessors, beside another stream: scratch memory has what earlier launches left."""
    config, chunk = BALANCED[name.partition(",")[0]], 1024 if "chunks" in name else 0
    beside = torch.cuda.Stream()
    for m, n in UNEVEN:
        a, b = _operands(m, 2600, n)
        b = with_layout(b, "transposed")
        expected = _gemm(a, b, _canonical(a, b, chunk=chunk), chunk=chunk)
        served = _served(a, b, config, chunk=chunk)
        beside.wait_stream(torch.cuda.current_stream())
        for _ in range(30):
            with torch.cuda.stream(beside):
                other = op.gemm(a, b, config=served, chunk=chunk, out_dtype=torch.float32)
            result = op.gemm(a, b, config=served, chunk=chunk, out_dtype=torch.float32)
            assert_bitwise_equal(result, expected, f"[{m}, 2600] by {n}")
            beside.synchronize()
            assert_bitwise_equal(other, expected, f"[{m}, 2600] by {n}, beside")


@pytest.mark.parametrize(
    "config", [ROLES, GATHERED, GATHERING["128+64"], WIDE, ALTERNATING, BALANCED["shared"], BALANCED["alternating"]],
    ids=str,
)  # fmt: skip
def test_replays_see_new_inputs(config):
    """A replay has the stamps of the one before: no flag that it left may let a program go on."""
    m, k, n, chunk = 300, 3000, 520, 1024 if config.parallel_chunks else 0
    if config.alternating or config.balanced:  # more tiles than multiprocessors
        m, k, n = 2331, 520, 3080
    a, b = (x.clone() for x in _operands(m, k, n))
    how = {"chunk": chunk, "out_dtype": torch.float32}
    config = _served(a, b, config, **how)
    plain = _canonical(a, b, **how)
    op.gemm(a, b, config=config, **how)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [op.gemm(a, b, config=config, **how) for _ in range(3)]
    for seed in range(30):
        a.copy_(make_data("normal", (m, k), seed=10 + seed, dtype=a.dtype, device=DEVICE))
        b.copy_(make_data("normal", (k, n), seed=50 + seed, dtype=b.dtype, device=DEVICE))
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        expected = op.gemm(a, b, config=plain, **how)
        for result in results:
            assert_bitwise_equal(result, expected, f"replay {seed}")


def test_replays_one_after_another():
    """No host between them: the next replay's programs may start while the last one's end."""
    a, b = _operands(300, 3000, 520)
    expected = _gemm(a, b, _canonical(a, b, chunk=1024), chunk=1024)
    op.gemm(a, b, config=GATHERED, chunk=1024, out_dtype=torch.float32)
    graph, differing = torch.cuda.CUDAGraph(), torch.zeros((), dtype=torch.int64, device=DEVICE)
    with torch.cuda.graph(graph):
        for _ in range(4):
            result = op.gemm(a, b, config=GATHERED, chunk=1024, out_dtype=torch.float32)
            differing += (result.view(torch.int32) != expected.view(torch.int32)).sum()
    for _ in range(200):
        graph.replay()
    assert int(differing) == 0


@pytest.mark.parametrize("chunk", [0, 512])
@pytest.mark.parametrize("m", [129, 1000])
def test_each_launch_waits_for_the_one_before(m, chunk):
    """Launches begin before their neighbours' end; the second reads what the first wrote."""
    drawn = torch.Generator(DEVICE).manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(1024, 1024, device=DEVICE, generator=drawn)).Q.bfloat16().contiguous()
    x = make_data("normal", (m, 1024), seed=0, dtype=torch.bfloat16, device=DEVICE)
    early = [replace(each, parallel_chunks="gathered" if chunk else "") for each in (ONCE, REST, NARROW)]
    late = replace(ROLES, num_stages=3)

    def chain(pause, configs_):
        y = x
        for step in range(24):
            y = op.gemm(y, rotation, config=configs_[step % len(configs_)], chunk=chunk)
            if step % 8 == 7:
                y = y * 1.0  # a kernel of torch's between
            pause()
        return y

    plain = replace(configs.canonical(op.problem_of(x, rotation, chunk=chunk)), persistent=True)
    expected = chain(torch.cuda.synchronize, [plain])
    for _ in range(5):
        assert_bitwise_equal(chain(lambda: None, early), expected, "early")
        assert_bitwise_equal(chain(lambda: None, [*early, late]), expected, "early and late")


def test_two_streams_at_the_same_time():
    """Other work keeps the chip busy, so that programs start in another order and at other times."""
    a, b = _operands(1000, 2600, 1032)
    other = torch.cuda.Stream()
    load = torch.randn(2048, 2048, device=DEVICE)
    for config, chunk in ((ROLES, 0), (ROLES, 1024), (GATHERED, 1024), (GATHERING["128+64"], 1024)):
        expected = _gemm(a, b, _canonical(a, b, chunk=chunk), chunk=chunk)
        other.wait_stream(torch.cuda.current_stream())
        beside = []
        for _ in range(10):
            with torch.cuda.stream(other):
                load = torch.tanh(load @ load)
                beside.append(op.gemm(a, b, config=config, chunk=chunk, out_dtype=torch.float32))
            result = op.gemm(a, b, config=config, chunk=chunk, out_dtype=torch.float32)
            assert_bitwise_equal(result, expected, f"{config} chunk {chunk}")
        other.synchronize()
        for each in beside:
            assert_bitwise_equal(each, expected, f"{config} chunk {chunk}, beside")
