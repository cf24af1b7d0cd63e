"""The fused layer's kernels by Hopper's warpgroups, in Gluon: a warpgroup keeps 64 rows in registers."""

from __future__ import annotations

from isogemm.core.launch import Launch
from isogemm.encoder.configs import FRAGMENT_ROWS, Layer, ProjectConfig, WarpgroupConfig
from isogemm.encoder.kernels.common import Call, described, packing_programs, programs_per_part
from isogemm.encoder.kernels.warpgroups import backward, forward

KERNELS = forward.KERNELS | backward.KERNELS

_SIDE = 64  # of a tile of weights that one program packs


def describe(name: str, layer: Layer, config: ProjectConfig | WarpgroupConfig, call: Call) -> Launch:
    """Launch of one of KERNELS."""
    tile: dict[str, object] = {"WARPS": config.warps, "SIDE": _SIDE}
    if isinstance(config, WarpgroupConfig):
        tile |= {"STAGES": config.stages, "BF": config.block}
        return described(name, KERNELS[name], layer, call, config.programs(layer), tile, num_warps=config.warps)
    parts = call.parts(layer)
    per_part = programs_per_part(layer, FRAGMENT_ROWS * config.warps, parts, config.at_once * call.sm_count)
    programs = per_part * parts + packing_programs(layer, call, _SIDE)
    return described(name, KERNELS[name], layer, call, programs, tile, per_part=per_part, num_warps=config.warps)
