"""Where the tiny kernels win: measured on sm_90 by benchmarks/tune_tiny.py, which writes this file.

For each (number type, layout) and each cell of (m, n, k), cut at EDGES: r (registers), d (dot), b (dot for small
batches, registers for large ones) or . (torch.bmm). TABLES[...][m] has one string per n; a string one letter per k.
"""

EDGES = (8, 16, 32, 48, 64)

# fmt: off
TABLES = {
    ("ieee", "nn"): (
        ("rrbbb", "bbdbd", "bddbb", "ddddd", "ddddd"),
        ("bbdbd", "bdddd", "bdddd", "ddddd", "ddddd"),
        ("brddd", "bdddd", "ddddd", "ddddd", "ddddd"),
        ("brrbb", "rdddd", "rdddd", "bddd.", "rdd.d"),
        ("brdbd", "rdddd", "ddddd", "rdd..", "ddddd"),
    ),
    ("ieee", "nt"): (
        ("rrrbb", "rrbbb", "rbb..", "rb...", "rb..."),
        ("rbbbb", "rbbbb", "rb...", "rb...", "rd..."),
        ("rbbdb", "rbbbb", "r....", "r....", "r...."),
        ("rbbbb", "rbd.b", "r....", "r....", "r...."),
        ("rbddd", "rrd.b", "r....", "r....", "r...."),
    ),
    ("ieee", "tn"): (
        ("rbbbb", "bdddd", "bdddd", "ddddd", "ddddd"),
        ("bdddd", "bdddd", "ddddd", "ddddd", "ddddd"),
        ("ddddd", "ddddd", "ddddd", "ddddd", "ddddd"),
        ("ddddd", "ddddd", "bdddd", "dd...", "dd..."),
        ("ddddd", "ddddd", "ddddd", ".d...", "dd..."),
    ),
    ("tf32", "nn"): (
        ("rrddd", "rrddd", "ddddd", "ddddd", "ddddd"),
        ("rrddd", "ddddd", "ddddd", "ddddd", "ddddd"),
        ("ddddd", "ddddd", "ddddd", "ddddd", "ddddd"),
        ("ddddd", "ddddd", "ddd..", "dd...", "dd..."),
        ("ddddd", "ddddd", "ddd..", "dd...", "dd..."),
    ),
    ("tf32", "nt"): (
        ("rrddd", "rdddd", "rdddd", "rdddd", "rdddd"),
        ("rdddd", "rdddd", "rdddd", "ddddd", "ddddd"),
        ("rdddd", "rdddd", "ddddd", "ddd..", "ddd.."),
        ("rdddd", "ddddd", "ddd..", "dd...", "dd..."),
        ("rdddd", "ddddd", "ddd..", "dd...", "dd..."),
    ),
    ("tf32", "tn"): (
        ("rrddd", "rrddd", "ddddd", "ddddd", "ddddd"),
        ("rrddd", "ddddd", "ddddd", "ddddd", "ddddd"),
        ("ddddd", "ddddd", "ddddd", "ddddd", "ddddd"),
        ("ddddd", "ddddd", "ddddd", "dd...", "dd..."),
        ("ddddd", "ddddd", "ddddd", "dd...", "dd..."),
    ),
    ("half", "nn"): (
        ("rrddd", "rrddd", "rdddd", "ddddd", "ddddd"),
        ("rrddd", "rdddd", "ddddd", "ddddd", "ddddd"),
        ("rdddd", "ddddd", "ddddd", "ddddd", "ddddd"),
        ("ddddd", "ddddd", "ddd..", "ddd..", "ddd.."),
        ("ddddd", "ddddd", "ddd..", "ddd..", "ddd.."),
    ),
    ("half", "nt"): (
        ("rrrdd", "rrddd", "rdddd", "ddddd", "ddddd"),
        ("rrddd", "ddddd", "ddddd", "ddd..", "ddd.."),
        ("ddddd", "ddddd", "ddddd", "ddd..", "ddd.."),
        ("ddddd", "ddd..", "ddd..", "dd...", "dd..."),
        ("ddddd", "ddd..", "ddd..", "dd...", "dd..."),
    ),
    ("half", "tn"): (
        ("rrddd", "rrddd", "rdddd", "ddddd", "ddddd"),
        ("rrddd", "rdddd", "ddddd", "ddddd", "ddddd"),
        ("rdddd", "ddddd", "ddddd", "ddddd", "ddddd"),
        ("ddddd", "ddddd", "ddddd", "ddd..", "ddd.."),
        ("ddddd", "ddddd", "ddddd", "ddd..", "ddd.."),
    ),
}
# fmt: on
