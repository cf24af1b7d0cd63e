"""isogemm.attention and attention_varlen: what their arguments mean, and which calls go straight to a plan."""

import pytest
import torch
from idle_gpu import idle_gpu  # noqa: F401
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data


def operands(batch=2, heads=4, kv_heads=2, queries=20, keys=20, head=16, dtype=torch.float32):
    shapes = (batch, heads, queries, head), (batch, kv_heads, keys, head), (batch, kv_heads, keys, head)
    return [make_data("normal", shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"causal": True, "window": 5}, {"causal": True, "window": (4, None)}),
        ({"causal": True, "window": 5}, {"window": (4, 0)}),
        ({"causal": True}, {"window": (None, 0)}),
        ({"causal": True, "window": 1000}, {"causal": True}),
        ({"window": [19, 19]}, {}),
        ({"scale": 0.25}, {}),
        ({"softcap": None, "kv_lengths": torch.tensor([20, 20])}, {}),
    ],
    ids=str,
)
def test_the_same_said_otherwise(one, other):
    inputs = operands()
    assert_bitwise_equal(isogemm.attention(*inputs, **one), isogemm.attention(*inputs, **other))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_mask_of_fewer_dimensions(dims):
    inputs = operands()
    mask = make_data("normal", (4, 20, 20)[3 - dims :], seed=9) > 0
    full = mask.expand(2, 4, 20, 20)
    assert_bitwise_equal(isogemm.attention(*inputs, attn_mask=mask), isogemm.attention(*inputs, attn_mask=full))


def test_queries_may_be_more_than_keys():
    """As in torch, unless they are causal, or kv_starts says that they begin with padding."""
    q, k, v = operands(queries=30, keys=7)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(isogemm.attention(q, k, v), expected)
    starts = torch.zeros(2, dtype=torch.int32)
    for padded in (isogemm.attention(q, k, v, causal=True), isogemm.attention(q, k, v, kv_starts=starts)):
        assert_bitwise_equal(padded[:, :, :23], torch.zeros_like(padded[:, :, :23]))
        assert bool((padded[:, :, 23:] != 0).all())


def test_the_result_lies_as_the_queries_do():
    for heads in (4, 1):
        q, k, v = operands(heads=heads, kv_heads=1)
        by_token = q.transpose(1, 2).contiguous().transpose(1, 2)
        fused = torch.cat([q.transpose(1, 2), q.transpose(1, 2)], -1)[..., :16].transpose(1, 2)
        for x in (q, by_token, fused):
            o = isogemm.attention(x, k, v)
            assert o.transpose(1, 2).is_contiguous() if x is not q and heads > 1 else o.is_contiguous()


@pytest.mark.parametrize("given", [{"window": 0, "causal": True}, {"window": 3}, {"window": (-1, 2)}, {"softcap": 0}])
def test_values_that_are_refused(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        isogemm.attention(*operands(), **given)


@pytest.mark.parametrize("given", [{"window": (1, 2, 3)}, {"window": "all"}, {"causal": 1}, {"scale": "1"}])
def test_types_that_are_refused(given):
    with pytest.raises(TypeError, match=next(iter(given))):
        isogemm.attention(*operands(), **given)


def test_one_call_for_a_torch_function_mode():
    class Record(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    cu = torch.tensor([0, 20], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in operands()]
    with Record() as mode:
        isogemm.attention(*operands(), causal=True)
        isogemm.attention_varlen(*packed, cu, cu)
    assert [each for each in mode.seen if each in (isogemm.attention, isogemm.attention_varlen)] == [
        isogemm.attention, isogemm.attention_varlen
    ]  # fmt: skip


CHANGES = {
    "none": {},
    "another length": {"keys": 21},
    "another dtype": {"dtype": torch.float16},
    "option": {"causal": False},
    "gradient": {},
    "a copied operand": {},
    "address": {},
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_calls_that_go_straight_to_their_plan(change, trained, idle_gpu, monkeypatch):  # noqa: F811
    """Only those that are like an earlier one in all that counts."""
    pytest.importorskip("triton")
    from isogemm.attention import op

    looked_up = []
    original = op.plan_key
    monkeypatch.setattr(op, "plan_key", lambda *args: looked_up.append(0) or original(*args))
    how = {"dtype": torch.bfloat16, "queries": 1}

    def call(causal=True, with_grad=trained, **changed):
        q, k, v = operands(**(how | changed))
        if change == "a copied operand":
            k = k.mT.contiguous().mT
        if change == "address" and looked_up == []:
            k = torch.cat([k.flatten()[:1], k.flatten()])[1:].view(k.shape)
        isogemm.attention(q, k, v.requires_grad_(with_grad), causal=causal)

    for _ in range(2):
        call()
    looked_up.clear()
    changed = dict(CHANGES[change])
    call(changed.pop("causal", True), trained != (change == "gradient"), **changed)
    assert bool(looked_up) == (change != "none")


def test_a_known_call_has_the_gradients_of_another(idle_gpu):  # noqa: F811
    """Launches of both are the same, and so is what is saved for them."""
    pytest.importorskip("triton")
    for _ in range(3):
        q, k, v = (x.requires_grad_() for x in operands(dtype=torch.bfloat16))
        sinks = torch.zeros(4, requires_grad=True)
        o = isogemm.attention(q, k, v, causal=True, sinks=sinks)
        idle_gpu.clear()
        o.backward(torch.ones_like(o))
        assert [name for name, *_ in idle_gpu][:2] == ["_query_gradients_kernel", "_key_gradients_kernel"]
        assert [x.grad.shape for x in (q, k, v, sinks)] == [x.shape for x in (q, k, v, sinks)]
