"""The kernels of the GEMM family: products, what follows them, and gradients over tokens."""
