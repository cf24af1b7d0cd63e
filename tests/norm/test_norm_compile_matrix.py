"""The norm's kernels compiled for GPUs that are not here, at a usual width."""

import pytest

pytest.importorskip("triton")

from compile_matrix import TARGETS, CompileJob, compile_job, limit_violations

from isogemm.norm import configs
from isogemm.norm.kernels.row_norm import describe_norm, describe_norm_backward

WIDTHS = [512]


def _jobs(width, dtype="*bf16"):
    config = configs.choose(width)
    for describe in (describe_norm, describe_norm_backward):
        launch = describe(37, width, "layer_norm", 1e-5, config)
        names = launch.kernel.arg_names[: -len(launch.constants)]
        pointers = [name for name in names if name.endswith("_ptr")]
        signature = {name: "*fp32" if "sums" in name else dtype for name in pointers}
        yield CompileJob(
            name=f"{launch.kernel.__name__} {width}",
            kernel=launch.kernel,
            signature=signature | {"rows": "i32", "eps": "fp32"},
            constexprs=launch.constants,
            attrs=dict.fromkeys(pointers, 16),
            num_warps=launch.options["num_warps"],
            num_stages=launch.options["num_stages"],
            options={"enable_fp_fusion": launch.options["enable_fp_fusion"]},
        )


CASES = [(job, "sm_90") for width in WIDTHS for job in _jobs(width)]
CASES += [(job, target) for target in TARGETS if target != "sm_90" for job in _jobs(48, "*fp32")]


@pytest.mark.parametrize(("job", "target"), CASES, ids=[f"{target} {job.name}" for job, target in CASES])
def test_compiles_within_limits(job, target):
    assert limit_violations(job, target, compile_job(job, target)) == ()  # spills, shared memory


def test_rows_that_would_not_fit_or_begin_anywhere_are_not_fetched_ahead():
    assert [configs.choose(width).num_stages for width in (96, 768, 2048)] == [3, 3, 3]
    assert [configs.choose(width).num_stages for width in (90, 999, 4096, 65536)] == [1, 1, 1, 1]
