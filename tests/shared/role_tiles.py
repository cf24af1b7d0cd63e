"""Configurations of the kernel whose warps have roles, by what is particular to them."""

from dataclasses import replace

from isogemm.gemm.configs import Config

ROLES = Config(128, 128, 64, 8, 5, "roles", persistent=True)
ONCE = replace(ROLES, persistent=False, pdl=True)  # a program per tile
WIDE = replace(ROLES, block_n=256, num_stages=4, parts=2)
REST = replace(ONCE, num_stages=4, rest_n=64)
NARROW = replace(ONCE, block_n=64, num_stages=6)
ALTERNATING = replace(ROLES, num_stages=6, parts=2, alternating=True)
TILES = {
    "128": ROLES, "128 once": ONCE, "256": WIDE, "128+64": REST, "128+32": replace(REST, num_stages=5, rest_n=32),
    "64": replace(NARROW, num_stages=8), "64+32": replace(NARROW, rest_n=32),
    "64+16": replace(NARROW, num_stages=7, rest_n=16), "two stages": replace(ROLES, num_stages=2),
    "k of 16": replace(ROLES, block_k=16), "16 columns": replace(ROLES, block_n=16),
    "alternating": ALTERNATING, "alternating 64+32": replace(ALTERNATING, block_n=64, rest_n=32),
}  # fmt: skip
FEW = ("128", "128+64")  # tiles of what takes a kernel more for each

GATHERED = replace(ONCE, parallel_chunks="gathered")
GATHERING = {
    "128": GATHERED, "128+64": replace(GATHERED, num_stages=4, rest_n=64), "128+32": replace(GATHERED, rest_n=32),
    "64+16": replace(GATHERED, block_n=64, rest_n=16), "64": replace(GATHERED, block_n=64, num_stages=8),
    "not early": replace(GATHERED, pdl=False),
}  # fmt: skip

BALANCED = {
    "shared": replace(ROLES, group=12, balanced=True),
    "shared 128+64": replace(REST, pdl=False, persistent=True, balanced=True),
    "shared 256": replace(WIDE, balanced=True),
    "alternating": replace(ALTERNATING, group=12, balanced=True),
    "alternating 64+32": replace(ALTERNATING, block_n=64, rest_n=32, num_stages=5, balanced=True),
    "two stages": replace(ALTERNATING, num_stages=2, balanced=True),
}  # fmt: skip
UNEVEN = ((2331, 3080), (1100, 4616))  # M, N: 475 and 333 tiles of 128 x 128, on 132 multiprocessors
