"""Pieces of memory, against a list of all that was added."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from isogemm.fusion.memory import Pieces, memory_of

memories = st.tuples(st.integers(-20, 60), st.integers(1, 12)).map(lambda each: (each[0], each[0] + each[1]))


def _overlap(one, other):
    return one[0] < other[1] and other[0] < one[1]


@given(st.lists(memories, max_size=20), st.lists(memories, min_size=1, max_size=5))
def test_notes_on_what_overlaps(added, asked):
    pieces = Pieces((each, number) for number, each in enumerate(added))
    for memory in asked:
        found = list(pieces.on(memory))
        assert len(found) == len(set(found))
        assert {number for number, each in enumerate(added) if _overlap(each, memory)} <= set(found)
        assert pieces.overlap(memory) == any(_overlap(each, memory) for each in added) == bool(found)
    assert sorted(note for notes in pieces.notes for note in notes) == list(range(len(added)))
    assert pieces._starts == sorted(pieces._starts)
    assert all(end <= start for end, start in zip(pieces._ends, pieces._starts[1:], strict=False))


def test_memory_that_is_apart_stays_apart():
    pieces = Pieces([((0, 8), "a"), ((8, 16), "b"), ((24, 32), "c")])
    assert [list(pieces.on(each)) for each in ((0, 1), (7, 9), (16, 24), (31, 99))] == [["a"], ["a", "b"], [], ["c"]]


def test_what_has_no_memory():
    """Empty tensors count as one: two views of one that is resized must. Others have their own."""
    empty, lazy = torch.empty(0, 4), torch.nn.LazyLinear(4).weight
    assert memory_of(empty) == memory_of(torch.empty(3, 0)) != memory_of(lazy)
    assert memory_of(lazy) != memory_of(torch.sparse_coo_tensor(size=(2, 2)))
    assert Pieces([(memory_of(empty), 1)]).overlap(memory_of(empty[:0]))
