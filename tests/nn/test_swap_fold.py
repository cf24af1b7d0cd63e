"""isogemm.nn.swap: activations folded into the linears before them."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch.nn import ELU, GELU, Identity, LeakyReLU, ReLU, Sequential, Sigmoid, SiLU, Tanh

import isogemm
from isogemm.nn import Folded, FoldedActivation, Linear, Unfolded, swap
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

ACTIVATIONS = {
    "relu": [ReLU(), ReLU(inplace=True)],
    "gelu": [GELU()],
    "gelu_tanh": [GELU("tanh")],
    "silu": [SiLU(), SiLU(inplace=True)],
    "tanh": [Tanh()],
    "sigmoid": [Sigmoid()],
    "leaky_relu(negative_slope=0.2)": [LeakyReLU(0.2), LeakyReLU(0.2, inplace=True)],
}
CASES = [(epilogue, module) for epilogue, modules in ACTIVATIONS.items() for module in modules]


def _linear(features=8):
    return torch.nn.Linear(features, features)


def _trained(model, dtype=torch.float32):
    """The result and the gradients of x and the parameters."""
    x, grad = (make_data("normal", (17, 8), seed=seed, dtype=torch.float32).to(dtype) for seed in (0, 1))
    model.zero_grad()
    result = model(x.requires_grad_())
    result.backward(grad)
    return [result.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


def _unfolded(model, **options):
    """The reason of the only candidate, which stays as it was."""
    before = {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}
    report = swap(model, **options)
    after = {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}
    assert report.folded == ()
    assert after == {name: Linear if kind is torch.nn.Linear else kind for name, kind in before.items()}
    assert all(module.activation is None for module in model.modules() if isinstance(module, Linear))
    [reason] = {each.reason for each in report.unfolded}
    return reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("epilogue", "activation"), CASES, ids=str)
def test_every_activation(epilogue, activation, dtype):
    torch.manual_seed(0)
    theirs = Sequential(_linear(), copy.deepcopy(activation), _linear()).to(dtype)
    ours, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    report = swap(ours)
    assert (report.swapped, report.folded, report.unfolded) == (("0", "2"), (Folded("0", "1", epilogue),), ())
    assert [type(module) for module in ours] == [Linear, FoldedActivation, Linear]
    with isogemm.dispatch_log() as log, torch.no_grad():
        ours(torch.zeros(3, 8, dtype=dtype))
    assert len(log) == 2
    for results in zip(_trained(ours, dtype), _trained(theirs, dtype), _trained(exact, torch.float64), strict=True):
        assert_no_worse_than_torch(*results)


def test_names_and_state_dict_stay():
    theirs = Sequential(OrderedDict(up=_linear(), act=GELU(), down=_linear()))
    ours = copy.deepcopy(theirs)
    parameters = dict(ours.named_parameters())
    assert swap(ours).folded == (Folded("up", "act", "gelu"),)
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
    assert all(parameter is parameters[name] for name, parameter in ours.named_parameters())
    theirs = copy.deepcopy(theirs).requires_grad_(False)
    for parameter in theirs.parameters():
        parameter.mul_(2)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = make_data("normal", (5, 8), seed=0)
    torch.testing.assert_close(ours(x), theirs(x))


def test_optimizer_made_before_still_trains_it():
    model = Sequential(_linear(), ReLU(), _linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = copy.deepcopy(model)
    swap(model)
    _trained(model)
    optimizer.step()
    _trained(theirs)
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


def test_compiled():
    torch._dynamo.reset()
    model = Sequential(_linear(), LeakyReLU(0.2), _linear())
    swap(model)
    eager = _trained(model)
    for mine, traced in zip(eager, _trained(torch.compile(model, fullgraph=True, backend="aot_eager")), strict=True):
        assert_bitwise_equal(traced, mine)


def test_rows_alone_and_together():
    model = Sequential(_linear(), GELU(), _linear())
    swap(model)
    x = make_data("normal", (37, 8), seed=0)
    together = model(x)
    for row in range(37):
        assert_bitwise_equal(model(x[row : row + 1])[0], together[row], f"row {row} alone")


def test_turned_off():
    model = Sequential(_linear(), ReLU())
    report = swap(model, fold=False)
    assert (report.swapped, report.folded, report.unfolded) == (("0",), (), ())
    assert [type(module) for module in model] == [Linear, ReLU]


def test_only_the_selected():
    model = Sequential(_linear(), ReLU(), _linear(), ReLU())
    assert swap(model, "2").folded == (Folded("2", "3", "relu"),)
    assert [type(module) for module in model] == [torch.nn.Linear, ReLU, Linear, FoldedActivation]


def test_swapping_twice():
    model = Sequential(_linear(), ReLU(), _linear(), ReLU())
    swap(model)
    before = list(model)
    report = swap(model)
    assert (report.swapped, report.folded, report.unfolded) == ((), (), ())
    assert all(module is same for module, same in zip(model, before, strict=True))


def test_what_was_made_by_hand_stays():
    model = Sequential(Linear(8, 8), ReLU())
    report = swap(model)
    assert (report.folded, report.unfolded) == ((), ())
    assert type(model[1]) is ReLU


@pytest.mark.parametrize(
    "model",
    [
        Sequential(_linear(), ELU()),
        Sequential(_linear(), Identity(), ReLU()),
        Sequential(ReLU(), _linear()),
        Sequential(Sequential(_linear()), ReLU()),
        torch.nn.ModuleList((_linear(), ReLU())),
        Sequential(torch.nn.TransformerEncoderLayer(8, 2, 16)),
        Sequential(_linear(), ReLU()).double(),
    ],
    ids=str,
)
def test_what_is_no_candidate(model):
    report = swap(model)
    assert (report.folded, report.unfolded) == ((), ())


def test_nested():
    model = torch.nn.ModuleDict({"net": Sequential(Sequential(_linear(), ReLU()), Sequential(_linear(), GELU()))})
    assert swap(model).folded == (Folded("net.0.0", "net.0.1", "relu"), Folded("net.1.0", "net.1.1", "gelu"))


def test_mode_is_kept():
    model = Sequential(_linear(), ReLU()).eval()
    swap(model)
    assert not any(module.training for module in model.modules())


def test_an_activation_used_elsewhere_stays_there():
    model = torch.nn.Module()
    model.act = ReLU()
    model.net = Sequential(_linear(), model.act, _linear(), model.act, torch.nn.LayerNorm(8), model.act)
    assert swap(model).folded == (Folded("net.0", "net.1", "relu"), Folded("net.2", "net.3", "relu"))
    assert type(model.act) is ReLU
    assert [type(module) for module in model.net][-1] is ReLU


def test_one_linear_with_the_same_activation_everywhere():
    shared = _linear()
    model = Sequential(shared, LeakyReLU(0.2), shared, LeakyReLU(0.2))
    expected = _trained(model)
    assert [pair.linear for pair in swap(model).folded] == ["0", "2"]
    assert model[0] is model[2]
    for ours, theirs in zip(_trained(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_sequential_under_two_names():
    model = torch.nn.Module()
    model.first = model.second = Sequential(_linear(), ReLU())
    assert swap(model).folded == (Folded("first.0", "first.1", "relu"), Folded("second.0", "second.1", "relu"))
    assert model.first is model.second
    assert [type(module) for module in model.first] == [Linear, FoldedActivation]


@pytest.mark.parametrize("other", [[], [torch.nn.LayerNorm(8)], [GELU()], [LeakyReLU(0.1)]], ids=str)
def test_one_linear_with_something_else_after_it_elsewhere(other):
    shared = _linear()
    model = Sequential(shared, LeakyReLU(0.2), shared, *other)
    expected = _trained(model)
    report = swap(copy.deepcopy(model))
    assert report.unfolded[0] == Unfolded(
        "0", "1", "leaky_relu(negative_slope=0.2)", "the same Linear is 2, where it cannot be folded"
    )
    swap(model)
    assert model[0] is model[2]
    assert model[0].activation is None
    for ours, theirs in zip(_trained(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_linear_that_cannot_be_folded_elsewhere():
    class Reversed(Sequential):
        def forward(self, x):
            return self[0](self[1](x))

    shared = _linear()
    model = torch.nn.ModuleDict({"plain": Sequential(shared, ReLU()), "other": Reversed(shared, ReLU())})
    report = swap(model)
    assert report.folded == ()
    assert report.unfolded == (
        Unfolded("plain.0", "plain.1", "relu", "the same Linear is other.0, where it cannot be folded"),
        Unfolded(
            "other.0", "other.1", "relu",
            "Reversed is a subclass of torch.nn.Sequential, which may call its modules otherwise",
        ),
    )  # fmt: skip


def test_tied_weights_of_two_linears():
    model = Sequential(_linear(), ReLU(), _linear())
    model[2].weight = model[0].weight
    expected = _trained(model)
    assert len(swap(model).folded) == 1
    assert model[2].weight is model[0].weight
    for ours, theirs in zip(_trained(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["forward_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_that_see_the_linears_output(kind):
    model = Sequential(_linear(), ReLU())
    getattr(model[0], f"register_{kind}")(lambda *args: None)
    assert "the Linear has hooks" in _unfolded(model)


def test_hooks_that_see_its_input_go_on():
    model = Sequential(_linear(), ReLU())
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert len(swap(model).folded) == 1
    x = torch.zeros(3, 8)
    model(x)
    assert [each is x for each in seen] == [True]


@pytest.mark.parametrize(
    "kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "state_dict_pre_hook"]
)
def test_hooks_of_the_activation(kind):
    model = Sequential(_linear(), ReLU())
    getattr(model[1], f"register_{kind}")(lambda *args: None)
    assert _unfolded(model) == "the ReLU has hooks"


def test_modules_that_were_changed():
    model = Sequential(_linear(), ReLU())
    model.forward = torch.nn.functional.relu
    assert _unfolded(model) == "the forward of its Sequential was replaced on the instance"
    model = Sequential(_linear(), ReLU())
    model[1].forward = torch.nn.functional.gelu
    assert _unfolded(model) == "the forward of the ReLU was replaced on the instance"
    model = Sequential(_linear(), ReLU())
    model[1].compile(backend="eager")
    assert "the ReLU is compiled" in _unfolded(model)
    model = Sequential(_linear(), ReLU())
    model[1].register_buffer("calls", torch.zeros(()))
    assert "the ReLU holds parameters" in _unfolded(model)


def test_numerics_of_the_folded():
    model = Sequential(_linear(), ReLU()).bfloat16()
    swap(model, out_dtype=torch.float32)
    assert (model[0].out_dtype, model(torch.zeros(3, 8, dtype=torch.bfloat16)).dtype) == (torch.float32,) * 2


def test_report_in_words():
    model = torch.nn.ModuleDict(
        {
            "blocks": torch.nn.ModuleList(Sequential(_linear(), GELU(), _linear(), LeakyReLU(0.2)) for _ in range(2)),
            "hooked": Sequential(_linear(), ReLU()),
            "conv": torch.nn.Conv1d(2, 2, 3),
        }
    )
    model["hooked"][1].register_forward_hook(lambda *args: None)
    assert str(swap(model)).splitlines() == [
        "swapped 5, folded 4, kept 1",
        "  swapped blocks.*.* x 4",
        "  swapped hooked.0",
        "  folded gelu into blocks.*.* x 2",
        "  folded leaky_relu(negative_slope=0.2) into blocks.*.* x 2",
        "  not folded relu into hooked.0: the ReLU has hooks",
        "  kept conv (Conv1d): is no Linear: torch computes products with its weight",
    ]
