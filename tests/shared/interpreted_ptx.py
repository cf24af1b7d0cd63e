"""The PTX that kernels write as inline assembly, in NumPy: Triton's interpreter has none.

A register is an array [32 * warps], one value per lane.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import interpreter
from triton.runtime.interpreter import TensorHandle

_WARP = 32
_HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def run(builder: Any, asm: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int) -> Any:
    """`InterpreterBuilder.create_inline_asm`: results of one snippet, for `get_result`."""
    registers = [each.data for each in values]
    if "mma.sync" in asm:
        shape = re.search(r"m16n8k(\d+)\.row\.col\.f32\.(\w+)", asm)
        results = _mma(registers, int(shape[1]), shape[2])
    elif "shfl.sync.bfly" in asm:
        results = [_from_lanes(registers[0], np.arange(len(registers[0])) ^ registers[1])]
    elif "shfl.sync.idx" in asm:
        results = [_from_lanes(registers[0], registers[1])]
    elif "ld.global" in asm:
        live = registers[1] != 0 if "@p" in asm else np.ones(len(registers[0]), bool)
        results = [_load(registers[0] + 4 * i, live) for i in range(len(types))]
    elif "st.global" in asm:
        address, *words, live = registers
        for i, word in enumerate(words):
            _store(address + 4 * i, word, live != 0)
        results = [np.zeros(len(address), np.int32)]
    elif packing := re.search(r"cvt\.rn\.(\w+)x2\.f32", asm):
        high, low = (_half_bits(each, _HALVES[packing[1]]) for each in registers)
        results = [low | high << 16]
    elif "prefetch.global" in asm:
        results = [np.zeros(len(registers[0]), np.int32)]
    else:
        raise NotImplementedError(asm)
    handles = [_handle(made, each.scalar) for made, each in zip(results, types, strict=True)]
    return SimpleNamespace(get_result=handles.__getitem__)


def _handle(register: np.ndarray, kind: Any) -> Any:
    return TensorHandle(register.view(np.float32 if kind == tl.float32 else np.int32), kind)


def _mma(registers: list[np.ndarray], depth: int, kind: str) -> list[np.ndarray]:
    """c [16, 8] + a [16, depth] b [depth, 8] of each warp: a's registers come first, then b's, then four of c.

    Tensor cores leave out the last 13 bits of TF32 operands. Products are exact. A lane's are added first, then those
    of a row's four lanes as `row_sum` does.
    """
    per_register = 1 if kind == "tf32" else 2
    of_b = depth // (4 * per_register)
    left, right, start = registers[: 2 * of_b], registers[2 * of_b : 3 * of_b], registers[3 * of_b :]
    warps, lane = len(start[0]) // _WARP, np.arange(_WARP)
    row, column = lane // 4, lane % 4
    a, b, c = (np.zeros((warps, *shape), np.float32) for shape in ((16, depth), (depth, 8), (16, 8)))
    for i, register in enumerate(left):
        for e, value in enumerate(_operands(register, kind)):
            a[:, row + 8 * (i % 2), per_register * (4 * (i // 2) + column) + e] = value.reshape(warps, _WARP)
    for i, register in enumerate(right):
        for e, value in enumerate(_operands(register, kind)):
            b[:, per_register * (4 * i + column) + e, row] = value.reshape(warps, _WARP)
    for i, register in enumerate(start):
        c[:, row + 8 * (i // 2), 2 * column + i % 2] = register.reshape(warps, _WARP)
    products = (a[:, :, None, :] * b.transpose(0, 2, 1)[:, None]).reshape(warps, 16, 8, of_b, 4, per_register)
    lanes = sum(products[..., i, :, e] for i in range(of_b) for e in range(per_register))
    c += (lanes[..., 0] + lanes[..., 1]) + (lanes[..., 2] + lanes[..., 3])
    return [c[:, row + 8 * (i // 2), 2 * column + i % 2].reshape(-1) for i in range(4)]


def _operands(register: np.ndarray, kind: str) -> list[np.ndarray]:
    if kind == "tf32":
        return [(register & -0x2000).view(np.float32)]
    halves = torch.from_numpy(register.view(np.int16).copy()).view(_HALVES[kind]).float().numpy()
    return [halves[0::2], halves[1::2]]


def _from_lanes(x: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """x of the lane with each lane's number, in the same warp."""
    first = np.arange(len(x)) // _WARP * _WARP
    return x[first + lane % _WARP]


def _half_bits(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(x.copy()).to(dtype).view(torch.int16).numpy().astype(np.int32) & 0xFFFF


def _load(address: np.ndarray, live: np.ndarray) -> np.ndarray:
    found: np.ndarray = interpreter.load(
        address.astype(np.uint64), live, np.zeros(len(address), np.int32), np.dtype("i4")
    )
    return found


def _store(address: np.ndarray, word: np.ndarray, live: np.ndarray) -> None:
    interpreter.store(address.astype(np.uint64), word.view(np.int32), live)
