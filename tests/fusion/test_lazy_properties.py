"""Programs drawn at random give the same with and without isogemm.autofuse: values, dtypes, aliases and gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from isogemm.fusion import autofuse
from isogemm.fusion.deferred import Deferred

SIZE = 4
LEAVES = {"x": (SIZE, SIZE), "w": (SIZE, SIZE), "r": (SIZE, SIZE), "row": (SIZE,), "column": (SIZE, 1), "scalar": ()}

# Of values by their place in the pool; modulo its size, so that any number is a place.
PRODUCTS = {
    "matmul": lambda a, b, c: a @ b,
    "mm": lambda a, b, c: a.mm(b),
    "linear": lambda a, b, c: F.linear(a, b),
    "linear bias": lambda a, b, c: F.linear(a, b, c) if c.shape == (SIZE,) else F.linear(a, b) + c,
    "addmm": lambda a, b, c: torch.addmm(c, a, b, beta=2, alpha=0.5),
    "batched": lambda a, b, c: (a.view(2, 2, SIZE) @ b).view(SIZE, SIZE),
}
POINTWISE = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "add scaled": lambda a, b: torch.add(a, b, alpha=0.5),
    "rsub": lambda a, b: torch.rsub(a, b),
    "mul": lambda a, b: a * b,
    "half": lambda a, b: 0.5 * a,
    "quarter": lambda a, b: a / 4,
    "neg": lambda a, b: -a,
    "one more": lambda a, b: a + 1,
    "relu": lambda a, b: torch.relu(a),
    "gelu": lambda a, b: F.gelu(a),
    "gelu_tanh": lambda a, b: F.gelu(a, approximate="tanh"),
    "silu": lambda a, b: F.silu(a),
    "tanh": lambda a, b: a.tanh(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "leaky_relu": lambda a, b: F.leaky_relu(a, 0.3),
    "square": lambda a, b: a.tanh().square(),
    "relu2": lambda a, b: F.relu(a).square(),
    "swish": lambda a, b: a * torch.sigmoid(a),
    "dropout": lambda a, b: F.dropout(a, 0.5, training=False),
    "transposed": lambda a, b: a.t() if a.ndim == 2 else a,
    "viewed": lambda a, b: a.view(a.shape) if a.is_contiguous() else a,
    "indexed": lambda a, b: a[...],
    "detached": lambda a, b: a.detach(),
    "cast": lambda a, b: a.float().to(a.dtype),
    "softmax": lambda a, b: a.softmax(0) if a.ndim else a,
    "untracked": lambda a, b: _without_gradients(a, b),
}
IN_PLACE = {
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(b),
    "relu_": lambda a, b: a.relu_(),
    "relu in place": lambda a, b: F.relu(a, inplace=True),
    "setitem": lambda a, b: a.__setitem__(0, 0.5) if a.ndim else a,
    "zero row": lambda a, b: a[:1].zero_() if a.ndim else a,
    "data": lambda a, b: a.data.mul_(0.5),
}


def _without_gradients(a, b):
    with torch.no_grad():
        return a + b


places = st.integers(0, 30)
product = st.tuples(st.sampled_from(sorted(PRODUCTS)), places, places, places)
latest = st.tuples(st.sampled_from(sorted(POINTWISE)), st.just(-1), places)
other = st.one_of(
    st.tuples(st.sampled_from(sorted(POINTWISE)), places, places),
    st.tuples(st.sampled_from(["forget", "look"]), places),
)
change = st.tuples(st.sampled_from(sorted(IN_PLACE)), places, places)


def _programs(others):
    chain = st.tuples(product, st.lists(latest, min_size=1, max_size=3)).map(lambda drawn: [drawn[0], *drawn[1]])
    parts = st.lists(st.one_of(chain, others.map(lambda step: [step])), min_size=1, max_size=6)
    return parts.map(lambda drawn: [step for part in drawn for step in part])


programs = _programs(other)
changing = _programs(st.one_of(other, change))


def _leaves(dtype, requires_grad):
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5 for shape in LEAVES.values())
    return [leaf.to(dtype).requires_grad_(requires_grad) for leaf in drawn]


def _execute(program, leaves):
    """The values that are left at the end; the leaves are the first of them."""
    pool = list(leaves)
    for name, *operands in program:
        if name == "forget":
            if len(pool) > len(LEAVES):
                del pool[len(LEAVES) + operands[0] % (len(pool) - len(LEAVES))]
            continue
        if name in PRODUCTS:
            matrices = [value for value in pool if value.shape == (SIZE, SIZE)]
            a, b = (matrices[place % len(matrices)] for place in operands[:2])
            pool.append(PRODUCTS[name](a, b, pool[operands[2] % len(pool)]))
            continue
        a, *rest = (pool[place] if place < 0 else pool[place % len(pool)] for place in operands)
        if name == "look":
            float(a.sum())
        elif name in POINTWISE:
            if operands[0] == -1 and len(pool) > len(LEAVES):
                pool.pop()  # nobody else is to read it
            pool.append(POINTWISE[name](a, *rest))
        else:
            b = rest[0] if torch.broadcast_shapes(a.shape, rest[0].shape) == a.shape else a
            IN_PLACE[name](a, b)
        del a, rest
    return pool


def _gradients(values, leaves):
    total = sum(
        (value * torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view(value.shape)).sum()
        for value in values
        if value.requires_grad
    )
    return torch.autograd.grad(total, leaves, allow_unused=True)


def _aliases(values):
    """Which values share memory."""
    return [[a.data_ptr() == b.data_ptr() for b in values] for a in values]


def _fused(program, leaves):
    with autofuse() as report:
        values = _execute(program, leaves)
    assert not any(type(value) is Deferred for value in values)
    return values, report


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs)
@example([("matmul", 0, 1, 0), ("relu", -1, 0), ("swish", 6, 0), ("forget", 0)])
@example([("matmul", 0, 1, 0), ("silu", -1, 0), ("matmul", 0, 2, 0), ("mul", 7, 8)])
def test_values_and_gradients(program):
    leaves = _leaves(torch.float64, True)
    plain = _execute(program, leaves)
    fused, _ = _fused(program, leaves)
    for left, right in zip(fused, plain, strict=True):
        assert (left.shape, left.dtype, left.requires_grad) == (right.shape, right.dtype, right.requires_grad)
        torch.testing.assert_close(left, right)
    assert _aliases(fused) == _aliases(plain)
    for left, right in zip(_gradients(fused, leaves), _gradients(plain, leaves), strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changing)
@example([("matmul", 0, 1, 0), ("relu", -1, 0), ("add_", 6, 0), ("mul_", 0, 1)])
@example([("matmul", 0, 1, 0), ("relu", -1, 0), ("look", 6), ("data", 6, 0)])
def test_values_that_change(program):
    plain = _execute(program, _leaves(torch.float64, False))
    fused, _ = _fused(program, _leaves(torch.float64, False))
    for left, right in zip(fused, plain, strict=True):
        torch.testing.assert_close(left, right)
    assert _aliases(fused) == _aliases(plain)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(changing)
def test_gradients_of_values_that_change(program):
    """Equal, or an error where the fused call reads again in the backward what torch's own would not."""

    def run(execute):
        leaves = _leaves(torch.float64, True)
        values = execute(program, [leaf * 1 for leaf in leaves])
        return values, _gradients(values, leaves)

    try:
        plain, expected = run(_execute)
    except RuntimeError:
        assume(False)
    try:
        fused, found = run(lambda *args: _fused(*args)[0])
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return
    for left, right in zip((*fused, *found), (*plain, *expected), strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding(dtype):
    """At most the error of the plain run, twice, and a few roundings of the largest value."""

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(programs)
    def check(program):
        plain, exact = (_execute(program, _leaves(each, False)) for each in (dtype, torch.float64))
        fused, _ = _fused(program, _leaves(dtype, False))
        for left, right, truth in zip(fused, plain, exact, strict=True):
            assert left.dtype == right.dtype
            allowed = 2 * (right - truth).abs().max() + 8 * torch.finfo(dtype).eps * truth.abs().max().clamp(min=1)
            assert (left - truth).abs().max() <= allowed

    check()


def test_programs_do_fuse():
    counts = []

    @settings(max_examples=100, deadline=None)
    @given(programs)
    def count(program):
        counts.append(_fused(program, _leaves(torch.float64, True))[1].fused.total())

    count()
    assert sum(count > 0 for count in counts) > len(counts) // 4
