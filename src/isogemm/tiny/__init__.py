"""Strided-batched GEMM of tiny matrices (m, n, k <= 64), one launch."""
