"""What the fused layer's kernels share in all formulations, and how their launches are described."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from isogemm.core.kernels import pdl_option
from isogemm.core.launch import Launch
from isogemm.encoder import configs
from isogemm.encoder.configs import Layer, WeightSums, projected_parts, tile_rows
from isogemm.encoder.parameters import EncoderDropout
from isogemm.epilogues import device, random
from isogemm.gemm.kernels.halves import round_by_instruction

# Added to dropout's seed at each place.
PROJECTION = tl.constexpr(EncoderDropout._fields.index("projection"))
ACTIVATION = tl.constexpr(EncoderDropout._fields.index("activation"))
OUTPUT = tl.constexpr(EncoderDropout._fields.index("output"))

_LEVELS = tl.constexpr(random.LEVELS)


@triton.jit
def scale_of_kept(DROPPED):
    """`epilogues.random.scale` of the probability whose threshold is DROPPED."""
    return _LEVELS / (_LEVELS - DROPPED) if DROPPED < _LEVELS else 0.0


@triton.jit
def operand(x, OPERAND, PRECISION):
    """x as a product's operand: cast, and for TF32 rounded to nearest, where the tensor core would truncate."""
    if PRECISION == "tf32":
        return round_by_instruction(x.to(OPERAND))
    else:
        return x.to(OPERAND)


@triton.jit
def pack_weights(
    item, wq, wk, wv, wo, w1, w2, packed, TILE, D, F, SIDE, STACKED, PROJECTED, TRANSPOSE, OPERAND, PRECISION
):
    """Write one tile of the weights as operands: rounded or cast, and with TRANSPOSE also its transpose.

    `packed` holds out_proj, linear1, linear2, in_proj; then the transposes of linear2, linear1, out_proj, in_proj.
    Unless PROJECTED, in_proj and out_proj's transpose are left out: only projections that do not read the weights as
    they are need them. TILE writes the tile at (r, c) of a weight [ROWS, COLS], and its transpose from column `first`
    on in one that is LD wide.
    """
    ACROSS: tl.constexpr = (D + SIDE - 1) // SIDE
    DOWN: tl.constexpr = (F + SIDE - 1) // SIDE
    SQUARE: tl.constexpr = ACROSS * ACROSS
    transposed = packed + (4 * D * D + 2 * D * F)
    if item < SQUARE:
        TILE(
            wo, packed, transposed + 2 * D * F, item // ACROSS * SIDE, item % ACROSS * SIDE, 0,
            D, D, D, SIDE, True, TRANSPOSE and PROJECTED, OPERAND, PRECISION,
        )  # fmt: skip
    elif item < SQUARE + ACROSS * DOWN:
        item -= SQUARE
        TILE(
            w1, packed + D * D, transposed + D * F, item // ACROSS * SIDE, item % ACROSS * SIDE, 0,
            F, D, F, SIDE, True, TRANSPOSE, OPERAND, PRECISION,
        )  # fmt: skip
    elif item < SQUARE + 2 * ACROSS * DOWN:
        item -= SQUARE + ACROSS * DOWN
        TILE(
            w2, packed + (D * D + D * F), transposed, item // DOWN * SIDE, item % DOWN * SIDE, 0,
            D, F, D, SIDE, True, TRANSPOSE, OPERAND, PRECISION,
        )  # fmt: skip
    elif TRANSPOSE:
        item -= SQUARE + 2 * ACROSS * DOWN
        part = item // SQUARE
        item -= part * SQUARE
        TILE(
            in_proj(wq, wk, wv, part, D * D, STACKED), packed + (D * D + 2 * D * F) + part * (D * D),
            transposed + (2 * D * F + D * D), item // ACROSS * SIDE, item % ACROSS * SIDE, part * D,
            D, D, 3 * D, SIDE, PROJECTED, TRANSPOSE, OPERAND, PRECISION,
        )  # fmt: skip


@triton.jit
def in_proj(q, k, v, part, size, STACKED):
    """Address of part 0, 1 or 2 of in_proj (q, k, v), which is one tensor or three."""
    if STACKED:
        return q + part * size
    else:
        at = q
        if part == 1:
            at = k
        elif part == 2:
            at = v
        return at


@triton.jit
def projected_at(qkv_ptr, v_ptr, part, size, FIRST):
    """Address of a part of `size` elements: its place among q, k and v, or v's own. FIRST == 2: v alone is computed."""
    if v_ptr is None:
        return qkv_ptr + part * size
    elif FIRST == 2:
        return v_ptr
    else:
        at = qkv_ptr + part * size
        if part == 2:
            at = v_ptr
        return at


# the launches


class Call(NamedTuple):
    """What a launch depends on besides the layer and its config."""

    eps: float
    sm_count: int
    biases: bool  # whether q, k and v have them
    backward: bool = False  # of project: the backward's, which also computes do
    transpose: bool = False  # of project: whether it packs transposes, too
    sums: WeightSums | None = None  # of weight_grads

    def parts(self, layer: Layer) -> int:
        """How many of q, k, v and do a projection computes."""
        return len(projected_parts(layer, self.backward))


def described(
    name: str, kernel: Any, layer: Layer, call: Call, programs: int, tile: dict[str, object], *, per_part: int = 0,
    **options: object,
) -> Launch:  # fmt: skip
    """Launch of a formulation's kernel, which takes the scalars and the constants that its signature names.

    tile: constants that follow from the config. per_part: programs that share the rows of one part of in_proj.
    """
    scalars = {"rows": layer.rows, "eps": call.eps, "ld": layer.ld, "per_part": per_part}
    if call.sums is not None:
        scalars |= zip(("weight0", "bias0", "weight1", "norms"), call.sums.offsets, strict=True)
    known = _constants(layer) | _constants_of(name, layer, call) | tile
    constants = {each: known[each] for each in kernel.arg_names if each in known}
    taken = tuple(scalars[each] for each in kernel.arg_names if each in scalars)
    return Launch(kernel, programs, taken, constants, options | {"enable_fp_fusion": False} | pdl_option(layer.pdl))


def _constants_of(name: str, layer: Layer, call: Call) -> dict[str, object]:
    """Constants of one kernel, in all formulations: besides the layer's, or in their place."""
    if name == "project":
        first = projected_parts(layer, call.backward)[0]
        return {
            "NORM": layer.row_norm, "BIASES": call.biases, "FIRST": first, "BACKWARD": call.backward,
            "TRANSPOSE": call.transpose,
        }  # fmt: skip
    if name == "out_project":
        return {
            "NORM": layer.row_norm if layer.residual_normed else "",
            "DROPPED": random.threshold(layer.dropout.projection),
            "PACKED": layer.packed_weights and not configs.choose_warpgroup(layer).project,
        }
    if name == "input_grad":
        return {"NORM": layer.row_norm}
    if call.sums is not None:
        sizes = zip(("M0", "N0", "M1", "N1"), call.sums.shapes, strict=True)
        return dict(sizes) | {"SIZE": call.sums.size, "ADDED": call.sums.added}
    return {}


def _constants(layer: Layer) -> dict[str, object]:
    """Kernel constants that depend on the layer alone."""
    tiles = layer.chunk // tile_rows(layer)
    return {
        "D": layer.d_model,
        "DP": layer.padded,
        "F": layer.dim_feedforward,
        "HEAD": layer.head,
        "BY_HEAD": layer.by_head,
        "STACKED": layer.stacked,
        "NORM": layer.norm,
        "NORM_LAST": layer.norm_last,
        "RESIDUAL": _residual(layer),
        "RESIDUAL_NORMED": layer.residual_normed or not layer.norm_first,
        "HIDDEN_DROPPED": random.threshold(layer.dropout.activation),
        "DROPPED": random.threshold(layer.dropout.output),
        "ACT": getattr(device, layer.activation),
        "ACT_GRAD": getattr(device, f"{layer.activation}_derivative"),
        "EXACT": layer.exact,
        "PARKED": layer.dtype == "float32",
        "PACKED": layer.packed_weights,
        "TRANSPOSED": layer.transposed,
        "OPERAND": getattr(tl, layer.operand),
        "KIND": getattr(tl, layer.operand),
        "PRECISION": layer.precision,
        "INDEX": tl.int64 if layer.wide else tl.int32,
        "CHUNK": layer.chunk,
        "TILES": tiles,
        "TILES_P": 1 << (tiles - 1).bit_length(),
        "PDL": layer.pdl,
    }


def _residual(layer: Layer) -> str:
    """Where the residual's gradient is added to dx: "around" the norm, "through" it, or, of a batch norm, elsewhere."""
    if not layer.norm_first or layer.residual_normed:
        return "through"
    return "" if layer.batch_norm else "around"


def packing_programs(layer: Layer, call: Call, side: int) -> int:
    """Programs of a projection that `pack_weights` the weights, a tile of side x side each."""
    if call.backward or not layer.packed_weights:
        return 0
    across, down = -(-layer.d_model // side), -(-layer.dim_feedforward // side)
    return across * across * (4 if call.transpose else 1) + 2 * across * down


def programs_per_part(layer: Layer, rows: int, parts: int, at_once: int) -> int:
    """Programs that share the rows, `rows` at a time, of each of `parts` parts of in_proj: as many as run at once."""
    return min(-(-layer.rows // rows), max(1, -(-at_once // parts)))
