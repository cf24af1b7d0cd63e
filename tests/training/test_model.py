from __future__ import annotations

import math

import pytest
import torch

from isogemm.training.model import EncoderLayer, Forecaster, MultiheadAttention
from isogemm_options import PRESETS, Architecture

SMALL = {"channels": 3, "inputs": 32, "horizon": 6, "layers": 2, "d_model": 8, "nhead": 2, "dim_feedforward": 12}


@pytest.mark.parametrize(
    ("preset", "patches"), [("reference", 5), ("ettm1", 42), ("etth1", 42), ("weather", 42), ("patchtst64", 64)]
)
def test_patches(preset, patches):
    sizes = PRESETS[preset].config.model
    assert sizes.patches == patches
    if sizes.channels <= 7:
        x = torch.randn(2, sizes.channels, sizes.inputs)
        with torch.no_grad():
            assert Forecaster(sizes).eval()(x).shape == (2, sizes.channels, sizes.horizon)


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("res_attention", [False, True])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_layer_is_its_formula(norm, res_attention, pre_norm):
    """In fp64, written out head by head."""
    sizes = Architecture(**SMALL, norm=norm, res_attention=res_attention, pre_norm=pre_norm)
    torch.manual_seed(0)
    layer = EncoderLayer(sizes).double()
    x, prev = torch.randn(4, 5, 8, dtype=torch.float64), torch.randn(4, 2, 5, 5, dtype=torch.float64)

    def normed(z, scale):
        over = (0, 1) if norm == "batch" else -1
        centred = z - z.mean(over, keepdim=True)
        return centred / (centred.square().mean(over, keepdim=True) + 1e-5).sqrt() * scale

    def attended(z):
        attention = layer.self_attn
        q, k, v = (each(z) for each in (attention.W_Q, attention.W_K, attention.W_V))
        heads, scores = [], []
        for columns in (slice(0, 4), slice(4, 8)):
            score = q[..., columns] @ k[..., columns].mT / math.sqrt(4)
            if res_attention:
                score = score + prev[:, len(scores)]
            scores.append(score)
            heads.append(torch.softmax(score, -1) @ v[..., columns])
        return attention.to_out[0](torch.cat(heads, -1)), torch.stack(scores, 1)

    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter))
        for each in (layer.norm_attn, layer.norm_ffn):
            (each[1] if norm == "batch" else each).bias.zero_()
        scales = [(each[1] if norm == "batch" else each).weight for each in (layer.norm_attn, layer.norm_ffn)]
        begin = normed(x, scales[0]) if pre_norm else x
        attention, scores = attended(begin)
        middle = normed(begin + attention, scales[1 if pre_norm else 0])
        end = middle + layer.ff[3](torch.nn.functional.gelu(layer.ff[0](middle)))
        expected = end if pre_norm else normed(end, scales[1])
        found = layer(x, prev)
    if res_attention:
        found, passed_on = found
        torch.testing.assert_close(passed_on, scores)
    torch.testing.assert_close(found, expected)


def test_the_names_that_the_official_weights_have():
    names = set(EncoderLayer(Architecture(**SMALL)).state_dict())
    for name in (
        "self_attn.W_Q.weight", "self_attn.W_K.bias", "self_attn.W_V.weight", "self_attn.to_out.0.weight",
        "self_attn.sdp_attn.scale", "norm_attn.1.running_mean", "norm_ffn.1.weight", "ff.0.weight", "ff.3.bias",
    ):  # fmt: skip
        assert name in names


def test_scores_go_from_layer_to_layer(monkeypatch):
    given = []
    attend = MultiheadAttention.forward

    def seen(self, x, prev=None):
        result = attend(self, x, prev)
        given.append((prev, result[1]))
        return result

    monkeypatch.setattr(MultiheadAttention, "forward", seen)
    Forecaster(Architecture(**SMALL))(torch.randn(2, 3, 32))
    (first, passed_on), (second, _) = given
    assert first is None
    assert second is passed_on


@pytest.mark.parametrize("subtract_last", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_forecasts_follow_level_and_scale(subtract_last, affine):
    """What RevIN is for; and channels do not see each other."""
    torch.manual_seed(0)
    model = Forecaster(Architecture(**SMALL, affine=affine, subtract_last=subtract_last)).double().eval()
    if affine:
        torch.nn.init.normal_(model.revin.affine_weight)
        torch.nn.init.normal_(model.revin.affine_bias)
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    with torch.no_grad():
        y = model(x)
        moved = x.clone()
        moved[:, 1] = 50 * x[:, 1] + 1000
        found = model(moved)
    torch.testing.assert_close(found[:, 1], 50 * y[:, 1] + 1000, rtol=1e-4, atol=1e-3)  # RevIN's eps is in the scale
    torch.testing.assert_close(found[:, ::2], y[:, ::2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nhead": 3}, "nhead is 3, which does not divide d_model 8"),
        ({"norm": "group"}, "norm is 'group'; accepted: batch, layer"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"stride": 0}, "stride is 0"),
        ({"patch": 64}, "patch is 64, longer than the input of 40"),
    ],
)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        Architecture(**{**SMALL, **options})
