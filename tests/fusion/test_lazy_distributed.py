"""autofuse beside torch.distributed: two gloo processes run each case plain and in a block, and compare.

Collectives write tensors without a torch function or a version that would tell, DDP and FSDP2 from C++ and by resizing
storages. The cases run in one pair of processes, started once: this file as a script.
"""

import json
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from isogemm.fusion import autofuse

CASES = {}
MOST_SECONDS = 120
REASON = "a process group exists, and torch.distributed writes tensors unseen"


def case(function):
    CASES[function.__name__] = function
    return function


def values(rank, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def between(block, rank, change):
    """A product, a change of its operand that torch does not tell of, and what follows the product."""
    b, w = values(rank, 4, 8), values(7, 8, 8)
    before = b.clone()
    with block:
        y = b @ w
        change(b)
        z = torch.relu(y)
    assert not torch.equal(b, before) or rank == 0, "nothing was changed"
    return [z, b]


@case
def all_reduce(block, rank):
    return between(block, rank, dist.all_reduce)


@case
def all_reduce_later(block, rank):
    return between(block, rank, lambda b: dist.all_reduce(b, async_op=True).wait())


@case
def broadcast(block, rank):
    return between(block, rank, lambda b: dist.broadcast(b, 0))


@case
def reduce(block, rank):
    return between(block, rank, lambda b: dist.reduce(b, 1))


@case
def scatter(block, rank):
    parts = [values(8, 4, 8), values(9, 4, 8)] if rank == 0 else None
    return between(block, rank, lambda b: dist.scatter(b, parts))


@case
def gather(block, rank):
    return between(block, rank, lambda b: dist.all_gather_into_tensor(b, values(rank + 3, 2, 8)))


@case
def all_to_all_single(block, rank):
    return between(block, rank, lambda b: dist.all_to_all_single(b, values(rank + 3, 4, 8)))


def receiving(how):
    return lambda b: dist.send(values(3, 4, 8), 1) if dist.get_rank() == 0 else how(b)


@case
def recv(block, rank):
    return between(block, rank, receiving(lambda b: dist.recv(b, 0)))


@case
def irecv(block, rank):
    return between(block, rank, receiving(lambda b: dist.irecv(b, 0).wait()))


@case
def by_the_group(block, rank):
    """As C++ code calls it: past torch.distributed's functions."""
    return between(block, rank, lambda b: dist.group.WORLD.allreduce([b]).wait())


@case
def one_buffer(block, rank):
    buffer, head, results = torch.zeros(4, 8), torch.nn.Linear(8, 8, bias=False), []
    torch.nn.init.eye_(head.weight)
    with block, torch.no_grad():
        for step in range(3):
            if rank == 0:
                dist.send(values(step, 4, 8), 1)
            else:
                dist.recv(buffer, 0)
                results.append(head(buffer))
        return [torch.relu(each) for each in results]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.b(torch.nn.functional.gelu(self.a(x))) + x)


def train(model, block, rank):
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(2):
        with block:
            loss = model(values(10 * step + rank, 4, 8)).square().sum()
            loss.backward()
            found += [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
    return found


@case
def data_parallel(block, rank):
    torch.manual_seed(0)
    return train(torch.nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True), block, rank)


@case
def fully_sharded(block, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, mesh = torch.nn.Sequential(Net(), Net()), init_device_mesh("cpu", (2,))
    for each in (*model, model):
        fully_shard(each, mesh=mesh)
    found = train(model, block, rank)
    return [each.to_local() if hasattr(each, "to_local") else each for each in found]


def begun_inside(rank, path):
    """The group begins while a product is pending, and ends before the next."""
    b, w = values(rank, 4, 8), values(7, 8, 8)
    expected = torch.relu(b @ w)
    with autofuse() as report:
        y = b @ w
        dist.init_process_group("gloo", init_method=f"file://{path}/first", rank=rank, world_size=2)
        dist.broadcast(b, 0)
        torch.testing.assert_close(torch.relu(y), expected)
        assert [entry.reason for entry in report.left] == [REASON]
        changed = torch.relu(b @ w)
        assert not report.fused
        assert report.left.total() == 2
        dist.destroy_process_group()
        again = torch.relu(b @ w)
    assert report.fused.total() == 1
    torch.testing.assert_close([changed, again], [torch.relu(values(0, 4, 8) @ w)] * 2)


def compared(function, rank):
    plain = function(nullcontext(), rank)
    block = autofuse()
    torch.testing.assert_close(function(block, rank), plain)
    assert not block.report.fused
    assert {entry.reason for entry in block.report.left} <= {REASON}


def outcome(function, *args):
    try:
        function(*args)
    except Exception as error:  # the other process goes on with the next case
        return f"{type(error).__name__}: {error}"
    return "as plain torch"


def work(rank, path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {"begun_inside": outcome(begun_inside, rank, path)}
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{path}/second", rank=rank, world_size=2)
        for name, function in CASES.items():
            found[name] = outcome(compared, function, rank)
    said = [str(each.message) for each in caught if "isogemm" in str(each.message)]
    found["warned"] = "as plain torch" if len(said) == 1 and REASON in said[0] else repr(said)
    Path(path, f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    path = str(tmp_path_factory.mktemp("groups"))
    program = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_lazy_distributed

distributed.destroy_process_group()
test_lazy_distributed.work(rank, {path!r})
"""
    run_ranks(program, Path(path), timeout=MOST_SECONDS)
    return [json.loads(Path(path, f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", ["begun_inside", *CASES, "warned"])
def test_beside_a_process_group(outcomes, name):
    assert [found[name] for found in outcomes] == ["as plain torch"] * 2
