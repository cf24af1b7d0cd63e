"""The optional packages that the report and the plots need."""

from __future__ import annotations

import importlib
from types import ModuleType


def need(module: str) -> ModuleType:
    """Import a module of the `bench` extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{package} is not installed; it comes with: pip install isogemm[bench]", name=package
        ) from error
