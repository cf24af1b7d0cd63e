"""`isogemm.attention` and `attention_varlen`: autocast, the operator with its gradients, and calls of known plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from isogemm.attention import op, reference
from isogemm.attention.describe import NAMES, Call
from isogemm.core import dispatch
from isogemm.core.dispatch import Dispatch
from isogemm.core.eager import NO_TENSOR, KnownCalls, autocast_dtype, is_tracing, through_dispatcher
from isogemm.core.errors import require_tensor
from isogemm.core.plan import Plan, plans
from isogemm.gemm import autograd

Window = int | tuple[int | None, int | None] | None
_POSITIONS = 1 << 30  # positions are below this; kernels compute with them in int32


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    kv_starts: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    precision: str | None = None,
) -> Tensor:
    """softmax(scale q k^T + mask) v, batch-invariant: a query's bits depend on its own sequence alone.

    They are the same alone and in any batch, padded or packed, in one call or in chunks, and decoded token by token
    from any cache. The gradients of a sequence likewise.

    Args:
        q: [B, H, T, D], any strides; the last T positions of a sequence. D is 1 to 256.
        k: [B, Hkv, S, D], where H is a multiple of Hkv.
        v: [B, Hkv, S, DV].
        causal: a query sees no later keys.
        scale: of the scores; D ** -0.5 by default.
        window: W, with causal: a query sees the last W positions, its own included. Or (left, right), the numbers of
            positions before and after its own, None for all.
        softcap: c, which replaces a score s by c * tanh(s / c).
        sinks: [H], one more score per head in the softmax's denominator.
        attn_mask: [B or 1, H or 1, T or 1, S or 1], or fewer dimensions; bool, True for a key that takes part, or
            floating point, added to the scores.
        kv_lengths: [B], int32 or int64: where in the buffer k the sequence ends; S by default. Values after it are not
            read. The queries are then the last T positions before that.
        kv_starts: [B]: where in the buffer it begins (padding on the left); 0 by default. With it, or causal, queries
            before a sequence's first position are padding too: 0.
        kv_offsets: [B]: position of the first key that the buffer holds (of a cache that drops old keys); 0 by default.
        precision: of float32 inputs on a GPU: "ieee" or "tf32"; None is torch.backends.cuda.matmul.fp32_precision.

    Returns:
        [B, H, T, DV], as q in memory: transposed from [B, T, H, DV] where q is. 0 for a query that sees no key.

    Differentiable in q, k, v, sinks and a floating-point attn_mask. float64 is served by torch's operations.
    """
    if has_torch_function(NO_TENSOR) and not is_compiling():  # `is_intercepted`, without its frame
        given: dict[str, Any] = {
            "q": q, "k": k, "v": v, "causal": causal, "scale": scale, "window": window, "softcap": softcap,
            "sinks": sinks, "attn_mask": attn_mask, "kv_lengths": kv_lengths, "kv_starts": kv_starts,
            "kv_offsets": kv_offsets, "precision": precision,
        }  # fmt: skip
        return handle_torch_function(attention, (), **given)
    tensors = q, k, v, sinks, attn_mask, kv_lengths, kv_starts, kv_offsets, None, None, None
    return _attend("attention", tensors, (causal, window, scale, softcap, precision))


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    precision: str | None = None,
) -> Tensor:
    """`attention` of B sequences that lie one after another, or whose keys are in a paged cache; the same bits.

    Args:
        q: [tokens, H, D], any strides. The queries of a sequence are its last positions.
        k, v: [tokens_k, Hkv, D] and [tokens_k, Hkv, DV]; with block_table a cache [pages, page, Hkv, D] and
            [pages, page, Hkv, DV], without gradients.
        cu_seqlens_q, cu_seqlens_k: [B + 1], int32: where each sequence begins, and the last one ends. Of a cache, the
            differences of cu_seqlens_k are the sequences' lengths. Results of tokens after the last sequence, and
            gradients there, are undefined.
        block_table: [B, most pages], int32: key j of sequence b is in page block_table[b, j // page].
        causal .. precision: as in `attention`.

    Returns:
        [tokens, H, DV], contiguous.
    """
    if has_torch_function(NO_TENSOR) and not is_compiling():
        given: dict[str, Any] = {
            "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "causal": causal,
            "scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "block_table": block_table,
            "kv_offsets": kv_offsets, "precision": precision,
        }  # fmt: skip
        return handle_torch_function(attention_varlen, (), **given)
    tensors = q, k, v, sinks, None, None, None, kv_offsets, cu_seqlens_q, cu_seqlens_k, block_table
    return _attend("attention_varlen", tensors, (causal, window, scale, softcap, precision))


_known: KnownCalls[Plan] = KnownCalls(aligned=3)  # the others are read by element
_known_trained: KnownCalls[op.Known] = KnownCalls(is_plan=False)


def _attend(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Tensor:
    """A call by its plan if that is known; tensors: a Call's; options: causal, window, scale, softcap, precision."""
    key, wanted = None, False
    present = [each for each in tensors if each is not None]
    try:
        if not is_tracing():
            wanted = torch.is_grad_enabled() and any(each.requires_grad for each in present)
            key = name, options, *[None if each is None else each.shape for each in tensors]
    except (AttributeError, RuntimeError):  # no tensors, or nested ones
        pass
    if key is not None and not wanted:
        plan = _known.find(key, present)
        if plan is not None:
            return plan.run(tensors)
    elif key is not None:
        known = _known_trained.find(key, present)
        if known is not None and not any(each.data_ptr() & 15 for each in present[:3]):
            return cast(Tensor, op.apply_known(*tensors[:5], tensors[5:], known)[0])
    call = _call(name, tensors, options)
    if call.q.dtype is torch.float64:
        return _by_torch(name, call)
    wanted = torch.is_grad_enabled() and any(each.requires_grad for each in call.tensors if each is not None)
    if wanted and call.kind == "paged":
        raise ValueError("an input requires a gradient, but a call with a block_table has none: use torch.no_grad()")
    reshaped = call.mask is not tensors[4]  # to the four dimensions that a backward reads
    owner = autograd.parameter(call.sinks)
    run: Callable[..., Any] = op.attention_operator
    o, _ = run(*call, owner, autograd.main_grad_of(owner), wanted)
    if key is not None and call.q.is_cuda and autocast_dtype(call.q) is None and not (wanted and reshaped):
        _keep(key, present, call, wanted)
    return cast(Tensor, o)


def _keep(key: Any, present: list[Tensor], call: Call, wanted: bool) -> None:
    """Remember the plan that served a call, if the kernels read the tensors that were given."""
    if through_dispatcher(*present):
        return
    readable = op.readable(call)
    plan = plans.get(op.plan_key(readable, wanted))
    read = [each.data_ptr() for each in readable.tensors if each is not None]
    if plan is None or read != [each.data_ptr() for each in present]:
        return
    if not wanted:
        _known.keep(key, present, plan)
    elif not any(address & 15 for address in read[:3]):
        _known_trained.keep(key, present, op.Known(plan, call[len(call.tensors) :]))


def _call(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Call:
    """The arguments as the operator takes them, cast as autocast does for a product."""
    q, k, v, sinks, mask, lengths, starts, offsets, cu_q, cu_k, table = tensors
    causal, window, scale, softcap, precision = options
    for which, x in zip(("q", "k", "v"), tensors, strict=False):
        if not isinstance(x, Tensor):
            dense = "[B, H, T, D]" if name == "attention" else "[tokens, H, D]"
            raise TypeError(f"{which} is a {type(x).__name__}; expected a torch.Tensor {dense}")
    if name != "attention":
        for which, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
            require_tensor(which, x, 1, "[B + 1], int32")
    for which, x in zip(NAMES, tensors, strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{which} is a {type(x).__name__}; expected a torch.Tensor or None")
    if mask is not None and mask.ndim < 4:
        mask = mask[(None,) * (4 - mask.ndim)]
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}; expected True or False")
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in (q, k, v))
        precision = precision if dtype is torch.float32 else None
    left, right = _window(window, causal)
    _require_number("scale", scale)
    _require_number("softcap", softcap)
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap!r}; expected a positive number or None")
    return Call(
        q, k, v, sinks, mask, lengths, starts, offsets, cu_q, cu_k, table, causal, left, right, scale, softcap or 0.0,
        precision,
    )  # fmt: skip


def _require_number(name: str, value: object) -> None:
    if value is not None and not isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a number or None")


def _window(window: object, causal: bool) -> tuple[int, int]:
    """The positions before and after its own that a query sees; -1 for all."""
    if window is None:
        return -1, -1
    if isinstance(window, int) and not isinstance(window, bool):
        if not causal or window < 1:
            raise ValueError(f"window is {window} with causal={causal}; a number is at least 1, and needs causal=True")
        window = window - 1, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window is {window!r}; expected a number, (left, right) or None")
    for each in window:
        if each is not None and (not isinstance(each, int) or each < 0):
            raise ValueError(f"window is {window!r}; expected numbers of at least 0, or None for all")
    left, right = (-1 if each is None or each >= _POSITIONS else each for each in window)
    return left, right


def _by_torch(name: str, call: Call) -> Tensor:
    op.validate(call, (torch.float64,))
    if dispatch.active and not is_compiling():
        dispatch.record(Dispatch(name, "torch", f"{list(call.q.shape)} {list(call.k.shape)} float64", "", "float64"))
    return reference.attention(call)
