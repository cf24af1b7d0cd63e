"""Attention's order of sums and its tiles: pure functions of a problem."""

from dataclasses import replace

import pytest

from isogemm.attention import configs
from isogemm.attention.configs import BackwardProblem, Problem, choose, choose_backward, order
from isogemm.core.problems import power_of_two

HEADS = (1, 16, 40, 64, 80, 96, 128, 192, 256)
DECODE = Problem("dense", 1, 1, 8192, 32, 8, 128, 128, "bfloat16", causal=True)
PREFILL = replace(DECODE, queries=8192)


@pytest.mark.parametrize("dtype", configs.DTYPES)
def test_splits_are_whole_blocks(dtype):
    for head in HEADS:
        for value_head in HEADS:
            found = order(head, value_head, dtype)
            assert power_of_two(found.block_n, found.split)
            assert found.split % found.block_n == 0
            assert found.block_n >= 16


def test_the_order_depends_on_heads_and_dtype_alone():
    for changed in (
        {"queries": 7}, {"keys": 100}, {"sequences": 64}, {"heads": 8}, {"causal": False}, {"arch": "sm_80"},
        {"kind": "packed"}, {"softcap": 3.0},
    ):  # fmt: skip
        assert replace(DECODE, **changed).order == DECODE.order


def test_decode_splits_side_by_side():
    assert choose(DECODE).split
    assert choose(DECODE).roles
    assert not choose(PREFILL).split
    elsewhere = replace(DECODE, arch="sm_80")
    assert choose(elsewhere).split
    assert not choose(replace(elsewhere, keys=DECODE.order.split)).split


def test_partial_results_are_bounded():
    for queries in (1, 4, 64, 1000):
        for sequences in (1, 16, 512):
            for keys in (1024, 131072):
                problem = replace(DECODE, queries=queries, sequences=sequences, keys=keys, arch="sm_80")
                config = choose(problem)
                assert not config.split or 4 * configs.partial_elements(problem, config) <= configs.WORKSPACE


@pytest.mark.parametrize("dtype", configs.DTYPES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_a_tile_for_every_problem(arch, dtype):
    for head in HEADS:
        for heads, kv_heads in ((32, 8), (7, 1), (4, 4)):
            for queries in (1, 17, 5000):
                problem = replace(
                    DECODE, queries=queries, heads=heads, kv_heads=kv_heads, head=head, value_head=head, dtype=dtype,
                    arch=arch, precision="ieee" if dtype == "float32" else "",
                )  # fmt: skip
                config = choose(problem)
                assert power_of_two(config.block_m, config.num_warps)
                assert config.block_m >= 16
                tiles = choose_backward(BackwardProblem(replace(problem, lse=True), (0, 0, 0)))
                assert power_of_two(tiles.query.rows, tiles.query.keys, tiles.key.rows, tiles.key.keys)
                assert configs.PADDED_ROWS % tiles.query.rows == 0
                assert tiles.query.rows >= tiles.key.rows


def test_offsets_that_need_64_bits():
    assert not DECODE.wide
    assert replace(DECODE, keys=1 << 20, k_strides=(0, 1 << 12, 128)).wide
    assert replace(PREFILL, q_strides=(0, 1 << 19, 128)).wide


def test_splits_of_a_cache_that_dropped_keys():
    """Its first key may lie inside a split."""
    assert replace(DECODE, placed=(False, False, True)).most_splits == DECODE.most_splits + 1


def test_rows_of_packed_sequences_have_slots():
    """At least as many as their blocks, however the tokens are distributed."""
    problem = replace(PREFILL, kind="packed", sequences=3, queries=100)
    for lengths in ((100, 0, 0), (1, 1, 98), (33, 33, 34)):
        blocks = sum(-(-length * problem.group // 64) for length in lengths)
        assert configs.row_blocks(problem, 64) >= blocks
