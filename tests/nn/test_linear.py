"""isogemm.nn.Linear: a torch.nn.Linear in all but who computes."""

import copy
import inspect
import pickle

import pytest
import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrizations, prune

import isogemm
from isogemm.epilogues import ACTIVATIONS
from isogemm.gemm.api import linear
from isogemm.nn import MLP, Linear
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

PLAIN = [name for name, entry in ACTIVATIONS.items() if not entry.gate]
GATED = [name for name, entry in ACTIVATIONS.items() if entry.gate]


def _input(rows=5, features=12, dtype=torch.float32):
    return make_data("normal", (rows, features), seed=0, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_computes_isogemm_linear(bias, dtype):
    module = Linear(12, 7, bias, dtype=dtype)
    x = _input(dtype=dtype)
    assert_bitwise_equal(module(x), linear(x, module.weight, module.bias))
    with isogemm.dispatch_log() as log:
        module(x.view(1, 5, 12))
    assert len(log) == 1


def test_rows_alone_and_together():
    module = Linear(64, 33)
    x = _input(rows=37, features=64)
    together = module(x)
    for row in range(37):
        assert_bitwise_equal(module(x[row : row + 1])[0], together[row], f"row {row} alone")


def test_is_torch_linear_to_its_users():
    ours, theirs = Linear(12, 7), torch.nn.Linear(12, 7)
    assert isinstance(ours, torch.nn.Linear)
    assert {name: value.shape for name, value in ours.state_dict().items()} == {
        name: value.shape for name, value in theirs.state_dict().items()
    }
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert repr(ours) == f"isogemm.nn.{theirs!r}"


def test_arguments_in_torchs_order():
    ours = list(inspect.signature(Linear).parameters.values())
    theirs = list(inspect.signature(torch.nn.Linear).parameters)
    assert [parameter.name for parameter in ours[: len(theirs)]] == theirs
    assert {parameter.kind for parameter in ours[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY}


def test_same_initial_values():
    torch.manual_seed(0)
    ours = Linear(12, 7)
    torch.manual_seed(0)
    theirs = torch.nn.Linear(12, 7)
    assert_bitwise_equal(ours.weight, theirs.weight)


def test_numerics_are_passed_on_and_kept():
    module = Linear(12, 7, dtype=torch.bfloat16, out_dtype=torch.float32)
    x = _input(dtype=torch.bfloat16)
    assert "out_dtype=torch.float32" in repr(module)
    for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_bitwise_equal(same(x), linear(x, module.weight, module.bias, out_dtype=torch.float32))
    assert repr(Linear(2, 3, precision="tf32")).endswith("bias=True, precision=tf32)")
    assert Linear.from_torch(torch.nn.Linear(2, 3), precision="tf32").precision == "tf32"


@pytest.mark.parametrize(
    "make", [lambda **numerics: Linear(2, 3, **numerics), lambda **n: Linear.from_torch(Linear(2, 3), **n)]
)
def test_unknown_precision(make):
    with pytest.raises(ValueError, match="precision is 'fp8'; accepted: 'ieee'"):
        make(precision="fp8")


@pytest.mark.parametrize("bias", [True, False])
def test_from_torch_shares_all(bias):
    theirs = torch.nn.Linear(12, 7, bias).eval().requires_grad_(False)
    theirs.note = object()
    ours = Linear.from_torch(theirs)
    assert ours.weight is theirs.weight
    assert ours.bias is theirs.bias
    assert (ours.in_features, ours.out_features, ours.training, ours.note) == (12, 7, False, theirs.note)
    ours.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    assert not hasattr(theirs, "extra")


def test_from_torch_keeps_hooks_and_their_handles():
    theirs = torch.nn.Linear(12, 7)
    seen = []
    handle = theirs.register_forward_hook(lambda module, args, kwargs, output: seen.append(module), with_kwargs=True)
    ours = Linear.from_torch(theirs)
    ours(_input())
    assert seen == [ours]
    handle.remove()
    ours(_input())
    assert seen == [ours]


def test_from_torch_on_meta():
    ours = Linear.from_torch(torch.nn.Linear(12, 7, device="meta", dtype=torch.bfloat16))
    assert ours.weight.is_meta
    assert ours.to_empty(device="cpu").weight.device.type == "cpu"


def test_from_torch_of_a_subclass_without_a_forward():
    theirs = NonDynamicallyQuantizableLinear(12, 7)
    assert type(Linear.from_torch(theirs)) is Linear


def test_from_torch_makes_the_class_it_is_called_on():
    class Named(Linear):
        pass

    ours = Named.from_torch(torch.nn.Linear(12, 7), out_dtype=torch.float32)
    assert type(ours) is Named
    again = Linear.from_torch(ours)
    assert (type(again), again.out_dtype, again.weight is ours.weight) == (Linear, None, True)


def test_gradients_reach_the_shared_parameters():
    theirs = torch.nn.Linear(12, 7)
    Linear.from_torch(theirs)(_input()).sum().backward()
    assert_bitwise_equal(theirs.bias.grad, torch.full((7,), 5.0))
    torch.testing.assert_close(theirs.weight.grad, _input().sum(0).expand(7, 12))


def _with_forward_of_its_own():
    class Doubled(torch.nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    return Doubled(12, 7)


def _with_replaced_forward():
    module = torch.nn.Linear(12, 7)
    module.forward = torch.nn.functional.relu
    return module


def _compiled():
    module = torch.nn.Linear(12, 7)
    module.compile(backend="eager")
    return module


def _with_load_hook():
    module = torch.nn.Linear(12, 7)
    module.register_load_state_dict_pre_hook(lambda module, *args: None)
    return module


def _flattened():
    module = torch.nn.Linear(12, 7)
    module.weight._fsdp_flattened = True
    return module


class _Wrapped(torch.Tensor):
    pass


def _with_tensor_subclass():
    module = torch.nn.Linear(12, 7)
    module.weight = torch.nn.Parameter(torch.zeros(7, 12).as_subclass(_Wrapped))
    return module


REFUSED = {
    "Doubled has a forward of its own": _with_forward_of_its_own,
    "forward was replaced on the instance": _with_replaced_forward,
    "it is compiled": _compiled,
    "weight is made from other parameters .*: swap first": lambda: parametrizations.weight_norm(torch.nn.Linear(12, 7)),
    "bias is made from other parameters": lambda: prune.identity(torch.nn.Linear(12, 7), "bias"),
    "load_state_dict pre-hook": _with_load_hook,
    "weight is a Parameter of a sharded": _flattened,
    "weight is a _Wrapped of a sharded or quantized": _with_tensor_subclass,
    "it has an activation, leaky_relu\\(negative_slope=0.2\\)": lambda: Linear(
        12, 7, activation="leaky_relu", activation_args={"negative_slope": 0.2}
    ),
    "its dtype is torch.complex64": lambda: torch.nn.Linear(12, 7, dtype=torch.complex64),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_from_torch_refuses_what_it_could_not_repeat(reason):
    with pytest.raises(ValueError, match=f"module cannot become an isogemm.nn.Linear: .*{reason}"):
        Linear.from_torch(REFUSED[reason]())


def test_from_torch_takes_linears_alone():
    with pytest.raises(TypeError, match=r"module is a Conv1d; expected a torch\.nn\.Linear"):
        Linear.from_torch(torch.nn.Conv1d(1, 1, 1))


@pytest.mark.parametrize(
    "change", [parametrizations.weight_norm, lambda module: prune.l1_unstructured(module, "weight", 9)]
)
def test_parametrized_afterwards(change):
    """The computed weight is what is multiplied by, and the gradient reaches what it was made from."""
    module = change(Linear(12, 7))
    x = _input()
    result = module(x)
    assert_bitwise_equal(result, linear(x, module.weight, module.bias))
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def _trained(module, x, grad, then=lambda y: y):
    """The result and the gradients of x and the parameters."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    result = then(module(x))
    result.backward(grad.to(result.dtype))
    return [result.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", PLAIN)
def test_activation_trains_as_torchs(activation, dtype):
    torch.manual_seed(0)
    ours = Linear(33, 17, activation=activation, dtype=dtype)
    theirs = torch.nn.Linear(33, 17, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    x, grad = _input(65, 33, dtype), make_data("normal", (65, 17), seed=1, dtype=dtype)
    act = ACTIVATIONS[activation].torch
    exact = _trained(copy.deepcopy(theirs).double(), x.double(), grad, act)
    for mine, torchs, reference in zip(_trained(ours, x, grad), _trained(theirs, x, grad, act), exact, strict=True):
        assert_no_worse_than_torch(mine, torchs, reference)
    for mine, reference in zip(_trained(ours.double(), x.double(), grad), exact, strict=True):
        torch.testing.assert_close(mine, reference)


def test_rows_with_an_activation_alone_and_together():
    module = Linear(64, 33, activation="gelu")
    x = _input(rows=37, features=64)
    together = module(x)
    for row in range(37):
        assert_bitwise_equal(module(x[row : row + 1])[0], together[row], f"row {row} alone")


def test_activation_is_one_call():
    module = Linear(12, 7, activation="relu")
    with isogemm.dispatch_log() as log:
        module(_input())
    assert len(log) == 1


def test_activation_is_kept():
    module = Linear(12, 7, activation="leaky_relu", activation_args={"negative_slope": 0.5}, precision="ieee")
    assert module.extra_repr() == (
        "in_features=12, out_features=7, bias=True, activation=leaky_relu(negative_slope=0.5), precision=ieee"
    )
    x = _input()
    expected = linear(x, module.weight, module.bias, activation="leaky_relu", activation_args={"negative_slope": 0.5})
    theirs = torch.nn.Linear(12, 7)
    theirs.load_state_dict(module.state_dict())
    again = Linear.from_torch(theirs, activation="leaky_relu", activation_args={"negative_slope": 0.5})
    for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), again):
        assert_bitwise_equal(same(x), expected)


def test_activation_compiled():
    torch._dynamo.reset()
    module = Linear(12, 7, activation="leaky_relu", activation_args={"negative_slope": 0.5})
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, grad = _input(), make_data("normal", (5, 7), seed=1)
    for eager, traced in zip(_trained(module, x, grad), _trained(compiled, x, grad), strict=True):
        assert_bitwise_equal(traced, eager)


@pytest.mark.parametrize("make", [lambda **of: Linear(2, 3, **of), lambda **of: Linear.from_torch(Linear(2, 3), **of)])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "mish"}, "activation is 'mish'; accepted: relu"),
        *(({"activation": gated}, f"activation is '{gated}', .*isogemm.nn.MLP") for gated in GATED),
        ({"activation": "relu", "activation_args": {"slope": 1}}, "activation_args has 'slope'; relu takes no"),
        ({"activation_args": {"slope": 1}}, "activation_args is {'slope': 1} without an activation"),
    ],
)
def test_unknown_activation(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("out_dtype", [torch.int32, "float16"])
@pytest.mark.parametrize("module", [Linear, MLP])
def test_an_out_dtype_that_no_input_can_have(module, out_dtype):
    """At once, not when it is called. Another one may become right: by `half()`, or under autocast."""
    with pytest.raises(ValueError, match=r"out_dtype is .*; accepted: torch\."):
        module(8, 8, out_dtype=out_dtype)
    assert module(8, 8, out_dtype=torch.float16).half()(torch.ones(2, 8).half()).dtype is torch.float16
