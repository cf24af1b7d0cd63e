"""isogemm.nn.EncoderLayer: a torch.nn.TransformerEncoderLayer in all but who computes."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from encoder_layers import F_, HEADS, LENGTHS, PADDED, D, call_function, make_input, make_layer, make_torch_layer, train
from tensor_cases import NEARBY
from torch.nn import GELU, ReLU, RMSNorm, SiLU, TransformerEncoderLayer
from torch.nn import functional as F

from isogemm.encoder.parameters import ACTIVATIONS
from isogemm.nn import EncoderLayer
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch

GIVEN = {
    "relu": ["relu", F.relu, torch.relu, ReLU(), ReLU(inplace=True)],
    "gelu": ["gelu", F.gelu, GELU(), functools.partial(F.gelu, approximate="none")],
    "gelu_tanh": ["gelu_tanh", functools.partial(F.gelu, approximate="tanh"), GELU("tanh")],
    "silu": ["silu", F.silu, SiLU(), SiLU(inplace=True)],
}
FORMS = [(name, form) for name, forms in GIVEN.items() for form in forms]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trains_as_torchs(dtype, norm_first, bias):
    theirs = make_torch_layer(norm_first=norm_first, bias=bias, dtype=dtype, activation="gelu")
    ours = EncoderLayer.from_torch(copy.deepcopy(theirs))
    wide = copy.deepcopy(theirs).double()
    found = [train(ours, dtype, src_key_padding_mask=PADDED)]
    torchs, exact = (
        [train(layer, of, near, src_key_padding_mask=PADDED) for near in (None, *range(NEARBY))]
        for layer, of in ((theirs, dtype), (wide, torch.float64))
    )
    found += [[each.to(dtype) for each in right] for right in exact[1:]]
    for results in zip(*(zip(*each, strict=True) for each in (found, torchs, exact)), strict=True):
        assert_no_worse_than_torch(*map(torch.stack, results))


@pytest.mark.parametrize(
    "options",
    [
        {"norm_first": True},
        {"activation": "gelu"},
        {"layer_norm_eps": 0.1},
        {"bias": False},
        {"norm": "rms_norm"},
        {"precision": "ieee"},
    ],
    ids=str,
)
def test_computes_isogemm_encoder_layer(options):
    layer, x = make_layer(**options), make_input()
    given = {name: value for name, value in options.items() if name not in ("bias", "layer_norm_eps")}
    if "layer_norm_eps" in options:
        given["eps"] = options["layer_norm_eps"]
    for masks in ({}, {"is_causal": True}):
        assert_bitwise_equal(layer(x, **masks), call_function(layer, x, **given, **masks))
    masked = call_function(layer, x, **given, key_padding_mask=PADDED)
    assert_bitwise_equal(layer(x, src_key_padding_mask=PADDED), masked)
    assert_bitwise_equal(layer(x[1], src_key_padding_mask=PADDED[1]), masked[1])
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_bitwise_equal(same(x, src_key_padding_mask=PADDED), masked)


def test_sequences_alone_and_together():
    layer, x = make_layer().requires_grad_(False), make_input()
    together = layer(x, src_key_padding_mask=PADDED)
    for index, length in enumerate(LENGTHS):
        alone = layer(x[index, :length])
        assert_bitwise_equal(together[index, :length], alone, f"sequence {index} alone")


def test_arguments_in_torchs_order():
    ours = inspect.signature(EncoderLayer).parameters
    theirs = inspect.signature(TransformerEncoderLayer).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {ours[name].kind for name in list(ours)[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY}
    changed = {name for name in theirs if ours[name].default != theirs[name].default}
    assert changed == {"batch_first"}
    calls = [list(inspect.signature(kind.forward).parameters) for kind in (EncoderLayer, TransformerEncoderLayer)]
    assert calls[0] == calls[1]


@pytest.mark.parametrize("bias", [True, False])
def test_is_torchs_layer_to_its_users(bias):
    ours, theirs = make_layer(bias=bias), make_torch_layer(bias=bias)
    assert isinstance(ours, TransformerEncoderLayer)
    for name, value in theirs.state_dict().items():
        assert_bitwise_equal(ours.state_dict()[name], value, f"initial {name}")
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]


def test_device_and_dtype():
    layer = EncoderLayer(D, HEADS, F_, 0.0, device="meta", dtype=torch.bfloat16, norm="rms_norm")
    assert {(value.device.type, value.dtype) for value in layer.parameters()} == {("meta", torch.bfloat16)}
    assert layer.to_empty(device="cpu")(make_input(dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_rms_norm():
    layer = make_layer(norm="rms_norm", layer_norm_eps=0.1)
    assert [type(norm) for norm in (layer.norm1, layer.norm2)] == [RMSNorm, RMSNorm]
    assert not any(name in layer.state_dict() for name in ("norm1.bias", "norm2.bias"))
    theirs = make_torch_layer()
    theirs.norm1, theirs.norm2 = layer.norm1, layer.norm2
    theirs.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(make_input()), theirs(make_input()))
    assert_bitwise_equal(EncoderLayer.from_torch(theirs)(make_input()), layer(make_input()))


@pytest.mark.parametrize(("name", "form"), FORMS, ids=[f"{name} {i}" for i, (name, _) in enumerate(FORMS)])
def test_every_form_of_an_activation(name, form):
    x = make_input()
    expected = make_layer(activation=name)(x)
    ours = make_layer(activation=form)
    for same in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_bitwise_equal(same(x), expected)
    if not isinstance(form, str):
        theirs = make_torch_layer(activation=form)
        assert_bitwise_equal(EncoderLayer.from_torch(theirs)(x), expected)
        torch.testing.assert_close(theirs(x), expected)
    assert f"activation={name}," in repr(ours)


def test_every_activation_is_tried():
    assert {*GIVEN} == {*ACTIVATIONS}


@pytest.mark.parametrize(
    "activation", ["mish", "tanh", F.tanh, GELU, lambda x: F.relu(x), torch.nn.PReLU(), torch.nn.Tanh(), None, 3]
)
def test_other_activations(activation):
    with pytest.raises(ValueError, match=r"activation is .*; accepted: relu, gelu, gelu_tanh, silu, or torch's"):
        EncoderLayer(D, HEADS, F_, activation=activation)
    if callable(activation):
        theirs = make_torch_layer(activation=activation)
        with pytest.raises(ValueError, match=r"its activation is .*, none of relu, gelu"):
            EncoderLayer.from_torch(theirs)


def test_an_activation_set_later():
    layer, x = make_layer(), make_input()
    layer.activation = F.silu
    assert_bitwise_equal(layer(x), make_layer(activation="silu")(x))
    with pytest.raises(ValueError, match=r"activation is .*accepted"):
        layer.activation = F.tanh
    assert_bitwise_equal(layer(x), make_layer(activation="silu")(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_first": False}, r"batch_first is False; expected True, and x of \[sequences, tokens, d_model\]"),
        ({"norm": "instance_norm"}, "norm is 'instance_norm'; accepted: layer_norm, rms_norm, batch_norm"),
        ({"precision": "fp8"}, "precision is 'fp8'; accepted: 'ieee'"),
    ],
)
def test_options_that_are_not_there(options, message):
    with pytest.raises(ValueError, match=message):
        EncoderLayer(D, HEADS, F_, **options)


def test_repr():
    layer = make_layer(norm_first=True, activation="gelu", precision="tf32")
    assert layer.extra_repr() == "nhead=4, activation=gelu, norm_first=True, precision=tf32"
    assert make_layer().extra_repr() == "nhead=4, activation=relu, norm_first=False"


@pytest.mark.parametrize("name", ["self_attn", "dropout", "dropout1", "dropout2"])
def test_dropout_drops_where_it_trains(name):
    layer, x = make_layer(), make_input()
    expected = layer(x)
    module = getattr(layer, name)
    setattr(module, "dropout" if name == "self_attn" else "p", 0.25)
    assert not torch.equal(layer(x), expected)
    module.eval()
    assert_bitwise_equal(layer(x), expected)
    module.train()
    assert_bitwise_equal(layer.eval()(x), expected)
    if name != "self_attn":
        setattr(layer, name, torch.nn.Identity())
        assert_bitwise_equal(layer.train()(x), expected)


def test_where_all_is_dropped_nothing_but_the_residual_is_left():
    """At each place, as torch's layer: with probability 1 no draw decides."""
    ours, theirs, x = make_layer(norm_first=True), make_torch_layer(norm_first=True), make_input()
    theirs.load_state_dict(ours.state_dict())
    for name in ("dropout1", "dropout", "dropout2"):
        for layer in (ours, theirs):
            getattr(layer, name).p = 1.0
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)
        for layer in (ours, theirs):
            getattr(layer, name).p = 0.0


def test_batch_norm():
    """Over all sequences and tokens, and by the running statistics in eval mode."""
    layer, x = make_layer(norm="batch_norm"), make_input()
    y = layer(x)
    rows = ((y - layer.norm2.bias) / layer.norm2.weight).detach().flatten(0, 1)
    torch.testing.assert_close(rows.mean(0), torch.zeros(D), rtol=0, atol=1e-5)
    torch.testing.assert_close(rows.var(0, unbiased=False), torch.ones(D), rtol=0, atol=1e-3)
    assert int(layer.norm2.num_batches_tracked) == 1
    before = {name: each.clone() for name, each in layer.state_dict().items()}
    layer.eval()
    assert_bitwise_equal(torch.cat([layer(one[None]) for one in x]), layer(x))
    assert all(torch.equal(each, before[name]) for name, each in layer.state_dict().items())
    layer.train()
    layer.norm1.eval()
    with pytest.raises(RuntimeError, match="norm1 and norm2 do not both take the batch's statistics"):
        layer(x)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("made", ["layer", "from_torch"])
def test_an_activation_module_s_options_are_followed(made, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    theirs = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation=torch.nn.GELU(), batch_first=True)
    ours = EncoderLayer.from_torch(theirs) if made == "from_torch" else EncoderLayer(8, 2, 16, 0.0, torch.nn.GELU())
    ours.load_state_dict(theirs.state_dict())
    run = torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours
    x = 4 * torch.randn(3, 5, 8)
    for approximate in ("none", "tanh", "none"):
        for layer in (ours, theirs):
            layer.activation.approximate = approximate
        torch.testing.assert_close(run(x), theirs(x), rtol=1e-6, atol=2e-6)
        assert f"activation={'gelu_tanh' if approximate == 'tanh' else 'gelu'}," in repr(ours)


def test_an_activation_module_that_becomes_unknown_raises():
    layer = EncoderLayer(8, 2, 16, 0.0, torch.nn.GELU())
    layer.activation.approximate = "cubic"
    with pytest.raises(RuntimeError, match="activation has become GELU"):
        layer(torch.randn(2, 3, 8))
