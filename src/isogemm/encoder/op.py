"""`isogemm::encoder_norm` and `isogemm::attention`: what the composed path needs besides products.

In eager mode a call goes straight to its kernel; under torch.compile, fake tensors and dispatch modes it goes through
the registered operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from isogemm.core import dispatch
from isogemm.core.dispatch import Dispatch
from isogemm.core.eager import through_dispatcher
from isogemm.encoder import configs_norm, cpu
from isogemm.encoder.configs import LONGEST_HALF_HEAD
from isogemm.encoder.configs_attention import Attention
from isogemm.gemm import autograd, fused_autograd
from isogemm.gemm.autograd import Accumulated, parameter
from isogemm.gemm.configs import BIAS_BLOCKS
from isogemm.gemm.describe import aligned, dtype_name, flat
from isogemm.gemm.op import require_total

if TYPE_CHECKING:
    from isogemm.core.launch import BoundKernel, Launch


def encoder_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float, dtype: torch.dtype
) -> Tensor:
    """norm(x) * weight + bias over x's last dimension, in fp32, rounded to `dtype`; differentiable."""
    tensors = [each for each in (x, weight, bias) if each is not None]
    if through_dispatcher(*tensors):
        owners, main_grads = autograd.with_main_grad(parameter(weight), parameter(bias))
        accumulated = (owners[0], main_grads[0], owners[1], main_grads[1])
        return cast(Tensor, torch.ops.isogemm.encoder_norm(x, weight, bias, *accumulated, norm, eps, dtype))
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        owners = parameter(weight), parameter(bias)
        return cast(Tensor, cast(Any, _Norm).apply(x, weight, bias, owners, norm, eps, dtype))
    return _norm(x, weight, bias, norm, eps, dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        owners: tuple[Tensor | None, Tensor | None],
        norm: str,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owners, ctx.norm, ctx.eps = owners, norm, eps
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _norm(x, weight, bias, norm, eps, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("encoder_norm")
        accumulated = list(map(autograd.accumulated, ctx.owners, ctx.needs_input_grad[1:3]))
        return *_norm_gradients(ctx, grad, accumulated, _norm_backward), None, None, None, None


def _norm_gradients(
    ctx: Any, grad: Tensor, accumulated: Sequence[Accumulated], backward: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, weight and bias; None where not needed, and where added to a main_grad."""
    x, weight = ctx.saved_tensors
    needs_x, *needs = ctx.needs_input_grad[:3]
    for name, (_, total), needed in zip(("weight", "bias"), accumulated, needs, strict=True):
        if needed and total is not None:  # both, before either is touched
            require_total(f"the norm's {name}.main_grad", total, x.shape[-1:], x.device)
    dx, partial = backward(grad, x, weight, ctx.norm, ctx.eps, *needs)
    sums = iter(partial)
    dtypes = (None if weight is None else weight.dtype, ctx.bias_dtype)
    of_weight, of_bias = (
        fused_autograd.of_sums(next(sums), BIAS_BLOCKS, dtype, owner) if needed else None
        for needed, dtype, owner in zip(needs, dtypes, accumulated, strict=True)
    )
    return dx if needs_x else None, of_weight, of_bias


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not x.numel():
        return out
    record("encoder_norm", x)
    if not x.is_cuda:
        out.view(-1, x.shape[-1]).copy_(cpu.norm(flat(x), weight, bias, norm, eps))
        return out
    from isogemm.encoder import kernels_norm

    d = x.shape[-1]
    launch = kernels_norm.describe_norm(x.numel() // d, d, norm, eps, configs_norm.choose(d))
    run(launch, (placed(x), dense(weight), dense(bias), out))
    return out


def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, norm: str, eps: float, of_weight: bool, of_bias: bool
) -> tuple[Tensor, Tensor]:
    """That of x, and those of weight and bias that are wanted as sums over blocks of rows [0 to 2, blocks, D]."""
    d = x.shape[-1]
    rows = x.numel() // d
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = -(-rows // configs_norm.ROWS)
    partial = torch.empty((of_weight + of_bias, blocks, d), dtype=torch.float32, device=x.device)
    if not rows:
        return dx, partial
    record("encoder_norm_backward", x)
    weight_sums, bias_sums = partial[0] if of_weight else None, partial[-1] if of_bias else None
    if not x.is_cuda:
        of_x, *sums = cpu.norm_backward(flat(grad), flat(x), weight, norm, eps, configs_norm.ROWS)
        dx.view(-1, d).copy_(of_x)
        for into, computed in zip((weight_sums, bias_sums), sums, strict=True):
            if into is not None:
                into.copy_(computed)
        return dx, partial
    from isogemm.encoder import kernels_norm

    launch = kernels_norm.describe_norm_backward(rows, d, norm, eps, configs_norm.choose(d))
    run(launch, (placed(grad), placed(x), dense(weight), dx, weight_sums, bias_sums))
    return dx, partial


def placed(x: Tensor) -> Tensor:
    """Contiguous and aligned: the order of a row's sums follows how it is loaded."""
    x = x.contiguous()
    return x if aligned(x) else x.clone()


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


_bound: dict[tuple[Any, ...], BoundKernel] = {}


def run(launch: Launch, tensors: tuple[Tensor | None, ...]) -> None:
    """On the tensors' device; compiled where it is not yet."""
    index = next(each for each in tensors if each is not None).get_device()
    seen = tuple(None if each is None else (each.dtype, each.data_ptr() & 15 == 0) for each in tensors)
    key = (launch.kernel, *launch.constants.values(), *map(_specialised, launch.scalars), index, seen)
    with torch.cuda.device(index):
        kernel = _bound.get(key)
        if kernel is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("nothing can be compiled while a CUDA graph is captured: call the layer before")
            kernel = _bound[key] = launch.bind(*tensors)
        addresses = (None if each is None else each.data_ptr() for each in tensors)
        kernel(index, launch.programs, *addresses, *launch.scalars)


def _specialised(scalar: object) -> object:
    """What Triton compiles for, of an integer; else the number."""
    return (scalar == 1, scalar % 16 == 0, scalar >= 2**31) if isinstance(scalar, int) else scalar


class AttentionCall(NamedTuple):
    """The arguments of `attention` that are read again in the backward."""

    q: Tensor  # [S, T, H * d], or [S, T, 3 H * d] with k and v after it
    k: Tensor | None
    v: Tensor | None
    mask: Tensor | None  # [S, T]: bool, True for a key to leave out, or floating point, added to the scores
    nhead: int
    is_causal: bool
    precision: str | None
    previous: Tensor | None = None  # [S, H, T, T] in q's dtype, added to the scores
    seed: Tensor | None = None  # of dropout, int64
    dropout: float = 0.0  # of the weights
    scores: bool = False  # whether they are a result

    def parts(self, packed: Tensor, *rest: Tensor | None) -> list[Tensor]:
        """q, k and v, or what is laid out like them: views."""
        if self.k is None:
            return list(packed.chunk(3, dim=-1))
        return [packed, *(each for each in rest if each is not None)]

    @property
    def width(self) -> int:
        return self.q.shape[-1] // (3 if self.k is None else 1)

    @property
    def extras(self) -> cpu.Extras:
        return cpu.Extras(self.previous, self.dropout, self.seed)

    def empty_scores(self, wanted: bool) -> Tensor:
        sequences, tokens, _ = self.q.shape
        return self.q.new_empty((sequences, self.nhead, tokens, tokens) if wanted else 0)


_TENSORS = ("q", "k", "v", "mask", "previous", "seed")


def attention(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """drop(softmax(scores)) v of every head [S, T, H * d], 0 for a query without keys; and, where wanted, the scores.

    They are q k^T / sqrt(d) + previous + mask [S, H, T, T], -inf where a query does not see a key. Differentiable.
    """
    tensors = [each for each in call if isinstance(each, Tensor)]
    if through_dispatcher(*tensors):
        o, _, scores = torch.ops.isogemm.attention(*call)
    elif torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        o, scores = cast(Any, _Attention).apply(*call)
    else:
        o, _, scores = _attention(*call)
    return o, scores if call.scores else None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        o, lse, scores = _attention(*args)
        _keep_attention(ctx, args, (o, lse))
        return o, scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_scores: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention")
        return _attention_gradients(ctx, grad, of_scores, _attention_backward)


def _keep_attention(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
    given = AttentionCall(*args)._asdict()
    ctx.save_for_backward(*results, *(given.pop(name) for name in _TENSORS))
    ctx.rest = given
    ctx.set_materialize_grads(False)


def _attention_gradients(
    ctx: Any, grad: Tensor | None, of_scores: Tensor | None, backward: Any
) -> tuple[Tensor | None, ...]:
    """Of an AttentionCall's fields."""
    o, lse, *tensors = ctx.saved_tensors
    call = AttentionCall(**dict(zip(_TENSORS, tensors, strict=True)), **ctx.rest)
    needed = dict(zip(call._fields, ctx.needs_input_grad, strict=True))
    grad = torch.zeros_like(o) if grad is None else grad
    found = backward(grad, of_scores if call.scores else None, o, lse, needed["previous"], *call)
    gradients = dict(zip(("q", "k", "v", "previous"), found, strict=True))
    return tuple(gradients.get(name) if needed[name] else None for name in call._fields)


def _attention(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The result, log2 of every query's sum of exp2(score * log2(e)) [S, T, H], +inf where it has no keys; scores."""
    call = AttentionCall(*args)
    sequences, tokens, _ = call.q.shape
    o = call.q.new_empty((sequences, tokens, call.width))
    lse = call.q.new_empty((sequences, tokens, call.nhead), dtype=torch.float32)
    result = call.empty_scores(call.scores)
    if not o.numel():
        return o, lse, result
    q, k, v = call.parts(*call[:3])
    scores = result if call.scores else None
    if call.q.is_cuda:
        _attention_on_gpu(call, "forward", q, k, v, call.mask, call.previous, call.seed, o, lse, scores)
    else:
        cpu.attention(q, k, v, call.mask, call.nhead, call.is_causal, o, lse, scores, call.extras)
    record("attention", call.q)
    return o, lse, result


def _attention_backward(
    grad: Tensor, of_scores: Tensor | None, o: Tensor, lse: Tensor, of_previous: bool, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and, where wanted, previous; where q holds all three, of it, and two that are empty."""
    call = AttentionCall(*args)
    found = _like_operands(call, of_previous)
    if not o.numel():
        return found
    q, k, v = call.parts(*call[:3])
    dq, dk, dv = call.parts(*found[:3])
    d_previous = found[3] if of_previous else None
    if call.q.is_cuda:
        given = (q, k, v, call.mask, call.previous, call.seed, o, lse, grad.contiguous(), of_scores)
        _attention_on_gpu(call, "backward", *given, dq, dk, dv, d_previous)
    else:
        cpu.attention_backward(
            grad, q, k, v, call.mask, call.nhead, call.is_causal, dq, dk, dv, of_scores, d_previous, call.extras
        )
    record("attention_backward", call.q)
    return found


def _like_operands(call: AttentionCall, of_previous: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (call.q.new_empty(0 if each is None else each.shape) for each in call[:3])
    return dq, dk, dv, call.empty_scores(of_previous)


def _attention_on_gpu(call: AttentionCall, direction: str, *tensors: Tensor | None) -> None:
    """Launch what serves heads of this size.

    Of q, k, v, mask, previous, seed, o, lse and scores; in the backward do, d_scores, dq, dk, dv and d_previous instead
    of the scores.
    """
    from isogemm.encoder import plan

    forward = direction == "forward"
    if call.width // call.nhead > LONGEST_HALF_HEAD and call.q.dtype is not torch.float32:
        wide = [each.float() if each is not None and each.is_floating_point() else each for each in tensors]
        _attention_on_gpu(call._replace(q=call.q.float(), precision="tf32"), direction, *wide)
        for place in (6, 8) if forward else range(10, 14):
            if (written := tensors[place]) is not None:
                written.copy_(cast(Tensor, wide[place]))
        return
    q, k, v, mask, previous, seed, o, lse, *rest = tensors
    grads = () if forward else rest[2:5]
    last = rest[0] if forward else rest[1]  # scores, or their gradient
    sequences, tokens, _ = call.q.shape
    problem = Attention(
        sequences, tokens, call.nhead, call.width // call.nhead, dtype_name(call.q.dtype), call.precision or "ieee",
        tuple(_row_stride(each) for each in (q, k, v, *grads)), call.is_causal,
        "" if mask is None else "bool" if mask.dtype is torch.bool else "additive",
        (0, 0) if mask is None else cast("tuple[int, int]", mask.stride()), plan.backend(),
        dropout=call.dropout, previous=previous is not None, scores=last is not None,
    )  # fmt: skip
    if mask is not None and mask.dtype is torch.bool:
        mask = mask.view(torch.uint8)
    if previous is not None:
        previous = placed(previous)
    if not forward and last is not None:
        rest[1] = placed(last)
    describe = plan.describe_attention if forward else plan.describe_attention_backward
    run(describe(problem), (q, k, v, mask, previous, seed if call.dropout else None, o, lse, *rest))


def _row_stride(x: Tensor | None) -> int:
    """Of [S, T, width] whose rows lie one after another."""
    assert x is not None
    return x.stride(1)


def record(name: str, x: Tensor) -> None:
    if dispatch.active:
        path, reason = ("encoder", "on a GPU") if x.is_cuda else ("cpu", "not on a GPU")
        dispatch.record(Dispatch(name, path, f"{list(x.shape)} {dtype_name(x.dtype)}", "", reason))


# registration with torch.library, for torch.compile, fake tensors and dispatch modes


def _encoder_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    owner: Tensor | None,
    main_grad: Tensor | None,
    bias_owner: Tensor | None,
    bias_main_grad: Tensor | None,
    norm: str,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    return _norm(x, weight, bias, norm, eps, dtype)


def _encoder_norm_fake(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=args[-1])


def _encoder_norm_backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor | None, norm: str, eps: float, of_weight: bool, of_bias: bool
) -> tuple[Tensor, Tensor]:
    d = x.shape[-1]
    blocks = (x.numel() // d + configs_norm.ROWS - 1) // configs_norm.ROWS
    return x.new_empty(x.shape), x.new_empty((of_weight + of_bias, blocks, d), dtype=torch.float32)


def _attention_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = AttentionCall(*args)
    sequences, tokens, _ = call.q.shape
    o = call.q.new_empty((sequences, tokens, call.width))
    lse = call.q.new_empty((sequences, tokens, call.nhead), dtype=torch.float32)
    return o, lse, call.empty_scores(call.scores)


def _attention_backward_fake(
    grad: Tensor, of_scores: Tensor | None, o: Tensor, lse: Tensor, of_previous: bool, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like_operands(AttentionCall(*args), of_previous)


_OPERANDS = (
    "Tensor q, Tensor? k, Tensor? v, Tensor? mask, int nhead, bool is_causal, str? precision, Tensor? previous, "
    "Tensor? seed, float dropout, bool scores"
)

# torch.library is not typed.
_library: Any = torch.library.Library("isogemm", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _function, _fake in (
    (
        "encoder_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? owner, Tensor? main_grad, Tensor? bias_owner, "
        "Tensor? bias_main_grad, str norm, float eps, ScalarType dtype) -> Tensor",
        _encoder_norm,
        _encoder_norm_fake,
    ),
    (
        "encoder_norm_backward(Tensor grad, Tensor x, Tensor? weight, str norm, float eps, bool of_weight, "
        "bool of_bias) -> (Tensor, Tensor)",
        _norm_backward,
        _encoder_norm_backward_fake,
    ),
    (f"attention({_OPERANDS}) -> (Tensor, Tensor, Tensor)", _attention, _attention_fake),
    (
        "attention_backward(Tensor grad, Tensor? of_scores, Tensor o, Tensor lse, bool of_previous, "
        f"{_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)",
        _attention_backward,
        _attention_backward_fake,
    ),
):
    _library.define(_schema)
    _name = _schema.partition("(")[0]
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
    torch.library.register_fake(f"isogemm::{_name}", _fake, lib=_library)


def _register_autograd() -> None:
    """The operators' autograd: the same gradients, through the operators."""

    def keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, owner, main_grad, bias_owner, bias_main_grad, ctx.norm, ctx.eps, _ = inputs
        ctx.save_for_backward(x, weight)
        # Not saved tensors: another micro-batch's backward may change a main_grad before this one's does.
        ctx.given = (owner, main_grad), (bias_owner, bias_main_grad)
        ctx.bias_dtype = None if bias is None else bias.dtype

    def norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("encoder_norm")
        accumulated = list(map(autograd.given_or_accumulated, ctx.given, ctx.needs_input_grad[1:3]))
        found = _norm_gradients(ctx, grad, accumulated, torch.ops.isogemm.encoder_norm_backward)
        return *found, *(None,) * 7

    def keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _keep_attention(ctx, inputs, output[:2])
        ctx.mark_non_differentiable(output[1])

    def attention_backward(ctx: Any, grad: Tensor | None, of_lse: None, of_scores: Tensor | None) -> Any:
        refuse_second_derivative("attention")
        return _attention_gradients(ctx, grad, of_scores, torch.ops.isogemm.attention_backward)

    register: Any = torch.library.register_autograd
    register("isogemm::encoder_norm", norm_backward, setup_context=keep_norm)
    register("isogemm::attention", attention_backward, setup_context=keep_attention)


def refuse_second_derivative(name: str) -> None:
    """In a backward: gradients that were themselves differentiated (create_graph) would be wrong."""
    if torch.is_grad_enabled() and not is_compiling():
        raise RuntimeError(f"isogemm::{name} has no second derivative")


_register_autograd()
