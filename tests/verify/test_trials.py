from types import SimpleNamespace

import pytest
import torch

from isogemm.core import device as devices
from isogemm.verify import encoder, fused, gemm, tiny, trials

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("module", [gemm, fused, tiny, encoder], ids=lambda module: module.__name__)
def test_every_trial_of_a_gpu_is_compiled_ahead(module, monkeypatch):
    jobs = []
    monkeypatch.setattr(trials, "run_in_processes", lambda function, device, found: jobs.extend(found))
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch="sm_90"))
    trials.compile_ahead(module, CUDA, 2)
    on_gpu = [place for place, each in enumerate(module.TRIALS) if not each.cpu_only]
    assert jobs == [(module.__name__, seed, place) for seed in range(2) for place in on_gpu]
    trials._rehearse("cpu", (module.__name__, 0, len(module.TRIALS) - 1))


def test_nothing_is_compiled_for_a_gpu_without_kernels(monkeypatch):
    monkeypatch.setattr(trials, "run_in_processes", lambda *args: pytest.fail("compiled"))
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch="sm_75"))
    trials.compile_ahead(gemm, CUDA, 2)
