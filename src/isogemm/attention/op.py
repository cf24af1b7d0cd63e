"""`isogemm::attention` and `isogemm::attention_backward`: dense, packed and paged."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from isogemm.attention import configs, cpu
from isogemm.attention.describe import NAMES, TENSORS, Call, backward_problem_of, is_token_major, problem_of
from isogemm.core import device as devices
from isogemm.core import dispatch
from isogemm.core.dispatch import Dispatch
from isogemm.core.eager import PLAIN
from isogemm.core.errors import require_precision, require_same, require_tensor
from isogemm.core.operator import Operator, refuse_second_derivative
from isogemm.core.plan import Plan, plans
from isogemm.gemm import autograd
from isogemm.gemm.describe import dtype_name, layout

SERVED = tuple(getattr(torch, name) for name in configs.DTYPES)
INTEGERS = torch.int32, torch.int64


def attention(*args: Any) -> tuple[Tensor, Tensor]:
    """o, and lse if wanted; args: a Call's fields, and whether the lse is wanted.

    lse [B, T, H] or [tokens, H]: the logarithm of a query's sum of exp(score), to the base 2 on a GPU; +inf without
    keys. Without autograd.
    """
    call = given = Call(*args[:-1])
    with_lse = args[-1]
    if call.q.is_cuda:
        call = readable(given)
        key = plan_key(call, with_lse)
        plan = plans.get(key)
        if plan is not None:
            lse = empty_lse(call, with_lse)
            return plan.run((*call.tensors, lse)), lse
    validate(given)
    o, lse = empty_like(call, call.q, call.v.shape[-1]), empty_lse(call, with_lse)
    if not o.numel():
        return o, lse
    if not has_keys(call):
        return o.zero_(), lse.fill_(math.inf)
    if call.q.is_cuda:
        plan = plans.keep(key, _plan(call, with_lse))
        return plan.run((*call.tensors, lse), o), lse
    cpu.attention(call, o, lse if with_lse else None)
    _record("attention", call)
    return o, lse


def attention_backward(
    grad: Tensor, o: Tensor, lse: Tensor, of_sinks: bool, of_mask: bool, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; if wanted, each query's term of that of its sink, as lse, and [B, H, T, S] of mask.

    args: a Call's fields.
    """
    call = Call(*args)
    found = _empty_gradients(call, of_sinks, of_mask)
    if not o.numel() or not has_keys(call):
        for each in found:
            each.zero_()
        return found
    dq, *others = found
    if call.q.is_cuda:
        call, grad = readable(call), with_unit_stride(grad)
        how = layout(grad), layout(o), of_sinks, of_mask
        key = "attention_backward", *plan_key(call, True), *how
        plan = plans.get(key) or plans.keep(key, _backward_plan(call, grad, o, of_sinks, of_mask, found))
        if of_mask:
            found[4].zero_()
        plan.run((*call.tensors, o, lse, grad, *others), dq)
        return found
    cpu.attention_backward(call, grad, lse, *found[:3], found[3] if of_sinks else None, found[4] if of_mask else None)
    _record("attention_backward", call)
    return found


def has_keys(call: Call) -> bool:
    """Whether a sequence may have keys, by the sizes of the tensors."""
    return bool(call.k.numel()) and (call.block_table is None or bool(call.block_table.numel()))


def plan_key(call: Call, with_lse: bool) -> tuple[Any, ...]:
    """All that a plan depends on, including the arguments' validity and what Triton specialises on."""
    return (
        "attention", *map(layout, call.tensors), *call[TENSORS:-1],
        devices.resolve_precision(call.q, call.precision), with_lse,
    )  # fmt: skip


def readable(call: Call) -> Call:
    """The call with tensors as the kernels read them: contiguous along heads' elements, and small ones altogether."""
    q, k, v, sinks, mask, *small = call.tensors
    tensors: list[Any] = [*map(with_unit_stride, (q, k, v)), sinks, mask]
    if sinks is not None:
        tensors[3] = sinks.contiguous()
    if mask is not None and mask.dtype is torch.bool:
        tensors[4] = mask.view(torch.uint8)
    tensors += [None if each is None else each.contiguous() for each in small]
    return Call(*tensors, *call[TENSORS:])


def with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_like(call: Call, x: Tensor, width: int) -> Tensor:
    """A tensor of x's sizes but the last, contiguous, or as [B, T, H, W] in memory if x's heads lie so."""
    *sizes, _ = x.shape
    if is_token_major(call, x):
        return x.new_empty((sizes[0], sizes[2], sizes[1], width)).transpose(1, 2)
    return x.new_empty((*sizes, width))


def empty_lse(call: Call, wanted: bool) -> Tensor:
    shape = call.q.shape
    sizes = (shape[0], shape[2], shape[1]) if call.cu_q is None else (shape[0], shape[1])
    return call.q.new_empty(sizes if wanted else 0, dtype=torch.float32)


def _empty_gradients(call: Call, of_sinks: bool, of_mask: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sizes = (*call.q.shape[:3], call.k.shape[2]) if of_mask else 0
    return (
        empty_like(call, call.q, call.q.shape[-1]), empty_like(call, call.k, call.k.shape[-1]),
        empty_like(call, call.v, call.v.shape[-1]), empty_lse(call, of_sinks),
        call.q.new_empty(sizes, dtype=torch.float32),
    )  # fmt: skip


def _plan(call: Call, with_lse: bool) -> Plan:
    from isogemm.attention.plan import attention_plan

    return attention_plan(problem_of(call, with_lse), call)


def _backward_plan(
    call: Call, grad: Tensor, o: Tensor, of_sinks: bool, of_mask: bool, found: tuple[Tensor, ...]
) -> Plan:
    from isogemm.attention.plan import backward_plan

    problem = backward_problem_of(call, grad, o, *found[:3])
    return backward_plan(problem, call, o, grad, of_sinks, of_mask)


def _record(name: str, call: Call) -> None:
    if dispatch.active:
        sizes = f"{list(call.q.shape)} {list(call.k.shape)} {dtype_name(call.q.dtype)}"
        dispatch.record(Dispatch(name, "cpu", f"{call.kind} {sizes}", "", "not on a GPU"))


# Validation


def validate(call: Call, dtypes: tuple[torch.dtype, ...] = SERVED) -> None:
    """Raise where an argument does not fit."""
    if call.kind == "dense":
        _validate_dense(call)
    else:
        _validate_packed(call)
    _validate_operands(call, dtypes)
    if call.sinks is not None:
        require_tensor("sinks", call.sinks, 1, "[H]")
        require_same("heads", ("sinks", "q"), (call.sinks.shape[0], call.heads))
        if not call.sinks.is_floating_point():
            raise TypeError(f"sinks has dtype {call.sinks.dtype}; expected floating point")
    for name, given in zip(NAMES[3:], call.tensors[3:], strict=True):
        if given is not None:
            require_same("device", (name, "q"), (given.device, call.q.device))
    for name, value in (("scale", call.scale), ("softcap", call.softcap or None)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value!r}; expected a positive number or None")
    require_precision(call.precision, call.q.dtype)


def _validate_dense(call: Call) -> None:
    require_tensor("q", call.q, 4, "[B, H, T, D]")
    require_tensor("k", call.k, 4, "[B, Hkv, S, D]")
    require_tensor("v", call.v, 4, "[B, Hkv, S, DV]")
    require_same("batch", ("q", "k"), (call.q.shape[0], call.k.shape[0]))
    require_same("batch, heads and keys", ("k", "v"), (list(call.k.shape[:3]), list(call.v.shape[:3])))
    for name, given in (("kv_lengths", call.lengths), ("kv_starts", call.starts), ("kv_offsets", call.offsets)):
        _require_integers(name, given, (call.q.shape[0],), "[B]")
    if call.mask is None:
        return
    require_tensor("attn_mask", call.mask, 4, "[B or 1, H or 1, T or 1, S or 1]")
    full = (*call.q.shape[:3], call.k.shape[2])
    if any(size not in (1, whole) for size, whole in zip(call.mask.shape, full, strict=True)):
        raise ValueError(f"attn_mask has shape {list(call.mask.shape)}; expected {list(full)}, or 1 in any place")
    if call.mask.dtype is not torch.bool and not call.mask.is_floating_point():
        raise TypeError(f"attn_mask has dtype {call.mask.dtype}; expected torch.bool or floating point")


def _validate_packed(call: Call) -> None:
    paged = call.kind == "paged"
    shape = "[pages, page, Hkv, {}]" if paged else "[tokens, Hkv, {}]"
    require_tensor("q", call.q, 3, "[tokens, H, D]")
    require_tensor("k", call.k, 4 if paged else 3, shape.format("D"))
    require_tensor("v", call.v, 4 if paged else 3, shape.format("DV"))
    require_same("sizes but the last", ("k", "v"), (list(call.k.shape[:-1]), list(call.v.shape[:-1])))
    require_tensor("cu_seqlens_q", call.cu_q, 1, "[B + 1]")
    cu_q = cast(Tensor, call.cu_q)
    if cu_q.shape[0] < 1:
        raise ValueError("cu_seqlens_q has shape [0]; expected [B + 1]")
    count = cu_q.shape[0]
    if count == 1 and call.q.shape[0]:
        raise ValueError(f"cu_seqlens_q has shape [1]: the {call.q.shape[0]} tokens of q belong to no sequence")
    for name, given in (("cu_seqlens_q", call.cu_q), ("cu_seqlens_k", call.cu_k)):
        require_tensor(name, given, 1, "[B + 1]")
        _require_integers(name, given, (count,), "[B + 1], as cu_seqlens_q", (torch.int32,))
    _require_integers("kv_offsets", call.offsets, (count - 1,), "[B]")
    if call.block_table is not None:
        require_tensor("block_table", call.block_table, 2, "[B, most pages]")
        sizes = (count - 1, call.block_table.shape[1])
        _require_integers("block_table", call.block_table, sizes, "[B, most pages]", (torch.int32,))
        if call.k.shape[1] < 1:
            raise ValueError(f"k has shape {list(call.k.shape)}; expected pages of at least one key")


def _require_integers(
    name: str, given: Tensor | None, sizes: tuple[int, ...], shape: str, dtypes: tuple[torch.dtype, ...] = INTEGERS
) -> None:
    if given is None:
        return
    require_tensor(name, given, len(sizes), shape)
    if given.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {given.dtype}; accepted: {', '.join(map(str, dtypes))}")
    if tuple(given.shape) != sizes:
        raise ValueError(f"{name} has shape {list(given.shape)}; expected {list(sizes)}, {shape}")


def _validate_operands(call: Call, dtypes: tuple[torch.dtype, ...]) -> None:
    q, k, v = call[:3]
    if q.dtype not in dtypes:
        raise TypeError(f"q has dtype {q.dtype}; accepted: {', '.join(map(str, dtypes))}")
    for name, x in (("k", k), ("v", v)):
        require_same("dtype", ("q", name), (q.dtype, x.dtype))
        require_same("device", ("q", name), (q.device, x.device))
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"q is on {q.device}; accepted: cpu and cuda")
    require_same("head size D", ("q", "k"), (q.shape[-1], k.shape[-1]))
    for name, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[-1] <= configs.MOST_HEAD:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; accepted are heads of 1 to {configs.MOST_HEAD} elements"
            )
    if call.kv_heads < 1 or call.heads % call.kv_heads:
        raise ValueError(f"q has {call.heads} heads, k has {call.kv_heads}; expected a multiple of k's")


# Gradients


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, owner, main_grad, with_lse = inputs
    call = Call(*given)
    ctx.save_for_backward(*output, *call.tensors)
    precision = devices.resolve_precision(call.q, call.precision)
    ctx.rest, ctx.with_lse = (*call[TENSORS:-1], precision), with_lse
    # In eager mode the backward reads the owner's main_grad: an older one is not kept alive until then.
    ctx.given = owner, None if type(owner) in PLAIN else main_grad
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    """Gradients of a Call's fields."""
    count = len(ctx.needs_input_grad)
    if grad is None:
        return (None,) * count
    refuse_second_derivative("attention")
    if not ctx.with_lse:
        raise RuntimeError("isogemm::attention was called without with_lse, which its gradient needs")
    o, lse, *tensors = ctx.saved_tensors
    call = Call(*tensors, *ctx.rest)
    needed = dict(zip(Call._fields, ctx.needs_input_grad, strict=False))
    owner = autograd.given_or_accumulated(ctx.given, needed["sinks"])
    dq, dk, dv, terms, of_scores = attention_backward_operator(grad, o, lse, needed["sinks"], needed["mask"], *call)
    found: dict[str, Tensor | None] = {"q": dq, "k": dk, "v": dv}
    if call.sinks is not None and needed["sinks"]:
        found["sinks"] = autograd.of_bias(terms, call.sinks.dtype, owner)
    if call.mask is not None and needed["mask"]:
        found["mask"] = of_scores.sum_to_size(call.mask.shape).to(call.mask.dtype)
    gradients = [found.get(name) if wanted else None for name, wanted in needed.items()]
    return *gradients, *(None,) * (count - len(gradients))


class Known(NamedTuple):
    """What serves calls with gradients that are like an earlier one."""

    plan: Plan
    options: tuple[Any, ...]  # the fields of a Call after its tensors


class _Known(torch.autograd.Function):
    """The eager operator, for a call whose plan is known: with fewer arguments, since each costs time."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, others, known = args
        call = Call(*tensors, *others, *known.options)
        lse = empty_lse(call, True)
        output = known.plan.run((*call.tensors, lse)), lse
        _keep(ctx, (*call, autograd.parameter(call.sinks), None, True), output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, *grads)


# Takes q, k, v, sinks, mask, a tuple of a Call's other tensors, and a `Known`; returns o and lse.
apply_known: Any = _Known.apply


def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    """`attention`, of the operator's arguments."""
    return attention(*args[:-3], args[-1])


def _attention_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = Call(*args[:-3])
    validate(call)
    return empty_like(call, call.q, call.v.shape[-1]), empty_lse(call, args[-1])


def _attention_backward_fake(
    grad: Tensor, o: Tensor, lse: Tensor, of_sinks: bool, of_mask: bool, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(Call(*args), of_sinks, of_mask)


_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? mask, Tensor? lengths, Tensor? starts, Tensor? offsets, "
    "Tensor? cu_q, Tensor? cu_k, Tensor? block_table, bool causal, int left, int right, float? scale, float softcap, "
    "str? precision"
)

attention_operator: Operator[tuple[Tensor, Tensor]] = Operator(
    f"attention({_CALL}, Tensor? owner, Tensor? main_grad, bool with_lse) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
    keep=_keep,
    backward=_gradients,
    refused="attention",
)
attention_backward_operator: Operator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = Operator(
    f"attention_backward(Tensor grad, Tensor o, Tensor lse, bool of_sinks, bool of_mask, {_CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    attention_backward,
    _attention_backward_fake,
)
