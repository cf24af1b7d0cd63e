"""isogemm.nn.MLP: two layers as torch's, plain and gated."""

import copy
import pickle

import pytest
import torch
from torch.nn.utils import parametrizations, prune

from isogemm.epilogues import ACTIVATIONS
from isogemm.gemm.api import mlp
from isogemm.nn import MLP, Linear, swap
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

KINDS = ["gelu", "relu", "tanh", "leaky_relu", "swiglu", "geglu", "reglu"]


class _Torchs(torch.nn.Module):
    """The same in torch, with the same names."""

    def __init__(self, activation, bias=True, dtype=None):
        super().__init__()
        entry = ACTIVATIONS[activation]
        if entry.gate:
            self.gate = torch.nn.Linear(17, 33, bias, dtype=dtype)
        self.up = torch.nn.Linear(17, 33, bias, dtype=dtype)
        self.down = torch.nn.Linear(33, 9, bias, dtype=dtype)
        self.gated, self.act = bool(entry.gate), entry.torch

    def forward(self, x, residual=None):
        hidden = self.act(self.gate(x)) * self.up(x) if self.gated else self.act(self.up(x))
        return self.down(hidden) if residual is None else residual + self.down(hidden)


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype)


def _trained(module, dtype=torch.float32, rows=65):
    """The result and the gradients of x, the residual and the parameters."""
    x, residual, grad = (_normal(rows, n, seed=seed).to(dtype) for seed, n in enumerate((17, 9, 9)))
    x.requires_grad_()
    residual.requires_grad_()
    module.zero_grad()
    result = module(x, residual)
    result.backward(grad)
    return [result.detach(), x.grad, residual.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", KINDS)
def test_trains_as_torchs(activation, dtype, bias):
    torch.manual_seed(0)
    ours = MLP(17, 33, 9, activation=activation, bias=bias, dtype=dtype)
    torch.manual_seed(0)
    theirs = _Torchs(activation, bias, dtype)
    exact = _trained(copy.deepcopy(theirs).double(), torch.float64)
    for name, value in theirs.state_dict().items():
        assert_bitwise_equal(ours.state_dict()[name], value, f"initial {name}")
    ours.load_state_dict(theirs.state_dict())
    for mine, torchs, reference in zip(_trained(ours, dtype), _trained(theirs, dtype), exact, strict=True):
        assert_no_worse_than_torch(mine, torchs, reference)
    for mine, reference in zip(_trained(ours.double(), torch.float64), exact, strict=True):
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("activation", KINDS)
def test_computes_isogemm_mlp(activation):
    module = MLP(17, 33, activation=activation, out_dtype=torch.float32, dtype=torch.bfloat16)
    x = _normal(3, 5, 17, dtype=torch.bfloat16)
    weights = {"weight": module.up.weight, "bias": module.up.bias}
    if module.gate is not None:
        weights = {"weight": module.gate.weight, "bias": module.gate.bias}
        weights |= {"weight_up": module.up.weight, "bias_up": module.up.bias}
    expected = mlp(
        x, weights.pop("weight"), module.down.weight, **weights, bias_down=module.down.bias, activation=activation,
        out_dtype=torch.float32,
    )  # fmt: skip
    assert expected.shape == (3, 5, 17)
    for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_bitwise_equal(same(x), expected)


def test_rows_alone_and_together():
    module = MLP(17, 33, 9, activation="swiglu")
    x, residual = _normal(37, 17), _normal(37, 9, seed=1)
    together = module(x, residual)
    for row in range(37):
        alone = slice(row, row + 1)
        assert_bitwise_equal(module(x[alone], residual[alone]), together[alone], f"row {row} alone")


def test_activation_args():
    module = MLP(17, 33, 9, activation="leaky_relu", activation_args={"negative_slope": 1.0})
    torch.testing.assert_close(module(_normal(5, 17)), module.down(module.up(_normal(5, 17))))


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_dropout_in_training_alone(activation):
    module = MLP(17, 33, 9, activation=activation, hidden_dropout_p=0.5, dropout_p=0.5)
    plain = MLP.from_linears(module.up, module.down, module.gate, activation=activation)
    x, residual = _normal(65, 17), _normal(65, 9, seed=1)
    torch.manual_seed(0)
    first, second = module(x, residual), module(x, residual)
    assert 0.4 < (first == residual).float().mean() < 0.6
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert_bitwise_equal(module(x, residual), first)
    assert_bitwise_equal(module.eval()(x, residual), plain(x, residual))


@pytest.mark.parametrize("dropped", ["hidden_dropout_p", "dropout_p"])
def test_all_dropped(dropped):
    module = MLP(17, 33, 9, **{dropped: 1.0})
    expected = module.down.bias.expand(5, 9) if dropped == "hidden_dropout_p" else torch.zeros(5, 9)
    assert torch.equal(module(_normal(5, 17)), expected)


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu", "bias": False}, {"hidden_dropout_p": 0.5}], ids=str)
def test_compiled(options):
    torch._dynamo.reset()
    module = MLP(17, 33, 9, **options)
    torch.manual_seed(0)
    eager = _trained(module)
    torch.manual_seed(0)
    for mine, traced in zip(eager, _trained(torch.compile(module, fullgraph=True, backend="aot_eager")), strict=True):
        assert_bitwise_equal(traced, mine)


def test_repr():
    module = MLP(
        17, 33, activation="leaky_relu", activation_args={"negative_slope": 0.5}, dropout_p=0.1, precision="tf32"
    )
    assert repr(module).splitlines() == [
        "isogemm.nn.MLP(",
        "  activation=leaky_relu(negative_slope=0.5), dropout_p=0.1, precision=tf32",
        "  (up): isogemm.nn.Linear(in_features=17, out_features=33, bias=True)",
        "  (down): isogemm.nn.Linear(in_features=33, out_features=17, bias=True)",
        ")",
    ]


def test_on_meta():
    module = MLP(17, 33, activation="swiglu", device="meta", dtype=torch.bfloat16)
    assert [(name, value.is_meta) for name, value in module.named_parameters() if name.endswith("weight")] == [
        ("gate.weight", True),
        ("up.weight", True),
        ("down.weight", True),
    ]
    assert module.to_empty(device="cpu")(_normal(5, 17, dtype=torch.bfloat16)).shape == (5, 17)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_from_linears_shares_the_parameters(activation):
    theirs = _Torchs(activation).eval()
    module = MLP.from_linears(theirs.up, theirs.down, getattr(theirs, "gate", None), activation=activation)
    assert {name: id(value) for name, value in module.named_parameters()} == {
        name: id(value) for name, value in theirs.named_parameters()
    }
    assert not module.training
    module.train()
    assert not theirs.up.training
    expected = [*(grad.clone() for grad in _trained(theirs))]
    for mine, torchs in zip(_trained(module), expected, strict=True):
        torch.testing.assert_close(mine, torchs)


def test_from_linears_of_a_llama_block():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=32, intermediate_size=96)
    theirs = llama.LlamaMLP(config).requires_grad_(False)
    module = MLP.from_linears(theirs.up_proj, theirs.down_proj, theirs.gate_proj, activation="swiglu")
    x = _normal(2, 7, 32)
    assert_no_worse_than_torch(module(x), theirs(x), copy.deepcopy(theirs).double()(x.double()))


def test_from_linears_makes_the_class_it_is_called_on():
    class Named(MLP):
        pass

    made = Named.from_linears(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4), activation="relu", dropout_p=0.1)
    assert (type(made), made.dropout_p, type(made.up)) == (Named, 0.1, Linear)


def _hooked():
    module = torch.nn.Linear(2, 3)
    module.register_forward_hook(lambda *args: None)
    return module


@pytest.mark.parametrize(
    ("layers", "activation", "error", "message"),
    [
        ((torch.nn.Conv1d(2, 3, 1), torch.nn.Linear(3, 2)), "relu", TypeError, "up: module is a Conv1d; expected"),
        (
            (torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)),
            "relu",
            ValueError,
            "down is Linear.*; expected in_features=3",
        ),
        (
            (torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)),
            "reglu",
            ValueError,
            "'reglu' without gate; gated ones: swiglu",
        ),
        ((torch.nn.Linear(2, 3), torch.nn.Linear(3, 2), torch.nn.Linear(2, 3)), "relu", ValueError, "'relu' with gate"),
        ((torch.nn.Linear(2, 3), torch.nn.Linear(3, 2), torch.nn.Linear(3, 3)), "reglu", ValueError, "gate is Linear"),
        ((_hooked(), torch.nn.Linear(3, 2)), "relu", ValueError, "up has hooks"),
        ((torch.nn.Linear(2, 3), Linear(3, 2, out_dtype=torch.float32)), "relu", ValueError, "down has an out_dtype"),
        ((Linear(2, 3, activation="relu"), torch.nn.Linear(3, 2)), "relu", ValueError, "up: .*has an activation, relu"),
        (
            (parametrizations.weight_norm(torch.nn.Linear(2, 3)), torch.nn.Linear(3, 2)),
            "relu",
            ValueError,
            "up: .*its weight is made from other parameters",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_from_linears_that_do_not_fit(layers, activation, error, message):
    with pytest.raises(error, match=message):
        MLP.from_linears(*layers, activation=activation)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "mish"}, "activation is 'mish'; accepted: relu"),
        ({"activation_args": {"slope": 1}}, "activation_args has 'slope'; gelu takes no"),
        ({"dropout_p": 1.5}, "^dropout_p is 1.5; expected a probability"),
        ({"hidden_dropout_p": float("nan")}, "hidden_dropout_p is nan; expected a probability"),
        ({"precision": "fp8"}, "precision is 'fp8'; accepted: 'ieee'"),
    ],
)
def test_unknown_options(options, message):
    with pytest.raises(ValueError, match=message):
        MLP(2, 3, **options)


def _replace_up(module):
    module.up = torch.nn.Bilinear(2, 2, 3)


def _activate_up(module):
    module.up = Linear(17, 33, activation="relu")


def _replace_forward(module):
    module.up.forward = torch.nn.functional.relu


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_replace_up, "is a Bilinear with a forward of its own"),
        (_replace_forward, "is a Linear with a forward of its own"),
        (_activate_up, "has an activation, relu"),
        (lambda module: setattr(module.up, "out_dtype", torch.float32), "has an out_dtype, torch.float32"),
        (lambda module: module.up.register_forward_hook(print), "has hooks"),
        (lambda module: module.up.register_full_backward_hook(print), "has hooks"),
        (lambda module: prune.l1_unstructured(module.up, "weight", 9), "has hooks"),
    ],
)
def test_a_layer_that_needs_its_forward_is_told(change, reason):
    module = MLP(17, 33, 9)
    change(module)
    with pytest.raises(RuntimeError, match=f"up {reason}, but MLP reads only its weight"):
        module(_normal(5, 17))


def test_hooks_of_its_own():
    module, seen = MLP(17, 33, 9), []
    module.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    module(_normal(5, 17))
    assert seen == [(5, 9)]


def test_parametrized_and_tied_weights():
    module = MLP(17, 33, bias=False)
    module.down.weight = torch.nn.Parameter(module.up.weight.detach().T)
    parametrizations.weight_norm(module.up)
    x = _normal(5, 17)
    result = module(x)
    torch.testing.assert_close(result, module.down(torch.nn.functional.gelu(module.up(x))))
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    tied = MLP(17, 17, bias=False)
    tied.down.weight = tied.up.weight
    tied(x).sum().backward()
    weight = tied.up.weight.detach().clone().requires_grad_()
    torch.nn.functional.linear(torch.nn.functional.gelu(x @ weight.T), weight).sum().backward()
    torch.testing.assert_close(tied.up.weight.grad, weight.grad)


def test_swap_leaves_it():
    model = torch.nn.Sequential(MLP(17, 33), torch.nn.Linear(17, 9))
    report = swap(model)
    assert report.swapped == ("1",)
    assert {kept.reason for kept in report.kept} == {"is an isogemm.nn.Linear already"}
