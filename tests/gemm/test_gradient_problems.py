"""Problems of the passes over a gradient's tokens."""

from dataclasses import replace

import pytest

from isogemm.epilogues.operands import Epilogue
from isogemm.gemm.configs import BIAS_CHUNK, BIAS_ROWS
from isogemm.gemm.gradient_problems import BIAS_BLOCK_T, ActivationGradProblem, BiasGradProblem


def test_chunks_of_bias_gradients():
    assert BIAS_CHUNK % BIAS_BLOCK_T == 0
    assert BIAS_CHUNK % BIAS_ROWS == 0


@pytest.mark.parametrize(
    ("others", "vectors"),
    [
        ({}, True),
        ({"n": 127, "strides": (127, 1)}, False),
        ({"n": 127, "strides": (128, 1)}, False),
        ({"strides": (129, 1)}, False),
        ({"aligned": False}, False),
        ({"t_inner": 10, "t_outer": 1281}, False),
        ({"t_inner": 10, "t_outer": 1280}, True),
        ({"strides": (1, 128)}, False),
        ({"strides": (256, 2)}, False),
    ],
    ids=str,
)
def test_rows_of_bias_gradients_that_are_read_by_vectors(others, vectors):
    """Loads of lone elements are not overlapped: they would be seven times slower."""
    problem = replace(BiasGradProblem(100, 128, "float32", "float32", (128, 1), BIAS_CHUNK), **others)
    assert problem.vectors is vectors


@pytest.mark.parametrize(
    ("t", "n", "split"), [(2048, 64, 0), (2049, 64, 1), (2049, 8191, 1), (2049, 8192, 0), (2**22, 4097, 0)]
)
def test_bias_gradients_of_few_columns_are_summed_by_chunks_side_by_side(t, n, split):
    assert BiasGradProblem(t, n, "float32", "float32", (n, 1), BIAS_CHUNK).split == split


@pytest.mark.parametrize(
    ("t", "n", "columns"), [(1024, 8192, 32), (1024, 8193, 64), (2048, 4096, 32), (2049, 4096, 64)]
)
def test_few_programs_of_an_activation_gradient_are_narrow(t, n, columns):
    problem = ActivationGradProblem(t, n, "bfloat16", Epilogue(activation="gelu"), n, sums=True)
    assert problem.block_n == columns
    assert replace(problem, dtype="float32", epilogue=Epilogue(activation="swiglu")).block_n == 32


def test_names():
    assert str(BiasGradProblem(9, 5, "float16", "float32", (5, 1), 1024, accumulate=True)) == (
        "[9,5] float16 chunk 1024 accumulated"
    )
