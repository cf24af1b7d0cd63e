"""A small sweep over the kernels for a memory checker: ragged sizes, every way to read, to sum and to end.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu/memcheck.py [part ...]

Without torch's memory pool every tensor is an allocation of its own, so that a byte beyond it is seen.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch

import isogemm
from isogemm.epilogues.operands import Operands
from isogemm.gemm import configs, fused, op, selection
from isogemm.gemm.api import mlp
from isogemm.gemm.configs import Config
from isogemm.verify.encoder_reference import EncoderShape, encoder_parameters, encoder_tensors

NUMBERS = (
    (torch.bfloat16, None), (torch.float16, None),
    (torch.float32, "tf32"), (torch.float32, "ieee"), (torch.float32, "tf32x3"),
)  # fmt: skip
SIZES = ((1, 65, 129), (17, 63, 40), (130, 264, 1040))  # m, n, k
ROLES = (
    Config(128, 128, 64, 8, 5, "roles", persistent=True), Config(128, 64, 64, 8, 6, "roles", rest_n=16, pdl=True),
    Config(128, 64, 64, 8, 6, "roles", rest_n=32, pdl=True, parallel_chunks="gathered"),
)  # fmt: skip


def main(parts: list[str]) -> None:
    calls = sum(each() for name, each in PARTS.items() if name in parts or not parts)
    torch.cuda.synchronize()
    print(f"{calls} calls")


def _products() -> int:
    calls = 0
    for dtype, precision in NUMBERS:
        for m, n, k in SIZES if dtype == torch.bfloat16 else SIZES[1:]:
            x = torch.randn(m, k, device="cuda", dtype=dtype, requires_grad=True)
            weight = torch.nn.Parameter(torch.randn(n, k, device="cuda", dtype=dtype))
            bias = torch.nn.Parameter(torch.randn(n, device="cuda", dtype=dtype))
            for accumulate in (False, True):
                if accumulate:
                    weight.main_grad = torch.zeros(n, k, device="cuda")
                    bias.main_grad = torch.zeros(n, device="cuda")
                isogemm.linear(x, weight, bias, precision=precision).sum().backward()
                calls += 1
    for layout in ("nt", "tn"):
        a, b = (torch.randn(136, 520, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        a, b = (a, b.mT) if layout == "nt" else (a.mT, b)
        for chunk in (0, 256):
            problem = op.problem_of(a, b, chunk=chunk)
            others = [config for config in ROLES if not configs.illegal(problem, config)]
            for config in (*selection.candidates(problem), *others):
                op.gemm(a, b, chunk=chunk, config=config)
                calls += 1
    return calls


def _epilogues() -> int:
    cases = [*((size, torch.bfloat16) for size in SIZES), (SIZES[1], torch.float32)]
    return sum(_epilogues_of(*size, dtype) for size, dtype in cases)


def _epilogues_of(m: int, n: int, k: int, dtype: torch.dtype) -> int:
    """Everything an epilogue reads and saves, forward and backward, by every configuration."""

    def normal(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=like, requires_grad=True)

    x, weight, up, bias, bias_up = normal(m, k), normal(n, k), normal(n, k), normal(n), normal(n)
    residual, row_scale, col_scale = normal(m, n, like=torch.float32), normal(m), normal(n)
    calls: list[Callable[[], torch.Tensor]] = [
        *(partial(isogemm.linear, x, weight, bias, activation=name) for name in ("relu", "gelu", "tanh")),
        partial(isogemm.linear, x, weight, bias, weight_up=up, bias_up=bias_up, activation="swiglu", dropout_p=0.5),
        partial(
            isogemm.matmul_fused, x, weight.mT, bias=x[:, 0].contiguous(), bias_dim=-2, alpha=0.5, beta=2.0, c=residual,
            row_scale=row_scale, col_scale=col_scale, activation="gelu_tanh", residual=residual,
        ),
        partial(mlp, x, weight, up.mT, bias=bias, bias_down=x[0].contiguous(), activation="gelu", hidden_dropout_p=0.5),
        partial(mlp, x, weight, up.mT, weight_up=up, bias_up=bias_up, activation="swiglu"),
    ]  # fmt: skip
    for call in calls:
        call().sum().backward()
    fusion = Operands(bias.detach(), residual=residual.detach(), activation="gelu_tanh")
    operands = x.detach(), weight.detach().mT, None, fusion
    configurations = selection.candidates(fused.problem_of(*operands))
    for config in configurations:
        fused.gemm(*operands, config=config)
    return len(calls) + len(configurations)


ENCODERS = (  # ragged sequences, tokens, widths and heads; fused and composed
    (13, 2, 16, 4, 4), (1, 1, 16, 4, 32), (5, 42, 16, 4, 128), (3, 17, 48, 3, 100), (7, 5, 64, 4, 256),
    (2, 63, 128, 16, 192), (2, 128, 40, 5, 72), (2, 130, 24, 1, 40), (1, 33, 512, 8, 130),
)  # fmt: skip


def _encoders() -> int:
    return sum(encoder_calls(i, j) for i in range(len(ENCODERS)) for j in range(4))


def encoder_calls(i: int, j: int) -> int:
    """Forward and backward of the i-th sizes in the j-th number type, over masks and ways to hold the parameters."""
    shape, (dtype, precision) = EncoderShape(*ENCODERS[i]), NUMBERS[j]
    if precision == "ieee" and shape.d_model > 64:
        return 0  # long to compile
    norm = ("layer_norm", "rms_norm")[(i + j) % 2]
    leaves = {
        name: each.requires_grad_()
        for name, each in encoder_tensors(shape, dtype, device="cuda", norm=norm).items()
    }  # fmt: skip
    if j % 2:
        for name in ("in_proj_weight", "norm1_weight", "linear2_bias"):
            leaves[name].main_grad = torch.zeros(leaves[name].shape, device="cuda")
    mask = torch.rand(shape[:2], device="cuda") > 0.7
    masks = (None, mask, mask.to(dtype))
    for k, key_padding_mask in enumerate(masks):
        isogemm.encoder_layer(
            leaves["x"], encoder_parameters(leaves, separate=bool((i + j + k) % 2)), nhead=shape.nhead,
            norm_first=bool(i % 2), activation=("gelu", "relu", "silu")[j % 3], norm=norm,
            key_padding_mask=key_padding_mask, is_causal=k == 1, precision=precision,
        ).sum().backward()  # fmt: skip
    return len(masks)


def _variants() -> int:
    return sum(variant_calls(i, j) for i in range(len(ENCODERS)) for j in range(4))


STACKED = 3  # layers that pass scores on by factors


def variant_calls(i: int, j: int) -> int:
    """The same with dropout everywhere, residual scores, and norms of every kind and place."""
    shape, (dtype, precision) = EncoderShape(*ENCODERS[i]), NUMBERS[j]
    rows = shape.sequences * shape.tokens
    if (precision == "ieee" and shape.d_model > 64) or rows == 1:
        return 0  # long to compile; of one row there is no variance
    leaves = {name: each.requires_grad_() for name, each in encoder_tensors(shape, dtype, device="cuda").items()}
    places = ({}, {"norm_first": True}, {"norm_first": True, "residual_normed": True})
    scores = None
    for k, place in enumerate(places):
        running = tuple(
            isogemm.RunningStatistics(
                torch.zeros(shape.d_model, device="cuda"), torch.ones(shape.d_model, device="cuda"),
                torch.tensor(0, device="cuda"),
            )
            for _ in range(2)
        )  # fmt: skip
        batch = (i + j + k) % 3 > 0
        y, scores = isogemm.encoder_layer(
            leaves["x"], encoder_parameters(leaves), nhead=shape.nhead, precision=precision, dropout=0.25,
            norm="batch_norm" if batch else "layer_norm", running=running if batch else None,
            scores=scores, return_scores=True, **place,
        )  # fmt: skip
        (y.sum() + scores.sum()).backward()
        scores = scores.detach().requires_grad_()
    y, factors = leaves["x"], None
    for _ in range(STACKED):
        y, factors = isogemm.encoder_layer(
            y, encoder_parameters(leaves), nhead=shape.nhead, precision=precision, scores=factors,
            return_scores="factors",
        )  # fmt: skip
    (y.sum() + factors[-1].sum()).backward()
    return len(places) + STACKED


PARTS = {"products": _products, "epilogues": _epilogues, "encoder": _encoders, "variants": _variants}

if __name__ == "__main__":
    main(sys.argv[1:])
