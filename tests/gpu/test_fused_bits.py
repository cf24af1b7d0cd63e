"""Fusing changes no row's dependence on its batch: the GEMM's invariance, with epilogues on."""

import functools
from dataclasses import replace

import pytest
import torch
from arithmetic import NUMBERS
from torch.nn import functional as F

import isogemm
from isogemm.epilogues import ACTIVATIONS
from isogemm.epilogues.operands import Epilogue, Operands
from isogemm.gemm import configs, cpu, describe, fused, selection
from isogemm.gemm.api import mlp
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import DATA_KINDS, make_data, make_operands, with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"
PLAIN = [name for name, entry in ACTIVATIONS.items() if not entry.gate]
GATED = [name for name, entry in ACTIVATIONS.items() if entry.gate]
# Both sides of what tiles and tables are cut at.
EDGES = sorted(
    {1, 2, 3, 5, 7, *(size + off for size in (8, 16, 32, 64, 128, 256, 512, 1024, 2048) for off in (-1, 0, 1))}
)


@pytest.fixture(autouse=True)
def free_memory():
    yield
    _tensors.cache_clear()


def _normal(*shape, seed=0, dtype=torch.bfloat16):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=DEVICE)


@functools.lru_cache(maxsize=1)
def _tensors(number, k, n, m=512):
    """x, residual, weight, weight_up, bias, bias_up; and 28 rows of other data for the first two."""
    dtype, _ = NUMBERS[number]
    shapes = (m, k), (m, n), (n, k), (n, k), (n,), (n,)
    tensors = [_normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    tensors[0] = tensors[0] / k**0.5  # results of about 1, where activations bend
    noise = [make_data("wide", (28, size), seed=9, dtype=dtype, device=DEVICE) for size in (k, n)]
    return *tensors, *noise


def _call(number, activation, weight, up, bias, bias_up, **options):
    """A function of x and residual; the fp32 result, before a 16-bit one would hide its last bits."""
    options |= {"weight_up": up, "bias_up": bias_up} if activation in GATED else {}
    options |= {"out_dtype": torch.float32} if weight.dtype != torch.float32 else {}
    options |= {"activation": activation, "bias": bias, "precision": NUMBERS[number][1]}
    return functools.partial(isogemm.linear, weight=weight, **options)


def _assert_rows_follow_themselves(call, x, residual, noise, other):
    with isogemm.dispatch_log() as log:
        whole = call(x, residual=residual)
        for row in (0, 1, 255, 511):
            rows = slice(row, row + 1)
            assert_bitwise_equal(call(x[rows], residual=residual[rows]), whole[rows], f"row {row} alone")
        cut = [call(x[rows], residual=residual[rows]) for rows in (slice(0, 100), slice(100, 256))]
        assert_bitwise_equal(torch.cat(cut), whole[:256], "256 rows as 100 + 156")
        padded = call(torch.cat([x[:100], noise]), residual=torch.cat([residual[:100], other]))
        assert_bitwise_equal(padded[:100], whole[:100], "100 rows beside 28 others")
        order = torch.randperm(512, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        assert_bitwise_equal(call(x[order], residual=residual[order]), whole[order], "rows permuted")
        batched = call(x.view(4, 8, 16, -1), residual=residual.view(4, 8, 16, -1))
        assert_bitwise_equal(batched.view(512, -1), whole, "rows in a batch")
        assert_bitwise_equal(call(x, residual=residual), whole, "again")
    assert {entry.path for entry in log} == {"gemm"}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("number", ["bf16", "tf32"])
def test_a_row_follows_nothing_but_itself(number, activation):
    x, residual, *weights, noise, other = _tensors(number, 1000, 1003)
    call = _call(number, activation, *weights)
    _assert_rows_follow_themselves(call, x, residual, noise, other)


CASES = [("bf16", 4096, 4096), ("bf16", 4096, 14336), ("bf16", 14336, 4096), ("fp16", 4096, 4096)]
CASES += [("tf32", 4096, 4096), ("ieee", 4096, 1024), ("tf32x3", 1000, 1003), ("bf16", 127, 65)]


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_sizes(case, activation):
    number, k, n = case
    x, residual, *weights, noise, other = _tensors(number, k, n)
    call = functools.partial(_call(number, activation, *weights), out_dtype=None)
    _assert_rows_follow_themselves(call, x, residual, noise, other)


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("number", ["bf16", "tf32"])
def test_every_number_of_rows(number, activation):
    """1 to 300, and both sides of what tiles and tables are cut at: several configurations, one set of bits."""
    x, residual, *weights, _, _ = _tensors(number, 512, 768, 2049)
    call = functools.partial(_call(number, activation, *weights), out_dtype=None)
    whole = call(x, residual=residual)
    configurations = set()
    for m in sorted({*range(1, 301), *EDGES}):
        with isogemm.dispatch_log() as log:
            result = call(x[:m], residual=residual[:m])
        configurations |= {entry.config for entry in log}
        assert_bitwise_equal(result, whole[:m], f"{m} rows by {log[0].config}")
    assert len(configurations) > 2, "one configuration for every M"


@pytest.mark.parametrize("sizes", [(4096, 4096), (1024, 512), (256, 14336)], ids=str)
def test_edges(sizes):
    x, residual, *weights, _, _ = _tensors("bf16", *sizes, 2049)
    for activation in ("relu", "swiglu"):
        call = _call("bf16", activation, *weights, dropout_p=0.5)
        torch.manual_seed(0)
        whole = call(x, residual=residual)
        for m in EDGES:
            torch.manual_seed(0)
            assert_bitwise_equal(call(x[:m], residual=residual[:m]), whole[:m], f"{activation}, {m} rows, and its mask")


def test_a_row_at_every_position():
    x, residual, *weights, noise, other = _tensors("bf16", 4096, 1024)
    for activation in ("gelu", "swiglu"):
        call = _call("bf16", activation, *weights)
        expected = call(x[:1], residual=residual[:1])
        for size, positions in ((28, range(28)), (512, (0, 1, 63, 64, 127, 128, 255, 256, 511))):
            for position in positions:
                batch, beside = noise.repeat(19, 1)[:size], other.repeat(19, 1)[:size]
                batch[position], beside[position] = x[0], residual[0]
                got = call(batch, residual=beside)[position : position + 1]
                assert_bitwise_equal(got, expected, f"{activation} at {position} of {size}")


def test_neighbours_may_be_nan():
    x, residual, *weights, _, _ = _tensors("bf16", 1000, 1003)
    sick = x.clone()
    sick[1::4], sick[3::4] = torch.nan, torch.inf
    for activation in ACTIVATIONS:
        call = _call("bf16", activation, *weights)
        expected = call(x, residual=residual)
        assert_bitwise_equal(call(sick, residual=residual)[::2], expected[::2], activation)


def test_operands_of_a_row_go_with_it():
    """row_scale, c and a bias along rows."""
    m, k, n = 600, 512, 384
    shapes = {"a": (m, k), "bias": (m,), "c": (m, n), "residual": (m, n), "row_scale": (m,)}
    rows = {name: _normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    b, col_scale = _normal(k, n, seed=8), _normal(n, seed=9)
    call = functools.partial(isogemm.matmul_fused, b=b, col_scale=col_scale, bias_dim=-2, beta=0.5, activation="gelu")
    whole = call(**rows)
    for m in (1, 2, 7, 16, 17, 100, 129, 257, 513):
        assert_bitwise_equal(call(**{name: each[:m] for name, each in rows.items()}), whole[:m], f"{m} rows")
    eager = functools.partial(call, rounding="eager")
    whole = eager(**rows)
    for m in (1, 17, 300):
        part = {name: each[:m] for name, each in rows.items()}
        assert_bitwise_equal(eager(**part), whole[:m], f"{m} rows, each operation rounded")


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_hidden_gradient_and_its_sums_follow_no_tile(number, activation, dropout_p):
    """The sums are those of what is stored, in one order by every configuration."""
    dtype, precision = NUMBERS[number]
    tokens, k, n = 1100, 256, 328
    gated, kind = activation in GATED, "out" if activation == "relu" else "pre"
    grad, weight = _normal(tokens, k, seed=1, dtype=dtype), _normal(k, n, seed=2, dtype=dtype)
    saved = _normal(*((2, tokens, n) if gated else (tokens, n)), seed=3, dtype=dtype)
    saved = saved.relu() if kind == "out" else saved
    fusion = Operands(activation=activation, dropout_p=dropout_p, seed=torch.tensor([7], device=DEVICE))
    fusion = fusion if dropout_p else fusion._replace(seed=None)
    problem = describe.product(grad, weight, None, dtype, precision, 0)
    epilogue = Epilogue(
        activation=activation, dropout=dropout_p > 0, gradient=kind, sums=True, exact=number in ("ieee", "tf32x3")
    )
    tiles = selection.candidates(replace(problem, epilogue=epilogue))
    assert len(tiles) > 1
    call = functools.partial(fused.hidden_grad, grad, weight, saved, kind, fusion, precision)
    alone, none = call(False)
    assert none is None
    for config in tiles:
        with poisoned_allocations():
            dz, sums = call(True, config)
        assert_bitwise_equal(dz, alone, f"{config}, with sums and without")
        halves = zip(dz, sums, strict=True) if gated else [(dz, sums)]
        for half, of_half in halves:
            assert_bitwise_equal(of_half, cpu.row_sums(half, configs.BIAS_ROWS), str(config))
            together = configs.BIAS_BLOCKS
            chunks = cpu.row_sums(of_half, together)
            db = fused.chunk_sums(of_half, together, None, torch.float32)
            assert_bitwise_equal(db, chunks[0] + chunks[1], str(config))
            total = _normal(n, seed=4, dtype=torch.float32)
            expected = total + chunks[0] + chunks[1]
            fused.chunk_sums(of_half, together, total, torch.float32)
            assert_bitwise_equal(total, expected, f"{config}, accumulated")


# The sums are the plain product's own: what is exact after them shows it.


@pytest.mark.parametrize("kind", DATA_KINDS)
@pytest.mark.parametrize("number", NUMBERS)
def test_sums_are_those_of_the_plain_product(number, kind):
    dtype, precision = NUMBERS[number]
    for m, k, n in ((1, 4096, 512), (33, 1000, 1003), (1030, 512, 768)):
        x, b = make_operands(kind, (m, k), (k, n), seed=3, dtype=dtype, device=DEVICE)
        weight, bias = b.T.contiguous(), _normal(n, seed=4, dtype=dtype)
        linear = functools.partial(isogemm.linear, x, weight, precision=precision)
        for out_dtype in {None, torch.float32 if number == "bf16" else None}:
            plain, biased = linear(out_dtype=out_dtype), linear(bias, out_dtype=out_dtype)
            where = f"[{m}, {k}] by {n}"
            assert_bitwise_equal(
                linear(bias, activation="relu", out_dtype=out_dtype), torch.relu(biased), f"relu, {where}"
            )
            fused = isogemm.matmul_fused(x, weight.T, bias=bias, out_dtype=out_dtype, precision=precision)
            assert_bitwise_equal(fused, biased, f"bias, {where}")
            fused = linear(alpha=-2.0, out_dtype=out_dtype)
            finite = (plain * -2.0).isfinite() & (plain.abs() > torch.finfo(plain.dtype).smallest_normal)
            assert_bitwise_equal(fused[finite], (plain * -2.0)[finite], f"alpha, {where}")
            slope = linear(activation="leaky_relu", activation_args={"negative_slope": 1.0}, out_dtype=out_dtype)
            assert_bitwise_equal(slope, plain, f"a slope of 1, {where}")


@pytest.mark.parametrize("number", ["bf16", "ieee", "tf32"])
def test_both_sums_of_a_gate_are_those_of_the_plain_product(number):
    dtype, precision = NUMBERS[number]
    wide = torch.float32 if dtype != torch.float32 else None
    for m in (1, 17, 130, 1030):
        x, weight, up = (
            _normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(((m, 1024), (384, 1024), (384, 1024)))
        )
        linear = functools.partial(isogemm.linear, x, precision=precision)
        gate, other = linear(weight, out_dtype=wide), linear(up, out_dtype=wide)  # one walk, as for 16 bits
        gated = linear(weight, weight_up=up, activation="reglu")
        assert_bitwise_equal(gated, (torch.relu(gate) * other).to(dtype), f"{m} rows")


def test_layouts_have_the_same_bits():
    a, b = make_operands("normal", (512, 1024), (1024, 768), seed=4, dtype=torch.bfloat16, device=DEVICE)
    bias = _normal(768, seed=5)
    fused = functools.partial(isogemm.matmul_fused, bias=bias, activation="gelu", out_dtype=torch.float32)
    expected = fused(a, b)
    for a_layout in ("contiguous", "transposed", "misaligned", "strided"):
        for b_layout in ("contiguous", "transposed", "misaligned"):
            for m in (1, 512):
                result = fused(with_layout(a[:m], a_layout), with_layout(b, b_layout))
                assert_bitwise_equal(result, expected[:m], f"{a_layout}, {b_layout}, {m} rows")


def test_k_longer_than_one_walk():
    x, residual, *weights, noise, other = _tensors("bf16", 40000, 256)
    for activation in ("gelu", "swiglu"):
        for out_dtype in (None, torch.float32):
            call = functools.partial(_call("bf16", activation, *weights), out_dtype=out_dtype)
            _assert_rows_follow_themselves(call, x, residual, noise, other)
    weight, _, bias, _ = weights
    plain = isogemm.linear(x, weight, bias)
    assert_bitwise_equal(isogemm.linear(x, weight, bias, activation="relu"), torch.relu(plain))


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_mlp(activation):
    x, residual, weight, up, bias, bias_up, noise, other = _tensors("bf16", 768, 768)
    options = {"weight_up": up, "bias_up": bias_up} if activation in GATED else {}
    down = _normal(768, 768, seed=11)
    call = functools.partial(mlp, weight=weight, weight_down=down, bias=bias, activation=activation, **options)
    _assert_rows_follow_themselves(call, x, residual, noise, other)


def test_masks_follow_neither_rows_nor_configuration():
    """For every M and whatever serves it, an element's mask is that of its row and column."""
    n, k = 1003, 64
    x, weight = (torch.ones(shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((4097, k), (n, k)))

    def masks(m, columns=n, activation=None, **options):
        torch.manual_seed(5)
        return isogemm.linear(x[:m], weight[:columns], dropout_p=0.5, activation=activation, **options) != 0

    whole = masks(4097)
    for m in EDGES:
        assert torch.equal(masks(m), whole[:m]), f"{m} rows"
    for columns in (1, 8, 17, 63, 64, 129, 512, 1000):
        for m in (1, 64, 600):
            assert torch.equal(masks(m, columns), whole[:m, :columns]), f"{m} rows, {columns} columns"
    for activation in ("relu", "gelu", "silu"):
        for m in (1, 100, 2000):
            assert torch.equal(masks(m, activation=activation), whole[:m]), f"{activation}, {m} rows"
    gated = masks(700, activation="swiglu", weight_up=weight)
    assert torch.equal(gated, whole[:700])


def test_bits_beside_other_work():
    x, residual, *weights, _, _ = _tensors("bf16", 4096, 1024)
    calls = [_call("bf16", activation, *weights) for activation in ("gelu", "swiglu")]
    expected = [call(x, residual=residual) for call in calls]
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    load = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(10):
        with torch.cuda.stream(other):
            load = torch.tanh(load @ load)
        for call, whole in zip(calls, expected, strict=True):
            for m in (1, 64, 512):
                assert_bitwise_equal(call(x[:m], residual=residual[:m]), whole[:m], f"{m} rows")
    torch.cuda.synchronize()


def test_signed_zeros_do_not_follow_the_padding():
    choice = torch.tensor([-1.0, -0.0, 0.0, 1.0], dtype=torch.bfloat16, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(9)
    x, weight = (
        choice[torch.randint(0, 4, shape, generator=generator, device=DEVICE)] for shape in ((512, 37), (65, 37))
    )
    x[7], x[300] = -0.0, 0.0
    for activation in ("relu", "leaky_relu", "silu", "tanh"):
        whole = isogemm.linear(x, weight, activation=activation)
        for m in (1, 8, 33, 100, 301):
            assert_bitwise_equal(
                isogemm.linear(x[:m], weight, activation=activation), whole[:m], f"{activation}, {m} rows"
            )


def test_against_eager_of_other_batches():
    """What this is for: torch's own bits do follow the batch, ours agree with torch's values all the same."""
    x, _, weight, _, bias, *_ = _tensors("bf16", 4096, 4096)
    for m in (1, 512):
        result = isogemm.linear(x[:m], weight, bias, activation="gelu")
        torch.testing.assert_close(result, F.gelu(F.linear(x[:m], weight, bias)), rtol=2e-2, atol=2e-2)
