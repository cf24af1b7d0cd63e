"""The fused layer's kernels by tiles: a program keeps a tile of rows on the chip. For any GPU and number type."""

from __future__ import annotations

from typing import Any

from isogemm.core.launch import Launch
from isogemm.encoder.configs import Layer, tile_rows
from isogemm.encoder.kernels.common import Call, described, packing_programs, programs_per_part
from isogemm.encoder.kernels.tiles import backward, forward

KERNELS = forward.KERNELS | backward.KERNELS

_SIDE = 64  # of a tile of weights that one program packs
_AT_ONCE = 2  # programs of a projection per multiprocessor


def describe(name: str, layer: Layer, config: Any, call: Call) -> Launch:
    """Launch of one of KERNELS; config: the WeightConfig of weight_grads, else a RowConfig."""
    options, per_part = {"num_warps": config.num_warps, "num_stages": config.num_stages}, 0
    if call.sums is not None:
        m0, n0, m1, n1 = call.sums.shapes
        programs = (config.tiles(m0, n0) + config.tiles(m1, n1) + 1) * layer.chunks
        tile = {"BM": config.block_m, "BN": config.block_n, "BK": config.block_k}
        return described(name, KERNELS[name], layer, call, programs, tile, **options)
    programs, block = config.programs(layer), min(config.block, layer.padded)
    if name == "project":
        blocks = call.parts(layer) * -(-layer.d_model // block)
        per_part = programs_per_part(layer, config.rows, blocks, _AT_ONCE * call.sm_count)
        programs = per_part * blocks + packing_programs(layer, call, _SIDE)
    tile = {"BM": config.rows, "BF": config.block, "BK": block, "BN": block, "SIDE": _SIDE}
    tile["SLOTS"] = config.rows // tile_rows(layer)
    return described(name, KERNELS[name], layer, call, programs, tile, per_part=per_part, **options)
