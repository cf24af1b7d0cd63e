"""Softmax attention whose queries have the same bits in any batch, padding, chunk and cache, forward and backward."""
