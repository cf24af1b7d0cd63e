"""Modules over isogemm's operations, and the way to put them into an existing model."""

from isogemm.nn.encoder_layer import EncoderLayer
from isogemm.nn.linear import Linear
from isogemm.nn.mlp import MLP
from isogemm.nn.swap import Folded, FoldedActivation, Kept, Note, SwapReport, Unfolded, restore, swap

__all__ = [
    "MLP",
    "EncoderLayer",
    "Folded",
    "FoldedActivation",
    "Kept",
    "Linear",
    "Note",
    "SwapReport",
    "Unfolded",
    "restore",
    "swap",
]
