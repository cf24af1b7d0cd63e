"""What a plan does with a call's addresses, and what is kept."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from isogemm.core import device, plan
from isogemm.core.dispatch import Dispatch
from isogemm.core.launch import Launch
from isogemm.core.plan import INPUTS, OUT, Cache, Plan, Step, clear_caches


class Kernel:
    def __init__(self):
        self.launched = []

    def launch(self, index, programs, arguments):
        self.launched.append((index, programs, list(arguments)))


@pytest.fixture(autouse=True)
def device_zero(monkeypatch):
    monkeypatch.setattr(device, "current_device", lambda: 0)


def _plan(*steps, scratch=0):
    served = Dispatch("matmul", "gemm", "", "", "")
    return Plan(served, (4, 4), (4, 1), torch.float32, torch.device("cpu"), 0, scratch, steps)


def test_a_call_fills_in_addresses_descriptions_and_numbers():
    """A step with one argument of each kind: an address, two descriptors, a scalar, two numbers and a constant."""
    kernel = Kernel()
    described = (
        (slice(1, 4), (INPUTS + 1,), lambda address: (f"map of {address}", 7, 8)),
        (slice(4, 5), (INPUTS, INPUTS + 1), lambda pair: (pair,)),
    )
    empty = (None, None, None, None, None, 16, None, None, "constant")
    step = Step(kernel, 5, empty, ((0, OUT),), described, ((6, 0), (7, 1)))
    a, b = torch.randn(4, 8), torch.randn(8, 4)
    first = _plan(step).run((a, b))
    second = _plan(step).run((b, a), torch.zeros(4, 4), (0.5, 2.0))
    third = _plan(step).run((a, b))
    assert first.shape == (4, 4)
    expected = []
    for out, x, y, numbers in ((first, a, b, (None, None)), (second, b, a, (0.5, 2.0)), (third, a, b, (None, None))):
        pair = x.data_ptr(), y.data_ptr()
        expected.append((0, 5, [out.data_ptr(), f"map of {pair[1]}", 7, 8, pair, 16, *numbers, "constant"]))
    assert kernel.launched == expected


def test_a_plan_of_other_inputs_launches_the_same():
    kernel = Kernel()
    described = ((slice(0, 1), (INPUTS, INPUTS + 2), lambda pair: (pair,)),)
    served = _plan(Step(kernel, 1, (None, None, None), ((1, OUT), (2, INPUTS + 2)), described, ()))
    a, b, out = torch.randn(4, 8), torch.randn(8, 4), torch.zeros(4, 4)
    served.run((a, None, b), out)
    served.of_inputs((1, None, 0)).run((b, a), out)
    first, second = kernel.launched
    assert first == second == (0, 1, [(a.data_ptr(), b.data_ptr()), out.data_ptr(), b.data_ptr()])


def test_scratch_memory_is_allocated_where_a_plan_needs_it():
    kernel = Kernel()
    step = Step(kernel, 1, (None, None), ((0, plan.SCRATCH), (1, OUT)), (), ())
    _plan(step, scratch=16).run(())
    ((_, _, (scratch, out)),) = kernel.launched
    assert scratch not in (None, out)


def test_parts_of_the_scratch_memory_come_last():
    kernel = Kernel()
    step = Step(kernel, 1, (None,) * 3, ((0, plan.SCRATCH), (1, -2), (2, -1)), (), ())
    replace(_plan(step, scratch=256), parts=(128, 512)).run((None, torch.zeros(3)))
    ((_, _, (scratch, first, second)),) = kernel.launched
    assert (first - scratch, second - scratch) == (128, 512)


def test_every_launch_has_its_own_stamps():
    """What a launch before left in the same memory, up to a million above its stamp, is none of this launch's."""
    kernel = Kernel()
    step = Step(kernel, 1, (None, plan.STAMP), ((0, OUT),), (), (), 1)
    two = _plan(step, step)
    for _ in range(3):
        two.run(())
    stamps = [arguments[1] for _, _, arguments in kernel.launched]
    assert all(plan.STAMP <= stamp < 2**63 - 2**62 for stamp in stamps)
    assert all(after - before > 1 << 20 for before, after in itertools.pairwise(stamps))


@pytest.mark.parametrize("freed", ["a", "b", "bias", "b_up", "total"])
def test_an_operand_without_memory_is_refused(freed):
    """As a sharded weight's between its uses: a kernel would read from address 0."""
    operands = {"a": torch.randn(4, 8), "b": torch.randn(8, 4), "b_up": torch.randn(8, 4), "bias": torch.randn(4)}
    operands["total"] = torch.zeros(4, 4)
    operands[freed].untyped_storage().resize_(0)
    *inputs, total = operands.values()
    described = (
        (slice(2, 3), (INPUTS,), lambda address: (address,)),
        (slice(3, 4), (INPUTS + 1, INPUTS + 2), lambda pair: (pair,)),
    )
    kernel = Kernel()
    step = Step(kernel, 1, (None,) * 4, ((0, OUT), (1, INPUTS + 3)), described, ())
    with pytest.raises(RuntimeError, match=r"isogemm.matmul: an operand has no memory"):
        _plan(step).run(inputs, total)
    assert kernel.launched == []


def test_caches_are_bounded_and_cleared_together():
    first, second = Cache(4), Cache(4)
    for number in range(11):
        assert first.keep(number, str(number)) == str(number)
        assert len(first) <= 4
        assert first[number] == str(number)
    second.keep("key", 1)
    clear_caches()
    assert not first
    assert not second


def test_kernels_are_kept_by_what_triton_compiles_for(monkeypatch):
    """A stride of 1 is compiled in, one of 16 is known to divide: neither kernel does for the other. A size that opts
    out of specialisation has one kernel up to 2^31."""
    made = []
    monkeypatch.setattr(plan, "_kernels", Cache())
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Launch, "bind", lambda self, *tensors: made.append(self.scalars) or (lambda *args: None))
    parameters = [SimpleNamespace(do_not_specialize=each) for each in (False, False, True, False, False)]
    kernel = type("Kernel", (), {"params": parameters})()
    for stride, size in ((1, 5), (16, 6), (32, 7), (3, 1), (5, 16), (5, 2**31)):
        launch = Launch(kernel, 1, (stride, size, None, 0.5), {}, {})
        plan.run_launch(launch, (torch.zeros(4),))
    assert made == [(1, 5, None, 0.5), (16, 6, None, 0.5), (3, 1, None, 0.5), (5, 2**31, None, 0.5)]


def test_nothing_is_compiled_in_a_graph_capture(monkeypatch):
    monkeypatch.setattr(plan, "_kernels", Cache())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    launch = Launch(type("Kernel", (), {"params": []})(), 1, (), {}, {})
    with pytest.raises(RuntimeError, match="nothing can be compiled while a CUDA graph is captured"):
        plan.run_launch(launch, (torch.zeros(4),))
