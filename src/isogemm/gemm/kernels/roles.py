"""A product whose warps have roles: one loads, two warpgroups multiply and store.

Each warpgroup has half of a tile's rows and waits for the other one at no time. So one of them stores its sums, or
adds a chunk's, while the other one keeps the tensor cores busy; and the loads of the next tile never stop. It is
written in Gluon, Triton's language with explicit layouts, since Triton's own compiler does not part warps on Hopper.
"""

from __future__ import annotations

from dataclasses import replace

import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from isogemm.core.kernels import start_launch
from isogemm.core.launch import TensorMap
from isogemm.gemm import configs
from isogemm.gemm.kernels.epilogue import biases, finish
from isogemm.gemm.kernels.handover import keep, kept_sums
from isogemm.gemm.kernels.tiles import inside, multiple, place

_GROUPS = gl.constexpr(configs.ROLE_GROUPS)
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # since Triton 3.9, before
_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_LOADER_REGISTERS = gl.constexpr(24)
_REGISTERS = gl.constexpr(232)  # of a thread of the second warpgroup; the first has those that are left, 248


def laid_out(seen: TensorMap | None, dtype: str) -> TensorMap | None:
    """The map with the layout of its blocks in shared memory, which Gluon wants to know."""
    if seen is None:
        return None
    return replace(seen, layout=gl.NVMMASharedLayout.get_default_for(list(seen.block), getattr(gl, dtype)))


@tl.core._aggregate
class _Staged:
    """A result that is stored by TMA, through shared memory."""

    # Types, which Triton reads: the names of types, as annotations are in this file, would not do.
    __annotations__ = {
        "tensor_map": tma.tensor_descriptor, "tile": gl.shared_memory_descriptor, "dtype": gl.constexpr,
    }  # fmt: skip

    @gluon.constexpr_function
    def __init__(self, tensor_map, tile):
        self.tensor_map = tensor_map
        self.tile = tile
        self.dtype = gl.constexpr(tensor_map.dtype)

    @gluon.jit
    def store(self, at, value):
        tma.store_wait(0)  # what was stored before has been read
        self.tile.store(value)
        fence_async_shared()
        _tma_store(self.tensor_map, at, self.tile)


@gluon.jit
def _item(
    item, m_tiles, n_tiles, M, N, K, TILE_M: gl.constexpr, TILE_N: gl.constexpr, CHUNK: gl.constexpr,
    GROUP: gl.constexpr, UNITS: gl.constexpr, INSIDE: gl.constexpr, PARALLEL: gl.constexpr,
):  # fmt: skip
    """Where a program's item begins in the result, where its k begins and ends, and which chunk it is."""
    places = m_tiles * n_tiles
    chunk = item // places
    row, column = place(item % places, m_tiles, n_tiles, GROUP)
    m = inside(row * TILE_M, M, TILE_M, UNITS[0], INSIDE)
    n = inside(column * TILE_N, N, TILE_N, UNITS[1], INSIDE)
    begin = chunk * CHUNK if PARALLEL else 0
    end = min(begin + CHUNK, K) if PARALLEL else K
    return m, n, begin, end, chunk


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The next buffer, and the parity of its barriers' phase."""
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _copy(source, row, k, ready, buffer, K_CONTIGUOUS: gl.constexpr, PAIRED: gl.constexpr = False):
    if PAIRED:
        _tma_load(source, [0, row, k], ready, buffer)
    elif K_CONTIGUOUS:
        _tma_load(source, [row, k], ready, buffer)
    else:
        _tma_load(source, [k, row], ready, buffer)


@gluon.jit
def _load(
    a, b, b_rest, a_tiles, b_tiles, rest_tiles, ready, free, items, m_tiles, n_tiles, M, N, K,
    ROWS: gl.constexpr, BN: gl.constexpr, BN_REST: gl.constexpr, TILE_N: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, CHUNK: gl.constexpr, GROUP: gl.constexpr, UNITS: gl.constexpr, INSIDE: gl.constexpr,
    PARALLEL: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """The loading warp: fill each buffer as soon as both warpgroups have read it."""
    BYTES: gl.constexpr = (ROWS * _GROUPS + BN + BN_REST) * BK * a.dtype.primitive_bitwidth // 8
    slot = 0
    phase = 1
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        m, n, begin, end, _ = _item(
            item, m_tiles, n_tiles, M, N, K, ROWS * _GROUPS, TILE_N, CHUNK, GROUP, UNITS, INSIDE, PARALLEL
        )
        for k in range(begin, end, BK):
            mbarrier.wait(free.index(slot), phase)
            full = ready.index(slot)
            mbarrier.expect(full, BYTES)
            for which in gl.static_range(_GROUPS):
                _copy(a, m + which * ROWS, k, full, a_tiles.index(slot * _GROUPS + which), A_K)
            _copy(b, n, k, full, b_tiles.index(slot), B_K, PAIRED)
            if BN_REST > 0:
                _copy(b_rest, n + BN, k, full, rest_tiles.index(slot), B_K)
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _operand(tile, TRANSPOSED: gl.constexpr, PAIRED: gl.constexpr = False):
    if PAIRED:
        tile = tile.reshape([tile.shape[0] * tile.shape[1], tile.shape[2]])
    if TRANSPOSED:
        tile = tile.permute((1, 0))
    return tile


@gluon.jit
def _products(
    acc, acc_rest, a_tiles, b_tiles, rest_tiles, ready, free, slot, phase, begin, end,
    WHICH: gl.constexpr, REST: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, A_K: gl.constexpr,
    B_K: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """Add the products of k in begin .. end - 1 to the sums, in ascending order."""
    for k in range(begin, end, BK):
        mbarrier.wait(ready.index(slot), phase)
        a = _operand(a_tiles.index(slot * _GROUPS + WHICH), not A_K)
        acc = warpgroup_mma(a, _operand(b_tiles.index(slot), B_K, PAIRED), acc, is_async=True)
        if REST:
            acc_rest = warpgroup_mma(a, _operand(rest_tiles.index(slot), B_K), acc_rest, is_async=True)
            acc, acc_rest = warpgroup_mma_wait(2, deps=(acc, acc_rest))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        # The block before has been read. Its buffer is computed: Triton takes `before = slot` for `slot`.
        mbarrier.arrive(free.index(gl.where(slot == 0, STAGES - 1, slot - 1)), pred=k > begin)
        slot, phase = _next(slot, phase, STAGES)
    if REST:
        acc, acc_rest = warpgroup_mma_wait(0, deps=(acc, acc_rest))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free.index(gl.where(slot == 0, STAGES - 1, slot - 1)))
    return acc, acc_rest, slot, phase


@gluon.jit
def _set_flag(flag, stamp):
    """As `handover.set_flag`, for a warpgroup: it has a barrier and a first thread of its own."""
    tl.debug_barrier()
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 first, thread, 0;
        @first st.release.gpu.global.b64 [$1], $2;
        mov.b64 $0, $2;
        }""",
        "=l,l,l", [flag, stamp], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _await_flag(flag, stamp):
    """As `handover.await_flag`, likewise."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred other;
        again: ld.acquire.gpu.global.b64 $0, [$1];
        setp.ne.b64 other, $0, $2;
        @other bra again;
        }""",
        "=&l,l,l", [flag, stamp], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()
    gl.inline_asm_elementwise(
        "st.global.b64 [$1], $2; mov.b64 $0, $2;", "=l,l,l", [flag, stamp * 0], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def _gathered(
    acc, acc_rest, kept, apart, chunk, ROWS: gl.constexpr, BN: gl.constexpr, REST: gl.constexpr,
    BN_REST: gl.constexpr,
):  # fmt: skip
    """The sums of all chunks, of which the last one's are `acc`, from the first to the last."""
    total = kept_sums(kept, acc, ROWS, BN) + 0.0  # as a sum that starts at 0: no -0
    total_rest = acc_rest
    if REST:
        total_rest = kept_sums(kept + ROWS * BN, acc_rest, ROWS, BN_REST) + 0.0
    for _ in range(1, chunk):
        kept += apart
        total += kept_sums(kept, acc, ROWS, BN)
        if REST:
            total_rest += kept_sums(kept + ROWS * BN, acc_rest, ROWS, BN_REST)
    return total + acc, total_rest + acc_rest


@gluon.jit
def _multiply(
    a_tiles, b_tiles, rest_tiles, ready, free, c, c_tiles, scratch, e, steps, numbers, items, m_tiles, n_tiles, M, N,
    K, stamp,
    WHICH: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr, BN_REST: gl.constexpr, TILE_N: gl.constexpr,
    BK: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, A_K: gl.constexpr,
    B_K: gl.constexpr, UNITS: gl.constexpr, INSIDE: gl.constexpr, ACCUMULATION: gl.constexpr, CHUNK: gl.constexpr,
    INDEX: gl.constexpr, UP_FIRST: gl.constexpr, E: gl.constexpr, ACT: gl.constexpr, SLOPE: gl.constexpr,
):  # fmt: skip
    """A warpgroup's part: rows WHICH * ROWS .. of each tile."""
    REST: gl.constexpr = BN_REST > 0
    RESTS: gl.constexpr = BN_REST if REST else 8  # sums that nothing uses
    PARALLEL: gl.constexpr = ACCUMULATION == "gathered"
    PAIRED: gl.constexpr = E.paired
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LAYOUT_REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RESTS, 16])
    AREA: gl.constexpr = ROWS * (BN + BN_REST)
    slot = 0
    phase = 0
    c_to = _Staged(c, c_tiles.index(WHICH))
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        m, n, begin, end, chunk = _item(
            item, m_tiles, n_tiles, M, N, K, ROWS * _GROUPS, TILE_N, CHUNK, GROUP, UNITS, INSIDE, PARALLEL
        )
        m += WHICH * ROWS
        loaded = biases(e, n, N, BN // 2 if PAIRED else BN, E)
        loaded_rest = biases(e, n + BN, N, RESTS, E)
        zeros = gl.zeros((ROWS, BN), gl.float32, LAYOUT)
        zeros_rest = gl.zeros((ROWS, RESTS), gl.float32, LAYOUT_REST)
        if ACCUMULATION == "registers":
            total = zeros
            total_rest = zeros_rest
            for chunk_begin in range(0, K, CHUNK):
                acc, acc_rest, slot, phase = _products(
                    zeros, zeros_rest, a_tiles, b_tiles, rest_tiles, ready, free, slot, phase, chunk_begin,
                    min(chunk_begin + CHUNK, K), WHICH, REST, BK, STAGES, A_K, B_K, PAIRED,
                )  # fmt: skip
                total += acc
                total_rest += acc_rest
        else:
            total, total_rest, slot, phase = _products(
                zeros, zeros_rest, a_tiles, b_tiles, rest_tiles, ready, free, slot, phase, begin, end, WHICH, REST, BK,
                STAGES, A_K, B_K, PAIRED,
            )  # fmt: skip
        whole = True
        if PARALLEL:
            whole = end == K
            places = m_tiles * n_tiles
            apart = places.to(gl.int64) * (AREA * _GROUPS)
            kept = scratch + (item.to(gl.int64) * _GROUPS + WHICH) * AREA
            slots = (gl.cdiv(K, CHUNK) - 1) * places
            flags = (scratch + slots.to(gl.int64) * (AREA * _GROUPS)).to(gl.pointer_type(gl.int64), bitcast=True)
            flag = flags + item * _GROUPS + WHICH
            if whole:
                for back in range(1, chunk + 1):
                    _await_flag(flag - back * places * _GROUPS, stamp)
                first = kept - apart * chunk
                total, total_rest = _gathered(total, total_rest, first, apart, chunk, ROWS, BN, REST, RESTS)
            else:
                keep(total, kept, ROWS, BN)
                if REST:
                    keep(total_rest, kept + ROWS * BN, ROWS, BN_REST)
                _set_flag(flag, stamp)
        if whole:
            finish(
                total, c_to, scratch, e, loaded, steps, numbers, m, n, True, True, M, N, 0, 0, ROWS, BN, WIDTH, True,
                False, UP_FIRST, E, ACT, SLOPE, ACCUMULATION, False, INDEX, False,
            )  # fmt: skip
            if REST:
                finish(
                    total_rest, c_to, scratch, e, loaded_rest, steps, numbers, m, n + BN, True, True, M, N, 0, 0, ROWS,
                    BN_REST, WIDTH, True, False, UP_FIRST, E, ACT, SLOPE, ACCUMULATION, False, INDEX, False,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "stamp", "dropped"])
def roles_kernel(
    a, b, b_rest, c, scratch,
    e0, e1, e2, e3, e4, e5, e6, e7, e8, e9, e10, e11, e12, e13, e14, e15, e16, e17, e18, e19,
    M, N, K,
    stride_e0, stride_e1, stride_e2, stride_e3, stride_e4, stride_e5, stride_e6, stride_e7, stride_e8, stride_e9,
    stride_e10, stride_e11, stamp, alpha_value, beta_value, dropped, kept_scale,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr,
    A_K_CONTIGUOUS: gl.constexpr, B_K_CONTIGUOUS: gl.constexpr, UNITS: gl.constexpr, ACCUMULATION: gl.constexpr,
    CHUNK: gl.constexpr, INSIDE: gl.constexpr, INDEX: gl.constexpr, UP_FIRST: gl.constexpr, E: gl.constexpr,
    ACT: gl.constexpr, SLOPE: gl.constexpr, BN_REST: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """C = A B with operands and roles as the module says; persistent, or with a program per chunk of a tile."""
    e = (e0, e1, e2, e3, e4, e5, e6, e7, e8, e9, e10, e11, e12, e13, e14, e15, e16, e17, e18, e19)
    steps = (
        stride_e0, stride_e1, stride_e2, stride_e3, stride_e4, stride_e5, stride_e6, stride_e7, stride_e8, stride_e9,
        stride_e10, stride_e11,
    )  # fmt: skip
    numbers = (alpha_value, beta_value, dropped, kept_scale)
    ROWS: gl.constexpr = BM // _GROUPS
    M = multiple(M, UNITS[0])
    N = multiple(N, UNITS[1])
    m_tiles = gl.cdiv(M, BM)
    TILE_N: gl.constexpr = BN // 2 if E.paired else BN + BN_REST
    n_tiles = gl.cdiv(N, TILE_N)
    items = m_tiles * n_tiles
    if ACCUMULATION == "gathered":
        items *= gl.cdiv(K, CHUNK)
    A_TILE: gl.constexpr = [ROWS, BK] if A_K_CONTIGUOUS else [BK, ROWS]
    B_TILE: gl.constexpr = [BN, BK] if B_K_CONTIGUOUS else [BK, BN]
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES * _GROUPS, A_TILE[0], A_TILE[1]], a.layout)
    if E.paired:
        b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, 2, BN // 2, BK], b.layout)
    else:
        b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, B_TILE[0], B_TILE[1]], b.layout)
    rest_tiles = b_tiles
    if BN_REST > 0:
        REST_TILE: gl.constexpr = [BN_REST, BK] if B_K_CONTIGUOUS else [BK, BN_REST]
        rest_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, REST_TILE[0], REST_TILE[1]], b_rest.layout)
    c_tiles = gl.allocate_shared_memory(c.dtype, [_GROUPS, ROWS, WIDTH], c.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=_GROUPS)
    fence_async_shared()
    start_launch(PDL)
    PARALLEL: gl.constexpr = ACCUMULATION == "gathered"
    PAIRED: gl.constexpr = E.paired
    gl.warp_specialize(
        [
            (_multiply, (
                a_tiles, b_tiles, rest_tiles, ready, free, c, c_tiles, scratch, e, steps, numbers, items, m_tiles,
                n_tiles, M, N, K, stamp, 0, ROWS, BN, BN_REST, TILE_N, BK, WIDTH, STAGES, GROUP,
                A_K_CONTIGUOUS, B_K_CONTIGUOUS, UNITS, INSIDE, ACCUMULATION, CHUNK, INDEX, UP_FIRST,
                E, ACT, SLOPE,
            )),
            (_multiply, (
                a_tiles, b_tiles, rest_tiles, ready, free, c, c_tiles, scratch, e, steps, numbers, items, m_tiles,
                n_tiles, M, N, K, stamp, 1, ROWS, BN, BN_REST, TILE_N, BK, WIDTH, STAGES, GROUP,
                A_K_CONTIGUOUS, B_K_CONTIGUOUS, UNITS, INSIDE, ACCUMULATION, CHUNK, INDEX, UP_FIRST,
                E, ACT, SLOPE,
            )),
            (_load, (
                a, b, b_rest, a_tiles, b_tiles, rest_tiles, ready, free, items, m_tiles, n_tiles, M, N, K, ROWS, BN,
                BN_REST, TILE_N, BK, STAGES, CHUNK, GROUP, UNITS, INSIDE, PARALLEL, A_K_CONTIGUOUS, B_K_CONTIGUOUS,
                PAIRED,
            )),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip
