"""Properties of a device, and torch's precision setting for float32 products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from isogemm.core import private


@dataclass(frozen=True)
class DeviceFacts:
    name: str
    arch: str  # sm_90, gfx942, cpu
    sm_count: int
    shared_memory: int  # bytes one block may use
    l2_bytes: int


def facts(device: torch.device) -> DeviceFacts:
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _facts(device)


@functools.cache
def _facts(device: torch.device) -> DeviceFacts:
    if device.type != "cuda":
        return DeviceFacts(name=device.type, arch=device.type, sm_count=0, shared_memory=0, l2_bytes=0)
    properties = torch.cuda.get_device_properties(device)
    arch = getattr(properties, "gcnArchName", "").split(":")[0] if torch.version.hip else ""
    arch = arch or f"sm_{properties.major}{properties.minor}"
    return DeviceFacts(
        name=properties.name or arch,  # some drivers of AMD give none
        arch=arch,
        sm_count=properties.multi_processor_count,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block,
        l2_bytes=properties.L2_cache_size,
    )


def matmul_precision() -> str:
    """What torch would use for an fp32 matmul now: "ieee" or "tf32"."""
    return "tf32" if fp32_precision("cuda", "matmul") == "tf32" else "ieee"


# torch.compile cannot trace it: it takes the result as a constant, and recompiles where the setting changes. So does
# torch.compiler.assume_constant_result, which imports all of torch.compile.
matmul_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]

# As torch.backends.cuda.matmul.fp32_precision, at half its cost: every call reads it.
fp32_precision: Callable[[str, str], str] = private.find("torch._C:_get_fp32_precision_getter") or (
    lambda backend, op: torch.backends.cuda.matmul.fp32_precision
)

# As torch.cuda.current_device, without the check whether CUDA is initialised.
current_device: Callable[[], int] = private.find("torch._C:_cuda_getDevice") or torch.cuda.current_device


def resolve_precision(a: torch.Tensor, precision: str | None) -> str | None:
    """The precision of a product with `a`: None becomes torch's setting where it matters, float32 on a GPU."""
    if precision is None and a.dtype is torch.float32 and a.is_cuda:
        return matmul_precision()
    return precision


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
