"""isogemm.bmm without a GPU: torch.bmm's results, the errors, autograd, the registered operators, the fallback."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import isogemm
from isogemm.core import env
from isogemm.core.eager import KnownCalls
from isogemm.core.plan import Cache, Plan, Step, contiguous
from isogemm.tiny import api, configs, op
from isogemm.tiny.configs import DotConfig
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_operands, with_layout
from isogemm.verify.poison import poisoned_allocations

SOURCE = Path(__file__).parents[2] / "src"
SHARING = {"neither": (3, 3), "a": (1, 3), "b": (3, 1), "both": (1, 1)}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(env, "settings", env.Settings(disable_tiny=False, log=False))
    monkeypatch.setattr(op, "served", Cache())
    monkeypatch.setattr(api, "_known", KnownCalls())
    monkeypatch.setattr(op, "_warned", set())


def _operands(sharing="neither", dtype=torch.float32, m=3, k=7, n=5):
    a_batch, b_batch = SHARING[sharing]
    return make_operands("normal", (a_batch, m, k), (b_batch, k, n), seed=0, dtype=dtype)


def _leaves(sharing="neither", dtype=torch.float64):
    return tuple(x.requires_grad_() for x in _operands(sharing, dtype, m=2, k=3, n=2))


def _tiny(a, b):
    """The way of a call that the tiny family has a part in, which on the CPU isogemm.bmm does not go."""
    return api._bmm(a, b, None)


@pytest.mark.parametrize("function", [isogemm.bmm, _tiny])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("sharing", SHARING)
def test_is_torch_bmm(sharing, dtype, function):
    a, b = (x.mul(4).to(dtype) for x in _operands(sharing))
    batch = max(len(a), len(b))
    expected = torch.bmm(a.expand(batch, -1, -1), b.expand(batch, -1, -1))
    assert_bitwise_equal(function(a, b), expected)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "broadcast", "strided", "misaligned"])
def test_any_strides(layout):
    a, b = (with_layout(x, layout) for x in _operands())
    assert_bitwise_equal(isogemm.bmm(a, b), torch.bmm(a, b))


@pytest.mark.parametrize("function", [isogemm.bmm, _tiny])
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((0, 3, 4), (0, 4, 5)),
        ((0, 3, 4), (1, 4, 5)),
        ((1, 3, 4), (0, 4, 5)),
        ((2, 0, 4), (2, 4, 5)),
        ((2, 3, 4), (1, 4, 0)),
        ((2, 3, 0), (2, 0, 5)),
        ((1, 3, 0), (2, 0, 5)),
    ],
)
def test_empty_sizes(a_shape, b_shape, function):
    """k = 0 gives zeros; a batch of 0 shared with one matrix stays 0."""
    a, b = torch.ones(a_shape, requires_grad=True), torch.ones(b_shape, requires_grad=True)
    with poisoned_allocations():
        result = function(a, b)
    batch = b_shape[0] if a_shape[0] == 1 else a_shape[0]
    assert_bitwise_equal(result, torch.zeros(batch, a_shape[1], b_shape[2]))
    result.sum().backward()
    assert_bitwise_equal(a.grad, torch.zeros(a_shape))
    assert_bitwise_equal(b.grad, torch.zeros(b_shape))


X = torch.ones(2, 3, 4)
BAD = {
    "a is no tensor": ((X.tolist(), X), TypeError, r"^a is a list; expected a torch\.Tensor \[B or 1, M, K\]"),
    "b is no tensor": ((X, None), TypeError, r"^b is a NoneType; expected a torch\.Tensor \[B or 1, K, N\]"),
    "rank of a": ((X[0], X.mT), ValueError, r"^a has shape \[3, 4\]; expected 3 dimensions \[B or 1, M, K\]"),
    "rank of b": ((X, X.mT[None]), ValueError, r"^b has shape \[1, 2, 4, 3\]; expected 3 dimensions"),
    "k": ((X, X), ValueError, r"^a and b must have the same K .*; a has 4, b has 3"),
    "batch": ((X, X.mT.repeat(2, 1, 1)), ValueError, r"^a and b must have the same batch.*; a has 2, b has 4"),
    "batch of 0": ((X[:0], X.mT), ValueError, r"^a and b must have the same batch.*; a has 0, b has 2"),
    "dtype": ((X, X.mT.half()), ValueError, r"^a and b .* same dtype; a has torch\.float32, b has torch\.float16"),
    "device": ((X, X.mT.to("meta")), ValueError, r"^a and b must have the same device; a has cpu, b has meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_operands(name):
    operands, error, message = BAD[name]
    with pytest.raises(error, match=message):
        isogemm.bmm(*operands)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_precision_is_ieee_on_the_cpu(precision):
    a, b = _operands()
    assert_bitwise_equal(isogemm.bmm(a, b, precision=precision), torch.bmm(a, b))


def test_bad_precision():
    with pytest.raises(ValueError, match=r"^precision is 'fp8'; accepted: 'ieee', 'tf32', 'tf32x3' or None"):
        isogemm.bmm(X, X.mT, precision="fp8")
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        with pytest.raises(ValueError, match=rf"^precision is 'tf32', which applies to torch\.float32 .* got {dtype}"):
            isogemm.bmm(X.to(dtype), X.mT.to(dtype), precision="tf32")
    with pytest.raises(TypeError):
        isogemm.bmm(X, X.mT, "ieee")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    a, b = (x.requires_grad_() for x in _operands("b"))
    with torch.autocast("cpu", dtype):
        result = isogemm.bmm(a, b)
        asked = isogemm.bmm(a, b, precision="tf32")  # a word about float32, which autocast leaves behind
        untouched = isogemm.bmm(a.double(), b.double())
    assert_bitwise_equal(result, torch.bmm(a.to(dtype), b.to(dtype).expand(3, -1, -1)))
    assert_bitwise_equal(asked, result)
    assert untouched.dtype == torch.float64
    result.sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32


def test_dispatch_log():
    a, b = _operands()
    with isogemm.dispatch_log() as log:
        isogemm.bmm(a, b)
        isogemm.bmm(a, b[:1])
        _tiny(a, with_layout(b, "transposed"))
    assert [(entry.op, entry.path, entry.config, entry.reason) for entry in log] == [
        ("bmm", "torch", "", "not on a GPU")
    ] * 3
    assert [entry.problem for entry in log] == [
        "[3; 3,5,7] float32/ieee nn",
        "[3; 3,5,7] float32/ieee nn",
        "[3; 3,5,7] float32/ieee nt",
    ]
    assert str(log[0]) == "isogemm.bmm [3; 3,5,7] float32/ieee nn: torch (not on a GPU)"


def test_disabled_by_the_environment(monkeypatch):
    monkeypatch.setenv("ISOGEMM_DISABLE_TINY", "1")
    monkeypatch.setattr(env, "settings", env.read())
    with isogemm.dispatch_log() as log:
        isogemm.bmm(*_operands())
        _tiny(*_operands())
    assert [entry.reason for entry in log] == ["ISOGEMM_DISABLE_TINY is set"] * 2


def test_log_by_the_environment():
    program = "import torch, isogemm; isogemm.bmm(torch.ones(2, 3, 4), torch.ones(1, 4, 5))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "ISOGEMM_LOG": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["isogemm.bmm [2; 3,5,4] float32/ieee nn: torch (not on a GPU)"]
    assert done.stdout == ""


@pytest.mark.parametrize("function", [isogemm.bmm, _tiny, torch.ops.isogemm.bmm], ids=["api", "tiny", "operator"])
@pytest.mark.parametrize("sharing", SHARING)
def test_gradients(sharing, function):
    a, b = _leaves(sharing)
    assert gradcheck(function, (a, b))
    assert gradgradcheck(function, (a, b))


@pytest.mark.parametrize("sharing", ["a", "b"])
def test_gradient_of_a_shared_operand(sharing):
    """The sum over the batch, in the shared operand's shape."""
    a, b = _leaves(sharing)
    grad = torch.randn(3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad(_tiny(a, b), (a, b), grad)
    expected = torch.autograd.grad(torch.matmul(a, b), (a, b), grad)
    torch.testing.assert_close(actual, expected)


def test_gradients_that_nobody_needs_cost_nothing():
    a, b = _operands()
    b.requires_grad_()
    result = _tiny(a, b)
    with isogemm.dispatch_log() as log:
        result.sum().backward()
    assert [entry.problem for entry in log] == ["[3; 7,5,3] float32/ieee tx"]  # A^T dC, dC of stride 0
    with torch.no_grad():
        assert not _tiny(a, b).requires_grad


@pytest.mark.parametrize("function", [isogemm.bmm, _tiny])
@pytest.mark.parametrize("sharing", SHARING)
def test_compiled(sharing, function):
    def loss(a, b):
        return function(a * 2, b).tanh().sum()

    torch._dynamo.reset()
    a, b = _leaves(sharing)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b), loss(a, b))
    actual = torch.autograd.grad(compiled(a, b), (a, b))
    torch.testing.assert_close(actual, torch.autograd.grad(loss(a, b), (a, b)))


@pytest.mark.parametrize("function", [isogemm.bmm, _tiny])
def test_compiled_once_for_any_batch(function):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for batch in (8, 11, 300):
        a, b = torch.randn(batch, 3, 4), torch.randn(batch, 4, 5)
        assert_bitwise_equal(compiled(a, b), torch.bmm(a, b))
    assert counter.frame_count == 1


@pytest.mark.parametrize("sharing", SHARING)
def test_opcheck(sharing):
    a, b = _operands(sharing)
    torch.library.opcheck(torch.ops.isogemm.bmm.default, (a, b), {"precision": "tf32"})
    torch.library.opcheck(torch.ops.isogemm.bmm.default, (with_layout(a, "transposed"), with_layout(b, "sliced")))
    torch.library.opcheck(torch.ops.isogemm.bmm.default, (a.requires_grad_(), b.requires_grad_()))


@pytest.mark.parametrize("function", [isogemm.bmm, _tiny])
def test_negated_view(function):
    a, b = _operands()
    assert_bitwise_equal(function(torch._neg_view(a), b), torch.bmm(-a, b))
    assert_bitwise_equal(function(a, torch._neg_view(b)), torch.bmm(a, -b))


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("function", [isogemm.bmm, _tiny])
def test_tensor_subclasses_and_parameters(function):
    a, b = _operands()
    assert type(function(a.as_subclass(Subclass), b)) is Subclass
    assert type(function(torch.nn.Parameter(a), b)) is torch.Tensor


@pytest.mark.parametrize("function", [isogemm.bmm, _tiny])
def test_tensors_without_memory(function):
    from torch._subclasses import FakeTensorMode

    a, b = _operands("b")
    assert function(a.to("meta"), b.to("meta")).shape == (3, 3, 5)
    mode = FakeTensorMode()
    fake_a, fake_b = mode.from_tensor(a), mode.from_tensor(b)
    with mode:
        assert function(fake_a, fake_b).shape == (3, 3, 5)
    assert function(fake_a, fake_b).shape == (3, 3, 5)


TRANSFORMS = {
    "grad": lambda f, a, b: torch.func.grad(lambda x: f(x, b).square().sum())(a),
    "vjp": lambda f, a, b: torch.func.vjp(f, a, b)[1](torch.ones(3, 2, 2, dtype=a.dtype)),
    "jvp": lambda f, a, b: torch.func.jvp(f, (a, b), (b.mT.contiguous(), a.mT.contiguous())),
    "jacrev": lambda f, a, b: torch.func.jacrev(f)(a, b),
    "vmap": lambda f, a, b: torch.vmap(f)(torch.stack((a, 2 * a)), torch.stack((b, 3 * b))),
    "vmap one": lambda f, a, b: torch.vmap(f, in_dims=(0, None))(torch.stack((a, 2 * a)), b),
    "hessian": lambda f, a, b: torch.func.hessian(lambda x: f(x, b).square().sum())(a),
}


@pytest.mark.parametrize("function", [isogemm.bmm, _tiny])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(name, function):
    transform = TRANSFORMS[name]
    a, b = (x.detach() for x in _leaves())
    torch.testing.assert_close(transform(function, a, b), transform(torch.bmm, a, b))


@pytest.mark.parametrize("function", [isogemm.bmm, _tiny])
def test_forward_mode(function):
    a, b = (x.detach() for x in _leaves())

    def tangent(product):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(product(forward_ad.make_dual(a, torch.ones_like(a)), b)).tangent

    torch.testing.assert_close(tangent(function), tangent(torch.bmm))


@pytest.fixture
def tiny_serves(monkeypatch):
    """The tiny kernels serve CPU tensors, as far as the planning goes: dot, by a launcher that the test gives."""

    def serve(launcher):
        def plan(problem, config, device):
            shape = contiguous((problem.batch, problem.m, problem.n))
            served = op.Dispatch("bmm", "tiny", str(problem), str(config), "")
            steps = (Step(SimpleNamespace(launch=launcher()), 1, (), (), (), None),)
            return Plan(served, *shape, getattr(torch, problem.dtype), device, -1, 0, steps)

        monkeypatch.setattr(op, "tiny_plan", plan)

    monkeypatch.setattr(op, "unserved", lambda problem, on_gpu: "")
    monkeypatch.setattr(configs, "gate", lambda problem: "dot")
    monkeypatch.setattr(configs, "choose", lambda problem, kernel: DotConfig(16, 16, 16, 1, 1))
    monkeypatch.setattr(op.devices, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return serve


def _no_compile():
    raise RuntimeError("injected: does not compile")


def _no_launch():
    def launch(*args):
        raise RuntimeError("injected: does not launch")

    return launch


@pytest.mark.parametrize("launcher", [_no_compile, _no_launch])
def test_failure_falls_back_with_one_warning(launcher, tiny_serves):
    tiny_serves(launcher)
    a, b = _operands()
    expected = torch.bmm(a, b)
    with pytest.warns(
        RuntimeWarning, match=r"^isogemm\.bmm \[3; 3,5,7\] .* served by torch\.bmm: RuntimeError: inj"
    ) as all_:
        result = op.bmm(a, b)
    assert len(all_) == 1
    assert_bitwise_equal(result, expected)
    with warnings.catch_warnings(), isogemm.dispatch_log() as log:
        warnings.simplefilter("error")
        assert_bitwise_equal(op.bmm(a, b), expected)
        op.bmm(a[:2], b[:2])  # the same reason again is no news
    assert [entry.path for entry in log] == ["torch", "torch"]
    assert "injected" in log[0].reason


@pytest.mark.parametrize("launcher", [_no_compile, _no_launch])
@pytest.mark.parametrize("sharing", ["neither", "a", "b"])
@pytest.mark.filterwarnings("ignore:isogemm.bmm:RuntimeWarning")
def test_gradients_of_a_fallback(sharing, launcher, tiny_serves):
    tiny_serves(launcher)
    a, b = _leaves(sharing)
    assert gradcheck(_tiny, (a, b))
    assert gradgradcheck(_tiny, (a, b))


def test_another_failure_is_another_warning(tiny_serves):
    a, b = _operands()
    tiny_serves(_no_compile)
    with pytest.warns(RuntimeWarning, match="does not compile"):
        op.bmm(a, b)
    tiny_serves(_no_launch)
    with pytest.warns(RuntimeWarning, match="does not launch"):
        op.bmm(a[:2], b[:2])


def test_a_failed_launch_is_remembered_unless_in_a_capture(tiny_serves, monkeypatch):
    """What fails inside a graph capture may succeed outside it."""
    tiny_serves(_no_launch)
    a, b = _operands()
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            op.bmm(a, b)
        assert [found.plan is not None for found in op.served.values()] == [capturing]


def test_plans_stay_bounded(monkeypatch):
    monkeypatch.setattr(op, "served", Cache(4))
    a, b = torch.ones(20, 2, 3), torch.ones(20, 3, 2)
    for batch in range(1, 21):
        op.bmm(a[:batch], b[:batch])
        assert 0 < len(op.served) <= 4


def test_plans_follow_what_a_call_depends_on():
    a, b = _operands()
    base = op.key(a, b, None)
    assert op.key(a.clone(), b.clone(), None) == base
    others = [
        op.key(a, b, "tf32"),
        op.key(a[:1], b, None),
        op.key(a, b[:1], None),
        op.key(a[:2], b[:2], None),
        op.key(a.double(), b.double(), None),
        op.key(with_layout(a, "transposed"), b, None),
        op.key(with_layout(a, "misaligned"), b, None),
        op.key(a, with_layout(b, "misaligned"), None),
    ]
    env.settings = replace(env.settings, disable_tiny=True)  # put back by the fixture
    others.append(op.key(a, b, None))
    assert len({base, *others}) == 1 + len(others)


def test_autocast_takes_operands_of_two_dtypes():
    """As torch.bmm does: softmax gives float32, the values are bfloat16."""
    a, b = _operands()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_bitwise_equal(isogemm.bmm(a, b.bfloat16()), torch.bmm(a, b.bfloat16()))


def test_gradients_of_many_outputs_at_once():
    a, b = _leaves("b")
    grads = torch.eye(12, dtype=torch.float64).view(12, 3, 2, 2)
    actual = torch.autograd.grad(_tiny(a, b), (a, b), grads, is_grads_batched=True)
    expected = torch.autograd.grad(torch.matmul(a, b), (a, b), grads, is_grads_batched=True)
    torch.testing.assert_close(actual, expected)


def test_the_log_changes_nothing_under_vmap():
    a, b = (torch.stack([x, x]) for x in _operands())
    with isogemm.dispatch_log() as log:
        torch.testing.assert_close(torch.vmap(_tiny)(a, b), torch.matmul(a, b))
    assert [entry.path for entry in log] == ["torch"]


def test_tensors_of_zeros_without_memory():
    zeros = torch._efficientzerotensor((3, 3, 7))
    assert_bitwise_equal(_tiny(zeros, _operands()[1]), torch.zeros(3, 3, 5))


def test_traced():
    a, b = _operands()
    traced = torch.jit.trace(_tiny, (a, b))
    torch.testing.assert_close(traced(2 * a, b), torch.bmm(2 * a, b))


def test_the_operator_validates():
    a, b = _operands()
    with pytest.raises(ValueError, match="same K"):
        torch.ops.isogemm.bmm(a, b.transpose(1, 2))
    with pytest.raises(ValueError, match="same K"):
        torch.ops.isogemm.bmm(a.to("meta"), b.transpose(1, 2).to("meta"))
    assert not op.served
