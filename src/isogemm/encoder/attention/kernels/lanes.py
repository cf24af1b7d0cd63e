"""Tensor-core products of values that a warp's lanes hold as the instruction wants them: no shared memory, no barriers.

Every tensor here is [BLOCK], one value a lane; lane 4 r + c of a warp works on rows r and r + 8 of the warp's sixteen.
A block is sixteen columns: of each of its two rows a lane holds the four columns 4 c .. 4 c + 3, upper row first, so
that memory is read and written sixteen bytes at a time and a product's result is the next one's operand where it lies.
The instructions order k and n differently. Which of a block's columns stands for which k is free, as long as both
operands agree, and so is the order of a weight's rows in n.

A function's tuple arguments have one length each: Triton (3.6, 3.7) names a compiled function by its arguments' types
without separators, and would confuse tuples of 14 and 16 values with tuples of 16 and 14.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.gemm.kernels.halves import round_by_instruction

# memory: four consecutive values at each address


@triton.jit
def load_four(at):
    """Load four float32, or four 16-bit values packed in two registers.

    Not pure, so that the compiler loads again instead of keeping values in registers.
    """
    if at.dtype.element_ty == tl.float32:
        return tl.inline_asm_elementwise(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [at],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )


@triton.jit
def _load_constant(at):
    """Load sixteen bytes with ld.global.nc: only weights packed two launches ago, since the last may still write."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [at],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store_four(at, values, live):
    """Store four floats in the type of `at`."""
    KIND: tl.constexpr = at.dtype.element_ty
    if KIND == tl.float32:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
            "=r,l,f,f,f,f,r", [at.to(tl.int64), values[0], values[1], values[2], values[3], live.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        low = packed(values[0], values[1], KIND)
        high = packed(values[2], values[3], KIND)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.global.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0; }",
            "=r,l,r,r,r", [at.to(tl.int64), low, high, live.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


# numbers


@triton.jit
def packed(low, high, KIND):
    """Two floats as 16-bit values in one register."""
    NAME: tl.constexpr = "bf16x2" if KIND == tl.bfloat16 else "f16x2"
    return tl.inline_asm_elementwise(
        "cvt.rn." + NAME + ".f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def operand(values, KIND):
    """Floats, an even number, as operands: TF32 for float32, or packed pairs."""
    if KIND == tl.float32:
        return [round_by_instruction(value).to(tl.int32, bitcast=True) for value in values]
    else:
        made = ()
        for i in tl.static_range(0, len(values), 2):
            made = made + (packed(values[i], values[i + 1], KIND),)
        return made


@triton.jit
def floats(raw, KIND):
    """Values loaded from memory of type KIND, as floats."""
    if KIND == tl.float32:
        return [word.to(tl.float32, bitcast=True) for word in raw]
    else:
        made = ()
        for i in tl.static_range(len(raw)):
            low = (raw[i] & 0xFFFF).to(tl.int16)
            high = (raw[i] >> 16).to(tl.int16)
            made = made + (low.to(KIND, bitcast=True).to(tl.float32), high.to(KIND, bitcast=True).to(tl.float32))
        return made


@triton.jit
def loaded_operand(raw, FROM, KIND):
    """Values loaded from memory of type FROM, as an operand."""
    if FROM == KIND and KIND != tl.float32:
        return raw
    else:
        return operand(floats(raw, FROM), KIND)


# products


@triton.jit
def instruction(c0, c1, c2, c3, a0, a1, a2, a3, b0, b1, KIND):
    """c [16, 8] + a b: TF32 with k of 8, or 16-bit pairs with k of 16."""
    SHAPE: tl.constexpr = (
        "m16n8k8.row.col.f32.tf32.tf32.f32" if KIND == tl.float32
        else "m16n8k16.row.col.f32.bf16.bf16.f32" if KIND == tl.bfloat16
        else "m16n8k16.row.col.f32.f16.f16.f32"
    )  # fmt: skip
    return tl.inline_asm_elementwise(
        "mma.sync.aligned." + SHAPE + " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _eight_columns(c0, c1, c2, c3, a, b, KIND):
    """Add a block's product to a lane's two columns (of eight in n) of each row."""
    if KIND == tl.float32:
        c0, c1, c2, c3 = instruction(c0, c1, c2, c3, a[0], a[4], a[1], a[5], b[0], b[1], KIND)
        return instruction(c0, c1, c2, c3, a[2], a[6], a[3], a[7], b[2], b[3], KIND)
    else:
        return instruction(c0, c1, c2, c3, a[0], a[2], a[1], a[3], b[0], b[1], KIND)


@triton.jit
def multiply(acc, a, b, KIND):
    """acc + a b^T: blocks acc and a; b: sixteen columns of the two rows of a weight that `weight_rows` gives."""
    x0, x1, y0, y1 = _eight_columns(acc[0], acc[1], acc[4], acc[5], a, b[0], KIND)
    x2, x3, y2, y3 = _eight_columns(acc[2], acc[3], acc[6], acc[7], a, b[1], KIND)
    return x0, x1, x2, x3, y0, y1, y2, y3


@triton.jit
def weight_row(r):
    """First of the two rows, of a weight's sixteen, that lane r reads for `multiply`; the second is two further."""
    return r // 2 * 4 + r % 2


@triton.jit
def load_weights(at, LD, KIND):
    """Four columns of two rows of a weight, LD apart, as operands."""
    FROM: tl.constexpr = at.dtype.element_ty
    return (loaded_operand(load_four(at), FROM, KIND), loaded_operand(load_four(at + 2 * LD), FROM, KIND))


@triton.jit
def packed_place(n, k, K, KIND):
    """Offset of element (n, k) of a weight [N, K] in the packed weight: blocks of 256, in the order that lanes read."""
    lane = (n % 16 // 4 * 2 + n % 2) * 4 + k % 16 // 4
    second = n % 4 // 2
    block = (n // 16 * (K // 16) + k // 16) * 256
    if KIND == tl.float32:
        return block + second * 128 + lane * 4 + k % 4
    else:
        return block + lane * 8 + second * 4 + k % 4


@triton.jit
def load_packed(at, lane, KIND):
    """A block of a packed weight, the 256 elements at `at`, as operands."""
    if KIND == tl.float32:
        return _load_constant(at + lane * 4), _load_constant(at + (lane * 4 + 128))
    else:
        w0, w1, w2, w3 = _load_constant(at + lane * 8)
        return (w0, w1), (w2, w3)


@triton.jit
def zero_block(BLOCK):
    return (tl.zeros([BLOCK], tl.float32),) * 8


@triton.jit
def zero_blocks(N, BLOCK):
    return (zero_block(BLOCK),) * N


# between lanes


@triton.jit
def _partner(x, DISTANCE):
    """x of the lane whose number differs by the bit DISTANCE."""
    return tl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, tl.full(x.shape, DISTANCE, tl.int32)],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def row_sum(x):
    """The sum over a row's four lanes, in each of them."""
    x += _partner(x, 1)
    return x + _partner(x, 2)


@triton.jit
def row_max(x):
    x = tl.maximum(x, _partner(x, 1))
    return tl.maximum(x, _partner(x, 2))


@triton.jit
def column_sum(x):
    """The sum over a column's eight lanes, in each of them."""
    x += _partner(x, 4)
    x += _partner(x, 8)
    return x + _partner(x, 16)


@triton.jit
def across(x):
    """32-bit words x of the lane two columns away in the row."""
    return _partner(x.to(tl.float32, bitcast=True), 2).to(x.dtype, bitcast=True)
