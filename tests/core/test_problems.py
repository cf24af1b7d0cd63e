"""What problems of several families have in common; which architectures are usable: the families' test_configs.py."""

import pytest

from isogemm.core import problems


@pytest.mark.parametrize(("arch", "number"), [("sm_90", 90), ("sm_120", 120), ("gfx942", 0), ("cpu", 0), ("", 0)])
def test_number_of_an_architecture(arch, number):
    assert problems.sm(arch) == number


def test_layout_letters_are_those_of_blas():
    assert [problems.layout_letter(*strides) for strides in ((1, 8), (8, 1), (1, 1), (2, 8))] == ["n", "t", "n", "x"]


def test_unit_is_a_power_of_two_up_to_16():
    assert [problems.unit(size) for size in (0, 1, 6, 16, 24, 48, 1 << 20)] == [16, 1, 2, 16, 8, 16, 16]


def test_powers_of_two():
    assert problems.power_of_two(1, 2, 1024)
    assert not any(problems.power_of_two(2, size) for size in (0, -2, 3, 12))
