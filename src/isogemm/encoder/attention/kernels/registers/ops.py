"""Attention of short heads (d <= 16), in fp32 registers: a thread owns a few tokens of one head of one sequence.

Tensor cores would pad d to 8 or 16 and the tokens to a power of two, and exchange P between threads; here every sum is
one thread's, over keys (or queries) in ascending order, so no bit depends on the batch, the packing or the launch.

With dropout a thread owns and reads tokens in pairs that are eight apart, whose weights share random words. Pairs are
numbered as in `epilogues.random`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.epilogues.device import philox


@triton.jit
def _columns(x, BLOCK, VEC):
    """The VEC columns of x [BLOCK, VEC], each [BLOCK], in order."""
    if VEC == 1:
        return (tl.reshape(x, [BLOCK]),)
    elif VEC == 2:
        return tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, [BLOCK, VEC // 2, 2]))
        evens = _columns(even, BLOCK, VEC // 2)
        odds = _columns(odd, BLOCK, VEC // 2)
        columns = ()
        for c in tl.static_range(VEC // 2):
            columns = columns + (evens[c], odds[c])
        return columns


@triton.jit
def read_head(at, D, VEC, BLOCK):
    """Load the D floats at each address, as D tensors [BLOCK]."""
    values = ()
    for c in tl.static_range(0, D, VEC):
        block = tl.load(at[:, None] + (c + tl.arange(0, VEC))[None, :])
        columns = _columns(block.to(tl.float32), BLOCK, VEC)
        for i in tl.static_range(VEC):
            values = values + (columns[i],)
    return values


@triton.jit
def fetch_head(at, FETCH):
    """Prefetch the cache line at each address: each token is one thread's own, and is read by all of its head's."""
    if FETCH:
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def write_head(at, values, live, D, VEC, BLOCK):
    """Store D tensors [BLOCK] to the D places at each address."""
    for c in tl.static_range(0, D, VEC):
        block = _joined(values[c : c + VEC], BLOCK, VEC)
        tl.store(at[:, None] + (c + tl.arange(0, VEC))[None, :], block.to(at.dtype.element_ty), mask=live[:, None])


@triton.jit
def _joined(values, BLOCK, VEC):
    """VEC tensors [BLOCK] as the columns of one [BLOCK, VEC]."""
    if VEC == 1:
        return tl.reshape(values[0], [BLOCK, 1])
    elif VEC == 2:
        return tl.join(values[0], values[1])
    else:
        evens, odds = (), ()
        for c in tl.static_range(0, VEC, 2):
            evens = evens + (values[c],)
            odds = odds + (values[c + 1],)
        even = _joined(evens, BLOCK, VEC // 2)
        odd = _joined(odds, BLOCK, VEC // 2)
        return tl.reshape(tl.join(even, odd), [BLOCK, VEC])


@triton.jit
def dot_of(a, b):
    """sum_c a[c] b[c], ascending."""
    total = a[0] * b[0]
    for c in tl.static_range(1, len(a)):
        total = tl.fma(a[c], b[c], total)
    return total


@triton.jit
def zero_head(D, BLOCK):
    return (tl.zeros([BLOCK], tl.float32),) * D


@triton.jit
def scaled_head(a, factor):
    """a times a number."""
    return [x * factor for x in a]


@triton.jit
def plus_scaled(a, factor, b):
    """a + factor b."""
    result = ()
    for c in tl.static_range(len(a)):
        result = result + (tl.fma(factor, b[c], a[c]),)
    return result


@triton.jit
def pairs_of(tokens):
    """Number of pairs."""
    return (tokens >> 4 << 3) + tl.minimum(tokens & 15, 8)


@triton.jit
def first_of_pair(pair):
    return (pair >> 3 << 4) + (pair & 7)


@triton.jit
def read_token(first, i: tl.constexpr, COUNT, DROPOUT):
    """The i-th of COUNT tokens that are read per step."""
    if DROPOUT:
        return first + (i % (COUNT // 2) + i // (COUNT // 2) * 8)
    else:
        return first + i


@triton.jit
def owned_token(first, groups, n: tl.constexpr, DROPOUT):
    """A thread's n-th token; it may lie beyond the end."""
    if DROPOUT:
        return first_of_pair(first + n // 2 * groups) + n % 2 * 8
    else:
        return first + n * groups


@triton.jit
def groups_of(tokens, own, DROPOUT):
    """Threads per head."""
    if DROPOUT:
        return (pairs_of(tokens) + own // 2 - 1) // (own // 2)
    else:
        return (tokens + own - 1) // own


@triton.jit
def place(thread, groups, sequences, tokens, H, WIDE):
    """A thread's index in its head; its sequence and head, whether they exist; the sequence's first row."""
    pair = thread // groups
    first = thread - pair * groups
    sequence = pair // H
    head = pair - sequence * H
    live = sequence < sequences
    sequence = tl.minimum(sequence, sequences - 1)  # so that only stores need a mask
    row = sequence * tokens
    if WIDE:
        row = row.to(tl.int64)
    return first, sequence, head, live, row


@triton.jit
def matrix_at(ptr, matrix, tokens, WIDE):
    """Address of a matrix's first score."""
    if WIDE:
        matrix = matrix.to(tl.int64)
    return ptr + matrix * tokens * tokens


@triton.jit
def _score_at(at, query, key, tokens, WIDE):
    """Address of a score; beyond the end, of the last query or key."""
    query = tl.minimum(query, tokens - 1)
    if WIDE:
        query = query.to(tl.int64)
    return at + (query * tokens + tl.minimum(key, tokens - 1))


@triton.jit
def with_score(s, at, query, key, tokens, WIDE):
    """s plus a score in memory, in units of log 2."""
    before = tl.load(_score_at(at, query, key, tokens, WIDE)).to(tl.float32)
    return tl.fma(before, 1.4426950408889634, s)


@triton.jit
def with_gradient(ds, s, at, query, key, tokens, WIDE):
    """ds plus the gradient given for the score itself, unless that is -inf."""
    above = tl.load(_score_at(at, query, key, tokens, WIDE)).to(tl.float32)
    return ds + tl.where((s == float("-inf")) | (query >= tokens), 0.0, above)


@triton.jit
def write_score(at, query, key, x, tokens, live, WIDE):
    written = live & (query < tokens) & (key < tokens)
    tl.store(_score_at(at, query, key, tokens, WIDE), x.to(at.dtype.element_ty), mask=written)


@triton.jit
def random_words(dropout, keys, queries):
    """Random words as in `epilogues.random`, of a pair of keys and one of queries; dropout: seed, threshold, matrix."""
    zero = tl.zeros(dropout[2].shape, tl.int32)
    return philox(dropout[0], keys + zero, queries + zero, dropout[2])


@triton.jit
def kept(x, word, dropout):
    return tl.where((word >> 16).to(tl.int32) < dropout[1], 0.0, x)


@triton.jit
def masked_score(s, seen, i: tl.constexpr, key, query, tokens, LAST, MASK, CAUSAL):
    """The score s, in units of log 2, or -inf where the query does not see the key."""
    if MASK == "additive":
        s += seen[i].to(tl.float32) * 1.4426950408889634
    if MASK == "bool":
        s = tl.where(seen[i] != 0, float("-inf"), s)
    if LAST:
        s = tl.where(key < tokens, s, float("-inf"))
    if CAUSAL:
        s = tl.where(key <= query, s, float("-inf"))
    return s


@triton.jit
def load_keys(key, tokens, head_at, mask, D, VEC, KEYS, MASK, DROPOUT, BLOCK):
    """KEYS keys from `key` on, their values and their masks; beyond the end, those of the last key.

    head_at: addresses of the head's keys and values, and distances between tokens. mask: likewise, or None.
    """
    k_at, v_at, ld_k, ld_v = head_at
    ks, vs, seen = (), (), ()
    for i in tl.static_range(KEYS):
        j = tl.minimum(read_token(key, i, KEYS, DROPOUT), tokens - 1)
        ks = ks + (read_head(k_at + j * ld_k, D, VEC, BLOCK),)
        vs = vs + (read_head(v_at + j * ld_v, D, VEC, BLOCK),)
        if MASK != "":
            seen = seen + (tl.load(mask[0] + j * mask[1]),)
    return ks, vs, seen
