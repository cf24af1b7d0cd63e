"""The rounding of products with an epilogue on the CPU: once, or after each operation as in eager mode."""

import functools

import pytest
import torch
from cpu_tensors import CONTRACT, HALVES, normal
from fused_cases import COMBINATIONS, fused_operands, gated_operands
from fused_forms import doubled, fused_form, gated_form
from idle_gpu import idle_gpu  # noqa: F401
from nonfinite import assert_same_nonfinite

import isogemm
from isogemm.epilogues import spec
from isogemm.epilogues.operands import Operands
from isogemm.gemm import fused, op
from isogemm.verify.activations import ACTIVATION_FORMS as ACTIVATIONS
from isogemm.verify.activations import GATE_FORMS as GATED
from isogemm.verify.compare import assert_bitwise_equal


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounded_once(dtype):
    """The 16-bit result is the fp32 one, rounded."""
    for tensors, options in COMBINATIONS.values():
        operands = fused_operands(tensors, 17, 100, 48, dtype)
        wide = isogemm.matmul_fused(**operands, **options, out_dtype=torch.float32)
        assert_bitwise_equal(isogemm.matmul_fused(**operands, **options), wide.to(dtype))
    x, weight, up = (
        normal(17, 33, dtype=dtype),
        normal(9, 33, seed=1, dtype=dtype),
        normal(9, 33, seed=2, dtype=dtype),
    )
    linear = functools.partial(isogemm.linear, x, weight, weight_up=up, activation="swiglu")
    assert_bitwise_equal(linear(), linear(out_dtype=torch.float32).to(dtype))


def _assert_same_but_for_the_kind_of_nan(actual, expected, what=""):
    assert torch.equal(actual.isnan(), expected.isnan()), what
    assert_bitwise_equal(actual.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf),
                         expected.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), what)  # fmt: skip


def _every_pattern(dtype):
    """[65536, 1]: each number that 16 bits can be."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[:, None]


# Arithmetic alone: torch has the same bits. The others are isogemm's own functions, torch's following the place.
TORCHS_BITS = ["relu", "relu2", "leaky_relu"]


def _rounded_forms():
    """Each activation's operations, every one rounded to the dtype: torch's, or what stands for it on the CPU."""
    return {name: spec.ACTIVATIONS[name].torch for name in (*ACTIVATIONS, *GATED)}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_eager_rounding_of_every_number(activation, dtype):
    """Bit-equal to torch, or at most an ulp from it; there the nearer (see tests/epilogues)."""
    a, b = _every_pattern(dtype), torch.ones(1, 4, dtype=dtype)
    result = isogemm.matmul_fused(a, b, activation=activation, rounding="eager")
    expected = ACTIVATIONS[activation](isogemm.mm(a, b))
    if activation in TORCHS_BITS:
        _assert_same_but_for_the_kind_of_nan(result, expected, activation)
    else:
        finite = expected[:, 0].isfinite()  # torch's gelu of the largest is not
        z, result, expected = (each[finite].double() for each in (a, result, expected))
        info = torch.finfo(dtype)  # an ulp, and torch's own error, which takes subnormals for 0
        slack = info.eps * expected.abs() + info.smallest_normal + 2**-23 * z.abs()
        assert bool(((result - expected).abs() <= slack).all())


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_eager_rounding(activation, dtype, monkeypatch):
    """Bit-equal to isogemm.mm and torch's own operations; the elementary functions among them aside."""
    if activation not in (None, *TORCHS_BITS):
        monkeypatch.setattr("fused_forms.ACTIVATION_FORMS", _rounded_forms())
    for names, numbers in (
        (("bias",), {}),
        (("column bias", "residual"), {}),
        (("bias", "c", "residual", "row_scale", "col_scale"), {"alpha": 0.3, "beta": -1.7}),
        (("alpha", "beta", "c"), {}),
    ):
        operands = fused_operands(names, 32, 100, 64, dtype)
        result = isogemm.matmul_fused(**operands, **numbers, activation=activation, rounding="eager")
        expected = fused_form(**operands, **numbers, activation=activation, product=isogemm.mm)
        assert_bitwise_equal(result, expected, str(names))


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", GATED)
def test_eager_rounding_of_gates(activation, dtype, monkeypatch):
    if activation != "reglu":
        monkeypatch.setattr("fused_forms.GATE_FORMS", _rounded_forms())
    x, weight, up = gated_operands(dtype, 32, 100, 64)
    operands = {"bias": normal(64, seed=3, dtype=dtype), "bias_up": normal(64, seed=4, dtype=dtype)}
    operands["residual"] = normal(32, 64, seed=5, dtype=dtype)
    result = isogemm.linear(x, weight, weight_up=up, activation=activation, rounding="eager", **operands)
    assert_bitwise_equal(result, gated_form(x, weight, up, activation, linear=isogemm.linear, **operands))


def test_eager_rounding_differs():
    """Or the tests above would say nothing."""
    operands = fused_operands(("bias",), 32, 100, 64, torch.bfloat16)
    once, eager = (isogemm.matmul_fused(**operands, activation="gelu", rounding=each) for each in ("once", "eager"))
    assert 0.01 < float((once != eager).float().mean()) < 0.9


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_inf(activation, dtype):
    """As in torch's fp64: relu of a NaN is one, an infinity goes where the activation takes it."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0, 60000.0, -60000.0], dtype=dtype)
    a, b = special[:, None], torch.ones(1, 3, dtype=dtype)
    for operands in ({}, {"bias": special[:3]}, {"residual": special[:3].repeat(9, 1)}, {"row_scale": special}):
        result = isogemm.matmul_fused(a, b, activation=activation, **operands)
        expected = fused_form(a.double(), b.double(), activation=activation, **doubled(operands))
        assert_same_nonfinite(result, expected.float(), str(tuple(operands)))
    assert bool(isogemm.matmul_fused(a[:1], b, activation=activation).isnan().all())


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", GATED)
def test_nan_and_inf_of_gates(activation, dtype):
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0, -1.0], dtype=dtype)
    x = torch.ones(2, 1, dtype=dtype)
    weight, up = special.repeat_interleave(6)[:, None], special.repeat(6)[:, None]
    result = isogemm.linear(x, weight, weight_up=up, activation=activation)
    assert_same_nonfinite(result, gated_form(x.double(), weight.double(), up.double(), activation))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "silu", "tanh", "sigmoid"])
def test_large_numbers_do_not_overflow_inside(activation):
    """60000 is finite in float16, and so is its activation, though not its square or its exponential."""
    for large, dtype in ((60000.0, torch.float16), (1e30, torch.bfloat16), (1e30, torch.float32)):
        a = torch.tensor([[large], [-large], [300.0], [-300.0]], dtype=dtype)
        result = isogemm.matmul_fused(a, torch.ones(1, 1, dtype=dtype), activation=activation)
        expected = ACTIVATIONS[activation](a.double()).to(dtype)
        assert_bitwise_equal(result + 0, expected + 0, activation)  # -0 is 0 here


def _weight(rows, columns, layout):
    flat = torch.zeros(2 * rows * columns, dtype=torch.bfloat16)
    strides = {"rows": (columns, 1), "columns": (1, rows), "sliced": (2 * columns, 1), "strided": (2 * columns, 2)}
    return flat.as_strided((rows, columns), strides[layout])


@pytest.mark.parametrize("layouts", [("rows", "columns"), ("columns", "rows"), ("strided", "rows")], ids="-".join)
def test_gates_of_two_layouts_are_cut_as_mm_cuts_them(layouts, idle_gpu):  # noqa: F811
    """One kernel reads both weights along k; `mm` of a weight that lies across k has one sum."""
    x = torch.zeros(8, 4096, dtype=torch.bfloat16)
    gate, up = (_weight(256, 4096, each) for each in layouts)
    chunks = [op.problem_of(x, each.mT, chunk=None).chunk for each in (gate, up)]
    assert chunks == [2048 * (layout == "rows") for layout in layouts]
    call = fused.Call(x, gate, up, Operands(activation="reglu", eager=True), by_rows=True)
    assert fused.find(call) is None
    assert fused.find(call._replace(operands=Operands(activation="reglu"))) is not None
    assert fused.find(call._replace(weight_up=_weight(256, 4096, layouts[0]))) is not None


@pytest.mark.parametrize("layout", ["rows", "columns", "sliced", "strided"])
def test_a_weight_in_both_places_keeps_its_strides(layout):
    """The kernel reads both by the strides of one."""
    weight = _weight(24, 40, layout)
    weight.copy_(torch.randn(24, 40))
    first, second = fused._alike(weight, weight)
    assert first.stride() == second.stride() == weight.stride()
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)
    assert torch.equal(*fused._alike(weight[:1].expand(24, 40), weight[:1].expand(24, 40)))


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0, 0)], ids=str)
def test_an_empty_weight_in_both_places(shape):
    assert [each.shape for each in fused._alike(torch.empty(shape), torch.empty(shape))] == [shape, shape]
