from __future__ import annotations

from collections.abc import Callable

import pytest

from isogemm.bench.store import Row
from isogemm.bench.views import FamilyView, number_type, view_of

VIEW = FamilyView("tiny", "Tiny batched GEMM", ("m", "n", "k"))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"dtype": "float32", "precision": "tf32"}, "fp32 tf32"),
        ({"dtype": "float32"}, "fp32 ieee"),
        ({"dtype": "bfloat16", "precision": ""}, "bf16"),
        ({"dtype": "int8"}, "int8"),
        ({}, ""),
    ],
)
def test_number_type(params: dict[str, int | str], expected: str) -> None:
    assert number_type(params) == expected


def test_a_family_without_a_view_gets_one_from_its_parameters(make_row: Callable[..., Row]) -> None:
    assert view_of("tiny", [make_row(cache="cold")]) == FamilyView("tiny", "tiny", ("m", "n", "k"))
    assert view_of("tiny", [], [VIEW]) is VIEW
