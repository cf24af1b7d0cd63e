"""Launches of compiled kernels by their handle, without the JIT's work per call.

Triton's JIT spends 31 us a call (H200 host) on binding arguments and finding the compiled kernel again. A caller that
keeps a `BoundKernel` per problem, with everything Triton specialises on in its own key, pays 7 us. Descriptors for TMA
are made once per address and kept.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from triton import knobs
from triton.runtime import cache, driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from isogemm.core import compiler_key, private

# The raw handle of torch's current stream on a device: what Triton's own launcher asks for.
current_stream: Any = private.find("torch._C:_cuda_getCurrentRawStream") or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)

_TFLOAT32 = 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: the copy engine rounds float32 as it reads
_OF_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.float32}  # for Triton's checks of alignment
_MOST_MAPS = 256  # TMA descriptors kept per plan and argument: one per address, such as each layer's weight


@dataclass(frozen=True)
class TensorMap:
    """A matrix in memory as TMA reads or writes it, a block at a time.

    Three axes describe two matrices of one shape: the first stride is their distance, known with their addresses.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements; the last is 1
    block: tuple[int, ...]
    round_to_tf32: bool = False
    layout: Any = None  # of a block in shared memory, for a kernel in Gluon

    def descriptor(self, base: Any, strides: Sequence[int], **rounding: bool) -> Any:
        """The matrix at `base` as Triton's launcher takes it."""
        described = list(self.shape), list(strides), list(self.block)
        if self.layout is None:
            return TensorDescriptor(base, *described, **rounding)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOut

        return LaidOut(base, *described, self.layout)


@dataclass(frozen=True)
class Launch:
    """A launch without its tensors, which come first among the kernel's arguments."""

    kernel: Any
    programs: int
    scalars: tuple[Any, ...]  # after the tensors; None where the kernel does not use it
    constants: dict[str, object]
    options: dict[str, object]
    maps: tuple[TensorMap | None, ...] = ()  # for each of the first tensors: how TMA sees it, or None
    numbers: tuple[float | None, ...] = ()  # after the scalars: placeholders for numbers that come with a call

    def run(self, *tensors: Any, numbers: tuple[float | None, ...] = ()) -> None:
        """Launch through Triton's JIT, for its interpreter; a pair of tensors where a map is of two matrices."""
        self._check_options()
        if self.programs:
            arguments = (*self._described(tensors), *self.scalars, *(numbers or self.numbers))
            self.kernel[(self.programs,)](*arguments, **self.constants, **self.options)

    def check(self, tensors: int) -> None:
        """Raise unless the constants are the kernel's arguments after so many tensors, the scalars and the numbers, and
        the options are complete."""
        names = list(self.kernel.arg_names[tensors + len(self.scalars) + len(self.numbers) :])
        if names != list(self.constants):
            raise TypeError(f"constants are {list(self.constants)}; {self.kernel.__name__} expects {names}")
        self._check_options()

    def _check_options(self) -> None:
        """Raise unless enable_fp_fusion is set: bits depend on it, and its default on Triton's version."""
        if "enable_fp_fusion" not in self.options:
            found = f"options of {self.kernel.__name__} are {list(self.options)}"
            raise TypeError(f"{found}; expected enable_fp_fusion among them")

    def bind(self, *tensors: Any) -> BoundKernel:
        """Compile on the current device for tensors like these."""
        if not isinstance(self.kernel, JITFunction):
            raise TypeError(f"kernel is a {type(self.kernel).__name__}; expected a compiled @triton.jit function")
        self.check(len(tensors))
        compiler_key.keep(cache)
        arguments = (*self._described(tensors), *self.scalars, *self.numbers)
        compiled = self.kernel.warmup(*arguments, grid=(1,), **self.constants, **self.options)
        return BoundKernel(compiled, list(self.constants.values()))

    def _described(self, tensors: Sequence[Any]) -> list[Any]:
        """The tensors as Triton's JIT takes them."""
        described = list(tensors)
        for place, seen in enumerate(self.maps):
            if seen is None:
                continue
            tensor, strides = tensors[place], list(seen.strides)
            if isinstance(tensor, tuple):
                tensor, second = sorted(tensor, key=torch.Tensor.data_ptr)
                strides[0] = (second.data_ptr() - tensor.data_ptr()) // tensor.element_size()
            described[place] = seen.descriptor(tensor, strides)
        return described


class BoundKernel:
    """A kernel compiled for one specialisation on one device."""

    __slots__ = (
        "_after",
        "_before",
        "_compiled",
        "_encoders",
        "_function",
        "_grouped",
        "_launch",
        "_metadata",
        "_places",
        "constants",
        "direct",
    )

    def __init__(self, compiled: Any, constants: Sequence[object]) -> None:
        compiled._init_handles()  # load the module; `run` would take a load that failed before for one that succeeded
        if compiled.function is None:
            raise RuntimeError(f"{compiled.name} was compiled but not loaded")
        self._compiled = compiled
        self._function = compiled.function
        self._metadata = compiled.packed_metadata
        self.constants = tuple(constants)  # the kernel's last arguments
        self._encoders = tuple(getattr(getattr(compiled, "metadata", None), "tensordesc_meta", None) or ())
        launcher = _launcher(compiled, bool(self._encoders))
        self.direct = launcher is not None  # whether launches go past Triton's launcher
        self._launch, self._before, self._after, self._grouped, self._places = launcher or _Launcher(compiled.run)

    def __call__(self, device: int, programs: int, *args: Any) -> None:
        """Launch on `device`'s current stream; `device` must be current.

        Tensors are given by address, or by what a `describer` gives, unpacked.
        """
        self.launch(device, programs, self.taken((*args, *self.constants)))

    def taken(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return those of the kernel's arguments, its constants last, that its launcher takes."""
        return arguments if self._places is None else [arguments[place] for place in self._places]

    def launch(self, device: int, programs: int, arguments: Sequence[Any]) -> None:
        """Launch with the `taken` arguments."""
        stream, runtime = current_stream(device), knobs.runtime
        enter, leave, described = runtime.launch_enter_hook, runtime.launch_exit_hook, None
        # A chain without hooks counts as none; Triton would call it.
        enter = enter if enter is not None and getattr(enter, "calls", True) else None
        leave = leave if leave is not None and getattr(leave, "calls", True) else None
        if enter is not None:
            described = self._compiled.launch_metadata((programs, 1, 1), stream, *arguments)
        hooks = (self._metadata, described, enter, leave)
        if self._grouped:
            self._launch(programs, 1, 1, stream, self._function, *self._before, *hooks, *self._after, arguments)
        else:
            self._launch(programs, 1, 1, stream, self._function, *self._before, *hooks, *arguments)

    def prepared(self, stream: int, programs: int, args: Sequence[Any]) -> Callable[[], None]:
        """Return a function that launches with these arguments on that stream, without Triton's launch hooks."""
        rest = tuple(self.taken((*args, *self.constants)))
        if self._grouped:
            rest = (*self._after, rest)
        hooks = (self._metadata, None, None, None)
        return functools.partial(
            self._launch, programs, 1, 1, stream, self._function, *self._before, *hooks, *rest
        )  # fmt: skip

    def described_by(self, seen: TensorMap) -> int:
        """Number of kernel arguments that describe a matrix for TMA."""
        return 1 + 2 * len(seen.shape) if self.direct else 1

    def describer(self, index: int, seen: TensorMap, device: int) -> Callable[[Any], tuple[Any, ...]]:
        """Return a function from an address to the arguments of the kernel's `index`-th TMA descriptor.

        Where the map is of two matrices, it takes a pair of addresses.
        """
        meta = self._encoders[index]
        describe_at = _encoded if self.direct else _unencoded

        def describe(address: Any) -> tuple[Any, ...]:
            first, strides = address, list(seen.strides)
            if isinstance(address, tuple):
                first, strides[0] = min(address), abs(address[1] - address[0]) // meta["elem_size"]
            return describe_at(first, strides, meta, seen, device)

        return _Maps(describe).__getitem__


class _Maps(dict[Any, tuple[Any, ...]]):
    """Descriptions by address, made where they are missing; emptied when full."""

    def __init__(self, describe: Callable[[Any], tuple[Any, ...]]) -> None:
        super().__init__()
        self._describe = describe

    def __missing__(self, address: Any) -> tuple[Any, ...]:
        if len(self) >= _MOST_MAPS:
            self.clear()
        found = self[address] = self._describe(address)
        return found


@functools.cache
def descriptors_usable() -> bool:
    """Whether this Triton's launcher takes TMA descriptors that were encoded here."""
    try:
        _internals()
        from triton.backends.nvidia.driver import wrap_handle_tensordesc

        _below_descriptors(wrap_handle_tensordesc(print, {0: "tensordesc<fp32[1, 1]>"}, None))
    except (ImportError, AttributeError, KeyError, TypeError, RuntimeError):
        return False
    return True


def _below_descriptors(launch: Any) -> Callable[..., None]:
    """Return what Triton's launcher of kernels with descriptors calls once it has encoded them."""
    inside = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    return cast("Callable[..., None]", inside["launcher"].cell_contents)


@functools.cache
def _internals() -> tuple[Callable[..., Any], Mapping[int, int]]:
    """The driver's encoder of TMA descriptors, and its numbers of element types by the compiler's."""
    from triton.backends.nvidia import driver as nvidia

    if driver.active.get_current_target().backend != "cuda":
        raise AttributeError("no TMA here")
    utils = driver.active.utils
    encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor  # since Triton 3.7, before
    return encode, nvidia.TMA_DTYPE_DEVICE_TO_HOST


def _encoded(
    address: int, strides: list[int], meta: Mapping[str, Any], seen: TensorMap, device: int
) -> tuple[Any, ...]:
    """Return a descriptor as Triton's innermost launcher takes it."""
    encode, element_types = _internals()
    element = _TFLOAT32 if seen.round_to_tf32 else element_types[meta["elem_type"]]
    _enter_context(device)
    shape = list(seen.shape)
    tensor_map = encode(address, meta["swizzle"], meta["elem_size"], element, meta["block_size"], shape, strides, 0)
    return (tensor_map, *shape, *strides)


def _unencoded(
    address: int, strides: list[int], meta: Mapping[str, Any], seen: TensorMap, device: int
) -> tuple[Any, ...]:
    """Return a descriptor as Triton's outer launcher takes it, which encodes it at every launch."""
    base = SimpleNamespace(data_ptr=lambda: address, dtype=_OF_SIZE[meta["elem_size"]])
    rounding = {"round_f32_to_tf32": True} if seen.round_to_tf32 else {}  # since Triton 3.7
    return (seen.descriptor(base, strides, **rounding),)


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


class _Launcher(NamedTuple):
    """A launcher, called with grid, stream, function, `before`, metadata and hooks, `after`, and the arguments."""

    launch: Callable[..., None]
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()
    grouped: bool = False  # whether the arguments are one sequence
    places: tuple[int, ...] | None = None  # the arguments that it takes; None: all


def _launcher(compiled: Any, described: bool) -> _Launcher | None:
    """Return Triton's innermost launcher; None, with a warning for CUDA, where it is not called in a known way.

    The outer one allocates scratch memory, which no kernel here needs, and encodes every descriptor at every call. How
    it calls the innermost one depends on Triton's version: that is read off one call of a copy that launches nothing.
    """
    outer, given = compiled.run, [object() for _ in range(10)]  # grid, stream, function, metadata and hooks, argument
    seen: list[Any] = []
    try:
        recorder = copy.copy(outer)
        recorder.launch = lambda *args: seen.extend(args)
        recorder(*given)
        at, grouped = seen.index(given[5]), isinstance(seen[-1], tuple)
        before, after = seen[5:at], seen[at + 4 : -1]
        constant = [None, *vars(outer).values()]  # from launch to launch
        expected = [*given[:5], *before, *given[5:9], *after, (given[9],) if grouped else given[9]]
        if seen == expected and all(each in constant for each in (*before, *after)):
            launch = _below_descriptors(outer.launch) if described else outer.launch
            return _without_constants(compiled, outer, _Launcher(launch, tuple(before), tuple(after), grouped))
        reason = "it calls its innermost one in an unknown way"
    except Exception as error:  # of another structure, or with more to do than to launch
        reason = repr(error)
    if type(outer).__name__ == "CudaLauncher":
        _warn_of_slow_launches(reason)
    return None


def _without_constants(compiled: Any, outer: Any, launcher: _Launcher) -> _Launcher:
    """Return a launcher that takes only what the kernel reads: Triton's (since 3.7) skips a hundred constants a call.

    It does so by a list of annotations, one for each argument.
    """
    kinds = [*getattr(getattr(compiled, "src", None), "signature", {}).values()]
    annotations = getattr(outer, "arg_annotations", None)
    if not launcher.grouped or not annotations or not all(isinstance(kind, str) for kind in kinds):
        return launcher
    axes = [kind.partition("[")[2].partition("]")[0].count(",") + 1 for kind in kinds]
    sizes = [1 + 2 * n if kind.startswith("tensordesc") else 1 for kind, n in zip(kinds, axes, strict=True)]
    expanded = [kind for kind, size in zip(kinds, sizes, strict=True) for _ in range(size)]
    if len(annotations) != len(expanded):
        return launcher
    places = tuple(place for place, kind in enumerate(expanded) if kind != "constexpr")
    fewer = [annotations[place] for place in places]
    return launcher._replace(
        after=tuple(fewer if each is annotations else each for each in launcher.after), places=places
    )


@functools.cache
def _warn_of_slow_launches(reason: str) -> None:
    message = f"kernels are launched by Triton's own launcher, which takes longer: {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def has_launch_hooks() -> bool:
    """Whether a hook is called at launches, such as a profiler's."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
