"""Modules over isogemm's operations, and the way to put them into an existing model."""

from isogemm.nn.linear import Linear
from isogemm.nn.swap import Kept, SwapReport, swap

__all__ = ["Kept", "Linear", "SwapReport", "swap"]
