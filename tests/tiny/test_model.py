"""The modelled times choose entries of the menu, and never other bits for another batch."""

import math
import random
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies as st
from tiny_problems import make_problem, problems

from isogemm.tiny import configs, model


def _fitted(**constants):
    """A model in which every entry takes so many times the least time, whatever the sizes."""
    count = len(model.features(make_problem(), "nn"))
    scaled = {entry.replace("_", " "): math.log(times) for entry, times in constants.items()}
    ones = [float(at in (0, count // 2)) for at in range(count)]
    return tuple((entry, 0, 0, tuple(level * one for one in ones)) for entry, level in scaled.items())


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(problem=problems())
def test_model_chooses_the_fastest(problem):
    near = {"torch": 1.0, "registers": 2.0, "dot": 1.5, "whole_parts_w2": 1.2}
    assert configs.fastest(problem, _fitted(**near)) == ""
    assert configs.fastest(problem, _fitted(**near | {"torch": 1.21})) == ""  # within the errors of measurement
    assert configs.fastest(problem, _fitted(**near | {"torch": 1.3})) == "whole parts w2"
    assert model.predicted(problem, problem.layout, _fitted(dot=3.0)[0][3]) == pytest.approx(3 * model.base(problem))


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(problem=problems(), seed=st.integers(0, 99))
def test_model_keeps_bits_whatever_the_batch(problem, seed):
    """Entries with other bits, and torch, are chosen for all batches or for none."""
    rng, count = random.Random(seed), len(model.features(problem, "nn"))
    entries = ("torch", "registers", "dot", "whole parts w1", "whole packed w4")
    fitted = [(entry, 0, 0, [rng.gauss(0, 0.3) for _ in range(count)]) for entry in entries]
    chosen = {configs.fastest(replace(problem, batch=batch), fitted) for batch in (2, 100, 5000, 2**20)}
    groups = {entry and (entry.startswith("registers") and configs.arithmetic(problem) != "ieee") for entry in chosen}
    assert len(groups) == 1
    assert len({bool(entry) for entry in chosen}) == 1
