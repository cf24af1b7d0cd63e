import pytest
import torch

from isogemm.verify.poison import poison_value, poisoned_allocations

ALLOCATORS = {
    "empty": lambda dtype: torch.empty(3, 4, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(3, 4, dtype=dtype)),
    "empty_strided": lambda dtype: torch.empty_strided((3, 4), (1, 3), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1, dtype=dtype).new_empty(3, 4),
    "new_empty_strided": lambda dtype: torch.zeros(1, dtype=dtype).new_empty_strided((3, 4), (9, 2)),
}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("allocate", ALLOCATORS.values(), ids=ALLOCATORS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_nan(allocate, dtype):
    with poisoned_allocations():
        assert allocate(dtype).to(torch.complex64).isnan().all()


@pytest.mark.parametrize("allocate", ALLOCATORS.values(), ids=ALLOCATORS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_largest(allocate, dtype):
    with poisoned_allocations():
        assert (allocate(dtype) == torch.iinfo(dtype).max).all()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_are_largest(dtype):
    with poisoned_allocations():
        assert torch.empty(2, dtype=dtype).tolist() == [poison_value(dtype)] * 2


def test_gaps_between_strides_are_poisoned():
    with poisoned_allocations():
        tensor = torch.empty_strided((2, 3), (8, 2))
    assert tensor.as_strided((13,), (1,)).isnan().all()


def test_overlapping_strides():
    with poisoned_allocations():
        assert torch.empty_strided((4, 3), (0, 1)).isnan().all()


def test_out_poisons_the_view_alone():
    base = torch.zeros(2, 6)
    with poisoned_allocations():
        torch.empty((2, 3), out=base[:, ::2])
    assert base[:, ::2].isnan().all()
    assert (base[:, 1::2] == 0).all()


def test_empty_meta_sparse_and_grad():
    with poisoned_allocations():
        assert torch.empty(0).shape == (0,)
        assert torch.empty_strided((0, 3), (1, 1)).shape == (0, 3)
        assert torch.empty(2, device="meta").is_meta
        assert torch.empty(2, layout=torch.sparse_coo).is_sparse
        assert torch.empty(2, requires_grad=True).requires_grad
        assert torch.empty(2, 3, dtype=torch.bool).all()


def _attributes():
    names = ("new_empty", "new_empty_strided")
    functions = [torch.empty, torch.empty_like, torch.empty_strided]
    return functions + [getattr(torch.Tensor, name) for name in names] + [vars(torch.Tensor).keys() & set(names)]


def _poison_then(error):
    with poisoned_allocations():
        raise error


def test_restored_on_exit_and_on_error():
    before = _attributes()
    with poisoned_allocations():
        assert torch.empty is not before[0]
    assert _attributes() == before
    with pytest.raises(RuntimeError, match="inside"):
        _poison_then(RuntimeError("inside"))
    assert _attributes() == before


def test_nests():
    before = _attributes()
    with poisoned_allocations():
        with poisoned_allocations():
            assert torch.empty(2).isnan().all()
        assert torch.empty(2).isnan().all()
    assert _attributes() == before


def test_no_torch_mode():
    with poisoned_allocations():
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        assert torch._C._len_torch_function_stack() == 0


def test_torch_results_are_untouched():
    with poisoned_allocations():
        assert (torch.ones(2, 3) @ torch.ones(3, 2) == 3).all()
