"""A matrix's bits follow neither the batch around it, nor the configuration, nor the run."""

from dataclasses import replace

import pytest
import torch

import isogemm
from isogemm.tiny import configs, op
from isogemm.tiny.configs import DotConfig, RegistersConfig, WholeConfig
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_operands, with_layout

BATCH = 65536
SLICES = [(0, 2), (1, 2), (BATCH - 2, 2), (32767, 3), (777, 1000)]  # start, size
PROBLEMS = [  # m, k, n, layout of b, dtype, precision
    (12, 64, 12, "transposed", torch.float32, None),
    (3, 7, 5, "contiguous", torch.float32, None),  # slices start at every alignment
    (42, 8, 42, "transposed", torch.float32, "tf32"),
    (12, 24, 16, "contiguous", torch.float32, "tf32"),
    (12, 12, 64, "contiguous", torch.bfloat16, None),
]


def _problem_id(problem):
    m, k, n, layout, dtype, precision = problem
    return f"{m}x{k}x{n}-{layout}-{dtype}-{precision}".replace("torch.", "")


@pytest.mark.parametrize("problem", PROBLEMS, ids=_problem_id)
def test_batch_position_and_run(forced, problem):
    m, k, n, layout, dtype, precision = problem
    a, b = make_operands("normal", (BATCH, m, k), (BATCH, k, n), seed=0, dtype=dtype, device="cuda")
    b = with_layout(b, layout)
    with isogemm.dispatch_log() as log:
        whole = isogemm.bmm(a, b, precision=precision)
        for start, size in SLICES:
            stop = start + size
            part = isogemm.bmm(a[start:stop], b[start:stop], precision=precision)
            assert_bitwise_equal(part, whole[start:stop], f"matrices {start}..{stop} alone")
    assert {entry.path for entry in log} == {"tiny"}
    for run in range(20):
        assert_bitwise_equal(isogemm.bmm(a, b, precision=precision), whole, f"run {run}")


@pytest.mark.parametrize("shared", ["a", "b"])
def test_shared_operand_as_if_copied(forced, shared):
    a, b = make_operands("normal", (100, 12, 20), (100, 20, 16), seed=1, device="cuda")
    one = {"a": (a[:1], b), "b": (a, b[:1])}[shared]
    copied = {"a": (a[:1].repeat(100, 1, 1), b), "b": (a, b[:1].repeat(100, 1, 1))}[shared]
    assert_bitwise_equal(isogemm.bmm(*one), isogemm.bmm(*copied))


def _signed_zeros(shape, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    choice = torch.randint(0, 4, shape, generator=generator, device="cuda")
    return torch.tensor([-1.0, -0.0, 0.0, 1.0], device="cuda")[choice]


def _operands(m, k, n, layout, dtype, kind):
    if kind == "zeros":
        a, b = _signed_zeros((33, m, k), 2).to(dtype), _signed_zeros((33, k, n), 3).to(dtype)
    else:
        a, b = make_operands(kind, (33, m, k), (33, k, n), seed=2, dtype=dtype, device="cuda")
    return a, with_layout(b, layout)


def _assert_all_equal(launch, kernel, candidates, shape, layout, dtype, precision="ieee"):
    for kind in ("normal", "wide", "cancelling", "zeros"):
        a, b = _operands(*shape, layout, dtype, kind)
        first = launch(kernel, a, b, precision, candidates[0])
        for config in candidates[1:]:
            assert_bitwise_equal(launch(kernel, a, b, precision, config), first, f"{config}, {kind} data")


def _legal(shape, layout, dtype, precision, candidates):
    a, b = _operands(*shape, layout, dtype, "zeros")
    problem = op.problem_of(a, b, precision)
    legal = [config for config in candidates if not configs.illegal(problem, config)]
    assert len(legal) >= 4
    return legal


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_registers_configs_agree(layout, launch):
    shape = (12, 20, 12)
    wide = {"contiguous": (4, 4, 1), "transposed": (1, 4, 4)}[layout]  # vec, a_vec, b_vec
    candidates = [
        RegistersConfig(1, 1, 1, 1, 1, unroll=20, num_warps=1),
        RegistersConfig(4, 2, *wide, unroll=20, num_warps=4),
        RegistersConfig(2, 1, *wide, unroll=8, num_warps=1, pdl=True),
        RegistersConfig(8, 4, 1, 2, 1, unroll=12, num_warps=2),
        RegistersConfig(6, 1, *wide, unroll=20, num_warps=2),
    ]
    legal = _legal(shape, layout, torch.float32, "ieee", candidates)
    _assert_all_equal(launch, "registers", legal, shape, layout, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.bfloat16, "ieee")],
    ids=["ieee", "tf32", "bf16"],
)
def test_dot_configs_agree(dtype, precision, launch):
    shape = (33, 20, 17)
    candidates = [
        DotConfig(16, 16, 16, 1, 1),
        DotConfig(16, 32, 16, 2, 3),
        DotConfig(64, 16, 32, 4, 2),
        DotConfig(64, 32, 64, 4, 1, pdl=True),
    ]
    legal = _legal(shape, "contiguous", dtype, precision, candidates)
    _assert_all_equal(launch, "dot", legal, shape, "contiguous", dtype, precision)


@pytest.mark.parametrize("shape", [(33, 20, 17), (1, 63, 3), (12, 64, 12), (64, 48, 33)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "misaligned"])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.bfloat16, "ieee")],
    ids=["ieee", "tf32", "bf16"],
)
def test_whole_has_the_bits_of_dot(dtype, precision, layout, shape, launch):
    """However it pads, packs and orders: the batch may choose between the two."""
    candidates = [
        WholeConfig(16, 8, 16, 1, 1),
        WholeConfig(16, 8, 64, 1, 4, ordered=True),
        WholeConfig(16, 16, 32, 2, 2, ordered=True),
        WholeConfig(32, 32, 16, 4, 4),
    ]
    for kind in ("normal", "wide", "cancelling", "zeros"):
        a, b = _operands(*shape, layout, dtype, kind)
        expected = launch("dot", a, b, precision)
        for config in candidates:
            assert_bitwise_equal(launch("whole", a, b, precision, config), expected, f"{config}, {kind} data")


@pytest.mark.parametrize("kernel", configs.KERNELS)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_chosen_configs_agree(kernel, precision, launch):
    """All that `choose` gives for one problem as the batch grows."""
    a, b = _operands(12, 24, 16, "contiguous", torch.float32, "normal")
    problem = op.problem_of(a, b, precision)
    batches = [2**power for power in range(1, 20)]
    chosen = {configs.choose(replace(problem, batch=batch), kernel) for batch in batches}
    _assert_all_equal(launch, kernel, sorted(chosen, key=str), (12, 24, 16), "contiguous", torch.float32, precision)


@pytest.mark.parametrize("shape", [(20, 20, 20), (17, 33, 50), (42, 42, 8), (64, 63, 64), (3, 7, 5)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.bfloat16, "ieee")],
    ids=["ieee", "tf32", "bf16"],
)
def test_entries_of_the_menu_agree(dtype, precision, layout, shape, launch):
    """As `configs.bits` says: the batch chooses between them, also between mma and wgmma."""
    for kind in ("normal", "wide", "cancelling", "zeros"):
        a, b = _operands(*shape, layout, dtype, kind)
        problem = op.problem_of(a, b, precision)
        first = {}
        for entry in configs.MENU:
            result = launch("", a, b, precision, configs.choose(problem, entry))
            group = configs.bits(configs.arithmetic(problem), entry)
            assert_bitwise_equal(result, first.setdefault(group, result), f"{entry}, {kind} data")


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("shape", [(12, 64, 12), (12, 20, 12), (3, 7, 5), (33, 20, 17)], ids=str)
def test_both_kernels_agree_in_ieee(shape, layout, launch):
    """The batch may choose between them for ieee float32 because they give the same bits."""
    for kind in ("normal", "wide", "cancelling", "zeros"):
        a, b = _operands(*shape, layout, torch.float32, kind)
        assert_bitwise_equal(launch("registers", a, b), launch("dot", a, b), f"registers and dot, {kind} data")


@pytest.mark.parametrize("shared", ["a", "b"])
def test_gradients_repeat(forced, shared):
    """A shared operand's gradient is a sum over the batch: the same bits in each of 20 runs."""
    a, b = make_operands("normal", (5000, 12, 20), (5000, 20, 16), seed=4, device="cuda")
    a, b = (a[:1], b) if shared == "a" else (a, b[:1])
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    grad = torch.randn(5000, 12, 16, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    first = torch.autograd.grad(isogemm.bmm(a, b), (a, b), grad)
    for run in range(20):
        again = torch.autograd.grad(isogemm.bmm(a, b), (a, b), grad)
        for name, got, expected in zip("ab", again, first, strict=True):
            assert_bitwise_equal(got, expected, f"gradient of {name}, run {run}")


def test_deterministic_algorithms(forced):
    """Nothing here needs an exception from torch.use_deterministic_algorithms."""
    a, b = make_operands("normal", (100, 12, 20), (1, 20, 16), seed=6, device="cuda")
    a, b = a.requires_grad_(), b.requires_grad_()
    result = isogemm.bmm(a, b)
    expected = (result, *torch.autograd.grad(result.square().sum(), (a, b)))
    torch.use_deterministic_algorithms(True)
    try:
        result = isogemm.bmm(a, b)
        actual = (result, *torch.autograd.grad(result.square().sum(), (a, b)))
    finally:
        torch.use_deterministic_algorithms(False)
    for got, same in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, same)
