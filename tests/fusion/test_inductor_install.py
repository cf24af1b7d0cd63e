"""`compile_fusion` turned on and off, and Inductor with it from end to end."""

import copy
import pickle

import pytest
import torch
from graph_fusing import W, X, gradients_by, make_leaves
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.fusion.inductor import FusionPass, compile_fusion

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _block(x, up, b, down, c):
    return x + torch.relu(x @ up + b) @ down + c


BLOCK = ((16, 8), (8, 24), (24,), (24, 8), (8,))


def test_training_with_inductor_on_any_number_of_rows():
    counters.clear()
    with compile_fusion() as report, isogemm.dispatch_log() as log:
        compiled = torch.compile(_block, fullgraph=True)
        for m in (16, 9, 30):
            inputs = make_leaves((m, 8), *BLOCK[1:])
            torch._dynamo.mark_dynamic(inputs[0], 0)
            for got, same in zip(gradients_by(compiled, inputs), gradients_by(_block, inputs), strict=True):
                torch.testing.assert_close(got, same, rtol=1e-4, atol=1e-3)
    (fused,) = report.fused
    assert fused.steps == ("bias", "relu", "matmul [s77, 24] x [24, 8] float32", "bias", "residual")
    assert {"fused", "weight_grad", "bias_grad"} <= {entry.op for entry in log}
    assert counters["stats"]["unique_graphs"] == 1


class Counting(CustomGraphPass):
    """Somebody else's pass: it sees the graph as Dynamo made it."""

    seen = 0

    def __call__(self, graph):
        type(self).seen += sum(node.target is torch.relu for node in graph.nodes)

    def uuid(self):
        return "counting"


def _relu(x, w):
    return torch.relu(x @ w)


def _compile_relu():
    torch._dynamo.reset()
    counters.clear()
    inputs = [each.detach() for each in make_leaves(X, W)]
    torch.testing.assert_close(torch.compile(_relu, fullgraph=True)(*inputs), _relu(*inputs))
    return counters["aot_autograd"]


def test_caches_know_fused_graphs_from_others():
    """Off, on, off, on: each time from a cache where it was seen before, and never the other's graph."""
    with fresh_cache():
        first = [dict(_compile_relu())]
        with compile_fusion() as report:
            first.append(dict(_compile_relu()))
        assert all(each.get("autograd_cache_miss") == 1 for each in first)
        assert dict(_compile_relu()).get("autograd_cache_hit") == 1
        with compile_fusion() as again:
            assert dict(_compile_relu()).get("autograd_cache_hit") == 1
    assert report.fused.total() == again.fused.total() == 1


def test_on_and_off():
    before = config.get_config_copy()
    fusion = compile_fusion()
    assert isinstance(config.pre_grad_custom_pass, FusionPass)
    with compile_fusion(False):
        assert config.pre_grad_custom_pass is None
    assert config.pre_grad_custom_pass.report is fusion.report
    second = compile_fusion()  # a new report, one pass
    assert second.report is not fusion.report
    assert config.pre_grad_custom_pass.before is None
    compile_fusion(False)
    assert config.get_config_copy() == before


def test_somebody_elses_pass_stays_and_goes_first():
    Counting.seen = 0
    other = Counting()
    with config.patch(pre_grad_custom_pass=other), fresh_cache():
        with compile_fusion() as report:
            assert config.pre_grad_custom_pass.uuid()[1:] == ("counting",)
            _compile_relu()
        assert config.pre_grad_custom_pass is other
        compile_fusion()
        compile_fusion(False)
        assert config.pre_grad_custom_pass is other
    assert report.fused.total() == 1
    assert Counting.seen == 1


def test_pass_in_a_caches_key():
    """torch 2.11 pickles it: the same for the same code, whatever it has done."""
    fresh, used = FusionPass(), FusionPass()
    used.report.add_left("a", "b")
    assert pickle.dumps(fresh) == pickle.dumps(used)
    assert fresh.uuid() == used.uuid()
    assert FusionPass(Counting()).uuid() != fresh.uuid()
    assert FusionPass(lambda graph: None).uuid() is None
    assert isinstance(copy.deepcopy(used), FusionPass)


def test_inside_a_checkpoint():
    """The mask is drawn once, whatever is computed again."""

    def function(x, w):
        return checkpoint(lambda x: F.dropout(torch.relu(x @ w)), x, use_reentrant=False)

    x, w = make_leaves(X, W)
    with compile_fusion() as report:
        result = torch.compile(function, fullgraph=True)(x, w)
        dx, dw = torch.autograd.grad(result.sum(), (x, w))
    assert [entry.steps for entry in report.fused] == [("relu", "dropout")]
    above = 2.0 * (result != 0)
    torch.testing.assert_close(dx, above @ w.t())
    torch.testing.assert_close(dw, x.t() @ above)
