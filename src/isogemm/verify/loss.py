"""What `isogemm verify --family loss` tries: log-probabilities from a language model's head, on a GPU as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from isogemm.gemm.api import linear
from isogemm.loss import configs, plan
from isogemm.loss.api import linear_cross_entropy, linear_logprob
from isogemm.loss.configs import Blocks, How
from isogemm.norm.api import log_softmax
from isogemm.verify import trials
from isogemm.verify.checks import Check
from isogemm.verify.compare import BitDiff, compare_bits
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data, with_layout
from isogemm.verify.trials import Rows, Trained, training_step

IGNORED = -100
_SOME = 1000  # tokens whose accuracy is measured


class Setting(trials.Setting):
    """A head of n tokens of the vocabulary. A row's target is drawn from the row's own bits."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        self.temperature = self.rng.choice((1.0, 0.7, 2.0))
        self.softcap = self.rng.choice((None, None, 5.0))

    @property
    def how(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "softcap": self.softcap, "precision": self.asked}

    def targets(self, rows: Tensor) -> Tensor:
        bits = rows[:, 0].contiguous().view(torch.int32 if rows.element_size() == 4 else torch.int16).long()
        return torch.where(bits % 7 == 0, IGNORED, bits % self.n)

    def head(self) -> tuple[Tensor, Tensor]:
        """Weight [V, K], whose logits are about normal, and bias [V]."""
        weight = self.normal(self.n, self.k, seed=1).float() * self.k**-0.5
        return with_layout(weight.to(self.dtype), self.layouts[1]), self.normal(self.n, seed=2)

    def forward(self, m: int) -> tuple[Tensor, list[Rows]]:
        x, _ = self.operands(m, self.k, self.n)
        weight, bias = self.head()

        def logprob(x: Tensor) -> Tensor:
            hidden = with_layout(x, self.layouts[0])
            values = linear_logprob(hidden, weight, self.targets(x), bias=bias, return_entropy=True, **self.how)
            return torch.stack(cast("tuple[Tensor, Tensor]", values), 1)

        return x, [logprob]

    def input_gradient(self, m: int) -> tuple[Tensor, list[Rows]]:
        """Return hidden, and how its gradient follows: every token's loss counts once."""
        x, _ = self.operands(m, self.k, self.n)
        weight, bias = self.head()

        def backward(x: Tensor) -> Tensor:
            hidden, targets = with_layout(x, self.layouts[0]), self.targets(x)
            return training_step(
                lambda hidden: self.losses(hidden, targets, weight, bias), [hidden], torch.ones(len(x), device=x.device)
            )[1]

        return x, [backward]

    def losses(self, hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        how: Any = {"softcap": self.softcap, "precision": self.asked, "label_smoothing": 0.1, "z_loss": 1e-3}
        return linear_cross_entropy(hidden, weight, targets, bias=bias, reduction="none", **how)

    def trained(self, tokens: int) -> Sequence[Trained]:
        _, x = self.weight_operands(tokens)
        grad = make_data("normal", (tokens, 1), seed=self.seed, device=self.device)

        def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return self.losses(x, self.targets(x), weight, bias)[:, None]

        return [Trained(layer, self.head(), x, grad)]


def _as_logits(each: Setting) -> Iterator[BitDiff]:
    m = each.rng.choice(each.sizes.edges)
    x, _ = each.operands(m, each.k, each.n)
    weight, bias = each.head()
    hidden, targets = with_layout(x, each.layouts[0]), each.targets(x)
    logits = linear(hidden, weight, bias, out_dtype=torch.float32, precision=each.asked)
    expected = log_softmax(logits / each.temperature).gather(1, targets.clamp(0)[:, None])[:, 0]
    how = {**each.how, "softcap": None}
    found = linear_logprob(hidden, weight, targets, bias=bias, **how)
    yield compare_bits(found, expected.masked_fill(targets == IGNORED, 0.0))


def _any_blocks(each: Setting) -> Iterator[BitDiff]:
    m, how = each.rng.choice(each.sizes.edges), How(each.softcap, each.temperature, entropy=True, mean=True, lse=True)
    x, _ = each.operands(m, each.k, each.n)
    weight, bias = each.head()
    targets = each.targets(x)
    expected = plan.forward(x, weight, targets, bias, how._replace(precision=each.asked))
    for tokens, columns in ((m, configs.BLOCK), (max(1, m // 3), 2 * configs.BLOCK), (each.rng.randint(1, m), each.n)):
        blocks = Blocks(tokens, min(each.n, columns))
        found = plan.forward(x, weight, targets, bias, how._replace(precision=each.asked), blocks)
        yield from trials.same(found, expected)


def _accuracy(each: Setting) -> Iterator[BitDiff]:
    """Raise where a result is not accurate; there are no bits to compare."""
    m = min(each.rng.choice(each.sizes.edges), _SOME)
    x, (weight, bias) = each.normal(m, each.k), each.head()
    targets, grad = each.targets(x), make_data("normal", (m,), seed=each.seed, device=each.device)
    names = "log-probability", "gradient of hidden", "gradient of weight", "gradient of bias"

    def logprob(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return cast(Tensor, linear_logprob(x, weight, targets, bias=bias, **each.how))

    found = training_step(logprob, [x, weight, bias], grad)
    torchs, exact = (_in_torch(each, x, weight, bias, targets, grad, wide) for wide in (False, True))
    for name, ours, theirs, right in zip(names, found, torchs, exact, strict=True):
        assert_no_worse_than_torch(ours, theirs, right, factor=4, ulps=8, what=name)
    yield from ()


def _in_torch(
    each: Setting, x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, grad: Tensor, wide: bool
) -> list[Tensor]:
    """The same of torch: in float64, or as models have it, with logits of the operands' dtype."""

    def logprob(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = F.linear(x, weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if each.softcap is None else each.softcap * torch.tanh(logits / each.softcap)
        chosen = F.log_softmax(logits / each.temperature, -1).gather(1, targets.clamp(0)[:, None])[:, 0]
        return chosen.masked_fill(targets == IGNORED, 0.0)

    leaves = [tensor.double() if wide else tensor for tensor in (x, weight, bias)]
    return training_step(logprob, leaves, grad.double() if wide else grad)


_check = partial(Check, Setting)

CHECKS = (
    _check(
        "as logits", "a log-probability has the bits of log_softmax(linear(...))", _as_logits,
        "1 .. {most} tokens, temperatures",
    ),
    _check(
        "any blocks", "how the logits are cut changes no bits", _any_blocks, "other blocks of tokens and columns",
        gpu_only="the CPU computes whole rows of logits",
    ),
    _check(
        "needle", "a token has the same bits at every position of any batch", trials.of_rows(trials.needle),
        "every position of 1 .. {most} tokens",
    ),
    _check(
        "rows", "cuts, padding, order and other work change nothing",
        trials.of_rows(trials.cut, trials.padded, trials.permuted, trials.repeated),
        "random cuts, garbage rows, permutations, runs under load",
    ),
    _check(
        "dhidden", "the gradient of hidden has the forward's contract", trials.input_gradient,
        "every position, cuts, garbage rows, permutations, runs under load",
    ),
    _check(
        "dweight, dbias", "micro-batches cut at chunks have the bits of one pass", trials.micro_batches,
        "cuts at multiples of the chunk into main_grad, trailing zeros, runs under load",
    ),
    _check(
        "accuracy", "the error is at most four times torch's and eight ulp", _accuracy,
        "forward and gradients, against fp64",
    ),
)  # fmt: skip
