"""Attention's values and every gradient beside torch's, by their errors against float64."""

import functools

import torch
from attention_cases import plain_attention, results_and_gradients, torch_arithmetic, torch_results

import isogemm
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.poison import poisoned_allocations

ENOUGH = 50_000  # elements, among which the largest error is no draw


def assert_parity(case, queries, keys, *, batch=2, mask=None, **places):
    """An error at most twice torch's, of the result and of the gradients of q, k, v, sinks and a floating mask.

    Errors are the largest over several draws of the operands where they are small. `mask` is the shape of a mask and
    its kind, "bool" or "floating"; with the former every query sees the key of its own index.
    """
    draws = 1 if batch * queries * case.heads * case.head >= ENOUGH and not case.sinks else 6
    found = {}
    for draw in range(draws):
        for name, results in _results(case, queries, keys, batch, mask, 100 * draw, places).items():
            found.setdefault(name, []).append(results)
    for name, parts in found.items():
        ours, theirs, exact, size = map(torch.stack, zip(*parts, strict=True))
        assert ours.dtype == case.dtype, name
        assert_no_worse_than_torch(ours, theirs, exact, scale=size, what=f"{case}, {queries} of {keys}: {name}")


def _results(case, queries, keys, batch, mask, seed, places):
    """{name: (ours, torch's, in float64, size of an error)}."""
    sequences = [case.sequence(keys, queries, seed=seed + i) for i in range(batch)]
    q, k, v, grad = (torch.stack(each) for each in zip(*sequences, strict=True))
    options, tensors = case.options | places, {"q": q, "k": k, "v": v}
    sinks = options.pop("sinks")
    if sinks is not None:
        tensors["sinks"] = sinks
    if mask:
        shape, of = mask
        values = case.data(*shape, seed=seed + 77)
        if of == "floating":
            tensors["attn_mask"] = values
        else:
            options["attn_mask"] = (values > -0.5) | torch.eye(queries, keys, dtype=torch.bool, device=case.device)
    with poisoned_allocations():
        call = functools.partial(isogemm.attention, precision=case.precision)
        ours = results_and_gradients(call, tensors, grad, **options)
    with torch_arithmetic(case.number):
        theirs = torch_results(case, tensors, grad, **options)
    wide = {name: each.double() for name, each in tensors.items()}
    exact = results_and_gradients(plain_attention, wide, grad.double(), **options)
    with torch.no_grad():
        sizes = {name: each.abs().amax().expand_as(each) for name, each in exact.items() if each.numel()}
        sizes["o"] = plain_attention(**wide | {"v": wide["v"].abs()}, **options)
    if sinks is not None:  # a sum over tokens and over a head, whose terms cancel: with all of them of one sign
        apart = wide | {"sinks": wide["sinks"].view(1, -1, 1, 1).repeat(batch, 1, queries, 1)}
        aligned = grad.double().abs() * exact["o"].sign()
        terms = results_and_gradients(plain_attention, apart, aligned, **options)["sinks"]
        sizes["sinks"] = terms.abs().sum((0, 2, 3))
    return {name: (ours[name], theirs[name], right, sizes[name]) for name, right in exact.items()}
