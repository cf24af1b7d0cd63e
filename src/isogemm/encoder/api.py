"""`isogemm.encoder_layer` and `encoder_chunk`: validation, autocast, and the choice of path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Required, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from isogemm.core import dispatch
from isogemm.core.device import resolve_precision
from isogemm.core.dispatch import Dispatch
from isogemm.core.eager import (
    NO_TENSOR,
    PLAIN,
    KnownCalls,
    autocast_dtype,
    is_tracing,
    likeness,
    refuse_transforms,
    through_dispatcher,
)  # fmt: skip
from isogemm.core.errors import require_precision, require_same
from isogemm.encoder import composed
from isogemm.encoder.parameters import (
    ACTIVATIONS,
    NORMS,
    NOTHING_DROPPED,
    EncoderDropout,
    EncoderParameters,
    Options,
    RunningStatistics,
)
from isogemm.epilogues import random
from isogemm.gemm.describe import dtype_name
from isogemm.gemm.fused import new_seed
from isogemm.gemm.op import SERVED
from isogemm.norm.op import update_running

if TYPE_CHECKING:
    from isogemm.encoder.buffers import ExtraInputs
    from isogemm.encoder.fused import Kind
    from isogemm.encoder.plan import Plan


class _Named(TypedDict, total=False):
    """encoder_layer's options except return_scores, which decides the result's type."""

    nhead: Required[int]
    norm_first: bool
    residual_normed: bool
    activation: str
    norm: str
    eps: float
    key_padding_mask: Tensor | None
    is_causal: bool
    dropout: float | EncoderDropout
    running: tuple[RunningStatistics, RunningStatistics] | None
    training: bool
    scores: Tensor | tuple[Tensor, ...] | None
    precision: str | None


@overload
def encoder_layer(
    x: Tensor, params: EncoderParameters, *, return_scores: Literal[False] = ..., **options: Unpack[_Named]
) -> Tensor: ...
@overload
def encoder_layer(
    x: Tensor, params: EncoderParameters, *, return_scores: Literal[True], **options: Unpack[_Named]
) -> tuple[Tensor, Tensor]: ...
@overload
def encoder_layer(
    x: Tensor, params: EncoderParameters, *, return_scores: Literal["factors"], **options: Unpack[_Named]
) -> tuple[Tensor, tuple[Tensor, ...]]: ...
def encoder_layer(
    x: Tensor,
    params: EncoderParameters,
    *,
    nhead: int,
    norm_first: bool = False,
    residual_normed: bool = False,
    activation: str = "relu",
    norm: str = "layer_norm",
    eps: float = 1e-5,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float | EncoderDropout = NOTHING_DROPPED,
    running: tuple[RunningStatistics, RunningStatistics] | None = None,
    training: bool = True,
    scores: Tensor | tuple[Tensor, ...] | None = None,
    return_scores: bool | Literal["factors"] = False,
    precision: str | None = None,
) -> Tensor | tuple[Tensor, Tensor | tuple[Tensor, ...]]:
    """A transformer's encoder layer, as torch.nn.TransformerEncoderLayer and PatchTST's layers compute it.

    Args:
        x: [S, T, D] or [T, D], any strides: S sequences of T tokens; float32, bfloat16 or float16.
        params: of x's dtype, unless under autocast. If a parameter has a float32 `main_grad`, its gradient is added to
            that instead of `.grad`, and its `grad_added_to_main_grad` is set.
        nhead: divides D; scores are scaled by 1 / sqrt(D / nhead).
        norm_first: normalise before the attention and before the feed-forward part; else after each residual sum.
        residual_normed: with norm_first, the residual is the normalised value, not the value before the norm.
        activation: "relu", "gelu" (erf), "gelu_tanh" or "silu".
        norm: "layer_norm"; "rms_norm", which has no bias; or "batch_norm", over all sequences and tokens.
        key_padding_mask: [S, T] ([T] for x [T, D]): bool, True for a key to leave out, or floating point, added to the
            scores; values below -8e37, such as -inf or float32's lowest number, leave a key out. It gets no gradient.
            The attention of a query without keys is 0.
        is_causal: a query sees no later key.
        dropout: the probability everywhere, or one for each place, rounded to 1/65536. Its seed is drawn on x's device
            from torch's generator.
        running: running statistics of both batch norms. In training they are updated in place, as in
            torch.nn.BatchNorm1d. In evaluation, or where frozen, they normalise. Without them the batch's do.
        training: whether dropout is applied and batch norms use the batch's statistics.
        scores: [S, nhead, T, T] ([nhead, T, T]) in the products' dtype: the scores that another layer returned, added
            to this layer's before the masks. Or their factors: the queries and keys [2, nhead, S, T, D / nhead]
            ([2, nhead, T, D / nhead]) of each earlier layer.
        return_scores: True: also return this layer's scores, with `scores` and the masks in them. "factors": also
            return a tuple of `scores`, which must be factors or None, and this layer's factors. Past 2 D / nhead
            tokens factors take less memory and traffic. No mask is in them: each layer applies its own.
        precision: of float32 products, as in `isogemm.matmul`.

    Returns:
        y, like x; with return_scores also the scores. Under autocast the products are in its dtype; x, the residual
        sums and y keep x's.

    The bits of a sequence's result and gradient do not depend on the other sequences, on its place among them, or on
    masked tokens after its own. There are two exceptions: a dropout mask depends on the place, and a batch norm in
    training depends on all rows, which it sums in a fixed order. Parameters' gradients are sums over `encoder_chunk`
    sequences at a time: micro-batches of multiples of that add up, through main_grad, to the bits of the whole batch.
    `isogemm.dispatch_log` shows whether the fused kernels served. Differentiable once.
    """
    if has_torch_function(NO_TENSOR) and not is_compiling():  # `is_intercepted`, without its frame
        return cast(Tensor, handle_torch_function(cast(Any, encoder_layer), (), **locals()))
    key: tuple[Any, ...] | None = None
    if _can_be_known(x, params, scores, running, return_scores, norm, dropout, training):
        present: list[Any] = [each for each in (x, key_padding_mask, *params) if each is not None]
        absent = key_padding_mask is None, *[each is None for each in params]
        key = (
            x.shape, absent, type(nhead), nhead, norm_first, residual_normed, activation, norm, eps, is_causal, dropout,
            training, precision,
        )  # fmt: skip
        known = _known_layers.find(key, present)
        if known is not None:
            inputs = [place if place is None else present[place] for place in known.places]
            return known.plan.forward(x, inputs).y
    plain, factors = (None, scores) if isinstance(scores, tuple) else (scores, ())
    given = _Tensors(key_padding_mask, plain, factors, running)
    decision = _decided(
        x, params, given, nhead, norm_first, residual_normed, activation, norm, eps, is_causal, dropout, training,
        return_scores, precision,
    )  # fmt: skip
    if running is not None and not training:
        given = given._replace(running=(running[0]._replace(frozen=True), running[1]._replace(frozen=True)))
    if x.ndim == 2:
        y, of_layer, qk = _encoder_layer(x[None], params, given.with_sequence_dimension(), decision)
        y = y[0]
        of_layer, qk = None if of_layer is None else of_layer[0], None if qk is None else qk[:, :, 0]
    else:
        y, of_layer, qk = _encoder_layer(x, params, given, decision)
        if key is not None and decision.kind is not None and not (y.requires_grad or through_dispatcher()):
            _know(key, present, x, params, given, decision)
    if qk is not None:
        return y, (*given.factors, qk)
    return y if of_layer is None else (y, of_layer)


def gains_by_factors(x: Tensor, params: EncoderParameters, nhead: int, precision: str | None) -> bool:
    """Whether the fused kernels can pass scores on as factors for x, and factors are smaller than scores."""
    if not x.is_cuda or x.shape[-2] <= 2 * x.shape[-1] // nhead:
        return False
    from isogemm.encoder import fused

    operand = autocast_dtype(x) or x.dtype
    precision = resolve_precision(x, precision) if operand is torch.float32 else None
    return not fused.unserved_factors(x, params, nhead, operand, precision)


def encoder_chunk(
    tokens: int,
    d_model: int,
    nhead: int,
    dim_feedforward: int,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> int:
    """Number of sequences that form one partial sum in the gradients of `encoder_layer`'s parameters.

    Depends on the sequences' length, the layer's sizes, the products' dtype and the kind of device (None: a GPU if
    there is one, else the CPU), never on the batch. On a GPU it is the fused path's. A layer that is composed because
    of its parameters (several dtypes, or biases for only some of q, k and v) has the composed path's, as on the CPU.
    """
    if dtype not in SERVED:
        raise TypeError(f"dtype is {dtype}; accepted: {', '.join(map(str, SERVED))}")
    sizes = {"tokens": tokens, "d_model": d_model, "nhead": nhead, "dim_feedforward": dim_feedforward}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; expected at least 1")
    _require_heads(d_model, nhead)
    name = dtype_name(dtype)
    if torch.cuda.is_available() if device is None else torch.device(device).type == "cuda":
        from isogemm.encoder import configs

        if not configs.unserved(tokens, d_model, nhead, name):
            return configs.chunk_of(tokens)
    return composed.chunk(tokens, d_model, dim_feedforward, name)


def _can_be_known(
    x: Tensor, params: EncoderParameters, scores: object, running: object, return_scores: object, norm: str,
    dropout: object, training: bool,
) -> bool:  # fmt: skip
    """Whether calls like this one may have a cached plan: no gradients, no dropout, y alone, stacked parameters."""
    if type(x) not in PLAIN or type(params) is not EncoderParameters or dispatch.active or is_tracing():
        return False
    if scores is not None or running is not None or return_scores is not False or norm == "batch_norm":
        return False
    if training and dropout is not NOTHING_DROPPED and (any(dropout) if isinstance(dropout, tuple) else dropout):
        return False
    if x.layout is not torch.strided or x.ndim != 3 or tuple in (type(params[0]), type(params.in_proj_bias)):
        return False
    trained = x.requires_grad or getattr(params.linear1_weight, "requires_grad", False)
    return not (trained and torch.is_grad_enabled())


class _KnownLayer(NamedTuple):
    """A cached plan."""

    plan: Plan
    places: tuple[int | None, ...]  # of the plan's inputs among the call's tensors


_known_layers: KnownCalls[_KnownLayer] = KnownCalls()


def _know(
    key: tuple[Any, ...], present: list[Tensor], x: Tensor, params: EncoderParameters, tensors: _Tensors,
    decision: _Decision,
) -> None:  # fmt: skip
    """Cache the plan of a call without gradients, if it reads the tensors in place."""
    # The guards see whether autocast is on, not its dtype.
    if autocast_dtype(x) is not None or not x.is_contiguous() or not _known_layers.is_aligned(present):
        return
    inputs = (*_given(x, tensors, decision.options), *params.flat())
    addresses = tuple(0 if each is None else each.data_ptr() for each in inputs)
    plan = cast(Any, decision.kind).plans.get(addresses)
    if plan is not None:
        ids = list(map(id, present))
        places = tuple(None if each is None else ids.index(id(each)) for each in inputs)
        _known_layers.keep(key, present, _KnownLayer(plan, places))


class _Tensors(NamedTuple):
    """A call's tensors besides x and the parameters."""

    mask: Tensor | None  # [S, T]
    scores: Tensor | None  # [S, H, T, T]
    factors: tuple[Tensor, ...]  # [2, H, S, T, d] each
    running: tuple[RunningStatistics, RunningStatistics] | None

    def with_sequence_dimension(self) -> _Tensors:
        return self._replace(
            mask=None if self.mask is None else self.mask[None],
            scores=None if self.scores is None else self.scores[None],
            factors=tuple(each.unsqueeze(2) for each in self.factors),
        )

    def flat(self) -> tuple[Tensor | None, ...]:
        if self.running is None:
            return self.mask, self.scores, *self.factors
        first, second = self.running
        return self.mask, self.scores, *self.factors, *first[:3], *second[:3]

    @property
    def frozen(self) -> bool | tuple[bool, bool]:
        """Whether each norm's running statistics are frozen."""
        return False if self.running is None else (self.running[0].frozen, self.running[1].frozen)


class _Decision(NamedTuple):
    options: Options
    obstacle: str  # why the fused kernels cannot serve, empty where they can
    kind: Kind | None = None  # of calls that they can serve with plain tensors


def _encoder_layer(
    x: Tensor, params: EncoderParameters, tensors: _Tensors, decision: _Decision
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run the layer on x [S, T, D]. Returns y, its scores and its factors."""
    options, obstacle, kind = decision
    x = x.contiguous()
    straight = kind is not None and not through_dispatcher()
    if not straight:
        refuse_transforms("encoder_layer", x)
    if obstacle:
        _record(x, params, options, "composed", obstacle)
        scores = tensors.scores
        if tensors.factors:
            scores = composed.scores_of(tensors.factors, options.precision)
        return composed.encoder_layer(x, params, tensors.mask, scores, tensors.running, options)
    from isogemm.encoder import fused

    _record(x, params, options, "fused", "all of it fits the fused kernels")
    given = _given(x, tensors, options)
    if kind is not None and straight:
        results = kind.launched(x, params.flat(), given)
    else:
        results = fused.encoder_layer(x, params, given, options)
    if results.statistics is not None and tensors.running is not None and options.from_batch:
        update_running(results.statistics, *tensors.running)
    return results.y, results.scores, results.qk


def _given(x: Tensor, tensors: _Tensors, options: Options) -> ExtraInputs:
    """The fused layer's extra inputs."""
    from isogemm.encoder.buffers import ExtraInputs

    seed = new_seed(x.device) if any(options.dropout) else None
    given = ExtraInputs(tensors.mask, seed, tensors.scores, *tensors.factors)
    if tensors.running is None or options.from_batch or options.norm != "batch_norm":
        return given
    (mean1, var1, *_), (mean2, var2, *_) = tensors.running
    return given._replace(mean1=mean1, var1=var1, mean2=mean2, var2=var2)


_decisions: KnownCalls[_Decision] = KnownCalls(most_alike=32, is_plan=False)


def _decided(x: Tensor, params: EncoderParameters, tensors: _Tensors, nhead: int, *rest: Any) -> _Decision:
    """Validate the call and choose its path. Cached: it takes longer than the launches."""
    if is_compiling() or is_tracing() or type(params) is not EncoderParameters:
        return _decide(x, params, tensors, nhead, *rest)
    try:
        given = (x, *tensors.flat(), *params.flat())
        present = [each for each in given if each is not None]
        absent = len(present) < len(given) and tuple([each is None for each in given])
        alike_in = len(given), len(tensors.factors), absent, tensors.frozen, autocast_dtype(x)
        key = (x.shape, *alike_in, type(nhead), nhead, *rest)
        decision = _decisions.find(key, present)
    except (AttributeError, TypeError, ValueError):  # no tensor, sizes that are symbols, what cannot be hashed
        return _decide(x, params, tensors, nhead, *rest)
    if decision is None:
        decision = _decide(x, params, tensors, nhead, *rest)
        if not decision.obstacle and likeness(present) is not None:
            from isogemm.encoder import buffers, fused

            given_tensors = buffers.ExtraInputs(None, None, tensors.scores, *tensors.factors)
            decision = decision._replace(kind=fused.kind_of(x, params, given_tensors, decision.options))
        if not through_dispatcher():  # those calls do not look in the cache
            _decisions.keep(key, present, decision)
    return decision


def _decide(x: Tensor, params: EncoderParameters, tensors: _Tensors, *rest: Any) -> _Decision:
    options = _options(x, params, tensors, *rest)
    if not x.is_cuda:
        return _Decision(options, "not on a GPU")
    from isogemm.encoder import fused

    return _Decision(options, fused.unserved(x, params, options, len(tensors.factors)))


def _record(x: Tensor, params: EncoderParameters, options: Options, path: str, reason: str) -> None:
    if dispatch.active and not is_compiling():
        sizes = [*x.shape, options.nhead, params.linear1_weight.shape[0]]
        precision = f"/{options.precision}" if options.precision else ""
        problem = f"{sizes} {dtype_name(options.operand)}{precision}"
        dispatch.record(Dispatch("encoder_layer", path, problem, "", reason))


def _options(
    x: Tensor, params: EncoderParameters, tensors: _Tensors, nhead: int, norm_first: bool, residual_normed: bool,
    activation: str, norm: str, eps: float, is_causal: bool, dropout: float | EncoderDropout, training: bool,
    return_scores: object, precision: str | None,
) -> Options:  # fmt: skip
    """Validate the arguments and make them Options."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; expected a torch.Tensor [S, T, D] or [T, D]")
    if x.ndim not in (2, 3):
        raise ValueError(f"x has shape {list(x.shape)}; expected [S, T, D] or [T, D]")
    if x.dtype not in SERVED:
        raise TypeError(f"x has dtype {x.dtype}; accepted: {', '.join(map(str, SERVED))}")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"x is on {x.device}; accepted: cpu and cuda")
    if not isinstance(params, EncoderParameters):
        raise TypeError(f"params is a {type(params).__name__}; expected an isogemm.EncoderParameters")
    for name, value, accepted in (("activation", activation, ACTIVATIONS), ("norm", norm, NORMS)):
        if value not in accepted:
            raise ValueError(f"{name} is {value!r}; accepted: {', '.join(map(repr, accepted))}")
    if residual_normed and not norm_first:
        raise ValueError("residual_normed is True without norm_first, where it always is so; expected both or neither")
    _require_heads(x.shape[-1], nhead)
    autocast = autocast_dtype(x)
    operand = autocast or x.dtype
    if autocast is None:
        require_precision(precision, operand)
    _require_parameters(x, params, norm, SERVED if autocast else (x.dtype,))
    if tensors.mask is not None:
        _require_mask(tensors.mask, x)
    _require_scores(tensors, x, nhead, operand, return_scores)
    from_batch = norm == "batch_norm" and _is_from_batch(x, tensors.running, training)
    if norm != "batch_norm" and tensors.running is not None:
        raise ValueError(f"running is given; norm {norm!r} has no such statistics, batch_norm alone has")
    precision = resolve_precision(x, precision) if operand is torch.float32 else None
    return Options(
        nhead, bool(norm_first), bool(residual_normed), activation, norm, float(eps), bool(is_causal), precision,
        operand, _probabilities(dropout) if training else NOTHING_DROPPED, from_batch,
        return_scores != "factors" and bool(return_scores), return_scores == "factors",
    )  # fmt: skip


def _probabilities(dropout: float | EncoderDropout) -> EncoderDropout:
    """Validate dropout's probabilities and round them to the generator's levels."""
    if isinstance(dropout, (int, float)):
        dropout = EncoderDropout(*(dropout,) * 4)
    elif not isinstance(dropout, EncoderDropout):
        raise TypeError(f"dropout is a {type(dropout).__name__}; expected a number or an isogemm.EncoderDropout")
    for place, p in zip(dropout._fields, dropout, strict=True):
        if not 0 <= p <= 1:
            raise ValueError(f"dropout.{place} is {p}; expected a probability")
    return EncoderDropout(*[random.threshold(p) / random.LEVELS for p in dropout])


def _is_from_batch(x: Tensor, running: object, training: bool) -> bool:
    """Validate `running`; whether the batch norms use the batch's statistics."""
    d, rows = x.shape[-1], x.shape[:-1].numel()
    if running is not None:
        if not isinstance(running, tuple) or [type(each) for each in running] != [RunningStatistics] * 2:
            raise TypeError(f"running is {type(running).__name__}; expected a tuple of two isogemm.RunningStatistics")
        for number, each in enumerate(running):
            for name, value, shape, dtypes in (
                ("mean", each.mean, (d,), SERVED),
                ("var", each.var, (d,), SERVED),
                ("batches", each.batches, (), (torch.int64,)),
            ):
                if value is not None:
                    _require_tensor(f"running[{number}].{name}", value, shape, x, dtypes)
            if (each.mean is None) != (each.var is None):
                raise ValueError(f"running[{number}] has one of mean and var; expected both or neither")
        first, second = ((training and not each.frozen) or each.mean is None for each in running)
        if first != second:
            raise ValueError("running has statistics that normalise for one norm alone; expected both or neither")
    from_batch = running is None or first
    if from_batch and rows == 1:
        raise ValueError(f"x has shape {list(x.shape)}; the statistics of a batch norm in training need two rows")
    return from_batch


def _require_heads(d_model: int, nhead: int) -> None:
    if not isinstance(nhead, int) or nhead < 1 or d_model % nhead:
        raise ValueError(f"nhead is {nhead!r}; expected a divisor of d_model, which is {d_model}")


def _require_parameters(x: Tensor, params: EncoderParameters, norm: str, dtypes: Sequence[torch.dtype]) -> None:
    d = x.shape[-1]
    linear1 = params.linear1_weight
    if not isinstance(linear1, Tensor) or linear1.ndim != 2:
        _require_tensor("params.linear1_weight", linear1, ("F", d), x, dtypes)
    if norm == "rms_norm":
        for name, bias in (("norm1_bias", params.norm1_bias), ("norm2_bias", params.norm2_bias)):
            if bias is not None:
                raise ValueError(f"params.{name} is given; rms_norm has no bias")
    f = linear1.shape[0]
    shapes = {"out_proj_weight": (d, d), "linear1_weight": (f, d), "linear2_weight": (d, f), "linear1_bias": (f,)}
    others = [
        (name, getattr(params, name), shapes.get(name, (d,)), name in EncoderParameters._field_defaults)
        for name in EncoderParameters._fields
        if not name.startswith("in_proj")
    ]
    for name, value, shape, optional in (*others, *_in_projection(params, d)):
        if value is not None or not optional:
            _require_tensor(f"params.{name}", value, shape, x, dtypes)


def _in_projection(params: EncoderParameters, d: int) -> Iterator[tuple[str, object, tuple[int, ...], bool]]:
    """Name, value, shape and whether it may be None, of the projections to queries, keys and values."""
    weight, bias = params.in_proj_weight, params.in_proj_bias
    if not isinstance(weight, tuple):
        if isinstance(bias, tuple):
            raise TypeError("params.in_proj_bias is a tuple; expected a torch.Tensor, since in_proj_weight is stacked")
        yield "in_proj_weight", weight, (3 * d, d), False
        yield "in_proj_bias", bias, (3 * d,), True
        return
    params.flat()  # a bias that is none is a tuple
    for name, values, shape, optional in (
        ("in_proj_weight", weight, (d, d), False),
        ("in_proj_bias", bias or (None, None, None), (d,), True),
    ):
        if len(values) != 3:
            raise ValueError(f"params.{name} has {len(values)} parts; expected 3: of queries, keys and values")
        for index, value in enumerate(values):
            yield f"{name}[{index}]", value, shape, optional


def _require_tensor(
    name: str, value: object, shape: Sequence[object], x: Tensor, dtypes: Sequence[torch.dtype]
) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a torch.Tensor {_text(shape)}")
    if value.shape != shape:
        raise ValueError(f"{name} has shape {_text(value.shape)}; expected {_text(shape)}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {value.dtype}; expected {' or '.join(map(str, dtypes))}")
    if value.device != x.device:
        require_same("device", (name, "x"), (value.device, x.device))


def _text(shape: Sequence[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _require_mask(mask: object, x: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"key_padding_mask is a {type(mask).__name__}; expected a torch.Tensor {list(x.shape[:-1])}")
    if mask.shape != x.shape[:-1]:
        raise ValueError(f"key_padding_mask has shape {list(mask.shape)}; expected {list(x.shape[:-1])}")
    if mask.dtype is not torch.bool and mask.dtype not in SERVED:
        accepted = ", ".join(map(str, (torch.bool, *SERVED)))
        raise TypeError(f"key_padding_mask has dtype {mask.dtype}; accepted: {accepted}")
    require_same("device", ("key_padding_mask", "x"), (mask.device, x.device))
    if mask.requires_grad:
        raise ValueError("key_padding_mask requires a gradient; expected one that does not: detach it")


def _require_scores(tensors: _Tensors, x: Tensor, nhead: int, operand: torch.dtype, returned: object) -> None:
    *sequences, tokens, d_model = x.shape
    if isinstance(returned, str) and returned != "factors":
        raise ValueError(f"return_scores is {returned!r}; accepted: False, True and 'factors'")
    if isinstance(tensors.scores, list):
        raise TypeError("scores is a list; expected a torch.Tensor or a tuple of factors")
    if tensors.scores is not None:
        if returned == "factors":
            raise ValueError("scores are given as one tensor; expected their factors, since return_scores='factors'")
        _require_tensor("scores", tensors.scores, (*sequences, nhead, tokens, tokens), x, (operand,))
    for index, factor in enumerate(tensors.factors):
        _require_tensor(f"scores[{index}]", factor, (2, nhead, *sequences, tokens, d_model // nhead), x, (operand,))
