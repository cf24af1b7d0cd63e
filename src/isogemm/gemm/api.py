"""`isogemm.mm`, `matmul`, `linear`, `matmul_fused` and `warmup`: autocast, and the way to autograd or to the plan.

In eager mode a call goes straight to its plan (no dispatcher hop); under torch.compile, fake tensors and dispatch modes
it goes through the registered operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function

from isogemm.core.eager import PLAIN, autocast_dtype, is_intercepted, is_tracing, likeness, through_dispatcher
from isogemm.core.errors import require_tensor
from isogemm.core.private import forward_ad_level
from isogemm.epilogues import spec
from isogemm.gemm import ahead, autograd, configs, fused_autograd, mlp_autograd, op
from isogemm.gemm.autograd import parameter
from isogemm.gemm.fused import ROUNDINGS, new_seed
from isogemm.gemm.fused_op import Call
from isogemm.gemm.plan import Plan
from isogemm.gemm.problem import dtype_name, resolve_precision

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)  # defaults are integers: torch.compile keeps 0 and 1 as they are

Tensors = torch.Tensor | Iterable[torch.Tensor] | torch.nn.Module


def mm(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, precision: str | None = None
) -> torch.Tensor:
    """Matrix product [M, K] @ [K, N] -> [M, N]; as `matmul`."""
    if is_intercepted():
        return handle_torch_function(mm, (), **locals())
    require_tensor("a", a, 2, "[M, K]")
    require_tensor("b", b, 2, "[K, N]")
    return matmul(a, b, out_dtype=out_dtype, precision=precision)


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, precision: str | None = None
) -> torch.Tensor:
    """torch.matmul, batch-invariant: a row's bits depend on the row and on b, on nothing else.

    Args:
        a: [..., M, K] or [K], any strides.
        b: [..., K, N] or [K], any strides; leading sizes are broadcast.
        out_dtype: torch.float32 for 16-bit inputs; None: the inputs' dtype.
        precision: of float32 inputs: "ieee", "tf32" or "tf32x3"; None follows
            torch.backends.cuda.matmul.fp32_precision. On the CPU any is computed as ieee.

    bfloat16, float16 and float32, summed in float32; float64 is torch's, without the promise. Differentiable, twice;
    gradients under the contract in docs/contract.md.
    """
    if is_intercepted():
        return handle_torch_function(matmul, (), **locals())
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
        if x.ndim == 0:
            raise ValueError(f"{name} has no dimensions; expected at least one")
    dtype = autocast_dtype(a)
    if dtype is not None:
        a, b = _cast(a, dtype), _cast(b, dtype)
        precision = precision if dtype is torch.float32 else None
    row, column = a.ndim == 1, b.ndim == 1
    a = a[None] if row else a
    b = b[:, None] if column else b
    result = autograd.matmul(a, b, out_dtype, precision)
    if column:
        result = result.squeeze(-1)
    return result.squeeze(-1 if column else -2) if row else result


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    activation_args: Mapping[str, float] | None = None,
    weight_up: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    alpha: float | torch.Tensor = 1,
    beta: float | torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    col_scale: torch.Tensor | None = None,
    dropout_p: float = 0,
    residual: torch.Tensor | None = None,
    epilogue: str | None = None,
    aux: Sequence[torch.Tensor] = (),
    rounding: str = "once",
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias in one launch, batch-invariant: a row's bits depend on the row, weight and bias alone.

    Args:
        x: [..., K], any strides.
        weight: [N, K], any strides, read where it lies. With a float32 `weight.main_grad` the backward accumulates into
            that, gives the weight no gradient and sets `weight.grad_added_to_main_grad`.
        bias: [N], likewise.
        weight_up, bias_up: [N, K] and [N], the second factor of a gated activation:
            act(x @ weight.T + bias) * (x @ weight_up.T + bias_up). Goes with no alpha, beta, c or scale.
        activation .. rounding: what follows in the same launch, as in `matmul_fused`.
        out_dtype, precision: as in `matmul`.
    """
    if (
        activation is not None or residual is not None or weight_up is not None or bias_up is not None
        or activation_args or c is not None or row_scale is not None or col_scale is not None
        or epilogue is not None or dropout_p or aux or rounding != "once"
        or isinstance(alpha, Tensor) or alpha != 1 or isinstance(beta, Tensor) or beta
    ):  # fmt: skip
        if is_intercepted():
            return handle_torch_function(linear, (), **locals())
        if not isinstance(x, Tensor):
            op.validate_linear(x, weight, bias, out_dtype, precision)
        require_tensor("weight", weight, 2, "[N, K]")
        if x.ndim == 0:
            raise ValueError("x has no dimensions; expected [..., K]")
        if x.ndim == 1:
            c, row_scale, residual = (
                each[None] if isinstance(each, torch.Tensor) else each for each in (c, row_scale, residual)
            )
        call = _call(
            x[None] if x.ndim == 1 else x, weight, bias, weight_up, bias_up, -1, activation, activation_args, alpha,
            beta, c, row_scale, col_scale, dropout_p, residual, epilogue, aux, rounding, out_dtype, precision,
            by_rows=True,
        )  # fmt: skip
        result = fused_autograd.run(call)
        return result[0] if x.ndim == 1 else result
    return plain_linear(x, weight, bias, out_dtype, precision)


def plain_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str | None,
) -> torch.Tensor:
    """`linear` without an epilogue: the path whose host time counts, one call per linear layer and token."""
    if is_intercepted():
        return handle_torch_function(linear, (), **locals())
    try:
        traced = is_compiling() or is_tracing()
        key = None if traced else (x.shape, weight.shape, bias is None, out_dtype, precision)
        found = _known.get(key, ())
    except (AttributeError, TypeError):  # no tensors, or of sizes that are symbols
        key, found = None, ()
    for known in found:
        if known.serves(x, weight, bias):
            return known.plan.run(x, weight, (bias,), None)
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))):
        op.validate_linear(x, weight, bias, out_dtype, precision)
    owner, bias_owner = weight, bias
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = _cast(x, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
        precision = precision if dtype is torch.float32 else None
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if through_dispatcher(*tensors):
        autograd.refuse_transforms("linear", *tensors)
        owners, main_grads = autograd.with_main_grad(owner, bias_owner)
        result = torch.ops.isogemm.linear(
            x, weight, bias, owners[0], main_grads[0], owners[1], main_grads[1], out_dtype, precision
        )
        return cast(torch.Tensor, result)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        differentiable: Any = autograd.Linear
        owned = autograd.Owners(owner, bias_owner)
        result = differentiable.apply(x, weight, bias, owned, out_dtype, resolve_precision(x, precision))
        return cast(torch.Tensor, result)
    follows_setting = x.dtype is torch.float32 and precision is None  # which a plan does not know
    if key is not None and dtype is None and not follows_setting:
        _know(key, tensors, op.plans.get(op.linear_key(x, weight, bias, out_dtype, precision)))
    return op.linear(x, weight, bias, out_dtype, precision)


class _Known(NamedTuple):
    """The plan of calls without gradients, modes or autocast that are like an earlier one in all but memory."""

    is_like: Callable[..., bool]
    is_trained: bool  # whether a tensor requires a gradient
    plan: Plan

    def serves(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        if (self.is_trained and torch.is_grad_enabled()) or forward_ad_level() >= 0:
            return False
        if not (self.is_like(x, weight) if bias is None else self.is_like(x, weight, bias)):
            return False
        return not (x.data_ptr() | weight.data_ptr()) & 15


_MOST_KNOWN = 4096
_MOST_ALIKE = 8  # of them for calls that shapes do not tell apart
_known: dict[tuple[Any, ...] | None, list[_Known]] = {}


def _know(key: tuple[Any, ...], tensors: Sequence[torch.Tensor], plan: Plan | None) -> None:
    """Keep the plan of such calls, where there is one: from the second call on."""
    x, weight, *bias = tensors
    is_plain = not (x.data_ptr() | weight.data_ptr()) & 15 and all(each.is_contiguous() for each in bias)
    is_like = likeness(tensors) if plan is not None and is_plain else None
    if plan is not None and is_like is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        alike = _known.setdefault(key, [])
        del alike[: len(alike) + 1 - _MOST_ALIKE]  # the oldest
        alike.append(_Known(is_like, any(each.requires_grad for each in tensors), plan))


def matmul_fused(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    bias_dim: int = -1,
    activation: str | None = None,
    activation_args: Mapping[str, float] | None = None,
    alpha: float | torch.Tensor = 1,
    beta: float | torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    col_scale: torch.Tensor | None = None,
    dropout_p: float = 0,
    residual: torch.Tensor | None = None,
    epilogue: str | None = None,
    aux: Sequence[torch.Tensor] = (),
    rounding: str = "once",
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """residual + dropout(act(alpha * row_scale * col_scale * (a @ b) + beta * c + bias)) in one launch.

    Args:
        a: [..., M, K], any strides.
        b: [K, N], any strides.
        bias: [N], or [..., M] with bias_dim=-2; of the inputs' dtype.
        activation: a name in `isogemm.epilogues.ACTIVATIONS` that is not gated; "gelu" is erf, as in torch.
        activation_args: of the activation, such as {"negative_slope": 0.2}.
        alpha, beta: numbers, or 0-d tensors on the device. beta is 1 where c is given without it, as in torch.addmm;
            with 0, c is not read.
        c, residual: [..., M, N], of the inputs' dtype or float32.
        row_scale, col_scale: [..., M] and [N], likewise.
        dropout_p: the probability of a zero; the rest is scaled up. The mask depends on the seed, which torch's
            generator draws on the device, and an element's row and column alone.
        epilogue: the name of a registered one (`isogemm.epilogues.register`) in the activation's place; `aux` are the
            tensors it reads, broadcast to [..., M, N].
        rounding: "once": all in float32, rounded at the end; "eager": rounded after the product and each operation,
            as `isogemm.mm` followed by torch's own (which do follow it, launched one by one, where the activation is
            gelu or quick_gelu, and for a registered epilogue). Bit-equal to them on a GPU; on the CPU but for
            activations with an exp, tanh or erf, which are isogemm's own functions there.
        out_dtype, precision: as in `matmul`.

    Batch-invariant and differentiable, twice, as `matmul`: docs/contract.md.
    """
    if is_intercepted():
        return handle_torch_function(matmul_fused, (), **locals())
    if not isinstance(a, torch.Tensor):
        raise TypeError(f"a is a {type(a).__name__}; expected a torch.Tensor [..., M, K]")
    if a.ndim < 2:
        raise ValueError(f"a has shape {list(a.shape)}; expected [..., M, K]")
    require_tensor("b", b, 2, "[K, N]")
    call = _call(
        a, b, bias, None, None, bias_dim, activation, activation_args, alpha, beta, c, row_scale, col_scale, dropout_p,
        residual, epilogue, aux, rounding, out_dtype, precision, by_rows=False,
    )  # fmt: skip
    return fused_autograd.run(call)


def mlp(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_down: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    bias_down: torch.Tensor | None = None,
    weight_up: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    activation: str = "gelu",
    activation_args: Mapping[str, float] | None = None,
    hidden_dropout_p: float = 0,
    dropout_p: float = 0,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """residual + dropout(dropout(act(x @ weight.T + bias)) @ weight_down.T + bias_down), two launches.

    As two calls of `linear`, but for the backward: the activation's derivative is the epilogue of the product that
    gives its gradient, and what is kept for it is let go as soon as it was read.
    """
    if is_intercepted():
        return handle_torch_function(mlp, (), **locals())
    if isinstance(x, torch.Tensor) and x.ndim == 1:
        residual = residual[None] if isinstance(residual, torch.Tensor) else residual
        return mlp(
            x[None], weight, weight_down, bias=bias, bias_down=bias_down, weight_up=weight_up, bias_up=bias_up,
            activation=activation, activation_args=activation_args, hidden_dropout_p=hidden_dropout_p,
            dropout_p=dropout_p, residual=residual, out_dtype=out_dtype, precision=precision,
        )[0]  # fmt: skip
    if isinstance(hidden_dropout_p, int | float) and not 0 <= hidden_dropout_p <= 1:
        raise ValueError(f"hidden_dropout_p is {hidden_dropout_p}; expected a probability")
    hidden = _call(
        x, weight, bias, weight_up, bias_up, -1, activation, activation_args, 1.0, None, None, None, None,
        hidden_dropout_p, None, None, (), "once", None, precision, by_rows=True,
    )  # fmt: skip
    require_tensor("weight_down", weight_down, 2, "[N, hidden]")
    if weight_down.shape[1] != weight.shape[0]:
        raise ValueError(
            f"weight_down has shape {list(weight_down.shape)}; expected [N, {weight.shape[0]}], "
            f"since weight is {list(weight.shape)}"
        )
    down = _call(
        hidden.x, weight_down, bias_down, None, None, -1, None, None, 1.0, None, None, None, None, dropout_p, residual,
        None, (), "once", out_dtype, precision, by_rows=True,
    )  # fmt: skip
    return mlp_autograd.run(hidden, down)


def _call(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_up: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    bias_dim: int,
    activation: str | None,
    activation_args: Mapping[str, float] | None,
    alpha: float | torch.Tensor,
    beta: float | torch.Tensor | None,
    c: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    col_scale: torch.Tensor | None,
    dropout_p: float,
    residual: torch.Tensor | None,
    epilogue: str | None,
    aux: Sequence[torch.Tensor],
    rounding: str,
    out_dtype: torch.dtype | None,
    precision: str | None,
    *,
    by_rows: bool,
) -> Call:
    """What the arguments say, after autocast; what is wrong with the tensors is found by what serves them."""
    arguments: tuple[float, ...] = ()
    if activation is not None:
        arguments = spec.argument_values(spec.activation(activation), activation_args)
    elif activation_args:
        raise ValueError(f"activation_args is {dict(activation_args)} without an activation")
    if epilogue is not None:
        spec.registered(epilogue)
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding is {rounding!r}; accepted: {', '.join(map(repr, ROUNDINGS))}")
    for each in (bias, weight_up, bias_up, c, row_scale, col_scale, residual):
        if each is not None and type(each) not in PLAIN:
            given = {
                "bias": bias, "weight_up": weight_up, "bias_up": bias_up, "c": c, "row_scale": row_scale,
                "col_scale": col_scale, "residual": residual,
            }  # fmt: skip
            _require_tensors({name: value for name, value in given.items() if value is not None})
            break
    if aux:
        _require_tensors({f"aux[{index}]": each for index, each in enumerate(aux)})
    if weight_up is not None:
        require_tensor("weight_up", weight_up, 2, "[N, K]")
    alpha_tensor, alpha_value = _number("alpha", alpha, 1.0)
    if beta is None:
        beta = 0 if c is None else 1
    beta_tensor, beta_value = _number("beta", beta, 0.0)
    if not isinstance(dropout_p, _NUMBERS):
        raise TypeError(f"dropout_p is {dropout_p!r}; expected a number")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p is {dropout_p}; expected a probability")
    owners: tuple[torch.Tensor | None, ...] = (None,) * 4
    if by_rows and torch.is_grad_enabled():
        owners = (parameter(weight), parameter(bias), parameter(weight_up), parameter(bias_up))
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = _cast(x, dtype), _cast(weight, dtype)
        bias, weight_up, bias_up = (each if each is None else _cast(each, dtype) for each in (bias, weight_up, bias_up))
        precision = precision if dtype is torch.float32 else None
    if beta_tensor is None and beta_value == 0:
        c = None
    return Call(
        x, weight, weight_up, bias, bias_up, c, residual, row_scale, col_scale, alpha_tensor, beta_tensor, tuple(aux),
        new_seed(x.device) if dropout_p > 0 else None, alpha_value, beta_value, float(dropout_p), activation or "",
        arguments, epilogue or "", bias_dim, rounding == "eager", by_rows, "", owners, (None,) * 4, out_dtype,
        precision,
    )  # fmt: skip


def _require_tensors(given: Mapping[str, Any]) -> None:
    for name, each in given.items():
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"{name} is a {type(each).__name__}; expected a torch.Tensor")


def _number(name: str, given: Any, nothing: float) -> tuple[torch.Tensor | None, float]:
    """A scalar on the device, or its value; `nothing` is the value that has no effect."""
    if isinstance(given, torch.Tensor):
        return given, nothing
    if not isinstance(given, _NUMBERS):
        raise TypeError(f"{name} is {given!r}; expected a number or a 0-d tensor")
    return None, float(given)


def warmup(
    weights: Tensors,
    *,
    tokens: int = 8192,
    backward: bool = False,
    bias: bool = False,
    activation: str | None = None,
    activation_args: Mapping[str, float] | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> int:
    """Compile all that `linear` will need for these weights: nothing is compiled later, in a server or a graph capture.

    Args:
        weights: [N, K] weights on a GPU, or a module, of which every linear and every isogemm.nn.MLP is taken.
        tokens: the most rows of x; every number up to it is covered.
        backward: the gradients too, of up to `tokens` rows.
        bias: with a bias; a module's linears are taken as they are.
        activation, activation_args: also followed by it; a module's are known.
        out_dtype, precision: as in the calls to come.

    Returns:
        The number of kernels that were compiled or found in Triton's cache. x, outputs and gradients are taken to be
        contiguous and aligned to 16 bytes, as torch allocates them.
    """
    if not isinstance(weights, torch.Tensor | torch.nn.Module | Iterable):
        raise TypeError(f"weights is a {type(weights).__name__}; expected [N, K] tensors or a module")
    return ahead.warmup(weights, tokens, backward, bias, activation, activation_args, out_dtype, precision)


def token_chunk(weight: torch.Tensor | torch.nn.Linear) -> int:
    """Number of tokens whose contributions to a weight's gradient form one partial sum.

    Micro-batches cut at multiples of it, accumulated into a float32 `weight.main_grad`, give the bits of one pass over
    the whole batch. Depends on the weight's shape and the dtype of the product, never on the batch.

    Args:
        weight: [N, K], as given to `linear`, or a linear module. Under autocast the product has autocast's dtype.
    """
    if isinstance(weight, torch.nn.Linear):
        weight = weight.weight
    require_tensor("weight", weight, 2, "[N, K]")
    dtype = autocast_dtype(weight)
    weight = weight if dtype is None else _cast(weight, dtype)
    if weight.dtype not in op.SERVED:
        raise TypeError(f"weight is {weight.dtype}; accepted: {', '.join(map(str, op.SERVED))}")
    return configs.token_chunk(weight.shape[0], weight.shape[1], dtype_name(weight.dtype))


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.dtype in op.SERVED else x
