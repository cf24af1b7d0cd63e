"""Attention's kernels in three formulations, by the size of the heads."""

from __future__ import annotations

from typing import Any

import torch

from isogemm.attention import configs
from isogemm.attention.configs import Attention
from isogemm.attention.kernels import dot, mma, registers
from isogemm.core.launch import Launch


def backend() -> str:
    return "hip" if torch.version.hip else "cuda"


def describe(problem: Attention) -> Launch:
    """Launch of the forward or the backward. Arguments, None for absent ones:

    - forward: q, k, v, mask, previous, seed, o, lse, scores; with factors also q0, k0, .. q3, k3.
    - backward: q, k, v, mask, previous, seed, o, lse, do, d_scores, dq, dk, dv, d_previous; with factors, or with
      gradients of q and k that come in, also q0, k0, .. q3, k3, dq0, dk0, .. dq3, dk3, dq_in, dk_in.
    """
    formulation: Any
    config: Any
    if configs.fits_mma(problem):
        formulation, config = mma, configs.choose_mma(problem)
    elif problem.head > configs.SHORT_HEAD:
        formulation, config = dot, configs.choose(problem)
    else:
        choose = configs.choose_registers_backward if problem.backward else configs.choose_registers
        formulation, config = registers, choose(problem)
    describe = formulation.describe_attention_backward if problem.backward else formulation.describe_attention
    launch: Launch = describe(problem, config)
    return launch
