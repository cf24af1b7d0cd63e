"""The norms', softmaxes' and embedding's kernels compiled for GPUs that are not here."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from compile_matrix import TARGETS, CompileJob, compile_job, limit_violations

from isogemm.norm import configs
from isogemm.norm.kernels import embedding, row_norm, softmax

FLOATS = {"eps": "fp32", "offset": "fp32"}
INTEGERS = {"ids_ptr": "*i32", "order_ptr": "*i64", "ends_ptr": "*i32"}
SUMS = ("sums_ptr", "other_sums_ptr", "weight_sums_ptr", "bias_sums_ptr", "statistics_ptr")


def _job(name, launch, dtype, missing=()):
    """A job of a launch on aligned tensors, all but those missing."""
    names = [each for each in launch.kernel.arg_names if each not in launch.constants]
    tensors = [each for each in names if each.endswith("_ptr") and each not in missing]
    signature = {each: "*fp32" if each in SUMS else INTEGERS.get(each, dtype) for each in tensors}
    return CompileJob(
        name=f"{name} {dtype}",
        kernel=launch.kernel,
        signature=signature | {each: FLOATS.get(each, "i32") for each in names if not each.endswith("_ptr")},
        constexprs=launch.constants | dict.fromkeys(missing),
        attrs=dict.fromkeys(tensors, 16),
        num_warps=launch.options["num_warps"],
        num_stages=launch.options["num_stages"],
        options={"enable_fp_fusion": launch.options["enable_fp_fusion"]},
    )


def _norms(width, kind, dtype, itemsize, block=0):
    config, backward = configs.choose(width, itemsize), configs.choose_backward(width, itemsize)
    no_bias = kind == "rms_norm"
    forward = row_norm.describe_norm(37, width, kind, 1e-5, 0.0, config)
    without = ("bias_ptr",) if no_bias else ("residual_ptr", "summed_ptr")
    yield _job(f"{kind} {width}", forward, dtype, without)
    launch = row_norm.describe_norm_backward(37, width, kind, 0.0, block or configs.SUM_ROWS, backward)
    without = ("bias_sums_ptr",) if no_bias else ("grad_summed_ptr",)
    yield _job(f"{kind}_backward {width}", launch, dtype, without)


def _softmaxes(columns, log, dtype, itemsize, shared_memory=1 << 18):
    name = "log_softmax" if log else "softmax"
    config = configs.choose_softmax(columns, itemsize, 1, shared_memory)
    yield _job(f"{name} {columns}", softmax.describe_softmax(37, columns, log, config), dtype)
    config = configs.choose_softmax(columns, itemsize, 2, shared_memory)
    yield _job(f"{name}_backward {columns}", softmax.describe_softmax_backward(37, columns, log, config), dtype)


def _sums(dtype):
    yield _job("weight_sums", row_norm.describe_weight_sums(37, 512, 4, 16, [1, 1], [False, False]), dtype)
    yield _job("long_pieces", embedding.describe_long_pieces(100, 512), dtype)
    yield _job("embedding", embedding.describe_embedding_backward(100, 9, 512, -1, (512, 1), False), dtype)


def jobs(target):
    if target == "sm_90":
        yield from _norms(4096, "rms_norm", "*bf16", 2)
        yield from _norms(512, "layer_norm", "*bf16", 2)
        yield from _norms(8192, "layer_norm", "*bf16", 2, 16)
        yield from _softmaxes(4096, False, "*bf16", 2)
        yield from _softmaxes(131072, True, "*bf16", 2)
        yield from _sums("*bf16")
    else:
        yield from _norms(1280, "layer_norm", "*fp32", 4)
        yield from _softmaxes(50304, False, "*fp32", 4, 1 << 16)
        yield from _sums("*fp32")


CASES = [(job, target) for target in TARGETS for job in jobs(target)]


@pytest.mark.parametrize(("job", "target"), CASES, ids=[f"{target} {job.name}" for job, target in CASES])
def test_compiles_within_limits(job, target):
    assert limit_violations(job, target, compile_job(job, target)) == ()  # spills, shared memory


def test_rows_that_would_not_fit_or_begin_anywhere_are_not_fetched_ahead():
    stages = {width: configs.choose_backward(width, 2).num_stages for width in (96, 4096, 8192, 16384, 90, 999, 65536)}
    assert stages == {96: 4, 4096: 4, 8192: 3, 16384: 2, 90: 1, 999: 1, 65536: 1}


def test_steps_of_a_softmax_fit_into_shared_memory():
    narrow, wide = (configs.choose_softmax(151936, 2, 2, size) for size in (1 << 16, 1 << 18))
    assert wide == replace(narrow, blocks=32, num_warps=32, steps=narrow.steps // 2)
