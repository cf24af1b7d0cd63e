"""The promises' other operations: norms, softmax, losses and attention."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from arithmetic import NUMBERS
from torch.nn import functional as F

import isogemm
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations
from promises.main_grads import accumulate
from promises.rows import RowFunction

WIDTH = 72  # of a norm's row, and of the LM head's
TARGET = 3


class Operation(NamedTuple):
    """An operation on rows, with the same by torch."""

    call: Callable  # x, parameters -> rows
    form: Callable  # by torch
    width: int = WIDTH
    parameters: tuple[tuple[int, ...], ...] = ()


def _targets(x):
    return torch.full(x.shape[:-1], TARGET, device=x.device)


def _losses(x, weight):
    return F.log_softmax(F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32)), -1)[..., TARGET]


OPERATIONS = {
    "rms_norm": Operation(
        lambda x, w: isogemm.rms_norm(x, w), lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6), parameters=((WIDTH,),)
    ),
    "layer_norm": Operation(
        lambda x, w, b: isogemm.layer_norm(x, w, b), lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        parameters=((WIDTH,), (WIDTH,)),
    ),
    "softmax": Operation(lambda x: isogemm.softmax(x), lambda x: F.softmax(x, -1), 1100),
    "log_softmax": Operation(lambda x: isogemm.log_softmax(x), lambda x: F.log_softmax(x, -1), 1100),
    "linear_logprob": Operation(
        lambda x, w: isogemm.linear_logprob(x, w, _targets(x)), _losses, parameters=((1100, WIDTH),)
    ),
    "linear_cross_entropy": Operation(
        lambda x, w: isogemm.linear_cross_entropy(x, w, _targets(x), reduction="none"), lambda x, w: -_losses(x, w),
        parameters=((1100, WIDTH),),
    ),
}  # fmt: skip


def _parameters(operation, dtype, device):
    made = (
        make_data("normal", shape, seed=10 + i, dtype=dtype, device=device)
        for i, shape in enumerate(operation.parameters)
    )
    return [each / each.shape[-1] ** 0.5 if each.dim() == 2 else each for each in made]


def row_operations(scale, number, *, gradient):
    """Each operation, or its gradient for x, as a function of rows [R, width]; checked against fp64."""
    dtype = NUMBERS[number][0]
    batch, tokens = scale.rows
    for name, operation in OPERATIONS.items():
        parameters = _parameters(operation, dtype, scale.device)
        x = make_data("normal", (batch * tokens, operation.width), seed=0, dtype=dtype, device=scale.device)

        def call(rows, operation=operation, parameters=parameters):
            x = rows["x"].detach().requires_grad_(gradient)
            with poisoned_allocations():
                out = operation.call(x, *parameters)
                return torch.autograd.grad(out, x, torch.ones_like(out))[0] if gradient else out

        whole = call({"x": x})

        def by_torch(dtype, operation=operation, parameters=parameters, x=x):
            leaf = x.to(dtype).requires_grad_(gradient)
            out = operation.form(leaf, *(each.to(dtype) for each in parameters))
            return torch.autograd.grad(out, leaf, torch.ones_like(out))[0] if gradient else out

        what = f"{'gradient of ' if gradient else ''}{name} {number}"
        assert_no_worse_than_torch(whole, by_torch(dtype), by_torch(torch.float64), ulps=4, what=what)
        yield RowFunction(call, {"x": x}, what, whole, grid=(batch, tokens))


class Trained(NamedTuple):
    """The gradients of an operation's parameters, accumulated into main_grad over micro-batches of rows."""

    what: str
    parameters: dict
    rows: dict
    chunk: int
    step: Callable  # rows -> None: a backward

    def __call__(self, rows, cuts=(), start=None):
        def step(first, last):
            self.step({name: each[first:last] for name, each in rows.items()})

        return accumulate(self.parameters, step, len(rows["x"]), cuts, start)


def trained_operations(scale, number, chunks):
    """Operations with parameters, the embedding among them, on a little more than `chunks` - 1 chunks of rows."""
    dtype = NUMBERS[number][0]
    for name, operation in OPERATIONS.items():
        if not operation.parameters:
            continue
        made = [each.requires_grad_() for each in _parameters(operation, dtype, scale.device)]
        chunk = 1024 if made[0].dim() == 1 else isogemm.token_chunk(made[0])
        count = (chunks - 1) * chunk + 70
        x = make_data("normal", (count, operation.width), seed=1, dtype=dtype, device=scale.device)
        shape = (count, *operation.call(x[:1], *made).shape[1:])
        grad = make_data("normal", shape, seed=2, device=scale.device)

        def step(rows, operation=operation, made=made):
            out = operation.call(rows["x"], *made)
            out.backward(rows["grad"].to(out.dtype))

        parameters = {f"{name} {i}": each for i, each in enumerate(made)}
        yield Trained(f"{name} {number}", parameters, {"x": x, "grad": grad}, chunk, step)
    weight = make_data("normal", (50, 24), seed=3, dtype=dtype, device=scale.device).requires_grad_()
    count = (chunks - 1) * 1024 + 70
    ids = torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(0)).to(scale.device)
    grad = make_data("normal", (count, 24), seed=4, dtype=dtype, device=scale.device)
    yield Trained(
        f"embedding {number}", {"weight": weight}, {"x": ids, "grad": grad}, 1024,
        lambda rows: isogemm.embedding(rows["x"], weight).backward(rows["grad"]),
    )  # fmt: skip


class Sequences(NamedTuple):
    """Queries, keys and values of sequences, and how they attend."""

    what: str
    rows: dict  # q [B, H, T, D], k and v [B, Hkv, T, D], grad as q
    options: dict

    def attend(self, q, k, v, **more):
        with poisoned_allocations():
            return isogemm.attention(q, k, v, **self.options, **more)

    def gradients(self, rows, **more):
        """Gradients of q, k and v."""
        leaves = [rows[name].detach().requires_grad_() for name in "qkv"]
        out = isogemm.attention(*leaves, **self.options, **more)
        with poisoned_allocations():
            return torch.autograd.grad(out, leaves, rows["grad"])


def attentions(scale, number):
    """Causal attention of grouped heads: plain, with a window and sinks, and soft-capped; checked against fp64."""
    dtype, precision = NUMBERS[number]
    for tokens, head, options in scale.attentions:
        shapes = {"q": (5, 6, tokens, head), "k": (5, 2, tokens, head), "v": (5, 2, tokens, head)}
        rows = {
            name: make_data("normal", shape, seed=i, dtype=dtype, device=scale.device)
            for i, (name, shape) in enumerate(shapes.items())
        }
        rows["grad"] = make_data("normal", shapes["q"], seed=4, dtype=dtype, device=scale.device)
        options = {"causal": True, **options} | ({"precision": precision} if precision else {})
        made = Sequences(f"attention {number} {tokens} tokens, heads of {head}", rows, options)
        if set(options) <= {"causal", "precision"}:
            _assert_right(made, number)
        yield made


def _assert_right(sequences, number):
    rows = sequences.rows
    q, k, v = (rows[name].cpu() for name in "qkv")

    def by_torch(dtype):
        return F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True, enable_gqa=True)

    exact = by_torch(torch.float64)
    theirs = by_torch(q.dtype)
    if number == "tf32":  # torch's on a CPU has none
        theirs = exact * (1 + 2**-10)
    found = sequences.attend(*(rows[name] for name in "qkv")).cpu()
    assert_no_worse_than_torch(found, theirs, exact, ulps=2, what=sequences.what)
