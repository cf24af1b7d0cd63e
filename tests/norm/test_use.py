"""Norms, softmaxes and embedding in use on the CPU: autograd, torch.compile, autocast, opcheck, empty sizes, errors."""

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cpu_tensors import normal
from dispatching import RecordOperators, ThroughOperators
from norm_cases import OPERATIONS, RESIDUAL, WEIGHTED, Case, Lookup, as_tuple
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.verify.compare import assert_bitwise_equal

IDS = torch.tensor([[1, 0, 3], [3, 3, 2]])


def _embedding(x, weight):
    """An embedding in the form of the other operations, with an x."""
    return x + isogemm.embedding(IDS, weight, padding_idx=0)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def _same(found, expected, what=""):
    for got, right in zip(found, expected, strict=True):
        assert_bitwise_equal(got, right, what)


def _everything(case, function):
    return list(case.gradients(function).values())


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiled_has_the_bits_of_eager(name):
    case = Case(name, 33, torch.bfloat16, 7)
    compiled = torch.compile(case.operation.ours, fullgraph=True, backend="aot_eager")
    _same(_everything(case, compiled), _everything(case, case.operation.ours))
    tensors = {each: case.rows[each] for each in case.inputs} | case.weights
    with torch.no_grad():
        _same(as_tuple(compiled(**tensors)), as_tuple(case.operation.ours(**tensors)), "no gradients")


def test_compiled_embedding_has_the_bits_of_eager():
    compiled = torch.compile(isogemm.embedding, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (9, 300):
        lookup = Lookup(7, 5, torch.bfloat16, count, padding_idx=1)
        _same(lookup.gradient(function=compiled), lookup.gradient())


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_graph_for_any_number_of_rows(name):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(OPERATIONS[name].ours, fullgraph=True, dynamic=True, backend=counter)
    compilations = set()
    for count in (8, 11, 300, 2):
        case = Case(name, 33, torch.float32, count)
        _same(_everything(case, compiled), _everything(case, case.operation.ours), f"{count} rows")
        compilations.add(counter.frame_count)  # 2 where dynamo starts anew to make a constant of eps
    assert len(compilations) == 1


def _model(ids, table, gain, weight, bias):
    x, total = isogemm.rms_norm(isogemm.embedding(ids, table), gain, residual=isogemm.embedding(ids, table.tanh()))
    x = isogemm.layer_norm(x, weight, bias, residual=total)[0]
    return isogemm.log_softmax(x) * isogemm.softmax(x)


@inductor.patch(force_disable_caches=True)  # its key has the names of operators, not their code
def test_compiled_by_inductor():
    shapes = ((4, 8), (8,), (8,), (8,))
    leaves = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    results = [function(IDS, *leaves) for function in (torch.compile(_model, fullgraph=True), _model)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(result.square().sum(), leaves) for result in results))


@pytest.mark.parametrize("name", ["embedding", *WEIGHTED])
def test_main_grad_in_a_graph(name):
    """Accumulated at each call, in the tensor that is there at that call, as in eager."""
    if name == "embedding":
        function, inputs, weights = _embedding, {"x": normal(2, 3, 5)}, {"weight": normal(4, 5, seed=1)}
    else:
        case = Case(name, 17, torch.bfloat16, 7)
        function, weights = case.operation.ours, case.weights
        inputs = {each: case.rows[each] for each in case.inputs}
    trained = []
    for call in (torch.compile(function, fullgraph=True, backend="aot_eager"), function):
        parameters = {each: torch.nn.Parameter(x.clone()) for each, x in weights.items()}
        for each in parameters.values():
            each.main_grad = torch.ones(each.shape)
        for _ in range(2):
            results = as_tuple(call(**{each: x.clone().requires_grad_() for each, x in inputs.items()}, **parameters))
            sum(each.float().square().sum() for each in results).backward()
        trained.append(parameters)
    for got, right in zip(*(each.values() for each in trained), strict=True):
        assert got.grad is None
        assert got.grad_added_to_main_grad is True
        assert_bitwise_equal(got.main_grad, right.main_grad)
        assert not torch.equal(got.main_grad, torch.ones(got.shape))


@pytest.mark.parametrize("name", WEIGHTED)
def test_autograd_grad_adds_nothing_to_main_grad(name):
    """It returns gradients instead; a hook sees them too, and may change them."""
    case = Case(name, 17, torch.float32, 7)
    expected = case.gradients(case.operation.ours)
    parameters = {each: torch.nn.Parameter(x) for each, x in case.weights.items()}
    for each in parameters.values():
        each.main_grad = torch.zeros(each.shape)
    leaves = {each: case.rows[each].detach().requires_grad_() for each in case.inputs}
    results = as_tuple(case.operation.ours(**leaves, **parameters))
    grads = [case.rows[each] for each in case.grads]
    found = torch.autograd.grad(results, list(parameters.values()), grads, retain_graph=True)
    for each, got in zip(parameters, found, strict=True):
        assert_bitwise_equal(got, expected[f"gradient of {each}"])
        assert not parameters[each].main_grad.any()
    hooked = parameters["weight"]
    hooked.register_hook(lambda grad: grad * 0.5)
    torch.autograd.backward(results, grads)
    assert not hooked.main_grad.any()
    assert_bitwise_equal(hooked.grad, expected["gradient of weight"] * 0.5)


def test_autograd_grad_adds_nothing_to_the_tables_main_grad():
    weight = torch.nn.Parameter(normal(4, 5))
    weight.main_grad = torch.zeros(4, 5)
    result = isogemm.embedding(IDS, weight)
    (found,) = torch.autograd.grad(result, weight, torch.ones_like(result), retain_graph=True)
    assert not weight.main_grad.any()
    result.backward(torch.ones_like(result))
    assert weight.grad is None
    assert_bitwise_equal(weight.main_grad, found)


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradcheck(name):
    """By finite differences in float64."""
    case = Case(name, 5, torch.float64, 3, kind="normal")
    tensors = {each: case.rows[each] for each in case.inputs} | case.weights
    leaves = [each.clone().requires_grad_() for each in tensors.values()]
    assert gradcheck(lambda *given: case.operation.ours(**dict(zip(tensors, given, strict=True))), leaves)


def test_gradcheck_of_embedding():
    table = normal(4, 5, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda weight: isogemm.embedding(IDS, weight), table)


@pytest.mark.parametrize("name", OPERATIONS)
def test_opcheck(name):
    """Every operator that a training step runs."""
    case = Case(name, 9, torch.float32, 7)
    with RecordOperators() as recorded:
        expected = case.gradients(case.operation.ours)
    _same(expected.values(), _everything(case, case.operation.ours), "through the operators")
    assert recorded.calls
    for operator, args, kwargs in recorded.calls:
        torch.library.opcheck(operator, args, kwargs, test_utils=("test_schema", "test_faketensor"))


def test_opcheck_of_embedding():
    lookup = Lookup(7, 5, torch.float32, 30, padding_idx=2)
    with RecordOperators() as recorded:
        found = lookup.gradient()
    _same(found, lookup.gradient())
    assert recorded.calls
    for operator, args, kwargs in recorded.calls:
        torch.library.opcheck(operator, args, kwargs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", WEIGHTED)
def test_main_grad_through_the_operators(name):
    case = Case(name, 17, torch.float32, 33)
    expected = case.main_grads()
    with ThroughOperators():
        found = case.main_grads()
    _same(found.values(), expected.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_autocast_gives_torchs_dtype(name, dtype):
    """And gradients of the inputs' dtype."""
    case = Case(name, 17, torch.float32, 7, kind="normal")
    torchs = {"rms": F.rms_norm, "layer": F.layer_norm}.get(name.partition("_")[0])
    with torch.autocast("cpu", dtype):
        found = case.gradients(case.operation.ours)
        x = case.rows["x"]
        expected = torchs(x, (17,)) if torchs else getattr(F, name)(x, -1)
    assert next(iter(found.values())).dtype == expected.dtype
    assert all(each.dtype == torch.float32 for what, each in found.items() if what.startswith("gradient"))


@pytest.mark.parametrize("shape", [(0, 17), (3, 0, 17), (0, 3, 17)], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_rows(name, shape):
    case = Case(name, 17, torch.bfloat16, 1)
    case.rows = {each: torch.empty(shape, dtype=torch.bfloat16) for each in case.rows}
    found, expected = (case.gradients(each) for each in (case.operation.ours, case.operation.theirs))
    for what, each in expected.items():
        assert found[what].shape == each.shape, what
        assert found[what].dtype == each.dtype, what
        assert not found[what].any(), what


def test_no_columns_and_no_ids():
    for function in (isogemm.softmax, isogemm.log_softmax):
        x = torch.empty(3, 0).requires_grad_()
        assert function(x).shape == (3, 0)
        assert torch.autograd.grad(function(x).sum(), x)[0].shape == (3, 0)
        assert function(torch.empty(0, 4), 0).shape == (0, 4)
    lookup = Lookup(7, 5, torch.float32, 0)
    found, result = lookup.gradient()
    assert result.shape == (0, 5)
    assert not found.any()
    assert isogemm.embedding(torch.empty(2, 0, dtype=torch.int64), lookup.weight).shape == (2, 0, 5)


@pytest.mark.parametrize("name", OPERATIONS)
def test_vectors(name):
    case = Case(name, 17, torch.float32, 1)
    whole = case.results(case.rows)
    assert_bitwise_equal(case.results({each: x[0] for each, x in case.rows.items()}), whole[0])


def test_a_single_id_and_a_single_number():
    table = normal(4, 5)
    assert_bitwise_equal(isogemm.embedding(torch.tensor(2), table), table[2])
    assert_bitwise_equal(isogemm.softmax(torch.tensor([3.0])), torch.ones(1))
    assert_bitwise_equal(isogemm.log_softmax(torch.tensor([3.0])), torch.zeros(1))


def _leaves(case):
    tensors = {each: case.rows[each] for each in case.inputs} | case.weights
    return {each: x.detach().clone().requires_grad_() for each, x in tensors.items()}


@pytest.mark.parametrize("name", RESIDUAL)
def test_one_of_two_results(name):
    """The gradient of the result alone, and of the sum alone, as if the other's were zero."""
    case = Case(name, 17, torch.float32, 7, kind="normal")
    for used in range(2):
        leaves = _leaves(case)
        result = case.operation.ours(**leaves)[used]
        result.backward(case.rows[case.grads[used]])
        case.rows[case.grads[1 - used]] = torch.zeros(7, 17)
        expected = case.gradients(case.operation.ours)
        for each, leaf in leaves.items():
            if used == 0 or each in case.inputs:
                assert_bitwise_equal(leaf.grad, expected[f"gradient of {each}"], f"{each}, result {used}")
        case = Case(name, 17, torch.float32, 7, kind="normal")


@pytest.mark.parametrize("name", RESIDUAL)
def test_x_added_to_itself(name):
    case = Case(name, 17, torch.float32, 7, kind="normal")
    x = case.rows["x"].clone().requires_grad_()
    y, total = case.operation.ours(x=x, residual=x, **case.weights)
    assert_bitwise_equal(total.detach(), 2 * x.detach())
    total.sum().backward()
    assert_bitwise_equal(x.grad, torch.full((7, 17), 2.0))
    assert y.shape == x.shape


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_expanded_gradient(name):
    """As .sum() has it: one number in memory."""
    case, found = Case(name, 17, torch.float32, 7), []
    for grad in (torch.ones(()).expand(7, 17), torch.ones(7, 17)):
        case.rows |= dict.fromkeys(case.grads, grad)
        found.append(_everything(case, case.operation.ours))
    _same(*found)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_saved_may_not_change(name):
    """A tensor that changed since the forward: the backward raises, or did not need it."""
    case = Case(name, 17, torch.float32, 7, kind="normal")
    expected = case.gradients(case.operation.ours)
    for changed in (*case.inputs, *case.weights, *case.grads):
        leaves = _leaves(case)
        results = as_tuple(case.operation.ours(**leaves))
        with torch.no_grad():
            (results[case.grads.index(changed)] if changed in case.grads else leaves[changed]).mul_(2)
        try:
            torch.autograd.backward(results, [case.rows[each] for each in case.grads])
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
        else:
            for each, leaf in leaves.items():
                assert_bitwise_equal(leaf.grad, expected[f"gradient of {each}"], f"{each}, {changed} changed")


@pytest.mark.parametrize("name", OPERATIONS)
def test_second_derivatives_are_right_or_refused(name):
    case = Case(name, 5, torch.float64, 3, kind="normal")
    tensors = {each: case.rows[each] for each in case.inputs} | case.weights
    leaves = [each.clone().requires_grad_() for each in tensors.values()]

    def call(*given):
        return case.operation.ours(**dict(zip(tensors, given, strict=True)))

    with contextlib.suppress(RuntimeError):
        assert gradgradcheck(call, leaves, raise_exception=False)
    leaves = _leaves(Case(name, 5, torch.float32, 3, kind="normal"))
    loss = as_tuple(case.operation.ours(**leaves))[0].square().sum()
    with contextlib.suppress(RuntimeError):
        (dx,) = torch.autograd.grad(loss, leaves["x"], create_graph=True)
        assert dx.requires_grad
        torch.autograd.grad(dx.square().sum(), leaves["x"])


@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_mode_is_refused(name):
    case = Case(name, 17, torch.float32, 7)
    tensors = {each: case.rows[each] for each in case.inputs} | case.weights
    with torch.autograd.forward_ad.dual_level():
        tensors["x"] = torch.autograd.forward_ad.make_dual(tensors["x"], torch.randn(7, 17))
        with pytest.raises((RuntimeError, NotImplementedError)):
            case.operation.ours(**tensors)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
def test_checkpointing(name, use_reentrant):
    case = Case(name, 17, torch.bfloat16, 7)

    def saved(**tensors):
        names = list(tensors)
        ours = lambda *given: case.operation.ours(**dict(zip(names, given, strict=True)))  # noqa: E731
        return checkpoint(ours, *tensors.values(), use_reentrant=use_reentrant)

    leaves, expected = _leaves(case), case.gradients(case.operation.ours)
    torch.autograd.backward(as_tuple(saved(**leaves)), [case.rows[each] for each in case.grads])
    for each, leaf in leaves.items():
        assert_bitwise_equal(leaf.grad, expected[f"gradient of {each}"], each)


@pytest.mark.parametrize("name", OPERATIONS)
def test_inference_mode_and_negated_views(name):
    case = Case(name, 17, torch.float32, 7)
    tensors = {each: case.rows[each] for each in case.inputs} | case.weights
    expected = as_tuple(case.operation.ours(**tensors | {"x": -tensors["x"]}))
    _same(as_tuple(case.operation.ours(**tensors | {"x": torch._neg_view(tensors["x"])})), expected, "a negated view")
    with torch.inference_mode():
        _same(as_tuple(case.operation.ours(**tensors | {"x": -tensors["x"]})), expected, "inference mode")


def test_a_table_that_is_the_head_too():
    """Tied weights: both gradients go into one main_grad."""
    ids, n = torch.randint(13, (40,), generator=torch.Generator().manual_seed(0)), 8
    table, gain = normal(13, n), normal(n, seed=1)

    def loss(function, weight, gain, **options):
        return function(isogemm.rms_norm(isogemm.embedding(ids, weight), gain), weight, **options).square().sum()

    weight, scale = torch.nn.Parameter(table.clone()), torch.nn.Parameter(gain.clone())
    weight.main_grad, scale.main_grad = torch.zeros(13, n), torch.zeros(n)
    loss(isogemm.linear, weight, scale).backward()
    exact = [each.double().requires_grad_() for each in (table, gain)]
    x = F.rms_norm(F.embedding(ids, exact[0]), (n,), exact[1], 1e-6)
    expected = torch.autograd.grad(F.linear(x, exact[0]).square().sum(), exact)
    for parameter, right in zip((weight, scale), expected, strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad.double(), right, rtol=1e-5, atol=1e-5 * right.abs().max().item())


def test_two_threads():
    cases = [Case(name, 65, torch.float32, 33) for name in OPERATIONS] * 2
    expected = [case.results(case.rows) for case in cases]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda case: case.gradients(case.operation.ours), cases))
    for got, right in zip(found, expected, strict=True):
        assert_bitwise_equal(next(iter(got.values())), right[..., 0, :])


@pytest.mark.parametrize("name", OPERATIONS)
def test_inputs_are_left_alone(name):
    case = Case(name, 17, torch.float32, 7)
    before = {each: x.clone() for each, x in (case.rows | case.weights).items()}
    case.gradients(case.operation.ours)
    for each, x in (case.rows | case.weights).items():
        assert_bitwise_equal(x, before[each], each)


@pytest.mark.parametrize("name", ["embedding", *OPERATIONS])
def test_the_log_has_an_entry(name):
    with isogemm.dispatch_log() as log:
        if name == "embedding":
            isogemm.embedding(IDS, normal(4, 5))
        else:
            case = Case(name, 17, torch.float32, 7)
            case.operation.ours(**{each: case.rows[each] for each in case.inputs}, **case.weights)
    assert log
    assert name == "embedding" or "17" in log[0].problem


X, W = torch.zeros(3, 17), torch.zeros(17)
EITHER = (TypeError, ValueError)
WRONG = {  # what: (call, errors, words of the message)
    "rms weight": (lambda: isogemm.rms_norm(X, torch.zeros(16)), ValueError, ("weight", "16", "17")),
    "rms weight 2-d": (lambda: isogemm.rms_norm(X, torch.zeros(3, 17)), ValueError, ("weight", "3, 17")),
    "rms x int": (lambda: isogemm.rms_norm(X.long(), W), TypeError, ("x", "int64")),
    "rms residual": (lambda: isogemm.rms_norm(X, W, residual=torch.zeros(2, 17)), ValueError, ("residual", "2, 17")),
    "rms residual dtype": (lambda: isogemm.rms_norm(X, W, residual=X.half()), EITHER, ("residual", "float16")),
    "rms no tensor": (lambda: isogemm.rms_norm([1.0], W), TypeError, ("x", "list")),
    "rms eps": (lambda: isogemm.rms_norm(X, W, None), TypeError, ("eps", "NoneType")),
    "rms offset": (lambda: isogemm.rms_norm(X, W, offset=W), TypeError, ("offset", "Tensor")),
    "rms scalar": (lambda: isogemm.rms_norm(torch.tensor(1.0)), ValueError, ("x",)),
    "layer weight": (lambda: isogemm.layer_norm(X, torch.zeros(1)), ValueError, ("weight", "17")),
    "layer bias": (lambda: isogemm.layer_norm(X, W, torch.zeros(18)), ValueError, ("bias", "18", "17")),
    "layer residual": (lambda: isogemm.layer_norm(X, residual=torch.zeros(17)), ValueError, ("residual", "17")),
    "layer complex": (lambda: isogemm.layer_norm(X.cfloat()), TypeError, ("x", "complex64")),
    "softmax dim": (lambda: isogemm.softmax(X, 2), (ValueError, IndexError), ("dim", "2")),
    "softmax dim below": (lambda: isogemm.log_softmax(X, -3), (ValueError, IndexError), ("dim", "-3")),
    "softmax dim none": (lambda: isogemm.softmax(X, None), TypeError, ("dim", "NoneType")),
    "softmax int": (lambda: isogemm.softmax(X.int()), TypeError, ("x", "int32")),
    "embedding ids": (lambda: isogemm.embedding(X, normal(4, 5)), TypeError, ("ids", "float32")),
    "embedding weight": (lambda: isogemm.embedding(IDS, W), ValueError, ("weight", "17")),
    "embedding weight int": (lambda: isogemm.embedding(IDS, IDS), TypeError, ("weight", "int64")),
    "embedding id": (lambda: isogemm.embedding(IDS, normal(3, 5)), (ValueError, IndexError), ("ids", "3")),
    "embedding negative": (lambda: isogemm.embedding(IDS - 1, normal(4, 5)), (ValueError, IndexError), ("ids", "-1")),
    "embedding padding type": (lambda: isogemm.embedding(IDS, X, padding_idx="0"), TypeError, ("padding_idx", "str")),
    "embedding padding": (
        lambda: isogemm.embedding(IDS, normal(4, 5), padding_idx=4), (ValueError, IndexError), ("padding_idx", "4"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_named(what):
    call, errors, words = WRONG[what]
    with pytest.raises(errors) as raised:
        call()
    for word in words:
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(raised.value)), f"{word!r} not in {raised.value}"
