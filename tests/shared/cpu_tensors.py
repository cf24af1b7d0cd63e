"""Dtypes of the contract, and tensors on the CPU."""

import torch

from isogemm.verify.inputs import make_data

CONTRACT = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*CONTRACT, torch.float64]
HALVES = [torch.bfloat16, torch.float16]


def normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype)


def integers(*shape, seed=0, dtype=torch.float32):
    """Small whole numbers: their sums of products are exact in every dtype and order, so equal means right."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
