"""The dropout generator: philox's known answers, masks that no shape changes, statistics."""

import itertools
import math

import pytest
import torch

from isogemm.epilogues import random

# The generator, written again from its definition (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").


def _philox(counter, key, rounds=10):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & 0xFFFFFFFF, (left >> 32) ^ c3 ^ k1, left & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [  # of philox4x32-10: counter, key, words
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _bits(seed, row, column):
    """The 16 bits of an element: 8 columns that agree but for bits 0, 3 and 4 share a counter."""
    group = (column >> 5 << 2) + (column >> 1 & 3)
    words = _philox((group, row, 0, 0), (seed & ONES, seed >> 32 & ONES))
    return words[column >> 3 & 3] >> (16 if column & 1 else 0) & 0xFFFF


def _seed(value):
    return torch.tensor([value], dtype=torch.int64)


SEEDS = [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 0x299F31D0A4093822]


@pytest.mark.parametrize("case", KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(case):
    counter, key, words = case
    assert _philox(counter, key) == words


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_are_philox(seed):
    rows, columns, p = 3, 70, 0.3
    dropped = round(p * 2**16)
    expected = torch.tensor([[_bits(seed, row, col) >= dropped for col in range(columns)] for row in range(rows)])
    assert torch.equal(random.kept(_seed(seed), rows, columns, p), expected)


def _weight_bits(seed, matrix, query, key):
    """The 16 bits of a weight: two queries and two keys that agree but for bit 3 share a counter."""
    groups = [(token >> 4 << 3) + (token & 7) for token in (key, query)]
    words = _philox((*groups, matrix, 0), (seed & ONES, seed >> 32 & ONES))
    return words[(query >> 3 & 1) * 2 + (key >> 3 & 1)] >> 16


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("first", "tokens"), [(0, 17), (5, 9), (2**31 - 1, 3)])
def test_masks_of_weights_are_philox(seed, first, tokens):
    p, numbers = 0.3, range(tokens)
    expected = torch.tensor(
        [
            [[_weight_bits(seed, matrix, query, key) >= round(p * 2**16) for key in numbers] for query in numbers]
            for matrix in (first, first + 1)
        ]
    )
    assert torch.equal(random.kept_weights(_seed(seed), 2, tokens, p, first), expected)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_statistics_of_weights(p):
    kept = random.kept_weights(_seed(4321), 400, 50, p).double()
    for axes in ((0, 1, 2), (1, 2), (0, 1), (0, 2)):
        rate, count = kept.mean(axes), math.prod(kept.shape[axis] for axis in axes)
        assert float((rate - (1 - p)).abs().max()) < 5 * math.sqrt(p * (1 - p) / count)


def test_masks_do_not_follow_the_shape():
    whole = random.kept(_seed(5), 300, 200, 0.5)
    for rows, columns in ((1, 1), (17, 65), (300, 3), (2, 200), (0, 5), (5, 0)):
        assert torch.equal(random.kept(_seed(5), rows, columns, 0.5), whole[:rows, :columns])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_statistics(p):
    rows, columns = 1024, 1000
    kept = random.kept(_seed(1234), rows, columns, p).double()
    for axis, count in ((None, rows * columns), (0, rows), (1, columns)):
        rate = kept.mean() if axis is None else kept.mean(axis)
        sigma = math.sqrt(p * (1 - p) / count)
        # Five sigma of one draw; of a thousand, the largest stays below.
        assert float((rate - (1 - p)).abs().max()) < 5 * sigma
        if axis is not None:
            assert 0.85 < float(rate.std()) / sigma < 1.15


def _correlation(a, b):
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])


def test_elements_are_independent():
    """Independent of their neighbours at every distance that shares a counter or a word, and of other seeds."""
    kept = random.kept(_seed(99), 512, 512, 0.5)
    bound = 5 / math.sqrt(kept.numel())
    for distance in (1, 2, 4, 8, 16, 24, 32, 33):
        assert abs(_correlation(kept[:, distance:], kept[:, :-distance])) < bound, f"columns {distance} apart"
        assert abs(_correlation(kept[distance:], kept[:-distance])) < bound, f"rows {distance} apart"
    for seed in (98, 100, 99 + 2**32, -99):
        assert abs(_correlation(kept, random.kept(_seed(seed), 512, 512, 0.5))) < bound, f"seed {seed}"
    assert abs(_correlation(kept, kept.T)) < bound


def test_ends_of_the_probability():
    assert bool(random.kept(_seed(3), 64, 64, 0.0).all())
    assert not bool(random.kept(_seed(3), 64, 64, 1.0).any())
    assert random.scale(0.0) == 1
    assert random.scale(1.0) == 0


@pytest.mark.parametrize("p", [1e-9, 0.1, 1 / 3, 0.5, 0.75, 0.9999])
def test_scale_keeps_the_mean(p):
    """Exactly, for the probability as it is rounded; and that is near."""
    share = 1 - random.threshold(p) / random.LEVELS
    assert share * random.scale(p) == pytest.approx(1, abs=1e-15)
    assert abs(share - (1 - p)) <= 0.5 / random.LEVELS


def test_fewer_are_kept_as_p_grows():
    """One draw per element: what a p drops, a larger one does too."""
    masks = [random.kept(_seed(8), 40, 40, p) for p in (0.0, 0.2, 0.5, 0.7, 1.0)]
    for more, fewer in itertools.pairwise(masks):
        assert not bool((fewer & ~more).any())
        assert int(fewer.sum()) < int(more.sum())
