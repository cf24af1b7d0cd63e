"""The pure part of the family: problems, and the configurations that may serve them."""

from dataclasses import replace
from itertools import product

import pytest
from gemm_problems import NUMBERS, input_grad, linear, make_problem, weight_grad

from isogemm.epilogues.operands import Epilogue
from isogemm.gemm import configs
from isogemm.gemm.configs import (
    BIAS_CHUNK,
    BIAS_ROWS,
    Config,
    accumulation,
    accumulation_chunk,
    default,
    fitted,
    illegal,
    token_chunk,
    usable,
    workspace,
)
from isogemm.gemm.selection import candidates, choose


@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "gfx90a", "gfx1100", "cpu", ""])
def test_other_architectures_are_not_served(arch):
    assert arch in usable(arch)
    assert usable(arch)


@pytest.mark.parametrize(("dtype", "precision"), NUMBERS)
def test_the_chunk_follows_the_weight_alone(dtype, precision):
    """A power of two that every block_k of a candidate divides; it has no way to know the number of tokens."""
    for n, k in product((1, 3, 64, 100, 128, 1000, 1024, 4096, 14336, 128256), repeat=2):
        chunk = token_chunk(n, k, dtype)
        assert chunk & (chunk - 1) == 0
        assert BIAS_CHUNK <= chunk <= 4096
        assert chunk % BIAS_CHUNK == 0
    for n, k in ((256, 1024), (1000, 1001), (4096, 4096)):
        for config in candidates(weight_grad(10000, n, k, dtype, precision)):
            assert token_chunk(n, k, dtype) % config.block_k == 0


def test_sums_over_rows_are_of_whole_blocks():
    """Their order follows no tile: a block is in one, and its rows are the tile's."""
    summed = replace(input_grad(512, 1024, 1024), epilogue=Epilogue(activation="silu", gradient="pre", sums=True))
    for config in (Config(32, 64, 64, 4, 3), Config(64, 64, 64, 4, 3, swapped=True)):
        assert "sums over rows" in illegal(summed, config)
        assert not illegal(replace(summed, epilogue=replace(summed.epilogue, sums=False)), config)
    for tokens in (1, 16, 40, 4096):
        assert choose(replace(summed, m=tokens)).config.block_m % BIAS_ROWS == 0


def _chunk(n, k, layout="nt", dtype="bfloat16", precision="ieee", m=512, **changes):
    return accumulation_chunk(make_problem(m, n, k, layout, dtype, precision, **changes))


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_long_walks_are_cut(layout):
    """For 16-bit operands with a float32 result sooner: their rounding hides nothing."""
    n = configs.LONGEST_SUM  # wide: it has many tiles
    for dtype, precision in NUMBERS:
        assert _chunk(n, configs.LONGEST_SUM, layout, dtype, precision) == 0
        chunk = _chunk(n, configs.LONGEST_SUM + 1, layout, dtype, precision)
        assert 0 < chunk <= configs.LONGEST_SUM
        assert chunk & (chunk - 1) == 0
        assert _chunk(64, 2 * configs.LONGEST_SUM, layout, dtype, precision) == chunk
    for n in (64, 4096, 16384):
        wide = _chunk(n, 8192, layout, out_dtype="float32")
        assert 0 < wide < 4096
        assert wide & (wide - 1) == 0
        assert _chunk(n, wide, layout, out_dtype="float32") == 0


@pytest.mark.parametrize(
    ("n", "k", "chunk"),
    [
        (1536, 8960, 4608), (3584, 8192, 4096), (2048, 11008, 5632), (2048, 5632, 3072), (1, 4096, 2048),
        (100, 4097, 2560),
        (2047, 4096, 2048), (2048, 4096, 0), (2048, 4097, 2560),  # k > 2 n
        (1, 4095, 0), (1024, 3072, 0),  # k is 4096 or more
        (4096, 8192, 0), (4096, 8193, 4608), (4096, 14336, 7168), (4097, 14336, 0), (5120, 13824, 0),  # n up to 4096
        (4096, 16384, 8192), (4096, 16385, 8192), (64, 32768, 8192),  # as long as any sum may be, and longer
        (14336, 4096, 0), (4096, 4096, 0), (3584, 18944, 8192),
    ],
)  # fmt: skip
def test_long_and_narrow_weights_are_cut_in_two(n, k, chunk):
    """But not in TF32 and ieee. Neither the rows nor how they lie matter, nor a batch of them."""
    assert _chunk(n, k) == chunk
    for (dtype, precision), m, layout in product(NUMBERS, (1, 64, 2048, 65536), ("nt", "tt")):
        in_two = dtype != "float32" or precision == "tf32x3" or k > configs.LONGEST_SUM
        assert _chunk(n, k, layout, dtype, precision, m) == (chunk if in_two else 0)
    changed = {"batch": 6, "a_aligned": False, "b_aligned": False, "a_strides": (2 * k, 2), "arch": "gfx942"}
    for name, value in changed.items():
        assert _chunk(n, k, **{name: value}) == chunk
    assert _chunk(n, k, b_strides=(1, k + 8)) == chunk
    assert _chunk(n, k, epilogue=Epilogue(activation="swiglu")) == chunk
    if chunk > 0 and k <= configs.LONGEST_SUM:
        assert chunk % 512 == 0
        assert chunk < k <= 2 * chunk


@pytest.mark.parametrize(("n", "k"), [(1536, 8960), (2048, 11008), (1, 4096), (4096, 14336)])
def test_weights_not_contiguous_along_k_are_not_cut_in_two(n, k):
    """As in an input gradient, whose weight [k, n] lies along n, and in torch.mm of such a matrix."""
    for layout, m in product(("nn", "tn"), (1, 2048)):
        assert _chunk(n, k, layout, m=m) == (0 if n > 1 else _chunk(n, k))
    assert _chunk(n, k, b_strides=(2, 2 * k)) == 0
    if n > 1:
        assert input_grad(64, k, n).chunk == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_cuts_are_served_by_every_arithmetic(arch):
    for (dtype, precision), m in product(NUMBERS, (1, 16, 64, 512, 8192)):
        problem = linear(m, 1536, 8960, dtype, precision, arch=arch)
        assert problem.chunks == (1 if precision in ("tf32", "ieee") and dtype == "float32" else 2)
        problem = replace(problem, chunk=4608)
        chosen = choose(problem).config
        assert illegal(problem, chosen) == ""
        assert all(problem.chunk % config.block_k == 0 for config in candidates(problem))


def test_the_walk_of_each_configuration():
    small, large = Config(64, 64, 64, 4, 3), Config(128, 256, 64, 8, 3, persistent=True)
    one, chunked = weight_grad(1024, 4096, 4096), weight_grad(10000, 4096, 4096)
    into_total = {"accumulate": True, "out_dtype": "float32"}
    assert accumulation(one, large) == "one"
    assert accumulation(chunked, small) == "registers"
    assert accumulation(chunked, large) == "scratch"
    assert accumulation(replace(chunked, out_dtype="float32"), large) == "in place"
    assert accumulation(replace(chunked, **into_total), small) == "in place"
    assert accumulation(replace(chunked, out_dtype="float32", epilogue=Epilogue(bias="n")), large) == "scratch"
    assert accumulation(chunked, replace(small, parallel_chunks="partials")) == "partials"
    stream = Config(128, 128, 64, 8, 5, "stream", persistent=True)
    assert accumulation(chunked, stream) == "registers"
    assert accumulation(chunked, replace(stream, num_warps=4)) == "scratch"
    assert workspace(chunked, small) == workspace(chunked, stream) == workspace(one, large) == 0
    assert workspace(chunked, large) == 4 * 132 * 128 * 256
    assert workspace(weight_grad(3000, 256, 1024), replace(small, parallel_chunks="partials")) == 4 * 3 * 256 * 1024


@pytest.mark.parametrize(
    ("block_m", "block_n", "rest_n", "warps", "kept"),
    [
        (64, 64, 32, 4, "registers"), (128, 64, 0, 4, "registers"),  # up to 64 sums a thread, with a rest or without
        (128, 128, 64, 8, "registers"),  # up to 96, where a tile has a rest and 8 warps
        (128, 128, 128, 8, "scratch"), (128, 256, 64, 8, "scratch"), (128, 64, 32, 4, "scratch"),
        (128, 256, 128, 16, "scratch"), (64, 128, 64, 4, "scratch"),
    ],
)  # fmt: skip
def test_chunks_wait_in_registers_if_there_is_room(block_m, block_n, rest_n, warps, kept):
    problem = linear(2048, 1536, 8960)
    assert problem.chunks == 2
    config = Config(block_m, block_n, 64, warps, 3, "tma", rest_n=rest_n)
    assert accumulation(problem, config) == kept
    assert ("persistent grid" in illegal(problem, config)) == (kept == "scratch")
    fits = fitted(problem, config)  # a rest whose sums would wait in memory is dropped
    assert fits.rest_n == (rest_n if kept == "registers" else 0)
    assert accumulation(problem, fits) == ("registers" if fits.block_n < 256 and warps < 16 else "scratch")
    assert illegal(problem, fits) == ""
    total = replace(problem, out_dtype="float32", accumulate=True)
    assert accumulation(total, config) == "in place"
    if not rest_n:
        assert accumulation(problem, replace(config, parallel_chunks="gathered")) == "gathered"
    assert accumulation(problem, replace(config, parallel_chunks="queued")) == "scratch"


MISALIGNED = {
    "address": {"a_aligned": False},
    "row": {"a_strides": (4097, 1)},
    "no contiguous axis": {"a_strides": (8192, 2)},
    "one row for all": {"a_strides": (0, 1)},
}


@pytest.mark.parametrize("change", MISALIGNED.values(), ids=MISALIGNED.keys())
def test_tma_reads_rows_of_16_bytes_from_aligned_addresses(change):
    tma = Config(128, 128, 64, 8, 3, "tma")
    problem = make_problem()
    assert configs.reads_a_by_tma(problem, tma)
    changed = replace(problem, **change)
    assert not configs.reads_a_by_tma(changed, tma)
    assert configs.reads_b_by_tma(changed, tma)
    assert illegal(changed, tma) == ""
    assert "cannot be read by TMA" in illegal(changed, replace(tma, kernel="stream", persistent=True))
    assert fitted(changed, replace(tma, kernel="stream", persistent=True)).kernel == "tma"
    other = {
        key.replace("a_", "b_"): value[::-1] if isinstance(value, tuple) else value for key, value in change.items()
    }
    neither = replace(changed, **other)
    assert illegal(neither, tma) == "no operand can be read by TMA"
    assert fitted(neither, tma).kernel == "pointer"


@pytest.mark.parametrize("change", [{"a_aligned": False}, {"b_aligned": False}, {"a_strides": (1001, 1)}])
@pytest.mark.parametrize("config", [Config(128, 64, 128, 4, 4), Config(32, 8, 512, 2, 4, swapped=True)], ids=str)
def test_tiles_are_small_where_rows_are_read_in_pieces(config, change):
    """By whichever kernel: each piece has its address in a register, and larger tiles would spill."""
    aligned = make_problem(16, 1024, 1000)
    assert fitted(aligned, config) == config
    small = fitted(replace(aligned, **change), config)
    assert (small.block_m, small.block_n, small.block_k) == (min(config.block_m, 64), config.block_n, 64)
    assert fitted(replace(aligned, tma=False, **change), config) == config


def test_tma_serves_no_part_of_a_matrix_that_ends_inside_16_bytes():
    """Rows may be as far apart as TMA wants: the GPU reports an illegal instruction."""
    config = Config(128, 128, 64, num_warps=8, num_stages=3, kernel="tma")
    whole = replace(linear(256, 1000, 1024), a_strides=(2048, 1), b_strides=(1, 2048), c_strides=(2048, 1))
    assert configs.reads_a_by_tma(whole, config)
    assert configs.reads_b_by_tma(whole, config)
    assert configs.writes_c_by_tma(whole, config)
    assert not configs.reads_a_by_tma(replace(whole, k=1003), config)
    assert not configs.reads_b_by_tma(replace(whole, k=1003), config)
    assert not configs.writes_c_by_tma(replace(whole, n=1003), config)


def test_tma_serves_no_batches_and_no_levels():
    tma = Config(128, 128, 64, 8, 3, "tma")
    for change in ({"batch": 2}, {"k_inner": 64}, {"arch": "sm_80"}, {"arch": "gfx942"}, {"tma": False}):
        problem = make_problem(**change)
        assert not configs.reads_a_by_tma(problem, tma)
        assert choose(problem).config.kernel == "pointer"


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (Config(128, 96, 64, 8, 3), "powers of two"),
        (Config(128, 128, 64, 6, 3), "powers of two"),
        (Config(8, 128, 64, 4, 3), "at least 16 x 8 x 16"),
        (Config(64, 64, 64, 4, 0), "num_stages are at least 1"),
        (Config(64, 64, 64, 4, -2), "num_stages are at least 1"),
        (Config(64, 64, 8192, 4, 1), "block_k divides the chunk"),
        (Config(64, 64, 64, 4, 3, rest_n=32), "rest_n is a power of two up to block_n, and read by TMA"),
        (Config(64, 64, 64, 4, 3, "tma", rest_n=128), "rest_n is a power of two up to block_n"),
        (Config(64, 64, 64, 4, 3, "stream"), "stream is persistent"),
        (Config(64, 64, 64, 4, 3, persistent=True, pdl=True), "nothing persistent launches early"),
        (Config(128, 256, 64, 8, 3), "need a persistent grid"),
        (Config(128, 128, 64, 8, 3, parallel_chunks="partials"), "bytes, more than 67108864"),
        (Config(128, 256, 64, 8, 8, persistent=True), "bytes of shared memory"),
        (Config(128, 128, 64, 8, 3, persistent=True, parallel_chunks="queued"), "are not persistent"),
        (Config(128, 256, 64, 8, 3, "stream", persistent=True, balanced=True), "of one sum each"),
    ],
)
def test_illegal_configs_are_told_why(config, rule):
    assert rule in illegal(weight_grad(10000, 4096, 4096), config)


def test_rules_of_numbers_and_chunks():
    for precision in ("ieee", "tf32x3"):
        assert "its bits depend on it" in illegal(
            make_problem(dtype="float32", precision=precision), Config(64, 64, 64, 4, 2)
        )
    assert "two chunks or more" in illegal(
        weight_grad(100, 256, 256), Config(64, 64, 64, 4, 2, parallel_chunks="partials")
    )
    one_by_pointer = make_problem(a_aligned=False)
    assert "TMA reads" in illegal(one_by_pointer, Config(64, 64, 64, 4, 2, "tma", rest_n=32))


def test_operands_split_by_a_pass():
    """What no pass can split is split in registers: both operands, or the larger one."""
    both = Config(64, 64, 32, 4, 2, "tma", rest_n=64, split="both")
    problem = make_problem(1000, 3000, 2001, dtype="float32", precision="tf32x3", a_aligned=False)
    assert fitted(problem, both) == both
    assert configs.halves_at(problem, both) == (0, 8 * 1000 * 2004, 8 * 4000 * 2004)
    assert workspace(problem, replace(both, split="b")) == 8 * 3000 * 2004
    assert not configs.reads_a_by_tma(problem, replace(both, split="b"))
    chunked, parallel = replace(problem, m=3, n=5, chunk=1024), replace(both, parallel_chunks="partials")
    assert configs.chunk_bytes(chunked, parallel) == 4 * 2 * 3 * 5
    assert configs.halves_at(chunked, parallel)[0] == 128
    for change in ({"precision": "tf32"}, {"batch": 2}, {"k_inner": 3}, {"tma": False}, {"arch": "sm_80"}):
        other = replace(problem, **change)
        assert illegal(other, both)
        assert not fitted(other, both).split
    gated = replace(problem, epilogue=Epilogue(activation="swiglu"))
    assert "one tf32x3 product" in illegal(gated, both)
    assert not fitted(gated, both).split
    long = make_problem(512, 65536, 4096, dtype="float32", precision="tf32x3")
    assert "more than 1073741824" in illegal(long, both)
    assert fitted(long, both) == replace(both, split="a", rest_n=0)
    assert not fitted(replace(long, m=65536), both).split
    assert default(problem).split == "both"
    assert illegal(problem, default(problem)) == ""
    assert not default(replace(problem, arch="sm_100")).split


def test_programs_that_wait_for_others():
    """They need no memory for every chunk, an epilogue may follow, and a wave that is full needs no balance."""
    into_total = weight_grad(65536, 1024, 1024, out_dtype="float32", accumulate=True)
    apart = Config(128, 128, 64, 8, 3, "tma", parallel_chunks="partials")
    queued, gathered = (replace(apart, parallel_chunks=each) for each in ("queued", "gathered"))
    assert "more than 67108864" in illegal(into_total, apart)
    assert illegal(into_total, queued) == ""
    assert workspace(into_total, queued) == 64 * 8
    assert configs.programs(into_total, queued) == 64 * into_total.chunks
    followed = make_problem(64, 1536, 8960, chunk=4480, epilogue=Epilogue(bias="n", activation="relu"))
    assert fitted(followed, queued) == queued
    assert accumulation(followed, queued) == "scratch"
    assert workspace(followed, queued) == 12 * (4 * 128 * 128 + 8)
    assert fitted(followed, apart) == gathered
    assert accumulation(followed, gathered) == "gathered"
    assert workspace(followed, gathered) == 12 * (4 * 128 * 128 + 8)
    assert workspace(replace(followed, chunk=1792), gathered) == 4 * 12 * (4 * 128 * 128 + 8)
    assert illegal(weight_grad(8192, 1024, 1024, out_dtype="float32", accumulate=True), gathered) == ""
    assert "at most 32 chunks" in illegal(replace(into_total, chunk=1024), gathered)
    thrice = replace(followed, chunk=3072)
    for problem, wide in ((followed, replace(gathered, rest_n=64)), (thrice, replace(gathered, num_warps=4))):
        assert "gathered in tiles without a rest" in illegal(problem, wide)
    assert illegal(followed, replace(gathered, num_warps=4)) == ""
    gated = replace(followed, epilogue=Epilogue(activation="swiglu"))
    assert fitted(gated, queued) == queued
    assert fitted(gated, gathered) == gathered
    for change in ({"chunk": 0}, {"batch": 2}):
        assert not fitted(make_problem(64, 1536, 8960, **{"chunk": 4480, **change}), queued).parallel_chunks
    stream = Config(128, 256, 64, 8, 3, "stream", persistent=True, balanced=True)
    ragged = make_problem(1024, 14336, 4096)
    assert illegal(ragged, stream) == ""
    assert workspace(ragged, stream) == 132 * (4 * 128 * 256 + 8)
    for other in (ragged, replace(ragged, n=4096), replace(ragged, m=132 * 128, n=256)):
        assert fitted(other, stream) == stream
        assert configs.balances(other, stream) == (other is ragged)  # the others have one wave, or whole ones
    assert not fitted(replace(ragged, chunk=2048), stream).balanced
    elsewhere = replace(ragged, arch="gfx942", chunk=2048)
    assert "NVIDIA" in illegal(elsewhere, fitted(elsewhere, queued))


def test_transposed():
    problem = make_problem(3, 5, 7, "nn", k_inner=2, k_outer_strides=(8, 9), a_aligned=False)
    other = problem.transposed()
    assert (other.m, other.n, other.k, other.layout) == (5, 3, 7, "tt")
    assert (other.a_aligned, other.b_aligned, other.k_outer_strides) == (True, False, (9, 8))
    assert other.transposed() == problem


def test_names():
    assert str(make_problem(8, 5, 7)) == "[8,5,7] bfloat16 nt"
    assert str(weight_grad(9000, 4096, 4096, "float32", "tf32", accumulate=True)) == (
        "[4096,4096,9000] float32/tf32 tn chunk 4096 accumulated"
    )
    assert str(make_problem(8, 5, 7, batch=6, out_dtype="float32")) == "6 x [8,5,7] bfloat16 nt -> float32"
    assert make_problem(a_strides=(8192, 2)).layout == "xt"
    assert str(Config(128, 64, 32, 4, 5, "tma", rest_n=32)) == "tma 128x64+32x32 w4 s5"


@pytest.mark.parametrize(
    ("block", "legal"), [((16, 32, 4), True), ((16, 16, 2), True), ((16, 16, 4), False), ((128, 8, 16), False)]
)
def test_no_thread_has_a_copy_of_a_sum_that_is_added_to_in_memory(block, legal):
    """Warps that repeat a tile would each add to what another has added to already. Gathered sums are only read."""
    rows, columns, warps = block
    problem = make_problem(64, 64, 8192, chunk=1024)
    queued = Config(rows, columns, 32, warps, 2, parallel_chunks="queued")
    assert ("none has copies" not in illegal(problem, queued)) == legal
    assert illegal(problem, replace(queued, parallel_chunks="gathered")) == ""
    rest = Config(128, 64, 32, 8, 2, "tma", parallel_chunks="queued", rest_n=8)
    assert illegal(problem, rest) == ""
    assert "none has copies" in illegal(problem, replace(rest, num_warps=16))
