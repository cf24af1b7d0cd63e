"""The loss kernels compiled for GPUs that are not here."""

import pytest

pytest.importorskip("triton")

from compile_matrix import TARGETS, CompileJob, compile_job, limit_violations

from isogemm.loss import kernels

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
SIZES = (4096, 16384, 16384, 0)  # rows, columns, their distance, the first column


def jobs():
    """Every kernel: the plain log-probability, and all values of scaled logits."""
    return [job for everything in (False, True) for job in _jobs(everything, "*i64", *POINTERS.values())]


def _jobs(everything, target, *outs):
    flags, name = (everything,) * 3, "all" if everything else "plain"
    scaling = (30.0, 1 / 30, 0.7) if everything else (None, None, None)
    sums = kernels.describe_block_sums(*SIZES, 126, scaling, *flags[:2])
    pointers = {"logits": "*fp32", "targets": target, "sums": "*fp32", "picked": "*fp32"}
    yield CompileJob.of(sums, pointers, f"block sums {name}")
    values = kernels.describe_row_values(4096, 4096, 262144, -100, *flags)
    pointers = {"sums": "*fp32", "picked": "*fp32", "targets": target, "values": "*fp32", "stats": "*fp32"}
    yield CompileJob.of(values, pointers, f"row values {name}")
    for out in outs:
        grad = kernels.describe_logit_grad(*SIZES, 4096, 128256, -100, scaling, *flags)
        pointers = {"logits": "*fp32", "targets": target, "grad": "*fp32", "values": "*fp32", "stats": "*fp32"}
        yield CompileJob.of(grad, pointers | {"out": out}, f"logit grad {name} {out}")


CASES = [("sm_90", job) for everything in (False, True) for job in _jobs(everything, "*i64", "*bf16")]
CASES += [(target, job) for target in sorted({*TARGETS} - {"sm_90"}) for job in _jobs(True, "*i32", "*bf16")]


@pytest.mark.parametrize(("target", "job"), CASES, ids=[f"{target} {job.name}" for target, job in CASES])
def test_compiles_within_limits(target, job):
    assert limit_violations(job, target, compile_job(job, target)) == ()
