"""The fused layer's launches compiled for GPUs that are not here: a few layers, and a sample elsewhere."""

import pytest

pytest.importorskip("triton")

import torch
import triton
from compile_matrix import TARGETS, CompileJob, compile_job, limit_violations

from isogemm.encoder.configs import Layer
from isogemm.encoder.parameters import EncoderDropout
from isogemm.encoder.plan import Plan

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def _layer(d_model, nhead, dim_feedforward, number, norm_first=True, wgmma=False, norm="layer_norm", **variant):
    dtype = "float32" if number in ("tf32", "ieee") else number
    return Layer(
        896, 42, d_model, nhead, dim_feedforward, dtype, dtype, dtype, number if dtype == "float32" else "",
        norm, norm_first, "gelu", False, "", (0, 0), True, mma=True, wgmma=wgmma, **variant,
    )  # fmt: skip


def _jobs(layer):
    plan = Plan(layer, torch.device("cpu"), 1e-5, biases=True)
    forward, _ = plan._forwards[True]
    backward, _ = plan._backward_schedule(plan.gradients((True,) * len(plan.names)), layer.scores)
    for step in (*forward._steps, *backward._steps):
        launch = step.describe()
        names = launch.kernel.arg_names[: -len(launch.constants)][: -len(launch.scalars)]
        pointers = {name: _pointer(plan, argument) for name, argument in zip(names, step.arguments, strict=True)}
        name = f"{launch.kernel.__name__} {layer} {'first' if layer.norm_first else 'last'}{_variant(layer)}"
        yield CompileJob.of(launch, pointers, name)


def _pointer(plan, argument):
    if argument is None or argument is plan.buffers.mask:
        return None
    if argument is plan.buffers.seed:
        return "*i64"
    return TYPES[argument.dtype or getattr(torch, plan.layer.dtype)]


def _variant(layer):
    of_norm = f" {layer.norm}, parted" if layer.split_at_norm else ""
    return of_norm + (" by factors" if layer.returns_qk else "")


LAYERS = [_layer(128, 16, 256, "tf32", wgmma=True), _layer(16, 2, 128, "tf32")]
CASES = [(job, "sm_90") for layer in LAYERS for job in _jobs(layer)]
CASES += [
    (job, "sm_90")
    for layer in (
        _layer(64, 4, 256, "tf32", norm_first=False, wgmma=True),
        _layer(128, 4, 128, "float16", norm_first=False, wgmma=True),
    )
    for job in _jobs(layer)
    if "warpgroup" in job.name
]
OFFICIAL = {  # PatchTST's
    "norm": "batch_norm", "norm_first": False, "dropout": EncoderDropout(0.1, 0.2, 0.2, 0.2), "from_batch": True,
    "previous": True, "scores": True,
}  # fmt: skip
CASES += [
    (job, "sm_90")
    for layer in (_layer(128, 16, 256, "tf32", wgmma=True, **OFFICIAL), _layer(16, 4, 128, "tf32", **OFFICIAL))
    for job in _jobs(layer)
    if any(part in job.name for part in ("feedforward", "attention", "out_project", "input_grad"))
]
BY_FACTORS = {"factors": 1, "returns_qk": True}
CASES += [
    (job, "sm_90")
    for layer in (
        _layer(128, 16, 256, "tf32", wgmma=True, **BY_FACTORS),
        _layer(16, 4, 128, "tf32", **BY_FACTORS),
        _layer(48, 6, 96, "bfloat16", **BY_FACTORS),
    )
    for job in _jobs(layer)
    if "_project" in job.name
]
PORTABLE = [
    job for job in _jobs(_layer(16, 4, 100, "bfloat16")) if "feedforward" in job.name or "attention" in job.name
]
CASES += [(job, target) for target in TARGETS if target != "sm_90" for job in PORTABLE]
CASES += [(job, "sm_80") for job in _jobs(_layer(16, 2, 128, "tf32", norm_first=False)) if "feedforward" in job.name]
# With which Triton; measured on an H200 (3.6): what spills nothing takes longer.
SPILLED = {
    "_input_grad_warpgroup_kernel [896, 42, 128, 16, 256] float32/tf32 first": ("3.6",)  # 68 us, tiles 91
}


@pytest.mark.parametrize(("job", "target"), CASES, ids=[f"{target} {job.name}" for job, target in CASES])
def test_compiles_within_limits(job, target):
    found = limit_violations(job, target, compile_job(job, target))  # spills, shared memory
    spills = [each for each in found if "spills" in each]
    assert bool(spills) == triton.__version__.startswith(SPILLED.get(job.name, ()))
    assert list(found) == spills


@pytest.mark.parametrize("job", [job for job in _jobs(LAYERS[1]) if "rows" in job.name or "mma" in job.name], ids=str)
def test_fragments_stay_in_their_lanes(job):
    """Kernels whose lanes hold fragments hand nothing over through shared memory: one value a lane, in order."""
    compiled = compile_job(job, "sm_90")
    aside = ("_project_rows_kernel", "_weight_grads_rows_kernel")  # the weights' tiles, and sums of tiles
    assert job.name.startswith(aside) or compiled.shared_bytes == 0
