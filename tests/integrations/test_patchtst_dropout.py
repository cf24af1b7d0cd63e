"""Dropout of accelerated PatchTST layers: where it is applied, and what it leaves."""

import pytest
import torch
from patchtst_models import CHANNELS, LENGTH, SEQUENCES, TOKENS, D, encoder_calls, huggingface, official, randn
from torch import nn

from isogemm.integrations.patchtst import accelerate
from isogemm.verify.compare import assert_bitwise_equal


def test_places_of_hugging_face_s_dropout(monkeypatch):
    model = huggingface(attention_dropout=0.1, path_dropout=0.2, ff_dropout=0.3)
    accelerate(model)
    x = randn(5, LENGTH, CHANNELS)
    first, second = encoder_calls(model.train(), x, monkeypatch)
    assert first == second == (0.1, 0.2, 0.3, 0.2)
    assert {*encoder_calls(model.eval(), x, monkeypatch)} == {(0, 0, 0, 0)}
    model.train().model.encoder.layers[1].dropout_path1.eval()
    assert encoder_calls(model, x, monkeypatch) == [(0.1, 0.2, 0.3, 0.2), (0.1, 0, 0.3, 0.2)]
    model.model.encoder.layers[1].self_attn.eval()
    assert encoder_calls(model, x, monkeypatch)[1] == (0, 0, 0.3, 0.2)


def test_places_of_the_official_dropout(monkeypatch):
    model = official(attn_dropout=0.1, dropout=0.2)
    accelerate(model)
    x = randn(SEQUENCES, TOKENS, D)
    first, _ = encoder_calls(model.train(), x, monkeypatch)
    assert first == pytest.approx((0.1, 1 - 0.8 * 0.8, 0.2, 0.2))
    model.layers[0].dropout_attn.eval()
    assert encoder_calls(model, x, monkeypatch)[0] == pytest.approx((0.1, 0.2, 0.2, 0.2))
    assert {*encoder_calls(model.eval(), x, monkeypatch)} == {(0, 0, 0, 0)}


def test_what_dropout_leaves():
    """p of the elements are 0 and the rest is scaled: with norms first and no feed-forward part the sum shows it."""
    model = huggingface(norm_type="layernorm", path_dropout=0.25)
    layer = model.model.encoder.layers[0]
    nn.init.zeros_(layer.ff[3].weight)
    nn.init.zeros_(layer.ff[3].bias)
    accelerate(model)
    x = randn(64, CHANNELS, 4, D)
    added = layer.eval()(x)[0] - x
    dropped = layer.train()(x)[0] - x
    zeros = dropped == 0
    n = x.numel()
    assert abs(int(zeros.sum()) - n / 4) <= 4 * (n * 0.25 * 0.75) ** 0.5  # standard deviations
    torch.testing.assert_close(dropped, torch.where(zeros, 0, added / 0.75), rtol=1e-4, atol=1e-4)
    assert not torch.equal(layer(x)[0] - x == 0, zeros)


def test_attention_s_dropout_keeps_the_mean():
    """The mean over many runs of one sequence, where everything after the attention is linear."""
    model = huggingface(norm_type="layernorm", attention_dropout=0.3)
    layer = model.model.encoder.layers[0]
    nn.init.zeros_(layer.ff[3].weight)
    accelerate(model)
    x = randn(1, 1, 4, D).expand(4000, 1, 4, D)
    draws = layer.train()(x)[0].detach()
    deviation = draws.std(0) / len(draws) ** 0.5
    assert float(deviation.max()) > 0
    assert bool(((draws.mean(0) - layer.eval()(x[:1])[0][0]).abs() <= 5 * deviation + 1e-5).all())


@pytest.mark.parametrize("model", [official, huggingface])
def test_eval_mode_knows_no_dropout(model):
    x = randn(SEQUENCES, TOKENS, D) if model is official else randn(5, LENGTH, CHANNELS)
    names = {"attn_dropout": 0.5, "dropout": 0.5} if model is official else {"path_dropout": 0.5, "ff_dropout": 0.5}
    results = []
    for options in (names, {}):
        made = model(**options).eval()
        accelerate(made)
        result = made(x)
        results.append(result if model is official else result.prediction_outputs)
    assert_bitwise_equal(*results)
