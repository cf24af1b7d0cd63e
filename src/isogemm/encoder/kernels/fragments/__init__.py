"""The fused layer's kernels by fragments: a warp keeps sixteen narrow rows in `mma.sync` fragments."""

from __future__ import annotations

from isogemm.core.launch import Launch
from isogemm.encoder.configs import FRAGMENT_ROWS, Layer
from isogemm.encoder.kernels.common import Call, described, packing_programs
from isogemm.encoder.kernels.fragments import backward, forward, weight_grads

KERNELS = forward.KERNELS | backward.KERNELS | weight_grads.KERNELS

_SIDE = 32  # of a tile of weights that one program packs
_SUM_WARPS = 2  # of weight_grads
_MOST_REGISTERS = 128  # with which a multiprocessor holds two programs of eight warps


def describe(name: str, layer: Layer, warps: int, call: Call) -> Launch:
    """Launch of one of KERNELS by programs of so many warps."""
    if call.sums is not None:
        m0, n0, m1, n1 = call.sums.shapes
        programs0, programs1 = _programs(m0, n0), _programs(m1, n1)
        programs = (programs0 + programs1 + 1) * layer.chunks
        tile = {"PROGRAMS0": programs0, "PROGRAMS1": programs1, "BLOCK": 32 * _SUM_WARPS}
        return described(name, KERNELS[name], layer, call, programs, tile, num_warps=_SUM_WARPS, num_stages=1)
    programs = per_part = -(-layer.rows // (FRAGMENT_ROWS * warps))
    split = warps == 1  # programs compute one of q, k and v each
    if name == "project":
        programs *= call.parts(layer) - call.backward if split else 1
        programs += per_part if call.backward else packing_programs(layer, call, _SIDE)
    options = {"num_warps": warps, "num_stages": 1}
    dropped = layer.dropout.activation and layer.precision == "tf32" and layer.d_model == 32
    if name == "feedforward_backward" and dropped:
        options["maxnreg"] = _MOST_REGISTERS  # spills up to four values during the loop
    tile = {"SPLIT": split, "SIDE": _SIDE, "BLOCK": 32 * warps}
    return described(name, KERNELS[name], layer, call, programs, tile, per_part=per_part, **options)


def _programs(m: int, n: int) -> int:
    """Programs of weight_grads for a weight [m, n]."""
    return -(-(-(-m // weight_grads.SIDE) * -(-n // weight_grads.SIDE)) // _SUM_WARPS)
