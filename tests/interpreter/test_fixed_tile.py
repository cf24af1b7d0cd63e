"""The fixed tile that benchmarks show beside isogemm computes the product."""

import pytest
import torch

from isogemm.bench.fixed_tile import mm
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_operands, with_layout


@pytest.mark.parametrize("shape", [(1, 130, 17), (200, 96, 200), (1100, 140, 64)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_product(shape, layout):
    m, n, k = shape
    a, b = make_operands("normal", (m, k), (k, n), seed=0, dtype=torch.float16)
    exact, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert_no_worse_than_torch(mm(a, with_layout(b, layout)), a @ b, exact, scale=scale)
