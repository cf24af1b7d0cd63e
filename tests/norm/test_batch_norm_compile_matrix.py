"""The batch norm's kernels compiled for GPUs that are not here, with all that they can be asked for.

From a shell, with PYTHONPATH=src:tests/encoder:
`PYTHONPATH=src:tests/shared:tests/norm python -m compile_matrix test_batch_norm_compile_matrix:jobs --target sm_90`.
"""

import pytest

pytest.importorskip("triton")

from compile_matrix import TARGETS, CompileJob, compile_job, limit_violations

from isogemm.norm import configs
from isogemm.norm.kernels import batch_norm as kernels

ROWS = 3000 * configs.TILE_ROWS
KINDS = {"seed": "*i64", "batches0": "*i64", "batches1": "*i64"}


def jobs(d=128, dtype="*fp32", pdl=True):
    launches = [
        kernels.describe("moments", ROWS, d, pdl=pdl),
        kernels.describe("group_moments", ROWS, d, pdl=pdl),
        kernels.describe("statistics", ROWS, d, eps=1e-5, pdl=pdl),
        kernels.describe("normalise", ROWS, d, pdl=pdl),
        kernels.describe("gradient_sums", ROWS, d, SLOTS=4, WIDTH=6, WHICH=2, pdl=pdl),
        kernels.describe("group_sums", ROWS, d, SLOTS=4, WIDTH=6, WHICH=2, pdl=pdl),
        kernels.describe("coefficients", ROWS, d, SLOTS=4, WIDTH=6, WHICH=2, pdl=pdl),
        kernels.describe("batch_norm_backward", ROWS, d, p=0.2, PLACE=1, pdl=pdl),
        kernels.describe("dropped", ROWS, d, p=0.2, PLACE=1, pdl=pdl),
        kernels.describe_running(d, (0.1, None), pdl),
    ]
    return [_job(launch, d, dtype) for launch in launches]


def _job(launch, d, dtype):
    names = launch.kernel.arg_names[: -len(launch.constants)]
    assert launch.kernel.arg_names[len(names) :] == list(launch.constants)  # as `Launch.bind` wants them
    tensors = names[: len(names) - len(launch.scalars)]
    pointers = {name: KINDS.get(name) or (dtype if name.endswith("_ptr") else "*fp32") for name in tensors}
    return CompileJob.of(launch, pointers, f"{launch.kernel.__name__} {d} {dtype}")


def _cases():
    for job in jobs():
        yield job, "sm_90"
    for target in TARGETS:
        if target != "sm_90":
            yield jobs(48, "*bf16", pdl=False)[7], target


CASES = list(_cases())


@pytest.mark.parametrize(("job", "target"), CASES, ids=[f"{target} {job.name}" for job, target in CASES])
def test_compiles_within_limits(job, target):
    assert limit_violations(job, target, compile_job(job, target)) == ()  # spills, shared memory


@pytest.mark.parametrize(
    ("name", "options"),
    [("statistics", {}), ("normalise", {"eps": 1e-5}), ("moments", {"SLOTS": 4}), ("coefficients", {"SLOT": 4})],
)
def test_what_a_kernel_does_not_take_is_an_error(name, options):
    with pytest.raises(TypeError, match=name):
        kernels.describe(name, ROWS, 16, **options)
