"""What `isogemm verify --family attention` tries: a sequence has the same bits however it is batched and cached."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isogemm.attention import configs, op, reference
from isogemm.attention.api import attention, attention_varlen
from isogemm.attention.configs import Config, Problem
from isogemm.attention.describe import Call, problem_of
from isogemm.verify import trials
from isogemm.verify.checks import NO_TILES, Check
from isogemm.verify.compare import BitDiff, compare_bits
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data
from isogemm.verify.precision import fp32_precision
from isogemm.verify.trials import other_work, same

NUMBERS = (("bfloat16", ""), ("float16", ""), ("float32", "ieee"), ("float32", "tf32"))
HEADS = ((8, 2), (4, 4), (7, 1), (6, 3))  # of queries, and of keys
SIZES = ((64, 64), (128, 128), (16, 16), (40, 40), (80, 96), (192, 128), (256, 256), (24, 8))  # D, DV
EDGES = (1, 2, 17, 63, 64, 65, 127, 128, 129)  # lengths around blocks
GPU_EDGES = (511, 512, 513, 1023, 1024, 1025)  # and around splits

Triple = tuple[Tensor, Tensor, Tensor]  # q [H, n, D], k [Hkv, n, D], v [Hkv, n, DV] of one sequence


class Setting:
    """Heads, dtype and options of an attention, drawn from the seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device, self.rng = seed, device, random.Random(seed)
        self.on_gpu = device.type == "cuda"
        threads = tuple(dict.fromkeys((*trials.THREADS, torch.get_num_threads())))
        self.threads = threads[seed % len(threads)]
        choose = self.rng.choice
        name, self.precision = NUMBERS[seed % len(NUMBERS)]
        self.dtype: torch.dtype = getattr(torch, name)
        self.heads, self.kv_heads = choose(HEADS)
        self.head, self.value_head = choose(SIZES if self.on_gpu else SIZES[2:5])
        self.how: dict[str, Any] = {
            "causal": True,
            "window": choose((None, None, 1, 63, 128, 1000, (5, None))),
            "softcap": choose((None, None, 20.0)),
            "scale": choose((None, 0.3)),
            "sinks": choose((None, None, self.normal(self.heads, seed=7))),
            "precision": self.precision or None,
        }

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        return make_data("normal", shape, seed=self.seed + seed, dtype=self.dtype, device=self.device)

    def length(self) -> int:
        """Draw a length: near a block's or a split's end, or any."""
        edges, most = (EDGES + GPU_EDGES, 3000) if self.on_gpu else (EDGES, 300)
        found: int = self.rng.choice((*edges, self.rng.randint(1, most), self.rng.randint(1, most)))
        return found

    def sequence(self, length: int, seed: int = 0) -> Triple:
        shapes = (self.heads, self.head), (self.kv_heads, self.head), (self.kv_heads, self.value_head)
        q, k, v = (self.normal(h, length, w, seed=1000 * seed + at) for at, (h, w) in enumerate(shapes))
        return q, k, v

    def alone(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        """The result [H, T, DV] of one sequence."""
        return attention(q[None], k[None], v[None], **(self.how | how))[0]


def _varlen(each: Setting, parts: Sequence[Triple], **how: Any) -> list[Tensor]:
    """Results [H, T, DV] of sequences that are packed."""
    q, k, v = (torch.cat([part[at] for part in parts], 1).transpose(0, 1) for at in range(3))
    cu_q, cu_k = (_cumulated([part[at].shape[1] for part in parts], each.device) for at in range(2))
    o = attention_varlen(q, k, v, cu_q, cu_k, **(each.how | how))
    return [part.transpose(0, 1) for part in torch.split(o, [part[0].shape[1] for part in parts])]


def _cumulated(counts: Sequence[int], device: torch.device) -> Tensor:
    sums = [sum(counts[:at]) for at in range(len(counts) + 1)]
    return torch.tensor(sums, dtype=torch.int32, device=device)


def _integers(each: Setting, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64 if each.seed % 2 else torch.int32, device=each.device)


def _batch(each: Setting) -> Iterator[BitDiff]:
    length, count = each.length(), each.rng.randint(2, 9)
    parts = [each.sequence(length, seed) for seed in range(count)]
    place = each.rng.randrange(count)
    alone = each.alone(*parts[place])
    spoilt = each.rng.choice([at for at in range(count) if at != place])
    for x in parts[spoilt]:
        x.fill_(each.rng.choice((torch.nan, torch.inf, 1e4)))
    q, k, v = (torch.stack(x) for x in zip(*parts, strict=True))
    yield compare_bits(attention(q, k, v, **each.how)[place], alone)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    yield compare_bits(attention(q, k, v, **each.how)[place], alone)
    others = [each.sequence(each.length(), seed) for seed in range(10, 10 + each.rng.randint(1, 4))]
    packed = [*others, parts[place]]
    each.rng.shuffle(packed)
    for part, found in zip(packed, _varlen(each, packed), strict=True):
        yield compare_bits(found, each.alone(*part))


def _padding(each: Setting) -> Iterator[BitDiff]:
    """Padding on the left, in q as well; and buffers that are longer than what they hold."""
    lengths = [each.length() for _ in range(each.rng.randint(2, 4))]
    parts = [each.sequence(length, seed) for seed, length in enumerate(lengths)]
    alone = [each.alone(*part) for part in parts]
    longest = max(lengths) + each.rng.choice((0, 0, 1, 70))
    q, k, v = (torch.stack([_padded(part[at], longest, left=True) for part in parts]) for at in range(3))
    starts = _integers(each, *(longest - length for length in lengths))
    q = torch.where(q.isnan(), torch.ones_like(q), q)
    found = attention(q, k, v, kv_starts=starts, **each.how)
    for one, length, expected in zip(found, lengths, alone, strict=True):
        yield compare_bits(one[:, longest - length :], expected)
        if length < longest:
            yield compare_bits(one[:, : longest - length], torch.zeros_like(one[:, : longest - length]))
    k, v = (torch.stack([_padded(part[at], longest, left=False) for part in parts]) for at in (1, 2))
    tokens = min(lengths)
    q = torch.stack([part[0][:, -tokens:] for part in parts])
    found = attention(q, k, v, kv_lengths=_integers(each, *lengths), **each.how)
    for one, expected in zip(found, alone, strict=True):
        yield compare_bits(one, expected[:, -tokens:])


def _padded(x: Tensor, length: int, *, left: bool) -> Tensor:
    """[H, n, W] with NaN before or after it."""
    more = length - x.shape[1]
    return F.pad(x, (0, 0, more, 0) if left else (0, 0, 0, more), value=torch.nan)


def _chunks(each: Setting) -> Iterator[BitDiff]:
    length = max(2, each.length())
    q, k, v = each.sequence(length)
    whole = each.alone(q, k, v)
    cuts = sorted({0, length, *(each.rng.randint(1, length - 1) for _ in range(each.rng.randint(1, 5)))})
    for low, high in pairwise(cuts):
        yield compare_bits(each.alone(q[:, low:high], k[:, :high], v[:, :high]), whole[:, low:high])


def _decode(each: Setting) -> Iterator[BitDiff]:
    """The last tokens one by one, from caches of every kind, in a batch of two."""
    length = max(2, each.length())
    parts = [each.sequence(length, seed) for seed in range(2)]
    q, k, v = (torch.stack(x) for x in zip(*parts, strict=True))
    whole = attention(q, k, v, **each.how)
    static_k, static_v = (
        _padded(x.flatten(0, 1), length + 40, left=False).view(2, each.kv_heads, length + 40, -1) for x in (k, v)
    )
    window = each.how["window"]
    left = window - 1 if isinstance(window, int) else window[0] if window else None
    for n in sorted({length, max(1, length // 2), each.rng.randint(1, length)}):
        one, expected = q[:, :, n - 1 : n], whole[:, :, n - 1 : n]
        lengths = _integers(each, n, n)
        yield compare_bits(attention(one, k[:, :, :n], v[:, :, :n], **each.how), expected)
        yield compare_bits(attention(one, static_k, static_v, kv_lengths=lengths, **each.how), expected)
        if left is not None:
            dropped = each.rng.randint(0, max(0, n - 1 - left))
            kept = (x[:, :, dropped:n] for x in (k, v))
            offsets = _integers(each, dropped, dropped)
            yield compare_bits(attention(one, *kept, kv_offsets=offsets, **each.how), expected)
        yield compare_bits(_paged(each, one, k[:, :, :n], v[:, :, :n]), expected)


def _paged(each: Setting, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attention` of [B, H, T, D] from a cache of pages in any order, with NaN in what no sequence holds."""
    page = each.rng.choice((1, 16, 48, 256))
    batch, _, n, _ = k.shape
    count = -(-n // page)
    table = torch.randperm(batch * count + 2, device=each.device)[: batch * count].view(batch, count).int()
    caches = []
    for x in (k, v):
        cache = x.new_full((batch * count + 2, page, *x.shape[1:2], x.shape[3]), torch.nan)
        pages = F.pad(x, (0, 0, 0, count * page - n), value=torch.nan)
        cache[table.long()] = pages.view(batch, each.kv_heads, count, page, -1).permute(0, 2, 3, 1, 4)
        caches.append(cache)
    cu_q, cu_k = (_cumulated([size] * batch, each.device) for size in (q.shape[2], n))
    k, v = caches
    o = attention_varlen(q.transpose(1, 2).flatten(0, 1), k, v, cu_q, cu_k, block_table=table, **each.how)
    return o.view(batch, q.shape[2], *o.shape[1:]).transpose(1, 2)


def _run_to_run(each: Setting) -> Iterator[BitDiff]:
    length = each.length()
    sequence = each.sequence(length)
    grad = each.normal(each.heads, length, each.value_head, seed=99)
    first = gradients(each, sequence, grad)
    with other_work(each.device):
        for _ in range(3):
            yield from same(gradients(each, sequence, grad), first)


def gradients(each: Setting, sequence: Triple, grad: Tensor, **how: Any) -> list[Tensor]:
    """o, dq, dk and dv of one sequence [H, n, W]."""
    return _trained(lambda q, k, v: each.alone(q, k, v, **how), sequence, grad)


def _trained(function: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    o = function(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, grad)]


def _gradients(each: Setting) -> Iterator[BitDiff]:
    """Alone, in a batch, padded on both sides, and packed."""
    each.how["causal"] = causal = each.rng.random() < 0.8
    if not causal:
        each.how["window"] = None
    lengths = [each.length() for _ in range(3)]
    parts = [each.sequence(length, seed) for seed, length in enumerate(lengths)]
    grads = [
        each.normal(each.heads, length, each.value_head, seed=50 + seed) for seed, length in enumerate(lengths)
    ]  # fmt: skip
    alone = [gradients(each, part, grad) for part, grad in zip(parts, grads, strict=True)]
    longest = max(lengths) + each.rng.choice((0, 1, 70))

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cu = _cumulated(lengths, each.device)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return attention_varlen(q, k, v, cu, cu, **each.how).transpose(0, 1)

    packed = _trained(varlen, [torch.cat(x, 1) for x in zip(*parts, strict=True)], torch.cat(grads, 1))
    for found, expected in zip(zip(*(torch.split(x, lengths, 1) for x in packed), strict=True), alone, strict=True):
        yield from same(found, expected)
    for left in (True, False) if causal else (True,):
        q, k, v = (
            torch.stack([_padded(part[at], longest, left=left).nan_to_num(nan=1.0) for part in parts])
            for at in range(3)
        )
        grad = torch.stack([_padded(x, longest, left=left).nan_to_num(nan=0.0) for x in grads])
        more = [longest - length for length in lengths]
        how = each.how | ({"kv_starts": _integers(each, *more)} if left else {})
        whole = _trained(partial(attention, **how), (q, k, v), grad)
        for at, (length, expected) in enumerate(zip(lengths, alone, strict=True)):
            first = more[at] if left else 0
            yield from same([x[at][:, first : first + length] for x in whole], expected)


def _any_tile(each: Setting) -> Iterator[BitDiff]:
    """Other tiles, and splits side by side or one after another."""
    from isogemm.attention.plan import attention_plan

    how, length = each.how, max(2, each.length())
    for tokens in (1, length):
        q, k, v = (x[None] for x in each.sequence(length))
        q = q[:, :, -tokens:]
        call = op.readable(call_of(q, k, v, **how))
        problem, expected = problem_of(call, False), attention(q, k, v, **how)
        for config in each.rng.sample(variants(problem), 3):
            plan = attention_plan(problem, call, config)
            yield compare_bits(plan.run((*call.tensors, None)), expected)


def variants(problem: Problem) -> list[Config]:
    """Configurations that must give the same bits."""
    chosen = configs.choose(problem)
    return [
        replace(chosen, block_m=block_m, num_warps=warps, num_stages=stages, split=split, roles=False)
        for block_m in ((16, 32) if max(problem.head, problem.value_head) > 128 else (16, 32, 64))
        for warps in (4, 8)
        for stages in (1, 2)
        for split in (False, True)
    ]


def _accuracy(each: Setting) -> Iterator[BitDiff]:
    """Raises where a result or a gradient is not accurate; there are no bits to compare."""
    each.how["causal"] = each.rng.random() < 0.6
    if not each.how["causal"]:
        each.how["window"] = each.rng.choice((None, (20, 9)))
    if each.how["window"] == 1:  # a query that sees one key has no gradient, and torch no error
        each.how["window"] = 2
    length = max(2, each.length())
    batch = tuple(x[None] for x in each.sequence(length))
    assert_accurate(batch, each.how, each.normal(1, each.heads, length, each.value_head, seed=99))
    yield from ()


def assert_accurate(operands: Sequence[Tensor], how: dict[str, Any], grad: Tensor | None) -> dict[str, float]:
    """Assert that o, and with `grad` its gradients, are at most twice as far from fp64's as torch's; the errors of o.

    torch's are by scaled_dot_product_attention where it has these options, else by its single operations.
    """
    dtype = operands[0].dtype
    # TF32 is as exact as float16, and what torch takes for it depends on the kernel.
    torchs_dtype = torch.float16 if how.get("precision") == "tf32" and operands[0].is_cuda else dtype
    ours = partial(attention, **how)
    exact: dict[str, Any] = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in how.items()
    }
    exact["precision"] = None
    functions = [ours, partial(_by_torch, how), partial(attention, **exact)]
    results = []
    for function, kind in zip(functions, (dtype, torchs_dtype, torch.float64), strict=True):
        given = [x.to(kind) for x in operands]
        with fp32_precision("ieee" if given[0].is_cuda and kind == torch.float32 else ""):
            if grad is None:
                results.append([function(*given)])
            else:
                results.append(_trained(function, given, grad.to(kind)))
    errors = {}
    for name, mine, torchs, right in zip(("o", "dq", "dk", "dv"), *results, strict=False):
        found = assert_no_worse_than_torch(mine, torchs.to(dtype), right, what=name)
        if name == "o":
            errors = dict(zip(("isogemm", "torch"), found, strict=True))
    return errors


def _by_torch(how: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What torch has for these options: a fused attention, or several operations."""
    plain = all(how.get(name) is None for name in ("softcap", "sinks", "window", "kv_starts", "kv_lengths"))
    if plain and how.get("attn_mask") is None and q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=how.get("causal", False), scale=how.get("scale"), enable_gqa=True
        )
    return reference.attention(call_of(q, k, v, **how))


def call_of(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Call:
    """The operator's arguments of a dense call of `isogemm.attention`."""
    from isogemm.attention import api

    names = "sinks", "attn_mask", "kv_lengths", "kv_starts", "kv_offsets"
    tensors = (q, k, v, *(how.get(name) for name in names), None, None, None)
    options = how.get("causal", False), how.get("window"), how.get("scale"), how.get("softcap")
    return api._call("attention", tensors, (*options, how.get("precision") if q.dtype is torch.float32 else None))


_check = partial(Check, Setting)

CHECKS = (
    _check(
        "batch", "a sequence has the same bits in any batch and packed in any order", _batch,
        "batches of 2 to 9, NaN and Inf in the others, both layouts",
    ),
    _check(
        "padding", "padding on the left and a longer buffer change nothing", _padding,
        "NaN beside the keys, lengths around blocks and splits",
    ),
    _check("prefill cuts", "chunks of a prompt have the bits of one call", _chunks, "random cuts"),
    _check(
        "decode", "a token has the prefill's bits from any cache", _decode,
        "contiguous, static, sliding and paged caches",
    ),
    _check("run to run", "a call has the same bits every time", _run_to_run, "4 runs, other work beside"),
    _check(
        "any tile", "every configuration gives the same bits", _any_tile,
        "3 other tiles of a prefill and of a decode, split and not", gpu_only=NO_TILES,
    ),
    _check(
        "gradients", "dq, dk and dv of a sequence are the same in any batch", _gradients,
        "packed, and padded on both sides",
    ),
    _check(
        "accuracy", "the error is at most twice torch's and one ulp", _accuracy,
        "o and its gradients, against fp64",
    ),
)  # fmt: skip
