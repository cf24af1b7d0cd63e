"""From a problem to the launches of attention's forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isogemm.attention import configs
from isogemm.attention.configs import BackwardConfig, BackwardProblem, Config, Problem
from isogemm.attention.describe import TENSORS, Call
from isogemm.core.dispatch import Dispatch
from isogemm.core.plan import INPUTS, OUT, SCRATCH, Place, Plan, make_step
from isogemm.gemm.describe import aligned

if TYPE_CHECKING:
    from isogemm.core.launch import Launch

_LSE = TENSORS  # its place among a plan's inputs
_MASK, _SINKS, _LENGTHS, _STARTS, _OFFSETS, _CU_Q, _CU_K, _TABLE = 4, 3, 5, 6, 7, 8, 9, 10


def attention_plan(problem: Problem, call: Call, config: Config | None = None) -> Plan:
    """Plan of a call's tensors and lse, by the config chosen or by this one."""
    config = config or configs.choose(problem)
    describe, elements = _launch_of(config)
    dtype, device = call.q.dtype, call.q.device
    inputs = _places(call)
    out: Place = ((dtype, True), OUT)
    lse: Place | None = ((torch.float32, True), INPUTS + _LSE) if problem.lse else None
    partial: Place | None = ((torch.float32, True), SCRATCH) if config.split else None
    steps = [
        make_step(
            describe(problem, config),
            (*inputs[:3], inputs[_MASK], inputs[_SINKS], out, lse, partial, inputs[_CU_Q], inputs[_CU_K],
             inputs[_LENGTHS], inputs[_STARTS], inputs[_OFFSETS], inputs[_TABLE]),
            device,
        )
    ]  # fmt: skip
    if config.split and not config.roles:
        from isogemm.attention.kernels.forward import describe_merge

        places = partial, inputs[_SINKS], out, lse, *(inputs[at] for at in (_CU_Q, _CU_K, _LENGTHS, _STARTS, _OFFSETS))
        steps.append(make_step(describe_merge(problem, config), places, device))
    shape, (sequence, token, head) = (*call.q.shape[:-1], call.v.shape[-1]), problem.o_strides
    strides = (sequence, head, token, 1) if problem.kind == "dense" else (token, head, 1)
    scratch = elements(problem, config) if config.split else 0
    dispatch = Dispatch("attention", "attention", str(problem), str(config), "", "default")
    return replace(Plan.of(dispatch, shape, dtype, device, steps, scratch), strides=strides)


def _launch_of(config: Config) -> tuple[Callable[[Problem, Config], Launch], Callable[[Problem, Config], int]]:
    """What describes a config's launch, and the number of elements of its scratch memory."""
    if config.roles and config.split:
        from isogemm.attention.kernels import decode

        return decode.describe_decode, decode.partial_elements
    if config.roles:
        from isogemm.attention.kernels.roles import describe_roles_forward

        return describe_roles_forward, configs.partial_elements
    from isogemm.attention.kernels.forward import describe_forward

    return describe_forward, configs.partial_elements


def _places(call: Call) -> list[Place | None]:
    """A call's tensors as its kernels see them. Small ones, and a mask, are read by element."""
    return [None if x is None else ((x.dtype, at < 3 and aligned(x)), INPUTS + at) for at, x in enumerate(call.tensors)]


def backward_plan(
    problem: BackwardProblem, call: Call, o: Tensor, grad: Tensor, of_sinks: bool, of_mask: bool,
    config: BackwardConfig | None = None,
) -> Plan:  # fmt: skip
    """Plan of a call's tensors, o, lse, o's gradient, and dk, dv, the sinks' terms and d_mask, that fills dq."""
    from isogemm.attention.kernels import backward

    config = config or configs.choose_backward(problem)
    dtype, device, forward = call.q.dtype, call.q.device, problem.forward
    inputs, float32 = _places(call), torch.float32

    def extra(at: int, of: torch.dtype, is_aligned: bool = True) -> Place:
        return (of, is_aligned), INPUTS + TENSORS + at

    statistics: Place = ((float32, True), SCRATCH)
    placed = [inputs[at] for at in (_CU_Q, _CU_K, _LENGTHS, _STARTS, _OFFSETS)]
    do = extra(2, dtype, aligned(grad))
    of_queries = (
        *inputs[:3], inputs[_MASK], inputs[_SINKS], extra(0, dtype, aligned(o)), extra(1, float32), do, statistics,
        ((dtype, True), OUT), extra(5, float32) if of_sinks else None, extra(6, float32) if of_mask else None, *placed,
    )  # fmt: skip
    of_keys = (
        inputs[0], do, *inputs[1:3], inputs[_MASK], statistics, extra(3, dtype), extra(4, dtype), *placed,
    )  # fmt: skip
    steps = [
        make_step(backward.describe_query_gradients(problem, config), of_queries, device),
        make_step(backward.describe_key_gradients(problem, config), of_keys, device),
    ]
    dispatch = Dispatch("attention_backward", "attention", str(problem), str(config), "", "default")
    return Plan.of(dispatch, call.q.shape, dtype, device, steps, configs.statistics_elements(forward))
