"""A GPU on which nothing runs: CPU tensors say that they are on it, kernels are bound to a launcher that only notes."""

from contextlib import nullcontext

import pytest
import torch

from isogemm.core import device, launch, plan
from isogemm.core.launch import BoundKernel, Launch
from isogemm.tiny import configs as tiny_configs


class _Compiled:
    """What BoundKernel reads of a compiled kernel."""

    packed_metadata, function = "metadata", "handle"

    def __init__(self, name, launched):
        self.name, self._launched = name, launched

    def _init_handles(self):
        """Nothing is loaded."""

    def run(self, *arguments):
        self._launched.append((self.name, arguments[0], arguments[9:]))


@pytest.fixture
def idle_gpu(monkeypatch):
    """What is launched: (kernel, programs, arguments) each. The GPU has no TMA."""
    launched = []

    def bind(self, *dummies):
        return BoundKernel(_Compiled(self.kernel.__name__, launched), list(self.constants.values()))

    plan.clear_caches()
    facts = device.DeviceFacts("idle", "sm_80", 108, 163 * 1024, 40 << 20)
    monkeypatch.setattr(Launch, "bind", bind)
    monkeypatch.setattr(device, "facts", lambda device: facts)
    monkeypatch.setattr(device, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "current_stream", lambda index: 0)
    monkeypatch.setattr(tiny_configs, "gate", lambda problem: "dot")
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    yield launched
    plan.clear_caches()
