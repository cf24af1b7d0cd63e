from types import SimpleNamespace

import pytest
import torch

from isogemm.core import device


@pytest.fixture
def properties(monkeypatch):
    """properties(...): a GPU with these."""

    def describe(**values):
        found = SimpleNamespace(
            name="GPU", major=9, minor=0, multi_processor_count=132, L2_cache_size=50 << 20,
            shared_memory_per_block=48 << 10, **values,
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        device._facts.cache_clear()
        return device.facts(torch.device("cuda", 0))

    yield describe
    device._facts.cache_clear()


def test_cpu():
    facts = device.facts(torch.device("cpu"))
    assert (facts.arch, facts.sm_count, facts.shared_memory) == ("cpu", 0, 0)


def test_nvidia(properties, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    facts = properties(shared_memory_per_block_optin=227 << 10)
    assert facts == device.DeviceFacts("GPU", "sm_90", 132, 227 << 10, 50 << 20)


def test_amd(properties, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    facts = properties(gcnArchName="gfx942:sramecc+:xnack-")
    assert (facts.arch, facts.shared_memory) == ("gfx942", 48 << 10)


@pytest.mark.parametrize(("setting", "precision"), [("tf32", "tf32"), ("ieee", "ieee")])
def test_matmul_precision(setting, precision):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = setting
    try:
        assert device.matmul_precision() == precision
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_the_precision_in_compiled_code_is_that_of_the_call(monkeypatch):
    setting = "ieee"
    monkeypatch.setattr(device, "fp32_precision", lambda backend, op: setting)

    def scaled(x):
        return x * (2 if device.matmul_precision() == "tf32" else 1)

    before = torch.get_float32_matmul_precision()
    try:
        compiled = torch.compile(scaled, fullgraph=True, backend="eager")
        torch.set_float32_matmul_precision("highest")
        assert compiled(torch.ones(2)).tolist() == [1, 1]
        setting = "tf32"
        torch.set_float32_matmul_precision("high")
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    finally:
        torch.set_float32_matmul_precision(before)
        torch.compiler.reset()
