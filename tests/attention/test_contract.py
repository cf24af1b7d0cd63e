"""Attention on the CPU: bits that depend on a query's own sequence alone, and errors no worse than torch's."""

import attention_promises
import pytest
import torch
from attention_cases import Case, alone, attend
from attention_parity import assert_parity
from attention_promises import Scale, boundaries

import isogemm
from isogemm.verify.compare import assert_bitwise_equal

CASES = [
    Case("bf16", 4, 2, 16),
    Case("ieee", 3, 1, 20, 12, window=63, sinks=True),
    Case("fp16", 2, 2, 8, causal=False, softcap=5.0),
]
SCALE = Scale(
    batches=(1, 2, 17, 64),
    trained_batches=(2, 17),
    everywhere=(2,),
    prompt=600,
    cuts=range(1, 600, 131),
    random_cuts=1,
    decode=160,
    decoded=range(1, 161, 23),
    lengths=(1, 63, 65),
    page_sizes=(16,),
)


@pytest.fixture
def scale():
    return SCALE


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return request.param


class TestAttention(attention_promises.AttentionPromises):
    def test_threads_change_nothing(self, case):
        sequence = case.sequence(130)
        before, results = torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(alone(case, sequence, train=True))
        finally:
            torch.set_num_threads(before)
        attention_promises.assert_same(results[1:], results[:1] * 2, f"{case}: threads")


def test_a_split_is_crossed():
    """A needle, chunks and a batch where the keys fill more than one split."""
    case = Case("bf16", 2, 1, 8)
    split = case.order().split
    whole = case.sequence(split + 70)
    expected = alone(case, whole, train=True)
    batch = [torch.cat([x[None].flip(2), x[None]]) for x in whole]
    attention_promises.assert_same([tuple(x[1] for x in attend(case, *batch))], [expected], "in a batch")
    for cut in (split - 1, split, split + 1, split + 64):
        last = whole.last_queries(whole.keys - cut)
        o, dq, *_ = alone(case, last, train=True)
        assert_bitwise_equal(o, expected[0][:, cut:], f"cut at {cut}")
        assert_bitwise_equal(dq, expected[1][:, cut:], f"dq, cut at {cut}")
        (o,) = alone(case, whole.prefix(cut))
        assert_bitwise_equal(o, expected[0][:, :cut], f"the first {cut}")
    found = attention_promises.padded(case, [whole, whole.prefix(split)], side="left", train=True)
    attention_promises.assert_same(found[:1], [expected], "padded")
    assert {split - 1, split, split + 1} <= set(boundaries(case, SCALE))


HEADS = (16, 40, 64, 80, 96, 128, 192, 256)


@pytest.mark.parametrize("number", ["bf16", "fp16", "ieee"])
def test_head_sizes_no_worse_than_torch(number):
    for head in HEADS if number == "bf16" else (1, 40, 128):
        assert_parity(Case(number, 4, 1, head), 65, 65, batch=1)
    assert_parity(Case(number, 7, 1, 40, 72, causal=False), 33, 129, batch=1)
    assert_parity(Case(number, 4, 2, 40, causal=False), 129, 17, batch=1)
    assert_parity(Case(number, 2, 2, 3, 1, causal=False), 17, 17)


OPTIONS = [
    {"window": 1},
    {"window": 63, "sinks": True},
    {"causal": False, "window": (40, 20)},
    {"causal": False, "window": (None, 3), "scale": 0.5},
    {"softcap": 2.0},
    {"softcap": 20.0, "window": 31, "sinks": True},
    {"sinks": True, "causal": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_no_worse_than_torch(options):
    for number, queries, keys in (("bf16", 127, 127), ("ieee", 17, 100)):
        assert_parity(Case(number, 4, 2, 24, **options), queries, keys)


@pytest.mark.parametrize("options", [{}, {"sinks": True, "causal": False}, {"softcap": 3.0}], ids=str)
def test_masks_no_worse_than_torch(options):
    for number in ("bf16", "ieee"):
        case = Case(number, 4, 2, 24, **options)
        for shape in ((1, 1, 70, 70), (2, 4, 70, 70)):
            assert_parity(case, 70, 70, mask=(shape, "bool"))
        for shape in ((1, 4, 70, 70), (2, 1, 1, 70), (1, 1, 70, 1), (2, 4, 70, 70)):
            assert_parity(case, 70, 70, mask=(shape, "floating"))


def test_placed_by_lengths_no_worse_than_torch():
    for case in (Case("bf16", 4, 2, 32), Case("ieee", 2, 2, 16, window=30, sinks=True)):
        lengths, starts = torch.tensor([70, 100]), torch.tensor([0, 31])
        assert_parity(case, 60, 110, kv_lengths=lengths, kv_starts=starts)
        assert_parity(case, 60, 110, kv_lengths=lengths, kv_offsets=torch.tensor([50, 0]))


@pytest.mark.parametrize("number", ["bf16", "ieee"])
def test_a_long_sequence_no_worse_than_torch(number):
    case = Case(number, 2, 1, 16)
    assert_parity(case, 100, case.order().split + 130, batch=1)
    assert_parity(case, 3, 2 * case.order().split + 1, batch=1)


def test_nan_and_infinity_of_its_own_reach_a_query():
    """What a query sees is not hidden: NaN in a key or a value that it sees, and +Inf among the values."""
    case = Case("ieee", 1, 1, 16)
    for name, value in (("k", torch.nan), ("v", torch.nan), ("v", torch.inf)):
        own = case.sequence(40)
        getattr(own, name)[:, 17] = value
        q, k, v, _ = (x[None] for x in own)
        o = isogemm.attention(q, k, v, causal=True)
        assert not bool(o[:, :, 17:].isfinite().any()), (name, value)
        if name == "k":  # a value that is not finite times a probability of 0 is NaN
            assert_bitwise_equal(o[0, :, :17], alone(case, own.prefix(17))[0], f"{name} {value}: queries before it")
