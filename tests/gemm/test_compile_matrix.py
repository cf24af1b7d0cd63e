"""The GEMM kernels compiled for GPUs that are not here, as `choose` would have them.

From a shell, with PYTHONPATH=src:tests/gemm:tests/shared:
`python -m compile_matrix test_compile_matrix:table_jobs --target sm_90`.
"""

import re
from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("triton")

from compile_matrix import compile_job, disassemble, limit_violations
from gemm_jobs import (
    NAMES,
    assert_wgmmas_overlap,
    check_compiled,
    compile_within_limits,
    for_warpgroups,
    launch_job,
    product_job,
    saved_type,
)

from isogemm.epilogues import ACTIVATIONS
from isogemm.epilogues.operands import MATRICES, PLACES, Epilogue
from isogemm.gemm import configs, selection
from isogemm.gemm.configs import BIAS_BLOCKS, BIAS_CHUNK, Config, Problem
from isogemm.gemm.gradient_problems import ActivationGradProblem, BiasGradProblem
from isogemm.gemm.kernels.gradients import describe_activation_grad, describe_bias_grad, describe_chunk_sums
from isogemm.gemm.kernels.halves import describe_split
from isogemm.gemm.kernels.products import describe_add_partials
from isogemm.gemm.tables.sm_90 import TABLE

NUMBERS = {  # dtype, precision
    "half": ("bfloat16", "ieee"),
    "tf32": ("float32", "tf32"),
    "tf32x3": ("float32", "tf32x3"),
    "ieee": ("float32", "ieee"),
}


BIASED = Epilogue(bias="n")
KINDS = {  # what stands for the epilogues of a kind of problem
    "activated": Epilogue(bias="n", activation="gelu_tanh"),
    "gated": Epilogue(activation="swiglu"),
    "gradient": Epilogue(activation="gelu", gradient="pre"),
    "gated gradient": Epilogue(activation="swiglu", gradient="pre"),
}
SUMMED = [replace(KINDS[kind], sums=True) for kind in ("gradient", "gated gradient")]


def _problem(m, n, k, layout="nt", dtype="bfloat16", precision="ieee", out_dtype=None, **others):
    a_strides = (k, 1) if layout[0] == "n" else (1, m)
    b_strides = (n, 1) if layout[1] == "n" else (1, k)
    return Problem(m, n, k, dtype, out_dtype or dtype, precision, a_strides, b_strides, (n, 1), **others)


def _measured():
    """The problems of the tables, one for each configuration of each."""
    found = {}
    for (number, kind, *sizes), by_tokens in TABLE.items():
        dtype = NUMBERS[number][0]
        layout, _, followed = kind.partition(" ")
        epilogue = KINDS.get(followed, Epilogue())
        for tokens, _ in by_tokens:
            if layout == "tn":
                chunk = configs.token_chunk(*sizes, dtype)
                problem = _problem(*sizes, tokens, layout, *NUMBERS[number], chunk=chunk)
            else:
                problem = _problem(tokens, *sizes, layout, *NUMBERS[number], epilogue=epilogue)
                problem = replace(problem, chunk=configs.accumulation_chunk(problem))
            chosen = {selection.choose(problem).config, *_on_the_menu(problem)}
            for config in sorted(chosen, key=str):
                found.setdefault((number, kind, config, configs.accumulation(problem, config)), (problem, config))
    return found.values()


def _on_the_menu(problem):
    """The configurations of the model that may serve this problem."""
    for each in selection.menu(problem):
        config = configs.fitted(problem, each.config)
        if each.above < problem.m <= (each.most or problem.m) and not configs.illegal(problem, config):
            yield config


def _other_cases():
    """For sm_90: numbers, layouts, walks and ends that the tables' own problems do not have."""
    accumulated = {"out_dtype": "float32", "accumulate": True}
    for tokens in (1, 64, 4096):
        yield _problem(tokens, 4096, 4096, dtype="float16", epilogue=BIASED)
        yield _problem(tokens, 4096, 4096, out_dtype="float32", epilogue=BIASED)
        yield _problem(tokens, 4096, 4096, dtype="float32", precision="tf32", epilogue=BIASED)
        yield _problem(tokens, 4096, 4096, dtype="float32", precision="tf32x3", epilogue=BIASED)
    for layout in ("nn", "tn", "tt"):
        for number in ("half", "tf32", "tf32x3", "ieee"):
            yield _problem(512, 4096, 4096, layout, *NUMBERS[number])
    yield _problem(4096, 4096, 4096, "tn", chunk=4096, **accumulated)
    yield _problem(4096, 4096, 8192, "tn", chunk=4096, **accumulated)
    yield _problem(256, 1024, 8192, "tn", chunk=1024, **accumulated)
    yield _problem(4096, 4096, 8192, "tn", *NUMBERS["tf32"], chunk=4096, accumulate=True)
    yield _problem(4096, 4096, 8192, "tn", *NUMBERS["ieee"], chunk=4096, accumulate=True)
    for tokens, epilogue in product((1, 16, 64, 100), (Epilogue(), KINDS["gated"])):  # rows that are read in pieces
        yield _problem(tokens, 1001, 999, epilogue=epilogue)
    yield _problem(1, 1001, 999, "nn", *NUMBERS["tf32"])
    yield _problem(100, 1001, 999, "tn", *NUMBERS["tf32"])
    yield _problem(100, 4096, 32768, chunk=8192, epilogue=BIASED)
    square = _problem(512, 512, 512)
    yield replace(square, a_aligned=False, b_aligned=False, c_aligned=False)
    yield replace(square, a_strides=(1024, 2), b_strides=(2, 1024))
    yield replace(square, a_strides=(2**31, 1))
    yield replace(square, batch=6, batch_inner=3, a_batch_strides=(2**20, 2**18), b_batch_strides=(0, 2**18))
    tokens = _problem(512, 512, 512, "tn", chunk=256, **accumulated)
    yield replace(tokens, k_inner=32, k_outer_strides=(2**15, 2**14))


def _epilogue_cases():
    """For sm_90: every activation, as torch computes it in a small tile or for training in a large one."""
    large = Config(128, 256, 64, 8, 3, "stream", persistent=True, parts=4)
    small = Config(64, 32, 64, 4, 4, swapped=True)
    everything = Epilogue(
        bias="m", alpha="host", row_scale=True, col_scale=True, beta="device", dropout=True, residual=True
    )
    epilogues = [everything]
    for place, (name, entry) in enumerate(ACTIVATIONS.items()):
        arguments = tuple(entry.arguments.values())
        saves = "pre" if entry.gate or entry.saved == "out" else entry.saved
        epilogues.append(
            Epilogue(activation=name, arguments=arguments, exact=True, eager=True, residual=True)
            if place % 2
            else Epilogue(bias="n", activation=name, arguments=arguments, saves=saves)
        )
    for epilogue, config, tokens in product(epilogues, (large, small), (1024,)):
        if (epilogue.eager and config is large) or (epilogue.saves and config is small):
            continue
        problem = _problem(tokens, 1024, 1024, epilogue=epilogue, read_strides=(1024, 1024))
        yield problem, configs.fitted(problem, config)
    for name in ("gelu", "swiglu"):  # kept within float16's range, and in float32
        epilogue = Epilogue(bias="n", activation=name, saves="pre")
        problem = _problem(1024, 1024, 1024, dtype="float16", epilogue=epilogue)
        yield problem, configs.fitted(problem, large)
    silu = _problem(1024, 1024, 1024, "nn", epilogue=Epilogue(activation="silu", gradient="pre", dropout=True))
    yield silu, configs.fitted(silu, large)
    for epilogue, number, tokens in (*product(SUMMED, NUMBERS, (512,)), *product(SUMMED, ("half",), (1, 4096))):
        problem = _problem(tokens, 14336, 4096, "nn", *NUMBERS[number], epilogue=epilogue)
        yield problem, selection.choose(problem).config
    for name, kind in (("relu", "out"), ("reglu", "pre")):
        epilogue = Epilogue(activation=name, gradient=kind, dropout=True, sums=True)
        problem = _problem(1024, 1024, 1024, "nn", epilogue=epilogue)
        yield problem, configs.fitted(problem, large)
    for tokens, sizes in product((256, 1024), ((3072, 768), (4096, 1024))):
        problem = _problem(tokens, *sizes, "nn", epilogue=SUMMED[1])
        yield problem, selection.choose(problem).config
    apart = _problem(1024, 1024, 1024, epilogue=Epilogue(bias="n", bias_up=True, activation="swiglu"))
    yield apart, configs.fitted(apart, Config(64, 64, 64, 4, 3))
    wide = _problem(1024, 1024, 1024, epilogue=everything, read_strides=(1024, 1024), reads_float32=True)
    odd = replace(wide, read_strides=(1024, 1025), reads_float32=False)
    added = Epilogue(bias="n", activation="relu", residual=True)  # with all else, pointers of each element would spill
    shifted = _problem(1024, 1024, 1024, epilogue=added, read_strides=(0, 1024), read_aligned=False)
    for problem, parts in ((wide, 1), (wide, 4), (odd, 2), (shifted, 1), (shifted, 4)):
        yield problem, configs.fitted(problem, replace(large, parts=parts))
    yield from _waiting_cases()
    unaligned = replace(apart, b_aligned=False)
    yield unaligned, selection.choose(unaligned).config


def _waiting_cases():
    """Programs that hand unfinished sums to others, and the loop still pipelined."""
    stream = Config(128, 256, 64, 8, 3, "stream", persistent=True, parts=2, balanced=True)
    for epilogue in (Epilogue(), KINDS["activated"], KINDS["gated"]):
        yield _problem(1024, 14336, 4096, epilogue=epilogue), stream
    tf32 = _problem(1024, 14336, 4096, dtype="float32", precision="tf32")
    yield tf32, replace(stream, block_k=32, parts=4)
    queued = Config(128, 128, 64, 4, 3, "tma", parts=2, parallel_chunks="queued")
    yield _problem(1024, 1024, 65536, "tn", out_dtype="float32", accumulate=True, chunk=2048), queued
    small = replace(queued, block_m=32, block_n=8, block_k=256, num_warps=2, num_stages=5, parts=1, swapped=True)
    for epilogue in (Epilogue(), Epilogue(bias="n", activation="gelu_tanh", residual=True)):
        problem = _problem(1, 1536, 8960, chunk=4352, epilogue=epilogue, read_strides=(1536, 1536))
        for parallel in ("queued", "gathered"):
            yield problem, replace(small, kernel="pointer", pdl=True, parallel_chunks=parallel)


def _split_cases():
    """tf32x3 with halves that a pass wrote: wgmma reads them from shared memory, whatever the layout was."""
    both = Config(128, 128, 32, 8, 3, "tma", split="both", parts=4)
    stream = replace(both, kernel="stream", persistent=True)
    for layout, config in product(("nt", "tn"), (both, stream, replace(both, num_stages=2, rest_n=64))):
        yield _problem(4096, 4096, 4096, layout, *NUMBERS["tf32x3"]), config
    chunked = _problem(1000, 3000, 2001, "tn", *NUMBERS["tf32x3"], chunk=1024)
    yield chunked, replace(both, block_m=64, num_warps=4, num_stages=2)
    few = _problem(64, 4096, 4096, "nt", *NUMBERS["tf32x3"], epilogue=BIASED)
    for split, columns in product(("", "a"), (16, 64)):
        yield few, Config(64, columns, 32, 4, 4, "tma", swapped=True, split=split, pdl=True)


def _split_jobs():
    """The pass, over operands contiguous along k, along their rows, and of odd sizes."""
    config = Config(128, 128, 32, 8, 3, "tma", split="both")
    for sizes, layout in product(((4096, 4096, 4096), (1000, 3000, 2001)), ("nt", "tn")):
        problem = _problem(*sizes, layout, *NUMBERS["tf32x3"])
        yield launch_job(f"halves of {problem}", describe_split(problem, config, "a"), ("fp32", "fp32"), (True, True))


def _portable_cases(arch):
    """What `choose` gives where nothing was measured."""
    for number, tokens in product(NUMBERS, (8, 512)):
        yield _problem(tokens, 1024, 1024, "nt", *NUMBERS[number], arch=arch)
    for number in ("half", "tf32"):
        yield _problem(512, 1024, 8192, "tn", *NUMBERS[number], chunk=1024, arch=arch)
    yield _problem(512, 1024, 1024, "nn", arch=arch, epilogue=BIASED, out_dtype="float32")
    for epilogue in (KINDS["activated"], KINDS["gated"]):
        yield _problem(512, 1024, 1024, arch=arch, epilogue=epilogue)
    for epilogue in SUMMED:
        yield _problem(512, 1024, 1024, "nn", arch=arch, epilogue=epilogue)


def _bias_grad_jobs():
    """One chunk; chunks side by side; rows that begin anywhere."""
    for dtype, (tokens, n, accumulate) in product(NAMES, ((1024, 1024, False), (1024, 127, True), (4096, 1024, False))):
        out_dtype = "float32" if accumulate else dtype
        problem = BiasGradProblem(tokens, n, dtype, out_dtype, (n, 1), BIAS_CHUNK, accumulate=accumulate)
        out = "fp32" if problem.split else NAMES[out_dtype]
        yield launch_job(f"bias gradient {problem}", describe_bias_grad(problem), (NAMES[dtype], out), (True, True))


def _adding_jobs():
    for problem in (
        _problem(256, 1024, 8192, "tn", chunk=1024),
        _problem(256, 1024, 8192, "tn", chunk=1024, out_dtype="float32", accumulate=True),
        _problem(256, 1024, 32768, chunk=8192, epilogue=BIASED),
    ):
        bias = NAMES[problem.dtype] if problem.epilogue.bias else None
        launch = describe_add_partials(problem)
        yield launch_job(f"sum of {problem}", launch, ("fp32", NAMES[problem.out_dtype], bias), (True, True, False))
    for together, dtype, accumulate in ((1, "bf16", False), (BIAS_BLOCKS, "fp32", True)):
        launch = describe_chunk_sums(64, 1024, together, 1, accumulate)
        yield launch_job(f"sum of chunks of {together}", launch, ("fp32", dtype), (False, False))


def _activation_grad_jobs():
    """Narrow programs and wide ones."""
    for dtype, (epilogue, saves), tokens in product(
        ("bfloat16", "float16", "float32"),
        (
            (Epilogue(activation="relu", gradient="mask"), True),
            (Epilogue(activation="swiglu", gradient="pre", dropout=True), True),
            (Epilogue(dropout=True), False),
        ),
        (4096, 16384),
    ):
        if dtype == "bfloat16" or epilogue.gated:
            problem = ActivationGradProblem(tokens, 1024, dtype, epilogue, 1024, sums=True)
            saved = saved_type(epilogue, NAMES[dtype]) if saves else None
            addressed = (NAMES[dtype], saved, "i64" if epilogue.dropout else None, NAMES[dtype], "fp32")
            yield launch_job(f"gradient of {problem}", describe_activation_grad(problem), addressed, (True,) * 5)


def table_jobs():
    return [product_job(*case) for case in MEASURED]


def _makes():
    """One measured configuration of each make."""
    found = {}
    for problem, config in MEASURED:
        make = problem.number, problem.kind, config.kernel, config.swapped, bool(config.rest_n)
        found.setdefault((*make, for_warpgroups(problem, config)), (problem, config))
    return list(found.values())


def _distinct(cases):
    """Those that the compiler tells apart, whatever their sizes."""
    found = {}
    for problem, config in cases:
        found.setdefault(repr(replace(product_job(problem, config), name="")), (problem, config))
    return list(found.values())


MEASURED = list(_measured())
SAMPLE = _makes()[::2]  # all of them ran on the GPU they were measured on; `table_jobs` compiles the rest
OTHERS = _distinct(
    [*((problem, selection.choose(problem).config) for problem in _other_cases()), *_epilogue_cases(), *_split_cases()]
)
PORTABLE = [
    (problem, selection.choose(problem).config)
    for arch in ("sm_80", "sm_100", "gfx942")
    for problem in _portable_cases(arch)
]
SMALL = [*_bias_grad_jobs(), *_adding_jobs(), *_activation_grad_jobs()]
SMALL = [(job, "sm_90") for job in (*SMALL, *_split_jobs())] + [
    (job, target) for job in SMALL[::2] for target in ("sm_80", "gfx942")
]
TENSOR_CORES = {"sm_80": {"mma"}, "sm_100": {"mma", "tcgen05"}, "gfx942": {"mfma"}}


def _ids(cases):
    return [f"{problem.arch} {problem} {config}" for problem, config in cases]


@pytest.mark.parametrize(("problem", "config"), SAMPLE, ids=_ids(SAMPLE))
def test_measured_compile_within_limits(problem, config):
    used = check_compiled(problem, config)
    if "wgmma" in used.instructions:  # warpgroups wait after each product if the compiler cannot tell what it touches
        code = disassemble(product_job(problem, config), "sm_90")
        assert code.count("WARPGROUP.DEPBAR") < code.count("HGMMA")


@pytest.mark.parametrize(("problem", "config"), OTHERS, ids=_ids(OTHERS))
def test_compiles_within_limits(problem, config):
    check_compiled(problem, config)
    if config.split:  # an operand in registers is one that the product splits
        left_in_registers = re.search(r"HGMMA\S* R\d+, R\d+, gdesc", disassemble(product_job(problem, config), "sm_90"))
        assert bool(left_in_registers) == (not config.splits("b" if config.swapped else "a"))


STREAM = Config(128, 256, 64, 8, 3, "stream", persistent=True, parts=2)
NESTED = Config(128, 128, 64, 8, 5, "tma")
OVERLAPPED = {
    "one sum": (_problem(4096, 4096, 4096), STREAM, "one"),
    "in scratch memory": (_problem(4096, 2048, 11008, chunk=5632), STREAM, "scratch"),
    "in registers": (
        _problem(4096, 2048, 11008, chunk=5632), replace(STREAM, block_n=128, num_stages=5), "registers",
    ),
    "balanced": (_problem(1024, 14336, 4096), replace(STREAM, balanced=True), "one"),
    "nested": (_problem(1024, 2048, 11008, chunk=5632), NESTED, "registers"),
    "nested, with a rest": (
        _problem(1024, 2048, 11008, chunk=5632), replace(NESTED, rest_n=64, num_stages=4), "registers",
    ),
    "gathered": (
        _problem(256, 2048, 11008, chunk=5632), replace(NESTED, parallel_chunks="gathered"), "gathered",
    ),
    "queued": (_problem(256, 2048, 11008, chunk=5632), replace(NESTED, parallel_chunks="queued"), "scratch"),
    "main_grad": (
        _problem(4096, 4096, 8192, "tn", chunk=4096, out_dtype="float32", accumulate=True), STREAM, "in place",
    ),
    "with an activation": (_problem(4096, 2048, 11008, chunk=5632, epilogue=KINDS["activated"]), STREAM, "scratch"),
    "a gate's two sums": (
        _problem(4096, 2048, 11008, chunk=5632, epilogue=KINDS["gated"]),
        replace(STREAM, block_n=128, num_stages=4), "registers",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("problem", "config", "kept"), OVERLAPPED.values(), ids=OVERLAPPED.keys())
def test_wgmmas_do_not_wait_for_one_another(problem, config, kept):
    """ptxas serialises them where it cannot tell what touches a sum.

    8192 tokens of 2048 x 11008 then took 737 us instead of 534.
    """
    assert configs.illegal(problem, config) == ""
    assert configs.accumulation(problem, config) == kept
    assert_wgmmas_overlap(problem, config)


@pytest.mark.parametrize(("problem", "config"), PORTABLE, ids=_ids(PORTABLE))
def test_defaults_compile_within_limits(problem, config):
    used = compile_within_limits(problem, config)
    tensor_cores = used.instructions & {"mma", "wgmma", "tcgen05", "mfma"}
    if problem.number == "ieee" and problem.arch != "gfx942":  # whose matrix cores do fp32
        assert not tensor_cores
    else:
        assert tensor_cores & TENSOR_CORES[problem.arch]


@pytest.mark.parametrize(("job", "target"), SMALL, ids=[f"{target} {job.name}" for job, target in SMALL])
def test_sums_compile_within_limits(job, target):
    """Also those of the smallest GPUs, for which no other configuration is chosen."""
    used = compile_job(job, target)
    assert limit_violations(job, target, used) == ()
    assert used.shared_bytes <= configs._LEAST_SHARED_MEMORY


def test_specialisation_is_tritons():
    """What `product_job` says of the arguments is what Triton would find out from them."""
    problem = _problem(100, 1024, 1000, "nn", epilogue=BIASED)
    job = product_job(problem, configs.canonical(problem))
    unused = {name for name, value in job.constexprs.items() if value is None}
    assert unused >= {
        "b_rest", "scratch", "k_inner", "stride_ak_outer", "stride_bk_outer", f"e{PLACES['residual']}",
        f"e{PLACES['seed']}", f"stride_e{MATRICES.index('residual')}", "batch", "batch_inner", "stride_ab_outer",
        "stride_ab", "stride_bb_outer", "stride_bb", "alpha_value",
    }  # fmt: skip
    assert not unused & {"a", "b", "c", f"e{PLACES['bias']}", "stride_am", "stride_bk", "stride_cm"}
    assert (job.constexprs["stride_ak"], job.constexprs["stride_bn"], job.constexprs["stride_cn"]) == (1, 1, 1)
    assert job.attrs == dict.fromkeys(("a", "b", "c", "stride_bk", "stride_cm"), 16)
    assert job.signature["stride_am"] == job.signature["M"] == "i32"
    far = product_job(replace(problem, a_strides=(2**31, 1)), configs.canonical(problem))
    assert far.signature["stride_am"] == "i64"
    square, tma = _problem(4096, 4096, 4096), Config(128, 128, 64, 8, 4, "tma")
    described = product_job(square, tma).signature
    assert described["a"] == f"tensordesc<bf16[{tma.block_m}, {tma.block_k}]>"
