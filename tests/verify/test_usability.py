from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from isogemm.core import device as devices
from isogemm.verify import usability

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("arch", "usable", "reason"),
    [
        ("sm_90", (True, True), "tiles measured on sm_90"),
        ("sm_100", (True, True), "safe default tiles: nothing was measured on sm_100, only on sm_90"),
        ("sm_80", (False, True), "safe default tiles"),
        ("gfx942", (False, True), "safe default tiles"),
        ("sm_75", (False, False), "sm_75"),
    ],
)
def test_gemm_usability_on_a_gpu(arch, usable, reason, monkeypatch):
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch=arch))
    found = usability.gemm(CUDA)
    assert [each.kernel for each in found] == ["gemm/tma", "gemm/pointer"]
    assert tuple(each.usable for each in found) == usable
    assert reason in found[1].reason


def test_gemm_usability_without_triton(monkeypatch):
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch="sm_90"))
    monkeypatch.setattr(usability.importlib.util, "find_spec", lambda name: None)
    assert {(each.usable, each.reason) for each in usability.gemm(CUDA)} == {(False, "Triton is not installed")}


def test_gemm_the_cpu_is_served():
    (found,) = usability.gemm(CPU)
    assert (found.usable, found.kernel) == (True, "gemm/cpu")


def test_fused_usability(monkeypatch):
    (on_cpu,) = usability.fused(CPU)
    assert (on_cpu.usable, on_cpu.kernel) == (True, "fused/cpu")
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch="sm_80"))
    found = usability.fused(CUDA)
    assert [(each.kernel, each.usable) for each in found] == [("fused/tma", False), ("fused/pointer", True)]


def test_encoder_usability(monkeypatch):
    (on_cpu,) = usability.encoder(CPU)
    assert (on_cpu.usable, on_cpu.kernel) == (True, "encoder/composed")
    for arch, usable in (("sm_80", True), ("sm_75", False)):
        monkeypatch.setattr(devices, "facts", lambda device, arch=arch: SimpleNamespace(arch=arch))
        found = usability.encoder(CUDA)
        assert [(each.kernel, each.usable) for each in found] == [
            ("encoder/fused", usable),
            ("encoder/composed", usable),
        ]
        assert arch in found[0].reason
    monkeypatch.setattr(devices, "facts", lambda device: SimpleNamespace(arch="sm_90"))
    monkeypatch.setattr(usability.importlib.util, "find_spec", lambda name: None)
    assert {(each.usable, each.reason) for each in usability.encoder(CUDA)} == {(False, "Triton is not installed")}
