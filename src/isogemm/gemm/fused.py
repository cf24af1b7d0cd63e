"""Products with an epilogue and their gradients, without autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from isogemm.core import device as devices
from isogemm.core.errors import require_same
from isogemm.core.plan import Plan, plans
from isogemm.epilogues import random, spec
from isogemm.epilogues.operands import DIFFERENTIABLE, MATRICES, PLACES, SHAPES, TENSORS, VECTORS, Operands
from isogemm.gemm import configs, cpu, describe, op
from isogemm.gemm import torch_forms as forms
from isogemm.gemm.configs import Config, Problem
from isogemm.gemm.describe import layout
from isogemm.gemm.gradient_problems import ActivationGradProblem
from isogemm.gemm.plan import activation_grad_plan, chunk_sums_plan, gemm_plan

ROUNDINGS = ("once", "eager")


class Call(NamedTuple):
    """A product with an epilogue. The operator isogemm::fused takes its fields, with `operands` unpacked."""

    x: Tensor  # [..., K]
    weight: Tensor
    weight_up: Tensor | None = None
    operands: Operands = Operands()
    by_rows: bool = True  # the weights are [N, K] as in `linear`, else [K, N] as in `matmul_fused`
    save: str = ""  # what the forward keeps for its backward: "", mask, out or pre
    owners: Sequence[Tensor | None] = (None,) * 4  # of the main_grads of weight, bias, weight_up and bias_up
    main_grads: Sequence[Tensor | None] = (None,) * 4
    out_dtype: torch.dtype | None = None
    precision: str | None = None

    @classmethod
    def of_operator(cls, args: Sequence[Any]) -> Call:
        """Make a call from the operator's arguments, whose tuples have become lists."""
        given = [tuple(each) if isinstance(each, list) else each for each in args]
        return cls._make((*given[:3], Operands._make(given[3:_AFTER]), *given[_AFTER:]))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the operator."""
        return *self[:3], *self.operands, *self[4:]

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The differentiable arguments, except aux."""
        return *self[:3], *self.operands[: len(DIFFERENTIABLE)]

    @property
    def columns(self) -> tuple[Tensor, Tensor | None]:
        """The weights as [K, N]."""
        weight, weight_up = self[1:3]
        if not self.by_rows:
            return weight, weight_up
        return weight.mT, None if weight_up is None else weight_up.mT

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return *self.x.shape[:-1], self.columns[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return self.out_dtype or self.x.dtype


_AFTER = 3 + len(Operands._fields)  # the place after the operands among the operator's arguments

Names = tuple[str, str, str, str]  # the caller's names of x, the weight, its bias and the dropout's probability


def validate(call: Call, names: Names | None = None) -> None:
    """Raise where an argument of a call does not fit; names: by default those of `linear` or `matmul_fused`."""
    x, (b, b_up), operands = call.x, call.columns, call.operands
    given: Names = ("x", "weight", "bias", "dropout_p") if call.by_rows else ("a", "b", "bias", "dropout_p")
    x_name, b_name, bias_name, dropout_name = names or given
    op.require_operands((x_name, x), (b_name, b), call.out_dtype, call.precision)
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


def fused(call: Call, save: str = "") -> tuple[Tensor, Tensor | None]:
    """The result [..., N] of a call and, if `save` says so, a mask or the pre-activation ("out": just the result)."""
    save = "" if save == "out" else save
    found = find(call, save)
    if found is None:
        return _in_torch(call, save)
    plan, inputs = found
    saved = None
    if save:
        saved = inputs[_READ + PLACES["saved"]] = saved_like(call.x, plan.shape, save, call.operands)
    return plan.run(inputs, None, call_numbers(call.operands)), saved


def find(call: Call, save: str = "") -> tuple[Plan, list[Tensor | None]] | None:
    """The plan of a call and its inputs, without memory for what is saved; None where torch or the CPU serves."""
    x, weight, weight_up, operands = call[:4]
    if not x.is_cuda or x.dtype is torch.float64:
        validate(call)
        return None
    up = None
    if weight_up is not None:
        if operands.eager and weight.stride() != weight_up.stride():  # copies may be cut along k where these are not
            validate(call)
            return None
        weight, weight_up = _alike(weight, weight_up)
        up = layout(weight_up), *apart(weight, weight_up)
    key = (  # all that a plan depends on
        "fused", layout(x), layout(weight), call.by_rows, up,
        *map(layout, cast("Sequence[Tensor | None]", operands[: len(SHAPES)])), *map(layout, operands.aux),
        operands.activation, operands.arguments, operands.epilogue and spec.REGISTERED.get(operands.epilogue),
        operands.alpha_value != 1, operands.beta_value != 0, operands.dropout_p > 0, operands.bias_dim, operands.eager,
        save, call.out_dtype, devices.resolve_precision(x, call.precision),
    )  # fmt: skip
    plan = plans.get(key)
    if plan is None:
        validate(call)
        if 0 in (*x.shape, call.shape[-1]) or (operands.eager and not _has_torchs_bits(operands)):
            return None
        readable = call._replace(x=_by_rows(x), weight=weight, weight_up=weight_up)
        plan = plans.keep(key, _plan(readable, _problem(readable, save)))
    return plan, [_by_rows(x), weight, weight_up, *_operands(call)]


_READ = 3  # the place among a plan's inputs from which on the epilogue reads


def problem_of(x: Tensor, b: Tensor, b_up: Tensor | None, operands: Operands, **how: Any) -> Problem:
    """Describe a `fused` call of tensors on a GPU, x [M, K]; how: out_dtype and precision."""
    return _problem(Call(x, b, b_up, operands, by_rows=False, **how))


def gemm(
    x: Tensor, b: Tensor, b_up: Tensor | None, operands: Operands, *, config: Config | None = None, **how: Any
) -> Tensor:
    """`fused` with a given configuration; how: as in `problem_of`. For tests and `verify`."""
    call = Call(x, b, b_up, operands, by_rows=False, **how)
    plan = _plan(call, _problem(call), config)
    return plan.run((x, b, b_up, *_operands(call)), None, call_numbers(operands))


def _plan(call: Call, problem: Problem, config: Config | None = None) -> Plan:
    seen = [
        None if each is None else (each.dtype, describe.aligned(each) and name not in VECTORS)  # read by element
        for name, each in zip(TENSORS, _operands(call), strict=False)
    ]
    if problem.epilogue.saves:
        pre = forms.saved_dtype(problem.epilogue.activation, call.x.dtype)
        seen[PLACES["saved"]] = (torch.uint8 if problem.epilogue.saves == "mask" else pre), True
    return gemm_plan("fused", call.shape, call.dtype, call.x.device, problem, config, seen)


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
    if (
        weight.numel() and weight.data_ptr() == weight_up.data_ptr()
    ):  # copied with what lies between its elements, to keep the strides
        span = 1 + sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
        weight_up = weight_up.as_strided((span,), (1,)).clone().as_strided(weight.shape, weight.stride())
    return weight, weight_up


def _operands(call: Call) -> list[Tensor | None]:
    """What the epilogue reads, in the kernels' order and layout: contiguous vectors, matrices by rows."""
    operands = call.operands
    read = [each if each is None else prepare(each) for prepare, each in zip(_PREPARED, operands, strict=False)]
    read += [operands.seed, None, None]
    if operands.aux:
        read += [describe.flat(each.expand(call.shape)) for each in operands.aux]
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


def saved_like(x: Tensor, shape: Sequence[int], save: str, operands: Operands) -> Tensor | None:
    """Allocate what `save` names, for a result of this shape."""
    if save == "pre":
        dtype = forms.saved_dtype(operands.activation, x.dtype)
        return x.new_empty(operands.paired(shape), dtype=dtype)
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


def _problem(call: Call, save: str = "") -> Problem:
    x, (b, b_up), read = call.x, call.columns, _operands(call)
    precision = devices.resolve_precision(x, call.precision)
    aux = [each for each in read[PLACES["aux0"] :] if each is not None]
    matrices = [read[PLACES[name]] for name in MATRICES]
    strides = (
        *(None if each is None else each.stride(0) for each in matrices),
        *(stride for each in aux for stride in each.stride()),
    )
    problem = describe.product(describe.flat(x), b, None, call.dtype, precision)
    assert problem is not None
    return replace(
        problem, epilogue=call.operands.compiled(call.dtype, precision, save), read_strides=strides,
        reads_float32=any(each is not None and each.dtype is torch.float32 for each in (*matrices, *aux)),
        read_aligned=all(each is None or describe.aligned(each) for each in matrices),
        b_aligned=problem.b_aligned and (b_up is None or describe.aligned(b_up)),
        up_first=b_up is not None and apart(b, b_up)[0], up_near=b_up is None or apart(b, b_up)[1],
    )  # fmt: skip


def _in_torch(call: Call, save: str = "") -> tuple[Tensor, Tensor | None]:
    """Compute in torch's operations: on the CPU, for float64, empty tensors, and eager rounding of some activations."""
    x, operands = call.x, call.operands
    with torch.no_grad():
        dtype = call.dtype if operands.eager else cpu.sums_dtype(x.dtype)
        sums, up = (None if each is None else _sums(x, each, dtype, call.precision) for each in call.columns)
        assert sums is not None
        pre, pre_up = forms.before_activation(sums, up, operands)
        result = forms.after_activation(pre, pre_up, operands).to(call.dtype).contiguous()
        saved = None
        if save == "mask":
            saved = forms.packed(spec.ACTIVATIONS[operands.activation].derivative(pre, *operands.arguments) == 1)
        elif save == "pre":
            pre = pre if pre_up is None else torch.stack((pre, pre_up))
            saved = forms.kept(pre, forms.saved_dtype(operands.activation, x.dtype))
    op.record_elsewhere("fused", x, operands.activation or operands.epilogue)
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
        return dz, torch.zeros(operands.paired((chunks, n)), dtype=torch.float32, device=grad.device)
    rows = cast(Tensor, _matrix(grad))
    saved = None if saved is None else saved.contiguous()
    key = (
        "activation_grad", layout(rows), layout(saved), kind, operands.activation, operands.arguments,
        operands.dropout_p > 0, dtype, sums, grad.shape,
    )  # fmt: skip
    chunks = -(-rows.shape[0] // configs.BIAS_CHUNK)
    partial = None
    if sums:
        partial = torch.empty(operands.paired((chunks, n)), dtype=torch.float32, device=grad.device)
    read = (saved, operands.seed, partial)
    plan = plans.get(key)
    if plan is None:
        epilogue = operands.of_gradient(kind, dtype is torch.float32)
        arch = devices.facts(grad.device).arch
        problem = ActivationGradProblem(
            rows.shape[0], n, describe.dtype_name(dtype), epilogue, rows.stride(0), sums, describe.aligned(rows), arch
        )
        seen = [None if each is None else (each.dtype, describe.aligned(each)) for each in (rows, *read)]
        plan = plans.keep(key, activation_grad_plan(problem, operands.paired(grad.shape), grad.device, seen))
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
        op.record_elsewhere("bias_grad", partial)
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
    out = torch.empty(operands.paired(shape), dtype=weight.dtype, device=weight.device)
    first, second = (out[0], out[1]) if operands.gated else (out, None)
    partial = None
    if sums:
        blocks = operands.paired((-(-describe.rows(grad) // configs.BIAS_ROWS), weight.shape[1]))
        partial = torch.empty(blocks, dtype=torch.float32, device=weight.device)
    given = {"seed": operands.seed, "saved": saved, "second": second, "row_sums": partial}
    read = [given.get(name) for name in TENSORS]
    key = (
        "hidden_grad", layout(grad), layout(weight), *map(layout, read), kind, operands.activation,
        operands.arguments, operands.dropout_p > 0, precision, config,
    )  # fmt: skip
    plan = plans.get(key)
    if plan is None:
        op.validate(grad, weight, None, None, precision)
        epilogue = operands.of_gradient(kind, grad.dtype is torch.float32 and precision != "tf32", sums)
        problem = describe.product(describe.flat(grad), weight, None, grad.dtype, precision)
        assert problem is not None
        problem = replace(problem, epilogue=epilogue)
        seen = [None if each is None else (each.dtype, describe.aligned(each)) for each in read]
        plan = plans.keep(key, gemm_plan("hidden_grad", shape, grad.dtype, grad.device, problem, config, seen))
    plan.run((grad, weight, None, *read), first, call_numbers(operands))
    return out, partial
