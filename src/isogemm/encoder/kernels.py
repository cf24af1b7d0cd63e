"""The launches of the fused layer, in the order of a call: which kernel, how many programs, with which constants."""

from __future__ import annotations

from collections.abc import Sequence

from isogemm.core.launch import Launch
from isogemm.encoder.configs import Layer, RowConfig, WeightConfig, projected_parts
from isogemm.encoder.kernels_backward import (
    _feedforward_backward_kernel,
    _input_grad_kernel,
    _sum_chunks_kernel,
    _weight_grads_kernel,
)
from isogemm.encoder.kernels_forward import (
    TYPES,
    _feedforward_kernel,
    _out_project_kernel,
    _project_kernel,
    feedforward_sizes,
    index_type,
    overlapping,
    residual_of,
)
from isogemm.epilogues import device, random

_SIDE = 64  # of a tile of weights that one program prepares
_ADDED_AT_ONCE = 128


def describe_project(
    layer: Layer, config: RowConfig, eps: float, walkers: int, biases: bool, backward: bool, turn: bool
) -> Launch:
    """Of x, norm1, the weights of q, k and v, their biases, qkv, ds, out_proj, do, linear1, linear2, ready, and v where
    it is no part of qkv.

    turn: whether the transposes are prepared too, for a backward.
    """
    parts = projected_parts(layer, backward)
    block = min(config.block, layer.padded)
    programs = walkers * len(parts) * -(-layer.d_model // block)
    if layer.ready and not backward:
        across, down = -(-layer.d_model // _SIDE), -(-layer.dim_feedforward // _SIDE)
        programs += across * across * (4 if turn else 1) + 2 * across * down
    constants = _sizes(layer) | {
        "F": layer.dim_feedforward,
        "HEAD": layer.head,
        "BY_HEAD": layer.by_head,
        "NORM": layer.row_norm,
        "STACKED": layer.stacked,
        "BIASES": biases,
        "FIRST": parts[0],
        "BACKWARD": backward,
        "READY": layer.ready,
        "TURN": turn,
        **_numbers(layer),
        "BM": config.rows,
        "BN": block,
        "SIDE": _SIDE,
        "EARLY": layer.early,
    }
    return Launch(_project_kernel, programs, (layer.rows, eps, walkers), constants, _options(layer, config))


def describe_out_project(layer: Layer, config: RowConfig, eps: float, ready: bool) -> Launch:
    """Of the residual (x, or what is normed here), o, out_proj, that norm's weight and bias, and the seed; s.

    ready: whether the weight is prepared.
    """
    constants = _sizes(layer) | {
        "NORM": layer.row_norm if layer.residual_normed else "",
        "DROPPED": random.threshold(layer.dropout.projection),
        "READY": ready,
        **_numbers(layer),
        "BM": config.rows,
        "BK": min(config.block, layer.padded),
        "EARLY": layer.early,
    }
    return Launch(_out_project_kernel, _tiles(layer, config), (layer.rows, eps), constants, _options(layer, config))


def describe_feedforward(layer: Layer, config: RowConfig, eps: float) -> Launch:
    """Of x, o, out_proj, linear1, linear2 and both norms, weight and bias each; y, and the sum before the last norm;
    the seed. A batch norm's weight is its statistics; without o, x is s."""
    constants = _feedforward(layer) | {
        "READY": layer.ready,
        "OPERAND": TYPES[layer.operand],
        "PRECISION": layer.precision,
        "ACT": getattr(device, layer.activation),
        "EXACT": layer.exact,
        "INDEX": index_type(layer),
        "PARKED": layer.dtype == "float32",
        **_blocks(layer, config),
        "EARLY": layer.early,
    }
    return Launch(_feedforward_kernel, _tiles(layer, config), (layer.rows, eps), constants, _options(layer, config))


def describe_feedforward_backward(layer: Layer, config: RowConfig, tile_rows: int, eps: float) -> Launch:
    """Of x, o, out_proj's weight and bias, linear1's, linear1 and linear2 turned, the first norm's weight and bias, the
    last norm's weight, dy, the sum before the last norm; to u, act(z), dz, dlast, ds, the sums and dlast's transpose;
    the seed, and what is left of dlast, as an operand. A batch norm's weight is its statistics; without o, x is s.
    """
    constants = _feedforward(layer) | {
        "READY": layer.ready,
        "TURNED": layer.turned,
        "OPERAND": TYPES[layer.operand],
        "PRECISION": layer.precision,
        "ACT": getattr(device, layer.activation),
        "ACT_GRAD": getattr(device, f"{layer.activation}_derivative"),
        "EXACT": layer.exact,
        "INDEX": index_type(layer),
        **_blocks(layer, config),
        "SLOTS": config.rows // tile_rows,
        "EARLY": layer.early,
    }
    scalars = (layer.rows, eps, layer.ld)
    return Launch(_feedforward_backward_kernel, _tiles(layer, config), scalars, constants, _options(layer, config))


def describe_input_grad(layer: Layer, config: RowConfig, tile_rows: int, eps: float) -> Launch:
    """Of x, norm1's weight and bias, in_proj, dqkv, ds; to the norm of x, dx and the sums; of o; to ds and o turned;
    of the residual's gradient, where it is not ds."""
    constants = _sizes(layer) | {
        "NORM": layer.row_norm,
        "RESIDUAL": residual_of(layer),
        "READY": layer.ready,
        "TURNED": layer.turned,
        **_numbers(layer),
        "BM": config.rows,
        "BK": min(config.block, layer.padded),
        "SLOTS": config.rows // tile_rows,
        "EARLY": layer.early,
    }
    scalars = (layer.rows, eps, layer.ld)
    return Launch(_input_grad_kernel, _tiles(layer, config), scalars, constants, _options(layer, config))


def describe_weight_grads(
    layer: Layer, config: WeightConfig, tile_rows: int, shapes: Sequence[int], offsets: Sequence[int], size: int,
    added: tuple[int, ...],
) -> Launch:  # fmt: skip
    """Of left, right, left, right, the tiles' sums and the partials; shapes: M, N, M, N of the two products.

    offsets: in a chunk's partials, `size` in all, of the first weight and its bias, the second weight, and those of the
    tiles' six sums that are added up.
    """
    m0, n0, m1, n1 = shapes
    tiles = layer.chunk // tile_rows
    per_chunk = _tiled(m0, n0, config) + _tiled(m1, n1, config) + 1
    constants = {
        "M0": m0, "N0": n0, "M1": m1, "N1": n1,
        "D": layer.d_model,
        "SIZE": size,
        "CHUNK": layer.chunk,
        "TILES": tiles,
        "TILES_P": 1 << (tiles - 1).bit_length(),
        "ADDED": added,
        "TURNED": layer.turned,
        **_numbers(layer),
        "BM": config.block_m,
        "BN": config.block_n,
        "BK": config.block_k,
        "EARLY": layer.early,
    }  # fmt: skip
    scalars = (layer.rows, layer.ld, *offsets)
    return Launch(_weight_grads_kernel, per_chunk * layer.chunks, scalars, constants, _options(layer, config))


def describe_sum_chunks(
    layer: Layer, segments: Sequence[tuple[int, int, int, bool] | None], sizes: Sequence[int]
) -> Launch:
    """Of the partials of both weight_grads and sixteen gradients. sizes: of a chunk's partials.

    segments: for each gradient which partials it is the sum of, its offset there, its size, whether it is added to.
    """
    programs, placed = 0, []
    for segment in segments:
        group, offset, length, added = segment or (0, 0, 0, False)
        placed.append((programs, group, offset, length, added))
        programs += -(-length // _ADDED_AT_ONCE)
    constants: dict[str, object] = {"SEGMENTS": tuple(placed), "SIZES": tuple(sizes), "PARTS": layer.parts}
    constants |= {"BLOCK": _ADDED_AT_ONCE, "EARLY": layer.early}
    options = {"num_warps": 4, "enable_fp_fusion": False} | overlapping(layer)
    return Launch(_sum_chunks_kernel, programs, (layer.chunks,), constants, options)


def _sizes(layer: Layer) -> dict[str, object]:
    return {"D": layer.d_model, "DP": layer.padded}


def _feedforward(layer: Layer) -> dict[str, object]:
    return _sizes(layer) | feedforward_sizes(layer)


def _numbers(layer: Layer) -> dict[str, object]:
    return {"OPERAND": TYPES[layer.operand], "PRECISION": layer.precision, "INDEX": index_type(layer)}


def _blocks(layer: Layer, config: RowConfig) -> dict[str, object]:
    return {"BM": config.rows, "BF": config.block, "BK": min(config.block, layer.padded)}


def _tiles(layer: Layer, config: RowConfig) -> int:
    return -(-layer.rows // config.rows)


def _tiled(m: int, n: int, config: WeightConfig) -> int:
    return -(-m // config.block_m) * -(-n // config.block_n)


def _options(layer: Layer, config: RowConfig | WeightConfig) -> dict[str, object]:
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False}
    return options | overlapping(layer)
