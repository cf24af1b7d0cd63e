"""How logits are cut: a bounded workspace, and cuts that no sum crosses."""

import pytest

from isogemm.gemm.configs import BIAS_CHUNK, token_chunk
from isogemm.loss import configs
from isogemm.loss.configs import How

VOCABULARIES = (1, 1000, 50257, 128256, 262144)
TOKENS = (1, 17, 1024, 4096, 5000, 8192, 100_000)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_blocks_are_bounded_and_hold_whole_sums(tokens, vocabulary):
    blocks = configs.gpu_blocks(tokens, vocabulary)
    assert blocks.tokens * blocks.columns <= max(configs.LOGITS, configs.MOST_TOKENS * configs.HIDDEN_CHUNK)
    assert blocks.columns == vocabulary or blocks.columns % configs.HIDDEN_CHUNK == 0
    assert blocks.columns == vocabulary or blocks.columns % configs.BLOCK == 0
    assert blocks.tokens == tokens or blocks.tokens % token_chunk(vocabulary, 4096, "bfloat16") == 0
    of_cpu, gradient = configs.cpu_blocks(tokens, vocabulary), configs.cpu_gradient_blocks(tokens, vocabulary)
    assert of_cpu.tokens * of_cpu.columns <= max(configs.CPU_LOGITS, vocabulary)
    assert of_cpu.columns == vocabulary
    assert gradient.columns == configs.cpu_gradient_blocks(1, vocabulary).columns
    assert gradient.tokens == tokens or gradient.tokens % token_chunk(vocabulary, 4096, "bfloat16") == 0


def test_chunks_of_biases_divide_blocks():
    assert configs.MOST_TOKENS % BIAS_CHUNK == configs.CPU_TOKENS % BIAS_CHUNK == 0


def test_spans_cover_everything_once():
    assert list(configs.spans(10, 4)) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert list(configs.spans(0, 4)) == []


def test_counts_of_values():
    assert How().value_count == 1
    assert How(entropy=True, mean=True, lse=True).value_count == 4
