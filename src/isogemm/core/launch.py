"""Launching a compiled kernel by its handle, past the JIT's per-call work.

Triton's JIT spends 31 us a call (H200 host) on binding arguments and finding the compiled kernel again. A caller that
keeps a `BoundKernel` per problem, with everything Triton specialises on in its own key, pays 7 us. Descriptors for TMA
are made once per address and kept.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# The raw handle of torch's current stream on a device: what Triton's own launcher asks for.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# torch.cuda.current_device, without asking whether CUDA is there.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)

_TFLOAT32 = 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: the copy engine rounds float32 as it reads
_MOST_MAPS = 256  # addresses kept per plan and argument: a model's weights of one shape, and what its layers pass on


@dataclass(frozen=True)
class TensorMap:
    """A matrix in memory as TMA reads or writes it, a block at a time.

    With three axes, two matrices of one shape: the first stride is their distance, known with their addresses.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements; the last is 1
    block: tuple[int, ...]
    round_to_tf32: bool = False


@dataclass(frozen=True)
class Launch:
    """All that a launch needs but its tensors, which come first among the kernel's arguments."""

    kernel: Any
    programs: int
    scalars: tuple[Any, ...]
    constants: dict[str, object]
    options: dict[str, object]

    def run(self, *tensors: torch.Tensor | None) -> None:
        """Through Triton's JIT."""
        if self.programs:
            self.kernel[(self.programs,)](*tensors, *self.scalars, **self.constants, **self.options)

    def check(self, tensors: int) -> None:
        """Raise unless its constants are those that the kernel takes after so many tensors and the scalars."""
        check_constants(self.kernel, tensors + len(self.scalars), self.constants)

    def bind(self, *tensors: torch.Tensor | None) -> BoundKernel:
        """Compile on the current device for tensors like these."""
        return bind(self.kernel, (*tensors, *self.scalars), self.constants, self.options)


class BoundKernel:
    """A kernel compiled for one specialisation on one device."""

    __slots__ = (
        "_after",
        "_before",
        "_compiled",
        "_constants",
        "_encoders",
        "_function",
        "_grouped",
        "_launch",
        "_metadata",
    )

    def __init__(self, compiled: Any, constants: Sequence[object]) -> None:
        compiled._init_handles()  # load the module; `run` would take a load that failed before for one that succeeded
        if compiled.function is None:
            raise RuntimeError(f"{compiled.name} was compiled but not loaded")
        self._compiled = compiled
        self._function = compiled.function
        self._metadata = compiled.packed_metadata
        self._constants = tuple(constants)
        self._encoders = tuple(getattr(getattr(compiled, "metadata", None), "tensordesc_meta", None) or ())
        self._launch, self._before, self._after, self._grouped = _launcher(compiled, bool(self._encoders))

    def __call__(self, device: int, programs: int, *args: Any) -> None:
        """Launch on `device`'s current stream; `device` must be current.

        Tensors are given by address, or by what a `describer` gives, unpacked.
        """
        stream = current_stream(device)
        enter, leave, described = _listening(knobs.runtime.launch_enter_hook), knobs.runtime.launch_exit_hook, None
        if enter is not None and not self._encoders:
            described = self._compiled.launch_metadata((programs, 1, 1), stream, *args, *self._constants)
        hooks = (self._metadata, described, enter, _listening(leave))
        if self._grouped:
            arguments = (*args, *self._constants)
            self._launch(programs, 1, 1, stream, self._function, *self._before, *hooks, *self._after, arguments)
        else:
            self._launch(programs, 1, 1, stream, self._function, *self._before, *hooks, *args, *self._constants)

    def prepared(self, stream: int, programs: int, args: Sequence[Any]) -> Callable[[], None]:
        """A launch with these arguments on that stream, of which no hook hears: with nothing left to do but it."""
        rest: tuple[Any, ...] = (*args, *self._constants)
        if self._grouped:
            rest = (*self._after, rest)
        hooks = (self._metadata, None, None, None)
        return functools.partial(
            self._launch, programs, 1, 1, stream, self._function, *self._before, *hooks, *rest
        )  # fmt: skip

    def describer(self, index: int, seen: TensorMap, device: int) -> Callable[[Any], tuple[Any, ...]]:
        """For the kernel's `index`-th descriptor: from an address to the arguments that describe the matrix there.

        From a pair of addresses, where the map is of two matrices.
        """
        meta = self._encoders[index]
        element = _TFLOAT32 if seen.round_to_tf32 else _internals().element_types[meta["elem_type"]]
        encode, shape, size = _internals().encode, list(seen.shape), meta["elem_size"]
        kept: dict[Any, tuple[Any, ...]] = {}

        def describe(address: Any) -> tuple[Any, ...]:
            found = kept.get(address)
            if found is None:
                if len(kept) >= _MOST_MAPS:
                    kept.clear()
                _enter_context(device)
                first, strides = address, list(seen.strides)
                if isinstance(address, tuple):
                    first, strides[0] = min(address), abs(address[1] - address[0]) // size
                tensor_map = encode(first, meta["swizzle"], size, element, meta["block_size"], shape, strides, 0)
                found = kept[address] = (tensor_map, *shape, *strides)
            return found

        return describe


def check_constants(kernel: Any, given: int, constants: Mapping[str, object]) -> None:
    """Raise unless these are the kernel's arguments after so many given ones, in their order."""
    names = list(kernel.arg_names[given:])
    if names != list(constants):
        raise TypeError(f"constants are {list(constants)}; {kernel.__name__} expects {names}")


def bind(
    kernel: Any,
    args: Sequence[object],
    constants: Mapping[str, object],
    options: Mapping[str, object],
) -> BoundKernel:
    """Compile `kernel` on the current device for arguments like `args`.

    `args` come first in the kernel's signature, `constants` (its constexprs) last and in the same order.
    """
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"kernel is a {type(kernel).__name__}; expected a compiled @triton.jit function")
    check_constants(kernel, len(args), constants)
    compiled = kernel.warmup(*args, grid=(1,), **constants, **options)
    return BoundKernel(compiled, list(constants.values()))


@functools.cache
def descriptors_usable() -> bool:
    """Whether this Triton's launcher is one that takes descriptors made here."""
    try:
        _internals()
        from triton.backends.nvidia.driver import wrap_handle_tensordesc

        _below_descriptors(wrap_handle_tensordesc(print, {0: "tensordesc<fp32[1, 1]>"}, None))
    except (ImportError, AttributeError, KeyError, TypeError, RuntimeError):
        return False
    return True


def _below_descriptors(launch: Any) -> Callable[..., None]:
    """What Triton's launcher of kernels with descriptors calls when it has made them."""
    inside = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    return cast("Callable[..., None]", inside["launcher"].cell_contents)


@dataclass(frozen=True)
class _Internals:
    encode: Callable[..., Any]
    element_types: Mapping[int, int]  # from the compiler's numbers to the driver's


@functools.cache
def _internals() -> _Internals:
    from triton.backends.nvidia import driver as nvidia

    if driver.active.get_current_target().backend != "cuda":
        raise AttributeError("no TMA here")
    utils = driver.active.utils
    encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor  # since Triton 3.7, before
    return _Internals(encode, nvidia.TMA_DTYPE_DEVICE_TO_HOST)


def _enter_context(device: int) -> None:
    """Give this thread the device's context: a new one, such as autograd's, has none until its first launch."""
    cuda, context = _libcuda(), ctypes.c_void_p()
    cuda.cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        handle = ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(handle), device)
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        cuda.cuCtxSetCurrent(context)


@functools.cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _launcher(compiled: Any, described: bool) -> tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...], bool]:
    """Triton's innermost launcher, what it takes before and after the hooks, and whether the rest is one tuple.

    Around it Triton allocates scratch memory, which no kernel here wants, and makes every descriptor again at every
    call. Where it is not as expected, the outermost one.
    """
    outer = compiled.run
    launch: Any = getattr(outer, "launch", None)
    if described:
        launch = _below_descriptors(launch)
    elif type(outer).__name__ != "CudaLauncher" or outer.global_scratch_size or outer.profile_scratch_size:
        return outer, (), (), False
    modes = (outer.launch_cooperative_grid, outer.launch_pdl)
    if hasattr(outer, "arg_annotations"):
        return launch, modes, (None, None, outer.arg_annotations, outer.kernel_signature), True
    return launch, (*modes, None, None), (), False


def is_heard() -> bool:
    """Whether anyone listens to launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _listening(hook: Any) -> Any:
    """A launch hook, or None where nobody listens: Triton calls even an empty chain."""
    return hook if hook is not None and getattr(hook, "calls", True) else None
