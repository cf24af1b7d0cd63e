"""What a plan's launches are given; the steps are not compiled."""

import pytest
import torch

pytest.importorskip("triton")

from gemm_problems import make_problem

from isogemm.core.plan import Plan
from isogemm.epilogues.operands import Epilogue
from isogemm.gemm import configs, plan
from isogemm.gemm.configs import Config


@pytest.fixture
def steps(monkeypatch):
    """The places of each step that a plan makes."""
    found = []
    monkeypatch.setattr(plan, "make_step", lambda launch, places, device: found.append(places))
    monkeypatch.setattr(Plan, "of", classmethod(lambda cls, *given: None))
    return found


@pytest.mark.parametrize("split", ["", "a", "both"])
def test_a_bias_beside_split_operands(steps, split):
    """It has the operands' type, whichever of them a pass splits beforehand."""
    problem = make_problem(1024, 256, 512, dtype="float32", precision="tf32x3", epilogue=Epilogue(bias="n"))
    config = Config(128, 128, 32, 8, 2, "tma", parts=4, split=split)
    assert configs.illegal(problem, config) == ""
    plan.gemm_plan("linear", (1024, 256), torch.float32, torch.device("cpu"), problem, config)
    *halves, product = steps
    assert len(halves) == {"": 0, "a": 1, "both": 2}[split]
    assert {each[0][0] for places in steps for each in places if each} == {torch.float32}
    assert sum(each is not None and each[0] == (torch.float32, False) for each in product) == 1  # the bias
