"""What `isogemm verify --family encoder` tries: the layer's contract, forward and backward, on a GPU as on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from isogemm.encoder.api import encoder_chunk, encoder_layer
from isogemm.encoder.parameters import ACTIVATIONS, EncoderParameters
from isogemm.verify import encoder_reference as references
from isogemm.verify import trials
from isogemm.verify.checks import Check
from isogemm.verify.compare import BitDiff, compare_bits
from isogemm.verify.encoder_reference import ENCODER_SHAPES, EncoderShape, encoder_parameters
from isogemm.verify.inputs import make_data, with_layout
from isogemm.verify.precision import fp32_precision
from isogemm.verify.trials import Measure, Rows, Trained, assert_step_accurate, training_step

LONGEST = 128  # tokens of a padded sequence
_CPU_SHAPES = tuple(
    EncoderShape(1, *sizes)
    for sizes in ((5, 16, 4, 32), (2, 16, 4, 4), (1, 16, 4, 32), (8, 24, 3, 20), (16, 12, 1, 10), (12, 32, 2, 40))
)
_NORMS = ("layer_norm", "rms_norm")  # norms of a row: a batch norm depends on the batch by definition
_CPU_TOKENS = (2, 3, 4, 6, 8, 12, 20)  # whose chunks are computed quickly
_MOST_ELEMENTS = {"cuda": 1 << 25, "cpu": 1 << 14}  # of x
_JUDGED_ELEMENTS = 1 << 18  # most elements of x where gradients are compared with fp64


class Setting(trials.Setting):
    """A layer with its options and parameters, and sequences to compute."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        rng = self.rng
        self.shape = self._shape()
        most = max(8, min(self.sizes.most, _MOST_ELEMENTS[device.type] // (self.shape.tokens * self.shape.d_model)))
        self.sizes = replace(self.sizes, most=most, edges=tuple(edge for edge in self.sizes.edges if edge <= most))
        self.options: dict[str, Any] = {
            "nhead": self.shape.nhead,
            "norm_first": rng.random() < 0.5,
            "activation": ACTIVATIONS[seed % len(ACTIVATIONS)],
            "norm": rng.choice(_NORMS),
            "eps": rng.choice((1e-5, 1e-6)),
            "is_causal": rng.random() < 0.3,
        }
        self.mask = rng.choice(("", "bool", "float"))
        self.separate = rng.random() < 0.4
        self.absent = rng.choice((0.0, 0.0, 0.3, 1.0))  # how many of the biases and scales

    def _shape(self) -> EncoderShape:
        """Choose a shape of the tests, and in every third trial a random one."""
        gpu, rng = self.device.type == "cuda", self.rng
        shapes = ENCODER_SHAPES if gpu else _CPU_SHAPES
        if self.seed % 3 < 2:
            return shapes[(self.seed - self.seed // 3) % len(shapes)]
        tokens = rng.randint(1, LONGEST) if gpu else rng.choice(_CPU_TOKENS)
        heads, size = rng.choice((1, 2, 3, 4, 8, 16) if gpu else (1, 2, 3)), rng.choice((4, 8, 16, 20, 32))
        return EncoderShape(1, tokens, heads * size, heads, rng.randint(1, 8 * size))

    def tensors(self, shape: EncoderShape) -> dict[str, Tensor]:
        """Make x and the parameters that are present, by name."""
        norm = self.options["norm"]
        named = references.encoder_tensors(shape, self.dtype, device=self.device, seed=self.seed, norm=norm)
        optional = [name for name in named if name.endswith("_bias") or name.startswith("norm")]
        absent = {name for name in optional if self.rng.random() < self.absent}
        return {name: each for name, each in named.items() if name not in absent}

    def parameters(self) -> EncoderParameters:
        params = encoder_parameters(self.tensors(self.shape), separate=self.separate)
        if isinstance(params.in_proj_bias, tuple) and self.rng.random() < 0.5:
            query, _, value = params.in_proj_bias
            params = params._replace(in_proj_bias=(query, None, value))
        return with_tensors(params, (each.clone() for _, each in params.named()))

    def rows(self, sequences: int) -> Tensor:
        """Return x and the mask of each sequence in one row, so that sequences are cut, moved and padded with masks."""
        shape = (sequences * self.shape.tokens, self.shape.d_model)
        x = make_data(self.kind, shape, seed=self.seed, dtype=self.dtype, device=self.device)
        parts = [x.view(sequences, self.shape.tokens * self.shape.d_model)]
        if self.mask:
            left_out = self.normal(sequences, self.shape.tokens, seed=1) > 0.5
            added = 2 * self.normal(sequences, self.shape.tokens, seed=2)
            as_float = added.masked_fill(left_out, -torch.inf)
            parts.append(left_out.to(self.dtype) if self.mask == "bool" else as_float)
        return torch.cat(parts, dim=1)

    def sequences(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split rows into x and the mask."""
        tokens, width = self.shape.tokens, self.shape.d_model
        x = with_layout(rows[:, : tokens * width].reshape(len(rows), tokens, width), self.layouts[0])
        mask = rows[:, tokens * width :][:, :tokens]
        return x, None if not self.mask else mask > 0 if self.mask == "bool" else mask

    def layer(self, x: Tensor, mask: Tensor | None, params: EncoderParameters) -> Tensor:
        return cast(Tensor, encoder_layer(x, params, key_padding_mask=mask, precision=self.asked, **self.options))

    def gradient_of_x(
        self, x: Tensor, mask: Tensor | None, grad: Tensor, params: EncoderParameters
    ) -> Sequence[Tensor]:
        """Return the result and dx."""
        return training_step(lambda x: self.layer(x, mask, params), [x], grad)

    def forward(self, m: int) -> tuple[Tensor, list[Rows]]:
        params = self.parameters()

        def way(params: EncoderParameters) -> Rows:
            return lambda rows: self.layer(*self.sequences(rows), params).detach().flatten(1)

        return self.rows(m), [way(params), way(trainable(params))]

    def input_gradient(self, m: int) -> tuple[Tensor, list[Rows]]:
        params = trainable(self.parameters()) if self.seed % 2 else self.parameters()
        size = self.shape.tokens * self.shape.d_model

        def gradient(rows: Tensor) -> Tensor:
            x, mask = self.sequences(rows)
            return self.gradient_of_x(x, mask, rows[:, -size:].reshape(x.shape), params)[1].flatten(1)

        return torch.cat([self.rows(m), self.normal(m, size, seed=9)], dim=1), [gradient]

    def tokens(self) -> tuple[int, int]:
        """Draw a number of sequences (whole chunks and a part of one); return it and the chunk."""
        _, tokens, width, heads, hidden = self.shape
        chunk = encoder_chunk(tokens, width, heads, hidden, self.dtype, self.device)
        most = self.sizes.most_tokens // (chunk * tokens * max(width, hidden))
        return chunk * self.rng.randint(2, min(max(most, 2), 5)) + self.rng.randrange(chunk), chunk

    def trained(self, tokens: int) -> Sequence[Trained]:
        params = self.parameters()

        def layer(rows: Tensor, *tensors: Tensor) -> Tensor:
            return self.layer(*self.sequences(rows), with_tensors(params, tensors)).flatten(1)

        grad = self.normal(tokens, self.shape.tokens * self.shape.d_model, seed=9)
        return [Trained(layer, [each for _, each in params.named()], self.rows(tokens), grad)]


def with_tensors(params: EncoderParameters, tensors: Iterable[Tensor]) -> EncoderParameters:
    """Replace the tensors that are present, in the order of `named`."""
    following = iter(tensors)

    def placed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(placed(each) for each in value)
        return None if value is None else next(following)

    return EncoderParameters(*map(placed, params))


def trainable(params: EncoderParameters) -> EncoderParameters:
    return with_tensors(params, (each.detach().requires_grad_() for _, each in params.named()))


def _parameter_gradients(each: Setting) -> Iterator[BitDiff]:
    yield from trials.micro_batches(each)
    sequences = each.rng.randint(1, each.sizes.most)
    more = each.rng.randint(1, sequences)
    for trained in each.trained(sequences):
        rows, grad = trained.rows, trained.grad
        zeros = torch.zeros_like(grad[:more])
        longer = replace(trained, rows=torch.cat([rows, rows[-more:]]), grad=torch.cat([grad, zeros]))
        for main_grad in (True, False):
            found, expected = (trials.gradients(each, it, main_grad=main_grad) for it in (longer, trained))
            yield from trials.same(found, expected)


def _right_padding(each: Setting) -> Iterator[BitDiff]:
    """Add masked tokens without a gradient after each sequence."""
    params = each.parameters()
    sequences = each.rng.randint(1, min(each.sizes.most, 64))
    x, mask = each.sequences(each.rows(sequences))
    tokens = each.rng.randint(1, each.shape.tokens)
    x, mask = x[:, :tokens], None if mask is None else mask[:, :tokens]
    grad = each.normal(*x.shape, seed=9)
    expected = each.gradient_of_x(x, mask, grad, params)
    for longer in sorted({tokens + 1, each.shape.tokens, each.rng.randint(tokens, each.shape.tokens + 16), LONGEST}):
        more = longer - tokens
        if not 0 < more <= LONGEST - tokens:
            continue
        after = 3 * each.normal(sequences, more, each.shape.d_model, seed=longer)
        known = torch.zeros_like(x[..., 0], dtype=torch.bool) if mask is None else mask
        left_out = known.new_full((sequences, more), True if known.dtype == torch.bool else -torch.inf)
        pairs = (x, after), (known, left_out), (grad, torch.zeros_like(after))
        longer_x, longer_mask, longer_grad = (torch.cat(pair, dim=1) for pair in pairs)
        found = each.gradient_of_x(longer_x, longer_mask, longer_grad, params)
        for one, other in zip(found, expected, strict=True):
            yield compare_bits(one[:, :tokens], other)


def measures(
    step: Callable[[], Sequence[Tensor]], dtype: torch.dtype, precision: str, device: torch.device
) -> list[Measure]:
    """What a step of torch's gives at this precision; the errors of any of them are allowed.

    Twice, but four times where the order of fp32 sums is all that differs. cuBLAS takes TF32 or not as it likes: fp32
    products of rounded operands are TF32's own error.
    """
    if dtype != torch.float32:
        return [(2, step())]
    with fp32_precision("ieee" if device.type == "cuda" else ""):
        found: list[Measure] = [(4, step())]
        if precision == "tf32" and device.type == "cuda":
            with references.products_of_tf32():
                found.append((2, step()))
    return found


def _accuracy(each: Setting) -> Iterator[BitDiff]:
    """Raise where a result or a gradient is not accurate; there are no bits to compare."""
    elements = each.shape.tokens * each.shape.d_model
    least = max(1, 4096 // elements)  # fewer elements: torch's error may be small by chance
    sequences = each.rng.randint(least, max(least, min(each.sizes.most, _JUDGED_ELEMENTS // elements)))
    tensors = each.tensors(each.shape._replace(sequences=sequences))
    if each.options["activation"] == "relu":  # no sum near 0, where the derivative jumps: there rounding decides
        tensors["linear1_bias"] = 8 * each.normal(each.shape.dim_feedforward, seed=20).sign()
    mask = each.sequences(each.rows(sequences))[1]
    if mask is not None:
        mask[:, 0] = 0  # torch returns NaN for a query without keys
    names = list(tensors)

    def named(function: Callable[..., Tensor], **how: Any) -> Callable[..., Tensor]:
        how |= {**each.options, "key_padding_mask": mask}
        return lambda *operands: function(**dict(zip(names, operands, strict=True)), **how)

    def isogemm(x: Tensor, **given: Any) -> Tensor:
        params = {name: given.pop(name) for name in names[1:]}
        return cast(Tensor, encoder_layer(x, encoder_parameters(params, separate=each.separate), **given))

    operands, in_torch = list(tensors.values()), named(references.torch_encoder)
    grad = each.normal(*tensors["x"].shape, seed=9)
    found = training_step(named(isogemm, precision=each.asked), operands, grad)
    torchs = measures(lambda: training_step(in_torch, operands, grad), each.dtype, each.precision, each.device)
    exact = training_step(in_torch, [operand.double() for operand in operands], grad.double())
    assert_step_accurate(found, torchs, exact, ["result", *names])
    yield from ()


_check = partial(Check, Setting)

CHECKS = (
    _check(
        "sequences", "a sequence's result has the same bits in any batch, at any place", trials.forward,
        "every position of up to {most} sequences, cuts, garbage sequences, permutations, runs under load",
    ),
    _check(
        "dx", "the input's gradient has the forward's contract", trials.input_gradient,
        "every position of up to {most} sequences, cuts, garbage sequences, permutations, runs under load",
    ),
    _check(
        "right-padding", "masked tokens after a sequence's own change nothing of it", _right_padding,
        f"results and dx, padded to up to {LONGEST} tokens",
    ),
    _check(
        "parameters' gradients", "micro-batches cut at chunks have the bits of one pass", _parameter_gradients,
        "cuts at multiples of the chunk into main_grad, trailing sequences without a gradient, runs under load",
    ),
    _check(
        "accuracy", "the error is at most twice that of torch's layer and one ulp", _accuracy,
        "the result and every gradient against fp64; 4x torch's error for fp32 sums",
    ),
)  # fmt: skip
