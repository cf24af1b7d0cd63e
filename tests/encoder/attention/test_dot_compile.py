"""The attention of long heads compiled for GPUs that are not here, as `choose` would have it.

From a shell, with PYTHONPATH=src:tests/encoder:
`PYTHONPATH=src:tests/shared:tests/attention python -m compile_matrix test_dot_compile:jobs --target sm_90`.
"""

from itertools import product

import pytest

pytest.importorskip("triton")

from compile_matrix import CompileJob, compile_job, limit_violations

from isogemm.encoder.attention import kernels
from isogemm.encoder.attention.configs import Attention, choose

HEADS = (64,)
NUMBERS = [("bfloat16", "ieee"), ("float32", "tf32"), ("float32", "ieee")]
POINTERS = {"float32": "*fp32", "bfloat16": "*bf16"}
MASKS = {"bool": "*i1", "additive": "*fp32"}
TENSOR_CORES = {"sm_80": {"mma"}, "sm_90": {"mma", "wgmma"}, "gfx942": {"mfma"}}


def jobs():
    """Every configuration with all it can be asked for, and a head that is no multiple of anything."""
    found = [_job(*each, "additive", True) for each in product(HEADS, NUMBERS, (False, True))]
    return found + [_job(17, NUMBERS[1], backward, "bool", False) for backward in (False, True)]


def portable_jobs():
    """A sample for every target."""
    return [_job(64, number, backward, "", False) for number, backward in product(NUMBERS, (False, True))]


def _job(head, number, backward, mask, causal):
    dtype, precision = number
    heads, tokens, tensors = 4, 128, 14 if backward else 9
    strides = (3 * heads * head,) * (6 if backward else 3)
    problem = Attention(64, tokens, heads, head, dtype, precision, strides, causal, mask, (tokens, 1))
    config = choose(problem)
    launch = kernels.describe(problem, config)
    names = launch.kernel.arg_names
    absent = ["previous_ptr", "seed_ptr", "scores_ptr", "d_scores_ptr", "d_previous_ptr"] + ["mask_ptr"] * (not mask)
    given = [name for name in names[:tensors] if name not in absent]
    types = {"lse_ptr": "*fp32", "mask_ptr": MASKS.get(mask)}
    signature = {name: types.get(name, POINTERS[dtype]) for name in given}
    attrs = dict.fromkeys(given, 16)
    constexprs = launch.constants | {name: None for name in names[:tensors] if name in absent}
    for name, value in zip(names[tensors:], launch.scalars, strict=False):  # as Triton specialises integers
        if value is None or (value == 1 and name != "tokens"):
            constexprs[name] = value
            continue
        signature[name] = "i32"
        if value % 16 == 0 and name != "tokens":
            attrs[name] = 16
    options = dict(launch.options)
    return CompileJob(
        name=f"{'backward' if backward else 'forward'} of {head} {dtype}/{precision} {mask or 'no'} mask {config}",
        kernel=launch.kernel,
        signature=signature,
        constexprs=constexprs,
        attrs=attrs,
        num_warps=options.pop("num_warps"),
        num_stages=options.pop("num_stages"),
        options=options,
    )


CASES = [(job, "sm_90") for job in jobs()]
CASES += [(job, target) for job in portable_jobs() for target in ("sm_80", "gfx942")]


@pytest.mark.parametrize(("job", "target"), CASES, ids=[f"{target} {job.name}" for job, target in CASES])
def test_compiles_within_limits(job, target):
    used = compile_job(job, target)
    assert limit_violations(job, target, used) == ()  # spills, shared memory
    if "float32/ieee" not in job.name:
        assert used.instructions & TENSOR_CORES[target]
