"""From an attention's tensors to its `Problem`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isogemm.attention.configs import BackwardProblem, Problem
from isogemm.core import device as devices
from isogemm.gemm.describe import aligned, dtype_name

NAMES = (
    "q", "k", "v", "sinks", "attn_mask", "kv_lengths", "kv_starts", "kv_offsets", "cu_seqlens_q", "cu_seqlens_k",
    "block_table",
)  # fmt: skip
TENSORS = len(NAMES)  # the first fields of a Call


class Call(NamedTuple):
    """The arguments of an attention, as the operators take them."""

    q: Tensor  # [B, H, T, D], or packed [tokens, H, D]
    k: Tensor  # [B, Hkv, S, D], packed [tokens_k, Hkv, D], or a cache [pages, page, Hkv, D]
    v: Tensor  # likewise, DV wide
    sinks: Tensor | None  # [H]
    mask: Tensor | None  # [B or 1, H or 1, T or 1, S or 1]: bool or floating point
    lengths: Tensor | None  # [B], as are starts and offsets
    starts: Tensor | None
    offsets: Tensor | None
    cu_q: Tensor | None  # [B + 1], where it is packed
    cu_k: Tensor | None
    block_table: Tensor | None  # [B, most pages], where k and v are a cache
    causal: bool
    left: int  # keys that a query sees before its position; -1: all
    right: int  # and after it
    scale: float | None  # None: D ** -0.5
    softcap: float  # 0: none
    precision: str | None

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self[:TENSORS]

    @property
    def kind(self) -> str:
        return "dense" if self.cu_q is None else "packed" if self.block_table is None else "paged"

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1 if self.cu_q is None or self.block_table is None else 2]

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return 1.0 / math.sqrt(self.q.shape[-1]) if self.scale is None else self.scale


def problem_of(call: Call, with_lse: bool) -> Problem:
    """Describe a validated call, whose tensors are `op.readable`."""
    q, k, v = call[:3]
    facts, kind, mask = devices.facts(q.device), call.kind, call.mask
    sequences, keys = (q.shape[0], k.shape[2]) if call.cu_q is None else (len(call.cu_q) - 1, k.shape[0])
    page = table_stride = 0
    if call.block_table is not None:
        page, table_stride = k.shape[1], call.block_table.stride(0)
        keys = page * call.block_table.shape[1]
    return Problem(
        kind=kind, sequences=sequences, queries=q.shape[2 if kind == "dense" else 0], keys=keys, heads=call.heads,
        kv_heads=call.kv_heads, head=q.shape[-1], value_head=v.shape[-1], dtype=dtype_name(q.dtype),
        precision=precision_of(call), q_strides=strides_of(call, q), k_strides=strides_of(call, k),
        v_strides=strides_of(call, v), o_strides=_strides_like(call, q, v.shape[-1]),
        causal=call.causal, left=call.left, right=call.right, scale=call.factor, softcap=call.softcap,
        sinks=call.sinks is not None, mask="" if mask is None else "added" if mask.is_floating_point() else "bool",
        mask_strides=_mask_strides(mask),
        placed=(call.lengths is not None, call.starts is not None, call.offsets is not None),
        page=page, table_stride=table_stride, aligned=all(map(aligned, (q, k, v))), lse=with_lse, arch=facts.arch,
        sm_count=facts.sm_count,
    )  # fmt: skip


def precision_of(call: Call) -> str:
    """How float32 products are computed: tf32x3 as ieee, which is as exact."""
    if call.q.dtype is not torch.float32:
        return ""
    return "tf32" if devices.resolve_precision(call.q, call.precision) == "tf32" else "ieee"


def strides_of(call: Call, x: Tensor) -> tuple[int, int, int]:
    """Strides of (sequence or page, token, head) of q, k, v, o or a gradient."""
    if call.cu_q is None:
        sequence, head, token, _ = x.stride()
        return sequence, token, head
    *outer, token, head, _ = x.stride()
    return (outer[0] if outer else 0), token, head


def is_token_major(call: Call, x: Tensor) -> bool:
    """Whether x lies as [B, T, H, D] in memory; not where `op.readable` copies it."""
    return call.cu_q is None and x.stride(3) == 1 and x.stride(1) < x.stride(2)


def _strides_like(call: Call, x: Tensor, width: int) -> tuple[int, int, int]:
    """Strides of `op.empty_like`."""
    if call.cu_q is not None:
        return 0, x.shape[1] * width, width
    _, heads, tokens, _ = x.shape
    if is_token_major(call, x):
        return tokens * heads * width, heads * width, width
    return tokens * heads * width, width, tokens * width


def _mask_strides(mask: Tensor | None) -> tuple[int, int, int, int]:
    """Strides by sequence, head, query and key; 0 where the mask is broadcast."""
    if mask is None:
        return 0, 0, 0, 0
    b, h, t, s = (stride if size > 1 else 0 for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return b, h, t, s


def backward_problem_of(call: Call, grad: Tensor, o: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> BackwardProblem:
    """Describe the gradients of a `op.readable` call."""
    forward = replace(problem_of(call, True), o_strides=strides_of(call, o))
    of_do, of_dq, of_dk, of_dv = (strides_of(call, x) for x in (grad, dq, dk, dv))
    return BackwardProblem(forward, of_do, of_dq, of_dk, of_dv, aligned(grad))
