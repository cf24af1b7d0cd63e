"""The layer out of the library's own products, the norm and the attention: any size, under the same contract."""

from __future__ import annotations

import math

from isogemm.gemm import configs


def chunk(tokens: int, d_model: int, dim_feedforward: int, dtype: str) -> int:
    """Sequences of one sum in the parameters' gradients: the fewest that all weights' chunks divide the tokens of."""
    weights = ((3 * d_model, d_model), (dim_feedforward, d_model), (d_model, dim_feedforward))
    widest = max(configs.token_chunk(n, k, dtype) for n, k in weights)
    return widest // math.gcd(widest, tokens)
