"""The tiny kernels compiled for GPUs that are not here, as `choose` would have them.

From a shell, with PYTHONPATH=src:tests/tiny:tests/shared:
`python -m compile_matrix test_compile_matrix:jobs --target sm_90`; `:portable_jobs` for every target.
"""

from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("triton")

from compile_matrix import CompileJob, compile_job, limit_violations

from isogemm.tiny.configs import KERNELS, DotConfig, Problem, WholeConfig, choose, gate
from isogemm.tiny.kernels import describe_bmm

SHAPES = [  # m, n, k
    (12, 12, 64), (12, 64, 12), (16, 16, 16), (32, 32, 32), (64, 64, 64), (42, 42, 8), (42, 8, 42),
    (42, 42, 4), (5, 5, 16), (5, 16, 5), (3, 5, 7), (48, 24, 40), (8, 8, 8), (64, 64, 16),
]  # fmt: skip
LAYOUTS = ("nn", "nt", "tn")
NUMBERS = [("float32", "ieee"), ("float32", "tf32"), ("bfloat16", "ieee"), ("float16", "ieee")]
POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
TENSOR_CORES = {"sm_80": {"mma"}, "sm_90": {"mma", "wgmma"}, "sm_100": {"mma", "tcgen05"}, "gfx942": {"mfma"}}


def jobs():
    """For sm_90: what the gate gives for the shapes of the speed goals."""
    found = {}
    for shape, layout, batch in product(SHAPES, LAYOUTS, (256, 65536)):
        problem = _problem(shape, layout, batch=batch)
        _add(found, problem, gate(problem))
    for shape, layout, number in product(SHAPES, LAYOUTS, NUMBERS[1:3]):
        for batch in (1024, 65536):
            problem = _problem(shape, layout, *number, batch=batch)
            _add(found, problem, gate(problem))
    return list(found.values())


def forced_jobs():
    """For sm_90: each kernel, whatever the gate gives."""
    found = {}
    for shape, number, kernel in product([(12, 12, 64), (42, 8, 42), (3, 5, 7)], NUMBERS[:3], KERNELS):
        _add(found, _problem(shape, "nt", *number), kernel)
    for kernel in KERNELS:
        _add(found, _problem((12, 12, 64), "nt", *NUMBERS[3]), kernel)
        _add(found, _problem((64, 64, 64), "nn"), kernel)
        _add(found, _problem((48, 24, 40), "tt"), kernel)
        _add(found, replace(_problem((12, 12, 64), "nn"), a_strides=(0, 64, 1)), kernel)
        _add(found, replace(_problem((12, 12, 64), "nn"), a_alignment=4, b_alignment=4), kernel)
        _add(found, replace(_problem((3, 5, 7), "nn"), a_strides=(2**31, 2**31, 1)), kernel)
    return list(found.values())


def packed_jobs():
    """For sm_90: several matrices per program, and parts of odd sizes."""
    odd = _problem((17, 50, 33), "nt", *NUMBERS[2])
    packed = _job(_problem((12, 12, 64), "nn"), WholeConfig(16, 16, 64, 4, 4))
    return [packed, _job(odd, WholeConfig(16, 8, 64, 1, 2, ordered=True))]


def portable_jobs():
    """Without early launches and assembly: a sample for every target."""
    found = {}
    for shape, number in [((12, 12, 64), NUMBERS[0]), ((64, 64, 16), NUMBERS[1]), ((48, 24, 40), NUMBERS[2])]:
        for kernel in KERNELS:
            _add(found, _problem(shape, "nn", *number, arch="gfx942"), kernel)
    _add(found, _problem((3, 5, 7), "nt", arch="gfx942"), "registers")
    return list(found.values())


def _problem(shape, layout, dtype="float32", precision="ieee", batch=1024, arch="sm_90"):
    m, n, k = shape
    a_strides = (m * k, k, 1) if layout[0] == "n" else (m * k, 1, m)
    b_strides = (k * n, n, 1) if layout[1] == "n" else (k * n, 1, k)
    return Problem(batch, m, n, k, dtype, precision, a_strides, b_strides, arch=arch)


def _add(found, problem, kernel):
    """The job of one launch, unless the same was compiled for another batch."""
    if kernel:
        config = choose(problem, kernel)
        job = _job(problem, config)
        found.setdefault(repr(replace(job, name="")), job)


def _job(problem, config):
    launch = describe_bmm(problem, config)
    names = launch.kernel.arg_names
    signature = dict.fromkeys(names[:3], POINTERS[problem.dtype])
    alignments = (problem.a_alignment, problem.b_alignment, 16)
    attrs = {name: 16 for name, alignment in zip(names, alignments, strict=False) if alignment == 16}
    constexprs = dict(launch.constants)
    for name, value in zip(names[3:], launch.scalars, strict=False):  # as Triton specialises integers
        if value == 1:
            constexprs[name] = 1
            continue
        signature[name] = "i32" if value < 2**31 else "i64"
        if value % 16 == 0 and name != "batch":
            attrs[name] = 16
    options = dict(launch.options)
    return CompileJob(
        name=f"{problem} {config}",
        kernel=launch.kernel,
        signature=signature,
        constexprs=constexprs,
        attrs=attrs,
        num_warps=options.pop("num_warps"),
        num_stages=options.pop("num_stages"),
        options=options,
    )


# Of every layout, batch and number some; the others from a shell, as above.
CASES = [(job, "sm_90") for job in (*jobs()[::5], *forced_jobs(), *packed_jobs())]
CASES += [(job, target) for job in portable_jobs() for target in ("sm_80", "sm_100", "gfx942")]


@pytest.mark.parametrize(("job", "target"), CASES, ids=[f"{target} {job.name}" for job, target in CASES])
def test_compiles_within_limits(job, target):
    used = compile_job(job, target)
    assert limit_violations(job, target, used) == ()  # spills, shared memory
    tensor_cores = used.instructions & {"mma", "wgmma", "tcgen05", "mfma"}
    if "registers" in job.name:
        assert "fma" in used.instructions
        assert not tensor_cores
        assert used.shared_bytes == 0
    elif "float32/ieee" in job.name:
        assert "fma" in used.instructions or target == "gfx942"  # whose matrix cores do fp32
        assert not tensor_cores or target == "gfx942"
    else:
        assert tensor_cores & TENSOR_CORES[target]


def test_specialisation_is_tritons():
    """What `_job` says of the arguments is what Triton would find out from them."""
    job = _job(_problem((12, 12, 64), "nn"), DotConfig(16, 16, 64, 1, 1))
    assert (job.constexprs["stride_ak"], job.constexprs["stride_bn"]) == (1, 1)
    assert set(job.attrs) == {"a_ptr", "b_ptr", "c_ptr", "stride_ab", "stride_am", "stride_bb"}
    assert job.signature["stride_bk"] == "i32"
    far = _job(replace(_problem((3, 5, 7), "nn"), a_strides=(0, 2**31, 1)), DotConfig(16, 16, 16, 1, 1))
    assert far.signature["stride_am"] == "i64"
