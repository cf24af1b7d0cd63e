"""Products with an epilogue and their gradients, without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from isogemm.core import device as devices
from isogemm.core import dispatch
from isogemm.core.dispatch import Dispatch
from isogemm.core.errors import require_same
from isogemm.epilogues import random, spec
from isogemm.epilogues.spec import Epilogue
from isogemm.gemm import configs, cpu, op
from isogemm.gemm import fused_forms as forms
from isogemm.gemm import problem as problems
from isogemm.gemm.configs import ActivationGradProblem, Config, Problem
from isogemm.gemm.fused_forms import Fusion
from isogemm.gemm.plan import Plan, activation_grad_plan, chunk_sums_plan, gemm_plan

ROUNDINGS = ("once", "eager")


Names = tuple[str, str, str, str]  # what the caller calls x, the weight, its bias and the dropout's probability
_NAMES: Names = ("a", "b", "bias", "dropout_p")


def names_of(by_rows: bool) -> Names:
    """In `linear`, where the weights are [N, K], or else in `matmul_fused`."""
    return ("x", "weight", "bias", "dropout_p") if by_rows else _NAMES


def validate(
    x: torch.Tensor,
    b: torch.Tensor,
    b_up: torch.Tensor | None,
    fusion: Fusion,
    out_dtype: torch.dtype | None,
    precision: str | None,
    names: Names = _NAMES,
) -> None:
    """Of `fused`'s arguments; x [..., K], b [K, N]."""
    x_name, b_name, bias_name, dropout_name = names
    op.require_operands((x_name, x), (b_name, b), out_dtype, precision)
    require_same(f"K (of {x_name} [..., K] and {b_name})", (x_name, b_name), (x.shape[-1], b.shape[0]))
    rows, n = x.shape[:-1], b.shape[-1]
    op.require_bias(fusion.bias if fusion.bias_dim == -1 else None, x, n, bias_name)
    if fusion.bias_dim not in (-1, -2):
        raise ValueError(f"bias_dim is {fusion.bias_dim}; expected -1 (a bias for each column) or -2 (for each row)")
    if fusion.bias is not None and fusion.bias_dim == -2:
        _require("bias", fusion.bias, rows, x, (x.dtype,))
    if fusion.activation and fusion.epilogue:
        raise ValueError(f"activation is {fusion.activation!r} and epilogue {fusion.epilogue!r}; one takes the place")
    if not 0 <= fusion.dropout_p <= 1:
        raise ValueError(f"{dropout_name} is {fusion.dropout_p}; expected a probability")
    _validate_gate(b, b_up, fusion)
    accepted = (x.dtype, torch.float32)
    for name, tensor, shape in (
        ("c", fusion.c, (*rows, n)),
        ("residual", fusion.residual, (*rows, n)),
        ("row_scale", fusion.row_scale, rows),
        ("col_scale", fusion.col_scale, (n,)),
        ("alpha", fusion.alpha, ()),
        ("beta", fusion.beta, ()),
    ):
        if tensor is not None:
            _require(name, tensor, shape, x, accepted)
    if (fusion.beta is not None or fusion.beta_value) and fusion.c is None:
        raise ValueError("beta is given without c; expected c [..., M, N]")
    if fusion.aux and not fusion.epilogue:
        raise ValueError(f"aux has {len(fusion.aux)} tensors and there is no epilogue to read them")
    if fusion.epilogue:
        _validate_aux(fusion, (*rows, n), x, accepted)


def _validate_gate(b: torch.Tensor, b_up: torch.Tensor | None, fusion: Fusion) -> None:
    if fusion.gated != (b_up is not None):
        gated = ", ".join(entry.name for entry in spec.ACTIVATIONS.values() if entry.gate)
        raise ValueError(
            f"activation is {fusion.activation or None!r} {'with' if b_up is not None else 'without'} weight_up; "
            f"weight_up goes with a gated one: {gated}"
        )
    if b_up is None:
        if fusion.bias_up is not None:
            raise ValueError("bias_up is given without weight_up")
        return
    require_same("shape", ("weight", "weight_up"), (b.shape[::-1], b_up.shape[::-1]))
    require_same("dtype", ("weight", "weight_up"), (b.dtype, b_up.dtype))
    require_same("device", ("weight", "weight_up"), (b.device, b_up.device))
    if fusion.bias_up is not None:
        _require("bias_up", fusion.bias_up, b_up.shape[1:], b, (b.dtype,))
    others = {name: getattr(fusion, name) for name in ("c", "row_scale", "col_scale", "alpha", "beta")}
    others |= {"alpha": fusion.alpha if fusion.alpha_value == 1 else fusion.alpha_value}
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} does not go with the gated activation {fusion.activation!r}")
    if fusion.bias_dim != -1:
        raise ValueError(f"bias_dim is {fusion.bias_dim}; a gated activation's biases are along columns (-1)")


def _validate_aux(fusion: Fusion, shape: Sequence[int], x: torch.Tensor, accepted: tuple[torch.dtype, ...]) -> None:
    entry = spec.registered(fusion.epilogue)
    if len(fusion.aux) != entry.aux:
        raise ValueError(f"aux has {len(fusion.aux)} tensors; epilogue {entry.name!r} reads {entry.aux}")
    for index, tensor in enumerate(fusion.aux):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"aux[{index}] is a {type(tensor).__name__}; expected a torch.Tensor")
        try:
            fits = problems.broadcast(tensor.shape, shape) == tuple(shape)
        except RuntimeError:
            fits = False
        _require(f"aux[{index}]", tensor, tensor.shape if fits else shape, x, accepted)


def _require(
    name: str, tensor: torch.Tensor, shape: Sequence[int], x: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor {list(shape)}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {list(shape)}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {', '.join(map(str, dict.fromkeys(dtypes)))}")
    require_same("device", (name, "the inputs"), (tensor.device, x.device))


def new_seed(device: torch.device) -> torch.Tensor:
    """Drawn on the device from torch's generator: another one at every replay of a captured graph."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_up: torch.Tensor | None,
    fusion: Fusion,
    out_dtype: torch.dtype | None,
    precision: str | None,
    save: str,
    *,
    by_rows: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result [..., N] of x [..., K] and, where asked to save it, a mask or the pre-activation.

    by_rows: the weights are [N, K], else [K, N].
    """
    if not x.is_cuda or x.dtype is torch.float64:
        b, b_up = columns(weight, weight_up, by_rows)
        validate(x, b, b_up, fusion, out_dtype, precision, names_of(by_rows))
        return _in_torch(x, b, b_up, fusion, out_dtype or x.dtype, precision, save)
    precision = problems.resolve_precision(x, precision)
    up = None
    if weight_up is not None:
        weight, weight_up = _alike(weight, weight_up)
        up = (_layout(weight_up), *_apart(weight, weight_up))
    key = (
        "fused", _layout(x), _layout(weight), by_rows, up,
        *map(_layout, fusion[:8]), *map(_layout, fusion.aux),
        fusion.activation, fusion.arguments, fusion.epilogue and spec.REGISTERED.get(fusion.epilogue),
        fusion.alpha_value != 1, fusion.beta_value != 0, fusion.dropout_p > 0, fusion.bias_dim, fusion.eager, save,
        out_dtype, precision,
    )  # fmt: skip
    plan = op.plans.get(key)
    if plan is None:
        b, b_up = columns(weight, weight_up, by_rows)
        validate(x, b, b_up, fusion, out_dtype, precision, names_of(by_rows))
        dtype = out_dtype or x.dtype
        if 0 in (*x.shape, b.shape[1]) or (fusion.eager and not _has_torchs_bits(fusion)):
            return _in_torch(x, b, b_up, fusion, dtype, precision, save)
        read = _operands(x, b.shape[1], fusion)
        rows = _by_rows(x)
        problem = _problem(rows, b, b_up, fusion, dtype, precision, save, read)
        plan = op.keep(key, _plan(rows, b, problem, configs.choose(problem), dtype, read))
    read = _operands(x, plan.shape[-1], fusion)
    saved = None
    if save:
        saved = read[_SAVED] = saved_like(x, plan.shape, save, fusion)
    return plan.run(_by_rows(x), weight, read, None, weight_up, _call_numbers(fusion)), saved


def columns(
    weight: torch.Tensor, weight_up: torch.Tensor | None, by_rows: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights as [K, N]."""
    if not by_rows:
        return weight, weight_up
    return weight.mT, None if weight_up is None else weight_up.mT


def describe(
    x: torch.Tensor,
    b: torch.Tensor,
    b_up: torch.Tensor | None,
    fusion: Fusion,
    *,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> Problem:
    """The problem of `fused`, of tensors on a GPU, x [M, K]."""
    precision, dtype = problems.resolve_precision(x, precision), out_dtype or x.dtype
    return _problem(x, b, b_up, fusion, dtype, precision, "", _operands(x, b.shape[1], fusion))


def gemm(
    x: torch.Tensor,
    b: torch.Tensor,
    b_up: torch.Tensor | None,
    fusion: Fusion,
    *,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """`fused` by a configuration of the caller's: for tests and `verify`."""
    problem = describe(x, b, b_up, fusion, out_dtype=out_dtype, precision=precision)
    config = configs.choose(problem) if config is None else config
    if reason := configs.illegal(problem, config):
        raise ValueError(f"config {config} for problem {problem}: {reason}")
    read = _operands(x, b.shape[1], fusion)
    plan = _plan(x, b, problem, config, out_dtype or x.dtype, read)
    return plan.run(x, b, read, None, b_up, _call_numbers(fusion))


def _plan(
    x: torch.Tensor,
    b: torch.Tensor,
    problem: Problem,
    config: Config,
    dtype: torch.dtype,
    read: Sequence[torch.Tensor | None],
) -> Plan:
    seen = [
        None if each is None else (each.dtype, problems.aligned(each) and index not in _VECTORS)
        for index, each in enumerate(read)
    ]
    if problem.epilogue.saves:
        pre = forms.saved_dtype(problem.epilogue.activation, x.dtype)
        seen[_SAVED] = (torch.uint8 if problem.epilogue.saves == "mask" else pre), True
    return gemm_plan("fused", (*x.shape[:-1], b.shape[1]), dtype, x.device, problem, config, seen)


def _has_torchs_bits(fusion: Fusion) -> bool:
    return not fusion.epilogue and (not fusion.activation or spec.ACTIVATIONS[fusion.activation].has_torchs_bits)


def _apart(b: torch.Tensor, b_up: torch.Tensor) -> tuple[bool, bool]:
    """Whether the second weight lies before the first, and whether one TMA map reaches both."""
    distance = b_up.data_ptr() - b.data_ptr()
    return distance < 0, abs(distance) < 2**40


_SAVED, _SECOND = 9, 10  # their places among what an epilogue reads
_VECTORS = (0, 1, 4, 5)  # read an element at a time: one kernel for any alignment


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    """x whose rows have one stride, copied where they do not."""
    return x if x.ndim == 2 or x.is_contiguous() else problems.flat(x).view(x.shape)


def _alike(weight: torch.Tensor, weight_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two weights that one kernel reads: with the same strides, and at two places."""
    if weight.stride() != weight_up.stride():
        weight, weight_up = weight.contiguous(), weight_up.contiguous()
    return weight, weight_up.clone() if weight.data_ptr() == weight_up.data_ptr() else weight_up


def _operands(x: torch.Tensor, n: int, fusion: Fusion) -> list[torch.Tensor | None]:
    """What the epilogue reads, in the kernels' order, as they read it: vectors, and matrices by rows."""
    bias, bias_up, c, residual, row_scale, col_scale, alpha, beta, aux, seed = fusion[:10]
    read = [
        _vector(bias), _vector(bias_up), _matrix(c), _matrix(residual), _vector(row_scale), _vector(col_scale), alpha,
        beta, seed, None, None,
    ]  # fmt: skip
    if aux:
        rows = problems.rows(x)
        read += [each.expand(*x.shape[:-1], n).reshape(rows, n) for each in aux]
    return read


def _vector(x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None or (x.ndim == 1 and x.is_contiguous()):
        return x
    return x.reshape(-1).contiguous()


def _matrix(x: torch.Tensor | None) -> torch.Tensor | None:
    """[rows, n], contiguous along n."""
    if x is None or (x.ndim == 2 and x.stride(1) == 1):
        return x
    flat = problems.flat(x)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _layout(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    """All of a tensor that a plan depends on."""
    return None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.get_device())


def saved_like(x: torch.Tensor, shape: Sequence[int], save: str, fusion: Fusion) -> torch.Tensor | None:
    """Memory for what `save` says, of a result of this shape."""
    if save == "pre":
        dtype = forms.saved_dtype(fusion.activation, x.dtype)
        return x.new_empty((2, *shape) if fusion.gated else shape, dtype=dtype)
    if save == "mask":
        return x.new_empty((*shape[:-1], (shape[-1] + 7) // 8), dtype=torch.uint8)
    return None


def _call_numbers(fusion: Fusion) -> tuple[float | None, ...]:
    """Alpha, beta, the dropout's threshold and its scale, where a kernel takes them."""
    alpha = fusion.alpha_value if fusion.alpha is None and fusion.alpha_value != 1 else None
    beta = fusion.beta_value if fusion.beta is None and fusion.beta_value != 0 else None
    if not fusion.dropout_p:
        return alpha, beta, None, None
    return alpha, beta, random.threshold(fusion.dropout_p), random.scale(fusion.dropout_p)


def _problem(
    x: torch.Tensor,
    b: torch.Tensor,
    b_up: torch.Tensor | None,
    fusion: Fusion,
    dtype: torch.dtype,
    precision: str | None,
    save: str,
    read: list[torch.Tensor | None],
) -> Problem:
    exact = fusion.eager or (dtype is torch.float32 and precision != "tf32")
    epilogue = Epilogue(
        bias="" if fusion.bias is None else "n" if fusion.bias_dim == -1 else "m",
        bias_up=fusion.bias_up is not None,
        alpha="device" if fusion.alpha is not None else "host" if fusion.alpha_value != 1 else "",
        row_scale=fusion.row_scale is not None,
        col_scale=fusion.col_scale is not None,
        beta="device" if fusion.beta is not None else "host" if fusion.beta_value else "",
        activation=fusion.activation,
        arguments=fusion.arguments,
        user=fusion.epilogue,
        aux=len(fusion.aux),
        exact=exact and bool(fusion.activation),
        eager=fusion.eager and dtype is not torch.float32,
        saves=cast(Any, save),
        dropout=fusion.dropout_p > 0,
        residual=fusion.residual is not None,
    )
    aux = tuple(stride for each in read[_SECOND + 1 :] if each is not None for stride in each.stride())
    addend, residual = (0 if each is None else each.stride(0) for each in (read[2], read[3]))
    flat = problems.flat(x)
    problem = problems.of_product(flat, b, None, dtype, precision, problems.walk_chunk(x, dtype))
    assert problem is not None
    return replace(
        problem, epilogue=epilogue, read_strides=(addend, residual, *aux),
        reads_float32=any(
            each is not None and each.dtype is torch.float32 for each in (*read[2:4], *read[_SECOND + 1 :])
        ),
        read_aligned=all(each is None or problems.aligned(each) for each in read[2:4]),
        b_aligned=problem.b_aligned and (b_up is None or problems.aligned(b_up)),
        up_first=b_up is not None and _apart(b, b_up)[0], up_near=b_up is None or _apart(b, b_up)[1],
    )  # fmt: skip


def _in_torch(
    x: torch.Tensor,
    b: torch.Tensor,
    b_up: torch.Tensor | None,
    fusion: Fusion,
    out_dtype: torch.dtype,
    precision: str | None,
    save: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The epilogue in torch's operations: on the CPU, of float64, of nothing, and where torch's are several."""
    with torch.no_grad():
        dtype = out_dtype if fusion.eager else cpu.sums_dtype(x.dtype)
        sums, up = (None if each is None else _sums(x, each, dtype, precision) for each in (b, b_up))
        assert sums is not None
        pre, pre_up = forms.before_activation(sums, up, fusion)
        result = forms.after_activation(pre, pre_up, fusion).to(out_dtype).contiguous()
        saved = None
        if save == "mask":
            saved = forms.packed(spec.ACTIVATIONS[fusion.activation].derivative(pre, *fusion.arguments) == 1)
        elif save == "pre":
            pre = pre if pre_up is None else torch.stack((pre, pre_up))
            saved = forms.kept(pre, forms.saved_dtype(fusion.activation, x.dtype))
    if dispatch.active:
        path, reason = "torch", "torch's own operations follow the product"
        if x.dtype is torch.float64:
            reason = "float64"
        elif not x.is_cuda:
            path, reason = "cpu", "not on a GPU"
        problem = f"{list(x.shape)} {problems.dtype_name(x.dtype)}"
        dispatch.record(Dispatch("fused", path, problem, fusion.activation or fusion.epilogue, reason))
    return result, saved


def _sums(x: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, precision: str | None) -> torch.Tensor:
    if x.dtype is torch.float64:
        return torch.matmul(x, b)
    if x.is_cuda:
        return op.product(x, b, None, dtype if dtype is not x.dtype else None, precision)
    return cpu.product(x, b, None, dtype)


def activation_grad(
    grad: torch.Tensor, saved: torch.Tensor | None, kind: str, fusion: Fusion, dtype: torch.dtype, sums: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dz [..., N] (gated: [2, ..., N], of the gate and of up) in `dtype`, from that of dropout(act(z)).

    saved: z, act(z) or a mask, as `kind` says. sums: on a GPU also the sums of dz over chunks of rows, in the same
    pass: `chunk_sums` makes the bias's gradient of them.
    """
    n = grad.shape[-1]
    if not grad.is_cuda or dtype is torch.float64 or not grad.numel():
        with torch.no_grad():
            dz = forms.activation_grad(grad, saved, kind, fusion, dtype)
        if not (sums and grad.is_cuda) or dtype is torch.float64:
            return dz, None
        chunks = -(-problems.rows(grad) // configs.BIAS_CHUNK)
        none = torch.zeros((chunks, n), dtype=torch.float32, device=grad.device)
        return dz, torch.stack((none, none)) if fusion.gated else none
    rows = cast(torch.Tensor, _matrix(grad))
    saved = None if saved is None else saved.contiguous()
    key = (
        "activation_grad", _layout(rows), _layout(saved), kind, fusion.activation, fusion.arguments,
        fusion.dropout_p > 0, dtype, sums, grad.shape,
    )  # fmt: skip
    chunks = -(-rows.shape[0] // configs.BIAS_CHUNK)
    partial = None
    if sums:
        partial = torch.empty((2, chunks, n) if fusion.gated else (chunks, n), dtype=torch.float32, device=grad.device)
    read = (saved, fusion.seed, partial)
    plan = op.plans.get(key)
    if plan is None:
        epilogue = Epilogue(
            activation=fusion.activation, arguments=fusion.arguments, dropout=fusion.dropout_p > 0,
            exact=dtype is torch.float32, gradient=cast(Any, kind),
        )  # fmt: skip
        arch = devices.facts(grad.device).arch
        problem = ActivationGradProblem(
            rows.shape[0], n, problems.dtype_name(dtype), epilogue, rows.stride(0), sums, problems.aligned(rows), arch
        )
        seen = [None if each is None else (each.dtype, problems.aligned(each)) for each in (rows, *read)]
        shape = (2, *grad.shape) if fusion.gated else grad.shape
        plan = op.keep(key, activation_grad_plan(problem, shape, grad.device, seen))
    dz = plan.run(rows, rows, read, None, None, _call_numbers(fusion)[2:])
    return dz, partial


def chunk_sums(partial: torch.Tensor, together: int, total: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The [N] sum of [count, N] sums: `together` neighbours by halves, then those from first to last.

    Added to `total` where given.
    """
    count, n = partial.shape
    if not partial.is_cuda:
        sums = partial.new_zeros(n) if total is None else total
        for chunk in cpu.row_sums(partial, together):
            sums += chunk + 0.0  # -0 is +0, as with rows of zeros after it
        if dispatch.active:
            problem = f"{list(partial.shape)} {problems.dtype_name(partial.dtype)}"
            dispatch.record(Dispatch("bias_grad", "cpu", problem, "", "not on a GPU"))
        return sums.to(dtype) if total is None else sums
    if not partial.numel():
        return torch.zeros(n, dtype=dtype, device=partial.device) if total is None else total
    partial = partial.contiguous()
    stride = None if total is None else total.stride(0)
    key = ("chunk_sums", count, n, together, dtype, stride, partial.get_device())
    plan = op.plans.get(key)
    if plan is None:
        out_dtype = dtype if total is None else total.dtype
        plan = op.keep(key, chunk_sums_plan(count, n, together, out_dtype, stride, partial.device))
    return plan.run(partial, partial, (), total)


def hidden_grad(
    grad: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    kind: str,
    fusion: Fusion,
    precision: str | None,
    sums: bool,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dz as `activation_grad` has it, from the gradient of dropout(act(z)) @ weight.T: one launch.

    sums: also those of dz over blocks of BIAS_ROWS rows, [ceil(rows / BIAS_ROWS), N] (gated: two); not of float64.
    config: one of the caller's, for tests.
    """
    grad = grad.to(weight.dtype)
    if not grad.is_cuda or grad.dtype is torch.float64 or 0 in (*grad.shape, weight.shape[1]):
        above = op.product(grad, weight, None, None if grad.dtype is torch.float64 else torch.float32, precision)
        dz, _ = activation_grad(above, saved, kind, fusion, weight.dtype, False)
        if not sums or grad.dtype is torch.float64:
            return dz, None
        halves = [cpu.row_sums(problems.flat(half), configs.BIAS_ROWS) for half in (dz if fusion.gated else dz[None])]
        return dz, torch.stack(halves) if fusion.gated else halves[0]
    precision = problems.resolve_precision(grad, precision)
    grad, saved = _by_rows(grad), saved.contiguous()
    shape = (*grad.shape[:-1], weight.shape[1])
    out = torch.empty((2, *shape) if fusion.gated else shape, dtype=weight.dtype, device=weight.device)
    first, second = (out[0], out[1]) if fusion.gated else (out, None)
    blocks = (-(-problems.rows(grad) // configs.BIAS_ROWS), weight.shape[1])
    partial = None
    if sums:
        partial = torch.empty((2, *blocks) if fusion.gated else blocks, dtype=torch.float32, device=weight.device)
    read = [*(None,) * 8, fusion.seed, saved, second, *(None,) * spec.MOST_AUX, partial]
    key = (
        "hidden_grad", _layout(grad), _layout(weight), *map(_layout, read), kind, fusion.activation, fusion.arguments,
        fusion.dropout_p > 0, precision, config,
    )  # fmt: skip
    plan = op.plans.get(key)
    if plan is None:
        op.validate(grad, weight, None, None, precision)
        epilogue = Epilogue(
            activation=fusion.activation, arguments=fusion.arguments, dropout=fusion.dropout_p > 0,
            exact=grad.dtype is torch.float32 and precision != "tf32", gradient=cast(Any, kind), sums=sums,
        )  # fmt: skip
        chunk = problems.walk_chunk(grad, grad.dtype)
        problem = problems.of_product(problems.flat(grad), weight, None, grad.dtype, precision, chunk)
        assert problem is not None
        problem = replace(problem, epilogue=epilogue)
        config = configs.choose(problem) if config is None else config
        if reason := configs.illegal(problem, config):
            raise ValueError(f"config {config} for problem {problem}: {reason}")
        seen = [None if each is None else (each.dtype, problems.aligned(each)) for each in read]
        plan = op.keep(key, gemm_plan("hidden_grad", shape, grad.dtype, grad.device, problem, config, seen))
    plan.run(grad, weight, read, first, None, _call_numbers(fusion))
    return out, partial
