"""Small PatchTST models, and what torch served of a call."""

import copy

import pytest
import torch
from official_patchtst import OfficialEncoder, assert_step_no_worse, training_step

import isogemm
from isogemm.integrations import patchtst
from isogemm.integrations.patchtst import accelerate

D, HEADS, F = 16, 4, 4
SEQUENCES, TOKENS, CHANNELS, LENGTH = 6, 5, 3, 16


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_random_values(model):
    """With parameters and running statistics that are none of the neutral ones that they start from."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, each in [*model.named_parameters(), *model.named_buffers()]:
            if each.is_floating_point() and not name.endswith("scale"):
                each.add_(torch.rand(each.shape, generator=generator) - 0.5, alpha=0.2)
    return model


def official(layers=2, **options):
    torch.manual_seed(0)
    return with_random_values(OfficialEncoder(layers, D, HEADS, F, **options))


def huggingface(head="Prediction", **options):
    """2 patches."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.PatchTSTConfig(
        num_input_channels=CHANNELS, context_length=LENGTH, patch_length=8, patch_stride=8, prediction_length=4,
        d_model=D, num_attention_heads=HEADS, ffn_dim=F, num_targets=3, loss="mse",
        **{"num_hidden_layers": 2, "attention_dropout": 0.0} | options,
    )  # fmt: skip
    return with_random_values(getattr(transformers, f"PatchTSTFor{head}")(config))


def served_by_torch(log):
    """The reasons."""
    return [entry.reason for entry in log if entry.op == "integrations.patchtst"]


def assert_step_is_no_worse(model, loss_of):
    """Within 1e-4, and twice torch's error; loss_of(model, dtype)."""
    theirs = training_step(copy.deepcopy(model), lambda model: loss_of(model, torch.float32))
    exact = training_step(copy.deepcopy(model).double(), lambda model: loss_of(model, torch.float64))
    assert accelerate(model).kept == ()
    with isogemm.dispatch_log() as log:
        ours = training_step(model, lambda model: loss_of(model, torch.float32))
    assert "encoder_layer" in {entry.op for entry in log}
    assert served_by_torch(log) == []
    assert_step_no_worse(ours, theirs, exact)
    for name, each in ours.items():
        error = (each - exact[name]).abs().max()
        assert error <= 1e-4 * max(1.0, float(exact[name].abs().max())), name


def official_loss(model, dtype, mask=None):
    y = model(randn(SEQUENCES, TOKENS, D).to(dtype), key_padding_mask=mask)
    return (y * randn(SEQUENCES, TOKENS, D, seed=3).to(dtype)).mean(), y


def encoder_calls(model, x, monkeypatch):
    """The dropouts that isogemm.encoder_layer is asked for."""
    seen = []
    computed = patchtst.encoder_layer

    def spy(*args, **kwargs):
        seen.append(kwargs["dropout"])
        return computed(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(patchtst, "encoder_layer", spy)
        model(x)
    return seen


def state_of(model):
    return [(name, type(each), {*vars(each)}) for name, each in model.named_modules()]


def outputs_of(model, x):
    result = model(x)
    return [result] if isinstance(result, torch.Tensor) else [result.prediction_outputs]


def reasons_of(model, *args, **kwargs):
    with isogemm.dispatch_log() as log:
        model(*args, **kwargs)
    return served_by_torch(log)
