"""Modules over isogemm's operations, and the way to put them into an existing model."""

from isogemm.nn.encoder_layer import EncoderLayer
from isogemm.nn.linear import Linear
from isogemm.nn.mlp import MLP
from isogemm.nn.swap import Folded, Kept, SwapReport, Unfolded, swap

__all__ = ["MLP", "EncoderLayer", "Folded", "Kept", "Linear", "SwapReport", "Unfolded", "swap"]
