"""linear_logprob and linear_cross_entropy on the CPU: the bits of log_softmax(linear(...)), alone and in any batch."""

import pytest
import torch
from cpu_tensors import CONTRACT
from loss_cases import (
    IGNORED,
    Head,
    chosen_logprob,
    plain_cross_entropy,
    plain_logprob,
    plain_logprob_and_entropy,
    sum_of_losses,
)
from promises.rows import assert_batch, assert_chunks, assert_decode, assert_padding
from torch.nn import functional as F

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import LAYOUTS, with_layout

KINDS = ("logprob", "entropy", "loss")
HEADS = ((65, 16, 1), (65, 17, 3), (33, 63, 130), (17, 40, 1000))  # tokens, k, vocab


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_depends_on_nothing_but_itself(kind, dtype):
    f = Head(65, 17, 131, dtype, bias=kind != "logprob", ignored=True).function(kind, (5, 13))
    assert_batch(f, (2, 3, 16, 64), (3, 17))
    assert_decode(f, 5)
    if dtype == torch.bfloat16:
        assert_padding(f)
        assert_chunks(f)


@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_up_to_64_and_4097(kind):
    options = {"softcap": 3.0} | ({} if kind == "loss" else {"temperature": 0.7})
    f = Head(65, 16, 33, torch.float32).function(kind, **options)
    assert_batch(f, range(1, 65) if kind == "logprob" else (31, 32, 33), (4097,))


def test_threads_change_nothing():
    head, found, results = Head(65, 40, 1000, torch.float32, ignored=True), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(head.gradients(isogemm.linear_logprob))
    finally:
        torch.set_num_threads(found)
    for each in results[1:]:
        for name in ("logprob", "gradient of hidden"):  # dweight is a product whose bits depend on them, as linear's
            assert_bitwise_equal(each[name], results[0][name], name)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_the_bits_of_logits_that_are_never_made(dtype):
    for sizes in HEADS:
        for bias in (False, True):
            for temperature in (1.0, 0.5, 0.7):
                Head(*sizes, dtype, bias=bias, ignored=True).assert_as_logits(temperature)


@pytest.mark.parametrize("vocab", [1, 1000, 50257])
def test_vocabularies(vocab):
    head = Head(3, 8, vocab, torch.bfloat16)
    head.assert_as_logits()
    head.assert_precise()
    whole = head.logprob()
    for i in range(3):
        alone = isogemm.linear_logprob(head.hidden[i], targets=head.targets[i], **head.parameters)
        assert_bitwise_equal(alone, whole[i])
    assert (whole <= 0).all()
    if vocab == 1:
        assert_bitwise_equal(whole, torch.zeros(3))


def test_every_token_of_the_vocabulary():
    head = Head(1, 17, 131, torch.float32)
    expected = isogemm.log_softmax(head.logits())[0]
    found = isogemm.linear_logprob(head.hidden.expand(131, -1), targets=torch.arange(131), **head.parameters)
    assert_bitwise_equal(found, expected)


def test_any_strides():
    """Strides of hidden change no bit; a weight in other memory has the bits of linear with it."""
    head = Head(33, 17, 65, torch.float32)
    expected = head.gradients(isogemm.linear_logprob)
    hidden, weight, targets = head.hidden, head.parameters["weight"], head.targets
    for layout in LAYOUTS:
        head.hidden = with_layout(hidden, layout)
        if layout != "transposed":
            head.targets = with_layout(targets, layout)
        for name, each in head.gradients(isogemm.linear_logprob).items():
            assert_bitwise_equal(each, expected[name], f"{name}, hidden {layout}")
        head.parameters["weight"] = with_layout(weight, layout)
        head.assert_as_logits()
        head.assert_right(isogemm.linear_logprob, plain_logprob)
        head.hidden, head.targets, head.parameters["weight"] = hidden, targets, weight
    grid = head.hidden.view(3, 11, 17).transpose(0, 1)
    found = isogemm.linear_logprob(grid, targets=targets.view(3, 11).T, **head.parameters)
    assert_bitwise_equal(found.T.flatten(), expected["logprob"], "a transposed grid of tokens")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_no_worse_than_torch(dtype):
    for sizes in HEADS:
        head = Head(*sizes, dtype, bias=True, ignored=True)
        head.assert_right(isogemm.linear_logprob, plain_logprob)
    for options in ({"temperature": 0.7}, {"softcap": 3.0}, {"temperature": 2.0, "softcap": 5.0}):
        head.assert_right(isogemm.linear_logprob, plain_logprob, **options)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 3.0}], ids=str)
def test_log_probabilities_and_entropies_of_fp32_logits(dtype, options):
    for sizes in HEADS:
        Head(*sizes, dtype, bias=True).assert_precise(**options)


def _with_entropy(**arguments):
    return isogemm.linear_logprob(return_entropy=True, **arguments)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_entropy_is_no_worse_than_torch(dtype):
    """With its gradient, alone and together with the log-probability's."""
    head = Head(33, 63, 130, dtype, bias=True)
    for grads in ([head.grad, head.grad_entropy], [torch.zeros(33), head.grad_entropy]):
        head.assert_right(_with_entropy, plain_logprob_and_entropy, grads=grads, temperature=0.7)
    found = head.logprob(return_entropy=True)
    assert_bitwise_equal(found[0], head.logprob(), "the log-probability beside an entropy")
    assert found[1].shape == head.targets.shape
    assert found[1].dtype == torch.float32
    assert (found[1] >= 0).all()


def test_banned_tokens():
    """A bias of -inf: no probability, nothing added to an entropy, finite gradients."""
    head = Head(33, 17, 65, torch.float32, bias=True)
    head.parameters["bias"][1::2] = -torch.inf
    head.targets = head.targets // 2 * 2
    head.assert_as_logits()
    found = head.gradients(_with_entropy, grads=[head.grad, head.grad_entropy])
    assert all(each.isfinite().all() for each in found.values())
    some = {name: each[::2] for name, each in head.parameters.items()}
    exact = plain_logprob_and_entropy(
        head.hidden.double(), targets=head.targets // 2, **{name: each.double() for name, each in some.items()}
    )
    torch.testing.assert_close(found["logprob"].double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["entropy"].double(), exact[1], rtol=1e-5, atol=1e-5)


def test_ignored_targets():
    """No log-probability, no gradient, whatever gradient comes; and the index may be another."""
    head = Head(33, 17, 65, torch.float32, bias=True, ignored=True)
    ignored = head.targets == IGNORED
    found = head.gradients(isogemm.linear_logprob)
    assert not found["logprob"][ignored].any()
    assert not found["gradient of hidden"][ignored].any()
    head.grad = head.grad.masked_fill(ignored, 0)
    for name, each in head.gradients(isogemm.linear_logprob).items():
        assert_bitwise_equal(each, found[name], name)
    head.targets = head.targets.masked_fill(ignored, 7)
    kept = head.targets != 7
    again = head.gradients(isogemm.linear_logprob, ignore_index=7)
    assert_bitwise_equal(again["logprob"][kept], found["logprob"][kept])
    assert not again["logprob"][~kept].any()


OPTIONS = (
    {}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"softcap": 3.0},
    {"label_smoothing": 0.3, "z_loss": 1e-3, "softcap": 5.0},
)  # fmt: skip


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_no_worse_than_torch(reduction, dtype):
    head = Head(33, 40, 130, dtype, bias=True, ignored=True)
    grads = None if reduction == "none" else [torch.tensor(0.7)]
    for options in OPTIONS:
        options = options | {"reduction": reduction}
        found = head.assert_right(isogemm.linear_cross_entropy, plain_cross_entropy, grads=grads, **options)
        assert found["logprob"].dtype == torch.float32
    Head(17, 16, 1, dtype).assert_right(
        isogemm.linear_cross_entropy, plain_cross_entropy, grads=grads, reduction=reduction, label_smoothing=0.1
    )


def test_cross_entropy_is_the_negative_log_probability():
    for dtype in CONTRACT:
        head = Head(33, 40, 130, dtype, bias=True)
        loss = isogemm.linear_cross_entropy(head.hidden, targets=head.targets, **head.parameters, reduction="none")
        assert_bitwise_equal(loss, -head.logprob())


def test_cross_entropy_of_ignored_tokens_alone():
    head = Head(5, 16, 33, torch.float32)
    head.targets[:] = IGNORED
    for reduction, expected in (
        ("none", torch.zeros(5)),
        ("sum", torch.tensor(0.0)),
        ("mean", torch.tensor(torch.nan)),
    ):
        found = isogemm.linear_cross_entropy(
            head.hidden, targets=head.targets, **head.parameters, reduction=reduction, label_smoothing=0.1, z_loss=0.1
        )
        theirs = F.cross_entropy(head.logits(), head.targets, reduction=reduction, label_smoothing=0.1)
        torch.testing.assert_close(found, expected, equal_nan=True)
        torch.testing.assert_close(theirs, expected, equal_nan=True)


def test_nonfinite_tokens_stay_where_they_are():
    head = Head(9, 17, 65, torch.float32)
    expected = head.logprob(return_entropy=True)
    head.hidden[1, 3], head.hidden[2, 3], head.hidden[4] = torch.nan, torch.inf, -torch.inf
    found = head.logprob(return_entropy=True)
    for got, right in zip(found, expected, strict=True):
        assert got[[1, 2, 4]].isnan().all()
        assert_bitwise_equal(got[[0, 3, 5, 6, 7, 8]], right[[0, 3, 5, 6, 7, 8]])
    theirs = chosen_logprob(F.log_softmax(head.logits(), -1), head.targets)
    assert theirs[[1, 2, 4]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [isogemm.linear_logprob, sum_of_losses], ids=["logprob", "loss"])
def test_weight_gradients_in_micro_batches(function, dtype):
    head = Head(2 * 1024 + 37, 16, 33, dtype, bias=True, ignored=True)
    assert head.chunk == 1024
    whole = head.assert_micro_batches_add_up(function)
    grads = [torch.tensor(1.0)] if function is sum_of_losses else None
    found = head.gradients(function, grads=grads)
    for name, each in whole.items():
        assert_bitwise_equal(found[f"gradient of {name}"], each.to(dtype), f"{name}.grad, rounded once")


def test_softcap_bounds_the_logits():
    head = Head(33, 17, 65, torch.float32)
    head.parameters["weight"] *= 100
    found = head.logprob(softcap=2.0)
    assert (found >= -4 - torch.log(torch.tensor(65.0))).all()
    head.parameters["weight"] /= 1e5  # far from the cap there is none
    torch.testing.assert_close(head.logprob(softcap=1e6), head.logprob())
