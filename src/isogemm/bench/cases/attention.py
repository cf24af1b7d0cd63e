"""Cases and demo of the attention family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from isogemm.attention import reference
from isogemm.attention.api import attention, attention_varlen
from isogemm.attention.describe import backward_problem_of, problem_of
from isogemm.bench import demo as demos
from isogemm.bench import timer
from isogemm.bench.cases import Case, CaseRun, Thunk, make_params, on_poison, served_by, use_precision
from isogemm.bench.demo import DemoResult
from isogemm.bench.views import FamilyView
from isogemm.verify.attention import assert_accurate, call_of
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data
from isogemm.verify.parallel import run_in_processes

VIEW = FamilyView("attention", "Attention", ("heads", "head", "batch"), column="keys")

TOKENS = 16384  # of a prefill, in all
LENGTHS = (1024, 2048, 4096, 8192, 16384)
DECODED = (1, 4, 16, 64), (1024, 4096, 8192, 16384, 32768)  # sequences, and keys
MOST_CACHE = 60e9  # bytes
PAGE = 16
CHECKED = 64  # queries that are compared with fp64's
BACKENDS = {"torch": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Point:
    """An attention: its sizes and options, and what is measured of it."""

    name: str
    batch: int
    queries: int
    keys: int
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    how: dict[str, Any] = field(default_factory=lambda: {"causal": True}, hash=False)
    layout: str = "dense"  # or packed or paged
    of_grad: bool = False  # whether the backward is measured, alone

    @property
    def decoded(self) -> bool:
        return self.queries == 1

    @property
    def lengths(self) -> list[int]:
        """Lengths of packed sequences: from a quarter of the longest to the longest."""
        count = self.batch
        return [self.keys // 4 + (self.keys - self.keys // 4) * at // (count - 1) for at in range(count)]

    @property
    def flops(self) -> float:
        """Arithmetic of the two products with the keys that are seen; five products in the backward."""
        pairs = sum(n * n for n in self.lengths) if self.layout == "packed" else self.batch * self.queries * self.keys
        if self.how.get("causal") and not self.decoded:
            pairs //= 2
            if window := self.how.get("window"):
                pairs = self.batch * (self.queries * window - window * window // 2)
        return (2.5 if self.of_grad else 1.0) * 4 * self.heads * self.head * pairs

    @property
    def bytes(self) -> float:
        """Keys and values, queries and results; in the backward with the gradients."""
        rows = self.batch * (2 * self.queries * self.heads + 2 * self.keys * self.kv_heads)
        return 2.0 * rows * self.head * (2 if self.of_grad else 1)

    def case(self) -> Case:
        sizes: dict[str, int | str] = {"heads": f"{self.heads}/{self.kv_heads}", "head": self.head, "keys": self.keys}
        if self.decoded or self.name.endswith("other"):
            sizes["batch"] = self.batch
        options = {name: str(value) for name, value in self.how.items() if name != "causal"}
        if not self.how.get("causal"):
            options["mask"] = "full"
        params = make_params("bfloat16", "", **sizes) | options
        return Case("attention", self.name, params, self.flops, self.bytes, partial(_build, self))


def points() -> Iterator[Point]:
    for name, of_grad in (("attention", False), ("attention grad", True)):
        for head in (128, 64):
            for length in LENGTHS:
                yield Point(name, TOKENS // length, length, length, head=head, of_grad=of_grad)
    batches, lengths = DECODED
    for batch in batches:
        for keys in lengths:
            point = Point("decode", batch, 1, keys)
            if point.bytes <= MOST_CACHE:
                yield point
    for of_grad in (False, True):
        other = Point("attention grad other" if of_grad else "attention other", 4, 2048, 2048, of_grad=of_grad)
        yield from (replace(other, head=head) for head in (80, 96, 256))
        yield replace(other, heads=28, kv_heads=4)
        yield replace(other, batch=64, queries=197, keys=197, heads=16, kv_heads=16, head=64, how={})
        yield replace(other, batch=1, queries=16384, keys=16384, how={"causal": True, "window": 4096})
        yield replace(other, batch=1, how={"causal": True, "softcap": 50.0}, heads=16)
        yield replace(other, name="packed grad other" if of_grad else "packed other", batch=8, layout="packed")
    for batch, keys in ((1, 8192), (16, 8192), (64, 4096)):
        yield Point("decode paged", batch, 1, keys, layout="paged")
    yield Point("decode other", 16, 1, 8192, heads=28, kv_heads=4)
    yield Point("decode other", 16, 1, 8192, heads=16, kv_heads=16, head=64)
    yield Point("decode other", 16, 4, 8192)  # a few tokens at a time
    yield Point("decode other", 16, 1, 8192, head=256, heads=16, kv_heads=8)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    if device.type != "cuda":
        chosen = [Point("attention", 2, 256, 256, 8, 2, 64), Point("decode", 4, 1, 512, 8, 2, 64)]
        chosen.append(Point("attention grad", 1, 128, 128, 4, 2, 64, of_grad=True))
    elif quick:
        chosen = [
            Point("attention", 8, 2048, 2048), Point("attention grad", 8, 2048, 2048, of_grad=True),
            Point("decode", 16, 1, 8192),
        ]  # fmt: skip
    else:
        chosen = list(points())
    return [point.case() for point in chosen]


def compile_cases(device: torch.device, cases: Sequence[Case]) -> None:
    """Compile what the cases launch, on all cores, without their memory."""
    jobs = [case.build.args[0] for case in cases if isinstance(case.build, partial)]
    run_in_processes(_compile, device, jobs)


def _compile(device: str, point: Point) -> None:
    from isogemm.attention import op
    from isogemm.attention.plan import attention_plan, backward_plan

    if point.layout != "dense":
        function, operands = _ours(point, _operands(point, torch.device(device)))
        function(*operands)
        return
    small = replace(point, batch=1)
    q, k, v = _operands(small, torch.device(device))
    call = op.readable(call_of(q, k, v, **point.how))
    problem = replace(problem_of(call, point.of_grad), sequences=point.batch)
    attention_plan(problem, call)
    if point.of_grad:
        o = torch.empty_like(q)
        of_grad = backward_problem_of(call, o, o, q, k, v)
        backward_plan(
            replace(of_grad, forward=replace(of_grad.forward, sequences=point.batch)), call, o, o, False, False
        )


def _operands(point: Point, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, dense."""

    def random(heads: int, tokens: int) -> Tensor:
        shape = (point.batch, heads, tokens, point.head)
        return torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=point.of_grad)

    return random(point.heads, point.queries), random(point.kv_heads, point.keys), random(point.kv_heads, point.keys)


def _ours(point: Point, dense: Sequence[Tensor]) -> tuple[Callable[..., Tensor], Sequence[Tensor]]:
    """isogemm's function and its operands, laid out as the point says."""
    q, k, v = dense
    if point.layout == "dense":
        return partial(attention, **point.how), dense
    batch, device = point.batch, q.device
    if point.layout == "packed":
        lengths = point.lengths
        cu = _cumulated(lengths, device)
        packed = [
            torch.cat([x[at, :, :length].transpose(0, 1) for at, length in enumerate(lengths)]).detach()
            for x in dense
        ]  # fmt: skip
        packed = [x.requires_grad_(point.of_grad) for x in packed]
        return partial(attention_varlen, cu_seqlens_q=cu, cu_seqlens_k=cu, **point.how), packed
    count = point.keys // PAGE
    table = torch.randperm(batch * count, device=device).view(batch, count).int()
    caches = []
    for x in (k, v):
        pages = x.view(batch, point.kv_heads, count, PAGE, point.head).permute(0, 2, 3, 1, 4).flatten(0, 1)
        cache = torch.empty_like(pages, memory_format=torch.contiguous_format)
        cache[table.flatten().long()] = pages
        caches.append(cache)
    cu_q, cu_k = (_cumulated([size] * batch, device) for size in (1, point.keys))
    how = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "block_table": table, **point.how}
    return partial(attention_varlen, **how), (q[:, :, 0], *caches)


def _cumulated(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def _torchs(point: Point, device: torch.device) -> dict[str, Function]:
    """What torch has for the point's options, on dense operands: fused attentions, or else single operations."""
    how = dict(point.how)
    scale, causal = how.pop("scale", None), how.pop("causal", False) and not point.decoded
    if how.get("softcap"):
        return {"torch": lambda q, k, v: reference.attention(call_of(q, k, v, **point.how))}
    options: dict[str, Any] = {"is_causal": causal, "scale": scale, "enable_gqa": True}
    if point.queries not in (1, point.keys) or "window" in how:
        position = torch.arange(point.keys, device=device)
        mask = position <= position[-point.queries :, None]
        if window := how.get("window"):
            mask &= position > position[-point.queries :, None] - window
        options |= {"is_causal": False, "attn_mask": mask}
        return {"torch": partial(F.scaled_dot_product_attention, **options)}
    if device.type != "cuda":
        return {"torch": partial(F.scaled_dot_product_attention, **options)}

    def by(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return {name: partial(by, backend) for name, backend in BACKENDS.items()}


def _build(point: Point, device: torch.device) -> CaseRun:
    use_precision("", device)
    most = 1 if point.of_grad else 256
    sets = [_operands(point, device) for _ in range(timer.rotations(point.bytes, device, most))]
    ours = [_ours(point, each) for each in sets]
    functions = {name: function for name, function in _torchs(point, device).items() if _serves(function, sets[0])}
    if point.of_grad:
        grad = torch.randn_like(sets[0][0])
        variants = {"isogemm": [_backward(*ours[0], _grad_like(point, grad))]}
        variants |= {name: [_backward(function, sets[0], grad)] for name, function in functions.items()}
    else:
        variants = {"isogemm": [partial(function, *operands) for function, operands in ours]}
        variants |= {name: [partial(function, *each) for each in sets] for name, function in functions.items()}
        if point.decoded and point.layout == "dense" and device.type == "cuda":
            variants["one split"] = [_in_one_split(point, *each) for each in sets]
    info = served_by(variants["isogemm"][0])
    eager = tuple(variants) if point.of_grad else ()
    if not point.decoded:  # a mask or single operations: their graphs would hold much memory
        eager = tuple(variants) if point.how.get("softcap") else eager
    return CaseRun(variants, partial(_check, point, sets[0], functions), info, eager)


def _serves(function: Function, operands: Sequence[Tensor]) -> bool:
    """Whether torch's backend takes the problem."""
    try:
        function(*operands)
    except RuntimeError:
        return False
    return True


def _grad_like(point: Point, grad: Tensor) -> Tensor:
    """The dense gradient, as the point's result lies."""
    if point.layout != "packed":
        return grad
    return torch.cat([grad[at, :, :length].transpose(0, 1) for at, length in enumerate(point.lengths)])


def _backward(function: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor) -> Thunk:
    o = function(*operands)
    return lambda: torch.autograd.grad(o, operands, grad, retain_graph=True)[0]


def _in_one_split(point: Point, q: Tensor, k: Tensor, v: Tensor) -> Thunk:
    """A program walks all keys of a sequence, as batch-invariant attention is usually made."""
    from isogemm.attention import configs, op
    from isogemm.attention.plan import attention_plan

    call = op.readable(call_of(q, k, v, **point.how))
    problem = problem_of(call, False)
    plan = attention_plan(problem, call, configs.Config(16, 4, 3 if point.head <= 128 else 2))
    return partial(plan.run, (*call.tensors, None))


def _check(point: Point, dense: Sequence[Tensor], functions: dict[str, Function]) -> dict[str, float]:
    """Errors of o, and with of_grad of the gradients, for the last queries and one group of heads."""
    group = point.heads // point.kv_heads
    tokens = min(CHECKED, point.queries)
    ours, operands = _ours(point, dense)
    results = {"isogemm": on_poison("isogemm", partial(ours, *operands))}
    results |= {name: function(*dense) for name, function in functions.items()}
    if point.layout == "packed":
        results["isogemm"] = results["isogemm"][-point.queries :].transpose(0, 1)[None]
        results |= {name: result[-1:] for name, result in results.items()}
    elif point.layout == "paged":
        results["isogemm"] = results["isogemm"][:, :, None]
    at = -1 if point.layout == "packed" else 0  # the longest
    q, k, v = (x.detach()[at][None] for x in dense)
    part = q[:, :group, -tokens:], k[:, :1], v[:, :1]
    exact = reference.attention(call_of(*(x.double() for x in part), **point.how))
    found = {name: result.detach()[at][None, :group, -tokens:] for name, result in results.items()}
    torchs = found.get("torch", found["isogemm"])
    errors = {}
    for name, result in found.items():
        errors[name] = assert_no_worse_than_torch(result, torchs, exact, what=name)[0]
    if point.of_grad and point.layout == "dense":
        small = [x[:, :, -1024:] for x in (q[:, :group], k[:, :1], v[:, :1])]
        assert_accurate(small, dict(point.how), torch.randn_like(small[0]))
    return errors


def demo(device: torch.device) -> DemoResult:
    """Causal attention of grouped heads."""
    on_gpu = device.type == "cuda"
    batch, tokens, heads, kv_heads, head = (32, 512, 32, 8, 128) if on_gpu else (8, 128, 8, 2, 32)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shapes = [(batch, count, tokens, head) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (make_data("normal", shape, seed=at, dtype=dtype, device=device) for at, shape in enumerate(shapes))
    functions: dict[str, Callable[..., Tensor]] = {
        "isogemm": partial(attention, causal=True),
        "torch": partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True),
    }
    use_precision("ieee", device)

    def last(function: Callable[..., Tensor], some: slice) -> Tensor:
        """Each sequence's last token by itself, as decode computes it."""
        how = {"is_causal": False} if function is functions["torch"] else {}
        return function(q[some, :, -1:], k[some], v[some], **how)

    bits = demos.count_changes(functions, last, "sequences, one new token each", batch=batch, sizes=(1, 3))
    title = f"attention [{batch}, {heads}/{kv_heads}, {tokens}, {head}], causal, {'bf16' if on_gpu else 'fp32'}"
    small = q[:1], k[:1], v[:1]
    errors = partial(assert_accurate, small, {"causal": True}, None)
    thunks: dict[str, Thunk] = {name: partial(function, q, k, v) for name, function in functions.items()}
    return demos.result(title, bits, errors, "the largest result", thunks, "scaled_dot_product_attention", device)
