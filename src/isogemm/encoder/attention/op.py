"""`isogemm::encoder_attention` and its gradient."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from isogemm.core.dispatch import record_operator
from isogemm.core.operator import Operator, refuse_second_derivative
from isogemm.core.plan import placed, run_launch
from isogemm.encoder.attention import configs, cpu
from isogemm.encoder.attention.configs import Attention
from isogemm.encoder.attention.cpu import AttentionCall
from isogemm.gemm.describe import dtype_name

_TENSORS = ("q", "k", "v", "mask", "previous", "seed")


def attention(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """dropout(softmax(scores)) v of every head [S, T, H * d], 0 for a query without keys; also the scores, if wanted.

    scores = q k^T / sqrt(d) + previous + mask [S, H, T, T], -inf where a query does not see a key. Differentiable.
    """
    o, _, scores = attention_operator(*call)
    return o, scores if call.scores else None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    given = AttentionCall(*inputs)._asdict()
    ctx.save_for_backward(*output[:2], *(given.pop(name) for name in _TENSORS))
    ctx.rest = given
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, of_lse: None, of_scores: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of an AttentionCall's fields."""
    refuse_second_derivative("encoder_attention")
    o, lse, *tensors = ctx.saved_tensors
    call = AttentionCall(**dict(zip(_TENSORS, tensors, strict=True)), **ctx.rest)
    needed = dict(zip(call._fields, ctx.needs_input_grad, strict=True))
    grad = torch.zeros_like(o) if grad is None else grad
    found = attention_backward(grad, of_scores if call.scores else None, o, lse, needed["previous"], *call)
    gradients = dict(zip(("q", "k", "v", "previous"), found, strict=True))
    return tuple(gradients.get(name) if needed[name] else None for name in call._fields)


def _attention(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns o, lse [S, T, H] and scores. lse: log2 of a query's sum of exp2(score * log2(e)), +inf without keys."""
    call = AttentionCall(*args)
    o, lse, result = _empty_results(call)
    if not o.numel():
        return o, lse, result
    scores = result if call.scores else None
    if call.q.is_cuda:
        given = (*call.parts(*call[:3]), call.mask, call.previous, call.seed)
        _attention_on_gpu(call, "forward", *given, o, lse, scores)
    else:
        cpu.attention(call, o, lse, scores)
    record_operator("encoder_attention", call.q)
    return o, lse, result


def _empty_results(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    sequences, tokens, _ = call.q.shape
    o = call.q.new_empty((sequences, tokens, call.width))
    lse = call.q.new_empty((sequences, tokens, call.nhead), dtype=torch.float32)
    return o, lse, call.empty_scores(call.scores)


def _attention_backward(
    grad: Tensor, of_scores: Tensor | None, o: Tensor, lse: Tensor, of_previous: bool, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and, if wanted, previous. If q holds k and v, those two are empty."""
    call = AttentionCall(*args)
    found = _like_operands(call, of_previous)
    if not o.numel():
        return found
    dq, dk, dv = call.parts(*found[:3])
    d_previous = found[3] if of_previous else None
    if call.q.is_cuda:
        given = (*call.parts(*call[:3]), call.mask, call.previous, call.seed, o, lse, grad.contiguous(), of_scores)
        _attention_on_gpu(call, "backward", *given, dq, dk, dv, d_previous)
    else:
        cpu.attention_backward(call, grad, of_scores, dq, dk, dv, d_previous)
    record_operator("encoder_attention_backward", call.q)
    return found


def _like_operands(call: AttentionCall, of_previous: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (call.q.new_empty(0 if each is None else each.shape) for each in call[:3])
    return dq, dk, dv, call.empty_scores(of_previous)


def _attention_on_gpu(call: AttentionCall, direction: str, *tensors: Tensor | None) -> None:
    """Launch the kernel for heads of this size.

    tensors: q, k, v, mask, previous, seed, o, lse, then scores; in the backward do, d_scores, dq, dk, dv, d_previous
    instead.
    """
    from isogemm.encoder.attention import kernels

    forward = direction == "forward"
    if call.width // call.nhead > configs.LONGEST_HALF_HEAD and call.q.dtype is not torch.float32:
        wide = [each.float() if each is not None and each.is_floating_point() else each for each in tensors]
        _attention_on_gpu(call._replace(q=call.q.float(), precision="tf32"), direction, *wide)
        for place in (6, 8) if forward else range(10, 14):
            if (written := tensors[place]) is not None:
                written.copy_(cast(Tensor, wide[place]))
        return
    q, k, v, mask, previous, seed, o, lse, *rest = tensors
    grads = () if forward else rest[2:5]
    last = rest[0] if forward else rest[1]  # scores, or their gradient
    sequences, tokens, _ = call.q.shape
    problem = Attention(
        sequences, tokens, call.nhead, call.width // call.nhead, dtype_name(call.q.dtype), call.precision or "ieee",
        tuple(cast(Tensor, each).stride(1) for each in (q, k, v, *grads)), call.is_causal,
        "" if mask is None else "bool" if mask.dtype is torch.bool else "additive",
        (0, 0) if mask is None else cast("tuple[int, int]", mask.stride()), kernels.backend(),
        dropout=call.dropout, previous=previous is not None, scores=last is not None,
    )  # fmt: skip
    if mask is not None and mask.dtype is torch.bool:
        mask = mask.view(torch.uint8)
    if previous is not None:
        previous = placed(previous)
    if not forward and last is not None:
        rest[1] = placed(last)
    tensors = (q, k, v, mask, previous, seed if call.dropout else None, o, lse, *rest)
    run_launch(kernels.describe(problem), tensors)


def _attention_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(AttentionCall(*args))


def _attention_backward_fake(
    grad: Tensor, of_scores: Tensor | None, o: Tensor, lse: Tensor, of_previous: bool, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like_operands(AttentionCall(*args), of_previous)


_OPERANDS = (
    "Tensor q, Tensor? k, Tensor? v, Tensor? mask, int nhead, bool is_causal, str? precision, Tensor? previous, "
    "Tensor? seed, float dropout, bool scores"
)

attention_operator = Operator(
    f"encoder_attention({_OPERANDS}) -> (Tensor, Tensor, Tensor)",
    _attention,
    _attention_fake,
    keep=_keep,
    backward=_gradients,
)
attention_backward = Operator(
    "encoder_attention_backward(Tensor grad, Tensor? of_scores, Tensor o, Tensor lse, bool of_previous, "
    f"{_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _attention_backward,
    _attention_backward_fake,
)
