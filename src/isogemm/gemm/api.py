"""`isogemm.mm`, `matmul`, `linear` and `matmul_fused`: autocast, and the way to autograd or to the plan.

In eager mode a call goes straight to its plan (no dispatcher hop); under torch.compile, fake tensors and dispatch modes
it goes through the registered operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, Unpack, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from isogemm.core.device import resolve_precision
from isogemm.core.eager import (
    NO_TENSOR,
    PLAIN,
    KnownCalls,
    autocast_dtype,
    is_intercepted,
    is_tracing,
    refuse_transforms,
    through_dispatcher,
)  # fmt: skip
from isogemm.core.errors import require_tensor
from isogemm.core.plan import Plan, plans
from isogemm.epilogues import spec
from isogemm.epilogues.operands import DEFAULTS, PLACES, SHAPES, Arguments, Operands
from isogemm.gemm import autograd, configs, fused, fused_autograd, mlp_autograd, op
from isogemm.gemm.autograd import parameter
from isogemm.gemm.describe import dtype_name
from isogemm.gemm.fused import ROUNDINGS, Call, new_seed
from isogemm.gemm.warmup import warmup as warmup

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)  # defaults are integers: torch.compile keeps 0 and 1 as they are

Function = TypeVar("Function", bound=Callable[..., Tensor])


def _with_keywords(function: Function) -> Function:
    """Show the epilogue's keywords in a function's signature."""
    signature = inspect.signature(function)
    given = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=DEFAULTS[name],
            annotation=getattr(hint, "__forward_arg__", hint),
        )
        for name, hint in Arguments.__annotations__.items()
    ]
    keywords += [given.pop() for _ in ("precision", "out_dtype")][::-1]
    cast(Any, function).__signature__ = signature.replace(parameters=[*given, *keywords])
    return function


def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, precision: str | None = None) -> Tensor:
    """Matrix product [M, K] @ [K, N] -> [M, N]; as `matmul`."""
    if has_torch_function(NO_TENSOR) and not is_compiling():
        return handle_torch_function(mm, (), **locals())
    if not (isinstance(a, Tensor) and a.ndim == 2 and isinstance(b, Tensor) and b.ndim == 2):
        require_tensor("a", a, 2, "[M, K]")
        require_tensor("b", b, 2, "[K, N]")
    return matmul(a, b, out_dtype=out_dtype, precision=precision)


def matmul(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, precision: str | None = None) -> Tensor:
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
    if has_torch_function(NO_TENSOR) and not is_compiling():
        return handle_torch_function(matmul, (), **locals())
    key = plan = None
    try:
        if not (is_tracing() or (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))):
            key = "matmul", a.shape, b.shape, out_dtype, precision
    except (AttributeError, RuntimeError):  # no tensors, or nested ones
        pass
    if key is not None:
        plan = _known_plans.find(key, (a, b))
    if plan is not None:
        return plan.run((a, b))
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
    if key is not None and a.is_cuda and dtype is None and not (row or column or through_dispatcher(a, b)):
        plan = plans.get(op.plan_key("matmul", a, b, None, out_dtype, precision))
        if plan is not None:
            _known_plans.keep(key, (a, b), plan)
    if column:
        result = result.squeeze(-1)
    return result.squeeze(-1 if column else -2) if row else result


@_with_keywords
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_up: Tensor | None = None,
    bias_up: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    **epilogue: Unpack[Arguments],
) -> Tensor:
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
    if weight_up is None and bias_up is None:
        if not epilogue:
            return plain_linear(x, weight, bias, out_dtype, precision)
        for name, value in epilogue.items():
            if value is not DEFAULTS.get(name, epilogue):  # which no value is
                break
        else:
            return plain_linear(x, weight, bias, out_dtype, precision)
    return _fused(
        linear, x, weight, {"bias": bias, "weight_up": weight_up, "bias_up": bias_up, **epilogue}, out_dtype, precision
    )


def plain_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, precision: str | None
) -> Tensor:
    """`linear` without an epilogue: the path whose host time matters most, one call per layer and token."""
    if has_torch_function(NO_TENSOR) and not is_compiling():  # `is_intercepted`, without its frame
        given: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "out_dtype": out_dtype, "precision": precision}
        return handle_torch_function(linear, (), **given)
    key = plan = None
    try:
        # A tracer would record that the sizes were read.
        if not (is_tracing() or (torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad))):
            key = x.shape, weight.shape, bias is None, out_dtype, precision
    except (AttributeError, RuntimeError):  # no tensors, or nested ones
        pass
    if key is not None:
        plan = _known_plans.find(key, (x, weight) if bias is None else (x, weight, bias))
    if plan is not None:
        return plan.run((x, weight, None, bias))
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
        refuse_transforms("linear", *tensors)
        owners, main_grads = autograd.with_main_grad(owner, bias_owner)
        result = autograd.linear.op(
            x, weight, bias, owners[0], main_grads[0], owners[1], main_grads[1], out_dtype, precision
        )
        return cast(Tensor, result)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        differentiable: Any = autograd.Linear
        owned = autograd.parameter(owner), autograd.parameter(bias_owner)
        result = differentiable.apply(x, weight, bias, owned, out_dtype, resolve_precision(x, precision))
        return cast(Tensor, result)
    plan = plans.get(op.plan_key("linear", x, weight, bias, out_dtype, precision)) if x.is_cuda else None
    if plan is not None and key is not None and dtype is None and (bias is None or bias.is_contiguous()):
        _known_plans.keep(key, tensors, plan)
    return op.linear(x, weight, bias, out_dtype, precision)


_known_plans: KnownCalls[Plan] = KnownCalls(aligned=2)  # a bias is read by element


@_with_keywords
def matmul_fused(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    bias_dim: int = -1,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    **epilogue: Unpack[Arguments],
) -> Tensor:
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
    return _fused(matmul_fused, a, b, {"bias": bias, "bias_dim": bias_dim, **epilogue}, out_dtype, precision)


def _fused(
    function: Any, x: Tensor, weight: Tensor, epilogue: Any, out_dtype: torch.dtype | None, precision: str | None
) -> Tensor:
    """`linear` or `matmul_fused` with an epilogue, or a layer of `mlp`."""
    by_rows = function is not matmul_fused
    if has_torch_function(NO_TENSOR) and not is_compiling():
        _require_keywords(function, epilogue)
        names = ("x", "weight") if by_rows else ("a", "b")
        given = {names[0]: x, names[1]: weight, **DEFAULTS, **epilogue, "out_dtype": out_dtype, "precision": precision}
        return cast(Tensor, handle_torch_function(function, (), **given))
    key: list[Any] = []
    tensors: list[Any] = [x, weight]
    known = None
    get, p = epilogue.get, epilogue.get("dropout_p", 0)
    try:
        # A call with tensors that only a registered epilogue reads is never known.
        if (
            type(p) in (int, float)
            and not (torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad))
            and not is_compiling() and not is_tracing()
            and get("epilogue") is None and get("aux", ()) is DEFAULTS["aux"]
        ):  # fmt: skip
            key = [function, x.shape, weight.shape, out_dtype, precision]
            for name, value in epilogue.items():  # of a tensor, that it is one; of other arguments, their values
                if value is None:
                    key.append(name)
                elif isinstance(value, Tensor):
                    tensors.append(value)
                    key += name, Tensor
                elif name in _FACTORS and type(value) in (int, float):  # only whether the number has an effect
                    key += name, value == _FACTORS[name]
                else:
                    key += name, type(value), tuple(value.items()) if isinstance(value, dict) else value
            up = get("weight_up")
            if type(up) in PLAIN:  # `fused.apart`, without its frame
                distance = up.data_ptr() - weight.data_ptr()
                key += distance < 0, abs(distance) < 2**40, distance == 0
    except (AttributeError, RuntimeError):  # no tensors, nested ones, or some without memory
        key = []
    if key:
        known = _known_fused.find(tuple(key), tensors)
    if known is not None and known.plan is not None:
        if p:
            tensors.append(new_seed(x.device))
        numbers = known.numbers
        if numbers[0] is not None:
            numbers = (float(epilogue["alpha"]), *numbers[1:])
        if numbers[1] is not None and epilogue.get("beta") is not None:
            numbers = (numbers[0], float(epilogue["beta"]), *numbers[2:])
        return known.plan.run(tensors, None, numbers)
    _require_keywords(function, epilogue)
    if function is linear and epilogue.get("activation") is None and not _has_effect(epilogue):
        return plain_linear(x, weight, epilogue["bias"], out_dtype, precision)
    if by_rows:
        if not isinstance(x, Tensor):
            op.validate_linear(x, weight, epilogue["bias"], out_dtype, precision)
        require_tensor("weight", weight, 2, "[N, K]")
        if x.ndim == 0:
            raise ValueError("x has no dimensions; expected [..., K]")
    else:
        if not isinstance(x, Tensor):
            raise TypeError(f"a is a {type(x).__name__}; expected a torch.Tensor [..., M, K]")
        if x.ndim < 2:
            raise ValueError(f"a has shape {list(x.shape)}; expected [..., M, K]")
        require_tensor("b", weight, 2, "[K, N]")
    if x.ndim == 1:
        row = {name: epilogue[name][None] for name in _BY_ROW if isinstance(epilogue.get(name), Tensor)}
        return fused_autograd.run(_call(x[None], weight, epilogue | row, out_dtype, precision, by_rows))[0]
    call = _call(x, weight, epilogue, out_dtype, precision, by_rows)
    result = fused_autograd.run(call)
    serves = key and known is None and x.is_cuda and not result.requires_grad and _known_fused.is_aligned(tensors)
    if serves and not through_dispatcher(*tensors):
        _known_fused.keep(tuple(key), tensors, _known(call, tensors) or _UNKNOWN)
    return result


_LINEAR_KEYWORDS = {"bias", "weight_up", "bias_up", *DEFAULTS}
_MATMUL_KEYWORDS = {"bias", "bias_dim", *DEFAULTS}
_FACTORS = {"alpha": 1, "beta": 0}  # and the values that have no effect


def _require_keywords(function: Any, epilogue: Mapping[str, Any]) -> None:
    """Raise for a keyword that the function does not have."""
    known = _MATMUL_KEYWORDS if function is matmul_fused else _LINEAR_KEYWORDS
    if not epilogue.keys() <= known:
        unknown = min(epilogue.keys() - known)
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {unknown!r}")


_BY_ROW = [name for name, shape in SHAPES.items() if shape.startswith("m")]  # the operands that x's rows have


class _Known(NamedTuple):
    """A fused call whose plan is known; without a plan, a call that must be prepared every time."""

    plan: Plan | None  # of the call's tensors; a new seed is the last of these
    numbers: tuple[float | None, ...]


_UNKNOWN = _Known(None, ())
_known_fused: KnownCalls[_Known] = KnownCalls()


def _known(call: Call, tensors: list[Tensor]) -> _Known | None:
    """How to run calls like this one, if its plan reads the call's own tensors without copies."""
    operands = call.operands
    if operands.epilogue or operands.aux or autocast_dtype(call.x) is not None:
        return None
    found = fused.find(call)
    tensors = tensors if operands.seed is None else [*tensors, operands.seed]
    addresses = {each.data_ptr(): place for place, each in enumerate(tensors)}
    if found is None or len(addresses) < len(tensors):
        return None
    plan, inputs = found
    if any(each is not None and each.data_ptr() not in addresses for each in inputs):
        return None
    places = tuple(None if each is None else addresses[each.data_ptr()] for each in inputs)
    return _Known(plan.of_inputs(places), fused.call_numbers(operands))


def _has_effect(epilogue: Mapping[str, Any]) -> bool:
    """Whether an argument of `linear` besides the bias is not its default."""
    get = epilogue.get
    alpha, beta = get("alpha", 1), get("beta")
    return bool(
        any(get(name) is not None for name in _PRESENT)
        or get("activation_args") or get("dropout_p") or get("aux", ()) or get("rounding", "once") != "once"
        or isinstance(alpha, Tensor) or alpha != 1 or isinstance(beta, Tensor) or beta
    )  # fmt: skip


_PRESENT = ("activation", "weight_up", *(name for name in SHAPES if name not in ("bias", "alpha", "beta")), "epilogue")


def mlp(
    x: Tensor,
    weight: Tensor,
    weight_down: Tensor,
    *,
    bias: Tensor | None = None,
    bias_down: Tensor | None = None,
    weight_up: Tensor | None = None,
    bias_up: Tensor | None = None,
    activation: str = "gelu",
    activation_args: Mapping[str, float] | None = None,
    hidden_dropout_p: float = 0,
    dropout_p: float = 0,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> Tensor:
    """residual + dropout(dropout(act(x @ weight.T + bias)) @ weight_down.T + bias_down), two launches.

    As two calls of `linear`, except in the backward: the activation's derivative is the epilogue of the product that
    computes its gradient, and what is saved for it is freed as soon as it was read.
    """
    if is_intercepted():
        return handle_torch_function(mlp, (), **locals())
    is_row = isinstance(x, Tensor) and x.ndim == 1
    if is_row:
        x, residual = x[None], residual[None] if isinstance(residual, Tensor) else residual
    if isinstance(hidden_dropout_p, int | float) and not 0 <= hidden_dropout_p <= 1:
        raise ValueError(f"hidden_dropout_p is {hidden_dropout_p}; expected a probability")
    given = (x, weight, weight_down, bias, bias_down, weight_up, bias_up, residual)
    tensors = [each for each in given if each is not None]
    key = None
    if (
        not is_compiling() and not is_tracing() and type(x) in PLAIN and not x.is_nested
        and _PLAIN.issuperset(map(type, tensors)) and type(activation_args) in (dict, type(None))
    ):  # fmt: skip
        arguments = tuple(activation_args.items()) if activation_args else ()
        present = tuple([each is not None for each in given])
        key = x.shape, present, activation, arguments, hidden_dropout_p, dropout_p, out_dtype, precision
    first = {
        "bias": bias, "weight_up": weight_up, "bias_up": bias_up, "activation": activation,
        "activation_args": activation_args,
    }  # fmt: skip
    second = {"bias": bias_down, "residual": residual}
    # What is not checked yet may be no tensor, and a probability no number.
    trained = torch.is_grad_enabled() and True in [getattr(each, "requires_grad", False) for each in tensors]
    eager = key is not None and _checked_mlps.find(key, tensors) is not None
    if not eager or trained or hidden_dropout_p or dropout_p:
        calls = _mlp_calls(x, weight, weight_down, first, second, hidden_dropout_p, dropout_p, out_dtype, precision)
        if not eager:
            mlp_autograd.validate(*calls)
            eager = key is not None and not through_dispatcher(*tensors)
            if eager and autocast_dtype(x) is None:
                _checked_mlps.keep(key, tensors, True)
    if eager and not (trained or hidden_dropout_p or dropout_p):
        h = _fused(mlp, x, weight, first, None, precision)
        result = _fused(mlp, h, weight_down, second, out_dtype, precision)
    else:
        result = mlp_autograd.run(*calls)
    return result[0] if is_row else result


_checked_mlps: KnownCalls[bool] = KnownCalls(is_plan=False)  # calls of `mlp` whose arguments fit


def _mlp_calls(
    x: Tensor, weight: Tensor, weight_down: Tensor, first: Mapping[str, Any], second: Mapping[str, Any],
    hidden_dropout_p: float, dropout_p: float, out_dtype: torch.dtype | None, precision: str | None,
) -> tuple[Call, Call]:  # fmt: skip
    """The two layers of an `mlp`; the second's x is a placeholder for the first's result."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; expected a torch.Tensor [..., K]")
    require_tensor("weight", weight, 2, "[hidden, K]")
    hidden = _call(x, weight, {**first, "dropout_p": hidden_dropout_p}, None, precision, True)
    require_tensor("weight_down", weight_down, 2, "[N, hidden]")
    if weight_down.shape[1] != weight.shape[0]:
        raise ValueError(
            f"weight_down has shape {list(weight_down.shape)}; expected [N, {weight.shape[0]}], "
            f"since weight is {list(weight.shape)}"
        )
    return hidden, _call(hidden.x, weight_down, {**second, "dropout_p": dropout_p}, out_dtype, precision, True)


def _call(
    x: Tensor,
    weight: Tensor,
    epilogue: Mapping[str, Any],
    out_dtype: torch.dtype | None,
    precision: str | None,
    by_rows: bool,
) -> Call:
    """Make the call from the arguments, after autocast; what serves it checks the tensors' shapes."""
    get = epilogue.get
    activation, activation_args, dropout_p = get("activation"), get("activation_args"), get("dropout_p", 0)
    arguments: tuple[float, ...] = ()
    if activation is not None:
        arguments = spec.argument_values(spec.activation(activation), activation_args)
    elif activation_args:
        raise ValueError(f"activation_args is {dict(activation_args)} without an activation")
    operands: list[Any] = list(map(get, SHAPES))
    weight_up = get("weight_up")
    alpha, beta, aux, user, bias_dim, rounding = 1.0, 0.0, (), None, -1, "once"
    if not _SELDOM.isdisjoint(epilogue):
        aux, user = tuple(get("aux", ())), get("epilogue")
        bias_dim, rounding = get("bias_dim", -1), get("rounding", rounding)
        if user is not None:
            spec.registered(user)
        if rounding not in ROUNDINGS:
            raise ValueError(f"rounding is {rounding!r}; accepted: {', '.join(map(repr, ROUNDINGS))}")
        operands[_ALPHA], alpha = _number("alpha", get("alpha", 1), 1.0)
        factor = get("beta")
        if factor is None:
            factor = 0 if operands[_C] is None else 1
        operands[_BETA], beta = _number("beta", factor, 0.0)
        if operands[_BETA] is None and beta == 0:
            operands[_C] = None
    if aux or not _EXPECTED.issuperset(map(type, (weight_up, *operands))):
        _require_tensors({"weight_up": weight_up, **dict(zip(SHAPES, operands, strict=True))}, aux)
    if weight_up is not None:
        require_tensor("weight_up", weight_up, 2, "[N, K]")
    if not isinstance(dropout_p, _NUMBERS):
        raise TypeError(f"dropout_p is {dropout_p!r}; expected a number")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p is {dropout_p}; expected a probability")
    owners: tuple[Tensor | None, ...] = (None,) * 4
    if by_rows and torch.is_grad_enabled():
        owners = (parameter(weight), parameter(operands[0]), parameter(weight_up), parameter(operands[1]))
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = _cast(x, dtype), _cast(weight, dtype)
        weight_up, *operands[:2] = (each if each is None else _cast(each, dtype) for each in (weight_up, *operands[:2]))
        precision = precision if dtype is torch.float32 else None
    seed = new_seed(x.device) if dropout_p > 0 else None
    read = Operands._make((
        *operands, aux, seed, alpha, beta, float(dropout_p), activation or "", arguments, user or "",
        bias_dim, rounding == "eager",
    ))  # fmt: skip
    return Call(x, weight, weight_up, read, by_rows, "", owners, (None,) * 4, out_dtype, precision)


_PLAIN = {*PLAIN}
_EXPECTED = {*PLAIN, type(None)}
_SELDOM = {"alpha", "beta", "c", "epilogue", "aux", "bias_dim", "rounding"}  # arguments that most calls leave out
_C, _ALPHA, _BETA = (PLACES[name] for name in ("c", "alpha", "beta"))


def _require_tensors(operands: Mapping[str, Any], aux: Sequence[Any]) -> None:
    """Raise where an argument that must be a tensor is none."""
    named = {name: each for name, each in operands.items() if each is not None and name not in _FACTORS}
    for name, each in {**named, **{f"aux[{index}]": each for index, each in enumerate(aux)}}.items():
        if not isinstance(each, Tensor):
            raise TypeError(f"{name} is a {type(each).__name__}; expected a torch.Tensor")


def _number(name: str, given: Any, nothing: float) -> tuple[Tensor | None, float]:
    """A scalar on the device, or its value; `nothing` is the value that has no effect."""
    if isinstance(given, Tensor):
        return given, nothing
    if not isinstance(given, _NUMBERS):
        raise TypeError(f"{name} is {given!r}; expected a number or a 0-d tensor")
    return None, float(given)


def token_chunk(weight: Tensor | torch.nn.Linear) -> int:
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


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.dtype in op.SERVED else x
