"""The batch norm on the CPU: errors against float64, running statistics beside torch's, bits, torch's machinery."""

import copy
import weakref

import pytest
import torch
from gradients import assert_gradients_no_worse
from torch.nn import functional as F

from isogemm.norm.op import RunningStatistics, batch_norm, encoder_norm, update_running
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

EPS = 1e-5


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype)


def _tensors(rows, width, dtype=torch.float32):
    x, weight, bias = _normal(rows, width, dtype=dtype), _normal(width, seed=1), _normal(width, seed=2)
    return {"x": x, "weight": weight, "bias": bias}


def _running(width, momentum=0.1):
    return RunningStatistics(
        _normal(width, seed=3), _normal(width, seed=4).square() + 0.1, torch.tensor(2), momentum=momentum
    )


def _ours(x, weight=None, bias=None, running=None, from_batch=True, dtype=None):
    return batch_norm(x, weight, bias, running, from_batch, EPS, dtype or x.dtype)


def _theirs(x, weight=None, bias=None, running=None, from_batch=True):
    mean, var = (None, None) if from_batch else (running.mean.to(x.dtype), running.var.to(x.dtype))
    rows = F.batch_norm(x.flatten(0, -2), mean, var, weight, bias, training=from_batch, eps=EPS)
    return rows.view(x.shape)


@pytest.mark.parametrize("from_batch", [True, False], ids=["batch", "running"])
@pytest.mark.parametrize("size", [(2, 3), (64, 16), (150, 17), (700, 128)], ids=str)
def test_as_exact_as_torch(size, from_batch):
    tensors, options = _tensors(*size), {"from_batch": from_batch}
    if not from_batch:
        options["running"] = _running(size[1])
    exact = {name: each.double() for name, each in tensors.items()}
    with poisoned_allocations():
        actual = _ours(**tensors, **options)
    assert_no_worse_than_torch(actual, _theirs(**tensors, **options), _theirs(**exact, **options), ulps=4)
    assert_gradients_no_worse(_ours, _theirs, tensors, _normal(*size, seed=5), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    """Rounded once: x is exact in float32."""
    x, weight = _normal(5, 30, 24, dtype=dtype), _normal(24, seed=1)
    wide = x.float().requires_grad_()
    x = x.requires_grad_()
    expected = _ours(wide, weight)
    assert_bitwise_equal(_ours(x, weight), expected.to(dtype))
    assert_bitwise_equal(_ours(x, weight, dtype=torch.float32), expected)
    grad = _normal(5, 30, 24, seed=2, dtype=dtype)
    (dx,) = torch.autograd.grad(_ours(x, weight), x, grad)
    assert_bitwise_equal(dx, torch.autograd.grad(expected, wide, grad.float())[0].to(dtype))


def test_a_mean_far_from_zero():
    x = _normal(1000, 5) + 1e4
    ours, theirs = (RunningStatistics(torch.zeros(5), torch.ones(5), momentum=1.0) for _ in range(2))
    y = _ours(x, running=ours)
    expected = F.batch_norm(x, theirs.mean, theirs.var, training=True, momentum=1.0)
    wide = x.double()
    assert_no_worse_than_torch(y, expected, _theirs(wide))
    assert_no_worse_than_torch(ours.mean, theirs.mean, wide.mean(0))
    assert_no_worse_than_torch(ours.var, theirs.var, wide.var(0))


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_running_statistics_over_several_batches(momentum, dtype):
    norm = torch.nn.BatchNorm1d(6, momentum=momentum, dtype=dtype)
    exact = copy.deepcopy(norm).double()
    ours = RunningStatistics(
        norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone(), momentum
    )
    for step in range(4):
        x = _normal(20 + step, 6, seed=step, dtype=dtype) * (1 + step)
        norm(x)
        exact(x.double())
        _ours(x, running=ours)
    assert_no_worse_than_torch(ours.mean, norm.running_mean, exact.running_mean)
    assert_no_worse_than_torch(ours.var, norm.running_var, exact.running_var)
    assert ours.batches.item() == norm.num_batches_tracked.item() == 4


def test_evaluation_changes_no_running_statistic():
    running = _running(7)
    before = copy.deepcopy(running)
    _ours(_normal(20, 7), running=running, from_batch=False)
    for got, same in zip(running[:3], before[:3], strict=True):
        assert_bitwise_equal(got, same)


def test_evaluation_without_running_statistics_takes_the_batchs():
    x, counted = _normal(20, 7), RunningStatistics(batches=torch.tensor(3))
    for running in (None, RunningStatistics(), counted):
        assert_bitwise_equal(_ours(x, running=running, from_batch=False), _ours(x))
    assert counted.batches.item() == 3


def test_running_statistics_in_part():
    statistics = _normal(4, 3)
    uncounted = RunningStatistics(torch.ones(3), momentum=None)
    update_running(statistics, uncounted)  # a mean of all batches, of which it is not known how many there were
    assert_bitwise_equal(uncounted.mean, torch.ones(3))
    counted = RunningStatistics(batches=torch.tensor(3))
    update_running(statistics, counted)
    assert counted.batches.item() == 4


def test_a_single_row():
    running = _running(7)
    for options in ({}, {"from_batch": False}, {"running": RunningStatistics(), "from_batch": False}):
        with pytest.raises(ValueError, match=r"x has shape \[1, 1, 7\]: .* more than one row"):
            _ours(_normal(1, 1, 7), **options)
    assert _ours(_normal(1, 1, 7), running=running, from_batch=False).isfinite().all()


@pytest.mark.parametrize("from_batch", [True, False])
def test_no_rows(from_batch):
    """A batch all the same, of which nothing is learnt."""
    running, x, weight = _running(3), torch.empty(0, 5, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    before = copy.deepcopy(running)
    y = _ours(x, weight, running=running, from_batch=from_batch)
    dx, of_weight = torch.autograd.grad(y.sum(), [x, weight])
    assert y.shape == dx.shape == (0, 5, 3)
    assert_bitwise_equal(of_weight, torch.zeros(3))
    assert_bitwise_equal(running.mean, before.mean)
    assert_bitwise_equal(running.var, before.var)
    assert running.batches.item() == 2 + from_batch


def test_bits_of_a_row_are_its_own_in_evaluation():
    x, running, grad = _normal(300, 24), _running(24), _normal(300, 24, seed=1)

    def both(at):
        leaf = x[at].clone().requires_grad_()
        y = _ours(leaf, _normal(24, seed=2), running=running, from_batch=False)
        return y, *torch.autograd.grad(y, leaf, grad[at])

    whole = both(slice(None))
    for at in (slice(0, 1), slice(299, 300), slice(7, 178)):
        for part, rows in zip(both(at), whole, strict=True):
            assert_bitwise_equal(part, rows[at])


@pytest.fixture
def threads():
    """threads(count): that many of them, until the test is over."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_bits_with_any_number_of_threads(threads):
    tensors = _tensors(3001, 70)

    def call():
        leaves = [each.clone().requires_grad_() for each in tensors.values()]
        running = _running(70)
        y = _ours(*leaves, running=running)
        return y, *running[:3], *torch.autograd.grad(y, leaves, _normal(3001, 70, seed=5))

    threads(1)
    alone = call()
    threads(3)
    for got, same in zip(call(), alone, strict=True):
        assert_bitwise_equal(got, same)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()


def _step(call, rows, from_batch=True, momentum=0.1, dtype=torch.float32):
    """The result, the gradients and what is in the buffers after a call."""
    leaves = [each.requires_grad_() for each in _tensors(rows, 12, dtype).values()]
    torch._dynamo.mark_dynamic(leaves[0], 0)
    running = _running(12, momentum)
    y = call(*leaves, running, from_batch)
    return [y.detach(), *running[:3], *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"from_batch": False}, {"dtype": torch.bfloat16}], ids=str)
def test_compiled(options):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_ours, fullgraph=True, backend=counter)
    for rows in (20, 130):
        for got, same in zip(_step(compiled, rows, **options), _step(_ours, rows, **options), strict=True):
            assert_bitwise_equal(got, same)
    assert counter.frame_count == 1  # for any number of rows


@pytest.mark.parametrize("running", [False, True])
def test_opcheck(running):
    x, weight = _normal(70, 5).requires_grad_(), _normal(5, seed=1).requires_grad_()
    mean, var = _running(5)[:2] if running else (None, None)
    arguments = (x, weight, None, mean, var, None, None, None, None, EPS, torch.bfloat16)
    torch.library.opcheck(torch.ops.isogemm.batch_norm.default, arguments)
    grad, statistics = _normal(70, 5, seed=2, dtype=torch.bfloat16), _normal(4, 5)
    for of_parameters in (False, True):
        backward = (grad, x.detach(), statistics, not running, of_parameters)
        torch.library.opcheck(torch.ops.isogemm.batch_norm_backward.default, backward)


@pytest.mark.parametrize("running", [_running(5), _running(5, None), RunningStatistics(batches=torch.tensor(1))])
def test_opcheck_of_the_update(running):
    torch.library.opcheck(torch.ops.isogemm.update_running.default, (_normal(4, 5), *running[:4]))
    both = (*running[:4], *_running(5)[:4])
    torch.library.opcheck(torch.ops.isogemm.update_running.default, (_normal(2, 4, 5), *both))


def test_two_norms_are_updated_as_each():
    statistics = _normal(2, 4, 5)
    together, apart = ([_running(5), _running(5, None)] for _ in range(2))
    update_running(statistics, *together)
    for each, running in zip(statistics, apart, strict=True):
        update_running(each, running)
    for one, other in zip(together, apart, strict=True):
        for now, expected in zip(one[:3], other[:3], strict=True):
            assert_bitwise_equal(now, expected)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [False, True])
def test_main_grad(compiled):
    tensors = _tensors(70, 12)
    weight, bias = (torch.nn.Parameter(tensors[name]) for name in ("weight", "bias"))
    plain = torch.autograd.grad(_ours(tensors["x"], weight, bias).square().sum(), [weight, bias])
    for each in (weight, bias):
        each.main_grad = torch.ones(12)
    call = torch.compile(_ours, fullgraph=True, backend="aot_eager") if compiled else _ours
    call(tensors["x"], weight, bias).square().sum().backward()
    for each, gradient in zip((weight, bias), plain, strict=True):
        assert each.grad is None
        assert_bitwise_equal(each.main_grad, 1.0 + gradient)


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm"])
def test_main_grad_is_the_one_at_the_backward(norm):
    """A main_grad that is replaced after the forward is freed."""
    tensors = _tensors(70, 12)
    weight, bias = (torch.nn.Parameter(tensors[name]) for name in ("weight", "bias"))
    for each in (weight, bias):
        each.main_grad = torch.zeros(12)
    before = [weakref.ref(each.main_grad) for each in (weight, bias)]
    x = tensors["x"]
    y = _ours(x, weight, bias) if norm == "batch_norm" else encoder_norm(x, weight, bias, norm, EPS, x.dtype)
    for each in (weight, bias):
        each.main_grad = torch.zeros(12)
    assert [each() for each in before] == [None, None]
    y.square().sum().backward()
    assert all(each.main_grad.count_nonzero() == 12 for each in (weight, bias))


def test_second_derivatives_are_refused():
    x = _normal(9, 4).requires_grad_()
    with pytest.raises(RuntimeError, match="batch_norm has no second derivative"):
        torch.autograd.grad(_ours(x).square().sum(), x, create_graph=True)
