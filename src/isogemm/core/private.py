"""The releases of torch and Triton that were tested, and the private names of torch that isogemm uses.

A release of torch may drop any of them. Then `find` gives None and the feature that needs the name is off: it says so,
and results stay right. Other modules find their names here. Not listed, since torch documents them or has long kept
them: `torch._C.DisableTorchFunction`, `TorchDispatchMode`, `Tensor._version`, the registries of torch.nn.Module
(`_parameters`, `_forward_hooks`, ...), and attributes of torch.fx nodes and operators (`_erased`, `_schema`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

# The releases on which the whole test suite passed; pyproject.toml has the bounds.
TORCH = "2.11.0", "2.13.0", "2.15.0"
TRITON = "3.6.0", "3.7.1", "3.9.0"

# What is off where a name is missing.
FAST_PATH = "eager fast path"  # calls go through torch.library's operators instead
AUTOFUSE = "autofuse"  # blocks fuse nothing
COMPILE_FUSION = "compile_fusion"  # graphs stay as they are
EPILOGUES = "gradients of registered epilogues"  # they raise
FALLBACK = "nothing"  # a slower or more careful way takes its place
BENCH = "benchmarks"


NAMES = {  # each as module:attribute, with what needs it
    "torch._C:_len_torch_dispatch_stack": (FAST_PATH, AUTOFUSE),
    "torch._C:_functorch.peek_interpreter_stack": (FAST_PATH, AUTOFUSE),
    "torch.autograd.forward_ad:_current_level": (FAST_PATH, AUTOFUSE),
    "torch._C:_functorch.is_legacy_batchedtensor": (FALLBACK,),
    "torch._C._dynamo.guards:TensorGuards": (FALLBACK,),
    "torch._C._dynamo.guards:_empty_strided_cuda": (FALLBACK,),
    "torch._C:_get_fp32_precision_getter": (FALLBACK,),
    "torch._C:_cuda_getCurrentRawStream": (FALLBACK,),
    "torch._C:_cuda_getDevice": (FALLBACK,),
    "torch._C:_will_engine_execute_node": (FALLBACK,),
    "torch._C:_dispatch_tls_is_dispatch_key_excluded": (AUTOFUSE, EPILOGUES),
    "torch._C:_dispatch_tls_set_dispatch_key_excluded": (AUTOFUSE, EPILOGUES),
    "torch._C:DispatchKey": (AUTOFUSE, EPILOGUES),
    "torch._C:_autograd._top_saved_tensors_default_hooks": (AUTOFUSE,),
    "torch._C:_autograd._push_saved_tensors_default_hooks": (AUTOFUSE,),
    "torch._C:_autograd._pop_saved_tensors_default_hooks": (AUTOFUSE,),
    "torch._C:_autograd._get_current_graph_task_keep_graph": (FALLBACK,),
    "torch._C:_current_graph_task_id": (AUTOFUSE,),
    "torch._C:_is_fwd_grad_enabled": (AUTOFUSE,),
    "torch._C:_cuda_getCurrentStream": (FALLBACK,),
    "torch._C:_set_throw_on_mutable_data_ptr": (AUTOFUSE,),
    "torch._C:_swap_tensor_impl": (AUTOFUSE,),
    "torch:Tensor._make_wrapper_subclass": (AUTOFUSE,),
    "torch:Tensor._use_count": (AUTOFUSE,),
    "torch:Tensor._backward_hooks": (AUTOFUSE,),
    "torch:UntypedStorage._cdata": (COMPILE_FUSION,),
    "torch.overrides:_get_current_function_mode_stack": (AUTOFUSE,),
    "torch.utils._python_dispatch:_disable_current_modes": (AUTOFUSE, COMPILE_FUSION),
    "torch.utils.checkpoint:_StopRecomputationError": (AUTOFUSE,),
    "torch._dynamo:graph_break": (AUTOFUSE,),
    "torch._inductor:config": (COMPILE_FUSION, BENCH),
    "torch._inductor.custom_graph_pass:CustomGraphPass": (COMPILE_FUSION,),
    "torch._subclasses.fake_tensor:FakeTensor": (COMPILE_FUSION,),
    "torch:_addmm_activation": (BENCH,),
}


@functools.cache
def find(path: str) -> Any:
    """The object of a name in NAMES, or None where this torch has none."""
    if path not in NAMES:
        raise KeyError(f"{path} is not listed in isogemm.core.private.NAMES")
    module, _, attribute = path.partition(":")
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def forward_ad_level() -> int:
    """Level of forward-mode AD, negative outside of it; read anew, since torch rebinds it."""
    return forward_ad._current_level


@contextlib.contextmanager
def autograd_below_dispatcher() -> Iterator[None]:
    """Enable autograd inside an operator, where the dispatcher has excluded it."""
    is_excluded = find("torch._C:_dispatch_tls_is_dispatch_key_excluded")
    exclude, keys = find("torch._C:_dispatch_tls_set_dispatch_key_excluded"), _autograd_keys()
    excluded = [is_excluded(key) for key in keys]
    try:
        for key in keys:
            exclude(key, False)
        yield
    finally:
        for key, was in zip(keys, excluded, strict=True):
            exclude(key, was)


@functools.cache
def _autograd_keys() -> list[Any]:
    if lacking := missing(EPILOGUES):
        raise RuntimeError(f"{EPILOGUES} need {', '.join(lacking)}, which torch {torch.__version__} does not have")
    names = "AutogradCPU", "AutogradCUDA", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView"
    return [getattr(find("torch._C:DispatchKey"), name) for name in names]


def missing(*features: str) -> list[str]:
    """Paths that these features need and this torch lacks; of the compiler's, where it is imported already."""
    return [
        path
        for path, needed_by in NAMES.items()
        if not set(features).isdisjoint(needed_by) and _is_loaded(path) and find(path) is None
    ]


def _is_loaded(path: str) -> bool:
    """False for names whose modules take seconds to import and were not needed so far."""
    module = path.partition(":")[0]
    return not module.startswith(("torch._inductor", "torch._dynamo")) or module in sys.modules


def is_off(feature: str) -> bool:
    """Whether this torch lacks a name that the feature needs; says so once."""
    lacking = missing(feature)
    if lacking:
        _warn_off(feature, tuple(lacking))
    return bool(lacking)


@functools.cache
def _warn_off(feature: str, lacking: tuple[str, ...]) -> None:
    what = ", ".join(path.replace(":", ".") for path in lacking)
    warnings.warn(
        f"isogemm: {feature} is off: torch {torch.__version__} has no {what}. Results are not affected.", stacklevel=4
    )


def untested(package: str, version: str) -> str:
    """A warning where this torch or triton is newer than the last one tested, by its minor version; else empty."""
    last = {"torch": TORCH, "triton": TRITON}[package][-1]
    if _minor(version) <= _minor(last):
        return ""
    return f"{package} {version} is newer than {last}, the last release isogemm was tested with: run `isogemm verify`"


def _minor(version: str) -> tuple[int, ...]:
    """The first two numbers; none in what is no version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
