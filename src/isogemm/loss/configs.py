"""How the logits are cut to fit in a bounded workspace. Pure: no device, no tensors.

Nothing here changes a bit of the forward: a logit depends on its row of `hidden` and of `weight`, and the order of a
row's sums is that of `norm`'s log-softmax. The order of the gradients' sums depends on HIDDEN_CHUNK and on the weight's
token chunk; both divide every block that a sum continues over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from isogemm.norm.configs import SOFTMAX_BLOCK as SOFTMAX_BLOCK

HIDDEN_CHUNK = 16384  # vocabulary rows of one sum in the gradient of hidden
LOGITS = 64 << 20  # float32 logits in memory at a time, for up to LOGITS / HIDDEN_CHUNK tokens
MOST_TOKENS = 8192  # of a block; a multiple of every weight's token chunk
CPU_LOGITS = 4 << 20  # on the CPU
CPU_COLUMNS, CPU_TOKENS = 8192, 4096  # of a block in the CPU's backward; the tokens likewise

BLOCK = SOFTMAX_BLOCK  # columns of a program
GRADIENT_BLOCK = 2048  # likewise, where nothing is summed
ROW_UNIT = 64  # rows of the workspace begin at multiples of so many elements: TMA and wide loads
GRADIENT_WARPS = 4
SUM_WARPS = 1  # all but five of a block's additions by halves are inside a thread


class How(NamedTuple):
    """What is computed of each token's logits."""

    softcap: float | None = None
    temperature: float = 1
    entropy: bool = False  # values besides the target's log-probability: the entropy,
    mean: bool = False  # the mean of the vocabulary's log-probabilities,
    lse: bool = False  # and the logits' log-sum-exp
    ignore_index: int = -100
    precision: str | None = None

    @property
    def value_count(self) -> int:
        """Number of values of a token."""
        return 1 + self.entropy + self.mean + self.lse


@dataclass(frozen=True)
class Blocks:
    """The logits [tokens, columns] that are in memory at a time."""

    tokens: int
    columns: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.columns} logits at a time"


def gpu_blocks(tokens: int, vocabulary: int) -> Blocks:
    """Columns a multiple of HIDDEN_CHUNK, or all of them; of an odd vocabulary the rest has slower products."""
    rows = max(1, min(tokens, MOST_TOKENS))
    whole = vocabulary
    if vocabulary % 8 and vocabulary > HIDDEN_CHUNK and rows >= 128:
        whole = vocabulary // HIDDEN_CHUNK * HIDDEN_CHUNK
    return Blocks(rows, min(whole, max(1, LOGITS // rows // HIDDEN_CHUNK) * HIDDEN_CHUNK))


def cpu_blocks(tokens: int, vocabulary: int) -> Blocks:
    """All columns: the CPU's products depend on the number of threads and on the whole weight."""
    rows = max(1, min(tokens, CPU_LOGITS // vocabulary))
    return Blocks(rows, vocabulary)


def cpu_gradient_blocks(tokens: int, vocabulary: int) -> Blocks:
    """Columns that do not depend on the tokens: the gradient of hidden is summed over them."""
    return Blocks(max(1, min(tokens, CPU_TOKENS)), min(vocabulary, CPU_COLUMNS))


def spans(size: int, step: int) -> Iterator[slice]:
    """Cut 0 .. size into slices of `step`."""
    return (slice(start, min(start + step, size)) for start in range(0, size, step))
