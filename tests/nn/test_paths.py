"""Which operation each module of isogemm.nn calls, eager, traced and compiled: a plain layer never the fused one."""

import pytest
import torch

import isogemm
from isogemm.fusion.inductor import fuse
from isogemm.fusion.report import Report
from isogemm.nn import MLP, EncoderLayer, Linear, swap
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

K, N = 12, 6
PLAIN_GRADIENTS = ["matmul", "weight_grad"]

MODULES = {  # the module, the operations of its forward and of its backward
    "plain": (lambda: Linear(K, N, bias=False), ["matmul"], PLAIN_GRADIENTS),
    "bias": (lambda: Linear(K, N), ["matmul"], ["bias_grad", *PLAIN_GRADIENTS]),
    "no activation_args": (lambda: Linear(K, N, activation_args={}), ["matmul"], ["bias_grad", *PLAIN_GRADIENTS]),
    "out_dtype": (
        lambda: Linear(K, N, bias=False, dtype=torch.bfloat16, out_dtype=torch.float32), ["matmul"], PLAIN_GRADIENTS,
    ),
    "activation": (lambda: Linear(K, N, activation="gelu"), ["fused"], ["bias_grad", *PLAIN_GRADIENTS]),
    "mlp": (lambda: MLP(K, N), ["fused"] * 2, ["bias_grad", *PLAIN_GRADIENTS] * 2),
    "gated mlp": (
        lambda: MLP(K, N, activation="swiglu"), ["fused"] * 2,
        ["fused", *["bias_grad", "weight_grad"] * 3, *["matmul"] * 2],
    ),
    "swapped": (lambda: _swapped(torch.nn.Linear(K, N)), ["matmul"], ["bias_grad", *PLAIN_GRADIENTS]),
    "swapped and folded": (
        lambda: _swapped(torch.nn.Linear(K, N), torch.nn.GELU()), ["fused"], ["bias_grad", *PLAIN_GRADIENTS],
    ),
    "encoder layer": (
        lambda: EncoderLayer(K, 2, N, dropout=0.0),
        ["encoder_attention", "encoder_layer", *["fused"] * 3, *["layer_norm"] * 2, "matmul"],
        None,
    ),
}  # fmt: skip


def _swapped(*modules, **options):
    model = torch.nn.Sequential(*modules)
    swap(model, **options)
    return model


def _input(module):
    return make_data("normal", (5, 7, K), seed=0, dtype=next(module.parameters()).dtype)


def _operations(call):
    with isogemm.dispatch_log() as log:
        result = call()
    assert {entry.path for entry in log} <= {"cpu", "composed"}
    return sorted(entry.op for entry in log), result


@pytest.mark.parametrize("name", MODULES)
def test_operations(name):
    make, forward, backward = MODULES[name]
    module = make()
    x = _input(module)
    with torch.no_grad():
        assert _operations(lambda: module(x))[0] == sorted(forward)
    operations, result = _operations(lambda: module(x.requires_grad_()))
    assert operations == sorted(forward)
    if backward is not None:
        assert _operations(result.sum().backward)[0] == sorted(backward)


def test_linear_without_activation_args_of_an_activation():
    x, weight = make_data("normal", (5, K), seed=0), make_data("normal", (N, K), seed=1)
    assert _operations(lambda: isogemm.linear(x, weight, activation_args={}, beta=0, alpha=1.0))[0] == ["matmul"]
    with pytest.raises(ValueError, match=r"activation_args is .* without an activation"):
        isogemm.linear(x, weight, activation_args={"negative_slope": 0.5})


def _compiled(module):
    """What dynamo's graph calls, and what compile_fusion's pass makes of it."""
    torch._dynamo.reset()
    targets, report = [], Report()

    def backend(graph, inputs):
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        fuse(graph.graph, report)
        graph.recompile()
        return graph.forward

    x = _input(module)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=backend, fullgraph=True)(x), module(x))
    return targets, report


@pytest.mark.parametrize("name", ["plain", "bias", "out_dtype", "swapped"])
def test_compiled_is_the_plain_operator(name):
    targets, _ = _compiled(MODULES[name][0]())
    assert targets == [torch.ops.isogemm.linear]


class _Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(K, N, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(N, K, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def _sequential():
    return torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.Mish(), torch.nn.Linear(N, N), torch.nn.ReLU())


@pytest.mark.parametrize(("make", "linears", "fused"), [(_sequential, 2, "bias + relu"), (_Gated, 3, "swiglu")])
def test_compile_fusion_after_swap(make, linears, fused):
    """What torch computes after a swapped linear becomes its epilogue."""
    model = make()
    swap(model, fold=False)
    targets, report = _compiled(model)
    assert targets.count(torch.ops.isogemm.linear) == linears
    assert len(report.fused) == 1
    assert fused in str(report)


def test_jit_trace_after_swap():
    model = _swapped(torch.nn.Linear(K, N), torch.nn.Mish(), torch.nn.Linear(N, K, bias=False))
    traced = torch.jit.trace(model, make_data("normal", (5, K), seed=0))
    assert "isogemm::linear" in str(traced.inlined_graph)
    x = make_data("normal", (3, K), seed=1)
    assert_bitwise_equal(traced(x), model(x))
    model[0].weight.data.mul_(2)  # no constants of the trace
    assert_bitwise_equal(traced(x), model(x))


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (lambda: Linear(K, N), "isogemm.linear"),
        (lambda: Linear(K, N, activation="gelu"), "isogemm.linear"),
        (lambda: MLP(K, N), "isogemm.nn.MLP"),
        (lambda: lambda x: isogemm.matmul_fused(x, x.mT, activation="gelu"), "isogemm.matmul_fused"),
    ],
)
def test_errors_name_the_function(make, function):
    x = make_data("normal", (5, K), seed=0)
    with pytest.raises(RuntimeError, match=rf"{function} has no rule for forward-mode AD"):
        torch.func.jvp(make(), (x,), (x,))


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_wrong_inputs_of_a_linear(activation):
    module = Linear(K, N, activation=activation)
    with pytest.raises(TypeError, match=r"x is a list; expected a torch\.Tensor \[\.\.\., K\]"):
        module([1.0])
    with pytest.raises(ValueError, match="x and weight must have the same dtype"):
        module(make_data("normal", (5, K), seed=0, dtype=torch.float16))
    with pytest.raises(ValueError, match="x and weight must have the same K"):
        module(make_data("normal", (5, N), seed=0))
