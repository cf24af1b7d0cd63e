"""A simulated H200: the whole way from a call to its launches, on CPU tensors, without a GPU.

CPU tensors say that they are on a GPU, Triton's driver is replaced, kernels are compiled to PTX for sm_90 and nothing
is run. What would have been launched is recorded: the machine code, the grid, and every argument, with addresses as
buffer + offset. Two versions of the library that record the same launch the same work, so their results have the same
bits and their kernels take the same time.

Works with the Triton that constraints.txt pins: it replaces parts of its driver. Install it before isogemm is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler, driver
from triton.runtime import driver as runtime

Launches = list[list[Any]]

_STREAM = 7
_LEAST_ADDRESS = 1 << 40  # integers from here on are addresses
_ARENA_BYTES = 6 << 30

_launched: list[tuple[Any, ...]] = []
_buffers: list[tuple[int, int]] = []  # start and end of each known allocation
_alive: list[torch.Tensor] = []  # no address is used twice
_arena = torch.empty(_ARENA_BYTES, dtype=torch.uint8)  # never written: no memory behind it
_used = 0


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory whose distance from what was allocated before is the same in every run."""
    global _used
    size = dtype.itemsize * functools.reduce(lambda a, b: a * b, shape, 1)
    start = -_arena.data_ptr() % 4096 + _used
    _used += -(-size // 512) * 512 + 512
    memory = (ctypes.c_char * max(size, 1)).from_address(_arena.data_ptr() + start)
    return note(torch.frombuffer(memory, dtype=torch.uint8)[:size].view(dtype).view(shape))


def note(tensor: torch.Tensor) -> torch.Tensor:
    """Let launches name this tensor's memory."""
    storage = tensor.untyped_storage()
    _alive.append(tensor)
    _buffers.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return tensor


def restart() -> None:
    global _used
    _used = 0
    for each in (_launched, _buffers, _alive):
        each.clear()  # type: ignore[attr-defined]


def launches() -> Launches:
    """What was launched since the last `restart`: PTX hash, grid, PDL, warps and shared memory, arguments."""
    seen: dict[int, int] = {}
    return [
        [_ptx_hash(*function), grid, pdl, str(metadata), [repr(_named(each, seen)) for each in arguments]]
        for function, grid, pdl, metadata, arguments in _launched
    ]


def install() -> None:
    """Simulate from now on."""
    knobs.compilation.disable_line_info = True  # the PTX does not depend on where the source lies
    compiler.CUDABackend.make_cubin = lambda self, ptx, *rest: ptx.encode()  # no assembler: it is not to be run
    driver.PyKernelArg, driver.ARG_KERNEL, driver.ARG_CONSTEXPR, driver.ARG_TUPLE = (lambda **_: None), 0, 0, 0
    driver.make_kernel_signature = lambda signature: b""
    driver.annotate_arguments = tuple
    runtime.set_active(_Driver())
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment, method-assign]
    torch.Tensor.get_device = lambda self: 0  # type: ignore[assignment, method-assign]
    stream = SimpleNamespace(stream_id=_STREAM, device_index=0, device_type=1, cuda_stream=_STREAM)
    cuda: Any = torch.cuda
    cuda.device, cuda.current_device = (lambda *_: contextlib.nullcontext()), lambda: 0
    cuda.is_current_stream_capturing, cuda.current_stream = (lambda: False), lambda *_: stream
    for owner, names in ((torch, ("empty", "empty_strided", "empty_like", "zeros")), (torch.Tensor, ("new_empty",))):
        for name in names:
            setattr(owner, name, _noting(getattr(owner, name)))
    from isogemm.core import device, launch

    facts = device.DeviceFacts("NVIDIA H200", "sm_90", 132, 232448, 60 << 20)
    device.facts, device.current_device = (lambda _: facts), lambda: 0
    launch.current_stream, launch._enter_context = (lambda index: _STREAM), lambda index: None


class _Utilities:
    """What Triton's launcher and this library ask the driver for."""

    def launch(self, x: int, y: int, z: int, stream: int, function: Any, cooperative: bool, pdl: bool, metadata: Any,
               *rest: Any) -> None:  # fmt: skip
        *_, annotations, _, arguments = rest
        given = [each for each, kind in zip(arguments, annotations, strict=True) if kind != "constexpr"]
        _launched.append((function, (x, y, z), pdl, metadata, given))

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return ("module", name), (name, kernel), 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def fill_tma_descriptor_tiled(self, *arguments: Any) -> tuple[Any, ...]:
        return ("tma", *[tuple(each) if isinstance(each, list) else each for each in arguments])


class _Driver:
    launcher_cls = driver.CudaLauncher
    utils = _Utilities()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return _STREAM

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return 9, 0


@functools.cache
def _ptx_hash(name: str, ptx: bytes) -> str:
    lines = ptx.decode().replace(name, "kernel").splitlines()
    code = "\n".join(line for line in lines if not line.lstrip().startswith("//"))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _named(value: Any, seen: dict[int, int]) -> Any:
    """A value with addresses as buffer + offset: buffers are numbered in the order in which launches use them."""
    if isinstance(value, tuple):
        return tuple(_named(each, seen) for each in value)
    if not isinstance(value, int) or value < _LEAST_ADDRESS:
        return value
    for start, end in reversed(_buffers):
        if start <= value < max(end, start + 1):
            return f"{seen.setdefault(start, len(seen))}+{value - start}"
    return "elsewhere"  # the result of a torch operation


def _noting(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return note(function(*args, **kwargs))

    return run
