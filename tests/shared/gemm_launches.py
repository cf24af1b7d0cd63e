"""Products launched in Triton's interpreter, with guards around what they write."""

from dataclasses import replace

import torch

from isogemm.gemm import configs, op
from isogemm.gemm.kernels import products as kernels
from isogemm.gemm.kernels.halves import describe_split

GUARD = 16  # elements on either side of an output that must stay as they were


def seen_problem(a, b, *, sm_count=2, **described):
    """As `op.describe` has it, for a GPU of few SMs."""
    return replace(op.problem_of(a, b, **described), arch="sm_90", tma=True, sm_count=sm_count)


def launch(problem, config, a, b, bias=None, total=None):
    """What a plan launches, with the block_k that the number demands; the output lies between guards."""
    config = replace(config, block_k=configs.fitted(problem, config).block_k)
    assert configs.illegal(problem, config) == ""
    accumulation = configs.accumulation(problem, config)
    shape = (problem.batch, problem.m, problem.n)
    buffer = torch.full((GUARD + problem.batch * problem.m * problem.n + GUARD,), torch.nan)
    buffer = buffer.to(getattr(torch, problem.out_dtype))
    out = buffer[GUARD:-GUARD].view(shape) if total is None else total
    bytes_ = configs.workspace(problem, config)
    scratch = torch.full((bytes_ // 4 + GUARD,), torch.nan)
    product = kernels.describe_gemm(problem, config)
    a, b = _halves(problem, config, a, b, scratch)
    left, right = (b, a) if config.swapped else (a, b)
    rest = () if config.kernel == "stream" else (right if config.rest_n else None,)
    product.run(
        left,
        right,
        *rest,
        scratch if accumulation == "partials" else out,
        scratch if configs.chunk_bytes(problem, config) else None,
        bias if accumulation != "partials" else None,
        *(None,) * (kernels.SLOTS - 1),
    )
    if accumulation == "partials":
        kernels.describe_add_partials(problem).run(scratch, out, bias)
    assert bool(buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all() and scratch[-GUARD:].isnan().all())
    return out if total is not None else out[0] if problem.batch == 1 else out


def _halves(problem, config, a, b, scratch):
    """The operands as the product reads them, each as two halves in scratch memory if the config says so."""
    read = {"a": a, "b": b}
    for operand, begin in zip(filter(config.splits, configs.OPERANDS), _begins(problem, config), strict=True):
        whole, read[operand] = read[operand], scratch[begin // 4 :]
        describe_split(problem, config, operand).run(whole, read[operand])
    return read["a"], read["b"]


def _begins(problem, config):
    if not config.split:
        return []
    at = configs.halves_at(problem, config)
    return [begin for operand, begin in zip(configs.OPERANDS, at, strict=False) if config.splits(operand)]


def assert_close(actual, a, b, *others, reference=None):
    """k fp32 products and k sums, each rounded once, those of the other summands, and one rounding to the dtype."""
    exact, scale = torch.matmul(a.double(), b.double()), torch.matmul(a.double().abs(), b.double().abs())
    for other in others:
        exact, scale = exact + other.double(), scale + other.double().abs()
    allowed = (2 * (a.shape[-1] + len(others)) * 2**-24 + torch.finfo(actual.dtype).eps) * scale
    error = (actual.double() - (exact if reference is None else reference)).abs()
    assert bool((error <= allowed).all()), f"largest error {error.max()}, or poison left"
