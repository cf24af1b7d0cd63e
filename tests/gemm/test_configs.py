"""The pure part of the family: problems, the configurations that may serve them, and which one does."""

from dataclasses import replace
from itertools import product

import hypothesis
import pytest
from hypothesis import strategies as st

from isogemm.epilogues.operands import NOTHING, Epilogue
from isogemm.gemm import configs
from isogemm.gemm.configs import (
    BIAS_CHUNK,
    BIAS_ROWS,
    DTYPES,
    WORKSPACE,
    ActivationGradProblem,
    BiasGradConfig,
    BiasGradProblem,
    Config,
    Problem,
    accumulation,
    accumulation_chunk,
    candidates,
    canonical,
    choose,
    fitted,
    illegal,
    programs,
    token_chunk,
    token_edges,
    usable,
    workspace,
)
from isogemm.gemm.tables.sm_90 import TABLE

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
NUMBERS = [("bfloat16", "ieee"), ("float16", "ieee"), *(("float32", name) for name in ("ieee", "tf32", "tf32x3"))]


def _problem(m=512, n=4096, k=4096, layout="nt", dtype="bfloat16", precision="ieee", **changes):
    """Contiguous operands, or transposed views of contiguous ones."""
    a_strides = (k, 1) if layout[0] == "n" else (1, m)
    b_strides = (n, 1) if layout[1] == "n" else (1, k)
    problem = Problem(m, n, k, dtype, dtype, precision, a_strides, b_strides, (n, 1))
    return replace(problem, **changes)


def _linear(tokens, n, k, dtype="bfloat16", precision="ieee", **changes):
    return _problem(tokens, n, k, "nt", dtype, precision, chunk=accumulation_chunk(k, dtype, dtype), **changes)


def _input_grad(tokens, n, k, dtype="bfloat16", precision="ieee", **changes):
    return _problem(tokens, k, n, "nn", dtype, precision, chunk=accumulation_chunk(n, dtype, dtype), **changes)


def _weight_grad(tokens, n, k, dtype="bfloat16", precision="ieee", **changes):
    return _problem(n, k, tokens, "tn", dtype, precision, chunk=token_chunk(n, k, dtype), **changes)


SIZES = st.one_of(
    st.sampled_from([1, 3, 8, 16, 17, 33, 63, 64, 65, 127, 128, 1000, 1024, 4096, 4097, 14336, 32000, 128256]),
    st.integers(1, 2**17),
)


EPILOGUES = (
    Epilogue(), Epilogue(bias="n"), Epilogue(bias="n", activation="gelu"), Epilogue(bias="m", residual=True),
    Epilogue(activation="swiglu", saves="pre"), Epilogue(bias="n", bias_up=True, activation="geglu"),
    Epilogue(activation="silu", gradient="pre"), Epilogue(activation="swiglu", gradient="pre"),
    Epilogue(activation="silu", gradient="pre", sums=True), Epilogue(activation="swiglu", gradient="pre", sums=True),
)  # fmt: skip


@st.composite
def problems(draw):
    """All that operations ask for: layouts, gaps, misalignment, batches, levels of k, chunks, sums, epilogues."""
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    dtype, precision = draw(st.sampled_from(NUMBERS))

    def strides(rows, columns):
        outer, inner = draw(
            st.sampled_from([(columns, 1), (1, rows), (2 * columns, 2), (columns + 3, 1), (1, rows + 8)])
        )
        return outer, inner

    kind = draw(st.sampled_from(["product", "weight gradient"]))
    out_dtype = draw(st.sampled_from([dtype, "float32"]))
    problem = Problem(
        m, n, k, dtype, out_dtype, precision, strides(m, k), strides(k, n), (n, 1),
        a_aligned=draw(st.booleans()), b_aligned=draw(st.booleans()), tma=draw(st.sampled_from([True, True, False])),
        arch=draw(st.sampled_from(ARCHS)), sm_count=draw(st.sampled_from([1, 20, 108, 132, 148, 304])),
    )  # fmt: skip
    if kind == "product":
        batch = draw(st.sampled_from([1, 1, 2, 6, 4096]))
        inner = 3 if batch == 6 else batch
        epilogue = draw(st.sampled_from(EPILOGUES if batch == 1 else EPILOGUES[:2]))
        return replace(
            problem, chunk=accumulation_chunk(k, dtype, out_dtype), epilogue=epilogue, batch=batch, batch_inner=inner,
            a_batch_strides=(inner * m * k, m * k) if batch > 1 else (0, 0),
        )  # fmt: skip
    accumulate = draw(st.booleans())
    k_inner = draw(st.sampled_from([0, 0, 7]))
    return replace(
        problem, chunk=token_chunk(m, n, dtype), accumulate=accumulate, out_dtype="float32" if accumulate else dtype,
        c_strides=draw(st.sampled_from([(n, 1), (1, m), (n + 5, 1)])) if accumulate else (n, 1),
        c_aligned=not accumulate or draw(st.booleans()),
        k_inner=k_inner, k_outer_strides=(7 * m, 9 * n) if k_inner else (0, 0),
    )  # fmt: skip


@hypothesis.settings(max_examples=1500, deadline=None)
@hypothesis.given(problem=problems())
def test_chosen_is_legal_and_a_candidate(problem):
    chosen, all_of_them = choose(problem), candidates(problem)
    assert choose(problem) == chosen
    assert chosen in all_of_them
    assert fitted(problem, canonical(problem)) == all_of_them[0]
    assert len({str(config) for config in all_of_them}) == len(set(all_of_them)) == len(all_of_them)
    for config in all_of_them:
        assert illegal(problem, config) == ""
        assert fitted(problem, config) == config
        assert workspace(problem, config) <= WORKSPACE
        assert programs(problem, config) >= 1


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(problem=problems())
def test_bits_do_not_follow_the_configuration(problem):
    """Where block_k or the side of an operand would change them, every candidate has the same."""
    shared = {(config.block_k, config.swapped) for config in candidates(problem)}
    if problem.number == "tf32x3":
        assert shared == {(32, False)}
    elif problem.number == "ieee":
        assert len({block_k for block_k, _ in shared}) == 1


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(problem=problems())
def test_programs_cover_every_output(problem):
    """A program for every tile and chunk, or no more than fit the chip at once."""
    config = choose(problem)
    m, n = (problem.n, problem.m) if config.swapped else (problem.m, problem.n)
    block_m = config.block_m // (problem.weights if config.swapped else 1)
    block_n = config.columns // (1 if config.swapped else problem.weights)
    tiles = problem.batch * -(-m // block_m) * -(-n // block_n)
    work = tiles * (problem.chunks if accumulation(problem, config) == "partials" else 1)
    assert programs(problem, config) == (min(work, config.residents * problem.sm_count) if config.persistent else work)


@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "gfx90a", "gfx1100", "cpu", ""])
def test_other_architectures_are_not_served(arch):
    assert arch in usable(arch)
    assert usable(arch)


@pytest.mark.parametrize("arch", [*ARCHS, "sm_103", "sm_121"])
def test_architectures_served(arch):
    assert usable(arch) == ""
    for tokens, (dtype, precision) in product((1, 64, 4096), NUMBERS):
        problem = _linear(tokens, 4096, 4096, dtype, precision, arch=arch)
        assert illegal(problem, choose(problem)) == ""


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "gfx942"])
def test_only_what_the_hardware_has(arch):
    for tokens, kind in product((1, 16, 128, 4096), (_linear, _input_grad, _weight_grad)):
        config = choose(kind(tokens, 4096, 4096, arch=arch))
        assert config.kernel == "pointer"
        assert not config.pdl


@pytest.mark.parametrize(("dtype", "precision"), NUMBERS)
def test_the_chunk_follows_the_weight_alone(dtype, precision):
    """A power of two that every block_k of a candidate divides; it has no way to know the number of tokens."""
    for n, k in product((1, 3, 64, 100, 128, 1000, 1024, 4096, 14336, 128256), repeat=2):
        chunk = token_chunk(n, k, dtype)
        assert chunk & (chunk - 1) == 0
        assert BIAS_CHUNK <= chunk <= 4096
        assert chunk % BIAS_CHUNK == 0
    for n, k in ((256, 1024), (1000, 1001), (4096, 4096)):
        for config in candidates(_weight_grad(10000, n, k, dtype, precision)):
            assert token_chunk(n, k, dtype) % config.block_k == 0


def test_chunks_of_bias_gradients():
    assert BIAS_CHUNK % BiasGradConfig().block_t == 0
    assert BIAS_CHUNK % BIAS_ROWS == 0


@pytest.mark.parametrize(
    ("others", "vectors"),
    [
        ({}, True),
        ({"n": 127, "strides": (127, 1)}, False),
        ({"n": 127, "strides": (128, 1)}, False),
        ({"strides": (129, 1)}, False),
        ({"aligned": False}, False),
        ({"t_inner": 10, "t_outer": 1281}, False),
        ({"t_inner": 10, "t_outer": 1280}, True),
        ({"strides": (1, 128)}, False),
        ({"strides": (256, 2)}, False),
    ],
    ids=str,
)
def test_rows_of_bias_gradients_that_are_read_by_vectors(others, vectors):
    """Loads of lone elements are not overlapped: they would be seven times slower."""
    problem = replace(BiasGradProblem(100, 128, "float32", "float32", (128, 1), BIAS_CHUNK), **others)
    assert problem.vectors is vectors


@pytest.mark.parametrize(
    ("t", "n", "split"), [(2048, 64, 0), (2049, 64, 1), (2049, 8191, 1), (2049, 8192, 0), (2**22, 4097, 0)]
)
def test_bias_gradients_of_few_columns_are_summed_by_chunks_side_by_side(t, n, split):
    assert BiasGradProblem(t, n, "float32", "float32", (n, 1), BIAS_CHUNK).split == split


@pytest.mark.parametrize(
    ("t", "n", "columns"), [(1024, 8192, 32), (1024, 8193, 64), (2048, 4096, 32), (2049, 4096, 64)]
)
def test_few_programs_of_an_activation_gradient_are_narrow(t, n, columns):
    problem = ActivationGradProblem(t, n, "bfloat16", Epilogue(activation="gelu"), n, sums=True)
    assert problem.block_n == columns
    assert replace(problem, dtype="float32", epilogue=Epilogue(activation="swiglu")).block_n == 32


def test_sums_over_rows_are_of_whole_blocks():
    """Their order follows no tile: a block is in one, and its rows are the tile's."""
    summed = replace(_input_grad(512, 1024, 1024), epilogue=Epilogue(activation="silu", gradient="pre", sums=True))
    for config in (Config(32, 64, 64, 4, 3), Config(64, 64, 64, 4, 3, swapped=True)):
        assert "sums over rows" in illegal(summed, config)
        assert not illegal(replace(summed, epilogue=replace(summed.epilogue, sums=False)), config)
    for tokens in (1, 16, 40, 4096):
        assert choose(replace(summed, m=tokens)).block_m % BIAS_ROWS == 0


def test_long_walks_are_cut():
    """For 16-bit operands with a float32 result sooner: their rounding hides nothing."""
    for dtype in DTYPES:
        assert accumulation_chunk(configs.LONGEST_WALK, dtype, dtype) == 0
        chunk = accumulation_chunk(configs.LONGEST_WALK + 1, dtype, dtype)
        assert 0 < chunk <= configs.LONGEST_WALK
        assert chunk & (chunk - 1) == 0
    wide = accumulation_chunk(4096, "bfloat16", "float32")
    assert 0 < wide < 4096
    assert wide & (wide - 1) == 0
    assert accumulation_chunk(wide, "bfloat16", "float32") == 0


KINDS = [_linear, _input_grad, _weight_grad]


@pytest.mark.parametrize(("dtype", "precision"), NUMBERS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.strip("_"))
def test_every_choice_is_made_at_an_edge(kind, dtype, precision):
    """So that whoever compiles for the edges has compiled for every number of tokens."""
    most = 4200
    for n, k in ((4096, 4096), (256, 1024), (1000, 1001)):
        edges = token_edges(kind(1, n, k, dtype, precision), most)
        assert edges == sorted(set(edges))
        assert (edges[0], edges[-1]) == (1, most)
        at_edges = {choose(kind(tokens, n, k, dtype, precision)) for tokens in edges}
        for tokens in (*range(1, 280), *range(280, most, 7)):
            assert choose(kind(tokens, n, k, dtype, precision)) in at_edges, (tokens, n, k)


def test_the_walk_of_each_configuration():
    small, large = Config(64, 64, 64, 4, 3), Config(128, 256, 64, 8, 3, persistent=True)
    one, chunked = _weight_grad(1024, 4096, 4096), _weight_grad(10000, 4096, 4096)
    into_total = {"accumulate": True, "out_dtype": "float32"}
    assert accumulation(one, large) == "one"
    assert accumulation(chunked, small) == "registers"
    assert accumulation(chunked, large) == "scratch"
    assert accumulation(replace(chunked, out_dtype="float32"), large) == "in place"
    assert accumulation(replace(chunked, **into_total), small) == "in place"
    assert accumulation(replace(chunked, out_dtype="float32", epilogue=Epilogue(bias="n")), large) == "scratch"
    assert accumulation(chunked, replace(small, parallel_chunks=True)) == "partials"
    assert workspace(chunked, small) == workspace(one, large) == 0
    assert workspace(chunked, large) == 4 * 132 * 128 * 256
    assert workspace(_weight_grad(3000, 256, 1024), replace(small, parallel_chunks=True)) == 4 * 3 * 256 * 1024


MISALIGNED = {
    "address": {"a_aligned": False},
    "row": {"a_strides": (4097, 1)},
    "no contiguous axis": {"a_strides": (8192, 2)},
    "one row for all": {"a_strides": (0, 1)},
}


@pytest.mark.parametrize("change", MISALIGNED.values(), ids=MISALIGNED.keys())
def test_tma_reads_rows_of_16_bytes_from_aligned_addresses(change):
    tma = Config(128, 128, 64, 8, 3, "tma")
    problem = _problem()
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


def test_tma_serves_no_batches_and_no_levels():
    tma = Config(128, 128, 64, 8, 3, "tma")
    for change in ({"batch": 2}, {"k_inner": 64}, {"arch": "sm_80"}, {"arch": "gfx942"}, {"tma": False}):
        problem = _problem(**change)
        assert not configs.reads_a_by_tma(problem, tma)
        assert choose(problem).kernel == "pointer"


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
def test_warpgroups_serve_no_tf32_that_lies_across_k(layout, arch):
    """They read it along k alone: each tile would be turned first, at ten times the time."""
    epilogues = [NOTHING, Epilogue(activation="gelu", gradient="pre", sums=True)] if layout == "nn" else [NOTHING]
    for m, n, k, epilogue in product((17, 96, 1000, 4096), (90, 96, 768, 4096), (64, 999, 9408), epilogues):
        chunk = configs.token_chunk(m, n, "float32") if layout == "tn" else 0
        a_strides, b_strides = (k, 1) if layout[0] == "n" else (1, m), (n, 1) if layout[1] == "n" else (1, k)
        problem = Problem(
            m,
            n,
            k,
            "float32",
            "float32",
            "tf32",
            a_strides,
            b_strides,
            (n, 1),
            chunk=chunk,
            epilogue=epilogue,
            arch=arch,
        )
        assert not configs.warpgroups(configs.choose(problem)), problem


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (Config(128, 96, 64, 8, 3), "powers of two"),
        (Config(128, 128, 64, 6, 3), "powers of two"),
        (Config(8, 128, 64, 4, 3), "at least 16 x 8 x 16"),
        (Config(64, 64, 8192, 4, 1), "block_k divides the chunk"),
        (Config(64, 64, 64, 4, 3, rest_n=32), "rest_n is a power of two up to block_n, and read by TMA"),
        (Config(64, 64, 64, 4, 3, "tma", rest_n=128), "rest_n is a power of two up to block_n"),
        (Config(64, 64, 64, 4, 3, "stream"), "stream is persistent"),
        (Config(64, 64, 64, 4, 3, persistent=True, pdl=True), "nothing persistent launches early"),
        (Config(128, 256, 64, 8, 3), "need a persistent grid"),
        (Config(128, 128, 64, 8, 3, parallel_chunks=True), "bytes, more than 67108864"),
        (Config(128, 256, 64, 8, 8, persistent=True), "bytes of shared memory"),
    ],
)
def test_illegal_configs_are_told_why(config, rule):
    assert rule in illegal(_weight_grad(10000, 4096, 4096), config)


def test_rules_of_numbers_and_chunks():
    for precision in ("ieee", "tf32x3"):
        assert "its bits follow it" in illegal(_problem(dtype="float32", precision=precision), Config(64, 64, 64, 4, 2))
    assert "not swapped" in illegal(
        _problem(dtype="float32", precision="tf32x3"), Config(64, 64, 32, 4, 2, swapped=True)
    )
    assert "two chunks or more" in illegal(_weight_grad(100, 256, 256), Config(64, 64, 64, 4, 2, parallel_chunks=True))
    one_by_pointer = _problem(a_aligned=False)
    assert "TMA reads" in illegal(one_by_pointer, Config(64, 64, 64, 4, 2, "tma", rest_n=32))


def test_choose_refuses_where_nothing_serves(monkeypatch):
    monkeypatch.setattr(configs, "_SHARED_MEMORY", {"sm_90": 1})
    with pytest.raises(ValueError, match=r"no configuration serves \[512,4096,4096\] bfloat16 nt: takes about"):
        choose(_problem())


def test_transposed():
    problem = _problem(3, 5, 7, "nn", k_inner=2, k_outer_strides=(8, 9), a_aligned=False)
    other = problem.transposed()
    assert (other.m, other.n, other.k, other.layout) == (5, 3, 7, "tt")
    assert (other.a_aligned, other.b_aligned, other.k_outer_strides) == (True, False, (9, 8))
    assert other.transposed() == problem


def test_names():
    assert str(_problem(8, 5, 7)) == "[8,5,7] bfloat16 nt"
    assert str(_weight_grad(9000, 4096, 4096, "float32", "tf32", accumulate=True)) == (
        "[4096,4096,9000] float32/tf32 tn chunk 4096 accumulated"
    )
    assert str(_problem(8, 5, 7, batch=6, out_dtype="float32")) == "6 x [8,5,7] bfloat16 nt -> float32"
    assert _problem(a_strides=(8192, 2)).layout == "xt"
    assert str(Config(128, 64, 32, 4, 5, "tma", rest_n=32)) == "tma 128x64+32x32 w4 s5"
    assert str(BiasGradProblem(9, 5, "float16", "float32", (5, 1), 1024, accumulate=True)) == (
        "[9,5] float16 chunk 1024 accumulated"
    )


def test_names_of_the_tables_are_their_own():
    values = {values for by_tokens in TABLE.values() for _, values in by_tokens}
    assert len({str(Config(*value)) for value in values}) == len(values)
