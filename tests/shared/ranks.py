"""Programs of several processes that meet over gloo, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SHARED = Path(__file__).parent
_SOURCE = _SHARED.parents[1] / "src"
_BEGIN = """
import os
import sys

import torch
from torch import distributed

rank, ranks, meeting, *folders = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
sys.path[:0] = folders
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
"""
# Past the destructors: a thread of gloo's that one finds at work aborts the process.
_END = """
distributed.barrier()
sys.stdout.flush()
os._exit(0)
"""


def run_ranks(program: str, folder: Path, ranks: int = 2, timeout: float = 120) -> None:
    """Run `program`, in which `torch`, `distributed` and `rank` are known, in each of so many processes; raise with
    their output if one fails. folder: an empty one, for them to meet."""
    command = [sys.executable, "-c", _BEGIN + program + _END]
    places = [str(folder / "meeting"), str(_SOURCE), str(_SHARED)]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), *places], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [each.communicate(timeout=timeout)[0] for each in running]
    finally:
        for each in running:
            each.kill()
    codes = [each.returncode for each in running]
    if any(codes):
        raise AssertionError(f"exit codes {codes}\n" + "\n".join(outputs))
