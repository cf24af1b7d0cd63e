"""Attention's kernels in three formulations, by the size of the heads."""

from __future__ import annotations

import math

import torch
import triton.language as tl

from isogemm.core.kernels import pdl_option
from isogemm.core.launch import Launch
from isogemm.encoder.attention import configs
from isogemm.encoder.attention.configs import Attention, Config, DotConfig, MmaConfig, RegistersBackwardConfig
from isogemm.encoder.attention.kernels import dot, mma, registers


def backend() -> str:
    return "hip" if torch.version.hip else "cuda"


def describe(problem: Attention, config: Config | None = None) -> Launch:
    """Launch of the forward or the backward, by the config that is chosen if none is given.

    Arguments, None for absent ones:

    - forward: q, k, v, mask, previous, seed, o, lse, scores; with factors also q0, k0, .. q3, k3.
    - backward: q, k, v, mask, previous, seed, o, lse, do, d_scores, dq, dk, dv, d_previous; with factors, or with
      gradients of q and k that come in, also q0, k0, .. q3, k3, dq0, dk0, .. dq3, dk3, dq_in, dk_in.
    """
    config = config or configs.choose_any(problem)
    by_dot, by_mma = isinstance(config, DotConfig), isinstance(config, MmaConfig)
    kernel = (dot if by_dot else mma if by_mma else registers).KERNELS[problem.backward]
    constants, scalars = _constants(problem, by_dot) | config.constants, _scalars(problem)
    if isinstance(config, RegistersBackwardConfig):
        scalars["query_programs"] = config.query_programs(problem)
    absent: tuple[None, ...] = ()
    if by_mma and not (problem.factors or problem.added):
        absent = (None,) * (4 * configs.MOST_FACTORS + 2 if problem.backward else 2 * configs.MOST_FACTORS)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False}
    return Launch(
        kernel, config.programs(problem), absent + tuple(scalars[each] for each in kernel.arg_names if each in scalars),
        {each: constants[each] for each in kernel.arg_names if each in constants},
        options if by_dot else options | pdl_option(problem.pdl),
    )  # fmt: skip


def _scalars(problem: Attention) -> dict[str, object]:
    """All kernels' scalars by name; None where a kernel does not use one."""
    names = ("ld_q", "ld_k", "ld_v", "ld_dq", "ld_dk", "ld_dv")
    (mask_stride, mask_step), (dropped, kept_scale) = problem.masking, problem.dropping
    return dict(zip(names, problem.row_strides, strict=False)) | {
        "sequences": problem.sequences,
        "tokens": problem.tokens,
        "scale": math.log2(math.e) * problem.head**-0.5,  # from a score to its exponent of two
        "root": problem.head**0.5,
        "inverse_root": problem.head**-0.5,
        "ld_do": problem.head if problem.by_head else problem.width,
        "mask_stride": mask_stride,
        "mask_step": mask_step,
        "dropped": dropped,
        "kept_scale": kept_scale,
    }


def _constants(problem: Attention, by_dot: bool) -> dict[str, object]:
    """All kernels' constants by name, without those of a config."""
    strides = problem.row_strides
    unit = math.gcd(*strides, 16) if by_dot else math.gcd(*strides[:3], problem.head, 16 // problem.itemsize)
    number = "tf32" if problem.precision == "tf32" else "ieee"
    widest = max(*strides, problem.width, problem.tokens if problem.residual else 0)
    return {
        "H": problem.heads,
        "D": problem.head,
        "KIND": getattr(tl, problem.dtype),
        "SCALE": problem.head**-0.5,
        "MASK": problem.mask,
        "CAUSAL": problem.causal,
        "PRECISION": number if problem.dtype == "float32" else "",
        "WIDE": problem.reach >= 2**31,
        "INDEX": tl.int64 if problem.tokens * widest >= 2**31 else tl.int32,
        "EVEN": problem.residual and problem.tokens % 2 == 0,
        "LINE": math.gcd(problem.tokens, 16) if problem.residual else 1,  # what rows of scores are multiples of
        "FETCH": problem.backend == "cuda" and problem.bytes_read > configs.CACHED,
        "BY_HEAD": problem.by_head,
        "TRANSPOSED": problem.transposed,
        "UNIT": unit,
        "VEC": unit,
        "PDL": problem.pdl,
    }
