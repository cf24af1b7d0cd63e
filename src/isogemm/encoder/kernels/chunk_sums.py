"""Sums over tiles and chunks of rows: the last steps of the parameters' gradients."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from isogemm.core.kernels import pdl_option, start_launch
from isogemm.core.launch import Launch
from isogemm.encoder.configs import Layer

_AT_ONCE = tl.constexpr(8)  # partial sums loaded at a time, at least
_BLOCK = 128  # elements of a gradient per program


@triton.jit
def add_tiles(norm_sums, to, chunk, rows, D, CHUNK, TILES, TILES_P, ADDED):
    """Add up the sums [6, D] of a chunk's tiles; ADDED: which of the six."""
    tile = tl.arange(0, TILES_P)
    tiles = tl.minimum((rows - chunk * CHUNK + (CHUNK // TILES) - 1) // (CHUNK // TILES), TILES)
    for i in tl.static_range(len(ADDED)):
        for first in tl.range(0, D, 64):
            col = first + tl.arange(0, 64)
            at = norm_sums + ((chunk.to(tl.int64) * TILES + tile)[:, None] * (6 * D) + (ADDED[i] * D + col)[None, :])
            live = (tile < tiles)[:, None] & (col < D)[None, :]
            tl.store(to + i * D + col, tl.sum(tl.load(at, mask=live, other=0.0), axis=0), mask=col < D)


@triton.jit
def _sum_segment(partials, to, chunks, first, size: tl.constexpr, SIZE, PARTS, ADD, BLOCK):
    """Add the chunks in order, each of PARTS partial sums, to zero or (ADD) to what is there."""
    at = first + tl.arange(0, BLOCK)
    live = at < size
    if ADD:
        total = tl.load(to + at, mask=live, other=0.0)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
    LOADED: tl.constexpr = (_AT_ONCE + PARTS - 1) // PARTS * PARTS
    for part in tl.range(0, chunks, LOADED):
        loaded = ()
        for i in tl.static_range(LOADED):
            loaded = loaded + (tl.load(partials + i * SIZE + at, mask=live & (part + i < chunks), other=0.0),)
        for i in tl.static_range(0, LOADED, PARTS):
            chunk = loaded[i]
            for j in tl.static_range(1, PARTS):
                chunk += loaded[i + j]
            total = tl.where(part + i < chunks, total + chunk, total)
        partials += LOADED * SIZE
    tl.store(to + at, total.to(to.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["chunks"])
def _sum_chunks_kernel(
    partials0, partials1, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15, chunks,
    SEGMENTS: tl.constexpr, SIZES: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # SEGMENTS: for each gradient its first program, which partials hold it, its offset there, its size, and whether it
    # is added to. SIZES: of a chunk's partials.
    start_launch(PDL)
    outs = (p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15)
    program = tl.program_id(0)
    for i in tl.static_range(16):
        if outs[i] is not None:
            if (program >= SEGMENTS[i][0]) & (program < SEGMENTS[i][0] + (SEGMENTS[i][3] + BLOCK - 1) // BLOCK):
                first = (program - SEGMENTS[i][0]) * BLOCK
                _sum_segment(
                    (partials1 if SEGMENTS[i][1] else partials0) + SEGMENTS[i][2], outs[i], chunks, first,
                    SEGMENTS[i][3], SIZES[SEGMENTS[i][1]], PARTS, SEGMENTS[i][4], BLOCK,
                )  # fmt: skip


def describe_sum_chunks(
    layer: Layer, segments: Sequence[tuple[int, int, int, bool] | None], sizes: Sequence[int]
) -> Launch:
    """Launch on the partial sums of both weight_grads and sixteen gradients. sizes: of a chunk's partial sums.

    segments: for each gradient which partials hold it, its offset there, its size, whether it is added to.
    """
    programs, placed = 0, []
    for segment in segments:
        group, offset, length, added = segment or (0, 0, 0, False)
        placed.append((programs, group, offset, length, added))
        programs += -(-length // _BLOCK)
    constants: dict[str, object] = {"SEGMENTS": tuple(placed), "SIZES": tuple(sizes), "PARTS": layer.parts}
    constants |= {"BLOCK": _BLOCK, "PDL": layer.pdl}
    options = {"num_warps": 4, "enable_fp_fusion": False} | pdl_option(layer.pdl)
    return Launch(_sum_chunks_kernel, programs, (layer.chunks,), constants, options)
