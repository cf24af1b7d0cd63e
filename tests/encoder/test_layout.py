"""Where the parts of the fused layer's buffers lie."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isogemm.encoder import layout, plan, schedule
from isogemm.encoder.configs import Layer
from isogemm.encoder.layout import Span
from isogemm.encoder.parameters import EncoderDropout

WIDE = Layer(
    896, 42, 128, 16, 256, "bfloat16", "bfloat16", "bfloat16", "", "layer_norm", True, "gelu", False, "", (0, 0), True
)
TF32 = replace(WIDE, dtype="float32", operand="float32", weights="float32", precision="tf32")
LAYERS = {
    "bf16": WIDE,
    "norms last": replace(WIDE, norm_first=False),
    "tf32": TF32,
    "autocast": replace(WIDE, dtype="float32", weights="float32"),
    "odd": replace(WIDE, sequences=3, tokens=5, d_model=20, nhead=5, dim_feedforward=36, norm_first=False),
}
DROPPED = EncoderDropout(0.1, 0.1, 0.1, 0.1)
BATCH_NORM = replace(TF32, norm="batch_norm", from_batch=True)
PARTED = {
    "dropped": replace(WIDE, dropout=DROPPED),
    "batch norms": BATCH_NORM,
    "batch norms last": replace(BATCH_NORM, norm_first=False, dropout=DROPPED),
    "normed residuals": replace(BATCH_NORM, residual_normed=True, dropout=DROPPED),
    "transposed": replace(BATCH_NORM, mma=True),  # ds is where dx will be
    "transposed, dropped": replace(BATCH_NORM, mma=True, dropout=DROPPED),
}
EVERY = LAYERS | PARTED


def _assert_apart(spans, offsets):
    """No byte belongs to two parts that one launch needs."""
    for name, at in offsets.items():
        assert at % layout.ALIGNMENT == 0
        for other, start in offsets.items():
            if other != name and spans[name].overlaps(spans[other]):
                assert at + spans[name].size <= start or start + spans[other].size <= at, (name, other)


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 6), st.integers(0, 6)), max_size=12), st.integers(0, 9000)
)
def test_parts_needed_together_lie_apart(drawn, limit):
    spans = {str(i): Span(size, min(a, b), max(a, b)) for i, (size, a, b) in enumerate(drawn)}
    offsets, size = layout.sharing(spans)
    _assert_apart(spans, offsets)
    assert set(offsets) == set(spans)
    assert all(offsets[name] + span.size <= size for name, span in spans.items())
    below, _ = layout.sharing(spans, limit)
    _assert_apart(spans, below)
    assert all(at + spans[name].size <= limit for name, at in below.items())


def test_parts_never_needed_together_share():
    spans = {"early": Span(1000, 0, 1), "late": Span(700, 2, 3), "all along": Span(10, 0, 3)}
    assert layout.sharing(spans) == ({"early": 0, "late": 0, "all along": 1024}, 1280)


def test_in_a_row():
    assert layout.in_a_row({"a": 1, "b": 256, "c": 300}) == ({"a": 0, "b": 256, "c": 512}, 1024)


def _backward(layer):
    made = plan.Plan(layer, torch.device("cpu"), 1e-5, biases=True)
    return made, *made._backward_schedule(made.gradients((True,) * len(made.names)))


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "autocast"])  # there dx has room left over
def test_a_backward_takes_no_more_than_its_greediest_launch(name):
    """Memory that holds all that lives while one of them runs, dx included, holds the whole backward."""
    made, backward, size = _backward(LAYERS[name])
    steps, dx = backward._steps, made.buffers.dx
    needed = {buffer: span for buffer, span in schedule.spans(steps).items() if buffer not in made._kept}
    needed[dx] = needed[dx]._replace(last=len(steps))
    alive = [
        sum(span.size for span in needed.values() if span.first <= step <= span.last) for step in range(len(steps))
    ]
    assert size + needed[dx].size <= max(alive) + layout.ALIGNMENT * len(needed)


@pytest.mark.parametrize("layer", EVERY.values(), ids=EVERY)
def test_a_calls_parts_lie_apart(layer):
    """For two that a launch needs, or that one is to find as another left them, in one buffer."""
    made, backward, _ = _backward(layer)
    dx = made.buffers.dx
    for launches in (backward, *(forward for forward, _ in made._forwards.values())):
        spans = schedule.spans(launches._steps)
        if launches is backward:
            spans[dx] = spans[dx]._replace(last=len(launches._steps))
        found = {}
        for step, places in zip(launches._steps, launches._places, strict=True):
            found |= {each: at for each, at in zip(step.arguments, places, strict=True) if each in spans}
        for (name, (buffer, start)), (other, (where, first)) in combinations(found.items(), 2):
            one, two = spans[name], spans[other]
            apart = start + one.size <= first or first + two.size <= start
            assert buffer != where or apart or one.last < two.first or two.last < one.first, (name, other)


@pytest.mark.parametrize("layer", EVERY.values(), ids=EVERY)
def test_attention_shares_memory_with_few_sums(layer):
    """Where q, k, v and their gradients are in memory, of all sums only the feed-forward's over chunks are."""
    made, backward, _ = _backward(layer)
    attention = [made.buffers.dq in step.arguments for step in backward._steps].index(True)
    needed = schedule.spans(backward._steps)
    alive = {buffer.name for buffer, span in needed.items() if span.first <= attention <= span.last}
    assert {name for name in alive if "sums" in name or "partials" in name} == {"feedforward partials"}
