"""Two processes under DistributedDataParallel (gloo, CPU): the gradients are the mean of each process's own."""

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

PROGRAM = """
import sys
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import isogemm

rank, meeting = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)


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


distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
try:
    for dtype in (torch.float32, torch.bfloat16):
        check(dtype, static_graph=False)
    check(torch.float32, static_graph=True)
finally:
    distributed.destroy_process_group()
"""


def test_gradients_are_the_mean(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "meeting")] for rank in range(2)]
    ranks = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
