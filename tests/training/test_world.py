import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

SOURCE = Path(__file__).parents[2] / "src"
PROGRAM = """
import gc
import os
from importlib import import_module
from pathlib import Path

import torch
from isogemm.training.world import entered

def of_gloo():
    names = [Path(f"/proc/self/task/{each}/comm").read_text() for each in os.listdir("/proc/self/task")]
    return [name for name in names if "gloo" in name]

def train():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()

gc.disable()
with entered(torch.device("cpu")):
    train()
    import_module("torch.distributed.nn")  # as Dynamo does
    assert of_gloo()
assert not of_gloo()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not distributed.is_gloo_available(), reason="needs gloo, and threads with names"
)
def test_no_thread_of_the_group_is_left():
    """One that frees a tensor while the interpreter ends would abort the process."""
    group = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    env = {**os.environ, **group, "TORCHELASTIC_RUN_ID": "one", "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stderr
