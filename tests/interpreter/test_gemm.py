"""The logic of the GEMM kernels on the CPU: every case on poisoned outputs and scratch memory, against fp64."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from gemm_launches import assert_close, launch, seen_problem
from nonfinite import assert_same_nonfinite

from isogemm.core.kernels import round_to_tf32
from isogemm.gemm import configs
from isogemm.gemm.configs import Config, Problem
from isogemm.gemm.kernels import products as kernels
from isogemm.gemm.kernels.halves import split_tf32
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data, make_operands, with_layout

POINTER = Config(16, 16, 32, 2, 1)
TMA = Config(16, 16, 32, 2, 2, "tma")
STREAM = Config(16, 16, 32, 2, 2, "stream", persistent=True)
CONFIGS = {  # what a Config can say, but early launches, which the interpreter cannot run
    "pointer": POINTER,
    "pointer swapped": replace(POINTER, block_m=32, block_n=8, swapped=True),
    "pointer persistent": replace(POINTER, block_m=32, persistent=True, group=2),
    "tma": replace(TMA, block_n=32),
    "tma swapped": replace(TMA, swapped=True),
    "tma persistent": replace(TMA, block_n=32, persistent=True, parts=2, group=1),
    "tma with a rest": replace(TMA, rest_n=16, group=2),
    "tma with a rest, parts": replace(TMA, block_n=32, rest_n=8, parts=2, persistent=True, residents=2),
    "stream": STREAM,
    "stream in parts": replace(STREAM, block_n=32, parts=4, group=2),
    "stream swapped": replace(STREAM, block_n=32, swapped=True),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def _operands(shape, layout="nt", dtype=torch.float32, seed=0):
    m, n, k = shape
    a, b = make_operands("normal", (m, k), (k, n), seed=seed, dtype=dtype)
    return tuple(
        with_layout(x, "contiguous" if letter == "n" else "transposed")
        for x, letter in zip((a, b), layout, strict=True)
    )


def _bias(n, dtype=torch.float32):
    return make_data("normal", (n,), seed=7, dtype=dtype)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@every_config
def test_layouts(config, layout):
    a, b = _operands((24, 40, 40), layout, torch.float16)
    assert_close(launch(seen_problem(a, b), config, a, b), a, b)


@every_config
def test_float32(config):
    a, b = _operands((24, 40, 24))
    assert_close(launch(seen_problem(a, b), config, a, b), a, b)


@pytest.mark.parametrize("block_k", [16, 64])
@pytest.mark.parametrize("name", ["pointer", "tma", "stream"])
def test_depths(name, block_k):
    a, b = _operands((24, 24, 72), dtype=torch.float16)
    assert_close(launch(seen_problem(a, b), replace(CONFIGS[name], block_k=block_k), a, b), a, b)


@pytest.mark.parametrize("programs", [2, 3, 4, 5, 7, 11])
@pytest.mark.parametrize("shape", [(40, 72, 200), (24, 200, 40), (72, 40, 24)], ids=str)
@pytest.mark.parametrize("change", [{}, {"parts": 2, "group": 1}, {"swapped": True}, {"residents": 2}], ids=str)
def test_balanced(change, shape, programs):
    """Shares of any length: tiles that two programs sum have the bits of one program's."""
    a, b = _operands(shape, dtype=torch.float16)
    bias = _bias(shape[1], torch.float16)
    problem = seen_problem(a, b, bias=bias, sm_count=programs)
    plain = replace(STREAM, **change)
    balanced = replace(plain, balanced=True)
    assert configs.illegal(problem, balanced) == ""
    result = launch(problem, balanced, a, b, bias)
    assert_close(result, a, b, bias)
    assert_bitwise_equal(result, launch(problem, plain, a, b, bias))


WAITING = {  # (dtype of the output, bias, accumulate)
    "scratch": (None, False, False),
    "scratch, biased": (None, True, False),
    "gathered": (None, False, False),
    "gathered, biased": (None, True, False),
    "gathered, float32": (torch.float32, False, False),
    "gathered, accumulated": (torch.float32, False, True),
    "in place": (torch.float32, False, False),
    "in place, accumulated": (torch.float32, False, True),
}


@pytest.mark.parametrize("ends", WAITING)
@pytest.mark.parametrize("k", [136, 256])
@pytest.mark.parametrize(
    "name", [name for name, config in CONFIGS.items() if config.kernel != "stream" and not config.persistent]
)
def test_programs_that_wait_for_chunks(name, k, ends):
    """Chunks that programs add one after another have the bits of one program's, with every end of a sum."""
    out_dtype, biased, accumulated = WAITING[ends]
    kind = ends.partition(",")[0]
    if kind == "gathered" and CONFIGS[name].rest_n:
        pytest.skip("chunks are gathered in tiles without a rest")
    queued = replace(CONFIGS[name], parallel_chunks="gathered" if kind == "gathered" else "queued")
    a, b = _operands((40, 72, k), dtype=torch.float16)
    bias = _bias(72, torch.float16) if biased else None
    total = make_data("normal", (40, 72), seed=9) if accumulated else None
    problem = seen_problem(a, b, bias=bias, out_dtype=out_dtype, chunk=64, total=total)
    assert configs.accumulation(problem, queued) == kind
    start = None if total is None else total.clone()
    expected = launch(problem, replace(POINTER, persistent=True), a, b, bias, start)
    assert_bitwise_equal(launch(problem, queued, a, b, bias, total), expected)
    tile = configs.tile(problem, queued)
    slots = -(-40 // tile[0]) * -(-72 // tile[1]) * (problem.chunks - 1 if kind == "gathered" else 1)
    kept = 0 if kind == "in place" else tile[0] * tile[1] * 4
    assert configs.workspace(problem, queued) == slots * (kept + 8)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 33, 5), (17, 1, 31), (33, 17, 33)], ids=str)
@pytest.mark.parametrize("name", ["pointer", "pointer swapped", "pointer persistent"])
def test_odd_sizes(name, shape):
    """What lies around the operands is NaN."""
    a, b = (with_layout(x, "sliced") for x in _operands(shape))
    assert_close(launch(seen_problem(a, b), CONFIGS[name], a, b), a, b)


@pytest.mark.parametrize("shape", [(1, 1, 8), (17, 33, 36), (33, 7, 4)], ids=str)
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.kernel != "pointer"])
def test_odd_sizes_by_tma(name, shape):
    """Rows of 16-byte multiples are all that TMA asks for; the output's may be anything."""
    a, b = _operands(shape)
    assert_close(launch(seen_problem(a, b), CONFIGS[name], a, b), a, b)


@pytest.mark.parametrize(
    "layouts", [("contiguous", "sliced"), ("strided", "transposed"), ("misaligned", "contiguous")], ids=" ".join
)
@pytest.mark.parametrize("name", ["tma", "tma swapped", "tma persistent"])
def test_one_operand_by_tma(name, layouts):
    a, b = (with_layout(x, layout) for x, layout in zip(_operands((24, 40, 40)), layouts, strict=True))
    problem = seen_problem(a, b)
    assert configs.reads_a_by_tma(problem, CONFIGS[name]) != configs.reads_b_by_tma(problem, CONFIGS[name])
    assert_close(launch(problem, CONFIGS[name], a, b), a, b)


@pytest.mark.parametrize(
    "layouts", [("strided", "sliced"), ("sliced", "misaligned"), ("misaligned", "strided")], ids=" ".join
)
@pytest.mark.parametrize("name", ["pointer", "pointer swapped"])
def test_any_strides(name, layouts):
    a, b = (with_layout(x, layout) for x, layout in zip(_operands((19, 21, 35)), layouts, strict=True))
    assert_close(launch(seen_problem(a, b), CONFIGS[name], a, b), a, b)


ACCUMULATIONS = {  # accumulation: (chunk, dtype of the output, bias, accumulate, parallel chunks)
    "one, biased": (0, None, True, False, ""),
    "one, biased, float32": (0, torch.float32, True, False, ""),
    "one, accumulated": (0, torch.float32, False, True, ""),
    "registers": (64, None, False, False, ""),
    "registers, biased, float32": (64, torch.float32, True, False, ""),
    "in place": (64, torch.float32, False, False, ""),
    "in place, accumulated": (64, torch.float32, False, True, ""),
    "scratch": (64, None, False, False, ""),
    "scratch, biased": (128, None, True, False, ""),
    "partials": (64, None, False, False, "partials"),
    "partials, biased": (128, None, True, False, "partials"),
    "partials, accumulated": (64, torch.float32, False, True, "partials"),
}


@pytest.mark.parametrize(
    ("config", "accumulation"),
    [
        pytest.param(config, accumulation, id=f"{name}-{accumulation}")
        for name, config in CONFIGS.items()
        for accumulation in ACCUMULATIONS
    ],
)
def test_accumulations(config, accumulation):
    """For 136 = 64 + 64 + 8: a last chunk shorter than the others, and than a block."""
    chunk, out_dtype, biased, accumulated, parallel = ACCUMULATIONS[accumulation]
    kind = accumulation.partition(",")[0]
    config = replace(config, parallel_chunks=parallel, persistent=config.persistent or kind == "scratch")
    if kind in ("in place", "scratch"):
        config = _beyond_registers(config)
    m, n = 12, (config.block_m if config.swapped else config.columns) + 8
    a, b = _operands((m, n, 136), dtype=torch.float16)
    bias = _bias(n, torch.float16) if biased else None
    total = make_data("normal", (m, n), seed=9) if accumulated else None
    problem = seen_problem(a, b, bias=bias, out_dtype=out_dtype, chunk=chunk, total=total)
    assert configs.accumulation(problem, config) == kind
    others = [x.clone() for x in (bias, total) if x is not None]
    assert_close(launch(problem, config, a, b, bias, total), a, b, *others)


def _beyond_registers(config):
    """A tile so large that finished chunks have no place in the registers."""
    return replace(config, block_m=64, block_n=64, num_warps=1)


@pytest.mark.parametrize("accumulated", [False, True], ids=["", "accumulated"])
@pytest.mark.parametrize("name", ["pointer persistent", "tma swapped", "tma with a rest", "stream"])
def test_chunks_are_added_from_left_to_right(name, accumulated):
    """Each is a product alone; one fp32 addition each, wherever they wait. Trailing zeros add nothing."""
    config = _beyond_registers(replace(CONFIGS[name], persistent=True))
    m, n = 12, 24
    a, b = _operands((m, n, 72))
    padded = torch.nn.functional.pad(a, (0, 24)), torch.nn.functional.pad(b.mT, (0, 24)).mT
    total = make_data("normal", (m, n), seed=9) if accumulated else None
    expected = torch.zeros(m, n) if total is None else total.clone()
    for begin in range(0, 72, 32):
        part = a[:, begin : begin + 32].contiguous(), b[begin : begin + 32].mT.contiguous().mT
        expected += launch(seen_problem(*part), config, *part)
    bias = None if accumulated else torch.zeros(n)
    accumulations = set()
    for operands, given, changes in [
        ((a, b), None, {}),
        ((a, b), bias, {}),
        (padded, None, {"parallel_chunks": "partials"}),
        ((a, b), bias, {"parallel_chunks": "partials"}),
        (padded, bias, {}),
        ((a, b), bias, {"num_warps": 8}),
    ]:
        sums = None if total is None else total.clone()
        problem = seen_problem(*operands, bias=given, chunk=32, total=sums)
        variant = replace(config, **changes)
        accumulations.add(configs.accumulation(problem, variant))
        assert_bitwise_equal(launch(problem, variant, *operands, given, sums), expected)
    assert accumulations == {"in place", "partials"} | (set() if accumulated else {"scratch", "registers"})


@triton.jit
def _underflown(
    a, b, acc, PRECISION: tl.constexpr, A_ROUNDED: tl.constexpr, B_ROUNDED: tl.constexpr,
    A_SPLIT: tl.constexpr = False, B_SPLIT: tl.constexpr = False, SWAPPED: tl.constexpr = False,
):  # fmt: skip
    """Sums that are -0, as a tensor core's that underflow may be; the interpreter's are never."""
    return tl.abs(acc) * -1.0  # since -x is 0 - x


@pytest.mark.parametrize(
    ("accumulation", "changes"),
    {
        "one": {},
        "registers": {},
        "in place": {},
        "scratch": {"persistent": True},
        "partials": {"parallel_chunks": "partials"},
        "gathered": {"parallel_chunks": "gathered"},
        "queued": {"parallel_chunks": "queued"},
    }.items(),
)
@pytest.mark.parametrize("accumulated", [False, True], ids=["", "accumulated"])
def test_sums_of_minus_zero(accumulation, changes, accumulated, monkeypatch):
    """A sum begins at +0, or at the total's -0, whoever adds the chunks."""
    monkeypatch.setattr(kernels, "multiply", _underflown)
    a, b = _operands((24, 40, 72), dtype=torch.float16)
    total = torch.full((24, 40), -0.0) if accumulated else None
    problem = seen_problem(a, b, chunk=32 * (accumulation != "one"), total=total)
    config = replace(POINTER, **changes)
    if accumulation == "scratch":
        config = _beyond_registers(config)
    result = launch(problem, config, a, b, total=total)
    assert_bitwise_equal(result, torch.full((24, 40), -0.0 if accumulated else 0.0, dtype=result.dtype))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "misaligned"])
@pytest.mark.parametrize("name", ["pointer", "tma persistent", "stream swapped"])
@pytest.mark.parametrize("parallel", ["", "partials"])
def test_accumulates_into_any_strides(name, layout, parallel):
    a, b = _operands((12, 24, 40), "tn")
    total = with_layout(make_data("normal", (12, 24), seed=9), layout)
    before = total.clone()
    problem = seen_problem(a, b, chunk=32, total=total)
    config = replace(CONFIGS[name], parallel_chunks=parallel)
    assert_close(launch(problem, config, a, b, total=total), a, b, before)
    if layout in ("sliced", "strided"):
        whole = total._base
        assert int(whole.isnan().sum()) == whole.numel() - total.numel()


@pytest.mark.parametrize("sm_count", [1, 5, 100])
@pytest.mark.parametrize("accumulation", ["one", "registers", "scratch", "partials"])
@pytest.mark.parametrize("name", ["pointer persistent", "tma with a rest, parts", "stream"])
def test_persistent_grids(name, accumulation, sm_count):
    """Fewer programs than tiles, as many, and no more however many SMs there are."""
    config = replace(CONFIGS[name], parallel_chunks="partials" if accumulation == "partials" else "")
    m, n = 24, 40
    if accumulation == "scratch":
        config, m, n = _beyond_registers(config), 72, 136
    a, b = _operands((m, n, 40), dtype=torch.float16)
    problem = seen_problem(a, b, chunk=0 if accumulation == "one" else 32, sm_count=sm_count)
    assert configs.accumulation(problem, config) == accumulation
    assert_close(launch(problem, config, a, b), a, b)


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["pointer", "stream"])
def test_groups_of_tiles(name, group):
    """Five rows of tiles in groups: the last is smaller."""
    a, b = _operands((72, 24, 8))
    assert_close(launch(seen_problem(a, b), replace(CONFIGS[name], group=group), a, b), a, b)


BATCHES = {  # a and b of a [2, 3] batch of [5, 24] @ [24, 12]
    "one level": ((2, 3, 5, 24), (2, 3, 24, 12), lambda a, b: (a.flatten(0, 1), b.flatten(0, 1))),
    "a's levels apart": ((3, 2, 5, 24), (2, 3, 24, 12), lambda a, b: (a.transpose(0, 1), b)),
    "b shared by the outer": ((2, 3, 5, 24), (3, 24, 12), lambda a, b: (a, b.expand(2, 3, 24, 12))),
    "b shared by the inner": ((2, 3, 5, 24), (2, 1, 24, 12), lambda a, b: (a, b.expand(2, 3, 24, 12))),
    "a shared by all": ((5, 24), (2, 3, 24, 12), lambda a, b: (a.expand(2, 3, 5, 24), b)),
    "heads of one tensor": ((2, 5, 3, 24), (2, 12, 3, 24), lambda a, b: (a.transpose(1, 2), b.permute(0, 2, 3, 1))),
}


@pytest.mark.parametrize("name", ["pointer", "pointer swapped", "pointer persistent"])
@pytest.mark.parametrize("levels", BATCHES)
def test_batches(levels, name):
    a_shape, b_shape, arrange = BATCHES[levels]
    a, b = arrange(*make_operands("normal", a_shape, b_shape, seed=0))
    problem = seen_problem(a, b)
    assert problem.batch > 1
    assert_close(launch(problem, CONFIGS[name], a, b).view(*a.shape[:-1], 12), a, b)


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("arrange", [lambda config: config, _beyond_registers], ids=["registers", "memory"])
def test_batches_in_chunks(arrange, biased):
    a, b = make_operands("normal", (3, 20, 70), (3, 70, 17), seed=0, dtype=torch.float16)
    bias = _bias(17, torch.float16) if biased else None
    problem = seen_problem(a, b, bias=bias, chunk=32)
    actual = launch(problem, arrange(replace(POINTER, persistent=True)), a, b, bias)
    assert_close(actual, a, b, *([bias] if biased else []))


@pytest.mark.parametrize("chunk", [0, 32])
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_two_levels_of_k(swapped, chunk):
    """Tokens of a [15, 4] batch whose gradient lies transposed: one accumulation through both levels."""
    x = make_data("normal", (15, 4, 20), seed=0)
    grad = make_data("normal", (4, 15, 24), seed=1).transpose(0, 1)
    problem = Problem(
        m=24, n=20, k=60, dtype="float32", out_dtype="float32", chunk=chunk,
        a_strides=(1, grad.stride(1)), b_strides=(x.stride(1), 1), c_strides=(20, 1),
        k_inner=4, k_outer_strides=(grad.stride(0), x.stride(0)),
    )  # fmt: skip
    actual = launch(problem, replace(POINTER, swapped=swapped), grad, x)
    assert_close(actual, grad.reshape(60, 24).mT, x.reshape(60, 20))


@pytest.fixture(scope="module")
def vast():
    """4.3 GB of virtual memory, touched at a few rows alone."""
    try:
        return torch.empty(2**31 + 2**12, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"no 4.3 GB of address space: {error}")


@pytest.mark.parametrize("stride", [2**30 + 8, 2**31 + 8])
@pytest.mark.parametrize("name", ["pointer", "pointer swapped", "tma", "stream"])
def test_wide_offsets(name, stride, vast):
    """Rows of A whose offsets need 64 bits, and strides that do."""
    rows = 1 + (2**31 + 8) // stride
    a, b = _operands((rows, 24, 40), dtype=torch.float16)
    far = vast.as_strided(a.shape, (stride, 1)).copy_(a)
    problem = seen_problem(far, b)
    assert kernels.describe_gemm(problem, CONFIGS[name]).constants["INDEX"] is tl.int64
    assert_close(launch(problem, CONFIGS[name], far, b), a, b)


def test_wide_offsets_of_the_output(vast):
    a, b = _operands((2, 24, 40))
    total = vast.view(torch.float32).as_strided((2, 24), (2**30 + 8, 1)).zero_()
    problem = seen_problem(a, b, total=total)
    assert kernels.describe_gemm(replace(problem, m=3), POINTER).constants["INDEX"] is tl.int64
    assert_close(launch(problem, POINTER, a, b, total=total), a, b)


def test_wide_batch_strides(vast):
    a, b = make_operands("normal", (2, 5, 24), (2, 24, 20), seed=0, dtype=torch.float16)
    far = vast.as_strided(a.shape, (2**31 + 8, 24, 1)).copy_(a)
    assert_close(launch(seen_problem(far, b), POINTER, far, b), a, b)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's word for inf * 0
@every_config
def test_nan_and_inf(config):
    """They stay in their row or column, though blocks reach past the edges of both operands."""
    a, b = _operands((20, 24, 24))
    _place_nonfinite(a, b)
    assert_same_nonfinite(launch(seen_problem(a, b), config, a, b), torch.matmul(a.double(), b.double()))


def _place_nonfinite(a, b):
    a[2, 23], a[3, 5], a[4, 0], a[18, 7] = torch.nan, torch.inf, -torch.inf, torch.nan
    a[5, 1], b[1, 5] = torch.inf, 0.0
    b[23, 3], b[0, 21] = torch.nan, torch.inf
    a.view(torch.int32)[6, 0] = 0x7FFFFFFF  # CUDA's own NaN
    a.view(torch.int32)[7, 0] = 0x7F800001  # the NaN next to Inf


# numpy's word for inf - inf
subtracting_infinities = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


@triton.jit
def _round_kernel(source, large, small, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(source + at)
    tl.store(large + at, round_to_tf32(x))
    tl.store(small + at, split_tf32(x)[1])


def _rounded(x):
    large, small = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    _round_kernel[(1,)](x, large, small, SIZE=x.numel())
    return large, small


@subtracting_infinities
def test_rounding_to_tf32():
    """To the nearest 10-bit mantissa, ties to even; past the largest, to infinity. NaN and infinity are themselves."""
    one, ulp = 0x3F800000, 0x2000
    expected = {  # bits: bits
        one: one,
        one + ulp // 2 - 1: one,
        one + ulp // 2: one,  # a tie, to the even side
        one + ulp // 2 + 1: one + ulp,
        one + ulp + ulp // 2: one + 2 * ulp,  # a tie, to the even side
        one + ulp + ulp // 2 - 1: one + ulp,
        0x3FFFFFFF: 0x40000000,  # into the next binade
        0x7F7FFFFF: 0x7F800000,
        0x7F7FE000: 0x7F7FE000,
        0x7F800000: 0x7F800000,
        0x00000001: 0x00000000,
        0x00001001: 0x00002000,
        0: 0,
        0x7FFFFFFF: None,  # NaNs
        0x7F800001: None,
        0x7FC00000: None,
    }
    for sign in (0, -(2**31)):
        x = torch.tensor([sign + bits for bits in expected], dtype=torch.int64).to(torch.int32).view(torch.float32)
        large, _ = _rounded(x)
        for actual, bits in zip(large, expected.values(), strict=True):
            if bits is None:
                assert bool(actual.isnan())
            else:
                assert int(actual.view(torch.int32)) == sign + bits


@subtracting_infinities
def test_split_for_tf32x3():
    """Two TF32 numbers carry 21 bits or more; an infinity has no small part, a NaN is one."""
    x = make_data("wide", (256,), seed=3)
    x[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    large, small = _rounded(x)
    for part in (large[3:], small[3:]):
        assert not bool((part.view(torch.int32) & 0x1FFF).any())
    assert bool(((large.double() + small.double() - x.double()).abs() <= 2**-22 * x.double().abs())[3:].all())
    assert large[:2].tolist() == x[:2].tolist()
    assert small[:2].tolist() == [0.0, 0.0]
    assert bool(large[2].isnan())


@pytest.mark.parametrize("name", ["pointer", "pointer swapped", "pointer persistent"])
def test_tf32(name):
    """The product of the rounded operands. TMA rounds as it reads, which the interpreter's does not."""
    a, b = _operands((20, 24, 24))
    reference = torch.matmul(_rounded_all(a).double(), _rounded_all(b).double())
    actual = launch(seen_problem(a, b, precision="tf32"), CONFIGS[name], a, b)
    assert_close(actual, a, b, reference=reference)
    with pytest.raises(AssertionError, match="largest error"):
        assert_close(actual, a, b)  # it is TF32, not fp32


def _rounded_all(x):
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("name", ["pointer", "tma", "stream"])
def test_tf32x3(name):
    """Three products: what is dropped is 2^-22 of each term."""
    a, b = _operands((20, 24, 40))
    actual = launch(seen_problem(a, b, precision="tf32x3"), CONFIGS[name], a, b)
    scale = torch.matmul(a.double().abs(), b.double().abs())
    error = (actual.double() - torch.matmul(a.double(), b.double())).abs()
    assert bool((error <= (3 * 2 * 40 * 2**-24 + 2**-21) * scale).all())
