"""RMS norm, layer norm, softmax, log-softmax, embedding and batch norm, forward and backward."""
