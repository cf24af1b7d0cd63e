"""Attention's kernels in three formulations, by the size of the heads."""

from __future__ import annotations

import torch

from isogemm.attention import configs
from isogemm.attention.configs import Attention
from isogemm.attention.kernels import dot, mma, registers
from isogemm.core.launch import Launch


def backend() -> str:
    return "hip" if torch.version.hip else "cuda"


def describe_attention(problem: Attention) -> Launch:
    """The forward's launch on q, k, v, mask, previous, seed, o, lse and scores; None where absent.

    With factors, q0, k0, .. q3, k3 follow.
    """
    if configs.fits_mma(problem):
        return mma.describe_attention(problem, configs.choose_mma(problem))
    if problem.head <= configs.SHORT_HEAD:
        return registers.describe_attention(problem, configs.choose_registers(problem))
    return dot.describe_attention(problem, configs.choose(problem))


def describe_attention_backward(problem: Attention) -> Launch:
    """The backward's launch on q, k, v, mask, previous, seed, o, lse, do, d_scores, dq, dk, dv and d_previous.

    With factors, or with gradients of q and k that come in, q0, k0, .. q3, k3, dq0, dk0, .. dq3, dk3, dq_in and dk_in
    follow. None where absent.
    """
    if configs.fits_mma(problem):
        return mma.describe_attention_backward(problem, configs.choose_mma(problem))
    if problem.head <= configs.SHORT_HEAD:
        return registers.describe_attention_backward(problem, configs.choose_registers_backward(problem))
    return dot.describe_attention_backward(problem, configs.choose_backward(problem))
