"""The loss kernels and the GPU's loop over blocks, in Triton's interpreter; products are the CPU's."""

import pytest
import torch
from torch.nn import functional as F

from isogemm.gemm import cpu as products
from isogemm.loss import configs, kernels, plan
from isogemm.loss.configs import How
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

CHUNK = 1024


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    def multiply(a, b, bias, out, precision, chunk, residual=None):
        result = products.product(a, b, bias, torch.float32)
        out.copy_(result if residual is None else residual + result)

    def add_weight_grad(grad, x, out, precision, chunk, *, accumulate):
        if accumulate:
            products.weight_grad(grad, x, out, torch.float32, chunk)
        else:
            out.copy_(products.weight_grad(grad, x, None, out.dtype, chunk))

    def launch(name, sizes, *tensors):
        getattr(kernels, f"describe_{name}")(*sizes).run(*tensors)

    monkeypatch.setattr(plan, "_multiply", multiply)
    monkeypatch.setattr(plan, "_add_weight_grad", add_weight_grad)
    monkeypatch.setattr(plan, "_launch", launch)


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cpu")


def _head(tokens, k, vocabulary, dtype=torch.float32):
    """hidden, weight, targets, bias and the gradients of four values."""
    targets = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(5))
    targets[1::4] = -100
    hidden, weight = _normal(tokens, k, dtype=dtype), _normal(vocabulary, k, seed=1, dtype=dtype)
    return hidden, weight, targets, _normal(vocabulary, seed=2, dtype=dtype), _normal(4, tokens, seed=3)


def _values(hidden, weight, targets, bias, how):
    """In torch, in float64."""
    z = F.linear(hidden, weight, bias)
    x = (z if how.softcap is None else how.softcap * torch.tanh(z / how.softcap)) / how.temperature
    logprobs = F.log_softmax(x, -1)
    found = [logprobs.gather(1, targets.clamp(0)[:, None])[:, 0]]
    found += [-(logprobs.exp() * logprobs).sum(1)] * how.entropy + [logprobs.mean(1)] * how.mean
    found += [x.logsumexp(1)] * how.lse
    return torch.stack(found).masked_fill(targets == how.ignore_index, 0.0)


def _computed(hidden, weight, targets, bias, grads, how, *, totals=(None, None), blocks=None):
    values, stats = plan.forward(hidden, weight, targets, bias, how, blocks)
    into = [torch.empty_like(each) for each in (hidden, weight, bias)]
    wanted = into[0], *(each if total is None else None for each, total in zip(into[1:], totals, strict=True))
    grad = grads[: how.value_count].contiguous()
    plan.backward(grad, hidden, weight, targets, bias, values, stats, how, CHUNK, wanted, totals, blocks)
    return values, *into


HOWS = (How(), How(softcap=2.0, temperature=0.7, entropy=True, mean=True, lse=True), How(lse=True, mean=True))


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize(("tokens", "k", "vocabulary"), [(5, 16, 1), (7, 9, 1000), (3, 24, 2500)])
def test_against_torch(how, tokens, k, vocabulary):
    *head, grads = _head(tokens, k, vocabulary)
    found = _computed(*head, grads, how)
    leaves = [each.double().requires_grad_() for each in (head[0], head[1], head[3])]
    values = _values(leaves[0], leaves[1], head[2], leaves[2], how)
    expected = values, *torch.autograd.grad(values, leaves, grads[: how.value_count].double())
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), right.detach(), rtol=2e-5, atol=2e-5)


def test_bits_do_not_depend_on_blocks(monkeypatch):
    monkeypatch.setattr(configs, "HIDDEN_CHUNK", 1024)
    how = HOWS[1]
    *head, grads = _head(9, 16, 3000, torch.float16)
    whole = _computed(*head, grads, how)
    for columns in (1024, 2048):
        cut = _computed(*head, grads, how, blocks=configs.Blocks(4, columns))
        for got, right in zip(cut, whole, strict=True):
            assert_bitwise_equal(got, right)
    hidden, weight, targets, bias = head
    for rows in (slice(0, 1), slice(3, 9)):
        values, of_hidden, *_ = _computed(hidden[rows], weight, targets[rows], bias, grads[:, rows], how)
        assert_bitwise_equal(values, whole[0][:, rows])
        assert_bitwise_equal(of_hidden, whole[1][rows])


def test_gradients_are_added_to_totals():
    *head, grads = _head(6, 16, 1500)
    totals = torch.zeros(1500, 16), torch.zeros(1500)
    _, _, of_weight, of_bias = _computed(*head, grads, HOWS[0])
    _computed(*head, grads, HOWS[0], totals=totals)
    assert_bitwise_equal(totals[0], of_weight)
    assert_bitwise_equal(totals[1], of_bias)


def test_unknown_targets_give_nan_and_ignored_ones_nothing():
    hidden, weight, targets, bias, grads = _head(6, 16, 40)
    targets[:3] = torch.tensor([40, -1, -100])
    hidden[2] = float("inf")
    values, of_hidden, *_ = _computed(hidden, weight, targets, bias, grads, HOWS[1])
    assert values[0, :2].isnan().all()
    assert of_hidden[:2].isnan().all()
    assert not values[:, 2].any()
    assert not of_hidden[2].any()
    assert values[:, 3:].isfinite().all()


def test_banned_tokens():
    """A block of nothing but -inf adds nothing."""
    hidden, weight, targets, bias, grads = _head(4, 8, 2048 + 5)
    targets.clamp_(max=1023)
    bias[1024:] = -torch.inf
    how = How(entropy=True)
    values, of_hidden, *_ = _computed(hidden, weight, targets, bias, grads, how)
    kept = _computed(hidden, weight[:1024], targets, bias[:1024], grads, how)
    assert_bitwise_equal(values, kept[0])
    torch.testing.assert_close(of_hidden, kept[1])
