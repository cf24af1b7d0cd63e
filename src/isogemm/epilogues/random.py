"""The dropout generator: Philox 4x32-10 keyed by the seed.

For a matrix the counters are (group of columns, row). One call serves 8 columns, 16 bits each: those whose indices
differ only in bits 0, 3 and 4, which a thread holds together in a tensor core's result. An element's mask depends on
(seed, row, column) alone.

For attention's weights they are (group of keys, group of queries, matrix). One call serves two queries and two keys,
whose indices differ only in bit 3: a thread holds them together, whether its rows are queries or keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
_WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

LEVELS = 1 << 16  # to which a probability is rounded


def threshold(p: float) -> int:
    """The number below which an element's 16 bits drop it."""
    return round(p * LEVELS)


def scale(p: float) -> float:
    """Factor for the kept elements, which preserves the mean; 0 where none is kept."""
    dropped = threshold(p)
    return LEVELS / (LEVELS - dropped) if dropped < LEVELS else 0.0


def kept(seed: Tensor, rows: int, columns: int, p: float) -> Tensor:
    """The mask of kept elements, [rows, columns] bool; seed: an int64 tensor of one element."""
    row, blocks = torch.arange(rows, device=seed.device)[:, None], -(-columns // 32)
    words = torch.stack(_philox(seed, torch.arange(4 * blocks, device=seed.device)[None, :], row))
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)  # of a column: bits 3 and 4, row, 5 and up, 1 and 2, 0
    bits = halves.view(4, rows, blocks, 4, 2).permute(1, 2, 0, 3, 4).reshape(rows, 32 * blocks)
    return bits[:, :columns] >= threshold(p)


def kept_weights(seed: Tensor, matrices: int, tokens: int, p: float, first: int = 0) -> Tensor:
    """The mask [matrices, tokens (queries), tokens (keys)] from matrix `first` on; matrix = sequence * heads + head."""
    matrix = torch.arange(first, first + matrices, device=seed.device)[:, None, None]
    blocks = -(-tokens // 16)
    group = torch.arange(8 * blocks, device=seed.device)
    words = torch.stack(_philox(seed, group[None, :], group[:, None], matrix))
    bits = (words >> 16).view(2, 2, matrices, blocks, 8, blocks, 8).permute(2, 3, 0, 4, 5, 1, 6)
    return bits.reshape(matrices, 16 * blocks, 16 * blocks)[:, :tokens, :tokens] >= threshold(p)


def _philox(seed: Tensor, *counters: Tensor) -> tuple[Tensor, ...]:
    """Four 32-bit words for each counter of up to four, 0 where there are fewer; in int64."""
    zero = torch.zeros_like(sum(counters, torch.zeros_like(counters[0])))
    c0, c1, c2, c3 = (*(each + zero for each in counters), *(zero,) * (4 - len(counters)))
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(ROUNDS):
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # the low 64 bits are right, wrapped or not
        c0, c1, c2, c3 = right >> 32 & _WORD ^ c1 ^ k0, right & _WORD, left >> 32 & _WORD ^ c3 ^ k1, left & _WORD
        k0, k1 = k0 + KEY_STEPS[0] & _WORD, k1 + KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3
