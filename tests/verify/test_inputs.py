import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import EVERY_LAYOUT, layouts_for
from layouts import with_layout as with_any_layout
from strategies import float_dtypes, sizes, tensor_cases
from tensor_cases import FLOAT_DTYPES, NEARBY, TensorCase, nearby

from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import DATA_KINDS, LAYOUTS, make_data, make_operands, with_layout

SHAPES = [(3, 5, 7), (1, 1, 1), (2, 0, 4), (0, 3, 2), (65, 17, 3)]


@pytest.mark.parametrize("kind", DATA_KINDS)
@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, torch.float64], ids=str)
def test_data_follow_the_seed_and_leave_the_global_generator(kind, dtype):
    state = torch.get_rng_state()
    first = make_data(kind, (3, 17, 8), seed=5, dtype=dtype)
    assert_bitwise_equal(first, make_data(kind, (3, 17, 8), seed=5, dtype=dtype))
    assert not torch.equal(first, make_data(kind, (3, 17, 8), seed=6, dtype=dtype))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.dtype == dtype
    assert first.isfinite().all()


@pytest.mark.parametrize("kind", DATA_KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_data_of_any_shape(kind, shape):
    assert make_data(kind, shape, seed=0).shape == shape


def test_wide_spans_its_exponents():
    exponents = torch.frexp(make_data("wide", (100_000,), seed=0)).exponent
    assert (exponents.min(), exponents.max()) == (-19, 20)


def test_wide_half_products_stay_finite():
    a, b = make_operands("wide", (64, 1000), (1000, 64), seed=0, dtype=torch.float16)
    assert (a.double() @ b.double()).half().isfinite().all()


@pytest.mark.parametrize("k", [2, 17, 64, 1000])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_cancelling_products_are_far_below_their_terms(k, dtype):
    a, b = make_operands("cancelling", (8, k), (k, 8), seed=1, dtype=dtype)
    a, b = a.double(), b.double()
    product, terms = (a @ b).abs(), a.abs() @ b.abs()
    assert product.mean() < 40 * torch.finfo(dtype).eps * terms.mean()
    assert (product > 0).any()


def test_model_has_outlier_channels_and_scaled_outputs():
    a, b = make_operands("model", (200, 1000), (1000, 50), seed=0)
    channels, outputs = a.std(0), b.std(0)
    assert int((channels > 30).sum()) == 10
    assert channels[channels <= 30].max() < 2
    assert 0.004 < outputs.min() < 0.01 < 0.04 < outputs.max() < 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_layout_keeps_values(layout, shape, dtype):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    assert_bitwise_equal(with_layout(tensor, layout), tensor)


def test_layout_strides():
    tensor = torch.arange(24.0).reshape(2, 3, 4)
    assert with_layout(tensor.mT, "contiguous").is_contiguous()
    assert with_layout(tensor, "transposed").stride() == (12, 1, 3)
    sliced = with_layout(tensor, "sliced")
    assert sliced.stride() == (42, 7, 1)
    assert sliced.storage_offset() == 42 + 7 + 1
    strided = with_layout(tensor, "strided")
    assert strided.stride() == (24, 8, 2)
    broadcast = with_any_layout(tensor, "broadcast")
    assert broadcast.stride(0) == 0
    assert torch.equal(broadcast[1], tensor[0])
    assert with_layout(tensor, "misaligned").storage_offset() == 1


@pytest.mark.parametrize("layout", ["sliced", "strided", "misaligned"])
def test_memory_outside_the_view_is_poison(layout):
    view = with_layout(torch.zeros(3, 5), layout)
    storage = view.as_strided((view.untyped_storage().nbytes() // 4,), (1,), 0)
    assert int((storage == 0).sum()) == 15
    assert int(storage.isnan().sum()) == len(storage) - 15 > 0


def test_layouts_for_axes():
    assert layouts_for(3) == EVERY_LAYOUT
    assert "broadcast" not in layouts_for(2)
    assert layouts_for(0) == ("contiguous", "misaligned")
    assert with_layout(torch.tensor(2.0), "misaligned").item() == 2.0


def test_bad_arguments():
    with pytest.raises(ValueError, match="kind: got 'odd', expected one of normal, wide, cancelling"):
        make_data("odd", (2,), seed=0)
    with pytest.raises(TypeError, match=r"dtype: got torch\.int32"):
        make_data("normal", (2,), seed=0, dtype=torch.int32)
    with pytest.raises(ValueError, match="layout: got 'odd'"):
        with_layout(torch.zeros(2), "odd")


def test_case_is_a_short_id():
    case = TensorCase((2, 3), torch.bfloat16, "wide", "sliced", 7)
    assert str(case) == "2x3-bfloat16-wide-sliced-7"
    assert_bitwise_equal(case.build(), case.build())


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_strategies(data):
    shape = tuple(data.draw(sizes(65)) for _ in range(3))
    case = data.draw(tensor_cases(shape, dtype=data.draw(float_dtypes())))
    tensor = case.build()
    assert tensor.shape == shape
    assert tensor.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_nearby_is_near_and_elsewhere(dtype):
    x = make_data("normal", (200, 30), seed=5, dtype=dtype)
    x[0] = 0
    found = [nearby(x, which) for which in range(NEARBY)]
    assert all(torch.equal(each, nearby(x, which)) for which, each in enumerate(found))
    for each in found:
        assert each.dtype == dtype
        assert not each[0].any()
        assert ((each - x).abs() <= (0.02 + torch.finfo(dtype).eps) * x.abs()).all()  # and its rounding
        assert (each[1:] != x[1:]).double().mean() > 0.5
    assert len({float(each.double().sum()) for each in found}) == NEARBY
