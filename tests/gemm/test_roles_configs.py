"""Which problems the kernel whose warps have roles serves, and with which configurations."""

from dataclasses import replace

import pytest
from gemm_problems import linear, make_problem
from role_tiles import ALTERNATING, ROLES

from isogemm.epilogues.operands import NOTHING, Epilogue
from isogemm.gemm import configs
from isogemm.gemm.configs import accumulation, fitted, illegal, workspace
from isogemm.gemm.selection import choose


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"num_warps": 4}, "8 warps that multiply"),
        ({"num_warps": 16}, "8 warps that multiply"),
        ({"block_m": 64}, "tiles of 128 rows"),
        ({"block_m": 256, "num_stages": 3}, "tiles of 128 rows"),
        ({"num_stages": 1}, "two stages"),
        ({"block_k": 128, "num_stages": 2}, "64 of k"),
        ({"block_n": 512}, "up to 256 columns"),
        ({"block_n": 256, "rest_n": 16}, "up to 256 columns"),
        ({"rest_n": 8}, "a rest of at least 16"),
        ({"rest_n": 48}, "rest_n is a power of two up to block_n"),
        ({"block_n": 64, "rest_n": 128}, "rest_n is a power of two up to block_n"),
        ({"swapped": True}, "not swapped"),
        ({"residents": 2}, "an SM to themselves"),
        ({"balanced": True, "persistent": False}, "a balanced grid is persistent"),
        ({"alternating": True}, "alternate between tiles of one chunk"),
        ({"persistent": False, "parallel_chunks": "queued"}, "gathered or follow one another"),
        ({"persistent": False, "parallel_chunks": "partials"}, "store by TMA"),
        ({"block_n": 256}, "wait in registers"),
        ({"rest_n": 128}, "wait in registers"),
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
        ({"c_aligned": False}, "store by TMA"),
        ({"c_strides": (4097, 1)}, "store by TMA"),
        ({"c_strides": (1, 4096)}, "store by TMA"),
        ({"out_dtype": "float32", "accumulate": True}, "neither add to a result"),
        ({"epilogue": Epilogue(activation="silu", gradient="pre", sums=True)}, "nor sum its rows"),
        ({"epilogue": Epilogue(user="registered")}, "no registered epilogue"),
    ],
    ids=str,
)
def test_problems_that_roles_do_not_serve(change, rule):
    problem = make_problem()
    assert illegal(problem, ROLES) == ""
    changed = replace(problem, **change)
    assert rule in illegal(changed, ROLES)
    assert choose(changed).config.kernel != "roles"


@pytest.mark.parametrize(
    "config", [ROLES, replace(ROLES, rest_n=64, num_stages=4), replace(ROLES, block_n=256, parts=2)], ids=str
)
def test_what_roles_do_not_serve_another_kernel_does(config):
    """Whatever the problem, what is fitted is legal."""
    problem = make_problem()
    summed = Epilogue(activation="silu", gradient="pre", sums=True)
    into_total = {"out_dtype": "float32", "accumulate": True}
    gated, gradient = Epilogue(activation="swiglu"), Epilogue(activation="swiglu", gradient="pre")
    for change in (
        {"a_aligned": False}, {"a_strides": (4097, 1)}, {"a_strides": (8192, 2)}, {"b_aligned": False},
        {"a_aligned": False, "b_aligned": False}, {"c_aligned": False}, {"c_strides": (4097, 1)}, into_total,
        {"chunk": 2048, **into_total}, {"chunk": 2048}, {"chunk": 1024, "out_dtype": "float32"},
        {"epilogue": Epilogue(user="registered")},
        {"epilogue": summed}, {"epilogue": gated}, {"epilogue": gradient}, {"epilogue": gated, "chunk": 2048},
        {"arch": "sm_100"}, {"precision": "tf32", "dtype": "float32", "out_dtype": "float32"}, {"m": 1}, {"m": 100_000},
    ):  # fmt: skip
        changed = replace(problem, **change)
        for parallel in ("", "gathered"):
            asked = replace(config, parallel_chunks=parallel, persistent=not parallel)
            assert illegal(changed, fitted(changed, asked)) == "", (change, parallel)
    for stored in ({"c_strides": (4097, 1)}, {"epilogue": summed}, into_total):
        assert fitted(replace(problem, **stored), config).kernel == "stream"
    for narrower in ({"chunk": 2048, "epilogue": gated}, {"epilogue": gradient}):
        fits = fitted(replace(problem, **narrower), config)
        assert (fits.kernel, fits.columns) == ("roles", 128)


def test_a_program_per_tile_or_persistent_ones():
    wave = make_problem(128 * 4, 128 * 33)
    for asked in (ROLES, replace(ROLES, persistent=False, pdl=True)):
        for problem, persistent in ((wave, False), (replace(wave, n=128 * 34), True)):
            fits = fitted(problem, asked)
            assert (fits.persistent, fits.pdl) == (persistent, not persistent)


def test_warpgroups_alternate_where_a_tile_s_sums_fit():
    """One tile of one chunk each, and more tiles than multiprocessors; else they share each tile."""
    problem = make_problem(4096, 4096, 4096)
    assert illegal(problem, ALTERNATING) == ""
    assert fitted(problem, ALTERNATING) == ALTERNATING
    assert "alternate where warps have roles" in illegal(problem, replace(ALTERNATING, kernel="stream", num_stages=3))
    for change in (
        {"persistent": False, "pdl": True}, {"block_n": 256, "num_stages": 4}, {"rest_n": 64, "num_stages": 4},
    ):  # fmt: skip
        assert "alternate between tiles of one chunk" in illegal(problem, replace(ALTERNATING, **change))
    assert fitted(problem, replace(ALTERNATING, rest_n=32)).alternating
    two_gradients = Epilogue(activation="swiglu", gradient="pre")
    for changed in (
        replace(problem, m=512, n=128), replace(problem, chunk=2048), replace(problem, epilogue=two_gradients),
    ):  # fmt: skip
        fits = fitted(changed, ALTERNATING)
        assert (fits.kernel, fits.columns, fits.alternating) == ("roles", 128, False)
        assert illegal(changed, fits) == ""
    for other in ({"a_aligned": False}, {"arch": "sm_100"}, {"out_dtype": "float32", "accumulate": True}):
        fits = fitted(replace(problem, **other), ALTERNATING)
        assert (fits.kernel == "roles", fits.alternating) == (False, False)


def test_parts_of_an_alternating_tile_are_smaller_where_matrices_are_read():
    problem = make_problem(4096, 4096, 4096, epilogue=Epilogue(residual=True), read_strides=(4096, 4096))
    assert fitted(problem, ALTERNATING).parts == 4
    saves = replace(problem, epilogue=Epilogue(bias="n", activation="gelu", saves="pre"))
    assert [fitted(saves, replace(ALTERNATING, balanced=each)).parts for each in (False, True)] == [2, 4]


def test_balanced_grids_of_roles():
    """Whole teams of programs, and a slot for a tile's sums each; of several chunks also their total."""
    balanced = replace(ROLES, group=12, balanced=True)
    problem = make_problem(4096, 128 * 34, 4096)
    assert illegal(problem, balanced) == ""
    assert configs.programs(problem, balanced) == 132
    assert workspace(problem, balanced) == 132 * (4 * 128 * 128 + 2 * 8)
    assert workspace(problem, replace(balanced, alternating=True)) == 132 * (4 * 128 * 128 + 2 * 8)
    assert workspace(replace(problem, chunk=2048), balanced) == 132 * (2 * 4 * 128 * 128 + 2 * 8)
    few = replace(problem, m=128)
    assert "a balanced grid is persistent" in illegal(few, balanced)
    fits = fitted(few, balanced)
    assert (fits.kernel, fits.balanced, fits.persistent) == ("roles", False, False)
    wide = replace(balanced, block_n=256, num_stages=4, parts=2)
    assert illegal(problem, wide) == ""
    assert not fitted(replace(problem, epilogue=Epilogue(bias="n")), wide).balanced
    assert configs.balances(problem, ROLES)
    assert not configs.balances(replace(problem, n=128 * 33), ROLES)  # exactly eight waves


@pytest.mark.parametrize(("sm_count", "team"), [(132, 12), (144, 12), (114, 6), (78, 6), (148, 4), (7, 7), (13, 1)])
def test_teams_divide_the_multiprocessors(sm_count, team):
    assert configs.team(make_problem(sm_count=sm_count)) == team


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, "registers"), ({"rest_n": 64, "num_stages": 4}, "registers"), ({"block_n": 64}, "registers"),
        ({"rest_n": 128}, "scratch"), ({"block_n": 256, "parts": 2}, "scratch"),
    ],
    ids=str,
)  # fmt: skip
def test_where_the_chunks_of_roles_wait(change, kept):
    """In registers up to 96 sums a thread, 64 before an epilogue; fitted, they all do."""
    problem, config = linear(2048, 1536, 8960), replace(ROLES, **change)
    assert accumulation(replace(problem, chunk=0), config) == "one"
    assert accumulation(problem, config) == kept
    for epilogue, most in ((NOTHING, 192), (Epilogue(bias="n", activation="gelu_tanh"), 128)):
        followed = replace(problem, epilogue=epilogue)
        assert bool(illegal(followed, config)) == (kept == "scratch" or config.columns > most)
        fits = fitted(followed, config)
        assert (fits.kernel, fits.columns <= most, accumulation(followed, fits)) == ("roles", True, "registers")
        assert illegal(followed, fits) == ""


def test_gathered_chunks_of_roles():
    """Each warpgroup has a flag, and a rest is gathered with the tile."""
    gathered = replace(ROLES, persistent=False, pdl=True, parallel_chunks="gathered")
    problem = make_problem(300, 1280, 5120, chunk=1792)
    assert problem.chunks == 3
    assert accumulation(problem, gathered) == "gathered"
    assert workspace(problem, gathered) == 2 * 3 * 10 * (4 * 128 * 128 + 2 * 8)
    assert workspace(problem, replace(gathered, kernel="tma")) == 2 * 3 * 10 * (4 * 128 * 128 + 8)
    assert configs.programs(problem, gathered) == 3 * 3 * 10
    rest = replace(gathered, rest_n=64, num_stages=4)
    assert workspace(problem, rest) == 2 * 3 * 7 * (4 * 128 * 192 + 2 * 8)
    for config in (gathered, rest, replace(rest, rest_n=32)):
        assert illegal(problem, config) == ""
        assert fitted(problem, config) == config
        assert config.waits
    assert "at most 96 sums" in illegal(problem, replace(gathered, block_n=256, num_stages=4))
    assert "at most 32 chunks" in illegal(replace(problem, chunk=128), gathered)
    assert not fitted(replace(problem, chunk=0), gathered).parallel_chunks
    assert workspace(problem, ROLES) == 0
