"""The pure part of the family: who serves what, with which configuration."""

import random
import time
from dataclasses import replace
from itertools import product

import hypothesis
import pytest
from hypothesis import strategies as st
from tiny_problems import ARCHS, BATCHES, PRECISIONS, make_problem, problems

from isogemm.core import tables
from isogemm.tiny import configs
from isogemm.tiny.configs import (
    KERNELS,
    MENU,
    DotConfig,
    RegistersConfig,
    WholeConfig,
    choose,
    eligible,
    gate,
    illegal,
    parts,
    programs,
    usable,
)


@pytest.mark.parametrize("axis", ["m", "n", "k"])
def test_sizes_up_to_64(axis):
    for size in (1, 63, 64):
        assert eligible(make_problem(**{axis: size})) == ""
    assert eligible(make_problem(**{axis: 65})) == "m, n or k is above 64"
    assert eligible(make_problem(**{axis: 0})) == "an empty size"


def test_more_than_one_matrix():
    assert eligible(make_problem(batch=2)) == ""
    assert eligible(make_problem(batch=1)) == "batch is 1"
    assert eligible(make_problem(batch=0)) != ""


@pytest.mark.parametrize("dtype", ["float64", "int32", "int8", "complex64", "bool"])
def test_other_dtypes_are_not_served(dtype):
    assert eligible(make_problem(dtype=dtype)) == f"dtype {dtype} is not one of float32, float16, bfloat16"


@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "gfx90a", "gfx1100", "cpu", ""])
def test_other_architectures_are_not_served(arch):
    assert arch in usable(arch)
    assert usable(arch)
    assert eligible(make_problem(arch=arch)) == usable(arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_architectures_served(arch):
    assert usable(arch) == ""
    assert eligible(make_problem(arch=arch)) == ""


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
    problem=problems(), batch=BATCHES, alignment=st.sampled_from([4, 8, 16]), sm_count=st.integers(1, 200)
)
def test_path_follows_sizes_type_and_strides_alone(problem, batch, alignment, sm_count):
    """Not the batch, addresses or device; entries that do have the same bits."""
    assert eligible(problem) == ""
    entry = gate(problem)
    assert entry in ("", *MENU)
    other = replace(problem, batch=batch, a_alignment=alignment, b_alignment=alignment, sm_count=sm_count)
    assert eligible(other) == ""
    assert _bits(other) == _bits(problem)


def _bits(problem):
    """Which entries could serve without another bit; empty where torch does."""
    entry = gate(problem)
    return entry and configs.bits(configs.arithmetic(problem), entry)


MEASURED = sorted({key[2:] for key in tables.load("tiny", "sm_90")})


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_shape_keeps_its_bits_in_any_batch(precision, dtype, layout):
    if (dtype, precision) == ("bfloat16", "tf32"):
        return
    for m, n, k in (*MEASURED, *product((4, 17, 32, 64), repeat=3)):
        problem = make_problem(2, m, n, k, dtype=dtype, precision=precision, a=layout[0], b=layout[1])
        found = {_bits(replace(problem, batch=batch)) for batch in (2, 64, 1024, 9000, 2**20)}
        found.add(_bits(replace(problem, a_alignment=4, b_alignment=4)))
        assert len(found) == 1, problem


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_choosing_is_cheap(layout):
    """Below a millisecond for a problem that was never seen: 0.2 ms where both of these layouts' models are asked."""
    shapes = random.Random(1).sample(list(product(range(1, 65, 3), repeat=3)), 40)
    made = [make_problem(300, m, n, k, dtype="bfloat16", a=layout[0], b=layout[1]) for m, n, k in shapes]
    times = []
    for problem in made:
        begun = time.perf_counter()
        entry = gate(problem)
        times.append(time.perf_counter() - begun)
        assert gate(problem) == entry
    assert sorted(times)[len(times) // 2] < 1e-3


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(problem=problems(), batch_strides=st.tuples(*[st.sampled_from([0, 2**12, 2**20 + 16])] * 2))
def test_path_does_not_follow_the_stride_between_matrices(problem, batch_strides):
    """A matrix alone in memory, in a slice, or shared by the batch takes the same path."""
    a_batch, b_batch = batch_strides
    moved = replace(problem, a_strides=(a_batch, *problem.a_strides[1:]), b_strides=(b_batch, *problem.b_strides[1:]))
    assert gate(moved) == gate(problem)


@hypothesis.settings(max_examples=1000, deadline=None)
@hypothesis.given(problem=problems())
def test_chosen_is_legal(problem):
    for kernel in KERNELS:
        config = choose(problem, kernel)
        assert config.kernel == kernel
        assert illegal(problem, config) == ""
        assert programs(problem, config) >= 1


def test_chosen_is_legal_for_every_size():
    random.seed(0)
    for m in range(1, 65):
        for n in range(1, 65):
            for k in random.sample(range(1, 65), 4):
                for layout in ("nn", "nt", "tn", "tt"):
                    problem = make_problem(random.choice((2, 1024, 65536)), m, n, k, a=layout[0], b=layout[1])
                    for kernel in KERNELS:
                        assert illegal(problem, choose(problem, kernel)) == "", problem


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(problem=problems())
def test_programs_cover_every_output(problem):
    """No output is left out, and no program beyond the last is launched."""
    dot = choose(problem, "dot")
    tiles_m, tiles_n = -(-problem.m // dot.block_m), -(-problem.n // dot.block_n)
    assert tiles_m * dot.block_m >= problem.m > (tiles_m - 1) * dot.block_m
    assert tiles_n * dot.block_n >= problem.n > (tiles_n - 1) * dot.block_n
    assert programs(problem, dot) == problem.batch * tiles_m * tiles_n
    whole = choose(problem, "whole")
    for size, unit in ((problem.m, whole.unit_m), (problem.n, whole.unit_n), (problem.k, 16)):
        cut = parts(size, unit, whole.block_k)
        assert [start for start, _ in cut] == [sum(length for _, length in cut[:at]) for at in range(len(cut))]
        assert size <= sum(length for _, length in cut) < size + unit
    count = programs(problem, whole)
    assert count * whole.matrices >= problem.batch > (count - 1) * whole.matrices
    registers = choose(problem, "registers")
    width = registers.cols * registers.vec
    groups = -(-problem.m // registers.rows) * -(-problem.n // width)
    assert groups * registers.rows * width >= problem.m * problem.n
    threads = 32 * registers.num_warps
    count = programs(problem, registers)
    assert count * threads >= problem.batch * groups > (count - 1) * threads


def test_parts():
    assert parts(42, 16) == ((0, 32), (32, 16))
    assert parts(50, 8) == ((0, 32), (32, 16), (48, 8))
    assert parts(33, 16, most=16) == ((0, 16), (16, 16), (32, 16))
    assert parts(1, 8) == ((0, 8),)


def test_widest_vectors():
    """Along k of A, k of B, n of B: only the contiguous axis, only what divides it and all strides, 4 at most."""
    assert configs.vectors(make_problem()) == (4, 1, 4)
    assert configs.vectors(make_problem(a="t", b="t")) == (1, 4, 1)
    assert configs.vectors(make_problem(n=6, k=10)) == (2, 1, 2)
    assert configs.vectors(make_problem(n=5, k=7)) == (1, 1, 1)
    assert configs.vectors(make_problem(a_strides=(0, 64, 1), b_strides=(0, 12, 1))) == (4, 1, 4)


MISALIGNED = {
    "address": {"a_alignment": 4, "b_alignment": 4},
    "batch stride": {"a_strides": (769, 64, 1), "b_strides": (769, 12, 1)},
    "row stride": {"a_strides": (12 * 65, 65, 1), "b_strides": (64 * 13, 13, 1)},
    "no contiguous axis": {"a_strides": (2 * 768, 128, 2), "b_strides": (2 * 768, 24, 2)},
}


@pytest.mark.parametrize("change", MISALIGNED.values(), ids=MISALIGNED.keys())
def test_no_vectors_where_one_could_be_misaligned(change):
    problem = make_problem(**change)
    config = choose(problem, "registers")
    assert (config.vec, config.a_vec, config.b_vec) == (1, 1, 1)
    for wider in ({"a_vec": 2, "unroll": 8}, {"vec": 2}):
        assert illegal(problem, replace(config, **wider))


@pytest.mark.parametrize(("alignment", "width"), [(4, 1), (8, 2), (16, 4)])
def test_widest_vectors_follow_the_address(alignment, width):
    problem = make_problem(a_alignment=alignment, b_alignment=alignment)
    assert configs.vectors(problem) == (width, 1, width)
    assert configs.vectors(replace(problem, dtype="bfloat16")) == (min(4, 2 * width), 1, min(4, 2 * width))


@hypothesis.settings(max_examples=500, deadline=None)
@hypothesis.given(problem=problems())
def test_every_vector_is_aligned(problem):
    """Each load of a_vec, b_vec or vec elements starts at a multiple of its own size, for every matrix and row."""
    config = choose(problem, "registers")
    itemsize = 4 if problem.dtype == "float32" else 2
    a_batch, a_row, a_k = problem.a_strides
    b_batch, b_k, b_n = problem.b_strides

    def aligned(width, size, inner, others, alignment):
        starts = [stride * itemsize for stride in others] + [alignment]
        return width == 1 or (inner == 1 and size % width == 0 and all(at % (width * itemsize) == 0 for at in starts))

    assert aligned(config.a_vec, problem.k, a_k, (a_batch, a_row), problem.a_alignment)
    assert aligned(config.b_vec, problem.k, b_k, (b_batch, b_n), problem.b_alignment)
    assert aligned(config.vec, problem.n, b_n, (b_batch, b_k), problem.b_alignment)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "gfx942"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_early_launch_only_where_the_hardware_has_it(kernel, arch):
    for batch in (2, 64, 65536):
        assert not choose(make_problem(batch=batch, arch=arch), kernel).pdl


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (DotConfig(16, 16, 16, num_warps=3, num_stages=1), "num_warps"),
        (DotConfig(24, 16, 16, num_warps=1, num_stages=1), "powers of two"),
        (DotConfig(16, 16, 8, num_warps=1, num_stages=1), "at least 16"),
        (DotConfig(16, 16, 128, num_warps=1, num_stages=1), "block_k pads"),
        (WholeConfig(12, 16, 16, 1, 1), "powers of two"),
        (WholeConfig(16, 16, 8, 1, 1), "at least 16"),
        (WholeConfig(16, 128, 16, 1, 1), "up to 64"),
        (RegistersConfig(1, 1, 1, 1, 1, unroll=8, num_warps=16), "num_warps"),
        (RegistersConfig(1, 1, 3, 1, 1, unroll=8, num_warps=1), "1, 2 or 4"),
        (RegistersConfig(1, 1, 1, 8, 1, unroll=8, num_warps=1), "1, 2 or 4"),
        (RegistersConfig(1, 1, 1, 4, 1, unroll=6, num_warps=1), "multiples"),
        (RegistersConfig(1, 1, 1, 1, 4, unroll=8, num_warps=1), "contiguous and aligned along k"),
    ],
)
def test_illegal_configs_are_told_why(config, rule):
    assert rule in illegal(make_problem(), config)


@pytest.mark.parametrize(
    ("config", "arch", "rule"), [(WholeConfig(16, 16, 16, 1, 1, ordered=True), "gfx942", "NVIDIA")]
)
def test_assembly_only_where_it_runs(config, arch, rule):
    assert rule in illegal(make_problem(arch=arch), config)
    assert illegal(make_problem(), config) == ""


def test_k_must_be_a_multiple_of_its_vector():
    assert "multiples" in illegal(make_problem(k=6), RegistersConfig(1, 1, 1, 4, 1, unroll=8, num_warps=1))


def test_choose_refuses_an_illegal_choice(monkeypatch):
    bad = RegistersConfig(1, 1, 1, 4, 1, unroll=4, num_warps=1)
    monkeypatch.setattr(configs, "MENU", {"registers": lambda problem: bad})
    with pytest.raises(ValueError, match=r"config registers .* for problem \[1024; 12,12,63\]"):
        choose(make_problem(k=63), "registers")


def test_names():
    assert str(make_problem()) == "[1024; 12,12,64] float32/ieee nn"
    assert str(make_problem(dtype="bfloat16", a="t", b="t")) == "[1024; 12,12,64] bfloat16 tt"
    assert make_problem(a_strides=(1536, 128, 2)).layout == "xn"
    for kernel in KERNELS:
        assert str(choose(make_problem(), kernel)).startswith(kernel)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(problem=problems(), entry=st.sampled_from(sorted(MENU)))
def test_menu_is_legal(problem, entry):
    assert illegal(problem, choose(problem, entry)) == ""
