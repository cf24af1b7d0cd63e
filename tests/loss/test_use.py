"""linear_logprob and linear_cross_entropy in use on the CPU: torch.compile, autocast, gradcheck, errors."""

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cpu_tensors import normal
from dispatching import RecordOperators
from loss_cases import Head, chosen_logprob, sum_of_losses
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.verify.compare import assert_bitwise_equal


def _logprob(**arguments):
    return isogemm.linear_logprob(**arguments, temperature=0.7, softcap=5.0)


def _entropy(**arguments):
    return isogemm.linear_logprob(**arguments, return_entropy=True)


def _loss(**arguments):
    return isogemm.linear_cross_entropy(**arguments, reduction="none", label_smoothing=0.1, z_loss=1e-3)


FUNCTIONS = {"logprob": _logprob, "entropy": _entropy, "loss": _loss}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def _gradients(head, name, function=None):
    grads = [head.grad, head.grad_entropy] if name == "entropy" else [head.grad]
    return head.gradients(function or FUNCTIONS[name], grads=grads)


def _same(found, expected, what=""):
    for name, right in expected.items():
        assert_bitwise_equal(found[name], right, f"{name} {what}")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_with_the_bits_of_eager(name):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, dynamic=True, backend=counter)
    for tokens in (7, 33, 130):
        head = Head(tokens, 17, 33, torch.bfloat16, bias=True, ignored=True)
        _same(_gradients(head, name, compiled), _gradients(head, name), f"of {tokens} tokens")
        with torch.no_grad():
            arguments = {"hidden": head.hidden, "targets": head.targets, **head.parameters}
            torch.testing.assert_close(compiled(**arguments), FUNCTIONS[name](**arguments), rtol=0, atol=0)
    assert counter.frame_count <= 2  # with gradients and without


@inductor.patch(force_disable_caches=True)  # its key has the names of operators, not their code
def test_compiled_mean_by_inductor():
    head = Head(9, 16, 33, torch.float32, ignored=True)

    def loss(**arguments):
        return isogemm.linear_cross_entropy(**arguments) * 2

    grads = [torch.tensor(1.0)]
    found = head.gradients(torch.compile(loss, fullgraph=True), grads=grads)
    for name, right in head.gradients(loss, grads=grads).items():
        torch.testing.assert_close(found[name], right)


@pytest.mark.parametrize("function", [_logprob, sum_of_losses], ids=["logprob", "loss"])
def test_main_grad_in_a_graph(function):
    head, trained = Head(9, 16, 33, torch.bfloat16, bias=True), []
    for call in (torch.compile(function, fullgraph=True, backend="aot_eager"), function):
        parameters = {name: torch.nn.Parameter(each.clone()) for name, each in head.parameters.items()}
        for each in parameters.values():
            each.main_grad = torch.ones(each.shape)
        for _ in range(2):
            call(hidden=head.hidden.clone().requires_grad_(), targets=head.targets, **parameters).sum().backward()
        trained.append(parameters)
    for got, right in zip(*(each.values() for each in trained), strict=True):
        assert got.grad is None
        assert got.grad_added_to_main_grad is True
        assert_bitwise_equal(got.main_grad, right.main_grad)


def test_autograd_grad_adds_nothing_to_main_grad():
    head = Head(9, 16, 33, torch.float32, bias=True)
    expected = head.gradients(_logprob)
    parameters = {name: torch.nn.Parameter(each) for name, each in head.parameters.items()}
    for each in parameters.values():
        each.main_grad = torch.zeros(each.shape)
    result = _logprob(hidden=head.hidden, targets=head.targets, **parameters)
    found = torch.autograd.grad(result, list(parameters.values()), head.grad)
    for name, got in zip(parameters, found, strict=True):
        assert_bitwise_equal(got, expected[f"gradient of {name}"], name)
        assert not parameters[name].main_grad.any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck(name):
    head = Head(4, 5, 7, torch.float64, bias=True, ignored=True)
    tensors = {"hidden": head.hidden} | head.parameters
    leaves = [each.clone().requires_grad_() for each in tensors.values()]

    def call(*given):
        return FUNCTIONS[name](targets=head.targets, **dict(zip(tensors, given, strict=True)))

    assert gradcheck(call, leaves)


def test_float64_stays_float64():
    head = Head(4, 5, 7, torch.float64)
    expected = chosen_logprob(torch.log_softmax(head.hidden @ head.parameters["weight"].T, -1), head.targets)
    torch.testing.assert_close(head.logprob(), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_opcheck(name):
    head = Head(9, 16, 33, torch.float32, bias=True, ignored=True)
    with RecordOperators() as recorded:
        found = _gradients(head, name)
    _same(found, _gradients(head, name), "through the operators")
    assert recorded.calls
    for operator, args, kwargs in recorded.calls:
        torch.library.opcheck(operator, args, kwargs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast_casts_as_linear(name, dtype):
    """The bits of operands cast before, an fp32 result, and gradients of the operands' dtype."""
    head, cast = Head(9, 16, 33, torch.float32, bias=True), Head(9, 16, 33, torch.float32, bias=True)
    cast.hidden = cast.hidden.to(dtype)
    cast.parameters = {each: x.to(dtype) for each, x in cast.parameters.items()}
    with torch.autocast("cpu", dtype):
        found = _gradients(head, name)
    expected = _gradients(cast, name)
    assert found["logprob"].dtype == torch.float32
    assert_bitwise_equal(found["logprob"], expected["logprob"])
    for each in ("hidden", *head.parameters):
        assert found[f"gradient of {each}"].dtype == torch.float32


@pytest.mark.parametrize("shape", [(0,), (3, 0)], ids=str)
def test_no_tokens(shape):
    head = Head(1, 16, 33, torch.bfloat16, bias=True)
    head.hidden, head.targets = torch.empty(*shape, 16, dtype=torch.bfloat16), torch.empty(shape, dtype=torch.int64)
    head.grad = head.grad_entropy = torch.empty(shape)
    for name in FUNCTIONS:
        found = _gradients(head, name)
        assert found["logprob"].shape == shape
        assert found["logprob"].dtype == torch.float32
        assert found["gradient of hidden"].shape == head.hidden.shape
        assert not found["gradient of weight"].any()
        assert not found["gradient of bias"].any()
    assert sum_of_losses(head.hidden, targets=head.targets, **head.parameters) == 0


def test_no_features():
    """The logits are the bias."""
    hidden, weight = torch.empty(2, 3, 0, requires_grad=True), torch.empty(7, 0, requires_grad=True)
    bias, targets = torch.linspace(-1, 1, 7), torch.tensor([[0, 1, 2], [6, 5, -100]])
    logp = isogemm.linear_logprob(hidden, weight, targets, bias=bias)
    expected = isogemm.log_softmax(bias)[targets.clamp(min=0)].masked_fill(targets < 0, 0.0)
    assert_bitwise_equal(logp, expected)
    logp.sum().backward()
    assert (hidden.grad.shape, weight.grad.shape) == (hidden.shape, weight.shape)


def test_a_vector_of_one_token():
    head = Head(3, 16, 33, torch.float32)
    found = isogemm.linear_logprob(head.hidden[1], targets=head.targets[1], **head.parameters)
    assert found.shape == ()
    assert_bitwise_equal(found, head.logprob()[1])


def test_targets_of_other_integers():
    head = Head(9, 16, 33, torch.float32, ignored=True)
    expected = head.logprob()
    head.targets = head.targets.int()
    assert_bitwise_equal(head.logprob(), expected)


def test_an_expanded_gradient():
    """As .sum() has it: one number in memory."""
    head = Head(9, 16, 33, torch.float32, bias=True)
    head.grad = torch.ones(())
    found = head.gradients(_logprob)
    head.grad = torch.ones(9)
    _same(found, head.gradients(_logprob))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_frozen_operands_change_nothing(name):
    """Each gradient alone, and the result without any, have the bits of all together."""
    head = Head(9, 16, 33, torch.float32, bias=True, ignored=True)
    expected = _gradients(head, name)
    tensors = {"hidden": head.hidden} | head.parameters
    for wanted in (None, *tensors):
        leaves = {each: x.detach().requires_grad_(each == wanted) for each, x in tensors.items()}
        results = FUNCTIONS[name](targets=head.targets, **leaves)
        results = results if isinstance(results, tuple) else (results,)
        assert_bitwise_equal(results[0], expected["logprob"], f"only {wanted}")
        if wanted:
            torch.autograd.backward(results, [head.grad, head.grad_entropy][: len(results)])
            assert_bitwise_equal(leaves[wanted].grad, expected[f"gradient of {wanted}"], f"only {wanted}")


def test_one_of_two_results():
    head = Head(9, 16, 33, torch.float32)
    for used, grads in enumerate(([head.grad, torch.zeros(9)], [torch.zeros(9), head.grad])):
        hidden = head.hidden.clone().requires_grad_()
        _entropy(hidden=hidden, targets=head.targets, **head.parameters)[used].backward(head.grad)
        expected = head.gradients(_entropy, grads=grads)["gradient of hidden"]
        torch.testing.assert_close(hidden.grad, expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_are_right_or_refused(name):
    head = Head(4, 5, 7, torch.float64)
    leaves = [each.clone().requires_grad_() for each in (head.hidden, head.parameters["weight"])]

    def call(hidden, weight):
        return FUNCTIONS[name](hidden=hidden, weight=weight, targets=head.targets)

    with contextlib.suppress(RuntimeError):
        assert gradgradcheck(call, leaves, raise_exception=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_is_refused(name):
    head = Head(4, 5, 7, torch.float32)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(head.hidden, torch.randn(4, 5))
        with pytest.raises((RuntimeError, NotImplementedError)):
            FUNCTIONS[name](hidden=dual, targets=head.targets, **head.parameters)


def test_what_is_saved_may_not_change():
    head = Head(4, 5, 7, torch.float32)
    hidden = head.hidden.requires_grad_() * 1
    result = _logprob(hidden=hidden, targets=head.targets, **head.parameters)
    with torch.no_grad():
        hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    head = Head(9, 16, 33, torch.bfloat16)
    expected = head.gradients(_logprob)
    leaves = [each.clone().requires_grad_() for each in (head.hidden, head.parameters["weight"])]

    def call(hidden, weight):
        return _logprob(hidden=hidden, weight=weight, targets=head.targets)

    checkpoint(call, *leaves, use_reentrant=use_reentrant).backward(head.grad)
    for name, leaf in zip(("hidden", "weight"), leaves, strict=True):
        assert_bitwise_equal(leaf.grad, expected[f"gradient of {name}"], name)


def test_two_threads():
    heads = [Head(33, 17, 65, dtype, bias=True) for dtype in (torch.float32, torch.bfloat16)] * 3
    expected = [head.gradients(_logprob) for head in heads]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda head: head.gradients(_logprob), heads))
    for got, right in zip(found, expected, strict=True):
        _same(got, right)


def test_the_log_has_an_entry():
    head = Head(9, 16, 33, torch.float32)
    for function in (isogemm.linear_logprob, sum_of_losses):
        with isogemm.dispatch_log() as log:
            function(head.hidden, targets=head.targets, **head.parameters)
        assert log


HIDDEN, WEIGHT, TARGETS = torch.zeros(3, 16), torch.zeros(33, 16), torch.zeros(3, dtype=torch.int64)


def _call(function, **changed):
    return function(**{"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS} | changed)


BOTH = {  # what: (arguments, errors, words of the message)
    "hidden": ({"hidden": torch.zeros(3, 17)}, ValueError, ("hidden", "weight", "17", "16")),
    "weight": ({"weight": torch.zeros(16)}, ValueError, ("weight", "16")),
    "targets": ({"targets": torch.zeros(4, dtype=torch.int64)}, ValueError, ("targets", "4", "3")),
    "targets float": ({"targets": torch.zeros(3)}, TypeError, ("targets", "float32")),
    "target": ({"targets": TARGETS + 33}, (ValueError, IndexError), ("targets", "33")),
    "target below": ({"targets": TARGETS - 1}, (ValueError, IndexError), ("targets", "-1")),
    "bias": ({"bias": torch.zeros(16)}, ValueError, ("bias", "16", "33")),
    "dtypes": ({"weight": WEIGHT.half()}, (TypeError, ValueError), ("hidden", "weight", "float16")),
    "integers": ({"hidden": HIDDEN.int(), "weight": WEIGHT.int()}, TypeError, ("hidden", "int32")),
    "softcap": ({"softcap": 0.0}, ValueError, ("softcap", "0.0")),
    "no tensor": ({"hidden": [1.0]}, TypeError, ("hidden", "list")),
}
WRONG = {f"{name} {what}": (function, *BOTH[what]) for what in BOTH for name, function in (
    ("logprob", isogemm.linear_logprob), ("loss", isogemm.linear_cross_entropy)
)}  # fmt: skip
WRONG |= {
    "temperature": (isogemm.linear_logprob, {"temperature": 0.0}, ValueError, ("temperature", "0.0")),
    "temperature below": (isogemm.linear_logprob, {"temperature": -1.0}, ValueError, ("temperature", "-1.0")),
    "reduction": (isogemm.linear_cross_entropy, {"reduction": "max"}, ValueError, ("reduction", "max", "mean")),
    "smoothing": (isogemm.linear_cross_entropy, {"label_smoothing": 1.5}, ValueError, ("label_smoothing", "1.5")),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_named(what):
    function, arguments, errors, words = WRONG[what]
    with pytest.raises(errors) as raised:
        _call(function, **arguments)
    for word in words:
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(raised.value)), f"{word!r} not in {raised.value}"


def test_a_vocabulary_of_none_is_refused():
    with pytest.raises(ValueError, match=r"weight|targets"):
        isogemm.linear_logprob(normal(3, 16), torch.zeros(0, 16), TARGETS)
