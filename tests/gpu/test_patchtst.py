"""Accelerated PatchTSTs by the fused kernels: whole training steps against torch's, in tf32 and under autocast."""

import copy
from contextlib import nullcontext

import pytest
import torch
from official_patchtst import OfficialEncoder, assert_step_no_worse, training_step

import isogemm
from isogemm.integrations.patchtst import accelerate, restore
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.encoder_reference import products_of_tf32
from isogemm.verify.inputs import make_data

DEVICE = "cuda"
SIZES = {"wide": (128, 16, 256), "narrow": (16, 4, 128)}  # d_model, heads, dim_feedforward
CHANNELS, LENGTH, HORIZON = 7, 336, 24


def _data(*shape, seed=0):
    return make_data("normal", shape, seed=seed, dtype=torch.float32, device=DEVICE)


def _official(size, **options):
    """And its loss: 112 sequences of 42 tokens."""
    torch.manual_seed(0)
    d_model, heads, feedforward = SIZES[size]
    model = OfficialEncoder(3, d_model, heads, feedforward, **options).to(DEVICE)
    x, weights = _data(112, 42, d_model), _data(112, 42, d_model, seed=1)

    def loss_of(model):
        dtype = model.layers[0].ff[0].weight.dtype
        y = model(x.to(dtype))
        return (y * weights.to(dtype)).sum() / 1000, y

    return model, loss_of


def _huggingface(size, **options):
    """And its loss: 16 windows of 7 channels in 41 patches."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    d_model, heads, feedforward = SIZES[size]
    config = transformers.PatchTSTConfig(
        num_input_channels=CHANNELS, context_length=LENGTH, patch_length=16, patch_stride=8, prediction_length=HORIZON,
        d_model=d_model, num_attention_heads=heads, ffn_dim=feedforward, num_hidden_layers=3, loss="mse",
        **{"attention_dropout": 0.0} | options,
    )  # fmt: skip
    model = transformers.PatchTSTForPrediction(config).to(DEVICE)
    past, future = _data(16, LENGTH, CHANNELS), _data(16, HORIZON, CHANNELS, seed=1)

    def loss_of(model):
        dtype = model.head.projection.weight.dtype
        out = model(past_values=past.to(dtype), future_values=future.to(dtype))
        return out.loss * 10, out.prediction_outputs

    return model, loss_of


def _assert_fused(log, launches):
    assert [entry for entry in log if entry.op == "integrations.patchtst"] == []
    served = [entry for entry in log if entry.op == "encoder_layer"]
    assert [entry.path for entry in served] == ["fused"] * launches, served


@pytest.mark.parametrize("number", ["tf32", "bf16"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (_official, {}),
        (_official, {"pre_norm": True, "norm": "LayerNorm", "res_attention": False}),
        (_official, {"pre_norm": True}),
        (_huggingface, {}),
        (_huggingface, {"pre_norm": False, "norm_type": "layernorm", "activation_function": "relu"}),
    ],
    ids=["official", "official, pre, layer norm", "official, pre", "HF", "HF, post, layer norm"],
)
def test_a_step_is_no_worse_than_torch_s(make, options, size, number):
    model, loss_of = make(size, **options)
    exact = training_step(copy.deepcopy(model).double(), loss_of)
    torch.backends.cuda.matmul.fp32_precision = "tf32" if number == "tf32" else "ieee"
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=number == "bf16")
    with autocast, products_of_tf32() if number == "tf32" else nullcontext():
        theirs = training_step(copy.deepcopy(model), loss_of)
    assert accelerate(model).kept == ()
    with autocast, isogemm.dispatch_log() as log:
        ours = training_step(model, loss_of)
    _assert_fused(log, 3)
    assert_step_no_worse(ours, theirs, exact)


@pytest.mark.parametrize("make", [_official, _huggingface])
def test_dropout_is_fused_and_gone_in_eval_mode(make):
    options = {"attn_dropout": 0.1, "dropout": 0.2} if make is _official else {"path_dropout": 0.2, "ff_dropout": 0.2}
    model, loss_of = make("wide", **options)
    plain, _ = make("wide")
    accelerate(model)
    accelerate(plain)
    with isogemm.dispatch_log() as log:
        first = training_step(model, loss_of)
    _assert_fused(log, 3)
    assert all(bool(each.isfinite().all()) for each in first.values())
    torch.manual_seed(3)
    assert float((loss_of(model)[1] - first["output 0"]).abs().max()) > 0
    plain.load_state_dict(model.state_dict())
    assert_bitwise_equal(loss_of(model.eval())[1], loss_of(plain.eval())[1])


def test_a_step_in_a_graph():
    """For the official model, running statistics and all; nothing waits for the device."""
    model, loss_of = _official("wide")
    accelerate(model)
    start = copy.deepcopy(model.state_dict())
    expected = [training_step(model, loss_of) for _ in range(3)][2]
    model.load_state_dict(start)
    graph = torch.cuda.CUDAGraph()
    training_step(model, loss_of)
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss, y = loss_of(model)
        loss.backward()
    for _ in range(2):
        graph.replay()
    assert_bitwise_equal(y, expected["output 0"])
    for name, each in model.named_parameters():
        if each.requires_grad:
            assert_bitwise_equal(each.grad, expected[f"gradient of {name}"])
    for name, each in model.named_buffers():
        assert_bitwise_equal(each, expected[f"buffer {name}"])


def test_restore_after_a_step():
    model, loss_of = _official("narrow")
    untouched = copy.deepcopy(model)
    accelerate(model)
    with torch.no_grad():
        loss_of(model.eval())
    restore(model)
    assert_bitwise_equal(loss_of(model)[1], loss_of(untouched.eval())[1])
