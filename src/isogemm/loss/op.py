"""`isogemm::linear_logprob`: values of tokens from a language model's head, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isogemm.core import dispatch
from isogemm.core.device import resolve_precision
from isogemm.core.dispatch import Dispatch
from isogemm.core.eager import PLAIN, through_dispatcher
from isogemm.core.errors import require_same, require_tensor
from isogemm.core.operator import Operator, refuse_second_derivative
from isogemm.gemm import autograd, describe
from isogemm.gemm import configs as gemm_configs
from isogemm.gemm import op as gemm_op
from isogemm.gemm.autograd import main_grad_of, parameter
from isogemm.loss import configs, cpu, plan
from isogemm.loss.configs import How

_NAME = "linear_logprob"
_TENSORS = "Tensor hidden, Tensor weight, Tensor targets, Tensor? bias"
_OWNERS = "Tensor? owner, Tensor{} main_grad, Tensor? bias_owner, Tensor{} bias_main_grad"
_HOW = "float? softcap, float temperature, bool entropy, bool mean, bool lse, int ignore_index, str? precision"
_HOWS = len(How._fields)


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, how: How,
    owners: tuple[Tensor | None, Tensor | None],
) -> Tensor:  # fmt: skip
    """The wanted values [1 to 4, T] of tokens hidden [T, K]; differentiable.

    They are the target's log-probability, the entropy, the mean log-probability of the vocabulary, and the log-sum-exp.
    owners: weight and bias before autocast's cast, which carry main_grad.
    """
    weight_owner, bias_owner = map(parameter, owners)
    given = weight_owner, main_grad_of(weight_owner), bias_owner, main_grad_of(bias_owner)
    return operator(hidden, weight, targets, bias, *given, *how)[0]


def validate(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, precision: str | None) -> None:
    """Raise where an argument does not fit; hidden is [..., K]."""
    require_tensor("weight", weight, 2, "[V, K]")
    for name, x, shape in (("hidden", hidden, "[..., K]"), ("targets", targets, "[...]")):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor {shape}")
    if hidden.ndim < 1:
        raise ValueError("hidden has no dimensions; expected [..., K]")
    gemm_op.require_operands(("hidden", hidden), ("weight", weight), None, precision)
    names = ("hidden", "weight")
    require_same("K (hidden is [..., K], weight is [V, K])", names, (hidden.shape[-1], weight.shape[-1]))
    if weight.shape[0] == 0:
        raise ValueError(f"weight has shape {list(weight.shape)}; expected a vocabulary of at least one row")
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets has dtype {targets.dtype}; accepted: torch.int64, torch.int32")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets has shape {list(targets.shape)}; expected {list(hidden.shape[:-1])}, hidden's without the last"
        )
    require_same("device", ("targets", "hidden"), (targets.device, hidden.device))
    gemm_op.require_bias(bias, hidden, weight.shape[0])


def require_known(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise for targets beyond the vocabulary, on the CPU: a GPU's call does not wait, and gives NaN."""
    if targets.device.type != "cpu":
        return
    wrong = targets[((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)]
    if len(wrong):
        raise ValueError(
            f"targets has {wrong[0].item()}; expected 0 to {vocabulary - 1} or ignore_index, which is {ignore_index}"
        )


def _run(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    how = How(*rest[-_HOWS:])
    require_known(targets, len(weight), how.ignore_index)
    how = how._replace(precision=resolve_precision(hidden, how.precision))
    if not len(hidden):
        return _fake(hidden, weight, targets, bias, *rest)
    _record(_NAME, hidden, weight)
    targets, bias = targets.contiguous(), None if bias is None else bias.contiguous()
    if not hidden.is_cuda:
        return cpu.forward(hidden, weight, targets, bias, how)
    return plan.forward(hidden, weight, targets, bias, how)


def _record(name: str, hidden: Tensor, weight: Tensor) -> None:
    if not dispatch.active:
        return
    problem = f"[{len(hidden)},{len(weight)},{hidden.shape[1]}] {describe.dtype_name(hidden.dtype)}"
    if hidden.is_cuda:
        blocks = configs.gpu_blocks(len(hidden), len(weight))
        dispatch.record(Dispatch(name, "loss", problem, str(blocks), ""))
    else:
        dispatch.record(Dispatch(name, "cpu", problem, "", "not on a GPU"))


def _fake(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    count, tokens = How(*rest[-_HOWS:]).value_count, hidden.shape[0]
    return hidden.new_empty((count, tokens), dtype=torch.float32), hidden.new_empty((2, tokens), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, targets, bias, *owners = inputs[:-_HOWS]
    how = How(*inputs[-_HOWS:])
    ctx.how = how._replace(precision=resolve_precision(hidden, how.precision))
    ctx.save_for_backward(hidden, weight, targets, bias, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    # In eager mode the backward reads the owner's main_grad: an older one is not kept alive until then.
    pairs = owners[:2], owners[2:]
    ctx.given = [(owner, None if type(owner) in PLAIN else total) for owner, total in pairs]


def _gradients(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    rest = (None,) * (4 + _HOWS)
    if grad is None:
        return (None,) * (4 + len(rest))
    refuse_second_derivative(_NAME)
    hidden, weight, targets, bias, values, stats = ctx.saved_tensors
    of_hidden, of_weight, _, of_bias = ctx.needs_input_grad[:4]
    needs = of_weight, of_bias
    (owner, main_grad), (bias_owner, bias_main_grad) = map(autograd.given_or_accumulated, ctx.given, needs)
    owners = owner, main_grad, bias_owner, bias_main_grad
    arguments = (
        grad, hidden, weight, targets, bias, values, stats, *owners, *ctx.how, of_hidden, of_weight, of_bias
    )  # fmt: skip
    given = [each for each in (*arguments[:7], main_grad, bias_main_grad) if each is not None]
    run = backward_operator.op if through_dispatcher(*given) else _run_backward
    d_hidden, d_weight, d_bias = run(*arguments)
    return (
        d_hidden if of_hidden else None,
        d_weight if of_weight and main_grad is None else None,
        None,
        d_bias if of_bias and bias_main_grad is None else None,
        *rest,
    )


def _run_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, values: Tensor, stats: Tensor,
    owner: Tensor | None, main_grad: Tensor | None, bias_owner: Tensor | None, bias_main_grad: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of hidden, weight and bias; empty where not wanted, or added to a main_grad."""
    *how, of_hidden, of_weight, of_bias = rest
    arguments = grad, hidden, weight, targets, bias, values, stats, owner, main_grad, bias_owner, bias_main_grad, *rest
    into = _backward_fake(*arguments)  # which checks both before either is changed
    wanted = [
        None if not needed or total is not None else each
        for each, needed, total in zip(
            into, (of_hidden, of_weight, of_bias), (None, main_grad, bias_main_grad), strict=True
        )
    ]
    for given, total, needed in ((owner, main_grad, of_weight), (bias_owner, bias_main_grad, of_bias)):
        if given is not None and total is not None and needed:
            given.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # as `gemm.autograd.MainGradAdder` does
    totals = main_grad if of_weight else None, bias_main_grad if of_bias else None
    if not len(hidden):
        for each in wanted[1:]:
            if each is not None:
                each.zero_()
        return into
    _record("linear_logprob_backward", hidden, weight)
    targets, bias, grad = targets.contiguous(), None if bias is None else bias.contiguous(), grad.contiguous()
    vocabulary, k = weight.shape
    chunk = gemm_configs.token_chunk(vocabulary, k, describe.dtype_name(weight.dtype))
    run = plan.backward if hidden.is_cuda else cpu.backward
    run(grad, hidden, weight, targets, bias, values, stats, How(*how), chunk, (wanted[0], wanted[1], wanted[2]), totals)
    return into


def _run_backward_operator(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same in a compiled backward, which does not know whether the gradients are accumulated."""
    given = list(arguments)
    for place, name, needed in ((7, "the weight", -2), (9, "the bias", -1)):
        if given[place + 1] is not None and given[needed]:
            given[needed] = gemm_op.is_added(name, given[place])
    return _run_backward(*given)


def _backward_fake(
    grad: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, values: Tensor, stats: Tensor,
    owner: Tensor | None, main_grad: Tensor | None, bias_owner: Tensor | None, bias_main_grad: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of_hidden, of_weight, of_bias = rest[-3:]
    if main_grad is not None and of_weight:
        gemm_op.require_total("weight.main_grad", main_grad, weight.shape, weight.device)
    if bias_main_grad is not None and of_bias:
        gemm_op.require_total("bias.main_grad", bias_main_grad, weight.shape[:1], weight.device)
    return (
        hidden.new_empty(hidden.shape if of_hidden else (0,)),
        weight.new_empty(weight.shape if of_weight and main_grad is None else (0,)),
        weight.new_empty(weight.shape[:1] if of_bias and bias_main_grad is None else (0,)),
    )


operator: Operator[tuple[Tensor, Tensor]] = Operator(
    f"linear_logprob({_TENSORS}, {_OWNERS.format('?', '?')}, {_HOW}) -> (Tensor, Tensor)",
    _run,
    _fake,
    keep=_keep,
    backward=_gradients,
    refused=_NAME,
)
backward_operator: Operator[tuple[Tensor, Tensor, Tensor]] = Operator(
    f"linear_logprob_backward(Tensor grad, {_TENSORS}, Tensor values, Tensor stats, "
    f"{_OWNERS.format('(a!)?', '(b!)?')}, {_HOW}, bool of_hidden, bool of_weight, bool of_bias) "
    "-> (Tensor, Tensor, Tensor)",
    _run_backward_operator,
    _backward_fake,
)
