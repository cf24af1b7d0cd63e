"""isogemm.nn.restore: the model as it was before isogemm.nn.swap, with the weights it has now."""

import copy
import pickle

import pytest
import torch
from torch.nn import GELU, LeakyReLU, Linear, ReLU, Sequential, TransformerEncoder, TransformerEncoderLayer
from torch.nn.utils import parametrizations

import isogemm
from isogemm.nn import restore, swap
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

D = 8


class _Tied(torch.nn.Module):
    """Weights in two places, a module and an activation in two places, and hooks."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, D)
        relu = ReLU(inplace=True)
        self.net = Sequential(Linear(D, D), relu, Linear(D, D), relu, Linear(D, D))
        self.twin = self.net[4]
        self.head = Linear(D, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.seen = 0
        self.net[0].register_forward_pre_hook(self._see)

    def _see(self, module, args):
        self.seen += 1

    def forward(self, ids):
        return self.head(self.twin(self.net(self.embedding(ids))))


def _llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _stack():
    layer = TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True, activation="gelu")
    return Sequential(Linear(D, D), LeakyReLU(0.2), TransformerEncoder(layer, 2), Linear(D, D), GELU("tanh"))


IDS = torch.tensor([[1, 2, 3]])
MODELS = {  # the model, its input, what it gives
    "tied": (_Tied, IDS, lambda output: output),
    "llama": (_llama, IDS, lambda output: output.logits),
    "encoder stack": (_stack, make_data("normal", (2, 3, D), seed=0), lambda output: output),
}


def _state(model):
    """All that is there: names, types, attributes, flags, and which modules and tensors are the same ones."""
    first = {}
    modules = [
        (name, type(module), {*vars(module)}, module.training, first.setdefault(id(module), name), repr(module))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    encoders = [each.use_nested_tensor for each in model.modules() if isinstance(each, TransformerEncoder)]
    fast = [each.activation_relu_or_gelu for each in model.modules() if isinstance(each, TransformerEncoderLayer)]
    tensors = {name: id(each) for name, each in model.state_dict(keep_vars=True).items()}
    return modules, encoders, fast, tensors


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name):
    make, x, of = MODELS[name]
    torch.manual_seed(0)
    model = make()
    next(model.children()).eval()
    untouched, before = copy.deepcopy(model), _state(model)
    report = swap(model, precision="ieee")
    assert _state(model) != before
    assert list(model.state_dict()) == list(before[-1])
    assert restore(model) == report.swapped
    assert _state(model) == before
    assert_bitwise_equal(of(model(x)), of(untouched(x)))
    assert restore(model) == ()
    assert _state(model) == before


def test_training_goes_on():
    """The optimizer's parameters, the hooks, and the modes that were set in between."""
    torch.manual_seed(0)
    model = _Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(IDS).square().mean().backward()
        optimizer.step()

    step()
    swap(model)
    assert "FoldedActivation(ReLU(inplace=True))" in repr(model).replace("\n", "").replace("  ", "")
    step()
    swapped = model.eval()(IDS)
    late = []
    model.net[2].register_forward_hook(lambda module, args, output: late.append(module))
    restore(model)
    assert not any(module.training for module in model.modules())
    torch.testing.assert_close(model(IDS), swapped)
    assert (model.seen, late) == (4, [model.net[2]])
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    step()
    for name, each in model.named_parameters():
        assert not torch.equal(each, weights[name]), name
    assert model.head.weight is model.embedding.weight


def test_copies_and_pickles():
    model = _stack()
    swap(model)
    x = make_data("normal", (2, 3, D), seed=0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        restore(other)
        assert repr(other) == repr(_stack())
        torch.testing.assert_close(other(x), model(x))
    assert type(model[0]) is isogemm.nn.Linear


def test_what_swap_did_not_make_stays():
    ours = Sequential(isogemm.nn.Linear(D, D, activation="relu"), isogemm.nn.MLP(D, D), isogemm.nn.EncoderLayer(D, 2))
    model = Sequential(ours, Linear(D, D))
    swap(model)
    modules = [*ours]
    assert restore(model) == ("1",)
    assert [*model[0]] == modules
    assert model[0][0].activation == "relu"


def test_what_was_made_from_swapped_modules_stays():
    swapped = Sequential(Linear(D, D), Linear(D, D), TransformerEncoderLayer(D, 2, 16, batch_first=True))
    swap(swapped)
    up, down, layer = swapped
    ours = [
        isogemm.nn.MLP.from_linears(up, down, activation="gelu"),
        isogemm.nn.Linear.from_torch(up, activation="relu"),
    ]
    model = Sequential(*ours, isogemm.nn.EncoderLayer.from_torch(layer))
    modules = list(model.modules())
    assert restore(model) == ()
    assert list(model.modules()) == modules
    assert restore(swapped) == ("0", "1", "2")


def test_activations_that_changed_since():
    model = Sequential(TransformerEncoderLayer(D, 2, 16, batch_first=True))
    swap(model)
    model[0].activation = torch.nn.functional.gelu
    restore(model)
    assert (model[0].activation, model[0].activation_relu_or_gelu) == (torch.nn.functional.gelu, 2)


BROKEN = {  # what happened to a swapped Sequential of Linear, ReLU, Linear
    "0 cannot be restored: it has become a ParametrizedLinear: undo that first": (
        lambda model: parametrizations.weight_norm(model[0])
    ),
    "2 cannot be restored: its forward was replaced on the instance": (
        lambda model: setattr(model[2], "forward", model[2].forward)
    ),
    "2 cannot be restored: it is compiled": lambda model: model[2].compile(backend="eager"),
    "0 cannot be restored: its folded activation's place is no longer after it": (
        lambda model: model.__setitem__(1, torch.nn.Identity())
    ),
    r"FoldedActivation\(ReLU\(\)\) cannot be restored: the linear that computes it": (
        lambda model: model.__setitem__(0, Linear(D, D))
    ),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_what_cannot_be_restored_changes_nothing(reason):
    model = Sequential(Linear(D, D), ReLU(), Linear(D, D))
    swap(model)
    BROKEN[reason](model)
    modules = [*model]
    with pytest.raises(RuntimeError, match=reason):
        restore(model)
    assert [*model] == modules


def test_a_swapped_layer_itself():
    model = Sequential(Linear(D, D))
    swap(model)
    with pytest.raises(ValueError, match="model is itself a swapped Linear"):
        restore(model[0])
    assert restore(isogemm.nn.Linear(D, D)) == ()


def test_what_was_put_on_a_folded_activation_stays():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    activation = model[1]
    swap(model)
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append("forward"))
    handle = model[1].register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    model[1].label = "kept"
    restore(model)
    assert model[1] is activation
    assert activation.label == "kept"
    model(torch.randn(2, 4)).sum().backward()
    assert seen == ["forward", "backward"]
    handle.remove()
    model(torch.randn(2, 4)).sum().backward()
    assert seen == ["forward", "backward", "forward"]


def test_modules_of_an_earlier_pickle_are_not_swapped_ones():
    model = torch.nn.Sequential(isogemm.nn.Linear(4, 4))
    model[0].__dict__.pop("is_swapped", None)
    assert restore(model) == ()


def test_an_activation_in_two_places_keeps_its_hooks_and_mode():
    """One stand-in for both, as the activation was one."""
    torch.manual_seed(0)
    activation, called = torch.nn.ReLU(), []
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), activation, torch.nn.Linear(8, 8), activation)
    assert len(swap(model).folded) == 2
    assert model[1] is model[3]
    model[1].register_full_backward_hook(lambda *args: called.append(1))
    model[1].eval()
    for _ in range(2):
        model(torch.randn(3, 8)).sum().backward()
        assert len(called) == 2
        called.clear()
        restore(model)
    assert model[1] is model[3] is activation
    assert not activation.training


@pytest.mark.parametrize(
    ("activation", "option", "value"),
    [(torch.nn.LeakyReLU(0.1), "negative_slope", 0.9), (torch.nn.GELU(), "approximate", "tanh")],
)
def test_options_of_a_folded_activation_are_refused(activation, option, value):
    """They would have no effect: the linear computes it."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), activation)
    before = getattr(activation, option)
    swap(model)
    assert getattr(model[1], option) == before
    with pytest.raises(AttributeError, match=rf"{option} was folded into .*; call isogemm\.nn\.restore first"):
        setattr(model[1], option, value)
    copy.deepcopy(model).eval()
    restore(model)
    setattr(model[1], option, value)
    assert getattr(activation, option) == value


def test_a_folded_activation_takes_what_has_no_effect_on_it():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LeakyReLU(0.1))
    for module in model.modules():
        module.name = "before"
    swap(model)
    for module in model.modules():
        module.name = "after"
    model[1].inplace, model[1].negative_slope, model[1].note = True, 0.1, "mine"
    restore(model)
    assert (model[1].inplace, model[1].name, model[1].note) == (True, "after", "mine")
