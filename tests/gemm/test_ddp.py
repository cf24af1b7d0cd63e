"""Two processes under DistributedDataParallel (gloo, CPU): the gradients are the mean of each process's own."""

from ranks import run_ranks

PROGRAM = """
from torch.nn.parallel import DistributedDataParallel

import isogemm


class Model(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = torch.nn.Parameter(torch.randn(24, 9, generator=generator).to(dtype))
        self.down = torch.nn.Parameter(torch.randn(9, 24, generator=generator).to(dtype))
        self.bias = torch.nn.Parameter(torch.randn(9, generator=generator).to(dtype))

    def forward(self, x):
        return isogemm.linear(torch.relu(isogemm.linear(x, self.up)), self.down, self.bias)


def gradients(model, x):
    model.zero_grad(set_to_none=True)
    model(x).float().square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def check(dtype, static_graph):
    batches = [torch.randn(17, 9, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2)]
    alone = [gradients(Model(dtype), x) for x in batches]
    parallel = DistributedDataParallel(Model(dtype), static_graph=static_graph)
    for step in range(2):
        for got, first, second in zip(gradients(parallel, batches[rank]), *alone, strict=True):
            assert torch.equal(got, first / 2 + second / 2), (rank, dtype, step)


for dtype in (torch.float32, torch.bfloat16):
    check(dtype, static_graph=False)
check(torch.float32, static_graph=True)
"""


def test_gradients_are_the_mean(tmp_path):
    run_ranks(PROGRAM, tmp_path)
