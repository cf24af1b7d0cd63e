"""The contract of attention, on any device: the bits of a query's result depend on its own sequence alone.

`tests/attention/test_contract.py` runs these tests on the CPU and `tests/gpu/test_attention_bits.py` on a GPU. Those
modules give the fixtures `scale` (sizes) and `case` (heads, dtype and options).
"""

import itertools
import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from attention_cases import GARBAGE, RESULTS, Pages, Sequence, alone, attend, attend_packed, offsets, packed, padded

from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import LAYOUTS, with_layout

__all__ = ["AttentionPromises", "Scale"]


class Scale(NamedTuple):
    """The sizes that one device can afford."""

    batches: tuple[int, ...]
    trained_batches: tuple[int, ...]
    everywhere: tuple[int, ...]  # batches at every position of which a sequence is tried
    prompt: int  # tokens
    cuts: range  # where the prompt is cut in two
    random_cuts: int
    decode: int  # tokens of a sequence whose caches are compared with one pass
    decoded: range  # positions that are decoded
    lengths: tuple[int, ...]  # besides those at the case's own boundaries
    page_sizes: tuple[int, ...]


def boundaries(case, scale):
    """Lengths on both sides of each boundary between tiles, blocks and splits."""
    order = case.order()
    at = {order.block_n, 2 * order.block_n, order.split}
    return sorted({length + more for length in at for more in (-1, 0, 1)} | set(scale.lengths))


def assert_same(found, expected, what):
    """Compare the results of some sequences with those of the same sequences."""
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name, x, y in zip(RESULTS, ours, theirs, strict=False):
            assert_bitwise_equal(x, y, f"{what}: {name} of sequence {i}")


def assert_zeros(x, what):
    wrong = int((x != 0).sum())
    assert wrong == 0, f"{what}: {wrong} of {x.numel()} elements are not 0"


def _batched(case, rows, train):
    q, k, v, grad = rows
    return attend(case, q, k, v, grad if train else None)


def _garbage_sequences(sequence, count, seed=0):
    """A batch of `count` sequences of `sequence`'s sizes, each full of one kind of garbage or of ordinary numbers."""
    fills = [*GARBAGE.values(), -torch.inf, None]
    batch = [each[None].repeat(count, 1, 1, 1) for each in sequence]
    for i in range(count):
        fill = fills[(i + seed) % len(fills)]
        for each in batch:
            each[i] = each[i].flip(0) if fill is None else fill
    return Sequence(*batch)


class AttentionPromises:
    # batches

    def test_alone_and_in_batches(self, case, scale):
        """A sequence among others, which are garbage, in batches of every size."""
        needle = case.sequence(37)
        expected = alone(case, needle, train=True)
        for size in scale.batches:
            positions = range(size) if size in scale.everywhere else {0, size // 2, size - 1}
            for position in positions:
                batch = _garbage_sequences(needle, size, position)
                for each, own in zip(batch, needle, strict=True):
                    each[position] = own
                train = size in scale.trained_batches
                found = tuple(x[position] for x in _batched(case, batch, train))
                assert_same([found], [expected], f"{case}: at {position} of {size}")

    def test_again_and_permuted(self, case, scale):
        rows = Sequence(
            *(torch.stack(each) for each in zip(*(case.sequence(70, seed=i) for i in range(7)), strict=True))
        )
        whole = _batched(case, rows, train=True)
        assert_same([_batched(case, rows, train=True)], [whole], f"{case}: again")
        order = torch.tensor([3, 0, 6, 1, 5, 2, 4], device=case.device)
        found = _batched(case, Sequence(*(each[order] for each in rows)), train=True)
        assert_same([found], [tuple(x[order] for x in whole)], f"{case}: permuted")
        for i in range(7):
            own = Sequence(*(each[i] for each in rows))
            assert_same([alone(case, own, train=True)], [tuple(x[i] for x in whole)], f"{case}: sequence {i} alone")

    def test_heads_of_a_group_are_heads(self, case):
        """Queries that share keys have the results of queries with keys of their own."""
        own = case.sequence(130)
        group = case.heads // case.kv_heads
        apart = own._replace(k=own.k.repeat_interleave(group, 0), v=own.v.repeat_interleave(group, 0))
        found = alone(replace(case, kv_heads=case.heads), apart, train=True)
        assert_same([found[:2]], [alone(case, own, train=True)[:2]], f"{case}: heads apart")

    # chunks and caches

    def test_a_prompt_in_chunks(self, case, scale):
        """Cut in two anywhere, and into several: the values, and the gradients of the queries."""
        if not case.causal:
            pytest.skip("a query sees what comes later")
        whole = case.sequence(scale.prompt)
        expected = alone(case, whole)[0]
        for cut in scale.cuts:
            self._assert_chunks(case, whole, [0, cut, scale.prompt], expected)
        for seed in range(scale.random_cuts):
            inner = random.Random(seed).sample(range(1, scale.prompt), 2 + 2 * seed)
            self._assert_chunks(case, whole, [0, *sorted(inner), scale.prompt], expected)
        dq = alone(case, whole, train=True)[1]
        for cut in (1, 64, scale.prompt // 2 + 3):
            last = whole.last_queries(scale.prompt - cut)
            assert_bitwise_equal(alone(case, last, train=True)[1], dq[:, cut:], f"{case}: dq, cut at {cut}")

    def _assert_chunks(self, case, whole, bounds, expected):
        parts = []
        for first, last in itertools.pairwise(bounds):
            part = whole.prefix(last)
            parts.append(alone(case, part._replace(q=part.q[:, first:]))[0])
        assert_bitwise_equal(torch.cat(parts, 1), expected, f"{case}: in chunks {bounds}")

    def test_decode_with_a_growing_cache(self, case, scale):
        whole, expected = self._decoded(case, scale)
        found = []
        for n in scale.decoded:
            part = whole.prefix(n)
            (o,) = attend(case, *(x[None].contiguous() for x in (part.q[:, n - 1 :], part.k, part.v)))
            found.append(o[0])
        assert_bitwise_equal(torch.cat(found, 1), expected, f"{case}: token by token")

    @pytest.mark.parametrize("garbage", ["nan", "large"])
    def test_decode_with_a_static_cache(self, case, scale, garbage):
        """Three sequences in larger buffers, of other lengths each, with garbage behind their ends."""
        whole, _ = self._decoded(case, scale)
        others = [whole, case.sequence(scale.decode, seed=1), case.sequence(scale.decode, seed=2)]
        behind = (0, 1, 65)  # tokens that the others have less
        expected = [alone(case, each)[0] for each in others]
        shape = (len(others), case.kv_heads, scale.decode + 100)
        k, v = (x.new_full((*shape, x.shape[-1]), GARBAGE[garbage]) for x in whole[1:3])
        lengths = torch.zeros(len(others), dtype=torch.int64, device=case.device)
        found, ends = [], [n for n in scale.decoded if n > max(behind)]
        for n in ends:
            for i, each in enumerate(others):
                held = n - behind[i]
                k[i, :, :held], v[i, :, :held] = each.k[:, :held], each.v[:, :held]
                lengths[i] = held
            q = torch.stack([each.q[:, n - less - 1 : n - less] for each, less in zip(others, behind, strict=True)])
            (o,) = attend(case, q, k, v, kv_lengths=lengths)
            found.append(o)
        for i, less in enumerate(behind):
            rows = torch.cat([each[i] for each in found], 1)
            at = [n - less - 1 for n in ends]
            assert_bitwise_equal(rows, expected[i][:, at], f"{case}: sequence {i} of a static cache")

    def test_decode_with_a_sliding_cache(self, case, scale):
        """A cache that holds the last keys only, at the beginning of its buffer, in its middle or at its end."""
        if isinstance(case.window, tuple):
            pytest.skip("caches slide by a window of tokens that came before")
        for window in {case.window} - {None} or {1, 63, 128, 1000}:
            sliding = replace(case, window=window)
            whole, expected = self._decoded(sliding, scale)
            found = []
            for place, n in enumerate(scale.decoded):
                kept = min(n, window + (0, 1, 40)[place % 3])
                before, after = ((0, 0), (5, 3), (64, 0), (0, 70))[place % 4]
                size = before + kept + after
                k, v = (x.new_full((1, x.shape[0], size, x.shape[2]), torch.nan) for x in whole[1:3])
                k[0, :, before : before + kept] = whole.k[:, n - kept : n]
                v[0, :, before : before + kept] = whole.v[:, n - kept : n]
                places = {"kv_starts": [before], "kv_lengths": [before + kept], "kv_offsets": [n - kept]}
                places = {name: torch.tensor(at, device=case.device) for name, at in places.items()}
                found.append(attend(sliding, whole.q[None, :, n - 1 : n], k, v, **places)[0][0])
            assert_bitwise_equal(torch.cat(found, 1), expected, f"{sliding}: from a sliding cache")

    def test_decode_with_a_paged_cache(self, case, scale):
        """One token of each sequence, or several of one, from pages in any order."""
        whole, _ = self._decoded(case, scale)
        others = [whole, case.sequence(scale.decode, seed=1), case.sequence(scale.decode - 70, seed=2)]
        expected = [alone(case, each)[0] for each in others]
        for page_size in scale.page_sizes:
            pages = Pages.of(case, others, page_size, seed=page_size)
            found = [[] for _ in others]
            for n in scale.decoded:
                lengths = [min(n + more, each.keys) for each, more in zip(others, (0, 3, 1), strict=True)]
                counts = [1, min(3, lengths[1]), 1]
                queries = [x.q[:, n - t : n] for x, n, t in zip(others, lengths, counts, strict=True)]
                for i, o in enumerate(pages.attend(case, queries, lengths)):
                    same = expected[i][:, lengths[i] - counts[i] : lengths[i]]
                    found[i].append((o, same))
            for i, rows in enumerate(found):
                ours, theirs = (torch.cat(each, 1) for each in zip(*rows, strict=True))
                assert_bitwise_equal(ours, theirs, f"{case}: sequence {i} in pages of {page_size}")

    def test_pages_that_sequences_share(self, case, scale):
        """A common beginning in the same pages; and one sequence twice."""
        if not case.causal:
            pytest.skip("a query sees what comes later")
        size, shared = scale.page_sizes[0], 3
        first, second = (case.sequence(scale.decode, seed=i) for i in (3, 4))
        k, v = (torch.cat([a[:, : shared * size], b[:, shared * size :]], 1) for a, b in zip(first[1:3], second[1:3]))  # noqa: B905
        second = second._replace(k=k, v=v)
        pages = Pages.of(case, [first, second], size)
        table = pages.table[[0, 1, 0]].clone()
        table[1, :shared] = table[0, :shared]
        found = pages._replace(table=table).attend(case, [first.q, second.q, first.q], [scale.decode] * 3)
        expected = [alone(case, each)[0] for each in (first, second, first)]
        assert_same([(o,) for o in found], [(o,) for o in expected], f"{case}: shared pages")

    def test_pages_that_were_dropped(self, case, scale):
        if not isinstance(case.window, int):
            pytest.skip("without a window every key is needed")
        size = scale.page_sizes[0]
        whole, _ = self._decoded(case, scale)
        expected, queries = alone(case, whole)[0], 5
        dropped = (scale.decode - queries - case.window) // size * size
        assert dropped > 0
        kept = whole._replace(k=whole.k[:, dropped:], v=whole.v[:, dropped:])
        at = torch.tensor([dropped, dropped], dtype=torch.int32, device=case.device)
        pages = Pages.of(case, [kept, kept], size)
        found = pages.attend(case, [whole.q[:, -queries:]] * 2, [kept.keys] * 2, kv_offsets=at)
        for o in found:
            assert_bitwise_equal(o, expected[:, -queries:], f"{case}: {dropped} keys in pages that were dropped")

    def test_gradients_where_keys_were_dropped(self, case, scale):
        """The last queries of a sequence, whose keys before all their windows are there or not."""
        window, queries, dropped = 63, 40, 70
        sliding = replace(case, causal=True, window=window)
        own = case.sequence(window + queries + dropped + 5, queries)
        expected = alone(sliding, own, train=True)
        q, k, v, grad = (x[None] for x in own)
        k, v = k[:, :, dropped:], v[:, :, dropped:]
        at = torch.tensor([dropped], device=case.device)
        found = attend(sliding, q, k, v, grad, kv_offsets=at)
        same = [x[:, dropped:] if name in ("dk", "dv") else x for name, x in zip(RESULTS, expected, strict=True)]
        assert_same([tuple(x[0] for x in found)], [same], f"{sliding}: {dropped} keys dropped")
        for name, x in zip(RESULTS[2:], expected[2:], strict=True):
            assert_zeros(x[:, :dropped], f"{sliding}: {name} of keys that no query sees")

    def test_more_queries_than_keys(self, case, scale):
        """Queries of another sequence: not causal, each sees every key, alone, padded and packed."""
        full = replace(case, causal=False, window=None)
        sequences = [full.sequence(keys, 130, seed=keys) for keys in (70, 1, 129)]
        expected = [alone(full, each, train=True) for each in sequences]
        assert_same(packed(full, sequences, train=True), expected, f"{full}: packed")
        k, v = (x.new_full((3, x.shape[0], 140, x.shape[2]), torch.nan) for x in sequences[0][1:3])
        for i, each in enumerate(sequences):
            k[i, :, : each.keys], v[i, :, : each.keys] = each.k, each.v
        q, grad = (torch.stack(each) for each in list(zip(*sequences, strict=True))[::3])
        lengths = torch.tensor([each.keys for each in sequences], device=case.device)
        found = attend(full, q, k, v, grad, kv_lengths=lengths)
        for i, each in enumerate(sequences):
            own = [x[i, :, : each.keys] if n > 1 else x[i] for n, x in enumerate(found)]
            assert_same([own], expected[i : i + 1], f"{full}: {each.keys} keys in a buffer")

    def test_one_query_sees_all_keys_causal_or_not(self, case, scale):
        own = case.sequence(333, 1)
        plain = replace(case, causal=False, window=None)
        same = alone(plain, own, train=True)
        assert_same([alone(replace(plain, causal=True), own, train=True)], [same], f"{case}: one query")

    def _decoded(self, case, scale):
        """A sequence, and the rows of its one pass that are decoded."""
        if not case.causal:
            pytest.skip("a query sees what comes later")
        whole = case.sequence(scale.decode)
        return whole, alone(case, whole)[0][:, [n - 1 for n in scale.decoded]]

    # padding, packing and lengths

    def test_padding_and_packing(self, case, scale):
        """Left, right and no padding, packed in any order: values and gradients."""
        lengths = (70, 1, 129, 3, 64, 17)
        sequences = [case.sequence(length, seed=i) for i, length in enumerate(lengths)]
        expected = [alone(case, each, train=True) for each in sequences]
        for side, spare, garbage, index in (
            ("left", 0, "nan", torch.int32), ("left", 60, "inf", torch.int64), ("right", 0, "nan", torch.int64),
            ("right", 130, "large", torch.int32), ("inside", 31, "inf", torch.int32),
        ):  # fmt: skip
            found = padded(case, sequences, side=side, spare=spare, garbage=garbage, train=True, index=index)
            assert_same(found, expected, f"{case}: {side}, {spare} more, {garbage}")
        for seed in range(3):
            order = random.Random(seed).sample(range(len(lengths)), len(lengths))
            found = packed(case, [sequences[i] for i in order], train=True)
            assert_same(found, [expected[i] for i in order], f"{case}: packed as {order}")

    def test_last_queries_padded_and_packed(self, case, scale):
        """Fewer queries than keys: chunks of several sequences in one call, with gradients."""
        lengths = (70, 5, 129, 64)
        sequences = [case.sequence(length, 5, seed=i) for i, length in enumerate(lengths)]
        expected = [alone(case, each, train=True) for each in sequences]
        for side in ("left", "right", "inside"):
            found = padded(case, sequences, side=side, spare=9, train=True)
            assert_same(found, expected, f"{case}: {side}")
        assert_same(packed(case, sequences, train=True), expected, f"{case}: packed")

    def test_every_boundary_of_lengths(self, case, scale):
        """Lengths around blocks and splits: packed, padded and, where causal, as the beginning of a longer one."""
        lengths = boundaries(case, scale)
        whole = case.sequence(max(lengths))
        sequences = [whole.prefix(length) for length in lengths]
        expected = [alone(case, each, train=True) for each in sequences]
        assert_same(packed(case, sequences, train=True), expected, f"{case}: packed {lengths}")
        few = slice(len(lengths) // 2, None, 2)
        found = padded(case, sequences[few], side="left", spare=7, train=True)
        assert_same(found, expected[few], f"{case}: padded {lengths[few]}")
        if case.causal:
            for length, (o, *_) in zip(lengths, expected, strict=True):
                assert_bitwise_equal(o, expected[-1][0][:, :length], f"{case}: the first {length} tokens")

    def test_empty_sequences_among_others(self, case, scale):
        sizes = ((70, 70), (0, 0), (5, 0), (33, 3), (0, 0), (70, 70), (0, 0))  # keys, queries
        sequences = [case.sequence(*each, seed=i) for i, each in enumerate(sizes)]
        found = packed(case, sequences, train=True)
        for i, each in enumerate(sequences):
            if each.queries and each.keys:
                assert_same(found[i : i + 1], [alone(case, each, train=True)], f"{case}: sequence {i} of {sizes}")
        for name, x in zip(RESULTS[2:], found[2][2:], strict=True):
            assert_zeros(x, f"{case}: {name} of keys that nobody asked")

    def test_queries_without_keys(self, case, scale):
        """Zeros, and no gradient: more queries than keys, and a sequence that has none."""
        own = case.sequence(20)
        more = case.sequence(20, 29, seed=1)
        q, grad = (torch.cat([other[:, :9], x], 1) for other, x in zip(more[::3], (own.q, own.grad), strict=True))
        batch = [torch.stack([x, x]) for x in (q, own.k, own.v, grad)]
        lengths = torch.tensor([20, 0], device=case.device)
        places = {"kv_lengths": lengths, "kv_starts": torch.zeros_like(lengths)}
        found = attend(case, *batch, **places)
        expected = alone(case, own, train=True)
        for name, x, same in zip(RESULTS, found, expected, strict=True):
            assert_zeros(x[1], f"{case}: {name} of a sequence without keys")
            x, rest = (x[0, :, 9:], x[0, :, :9]) if name in ("o", "dq") else (x[0], x[0, :, :0])
            assert_bitwise_equal(x, same, f"{case}: {name}")
            assert_zeros(rest, f"{case}: {name} of queries before the first key")
        one = Sequence(q[:, 12:], own.k[:, :0], own.v[:, :0], grad[:, 12:])
        counts = offsets([17, 20], case.device), offsets([0, 20], case.device)
        tokens = [torch.cat([a, b], 1).transpose(0, 1) for a, b in zip(one, own, strict=True)]
        found = attend_packed(case, *tokens[:3], *counts, tokens[3])
        for name, x, same in zip(RESULTS, found, expected, strict=True):
            x = x.transpose(0, 1)
            at = 17 if name in ("o", "dq") else 0
            assert_bitwise_equal(x[:, at:], same, f"{case}: packed, {name}")
            assert_zeros(x[:, :at], f"{case}: packed, {name} without keys")

    # options

    def test_windows(self, case, scale):
        """A window longer than the sequence is none; one of W tokens is the tokens W - 1 before and none after."""
        own = case.sequence(200)
        whole = alone(replace(case, window=None), own, train=True)
        for window in (200, 1000) if case.causal else ((199, 199), (None, 1000)):
            found = alone(replace(case, window=window), own, train=True)
            assert_same([found], [whole], f"{case}: window {window} of 200 tokens")
        for size in (1, 63, 128):
            one = alone(replace(case, causal=True, window=size), own, train=True)
            for causal in (True, False):
                found = alone(replace(case, causal=causal, window=(size - 1, 0)), own, train=True)
                assert_same([found], [one], f"{case}: window {size}")
            found = padded(replace(case, causal=True, window=size), [own, own.prefix(70)], side="left", train=True)
            assert_same(found[:1], [one], f"{case}: window {size}, padded")

    def test_sinks_of_no_weight(self, case, scale):
        own = case.sequence(70)
        nothing = torch.full((case.heads,), -torch.inf, dtype=case.dtype, device=case.device)
        q, k, v, grad = (x[None] for x in own)
        plain = alone(replace(case, sinks=False), own, train=True)
        found = attend(case, q, k, v, grad, sinks=nothing)
        assert_same([tuple(x[0] for x in found)], [plain], f"{case}: sinks of -inf")

    def test_bool_masks(self, case, scale):
        """A mask that says what `causal`, a window or lengths do has their bits, in every shape it may come in."""
        own = case.sequence(150)
        q, k, v, grad = (x[None].repeat(2, 1, 1, 1) for x in own)
        plain = replace(case, causal=False, window=None)
        i = torch.arange(150, device=case.device)
        causal = i[:, None] >= i
        lengths = torch.tensor([150, 97], device=case.device)
        behind = i < lengths[:, None]
        expected = attend(replace(plain, causal=True), q, k, v, grad)
        for mask in (
            causal[None, None],
            causal.expand(2, 1, -1, -1),
            causal.expand(1, case.heads, -1, -1).contiguous(),
        ):
            found = attend(plain, q, k, v, grad, attn_mask=mask)
            assert_same([found], [expected], f"{case}: a causal mask of shape {list(mask.shape)}")
        found = attend(plain, q, k, v, grad, attn_mask=(causal & (i[:, None] - i < 63))[None, None])
        assert_same([found], [attend(replace(plain, causal=True, window=63), q, k, v, grad)], f"{case}: a window")
        found = attend(plain, q, k, v, grad, attn_mask=behind[:, None, None])
        for n in range(2):
            one = attend(plain, *(x[None] for x in own), attn_mask=behind[n : n + 1, None, None])
            same = [tuple(x[n : n + 1] for x in found)]
            assert_same([one], same, f"{case}: sequence {n}, masked")
        seen = attend(plain, own.q[None, :, 53:], own.k[None, :, :97], own.v[None, :, :97])[0]
        found = attend(plain, own.q[None, :, 53:], own.k[None], own.v[None], attn_mask=behind[1:, None, None])[0]
        assert_bitwise_equal(found, seen, f"{case}: keys that a mask leaves out")

    @pytest.mark.parametrize("kind", ["bool", "floating"])
    def test_rows_that_a_mask_leaves_out(self, case, scale, kind):
        """Zeros and no gradient, and nothing of theirs in the other rows' gradients."""
        own = case.sequence(70)
        q, k, v, grad = (x[None] for x in own)
        rows = torch.zeros(70, dtype=torch.bool, device=case.device)
        rows[[0, 5, 33, 69]] = True

        def mask_of(left_out):
            mask = ~left_out.expand(70, 70).mT[None, None]
            return mask if kind == "bool" else torch.zeros_like(mask, dtype=case.dtype).masked_fill(~mask, -torch.inf)

        found = attend(case, q, k, v, grad, attn_mask=mask_of(rows))
        for name, x in zip(RESULTS[:2], found, strict=False):
            x = x[:, :, rows]
            assert_zeros(x, f"{case}: {name} of rows that see nothing")
        assert all(bool(x.isfinite().all()) for x in found), f"{case}: rows that see nothing spoil others"
        other, other_grad = q.clone(), grad.clone()
        other[:, :, rows], other_grad[:, :, rows] = 3.0, -2.0
        again = attend(case, other, k, v, other_grad, attn_mask=mask_of(rows))
        assert_same([again], [found], f"{case}: rows that see nothing hold other numbers")
        none = attend(case, q, k, v, grad, attn_mask=mask_of(torch.ones_like(rows)))
        for name, x in zip(RESULTS, none, strict=True):
            assert_zeros(x, f"{case}: {name} where all is left out")

    def test_floating_masks(self, case, scale):
        """In every shape, expanded or not, alone and in a batch."""
        own = case.sequence(70)
        q, k, v, grad = (x[None].repeat(3, 1, 1, 1) for x in own)
        for shape in ((1, 1, 70, 70), (3, 1, 1, 70), (1, case.heads, 70, 1), (3, case.heads, 70, 70)):
            mask = case.data(*shape, seed=5)
            found = attend(case, q, k, v, grad, attn_mask=mask)
            wide = mask.expand(3, case.heads, 70, 70)
            for layout in (wide, wide.contiguous(), wide.mT.contiguous().mT):
                assert_same([attend(case, q, k, v, grad, attn_mask=layout)], [found], f"{case}: a mask of {shape}")
            one = attend(case, *(x[1:2] for x in (q, k, v, grad)), attn_mask=wide[1:2])
            assert_same([one], [tuple(x[1:2] for x in found)], f"{case}: alone, with a mask of {shape}")

    # memory

    def test_strides(self, case, scale):
        """Any layout has the same bits, and the result lies in memory as the queries do."""
        batch = [torch.stack([a, b]) for a, b in zip(case.sequence(70), case.sequence(70, seed=1), strict=True)]
        expected = _batched(case, batch, train=True)
        for layout in LAYOUTS:
            views = [with_layout(x, layout) for x in batch]
            assert_same([_batched(case, views, train=True)], [expected], f"{case}: {layout}")
        transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in batch]
        found = _batched(case, transposed, train=True)
        assert_same([found], [expected], f"{case}: [B, T, H, D]")
        assert found[0].transpose(1, 2).is_contiguous()
        assert expected[0].is_contiguous()
        together = torch.cat([x.transpose(1, 2).flatten(2) for x in batch[:3]], 2)  # as one projection gives them
        sizes = [x.shape[1] * x.shape[3] for x in batch[:3]]
        views = [
            part.unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)
            for part, x in zip(together.split(sizes, 2), batch[:3], strict=True)
        ]
        assert_same([_batched(case, [*views, batch[3]], train=True)], [expected], f"{case}: views of one tensor")
        shared = Sequence(*(x[:1].expand(3, -1, -1, -1) for x in batch))
        for i in range(3):
            same = [tuple(x[0] for x in expected)]
            assert_same([tuple(x[i] for x in _batched(case, shared, train=True))], same, f"{case}: expanded, {i}")
