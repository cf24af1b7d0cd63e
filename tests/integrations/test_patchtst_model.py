"""An accelerated model stays the model it was: copies, files, state_dicts, dtypes, compiling, swapping."""

import copy
import io
import pickle

import pytest
import torch
from official_patchtst import OfficialEncoder
from patchtst_models import (
    CHANNELS,
    HEADS,
    LENGTH,
    SEQUENCES,
    TOKENS,
    D,
    F,
    encoder_calls,
    huggingface,
    official,
    outputs_of,
    randn,
    reasons_of,
    served_by_torch,
    state_of,
)
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import isogemm
from isogemm.integrations.patchtst import accelerate, restore
from isogemm.verify.compare import assert_bitwise_equal


@pytest.mark.parametrize("make", [official, huggingface])
def test_restore_gives_back_the_very_model(make):
    model = make()
    before, untouched = state_of(model), copy.deepcopy(model)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    layer = next(module for module in model.modules() if hasattr(module, "self_attn"))
    drawn = torch.get_rng_state()
    accelerate(model, precision="ieee")
    assert_bitwise_equal(torch.get_rng_state(), drawn)
    assert isinstance(layer, type(next(each for each in untouched.modules() if hasattr(each, "self_attn"))))
    assert state_of(model) != before
    assert model.state_dict().keys() == untouched.state_dict().keys()
    for name, each in model.state_dict(keep_vars=True).items():
        assert each is tensors[name]
    accelerate(model)
    restore(model)
    restore(model)
    assert state_of(model) == before
    x = randn(SEQUENCES, TOKENS, D) if make is official else randn(5, LENGTH, CHANNELS)
    for ours, theirs in zip(outputs_of(model, x), outputs_of(untouched, x), strict=True):
        assert_bitwise_equal(ours, theirs)
    for ours, theirs in zip(model.buffers(), untouched.buffers(), strict=True):
        assert_bitwise_equal(ours, theirs)


def test_restore_of_what_has_another_class_by_now():
    model = official(2)
    accelerate(model)
    model.layers[1].__class__ = type("Sharded", (type(model.layers[1]),), {})
    before = state_of(model)
    with pytest.raises(RuntimeError, match="has become a Sharded: undo that first"):
        restore(model)
    assert state_of(model) == before


def test_a_model_without_memory():
    with torch.device("meta"):
        model = OfficialEncoder(2, D, HEADS, F)
    assert accelerate(model).kept == ()
    expected = official().eval()
    model.to_empty(device="cpu").eval().load_state_dict(expected.state_dict())
    x = randn(SEQUENCES, TOKENS, D)
    assert reasons_of(model, x) == []
    torch.testing.assert_close(model(x), expected(x), rtol=1e-4, atol=1e-4)


def test_a_second_call_starts_afresh():
    model = official()
    first = accelerate(model)
    types = [type(layer) for layer in model.layers]
    assert accelerate(model, precision="ieee") == first
    assert [type(layer) for layer in model.layers] == types
    assert [layer.isogemm_choices.precision for layer in model.layers] == ["ieee", "ieee"]
    with pytest.raises(ValueError, match="precision"):
        accelerate(model, precision="tf64")
    assert [type(layer) for layer in model.layers] == types


@pytest.mark.parametrize("make", [official, huggingface])
def test_copies_and_files(make):
    model = make().eval()
    accelerate(model)
    x = randn(SEQUENCES, TOKENS, D) if make is official else randn(5, LENGTH, CHANNELS)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
    ):  # fmt: skip
        assert [type(each) for each in other.modules()] == [type(each) for each in model.modules()]
        with isogemm.dispatch_log() as log:
            assert_bitwise_equal(outputs_of(other, x)[0], outputs_of(model, x)[0])
        assert served_by_torch(log) == []
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert ours is not theirs
        restore(other)
        untouched = make()
        assert [type(each) for each in other.modules()] == [type(each) for each in untouched.modules()]


def test_state_dicts_of_both_fit_both():
    model, other = official(), official()
    with torch.no_grad():
        for each in other.parameters():
            if each.ndim:
                each.mul_(1.5)
    accelerate(model)
    model.load_state_dict(other.state_dict())
    x = randn(SEQUENCES, TOKENS, D)
    torch.testing.assert_close(model(x), other(x), rtol=1e-4, atol=1e-4)
    other.load_state_dict(model.state_dict())


def test_other_dtypes():
    model = official().eval()
    x = randn(SEQUENCES, TOKENS, D)
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
    model = official(norm=norm).bfloat16()
    for each in model.modules():
        if isinstance(each, (nn.BatchNorm1d, nn.LayerNorm)):
            each.float()
    untouched = copy.deepcopy(model)
    assert accelerate(model).kept == ()
    x = randn(SEQUENCES, TOKENS, D).bfloat16()
    assert {*reasons_of(model, x)} == {"its norms are float32, its input bfloat16"}
    untouched(x)  # running statistics
    assert_bitwise_equal(model(x), untouched(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert reasons_of(model, x) == []


def test_a_precision_of_float32_alone():
    model = official().eval()
    accelerate(model, precision="ieee")
    assert reasons_of(model.bfloat16(), randn(SEQUENCES, TOKENS, D).bfloat16()) == []


def test_compiled():
    model = official(1)
    expected = copy.deepcopy(model)
    accelerate(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = randn(SEQUENCES, TOKENS, D)
    for each in (compiled, expected):
        each(x).sin().mean().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-4)


def test_hugging_face_s_compiled():
    model = huggingface(num_hidden_layers=1).eval()
    x = randn(5, LENGTH, CHANNELS)
    expected = outputs_of(model, x)[0]
    accelerate(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(outputs_of(compiled, x)[0], expected, rtol=1e-4, atol=1e-4)


def test_compiled_code_follows_a_change_of_class(monkeypatch):
    layer = official(1).layers[0].eval()
    compiled = torch.compile(layer, backend="eager")
    x = randn(SEQUENCES, TOKENS, D)
    compiled(x)
    accelerate(layer)
    assert len(encoder_calls(compiled, x, monkeypatch)) == 1
    restore(layer)
    assert len(encoder_calls(compiled, x, monkeypatch)) == 0


def test_data_parallel_gradients():
    model = official()
    expected = copy.deepcopy(model)
    accelerate(model)
    x = randn(SEQUENCES, TOKENS, D)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        DistributedDataParallel(model)(x).square().mean().backward()
    finally:
        distributed.destroy_process_group()
    expected(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_swap_leaves_its_linears(monkeypatch):
    model = nn.Sequential(official(), nn.Linear(D, D))
    accelerate(model)
    assert isogemm.nn.swap(model).swapped == ("1",)
    x = randn(SEQUENCES, TOKENS, D)
    assert len(encoder_calls(model, x, monkeypatch)) == 2


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("make", [official, huggingface])
def test_swapped_before(make, fold, monkeypatch):
    """Layers of isogemm.nn.Linear, with the activation folded into one or not, compute the same."""
    model = make().train()
    untouched = copy.deepcopy(model)
    isogemm.nn.swap(model, fold=fold)
    swapped = state_of(model)
    assert len(accelerate(model).swapped) == 2
    x = randn(SEQUENCES, TOKENS, D) if make is official else randn(5, LENGTH, CHANNELS)
    assert reasons_of(model, x) == []
    outputs_of(untouched, x)  # running statistics
    for training in (True, False):
        ours, theirs = (outputs_of(each.train(training), x)[0] for each in (model, untouched))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    ours.sum().backward()
    theirs.sum().backward()
    for mine, exact in zip(model.parameters(), untouched.parameters(), strict=True):
        if exact.grad is not None:
            torch.testing.assert_close(mine.grad, exact.grad, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match=r"accelerated layer: isogemm\.integrations\.patchtst\.restore comes first"):
        isogemm.nn.restore(model)
    restore(model)
    assert state_of(model) == swapped
    isogemm.nn.restore(model)
    assert state_of(model) == state_of(untouched)


def test_linears_that_change_after_being_folded():
    model = official(1).eval()
    isogemm.nn.swap(model)
    accelerate(model)
    x = randn(SEQUENCES, TOKENS, D)
    ff = model.layers[0].ff
    ff[0].activation = "relu"
    assert reasons_of(model, x) == ["its activation was changed"]
    ff[0].activation = None
    assert reasons_of(model, x) == ["ff.0 lacks the activation that was folded into it"]
