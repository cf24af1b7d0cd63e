"""A PatchTST forecaster in plain torch, under the official implementation's names of layers and parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from isogemm_options import Architecture

_ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}


class Forecaster(nn.Module):
    """PatchTST: x [batch, channels, inputs] -> [batch, channels, horizon]; every channel separately, same weights."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = sizes = architecture
        self.revin = RevIN(sizes.channels, sizes.affine, sizes.subtract_last) if sizes.revin else None
        self.W_P = nn.Linear(sizes.patch, sizes.d_model)
        self.W_pos = nn.Parameter(torch.empty(sizes.patches, sizes.d_model).uniform_(-0.02, 0.02))
        self.dropout = nn.Dropout(sizes.dropout)
        self.encoder = Encoder(sizes)
        self.head = nn.Linear(sizes.patches * sizes.d_model, sizes.horizon)
        self.head_dropout = nn.Dropout(sizes.head_dropout)

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.architecture
        if self.revin is not None:
            x, centre, scale = self.revin.normalise(x)
        if sizes.pad_end:
            x = functional.pad(x, (0, sizes.stride), mode="replicate")
        patches = x.unfold(-1, sizes.patch, sizes.stride).flatten(0, 1)  # [batch * channels, patches, patch]
        z = self.encoder(self.dropout(self.W_P(patches) + self.W_pos))
        y = self.head_dropout(self.head(z.flatten(1))).unflatten(0, (-1, sizes.channels))
        return self.revin.restore(y, centre, scale) if self.revin is not None else y


class RevIN(nn.Module):
    """Reversible instance normalisation: removes a window's mean and deviation, restores them in the forecast."""

    eps = 1e-5

    def __init__(self, channels: int, affine: bool, subtract_last: bool) -> None:
        super().__init__()
        self.subtract_last = subtract_last
        self.affine_weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.affine_bias = nn.Parameter(torch.zeros(channels)) if affine else None

    def normalise(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, channels, length] normalised, and the centre and scale that `restore` wants."""
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        centre, scale = x[..., -1:] if self.subtract_last else mean, torch.sqrt(variance + self.eps)
        x = (x - centre) / scale
        if self.affine_weight is not None and self.affine_bias is not None:
            x = x * self.affine_weight[:, None] + self.affine_bias[:, None]
        return x, centre, scale

    def restore(self, y: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
        if self.affine_weight is not None and self.affine_bias is not None:
            y = (y - self.affine_bias[:, None]) / (self.affine_weight[:, None] + self.eps**2)
        return y * scale + centre


class Encoder(nn.Module):
    """A stack of layers. With residual attention each adds its scores to those of the one before."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(sizes) for _ in range(sizes.layers))
        self.res_attention = sizes.res_attention

    def forward(self, src: Tensor) -> Tensor:
        """src [sequences, patches, d_model] -> the same."""
        scores = None
        for layer in self.layers:
            if self.res_attention:
                src, scores = layer(src, prev=scores)
            else:
                src = layer(src)
        return src


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with a residual and a norm: after the sum, or before, where the residual then
    starts from the normed value."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.pre_norm, self.res_attention, self.store_attn = sizes.pre_norm, sizes.res_attention, False
        self.self_attn = MultiheadAttention(
            sizes.d_model, sizes.nhead, sizes.attention_dropout, sizes.dropout, sizes.res_attention
        )
        self.dropout_attn = nn.Dropout(sizes.dropout)
        self.norm_attn = _norm(sizes)
        self.ff = nn.Sequential(
            nn.Linear(sizes.d_model, sizes.dim_feedforward),
            _ACTIVATIONS[sizes.activation](),
            nn.Dropout(sizes.dropout),
            nn.Linear(sizes.dim_feedforward, sizes.d_model),
        )
        self.dropout_ffn = nn.Dropout(sizes.dropout)
        self.norm_ffn = _norm(sizes)

    def forward(self, src: Tensor, prev: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """src [sequences, patches, d_model]; prev: the scores of the layer before. With res_attention also its own."""
        if self.pre_norm:
            src = self.norm_attn(src)
        attended, scores = self.self_attn(src, prev)
        src = src + self.dropout_attn(attended)
        src = self.norm_ffn(src) if self.pre_norm else self.norm_attn(src)
        src = src + self.dropout_ffn(self.ff(src))
        if not self.pre_norm:
            src = self.norm_ffn(src)
        return (src, scores) if self.res_attention else src


class MultiheadAttention(nn.Module):
    def __init__(self, d_model: int, nhead: int, dropout: float, proj_dropout: float, res_attention: bool) -> None:
        super().__init__()
        self.n_heads, self.d_k, self.d_v, self.res_attention = nhead, d_model // nhead, d_model // nhead, res_attention
        self.W_Q, self.W_K, self.W_V = (nn.Linear(d_model, d_model) for _ in range(3))
        self.sdp_attn = ScaledDotProductAttention(self.d_k, dropout, res_attention)
        self.to_out = nn.Sequential(nn.Linear(d_model, d_model), nn.Dropout(proj_dropout))

    def forward(self, x: Tensor, prev: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x [sequences, tokens, d_model] -> the same, and the scores where res_attention wants them."""
        q, k, v = (
            each(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for each in (self.W_Q, self.W_K, self.W_V)
        )  # [sequences, heads, tokens, d_k]
        attended, scores = self.sdp_attn(q, k, v, prev)
        return self.to_out(attended.transpose(1, 2).flatten(2)), scores


class ScaledDotProductAttention(nn.Module):
    """softmax(q k^T / sqrt(d_k) + prev) v. Without residual attention by torch's fused function."""

    def __init__(self, d_k: int, dropout: float, res_attention: bool) -> None:
        super().__init__()
        self.attn_dropout = nn.Dropout(dropout)
        self.res_attention = res_attention
        self.scale = nn.Parameter(torch.tensor(d_k**-0.5), requires_grad=False)
        self.lsa = False  # a scale that is learned

    def forward(self, q: Tensor, k: Tensor, v: Tensor, prev: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if not self.res_attention:
            dropout = self.attn_dropout.p if self.training else 0.0
            return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout), None
        scores = q @ k.transpose(-2, -1) * self.scale
        if prev is not None:
            scores = scores + prev
        return self.attn_dropout(torch.softmax(scores, -1)) @ v, scores


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def _norm(sizes: Architecture) -> nn.Module:
    if sizes.norm == "layer":
        return nn.LayerNorm(sizes.d_model)
    return nn.Sequential(Transpose(), nn.BatchNorm1d(sizes.d_model), Transpose())
