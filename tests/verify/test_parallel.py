import os

import pytest
import torch

from isogemm.verify import parallel

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(parallel.os, "cpu_count", lambda: 2)
    room = parallel._PROCESS_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * room, 4 * room))


def test_jobs_run_in_other_processes_and_errors_are_left_to_others(tmp_path):
    (tmp_path / "taken").touch()
    parallel.run_in_processes(os.symlink, CUDA, [str(tmp_path / name) for name in ("one", "taken", "other")])
    links = {path.name: str(path.readlink()) for path in tmp_path.iterdir() if path.is_symlink()}
    assert links == {"one": "cuda:0", "other": "cuda:0"}


def test_nothing_is_done_for_a_cpu(tmp_path):
    parallel.run_in_processes(os.symlink, torch.device("cpu"), [str(tmp_path / "one")])
    parallel.run_in_processes(os.symlink, CUDA, [])
    assert list(tmp_path.iterdir()) == []
