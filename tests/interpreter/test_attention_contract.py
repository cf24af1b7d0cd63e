"""Attention's kernels in the interpreter, as its plans launch them: see tests/shared/attention_promises.py."""

import attention_promises
import pytest
import torch
from attention_cases import Case
from attention_promises import Scale

from isogemm.attention import cpu, describe, op, plan
from isogemm.core import device

CASES = [Case("fp16", 2, 1, 16), Case("ieee", 3, 1, 20, 12, window=63, sinks=True)]
SCALE = Scale(
    batches=(1, 3),
    trained_batches=(3,),
    everywhere=(),
    prompt=150,
    cuts=range(1, 150, 67),
    random_cuts=1,
    decode=150,
    decoded=range(1, 150, 73),
    lengths=(1, 65),
    page_sizes=(16,),
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The launches of a call's plan, one after another in the interpreter, instead of the CPU's own way."""
    results = {}

    def run(made, inputs, out):
        tensors = out, torch.full((made.scratch,), torch.nan), *inputs
        for launch, places in made.steps:
            launch.run(*(None if place is None else tensors[place[1]] for place in places))

    def attention(call, o, lse):
        call = op.readable(call)
        run(plan.attention_plan(describe.problem_of(call, lse is not None), call), (*call[: describe.TENSORS], lse), o)
        if lse is not None:
            results[lse.data_ptr()] = o

    def attention_backward(call, grad, lse, dq, dk, dv, terms, of_mask):
        call, grad, o = op.readable(call), op.with_unit_stride(grad), results[lse.data_ptr()]
        if of_mask is not None:
            of_mask.zero_()
        problem = describe.backward_problem_of(call, grad, o, dq, dk, dv)
        made = plan.backward_plan(problem, call, o, grad, terms is not None, of_mask is not None)
        run(made, (*call[: describe.TENSORS], o, lse, grad, dk, dv, terms, of_mask), dq)

    facts = device.DeviceFacts("interpreted", "sm_80", 4, 163 * 1024, 40 << 20)
    monkeypatch.setattr(device, "facts", lambda device: facts)
    monkeypatch.setattr(device, "index_of", lambda device: 0)
    monkeypatch.setattr(plan, "make_step", lambda launch, places, device: (launch, places))
    monkeypatch.setattr(cpu, "attention", attention)
    monkeypatch.setattr(cpu, "attention_backward", attention_backward)


@pytest.fixture
def scale():
    return SCALE


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return request.param


class TestAttention(attention_promises.AttentionPromises):
    """On small sizes, without what takes many blocks: a block takes the interpreter a hundredth of a second."""

    test_again_and_permuted = None
    test_every_boundary_of_lengths = None
    test_windows = None
    test_bool_masks = None
    test_floating_masks = None
    test_strides = None
    test_more_queries_than_keys = None
