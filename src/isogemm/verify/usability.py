"""Which kernels serve calls on a device, and why or why not: what `isogemm doctor` shows."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from isogemm.core import device as devices
from isogemm.core import tables
from isogemm.gemm import configs, selection
from isogemm.tiny import configs as tiny_configs


@dataclass(frozen=True)
class Usability:
    """Whether a kernel serves calls on a device, and why or why not."""

    usable: bool
    kernel: str
    reason: str


def gemm(device: torch.device) -> Sequence[Usability]:
    if device.type != "cuda":
        return [Usability(True, "gemm/cpu", "sums in one order whatever the batch; any precision is computed as ieee")]
    arch = devices.facts(device).arch
    obstacle = configs.usable(arch) or _missing_triton()
    tiles = f"tiles measured on {arch}"
    if not tables.measured("gemm", arch):
        known = ", ".join(tables.architectures("gemm"))
        tiles = f"safe default tiles: nothing was measured on {arch}, only on {known}"
    plain = configs.Problem(
        4096, 4096, 4096, "bfloat16", "bfloat16", "ieee", (4096, 1), (1, 4096), (4096, 1), arch=arch
    )  # fmt: skip
    has_tma = any(config.kernel == "tma" for config in selection.candidates(plain))
    no_tma = obstacle or ("" if has_tma else f"{arch} has no TMA")
    return [_kernel("gemm/tma", no_tma, arch, tiles), _kernel("gemm/pointer", obstacle, arch, tiles)]


def fused(device: torch.device) -> Sequence[Usability]:
    """The GEMM's kernels, with an epilogue."""
    found = [replace(each, kernel=each.kernel.replace("gemm/", "fused/")) for each in gemm(device)]
    if device.type != "cuda":
        return [replace(each, reason="the GEMM's sums followed by torch's operations in fp32") for each in found]
    return found


def tiny(device: torch.device) -> Sequence[Usability]:
    arch = devices.facts(device).arch
    obstacle = "not on a GPU: torch.bmm serves"
    if device.type == "cuda":
        obstacle = tiny_configs.usable(arch) or _missing_triton()
    detail = "" if tables.measured("tiny", arch) else f"gate measured on {', '.join(tables.architectures('tiny'))}"
    return [_kernel(f"tiny/{kernel}", obstacle, arch, detail) for kernel in tiny_configs.KERNELS]


def encoder(device: torch.device) -> Sequence[Usability]:
    if device.type != "cuda":
        return [Usability(True, "encoder/composed", "norm, products and attention, each in an order of its own")]
    arch = devices.facts(device).arch
    obstacle = configs.usable(arch) or _missing_triton()
    served = {"encoder/fused": "short sequences, small layers", "encoder/composed": "all others"}
    return [_kernel(name, obstacle, arch, detail) for name, detail in served.items()]


def attention(device: torch.device) -> Sequence[Usability]:
    if device.type != "cuda":
        return _on_cpu("attention")
    arch = devices.facts(device).arch
    obstacle = configs.usable(arch) or _missing_triton()
    no_roles = obstacle or ("" if arch == "sm_90" else f"it is for sm_90; this is {arch}")
    return [
        _kernel("attention/roles", no_roles, arch, "many 16-bit queries of dense sequences"),
        _kernel("attention/forward", obstacle, arch, "all others"),
        _kernel("attention/backward", obstacle, arch, ""),
    ]


def norm(device: torch.device) -> Sequence[Usability]:
    return _one_kernel("norm", device)


def loss(device: torch.device) -> Sequence[Usability]:
    return _one_kernel("loss", device)


def _one_kernel(family: str, device: torch.device) -> Sequence[Usability]:
    if device.type != "cuda":
        return _on_cpu(family)
    arch = devices.facts(device).arch
    return [_kernel(family, configs.usable(arch) or _missing_triton(), arch, "")]


def _on_cpu(family: str) -> Sequence[Usability]:
    return [Usability(True, f"{family}/cpu", "sums in one order whatever the batch")]


def _missing_triton() -> str:
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def _kernel(name: str, obstacle: str, arch: str, detail: str) -> Usability:
    return Usability(not obstacle, name, obstacle or "; ".join(filter(None, (f"compiled for {arch}", detail))))
