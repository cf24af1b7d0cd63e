"""What `isogemm verify --family tiny` tries: the tiny kernels, on a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from isogemm.core import tables
from isogemm.core.dispatch import dispatch_log
from isogemm.core.precision import of_cuda_products
from isogemm.gemm import reference
from isogemm.tiny import configs, op
from isogemm.tiny.api import bmm
from isogemm.tiny.configs import Config, DotConfig, Problem, WholeConfig
from isogemm.verify.checks import Check
from isogemm.verify.compare import BitDiff, compare_bits
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import DATA_KINDS, make_operands
from isogemm.verify.poison import poisoned_allocations
from isogemm.verify.trials import other_work


class Setting:
    """A random problem, made from the seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device, self.rng = seed, device, random.Random(seed)
        choose = self.rng.choice
        self.m, self.n, self.k = (choose((1, 3, 5, 8, 12, 16, 17, 31, 32, 42, 48, 63, 64)) for _ in range(3))
        self.dtype = choose((torch.float32, torch.float32, torch.float16, torch.bfloat16))
        self.precision = choose(("ieee", "tf32", "tf32x3")) if self.dtype is torch.float32 else ""
        self.layout = choose(("nn", "nt", "tn", "tt"))

    def operands(self, batch: int, kind: str = "") -> tuple[Tensor, Tensor]:
        """A [batch, m, k] and B [batch, k, n] of this kind of data, a random one by default."""
        shapes = (batch, self.m, self.k), (batch, self.k, self.n)
        kind = kind or self.rng.choice(DATA_KINDS)
        made = make_operands(kind, *shapes, seed=self.seed, dtype=self.dtype, device=self.device)
        a, b = (x.mT.contiguous().mT if letter == "t" else x for x, letter in zip(made, self.layout, strict=True))
        return a, b


def _products(a: Tensor, b: Tensor, precision: str) -> dict[str, Tensor]:
    """The results of each kernel, whatever the gate says, and of the public call if a tiny kernel serves it."""
    problem = op.problem_of(a, b, precision)
    products = {kernel: _product(a, b, problem, configs.choose(problem, kernel)) for kernel in configs.KERNELS}
    with dispatch_log() as log:
        public = bmm(a, b, precision=precision or None)
    return products | {"bmm": public} if log[0].path == "tiny" else products


def _product(a: Tensor, b: Tensor, problem: Problem, config: Config) -> Tensor:
    from isogemm.tiny import kernels

    out = torch.empty((problem.batch, problem.m, problem.n), dtype=a.dtype, device=a.device)
    with torch.cuda.device(a.device):
        kernels.launch_bmm(out, a, b, problem, config)
    return out


def _batch_invariance(each: Setting) -> Iterator[BitDiff]:
    batch = each.rng.choice((3, 37, 1000, 65536))
    a, b = each.operands(batch)
    at = each.rng.randrange(batch - 1)
    alone = _products(a[at : at + 2], b[at : at + 2], each.precision)
    for way, whole in _products(a, b, each.precision).items():
        yield compare_bits(alone[way], whole[at : at + 2])


def _run_to_run(each: Setting) -> Iterator[BitDiff]:
    a, b = each.operands(4096, "normal")
    first = _products(a, b, each.precision)
    with other_work(each.device):
        for _ in range(3):
            for way, again in _products(a, b, each.precision).items():
                yield compare_bits(again, first[way])


def _any_tile(each: Setting) -> Iterator[BitDiff]:
    a, b = each.operands(64)
    problem = op.problem_of(a, b, each.precision)
    canonical = _products(a, b, each.precision)
    for kernel in configs.KERNELS:
        configurations = variants(configs.choose(problem, kernel))
        others = [config for config in configurations if not configs.illegal(problem, config)]
        for config in each.rng.sample(others, min(2, len(others))):
            yield compare_bits(_product(a, b, problem, config), canonical[kernel])
    if tables.measured("tiny", problem.arch):  # there the gate may change kernels
        yield compare_bits(canonical["whole"], canonical["dot"])
        if each.precision == "ieee":
            yield compare_bits(canonical["registers"], canonical["dot"])


def variants(config: Config) -> list[Config]:
    """Configurations of the same kernel that must give the same bits."""
    if isinstance(config, DotConfig):
        return [
            replace(config, block_m=bm, block_n=bn, block_k=bk, num_warps=warps, num_stages=stages)
            for bm in (16, 32)
            for bn in (8, 16, 32)
            for bk in (16, 32, 64)
            for warps, stages in ((1, 1), (2, 3), (4, 2))
        ]
    if isinstance(config, WholeConfig):
        return [
            replace(config, unit_m=unit_m, unit_n=unit_n, block_k=block_k, matrices=matrices, num_warps=warps)
            for unit_m, unit_n in ((16, 8), (16, 16), (32, 32))
            for block_k in (16, 64)
            for matrices, warps in ((1, 1), (1, 4), (4, 2))
        ]
    return [
        replace(config, rows=rows, cols=cols, vec=vec, b_vec=b_vec, unroll=unroll, num_warps=warps)
        for rows in (1, 2, 4)
        for cols in (1, 2)
        for vec, b_vec in ((1, 1), (config.vec, config.b_vec))
        for unroll in (4, 8)
        for warps in (1, 4)
    ]


def _accuracy(each: Setting) -> Iterator[BitDiff]:
    """Raises where a result is not accurate; there are no bits to compare."""
    largest_errors(*each.operands(50), each.precision)
    yield from ()


def largest_errors(a: Tensor, b: Tensor, precision: str) -> dict[str, float]:
    """The largest errors of "isogemm" and "torch" in units of |A| |B|; raises where isogemm's exceeds its bound.

    The product is of the whole batch, on poisoned memory; its first and last matrices are compared.
    """
    with poisoned_allocations():
        whole = bmm(a, b, precision=precision or None)
    errors = {"isogemm": 0.0, "torch": 0.0}
    for part in (slice(0, 128), slice(-128, None)):
        x, y, ours = a[part], b[part], whole[part]
        # cuBLAS takes TF32 or not as it likes; the exact product of rounded operands is TF32's own error.
        if precision == "tf32":
            torchs = reference.matmul(reference.round_to_tf32(x), reference.round_to_tf32(y)).float()
        else:
            with of_cuda_products(precision or None):
                torchs = torch.bmm(x, y)
        found = assert_no_worse_than_torch(ours, torchs, reference.matmul(x, y), scale=reference.matmul_scale(x, y))
        for name, error in zip(errors, found, strict=True):
            errors[name] = max(errors[name], error)
    return errors


_check = partial(Check, Setting, gpu_only="not on a GPU: torch.bmm serves, which promises nothing about bits")

CHECKS = (
    _check(
        "batch invariance", "a matrix has the same bits in any batch, at any position", _batch_invariance,
        "batch 2 in 3 .. 65536, any position",
    ),
    _check(
        "run to run", "a call has the same bits every time", _run_to_run, "4 runs, other work beside"
    ),
    _check(
        "any tile", "every configuration of a kernel gives the same bits", _any_tile,
        "two other tiles of each kernel; in ieee, both kernels",
    ),
    _check(
        "accuracy", "the error is at most twice torch's and one ulp", _accuracy,
        "twice torch's error and one ulp, against fp64",
    ),
)  # fmt: skip
