"""Operands of products with an epilogue on a GPU."""

import torch

import isogemm
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"
NUMBERS = {  # name: (dtype, precision)
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
}
SHORT = ["bf16", "ieee"]  # where a kernel for each would take minutes to compile


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=DEVICE)


def fused_operands(names, m, k, n, dtype, *, batch=(), extra=None):
    """a [..., M, K], b [K, N] of [N, K] in memory, and those named; the wider ones of dtype `extra` where given."""
    rows, extra = (*batch, m), extra or dtype
    made = {"a": normal(*rows, k, dtype=dtype), "b": normal(n, k, seed=1, dtype=dtype).T}
    shapes = {"bias": ((n,), dtype), "column bias": (rows, dtype), "c": ((*rows, n), extra)}
    shapes |= {"residual": ((*rows, n), extra), "row_scale": (rows, extra), "col_scale": ((n,), extra)}
    shapes |= {"alpha": ((), extra), "beta": ((), extra)}
    for seed, (name, (shape, kind)) in enumerate(shapes.items(), 2):
        if name in names:
            made[name] = normal(*shape, seed=seed, dtype=kind)
    if "column bias" in made:
        made |= {"bias": made.pop("column bias"), "bias_dim": -2}
    return made


def run_fused(operands, **options):
    with poisoned_allocations(), isogemm.dispatch_log() as log:
        result = isogemm.matmul_fused(**operands, **options)
    assert [entry.path for entry in log] == ["gemm"]
    return result


EVERYTHING = ("bias", "c", "residual", "row_scale", "col_scale")
COMBINATIONS = {  # name: (tensors, options)
    "bias": (("bias",), {}),
    "column bias": (("column bias",), {}),
    "residual": (("residual",), {}),
    "alpha": ((), {"alpha": 0.7}),
    "alpha tensor": (("alpha",), {}),
    "c": (("c",), {"beta": -1.3}),
    "c, tensors": (("alpha", "beta", "c"), {}),
    "scales": (("row_scale", "col_scale"), {}),
    "column bias, gelu": (("column bias",), {"activation": "gelu"}),
    "bias, silu, residual": (("bias", "residual"), {"activation": "silu"}),
    "all, gelu_tanh": (EVERYTHING, {"alpha": 0.5, "beta": 2.0, "activation": "gelu_tanh"}),
    "all, leaky_relu": (
        ("column bias", *EVERYTHING[1:], "alpha", "beta"),
        {"activation": "leaky_relu", "activation_args": {"negative_slope": 0.2}},
    ),
}
