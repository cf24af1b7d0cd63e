"""A stack of encoder layers with the modules, names and call of the official PatchTST's, and steps of any model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isogemm.verify.errors import assert_no_worse_than_torch


class OfficialAttend(nn.Module):
    def __init__(self, head: int, p: float, res_attention: bool, lsa: bool) -> None:
        super().__init__()
        self.attn_dropout = nn.Dropout(p)
        self.res_attention = res_attention
        self.scale = nn.Parameter(torch.tensor(head**-0.5), requires_grad=lsa)
        self.lsa = lsa

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, prev: Tensor | None, padded: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, ...]:
        """q, k, v [S, H, T, d]."""
        scores = q @ k.mT * self.scale
        if prev is not None:
            scores = scores + prev
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if padded is not None:
            scores = scores.masked_fill(padded[:, None, None, :], -math.inf)
        weights = self.attn_dropout(scores.softmax(-1))
        return (weights @ v, weights, scores) if self.res_attention else (weights @ v, weights)


class OfficialAttention(nn.Module):
    def __init__(
        self, d_model: int, n_heads: int, d_k: int | None, attn_dropout: float, dropout: float, res_attention: bool,
        lsa: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.n_heads = n_heads
        self.d_k = self.d_v = d_k or d_model // n_heads
        self.W_Q, self.W_K, self.W_V = (nn.Linear(d_model, n_heads * self.d_k) for _ in range(3))
        self.res_attention = res_attention
        self.sdp_attn = OfficialAttend(d_model // n_heads, attn_dropout, res_attention, lsa)
        self.to_out = nn.Sequential(nn.Linear(n_heads * self.d_v, d_model), nn.Dropout(dropout))

    def forward(self, x: Tensor, prev: Tensor | None, padded: Tensor | None, mask: Tensor | None) -> tuple[Tensor, ...]:
        q, k, v = (each(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for each in (self.W_Q, self.W_K, self.W_V))
        attended, *rest = self.sdp_attn(q, k, v, prev, padded, mask)
        return self.to_out(attended.transpose(1, 2).flatten(2)), *rest


class Transpose(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(*self.dims)


class OfficialLayer(nn.Module):
    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_ff: int,
        *,
        norm: str = "BatchNorm",
        attn_dropout: float = 0.0,
        dropout: float = 0.0,
        activation: type[nn.Module] = nn.GELU,
        pre_norm: bool = False,
        res_attention: bool = True,
        store_attn: bool = False,
        d_k: int | None = None,
        lsa: bool = False,
    ) -> None:
        super().__init__()

        def made() -> nn.Module:
            if norm == "BatchNorm":
                return nn.Sequential(Transpose(1, 2), nn.BatchNorm1d(d_model), Transpose(1, 2))
            return nn.LayerNorm(d_model)

        self.res_attention = res_attention
        self.self_attn = OfficialAttention(d_model, n_heads, d_k, attn_dropout, dropout, res_attention, lsa)
        self.dropout_attn, self.norm_attn = nn.Dropout(dropout), made()
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), activation(), nn.Dropout(dropout), nn.Linear(d_ff, d_model))
        self.dropout_ffn, self.norm_ffn = nn.Dropout(dropout), made()
        self.pre_norm = pre_norm
        self.store_attn = store_attn

    def forward(
        self,
        src: Tensor,
        prev: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Any:
        n = self.norm_attn(src) if self.pre_norm else src
        attended, weights, *scores = self.self_attn(
            n, prev if self.res_attention else None, key_padding_mask, attn_mask
        )
        if self.store_attn:
            self.attn = weights
        s = n + self.dropout_attn(attended)
        u = self.norm_ffn(s) if self.pre_norm else self.norm_attn(s)
        y = u + self.dropout_ffn(self.ff(u))
        y = y if self.pre_norm else self.norm_ffn(y)
        return (y, *scores) if self.res_attention else y


class OfficialEncoder(nn.Module):
    """[S, T, d_model] -> the same; the options are OfficialLayer's."""

    def __init__(self, n_layers: int, d_model: int, n_heads: int, d_ff: int, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OfficialLayer(d_model, n_heads, d_ff, **options) for _ in range(n_layers)])
        self.res_attention = self.layers[0].res_attention

    def forward(self, src: Tensor, key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None) -> Any:
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        scores = None
        for layer in self.layers:
            if self.res_attention:
                src, scores = layer(src, prev=scores, **masks)
            else:
                src = layer(src, **masks)
        return src


def training_step(model: nn.Module, loss_of: Callable[[Any], tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """The loss, what comes with it, every gradient and the running statistics."""
    model.train().zero_grad(set_to_none=True)
    torch.manual_seed(2)
    loss, *outputs = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        "loss": loss.detach(),
        **{f"output {index}": each.detach() for index, each in enumerate(outputs)},
        **{f"gradient of {name}": each.grad for name, each in model.named_parameters() if each.grad is not None},
        **{f"buffer {name}": each.clone() for name, each in model.named_buffers()},
    }


def assert_step_no_worse(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """Outputs, gradients and buffers, each kind as one: of a few numbers, torch's may be right by luck."""
    __tracebackhide__ = True
    if not ours.keys() == theirs.keys() == exact.keys():
        raise AssertionError(f"of one alone: {ours.keys() ^ theirs.keys() or ours.keys() ^ exact.keys()}")
    for kind in sorted({name.split()[0] for name in ours} - {"loss"}):
        names = [name for name in ours if name.startswith(kind)]
        steps = [torch.cat([step[name].flatten() for name in names]) for step in (ours, theirs, exact)]
        assert_no_worse_than_torch(steps[0], steps[1], steps[2].double(), what=kind)
