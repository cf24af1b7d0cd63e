"""The kernel whose warps have roles, compiled for sm_90: it runs on a GPU alone, since Gluon has no interpreter."""

from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("triton")

from gemm_jobs import assert_wgmmas_overlap, check_compiled
from gemm_problems import make_problem
from role_tiles import ALTERNATING, NARROW, ONCE, REST, ROLES, WIDE

from isogemm.epilogues.operands import Epilogue
from isogemm.epilogues.spec import ACTIVATIONS
from isogemm.gemm import configs

BALANCED = replace(ROLES, balanced=True)
TILES = (
    ROLES, WIDE, REST, replace(REST, rest_n=32), NARROW, replace(NARROW, rest_n=32), replace(NARROW, rest_n=16),
    replace(ROLES, block_n=16), replace(ROLES, block_k=32), replace(ROLES, num_stages=2),
)  # fmt: skip
ACTIVATED = Epilogue(bias="n", activation="gelu_tanh")
GATED = Epilogue(activation="swiglu")
SAVES = (
    Epilogue(bias="n", activation="relu", saves="mask"), Epilogue(bias="n", activation="gelu", saves="pre"),
    Epilogue(activation="swiglu", saves="pre"),
)  # fmt: skip
GRADIENTS = (
    Epilogue(activation="relu", gradient="out"), Epilogue(activation="relu", gradient="mask"),
    Epilogue(activation="gelu", gradient="pre"), Epilogue(activation="swiglu", gradient="pre"),
)  # fmt: skip
EPILOGUES = (
    Epilogue(bias="n"), ACTIVATED, GATED, Epilogue(bias="n", bias_up=True, activation="swiglu", dropout=True),
    Epilogue(beta="host", residual=True), Epilogue(bias="n", activation="relu", dropout=True),
    Epilogue(bias="m", alpha="host", row_scale=True, col_scale=True, beta="device", residual=True),
    Epilogue(activation="gelu", exact=True, eager=True, residual=True), *SAVES,
)  # fmt: skip


def _square(*layout, **changes):
    return make_problem(4096, 4096, 4096, *layout, **changes)


def _cases():
    yield from ((_square(), config) for config in TILES)
    for layout, config in product(("nn", "tn", "tt"), (ROLES, WIDE, REST)):
        yield _square(layout), config
    yield _square("nn"), replace(NARROW, rest_n=16)
    yield _square(dtype="float16"), ROLES
    yield from ((_square(out_dtype="float32"), config) for config in (ROLES, REST))


def _chunked_cases():
    in_two = make_problem(1024, 1280, 5120, chunk=2560)
    yield from ((in_two, config) for config in (ROLES, REST))
    gathered = replace(ONCE, parallel_chunks="gathered")
    for config in (gathered, *(replace(tile, parallel_chunks="gathered") for tile in TILES if 0 < tile.columns <= 192)):
        if config.block_m == 128 and not config.persistent:
            yield in_two, config
    yield replace(in_two, out_dtype="float32", chunk=1024), gathered
    yield replace(in_two, epilogue=ACTIVATED), gathered
    yield replace(in_two, epilogue=GATED), gathered
    yield replace(in_two, epilogue=GATED), ROLES
    tokens = make_problem(4096, 4096, 8192, "tn", chunk=4096)
    yield tokens, ROLES


def _balanced_cases():
    """Tiles that two programs sum, of one chunk or of several: what is handed over leaves registers for the rest."""
    in_two = make_problem(8192, 1280, 5120, chunk=2560)
    rest = replace(REST, persistent=True, pdl=False, balanced=True)
    wide = replace(WIDE, balanced=True)
    yield from ((_square(), config) for config in (BALANCED, wide, rest, replace(rest, num_stages=5, rest_n=32)))
    yield from ((_square(layout), config) for layout, config in product(("nn", "tn"), (BALANCED, wide, rest)))
    yield from ((in_two, config) for config in (BALANCED, rest))
    for epilogue in (ACTIVATED, GATED, *SAVES):
        yield _square(epilogue=epilogue), BALANCED
        yield replace(in_two, epilogue=epilogue), BALANCED
    yield _square(epilogue=ACTIVATED), rest
    yield from ((_square("nn", epilogue=epilogue), BALANCED) for epilogue in GRADIENTS[:3])
    yield make_problem(4096, 4096, 8192, "tn", chunk=4096), BALANCED
    yield replace(in_two, out_dtype="float32", chunk=1024), BALANCED


def _alternating_cases():
    """A warpgroup has twice as many sums, and half of the tiles."""
    plain, balanced = ALTERNATING, replace(ALTERNATING, balanced=True)
    narrow = replace(plain, block_n=64)
    for config in (plain, balanced, narrow, replace(narrow, rest_n=32), replace(plain, rest_n=32, num_stages=4)):
        yield from ((_square(layout), config) for layout in ("nt", "nn", "tn"))
    yield _square(out_dtype="float32"), replace(plain, num_stages=4)
    registers = (
        *(Epilogue(activation=name, exact=True, eager=True) for name in ("gelu", "silu", "tanh")),
        Epilogue(activation="relu", gradient="mask", dropout=True),
        Epilogue(activation="gelu", gradient="pre", dropout=True),
    )
    for epilogue in (*EPILOGUES, *GRADIENTS[:3], *registers):
        problem = _square("nn" if epilogue.gradient else "nt", epilogue=epilogue, read_strides=(4096, 4096))
        yield from ((problem, configs.fitted(problem, config)) for config in (plain, balanced))


def _epilogue_cases():
    for epilogue in EPILOGUES:
        yield _square(epilogue=epilogue, read_strides=(4096, 4096)), ROLES
    for epilogue in (ACTIVATED, SAVES[1], EPILOGUES[5]):
        yield from ((_square(epilogue=epilogue), config) for config in (WIDE, REST))
    for name, known in ACTIVATIONS.items():
        exact = Epilogue(activation=name, arguments=(*known.arguments.values(),), exact=True, eager=True)
        yield _square(epilogue=exact), ROLES
    yield _square(epilogue=GATED), WIDE
    for epilogue in (*GRADIENTS, Epilogue(activation="silu", gradient="pre", dropout=True)):
        yield _square("nn", epilogue=epilogue), ROLES
    yield _square(epilogue=Epilogue(dropout=True, residual=True), read_strides=(4096, 4096)), ROLES
    yield from ((_square("nn", epilogue=GRADIENTS[2]), config) for config in (WIDE, REST))
    half = _square(dtype="float16", epilogue=SAVES[2])
    yield half, configs.fitted(half, ROLES)


def _ids(cases):
    return [f"{problem} {config}" for problem, config in cases]


CASES = [*_cases(), *_chunked_cases(), *_balanced_cases(), *_alternating_cases(), *_epilogue_cases()]


@pytest.mark.parametrize(("problem", "config"), CASES, ids=_ids(CASES))
def test_compiles_within_limits(problem, config):
    """And no product waits for the one before."""
    assert configs.illegal(problem, config) == ""
    assert config.kernel == "roles"
    check_compiled(problem, config)
    assert_wgmmas_overlap(problem, config)
