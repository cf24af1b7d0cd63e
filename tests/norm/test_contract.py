"""Norms, softmaxes and embedding on the CPU: a row's bits depend on the row alone, its errors are at most torch's."""

import pytest
import torch
from cpu_tensors import CONTRACT, normal
from nonfinite import assert_same_nonfinite
from norm_cases import (
    CHUNK,
    EPS,
    OPERATIONS,
    RESIDUAL,
    WEIGHTED,
    Case,
    Lookup,
    assert_frozen_weights_change_nothing,
    assert_layouts_change_nothing,
    assert_micro_batches_add_up,
    assert_right,
)
from promises.rows import assert_batch, assert_chunks, assert_decode, assert_padding, slice_rows
from torch.nn import functional as F

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import LAYOUTS, with_layout

SIZES = (1, 3, 17, 64, 127, 1000)
ROWS, GRID = 65, (5, 13)


def _layouts(x):
    for layout in LAYOUTS:
        if layout != "transposed" or x.dim() > 1:
            yield layout, with_layout(x, layout)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_depends_on_nothing_but_itself(name, dtype):
    for n in (17, 130):
        f = Case(name, n, dtype, ROWS).function(GRID, LAYOUTS)
        assert_batch(f, (2, 3, 16, 64), (3, 17))
        assert_decode(f, 5)
    assert_padding(f)
    assert_chunks(f)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_batch_up_to_64_and_4097(name):
    case = Case(name, 33, torch.float32, 65)
    f = case.function()
    assert_batch(f, range(1, 65), (4097,))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_long_row(name):
    case = Case(name, 50257, torch.bfloat16, 3)
    whole = case.results(case.rows)
    for i in range(3):
        assert_bitwise_equal(case.results(slice_rows(case.rows, i, i + 1)), whole[i : i + 1], f"row {i} alone")
    assert_right(Case(name, 50257, torch.float32, 3, kind="normal"))


@pytest.mark.parametrize("name", OPERATIONS)
def test_threads_change_nothing(name):
    case = Case(name, 1000, torch.float32, ROWS)
    found, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(case.results(case.rows))
    finally:
        torch.set_num_threads(found)
    for each in results[1:]:
        assert_bitwise_equal(each, results[0])


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_worse_than_torch(name, dtype):
    for n in SIZES:
        assert_right(Case(name, n, dtype, 33, kind="normal"))
    for kind in ("wide", "model", "cancelling", "shifted"):
        assert_right(Case(name, 127, dtype, 33, kind=kind))


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_needs_a_gradient_changes_nothing(name):
    for dtype in (torch.float32, torch.bfloat16):
        assert_frozen_weights_change_nothing(Case(name, 65, dtype, 7))


@pytest.mark.parametrize("name", OPERATIONS)
def test_layouts_change_nothing(name):
    assert_layouts_change_nothing(Case(name, 65, torch.float16, 7), _layouts)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("name", RESIDUAL)
def test_a_residual_is_added_first(name, dtype):
    """And rounded as it is returned: the result is that of the sum."""
    x, residual = normal(7, 65, dtype=dtype), normal(7, 65, seed=1, dtype=dtype)
    operation, weights = OPERATIONS[name], Case(name, 65, dtype, 7).weights
    y, total = operation.ours(x=x, residual=residual, **weights)
    assert_bitwise_equal(total, x + residual)
    assert_bitwise_equal(y, operation.ours(x=total, **weights))


def test_the_offset_is_added_to_the_weight():
    x, weight = normal(7, 65), normal(65, seed=1).bfloat16().float()  # few bits: the sum is exact
    assert_bitwise_equal(isogemm.rms_norm(x, torch.zeros(65), offset=1.0), isogemm.rms_norm(x))
    assert_bitwise_equal(isogemm.rms_norm(x, weight, offset=0.5), isogemm.rms_norm(x, 0.5 + weight))


def test_forms_without_a_weight_or_with_a_bias_alone():
    x, bias = normal(7, 65), normal(65, seed=1)
    torch.testing.assert_close(isogemm.rms_norm(x, eps=EPS), F.rms_norm(x, (65,), None, EPS))
    torch.testing.assert_close(isogemm.layer_norm(x, None, bias), F.layer_norm(x, (65,), None, bias))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [0, 1, -2, 2, -1])
def test_softmax_along_any_axis(name, dim):
    function, theirs = getattr(isogemm, name), getattr(F, name)
    x = normal(5, 7, 9)
    for each in (x, x.transpose(0, 2), x[:, ::2]):
        leaf, grad = each.detach().requires_grad_(), normal(*each.shape, seed=1)
        result = function(leaf, dim)
        moved = function(leaf.movedim(dim, -1).contiguous(), -1).movedim(-1, dim)
        assert_bitwise_equal(result, moved, f"dim {dim} of {list(each.shape)}")
        torch.testing.assert_close(result, theirs(each, dim))
        (dx,), (expected,) = (torch.autograd.grad(found, leaf, grad) for found in (result, moved))
        assert_bitwise_equal(dx, expected, f"dx, dim {dim} of {list(each.shape)}")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_nonfinite_rows(name, dtype):
    case = Case(name, 17, dtype, 9, kind="normal")
    x, largest = case.rows["x"], torch.finfo(dtype).max
    x[1, 3], x[2, 3], x[3, 3] = torch.nan, torch.inf, -torch.inf
    x[4], x[5], x[6, ::2] = -torch.inf, 0, -torch.inf
    x[7] = 100.0
    if "softmax" in name:
        x[8], x[8, 0] = -largest, largest
    tensors = {each: case.rows[each] for each in case.inputs} | case.weights
    results, expected = (
        function(**{each: x.to(of) for each, x in tensors.items()})
        for function, of in ((case.operation.ours, dtype), (case.operation.theirs, torch.float64))
    )
    for got, right in zip(*(each if isinstance(each, tuple) else (each,) for each in (results, expected)), strict=True):
        assert_same_nonfinite(got, right, str(case))


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("name", WEIGHTED)
def test_weight_gradients_in_micro_batches(name, dtype):
    assert_micro_batches_add_up(Case(name, 17, dtype, 3 * CHUNK + 37, kind="normal"))


@pytest.mark.parametrize("name", WEIGHTED)
def test_weight_gradients_of_a_grid_of_tokens(name):
    """[B, T, n] of any strides: the bits of the same tokens in order."""
    case = Case(name, 17, torch.float32, 6 * 50, kind="normal")
    flat = case.gradients(case.operation.ours)
    case.rows = {each: x.view(6, 50, -1).transpose(0, 1).contiguous().transpose(0, 1) for each, x in case.rows.items()}
    for each, found in case.gradients(case.operation.ours).items():
        assert_bitwise_equal(found.reshape(flat[each].shape), flat[each], each)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_embedding(dtype):
    for lookup in (Lookup(7, 17, dtype, 300), Lookup(1000, 3, dtype, 63, padding_idx=1), Lookup(1, 1, dtype, 9)):
        lookup.assert_right()
    Lookup(37, 5, dtype, 2 * CHUNK + 7).assert_a_row_depends_on_its_own_tokens()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding_in_micro_batches(dtype, padding_idx):
    Lookup(37, 5, dtype, 3 * CHUNK + 37, padding_idx=padding_idx).assert_micro_batches_add_up()


def test_the_padding_row_gets_no_gradient():
    for padding_idx in (2, -5):  # the same row, counted from the end
        lookup = Lookup(7, 5, torch.float32, 300, padding_idx=padding_idx)
        found, result = lookup.gradient()
        assert not found[2].any()
        assert_bitwise_equal(result, lookup.weight[lookup.ids])
        before = {"weight": normal(7, 5, seed=9)}
        assert_bitwise_equal(lookup.main_grad(start=before)["weight"][2], before["weight"][2])


def test_embedding_of_any_ids_and_strides():
    lookup = Lookup(37, 17, torch.float16, 60)
    expected, result = lookup.gradient()
    for index in (torch.int32, torch.int64):
        for ids in (lookup.ids.to(index), with_layout(lookup.ids.to(index), "strided")):
            found, again = lookup.gradient(ids)
            assert_bitwise_equal(found, expected)
            assert_bitwise_equal(again, result)
    grid = lookup.ids.view(5, 12)
    for what, grad in _layouts(lookup.grad):
        assert_bitwise_equal(lookup.gradient(grad=grad)[0], expected, f"grad {what}")
    found, again = lookup.gradient(grid, lookup.grad.view(5, 12, 17))
    assert_bitwise_equal(found, expected, "a grid of ids")
    assert_bitwise_equal(again.flatten(0, 1), result)
    for what, weight in _layouts(lookup.weight):
        lookup.weight = weight
        assert_bitwise_equal(lookup.gradient()[1], result, f"weight {what}")
        assert_bitwise_equal(lookup.gradient()[0], expected, f"weight {what}")
