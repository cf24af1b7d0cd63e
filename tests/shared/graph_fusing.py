"""Functions compiled with the fusion pass and run without Inductor, and the checks of what the pass made."""

import torch
from tensor_cases import NEARBY, nearby

from isogemm.fusion.inductor import fuse
from isogemm.fusion.report import Report
from isogemm.gemm import api
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

FUSED = (api.linear, api.matmul_fused, api.mlp)
M, K, N = 7, 9, 5
X, W, WEIGHT, BIAS, FULL = (M, K), (K, N), (N, K), (N,), (M, N)


class Fusing:
    """A backend that fuses and runs what is left: as it stands, or through AOTAutograd."""

    def __init__(self, then=lambda gm, inputs: gm.forward):
        self.then, self.report, self.targets, self.graphs = then, Report(), [], []

    def __call__(self, gm, inputs):
        fuse(gm.graph, self.report)
        gm.graph.lint()
        gm.recompile()
        nodes = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
        self.targets += [node.target for node in nodes]
        self.graphs.append(gm.graph)
        for node in nodes:
            if node.target in FUSED:
                assert isinstance(node.meta["example_value"], torch.Tensor)
        return self.then(gm, inputs)

    @property
    def calls(self):
        return [target.__name__ for target in self.targets if target in FUSED]

    @property
    def steps(self):
        return [entry.steps for entry in self.report.fused.elements()]

    @property
    def reasons(self):
        return [entry.reason for entry in self.report.left.elements()]


def make_leaves(*shapes, dtype=torch.float32):
    return [
        make_data("normal", shape, seed=seed, dtype=dtype, device="cpu").requires_grad_()
        for seed, shape in enumerate(shapes)
    ]


def gradients_by(function, inputs):
    result = function(*inputs)
    return [result, *torch.autograd.grad(result.double().square().sum(), inputs, allow_unused=True)]


def check_fused(function, *inputs, backend=None):
    """Values and gradients at most twice as far from float64 as torch's own (and `nearby`); the backend that fused."""
    backend = Fusing() if backend is None else backend
    actual = gradients_by(torch.compile(function, backend=backend, fullgraph=True), inputs)
    torchs, exact = by_torch(function, inputs)
    near = [by_torch(function, [nearby(each, which).requires_grad_() for each in inputs]) for which in range(NEARBY)]
    for place, (got, same, reference) in enumerate(zip(actual, torchs, exact, strict=True)):
        assert (got is None) == (same is None)
        if got is not None:
            assert got.shape == same.shape
            found = [(got, same, reference)]
            found += [(right[place].to(got.dtype), theirs[place], right[place]) for theirs, right in near]
            assert_no_worse_than_torch(*(torch.stack(each).detach() for each in zip(*found, strict=True)), ulps=4)
    return backend


def by_torch(function, inputs):
    """Values and gradients, and the same in float64."""
    wide = [each.detach().double().requires_grad_() for each in inputs]
    return gradients_by(function, inputs), gradients_by(function, wide)
