"""rms_norm, layer_norm, softmax, log_softmax and embedding as torch sees them: arguments, autograd, tracing, plans."""

import pytest
import torch
from cpu_tensors import normal
from torch.nn import functional as F

import isogemm
from isogemm.norm import configs
from isogemm.verify.compare import assert_bitwise_equal

X, W, B = normal(3, 5, 8), normal(8, seed=1), normal(8, seed=2)
CALLS = {
    "rms_norm": lambda x, w, b: isogemm.rms_norm(x, w, offset=1.0),
    "rms_norm residual": lambda x, w, b: sum(isogemm.rms_norm(x, w, residual=2 * x)),
    "layer_norm": lambda x, w, b: isogemm.layer_norm(x, w, b),
    "softmax": lambda x, w, b: isogemm.softmax(x, 1),
    "log_softmax": lambda x, w, b: isogemm.log_softmax(x),
}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: isogemm.rms_norm([1.0]), "x is a list; expected a torch.Tensor"),
        (lambda: isogemm.rms_norm(torch.tensor(1.0)), r"x has no dimensions; expected \[..., D\]"),
        (lambda: isogemm.rms_norm(torch.zeros(3, 8, dtype=torch.int32)), "x has dtype torch.int32; accepted"),
        (lambda: isogemm.rms_norm(X, W[None]), r"weight has shape \[1, 8\]; expected 1 dimensions"),
        (lambda: isogemm.rms_norm(X, W[:7]), "weight has 7, x has 8"),
        (lambda: isogemm.rms_norm(X, W.double()), "weight has torch.float64, x has torch.float32"),
        (lambda: isogemm.layer_norm(X, W, B[:3]), "bias has 3, x has 8"),
        (lambda: isogemm.layer_norm(X, residual=X[0]), r"residual has shape \[5, 8\]; expected 3 dimensions"),
        (lambda: isogemm.layer_norm(X, residual=X[:1]), r"residual has \[1, 5, 8\], x has \[3, 5, 8\]"),
        (lambda: isogemm.layer_norm(X, residual=X.half()), "residual has torch.float16, x has torch.float32"),
        (lambda: isogemm.softmax(3), "x is a int; expected a torch.Tensor"),
        (lambda: isogemm.softmax(X, 3), "dim is 3; x has 3 dimensions"),
        (lambda: isogemm.log_softmax(X.long()), "x has dtype torch.int64; accepted"),
        (lambda: isogemm.softmax(X, dtype=torch.int32), "dtype is torch.int32; accepted"),
        (lambda: isogemm.embedding([1], X[0]), "ids is a list; expected a torch.Tensor of int32 or int64"),
        (lambda: isogemm.embedding(X, X[0]), "ids has dtype torch.float32; accepted: torch.int32 and torch.int64"),
        (lambda: isogemm.embedding(torch.tensor([1]), X), r"weight has shape \[3, 5, 8\]; expected 2 dimensions"),
        (lambda: isogemm.embedding(torch.tensor([1]), X[0], padding_idx=5), "padding_idx is 5; the weight has 5 rows"),
        (lambda: isogemm.embedding(torch.tensor([5]), X[0]), "ids has 5; the weight has 5 rows"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, message):
    with pytest.raises((TypeError, ValueError, IndexError), match=message):
        call()


@pytest.mark.parametrize("name", CALLS)
def test_float64_is_torchs_and_differentiable_twice(name):
    leaves = [each.double().requires_grad_() for each in (X[:2, :2], W, B)]
    assert torch.autograd.gradcheck(CALLS[name], leaves)
    assert torch.autograd.gradgradcheck(CALLS[name], leaves)
    with isogemm.dispatch_log() as log:
        CALLS[name](*leaves)
    assert {(each.path, each.reason) for each in log} == {("torch", "float64")}


def test_float64_embedding():
    ids = torch.tensor([[0, 2], [2, 1]])
    weight = X[0, :4].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda weight: isogemm.embedding(ids, weight), weight)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_are_refused(name):
    x, w, b = (each.clone().requires_grad_() for each in (X, W, B))
    (dx,) = torch.autograd.grad(CALLS[name](x, w, b)[0].sum(), x, retain_graph=True)
    assert not dx.requires_grad
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(CALLS[name](x, w, b).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("name", CALLS)
def test_transforms_are_refused(name):
    with pytest.raises(RuntimeError, match="has no rule for forward-mode AD"):
        torch.func.vmap(lambda x: CALLS[name](x, W, B))(X[None])


def _gradients(call, x, *others):
    leaves = [each.clone().requires_grad_() for each in (x, *others)]
    result = call(*leaves)
    found = torch.autograd.grad(result, leaves, torch.ones_like(result), allow_unused=True)
    return [result.detach(), *(each for each in found if each is not None)]


@pytest.mark.parametrize("name", CALLS)
def test_one_compiled_graph_for_any_number_of_rows(name):
    torch._dynamo.reset()
    compiled = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 70, 9):
        x = normal(rows, 5, 8, seed=rows)
        for found, expected in zip(_gradients(compiled, x, W, B), _gradients(CALLS[name], x, W, B), strict=True):
            assert_bitwise_equal(found, expected)


def test_a_compiled_step_adds_to_main_grads():
    ids = torch.randint(9, (2000,))

    def step(ids, table, weight, bias):
        return isogemm.layer_norm(isogemm.embedding(ids, table), weight, bias)

    def main_grads(function):
        torch._dynamo.reset()
        parameters = [torch.nn.Parameter(each.clone()) for each in (normal(9, 8, seed=5), W, B)]
        for each in parameters:
            each.main_grad = torch.ones(each.shape)
        function(ids, *parameters).square().sum().backward()
        assert [each.grad for each in parameters] == [None] * 3
        assert all(each.grad_added_to_main_grad for each in parameters)
        return [each.main_grad for each in parameters]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for found, expected in zip(main_grads(compiled), main_grads(step), strict=True):
        assert_bitwise_equal(found, expected)


def test_opcheck():
    ids, weight = torch.tensor([[1, 0, 1]]), X[0].clone().requires_grad_()
    ops = torch.ops.isogemm
    x = X.clone().requires_grad_()
    torch.library.opcheck(ops.softmax.default, (x, True, torch.float32))
    torch.library.opcheck(ops.softmax_backward.default, (X, X, False, torch.bfloat16))
    torch.library.opcheck(ops.embedding.default, (ids, weight, None, None, -1))
    torch.library.opcheck(ops.embedding_backward.default, (X[:1, :3], ids, 5, 1, torch.float32))
    torch.library.opcheck(ops.norm_weight_sums.default, (X[0], 1, torch.bfloat16))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_without_rows(name, shape):
    x = torch.empty(shape)
    found = _gradients(CALLS[name], x, W, B)
    assert found[0].shape == found[1].shape == shape
    assert not any(each.any() for each in found[2:])


def test_rows_without_columns_and_numbers():
    assert isogemm.rms_norm(torch.empty(3, 0), torch.empty(0)).shape == (3, 0)
    assert isogemm.softmax(torch.empty(3, 0)).shape == (3, 0)
    number = torch.tensor(2.0, requires_grad=True)
    assert_bitwise_equal(isogemm.log_softmax(number, 0), torch.tensor(0.0))
    assert isogemm.embedding(torch.empty(0, 2, dtype=torch.int64), X[0]).shape == (0, 2, 8)
    table = X[0].clone().requires_grad_()
    isogemm.embedding(torch.tensor(2), table).sum().backward()
    assert_bitwise_equal(table.grad, F.one_hot(torch.tensor(2), 5).float()[:, None].expand(5, 8))


def test_a_wider_result_of_softmax():
    x = X.bfloat16()
    assert_bitwise_equal(isogemm.softmax(x, dtype=torch.float32), isogemm.softmax(x.float()))
    assert_bitwise_equal(isogemm.softmax(X, dtype=torch.float16), isogemm.softmax(X.half()))
    assert isogemm.log_softmax(X, dtype=torch.float64).dtype == torch.float64
    leaf = x.clone().requires_grad_()
    isogemm.softmax(leaf, dtype=torch.float32).square().sum().backward()
    assert leaf.grad.dtype == torch.bfloat16


def test_the_cpus_autocast_changes_nothing():
    with torch.autocast("cpu", torch.bfloat16):
        for name, call in CALLS.items():
            assert call(X, W, B).dtype == torch.float32, name
            assert call(X.bfloat16(), W, B).dtype == torch.bfloat16, name


def test_rows_per_sum():
    """More programs where there are few rows; fewer sums where there are many, unless they would not fit."""
    assert [configs.sum_rows(rows, 4096, 16) for rows in (1, 8192, 20000)] == [16, 16, 64]
    assert configs.sum_rows(20000, 8192, 16) == 16
    assert configs.sum_rows(1, 512, 64) == 64
