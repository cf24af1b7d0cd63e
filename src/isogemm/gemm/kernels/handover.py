"""How the programs of a product keep unfinished sums in memory, and hand them to one another."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from isogemm.core.kernels import arange

_LOADED_AHEAD = tl.constexpr(64 * 64)  # elements of a tile


def has_sm(least: Any, _semantic: Any = None) -> tl.constexpr:
    """Whether the target is an NVIDIA GPU of at least this architecture; False in the interpreter."""
    arch = "" if _semantic is None else str(_semantic.builder.options.arch)  # empty in the interpreter
    number = int("".join(filter(str.isdigit, arch))) if arch.startswith("sm") else 0
    return tl.constexpr(number >= getattr(least, "value", least))


setattr(has_sm, tl.core.TRITON_BUILTIN, True)  # so that kernels call it at compile time


@triton.jit
def _kept_at(kept, BM: tl.constexpr, BN: tl.constexpr):
    """Addresses of a tile's sums in scratch memory: those that the threads of `wgmma` have in one register lie
    together, so that nothing goes through shared memory. Any layout of the sums is right."""
    row = arange(0, BM)[:, None]
    col = arange(0, BN)[None, :]
    register = (col >> 3 << 2) + ((row >> 3 & 1) << 1) + (col & 1)
    lane = ((row & 7) << 2) + (col >> 1 & 3)
    return kept + (register * (BM * 2) + (row >> 4 << 5) + lane)


@triton.jit
def keep(acc, kept, BM: tl.constexpr, BN: tl.constexpr):
    """Write a tile's sums to scratch memory, each thread those it has."""
    at = _kept_at(kept, BM, BN)
    if has_sm(70):
        bits = acc.to(tl.int32, bitcast=True)
        tl.inline_asm_elementwise(
            "st.global.b32 [$1], $2; mov.b32 $0, 0;", "=r,l,r", [at, bits], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    else:
        tl.store(at, acc)


@triton.jit
def kept_sums(kept, like, BM: tl.constexpr, BN: tl.constexpr):
    """Read what `keep` wrote, in the layout of `like`, which are sums of this tile: their values are ignored."""
    at = _kept_at(kept, BM, BN)
    if has_sm(70):
        return tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l,r", [at, like.to(tl.int32, bitcast=True)], dtype=tl.float32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        return tl.load(at)


@triton.jit
def kept_sums_or_zero(kept, like, whether, BM: tl.constexpr, BN: tl.constexpr):
    """`kept_sums` on sm_90 if `whether` is not 0, else zeros. For sums that wgmma adds to: with a branch around the
    loads ptxas would wait after each of its instructions."""
    at = _kept_at(kept, BM, BN)
    return tl.inline_asm_elementwise(
        """{
        .reg .pred reads;
        setp.ne.s32 reads, $3, 0;
        mov.b32 $0, 0;
        @reads ld.global.b32 $0, [$1];
        }""",
        "=&r,l,r,r", [at, like.to(tl.int32, bitcast=True), whether], dtype=tl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def set_flag(flag, stamp):
    """Let the program that waits for `stamp` see all that this program has written."""
    if has_sm(70):  # as one instruction: `tl.debug_barrier` in a loop ends its pipelining
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            bar.sync 0;
            @first st.release.gpu.global.b64 [$1], $2;
            mov.b64 $0, $2;
            }""",
            "=l,l,l", [flag, stamp], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(flag, stamp)


@triton.jit
def await_flag(flag, stamp):
    """Wait for `set_flag`, then clear the flag: a replayed graph's stamp is the same every time."""
    if has_sm(70):
        tl.inline_asm_elementwise(
            """{
            .reg .pred first, other;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            again: ld.acquire.gpu.global.b64 $0, [$1];
            setp.ne.b64 other, $0, $2;
            @other bra again;
            bar.sync 0;
            @first st.global.b64 [$1], 0;
            }""",
            "=&l,l,l", [flag, stamp], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    else:  # the interpreter runs one program after another
        tl.device_assert(tl.load(flag) == stamp)
        tl.store(flag, stamp * 0)


@triton.jit
def await_turn(flag, stamp, chunk):
    """Wait until the chunk before is added, in a queue of a place's chunks."""
    if chunk > 0:
        await_flag(flag, stamp + chunk)


@triton.jit
def pass_turn(flag, stamp, chunk, last):
    """Let the next chunk be added, if there is one."""
    if not last:
        set_flag(flag, stamp + chunk + 1)


@triton.jit
def await_flags(flag, stride, count, stamp):
    """Wait for the `count` flags before this one, `stride` apart, then clear them; `count` is at most 32."""
    if has_sm(70):  # each thread waits for one: a flag takes about a microsecond to be seen
        tl.inline_asm_elementwise(
            """{
            .reg .pred waits, other;
            .reg .b32 thread;
            .reg .b64 at, seen;
            mov.u32 thread, %tid.x;
            setp.lt.u32 waits, thread, $3;
            add.u32 thread, thread, 1;
            mul.wide.u32 at, thread, $2;
            sub.u64 at, $1, at;
            again: @waits ld.acquire.gpu.global.b64 seen, [at];
            setp.ne.and.b64 other, seen, $4, waits;
            @other bra again;
            bar.sync 0;
            @waits st.global.b64 [at], 0;
            mov.b64 $0, $4;
            }""",
            "=&l,l,r,r,l", [flag, stride * 8, count, stamp], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        for back in tl.range(1, count + 1):
            await_flag(flag - back * stride, stamp)


@triton.jit
def gather(
    acc, scratch, kept, flag, place, places, chunk, last, stamp, c, m, n, M, N, stride_cm, stride_cn,
    BM: tl.constexpr, BN: tl.constexpr, CHUNKS: tl.constexpr, ACCUMULATE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Keep a chunk's sums; or, in the last chunk's program, add all chunks' in order and return them.

    CHUNKS: 2, or 3 for more. If ACCUMULATE, the first chunk's sums are added to C.
    """
    if last:
        await_flags(flag, places, chunk, stamp)
        other = scratch + place.to(tl.int64) * (BM * BN)
        apart = places.to(tl.int64) * (BM * BN)
        total = kept_sums(other, acc, BM, BN)
        if not ACCUMULATE:
            total += 0.0  # as a sum that starts at 0: no -0
        if CHUNKS > 2:  # a loop needs registers for both sums
            if BM * BN > _LOADED_AHEAD:
                for _ in tl.range(1, chunk):
                    other += apart
                    total += kept_sums(other, acc, BM, BN)
            else:  # small tiles wait for memory, and have registers for what is loaded next
                other += apart
                ahead = kept_sums(other, acc, BM, BN)
                for _ in tl.range(2, chunk):
                    other += apart
                    now = ahead
                    ahead = kept_sums(other, acc, BM, BN)
                    total += now
                total += ahead
        acc = total + acc
    else:
        if ACCUMULATE:
            if chunk == 0:
                row = (m + arange(0, BM))[:, None]
                col = (n + arange(0, BN))[None, :]
                at = c + (row.to(INDEX) * stride_cm + col.to(INDEX) * stride_cn)
                acc += tl.load(at, mask=(row < M) & (col < N), other=0.0)
        keep(acc, kept, BM, BN)
        set_flag(flag, stamp)
    return acc


@triton.jit
def shared_slots(
    scratch, program, tile, places, K, CHUNK: tl.constexpr, FIRST: tl.constexpr, AREA: tl.constexpr,
    ACCUMULATION: tl.constexpr, PARALLEL: tl.constexpr,
):  # fmt: skip
    """Where this program keeps its sums in scratch memory, FIRST of AREA and then the rest; and its flag, behind all.

    "gathered": a slot and a flag for each chunk of each place but the last. "queued": one of each per place. Else a
    slot per program, and no flag.
    """
    slot = program
    slots = 0
    if PARALLEL == "gathered":
        slot = tile
        slots = places * (tl.cdiv(K, CHUNK) - 1)
    elif PARALLEL == "queued":
        slot = tile % places
        slots = places if ACCUMULATION == "scratch" else 0
    kept = scratch + slot.to(tl.int64) * AREA
    flags = (scratch + slots.to(tl.int64) * AREA).to(tl.pointer_type(tl.int64), bitcast=True)
    return kept, kept + FIRST, flags + slot
