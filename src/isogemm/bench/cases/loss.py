"""Cases and demo of the loss family: log-probabilities from a language model's head."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from isogemm.bench import demo as demos
from isogemm.bench import timer
from isogemm.bench.cases import Case, CaseRun, Thunk, first, make_params, on_poison, rotated, served_by, use_precision
from isogemm.bench.demo import DemoResult
from isogemm.bench.timer import peak_bytes
from isogemm.bench.views import FamilyView, number_type
from isogemm.loss.api import linear_logprob
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.trials import sampled, training_step

VIEW = FamilyView("loss", "Log-probabilities of a language model's head", ("vocabulary", "k"), column="tokens")

FORWARD, STEP = "linear_logprob", "linear_logprob step"
HEADS = ((4096, 128256, 4096), (2048, 151936, 2048), (8192, 50257, 3072))  # tokens, vocabulary, k
OTHER_HEADS = ((1000, 32000, 4096), (4096, 49152, 576), (3000, 151936, 896), (2048, 262144, 2304), (16384, 32000, 2048))
FEW = ((1, 128256, 4096), (16, 151936, 2048), (64, 50257, 3072))
QUICK, CPU_HEADS = (512, 32000, 1024), ((64, 4000, 256), (1, 4000, 256))
PRODUCTS = "three products"  # without anything between: logits, and the gradients of hidden and weight
_CHECKED = 64  # tokens whose errors are measured

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_logprob(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As models compute it."""
    return F.log_softmax(F.linear(hidden, weight).float(), -1).gather(-1, targets[:, None])[:, 0]


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    if device.type != "cuda":
        return [_case(name, *head, "float32", "ieee") for head in CPU_HEADS for name in (FORWARD, STEP)]
    if quick:
        return [_case(name, *QUICK, "bfloat16", compiled=False) for name in (FORWARD, STEP)]
    return [
        *(_case(name, *head, "bfloat16") for head in (*HEADS, *OTHER_HEADS) for name in (FORWARD, STEP)),
        *(_case(FORWARD, *head, "bfloat16") for head in FEW),
        *(_case(name, 1024, 32000, 2048, "float32", "tf32") for name in (FORWARD, STEP)),
    ]


def _case(
    name: str, tokens: int, vocabulary: int, k: int, dtype: str, precision: str = "", *, compiled: bool = True
) -> Case:
    """Forward, or with the gradients of hidden and weight. Peak memory is without the operands."""
    element, trained = getattr(torch, dtype), name == STEP
    times = 3 if trained else 1
    size = float(element.itemsize * (1 + trained) * (tokens + vocabulary) * k)
    params = make_params(dtype, precision, tokens=tokens, vocabulary=vocabulary, k=k)

    def build(device: torch.device) -> CaseRun:
        use_precision(precision, device)
        functions: dict[str, Forward] = {"isogemm": linear_logprob, "torch": plain_logprob}
        if compiled and device.type == "cuda":
            torch.compiler.reset()
            functions["compiled"] = torch.compile(plain_logprob, dynamic=False, fullgraph=True)
        sets = [_head(tokens, vocabulary, k, element, device, seed) for seed in range(_sets(size, device))]
        grad = torch.randn(tokens, device=device)
        variants = rotated(functions, sets)
        if trained:
            variants = {each: [_step(function, one, grad) for one in sets] for each, function in functions.items()}
        info = served_by(variants["isogemm"][0])
        if device.type == "cuda":
            info |= {
                f"{each} peak MiB": f"{peak_bytes(thunks[0], device) / 2**20:.0f}" for each, thunks in variants.items()
            }
        check = partial(_errors, functions if trained else {}, first(variants), sets[0], grad)
        variants |= {PRODUCTS if trained else "one product": _products(sets, trained)}
        return CaseRun(variants, check, info)

    return Case("loss", name, params, 2.0 * times * tokens * vocabulary * k, size, build)


def _sets(size: float, device: torch.device) -> int:
    return timer.rotations(size, device, 8)


def _head(
    tokens: int, vocabulary: int, k: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight and targets; the logits are about normal."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn((tokens, k), device=device, generator=generator).to(dtype)
    weight = torch.empty((vocabulary, k), dtype=dtype, device=device).normal_(0, k**-0.5, generator=generator)
    return hidden, weight, torch.randint(vocabulary, (tokens,), device=device, generator=generator)


def _step(function: Forward, head: Sequence[Tensor], grad: Tensor) -> Thunk:
    hidden, weight, targets = head

    def logprob(hidden: Tensor, weight: Tensor) -> Tensor:
        return function(hidden, weight, targets)

    return lambda: training_step(logprob, [hidden, weight], grad)[1]


def _products(sets: Sequence[Sequence[Tensor]], trained: bool) -> list[Thunk]:
    """torch's products of these sizes in the operands' dtype, logits in memory."""
    hidden, weight, _ = sets[0]
    logits = hidden @ weight.t()

    def products(hidden: Tensor, weight: Tensor) -> Tensor:
        torch.mm(hidden, weight.t(), out=logits)
        if trained:
            torch.mm(logits.t(), hidden)
            return torch.mm(logits, weight)
        return logits

    return [partial(products, hidden, weight) for hidden, weight, _ in sets]


def _errors(
    functions: Mapping[str, Forward], thunks: Mapping[str, Thunk], head: Sequence[Tensor], grad: Tensor
) -> dict[str, float]:
    """Each variant's largest error, of some tokens: of the log-probability, or with `functions` of hidden's gradient.

    isogemm's is at most twice torch's.
    """
    hidden, weight, targets = head
    rows = sampled(len(hidden), _CHECKED, random.Random(0), hidden.device)
    part = hidden[rows].double().requires_grad_(bool(functions))
    exact = F.log_softmax(part @ weight.double().t(), -1).gather(-1, targets[rows, None])[:, 0]
    if functions:
        (exact,) = torch.autograd.grad(exact, part, grad[rows].double())
    found = {name: on_poison(name, thunk).detach()[rows] for name, thunk in thunks.items()}
    errors = {}
    for name, result in found.items():
        errors[name], _ = assert_no_worse_than_torch(result, found["torch"], exact, what=name)
    return errors


def demo(device: torch.device) -> DemoResult:
    """Log-probabilities of 64 tokens."""
    on_gpu = device.type == "cuda"
    (tokens, vocabulary, k), dtype, precision = (
        ((64, 128256, 4096), "bfloat16", "") if on_gpu else ((64, 4000, 256), "float32", "ieee")
    )
    use_precision(precision, device)
    head = hidden, weight, targets = _head(tokens, vocabulary, k, getattr(torch, dtype), device)
    functions: dict[str, Forward] = {"isogemm": linear_logprob, "torch": plain_logprob}
    thunks = first(rotated(functions, [head]))
    bits = demos.count_changes(
        functions, lambda call, at: call(hidden[at], weight, targets[at]), "tokens", batch=tokens, sizes=(1, 3)
    )
    title = f"linear_logprob [{tokens}, {k}] x [{vocabulary}, {k}], {number_type(make_params(dtype, precision))}"
    errors = partial(_errors, {}, thunks, head, torch.ones(tokens, device=device))
    return demos.result(title, bits, errors, "the largest", thunks, "log_softmax(F.linear)", device)
