"""Softmax attention, forward and backward: used by the encoder layer."""
