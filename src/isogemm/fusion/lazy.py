"""`isogemm.autofuse`: inside the block products are deferred, and what follows one is computed with it in one launch.

A torch function mode sees every call. A product becomes a `Deferred` (deferred.py), and so does a step that fits its
epilogue (deferring.py, by the rules in rules.py as chains.py remembers them). Anything else that looks computes it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import distributed
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from isogemm.core import private
from isogemm.fusion import questions
from isogemm.fusion.chains import Kwargs
from isogemm.fusion.deferred import NO_KWARGS, Block, Ledger, thread
from isogemm.fusion.deferring import BESIDE_GROUP, HANDLERS, on_product, on_product_beside_group
from isogemm.fusion.report import Report

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Their bodies run when they are iterated or awaited, after a call of theirs has ended.
_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
_has_group: Callable[[], bool] = distributed.is_initialized if distributed.is_available() else lambda: False


class autofuse:
    """Fuse products with what follows them, in plain torch code: a `with` block or a decorator.

    Args:
        dropout: fuse dropout as well; each call then has one mask of isogemm's, another than torch's, whose seed is
            drawn from torch's generator when the result is computed.

    The block gives a `Report` of what was fused and, for the products left, why not (of a decorator: its `report`).
    Values and gradients are those of the plain code within rounding. Nothing is fused where a torch.distributed process
    group exists. What else changes operands unseen, and so may not be used between a product and its next step, is
    listed in the README of isogemm.fusion.
    """

    def __init__(self, *, dropout: bool = False) -> None:
        self.dropout = dropout
        self.report = Report()
        self._mode: _Mode | None = None
        self._block: Block | None = None

    def __enter__(self) -> Report:
        if is_compiling():
            return self.report
        if self._mode is not None:
            raise RuntimeError("this autofuse() is entered already; expected one for each block")
        if private.is_off(private.AUTOFUSE):
            return self.report
        stack: list[TorchFunctionMode] = private.find("torch.overrides:_get_current_function_mode_stack")()
        active = next((mode for mode in reversed(stack) if isinstance(mode, _Mode)), None)
        self._mode = active or _Mode()
        self._block = Block(self._mode.ledger, self.report, self.dropout)
        self._mode.ledger.blocks.append(self._block)
        if active is None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self.report

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, traceback: Any) -> None:
        if is_compiling() or self._mode is None or self._block is None:
            return
        mode, block = self._mode, self._block
        self._mode = self._block = None
        ledger = mode.ledger
        if len(ledger.blocks) == 1:
            mode.__exit__(kind, exception, traceback)  # type: ignore[no-untyped-call]
        try:
            # A checkpoint leaves a layer by this when it has computed enough: more would be one saved tensor too many.
            if not isinstance(exception, private.find("torch.utils.checkpoint:_StopRecomputationError")):
                ledger.compute_pending("the block ended", of=block, failing=exception is not None)
        finally:
            ledger.blocks.remove(block)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        if not callable(function):
            raise TypeError(f"autofuse() decorates functions, not {function!r}; expected it below the other decorator")
        wrapped: Any = function
        while isinstance(wrapped, functools.partial | staticmethod):
            wrapped = wrapped.func if isinstance(wrapped, functools.partial) else wrapped.__func__
        for called in (wrapped, type(wrapped).__call__):
            if any(runs_later(called) for runs_later in _RUN_LATER):
                raise TypeError(f"{questions.name(wrapped)} is a generator or a coroutine; use a with block inside it")

        @functools.wraps(function)
        def fused(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            block = autofuse(dropout=self.dropout)
            block.report = self.report
            with block:
                return function(*args, **kwargs)

        return fused


class _Mode(TorchFunctionMode):
    """Defers, on one thread. Blocks inside a block share its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> Any:
        if is_dynamo_compiling() or thread.computing:
            return function(*args, **(kwargs or NO_KWARGS))
        ledger = self.ledger
        handler = HANDLERS.get(function) if not kwargs or "out" not in kwargs else None
        is_pending = handler is not None or ledger.is_pending()
        if is_pending and _has_group():
            ledger.compute_pending(BESIDE_GROUP)  # what was deferred before there was one
            handler = on_product_beside_group if handler is on_product else handler
        if handler is not None:
            return handler(ledger, function, args, kwargs or NO_KWARGS)
        if is_pending and questions.may_write(function, args, kwargs or NO_KWARGS):
            ledger.compute_readers((args, kwargs), f"{questions.name(function)} may change an operand")
        return function(*args, **kwargs) if kwargs else function(*args)
