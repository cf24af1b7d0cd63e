"""`isogemm::embedding`: a look-up, and the gradient of the weight, summed in one order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isogemm.core.dispatch import record_operator
from isogemm.core.eager import PLAIN
from isogemm.core.operator import Operator, refuse_second_derivative
from isogemm.core.plan import run_launch as run
from isogemm.gemm import autograd
from isogemm.gemm.op import require_total
from isogemm.norm import cpu


def _embedding(ids: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    record_operator("embedding", weight)
    if not weight.is_cuda and ids.numel():  # on a GPU an assertion on the device fails, as in torch
        low, high = map(int, ids.aminmax())
        if low < 0 or high >= len(weight):
            raise IndexError(f"ids has {low if low < 0 else high}; the weight has {len(weight)} rows, from 0")
    return torch.embedding(weight, ids)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative("embedding")
    (ids,) = ctx.saved_tensors
    vocabulary = ctx.shape[0]
    accumulated = autograd.given_or_accumulated(ctx.given, True)
    if accumulated[1] is not None:
        require_total("weight.main_grad", accumulated[1], ctx.shape, grad.device)
    added = _add_embedding_grad(accumulated, grad, ids, vocabulary, ctx.padding)
    of_weight = None if added else embedding_backward(grad, ids, vocabulary, ctx.padding, ctx.dtype)
    return None, of_weight, None, None, None


def _embedding_backward(
    grad: Tensor, ids: Tensor, vocabulary: int, padding: int, dtype: torch.dtype, total: Tensor | None = None
) -> Tensor:
    """The gradient [vocabulary, D] of the weight; added to `total` where given. padding: -1 for none."""
    d, count = grad.shape[-1], ids.numel()
    grad, ids = grad.reshape(count, d), ids.reshape(count)
    if not grad.is_cuda:
        sums = torch.zeros((vocabulary, d), device=grad.device) if total is None else total
        if sums.numel():
            record_operator("embedding_backward", grad)
            cpu.embedding_backward(grad, ids, sums, padding)
        return sums.to(dtype)
    out = torch.zeros((vocabulary, d), dtype=dtype, device=grad.device) if total is None else total
    if not (count and out.numel()):
        return out
    record_operator("embedding_backward", grad)
    from isogemm.norm.kernels import embedding as kernels

    if vocabulary < 2**31:
        ids = ids.to(torch.int32)  # fewer passes of the sort
    ids, order = torch.sort(ids, stable=True)
    grad, windows = grad.contiguous(), -(-count // kernels.LONG)
    sums = torch.empty((windows, d), dtype=torch.float32, device=grad.device)
    ends = torch.empty(windows, dtype=torch.int32, device=grad.device)
    tensors = grad, ids, order, sums, ends
    run(kernels.describe_long_pieces(count, d), tensors)
    strides = out.stride(0), out.stride(1)
    launch = kernels.describe_embedding_backward(count, vocabulary, d, padding, strides, total is not None)
    run(launch, (*tensors, out))
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, weight, owner, main_grad, ctx.padding = inputs
    ctx.save_for_backward(ids)
    ctx.shape, ctx.dtype = weight.shape, weight.dtype
    ctx.given = owner, None if type(owner) in PLAIN else main_grad


def _fake(ids: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


embedding_operator: Operator[Tensor] = Operator(
    "embedding(Tensor ids, Tensor weight, Tensor? owner, Tensor? main_grad, int padding) -> Tensor",
    _embedding,
    _fake,
    keep=_keep,
    backward=_gradients,
    refused="embedding",
)
embedding_backward: Operator[Tensor] = Operator(
    "embedding_backward(Tensor grad, Tensor ids, int vocabulary, int padding, ScalarType dtype) -> Tensor",
    _embedding_backward,
    lambda grad, ids, vocabulary, padding, dtype: grad.new_empty((vocabulary, grad.shape[-1]), dtype=dtype),
)
_add_embedding_grad = autograd.MainGradAdder(
    "embedding_grad", "weight", "Tensor grad, Tensor ids, int vocabulary, int padding",
    shape=lambda grad, ids, vocabulary, padding: (vocabulary, grad.shape[-1]),
    compute=lambda main_grad, grad, ids, vocabulary, padding: _embedding_backward(
        grad, ids, vocabulary, padding, torch.float32, main_grad
    ),
)  # fmt: skip
