"""Layers that stay torch's, calls that isogemm does not serve, and changes after `accelerate`."""

import copy
import pickle

import pytest
import torch
from official_patchtst import OfficialEncoder, OfficialLayer
from patchtst_models import (
    CHANNELS,
    HEADS,
    LENGTH,
    SEQUENCES,
    TOKENS,
    D,
    F,
    huggingface,
    official,
    outputs_of,
    randn,
    reasons_of,
    served_by_torch,
    state_of,
)
from torch import nn
from torch.nn.utils import parametrizations

import isogemm
from isogemm.integrations.patchtst import accelerate, restore
from isogemm.verify.compare import assert_bitwise_equal


class _OwnForward(OfficialLayer):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class _NoOwnForward(OfficialLayer):
    pass


class _Otherwise(nn.Module):
    def forward(self, src, prev=None):
        y, scores = OfficialLayer.forward(self, src, prev)
        return y + 0.01 * src, scores


class _OtherwiseInTraining(nn.Module):
    def forward(self, src, prev=None):
        y, scores = OfficialLayer.forward(self, src, prev)
        return nn.functional.dropout(y, 0.5, self.training), scores


class _OtherArguments(nn.Module):
    def forward(self, src, channels):
        return src


def _linear_of(layer):
    return layer.self_attn.W_K


LEFT = {
    "_OwnForward has a forward of its own": lambda layer: setattr(layer, "__class__", _OwnForward),
    "its forward was replaced on the instance (as accelerate does to place devices)": lambda layer: setattr(
        layer, "forward", layer.forward
    ),
    "the forward of _Otherwise computes something else": lambda layer: setattr(layer, "__class__", _Otherwise),
    "the forward of _OtherwiseInTraining computes something else in training mode": lambda layer: setattr(
        layer, "__class__", _OtherwiseInTraining
    ),
    "it cannot be copied to be tried: TypeError: cannot pickle 'generator' object": lambda layer: setattr(
        layer, "log", (each for each in ())
    ),
    "its forward, tried on the CPU, raised TypeError: _OtherArguments.forward() got an unexpected keyword argument "
    "'prev'": lambda layer: setattr(layer, "__class__", _OtherArguments),
    "self_attn.W_K has hooks": lambda layer: _linear_of(layer).register_forward_hook(lambda *args: None),
    "norm_attn.1 has hooks": lambda layer: layer.norm_attn[1].register_forward_pre_hook(lambda *args: None),
    "ff has hooks": lambda layer: layer.ff.register_full_backward_hook(lambda *args: None),
    "self_attn.W_K: its weight is made from other parameters (parametrization, weight norm, pruning): swap first": (
        lambda layer: parametrizations.weight_norm(_linear_of(layer))
    ),
    "ff.0 has an activation, relu": lambda layer: layer.ff.__setitem__(0, isogemm.nn.Linear(D, F, activation="relu")),
    "ff.0 has an out_dtype, torch.float32": lambda layer: layer.ff.__setitem__(
        0, isogemm.nn.Linear(D, F, out_dtype=torch.float32)
    ),
    "norm_attn.1 is a SyncBatchNorm with a forward of its own": nn.SyncBatchNorm.convert_sync_batchnorm,
    "its norms are not of one kind and eps": lambda layer: setattr(layer.norm_ffn[1], "eps", 1e-3),
    "one of its batch norms takes the batch's statistics and the other does not": lambda layer: layer.norm_ffn.eval(),
    "its norms are one batch norm, whose running statistics are updated twice": lambda layer: setattr(
        layer, "norm_ffn", layer.norm_attn
    ),
    "it keeps its attention's weights (store_attn)": lambda layer: setattr(layer, "store_attn", True),
    "its attention learns its scale (lsa)": lambda layer: layer.self_attn.sdp_attn.scale.requires_grad_(),
    "its attention's scale is not 1 / sqrt(d_k)": lambda layer: layer.self_attn.sdp_attn.scale.data.mul_(2),
    "its adapter is no module of such a layer": lambda layer: layer.add_module("adapter", nn.Linear(D, D)),
    "it lacks what such a layer has: 'dropout_attn'": lambda layer: layer.__delattr__("dropout_attn"),
    "its activation is LeakyReLU(negative_slope=0.01), none of relu, gelu, gelu_tanh, silu": (
        lambda layer: layer.ff.__setitem__(1, nn.LeakyReLU())
    ),
    "its activation is GLU(dim=-1), none of relu, gelu, gelu_tanh, silu": lambda layer: layer.ff.__setitem__(
        1, nn.GLU()
    ),
    "torch.float64 has no contract; those with one: float32, float16, bfloat16": lambda layer: layer.double(),
    "it is compiled: do this before compiling": lambda layer: layer.compile(backend="eager"),
}


@pytest.mark.parametrize("reason", LEFT)
def test_a_layer_that_stays(reason):
    model = official(1)
    LEFT[reason](model.layers[0])
    before = state_of(model)
    report = accelerate(model)
    assert report.swapped == ()
    assert [kept.reason for kept in report.kept] == [reason]
    assert state_of(model) == before
    assert str(report) == f"swapped 0, kept 1\n  kept layers.0 ({report.kept[0].type}): {reason}"


def test_heads_that_do_not_make_up_d_model():
    assert [kept.reason for kept in accelerate(official(1, d_k=8)).kept] == [
        "its heads of 8 and 8 do not make up d_model (d_k, d_v)"
    ]


def test_channel_attention():
    model = huggingface(channel_attention=True)
    report = accelerate(model)
    assert str(report) == (
        "swapped 0, kept 2\n  kept model.encoder.layers.* x 2 (PatchTSTEncoderLayer): "
        "it attends across channels too (channel_attention)"
    )


def test_a_model_without_such_layers():
    report = accelerate(nn.Linear(2, 2))
    assert str(report) == "no encoder layer of a PatchTST was found; isogemm.nn.swap replaces the linears of any model"


def test_a_model_that_is_no_patchtst():
    """A PatchTSMixer is left alone, with a message that names what serves it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.PatchTSMixerConfig(
        context_length=LENGTH, patch_length=8, patch_stride=8, num_input_channels=CHANNELS, d_model=D, num_layers=1,
        prediction_length=4,
    )  # fmt: skip
    model = transformers.PatchTSMixerForPrediction(config).eval()
    x = randn(5, LENGTH, CHANNELS)
    expected = outputs_of(model, x)[0]
    assert "isogemm.nn.swap" in str(accelerate(model))
    assert len(isogemm.nn.swap(model).swapped) > 4
    torch.testing.assert_close(outputs_of(model, x)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [accelerate, restore])
@pytest.mark.parametrize("model", ["model.pt", None, OfficialEncoder])
def test_no_model(function, model):
    with pytest.raises(TypeError, match=r"^model is .*; expected a torch\.nn\.Module$"):
        function(model)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, ""),
        ({"d_model": 384}, "slower than torch's on a GPU: "),
        ({"d_model": 96}, "slower than torch's on a GPU outside of"),
    ],
)
def test_notes_of_layers_that_are_not_on_the_cpu(options, text):
    """On a GPU as on meta: there is a note where isogemm.nn.EncoderLayer would have one."""
    with torch.device("meta"):
        model = OfficialEncoder(1, options.get("d_model", D), HEADS, F)
    report = accelerate(model)
    assert [note.text[: len(text)] for note in report.notes] == ([text] if text else [])


def test_a_subclass_without_a_forward():
    layer = _NoOwnForward(D, HEADS, F)
    assert accelerate(layer).swapped == ("",)
    restore(layer)
    assert type(layer) is _NoOwnForward


@pytest.mark.parametrize(
    ("name", "swapped"),
    [("gelu", 2), ("gelu_new", 2), ("gelu_pytorch_tanh", 2), ("silu", 2), ("swish", 2), ("relu", 2), ("quick_gelu", 0)],
)
def test_activations_of_hugging_face(name, swapped):
    model = huggingface(activation_function=name).eval()
    x = randn(5, LENGTH, CHANNELS)
    expected = outputs_of(model, x)[0]
    assert len(accelerate(model).swapped) == swapped
    torch.testing.assert_close(outputs_of(model, x)[0], expected, rtol=1e-4, atol=1e-4)


def test_an_attention_of_one_s_own():
    model = huggingface()
    model.config._attn_implementation_internal = "mine"
    [reason] = {kept.reason for kept in accelerate(model).kept}
    assert reason.startswith("its attention is 'mine', none of eager, sdpa, ")


def test_output_attentions():
    model = huggingface(attn_implementation="eager").eval()
    x = randn(5, LENGTH, CHANNELS)
    expected = model(x, output_attentions=True)
    accelerate(model)
    with isogemm.dispatch_log() as log:
        got = model(x, output_attentions=True)
    assert str(log[0]) == ("isogemm.integrations.patchtst [5, 3, 2, 16] float32: torch (output_attentions is True)")
    assert len(log) == len(got.attentions) == 2
    for ours, theirs in zip(got.attentions, expected.attentions, strict=True):
        assert_bitwise_equal(ours, theirs)
    assert_bitwise_equal(got.prediction_outputs, expected.prediction_outputs)
    assert reasons_of(model, x) == []


def test_calls_that_torch_serves():
    model = official().eval()
    untouched = copy.deepcopy(model)
    accelerate(model)
    x = randn(SEQUENCES, TOKENS, D)
    masks = {"attn_mask": torch.ones(TOKENS, TOKENS).triu(1).bool()}
    assert reasons_of(model, x, **masks) == ["it is called with an attn_mask"] * 2
    assert_bitwise_equal(model(x, **masks), untouched(x, **masks))
    assert [*map(str, reasons_of(model.layers[0], x))] == []
    with pytest.raises(RuntimeError, match="bool"):
        model(x, key_padding_mask=torch.zeros(SEQUENCES, TOKENS))
    tangents = torch.func.jvp(model, (x,), (x,))
    for ours, theirs in zip(tangents, torch.func.jvp(untouched, (x,), (x,)), strict=True):
        assert_bitwise_equal(ours, theirs)


def test_options_of_hugging_face_that_change_later():
    model = huggingface().eval()
    accelerate(model)
    x = randn(5, LENGTH, CHANNELS)
    attention = model.model.encoder.layers[0].self_attn
    for name, value, reason in (
        ("scaling", 1.0, "its attention's scale is not 1 / sqrt(head_dim)"),
        ("is_causal", True, "its attention is causal"),
    ):
        before = getattr(attention, name)
        setattr(attention, name, value)
        assert reasons_of(model, x) == [reason]
        setattr(attention, name, before)
    assert reasons_of(model, x) == []


def _scale(layer, value):
    """As a checkpoint does."""
    state = layer.state_dict()
    state["self_attn.sdp_attn.scale"] = torch.tensor(value)
    layer.load_state_dict(state)


CHANGES = {  # name: (the model, what is done to its first layer, what isogemm does not follow; empty: it does)
    "scale": (official, lambda layer: _scale(layer, 0.7), "its attention's scale is not 1 / sqrt(d_k)"),
    "another scale's memory": (
        official, lambda layer: setattr(layer.self_attn.sdp_attn.scale, "data", torch.tensor(0.7)),
        "its attention's scale is not 1 / sqrt(d_k)",
    ),
    "approximate": (
        official, lambda layer: setattr(layer.ff[1], "approximate", "tanh"), "its activation was changed",
    ),
    "eps": (official, lambda layer: [setattr(each[1], "eps", 0.5) for each in (layer.norm_attn, layer.norm_ffn)], ""),
    "one eps": (
        official, lambda layer: setattr(layer.norm_ffn[1], "eps", 0.5), "its norms are not of one kind and eps",
    ),
    "momentum": (official, lambda layer: setattr(layer.norm_attn[1], "momentum", 0.9), ""),
    "modes": (official, lambda layer: [each.eval() for each in (layer.norm_attn, layer.norm_ffn)], ""),
    "residual attention": (
        official,
        lambda layer: [
            setattr(each, "res_attention", False) for each in (layer, layer.self_attn, layer.self_attn.sdp_attn)
        ], "",
    ),
    "pre_norm": (official, lambda layer: setattr(layer, "pre_norm", True), ""),
    "store_attn": (
        official, lambda layer: setattr(layer, "store_attn", True), "it keeps its attention's weights (store_attn)",
    ),
    "Hugging Face's scaling": (
        huggingface, lambda layer: setattr(layer.self_attn, "scaling", 1.0),
        "its attention's scale is not 1 / sqrt(head_dim)",
    ),
    "Hugging Face's eps": (
        huggingface,
        lambda layer: [
            setattr(each.batchnorm, "eps", 0.5) for each in (layer.norm_sublayer1, layer.norm_sublayer3)
        ], "",
    ),
    "Hugging Face's activation": (
        huggingface, lambda layer: setattr(layer.ff[1], "act", torch.nn.functional.relu), "its activation was changed",
    ),
    "Hugging Face's bookkeeping": (
        huggingface, lambda layer: vars(layer.ff[1]).pop("_is_hf_initialized", None), "",
    ),
    "Hugging Face's pre_norm": (huggingface, lambda layer: setattr(layer, "pre_norm", False), ""),
}  # fmt: skip
COMPILED = ("scale", "approximate", "one eps", "Hugging Face's scaling", "Hugging Face's activation")


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in CHANGES), *((name, True) for name in COMPILED)]
)
def test_changes_after_accelerate(name, compiled):
    """Computed, or left to the forward that the layer had; in graphs that were made before, too."""
    torch._dynamo.reset()
    make, change, reason = CHANGES[name]
    expected = make(1).train() if make is official else make(num_hidden_layers=1).train()
    model = copy.deepcopy(expected)
    accelerate(model)
    ours, theirs = ((each.layers[0] if make is official else each) for each in (model, expected))
    run = torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours
    x = randn(SEQUENCES, TOKENS, D) if make is official else randn(5, LENGTH, CHANNELS)
    with isogemm.dispatch_log() as log:  # from the first call on: graphs are made anew for it
        torch.testing.assert_close(_first(run(x)), _first(theirs(x)), rtol=1e-4, atol=1e-4)
        for each in (model, expected):
            change(each.layers[0] if make is official else each.model.encoder.layers[0])
        log.clear()
        found, right = run(x), theirs(x)
    assert type(found) is type(right)
    torch.testing.assert_close(_first(found), _first(right), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-5)
    assert ("matmul" in {entry.op for entry in log}) == (not reason)  # isogemm's, which graphs show as well
    if not compiled:
        assert served_by_torch(log) == [reason] * bool(reason)


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_every_activation_is_followed_in_a_graph(name):
    """Each is another class of Hugging Face's, with its formula, a function or a partial one inside."""
    torch._dynamo.reset()
    model = huggingface(num_hidden_layers=1, activation_function=name).eval()
    x = randn(5, LENGTH, CHANNELS)
    right = _first(model(x))
    accelerate(model)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with isogemm.dispatch_log() as log:
            torch.testing.assert_close(_first(each(x)), right, rtol=1e-4, atol=1e-5)
        assert served_by_torch(log) == []
    found = []

    def backend(graph, inputs):
        found.extend(node for node in graph.graph.nodes if "isogemm" in str(node.target))
        return graph.forward

    graphed = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(_first(graphed(x)), right, rtol=1e-4, atol=1e-5)
    assert found


def test_vmap_over_an_official_layer():
    """Its scale has no memory to be known by there."""
    model = official(1).eval()
    accelerate(model)
    x = randn(SEQUENCES, TOKENS, D)
    named = model.named_parameters(), model.named_buffers()
    states = [{name: torch.stack([each, each]) for name, each in of_kind} for of_kind in named]
    with torch.no_grad():
        both = torch.func.vmap(lambda *state: torch.func.functional_call(model, state, (x,)))(*states)
        torch.testing.assert_close(both[1], model(x), rtol=1e-4, atol=1e-5)


def _first(result):
    """The first result of a layer, or a model's prediction."""
    if isinstance(result, torch.Tensor):
        return result
    return result[0] if isinstance(result, tuple) else result.prediction_outputs


def test_a_scale_changed_in_code_before_compiling():
    torch._dynamo.reset()
    model = official(1).eval()
    expected = copy.deepcopy(model)
    accelerate(model)
    for each in (model, expected):
        each.layers[0].self_attn.sdp_attn.scale.data.fill_(0.7)
    x = randn(SEQUENCES, TOKENS, D)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected(x), rtol=1e-4, atol=1e-4)
    for each in (model, expected):
        each.layers[0].self_attn.sdp_attn.scale.data.fill_(0.5)
        each.load_state_dict(each.state_dict())
    torch.testing.assert_close(compiled(x), expected(x), rtol=1e-4, atol=1e-4)


def test_what_changes_later():
    model = official(dropout=0.1)
    accelerate(model)
    x = randn(SEQUENCES, TOKENS, D)
    first = model.layers[0]
    seen = []
    handle = first.ff[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert reasons_of(model, x) == ["ff.0 has hooks"]
    assert seen == [(SEQUENCES, TOKENS, F)]
    handle.remove()
    assert reasons_of(model, x) == []

    first.norm_attn.eval()
    assert reasons_of(model, x) == ["one of its batch norms takes the batch's statistics and the other does not"]
    first.norm_ffn.eval()
    assert reasons_of(model, x) == []
    model.eval()

    state = model.state_dict()
    state["layers.0.self_attn.sdp_attn.scale"] = torch.tensor(0.7)
    model.load_state_dict(state)
    assert reasons_of(model, x) == ["its attention's scale is not 1 / sqrt(d_k)"]
    first.self_attn.sdp_attn.scale.data.fill_(0.5)
    assert reasons_of(model, x) == []

    first.ff[1] = nn.ReLU()
    assert reasons_of(model, x) == ["a module in it was replaced by one of another type"]
    restore(model)
    assert accelerate(model).kept == ()
    assert reasons_of(model, x) == []
    parametrizations.weight_norm(first.self_attn.W_Q)  # read past its module's forward as well
    expected = copy.deepcopy(model)
    restore(expected)
    assert reasons_of(model, x) == []
    torch.testing.assert_close(model(x), expected(x), rtol=1e-4, atol=1e-4)
