"""Norms, softmaxes and embedding on the GPU: a row's bits depend on the row alone; errors, main_grad, graphs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from nonfinite import assert_same_nonfinite
from norm_cases import (
    CHUNK,
    OPERATIONS,
    RESIDUAL,
    WEIGHTED,
    Case,
    Lookup,
    as_tuple,
    assert_frozen_weights_change_nothing,
    assert_layouts_change_nothing,
    assert_micro_batches_add_up,
    assert_right,
)
from promises.rows import assert_batch, assert_chunks, assert_decode, assert_padding, slice_rows
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import LAYOUTS, make_data, with_layout

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = (1, 17, 64, 127, 1000, 1025, 4096, 12345)
VOCABULARIES = (1, 1000, 50257, 151936, 262144)
SOFTMAXES = ("softmax", "log_softmax")
PAST = 2**31 // 4096 + 8  # rows of 4096 that pass 2^31 elements


def _case(name, n, dtype, count, kind=None):
    return Case(name, n, dtype, count, device=DEVICE, kind=kind)


def _layouts(x):
    for layout in LAYOUTS:
        if layout != "transposed" or x.dim() > 1:
            yield layout, with_layout(x, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_depends_on_nothing_but_itself(name, dtype):
    for n, grid in ((17, (5, 13)), (1000, (5, 13)), (4096, (5, 13)), (8192, None)):
        f = _case(name, n, dtype, 65).function(grid, LAYOUTS)
        assert_batch(f, (2, 3, 16, 31, 63, 64), (3, 17, 4097))
        assert_decode(f, 5)
        assert_padding(f)
        assert_chunks(f)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_many_rows(name, dtype):
    """As many as two programs per multiprocessor and more: every row as in a batch of 1, 64 and 4097."""
    for n in (64, 4096):
        case = _case(name, n, dtype, 20011)
        whole = case.results(case.rows)
        for first, last in ((0, 1), (0, 64), (20010, 20011), (7, 4104), (19000, 20011)):
            found = case.results(slice_rows(case.rows, first, last))
            assert_bitwise_equal(found, whole[first:last], f"{case}: rows {first} to {last}")


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_batch_up_to_64(name, n):
    if n in (17, 1000, 4096):
        assert_batch(_case(name, n, torch.bfloat16, 65).function(), range(1, 65), (64,))
    else:
        assert_batch(_case(name, n, torch.bfloat16, 33).function(), (2, 7, 32), (5,))


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("name", [*SOFTMAXES, "rms_norm", "layer_norm"])
def test_long_rows(name, vocab):
    for dtype in DTYPES:
        case = _case(name, vocab, dtype, 70)
        whole = case.results(case.rows)
        for first, last in ((0, 1), (69, 70), (0, 7), (3, 67)):
            found = case.results(slice_rows(case.rows, first, last))
            assert_bitwise_equal(found, whole[first:last], f"{case}: rows {first} to {last}")
        assert_right(_case(name, vocab, dtype, 9, kind="normal"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_worse_than_torch(name, dtype):
    for n in SIZES:
        assert_right(_case(name, n, dtype, 130, kind="normal"))
    for kind in ("wide", "model", "cancelling", "shifted"):
        for n in (127, 4096):
            assert_right(_case(name, n, dtype, 130, kind=kind))
    assert_right(_case(name, 1000, dtype, 5000, kind="normal"))


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_needs_a_gradient_changes_nothing(name):
    for n in (17, 4096):
        for dtype in DTYPES:
            assert_frozen_weights_change_nothing(_case(name, n, dtype, 70))


@pytest.mark.parametrize("name", OPERATIONS)
def test_layouts_change_nothing(name):
    for n in (17, 1000):
        assert_layouts_change_nothing(_case(name, n, torch.bfloat16, 17), _layouts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RESIDUAL)
def test_a_residual_is_added_first(name, dtype):
    case = _case(name, 1000, dtype, 33)
    x, residual = case.rows["x"], case.rows["residual"]
    y, total = case.operation.ours(x=x, residual=residual, **case.weights)
    assert_bitwise_equal(total, x + residual)
    assert_bitwise_equal(y, case.operation.ours(x=total, **case.weights))


@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_softmax_along_any_axis(name, dim):
    function = getattr(isogemm, name)
    x = make_data("normal", (17, 64, 127), seed=0, device=DEVICE)
    for each in (x, x.transpose(0, 2), x[:, ::2]):
        leaf, grad = each.detach().requires_grad_(), make_data("normal", tuple(each.shape), seed=1, device=DEVICE)
        result, moved = function(leaf, dim), function(leaf.movedim(dim, -1).contiguous(), -1).movedim(-1, dim)
        assert_bitwise_equal(result, moved)
        (dx,), (expected,) = (torch.autograd.grad(found, leaf, grad) for found in (result, moved))
        assert_bitwise_equal(dx, expected)


@pytest.mark.parametrize("n", [17, 4096, 50257])
@pytest.mark.parametrize("name", OPERATIONS)
def test_nonfinite_rows(name, n):
    for dtype in DTYPES:
        case = _case(name, n, dtype, 9, kind="normal")
        x, largest = case.rows["x"], torch.finfo(dtype).max
        x[1, 3], x[2, 3], x[3, 3] = torch.nan, torch.inf, -torch.inf
        x[4], x[5], x[6, ::2] = -torch.inf, 0, -torch.inf
        x[7] = 100.0
        if "softmax" in name:
            x[8], x[8, 0] = -largest, largest
        tensors = {each: case.rows[each] for each in case.inputs} | case.weights
        results = as_tuple(case.operation.ours(**tensors))
        expected = as_tuple(case.operation.theirs(**{each: x.double() for each, x in tensors.items()}))
        for got, right in zip(results, expected, strict=True):
            assert_same_nonfinite(got, right, str(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [17, 1000, 4096])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weight_gradients_in_micro_batches(name, n, dtype):
    assert_micro_batches_add_up(_case(name, n, dtype, 3 * CHUNK + 37, kind="normal"))


@pytest.mark.parametrize("name", WEIGHTED)
def test_weight_gradients_of_many_tokens(name):
    case = _case(name, 64, torch.bfloat16, 33 * CHUNK + 5, kind="normal")
    whole = case.main_grads()
    for cuts in ([16 * CHUNK], [CHUNK, 32 * CHUNK], list(range(3 * CHUNK, 33 * CHUNK, 3 * CHUNK))):
        for each, found in case.main_grads(cuts=cuts).items():
            assert_bitwise_equal(found, whole[each], f"{each}, cut at {cuts}")
    assert_right(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(dtype):
    Lookup(50257, 768, dtype, 5000, device=DEVICE).assert_right()
    Lookup(7, 65, dtype, 4097, device=DEVICE, padding_idx=2).assert_right()
    Lookup(1, 1, dtype, 2049, device=DEVICE).assert_right()
    Lookup(1000, 4096, dtype, 300, device=DEVICE, index=torch.int32).assert_right()
    Lookup(37, 130, dtype, 2 * CHUNK + 7, device=DEVICE).assert_a_row_depends_on_its_own_tokens()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_in_micro_batches(dtype):
    for vocab, n, padding_idx in ((37, 130, None), (1000, 768, 2)):
        Lookup(vocab, n, dtype, 3 * CHUNK + 37, device=DEVICE, padding_idx=padding_idx).assert_micro_batches_add_up()


def test_embedding_twice():
    """Tokens of one id alone, which atomics would add in any order."""
    lookup = Lookup(3, 1024, torch.float32, 20000, device=DEVICE)
    expected = lookup.main_grad()["weight"]
    for _ in range(5):
        assert_bitwise_equal(lookup.main_grad()["weight"], expected)


def _step(case, parameters):
    leaves = {each: case.rows[each].detach().requires_grad_() for each in case.inputs}
    results = as_tuple(case.operation.ours(**leaves, **parameters))
    torch.autograd.backward(results, [case.rows[each] for each in case.grads])
    return [each.detach() for each in results] + [each.grad for each in leaves.values()]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_training_step_in_a_graph(name):
    """Forward, dX, and weight gradients into main_grad, replayed on other data."""
    case, other = _case(name, 1000, torch.bfloat16, 2100), _case(name, 1000, torch.bfloat16, 2100, kind="normal")
    parameters = {each: torch.nn.Parameter(x) for each, x in case.weights.items()}
    for each in parameters.values():
        each.main_grad = torch.zeros(each.shape, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _step(case, parameters)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _step(case, parameters)
    expected = {}
    for rows in (other.rows, case.rows, other.rows):
        for each, x in case.rows.items():
            x.copy_(rows[each])
        for each in parameters.values():
            each.main_grad.zero_()
        for each in captured:
            each.fill_(torch.nan)
        graph.replay()
        found = [each.clone() for each in (*captured, *(each.main_grad for each in parameters.values()))]
        for each in parameters.values():
            each.main_grad.zero_()
        expected = [*_step(case, parameters), *(each.main_grad for each in parameters.values())]
        for got, right in zip(found, expected, strict=True):
            assert_bitwise_equal(got, right)


def test_embedding_in_a_graph():
    lookup = Lookup(37, 65, torch.bfloat16, 2100, device=DEVICE)
    weight = torch.nn.Parameter(lookup.weight)
    weight.main_grad = torch.zeros(weight.shape, device=DEVICE)
    expected = lookup.main_grad()["weight"]

    def step():
        isogemm.embedding(lookup.ids, weight).backward(lookup.grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        weight.main_grad.zero_()
        graph.replay()
        assert_bitwise_equal(weight.main_grad, expected)
    lookup.ids.copy_(lookup.ids.flip(0))
    weight.main_grad.zero_()
    graph.replay()
    assert_bitwise_equal(weight.main_grad, lookup.main_grad()["weight"], "other ids")


@pytest.mark.parametrize("name", OPERATIONS)
def test_runs_on_the_current_stream(name):
    case = _case(name, 1000, torch.bfloat16, 2100)
    expected = case.results(case.rows)
    late = {each: torch.full_like(x, torch.nan) for each, x in case.rows.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of ms: a launch on another stream would read the NaN
        for each, x in case.rows.items():
            late[each].copy_(x)
        found = case.results(late)
    stream.synchronize()
    assert_bitwise_equal(found, expected)


def test_two_threads():
    cases = [_case(name, n, torch.bfloat16, 70) for name in OPERATIONS for n in (64, 1000)] * 2
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda case: case.gradients(case.operation.ours), cases))
    torch.cuda.synchronize()
    for case, got in zip(cases, found, strict=True):
        for each, right in case.gradients(case.operation.ours).items():
            assert_bitwise_equal(got[each], right, f"{case}: {each}")


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_compiled_graph_for_any_number_of_rows(name):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(OPERATIONS[name].ours, fullgraph=True, dynamic=True, backend=counter)
    compilations = set()
    for count in (8, 300, 2):
        case = _case(name, 1000, torch.bfloat16, count)
        found = case.gradients(compiled)
        for each, right in case.gradients(case.operation.ours).items():
            assert_bitwise_equal(found[each], right, f"{count} rows: {each}")
        compilations.add(counter.frame_count)  # 2 where dynamo starts anew to make a constant of eps
    assert len(compilations) == 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiled_by_inductor(name):
    torch._dynamo.reset()
    case = _case(name, 1000, torch.bfloat16, 33)
    found = case.gradients(torch.compile(OPERATIONS[name].ours, fullgraph=True))
    for each, right in case.gradients(case.operation.ours).items():
        assert_bitwise_equal(found[each], right, each)


@pytest.mark.parametrize("name", OPERATIONS)
def test_autocast_gives_torchs_dtype(name):
    case = _case(name, 1000, torch.float32, 7, kind="normal")
    torchs = {"rms": F.rms_norm, "layer": F.layer_norm}.get(name.partition("_")[0])
    x = case.rows["x"]
    for each in (x, x.bfloat16()):
        tensors = {of: case.rows[of].to(each.dtype) for of in case.inputs}
        weights = {of: w.to(each.dtype) for of, w in case.weights.items()}
        with torch.autocast(DEVICE, torch.bfloat16):
            found = as_tuple(case.operation.ours(**tensors, **weights))[0]
            expected = torchs(each, (1000,)) if torchs else getattr(F, name)(each, -1)
        assert found.dtype == expected.dtype, f"of {each.dtype}"


@pytest.mark.parametrize("name", OPERATIONS)
def test_deterministic_algorithms(name):
    case = _case(name, 1000, torch.bfloat16, 70)
    expected = case.results(case.rows)
    torch.use_deterministic_algorithms(True)
    try:
        found = case.results(case.rows)
        lookup = Lookup(7, 64, torch.bfloat16, 300, device=DEVICE)
        gradient, _ = lookup.gradient()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_bitwise_equal(found, expected)
    assert_bitwise_equal(gradient, lookup.gradient()[0])


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_rows(name):
    for shape in ((0, 1000), (3, 0, 64)):
        case = _case(name, shape[-1], torch.bfloat16, 1)
        case.rows = {each: torch.empty(shape, dtype=torch.bfloat16, device=DEVICE) for each in case.rows}
        found, expected = (case.gradients(each) for each in (case.operation.ours, case.operation.theirs))
        for what, each in expected.items():
            assert found[what].shape == each.shape, what
            assert not found[what].any(), what


def test_devices_must_agree():
    x, weight = torch.zeros(3, 17, device=DEVICE), torch.zeros(17)
    for call in (isogemm.rms_norm, isogemm.layer_norm):
        with pytest.raises(ValueError, match="weight"):
            call(x, weight)
    with pytest.raises(ValueError, match="ids"):
        isogemm.embedding(torch.zeros(3, dtype=torch.int64), x)


@pytest.mark.alone
@pytest.mark.parametrize("name", ["rms_norm", "log_softmax"])
def test_past_2_to_the_31_elements(name):
    operation = OPERATIONS[name]
    x = torch.zeros(PAST, 4096, dtype=torch.bfloat16, device=DEVICE)
    x[-70:] = make_data("normal", (70, 4096), seed=0, dtype=torch.bfloat16, device=DEVICE)
    weights = _case(name, 4096, torch.bfloat16, 1).weights
    part, grad = x[-70:].clone().requires_grad_(), torch.zeros_like(x)
    grad[-70:] = make_data("normal", (70, 4096), seed=1, dtype=torch.bfloat16, device=DEVICE)
    (expected,) = as_tuple(operation.ours(x=part, **weights))
    (dx,) = torch.autograd.grad(expected, part, grad[-70:])
    x.requires_grad_()
    (found,) = as_tuple(operation.ours(x=x, **weights))
    assert_bitwise_equal(found[-70:], expected)
    (whole,) = torch.autograd.grad(found, x, grad)
    assert_bitwise_equal(whole[-70:], dx)


@pytest.mark.alone
def test_a_table_past_2_to_the_31_elements():
    weight = torch.zeros(PAST, 4096, dtype=torch.bfloat16, device=DEVICE)
    weight[-3:] = make_data("normal", (3, 4096), seed=0, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.tensor([PAST - 1, 0, PAST - 3, PAST - 1], device=DEVICE)
    weight.requires_grad_()
    result = isogemm.embedding(ids, weight)
    assert_bitwise_equal(result, weight.detach()[ids])
    grad = make_data("normal", (4, 4096), seed=1, dtype=torch.bfloat16, device=DEVICE)
    (found,) = torch.autograd.grad(result, weight, grad)
    assert_bitwise_equal(found[PAST - 3], grad[2])
    assert_bitwise_equal(found[PAST - 1], (grad[0].float() + grad[3].float()).bfloat16())
    assert not found[1 : PAST - 3].any()
