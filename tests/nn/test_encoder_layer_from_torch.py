"""isogemm.nn.EncoderLayer made of torch's layer, and what it refuses."""

import pytest
import torch
from encoder_layers import F_, HEADS, TOKENS, D, call_function, make_input, make_layer, make_torch_layer
from torch.nn import LayerNorm, ReLU, RMSNorm, TransformerEncoderLayer
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from isogemm.nn import EncoderLayer
from isogemm.verify.compare import assert_bitwise_equal


def test_a_torch_layer_with_batch_norms_is_another():
    theirs = make_torch_layer()
    theirs.norm1, theirs.norm2 = torch.nn.BatchNorm1d(D), torch.nn.BatchNorm1d(D)
    with pytest.raises(ValueError, match="norm1 is a BatchNorm1d, which there takes the tokens for its features"):
        EncoderLayer.from_torch(theirs)


def test_from_torch_shares_all():
    theirs = make_torch_layer().eval()
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
    theirs, seen = make_torch_layer(), []
    handle = theirs.register_forward_hook(lambda module, args, output: seen.append(module))
    ours = EncoderLayer.from_torch(theirs)
    ours(make_input())
    assert seen == [ours]
    handle.remove()
    ours(make_input())
    assert seen == [ours]


def test_from_torch_makes_the_class_it_is_called_on():
    class Named(EncoderLayer):
        pass

    ours = Named.from_torch(make_torch_layer(), precision="tf32")
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
        layer = make_torch_layer()
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
    layer = make_layer()
    layer._modules.update(changed._modules)
    with pytest.raises(RuntimeError, match=f"this EncoderLayer does not call its submodules, but .*{reason}"):
        layer(make_input())


def test_hooks_of_an_activation():
    theirs = make_torch_layer(activation=ReLU())
    ours = EncoderLayer.from_torch(theirs)
    theirs.activation.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="activation has hooks"):
        EncoderLayer.from_torch(theirs)
    with pytest.raises(RuntimeError, match="activation has hooks"):
        ours(make_input())


@pytest.mark.parametrize("name", [name for name, _ in make_torch_layer(activation=ReLU()).named_modules() if name])
def test_hooks_of_every_submodule(name):
    """Raise, self_attn.out_proj's too, although torch itself reads its weight without calling it."""
    theirs = make_torch_layer(activation=ReLU())
    ours = EncoderLayer.from_torch(theirs)
    with theirs.get_submodule(name).register_forward_hook(lambda *args: None):
        with pytest.raises(ValueError, match=f"{name} has hooks"):
            EncoderLayer.from_torch(theirs)
        with pytest.raises(RuntimeError, match=f"{name} has hooks"):
            ours(make_input())
    ours(make_input())


def _flattened(layer):
    layer.linear1.weight._fsdp_flattened = True


def _lazy(layer):
    layer.linear1._parameters["weight"] = torch.nn.UninitializedParameter()


REFUSED = {
    "_Doubled has a forward of its own": lambda: make_layer(_Doubled),
    "_OtherFeedForward has a _ff_block of its own": lambda: make_layer(_OtherFeedForward),
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
    layer, x = make_layer(), make_input()
    parametrizations.weight_norm(layer.linear1)
    parametrizations.orthogonal(layer.self_attn.out_proj)
    result = layer(x)
    assert_bitwise_equal(result, call_function(layer, x))
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
