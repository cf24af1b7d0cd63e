"""isogemm.bmm without a GPU: torch.bmm's results, the errors, autocast, the log, gradients."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layouts import with_layout
from torch.autograd import gradcheck, gradgradcheck

import isogemm
from isogemm.core import env
from isogemm.tiny import api
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_operands
from isogemm.verify.poison import poisoned_allocations

SOURCE = Path(__file__).parents[2] / "src"
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
