"""Which problems the kernel whose warps have roles serves, and with which configurations."""

from dataclasses import replace

import pytest
from gemm_problems import linear, make_problem

from isogemm.epilogues.operands import Epilogue
from isogemm.gemm import configs
from isogemm.gemm.configs import Config, accumulation, fitted, illegal, workspace
from isogemm.gemm.selection import choose

ROLES = Config(128, 128, 64, 8, 5, "roles", persistent=True)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"num_warps": 4}, "8 warps that multiply"),
        ({"num_warps": 16}, "8 warps that multiply"),
        ({"block_m": 64}, "tiles of 128 or 256 rows"),
        ({"block_m": 512, "block_n": 32}, "tiles of 128 or 256 rows"),
        ({"block_n": 512}, "up to 256 columns and 64 of k"),
        ({"block_k": 128, "num_stages": 2}, "up to 256 columns and 64 of k"),
        ({"residents": 2}, "an SM to themselves"),
        ({"balanced": True}, "an SM to themselves"),
        ({"persistent": False, "parallel_chunks": "queued"}, "gathered or follow one another"),
        ({"persistent": False, "parallel_chunks": "partials"}, "gathered or follow one another"),
        ({"block_m": 256, "block_n": 256}, "at most 192 sums"),
        ({"block_n": 256, "rest_n": 256}, "at most 192 sums"),
        ({"rest_n": 8}, "a rest at least 16 columns"),
        ({"rest_n": 48}, "rest_n is a power of two up to block_n"),
        ({"block_n": 64, "rest_n": 128}, "rest_n is a power of two up to block_n"),
        ({"block_n": 256}, "wait in registers, or in the output"),
        ({"rest_n": 128}, "wait in registers, or in the output"),
        ({"block_m": 256}, "wait in registers, or in the output"),
        ({"pdl": True}, "nothing persistent launches early"),
        ({"parallel_chunks": "gathered"}, "are not persistent"),
        ({"num_stages": 8}, "bytes of shared memory"),
    ],
    ids=str,
)
def test_rules_of_roles(change, rule):
    problem = linear(2048, 1536, 8960)
    assert problem.chunks == 2
    assert illegal(problem, ROLES) == ""
    assert rule in illegal(problem, replace(ROLES, **change))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"arch": "sm_100"}, "16-bit operands on sm_90"),
        ({"arch": "sm_120"}, "16-bit operands on sm_90"),
        ({"arch": "sm_80"}, "cannot be read by TMA"),
        ({"dtype": "float32", "out_dtype": "float32", "precision": "tf32"}, "16-bit operands on sm_90"),
        ({"tma": False}, "cannot be read by TMA"),
        ({"batch": 2}, "cannot be read by TMA"),
        ({"k_inner": 64}, "cannot be read by TMA"),
        ({"a_aligned": False}, "cannot be read by TMA"),
        ({"b_strides": (1, 4100)}, "cannot be read by TMA"),
        ({"epilogue": Epilogue(activation="silu", gradient="pre", sums=True)}, "no rows are summed"),
    ],
    ids=str,
)
def test_problems_that_roles_do_not_serve(change, rule):
    problem = make_problem()
    assert illegal(problem, ROLES) == ""
    changed = replace(problem, **change)
    assert rule in illegal(changed, ROLES)
    assert choose(changed).config.kernel != "roles"


def test_roles_do_not_swap_two_weights():
    gated = make_problem(epilogue=Epilogue(activation="swiglu"))
    assert illegal(gated, ROLES) == ""
    assert "two weights are not swapped" in illegal(gated, replace(ROLES, swapped=True))


@pytest.mark.xfail(reason="of one buffer, no block is given back before the next one is waited for")
def test_roles_have_two_stages_at_least():
    assert illegal(make_problem(), replace(ROLES, num_stages=1))


@pytest.mark.xfail(reason="the rest of a swapped tile reads the biases of its columns, which are rows of the result")
def test_a_swapped_rest_has_no_bias():
    biased = make_problem(epilogue=Epilogue(bias="n"))
    assert illegal(biased, replace(ROLES, swapped=True, num_stages=4, rest_n=64))


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, "registers"), ({"rest_n": 64, "num_stages": 4}, "registers"), ({"block_n": 64}, "registers"),
        ({"swapped": True}, "registers"), ({"block_m": 256, "block_n": 64, "num_stages": 4}, "registers"),
        ({"rest_n": 128}, "scratch"), ({"block_n": 256, "parts": 2}, "scratch"), ({"block_m": 256}, "scratch"),
    ],
    ids=str,
)  # fmt: skip
def test_where_the_chunks_of_roles_wait(change, kept):
    """In registers up to 96 sums a thread, with a rest or without. Fitted, they all do."""
    problem, config = linear(2048, 1536, 8960), replace(ROLES, **change)
    assert accumulation(replace(problem, chunk=0), config) == "one"
    assert accumulation(problem, config) == kept
    assert bool(illegal(problem, config)) == (kept == "scratch")
    fits = fitted(problem, config)
    assert fits == config if kept == "registers" else (fits.block_m, fits.block_n, fits.rest_n) == (128, 128, 0)
    assert fits.kernel == "roles"
    assert accumulation(problem, fits) == "registers"
    assert illegal(problem, fits) == ""
    into_total = replace(problem, out_dtype="float32", accumulate=True)
    assert accumulation(into_total, config) == "in place"
    assert illegal(into_total, fitted(into_total, config)) == ""
    assert fitted(into_total, config).kernel == "roles"
    wide = replace(problem, out_dtype="float32", chunk=1024)
    assert accumulation(wide, config) == ("in place" if kept == "scratch" else kept)
    assert fitted(wide, config).kernel == ("tma" if kept == "scratch" else "roles")
    assert illegal(wide, fitted(wide, config)) == ""


def test_two_weights_chunks_wait_in_registers():
    gated = replace(linear(2048, 1536, 8960), epilogue=Epilogue(activation="swiglu"))
    assert fitted(gated, ROLES) == ROLES
    assert fitted(gated, replace(ROLES, rest_n=64)) == ROLES
    assert accumulation(gated, ROLES) == "registers"
    wide = fitted(gated, replace(ROLES, block_n=256, num_stages=4))
    assert (wide.kernel, accumulation(gated, wide), illegal(gated, wide)) == ("tma", "registers", "")


@pytest.mark.parametrize(
    "config", [ROLES, replace(ROLES, rest_n=64, num_stages=4, persistent=False, pdl=True)], ids=str
)
def test_what_roles_do_not_serve_another_kernel_does(config):
    problem = make_problem()
    assert fitted(problem, config) == config
    for change in ({"a_aligned": False}, {"a_strides": (4097, 1)}, {"a_strides": (8192, 2)}, {"a_strides": (0, 1)}):
        one = fitted(replace(problem, **change), config)
        assert (one.kernel, one.block_m, one.block_n, one.rest_n) == ("tma", 64, 64, 0)
        assert illegal(replace(problem, **change), one) == ""
    neither = replace(problem, a_aligned=False, b_aligned=False)
    assert fitted(neither, config).kernel == "pointer"
    assert illegal(neither, fitted(neither, config)) == ""
    summed = replace(problem, epilogue=Epilogue(activation="silu", gradient="pre", sums=True))
    stream = fitted(summed, config)
    assert (stream.kernel, stream.persistent, stream.pdl, stream.rest_n) == ("stream", True, False, 0)
    assert illegal(summed, stream) == ""
    deep = fitted(problem, replace(config, num_stages=12))
    assert deep.kernel == "roles"
    assert 1 < deep.num_stages < 12
    assert illegal(problem, deep) == ""
    assert fitted(replace(problem, chunk=96), config).block_k == 32


def test_gathered_chunks_of_roles():
    """Each warpgroup has a flag. Totals are not added to, and a rest is gathered with the tile."""
    gathered = replace(ROLES, persistent=False, pdl=True, parallel_chunks="gathered")
    problem = make_problem(300, 1280, 5120, chunk=1792)
    assert problem.chunks == 3
    assert accumulation(problem, gathered) == "gathered"
    assert workspace(problem, gathered) == 2 * 3 * 10 * (4 * 128 * 128 + 2 * 8)
    assert workspace(problem, replace(gathered, kernel="tma")) == 2 * 3 * 10 * (4 * 128 * 128 + 8)
    assert configs.programs(problem, gathered) == 3 * 3 * 10
    rest = replace(gathered, rest_n=64, num_stages=4)
    assert workspace(problem, rest) == 2 * 3 * 7 * (4 * 128 * 192 + 2 * 8)
    for config in (gathered, rest, replace(rest, rest_n=32), replace(gathered, swapped=True)):
        assert illegal(problem, config) == ""
        assert fitted(problem, config) == config
        assert config.waits
    assert "of at most 96 sums" in illegal(problem, replace(gathered, block_n=256, num_stages=4))
    into_total = replace(problem, out_dtype="float32", accumulate=True)
    assert "of at most 0 sums" in illegal(into_total, gathered)
    assert "at most 32 chunks" in illegal(replace(problem, chunk=128), gathered)
    assert not fitted(replace(problem, chunk=0), gathered).parallel_chunks
    assert workspace(problem, ROLES) == workspace(into_total, ROLES) == 0
