"""Products with an epilogue and their gradients, without autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from isogemm.core import device as devices
from isogemm.core import dispatch
from isogemm.core.dispatch import Dispatch
from isogemm.core.errors import require_same
from isogemm.core.plan import Plan, plans
from isogemm.epilogues import random, spec
from isogemm.epilogues.operands import MATRICES, PLACES, SHAPES, TENSORS, VECTORS, Epilogue, Operands
from isogemm.gemm import configs, cpu, describe, op
from isogemm.gemm import torch_forms as forms
from isogemm.gemm.configs import ActivationGradProblem, Config, Problem
from isogemm.gemm.plan import activation_grad_plan, chunk_sums_plan, gemm_plan

ROUNDINGS = ("once", "eager")


Names = tuple[str, str, str, str]  # the caller's names of x, the weight, its bias and the dropout's probability
_NAMES: Names = ("a", "b", "bias", "dropout_p")


def names_of(by_rows: bool) -> Names:
    """The names in `linear`, where the weights are [N, K], or else in `matmul_fused`."""
    return ("x", "weight", "bias", "dropout_p") if by_rows else _NAMES


def validate(
    x: Tensor,
    b: Tensor,
    b_up: Tensor | None,
    operands: Operands,
    out_dtype: torch.dtype | None,
    precision: str | None,
    names: Names = _NAMES,
) -> None:
    """Raise where an argument of `fused` does not fit; x [..., K], b [K, N]."""
    x_name, b_name, bias_name, dropout_name = names
    op.require_operands((x_name, x), (b_name, b), out_dtype, precision)
    require_same(f"K (of {x_name} [..., K] and {b_name})", (x_name, b_name), (x.shape[-1], b.shape[0]))
    rows, n = x.shape[:-1], b.shape[-1]
    op.require_bias(operands.bias if operands.bias_dim == -1 else None, x, n, bias_name)
    if operands.bias_dim not in (-1, -2):
        raise ValueError(f"bias_dim is {operands.bias_dim}; expected -1 (a bias for each column) or -2 (for each row)")
    if operands.bias is not None and operands.bias_dim == -2:
        _require("bias", operands.bias, rows, x, (x.dtype,))
    if operands.activation and operands.epilogue:
        both = f"activation is {operands.activation!r} and epilogue {operands.epilogue!r}"
        raise ValueError(f"{both}; one takes the place")
    if not 0 <= operands.dropout_p <= 1:
        raise ValueError(f"{dropout_name} is {operands.dropout_p}; expected a probability")
    _validate_gate(b, b_up, operands)
    accepted = (x.dtype, torch.float32)
    shapes = {"m": rows, "n": (n,), "mn": (*rows, n), "": ()}
    for (name, shape), tensor in zip(SHAPES.items(), operands, strict=False):
        if tensor is not None and not name.startswith("bias"):
            _require(name, cast(Tensor, tensor), shapes[shape], x, accepted)
    if (operands.beta is not None or operands.beta_value) and operands.c is None:
        raise ValueError("beta is given without c; expected c [..., M, N]")
    if operands.aux and not operands.epilogue:
        raise ValueError(f"aux has {len(operands.aux)} tensors and there is no epilogue to read them")
    if operands.epilogue:
        _validate_aux(operands, (*rows, n), x, accepted)


def _validate_gate(b: Tensor, b_up: Tensor | None, operands: Operands) -> None:
    if operands.gated != (b_up is not None):
        gated = ", ".join(entry.name for entry in spec.ACTIVATIONS.values() if entry.gate)
        raise ValueError(
            f"activation is {operands.activation or None!r} {'with' if b_up is not None else 'without'} weight_up; "
            f"weight_up goes with a gated one: {gated}"
        )
    if b_up is None:
        if operands.bias_up is not None:
            raise ValueError("bias_up is given without weight_up")
        return
    require_same("shape", ("weight", "weight_up"), (b.shape[::-1], b_up.shape[::-1]))
    require_same("dtype", ("weight", "weight_up"), (b.dtype, b_up.dtype))
    require_same("device", ("weight", "weight_up"), (b.device, b_up.device))
    if operands.bias_up is not None:
        _require("bias_up", operands.bias_up, b_up.shape[1:], b, (b.dtype,))
    others = {name: getattr(operands, name) for name in SHAPES if name not in ("bias", "bias_up", "residual")}
    others |= {"alpha": operands.alpha if operands.alpha_value == 1 else operands.alpha_value}
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} does not go with the gated activation {operands.activation!r}")
    if operands.bias_dim != -1:
        raise ValueError(f"bias_dim is {operands.bias_dim}; a gated activation's biases are along columns (-1)")


def _validate_aux(operands: Operands, shape: Sequence[int], x: Tensor, accepted: tuple[torch.dtype, ...]) -> None:
    entry = spec.registered(operands.epilogue)
    if len(operands.aux) != entry.aux:
        raise ValueError(f"aux has {len(operands.aux)} tensors; epilogue {entry.name!r} reads {entry.aux}")
    for index, tensor in enumerate(operands.aux):
        try:
            fits = describe.broadcast(tensor.shape, shape) == tuple(shape)
        except RuntimeError:
            fits = False
        _require(f"aux[{index}]", tensor, tensor.shape if fits else shape, x, accepted)


def _require(name: str, tensor: Tensor, shape: Sequence[int], x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {list(shape)}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {', '.join(map(str, dict.fromkeys(dtypes)))}")
    require_same("device", (name, "the inputs"), (tensor.device, x.device))


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed on the device from torch's generator: each replay of a CUDA graph draws another."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def fused(
    x: Tensor,
    weight: Tensor,
    weight_up: Tensor | None,
    operands: Operands,
    out_dtype: torch.dtype | None,
    precision: str | None,
    save: str,
    *,
    by_rows: bool,
) -> tuple[Tensor, Tensor | None]:
    """The result [..., N] of x [..., K] and, if `save` is set, a mask or the pre-activation.

    by_rows: the weights are [N, K], else [K, N].
    """
    if not x.is_cuda or x.dtype is torch.float64:
        b, b_up = columns(weight, weight_up, by_rows)
        validate(x, b, b_up, operands, out_dtype, precision, names_of(by_rows))
        return _in_torch(x, b, b_up, operands, out_dtype or x.dtype, precision, save)
    precision = devices.resolve_precision(x, precision)
    if weight_up is not None:
        weight, weight_up = _alike(weight, weight_up)
    key = _key(x, weight, weight_up, operands, out_dtype, precision, save, by_rows)
    plan = plans.get(key)
    if plan is None:
        b, b_up = columns(weight, weight_up, by_rows)
        validate(x, b, b_up, operands, out_dtype, precision, names_of(by_rows))
        dtype = out_dtype or x.dtype
        if 0 in (*x.shape, b.shape[1]) or (operands.eager and not _has_torchs_bits(operands)):
            return _in_torch(x, b, b_up, operands, dtype, precision, save)
        read = _operands(x, b.shape[1], operands)
        rows = _by_rows(x)
        problem = _problem(rows, b, b_up, operands, dtype, precision, save, read)
        plan = plans.keep(key, _plan(rows, b, problem, None, dtype, read))
    read = _operands(x, plan.shape[-1], operands)
    saved = None
    if save:
        saved = read[PLACES["saved"]] = saved_like(x, plan.shape, save, operands)
    return plan.run((_by_rows(x), weight, weight_up, *read), None, call_numbers(operands)), saved


def find(
    x: Tensor, weight: Tensor, weight_up: Tensor | None, operands: Operands, out_dtype: torch.dtype | None,
    precision: str | None, by_rows: bool,
) -> tuple[Plan, list[Tensor | None]] | None:  # fmt: skip
    """The plan of a `fused` call that saves nothing, and its inputs; None if there is no plan yet."""
    if weight_up is not None:
        weight, weight_up = _alike(weight, weight_up)
    precision = devices.resolve_precision(x, precision)
    plan = plans.get(_key(x, weight, weight_up, operands, out_dtype, precision, "", by_rows))
    return None if plan is None else (plan, [_by_rows(x), weight, weight_up, *_operands(x, plan.shape[-1], operands)])


def _key(
    x: Tensor, weight: Tensor, weight_up: Tensor | None, operands: Operands, out_dtype: torch.dtype | None,
    precision: str | None, save: str, by_rows: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """All that a plan depends on."""
    up = None if weight_up is None else (_layout(weight_up), *apart(weight, weight_up))
    return (
        "fused", _layout(x), _layout(weight), by_rows, up,
        *map(_layout, cast("Sequence[Tensor | None]", operands[: len(SHAPES)])), *map(_layout, operands.aux),
        operands.activation, operands.arguments, operands.epilogue and spec.REGISTERED.get(operands.epilogue),
        operands.alpha_value != 1, operands.beta_value != 0, operands.dropout_p > 0, operands.bias_dim, operands.eager,
        save, out_dtype, precision,
    )  # fmt: skip


def columns(weight: Tensor, weight_up: Tensor | None, by_rows: bool) -> tuple[Tensor, Tensor | None]:
    """The weights as [K, N]."""
    if not by_rows:
        return weight, weight_up
    return weight.mT, None if weight_up is None else weight_up.mT


def problem_of(
    x: Tensor,
    b: Tensor,
    b_up: Tensor | None,
    operands: Operands,
    *,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> Problem:
    """Describe a `fused` call of tensors on a GPU, x [M, K]."""
    precision, dtype = devices.resolve_precision(x, precision), out_dtype or x.dtype
    return _problem(x, b, b_up, operands, dtype, precision, "", _operands(x, b.shape[1], operands))


def gemm(
    x: Tensor, b: Tensor, b_up: Tensor | None, operands: Operands, *, config: Config | None = None, **how: Any
) -> Tensor:
    """`fused` with a given configuration; how: as in `problem_of`. For tests and `verify`."""
    problem = problem_of(x, b, b_up, operands, **how)
    read = _operands(x, b.shape[1], operands)
    plan = _plan(x, b, problem, config, getattr(torch, problem.out_dtype), read)
    return plan.run((x, b, b_up, *read), None, call_numbers(operands))


def _plan(
    x: Tensor, b: Tensor, problem: Problem, config: Config | None, dtype: torch.dtype, read: Sequence[Tensor | None]
) -> Plan:
    seen = [
        None if each is None else (each.dtype, describe.aligned(each) and name not in VECTORS)  # read by element
        for name, each in zip(TENSORS, read, strict=False)
    ]
    if problem.epilogue.saves:
        pre = forms.saved_dtype(problem.epilogue.activation, x.dtype)
        seen[PLACES["saved"]] = (torch.uint8 if problem.epilogue.saves == "mask" else pre), True
    return gemm_plan("fused", (*x.shape[:-1], b.shape[1]), dtype, x.device, problem, config, seen)


def _has_torchs_bits(operands: Operands) -> bool:
    return not operands.epilogue and (not operands.activation or spec.ACTIVATIONS[operands.activation].has_torchs_bits)


def apart(b: Tensor, b_up: Tensor) -> tuple[bool, bool]:
    """Whether the second weight lies before the first, and whether one TMA map reaches both."""
    distance = b_up.data_ptr() - b.data_ptr()
    return distance < 0, abs(distance) < 2**40


def _by_rows(x: Tensor) -> Tensor:
    """x, copied unless its rows have one stride."""
    return x if x.ndim == 2 or x.is_contiguous() else describe.flat(x).view(x.shape)


def _alike(weight: Tensor, weight_up: Tensor) -> tuple[Tensor, Tensor]:
    """Make two weights readable by one kernel: with the same strides, at different addresses."""
    if weight.stride() != weight_up.stride():
        weight, weight_up = weight.contiguous(), weight_up.contiguous()
    return weight, weight_up.clone() if weight.data_ptr() == weight_up.data_ptr() else weight_up


def _operands(x: Tensor, n: int, operands: Operands) -> list[Tensor | None]:
    """What the epilogue reads, in the kernels' order and layout: contiguous vectors, matrices by rows."""
    read = [each if each is None else prepare(each) for prepare, each in zip(_PREPARED, operands, strict=False)]
    read += [operands.seed, None, None]
    if operands.aux:
        rows = describe.rows(x)
        read += [each.expand(*x.shape[:-1], n).reshape(rows, n) for each in operands.aux]
    return read


def _vector(x: Tensor | None) -> Tensor | None:
    """[n], contiguous; a scalar is as it is."""
    if x is None or x.ndim == 0 or (x.ndim == 1 and x.is_contiguous()):
        return x
    return x.reshape(-1).contiguous()


def _matrix(x: Tensor | None) -> Tensor | None:
    """[rows, n], contiguous along n."""
    if x is None or (x.ndim == 2 and x.stride(1) == 1):
        return x
    flat = describe.flat(x)
    return flat if flat.stride(1) == 1 else flat.contiguous()


_PREPARED: list[Callable[[Any], Any]] = [_matrix if shape == "mn" else _vector for shape in SHAPES.values()]


def _layout(x: Tensor | None) -> tuple[Any, ...] | None:
    """All of a tensor that a plan depends on."""
    return None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.get_device())


def saved_like(x: Tensor, shape: Sequence[int], save: str, operands: Operands) -> Tensor | None:
    """Allocate what `save` names, for a result of this shape."""
    if save == "pre":
        dtype = forms.saved_dtype(operands.activation, x.dtype)
        return x.new_empty((2, *shape) if operands.gated else shape, dtype=dtype)
    if save == "mask":
        return x.new_empty((*shape[:-1], (shape[-1] + 7) // 8), dtype=torch.uint8)
    return None


def call_numbers(operands: Operands) -> tuple[float | None, ...]:
    """Alpha, beta, the dropout's threshold and its scale, where a kernel takes them."""
    alpha = operands.alpha_value if operands.alpha is None and operands.alpha_value != 1 else None
    beta = operands.beta_value if operands.beta is None and operands.beta_value != 0 else None
    if not operands.dropout_p:
        return alpha, beta, None, None
    return alpha, beta, random.threshold(operands.dropout_p), random.scale(operands.dropout_p)


def _problem(
    x: Tensor,
    b: Tensor,
    b_up: Tensor | None,
    operands: Operands,
    dtype: torch.dtype,
    precision: str | None,
    save: str,
    read: list[Tensor | None],
) -> Problem:
    aux = [each for each in read[PLACES["aux0"] :] if each is not None]
    matrices = [read[PLACES[name]] for name in MATRICES]
    strides = (
        *(None if each is None else each.stride(0) for each in matrices),
        *(stride for each in aux for stride in each.stride()),
    )
    flat = describe.flat(x)
    problem = describe.product(flat, b, None, dtype, precision, describe.accumulation_chunk(x, dtype))
    assert problem is not None
    return replace(
        problem, epilogue=operands.compiled(dtype, precision, save), read_strides=strides,
        reads_float32=any(each is not None and each.dtype is torch.float32 for each in (*matrices, *aux)),
        read_aligned=all(each is None or describe.aligned(each) for each in matrices),
        b_aligned=problem.b_aligned and (b_up is None or describe.aligned(b_up)),
        up_first=b_up is not None and apart(b, b_up)[0], up_near=b_up is None or apart(b, b_up)[1],
    )  # fmt: skip


def _in_torch(
    x: Tensor, b: Tensor, b_up: Tensor | None, operands: Operands, out_dtype: torch.dtype, precision: str | None,
    save: str,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute in torch's operations: on the CPU, for float64, empty tensors, and eager rounding of some activations."""
    with torch.no_grad():
        dtype = out_dtype if operands.eager else cpu.sums_dtype(x.dtype)
        sums, up = (None if each is None else _sums(x, each, dtype, precision) for each in (b, b_up))
        assert sums is not None
        pre, pre_up = forms.before_activation(sums, up, operands)
        result = forms.after_activation(pre, pre_up, operands).to(out_dtype).contiguous()
        saved = None
        if save == "mask":
            saved = forms.packed(spec.ACTIVATIONS[operands.activation].derivative(pre, *operands.arguments) == 1)
        elif save == "pre":
            pre = pre if pre_up is None else torch.stack((pre, pre_up))
            saved = forms.kept(pre, forms.saved_dtype(operands.activation, x.dtype))
    if dispatch.active:
        path, reason = "torch", "torch's own operations follow the product"
        if x.dtype is torch.float64:
            reason = "float64"
        elif not x.is_cuda:
            path, reason = "cpu", "not on a GPU"
        problem = f"{list(x.shape)} {describe.dtype_name(x.dtype)}"
        dispatch.record(Dispatch("fused", path, problem, operands.activation or operands.epilogue, reason))
    return result, saved


def _sums(x: Tensor, b: Tensor, dtype: torch.dtype, precision: str | None) -> Tensor:
    if x.dtype is torch.float64:
        return torch.matmul(x, b)
    if x.is_cuda:
        return op.product(x, b, None, dtype if dtype is not x.dtype else None, precision)
    return cpu.product(x, b, None, dtype)


def activation_grad(
    grad: Tensor, saved: Tensor | None, kind: str, operands: Operands, dtype: torch.dtype, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """dz [..., N] (gated: [2, ..., N], of the gate and of up) in `dtype`, from the gradient of dropout(act(z)).

    saved: z, act(z) or a mask, as `kind` says. sums: on a GPU also sum dz over chunks of rows in the same pass;
    `chunk_sums` turns these into the bias's gradient.
    """
    n = grad.shape[-1]
    if not grad.is_cuda or dtype is torch.float64 or not grad.numel():
        with torch.no_grad():
            dz = forms.activation_grad(grad, saved, kind, operands, dtype)
        if not (sums and grad.is_cuda) or dtype is torch.float64:
            return dz, None
        chunks = -(-describe.rows(grad) // configs.BIAS_CHUNK)
        none = torch.zeros((chunks, n), dtype=torch.float32, device=grad.device)
        return dz, torch.stack((none, none)) if operands.gated else none
    rows = cast(Tensor, _matrix(grad))
    saved = None if saved is None else saved.contiguous()
    key = (
        "activation_grad", _layout(rows), _layout(saved), kind, operands.activation, operands.arguments,
        operands.dropout_p > 0, dtype, sums, grad.shape,
    )  # fmt: skip
    chunks = -(-rows.shape[0] // configs.BIAS_CHUNK)
    partial = None
    if sums:
        sizes = (2, chunks, n) if operands.gated else (chunks, n)
        partial = torch.empty(sizes, dtype=torch.float32, device=grad.device)
    read = (saved, operands.seed, partial)
    plan = plans.get(key)
    if plan is None:
        epilogue = Epilogue(
            activation=operands.activation, arguments=operands.arguments, dropout=operands.dropout_p > 0,
            exact=dtype is torch.float32, gradient=cast(Any, kind),
        )  # fmt: skip
        arch = devices.facts(grad.device).arch
        problem = ActivationGradProblem(
            rows.shape[0], n, describe.dtype_name(dtype), epilogue, rows.stride(0), sums, describe.aligned(rows), arch
        )
        seen = [None if each is None else (each.dtype, describe.aligned(each)) for each in (rows, *read)]
        shape = (2, *grad.shape) if operands.gated else grad.shape
        plan = plans.keep(key, activation_grad_plan(problem, shape, grad.device, seen))
    dz = plan.run((rows, *read), None, call_numbers(operands)[2:])
    return dz, partial


def chunk_sums(partial: Tensor, together: int, total: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add [count, N] sums -> [N]: `together` neighbours by halves, then the results from first to last.

    Added to `total` where given.
    """
    count, n = partial.shape
    if not partial.is_cuda:
        sums = partial.new_zeros(n) if total is None else total
        for chunk in cpu.row_sums(partial, together):
            sums += chunk + 0.0  # -0 is +0, as with rows of zeros after it
        if dispatch.active:
            problem = f"{list(partial.shape)} {describe.dtype_name(partial.dtype)}"
            dispatch.record(Dispatch("bias_grad", "cpu", problem, "", "not on a GPU"))
        return sums.to(dtype) if total is None else sums
    if not partial.numel():
        return torch.zeros(n, dtype=dtype, device=partial.device) if total is None else total
    partial = partial.contiguous()
    stride = None if total is None else total.stride(0)
    key = ("chunk_sums", count, n, together, dtype, stride, partial.get_device())
    plan = plans.get(key)
    if plan is None:
        out_dtype = dtype if total is None else total.dtype
        plan = plans.keep(key, chunk_sums_plan(count, n, together, out_dtype, stride, partial.device))
    return plan.run((partial,), total)


def hidden_grad(
    grad: Tensor,
    weight: Tensor,
    saved: Tensor,
    kind: str,
    operands: Operands,
    precision: str | None,
    sums: bool,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """dz as in `activation_grad`, from the gradient of dropout(act(z)) @ weight.T, in one launch.

    sums: also sum dz over blocks of BIAS_ROWS rows, [ceil(rows / BIAS_ROWS), N] (gated: two); not for float64.
    config: given by tests, else chosen.
    """
    grad = grad.to(weight.dtype)
    if not grad.is_cuda or grad.dtype is torch.float64 or 0 in (*grad.shape, weight.shape[1]):
        above = op.product(grad, weight, None, None if grad.dtype is torch.float64 else torch.float32, precision)
        dz, _ = activation_grad(above, saved, kind, operands, weight.dtype, False)
        if not sums or grad.dtype is torch.float64:
            return dz, None
        halves = [cpu.row_sums(describe.flat(half), configs.BIAS_ROWS) for half in (dz if operands.gated else dz[None])]
        return dz, torch.stack(halves) if operands.gated else halves[0]
    precision = devices.resolve_precision(grad, precision)
    grad, saved = _by_rows(grad), saved.contiguous()
    shape = (*grad.shape[:-1], weight.shape[1])
    out = torch.empty((2, *shape) if operands.gated else shape, dtype=weight.dtype, device=weight.device)
    first, second = (out[0], out[1]) if operands.gated else (out, None)
    blocks = (-(-describe.rows(grad) // configs.BIAS_ROWS), weight.shape[1])
    partial = None
    if sums:
        partial = torch.empty((2, *blocks) if operands.gated else blocks, dtype=torch.float32, device=weight.device)
    given = {"seed": operands.seed, "saved": saved, "second": second, "row_sums": partial}
    read = [given.get(name) for name in TENSORS]
    key = (
        "hidden_grad", _layout(grad), _layout(weight), *map(_layout, read), kind, operands.activation,
        operands.arguments, operands.dropout_p > 0, precision, config,
    )  # fmt: skip
    plan = plans.get(key)
    if plan is None:
        op.validate(grad, weight, None, None, precision)
        epilogue = Epilogue(
            activation=operands.activation, arguments=operands.arguments, dropout=operands.dropout_p > 0,
            exact=grad.dtype is torch.float32 and precision != "tf32", gradient=cast(Any, kind), sums=sums,
        )  # fmt: skip
        chunk = describe.accumulation_chunk(grad, grad.dtype)
        problem = describe.product(describe.flat(grad), weight, None, grad.dtype, precision, chunk)
        assert problem is not None
        problem = replace(problem, epilogue=epilogue)
        seen = [None if each is None else (each.dtype, describe.aligned(each)) for each in read]
        plan = plans.keep(key, gemm_plan("hidden_grad", shape, grad.dtype, grad.device, problem, config, seen))
    plan.run((grad, weight, None, *read), first, call_numbers(operands))
    return out, partial
