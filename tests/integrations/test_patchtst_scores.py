"""Scores that residual attention hands from layer to layer, and the last ones that nobody reads."""

import copy

import pytest
import torch
from official_patchtst import OfficialEncoder, training_step
from patchtst_models import HEADS, SEQUENCES, TOKENS, D, F, assert_step_is_no_worse, official, official_loss, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from isogemm.integrations import patchtst
from isogemm.integrations.patchtst import accelerate, restore


def test_scores_that_nobody_reads():
    model = official(3)
    report = accelerate(model)
    assert report.without_scores == ("layers.2",)
    assert report.by_factors == ("layers.0", "layers.1")
    assert str(report).splitlines() == [
        "swapped 3, kept 0",
        "  swapped layers.* x 3",
        "  note on layers.* x 3: slower than torch's on the CPU, where isogemm gives reproducible bits and no speed",
        "  no scores from layers.2, which nobody reads",
        "  scores by factors, where these are fused, from layers.* x 2",
    ]
    x = randn(SEQUENCES, TOKENS, D)
    _, scores = model.layers[0](x)
    assert scores.shape == (SEQUENCES, HEADS, TOKENS, TOKENS)
    assert model.layers[2](x, scores)[1] is None
    restore(model)
    assert model.layers[2](x, scores)[1] is not None


@pytest.fixture
def by_factors(monkeypatch):
    """Pass scores on by factors, as on a GPU."""
    monkeypatch.setattr(patchtst, "gains_by_factors", lambda *arguments: True)


def _passed_on(monkeypatch):
    """What the layers get for scores, as the model is called."""
    seen = []
    compute = patchtst.encoder_layer
    monkeypatch.setattr(
        patchtst, "encoder_layer", lambda *args, **options: seen.append(options["scores"]) or compute(*args, **options)
    )
    return seen


def test_scores_by_factors(by_factors, monkeypatch):
    model = official(3)
    seen = _passed_on(monkeypatch)
    assert_step_is_no_worse(model, official_loss)
    seen = seen[-3:]  # behind the trials
    assert [type(each) for each in seen] == [type(None), tuple, tuple]
    assert [each.shape for each in seen[2]] == [(2, HEADS, SEQUENCES, TOKENS, D // HEADS)] * 2


def test_scores_by_factors_to_a_layer_that_isogemm_does_not_compute(by_factors, monkeypatch):
    model = official(3)
    theirs = training_step(copy.deepcopy(model), lambda model: official_loss(model, torch.float32))
    accelerate(model)
    model.layers[1].self_attn.W_Q.register_forward_hook(lambda module, args, output: None)
    seen = _passed_on(monkeypatch)
    ours = training_step(model, lambda model: official_loss(model, torch.float32))
    for name, each in ours.items():
        torch.testing.assert_close(each, theirs[name], rtol=1e-4, atol=1e-4)
    assert [type(each) for each in seen] == [type(None), torch.Tensor]


def test_scores_that_a_hook_sees(by_factors):
    model = official(3)
    accelerate(model)
    seen = []
    for layer in model.layers[:2]:
        layer.register_forward_hook(lambda module, args, output: seen.append(output[1].shape))
        model(randn(SEQUENCES, TOKENS, D))
    assert seen == [(SEQUENCES, HEADS, TOKENS, TOKENS)] * 3


def test_stacks_of_more_layers_than_attention_takes_in():
    assert len(accelerate(official(5)).by_factors) == 4
    assert accelerate(official(6)).by_factors == ()


@pytest.mark.parametrize("masked", [0, 1])
def test_scores_with_masks_in_them_are_passed_on_themselves(by_factors, monkeypatch, masked):
    model = official(3).eval()
    mask = torch.arange(TOKENS).expand(SEQUENCES, -1) > 2

    def run(model):
        x, scores = randn(SEQUENCES, TOKENS, D), None
        for number, layer in enumerate(model.layers):
            x, scores = layer(x, prev=scores, key_padding_mask=mask if number == masked else None)
        return x

    expected = run(model)
    accelerate(model)
    seen = _passed_on(monkeypatch)
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-4)
    assert [type(each) for each in seen] == [type(None), torch.Tensor, torch.Tensor]


class _ScoresGiven(OfficialEncoder):
    def forward(self, src):
        scores = None
        for layer in self.layers:
            src, scores = layer(src, prev=scores)
        return src, scores


class _ScoresKept(OfficialEncoder):
    def forward(self, src):
        scores = None
        for layer in self.layers:
            src, scores = layer(src, prev=scores)
        self.scores = scores
        return src


class _ScoresUsed(OfficialEncoder):
    def forward(self, src):
        scores = None
        for layer in self.layers:
            src, scores = layer(src, prev=scores)
        return src + scores.mean()


class _Checkpointed(OfficialEncoder):
    def forward(self, src):
        scores = None
        for layer in self.layers:
            src, scores = checkpoint(layer, src, scores, use_reentrant=True)
        return src


@pytest.mark.parametrize("encoder", [_ScoresGiven, _ScoresKept, _ScoresUsed, _Checkpointed])
def test_scores_that_another_encoder_reads(encoder):
    model = encoder(2, D, HEADS, F)
    report = accelerate(model)
    assert len(report.swapped) == 2
    assert report.without_scores == report.by_factors == ()
    model(randn(SEQUENCES, TOKENS, D))


def test_scores_of_a_layer_that_others_call():
    shared = official(2)
    shared.layers[1] = shared.layers[0]
    hooked = official(2)
    hooked.layers[1].register_forward_hook(lambda module, args, output: None)
    elsewhere = nn.Module()
    elsewhere.encoder = official(2)
    elsewhere.too = elsewhere.encoder.layers[1]
    replaced = official(2)
    replaced.forward = replaced.forward
    for model in (shared, hooked, elsewhere, replaced, official(2, res_attention=False)):
        assert accelerate(model).without_scores == ()
    assert accelerate(shared).swapped == ("layers.0", "layers.1")
    shared(randn(SEQUENCES, TOKENS, D))


def test_scores_that_a_late_hook_sees():
    model = official(2)
    accelerate(model)
    seen = []
    model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output[1].shape))
    model(randn(SEQUENCES, TOKENS, D))
    assert seen == [(SEQUENCES, HEADS, TOKENS, TOKENS)]
