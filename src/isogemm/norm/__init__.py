"""Layer norm, RMS norm and batch norm, forward and backward: used by the encoder layer."""
