"""Training steps of accelerated PatchTST models, against those of the same models by torch."""

import copy

import pytest
import torch
from patchtst_models import (
    CHANNELS,
    HEADS,
    LENGTH,
    SEQUENCES,
    TOKENS,
    D,
    assert_step_is_no_worse,
    huggingface,
    official,
    official_loss,
    randn,
)
from torch import nn

from isogemm.integrations.patchtst import accelerate, restore
from isogemm.verify.errors import assert_no_worse_than_torch


def _forecast(model, dtype):
    future = randn(5, 4, CHANNELS, seed=1).to(dtype)
    out = model(past_values=randn(5, LENGTH, CHANNELS).to(dtype), future_values=future)
    return out.loss, out.prediction_outputs


def _reconstruct(model, dtype):
    out = model(past_values=randn(5, LENGTH, CHANNELS).to(dtype))
    return out.loss, out.prediction_output


def _classify(model, dtype):
    out = model(past_values=randn(5, LENGTH, CHANNELS).to(dtype), target_values=torch.tensor([0, 2, 1, 1, 0]))
    return out.loss, out.prediction_logits


def _regress(model, dtype):
    out = model(past_values=randn(5, LENGTH, CHANNELS).to(dtype), target_values=randn(5, 3, seed=1).to(dtype))
    return out.loss, out.regression_outputs


TASKS = {
    "Prediction": (_forecast, {}),
    "Pretraining": (_reconstruct, {"norm_type": "layernorm", "activation_function": "relu", "random_mask_ratio": 0.5}),
    "Classification": (_classify, {"pre_norm": False, "use_cls_token": True, "activation_function": "silu"}),
    "Regression": (_regress, {"pre_norm": False, "norm_type": "layernorm", "bias": False, "norm_eps": 1e-3}),
}


@pytest.mark.parametrize("head", TASKS)
def test_a_step_of_hugging_face_s_model(head):
    loss_of, options = TASKS[head]
    model = huggingface(head, **options)
    assert_step_is_no_worse(model, loss_of)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("res_attention", [False, True])
@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("norm", ["BatchNorm", "LayerNorm"])
def test_a_step_of_the_official_model(norm, pre_norm, res_attention, padded):
    model = official(3, norm=norm, pre_norm=pre_norm, res_attention=res_attention)
    mask = torch.arange(TOKENS) >= torch.tensor([5, 2, 1, 5, 4, 3])[:, None] if padded else None
    assert_step_is_no_worse(model, lambda model, dtype: official_loss(model, dtype, mask))


def test_scores_and_their_gradients():
    """A layer by itself gives them, and takes others."""
    model = official(1)
    layer = model.layers[0]
    assert accelerate(layer).swapped == ("",)
    prev = randn(SEQUENCES, HEADS, TOKENS, TOKENS, seed=4)
    x = randn(SEQUENCES, TOKENS, D)

    def run(layer, dtype):
        given, before = (each.to(dtype, copy=True).requires_grad_() for each in (x, prev))
        y, scores = layer(given, before)
        (y.square().mean() + scores.sin().mean()).backward()
        return y.detach(), scores.detach(), given.grad, before.grad

    ours = run(layer, torch.float32)
    restore(layer)
    for got, theirs, exact in zip(ours, run(layer, torch.float32), run(layer.double(), torch.float64), strict=True):
        assert_no_worse_than_torch(got, theirs, exact)


def _assert_same_after(steps, model):
    """Several steps in both modes: outputs and running statistics of the model and of a copy that is accelerated."""
    ours = copy.deepcopy(model)
    accelerate(ours)
    for seed, training in enumerate(steps):
        x = randn(SEQUENCES, TOKENS, D, seed=seed)
        for each in (ours, model):
            each.train(training)
        torch.testing.assert_close(ours(x), model(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-4)


def test_modes():
    _assert_same_after([True, True, False, True, False], official())


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_momentum(momentum):
    model = official()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.momentum = momentum
    _assert_same_after([True, True, True, False], model)


def test_no_running_statistics():
    model = official()
    for layer in model.layers:
        layer.norm_attn[1] = nn.BatchNorm1d(D, track_running_stats=False)
        layer.norm_ffn[1] = nn.BatchNorm1d(D, affine=False, track_running_stats=False)
    _assert_same_after([True, False], model)
    model = official()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.track_running_stats = False  # they are there, and are not updated
    _assert_same_after([True, False], model)
