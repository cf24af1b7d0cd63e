"""What a plan does with a call's addresses."""

import pytest
import torch

from isogemm.core.dispatch import Dispatch
from isogemm.gemm.plan import _NO_NUMBERS, Plan, Step


class Kernel:
    def __init__(self):
        self.launched = []

    def launch(self, index, programs, arguments):
        self.launched.append((index, programs, list(arguments)))


def _step(kernel):
    """A step with one argument of each kind: an address, a descriptor, a scalar, two numbers and a constant."""
    described = ((slice(1, 4), 1, lambda address: (f"map of {address}", 7, 8)),)
    return Step(kernel, 5, (None, None, None, None, 16, None, None, "constant"), ((0, 2),), described, slice(5, 7))


def test_a_call_fills_in_addresses_descriptions_and_numbers():
    kernel = Kernel()
    step = _step(kernel)
    step.run(3, (10, 20, 30), _NO_NUMBERS)
    step.run(3, (11, 21, 31), (0.5, 2.0))
    step.run(3, (10, 20, 30), _NO_NUMBERS)
    plain = (3, 5, [30, "map of 20", 7, 8, 16, None, None, "constant"])
    assert kernel.launched == [plain, (3, 5, [31, "map of 21", 7, 8, 16, 0.5, 2.0, "constant"]), plain]


@pytest.mark.parametrize("freed", ["a", "b", "bias", "b_up", "total"])
def test_an_operand_without_memory_is_refused(freed):
    """As a sharded weight's between its uses: a kernel would read from address 0."""
    operands = {"a": torch.randn(4, 8), "b": torch.randn(8, 4), "b_up": torch.randn(8, 4), "bias": torch.randn(4)}
    operands["total"] = torch.zeros(4, 4)
    operands[freed].untyped_storage().resize_(0)
    plan = Plan(Dispatch("matmul", "gemm", "", "", ""), (4, 4), (4, 1), torch.float32, torch.device("cpu"), 0, 0, ())
    with pytest.raises(RuntimeError, match=r"isogemm.matmul: an operand has no memory"):
        plan.run(operands["a"], operands["b"], (None, operands["bias"]), operands["total"], operands["b_up"])
