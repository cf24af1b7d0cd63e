"""Which configuration serves a problem: measured, modelled or by a rule; always legal, and one of those checked."""

from bisect import bisect_left
from dataclasses import astuple, replace
from itertools import product

import hypothesis
import pytest
from gemm_problems import ARCHS, NUMBERS, input_grad, linear, make_problem, problems, weight_grad

from isogemm.core import tuned
from isogemm.epilogues.operands import NOTHING, Epilogue
from isogemm.gemm import configs
from isogemm.gemm.configs import (
    HALVES,
    WORKSPACE,
    Config,
    Problem,
    accumulation,
    canonical,
    fitted,
    illegal,
    programs,
    usable,
    workspace,
)
from isogemm.gemm.selection import candidates, choose, token_edges
from isogemm.gemm.tables.sm_90 import MODEL, TABLE


@hypothesis.settings(max_examples=1500, deadline=None)
@hypothesis.given(problem=problems())
def test_chosen_is_legal_and_a_candidate(problem):
    (chosen, _), all_of_them = choose(problem), candidates(problem)
    assert choose(problem).config == chosen
    assert chosen in all_of_them
    assert fitted(problem, canonical(problem)) == all_of_them[0]
    assert len({str(config) for config in all_of_them}) == len(set(all_of_them)) == len(all_of_them)
    for config in all_of_them:
        assert illegal(problem, config) == ""
        assert fitted(problem, config) == config
        assert configs.chunk_bytes(problem, config) <= WORKSPACE
        assert workspace(problem, config) <= WORKSPACE + HALVES
        assert programs(problem, config) >= 1


@pytest.mark.parametrize("key", MODEL, ids=" ".join)
def test_whatever_the_model_may_choose_is_a_candidate(key):
    """So `isogemm verify` compares it: many of the menu are in no table."""
    number, kind = key
    dtype, precision = ("bfloat16", "ieee") if number == "half" else ("float32", number)
    epilogue = Epilogue(activation="gelu", gradient="pre") if kind.endswith("gradient") else NOTHING
    total = {"out_dtype": "float32", "accumulate": True} if kind.endswith("accumulated") else {}
    problem = make_problem(4096, 512, 512, kind[:2], dtype, precision, epilogue=epilogue, **total)
    served = {fitted(problem, Config(*values)) for values, *_ in MODEL[key]}
    assert served <= {*candidates(problem)}


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(problem=problems())
def test_bits_do_not_follow_the_configuration(problem):
    """Where block_k or the side of an operand would change them, every candidate has the same."""
    shared = {config.block_k for config in candidates(problem)}
    if problem.number in ("ieee", "tf32x3"):
        assert len(shared) == 1


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(problem=problems())
def test_programs_cover_every_output(problem):
    """A program for every tile and chunk, or no more than fit the chip at once."""
    config = choose(problem).config
    m, n = (problem.n, problem.m) if config.swapped else (problem.m, problem.n)
    block_m = config.block_m // (problem.weights if config.swapped else 1)
    block_n = config.columns // (1 if config.swapped else problem.weights)
    tiles = problem.batch * -(-m // block_m) * -(-n // block_n)
    work = tiles * (problem.chunks if accumulation(problem, config) == "partials" else 1)
    assert programs(problem, config) == (min(work, config.residents * problem.sm_count) if config.persistent else work)


@pytest.mark.parametrize("arch", [*ARCHS, "sm_103", "sm_121"])
def test_architectures_served(arch):
    assert usable(arch) == ""
    for tokens, (dtype, precision) in product((1, 64, 4096), NUMBERS):
        problem = linear(tokens, 4096, 4096, dtype, precision, arch=arch)
        assert illegal(problem, choose(problem).config) == ""


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "gfx942"])
def test_only_what_the_hardware_has(arch):
    for tokens, kind in product((1, 16, 128, 4096), (linear, input_grad, weight_grad)):
        config = choose(kind(tokens, 4096, 4096, arch=arch)).config
        assert config.kernel == "pointer"
        assert not config.pdl


KINDS = [linear, input_grad, weight_grad]


@pytest.mark.parametrize(("dtype", "precision"), NUMBERS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_choice_is_made_at_an_edge(kind, dtype, precision):
    """So that whoever compiles for the edges has compiled for every number of tokens."""
    most = 4200
    for n, k in ((4096, 4096), (256, 1024), (1000, 1001), (1536, 2048)):  # the last two are not measured
        edges = token_edges(kind(1, n, k, dtype, precision), most)
        assert edges == sorted(set(edges))
        assert (edges[0], edges[-1]) == (1, most)
        at_edges = {_kernel(kind(tokens, n, k, dtype, precision)) for tokens in edges}
        for tokens in (*range(1, 280), *range(280, most, 7)):
            chosen = choose(kind(tokens, n, k, dtype, precision))
            assert _kernel(kind(tokens, n, k, dtype, precision)) in at_edges, (tokens, n, k)
            if kind is not weight_grad:  # whose chunks are more at the next edge
                edge = edges[bisect_left(edges, tokens)]
                assert chosen == choose(kind(edge, n, k, dtype, precision)), (tokens, n, k)


def _kernel(problem):
    """What is compiled for a choice: with a mask where the last block of k is not full."""
    config = choose(problem).config
    return config, accumulation(problem, config), problem.k % config.block_k != 0


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
        assert not configs.warpgroups(choose(problem).config), problem


def test_choose_refuses_where_nothing_serves(monkeypatch):
    monkeypatch.setattr(configs, "_SHARED_MEMORY", {"sm_90": 1})
    with pytest.raises(ValueError, match=r"no configuration serves \[512,4096,4096\] bfloat16 nt: takes about"):
        choose(make_problem())


def test_names_of_the_tables_are_their_own():
    values = {values for by_tokens in TABLE.values() for _, values in by_tokens}
    assert len({str(Config(*value)) for value in values}) == len(values)


TUNED = Config(64, 64, 64, 4, 3, pdl=True)


@pytest.fixture
def tuned_for(monkeypatch):
    """Pretend that a weight [1536, 2048] was tuned at some numbers of tokens, on GPUs named "here"."""

    def tune(*tokens, config=TUNED, kind="nt"):
        steps = tuple((each, astuple(config)) for each in tokens)
        table = {("half", kind, 1536, 2048): steps}
        monkeypatch.setattr(tuned, "load", lambda family, gpu: table if (family, gpu) == ("gemm", "here") else {})

    return tune


def test_a_tuned_config_serves_about_its_number_of_tokens(tuned_for):
    """Few tokens are one tile; more make another number of tiles, for which another config may be best."""
    tuned_for(40, 96, 1024)
    tokens = (1, 20, 21, 40, 41, 84, 85, 96, 97, 896, 897, 1024, 1025, 4096)
    found = {each: choose(linear(each, 1536, 2048, gpu="here")) for each in tokens}
    assert {each for each, choice in found.items() if choice == (TUNED, "tuned")} == {21, 40, 85, 96, 897, 1024}
    assert {choice.source for choice in found.values()} == {"tuned", "model"}
    assert {20, 40, 84, 96, 896, 1024} <= set(token_edges(linear(1, 1536, 2048, gpu="here"), 4096))
    for others in (
        linear(100, 1536, 2048),
        linear(100, 1536, 2049, gpu="here"),
        input_grad(100, 1536, 2048, gpu="here"),
    ):
        assert choose(others).source != "tuned"


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942"])
def test_without_a_table_a_tuned_config_serves_its_neighbours(arch, tuned_for):
    """The rules that would serve them know nothing of this GPU. Few tokens say nothing of many, nor many of few."""

    def served(*tokens):
        found = {each: choose(linear(each, 1536, 2048, gpu="here", arch=arch)) for each in tokens}
        assert {choice.source for choice in found.values()} <= {"tuned", "default"}
        edges = token_edges(linear(1, 1536, 2048, gpu="here", arch=arch), 1 << 20)
        for each, choice in found.items():
            assert choose(linear(edges[bisect_left(edges, each)], 1536, 2048, gpu="here", arch=arch)) == choice
        return [each for each, choice in found.items() if choice.source == "tuned"]

    tuned_for(1, 40, 4096)
    sizes = 1, 2, 5, 6, 20, 21, 40, 41, 512, 513, 2048, 4096, 4097, 1 << 20
    assert served(*sizes) == [1, 6, 20, 21, 40, 513, 2048, 4096, 4097, 1 << 20]
    tuned_for(1, 512)
    assert served(1, 2, 64, 65, 512, 513, 4096) == [1, 65, 512]


def test_the_nearest_tuned_config_serves(monkeypatch):
    steps = tuple((tokens, astuple(replace(TUNED, group=tokens))) for tokens in (16, 64, 2048))
    monkeypatch.setattr(tuned, "load", lambda family, gpu: {("half", "nt", 1536, 2048): steps})
    chosen = {each: choose(linear(each, 1536, 2048, arch="sm_80")).config.group for each in (3, 17, 30, 64, 300, 9999)}
    assert chosen == {3: 16, 17: 64, 30: 64, 64: 64, 300: 2048, 9999: 2048}


def test_a_tuned_config_that_does_not_serve_here_is_passed_over(tuned_for):
    """What may differ between calls of one weight: alignment forces another kernel, a residual takes shared memory."""
    tuned_for(64, config=replace(TUNED, num_stages=64, block_k=512))
    assert choose(linear(64, 1536, 2048, gpu="here")).config.num_stages == 1  # as many as fit
    tuned_for(64, config=replace(TUNED, group=0))
    assert choose(linear(64, 1536, 2048, gpu="here")).source == "model"
    tuned_for(64, config=Config(128, 256, 64, 8, 3, "stream", persistent=True))
    misaligned = choose(linear(64, 1536, 2048, gpu="here", a_aligned=False))
    assert misaligned.config.kernel != "stream"
    assert illegal(linear(64, 1536, 2048, gpu="here", a_aligned=False), misaligned.config) == ""
    batched = make_problem(64, 1536, 2048, batch=3, batch_inner=3, gpu="here")
    assert choose(batched).source == "default"


def test_tuned_roles_serve_whatever_a_call_asks_for(tuned_for):
    """Calls of the weight that they cannot serve have another kernel, legal as well."""
    roles = Config(128, 128, 64, 8, 4, "roles", rest_n=64, pdl=True)
    tuned_for(512, config=roles)
    problem = linear(512, 1536, 2048, gpu="here")
    assert choose(problem) == (roles, "tuned")
    assert choose(replace(problem, dtype="float16", out_dtype="float16")).config == roles
    changes = {
        "tma": ({"a_aligned": False}, {"b_aligned": False}), "pointer": ({"tma": False},),
        "stream": ({"c_aligned": False},),
        "roles": ({"out_dtype": "float32", "chunk": 1024}, {"epilogue": Epilogue(bias="n")}),
    }  # fmt: skip
    for kernel, each in changes.items():
        for change in each:
            served = choose(replace(problem, **change))
            assert (served.config.kernel, served.source) == (kernel, "tuned"), change
            assert illegal(replace(problem, **change), served.config) == ""


def test_tuned_configs_are_candidates(tuned_for):
    odd = replace(TUNED, group=5)
    tuned_for(64, config=odd)
    assert odd in candidates(linear(1, 1536, 2048, gpu="here"))
    assert odd not in candidates(linear(1, 1536, 2048))


@pytest.mark.parametrize("change", [{"group": 0}, {"residents": 0}, {"parts": 3}, {"parts": 0}, {"num_warps": 32}])
def test_a_config_that_a_file_may_hold_by_mistake_is_illegal(change):
    assert illegal(linear(64, 4096, 4096), replace(TUNED, **change))
