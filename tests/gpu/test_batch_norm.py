"""The batch norm by its kernels: errors beside torch's against float64, and what its bits may depend on."""

import copy

import pytest
import torch
from gradients import assert_gradients_no_worse
from torch.nn import functional as F

from isogemm.epilogues import random
from isogemm.norm import configs
from isogemm.norm.kernels import batch_norm as kernels
from isogemm.norm.op import RunningStatistics, batch_norm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

EPS = 1e-5
MANY = 2100 * configs.TILE_ROWS + 5  # rows whose tiles are grouped
SIZES = [(2, 3), (64, 16), (1000, 17), (6400, 64), (37632, 128), (MANY, 128), (MANY, 48), (3000, 256), (500, 1000)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cuda")


def _running(width, momentum=0.1):
    """Numbers that bfloat16 has too."""
    mean, deviation = (_normal(width, seed=seed, dtype=torch.bfloat16) for seed in (3, 4))
    var = (deviation.square() + 0.1).float()
    return RunningStatistics(mean.float(), var, torch.tensor(2, device="cuda"), momentum)


def _ours(x, weight=None, bias=None, running=None, from_batch=True):
    return batch_norm(x, weight, bias, running, from_batch, EPS, x.dtype)


def _theirs(x, weight=None, bias=None, running=None, from_batch=True):
    mean, var = (None, None) if from_batch else (running.mean.to(weight.dtype), running.var.to(weight.dtype))
    return F.batch_norm(x, mean, var, weight, bias, training=from_batch, eps=EPS)


@pytest.mark.parametrize("from_batch", [True, False], ids=["batch", "running"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_as_exact_as_torch(size, dtype, from_batch):
    tensors = {
        "x": _normal(*size, dtype=dtype),
        "weight": _normal(size[1], seed=1, dtype=dtype),
        "bias": _normal(size[1], seed=2, dtype=dtype),
    }
    options = {"from_batch": from_batch, "running": None if from_batch else _running(size[1])}
    exact = {name: each.double() for name, each in tensors.items()}
    with poisoned_allocations():
        actual = _ours(**tensors, **options)
    assert_no_worse_than_torch(actual, _theirs(**tensors, **options), _theirs(**exact, **options), ulps=4)
    assert_gradients_no_worse(_ours, _theirs, tensors, _normal(*size, seed=5, dtype=dtype), **options)


@pytest.mark.parametrize("rows", [1000, MANY])
def test_a_mean_far_from_zero(rows):
    x = _normal(rows, 64) + 1e4
    ours, theirs = (
        RunningStatistics(torch.zeros(64, device="cuda"), torch.ones(64, device="cuda"), momentum=1.0) for _ in range(2)
    )
    y = _ours(x, running=ours)
    expected = F.batch_norm(x, theirs.mean, theirs.var, training=True, momentum=1.0)
    wide = x.double()
    assert_no_worse_than_torch(y, expected, _theirs(wide))
    assert_no_worse_than_torch(ours.mean, theirs.mean, wide.mean(0))
    assert_no_worse_than_torch(ours.var, theirs.var, wide.var(0), ulps=2)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_over_several_batches(momentum):
    norm = torch.nn.BatchNorm1d(200, momentum=momentum, device="cuda")
    exact = copy.deepcopy(norm).double()
    ours = RunningStatistics(
        norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone(), momentum
    )
    for step in range(4):
        x = _normal(100 + step, 200, seed=step) * (1 + step)
        norm(x)
        exact(x.double())
        _ours(x, running=ours)
    assert_no_worse_than_torch(ours.mean, norm.running_mean, exact.running_mean)
    assert_no_worse_than_torch(ours.var, norm.running_var, exact.running_var, ulps=2)
    assert ours.batches.item() == 4


def _step(x, grad, running, from_batch=True):
    width = x.shape[1]
    leaves = [x, _normal(width, seed=1), _normal(width, seed=2)]
    leaves = [each.detach().requires_grad_() for each in leaves]
    with poisoned_allocations():
        y = _ours(*leaves, running, from_batch)
        return y.detach(), *running[:3], *torch.autograd.grad(y, leaves, grad)


@pytest.mark.parametrize("size", [(37632, 128), (MANY, 128), (6400, 16)], ids=str)
def test_same_bits_again_and_at_another_place(size):
    x, grad = _normal(*size), _normal(*size, seed=5)
    expected = _step(x, grad, _running(size[1]))
    for _ in range(5):
        for got, same in zip(_step(x, grad, _running(size[1])), expected, strict=True):
            assert_bitwise_equal(got, same)
    rows, width = size
    moved = torch.empty(rows * width + 1, device="cuda")[1:].view(rows, width).copy_(x)  # not aligned
    for got, same in zip(_step(moved, grad, _running(width)), expected, strict=True):
        assert_bitwise_equal(got, same)


@pytest.mark.parametrize("width", [16, 48, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_follows_nothing_but_itself_in_evaluation(width, dtype):
    x, grad = _normal(1000, width, dtype=dtype), _normal(1000, width, seed=5, dtype=dtype)

    def both(at):
        y, _, _, _, dx, *_ = _step(x[at], grad[at], _running(width), from_batch=False)
        return y, dx

    whole = both(slice(None))
    for at in (slice(0, 1), slice(999, 1000), slice(3, 70), slice(100, 229)):
        for part, rows in zip(both(at), whole, strict=True):
            assert_bitwise_equal(part, rows[at])


def test_rows_behind_the_last_are_in_no_sum():
    memory = torch.full((256, 32), torch.nan, device="cuda")
    memory[:70] = _normal(70, 32)
    for got, same in zip(
        _step(memory[:70], _normal(70, 32, seed=5), _running(32)),
        _step(_normal(70, 32), _normal(70, 32, seed=5), _running(32)),
        strict=True,
    ):
        assert_bitwise_equal(got, same)
    statistics, moments = torch.empty(4, 32, device="cuda"), torch.empty(2, 3, 32, device="cuda")
    kernels.describe("moments", 70, 32).run(memory, moments)
    kernels.describe("statistics", 70, 32, eps=EPS).run(moments, None, None, None, statistics)
    assert statistics.isfinite().all()


@pytest.mark.alone
def test_offsets_past_32_bits():
    rows, last = 2**24 + 70, slice(-70, None)  # a tile that is full, and one that is not
    x = torch.ones(rows, 128, dtype=torch.bfloat16, device="cuda")
    x[last] = _normal(70, 128, dtype=torch.bfloat16)
    y, moments, statistics = torch.empty_like(x), torch.empty(2**18 + 2, 3, 128, device="cuda"), _normal(4, 128)
    kernels.describe("normalise", rows, 128).run(x, statistics, None, y)
    kernels.describe("moments", rows, 128).run(x, moments)
    few, of_few = torch.empty_like(y[last]), torch.empty(2, 3, 128, device="cuda")
    kernels.describe("normalise", 70, 128).run(x[last].clone(), statistics, None, few)
    kernels.describe("moments", 70, 128).run(x[last].clone(), of_few)
    assert_bitwise_equal(y[last], few)
    assert_bitwise_equal(moments[-2:], of_few)


def test_captured():
    """A replay updates the running statistics once more, by what is in x then."""
    x, running, again = _normal(500, 64), _running(64), _running(64)
    _ours(x, running=_running(64))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = _ours(x, running=running)
    for seed in (7, 8):
        x.copy_(_normal(500, 64, seed=seed))
        graph.replay()
        assert_bitwise_equal(y, _ours(x, running=again))
        for got, same in zip(running[:3], again[:3], strict=True):
            assert_bitwise_equal(got, same)


@pytest.mark.parametrize("width", [16, 48, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_of_the_gradient(width, dtype):
    grad, residual, seed = (
        _normal(300, width, dtype=dtype), _normal(300, width, seed=1, dtype=dtype), torch.tensor([77], device="cuda")
    )  # fmt: skip
    statistics = _normal(4, width, seed=2)
    dx, dropped, alone = (torch.full((300, width), torch.nan, device="cuda") for _ in range(3))
    launch = kernels.describe("batch_norm_backward", 300, width, p=0.3, PLACE=1)
    launch.run(grad, None, statistics, None, residual, dx, dropped, seed)
    assert_bitwise_equal(dx, grad.float() * statistics[2] + residual.float())
    kept = random.kept(seed + 1, 300, width, 0.3)
    scale = torch.tensor(random.scale(0.3), device="cuda", dtype=torch.float32)
    assert_bitwise_equal(dropped, torch.where(kept, dx * scale, 0.0))
    kernels.describe("dropped", 300, width, p=0.3, PLACE=1).run(dx, seed, alone)
    assert_bitwise_equal(alone, dropped)


@pytest.mark.parametrize("rows", [37632, MANY])
def test_overlapping_launches_wait_for_each_other(rows):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("launches overlap from sm_90 on")
    x, grad, width, groups = _normal(rows, 128), _normal(rows, 128, seed=1), 128, configs.groups(rows)

    def chain(pdl):
        def empty(*shape):
            return torch.full(shape, torch.nan, device="cuda")

        tiles, parts = empty(-(-rows // configs.TILE_ROWS), 3, width), empty(groups, 3, width)
        sums, part_sums = empty(len(tiles), 2, width), empty(groups, 2, width)
        statistics, coefficients, y, dx = empty(4, width), empty(2, width), empty(*x.shape), empty(*x.shape)
        kernels.describe("moments", rows, width, pdl=pdl).run(x, tiles)
        kernels.describe("group_moments", rows, width, pdl=pdl).run(tiles, parts)  # of none: no launch
        launch = kernels.describe("statistics", rows, width, eps=EPS, pdl=pdl)
        launch.run(parts if groups else tiles, None, None, None, statistics)
        kernels.describe("normalise", rows, width, pdl=pdl).run(x, statistics, None, y)
        kernels.describe("gradient_sums", rows, width, pdl=pdl).run(grad, x, statistics, sums)
        kernels.describe("group_sums", rows, width, pdl=pdl).run(sums, part_sums)
        launch = kernels.describe("coefficients", rows, width, pdl=pdl)
        launch.run(part_sums if groups else sums, statistics, coefficients, None, None)
        launch = kernels.describe("batch_norm_backward", rows, width, pdl=pdl)
        launch.run(grad, x, statistics, coefficients, None, dx, None, None)
        return y, dx

    expected = chain(False)
    for _ in range(5):
        for got, same in zip(chain(True), expected, strict=True):
            assert_bitwise_equal(got, same)
