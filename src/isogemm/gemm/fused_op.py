"""The operators of products with an epilogue, for torch.compile, fake tensors and dispatch modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from isogemm.gemm import configs, fused, op
from isogemm.gemm import fused_forms as forms
from isogemm.gemm import problem as problems
from isogemm.gemm.fused_forms import Fusion


class Call(NamedTuple):
    """The arguments of the operator isogemm::fused."""

    x: torch.Tensor  # [..., K]
    weight: torch.Tensor
    weight_up: torch.Tensor | None
    bias: torch.Tensor | None
    bias_up: torch.Tensor | None
    c: torch.Tensor | None
    residual: torch.Tensor | None
    row_scale: torch.Tensor | None
    col_scale: torch.Tensor | None
    alpha: torch.Tensor | None
    beta: torch.Tensor | None
    aux: Sequence[torch.Tensor]
    seed: torch.Tensor | None
    alpha_value: float
    beta_value: float
    dropout_p: float
    activation: str
    arguments: Sequence[float]
    epilogue: str
    bias_dim: int
    eager: bool
    by_rows: bool  # the weights are [N, K], else [K, N]
    save: str
    owners: Sequence[torch.Tensor | None]  # of the main_grads of weight, bias, weight_up and bias_up
    main_grads: Sequence[torch.Tensor | None]
    out_dtype: torch.dtype | None
    precision: str | None

    @classmethod
    def of_operator(cls, args: Sequence[Any]) -> Call:
        """From the operator's arguments, where a tuple has become a list."""
        return cls._make(tuple(each) if isinstance(each, list) else each for each in args)

    @property
    def fusion(self) -> Fusion:
        return Fusion._make(self[3:21])

    @property
    def columns(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights as [K, N]."""
        return fused.columns(self.weight, self.weight_up, self.by_rows)

    def run(self, fusion: Fusion, save: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result and what was saved; `fusion` is the call's own, made once."""
        return fused.fused(
            self.x, self.weight, self.weight_up, fusion, self.out_dtype, self.precision, save, by_rows=self.by_rows
        )


def _fused(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call.of_operator(args)
    result, saved = call.run(call.fusion, call.save)
    return result, call.x.new_empty(0) if saved is None else saved


def _fused_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call.of_operator(args)
    x, fusion = call.x, call.fusion
    fused.validate(x, *call.columns, fusion, call.out_dtype, call.precision, fused.names_of(call.by_rows))
    shape = (*x.shape[:-1], call.columns[0].shape[-1])
    saved = fused.saved_like(x, shape, call.save, fusion)
    return x.new_empty(shape, dtype=call.out_dtype or x.dtype), x.new_empty(0) if saved is None else saved


class MlpCall(NamedTuple):
    """The arguments of the operator isogemm::mlp."""

    x: torch.Tensor
    weight: torch.Tensor
    weight_up: torch.Tensor | None
    bias: torch.Tensor | None
    bias_up: torch.Tensor | None
    weight_down: torch.Tensor
    bias_down: torch.Tensor | None
    residual: torch.Tensor | None
    seed: torch.Tensor | None
    down_seed: torch.Tensor | None
    activation: str
    arguments: Sequence[float]
    hidden_dropout_p: float
    dropout_p: float
    save: bool
    owners: Sequence[torch.Tensor | None]  # of the main_grads of weight, bias, weight_up, bias_up, and those below
    main_grads: Sequence[torch.Tensor | None]
    out_dtype: torch.dtype | None
    precision: str | None

    @property
    def hidden(self) -> Fusion:
        return Fusion(
            self.bias, self.bias_up, seed=self.seed, dropout_p=self.hidden_dropout_p, activation=self.activation,
            arguments=tuple(self.arguments),
        )  # fmt: skip

    @property
    def down(self) -> Fusion:
        return Fusion(self.bias_down, residual=self.residual, seed=self.down_seed, dropout_p=self.dropout_p)

    @property
    def written(self) -> str:
        """What the first layer writes besides its result."""
        kind = self.hidden.saved_hidden
        return kind if self.save and kind != "out" else ""


def _mlp(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the hidden value and its pre-activation; those empty where they are not kept."""
    call = MlpCall(*args)
    h, z = fused.fused(
        call.x, call.weight, call.weight_up, call.hidden, None, call.precision, call.written, by_rows=True
    )
    result, _ = fused.fused(h, call.weight_down, None, call.down, call.out_dtype, call.precision, "", by_rows=True)
    return result, h if call.save else call.x.new_empty(0), call.x.new_empty(0) if z is None else z


def _mlp_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = MlpCall(*args)
    x, shape = call.x, (*call.x.shape[:-1], call.weight.shape[0])
    up = None if call.weight_up is None else call.weight_up.mT
    fused.validate(x, call.weight.mT, up, call.hidden, None, call.precision)
    h = x.new_empty(shape)
    fused.validate(h, call.weight_down.mT, None, call.down, call.out_dtype, call.precision)
    z = fused.saved_like(x, shape, call.written, call.hidden)
    result = x.new_empty((*shape[:-1], call.weight_down.shape[0]), dtype=call.out_dtype or x.dtype)
    return result, h if call.save else x.new_empty(0), x.new_empty(0) if z is None else z


class GradientCall(NamedTuple):
    """The arguments that isogemm::activation_grad and ::hidden_grad end with: of the forward's epilogue."""

    saved: torch.Tensor | None
    kind: str
    seed: torch.Tensor | None
    dropout_p: float
    activation: str
    arguments: Sequence[float]

    @property
    def fusion(self) -> Fusion:
        return Fusion(
            seed=self.seed, dropout_p=self.dropout_p, activation=self.activation, arguments=tuple(self.arguments)
        )


def gradient_call(saved: torch.Tensor | None, kind: str, fusion: Fusion) -> GradientCall:
    return GradientCall(saved, kind, fusion.seed, fusion.dropout_p, fusion.activation, list(fusion.arguments))


def _activation_grad(
    grad: torch.Tensor, dtype: torch.dtype, sums: bool, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    call = GradientCall(*args)
    dz, partial = fused.activation_grad(grad, call.saved, call.kind, call.fusion, dtype, sums)
    return dz, dz.new_empty(0, dtype=torch.float32) if partial is None else partial


def _activation_grad_fake(
    grad: torch.Tensor, dtype: torch.dtype, sums: bool, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    fusion = GradientCall(*args).fusion
    dz = grad.new_empty((2, *grad.shape) if fusion.gated else grad.shape, dtype=dtype)
    if not (sums and grad.device.type == "cuda") or dtype is torch.float64:
        return dz, grad.new_empty(0, dtype=torch.float32)
    chunks = (problems.rows(grad) + configs.BIAS_CHUNK - 1) // configs.BIAS_CHUNK
    shape = (2, chunks, grad.shape[-1]) if fusion.gated else (chunks, grad.shape[-1])
    return dz, grad.new_empty(shape, dtype=torch.float32)


def _chunk_sums(partial: torch.Tensor, together: int, dtype: torch.dtype) -> torch.Tensor:
    return fused.chunk_sums(partial, together, None, dtype)


def _chunk_sums_fake(partial: torch.Tensor, together: int, dtype: torch.dtype) -> torch.Tensor:
    return partial.new_empty(partial.shape[-1:], dtype=dtype)


def add_chunk_sums(main_grad: torch.Tensor, partial: torch.Tensor, together: int, owner: torch.Tensor) -> None:
    """Accumulate into the owner's main_grad, and tell it so."""
    op.require_total("bias.main_grad", main_grad, partial.shape[-1:], partial.device)
    fused.chunk_sums(partial, together, main_grad, torch.float32)
    owner.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def _add_chunk_sums(main_grad: torch.Tensor, partial: torch.Tensor, together: int, owner: torch.Tensor) -> None:
    if op.is_added("the bias", owner):
        add_chunk_sums(main_grad, partial, together, owner)


def _add_chunk_sums_fake(main_grad: torch.Tensor, partial: torch.Tensor, together: int, owner: torch.Tensor) -> None:
    op.require_total("bias.main_grad", main_grad, partial.shape[-1:], partial.device)


def _hidden_grad(
    grad: torch.Tensor, weight: torch.Tensor, precision: str | None, sums: bool, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    call = GradientCall(*args)
    assert call.saved is not None
    dz, partial = fused.hidden_grad(grad, weight, call.saved, call.kind, call.fusion, precision, sums)
    return dz, dz.new_empty(0, dtype=torch.float32) if partial is None else partial


def _hidden_grad_fake(
    grad: torch.Tensor, weight: torch.Tensor, precision: str | None, sums: bool, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    gated, n = GradientCall(*args).fusion.gated, weight.shape[-1]
    shape = (*grad.shape[:-1], n)
    dz = weight.new_empty((2, *shape) if gated else shape)
    if not sums or weight.dtype is torch.float64:
        return dz, weight.new_empty(0, dtype=torch.float32)
    blocks = (problems.rows(grad) + configs.BIAS_ROWS - 1) // configs.BIAS_ROWS
    return dz, weight.new_empty((2, blocks, n) if gated else (blocks, n), dtype=torch.float32)


def epilogue_gradients(
    grad: torch.Tensor,
    saved: torch.Tensor,
    dtype: torch.dtype,
    aux: Sequence[torch.Tensor],
    seed: torch.Tensor | None,
    dropout_p: float,
    epilogue: str,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    fusion = Fusion(seed=seed, dropout_p=dropout_p, epilogue=epilogue, aux=tuple(aux))
    found = forms.epilogue_grad(grad, saved, fusion, dtype, wanted)
    return [
        like.new_empty(0) if gradient is None else _apart_from(grad, gradient)
        for gradient, like in zip(found, (saved, *aux), strict=True)
    ]


def _apart_from(grad: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """An operator's results are its own."""
    return gradient.clone() if gradient.data_ptr() == grad.data_ptr() else gradient


def _epilogue_grad_fake(
    grad: torch.Tensor,
    saved: torch.Tensor,
    dtype: torch.dtype,
    aux: Sequence[torch.Tensor],
    seed: torch.Tensor | None,
    dropout_p: float,
    epilogue: str,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    of_aux = (each.new_empty(each.shape if want else 0) for each, want in zip(aux, wanted, strict=True))
    return [saved.new_empty(saved.shape, dtype=dtype), *of_aux]


_OF_FORWARD = "Tensor? saved, str kind, Tensor? seed, float dropout_p, str activation, float[] arguments"

_library: Any = torch.library.Library("isogemm", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _function, _fake in (
    (
        "fused(Tensor x, Tensor weight, Tensor? weight_up, Tensor? bias, Tensor? bias_up, Tensor? c, Tensor? residual, "
        "Tensor? row_scale, Tensor? col_scale, Tensor? alpha, Tensor? beta, Tensor[] aux, Tensor? seed, "
        "float alpha_value, float beta_value, float dropout_p, str activation, float[] arguments, str epilogue, "
        "int bias_dim, bool eager, bool by_rows, str save, Tensor?[] owners, Tensor?[] main_grads, "
        "ScalarType? out_dtype, str? precision) -> (Tensor, Tensor)",
        _fused,
        _fused_fake,
    ),
    (
        "mlp(Tensor x, Tensor weight, Tensor? weight_up, Tensor? bias, Tensor? bias_up, Tensor weight_down, "
        "Tensor? bias_down, Tensor? residual, Tensor? seed, Tensor? down_seed, str activation, float[] arguments, "
        "float hidden_dropout_p, float dropout_p, bool save, Tensor?[] owners, Tensor?[] main_grads, "
        "ScalarType? out_dtype, str? precision) -> (Tensor, Tensor, Tensor)",
        _mlp,
        _mlp_fake,
    ),
    (
        f"activation_grad(Tensor grad, ScalarType dtype, bool sums, {_OF_FORWARD}) -> (Tensor, Tensor)",
        _activation_grad,
        _activation_grad_fake,
    ),
    ("chunk_sums(Tensor partial, int together, ScalarType dtype) -> Tensor", _chunk_sums, _chunk_sums_fake),
    (
        "add_chunk_sums(Tensor(a!) main_grad, Tensor partial, int together, Tensor owner) -> ()",
        _add_chunk_sums,
        _add_chunk_sums_fake,
    ),
    (
        f"hidden_grad(Tensor grad, Tensor weight, str? precision, bool sums, {_OF_FORWARD}) -> (Tensor, Tensor)",
        _hidden_grad,
        _hidden_grad_fake,
    ),
    (
        "epilogue_grad(Tensor grad, Tensor saved, ScalarType dtype, Tensor[] aux, Tensor? seed, float dropout_p, "
        "str epilogue, bool[] wanted) -> Tensor[]",
        epilogue_gradients,
        _epilogue_grad_fake,
    ),
):
    _library.define(_schema)
    _name = _schema.partition("(")[0]
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
    torch.library.register_fake(f"isogemm::{_name}", _fake, lib=_library)
