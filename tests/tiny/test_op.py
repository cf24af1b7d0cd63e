"""isogemm.bmm's operators without a GPU: torch.compile, subclasses, transforms, and the fallback to torch.bmm."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import isogemm
from isogemm.core import env
from isogemm.core.plan import Cache, Plan, Step, contiguous
from isogemm.tiny import api, configs, op
from isogemm.tiny.configs import DotConfig
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_operands, with_layout

SHARING = {"neither": (3, 3), "a": (1, 3), "b": (3, 1), "both": (1, 1)}


def _operands(sharing="neither", dtype=torch.float32, m=3, k=7, n=5):
    a_batch, b_batch = SHARING[sharing]
    return make_operands("normal", (a_batch, m, k), (b_batch, k, n), seed=0, dtype=dtype)


def _leaves(sharing="neither", dtype=torch.float64):
    return tuple(x.requires_grad_() for x in _operands(sharing, dtype, m=2, k=3, n=2))


def _tiny(a, b):
    """The way of a call that the tiny family has a part in, which on the CPU isogemm.bmm does not go."""
    return api._bmm(a, b, None)


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
