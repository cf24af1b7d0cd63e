"""The kernels of the norms."""
