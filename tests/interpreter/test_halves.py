"""tf32x3 with operands that a pass splits, on the CPU: the bits of operands that are split in registers."""

from dataclasses import replace

import pytest
import torch
from gemm_launches import launch, seen_problem

from isogemm.gemm import configs
from isogemm.gemm.configs import Config
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data, make_operands, with_layout

TMA = Config(16, 16, 32, 4, 2, "tma")
STREAM = Config(16, 16, 32, 4, 2, "stream", persistent=True)
SPLIT = {  # every way to split operands, and every loop that multiplies halves
    "a": replace(TMA, block_n=32, split="a"),
    "b": replace(TMA, split="b", swapped=True),
    "both": replace(TMA, split="both", pdl=False),
    "both swapped": replace(TMA, block_m=32, split="both", swapped=True),
    "both persistent": replace(TMA, split="both", persistent=True, parts=2),
    "both with a rest": replace(TMA, split="both", rest_n=16),
    "both, stream": replace(STREAM, split="both"),
    "both, stream swapped": replace(STREAM, split="both", swapped=True, parts=2),
}
every_split = pytest.mark.parametrize("config", SPLIT.values(), ids=SPLIT.keys())


def _operands(shape, layout="nt"):
    m, n, k = shape
    operands = make_operands("normal", (m, k), (k, n), seed=0)
    kinds = ("contiguous" if letter == "n" else "transposed" for letter in layout)
    return tuple(with_layout(x, kind) for x, kind in zip(operands, kinds, strict=True))


def _assert_bits_of_registers(config, a, b, total=None, **described):
    """The bits of the canonical config, which splits operands in registers."""
    precision = {"precision": "tf32x3"} | described
    problem = seen_problem(a, b, total=total, **precision)
    start = None if total is None else total.clone()
    expected = launch(problem, replace(configs.canonical(problem), persistent=problem.chunks > 1), a, b, total=start)
    assert_bitwise_equal(launch(problem, config, a, b, total=total), expected)
    return expected


@pytest.mark.parametrize("shape", [(1, 17, 3), (33, 1, 17), (17, 65, 33), (3, 33, 65)], ids=str)
@every_split
def test_split_operands(config, shape):
    layouts = ("sliced", "misaligned")
    a, b = (with_layout(x, layout) for x, layout in zip(_operands(shape), layouts, strict=True))
    if config.split != "both":  # TMA reads the other operand as it is
        a, b = _operands((*shape[:2], -(-shape[2] // 4) * 4))
    exact, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    error = (_assert_bits_of_registers(config, a, b).double() - exact).abs()
    assert bool((error <= (3 * 2 * shape[2] * 2**-24 + 2**-21) * scale).all())


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@every_split
def test_split_layouts(config, layout):
    a, b = _operands((24, 40, 72), layout)
    _assert_bits_of_registers(config, a, b)


@pytest.mark.parametrize("layouts", [("strided", "transposed"), ("misaligned", "strided")], ids=" ".join)
def test_split_any_strides(layouts):
    a, b = (with_layout(x, layout) for x, layout in zip(_operands((19, 21, 35)), layouts, strict=True))
    _assert_bits_of_registers(SPLIT["both"], a, b)


@pytest.mark.parametrize("accumulated", [False, True], ids=["", "accumulated"])
@pytest.mark.parametrize("parallel", ["", "partials", "queued", "gathered"])
@every_split
def test_split_operands_in_chunks(config, parallel, accumulated):
    """For 136 = 64 + 64 + 8, wherever finished chunks wait beside the halves."""
    waits = parallel in ("queued", "gathered")
    if (waits and config.persistent) or (parallel == "gathered" and config.rest_n):
        pytest.skip("illegal")
    a, b = _operands((24, 40, 136), "tn")
    total = make_data("normal", (24, 40), seed=9) if accumulated else None
    if config.split != "both":
        a, b = _operands((24, 40, 136))
    _assert_bits_of_registers(replace(config, parallel_chunks=parallel), a, b, total, chunk=64)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's word for inf - inf
@every_split
def test_split_nan_inf_and_subnormals(config):
    a, b = _operands((20, 24, 24))
    a[2, 23], a[3, 5], a[4, 0], a[18, 7] = torch.nan, torch.inf, -torch.inf, torch.nan
    a[5, 1], b[1, 5], b[23, 3], b[0, 21] = torch.inf, 0.0, torch.nan, torch.inf
    a[7:9] = torch.tensor([1e-40, -0.0]).repeat(12)
    b[:, 7] *= 1e-38
    _assert_bits_of_registers(config, a, b)
