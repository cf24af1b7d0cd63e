"""A row's bits follow nothing but the row and the weights: not M, its place, its neighbours, the tile or the run."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from arithmetic import NUMBERS

import isogemm
from isogemm.gemm import configs, op, selection
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import DATA_KINDS, make_data, make_operands, with_layout

DEVICE = "cuda"
LLM = [(4096, 12288), (4096, 4096), (4096, 14336), (14336, 4096), (4096, 32000)]  # K, N
ODD = [(1000, 1003), (127, 65), (4095, 257)]
CASES = [("bf16", *sizes) for sizes in LLM + ODD]
CASES += [(number, 8960, 1536) for number in ("bf16", "tf32", "tf32x3", "ieee")]  # k is cut in two
CASES += [("fp16", 4096, 4096), ("tf32", 4096, 4096), ("ieee", 4096, 1024)]
CASES += [("tf32", 1000, 1003), ("ieee", 1000, 1003), ("tf32x3", 1000, 1003)]


@pytest.fixture(autouse=True)
def free_memory():
    yield
    _operands.cache_clear()


@functools.lru_cache(maxsize=1)
def _operands(number, k, n, m=512):
    """x [m, k], weight [n, k], and 28 rows of other data."""
    dtype, _ = NUMBERS[number]
    x = make_data("normal", (m, k), seed=0, dtype=dtype, device=DEVICE)
    weight = make_data("normal", (n, k), seed=1, dtype=dtype, device=DEVICE)
    return x, weight, make_data("wide", (28, k), seed=2, dtype=dtype, device=DEVICE)


def _linear(number, x, weight, bias=None):
    """The fp32 sums, before a 16-bit output would hide their last bits."""
    return isogemm.linear(x, weight, bias, out_dtype=torch.float32, precision=NUMBERS[number][1])


def _id(case):
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_a_row_follows_nothing_but_itself(case):
    number, k, n = case
    x, weight, noise = _operands(number, k, n)
    for out_dtype in {None, None if x.dtype == torch.float32 else torch.float32}:
        linear = functools.partial(isogemm.linear, weight=weight, out_dtype=out_dtype, precision=NUMBERS[number][1])
        _assert_rows_follow_themselves(linear, x, noise)


def _assert_rows_follow_themselves(linear, x, noise):
    k = x.shape[1]
    with isogemm.dispatch_log() as log:
        whole = linear(x)
        for row in (0, 1, 255, 511):
            assert_bitwise_equal(linear(x[row : row + 1]), whole[row : row + 1], f"row {row} alone")
        cut = torch.cat([linear(x[:100]), linear(x[100:256])])
        assert_bitwise_equal(cut, whole[:256], "256 rows as 100 + 156")
        assert_bitwise_equal(linear(torch.cat([x[:100], noise]))[:100], whole[:100], "100 rows beside 28 others")
        order = torch.randperm(512, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        assert_bitwise_equal(linear(x[order]), whole[order], "rows permuted")
        assert_bitwise_equal(linear(x.view(4, 8, 16, k)).view(512, -1), whole, "rows in a batch")
        assert_bitwise_equal(linear(x), whole, "again")
    assert {entry.path for entry in log} == {"gemm"}


@pytest.mark.parametrize("number", ["bf16", "tf32"])
def test_a_row_at_every_position(number):
    x, weight, noise = _operands(number, 4096, 1024)
    expected = _linear(number, x[:1], weight)
    for size, positions in ((28, range(28)), (512, (0, 1, 31, 63, 64, 127, 128, 255, 256, 383, 510, 511))):
        for position in positions:
            batch = noise.repeat(19, 1)[:size]
            batch[position] = x[0]
            got = _linear(number, batch, weight)[position : position + 1]
            assert_bitwise_equal(got, expected, f"at {position} of {size}")


def test_neighbours_may_be_nan():
    x, weight, _ = _operands("bf16", 4096, 1024)
    expected = _linear("bf16", x, weight)
    sick = x.clone()
    sick[1::4], sick[3::4] = torch.nan, torch.inf
    assert_bitwise_equal(_linear("bf16", sick, weight)[::2], expected[::2])


@pytest.mark.parametrize("number", ["bf16", "ieee"])
def test_bias_and_rounding_come_once_and_last(number):
    """The epilogue of every M: the fp32 sum plus the bias, rounded once."""
    x, weight, _ = _operands(number, 1024, 1024)  # a K up to which an fp32 result is one accumulation too
    bias = make_data("normal", (1024,), seed=3, dtype=x.dtype, device=DEVICE)
    sums = _linear(number, x, weight)
    precision = NUMBERS[number][1]
    for m in (1, 512):
        expected = sums[:m] + bias.float()
        assert_bitwise_equal(_linear(number, x[:m], weight, bias), expected, f"{m} rows, fp32")
        rounded = isogemm.linear(x[:m], weight, bias, precision=precision)
        assert_bitwise_equal(rounded, expected.to(x.dtype), f"{m} rows")
        assert_bitwise_equal(isogemm.linear(x[:m], weight, precision=precision), sums[:m].to(x.dtype), f"{m} rows")


LAYOUTS = {"nn": ("contiguous", "contiguous"), "nt": ("contiguous", "transposed")}
LAYOUTS |= {"tn": ("transposed", "contiguous"), "tt": ("transposed", "transposed")}


@pytest.mark.parametrize(("number", "rows"), [("bf16", (1, 512)), ("tf32", (512,))])
def test_four_layouts_and_others_have_the_same_bits(number, rows):
    dtype, precision = NUMBERS[number]
    a, b = make_operands("normal", (512, 1024), (1024, 1536), seed=4, dtype=dtype, device=DEVICE)
    expected = isogemm.mm(a, b, out_dtype=torch.float32, precision=precision)
    views = LAYOUTS | {"misaligned": ("misaligned", "misaligned"), "strided": ("strided", "contiguous")}
    for name, (a_layout, b_layout) in views.items():
        for m in rows:
            left, right = with_layout(a[:m], a_layout), with_layout(b, b_layout)
            result = isogemm.mm(left, right, out_dtype=torch.float32, precision=precision)
            assert_bitwise_equal(result, expected[:m], f"{name}, {m} rows")


def test_gradients_of_x_are_the_product_with_the_weight():
    """dX = dY W: each row of it the row that isogemm.mm gives for any M."""
    weight = make_data("normal", (4096, 1024), seed=5, dtype=torch.bfloat16, device=DEVICE)
    grad = make_data("normal", (512, 4096), seed=6, dtype=torch.bfloat16, device=DEVICE)
    whole = isogemm.mm(grad, weight)
    for rows in (slice(0, 1), slice(511, 512), slice(0, 100), slice(100, 256), slice(0, 512)):
        x = torch.zeros_like(grad[rows, :1024]).requires_grad_()
        (dx,) = torch.autograd.grad(isogemm.linear(x, weight), x, grad[rows])
        assert_bitwise_equal(dx, whole[rows], f"rows {rows}")


ROWS = sorted({*range(1, 601), *(size + off for size in (1024, 2048, 4096, 8192) for off in (-1, 0, 1))})
BOUNDED = [
    ("bf16", 4096, 4096),
    ("bf16", 4096, 1024),
    ("bf16", 14336, 4096),
    ("bf16", 8960, 1536),
    ("tf32", 4096, 4096),
]


def _describe(number, x, weight):
    return op.problem_of(x, weight.T, out_dtype=torch.float32, precision=NUMBERS[number][1])


def _accumulation(number, x, weight):
    """The chunk of a product in its own dtype."""
    return op.problem_of(x, weight.T, precision=NUMBERS[number][1], chunk=None).chunk


def _boundaries(number, x, weight):
    """The numbers of rows on both sides of each change of configuration, one pair for each two configurations."""
    precision, accumulation = NUMBERS[number][1], _accumulation(number, x, weight)
    problems = {m: op.problem_of(x[:m], weight.T, precision=precision, chunk=accumulation) for m in ROWS}
    chosen = {m: selection.choose(problem).config for m, problem in problems.items()}
    pairs = {}
    for before, after in itertools.pairwise(ROWS):
        if chosen[before] != chosen[after]:
            pairs.setdefault((chosen[before], chosen[after]), (before, after))
    return sorted({m for pair in pairs.values() for m in pair})


@pytest.mark.parametrize("case", BOUNDED, ids=_id)
def test_both_sides_of_every_dispatch_boundary(case):
    number, k, n = case
    x, weight, _ = _operands(number, k, n, max(ROWS))
    (dtype, precision), accumulation = NUMBERS[number], _accumulation(number, x, weight)
    expected = _gemm(number, x, weight.T, chunk=accumulation, config=configs.canonical(_describe(number, x, weight)))
    boundaries = _boundaries(number, x, weight)
    assert boundaries, "one configuration for every M"
    for m in boundaries:
        with isogemm.dispatch_log() as log:
            served = isogemm.linear(x[:m], weight, precision=precision)
        assert_bitwise_equal(served, expected[:m].to(dtype), f"{m} rows by {log[0].config}")
        config = selection.choose(op.problem_of(x[:m], weight.T, precision=precision, chunk=accumulation)).config
        assert str(config) == log[0].config
        unrounded = op.problem_of(x[:m], weight.T, out_dtype=torch.float32, precision=precision, chunk=accumulation)
        result = _gemm(number, x[:m], weight.T, chunk=accumulation, config=configs.fitted(unrounded, config))
        assert_bitwise_equal(result, expected[:m], f"{m} rows by {config}, not rounded")


def _gemm(number, a, b, **options):
    return op.gemm(a, b, out_dtype=torch.float32, precision=NUMBERS[number][1], **options)


SWEPT = [("bf16", 200, 1024, 1536), ("bf16", 33, 1000, 1003), ("tf32", 200, 1024, 512)]  # M, K, N; x @ weight.T


@pytest.mark.parametrize("case", SWEPT, ids=_id)
def test_every_configuration_has_the_bits_of_the_canonical_one(case):
    number, m, k, n = case
    for kind in DATA_KINDS:
        x, b = make_operands(kind, (m, k), (k, n), seed=7, dtype=NUMBERS[number][0], device=DEVICE)
        weight = b.T.contiguous()
        problem = _describe(number, x, weight)
        candidates = selection.candidates(problem)
        assert len(candidates) > 1
        expected = _gemm(number, x, weight.T, config=configs.canonical(problem))
        for config in candidates:
            result = _gemm(number, x, weight.T, config=config)
            assert_bitwise_equal(result, expected, f"{config}, {kind} data")


BALANCED = configs.Config(128, 256, 64, 8, 3, "stream", persistent=True, parts=2, balanced=True)
UNEVEN = [(1024, 14336), (1000, 4616), (3000, 2568), (777, 12288)]  # M, N: 448, 152, 264 and 336 tiles, or twice


@pytest.mark.parametrize("change", [{}, {"parts": 4}, {"block_n": 128, "residents": 2, "num_stages": 2}], ids=str)
@pytest.mark.parametrize("shape", UNEVEN, ids=str)
def test_balanced_tiles_have_the_bits_of_whole_ones(shape, change):
    """Over and over: the memory in which programs leave sums and flags has what earlier launches left."""
    (m, n), k = shape, 4096 + 72
    x, weight, _ = _operands("bf16", k, n, m)
    config = replace(BALANCED, **change)
    problem = _describe("bf16", x, weight)
    expected = _gemm("bf16", x, weight.T, config=configs.canonical(problem))
    for _ in range(20):
        assert_bitwise_equal(_gemm("bf16", x, weight.T, config=config), expected)


QUEUED = configs.Config(128, 128, 64, 8, 3, "tma", parts=2, parallel_chunks="queued")
QUEUES = [
    (QUEUED, (512, 1024, 8192), 1024),
    (replace(QUEUED, block_n=64, block_m=64, swapped=True, pdl=True), (64, 1536, 8960), 1792),
    (
        replace(QUEUED, kernel="pointer", block_m=32, block_n=8, num_warps=2, swapped=True, pdl=True),
        (1, 1536, 8960),
        4480,
    ),
    (replace(QUEUED, kernel="pointer", block_m=16, block_n=16, num_warps=1, swapped=True), (9, 1003, 5000), 192),
    (replace(QUEUED, block_n=256), (300, 1024, 4096), 2048),
    (replace(QUEUED, num_warps=4, pdl=True), (300, 1000, 4096), 2048),
]


@pytest.mark.parametrize(("config", "shape", "chunk"), QUEUES, ids=str)
@pytest.mark.parametrize("way", ["queued", "queued, accumulated", "gathered", "gathered, accumulated"])
def test_parallel_chunks_have_the_bits_of_one_program(config, shape, chunk, way):
    (m, n, k), beside = shape, torch.cuda.Stream()
    x, weight, _ = _operands("bf16", k, n, m)
    problem = replace(_describe("bf16", x, weight), chunk=chunk)
    config = replace(config, parallel_chunks=way.partition(",")[0])
    start = make_data("normal", (m, n), seed=5, device=DEVICE) if "accumulated" in way else None
    if reason := configs.illegal(replace(problem, accumulate=start is not None), config):
        pytest.skip(reason)

    def product(config):
        into = {} if start is None else {"total": start.clone()}
        return _gemm("bf16", x, weight.T, config=config, chunk=chunk, **into)

    expected = product(replace(configs.canonical(problem), persistent=True))
    beside.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(beside):
            other = product(config)
        assert_bitwise_equal(product(config), expected)
        beside.synchronize()
        assert_bitwise_equal(other, expected)


@pytest.mark.parametrize("config", [BALANCED, QUEUED, replace(QUEUED, parallel_chunks="gathered")], ids=str)
def test_waiting_programs_in_a_graph(config):
    """A replay has the stamps of the one before."""
    m, n, k, chunk = (1024, 14336, 4096, 0) if config.balanced else (512, 1024, 8192, 1024)
    x, weight, _ = _operands("bf16", k, n, m)
    expected = _gemm("bf16", x, weight.T, config=config, chunk=chunk)
    other = x * 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [_gemm("bf16", each, weight.T, config=config, chunk=chunk) for each in (x, other, x)]
    for _ in range(20):
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        for result, factor in zip(results, (1, 2, 1), strict=True):
            assert_bitwise_equal(result, expected * factor)


def test_a_batch_of_products_is_each_of_them():
    a, b = make_operands("normal", (5, 65, 512), (5, 512, 96), seed=8, dtype=torch.bfloat16, device=DEVICE)
    matmul = functools.partial(isogemm.matmul, out_dtype=torch.float32)
    whole = matmul(a, b)
    for i in range(5):
        assert_bitwise_equal(matmul(a[i], b[i]), whole[i], f"matrix {i} alone")
    assert_bitwise_equal(matmul(a[1:3], b[1:3]), whole[1:3], "two of them")
    assert_bitwise_equal(matmul(a[:, 7:8], b), whole[:, 7:8], "one row of each")
    shared = matmul(a, b[0])
    assert_bitwise_equal(matmul(a, b[:1].repeat(5, 1, 1)), shared, "a shared operand as if copied")


def test_k_longer_than_one_walk():
    """Sums that are cut: in the output's own memory where it is fp32, elsewhere beside it."""
    x, weight, _ = _operands("bf16", configs.LONGEST_SUM + 1000, 256)
    bias = make_data("normal", (256,), seed=3, dtype=torch.bfloat16, device=DEVICE)
    whole = _linear("bf16", x, weight)
    served = _gemm("bf16", x, weight.T, chunk=_accumulation("bf16", x, weight))
    for rows in (slice(0, 1), slice(100, 256), slice(511, 512), slice(0, 512)):
        assert_bitwise_equal(_linear("bf16", x[rows], weight), whole[rows], f"rows {rows}")
        rounded = isogemm.linear(x[rows], weight, bias)
        assert_bitwise_equal(rounded, (served[rows] + bias.float()).bfloat16(), f"rows {rows}, bias and rounding")


def test_signed_zeros_do_not_follow_the_padding():
    """Sums of negative zeros: a tile padded with zeros may not turn them positive for one M and not for another."""
    choice = torch.tensor([-1.0, -0.0, 0.0, 1.0], dtype=torch.bfloat16, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(9)
    x, weight = (
        choice[torch.randint(0, 4, shape, generator=generator, device=DEVICE)] for shape in ((512, 37), (65, 37))
    )
    x[7], x[300] = -0.0, 0.0
    whole = _linear("bf16", x, weight)
    for m in (1, 8, 33, 100, 301):
        assert_bitwise_equal(_linear("bf16", x[:m], weight), whole[:m], f"{m} rows")


def test_bits_beside_other_work():
    """Another stream keeps the chip busy: programs start in another order, at other times."""
    x, weight, _ = _operands("bf16", 4096, 1024)
    expected = _linear("bf16", x, weight)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    load = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(10):
        with torch.cuda.stream(other):
            load = torch.tanh(load @ load)
        for m in (1, 64, 512):
            assert_bitwise_equal(_linear("bf16", x[:m], weight), expected[:m], f"{m} rows")
    torch.cuda.synchronize()
