"""LM heads: linear_logprob and linear_cross_entropy beside torch's, and the properties that hold on every device."""

import torch
from promises.main_grads import accumulate, assert_same, starts
from promises.rows import RowFunction, join_rows, slice_rows
from torch.nn import functional as F

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

IGNORED = -100


def plain_logits(hidden, weight, bias=None, softcap=None):
    """fp32 or wider, of a product rounded to the operands' dtype, as models have it."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def chosen_logprob(logprobs, targets, ignore_index=IGNORED):
    """Log-probabilities [..., vocab] at the targets [...], 0 where a target is ignored."""
    kept = targets != ignore_index
    chosen = logprobs.gather(-1, torch.where(kept, targets, 0)[..., None]).squeeze(-1)
    return torch.where(kept, chosen, 0)


def logprob_of_logits(logits, targets, temperature=1.0, softcap=None, ignore_index=IGNORED):
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return chosen_logprob(F.log_softmax(logits / temperature, -1), targets, ignore_index)


def entropy_of_logits(logits, targets, temperature=1.0, softcap=None):
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logprobs = F.log_softmax(logits / temperature, -1)
    return -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)


def plain_logprob(hidden, weight, targets, *, bias=None, **options):
    return logprob_of_logits(plain_logits(hidden, weight, bias), targets, **options)


def plain_logprob_and_entropy(hidden, weight, targets, *, bias=None, **options):
    logits = plain_logits(hidden, weight, bias)
    return logprob_of_logits(logits, targets, **options), entropy_of_logits(logits, targets, **options)


def plain_cross_entropy(
    hidden, weight, targets, *, bias=None, softcap=None, ignore_index=IGNORED, reduction="mean", label_smoothing=0.0,
    z_loss=0.0,
):  # fmt: skip
    logits = plain_logits(hidden, weight, bias, softcap).flatten(0, -2)
    flat, options = targets.flatten(), {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(logits, flat, reduction=reduction, **options)
    if z_loss:
        kept = flat != ignore_index
        penalty = z_loss * torch.where(kept, logits.logsumexp(-1).square(), 0)
        loss = loss + {"none": penalty, "sum": penalty.sum(), "mean": penalty.sum() / kept.sum()}[reduction]
    return loss.view(targets.shape) if reduction == "none" else loss


class Head:
    """Tokens and an LM head: hidden [tokens, k], targets [tokens], weight [vocab, k] and perhaps bias [vocab]."""

    def __init__(self, tokens, k, vocab, dtype, *, device="cpu", bias=False, ignored=False):
        def normal(*shape, seed):
            return make_data("normal", shape, seed=seed, device=device)

        self.hidden = normal(tokens, k, seed=0).to(dtype)
        self.parameters = {"weight": (2 * normal(vocab, k, seed=1) / k**0.5).to(dtype)}
        if bias:
            self.parameters["bias"] = normal(vocab, seed=2).to(dtype)
        generator = torch.Generator().manual_seed(3)
        self.targets = torch.randint(vocab, (tokens,), generator=generator).to(device)
        if ignored:
            self.targets[1::3] = IGNORED
        self.grad = make_data("normal", (tokens,), seed=4, device=device)
        self.grad_entropy = make_data("normal", (tokens,), seed=5, device=device)
        self.what = f"{tokens} tokens, [{vocab}, {k}]{' + bias' * bias}, {dtype}{', some ignored' * ignored}"

    def __str__(self):
        return self.what

    @property
    def chunk(self):
        """Tokens at whose multiples micro-batches may be cut."""
        return max(1024, isogemm.token_chunk(self.parameters["weight"]))

    def logits(self, **options):
        """fp32 [tokens, vocab] by isogemm.linear."""
        return isogemm.linear(self.hidden, **self.parameters, out_dtype=torch.float32, **options)

    def logprob(self, **options):
        return isogemm.linear_logprob(self.hidden, targets=self.targets, **self.parameters, **options)

    def gradients(self, function, *, dtype=None, grads=None, **options):
        """Results (y, or y0, y1 ...) and the gradients of hidden, weight and bias, by name."""
        tensors = {"hidden": self.hidden} | self.parameters
        leaves = {name: each.detach().to(dtype or each.dtype).requires_grad_() for name, each in tensors.items()}
        results = function(targets=self.targets, **leaves, **options)
        results = results if isinstance(results, tuple) else (results,)
        if grads is None:
            grads = [self.grad]
        grads = [grad.to(each.dtype).expand(each.shape) for grad, each in zip(grads, results, strict=True)]
        found = torch.autograd.grad(results, list(leaves.values()), grads)
        named = {("logprob", "entropy")[i]: each.detach() for i, each in enumerate(results)}
        return named | {f"gradient of {name}": each for name, each in zip(leaves, found, strict=True)}

    def assert_right(self, ours, theirs, *, grads=None, **options):
        """Results and gradients at most twice as wrong as torch's, whose logits are rounded to the operands' dtype."""
        with poisoned_allocations():
            actual = self.gradients(ours, grads=grads, **options)
        expected = self.gradients(theirs, grads=grads, **options)
        exact = self.gradients(theirs, dtype=torch.float64, grads=grads, **options)
        for name, right in exact.items():
            ulps = 1 if right.numel() >= 64 else 8  # the error of few sums is a draw, not a largest of many
            what = f"{self}, {options}: {name}"
            assert_no_worse_than_torch(actual[name], expected[name], right, ulps=ulps, what=what)
        return actual

    def assert_precise(self, temperature=1.0, softcap=None):
        """Log-probability and entropy at most twice as wrong as torch's of fp32 logits."""
        weight, bias = self.parameters["weight"], self.parameters.get("bias")
        options = {"temperature": temperature, "softcap": softcap}
        found = self.logprob(return_entropy=True, **options)
        if self.hidden.is_cuda and self.hidden.dtype != torch.float32:
            logits = torch.mm(self.hidden, weight.T, out_dtype=torch.float32)
        else:
            logits = self.hidden.float() @ weight.float().T
        logits = logits if bias is None else logits + bias.float()
        exact = self.hidden.double() @ weight.double().T
        exact = exact if bias is None else exact + bias.double()
        for i, plain in enumerate((logprob_of_logits, entropy_of_logits)):
            theirs, right = (plain(each, self.targets, **options) for each in (logits, exact))
            what = f"{self}, {options}: {('log-probability', 'entropy')[i]}"
            assert_no_worse_than_torch(found[i], theirs, right, what=what)

    def assert_as_logits(self, temperature=1.0):
        """A sampler that has logits and a trainer that never makes them agree to the bit."""
        expected = isogemm.log_softmax(self.logits() / temperature)
        found = self.logprob(temperature=temperature)
        assert found.dtype == torch.float32
        assert_bitwise_equal(found, chosen_logprob(expected, self.targets), f"{self}, temperature {temperature}")

    def rows(self):
        """Rows of a RowFunction; a target is a float, so that it may be garbage: NaN is ignored, Inf token 0."""
        targets = torch.where(self.targets == IGNORED, torch.nan, self.targets.double())
        return {"hidden": self.hidden, "target": targets, "grad": self.grad, "grad_entropy": self.grad_entropy}

    def function(self, kind, grid=None, **options):
        """fp32 rows of log-probability, entropy (or loss) and dhidden: `kind` is "logprob", "entropy" or "loss"."""
        vocab = len(self.parameters["weight"])

        def call(rows):
            hidden, target = rows["hidden"].detach().requires_grad_(), rows["target"]
            token = torch.where((target >= 0) & (target < vocab), target, 0).long()
            parameters = {name: each.detach().requires_grad_() for name, each in self.parameters.items()}
            arguments = {"targets": torch.where(target.isnan(), IGNORED, token), **parameters, **options}
            with poisoned_allocations():
                if kind == "loss":
                    results = (isogemm.linear_cross_entropy(hidden, reduction="none", **arguments),)
                elif kind == "entropy":
                    results = isogemm.linear_logprob(hidden, return_entropy=True, **arguments)
                else:
                    results = (isogemm.linear_logprob(hidden, **arguments),)
                asked = [hidden, *parameters.values()]
                grads = [rows[name] for name in ("grad", "grad_entropy")][: len(results)]
                if not results[-1].requires_grad:
                    raise AssertionError(f"{kind}: a result without a gradient")
                found = torch.autograd.grad(results, asked, grads)
            return torch.cat([torch.stack([each.detach() for each in results], -1), found[0].float()], -1)

        rows = self.rows()
        return RowFunction(call, rows, f"{kind}, {self}, {options}", call(rows), grid, vectors=True)

    def main_grads(self, function, rows=None, cuts=(), start=None):
        """main_grads after a backward for each micro-batch; `function` is linear_logprob, or a sum of losses."""
        rows = rows or {"hidden": self.hidden, "targets": self.targets, "grad": self.grad}
        parameters = {name: torch.nn.Parameter(each.clone()) for name, each in self.parameters.items()}

        def step(first, last):
            part = slice_rows(rows, first, last)
            result = function(part["hidden"].detach().requires_grad_(), targets=part["targets"], **parameters)
            result.backward(part["grad"] if result.dim() else None)

        return accumulate(parameters, step, len(rows["hidden"]), cuts, start)

    def assert_micro_batches_add_up(self, function):
        """dweight and dbias through main_grad: in micro-batches at multiples of the chunk the bits of one pass."""
        chunk, count = self.chunk, len(self.hidden)
        assert count > 2 * chunk
        whole = self.main_grads(function)
        for start in starts(self.parameters):
            expected = whole if start is None else self.main_grads(function, start=start)
            for cuts in ([chunk], [2 * chunk], [chunk, 2 * chunk]):
                what = f"{self}: cut at {cuts}{'' if start is None else ', onto others'}"
                assert_same(self.main_grads(function, None, cuts, start), expected, what)
        rows = {"hidden": self.hidden, "targets": self.targets, "grad": self.grad}
        more = {name: each[: chunk + 1] for name, each in rows.items()}
        more |= {"targets": torch.full_like(more["targets"], IGNORED)}
        padded = self.main_grads(function, join_rows(rows, more))
        assert_same(padded, whole, f"{self}: more tokens, all of them ignored")
        return whole


def sum_of_losses(hidden, **arguments):
    return isogemm.linear_cross_entropy(hidden, reduction="sum", **arguments)
