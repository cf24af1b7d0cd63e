"""Elementary functions on the CPU: bits that follow the element alone, accuracy, and where they are torch's."""

import functools
import math
import os
import subprocess
import sys

import pytest
import torch
from tensor_cases import FLOAT_DTYPES
from torch.nn import functional as F

from isogemm.epilogues import elementary
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

TORCH = {
    "exp": torch.exp,
    "log": torch.log,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
EXACT = TORCH | {  # of float64; torch's own cancels where gelu is small
    "gelu": lambda x: 0.5 * x * torch.special.erfc(x * -math.sqrt(0.5)),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
}
THREADS = (1, 2, 3, 4, 8, 16)
named = pytest.mark.parametrize("name", TORCH)


@pytest.fixture
def restored_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _numbers(name, count=20_000, dtype=torch.float32):
    x = 4 * make_data("normal", (count,), seed=1)
    x[:8] = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -100.0, torch.inf, torch.nan])
    return (x.abs() + 1e-3 if name == "log" else x).to(dtype)


def _every(step):
    """Finite float32 numbers of every size and both signs."""
    positive = torch.arange(0, 0x7F800000, step, dtype=torch.int32).view(torch.float32)
    return torch.cat([positive, -positive])


def _ulp(x):
    size = x.abs().float()
    return (torch.nextafter(size, torch.tensor(torch.inf)) - size).double()


@named
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_an_element_has_the_same_bits_anywhere(name, dtype, restored_threads):
    """Alone, at the end of a vector, in a tensor that threads share: torch's own differ in the first two."""
    torch.set_num_threads(1)
    function, x = getattr(elementary, name), _numbers(name, 5000, dtype)
    whole = function(x)
    for size in (1, 3, 17):
        some = x[-50 * size :]
        assert_bitwise_equal(torch.cat([function(part) for part in some.split(size)]), whole[-50 * size :], f"{size}")
    assert_bitwise_equal(function(x.view(50, 100).t()), whole.view(50, 100).t(), "transposed")
    longer = torch.cat([x[:777], x.repeat(20), x[:1]])
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert_bitwise_equal(function(longer)[777:-1], whole.repeat(20), f"{threads} threads")


def test_torchs_own_bits_follow_the_place():
    """Or there would be no need of any of this."""
    x = _numbers("silu")
    parts = {name: torch.cat([TORCH[name](part) for part in x.split(7)]) for name in ("silu", "sigmoid", "gelu_tanh")}
    same = all(torch.equal(found.nan_to_num(), TORCH[name](x).nan_to_num()) for name, found in parts.items())
    assert not same or torch.backends.cpu.get_cpu_capability() == "DEFAULT"


# The sums of the results' bits, of numbers that no function of torch's has made.
DIGEST = """
import torch
from isogemm.epilogues import elementary

x = torch.arange(-65_000, 65_001, dtype=torch.float32) / 2048
for name in {names}:
    z = x.abs() + 2**-10 if name == "log" else x
    print(name, int(getattr(elementary, name)(z).view(torch.int32).long().sum()))
"""


def test_the_vector_unit_does_not_matter(capsys):
    """Processes of their own, since torch chooses when it starts; with any number of threads."""
    code = DIGEST.format(names=list(TORCH))
    found = []
    for capability in ("avx2", "default"):
        environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "3"}
        found.append(subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True))
    exec(code, {})
    expected = capsys.readouterr().out
    assert len(expected.splitlines()) == len(TORCH)
    assert [process.communicate()[0] for process in found] == [expected] * 2


# gelu's erf is exact to 1.3e-8, and 1 + erf to no more; nor would torch's be.
@pytest.mark.parametrize("name", [name for name in TORCH if name != "gelu"])
def test_error_in_ulps(name):
    x = _every(10_007)
    if name == "log":
        x = x[x >= torch.finfo(x.dtype).tiny]
    exact = EXACT[name](x.double())
    finite = exact.float().isfinite()
    error = (getattr(elementary, name)(x).double() - exact).abs()[finite] / _ulp(exact[finite])
    assert float(error.max()) < (0.71 if name == "erf" else 0.54)
    assert_bitwise_equal(getattr(elementary, name)(x)[~finite], exact[~finite].float())


@named
def test_no_worse_than_torch(name):
    x = _numbers(name)[8:]
    found, exact = getattr(elementary, name)(x), EXACT[name](x.double())
    assert_no_worse_than_torch(found, TORCH[name](x), exact, scale=exact.abs().clamp(min=2**-20))


def test_error_of_gelu():
    """By its argument, as torch's is judged: 0.7 ulp of the gate."""
    x = _every(10_007)
    error = (elementary.gelu(x).double() - EXACT["gelu"](x.double())).abs()
    assert bool((error <= 0.55 * 2**-23 * x.double().abs() + 2**-149).all())


@named
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number(name, dtype):
    """The nearest number, or one as near as torch's."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x > 0] if name == "log" else x[x.isfinite()]
    found, theirs, exact = getattr(elementary, name)(x), TORCH[name](x), EXACT[name](x.double())
    nearest = exact.float().to(dtype)
    finite = nearest.isfinite() & theirs.isfinite() & found.isfinite()
    errors = [(each.double() - exact).abs() for each in (found, theirs, nearest)]
    slack = 2**-26 * x.double().abs()
    assert bool((errors[0] <= torch.maximum(errors[1], errors[2] + slack))[finite].all())
    assert torch.equal(found.isfinite(), nearest.isfinite())


@pytest.mark.parametrize("name", [name for name in TORCH if name != "log"])
def test_special_values(name):
    """As in torch, whose own of gelu(inf) depend on the place."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e4, -1e4, 1e30, -1e30])
    expected = TORCH[name](x.double()).float()
    found = getattr(elementary, name)(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert_bitwise_equal(found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def test_log_of_nan():
    assert elementary.log(torch.tensor([torch.nan])).isnan().all()


@named
def test_of_float64_they_are_torchs(name):
    x = _numbers(name, 99)[8:].double()
    assert_bitwise_equal(getattr(elementary, name)(x), TORCH[name](x))


@named
def test_derivatives(name):
    """Two of them; where autograd records, the bits are those without."""
    function, x = getattr(elementary, name), _numbers(name, 999)[8:]
    ours, theirs, exact = (_derivatives(form, x.to(dtype)) for form, dtype in (
        (function, torch.float32), (TORCH[name], torch.float32), (TORCH[name], torch.float64),
    ))  # fmt: skip
    assert_bitwise_equal(ours[0], function(x))
    assert_bitwise_equal(ours[1], torch.autograd.grad(function(leaf := x.clone().requires_grad_()).sum(), leaf)[0])
    steep = 16 if name == "gelu_tanh" else 4  # its slope multiplies the rounding of 1 - tanh^2, twice in the second
    for found, torchs, right, factor in zip(ours, theirs, exact, (4, 4, steep), strict=True):
        assert_no_worse_than_torch(found, torchs, right, scale=1 + right.abs(), factor=factor)


def _derivatives(function, x):
    leaf = x.clone().requires_grad_()
    value = function(leaf)
    (first,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
    return value.detach(), first.detach(), torch.autograd.grad(first.sum(), leaf)[0]


@named
def test_the_argument_is_left_alone(name):
    function, x = getattr(elementary, name), _numbers(name, 99)
    before = x.clone()
    assert function(x).is_contiguous()
    assert_bitwise_equal(x, before)
    assert function(x[:0]).shape == (0,)
    assert function(x[9]).shape == ()
