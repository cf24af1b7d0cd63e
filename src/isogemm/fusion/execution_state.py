"""The execution state of a call: what its result depends on besides its operands.

It is read when a call is deferred and restored when the call is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from isogemm.core import private
from isogemm.core.eager import is_tracing
from isogemm.core.precision import of_cuda_products

Hooks = tuple[Any, Any] | None
Enclosure = tuple[Hooks, int, bool, bool]  # the first fields of an ExecutionState


class ExecutionState(NamedTuple):
    # Deferred results do not cross a change of these: a block defers only where they are as at its entry.
    hooks: Hooks  # the innermost hooks of saved tensors
    backward: int  # number of the backward that is running
    forward_ad: bool  # autograd turns it off in an autograd.Function's forward; no_grad does not
    capturing: bool  # the stream's work goes into a CUDA graph
    # No result is deferred under these.
    dispatch_modes: int
    tracing: bool
    level: int  # of forward-mode AD, negative outside of it
    interpreter: Any  # of a torch.func transform, or None
    inference: bool
    # A result is computed under these.
    grad: bool
    autocast: torch.dtype | None
    stream: tuple[int, int, int] | None  # of CUDA: id, device and kind
    device: int  # of CUDA, negative for the CPU

    @property
    def transform(self) -> bool:
        return self.level >= 0 or self.interpreter is not None


def read(device: int) -> tuple[Any, ...]:
    """Return the fields of the state now, for a call on a device: a bare tuple, made and compared at every call."""
    capturing, stream = False, None
    if device >= 0:
        stream = _current_stream(device)
        capturing = stream[0] != 0 and _is_capturing()  # torch captures no default stream
    kind = "cuda" if device >= 0 else "cpu"
    return (
        _top_hooks(True),
        _backward(),
        is_forward_ad_enabled(),
        capturing,
        _dispatch_modes(),
        is_tracing(),
        private.forward_ad_level(),
        _interpreter(),
        _is_inference(),
        _is_grad(),
        _autocast_dtype(kind) if _is_autocast(kind) else None,
        stream,
        device,
    )


def read_enclosure() -> Enclosure:
    is_capturing = _is_initialized() and _is_capturing()
    return _top_hooks(True), _backward(), is_forward_ad_enabled(), bool(is_capturing)


def is_inside(entered: Enclosure, state: ExecutionState) -> bool:
    """Whether a state without obstacles of its own belongs to a block that was entered in this enclosure."""
    return state[:3] == entered[:3] and (state.stream is None or state.capturing == entered[3])


def obstacle(entered: Enclosure, now: ExecutionState) -> str:
    """Say why no call may be deferred now in a block that was entered in this enclosure; empty if it may."""
    if now.dispatch_modes > 0 or now.tracing:
        return "a dispatch mode or a tracer listens"
    if now.transform:
        return "it is inside forward-mode AD or a torch.func transform"
    if now.inference:
        return "changes of an input cannot be seen in inference mode; torch.no_grad() would do"
    hooks, backward, forward_ad, _ = entered
    if now.forward_ad != forward_ad:
        return "it is inside an autograd.Function, which takes its result at once"
    if now.backward != backward:
        return "it is computed in a backward"
    if is_inside(entered, now):
        return ""
    what = "hooks of saved tensors (a checkpoint)" if now.hooks != hooks else "a CUDA graph's capture"
    return f"{what} began inside the block; enter the block inside of it"


@contextmanager
def restored(then: ExecutionState, now: ExecutionState, precision: str) -> Iterator[None]:
    """Compute as at the time of `then`; `precision` is that of a float32 product on CUDA, else empty."""
    with ExitStack() as stack:
        if now.capturing != then.capturing:
            raise RuntimeError(
                "a product was deferred on one side of a CUDA graph's capture and is read on the other; "
                "enter and leave isogemm.autofuse() on one side"
            )
        if now.stream is not None and then.stream is not None and now.stream != then.stream:
            before, current = _stream(*then.stream), _stream(*now.stream)
            stack.callback(current.wait_stream, before)  # the reader is on this one
            stack.enter_context(torch.cuda.stream(before))
        stack.enter_context(of_cuda_products(precision or None))
        if now.dispatch_modes:
            stack.enter_context(private.find("torch.utils._python_dispatch:_disable_current_modes")())
        if now.inference:
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(then.grad))
        if now.autocast != then.autocast:
            kind = "cpu" if then.stream is None else "cuda"
            stack.enter_context(torch.autocast(kind, then.autocast, enabled=then.autocast is not None))
        # Hooks that were entered since, such as a checkpoint's, must not see what was called before.
        while (top := _top_hooks(True)) is not None and top != then.hooks:
            _pop_hooks()
            stack.callback(_push_hooks, *top)
        yield


def _stream(number: int, index: int, kind: int) -> Any:
    return torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)  # type: ignore[no-untyped-call]


def _public_stream(device: int) -> tuple[int, int, int]:
    stream = torch.cuda.current_stream(device)
    return stream.stream_id, stream.device_index, stream.device_type


# Looked up once: they are called at every deferral.
_top_hooks: Any = private.find("torch._C:_autograd._top_saved_tensors_default_hooks")
_push_hooks: Any = private.find("torch._C:_autograd._push_saved_tensors_default_hooks")
_pop_hooks: Any = private.find("torch._C:_autograd._pop_saved_tensors_default_hooks")
_backward: Any = private.find("torch._C:_current_graph_task_id")
is_forward_ad_enabled: Any = private.find("torch._C:_is_fwd_grad_enabled")
_dispatch_modes: Any = private.find("torch._C:_len_torch_dispatch_stack")
_interpreter: Any = private.find("torch._C:_functorch.peek_interpreter_stack")
_is_inference: Any = torch.is_inference_mode_enabled
_is_grad: Any = torch.is_grad_enabled
_autocast_dtype: Any = torch.get_autocast_dtype
_is_autocast: Any = torch.is_autocast_enabled
_current_stream: Any = private.find("torch._C:_cuda_getCurrentStream") or _public_stream
_is_initialized: Any = torch.cuda.is_initialized
_is_capturing: Any = torch.cuda.is_current_stream_capturing
