"""Its product is tested in tests/interpreter; here, that it is a kernel worth comparing with."""

import pytest

pytest.importorskip("triton")

from compile_matrix import CompileJob, compile_job, limit_violations

from isogemm.bench import fixed_tile


def test_it_uses_the_tensor_cores_and_does_not_spill():
    options = dict(fixed_tile.OPTIONS)
    sizes = ["M", "N", "K", "a_row", "b_col", "out_row"]
    job = CompileJob(
        "fixed tile",
        fixed_tile._mm_kernel,
        {**dict.fromkeys(["a", "b", "out"], "*bf16"), **dict.fromkeys(sizes, "i32")},
        {"a_col": 1, "b_row": 1, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": fixed_tile.GROUP},
        attrs=dict.fromkeys(["a", "b", "out", *sizes], 16),
        num_warps=options.pop("num_warps"),
        num_stages=options.pop("num_stages"),
        options=options,
        uses={"sm_90": ["wgmma"]},
    )
    assert limit_violations(job, "sm_90", compile_job(job, "sm_90")) == ()
