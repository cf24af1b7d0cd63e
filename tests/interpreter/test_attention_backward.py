"""Attention's backward kernels on the CPU: poisoned outputs and stale memory, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from isogemm.attention import configs
from isogemm.attention.configs import BackwardConfig, BackwardProblem, BackwardTile, Problem
from isogemm.attention.kernels.backward import describe_key_gradients, describe_query_gradients
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

SMALL = BackwardConfig(BackwardTile(16, 16, 4, 1), BackwardTile(16, 16, 4, 1))
LARGE = BackwardConfig(BackwardTile(64, 32, 4, 1), BackwardTile(32, 64, 4, 1))
NAMES = "dq", "dk", "dv", "of_sinks", "of_mask"


@dataclass(frozen=True)
class Case:
    """Sequences of one call: queries and keys of each, which are packed or lie in buffers of the greatest size."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    head: int = 16
    value_head: int = 16
    dtype: torch.dtype = torch.float16
    packed: bool = False
    causal: bool = True
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    sinks: bool = False
    mask: str = ""
    starts: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    precision: str = ""
    tail: int = 0  # tokens and keys behind the packed sequences


def _data(*shape, seed, dtype):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cpu")


class Sequences:
    """A case's tensors; what belongs to no sequence is NaN. Fewer queries than others are as many as their keys."""

    def __init__(self, case: Case) -> None:
        self.case, count = case, len(case.queries)
        dtype, starts = case.dtype, case.starts or (0,) * count
        most_q, most_k = max(case.queries), max(k + s for k, s in zip(case.keys, starts, strict=True)) + case.tail
        if case.packed:
            shapes = (sum(case.queries) + case.tail,), (sum(case.keys) + case.tail,)
        else:
            shapes = (count, most_q), (count, most_k)
        of_q, of_k = (lambda n, d, i=i: torch.full((*shapes[i], n, d), math.nan, dtype=dtype) for i in range(2))
        self.q, self.do, self.o = of_q(case.heads, case.head), *(of_q(case.heads, case.value_head) for _ in "ab")
        self.k, self.v = of_k(case.kv_heads, case.head), of_k(case.kv_heads, case.value_head)
        self.lse = torch.full((*shapes[0], case.heads), math.inf)
        self.sinks = _data(case.heads, seed=9, dtype=dtype) if case.sinks else None
        self.mask = None
        if case.mask:
            self.mask = _data(count, 1, most_q, most_k, seed=8, dtype=dtype)
            self.mask = self.mask > -0.5 if case.mask == "bool" else self.mask
        self.places, at_q, at_k = [], 0, 0
        for b, (t, n, start) in enumerate(zip(case.queries, case.keys, starts, strict=True)):
            rows, held = (slice(at_q, at_q + t), slice(at_k, at_k + n)) if case.packed else (
                (b, slice(most_q - t, most_q)), (b, slice(start, start + n))
            )  # fmt: skip
            self.places.append((rows, held))
            at_q, at_k = at_q + t, at_k + n
            for seed, (tensor, place) in enumerate([(self.q, rows), (self.do, rows), (self.k, held), (self.v, held)]):
                tensor[place] = _data(*tensor[place].shape, seed=10 * b + seed, dtype=dtype)
        self.expected = self._gradients(torch.float64, fill=True)
        self.in_torch = self._gradients(torch.float16 if case.precision == "tf32" else dtype)  # as many bits

    def _gradients(self, dtype, fill=False):
        """Gradients by autograd; `fill` also sets what the forward leaves."""
        case = self.case
        found = self._outputs(0.0, torch.float32 if dtype != torch.float64 else dtype)
        for b, (rows, held) in enumerate(self.places):
            leaves = [each.to(dtype).requires_grad_() for each in (self.q[rows], self.k[held], self.v[held])]
            q, k, v = leaves
            group = case.heads // case.kv_heads
            k, v = (each.repeat_interleave(group, 1) for each in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * case.head**-0.5
            if case.softcap:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            seen = self._seen(b)
            added = scores.new_zeros(scores.shape)
            if self.mask is not None:
                part = self.mask[b, :, rows[1], held[1]]
                if case.mask == "bool":
                    seen = seen & part
                else:
                    added = added + part.to(dtype)
            added.requires_grad_()
            scores = (scores + added).masked_fill(~seen, -math.inf)
            sinks = scores.new_full((case.heads, 1, 1), -math.inf) if self.sinks is None else self.sinks.to(dtype)
            sinks = sinks.reshape(-1, 1, 1).expand(-1, len(q), 1).clone().requires_grad_()
            dead = ~seen.any(-1).expand(scores.shape[:-1])
            logits = torch.cat([scores, sinks], -1).masked_fill(dead[..., None], 0.0)
            weights = logits.softmax(-1)[..., :-1].masked_fill(dead[..., None], 0.0)
            o = torch.einsum("hqk,khd->qhd", weights, v)
            if fill:
                self.o[rows] = o.detach().to(case.dtype)
                lse = logits.logsumexp(-1).masked_fill(dead, math.inf) / math.log(2)
                self.lse[rows] = lse.T.detach().float()
            do = self.do[rows].to(dtype)
            got = torch.autograd.grad(o, [*leaves, sinks, added], do, allow_unused=True)
            for name, place, value in zip(NAMES[:3], (rows, held, held), got, strict=False):
                found[name][place] = value.to(found[name].dtype)
            if self.sinks is not None:
                found["of_sinks"][rows] = got[3][:, :, 0].T.to(found["of_sinks"].dtype)
            if case.mask == "added":
                found["of_mask"][b, :, rows[1], held[1]] = got[4].to(found["of_mask"].dtype)
        return found

    def _outputs(self, value, dtype=None):
        case, shape = self.case, self.lse.shape
        found = {
            name: torch.full_like(x, value, dtype=dtype)
            for name, x in zip(NAMES, (self.q, self.k, self.v), strict=False)
        }
        found["of_sinks"] = torch.full(shape, value, dtype=dtype or torch.float32) if case.sinks else None
        if case.mask == "added":
            mask_shape = (len(case.queries), case.heads, *self.mask.shape[2:])
            found["of_mask"] = torch.zeros(mask_shape, dtype=dtype or torch.float32)
        return found

    def _seen(self, b):
        case = self.case
        tokens, count = case.queries[b], case.keys[b]
        first = case.offsets[b] if case.offsets else 0
        query = first + count - tokens + torch.arange(tokens)[:, None]
        key = first + torch.arange(count)[None, :]
        seen = (query >= 0) & (key >= 0)
        if case.causal:
            seen &= key <= query
        if case.left >= 0:
            seen &= query - key <= case.left
        if case.right >= 0:
            seen &= key - query <= case.right
        return seen

    def problem(self):
        case, count = self.case, len(self.case.queries)
        sizes = self.q.shape[-3], self.k.shape[-3]
        forward = Problem(
            "packed" if case.packed else "dense", count, *sizes, case.heads, case.kv_heads, case.head, case.value_head,
            str(case.dtype).removeprefix("torch."), case.precision, *map(_strides, (self.q, self.k, self.v, self.o)),
            case.causal, case.left, case.right, case.head**-0.5, case.softcap, case.sinks, case.mask,
            placed=(not case.packed, bool(case.starts), bool(case.offsets)),
        )  # fmt: skip
        if self.mask is not None:
            strides = [0 if n == 1 else s for n, s in zip(self.mask.shape, self.mask.stride(), strict=True)]
            forward = replace(forward, mask_strides=tuple(strides))
        strides = [_strides(each) for each in (self.do, self.q, self.k, self.v)]
        return BackwardProblem(forward, *strides)

    def run(self, config, problem=None):
        case, problem = self.case, problem or self.problem()
        cu = [torch.tensor([0, *each]).cumsum(0).int() for each in (case.queries, case.keys)]
        cu_q, cu_k = cu if case.packed else (None, None)
        starts = torch.tensor(case.starts) if case.starts else None
        lengths = torch.tensor(case.keys) + (0 if starts is None else starts) if problem.forward.placed[0] else None
        placing = cu_q, cu_k, lengths, starts, torch.tensor(case.offsets) if case.offsets else None
        statistics = torch.full((configs.statistics_elements(problem.forward),), math.nan)
        out = self._outputs(math.nan)
        mask = self.mask.view(torch.uint8) if case.mask == "bool" else self.mask
        describe_query_gradients(problem, config).run(
            self.q, self.k, self.v, mask, self.sinks, self.o, self.lse, self.do, statistics, out["dq"],
            out["of_sinks"], out.get("of_mask"), *placing,
        )  # fmt: skip
        describe_key_gradients(problem, config).run(
            self.q, self.do, self.k, self.v, mask, statistics, out["dk"], out["dv"], *placing
        )
        return out


def _strides(x):
    return (x.stride(0) if x.dim() == 4 else 0, x.stride(-3), x.stride(-2))


CASES = {
    "causal": Case((20, 20), (20, 20)),
    "full": Case((20, 20), (33, 21), causal=False),
    "chunk": Case((7,), (40,), heads=7),
    "fp32": Case((20,), (20,), dtype=torch.float32, precision="ieee"),
    "tf32": Case((20,), (20,), dtype=torch.float32, precision="tf32"),
    "head sizes": Case((9,), (19,), head=40, value_head=24),
    "window": Case((50,), (50,), left=17),
    "left and right": Case((40,), (40,), causal=False, left=3, right=5),
    "softcap": Case((20,), (20,), softcap=0.7),
    "sinks": Case((20, 3), (20, 3), sinks=True),
    "bool mask": Case((20,), (20,), mask="bool"),
    "added mask": Case((20,), (20,), mask="added", softcap=1.5),
    "lengths": Case((20, 20, 2), (20, 33, 2), causal=False, starts=(0, 0, 0)),
    "starts": Case((20, 7), (20, 7), starts=(0, 13), tail=5),
    "offsets": Case((4, 4), (20, 20), left=9, offsets=(17, 40)),
    "packed": Case((17, 1, 30), (17, 9, 30), packed=True, heads=4, kv_heads=2),
    "packed, all": Case((3, 0, 40), (20, 0, 3), packed=True, left=6, softcap=0.7, sinks=True, tail=3),
    "packed, full": Case((3, 20), (20, 5), packed=True, causal=False),
}  # fmt: skip


@pytest.fixture(autouse=True)
def stepwise_dot(monkeypatch):
    """`tl.dot` that adds a tensor core's K-step at a time, in float32: its bits do not depend on the tile."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        step = 16 if a.dtype.primitive_bitwidth == 16 else 8
        total, left, right = d.data.copy(), a.data.astype(np.float64), b.data.astype(np.float64)
        for k in range(0, left.shape[1], step):
            products = left[:, k : k + step, None] * right[None, k : k + step]
            total += products.sum(1).astype(total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    """As exact as torch's, zero where there is no sequence, and the same whatever the tile, but in ieee."""
    sequences = Sequences(CASES[name])
    found, other = sequences.run(SMALL), sequences.run(SMALL if CASES[name].precision == "ieee" else LARGE)
    for each in NAMES:
        if (actual := found.get(each)) is None:
            continue
        assert_bitwise_equal(other[each], actual, each)
        expected, in_torch = sequences.expected[each], sequences.in_torch[each]
        assert_no_worse_than_torch(actual, in_torch.to(actual.dtype), expected, what=each)
        if each in NAMES[:3]:
            outside = torch.ones(actual.shape, dtype=torch.bool)
            for rows, held in sequences.places:
                outside[rows if each == "dq" else held] = False
            assert not bool(actual[outside].any()), each


@pytest.mark.parametrize("case", [Case((37, 37), (50, 50), 8, 2, 40, 32), Case((20,), (20,), causal=False)], ids=str)
def test_tma(case):
    sequences = Sequences(case)
    problem = sequences.problem()
    problem = replace(problem, forward=replace(problem.forward, placed=(False, False, False)))
    assert configs.tma_usable(problem) == (True, True)
    found = sequences.run(BackwardConfig(BackwardTile(32, 32, 4, 1, True), BackwardTile(16, 32, 4, 1, True)), problem)
    plain = sequences.run(SMALL, problem)
    for each in NAMES[:3]:
        assert_bitwise_equal(found[each], plain[each], each)


def test_padding_on_the_left_changes_nothing():
    """Sums over rows begin at position 0, wherever that is in the buffer."""
    alone, padded = Sequences(Case((23,), (23,))), Sequences(Case((23, 36), (23, 36), starts=(13, 0), tail=5))
    expected, found = alone.run(SMALL), padded.run(LARGE)
    for each in NAMES[:3]:
        place = padded.places[0][0 if each == "dq" else 1]
        assert_bitwise_equal(found[each][place], expected[each][0], each)
