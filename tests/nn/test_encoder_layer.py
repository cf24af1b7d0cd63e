"""isogemm.nn.EncoderLayer: a torch.nn.TransformerEncoderLayer in all but who computes."""

import copy
import functools
import inspect
import pickle
import warnings

import pytest
import torch
from ranks import run_ranks
from tensor_cases import NEARBY, nearby
from torch.nn import GELU, LayerNorm, ReLU, RMSNorm, SiLU, TransformerEncoder, TransformerEncoderLayer
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.encoder.api import encoder_layer
from isogemm.encoder.parameters import ACTIVATIONS, EncoderParameters
from isogemm.nn import EncoderLayer
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

SEQUENCES, TOKENS, D, HEADS, F_ = 5, 7, 16, 4, 24
LENGTHS = torch.tensor([7, 3, 1, 7, 5])
PADDED = torch.arange(TOKENS) >= LENGTHS[:, None]

GIVEN = {
    "relu": ["relu", F.relu, torch.relu, ReLU(), ReLU(inplace=True)],
    "gelu": ["gelu", F.gelu, GELU(), functools.partial(F.gelu, approximate="none")],
    "gelu_tanh": ["gelu_tanh", functools.partial(F.gelu, approximate="tanh"), GELU("tanh")],
    "silu": ["silu", F.silu, SiLU(), SiLU(inplace=True)],
}
FORMS = [(name, form) for name, forms in GIVEN.items() for form in forms]


def _layer(kind=EncoderLayer, dropout=0.0, **options):
    """With parameters that are none of the neutral ones that biases and norms start from."""
    torch.manual_seed(0)
    layer = kind(D, HEADS, F_, dropout, **({"batch_first": True} | options))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return layer


def _torchs(**options):
    return _layer(TransformerEncoderLayer, **options)


def _input(sequences=SEQUENCES, tokens=TOKENS, dtype=torch.float32, seed=0):
    return make_data("normal", (sequences, tokens, D), seed=seed, dtype=dtype)


def _called(layer, x, **options):
    """isogemm.encoder_layer with the layer's parameters."""
    norms = (layer.norm1, layer.norm2)
    params = EncoderParameters(
        layer.self_attn.in_proj_weight, layer.self_attn.out_proj.weight, layer.linear1.weight, layer.linear2.weight,
        *(norm.weight for norm in norms), layer.self_attn.in_proj_bias, layer.self_attn.out_proj.bias,
        layer.linear1.bias, layer.linear2.bias, *(getattr(norm, "bias", None) for norm in norms),
    )  # fmt: skip
    return encoder_layer(x, params, nhead=HEADS, **options)


def _trained(layer, dtype=torch.float32, near=None, **masks):
    """The result and the gradients of x and the parameters, all of the unpadded tokens alone."""
    x = _input() if near is None else nearby(_input(), near)
    x = x.to(dtype).requires_grad_()
    layer.zero_grad()
    result = layer(x, **masks).masked_fill(PADDED[..., None], 0)
    result.backward(_input(seed=1).to(dtype))
    return [result.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trains_as_torchs(dtype, norm_first, bias):
    theirs = _torchs(norm_first=norm_first, bias=bias, dtype=dtype, activation="gelu")
    ours = EncoderLayer.from_torch(copy.deepcopy(theirs))
    wide = copy.deepcopy(theirs).double()
    found = [_trained(ours, dtype, src_key_padding_mask=PADDED)]
    torchs, exact = (
        [_trained(layer, of, near, src_key_padding_mask=PADDED) for near in (None, *range(NEARBY))]
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
    layer, x = _layer(**options), _input()
    given = {name: value for name, value in options.items() if name not in ("bias", "layer_norm_eps")}
    if "layer_norm_eps" in options:
        given["eps"] = options["layer_norm_eps"]
    for masks in ({}, {"is_causal": True}):
        assert_bitwise_equal(layer(x, **masks), _called(layer, x, **given, **masks))
    masked = _called(layer, x, **given, key_padding_mask=PADDED)
    assert_bitwise_equal(layer(x, src_key_padding_mask=PADDED), masked)
    assert_bitwise_equal(layer(x[1], src_key_padding_mask=PADDED[1]), masked[1])
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_bitwise_equal(same(x, src_key_padding_mask=PADDED), masked)


def test_sequences_alone_and_together():
    layer, x = _layer().requires_grad_(False), _input()
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
    ours, theirs = _layer(bias=bias), _torchs(bias=bias)
    assert isinstance(ours, TransformerEncoderLayer)
    for name, value in theirs.state_dict().items():
        assert_bitwise_equal(ours.state_dict()[name], value, f"initial {name}")
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]


def test_device_and_dtype():
    layer = EncoderLayer(D, HEADS, F_, 0.0, device="meta", dtype=torch.bfloat16, norm="rms_norm")
    assert {(value.device.type, value.dtype) for value in layer.parameters()} == {("meta", torch.bfloat16)}
    assert layer.to_empty(device="cpu")(_input(dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_rms_norm():
    layer = _layer(norm="rms_norm", layer_norm_eps=0.1)
    assert [type(norm) for norm in (layer.norm1, layer.norm2)] == [RMSNorm, RMSNorm]
    assert not any(name in layer.state_dict() for name in ("norm1.bias", "norm2.bias"))
    theirs = _torchs()
    theirs.norm1, theirs.norm2 = layer.norm1, layer.norm2
    theirs.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(_input()), theirs(_input()))
    assert_bitwise_equal(EncoderLayer.from_torch(theirs)(_input()), layer(_input()))


@pytest.mark.parametrize(("name", "form"), FORMS, ids=[f"{name} {i}" for i, (name, _) in enumerate(FORMS)])
def test_every_form_of_an_activation(name, form):
    x = _input()
    expected = _layer(activation=name)(x)
    ours = _layer(activation=form)
    for same in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_bitwise_equal(same(x), expected)
    if not isinstance(form, str):
        theirs = _torchs(activation=form)
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
        theirs = _torchs(activation=activation)
        with pytest.raises(ValueError, match=r"its activation is .*, none of relu, gelu"):
            EncoderLayer.from_torch(theirs)


def test_an_activation_set_later():
    layer, x = _layer(), _input()
    layer.activation = F.silu
    assert_bitwise_equal(layer(x), _layer(activation="silu")(x))
    with pytest.raises(ValueError, match=r"activation is .*accepted"):
        layer.activation = F.tanh
    assert_bitwise_equal(layer(x), _layer(activation="silu")(x))


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
    layer = _layer(norm_first=True, activation="gelu", precision="tf32")
    assert layer.extra_repr() == "nhead=4, activation=gelu, norm_first=True, precision=tf32"
    assert _layer().extra_repr() == "nhead=4, activation=relu, norm_first=False"


@pytest.mark.parametrize("name", ["self_attn", "dropout", "dropout1", "dropout2"])
def test_dropout_drops_where_it_trains(name):
    layer, x = _layer(), _input()
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
    ours, theirs, x = _layer(norm_first=True), _torchs(norm_first=True), _input()
    theirs.load_state_dict(ours.state_dict())
    for name in ("dropout1", "dropout", "dropout2"):
        for layer in (ours, theirs):
            getattr(layer, name).p = 1.0
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)
        for layer in (ours, theirs):
            getattr(layer, name).p = 0.0


def test_batch_norm():
    """Over all sequences and tokens, and by the running statistics in eval mode."""
    layer, x = _layer(norm="batch_norm"), _input()
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


def test_a_torch_layer_with_batch_norms_is_another():
    theirs = _torchs()
    theirs.norm1, theirs.norm2 = torch.nn.BatchNorm1d(D), torch.nn.BatchNorm1d(D)
    with pytest.raises(ValueError, match="norm1 is a BatchNorm1d, which there takes the tokens for its features"):
        EncoderLayer.from_torch(theirs)


def test_from_torch_shares_all():
    theirs = _torchs().eval()
    theirs.linear1.requires_grad_(False)
    theirs.linear2.weight = theirs.self_attn.in_proj_weight  # tied, be the sizes as they may
    theirs.note = object()
    ours = EncoderLayer.from_torch(theirs, precision="tf32")
    assert {name: id(value) for name, value in ours.named_parameters(remove_duplicate=False)} == {
        name: id(value) for name, value in theirs.named_parameters(remove_duplicate=False)
    }
    assert (ours.training, ours.note, ours.precision) == (False, theirs.note, "tf32")
    ours.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    assert not hasattr(theirs, "extra")
    assert theirs.activation_relu_or_gelu == 1


def test_from_torch_keeps_its_hooks_and_their_handles():
    theirs, seen = _torchs(), []
    handle = theirs.register_forward_hook(lambda module, args, output: seen.append(module))
    ours = EncoderLayer.from_torch(theirs)
    ours(_input())
    assert seen == [ours]
    handle.remove()
    ours(_input())
    assert seen == [ours]


def test_from_torch_makes_the_class_it_is_called_on():
    class Named(EncoderLayer):
        pass

    ours = Named.from_torch(_torchs(), precision="tf32")
    assert type(ours) is Named
    again = EncoderLayer.from_torch(ours)
    assert (type(again), again.precision) == (EncoderLayer, None)


def test_from_torch_takes_encoder_layers_alone():
    with pytest.raises(TypeError, match="layer is a TransformerDecoderLayer; expected a"):
        EncoderLayer.from_torch(torch.nn.TransformerDecoderLayer(D, HEADS))


class _Doubled(TransformerEncoderLayer):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


class _OtherFeedForward(TransformerEncoderLayer):
    def _ff_block(self, x):
        return x


class _OtherLinear(torch.nn.Linear):
    def forward(self, input):
        return input


def _with(change):
    def made():
        layer = _torchs()
        change(layer)
        return layer

    return made


def _attention(**options):
    return _with(lambda layer: setattr(layer, "self_attn", torch.nn.MultiheadAttention(D, HEADS, **options)))


# In the layer's submodules: at from_torch and, where they come later, at the call.
UNLIKE = {
    "linear1 has hooks": _with(lambda layer: layer.linear1.register_forward_hook(lambda *args: None)),
    "norm2 has hooks": _with(lambda layer: layer.norm2.register_forward_pre_hook(lambda *args: None)),
    "self_attn has hooks": _with(lambda layer: layer.self_attn.register_full_backward_hook(lambda *args: None)),
    "linear2 is a _OtherLinear with a forward": _with(lambda layer: setattr(layer, "linear2", _OtherLinear(F_, D))),
    "linear1 is a Linear with a forward": _with(lambda layer: setattr(layer.linear1, "forward", F.relu)),
    "dropout1 is a AlphaDropout": _with(lambda layer: setattr(layer, "dropout1", torch.nn.AlphaDropout(0.0))),
    "norm1 is a GroupNorm": _with(lambda layer: setattr(layer, "norm1", torch.nn.GroupNorm(1, D))),
    "norm1 and norm2 are not of one kind": _with(lambda layer: setattr(layer, "norm1", RMSNorm(D, 1e-5))),
    "norm1 and norm2 .* eps": _with(lambda layer: setattr(layer.norm1, "eps", 0.1)),
    "norm1 has no eps": _with(lambda layer: layer.__dict__["_modules"].update(norm1=RMSNorm(D), norm2=RMSNorm(D))),
    "normalizes other dimensions": _with(lambda layer: setattr(layer, "norm2", LayerNorm((TOKENS, D)))),
    "self_attn is batch_first=False": _attention(),
    "keys or values of another size": _attention(batch_first=True, kdim=D + 1),
    "keys that are no tokens .*add_bias_kv": _attention(batch_first=True, add_bias_kv=True),
    "keys that are no tokens .*add_zero_attn": _attention(batch_first=True, add_zero_attn=True),
}


@pytest.mark.parametrize("reason", UNLIKE)
def test_what_its_submodules_would_have_to_compute(reason):
    changed = UNLIKE[reason]()
    with pytest.raises(ValueError, match=f"layer cannot become an isogemm.nn.EncoderLayer: .*{reason}"):
        EncoderLayer.from_torch(changed)
    layer = _layer()
    layer._modules.update(changed._modules)
    with pytest.raises(RuntimeError, match=f"this EncoderLayer computes past its submodules, but .*{reason}"):
        layer(_input())


def test_hooks_of_an_activation():
    theirs = _torchs(activation=ReLU())
    ours = EncoderLayer.from_torch(theirs)
    theirs.activation.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="activation has hooks"):
        EncoderLayer.from_torch(theirs)
    with pytest.raises(RuntimeError, match="activation has hooks"):
        ours(_input())


@pytest.mark.parametrize("name", [name for name, _ in _torchs(activation=ReLU()).named_modules() if name])
def test_hooks_of_every_submodule(name):
    """Raise, self_attn.out_proj's too, although torch itself reads its weight without calling it."""
    theirs = _torchs(activation=ReLU())
    ours = EncoderLayer.from_torch(theirs)
    with theirs.get_submodule(name).register_forward_hook(lambda *args: None):
        with pytest.raises(ValueError, match=f"{name} has hooks"):
            EncoderLayer.from_torch(theirs)
        with pytest.raises(RuntimeError, match=f"{name} has hooks"):
            ours(_input())
    ours(_input())


def _flattened(layer):
    layer.linear1.weight._fsdp_flattened = True


def _lazy(layer):
    layer.linear1._parameters["weight"] = torch.nn.UninitializedParameter()


REFUSED = {
    "_Doubled has a forward of its own": lambda: _layer(_Doubled),
    "_OtherFeedForward has a _ff_block of its own": lambda: _layer(_OtherFeedForward),
    "its forward was replaced": _with(lambda layer: setattr(layer, "forward", F.relu)),
    "it is compiled": _with(lambda layer: layer.compile(backend="eager")),
    "load_state_dict pre-hook": _with(lambda layer: layer.register_load_state_dict_pre_hook(lambda *args: None)),
    "linear1: its weight is made from": _with(lambda layer: parametrizations.weight_norm(layer.linear1)),
    "out_proj: its bias is made from": _with(lambda layer: prune.identity(layer.self_attn.out_proj, "bias")),
    "self_attn: its in_proj_weight is made": _with(lambda layer: prune.identity(layer.self_attn, "in_proj_weight")),
    "norm1: its bias is made from": _with(lambda layer: prune.identity(layer.norm1, "bias")),
    "linear1: its weight is a Parameter of a sharded": _with(_flattened),
    "linear1: its weight is a UninitializedParameter": _with(_lazy),
    "self_attn: its dtype is torch.complex64": lambda: TransformerEncoderLayer(
        D, HEADS, F_, 0.0, batch_first=True, bias=False
    ).to(torch.complex64),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_from_torch_refuses_what_it_could_not_repeat(reason):
    # A pruned module has a pre-hook, by which it is refused first; without that its parameters speak.
    layer = REFUSED[reason]()
    for module in layer.modules():
        module._forward_pre_hooks.clear()
    with pytest.raises(ValueError, match=f"layer cannot become an isogemm.nn.EncoderLayer: .*{reason}"):
        EncoderLayer.from_torch(layer)


def test_parametrized_afterwards():
    layer, x = _layer(), _input()
    parametrizations.weight_norm(layer.linear1)
    parametrizations.orthogonal(layer.self_attn.out_proj)
    result = layer(x)
    assert_bitwise_equal(result, _called(layer, x))
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_masks():
    layer, theirs, x = _layer(), _torchs(), _input()
    causal = torch.nn.Transformer.generate_square_subsequent_mask(TOKENS)
    expected = layer(x, is_causal=True)
    torch.testing.assert_close(expected, theirs(x, causal, is_causal=True))
    for mask in (causal, causal.isinf()):
        assert_bitwise_equal(layer(x, mask, is_causal=True), expected)
        with pytest.raises(ValueError, match=r"src_mask comes without is_causal=True; .*the causal one alone"):
            layer(x, mask)
    padding = torch.zeros(PADDED.shape).masked_fill_(PADDED, -torch.inf)
    assert_bitwise_equal(
        layer(x, src_key_padding_mask=padding)[~PADDED], layer(x, src_key_padding_mask=PADDED)[~PADDED]
    )
    additive = make_data("normal", PADDED.shape, seed=2)
    torch.testing.assert_close(layer(x, src_key_padding_mask=additive), theirs(x, src_key_padding_mask=additive))
    torch.testing.assert_close(
        layer(x, causal, PADDED, True)[~PADDED], theirs(x, causal.isinf(), PADDED, True)[~PADDED]
    )


def test_a_nested_tensor():
    nested = torch.nested.nested_tensor([torch.zeros(3, D), torch.zeros(2, D)])
    with pytest.raises(ValueError, match=r"src is a NestedTensor; .*set its use_nested_tensor to False"):
        _layer()(nested)


def _stack(layer, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")
        return TransformerEncoder(layer, 2, LayerNorm(D), **options)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("mask", [None, PADDED, PADDED.flip(1)], ids=["unpadded", "padded right", "padded left"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_in_a_stack(training, norm_first, mask, nested):
    """With torch's nested tensors asked for or not: the layers see none."""
    options = {"norm_first": norm_first, "activation": "gelu"}
    ours = _stack(_layer(**options), enable_nested_tensor=nested, mask_check=nested).train(training)
    theirs = _stack(_torchs(**options), enable_nested_tensor=False).train(training)
    theirs.load_state_dict(ours.state_dict())
    assert not ours.use_nested_tensor
    x = _input()
    seen = slice(None) if mask is None else ~mask
    with torch.set_grad_enabled(training), isogemm.dispatch_log() as log:
        result = ours(x, src_key_padding_mask=mask)
    assert [entry.op for entry in log].count("encoder_layer") == 2
    torch.testing.assert_close(result[seen], theirs(x, src_key_padding_mask=mask)[seen])


def test_put_into_torchs_stack_by_hand():
    stack = TransformerEncoder(_torchs(), 2).eval()
    stack.layers[0] = EncoderLayer.from_torch(stack.layers[0])
    with torch.no_grad(), pytest.raises(ValueError, match="set its use_nested_tensor to False"):
        stack(_input(), src_key_padding_mask=PADDED)
    stack.use_nested_tensor = False
    stack(_input(), src_key_padding_mask=PADDED)


def test_in_a_stack_with_a_causal_mask():
    ours, theirs = _stack(_layer()), _stack(_torchs())
    theirs.load_state_dict(ours.state_dict())
    causal, x = torch.nn.Transformer.generate_square_subsequent_mask(TOKENS), _input()
    torch.testing.assert_close(ours(x, causal), theirs(x, causal))
    torch.testing.assert_close(ours(x, causal, is_causal=True), theirs(x, causal))
    torch.testing.assert_close(ours(x[0], causal), theirs(x[0], causal))
    with pytest.raises(ValueError, match="src_mask comes without is_causal=True"):
        ours(x, causal.roll(1, 0))


def test_in_torchs_transformer():
    ours = torch.nn.Transformer(D, HEADS, 1, 1, F_, 0.0, batch_first=True)
    theirs = copy.deepcopy(ours)
    report = isogemm.nn.swap(ours)
    assert "encoder.layers.0" in report.swapped
    x = _input()
    torch.testing.assert_close(ours(x, x), theirs(x, x))


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": GELU("tanh"), "bias": False}], ids=str)
def test_compiled(options):
    torch._dynamo.reset()
    layer = _layer(**options)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    masks = {"src_key_padding_mask": PADDED}
    for eager, traced in zip(_trained(layer, **masks), _trained(compiled, **masks), strict=True):
        assert_bitwise_equal(traced, eager)


def test_a_stack_compiled():
    torch._dynamo.reset()
    stack = _stack(_layer())
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    masks = {"src_key_padding_mask": PADDED}
    for eager, traced in zip(_trained(stack, **masks), _trained(compiled, **masks), strict=True):
        assert_bitwise_equal(traced, eager)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant):
    layer = _layer()

    def recomputed(x, **masks):
        return checkpoint(lambda x: layer(x, **masks), x, use_reentrant=reentrant)

    recomputed.zero_grad, recomputed.parameters = layer.zero_grad, layer.parameters
    masks = {"src_key_padding_mask": PADDED}
    for kept, again in zip(_trained(layer, **masks), _trained(recomputed, **masks), strict=True):
        assert_bitwise_equal(again, kept)


def test_under_autocast():
    layer, x = _layer(), _input()
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(x)
        assert_bitwise_equal(result, _called(layer, x))
    assert result.dtype == torch.float32
    result.sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


def test_main_grad():
    layer, x = _layer(), _input()
    layer(x).sum().backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    layer(x).sum().backward()
    for parameter, grad in zip(layer.parameters(), expected, strict=True):
        assert parameter.grad is None
        assert_bitwise_equal(parameter.main_grad, grad)


PROGRAM = """
from torch.nn.parallel import DistributedDataParallel

import isogemm


def stack():
    torch.manual_seed(0)
    layers = (isogemm.nn.EncoderLayer(16, 4, 24, 0.0, norm_first=first) for first in (True, False))
    return torch.nn.Sequential(*layers)


def gradients(model, x):
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


batches = [torch.randn(5, 7, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
alone = [gradients(stack(), x) for x in batches]
for static_graph in (False, True):
    parallel = DistributedDataParallel(stack(), static_graph=static_graph)
    for step in range(2):
        for got, first, second in zip(gradients(parallel, batches[rank]), *alone, strict=True):
            assert torch.equal(got, first / 2 + second / 2), (rank, static_graph, step)
"""


def test_gradients_under_ddp_are_the_mean(tmp_path):
    run_ranks(PROGRAM, tmp_path)


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
