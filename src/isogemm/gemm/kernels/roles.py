"""A product whose warps have roles: one loads, two warpgroups multiply and store.

Each warpgroup has half of every tile's rows, and waits for the other one at no time; or every other tile, and they take
turns. So one of them stores its sums, or adds a chunk's, while the other one keeps the tensor cores busy; and the loads
of the next tile never stop. In a balanced grid programs hand unfinished tiles over: a further warp sees to the flags.
It is written in Gluon, Triton's language with explicit layouts, since Triton's own compiler does not part warps on
Hopper.
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
from isogemm.gemm.kernels.handover import keep, kept_sums, kept_sums_or_zero
from isogemm.gemm.kernels.tiles import item_at, items_of, multiple, team_share

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
    PARALLEL: gl.constexpr, TEAM: gl.constexpr, PARTS: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr,
    PAIRED: gl.constexpr,
):  # fmt: skip
    """The loading warp: fill each buffer as soon as it has been read."""
    BYTES: gl.constexpr = (ROWS * PARTS + BN + BN_REST) * BK * a.dtype.primitive_bitwidth // 8
    slot = 0
    phase = 1
    count, share = items_of(items, K, BK, TEAM)
    for index in range(count):
        m, n, begin, end, _ = item_at(
            index, share, m_tiles, n_tiles, M, N, K, ROWS * PARTS, TILE_N, BK, CHUNK, GROUP, UNITS, INSIDE, PARALLEL,
            TEAM,
        )  # fmt: skip
        for k in range(begin, end, BK):
            mbarrier.wait(free.index(slot), phase)
            full = ready.index(slot)
            mbarrier.expect(full, BYTES)
            for part in gl.static_range(PARTS):
                _copy(a, m + part * ROWS, k, full, a_tiles.index(slot * PARTS + part), A_K)
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
    PART: gl.constexpr, PARTS: gl.constexpr, REST: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    A_K: gl.constexpr, B_K: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """Add the products of k in begin .. end - 1 to the sums, in ascending order. The last ones may still run."""
    for k in range(begin, end, BK):
        mbarrier.wait(ready.index(slot), phase)
        a = _operand(a_tiles.index(slot * PARTS + PART), not A_K)
        acc = warpgroup_mma(a, _operand(b_tiles.index(slot), B_K, PAIRED), acc, is_async=True)
        if REST:
            acc_rest = warpgroup_mma(a, _operand(rest_tiles.index(slot), B_K), acc_rest, is_async=True)
            acc, acc_rest = warpgroup_mma_wait(2, deps=(acc, acc_rest))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        # The block before has been read. Its buffer is computed: Triton takes `before = slot` for `slot`.
        mbarrier.arrive(free.index(gl.where(slot == 0, STAGES - 1, slot - 1)), pred=k > begin)
        slot, phase = _next(slot, phase, STAGES)
    return acc, acc_rest, slot, phase


@gluon.jit
def _finished(acc, acc_rest, free, slot, REST: gl.constexpr, STAGES: gl.constexpr):
    """The sums, once the last products are added."""
    if REST:
        acc, acc_rest = warpgroup_mma_wait(0, deps=(acc, acc_rest))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free.index(gl.where(slot == 0, STAGES - 1, slot - 1)))
    return acc, acc_rest


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
def _relay(scratch, left, came, items, K, stamp, STATE: gl.constexpr, BK: gl.constexpr, TEAM: gl.constexpr):
    """The relaying warp: set this program's flag when its sums are left, and see the flag of the team before. So no
    warpgroup waits until other programs see what it has written. (Polled without acquiring: that empties the cache.)
    """
    if TEAM:
        _, begin, end = team_share(items, K, BK, TEAM)
        blocks = gl.cdiv(K, BK)
        program = gl.program_id(0)
        flags = (scratch + gl.num_programs(0).to(gl.int64) * STATE).to(gl.pointer_type(gl.int64), bitcast=True)
        if end % blocks > 0:
            mbarrier.wait(left, 0)
            gl.inline_asm_elementwise(
                """{
                .reg .pred first;
                .reg .b32 lane;
                mov.u32 lane, %laneid;
                setp.eq.u32 first, lane, 0;
                @first st.release.gpu.global.b64 [$1], $2;
                mov.b64 $0, $2;
                }""",
                "=l,l,l", [flags + program, stamp], dtype=gl.int64, is_pure=False, pack=1,
            )  # fmt: skip
        if begin % blocks > 0:
            gl.inline_asm_elementwise(
                """{
                .reg .pred first, other;
                .reg .b32 lane;
                mov.u32 lane, %laneid;
                setp.eq.u32 first, lane, 0;
                again: ld.relaxed.gpu.global.b64 $0, [$1];
                setp.ne.b64 other, $0, $2;
                @other nanosleep.u32 40;
                @other bra again;
                fence.acq_rel.gpu;
                bar.warp.sync 0xffffffff;
                @first st.global.b64 [$1], 0;
                }""",
                "=&l,l,l", [flags + (program - TEAM), stamp], dtype=gl.int64, is_pure=False, pack=1,
            )  # fmt: skip
            mbarrier.arrive(came)


@gluon.jit
def _keep(acc, acc_rest, kept, ROWS: gl.constexpr, BN: gl.constexpr, BN_REST: gl.constexpr):
    """Leave sums, and those of a rest, in scratch memory."""
    keep(acc, kept, ROWS, BN)
    if BN_REST > 0:
        keep(acc_rest, kept + ROWS * BN, ROWS, BN_REST)


@gluon.jit
def _kept(acc, acc_rest, kept, ROWS: gl.constexpr, BN: gl.constexpr, BN_REST: gl.constexpr):
    """Sums that `_keep` left, in the layouts of `acc` and `acc_rest`."""
    rest = acc_rest
    if BN_REST > 0:
        rest = kept_sums(kept + ROWS * BN, acc_rest, ROWS, BN_REST)
    return kept_sums(kept, acc, ROWS, BN), rest


@gluon.jit
def _resumed(acc, acc_rest, kept, resumes, ROWS: gl.constexpr, BN: gl.constexpr, BN_REST: gl.constexpr):
    """`_kept` sums, or zeros if nothing is resumed."""
    rest = acc_rest
    if BN_REST > 0:
        rest = kept_sums_or_zero(kept + ROWS * BN, acc_rest, resumes, ROWS, BN_REST)
    return kept_sums_or_zero(kept, acc, resumes, ROWS, BN), rest


@gluon.jit
def _gathered(
    acc, acc_rest, kept, apart, chunk, ROWS: gl.constexpr, BN: gl.constexpr, BN_REST: gl.constexpr,
):  # fmt: skip
    """The sums of all chunks, of which the last one's are `acc`, from the first to the last."""
    total, total_rest = _kept(acc, acc_rest, kept, ROWS, BN, BN_REST)
    total += 0.0  # as a sum that starts at 0: no -0
    total_rest += 0.0
    for _ in range(1, chunk):
        kept += apart
        other, other_rest = _kept(acc, acc_rest, kept, ROWS, BN, BN_REST)
        total += other
        total_rest += other_rest
    return total + acc, total_rest + acc_rest


@gluon.jit
def _multiply(
    a_tiles, b_tiles, rest_tiles, ready, free, turns, left, came, c, c_tiles, scratch, e, steps, numbers, items,
    m_tiles, n_tiles, M, N, K, stamp,
    WHICH: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, BN: gl.constexpr, BN_REST: gl.constexpr,
    TILE_N: gl.constexpr, BK: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    A_K: gl.constexpr, B_K: gl.constexpr, UNITS: gl.constexpr, INSIDE: gl.constexpr, ACCUMULATION: gl.constexpr,
    CHUNK: gl.constexpr, STATE: gl.constexpr, TEAM: gl.constexpr, INDEX: gl.constexpr, UP_FIRST: gl.constexpr,
    E: gl.constexpr, ACT: gl.constexpr, SLOPE: gl.constexpr,
):  # fmt: skip
    """A warpgroup's part: half of each item's rows, or every other item."""
    REST: gl.constexpr = BN_REST > 0
    RESTS: gl.constexpr = BN_REST if REST else 8  # sums that nothing uses
    PARALLEL: gl.constexpr = ACCUMULATION == "gathered"
    CHUNKED: gl.constexpr = ACCUMULATION == "registers"
    ALTERNATING: gl.constexpr = PARTS == 1
    PART: gl.constexpr = 0 if ALTERNATING else WHICH
    PAIRED: gl.constexpr = E.paired
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LAYOUT_REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RESTS, 16])
    AREA: gl.constexpr = ROWS * (BN + BN_REST)
    places = m_tiles * n_tiles
    program = gl.program_id(0)
    if TEAM or PARALLEL:
        mine = scratch + (program * PARTS + PART).to(gl.int64) * (STATE // PARTS)
    if PARALLEL:
        slots = (gl.cdiv(K, CHUNK) - 1) * places
        flags = (scratch + slots.to(gl.int64) * STATE).to(gl.pointer_type(gl.int64), bitcast=True)
        flag = flags + program * PARTS + PART
    c_to = _Staged(c, c_tiles.index(WHICH))
    count, share = items_of(items, K, BK, TEAM)
    for index in range(WHICH if ALTERNATING else 0, count, _GROUPS if ALTERNATING else 1):
        m, n, begin, end, before = item_at(
            index, share, m_tiles, n_tiles, M, N, K, ROWS * PARTS, TILE_N, BK, CHUNK, GROUP, UNITS, INSIDE, PARALLEL,
            TEAM,
        )  # fmt: skip
        m += PART * ROWS
        slot = before % STAGES
        phase = before // STAGES & 1
        loaded = biases(e, n, N, BN // 2 if PAIRED else BN, E)
        loaded_rest = biases(e, n + BN, N, RESTS, E)
        acc = gl.zeros((ROWS, BN), gl.float32, LAYOUT)
        acc_rest = gl.zeros((ROWS, RESTS), gl.float32, LAYOUT_REST)
        total = acc
        total_rest = acc_rest
        if TEAM:
            resumes = (begin > 0).to(gl.int32)  # the team before has begun this tile
            if begin > 0:
                mbarrier.wait(came, 0)
            theirs = mine - TEAM * STATE
            acc, acc_rest = _resumed(acc, acc_rest, theirs, resumes, ROWS, BN, BN_REST)
            if CHUNKED:
                total, total_rest = _resumed(acc, acc_rest, theirs + AREA, resumes, ROWS, BN, BN_REST)
        if ALTERNATING:
            turn = index // _GROUPS - 1 + WHICH
            mbarrier.wait(turns.index(WHICH), turn & 1, pred=turn >= 0)
        if CHUNKED:
            for chunk_begin in range(begin // CHUNK * CHUNK, end, CHUNK):
                chunk_end = min(chunk_begin + CHUNK, end)
                acc, acc_rest, slot, phase = _products(
                    acc, acc_rest, a_tiles, b_tiles, rest_tiles, ready, free, slot, phase, max(chunk_begin, begin),
                    chunk_end, PART, PARTS, REST, BK, STAGES, A_K, B_K, PAIRED,
                )  # fmt: skip
                acc, acc_rest = _finished(acc, acc_rest, free, slot, REST, STAGES)
                if chunk_end % CHUNK == 0 or chunk_end == K:  # else the next team ends this chunk
                    total += acc
                    total_rest += acc_rest
                    acc = gl.zeros((ROWS, BN), gl.float32, LAYOUT)
                    acc_rest = gl.zeros((ROWS, RESTS), gl.float32, LAYOUT_REST)
        else:
            acc, acc_rest, slot, phase = _products(
                acc, acc_rest, a_tiles, b_tiles, rest_tiles, ready, free, slot, phase, begin, end, PART, PARTS, REST,
                BK, STAGES, A_K, B_K, PAIRED,
            )  # fmt: skip
            if ALTERNATING:
                mbarrier.arrive(turns.index(1 - WHICH))
            acc, acc_rest = _finished(acc, acc_rest, free, slot, REST, STAGES)
            total = acc
            total_rest = acc_rest
        whole = True
        if PARALLEL or TEAM:
            whole = end == K
            if whole:
                if PARALLEL:
                    chunk = begin // CHUNK
                    for back in range(1, chunk + 1):
                        _await_flag(flag - back * places * PARTS, stamp)
                    apart = places.to(gl.int64) * STATE
                    total, total_rest = _gathered(
                        total, total_rest, mine - apart * chunk, apart, chunk, ROWS, BN, BN_REST
                    )
            else:
                _keep(acc, acc_rest, mine, ROWS, BN, BN_REST)
                if CHUNKED:
                    _keep(total, total_rest, mine + AREA, ROWS, BN, BN_REST)
                if TEAM:
                    tl.debug_barrier()
                    mbarrier.arrive(left)
                else:
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
    ACT: gl.constexpr, SLOPE: gl.constexpr, BN_REST: gl.constexpr, STAGES: gl.constexpr,
    ALTERNATING: gl.constexpr, TEAM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """C = A B with operands and roles as the module says; persistent, or with a program per chunk of a tile."""
    e = (e0, e1, e2, e3, e4, e5, e6, e7, e8, e9, e10, e11, e12, e13, e14, e15, e16, e17, e18, e19)
    steps = (
        stride_e0, stride_e1, stride_e2, stride_e3, stride_e4, stride_e5, stride_e6, stride_e7, stride_e8, stride_e9,
        stride_e10, stride_e11,
    )  # fmt: skip
    numbers = (alpha_value, beta_value, dropped, kept_scale)
    PARTS: gl.constexpr = 1 if ALTERNATING else _GROUPS  # of a tile's rows, each a warpgroup's
    ROWS: gl.constexpr = BM // PARTS
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
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES * PARTS, A_TILE[0], A_TILE[1]], a.layout)
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
        mbarrier.init(free.index(slot), count=PARTS)
    # Whose turn it is, if they alternate; that sums are left for the next team, and that the team before has left some.
    turns = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(_GROUPS):
        mbarrier.init(turns.index(which), count=1)
    left = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    came = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(left, count=PARTS)
    mbarrier.init(came, count=1)
    fence_async_shared()
    start_launch(PDL)
    PARALLEL: gl.constexpr = ACCUMULATION == "gathered"
    PAIRED: gl.constexpr = E.paired
    STATE: gl.constexpr = BM * (BN + BN_REST) * (2 if ACCUMULATION == "registers" else 1)  # what is handed over
    gl.warp_specialize(
        [
            (_multiply, (
                a_tiles, b_tiles, rest_tiles, ready, free, turns, left, came, c, c_tiles, scratch, e, steps, numbers,
                items, m_tiles, n_tiles, M, N, K, stamp, 0, ROWS, PARTS, BN, BN_REST, TILE_N, BK, WIDTH, STAGES, GROUP,
                A_K_CONTIGUOUS, B_K_CONTIGUOUS, UNITS, INSIDE, ACCUMULATION, CHUNK, STATE, TEAM, INDEX, UP_FIRST, E,
                ACT, SLOPE,
            )),
            (_multiply, (
                a_tiles, b_tiles, rest_tiles, ready, free, turns, left, came, c, c_tiles, scratch, e, steps, numbers,
                items, m_tiles, n_tiles, M, N, K, stamp, 1, ROWS, PARTS, BN, BN_REST, TILE_N, BK, WIDTH, STAGES, GROUP,
                A_K_CONTIGUOUS, B_K_CONTIGUOUS, UNITS, INSIDE, ACCUMULATION, CHUNK, STATE, TEAM, INDEX, UP_FIRST, E,
                ACT, SLOPE,
            )),
            (_load, (
                a, b, b_rest, a_tiles, b_tiles, rest_tiles, ready, free, items, m_tiles, n_tiles, M, N, K, ROWS, BN,
                BN_REST, TILE_N, BK, STAGES, CHUNK, GROUP, UNITS, INSIDE, PARALLEL, TEAM, PARTS,
                A_K_CONTIGUOUS, B_K_CONTIGUOUS, PAIRED,
            )),
            (_relay, (scratch, left, came, items, K, stamp, STATE, BK, TEAM)),
        ],
        worker_num_warps=[4, 1, 1],
        worker_num_regs=[_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip
