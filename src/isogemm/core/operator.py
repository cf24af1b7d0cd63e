"""Declarations of operators: schema, implementation, fake and gradients in one place.

A declared operator is called like a function. In eager mode, on plain tensors, the implementation runs at once (inside
an autograd Function where a gradient is wanted). Under torch.compile, fake tensors, dispatch modes and tensor
subclasses the call goes through the dispatcher, as `torch.ops.isogemm.<name>`. Both ways share `keep` and `backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch.compiler import is_compiling

from isogemm.core.eager import refuse_transforms, through_dispatcher

# torch.library is not typed.
_library: Any = torch.library.Library("isogemm", "FRAGMENT")  # type: ignore[no-untyped-call]


Result = TypeVar("Result")


def refuse_second_derivative(name: str) -> None:
    """Raise in a backward under create_graph, whose gradients would be wrong."""
    if torch.is_grad_enabled() and not is_compiling():
        raise RuntimeError(f"isogemm::{name} has no second derivative")


class Operator(Generic[Result]):
    """An operator of the namespace isogemm."""

    __slots__ = ("_apply", "_places", "_refused", "name", "op", "run")

    def __init__(
        self,
        schema: str,
        run: Callable[..., Result],
        fake: Callable[..., Any],
        *,
        keep: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
        refused: str = "",
        devices: Sequence[str] = ("CPU", "CUDA"),
    ) -> None:
        """Register the operator.

        Args:
            schema: "name(Tensor x, ...) -> Tensor", as torch.library takes it.
            run: the implementation on these devices, without autograd.
            fake: the result's shapes and dtypes, for fake tensors.
            keep, backward: keep(ctx, inputs, output) and backward(ctx, *grads), as torch.library.register_autograd
                takes them; none where the operator has no gradient.
            refused: the public function to name when a torch.func transform or forward-mode AD is refused.
        """
        self.name, arguments = schema.partition("(")[0], schema.partition("(")[2].partition(") ->")[0]
        self.run, self._refused = run, refused
        self._apply: Any = None
        kinds = [each.partition(" ")[0] for each in arguments.split(", ")]
        self._places = [place for place, kind in enumerate(kinds) if kind in ("Tensor", "Tensor?", "Tensor(a!)")]
        _library.define(schema)
        for key in devices:
            _library.impl(self.name, run, key)
        register: Any = torch.library
        register.register_fake(f"isogemm::{self.name}", fake, lib=_library)
        if keep is not None and backward is not None:
            register.register_autograd(f"isogemm::{self.name}", backward, setup_context=keep, lib=_library)
            self._apply = _function(self.name, run, keep, backward).apply
        self.op: Any = getattr(torch.ops.isogemm, self.name)

    def __call__(self, *args: Any) -> Result:
        """Run on all of the schema's arguments, given by position."""
        tensors = [each for place in self._places if (each := args[place]) is not None]
        if through_dispatcher(*tensors):
            if self._refused:
                refuse_transforms(self._refused, *tensors)
            return cast(Result, self.op(*args))
        return self.differentiable(*args)

    def differentiable(self, *args: Any) -> Result:
        """Run a call that is known not to need the dispatcher."""
        if self._apply is not None and torch.is_grad_enabled():
            for place in self._places:
                if args[place] is not None and args[place].requires_grad:
                    return cast(Result, self._apply(*args))
        return self.run(*args)


def _function(name: str, run: Callable[..., Any], keep: Callable[..., None], backward: Callable[..., Any]) -> Any:
    """Return the autograd Function of eager mode."""

    def forward(ctx: Any, *args: Any) -> Any:
        output = run(*args)
        keep(ctx, args, output)
        return output

    return type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )
