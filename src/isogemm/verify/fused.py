"""What `isogemm verify --family fused` tries: the GEMM's contract with epilogues on, and the epilogues themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from isogemm.epilogues import ACTIVATIONS, random, register
from isogemm.epilogues.operands import Operands
from isogemm.gemm import configs, fused, reference, selection
from isogemm.gemm.api import linear, matmul_fused, mlp, mm
from isogemm.gemm.fused import new_seed
from isogemm.verify import trials
from isogemm.verify.activations import ACTIVATION_FORMS, GATE_FORMS, Form
from isogemm.verify.checks import NO_TILES, Check
from isogemm.verify.compare import BitDiff, compare_bits
from isogemm.verify.errors import assert_no_worse_than_torch, scaled_error
from isogemm.verify.inputs import make_data, with_layout
from isogemm.verify.trials import Rows, Trained, torch_product, training_step

Multiply = Callable[[Tensor, Tensor], Tensor]

_TORCH_FORMS = ACTIVATION_FORMS | GATE_FORMS
_MORE = 64, 4096  # further rows, and elements, on which torch's error is measured
_TILES = 6  # configurations per trial
_LEAST = 64  # least sizes for comparing gradients with torch's, which may be exact on few elements


def _gain_and_shift(acc, col, row, gain, shift):  # type: ignore[no-untyped-def]
    """An epilogue that is valid in Triton and in torch."""
    return acc * (gain + col % 2) + shift


@functools.cache
def _registered() -> str:
    """Register `_gain_and_shift` as a user does; return its name."""
    from isogemm.epilogues import device

    return register("gain_and_shift", type(device.relu)(_gain_and_shift), _gain_and_shift).name


class Tokens(NamedTuple):
    """Operands with a row per token: x [M, K], c and residual [M, N], row_scale and bias [M], shift [M, 1]."""

    x: Tensor
    c: Tensor | None = None
    residual: Tensor | None = None
    row_scale: Tensor | None = None
    bias: Tensor | None = None
    shift: Tensor | None = None  # of the registered epilogue

    def map(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        return Tokens(function(self.x), *(None if each is None else function(each) for each in self[1:]))


@dataclass(frozen=True)
class Layer:
    """residual + act(alpha row_scale col_scale (x @ weight.T) + beta c + bias), or gated; or a registered epilogue."""

    weight: Tensor  # [N, K]
    bias: Tensor | None = None
    weight_up: Tensor | None = None
    bias_up: Tensor | None = None
    col_scale: Tensor | None = None
    activation: str = ""
    arguments: Mapping[str, float] = field(default_factory=dict)
    alpha: float | Tensor = 1.0
    beta: float | Tensor = 0.0
    gain: Tensor | None = None  # [N], of the registered epilogue

    def isogemm(self, tokens: Tokens, **how: Any) -> Tensor:
        """Compute the layer in one launch."""
        how |= {
            "activation": self.activation or None, "activation_args": self.arguments, "alpha": self.alpha,
            "beta": self.beta, "c": tokens.c, "row_scale": tokens.row_scale, "col_scale": self.col_scale,
            "residual": tokens.residual, "epilogue": None if self.gain is None else _registered(),
            "aux": self._aux(tokens),
        }  # fmt: skip
        if tokens.bias is not None:
            return matmul_fused(tokens.x, self.weight.mT, bias=tokens.bias, bias_dim=-2, **how)
        return linear(tokens.x, self.weight, self.bias, weight_up=self.weight_up, bias_up=self.bias_up, **how)

    def _aux(self, tokens: Tokens) -> tuple[Tensor, ...]:
        return () if self.gain is None or tokens.shift is None else (self.gain, tokens.shift)

    def after(
        self, product: Tensor, up: Tensor | None, tokens: Tokens, forms: Mapping[str, Form] = _TORCH_FORMS
    ) -> Tensor:
        """Compute the epilogue in torch's operations, each rounded to the products' dtype."""
        z = self.before(product, tokens)
        if self.activation:
            z = forms[self.activation](z, **self.arguments)
        if aux := self._aux(tokens):
            form: Callable[..., Tensor] = _gain_and_shift
            z = form(z, torch.arange(z.shape[-1], device=z.device), None, *(each.to(z.dtype) for each in aux))
        if up is not None:
            z = z * (up if self.bias_up is None else up + self.bias_up)
        return z if tokens.residual is None else tokens.residual + z

    def before(self, product: Tensor, tokens: Tokens) -> Tensor:
        """Compute the pre-activation."""
        z = product * self.alpha
        for scale in (None if tokens.row_scale is None else tokens.row_scale[:, None], self.col_scale):
            z = z if scale is None else z * scale
        if tokens.c is not None:
            z = z + tokens.c.to(z.dtype) * self.beta
        if tokens.bias is not None:
            return z + tokens.bias[:, None]
        return z if self.bias is None else z + self.bias

    def sizes(self, product: Tensor, up: Tensor | None, tokens: Tokens) -> Tensor:
        """Return the unit of each element's error, from |x| |weight|: only relu2 grows faster than its argument."""
        named = {name: getattr(self, name) for name in ("bias", "bias_up", "col_scale", "gain", "alpha", "beta")}
        absolute: Any = {name: None if each is None else abs(each) for name, each in named.items()}
        activation = "relu2" if self.activation == "relu2" else ""
        return replace(self, activation=activation, **absolute).after(product, up, tokens.map(torch.abs))

    def products(self, multiply: Multiply, x: Tensor) -> tuple[Tensor, Tensor | None]:
        b, b_up = self.columns
        return multiply(x, b), None if b_up is None else multiply(x, b_up)

    def fusion(self, tokens: Tokens, dropout_p: float = 0.0, seed: Tensor | None = None) -> Operands:
        by_column = tokens.bias is None
        alpha, beta = (each if isinstance(each, Tensor) else None for each in (self.alpha, self.beta))
        return Operands(
            self.bias if by_column else tokens.bias, self.bias_up, tokens.c, tokens.residual, tokens.row_scale,
            self.col_scale, alpha, beta, self._aux(tokens), seed, float(self.alpha) if alpha is None else 1.0,
            float(self.beta) if beta is None else 0.0, dropout_p, self.activation, tuple(self.arguments.values()),
            "" if self.gain is None else _registered(), -1 if by_column else -2,
        )  # fmt: skip

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trained tensors, by name."""
        named = {name: getattr(self, name) for name in ("weight", "bias", "weight_up", "bias_up")}
        return {name: each for name, each in named.items() if each is not None}

    def with_parameters(self, tensors: Sequence[Tensor]) -> Layer:
        """The layer with these tensors as its `parameters`."""
        return replace(self, **dict(zip(self.parameters, tensors, strict=True)))  # type: ignore[arg-type]

    @property
    def columns(self) -> tuple[Tensor, Tensor | None]:
        """The weights as [K, N]."""
        return self.weight.mT, None if self.weight_up is None else self.weight_up.mT


def assert_accurate(
    found: Tensor, layer: Layer, tokens: Tokens, precision: str, *, factor: float = 2, what: str = ""
) -> float:
    """Assert that `found`, the layer's result, has at most `factor` times the error of torch's separate operations, and
    one ulp. torch's error is measured on more rows too, the given ones with other signs: on few it may be 0 by chance.
    """
    m, (n, k), device = len(tokens.x), layer.weight.shape, tokens.x.device
    added = max(_MORE[0], _MORE[1] // n)
    rows = torch.cat([torch.arange(m, device=device), torch.arange(added, device=device) % m])
    more = tokens.map(lambda each: each[rows])
    more.x[m:] *= 2 * torch.randint(2, (added, k), device=device, generator=torch.Generator(device).manual_seed(0)) - 1

    def of_torch(a: Tensor, b: Tensor) -> Tensor:
        return torch_product(a, b, found.dtype, precision)

    with torch.no_grad():
        torchs, exact = (layer.after(*layer.products(way, more.x), more) for way in (of_torch, reference.matmul))
        scale = layer.sizes(*layer.products(reference.matmul_scale, more.x), more) + exact.abs()
    assert_no_worse_than_torch(torch.cat([found, torchs[m:]]), torchs, exact, scale=scale, factor=factor, what=what)
    return scaled_error(found, exact[:m], scale[:m])


class Setting(trials.Setting):
    """A layer with an activation or none, and further epilogue operands drawn from the seed."""

    def __init__(self, seed: int, device: torch.device, least: int = 1) -> None:
        super().__init__(seed, device)
        self.n, self.k = max(self.n, least), max(self.k, least)
        place = seed % (len(ACTIVATIONS) + 2)
        self.activation = (*ACTIVATIONS, "", "")[place]
        self.registered = place == len(ACTIVATIONS) and find_spec("triton") is not None
        entry = ACTIVATIONS.get(self.activation)
        self.gated = entry is not None and bool(entry.gate)
        self.arguments = {name: self.rng.random() for name in entry.arguments} if entry else {}
        self.biased, residual, scaled, added = (self.rng.random() < 0.6 for _ in range(4))
        self.scaled = scaled and not self.gated
        added = added and not self.gated
        self.alpha: float | Tensor = self.rng.uniform(-2, 2) if self.scaled else 1.0
        self.beta: float | Tensor = self.rng.uniform(-2, 2) if added else 0.0
        if self.rng.random() < 0.5:  # numbers on the device
            alpha, beta = (torch.tensor(each, dtype=self.dtype, device=device) for each in (self.alpha, self.beta))
            self.alpha, self.beta = alpha if self.scaled else self.alpha, beta if added else self.beta
        self.by_row = self.biased and not self.gated and self.rng.random() < 0.5  # the bias
        self.widths = {
            "x": self.k, "c": self.n * added, "residual": self.n * residual, "row_scale": int(self.scaled),
            "bias": int(self.by_row), "shift": int(self.registered),
        }  # fmt: skip

    @property
    def called(self) -> str:
        return self.activation or ("a registered epilogue" if self.registered else "no activation")

    def layer(self, weight: Tensor) -> Layer:
        """The layer with this [N, K] weight."""
        bias, bias_up, col_scale, gain = (self.normal(self.n, seed=at) for at in (1, 2, 3, 10))
        up = self._weight(self.seed + 1) if self.gated else None
        return Layer(
            with_layout(weight, self.layouts[1]),
            bias if self.biased and not self.by_row else None,
            None if up is None else with_layout(up, self.layouts[1]),
            bias_up if self.gated and self.biased else None,
            col_scale if self.scaled else None,
            self.activation, self.arguments, self.alpha, self.beta,
            gain if self.registered else None,
        )  # fmt: skip

    def _weight(self, seed: int) -> Tensor:
        shape = (self.n, self.k)
        return make_data(self.kind, shape, seed=seed, dtype=self.dtype, device=self.device, pair_sign=1)

    def packed(self, x: Tensor, *more: Tensor) -> Tensor:
        """x [M, K] and the row's other operands side by side, so that they are cut, moved and padded together."""
        added = [self.normal(len(x), width, seed=at) for at, width in enumerate(list(self.widths.values())[1:], 11)]
        return torch.cat([x, *added, *more], dim=1)

    def tokens_of(self, rows: Tensor) -> Tokens:
        parts = torch.split(rows[:, : sum(self.widths.values())], list(self.widths.values()), dim=1)
        found = {name: part for name, part in zip(self.widths, parts, strict=True) if part.shape[1]}
        found |= {name: found[name][:, 0] for name in ("row_scale", "bias") if name in found}
        return Tokens(**found | {"x": with_layout(found["x"], self.layouts[0])})

    def layer_and_tokens(self, m: int) -> tuple[Layer, Tokens]:
        x, b = self.operands(m, self.k, self.n)
        return self.layer(b.mT), self.tokens_of(self.packed(x))

    def forward(self, m: int) -> tuple[Tensor, list[Rows]]:
        """Return rows, and the ways to compute them: fp32 result, result of their dtype, eager rounding, an mlp."""
        x, b = self.operands(m, self.k, self.n)
        layer = self.layer(b.mT)

        def way(**how: Any) -> Rows:
            return lambda rows: layer.isogemm(self.tokens_of(rows), precision=self.asked, **how)

        ways = [way(out_dtype=out) for out in dict.fromkeys((self.wide, None))] + [way(rounding="eager")]
        if self.activation:
            down = self._down()
            ways.append(lambda rows: self._mlp(layer, down, self.tokens_of(rows).x))
        return self.packed(x), ways

    def _down(self) -> Tensor:
        """The weight of a second layer."""
        return self.normal(self.k, self.n, seed=8)

    def _mlp(self, layer: Layer, down: Tensor, x: Tensor) -> Tensor:
        return mlp(
            x, layer.weight, down, bias=layer.bias, weight_up=layer.weight_up,
            bias_up=layer.bias_up, activation=layer.activation, activation_args=layer.arguments,
            precision=self.asked,
        )  # fmt: skip

    def input_gradient(self, m: int) -> tuple[Tensor, list[Rows]]:
        """Return rows with their gradient, and dX of the layer and of an mlp."""
        x, b = self.operands(m, self.k, self.n)
        layer, down = self.layer(b.mT), self._down()
        widest = max(self.n, self.k)

        def of_layer(rows: Tensor) -> Tensor:
            tokens, grad = self.tokens_of(rows), rows[:, -widest:][:, : self.n]
            ours = functools.partial(layer.isogemm, precision=self.asked)
            return training_step(lambda x: ours(tokens._replace(x=x)), [tokens.x], grad)[1]

        def of_mlp(rows: Tensor) -> Tensor:
            x, grad = self.tokens_of(rows).x, rows[:, -widest:][:, : self.k]
            return training_step(lambda x: self._mlp(layer, down, x), [x], grad)[1]

        ways: list[Rows] = [of_layer, of_mlp] if self.activation else [of_layer]
        return self.packed(x, self.normal(m, widest, seed=9)), ways

    def trained(self, tokens: int) -> Sequence[Trained]:
        grad, x = self.weight_operands(tokens)
        layer = self.layer(self._weight(self.seed))

        def one(rows: Tensor, *parameters: Tensor) -> Tensor:
            tokens = self.tokens_of(rows)._replace(bias=None)  # of `linear`, which knows parameters
            return layer.with_parameters(parameters).isogemm(tokens, precision=self.asked)

        def two(rows: Tensor, *parameters: Tensor) -> Tensor:
            return self._mlp(layer.with_parameters(parameters[:-1]), parameters[-1], self.tokens_of(rows).x)

        rows, parameters = self.packed(x), list(layer.parameters.values())
        trained = [Trained(one, parameters, rows, grad)]
        if self.activation:
            trained.append(Trained(two, [*parameters, self._down()], rows, self.normal(tokens, self.k, seed=9)))
        return trained


def _any_tile(each: Setting) -> Iterator[BitDiff]:
    layer, tokens = each.layer_and_tokens(each.rng.choice(each.sizes.edges))
    p = each.rng.choice((0.0, 0.3))
    seed = torch.full((1,), each.seed, dtype=torch.int64, device=each.device) if p else None
    how: Any = {"out_dtype": each.wide if each.seed % 2 else None, "precision": each.asked}
    operands = tokens.x, *layer.columns, layer.fusion(tokens, p, seed)
    problem = fused.problem_of(*operands, **how)
    plainest, candidates = configs.canonical(problem), selection.candidates(problem)
    others = [config for config in candidates if config != plainest]
    expected = fused.gemm(*operands, **how, config=plainest)
    for config in each.rng.sample(others, min(_TILES, len(others))):
        yield compare_bits(fused.gemm(*operands, **how, config=config), expected)


def _accuracy(each: Setting) -> Iterator[BitDiff]:
    """Raise where a result is not accurate; there are no bits to compare."""
    layer, tokens = each.layer_and_tokens(min(each.rng.choice(each.sizes.edges), 1000))
    for out_dtype in dict.fromkeys((None, each.wide)):
        # Tensor cores sum an fp32 result of 16-bit operands, and tf32x3, less exactly: as in the gemm family.
        factor = 4 if out_dtype is not None or each.precision == "tf32x3" else 2
        found = layer.isogemm(tokens, out_dtype=out_dtype, precision=each.asked)
        assert_accurate(found, layer, tokens, each.precision, factor=factor, what=each.called)
    _assert_trained_accurately(Setting(each.seed, each.device, _LEAST))
    yield from ()


class _TorchProduct(torch.autograd.Function):
    """torch's product, and its gradients as torch's products."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, precision: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.precision = precision
        return torch_product(a, b, a.dtype, precision)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (a, b), (grad,) = ctx.saved_tensors, grads
        of_a = torch_product(grad, b.mT, a.dtype, ctx.precision)
        return of_a, torch_product(a.mT, grad, a.dtype, ctx.precision), None


def _assert_trained_accurately(each: Setting) -> None:
    """Compare results and gradients of one layer and of two with fp64: the largest error of each against torch's.

    No pre-activation is near 0, where a derivative may jump and rounding decides which value is right.
    """
    m = min(each.rng.choice(each.sizes.edges), 1000)
    layer, tokens, down = _smooth(each, m)
    names = list(layer.parameters)
    differentiable: Any = _TorchProduct

    def in_torch(a: Tensor, b: Tensor) -> Tensor:
        return a @ b if a.dtype == torch.float64 else cast(Tensor, differentiable.apply(a, b, each.precision))

    def one(x: Tensor, *parameters: Tensor) -> Tensor:
        mine = layer.with_parameters(parameters)
        return mine.isogemm(tokens._replace(x=x), precision=each.asked)

    def one_in_torch(x: Tensor, *parameters: Tensor) -> Tensor:
        mine = layer.with_parameters(parameters)
        return mine.after(*mine.products(in_torch, x), tokens._replace(x=x))

    def two(x: Tensor, *parameters: Tensor) -> Tensor:
        return each._mlp(layer.with_parameters(parameters[:-1]), parameters[-1], x)

    def two_in_torch(x: Tensor, *parameters: Tensor) -> Tensor:
        mine = replace(layer.with_parameters(parameters[:-1]), col_scale=None, alpha=1.0, beta=0.0)
        return in_torch(mine.after(*mine.products(in_torch, x), Tokens(x)), parameters[-1].mT)

    operands = [tokens.x, *layer.parameters.values()]
    exact = layer.before(reference.matmul(tokens.x, layer.weight.mT), tokens)
    grad = torch.where(exact.abs() < exact.abs().mean() / 64, 0, each.normal(m, each.n, seed=9))
    _assert_as_torch(one, one_in_torch, ["result", "x", *names], operands, grad, each)
    if each.activation:
        grad = each.normal(m, each.k, seed=9)
        names_of_two = ["mlp's result", *(f"mlp's {name}" for name in ("x", *names, "weight_down"))]
        _assert_as_torch(two, two_in_torch, names_of_two, [*operands, down], grad, each)


def _smooth(each: Setting, m: int) -> tuple[Layer, Tokens, Tensor]:
    """Make a layer whose products have one sign per column and sizes at which activations are curved."""
    sign = each.normal(each.n, 1, seed=20).sign()
    size = 4 ** torch.linspace(-1, 1, each.n, device=each.device, dtype=each.dtype)[:, None] / each.k
    layer = each.layer(sign * size * each.normal(each.n, each.k).abs())
    bias = None if layer.bias is None else sign[:, 0] * layer.bias.abs() / 4
    tokens = each.tokens_of(each.packed(each.normal(m, each.k, seed=21).abs()))
    up = None if layer.weight_up is None else each.normal(each.n, each.k, seed=22) * each.k**-0.5
    return replace(layer, bias=bias, weight_up=up), tokens, each._down() * each.n**-0.5


def _assert_as_torch(
    ours: Callable[..., Tensor], in_torch: Callable[..., Tensor], names: Sequence[str], operands: Sequence[Tensor],
    grad: Tensor, each: Setting,
) -> None:  # fmt: skip
    """Assert that each largest error is at most a factor times torch's plus one ulp of the largest element."""
    found, torchs = (training_step(way, operands, grad) for way in (ours, in_torch))
    exact = training_step(in_torch, [operand.double() for operand in operands], grad.double())
    factor = 4 if each.dtype == torch.float32 else 2  # the order of fp32 sums alone makes more than twice, at times
    for name, mine, torchs_own, right in zip(names, found, torchs, exact, strict=True):
        error, torchs_error = (float((result.double() - right).abs().max()) for result in (mine, torchs_own))
        allowed = factor * torchs_error + torch.finfo(mine.dtype).eps * float(right.abs().max())
        if not error <= allowed:
            text = f"error {error:.2e}, expected at most {factor} x torch's and an ulp, {allowed:.2e}"
            raise AssertionError(f"{each.called}, {name}: {text}")


def _eager(each: Setting) -> Iterator[BitDiff]:
    layer, tokens = each.layer_and_tokens(each.rng.choice(each.sizes.edges))
    found = layer.isogemm(tokens, rounding="eager", precision=each.asked)
    with torch.no_grad():
        products = layer.products(functools.partial(mm, precision=each.asked), tokens.x)
        expected = layer.after(*products, tokens, {name: entry.torch for name, entry in ACTIVATIONS.items()})
    yield compare_bits(found, expected)


def _dropout(each: Setting) -> Iterator[BitDiff]:
    m, p = each.rng.choice(each.sizes.edges), each.rng.choice((0.1, 0.5, 0.9))
    layer, tokens = each.layer_and_tokens(m)
    tokens = tokens._replace(residual=None)
    with torch.random.fork_rng([each.device] if each.device.type == "cuda" else []):

        def seeded(function: Callable[..., Tensor], *args: Any, **how: Any) -> Tensor:
            torch.manual_seed(each.seed)
            return function(*args, **how)

        kept = random.kept(seeded(new_seed, each.device), m, each.n, p)
        found = seeded(layer.isogemm, tokens, dropout_p=p, precision=each.asked)
        wide = seeded(layer.isogemm, tokens, dropout_p=p, precision=each.asked, out_dtype=each.wide)
        c, grad = each.normal(m, each.n).requires_grad_(), each.normal(m, each.n, seed=1)
        dropped = seeded(linear, tokens.x, layer.weight, c=c, beta=1.0, dropout_p=p, precision=each.asked)
        (backward,) = torch.autograd.grad(dropped, c, grad)

    def expected(whole: Tensor) -> Tensor:
        return torch.where(kept, whole.float() * random.scale(p), 0.0).to(whole.dtype) + 0.0  # either zero will do

    whole = layer.isogemm(tokens, precision=each.asked)
    yield compare_bits(wide + 0.0, expected(layer.isogemm(tokens, precision=each.asked, out_dtype=each.wide)))
    yield compare_bits(backward + 0.0, expected(grad))
    seen = whole != 0
    yield compare_bits((found != 0) & seen, kept & seen)
    info = torch.finfo(whole.dtype)  # the whole is rounded before it is scaled: an ulp more
    least = info.smallest_normal * info.eps * (1 + random.scale(p))
    close = found.isclose(expected(whole), rtol=2 * info.eps, atol=least, equal_nan=True)
    yield compare_bits(close, torch.ones_like(close))


def _activations(each: Setting) -> Iterator[BitDiff]:
    """Compute every activation in float32, where torch's own functions depend most on the place."""
    shapes = (100, 48), (201, 48), (201, 48)
    x, weight, up = (make_data("normal", shape, seed=each.seed + at, device="cpu") for at, shape in enumerate(shapes))
    for name, entry in ACTIVATIONS.items():
        layer = functools.partial(linear, weight=weight, weight_up=up if entry.gate else None, activation=name)
        yield compare_bits(torch.cat([layer(row[None]) for row in x[::3]]), layer(x)[::3])


_check = functools.partial(Check, Setting)

CHECKS = (
    _check(
        "any tile", "every configuration gives the same bits with an epilogue on", _any_tile,
        "up to 6 configurations; activations, scales, addends, residuals and dropout", gpu_only=NO_TILES,
    ),
    _check(
        "rows", "a row with its epilogue has the same bits in any batch", trials.forward,
        "every position, cuts, garbage rows, permutations, runs under load; both roundings, and two layers",
    ),
    _check(
        "activations", "an activation has the same bits at any place in a tensor", _activations,
        "every activation, float32, rows alone and in a batch of 100 x 201",
        cpu_only="on a GPU a part of the kernels, which the other checks run",
    ),
    _check(
        "dX", "the input's gradient has the forward's contract", trials.input_gradient,
        "every position, cuts, garbage rows, permutations, runs under load; one layer and two",
    ),
    _check(
        "dW, db", "micro-batches cut at chunks have the bits of one pass", trials.micro_batches,
        "cuts at multiples of the chunk into main_grad, trailing zeros, runs under load; one layer and two",
    ),
    _check(
        "dropout", "the mask is that of (seed, row, column), in the backward too", _dropout,
        "1 .. {most} rows, a tenth to nine tenths dropped",
    ),
    _check(
        "eager rounding",
        "isogemm.mm followed by torch's operations (on the CPU with isogemm's own exp, erf and tanh), bit for bit",
        _eager, "activations, scales, addends and residuals",
    ),
    _check(
        "accuracy", "the error is at most twice that of torch's operations and one ulp", _accuracy,
        "results, dX, dW and db against fp64, one layer and two; 4x torch's error for fp32 of 16-bit inputs, "
        "tf32x3 and fp32 gradients",
    ),
)  # fmt: skip
