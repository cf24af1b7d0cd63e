"""PatchTST's layers through isogemm: the model that it was in all but who computes, and that one again."""

import copy
import io
import pickle

import pytest
import torch
from official_patchtst import OfficialEncoder, OfficialLayer, assert_step_no_worse, training_step
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.integrations import patchtst
from isogemm.integrations.patchtst import accelerate, restore
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch

D, HEADS, F = 16, 4, 4
SEQUENCES, TOKENS, CHANNELS, LENGTH = 6, 5, 3, 16


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _filled(model):
    """With parameters and running statistics that are none of the neutral ones that they start from."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, each in [*model.named_parameters(), *model.named_buffers()]:
            if each.is_floating_point() and not name.endswith("scale"):
                each.add_(torch.rand(each.shape, generator=generator) - 0.5, alpha=0.2)
    return model


def _official(layers=2, **options):
    torch.manual_seed(0)
    return _filled(OfficialEncoder(layers, D, HEADS, F, **options))


def _huggingface(head="Prediction", **options):
    """2 patches."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.PatchTSTConfig(
        num_input_channels=CHANNELS, context_length=LENGTH, patch_length=8, patch_stride=8, prediction_length=4,
        d_model=D, num_attention_heads=HEADS, ffn_dim=F, num_targets=3, loss="mse",
        **{"num_hidden_layers": 2, "attention_dropout": 0.0} | options,
    )  # fmt: skip
    return _filled(getattr(transformers, f"PatchTSTFor{head}")(config))


def _served_by_torch(log):
    """The reasons."""
    return [entry.reason for entry in log if entry.op == "integrations.patchtst"]


def _assert_step_is_no_worse(model, loss_of):
    """Within 1e-4, and twice torch's error; loss_of(model, dtype)."""
    theirs = training_step(copy.deepcopy(model), lambda model: loss_of(model, torch.float32))
    exact = training_step(copy.deepcopy(model).double(), lambda model: loss_of(model, torch.float64))
    assert accelerate(model).kept == ()
    with isogemm.dispatch_log() as log:
        ours = training_step(model, lambda model: loss_of(model, torch.float32))
    assert "encoder_layer" in {entry.op for entry in log}
    assert _served_by_torch(log) == []
    assert_step_no_worse(ours, theirs, exact)
    for name, each in ours.items():
        error = (each - exact[name]).abs().max()
        assert error <= 1e-4 * max(1.0, float(exact[name].abs().max())), name


def _forecast(model, dtype):
    future = _random(5, 4, CHANNELS, seed=1).to(dtype)
    out = model(past_values=_random(5, LENGTH, CHANNELS).to(dtype), future_values=future)
    return out.loss, out.prediction_outputs


def _reconstruct(model, dtype):
    out = model(past_values=_random(5, LENGTH, CHANNELS).to(dtype))
    return out.loss, out.prediction_output


def _classify(model, dtype):
    out = model(past_values=_random(5, LENGTH, CHANNELS).to(dtype), target_values=torch.tensor([0, 2, 1, 1, 0]))
    return out.loss, out.prediction_logits


def _regress(model, dtype):
    out = model(past_values=_random(5, LENGTH, CHANNELS).to(dtype), target_values=_random(5, 3, seed=1).to(dtype))
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
    model = _huggingface(head, **options)
    _assert_step_is_no_worse(model, loss_of)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("res_attention", [False, True])
@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("norm", ["BatchNorm", "LayerNorm"])
def test_a_step_of_the_official_model(norm, pre_norm, res_attention, padded):
    model = _official(3, norm=norm, pre_norm=pre_norm, res_attention=res_attention)
    mask = torch.arange(TOKENS) >= torch.tensor([5, 2, 1, 5, 4, 3])[:, None] if padded else None
    _assert_step_is_no_worse(model, lambda model, dtype: _of_official(model, dtype, mask))


def _of_official(model, dtype, mask=None):
    y = model(_random(SEQUENCES, TOKENS, D).to(dtype), key_padding_mask=mask)
    return (y * _random(SEQUENCES, TOKENS, D, seed=3).to(dtype)).mean(), y


def test_scores_and_their_gradients():
    """A layer by itself gives them, and takes others."""
    model = _official(1)
    layer = model.layers[0]
    assert accelerate(layer).swapped == ("",)
    prev = _random(SEQUENCES, HEADS, TOKENS, TOKENS, seed=4)
    x = _random(SEQUENCES, TOKENS, D)

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
        x = _random(SEQUENCES, TOKENS, D, seed=seed)
        for each in (ours, model):
            each.train(training)
        torch.testing.assert_close(ours(x), model(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-4)


def test_modes():
    _assert_same_after([True, True, False, True, False], _official())


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_momentum(momentum):
    model = _official()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.momentum = momentum
    _assert_same_after([True, True, True, False], model)


def test_no_running_statistics():
    model = _official()
    for layer in model.layers:
        layer.norm_attn[1] = nn.BatchNorm1d(D, track_running_stats=False)
        layer.norm_ffn[1] = nn.BatchNorm1d(D, affine=False, track_running_stats=False)
    _assert_same_after([True, False], model)
    model = _official()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.track_running_stats = False  # they are there, and are not updated
    _assert_same_after([True, False], model)


# Dropout


def _asked(model, x, monkeypatch):
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


def test_places_of_hugging_face_s_dropout(monkeypatch):
    model = _huggingface(attention_dropout=0.1, path_dropout=0.2, ff_dropout=0.3)
    accelerate(model)
    x = _random(5, LENGTH, CHANNELS)
    first, second = _asked(model.train(), x, monkeypatch)
    assert first == second == (0.1, 0.2, 0.3, 0.2)
    assert {*_asked(model.eval(), x, monkeypatch)} == {(0, 0, 0, 0)}
    model.train().model.encoder.layers[1].dropout_path1.eval()
    assert _asked(model, x, monkeypatch) == [(0.1, 0.2, 0.3, 0.2), (0.1, 0, 0.3, 0.2)]
    model.model.encoder.layers[1].self_attn.eval()
    assert _asked(model, x, monkeypatch)[1] == (0, 0, 0.3, 0.2)


def test_places_of_the_official_dropout(monkeypatch):
    model = _official(attn_dropout=0.1, dropout=0.2)
    accelerate(model)
    x = _random(SEQUENCES, TOKENS, D)
    first, _ = _asked(model.train(), x, monkeypatch)
    assert first == pytest.approx((0.1, 1 - 0.8 * 0.8, 0.2, 0.2))
    model.layers[0].dropout_attn.eval()
    assert _asked(model, x, monkeypatch)[0] == pytest.approx((0.1, 0.2, 0.2, 0.2))
    assert {*_asked(model.eval(), x, monkeypatch)} == {(0, 0, 0, 0)}


def test_what_dropout_leaves():
    """p of the elements are 0 and the rest is scaled: with norms first and no feed-forward part the sum shows it."""
    model = _huggingface(norm_type="layernorm", path_dropout=0.25)
    layer = model.model.encoder.layers[0]
    nn.init.zeros_(layer.ff[3].weight)
    nn.init.zeros_(layer.ff[3].bias)
    accelerate(model)
    x = _random(64, CHANNELS, 4, D)
    added = layer.eval()(x)[0] - x
    dropped = layer.train()(x)[0] - x
    zeros = dropped == 0
    n = x.numel()
    assert abs(int(zeros.sum()) - n / 4) <= 4 * (n * 0.25 * 0.75) ** 0.5  # standard deviations
    torch.testing.assert_close(dropped, torch.where(zeros, 0, added / 0.75), rtol=1e-4, atol=1e-4)
    assert not torch.equal(layer(x)[0] - x == 0, zeros)


def test_attention_s_dropout_keeps_the_mean():
    """Of what the same sequence gets many times, where all after the attention is linear."""
    model = _huggingface(norm_type="layernorm", attention_dropout=0.3)
    layer = model.model.encoder.layers[0]
    nn.init.zeros_(layer.ff[3].weight)
    accelerate(model)
    x = _random(1, 1, 4, D).expand(4000, 1, 4, D)
    draws = layer.train()(x)[0].detach()
    deviation = draws.std(0) / len(draws) ** 0.5
    assert float(deviation.max()) > 0
    assert bool(((draws.mean(0) - layer.eval()(x[:1])[0][0]).abs() <= 5 * deviation + 1e-5).all())


@pytest.mark.parametrize("model", [_official, _huggingface])
def test_eval_mode_knows_no_dropout(model):
    x = _random(SEQUENCES, TOKENS, D) if model is _official else _random(5, LENGTH, CHANNELS)
    names = {"attn_dropout": 0.5, "dropout": 0.5} if model is _official else {"path_dropout": 0.5, "ff_dropout": 0.5}
    results = []
    for options in (names, {}):
        made = model(**options).eval()
        accelerate(made)
        result = made(x)
        results.append(result if model is _official else result.prediction_outputs)
    assert_bitwise_equal(*results)


# The model stays what it was


def _state(model):
    return [(name, type(each), {*vars(each)}) for name, each in model.named_modules()]


@pytest.mark.parametrize("make", [_official, _huggingface])
def test_restore_gives_back_the_very_model(make):
    model = make()
    before, untouched = _state(model), copy.deepcopy(model)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    layer = next(module for module in model.modules() if hasattr(module, "self_attn"))
    drawn = torch.get_rng_state()
    accelerate(model, precision="ieee")
    assert_bitwise_equal(torch.get_rng_state(), drawn)
    assert isinstance(layer, type(next(each for each in untouched.modules() if hasattr(each, "self_attn"))))
    assert _state(model) != before
    assert model.state_dict().keys() == untouched.state_dict().keys()
    for name, each in model.state_dict(keep_vars=True).items():
        assert each is tensors[name]
    accelerate(model)
    restore(model)
    restore(model)
    assert _state(model) == before
    x = _random(SEQUENCES, TOKENS, D) if make is _official else _random(5, LENGTH, CHANNELS)
    for ours, theirs in zip(_outputs(model, x), _outputs(untouched, x), strict=True):
        assert_bitwise_equal(ours, theirs)
    for ours, theirs in zip(model.buffers(), untouched.buffers(), strict=True):
        assert_bitwise_equal(ours, theirs)


def _outputs(model, x):
    result = model(x)
    return [result] if isinstance(result, torch.Tensor) else [result.prediction_outputs]


def test_restore_of_what_has_another_class_by_now():
    model = _official(2)
    accelerate(model)
    model.layers[1].__class__ = type("Sharded", (type(model.layers[1]),), {})
    before = _state(model)
    with pytest.raises(RuntimeError, match="has become a Sharded: undo that first"):
        restore(model)
    assert _state(model) == before


def test_a_model_without_memory():
    with torch.device("meta"):
        model = OfficialEncoder(2, D, HEADS, F)
    assert accelerate(model).kept == ()
    expected = _official().eval()
    model.to_empty(device="cpu").eval().load_state_dict(expected.state_dict())
    x = _random(SEQUENCES, TOKENS, D)
    assert _reasons(model, x) == []
    torch.testing.assert_close(model(x), expected(x), rtol=1e-4, atol=1e-4)


def test_a_second_call_starts_afresh():
    model = _official()
    first = accelerate(model)
    types = [type(layer) for layer in model.layers]
    assert accelerate(model, precision="ieee") == first
    assert [type(layer) for layer in model.layers] == types
    assert [layer.isogemm_choices.precision for layer in model.layers] == ["ieee", "ieee"]
    with pytest.raises(ValueError, match="precision"):
        accelerate(model, precision="tf64")
    assert [type(layer) for layer in model.layers] == types


@pytest.mark.parametrize("make", [_official, _huggingface])
def test_copies_and_files(make):
    model = make().eval()
    accelerate(model)
    x = _random(SEQUENCES, TOKENS, D) if make is _official else _random(5, LENGTH, CHANNELS)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
    ):  # fmt: skip
        assert [type(each) for each in other.modules()] == [type(each) for each in model.modules()]
        with isogemm.dispatch_log() as log:
            assert_bitwise_equal(_outputs(other, x)[0], _outputs(model, x)[0])
        assert _served_by_torch(log) == []
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert ours is not theirs
        restore(other)
        untouched = make()
        assert [type(each) for each in other.modules()] == [type(each) for each in untouched.modules()]


def test_state_dicts_of_both_fit_both():
    model, other = _official(), _official()
    with torch.no_grad():
        for each in other.parameters():
            if each.ndim:
                each.mul_(1.5)
    accelerate(model)
    model.load_state_dict(other.state_dict())
    x = _random(SEQUENCES, TOKENS, D)
    torch.testing.assert_close(model(x), other(x), rtol=1e-4, atol=1e-4)
    other.load_state_dict(model.state_dict())


def test_other_dtypes():
    model = _official().eval()
    x = _random(SEQUENCES, TOKENS, D)
    expected = model(x).detach()
    accelerate(model)
    few_bits = 0.03 * float(expected.abs().max())
    torch.testing.assert_close(model.to(torch.bfloat16)(x.bfloat16()).float(), expected, rtol=0, atol=few_bits)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), expected, rtol=0, atol=few_bits)
    with isogemm.dispatch_log() as log:
        model.double()(x.double())
    assert {entry.reason for entry in log} == {"its input is float64 on cpu"}


@pytest.mark.parametrize("norm", ["BatchNorm", "LayerNorm"])
def test_a_16_bit_model_with_norms_in_float32(norm):
    model = _official(norm=norm).bfloat16()
    for each in model.modules():
        if isinstance(each, (nn.BatchNorm1d, nn.LayerNorm)):
            each.float()
    untouched = copy.deepcopy(model)
    assert accelerate(model).kept == ()
    x = _random(SEQUENCES, TOKENS, D).bfloat16()
    assert {*_reasons(model, x)} == {"its norms are float32, its input bfloat16"}
    untouched(x)  # running statistics
    assert_bitwise_equal(model(x), untouched(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert _reasons(model, x) == []


def test_a_precision_of_float32_alone():
    model = _official().eval()
    accelerate(model, precision="ieee")
    assert _reasons(model.bfloat16(), _random(SEQUENCES, TOKENS, D).bfloat16()) == []


def test_compiled():
    model = _official(1)
    expected = copy.deepcopy(model)
    accelerate(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = _random(SEQUENCES, TOKENS, D)
    for each in (compiled, expected):
        each(x).sin().mean().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-4)


def test_hugging_face_s_compiled():
    model = _huggingface(num_hidden_layers=1).eval()
    x = _random(5, LENGTH, CHANNELS)
    expected = _outputs(model, x)[0]
    accelerate(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(_outputs(compiled, x)[0], expected, rtol=1e-4, atol=1e-4)


def test_compiled_code_follows_a_change_of_class(monkeypatch):
    layer = _official(1).layers[0].eval()
    compiled = torch.compile(layer, backend="eager")
    x = _random(SEQUENCES, TOKENS, D)
    compiled(x)
    accelerate(layer)
    assert len(_asked(compiled, x, monkeypatch)) == 1
    restore(layer)
    assert len(_asked(compiled, x, monkeypatch)) == 0


def test_data_parallel_gradients():
    model = _official()
    expected = copy.deepcopy(model)
    accelerate(model)
    x = _random(SEQUENCES, TOKENS, D)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        DistributedDataParallel(model)(x).square().mean().backward()
    finally:
        distributed.destroy_process_group()
    expected(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_swap_leaves_its_linears(monkeypatch):
    model = nn.Sequential(_official(), nn.Linear(D, D))
    accelerate(model)
    assert isogemm.nn.swap(model).swapped == ("1",)
    x = _random(SEQUENCES, TOKENS, D)
    assert len(_asked(model, x, monkeypatch)) == 2


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("make", [_official, _huggingface])
def test_swapped_before(make, fold, monkeypatch):
    """Layers of isogemm.nn.Linear, with the activation folded into one or not, compute the same."""
    model = make().train()
    untouched = copy.deepcopy(model)
    isogemm.nn.swap(model, fold=fold)
    swapped = _state(model)
    assert len(accelerate(model).swapped) == 2
    x = _random(SEQUENCES, TOKENS, D) if make is _official else _random(5, LENGTH, CHANNELS)
    assert _reasons(model, x) == []
    _outputs(untouched, x)  # running statistics
    for training in (True, False):
        ours, theirs = (_outputs(each.train(training), x)[0] for each in (model, untouched))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    ours.sum().backward()
    theirs.sum().backward()
    for mine, exact in zip(model.parameters(), untouched.parameters(), strict=True):
        if exact.grad is not None:
            torch.testing.assert_close(mine.grad, exact.grad, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match=r"accelerated layer: isogemm\.integrations\.patchtst\.restore comes first"):
        isogemm.nn.restore(model)
    restore(model)
    assert _state(model) == swapped
    isogemm.nn.restore(model)
    assert _state(model) == _state(untouched)


def test_linears_that_change_after_being_folded():
    model = _official(1).eval()
    isogemm.nn.swap(model)
    accelerate(model)
    x = _random(SEQUENCES, TOKENS, D)
    ff = model.layers[0].ff
    ff[0].activation = "relu"
    assert _reasons(model, x) == ["its activation was changed"]
    ff[0].activation = None
    assert _reasons(model, x) == ["ff.0 lacks the activation that was folded into it"]


# The last layer's scores


def test_scores_that_nobody_reads():
    model = _official(3)
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
    x = _random(SEQUENCES, TOKENS, D)
    _, scores = model.layers[0](x)
    assert scores.shape == (SEQUENCES, HEADS, TOKENS, TOKENS)
    assert model.layers[2](x, scores)[1] is None
    restore(model)
    assert model.layers[2](x, scores)[1] is not None


@pytest.fixture
def by_factors(monkeypatch):
    """As on a GPU."""
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
    model = _official(3)
    seen = _passed_on(monkeypatch)
    _assert_step_is_no_worse(model, _of_official)
    seen = seen[-3:]  # behind the trials
    assert [type(each) for each in seen] == [type(None), tuple, tuple]
    assert [each.shape for each in seen[2]] == [(2, HEADS, SEQUENCES, TOKENS, D // HEADS)] * 2


def test_scores_by_factors_to_a_layer_that_isogemm_does_not_compute(by_factors, monkeypatch):
    model = _official(3)
    theirs = training_step(copy.deepcopy(model), lambda model: _of_official(model, torch.float32))
    accelerate(model)
    model.layers[1].self_attn.W_Q.register_forward_hook(lambda module, args, output: None)
    seen = _passed_on(monkeypatch)
    ours = training_step(model, lambda model: _of_official(model, torch.float32))
    for name, each in ours.items():
        torch.testing.assert_close(each, theirs[name], rtol=1e-4, atol=1e-4)
    assert [type(each) for each in seen] == [type(None), torch.Tensor]


def test_scores_that_a_hook_sees(by_factors):
    model = _official(3)
    accelerate(model)
    seen = []
    for layer in model.layers[:2]:
        layer.register_forward_hook(lambda module, args, output: seen.append(output[1].shape))
        model(_random(SEQUENCES, TOKENS, D))
    assert seen == [(SEQUENCES, HEADS, TOKENS, TOKENS)] * 3


def test_stacks_of_more_layers_than_attention_takes_in():
    assert len(accelerate(_official(5)).by_factors) == 4
    assert accelerate(_official(6)).by_factors == ()


@pytest.mark.parametrize("masked", [0, 1])
def test_scores_with_masks_in_them_are_passed_on_themselves(by_factors, monkeypatch, masked):
    model = _official(3).eval()
    mask = torch.arange(TOKENS).expand(SEQUENCES, -1) > 2

    def run(model):
        x, scores = _random(SEQUENCES, TOKENS, D), None
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
    model(_random(SEQUENCES, TOKENS, D))


def test_scores_of_a_layer_that_others_call():
    shared = _official(2)
    shared.layers[1] = shared.layers[0]
    hooked = _official(2)
    hooked.layers[1].register_forward_hook(lambda module, args, output: None)
    elsewhere = nn.Module()
    elsewhere.encoder = _official(2)
    elsewhere.too = elsewhere.encoder.layers[1]
    replaced = _official(2)
    replaced.forward = replaced.forward
    for model in (shared, hooked, elsewhere, replaced, _official(2, res_attention=False)):
        assert accelerate(model).without_scores == ()
    assert accelerate(shared).swapped == ("layers.0", "layers.1")
    shared(_random(SEQUENCES, TOKENS, D))


# Layers that stay, and calls that isogemm does not serve


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
    model = _official(1)
    LEFT[reason](model.layers[0])
    before = _state(model)
    report = accelerate(model)
    assert report.swapped == ()
    assert [kept.reason for kept in report.kept] == [reason]
    assert _state(model) == before
    assert str(report) == f"swapped 0, kept 1\n  kept layers.0 ({report.kept[0].type}): {reason}"


def test_heads_that_do_not_make_up_d_model():
    assert [kept.reason for kept in accelerate(_official(1, d_k=8)).kept] == [
        "its heads of 8 and 8 do not make up d_model (d_k, d_v)"
    ]


def test_channel_attention():
    model = _huggingface(channel_attention=True)
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
    x = _random(5, LENGTH, CHANNELS)
    expected = _outputs(model, x)[0]
    assert "isogemm.nn.swap" in str(accelerate(model))
    assert len(isogemm.nn.swap(model).swapped) > 4
    torch.testing.assert_close(_outputs(model, x)[0], expected, rtol=1e-4, atol=1e-4)


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
    model = _huggingface(activation_function=name).eval()
    x = _random(5, LENGTH, CHANNELS)
    expected = _outputs(model, x)[0]
    assert len(accelerate(model).swapped) == swapped
    torch.testing.assert_close(_outputs(model, x)[0], expected, rtol=1e-4, atol=1e-4)


def test_an_attention_of_one_s_own():
    model = _huggingface()
    model.config._attn_implementation_internal = "mine"
    [reason] = {kept.reason for kept in accelerate(model).kept}
    assert reason.startswith("its attention is 'mine', none of eager, sdpa, ")


def _reasons(model, *args, **kwargs):
    with isogemm.dispatch_log() as log:
        model(*args, **kwargs)
    return _served_by_torch(log)


def test_output_attentions():
    model = _huggingface(attn_implementation="eager").eval()
    x = _random(5, LENGTH, CHANNELS)
    expected = model(x, output_attentions=True)
    accelerate(model)
    with isogemm.dispatch_log() as log:
        got = model(x, output_attentions=True)
    assert str(log[0]) == ("isogemm.integrations.patchtst [5, 3, 2, 16] float32: torch (output_attentions is True)")
    assert len(log) == len(got.attentions) == 2
    for ours, theirs in zip(got.attentions, expected.attentions, strict=True):
        assert_bitwise_equal(ours, theirs)
    assert_bitwise_equal(got.prediction_outputs, expected.prediction_outputs)
    assert _reasons(model, x) == []


def test_calls_that_torch_serves():
    model = _official().eval()
    untouched = copy.deepcopy(model)
    accelerate(model)
    x = _random(SEQUENCES, TOKENS, D)
    masks = {"attn_mask": torch.ones(TOKENS, TOKENS).triu(1).bool()}
    assert _reasons(model, x, **masks) == ["it is called with an attn_mask"] * 2
    assert_bitwise_equal(model(x, **masks), untouched(x, **masks))
    assert [*map(str, _reasons(model.layers[0], x))] == []
    with pytest.raises(RuntimeError, match="bool"):
        model(x, key_padding_mask=torch.zeros(SEQUENCES, TOKENS))
    tangents = torch.func.jvp(model, (x,), (x,))
    for ours, theirs in zip(tangents, torch.func.jvp(untouched, (x,), (x,)), strict=True):
        assert_bitwise_equal(ours, theirs)


def test_options_of_hugging_face_that_change_later():
    model = _huggingface().eval()
    accelerate(model)
    x = _random(5, LENGTH, CHANNELS)
    attention = model.model.encoder.layers[0].self_attn
    for name, value, reason in (
        ("scaling", 1.0, "its attention's scale is not 1 / sqrt(head_dim)"),
        ("is_causal", True, "its attention is causal"),
    ):
        before = getattr(attention, name)
        setattr(attention, name, value)
        assert _reasons(model, x) == [reason]
        setattr(attention, name, before)
    assert _reasons(model, x) == []


def _scale(layer, value):
    """As a checkpoint does."""
    state = layer.state_dict()
    state["self_attn.sdp_attn.scale"] = torch.tensor(value)
    layer.load_state_dict(state)


CHANGES = {  # name: (the model, what is done to its first layer, what isogemm does not follow; empty: it does)
    "scale": (_official, lambda layer: _scale(layer, 0.7), "its attention's scale is not 1 / sqrt(d_k)"),
    "another scale's memory": (
        _official, lambda layer: setattr(layer.self_attn.sdp_attn.scale, "data", torch.tensor(0.7)),
        "its attention's scale is not 1 / sqrt(d_k)",
    ),
    "approximate": (
        _official, lambda layer: setattr(layer.ff[1], "approximate", "tanh"), "its activation was changed",
    ),
    "eps": (_official, lambda layer: [setattr(each[1], "eps", 0.5) for each in (layer.norm_attn, layer.norm_ffn)], ""),
    "one eps": (
        _official, lambda layer: setattr(layer.norm_ffn[1], "eps", 0.5), "its norms are not of one kind and eps",
    ),
    "momentum": (_official, lambda layer: setattr(layer.norm_attn[1], "momentum", 0.9), ""),
    "modes": (_official, lambda layer: [each.eval() for each in (layer.norm_attn, layer.norm_ffn)], ""),
    "residual attention": (
        _official,
        lambda layer: [
            setattr(each, "res_attention", False) for each in (layer, layer.self_attn, layer.self_attn.sdp_attn)
        ], "",
    ),
    "pre_norm": (_official, lambda layer: setattr(layer, "pre_norm", True), ""),
    "store_attn": (
        _official, lambda layer: setattr(layer, "store_attn", True), "it keeps its attention's weights (store_attn)",
    ),
    "Hugging Face's scaling": (
        _huggingface, lambda layer: setattr(layer.self_attn, "scaling", 1.0),
        "its attention's scale is not 1 / sqrt(head_dim)",
    ),
    "Hugging Face's eps": (
        _huggingface,
        lambda layer: [
            setattr(each.batchnorm, "eps", 0.5) for each in (layer.norm_sublayer1, layer.norm_sublayer3)
        ], "",
    ),
    "Hugging Face's activation": (
        _huggingface, lambda layer: setattr(layer.ff[1], "act", torch.nn.functional.relu), "its activation was changed",
    ),
    "Hugging Face's bookkeeping": (
        _huggingface, lambda layer: vars(layer.ff[1]).pop("_is_hf_initialized", None), "",
    ),
    "Hugging Face's pre_norm": (_huggingface, lambda layer: setattr(layer, "pre_norm", False), ""),
}  # fmt: skip


COMPILED = ("scale", "approximate", "one eps", "Hugging Face's scaling", "Hugging Face's activation")


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in CHANGES), *((name, True) for name in COMPILED)]
)
def test_changes_after_accelerate(name, compiled):
    """Computed, or left to the forward that the layer had; in graphs that were made before, too."""
    torch._dynamo.reset()
    make, change, reason = CHANGES[name]
    expected = make(1).train() if make is _official else make(num_hidden_layers=1).train()
    model = copy.deepcopy(expected)
    accelerate(model)
    ours, theirs = ((each.layers[0] if make is _official else each) for each in (model, expected))
    run = torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours
    x = _random(SEQUENCES, TOKENS, D) if make is _official else _random(5, LENGTH, CHANNELS)
    with isogemm.dispatch_log() as log:  # from the first call on: graphs are made anew for it
        torch.testing.assert_close(_first(run(x)), _first(theirs(x)), rtol=1e-4, atol=1e-4)
        for each in (model, expected):
            change(each.layers[0] if make is _official else each.model.encoder.layers[0])
        log.clear()
        found, right = run(x), theirs(x)
    assert type(found) is type(right)
    torch.testing.assert_close(_first(found), _first(right), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-5)
    assert ("matmul" in {entry.op for entry in log}) == (not reason)  # isogemm's, which graphs show as well
    if not compiled:
        assert _served_by_torch(log) == [reason] * bool(reason)


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_every_activation_is_followed_in_a_graph(name):
    """Each is another class of Hugging Face's, with its formula, a function or a partial one inside."""
    torch._dynamo.reset()
    model = _huggingface(num_hidden_layers=1, activation_function=name).eval()
    x = _random(5, LENGTH, CHANNELS)
    right = _first(model(x))
    accelerate(model)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with isogemm.dispatch_log() as log:
            torch.testing.assert_close(_first(each(x)), right, rtol=1e-4, atol=1e-5)
        assert _served_by_torch(log) == []
    found = []

    def backend(graph, inputs):
        found.extend(node for node in graph.graph.nodes if "isogemm" in str(node.target))
        return graph.forward

    graphed = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(_first(graphed(x)), right, rtol=1e-4, atol=1e-5)
    assert found


def test_vmap_over_an_official_layer():
    """Its scale has no memory to be known by there."""
    model = _official(1).eval()
    accelerate(model)
    x = _random(SEQUENCES, TOKENS, D)
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
    model = _official(1).eval()
    expected = copy.deepcopy(model)
    accelerate(model)
    for each in (model, expected):
        each.layers[0].self_attn.sdp_attn.scale.data.fill_(0.7)
    x = _random(SEQUENCES, TOKENS, D)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected(x), rtol=1e-4, atol=1e-4)
    for each in (model, expected):
        each.layers[0].self_attn.sdp_attn.scale.data.fill_(0.5)
        each.load_state_dict(each.state_dict())
    torch.testing.assert_close(compiled(x), expected(x), rtol=1e-4, atol=1e-4)


def test_scores_that_a_late_hook_sees():
    model = _official(2)
    accelerate(model)
    seen = []
    model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output[1].shape))
    model(_random(SEQUENCES, TOKENS, D))
    assert seen == [(SEQUENCES, HEADS, TOKENS, TOKENS)]


def test_what_changes_later():
    model = _official(dropout=0.1)
    accelerate(model)
    x = _random(SEQUENCES, TOKENS, D)
    first = model.layers[0]
    seen = []
    handle = first.ff[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert _reasons(model, x) == ["ff.0 has hooks"]
    assert seen == [(SEQUENCES, TOKENS, F)]
    handle.remove()
    assert _reasons(model, x) == []

    first.norm_attn.eval()
    assert _reasons(model, x) == ["one of its batch norms takes the batch's statistics and the other does not"]
    first.norm_ffn.eval()
    assert _reasons(model, x) == []
    model.eval()

    state = model.state_dict()
    state["layers.0.self_attn.sdp_attn.scale"] = torch.tensor(0.7)
    model.load_state_dict(state)
    assert _reasons(model, x) == ["its attention's scale is not 1 / sqrt(d_k)"]
    first.self_attn.sdp_attn.scale.data.fill_(0.5)
    assert _reasons(model, x) == []

    first.ff[1] = nn.ReLU()
    assert _reasons(model, x) == ["a module in it was replaced by one of another type"]
    restore(model)
    assert accelerate(model).kept == ()
    assert _reasons(model, x) == []
    parametrizations.weight_norm(first.self_attn.W_Q)  # read past its module's forward as well
    expected = copy.deepcopy(model)
    restore(expected)
    assert _reasons(model, x) == []
    torch.testing.assert_close(model(x), expected(x), rtol=1e-4, atol=1e-4)
