"""Hypothesis strategies over sizes, dtypes, data and strides. The one module here that needs hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from layouts import layouts_for
from tensor_cases import FLOAT_DTYPES, ODD_SIZES, TensorCase

from isogemm.verify.inputs import DATA_KINDS


def sizes(max_size: int, *, min_size: int = 1) -> st.SearchStrategy[int]:
    """Any size in the range, with odd sizes and both ends drawn more often."""
    odd = [size for size in ODD_SIZES if min_size <= size <= max_size]
    return st.one_of(st.sampled_from([min_size, *odd, max_size]), st.integers(min_size, max_size))


def float_dtypes() -> st.SearchStrategy[torch.dtype]:
    return st.sampled_from(FLOAT_DTYPES)


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**31 - 1)


def tensor_cases(
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    kinds: Sequence[str] = DATA_KINDS,
    layouts: Sequence[str] | None = None,
) -> st.SearchStrategy[TensorCase]:
    """Tensors of one shape and dtype over data kinds, layouts and seeds, as cases to `build`."""
    return st.builds(
        TensorCase,
        shape=st.just(tuple(shape)),
        dtype=st.just(dtype),
        kind=st.sampled_from(kinds),
        layout=st.sampled_from(layouts if layouts is not None else layouts_for(len(shape))),
        seed=seeds(),
    )
