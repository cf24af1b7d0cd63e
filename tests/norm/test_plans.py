"""What norms, softmaxes and embedding launch on a GPU, a simulated one: which kernels, known calls or not."""

import pytest
import torch

pytest.importorskip("triton")

from idle_gpu import idle_gpu  # noqa: F401

import isogemm
from isogemm.norm import api, configs, row_norm


@pytest.fixture(autouse=True)
def simulated_gpu(idle_gpu):  # noqa: F811
    for known in (api._known, api._known_norms, api._known_softmaxes):
        known.clear()
    return idle_gpu


def half(*shape, grad=False):
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=grad)


def _names(launched):
    names = [name for name, *_ in launched]
    launched.clear()
    return names


CALLS = {
    "rms_norm": (
        lambda x, w: isogemm.rms_norm(x, w), ["_norm_kernel"], ["_norm_backward_kernel", "_weight_sums_kernel"],
    ),
    "rms_norm residual": (
        lambda x, w: isogemm.rms_norm(x, w, residual=x)[0], ["_norm_kernel"],
        ["_norm_backward_kernel", "_weight_sums_kernel"],
    ),
    "layer_norm": (
        lambda x, w: isogemm.layer_norm(x, w, w), ["_norm_kernel"],
        ["_norm_backward_kernel", "_weight_sums_kernel"],
    ),
    "softmax": (lambda x, w: isogemm.softmax(x), ["_softmax_kernel"], ["_softmax_backward_kernel"]),
    "log_softmax": (lambda x, w: isogemm.log_softmax(x), ["_softmax_kernel"], ["_softmax_backward_kernel"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_each_call_launches_the_same_known_or_not(name, simulated_gpu):
    call, forward, backward = CALLS[name]
    for grad in (False, True):
        x, w = half(9, 64, grad=grad), half(64, grad=grad)
        for _ in range(3):
            y = call(x, w)
            assert _names(simulated_gpu) == forward
            assert y.requires_grad == grad
            if grad:
                y.sum().backward()
                assert _names(simulated_gpu) == backward


@pytest.mark.parametrize("name", CALLS)
def test_other_tensors_are_not_taken_for_known_ones(name, simulated_gpu):
    """Other dtypes, sizes, strides and alignments, gradients or none: each has its own arguments."""
    call, *_ = CALLS[name]
    x, w = half(9, 64), half(64)
    call(x, w)
    for each, weight in (
        (half(10, 64), w), (half(9, 32), half(32)), (x.half(), w), (half(9, 64)[:, :32], w[:32]),
        (half(577)[1:].view(9, 64), w), (half(9, 64, grad=True), w), (x, half(64, grad=True)),
    ):  # fmt: skip
        simulated_gpu.clear()
        y = call(each, weight)
        assert y.shape == each.shape
        assert y.dtype == each.dtype
        assert y.requires_grad == (each.requires_grad or (weight.requires_grad and "softmax" not in name))
        assert len(simulated_gpu) == 1


def test_autocast_and_grad_mode_are_seen():
    x, w = half(9, 64, grad=True), half(64)
    isogemm.rms_norm(x, w)
    isogemm.softmax(x)
    with torch.no_grad():
        for _ in range(2):
            assert not isogemm.rms_norm(x, w).requires_grad
            assert not isogemm.softmax(x).requires_grad
    assert isogemm.rms_norm(x, w).requires_grad
    assert isogemm.softmax(x).requires_grad


def test_a_main_grad_is_added_to_and_marked(simulated_gpu):
    x, weight = half(70, 64), torch.nn.Parameter(half(64))
    for added in (False, True, True, False):
        weight.grad = None
        weight.main_grad = torch.zeros(64) if added else None
        weight.grad_added_to_main_grad = False
        simulated_gpu.clear()
        isogemm.rms_norm(x, weight).sum().backward()
        assert (weight.grad is None) == added
        assert weight.grad_added_to_main_grad == added


def test_gradients_that_nobody_wants_are_not_summed(simulated_gpu):
    isogemm.layer_norm(half(9, 64, grad=True), half(64), half(64)).sum().backward()
    assert _names(simulated_gpu) == ["_norm_kernel", "_norm_backward_kernel"]
    isogemm.layer_norm(half(9, 64), half(64), half(64, grad=True)).sum().backward()
    assert _names(simulated_gpu) == ["_norm_kernel", "_norm_backward_kernel", "_weight_sums_kernel"]


def test_long_rows(simulated_gpu):
    d = configs.LONG_COLUMNS + 8
    x, w = half(2, d, grad=True), half(d, grad=True)
    isogemm.layer_norm(x, w, w).sum().backward()
    backward = ["_coefficients_kernel", "_long_norm_backward_kernel", "_weight_sums_kernel"]
    assert _names(simulated_gpu) == ["_long_norm_kernel", *backward]
    isogemm.softmax(x).sum().backward()
    assert _names(simulated_gpu) == ["_long_softmax_kernel", "_long_softmax_backward_kernel"]


def test_few_rows_are_summed_by_more_programs(simulated_gpu):
    for rows, programs in ((1000, 63), (configs.SUM_ROWS * 300, 300)):
        x, w = half(rows, 2048), half(2048, grad=True)
        isogemm.rms_norm(x, w).sum().backward()
        assert [programs for name, programs, _ in simulated_gpu if name == "_norm_backward_kernel"] == [programs]
        simulated_gpu.clear()


def test_an_embedding(simulated_gpu):
    weight = half(9, 64, grad=True)
    isogemm.embedding(torch.zeros(70, dtype=torch.int64), weight).sum().backward()
    assert [(name, programs) for name, programs, _ in simulated_gpu] == [
        ("_long_pieces_kernel", 3),
        ("_embedding_backward_kernel", 70),
    ]


def test_through_the_dispatcher_the_launches_are_the_same(simulated_gpu):
    arguments = (half(9, 64), None, half(64), None, *[None] * 4, "rms_norm", 1e-6, 0.0, torch.bfloat16, True)
    _, _, statistics = torch.ops.isogemm.row_norm.default.redispatch(
        torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *arguments
    )
    x = arguments[0]
    row_norm._norm_backward(x, None, x, arguments[2], statistics, "rms_norm", 0.0, True, False, 16)
    assert _names(simulated_gpu) == ["_norm_kernel", "_norm_backward_kernel"]
    x, w = half(2, configs.LONG_COLUMNS + 8), half(configs.LONG_COLUMNS + 8)
    row_norm._norm_backward(x, x, x, w, torch.zeros(2, 2), "layer_norm", 0.0, True, True, configs.SUM_ROWS)
    assert _names(simulated_gpu) == ["_coefficients_kernel", "_long_norm_backward_kernel"]


def test_one_parameter_given_twice_is_added_to_its_main_grad_by_two_launches(simulated_gpu):
    weight = torch.nn.Parameter(half(64))
    weight.main_grad = torch.zeros(64)
    isogemm.layer_norm(half(9, 64), weight, weight).sum().backward()
    assert _names(simulated_gpu) == ["_norm_kernel", "_norm_backward_kernel", *["_weight_sums_kernel"] * 2]
