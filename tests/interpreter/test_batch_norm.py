"""The batch norm's kernels on the CPU: poisoned memory around the rows and under the results, against float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from isogemm.epilogues import random
from isogemm.norm import configs
from isogemm.norm.configs import GROUP, GROUP_ROWS, TILE_ROWS
from isogemm.norm.kernels import batch_norm as kernels
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

EPS = 1e-5
SIZES = [(2, 3), (64, 16), (130, 48), (65, 100)]  # rows, columns


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cpu")


def _nans(*shape, dtype=torch.float32):
    return torch.full(shape, math.nan, dtype=dtype)


def _among_nans(x):
    """The same rows, with memory behind the last that is not to be read."""
    return torch.cat([x, _nans(TILE_ROWS, *x.shape[1:], dtype=x.dtype)])[: len(x)]


def _tiles(rows):
    return -(-rows // TILE_ROWS)


def _statistics(x, weight=None):
    rows, d = x.shape
    moments, statistics = _nans(_tiles(rows), 3, d), _nans(4, d)
    kernels.describe("moments", rows, d).run(_among_nans(x), moments)
    kernels.describe("statistics", rows, d, eps=EPS).run(moments, None, None, weight, statistics)
    return statistics


def _exact_statistics(x, weight=None):
    wide = x.double()
    inverse = (wide.var(0, correction=0) + EPS).rsqrt()
    scale = inverse if weight is None else inverse * weight.double()
    return torch.stack([wide.mean(0), inverse, scale, wide.var(0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_statistics(size, dtype):
    x, weight = _normal(*size, dtype=dtype) + 0.5, _normal(size[1], seed=1, dtype=dtype)
    exact = _exact_statistics(x, weight)
    error = (_statistics(x, weight) - exact).abs()
    assert (error <= 16 * 2**-24 * exact.abs() + 2**-24).all()  # of up to 64 squares one after another


def test_a_mean_far_from_zero_leaves_the_variance_exact():
    x = _normal(1000, 5) + 1e4
    exact = _exact_statistics(x)
    mean, variance = torch.empty(5), torch.empty(5)
    F.batch_norm(x, mean, variance, training=True, momentum=1.0)
    actual = _statistics(x)
    assert_no_worse_than_torch(actual[0], mean, exact[0])
    assert_no_worse_than_torch(actual[3], variance, exact[3], ulps=2)


def test_a_constant_column_has_no_variance():
    statistics = _statistics(torch.full((100, 3), 0.1))
    assert_bitwise_equal(statistics[0], torch.full((3,), 0.1))
    assert (statistics[3] >= 0).all()
    assert (statistics[3] < 1e-15).all()


def test_nan_stays_in_its_column():
    x = _normal(70, 4)
    x[66, 1] = math.nan
    assert _statistics(x).isnan().all(0).tolist() == [False, True, False, False]


def test_statistics_of_running_ones():
    mean, variance, weight = _normal(5).half(), _normal(5, seed=1).square(), _normal(5, seed=2).bfloat16()
    statistics = _nans(4, 5)
    kernels.describe("statistics", 77, 5, eps=EPS).run(None, mean, variance, weight, statistics)
    inverse = (variance.double() + EPS).rsqrt()
    expected = torch.stack([mean.double(), inverse, inverse * weight.double(), variance.double()])
    assert_no_worse_than_torch(statistics, expected.float(), expected)


def test_groups_of_tiles():
    rows, d = 2050 * TILE_ROWS - 7, 5
    means, squares = _normal(2050, d), _normal(2050, d, seed=1).square() * TILE_ROWS
    moments, parts = torch.stack([means + 3, means / 2**26, squares], 1), _nans(configs.groups(rows), 3, d)
    kernels.describe("group_moments", rows, d).run(_among_nans(moments), parts)
    statistics = _nans(4, d)
    kernels.describe("statistics", rows, d, eps=EPS).run(parts, None, None, None, statistics)
    counts = torch.full((2050, 1), float(TILE_ROWS), dtype=torch.float64)
    counts[-1] -= 7
    of_tiles = moments[:, 0].double() + moments[:, 1].double()
    mean = (counts * of_tiles).sum(0) / rows
    total = (squares.double() + counts * (of_tiles - mean) ** 2).sum(0)
    exact = torch.stack([mean, (total / rows + EPS).rsqrt(), (total / rows + EPS).rsqrt(), total / (rows - 1)])
    assert_no_worse_than_torch(statistics, exact.float(), exact, ulps=2)

    sums, parts, coefficients = _normal(2050 * 2, 6, d), _nans(configs.groups(rows), 2, d), _nans(2, d)
    sums[1::2] = math.nan  # a tile's other slot is zeros, and need not be read
    kernels.describe("group_sums", rows, d, SLOTS=2, WIDTH=6, WHICH=3).run(sums, parts)
    launch = kernels.describe("coefficients", rows, d)
    launch.run(parts, statistics, coefficients, None, None)
    of_product, of_grad = sums[::2, 3:5].double().sum(0)
    exact = torch.stack([of_grad / rows, of_product / rows * statistics[1]])
    assert (coefficients - exact).abs().max() <= 2**-23 * sums[::2, 3:5].abs().sum(0).max() / rows


def test_few_tiles_are_not_grouped():
    assert configs.groups(GROUP_ROWS) == configs.groups(2048 * TILE_ROWS) == 0
    assert configs.groups(2048 * TILE_ROWS + 1) == 2048 // GROUP + 1


def _sums(grad, x, statistics):
    rows, d = x.shape
    sums = _nans(_tiles(rows), 2, d)
    kernels.describe("gradient_sums", rows, d).run(_among_nans(grad), _among_nans(x), statistics, sums)
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forward_and_backward_of_the_batchs_statistics(size, dtype):
    rows, d = size
    x, grad = _normal(*size, dtype=dtype), _normal(*size, seed=3, dtype=dtype)
    weight, bias = _normal(d, seed=1), _normal(d, seed=2)
    statistics = _statistics(x, weight)
    y, dx, coefficients = _nans(*size, dtype=dtype), _nans(*size, dtype=dtype), _nans(2, d)
    of_weight, of_bias = _nans(d), _nans(d)
    kernels.describe("normalise", rows, d).run(x, statistics, bias, y)
    sums = _sums(grad, x, statistics)
    kernels.describe("coefficients", rows, d).run(sums, statistics, coefficients, of_weight, of_bias)
    backward = kernels.describe("batch_norm_backward", rows, d)
    backward.run(grad, x, statistics, coefficients, None, dx, None, None)

    def in_torch(dtype, of_parameters):
        leaves = [x.to(dtype), weight.to(of_parameters), bias.to(of_parameters)]
        leaves = [each.requires_grad_() for each in leaves]
        out = F.batch_norm(leaves[0], None, None, *leaves[1:], training=True, eps=EPS)
        return out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))

    exact = in_torch(torch.float64, torch.float64)
    for ours, theirs, right in zip((y, dx, of_weight, of_bias), in_torch(dtype, torch.float32), exact, strict=True):
        scale = right.abs().clamp_min(1.0)
        assert_no_worse_than_torch(ours, theirs.to(ours.dtype), right, ulps=4, scale=scale)


def test_tiles_with_slots_of_their_own():
    """Two rows of six, in the first of a tile's four slots; zeros in the others."""
    x, grad = _normal(100, 20), _normal(100, 20, seed=1)
    statistics, sums = _statistics(x), _nans(8, 6, 20)
    kernels.describe("gradient_sums", 100, 20, SLOTS=4, WIDTH=6, WHICH=2).run(grad, x, statistics, sums)
    plain = _sums(grad, x, statistics)
    assert_bitwise_equal(sums[::4, 2:4], plain)
    assert not sums.view(2, 4, 6, 20)[:, 1:, 2:4].any()
    assert sums[:, [0, 1, 4, 5]].isnan().all()
    coefficients = [_nans(2, 20), _nans(2, 20)]
    launch = kernels.describe("coefficients", 100, 20, SLOTS=4, WIDTH=6, WHICH=2)
    launch.run(sums, statistics, coefficients[0], None, None)
    kernels.describe("coefficients", 100, 20).run(plain, statistics, coefficients[1], None, None)
    assert_bitwise_equal(*coefficients)


def test_sums_are_of_their_own_rows():
    x, grad = _normal(200, 24), _normal(200, 24, seed=1)
    statistics = _statistics(x)
    whole = _sums(grad, x, statistics)
    assert_bitwise_equal(_sums(grad[64:128], x[64:128], statistics), whole[1:2])


@pytest.mark.parametrize("width", [16, 48])
def test_bits_of_a_row_are_its_own_once_the_statistics_are_known(width):
    x, grad, bias = _normal(300, width), _normal(300, width, seed=1), _normal(width, seed=2)
    statistics, coefficients = _statistics(x), _normal(2, width, seed=3)

    def both(at):
        rows = len(x[at])
        y, dx = _nans(rows, width), _nans(rows, width)
        kernels.describe("normalise", rows, width).run(x[at], statistics, bias, y)
        backward = kernels.describe("batch_norm_backward", rows, width)
        backward.run(grad[at], x[at], statistics, coefficients, None, dx, None, None)
        return y, dx

    whole = both(slice(None))
    for at in (slice(0, 1), slice(299, 300), slice(7, 177)):
        for part, all_rows in zip(both(at), whole, strict=True):
            assert_bitwise_equal(part, all_rows[at])


@pytest.mark.parametrize("width", [16, 48, 128])
@pytest.mark.parametrize("p", [0.2, 1.0])
def test_residual_and_dropout(width, p):
    x, grad, residual = (_normal(70, width, seed=seed) for seed in range(3))
    statistics, seed = _statistics(x), torch.tensor([2**40 + 5])
    plain, dx, dropped, alone = (_nans(70, width) for _ in range(4))
    launch = kernels.describe("batch_norm_backward", 70, width, p=p, PLACE=1)
    launch.run(grad, None, statistics, None, None, plain, None, None)
    assert_bitwise_equal(plain, grad * statistics[2])
    launch.run(grad, None, statistics, None, residual, dx, dropped, seed)
    assert_bitwise_equal(dx, plain + residual)
    kept = random.kept(seed + 1, 70, width, p)
    assert_bitwise_equal(dropped, torch.where(kept, dx * torch.tensor(random.scale(p)), 0.0))
    kernels.describe("dropped", 70, width, p=p, PLACE=1).run(dx, seed, alone)
    assert_bitwise_equal(alone, dropped)


def _run_batches(momenta, steps=3, dtype=torch.float32):
    """Two norms' running statistics after some batches, ours and torch's."""
    torch_norms = [torch.nn.BatchNorm1d(200, momentum=each, dtype=dtype) for each in momenta]
    ours = [(torch.zeros(200, dtype=dtype), torch.ones(200, dtype=dtype), torch.tensor(0)) for _ in momenta]
    for step in range(steps):
        args = []
        for place, (theirs, running) in enumerate(zip(torch_norms, ours, strict=True)):
            x = _normal(40, 200, seed=2 * step + place) + place
            theirs(x.to(dtype))
            args += [_exact_statistics(x.to(dtype)).float(), *running]
        kernels.describe_running(200, momenta).run(*args, *[None] * (8 - len(args)))
    return ours, torch_norms


@pytest.mark.parametrize("momenta", [(0.1,), (None,), (0.1, None)], ids=str)
def test_running_statistics(momenta):
    ours, theirs = _run_batches(momenta)
    for (mean, variance, batches), norm in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mean, norm.running_mean, rtol=0, atol=3e-7)  # a few roundings of numbers below 2
        torch.testing.assert_close(variance, norm.running_var, rtol=0, atol=6e-7)
        assert batches.item() == norm.num_batches_tracked.item() == 3


def test_running_statistics_in_part():
    statistics, mean, batches = _normal(4, 3), torch.zeros(3), torch.tensor(4)
    nothing = [None] * 4
    kernels.describe_running(3, (0.5,)).run(statistics, mean, None, None, *nothing)
    assert_bitwise_equal(mean, 0.5 * statistics[0])
    kernels.describe_running(3, (None,)).run(statistics, mean, None, None, *nothing)  # of uncounted batches
    assert_bitwise_equal(mean, 0.5 * statistics[0])
    kernels.describe_running(3, (0.1,)).run(statistics, None, None, batches, *nothing)
    assert batches.item() == 5
