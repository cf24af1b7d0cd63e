"""Operands of products with an epilogue."""

from cpu_tensors import normal


def fused_operands(names, m, k, n, dtype, *, batch=(), extra=None, make=normal):
    """a [..., M, K], b [K, N] and those named; scales, c and residual of dtype `extra` where it is given."""
    rows, extra = (*batch, m), extra or dtype
    shapes = {"a": ((*rows, k), dtype), "b": ((k, n), dtype), "bias": ((n,), dtype), "column bias": (rows, dtype)}
    shapes |= {"c": ((*rows, n), extra), "residual": ((*rows, n), extra), "row_scale": (rows, extra)}
    shapes |= {"col_scale": ((n,), extra), "alpha": ((), extra), "beta": ((), extra)}
    made = {}
    for seed, (name, (shape, kind)) in enumerate(shapes.items()):
        if name in ("a", "b", *names):
            made[name] = make(*shape, seed=seed, dtype=kind)
    if "column bias" in made:
        made |= {"bias": made.pop("column bias"), "bias_dim": -2}
    return made


COMBINATIONS = {  # name: (tensors, options)
    "alone": ((), {}),
    "bias": (("bias",), {}),
    "column bias": (("column bias",), {}),
    "residual": (("residual",), {}),
    "alpha": ((), {"alpha": 0.7}),
    "alpha tensor": (("alpha",), {}),
    "c": (("c",), {"beta": -1.3}),
    "c, tensors": (("alpha", "beta", "c"), {}),
    "scales": (("row_scale", "col_scale"), {}),
    "bias, relu": (("bias",), {"activation": "relu"}),
    "column bias, gelu": (("column bias",), {"activation": "gelu"}),
    "bias, silu, residual": (("bias", "residual"), {"activation": "silu"}),
    "all, gelu_tanh": (
        ("bias", "c", "residual", "row_scale", "col_scale"), {"alpha": 0.5, "beta": 2.0, "activation": "gelu_tanh"},
    ),
    "all, leaky_relu": (
        ("column bias", "c", "residual", "row_scale", "col_scale", "alpha", "beta"),
        {"activation": "leaky_relu", "activation_args": {"negative_slope": 0.2}},
    ),
}  # fmt: skip


def gated_operands(dtype, m=33, k=100, n=47):
    shapes = (m, k), (n, k), (n, k)
    return [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
