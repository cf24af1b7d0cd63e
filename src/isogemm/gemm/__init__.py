"""The invariant GEMM."""
