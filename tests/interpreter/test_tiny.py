"""The logic of the tiny kernels on the CPU: every case on poisoned outputs against fp64."""

import pytest
import torch
from layouts import with_layout
from nonfinite import assert_same_nonfinite

from isogemm.gemm.reference import round_to_tf32
from isogemm.tiny import configs, op
from isogemm.tiny.configs import DotConfig, Problem, RegistersConfig, WholeConfig
from isogemm.tiny.kernels import launch_bmm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_operands

SHAPES = [  # batch, m, k, n
    (2, 1, 1, 1),
    (3, 3, 7, 5),
    (5, 5, 16, 5),
    (2, 12, 20, 12),
    (2, 16, 16, 16),
    (3, 8, 17, 4),
    (2, 20, 4, 9),
]
LARGE = [(2, 33, 10, 41), (2, 42, 8, 42), (2, 12, 64, 12)]


def _problem(a, b, precision="ieee"):
    """As `op.describe` has it, for a GPU without what the interpreter cannot run: early launches and assembly."""
    described = op.problem_of(a, b, precision)
    fields = {name: getattr(described, name) for name in Problem.__dataclass_fields__}
    return Problem(**{**fields, "arch": "gfx942", "sm_count": 2})


def _launch(kernel, a, b, precision="ieee", config=None):
    problem = _problem(a, b, precision)
    out = torch.full((problem.batch, problem.m, problem.n), torch.nan, dtype=a.dtype)
    launch_bmm(out, a, b, problem, config or configs.choose(problem, kernel))
    return out


def _operands(shape, dtype=torch.float32, kind="normal", seed=0):
    batch, m, k, n = shape
    return make_operands(kind, (batch, m, k), (batch, k, n), seed=seed, dtype=dtype)


def _exact(a, b):
    return torch.matmul(a.double(), b.double()), torch.matmul(a.double().abs(), b.double().abs())


def _assert_close(actual, a, b, reference=None):
    """k fp32 products and k sums, each rounded once, then one rounding to the dtype."""
    exact, scale = _exact(a, b)
    k = a.shape[2]
    allowed = (2 * k * 2**-24 + torch.finfo(actual.dtype).eps) * scale
    error = (actual.double() - (exact if reference is None else reference)).abs()
    assert bool((error <= allowed).all()), f"largest error {error.max()}, or poison left"


@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_shapes(kernel, shape):
    a, b = _operands(shape)
    _assert_close(_launch(kernel, a, b), a, b)


@pytest.mark.parametrize("shape", [(3, 3, 7, 5), (2, 12, 20, 16)], ids=str)
@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_float16(kernel, shape):
    a, b = _operands(shape, torch.float16)
    _assert_close(_launch(kernel, a, b), a, b)


@pytest.mark.parametrize("b_layout", ["contiguous", "transposed", "sliced", "broadcast", "misaligned", "strided"])
@pytest.mark.parametrize("a_layout", ["contiguous", "transposed", "sliced", "broadcast"])
@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_layouts(kernel, a_layout, b_layout):
    """What lies around a sliced, misaligned or strided view is NaN."""
    a, b = _operands((3, 5, 12, 8))
    a, b = with_layout(a, a_layout), with_layout(b, b_layout)
    _assert_close(_launch(kernel, a, b), a, b)


@pytest.mark.parametrize("shared", ["a", "b"])
@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_shared_operand(kernel, shared):
    a, b = _operands((5, 4, 9, 6))
    a, b = (a[:1], b) if shared == "a" else (a, b[:1])
    _assert_close(_launch(kernel, a, b), a, b)


REGISTERS = [  # for m, k, n = 6, 12, 8
    RegistersConfig(1, 1, 1, 1, 1, unroll=1, num_warps=1),
    RegistersConfig(2, 1, 4, 4, 1, unroll=12, num_warps=1),
    RegistersConfig(4, 2, 2, 2, 1, unroll=8, num_warps=2),
    RegistersConfig(8, 4, 1, 1, 1, unroll=5, num_warps=4),
    RegistersConfig(4, 4, 4, 4, 1, unroll=4, num_warps=1),
    RegistersConfig(3, 1, 4, 4, 1, unroll=12, num_warps=1),  # divides m, no power of two
    RegistersConfig(6, 5, 1, 2, 1, unroll=12, num_warps=2),
]
REGISTERS_ALONG_K = [
    RegistersConfig(2, 2, 1, 4, 4, unroll=4, num_warps=1),
    RegistersConfig(4, 4, 1, 1, 4, unroll=8, num_warps=1),
    RegistersConfig(1, 8, 1, 4, 2, unroll=12, num_warps=2),
]


@pytest.mark.parametrize("config", REGISTERS + REGISTERS_ALONG_K, ids=str)
def test_registers_configs(config):
    """Any legal tile, vector and unroll gives the same bits."""
    a, b = _operands((3, 6, 12, 8))
    b = with_layout(b, "transposed" if config in REGISTERS_ALONG_K else "contiguous")
    assert configs.illegal(_problem(a, b), config) == ""
    result = _launch("registers", a, b, config=config)
    _assert_close(result, a, b)
    assert_bitwise_equal(result, _launch("registers", a, b, config=REGISTERS[0]))


@pytest.mark.parametrize(
    "config", [DotConfig(16, 16, 16, 1, 1), DotConfig(32, 16, 32, 2, 2), DotConfig(16, 32, 64, 1, 3)], ids=str
)
def test_dot_configs(config):
    a, b = _operands((3, 19, 20, 17))
    assert configs.illegal(_problem(a, b), config) == ""
    _assert_close(_launch("dot", a, b, config=config), a, b)


WHOLE = [  # for 5 matrices
    WholeConfig(16, 8, 16, 1, 1),
    WholeConfig(8, 16, 64, 4, 1),  # the last program has one matrix
    WholeConfig(32, 32, 32, 2, 2),
    WholeConfig(4, 4, 16, 1, 1),
]


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("shape", [(5, 1, 3, 17), (5, 17, 33, 3), (5, 33, 17, 1), (5, 3, 63, 33)], ids=str)
def test_whole_configs(shape, precision):
    """Any padding and packing, on operands that are misaligned and transposed."""
    a, b = _operands(shape)
    a, b = with_layout(a, "misaligned"), with_layout(b, "transposed")
    reference, _ = _exact(round_to_tf32(a), round_to_tf32(b)) if precision == "tf32" else _exact(a, b)
    for config in WHOLE:
        assert configs.illegal(_problem(a, b, precision), config) == ""
        _assert_close(_launch("whole", a, b, precision, config), a, b, reference)


@pytest.mark.parametrize("shared", ["a", "b"])
@pytest.mark.parametrize("config", WHOLE[1:3], ids=str)
def test_whole_packs_a_shared_operand(config, shared):
    a, b = _operands((5, 4, 9, 6))
    a, b = (a[:1], b) if shared == "a" else (a, b[:1])
    _assert_close(_launch("whole", a, b, config=config), a, b)


@pytest.mark.parametrize("kernel", configs.KERNELS)
@pytest.mark.parametrize("num_warps", [1, 4])
def test_batch_is_no_multiple_of_the_block(kernel, num_warps):
    """The last program has matrices left over; nothing is written past the last one."""
    a, b = _operands((5, 3, 4, 3))
    problem = _problem(a, b)
    config = {
        "registers": RegistersConfig(1, 1, 1, 1, 1, unroll=4, num_warps=num_warps),
        "dot": DotConfig(16, 16, 16, num_warps, 1),
        "whole": WholeConfig(8, 8, 16, 2, num_warps),
    }[kernel]
    buffer = torch.full((7, 3, 3), torch.nan)
    launch_bmm(buffer[1:6], a, b, problem, config)
    _assert_close(buffer[1:6], a, b)
    assert bool(buffer[[0, 6]].isnan().all())


def test_tf32_rounds_to_nearest():
    a, b = _operands((3, 16, 20, 16))
    reference, _ = _exact(round_to_tf32(a), round_to_tf32(b))
    result = _launch("dot", a, b, "tf32")
    _assert_close(result, a, b, reference)
    exact, scale = _exact(a, b)
    assert float(((result - exact).abs() / scale).max()) > 2**-14  # it is TF32, not fp32


def test_tf32_rounds_ties_to_even():
    """As the other families' kernels do."""
    ulp = 2.0**-10
    a = torch.tensor([1 + ulp / 2, 1 + 3 * ulp / 2, -1 - 5 * ulp / 2, 1 + ulp / 2 + 2**-23]).repeat(2, 16, 4)
    expected = torch.tensor([1.0, 1 + 2 * ulp, -1 - 2 * ulp, 1 + ulp]).repeat(2, 16, 4)
    assert_bitwise_equal(_launch("dot", a, torch.eye(16).repeat(2, 1, 1), "tf32"), expected)
    assert_bitwise_equal(_launch("dot", torch.eye(16).repeat(2, 1, 1), a.mT.contiguous(), "tf32"), expected.mT)


def test_tf32_keeps_what_it_can_represent():
    a, b = (round_to_tf32(x) for x in _operands((2, 16, 16, 16)))
    _assert_close(_launch("dot", a, b, "tf32"), a, b)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's word for inf * 0
@pytest.mark.parametrize(
    ("kernel", "precision"), [("registers", "ieee"), ("dot", "ieee"), ("dot", "tf32"), ("whole", "tf32")]
)
def test_nan_and_inf(kernel, precision):
    a, b = _operands((7, 5, 7, 6))
    for at, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        a[at, 2, 6] = value
        b[at, 0, 3] = value
    a[3, 0, 0], b[3, 0, 0] = torch.inf, 0.0
    a[4, 1, 0], a[4, 1, 1] = torch.inf, -torch.inf
    a.view(torch.int32)[5, 0, 0] = 0x7FFFFFFF  # CUDA's own NaN
    b.view(torch.int32)[6, 0, 0] = 0x7F800001  # the NaN next to Inf
    reference, _ = _exact(a, b)
    assert_same_nonfinite(_launch(kernel, a, b, precision), reference)


@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_wide_offsets(kernel):
    """Strides of 31 bits whose multiples need 64. The buffer is virtual memory, touched at its rows alone."""
    stride = 2**30 + 8
    try:
        buffer = torch.empty(2 * stride + 64, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"no 4.3 GB of address space: {error}")
    a, b = _operands((2, 3, 4, 3), torch.float16)
    far = buffer.as_strided(a.shape, (16, stride, 1)).copy_(a)
    _assert_close(_launch(kernel, far, b), a, b)
