"""`isogemm::row_norm`: RMS norm and layer norm of rows, with the gradients of rows, weight and bias."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from isogemm.core.dispatch import Dispatch, record_operator
from isogemm.core.eager import PLAIN, through_dispatcher
from isogemm.core.operator import Operator, refuse_second_derivative
from isogemm.core.plan import INPUTS, OUT, Place, Plan, make_step, plans
from isogemm.core.plan import run_launch as run
from isogemm.gemm import autograd
from isogemm.gemm.autograd import Accumulated, main_grad_of, parameter
from isogemm.gemm.configs import BIAS_BLOCKS
from isogemm.gemm.describe import flat, layout, rows
from isogemm.gemm.op import require_total
from isogemm.norm import configs, cpu

NONE = (None,) * 4  # no owners


def owners_of(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operators' arguments owner, main_grad, bias_owner and bias_main_grad."""
    weight, bias = parameter(weight), parameter(bias)
    return weight, main_grad_of(weight), bias, main_grad_of(bias)


def checked_owners(ctx: Any, x: Tensor, needs: tuple[bool, bool]) -> list[Accumulated]:
    """Owner and main_grad of weight and bias. Both are checked before either is changed."""
    owners = list(map(autograd.given_or_accumulated, ctx.given, needs))
    for name, (_, total), needed in zip(("weight", "bias"), owners, needs, strict=True):
        if needed and total is not None:
            require_total(f"the norm's {name}.main_grad", total, x.shape[-1:], x.device)
    return owners


def keep_parameters(ctx: Any, weight: Tensor | None, bias: Tensor | None, *owners: Tensor | None) -> None:
    """Keep what the gradients of weight and bias need. A main_grad is no saved tensor: other backwards change it."""
    ctx.dtypes = [None if each is None else each.dtype for each in (weight, bias)]
    # In eager mode the backward reads the owner's main_grad: an older one is not kept alive until then.
    pairs = owners[:2], owners[2:]
    ctx.given = [(owner, None if type(owner) in PLAIN else total) for owner, total in pairs]


def row_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float,
    offset: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """norm(s) * (offset + weight) + bias over the last dimension of s = x + residual, rounded to `dtype`; and s.

    Computed in fp32; s is rounded to x's dtype first, and empty without a residual. Differentiable.
    """
    trained = torch.is_grad_enabled() and True in [
        each is not None and each.requires_grad for each in (x, residual, weight, bias)
    ]
    owners = owners_of(weight, bias) if trained else NONE
    y, summed, _ = row_norm_operator(x, residual, weight, bias, *owners, norm, eps, offset, dtype, trained)
    return y, summed


class Known(NamedTuple):
    """An eager call on a GPU that was served before, without what its tensors hold."""

    plan: Plan
    norm: str
    offset: float
    statistics: tuple[int, int] | None  # their shape; None without gradients


def known_call(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float,
    offset: float, dtype: torch.dtype, trained: bool,
) -> Known:  # fmt: skip
    """The call on these contiguous, aligned tensors."""
    statistics = (_statistics(norm), rows(x)) if trained else None
    like = x.new_empty(statistics or 0, dtype=torch.float32)
    inputs = x, residual, weight, bias, None if residual is None else x, like if trained else None
    return Known(plan_of(*inputs, norm, eps, offset, dtype), norm, offset, statistics)


def run_known(
    known: Known, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run a known call: the result, and x + residual."""
    if known.statistics is not None:
        return cast("tuple[Tensor, Tensor | None]", cast(Any, _Eager).apply(x, residual, weight, bias, known))
    summed = None if residual is None else torch.empty_like(x)
    return known.plan.run((x, residual, weight, bias, summed, None)), summed


class _Eager(torch.autograd.Function):
    """A known call with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor | None]:
        weight, bias, known = rest
        summed = None if residual is None else torch.empty_like(x)
        statistics = torch.empty(known.statistics, dtype=torch.float32, device=x.device)
        y = known.plan.run((x, residual, weight, bias, summed, statistics))
        ctx.save_for_backward(x if summed is None else summed, weight, statistics)
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.offset = known.norm, known.offset
        ctx.dtypes = [None if each is None else each.dtype for each in (weight, bias)]
        ctx.given = (parameter(weight), None), (parameter(bias), None)
        return y, summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grads[0], grads[1], None)[:4], None


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, norm, eps, offset, dtype, trained = rest
    d = x.shape[-1]
    summed = x.new_empty(0) if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    statistics = x.new_empty((_statistics(norm), rows(x) if trained else 0), dtype=torch.float32)
    if not x.is_cuda or not x.numel():
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        if x.numel():
            record_operator(norm, x)
            normed, added, moments = cpu.norm(flat(x), residual, weight, bias, norm, eps, offset)
            y.view(-1, d).copy_(normed)
            if residual is not None:
                summed.view(-1, d).copy_(added)
            if trained:
                statistics.copy_(moments)
        return y, summed, statistics
    residual, weight, bias = (each if each is None else each.contiguous() for each in (residual, weight, bias))
    inputs = (
        x.contiguous(),
        residual,
        weight,
        bias,
        None if residual is None else summed,
        statistics if trained else None,
    )
    plan = plan_of(*inputs, norm, eps, offset, dtype)
    return plan.run(inputs), summed, statistics


def plan_of(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, summed: Tensor | None,
    statistics: Tensor | None, norm: str, eps: float, offset: float, dtype: torch.dtype,
) -> Plan:  # fmt: skip
    """The plan of these inputs on a GPU: contiguous, not empty."""
    key = (
        norm, eps, offset, dtype, x.shape, layout(x), layout(residual), layout(weight), layout(bias),
        statistics is None,
    )  # fmt: skip
    plan = plans.get(key)
    if plan is not None:
        return plan
    from isogemm.norm.kernels import row_norm as kernels

    d = x.shape[-1]
    tensors = x, residual, weight, bias, None, summed, statistics
    at = INPUTS, INPUTS + 1, INPUTS + 2, INPUTS + 3, OUT, INPUTS + 4, INPUTS + 5
    places: list[Place | None] = [
        None if each is None else ((each.dtype, each.data_ptr() % 16 == 0), place)
        for each, place in zip(tensors, at, strict=True)
    ]
    places[4] = (dtype, True), OUT
    launch = kernels.describe_norm(rows(x), d, norm, eps, offset, configs.choose(d, x.dtype.itemsize))
    served = Dispatch(norm, "norm", f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}", "", "")
    step = make_step(launch, places, x.device)
    return plans.keep(key, Plan.of(served, x.shape, dtype, x.device, (step,)))


def _statistics(norm: str) -> int:
    """Numbers that the backward needs of each row: 1 / deviation, and a layer norm's mean."""
    return 2 if norm == "layer_norm" else 1


def _gradients(ctx: Any, grad: Tensor | None, of_summed: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 9
    if grad is None and of_summed is None:
        return (*(None,) * 4, *nothing)
    refuse_second_derivative(ctx.norm)
    x, weight, statistics = ctx.saved_tensors
    of_x, of_residual, *needs = ctx.needs_input_grad[:4]
    if grad is None:
        grad = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    owners = checked_owners(ctx, x, (needs[0], needs[1]))
    d, block = x.shape[-1], configs.SUM_ROWS
    if x.is_cuda and d:
        block = sub = configs.choose_backward(d, x.dtype.itemsize).sub
        total = owners[0][1]
        is_twice = total is not None and total is owners[1][1]  # one parameter, to which one launch adds once
        if not through_dispatcher(grad, x) and x.numel() and not is_twice:
            block = configs.sum_rows(rows(x), d, sub)
            dx, *gradients = _gradients_by_plan(ctx, grad, of_summed, x, weight, statistics, needs, owners, block)
            return dx if of_x else None, dx if of_residual else None, *gradients, *nothing
    dx, partial = row_norm_backward(
        grad, of_summed, x, weight, statistics, ctx.norm, ctx.offset, needs[0], needs[1], block
    )
    sums = partial[0] if needs[0] else None, partial[-1] if needs[1] else None
    gradients = [
        None if each is None else of_sums(each, configs.SUM_ROWS // block, dtype, owner)
        for each, dtype, owner in zip(sums, ctx.dtypes, owners, strict=True)
    ]
    return dx if of_x else None, dx if of_residual else None, *gradients, *nothing


def _gradients_by_plan(
    ctx: Any, grad: Tensor, of_summed: Tensor | None, x: Tensor, weight: Tensor | None, statistics: Tensor,
    needs: list[bool], owners: list[Accumulated], block: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dx and the gradients of weight and bias in one plan; None where not needed and where added to a main_grad."""
    totals = [total for _, total in owners]
    outs = [
        None if not needed else torch.empty(x.shape[-1], dtype=dtype, device=x.device) if total is None else total
        for needed, total, dtype in zip(needs, totals, ctx.dtypes, strict=True)
    ]
    inputs = (
        grad.contiguous(), None if of_summed is None else of_summed.contiguous(), x.contiguous(),
        None if weight is None else weight.contiguous(), statistics, *outs,
    )  # fmt: skip
    dx = _backward_plan(inputs, [total is not None for total in totals], ctx.norm, ctx.offset, block).run(inputs)
    for needed, (owner, total) in zip(needs, owners, strict=True):
        if needed and total is not None:
            owner.grad_added_to_main_grad = True  # type: ignore[union-attr]
    return dx, *(out if total is None else None for out, total in zip(outs, totals, strict=True))


def _backward_plan(
    inputs: tuple[Tensor | None, ...], accumulate: list[bool], norm: str, offset: float, block: int
) -> Plan:
    """Plan of the inputs (grad, of_summed, x, weight, statistics, gradient of weight, gradient of bias)."""
    key = "norm_backward", norm, offset, block, *map(layout, inputs), *accumulate
    plan = plans.get(key)
    if plan is not None:
        return plan
    from isogemm.norm.kernels import row_norm as kernels

    x = cast(Tensor, inputs[2])
    d, count = x.shape[-1], rows(x)
    blocks = -(-count // block)
    grad, of_summed, _, weight, statistics, *outs = (
        None if each is None else ((each.dtype, each.data_ptr() % 16 == 0), INPUTS + index)
        for index, each in enumerate(inputs)
    )
    given: Place = (x.dtype, x.data_ptr() % 16 == 0), INPUTS + 2
    dx: Place = (x.dtype, True), OUT
    # Parts of the scratch memory, each at a multiple of 16 bytes: sums for weight and bias, coefficients of long rows.
    is_long = d > configs.LONG_COLUMNS
    sizes = [blocks * d for out in outs if out is not None] + [_statistics(norm) * count] * is_long
    ends = [0, *itertools.accumulate(-(-size // 4) * 4 for size in sizes)]
    parts: Iterator[Place] = iter([((torch.float32, True), index - len(sizes)) for index in range(len(sizes))])
    sums = [None if out is None else next(parts) for out in outs]
    config = configs.choose_backward(d, x.dtype.itemsize)
    if is_long:
        coefficients = next(parts)
        launch = kernels.describe_coefficients(count, d, norm, offset, configs.choose(d, x.dtype.itemsize))
        steps = [make_step(launch, (grad, given, weight, statistics, coefficients), x.device)]
        launch = kernels.describe_long_backward(count, d, norm, offset)
        places = (grad, of_summed, given, weight, statistics, coefficients, dx, *sums)
        steps.append(make_step(launch, places, x.device))
    else:
        launch = kernels.describe_norm_backward(count, d, norm, offset, block, config)
        steps = [make_step(launch, (grad, of_summed, given, weight, statistics, dx, *sums), x.device)]
    wanted = [which for which, tensor in enumerate(inputs[5:]) if tensor is not None]
    if wanted:
        strides = [cast(Tensor, inputs[5 + which]).stride(0) for which in wanted]
        adds = [accumulate[which] for which in wanted]
        launch = kernels.describe_weight_sums(blocks, d, configs.SUM_ROWS // block, BIAS_BLOCKS, strides, adds)
        pairs = [each for which in wanted for each in (sums[which], outs[which])]
        steps.append(make_step(launch, (*pairs, *[None] * (4 - len(pairs))), x.device))
    served = Dispatch(f"{norm}_backward", "norm", f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}", "", "")
    begins = [4 * each for each in ends[:-1]]
    return plans.keep(key, Plan.of(served, x.shape, x.dtype, x.device, steps, ends[-1], begins))


def of_sums(sums: Tensor, subs: int, dtype: torch.dtype, accumulated: Accumulated) -> Tensor | None:
    """A [D] gradient from sums over blocks of rows, `subs` to SUM_ROWS rows; None where added to a main_grad."""
    return None if _add_weight_sums(accumulated, sums, subs) else weight_sums(sums, subs, dtype)


def _weight_sums(sums: Tensor, subs: int, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
    """Sum over all blocks but the last, which is empty, in the chunked order; added to `total` where given."""
    sums = sums[:-1]
    count, d = sums.shape
    out = torch.empty(d, dtype=dtype, device=sums.device) if total is None else total
    if not sums.is_cuda:
        return cpu.weight_sums(sums, BIAS_BLOCKS, total, out)
    if not count:
        return out.zero_() if total is None else out
    from isogemm.norm.kernels import row_norm as kernels

    launch = kernels.describe_weight_sums(count, d, subs, BIAS_BLOCKS, [out.stride(0)], [total is not None])
    run(launch, (sums, out, None, None))
    return out


def _norm_backward(
    grad: Tensor, of_summed: Tensor | None, x: Tensor, weight: Tensor | None, statistics: Tensor, norm: str,
    offset: float, of_weight: bool, of_bias: bool, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx, and the wanted gradients of weight and bias as sums over blocks of rows [0 to 2, blocks + 1, D].

    The last of them is empty: torch.compile would take a single block for a constant.
    """
    d, count = x.shape[-1], rows(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty((of_weight + of_bias, -(-count // block) + 1, d), dtype=torch.float32, device=x.device)
    partial[:, -1].zero_()
    if not x.numel():
        return dx, partial
    record_operator(f"{norm}_backward", x)
    sums = partial[0] if of_weight else None, partial[-1] if of_bias else None
    if not x.is_cuda:
        of_x, *found = cpu.norm_backward(
            flat(grad), None if of_summed is None else flat(of_summed), flat(x), weight, statistics, norm, offset, block
        )
        dx.view(-1, d).copy_(of_x)
        for into, computed in zip(sums, found, strict=True):
            if into is not None:
                into[:-1].copy_(computed)
        return dx, partial
    from isogemm.norm.kernels import row_norm as kernels

    given = [None if each is None else each.contiguous() for each in (grad, of_summed, x, weight)]
    if d > configs.LONG_COLUMNS:
        coefficients = torch.empty_like(statistics)
        launch = kernels.describe_coefficients(count, d, norm, offset, configs.choose(d, x.dtype.itemsize))
        run(launch, (given[0], *given[2:], statistics, coefficients))
        launch = kernels.describe_long_backward(count, d, norm, offset)
        run(launch, (*given, statistics, coefficients, dx, *sums))
        return dx, partial
    launch = kernels.describe_norm_backward(count, d, norm, offset, block, configs.choose_backward(d, x.dtype.itemsize))
    run(launch, (*given, statistics, dx, *sums))
    return dx, partial


def _norm_fake(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, norm, _, _, dtype, trained = rest
    statistics = x.new_empty((_statistics(norm), rows(x) if trained else 0), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(0 if residual is None else x.shape), statistics


def _norm_backward_fake(grad: Tensor, of_summed: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    of_weight, of_bias, block = rest[-3:]
    blocks = (rows(x) + block - 1) // block + 1
    shape = (of_weight + of_bias, blocks, x.shape[-1])
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, bias, *owners, ctx.norm, _, ctx.offset, _, _ = inputs
    _, summed, statistics = output
    ctx.save_for_backward(x if residual is None else summed, weight, statistics)
    ctx.mark_non_differentiable(*((summed,) if residual is None else ()), statistics)
    ctx.set_materialize_grads(False)
    keep_parameters(ctx, weight, bias, *owners)


OWNERS = "Tensor? owner, Tensor? main_grad, Tensor? bias_owner, Tensor? bias_main_grad"

row_norm_operator: Operator[tuple[Tensor, Tensor, Tensor]] = Operator(
    f"row_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, {OWNERS}, str norm, float eps, float offset, "
    "ScalarType dtype, bool trained) -> (Tensor, Tensor, Tensor)",
    _norm,
    _norm_fake,
    keep=_keep,
    backward=_gradients,
    refused="rms_norm and isogemm.layer_norm",
)
row_norm_backward: Operator[tuple[Tensor, Tensor]] = Operator(
    "row_norm_backward(Tensor grad, Tensor? of_summed, Tensor x, Tensor? weight, Tensor statistics, str norm, "
    "float offset, bool of_weight, bool of_bias, int block) -> (Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
)
weight_sums: Operator[Tensor] = Operator(
    "norm_weight_sums(Tensor sums, int subs, ScalarType dtype) -> Tensor",
    _weight_sums,
    lambda sums, subs, dtype: sums.new_empty(sums.shape[-1:], dtype=dtype),
)
_add_weight_sums = autograd.MainGradAdder(
    "norm_weight_sums", "the norm's weight or bias", "Tensor sums, int subs",
    shape=lambda sums, subs: sums.shape[-1:],
    compute=lambda main_grad, sums, subs: _weight_sums(sums, subs, torch.float32, cast(Tensor, main_grad)),
)  # fmt: skip
