"""The modelled times choose entries of the menu, and never other bits for another batch."""

import random
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies as st
from tiny_problems import make_problem, problems

from isogemm.tiny import configs, model
from isogemm.tiny.configs import MENU


def _terms(entry, problem):
    return model.terms(problem, None if entry == "torch" else MENU[entry](problem))


def _fitted(**constants):
    """A model in which every entry takes so many microseconds, whatever the sizes."""
    scaled = {entry.replace("_", " "): times for entry, times in constants.items()}
    counts = {entry: len(_terms(entry, make_problem())) for entry in scaled}
    return tuple((entry, 0, 0, (us, *[0.0] * (counts[entry] - 1))) for entry, us in scaled.items())


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(problem=problems())
def test_model_chooses_the_fastest(problem):
    near = {"torch": 1.0, "registers": 2.0, "dot": 1.5, "whole_parts_w2": 1.2}
    assert configs.fastest(problem, _fitted(**near)) == ""
    assert configs.fastest(problem, _fitted(**near | {"torch": 1.21})) == ""  # within the errors of measurement
    assert configs.fastest(problem, _fitted(**near | {"torch": 1.3})) == "whole parts w2"
    assert configs.fastest(problem, ()) == ""  # an architecture that nobody measured


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(problem=problems(), seed=st.integers(0, 99))
def test_model_keeps_bits_whatever_the_batch(problem, seed):
    """Entries with other bits, and torch, are chosen for all batches or for none."""
    rng = random.Random(seed)
    entries = ("torch", "registers", "dot", "whole parts w1", "whole")
    counts = {entry: len(_terms(entry, make_problem())) for entry in entries}
    fitted = [(entry, 0, 0, [rng.random() ** 8 for _ in range(counts[entry])]) for entry in entries]
    chosen = {configs.fastest(replace(problem, batch=batch), fitted) for batch in (2, 100, 5000, 2**20)}
    assert len({entry and configs.bits(configs.arithmetic(problem), entry) for entry in chosen}) == 1


@pytest.mark.parametrize("entry", ["torch", *MENU])
def test_work_grows_with_the_batch(entry):
    """But for what is done once; so no coefficient can make a larger batch faster."""
    small, large = (_terms(entry, make_problem(batch=batch, dtype="bfloat16")) for batch in (2**17, 2**18))
    assert min(small) >= 0
    assert {after / before for before, after in zip(small, large, strict=True) if before} == {1, 2}
