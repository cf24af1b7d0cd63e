"""`isogemm.linear_logprob` and `isogemm.linear_cross_entropy`: validation, autocast, and the way to the operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function

from isogemm.core.eager import autocast_dtype, is_intercepted
from isogemm.gemm import autograd
from isogemm.gemm.api import plain_linear
from isogemm.gemm.describe import flat
from isogemm.loss import op
from isogemm.loss.configs import How

REDUCTIONS = ("mean", "sum", "none")


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1,  # an integer: torch.compile keeps 0 and 1 as they are
    softcap: float | None = None,
    return_entropy: bool = False,
    ignore_index: int = -100,
    precision: str | None = None,
) -> Any:
    """Log-probabilities of given tokens from a language model's head, fp32, without logits in memory.

    Args:
        hidden: [..., K], any strides.
        weight: [V, K], the head's. With a float32 `weight.main_grad` the backward accumulates into that, as `linear`'s.
        targets: [...], int64 or int32, the tokens. Others than 0 to V - 1 raise on the CPU and give NaN on a GPU.
        bias: [V], likewise.
        temperature: what the logits are divided by, after the softcap.
        softcap: the logits become softcap * tanh(logits / softcap).
        return_entropy: whether to return the entropy of each token's distribution as well; differentiable.
        ignore_index: a target whose log-probability and entropy are 0, without a gradient.
        precision: of float32 inputs, as in `linear`.

    Returns:
        fp32 [...], or a pair of such. float64 inputs are computed by torch in float64.

    The same bits as `log_softmax(linear(hidden, weight, bias, out_dtype=torch.float32) / temperature)` of isogemm at
    the targets, for one token as for many. A bounded part of the logits is in memory at a time.
    """
    if is_intercepted():
        return handle_torch_function(linear_logprob, (), **locals())
    how = How(softcap, temperature, return_entropy, False, False, ignore_index, precision)
    values = _values(hidden, weight, targets, bias, how)
    return (values[0], values[1]) if return_entropy else values[0]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0,
    z_loss: float = 0,
    precision: str | None = None,
) -> Tensor:
    """Cross-entropy of a language model's head, fp32, without logits in memory: F.cross_entropy(linear(...), targets).

    Args:
        hidden, weight, targets, bias, softcap, precision: as in `linear_logprob`.
        ignore_index: a target that has no loss and no gradient; "mean" is over the others.
        reduction: "mean", "sum" or "none", as in torch. Sums are over 1024 tokens at a time, in ascending order.
        label_smoothing: in 0 to 1, as in torch.
        z_loss: adds z_loss * logsumexp(logits) ** 2 to each token's loss.

    Returns:
        fp32 [], or [...] of targets' shape for "none".
    """
    if is_intercepted():
        return handle_torch_function(linear_cross_entropy, (), **locals())
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; accepted: {', '.join(map(repr, REDUCTIONS))}")
    _require_number("label_smoothing", label_smoothing, "a number of 0 to 1", lambda number: 0 <= number <= 1)
    _require_number("z_loss", z_loss, "a finite number", lambda number: -math.inf < number < math.inf)
    how = How(softcap, 1, False, label_smoothing > 0, z_loss != 0, ignore_index, precision)
    values = _values(hidden, weight, targets, bias, how)
    loss = -values[0]
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * values[1]
    if z_loss:
        loss = loss + z_loss * values[-1] * values[-1]
    if reduction == "none":
        return loss
    total = autograd.bias_grad(loss.reshape(-1, 1))[0]
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def _values(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, how: How) -> tuple[Tensor, ...]:
    """The wanted values of each token, of targets' shape."""
    owners = weight, bias
    dtype = autocast_dtype(hidden) if isinstance(hidden, Tensor) else None
    if dtype is not None:
        hidden, weight = _cast(hidden, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
        how = how._replace(precision=how.precision if dtype is torch.float32 else None)
    op.validate(hidden, weight, targets, bias, how.precision)
    _require_positive("temperature", how.temperature)
    if how.softcap is not None:
        _require_positive("softcap", how.softcap)
    if not isinstance(how.ignore_index, int):
        raise TypeError(f"ignore_index is a {type(how.ignore_index).__name__}; expected an int")
    if hidden.dtype is torch.float64:
        return _in_torch(hidden, weight, targets, bias, how)
    shape = targets.shape
    values = op.linear_logprob(flat(hidden), weight, targets.reshape(-1), bias, how, owners)
    return tuple(each.view(shape) for each in values.unbind(0))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as autocast gives it to a product: float64 is left alone."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(dtype)


def _require_number(name: str, value: object, accepted: str, within: Callable[[float], bool]) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}; expected {accepted}")
    if not within(value):
        raise ValueError(f"{name} is {value}; expected {accepted}")


def _require_positive(name: str, value: object) -> None:
    _require_number(name, value, "a finite number above 0", lambda number: 0 < number < math.inf)


def _in_torch(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, how: How) -> tuple[Tensor, ...]:
    """The values of float64 inputs, by torch's differentiable operations."""
    op.require_known(targets.reshape(-1), len(weight), how.ignore_index)
    logits = plain_linear(hidden, weight, bias, None, how.precision)
    if how.softcap is not None:
        logits = how.softcap * torch.tanh(logits / how.softcap)
    logits = logits / how.temperature
    logprobs = F.log_softmax(logits, -1)
    ignored = targets == how.ignore_index
    target = targets.long().masked_fill(ignored, 0)[..., None]
    values = [logprobs.gather(-1, target)[..., 0]]
    if how.entropy:
        p = logprobs.exp()
        values.append(-torch.where(p == 0, 0.0, p * logprobs).sum(-1))
    if how.mean:
        values.append(logprobs.mean(-1))
    if how.lse:
        values.append(torch.logsumexp(logits, -1))
    return tuple(each.masked_fill(ignored, 0.0) for each in values)
