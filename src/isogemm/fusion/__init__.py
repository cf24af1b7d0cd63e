"""Automatic fusion of plain torch code."""

from typing import Any

from isogemm.fusion.lazy import autofuse
from isogemm.fusion.report import Fused, Left, Report

__all__ = ["Fused", "Left", "Report", "autofuse", "compile_fusion"]


def __getattr__(name: str) -> Any:
    """Inductor takes seconds to import: only where it is asked for."""
    if name == "compile_fusion":
        from isogemm.fusion.inductor import compile_fusion

        return compile_fusion
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
