"""The epilogues in the kernels, interpreted: every one in every kind of tile, against fp64 and on poisoned memory."""

from dataclasses import replace

import float16_range
import pytest
import torch
import triton
import triton.language as tl

from isogemm.epilogues import ACTIVATIONS, random, register
from isogemm.epilogues.operands import PLACES, TENSORS, Epilogue, Operands
from isogemm.gemm import configs, cpu, describe, fused, gradient_problems, torch_forms
from isogemm.gemm.configs import Config
from isogemm.gemm.kernels import gradients as kernels_gradients
from isogemm.gemm.kernels import products as kernels
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

GUARD = 16
M, N, K = 21, 72, 40
CONFIGS = {
    "pointer": Config(16, 32, 32, 4, 1),
    "pointer swapped": Config(32, 8, 32, 4, 1, swapped=True),
    "tma": Config(16, 32, 32, 4, 2, "tma"),
    "tma in parts": Config(16, 64, 32, 4, 2, "tma", persistent=True, parts=2),
    "tma swapped": Config(32, 16, 32, 4, 2, "tma", swapped=True),
    "tma with a rest": Config(16, 32, 32, 4, 2, "tma", rest_n=16),
    "stream": Config(16, 64, 32, 4, 2, "stream", persistent=True, parts=2),
    "stream swapped": Config(32, 16, 32, 4, 2, "stream", persistent=True, swapped=True),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
PLAIN = [name for name, entry in ACTIVATIONS.items() if not entry.gate]


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype)


def _guarded(shape, dtype):
    """Memory of NaN (or 0xFF) with as much on either side, which must stay so."""
    size = torch.Size(shape).numel()
    buffer = torch.full((GUARD + size + GUARD,), 255 if dtype is torch.uint8 else torch.nan, dtype=dtype)
    return buffer, buffer[GUARD : GUARD + size].view(shape)


def _untouched(buffer):
    edges = torch.cat((buffer[:GUARD], buffer[-GUARD:]))
    return bool((edges == 255).all() if buffer.dtype is torch.uint8 else edges.isnan().all())


def _launch(config, problem, x, b, b_up, read, out, numbers):
    problem = replace(problem, arch="sm_90", tma=True, sm_count=2)
    config = replace(config, block_k=configs.fitted(problem, config).block_k)
    assert configs.illegal(problem, config) == ""
    launch = kernels.describe_gemm(problem, config)
    by_map = configs.reads_b_by_tma(problem, config)
    weight = (b, b_up) if b_up is not None and by_map else b
    left, right = (weight, x) if config.swapped else (x, weight)
    second = None if by_map else b_up
    rest = () if config.kernel == "stream" else (right if config.rest_n else second,)
    scratch = torch.full((configs.workspace(problem, config) // 4 + GUARD,), torch.nan)
    waits = scratch if configs.chunk_bytes(problem, config) else None
    launch.run(left, right, *rest, out, waits, *read, numbers=numbers)


def _placed(**tensors):
    """An epilogue's tensors in the kernel's places."""
    return [tensors.get(name) for name in TENSORS] + [None] * (kernels.SLOTS - len(TENSORS))


def _run(config, x, b, fusion, b_up=None, save="", out_dtype=None):
    """As `fused.fused` on a GPU of few SMs."""
    dtype = out_dtype or x.dtype
    call = fused.Call(x, b, b_up, fusion, by_rows=False, out_dtype=dtype)
    read, problem = fused._operands(call), fused._problem(call, save)
    buffer, out = _guarded((x.shape[0], b.shape[1]), dtype)
    saved_buffer = saved = None
    if save:
        like = fused.saved_like(x, out.shape, save, fusion)
        saved_buffer, saved = _guarded(like.shape, like.dtype)
    read[PLACES["saved"]] = saved
    read += [None] * (kernels.SLOTS - len(read))
    _launch(config, problem, x, b, b_up, read, out, fused.call_numbers(fusion))
    assert _untouched(buffer)
    assert saved is None or _untouched(saved_buffer)
    return out, saved


def _exact(x, b, fusion, b_up=None):
    """In fp64, by the torch forms."""
    wide = Operands(
        *(each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in fusion)
    )
    wide = wide._replace(aux=tuple(each.double() for each in fusion.aux), eager=False)
    call = fused.Call(x.double(), b.double(), None if b_up is None else b_up.double(), wide, by_rows=False)
    return fused._in_torch(call)[0]


def _assert_close(actual, exact, scale=1.0):
    """One rounding to the dtype, K in fp32 and those of the forms; scale: of the sums before they cancelled."""
    error = (actual.double() - exact).abs()
    allowed = (torch.finfo(actual.dtype).eps + 2e-5) * (exact.abs() + scale)
    assert bool((error <= allowed).all()), f"largest error {error.max()}, or poison left"


def _operands(dtype=torch.float32):
    return _normal(M, K, dtype=dtype), _normal(N, K, seed=1, dtype=dtype).t()


def _everything():
    return Operands(
        bias=_normal(N, seed=2), c=_normal(M, N, seed=3), residual=_normal(M, N + 8, seed=4)[:, 8:],
        row_scale=_normal(M, seed=5), col_scale=_normal(N, seed=6), alpha_value=0.5, beta_value=-2.0,
    )  # fmt: skip


@every_config
def test_everything_linear(config):
    x, b = _operands()
    fusion = _everything()
    _assert_close(_run(config, x, b, fusion)[0], _exact(x, b, fusion), scale=10)


@every_config
def test_scalars_on_the_device(config):
    x, b = _operands()
    fusion = _everything()._replace(alpha=torch.tensor(0.25), beta=torch.tensor(3.0), alpha_value=1.0, beta_value=0.0)
    _assert_close(_run(config, x, b, fusion)[0], _exact(x, b, fusion), scale=10)


@every_config
def test_bias_along_m(config):
    x, b = _operands()
    fusion = Operands(bias=_normal(M, seed=2), bias_dim=-2)
    _assert_close(_run(config, x, b, fusion)[0], _exact(x, b, fusion), scale=10)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("activation", PLAIN)
def test_activations(activation, exact):
    """The short forms (16-bit results) and torch's own."""
    dtype = torch.float32 if exact else torch.float16
    x, b = _operands(dtype)
    x = x / 4
    fusion = Operands(
        bias=_normal(N, seed=2, dtype=dtype), activation=activation, arguments=(0.2,) * (activation == "leaky_relu")
    )
    _assert_close(_run(CONFIGS["tma"], x, b, fusion)[0], _exact(x, b, fusion), scale=0.1)


@pytest.mark.parametrize(("activation", "up_first"), [("swiglu", False), ("geglu", True)])
@every_config
def test_gated(config, activation, up_first):
    if config.rest_n:
        pytest.skip("two weights have no rest")
    x = _normal(M, K)
    weights = _normal(3, N, K, seed=1)  # the one between is not read
    weights[1] = torch.nan
    b, b_up = (weights[2].t(), weights[0].t()) if up_first else (weights[0].t(), weights[2].t())
    fusion = Operands(bias=_normal(N, seed=2), bias_up=_normal(N, seed=3), activation=activation)
    exact = _exact(x, b, fusion, b_up)
    result, saved = _run(config, x, b, fusion, b_up, save="pre")
    _assert_close(result, exact, scale=20)
    for pre, weight, bias in zip(saved, (b, b_up), (fusion.bias, fusion.bias_up), strict=True):
        _assert_close(pre, x.double() @ weight.double() + bias.double(), scale=10)


@triton.jit
def _underflown(
    a, b, acc, PRECISION: tl.constexpr, A_ROUNDED: tl.constexpr, B_ROUNDED: tl.constexpr,
    A_SPLIT: tl.constexpr = False, B_SPLIT: tl.constexpr = False, SWAPPED: tl.constexpr = False,
):  # fmt: skip
    return tl.abs(acc) * -1.0  # since -x is 0 - x


@pytest.mark.parametrize("kept", [{}, {"block_m": 32, "block_n": 128, "num_warps": 1}], ids=["registers", "scratch"])
def test_sums_of_minus_zero_through_a_gate(kept, monkeypatch):
    """They are +0 wherever chunks wait, so the result's sign is the same."""
    monkeypatch.setattr(kernels, "multiply", _underflown)
    config = replace(CONFIGS["pointer"], persistent=True, **kept)
    x, b = _operands()
    call = fused.Call(x, b, b.clone(), Operands(activation="reglu"), by_rows=False, out_dtype=x.dtype)
    problem = replace(fused._problem(call), chunk=32, precision="tf32")
    assert configs.accumulation(problem, config) == ("scratch" if kept else "registers")
    monkeypatch.setattr(fused, "_problem", lambda *_: problem)
    assert_bitwise_equal(_run(config, x, b, call.operands, b.clone())[0], torch.zeros(M, N))


@pytest.mark.parametrize("columns", [N, N - 3])
@every_config
def test_mask(config, columns):
    x, b = _operands()
    b = b[:, :columns]
    fusion = Operands(bias=_normal(columns, seed=2), activation="relu")
    result, saved = _run(config, x, b, fusion, save="mask")
    assert_bitwise_equal(torch_forms.unpacked(saved, columns), result > 0)
    assert not bool((saved[:, -1] >> (columns % 8 or 8)).any())  # bits of no column


@every_config
def test_pre_activation(config):
    x, b = _operands(torch.float16)
    result, saved = _run(config, x, b, Operands(activation="gelu"), save="pre")
    _assert_close(saved, x.double() @ b.double(), scale=10)
    assert bool(result.isfinite().all())


@pytest.mark.parametrize("p", [0.3, 1.0])
@every_config
def test_dropout_is_the_torch_forms(config, p):
    x, b = _operands()
    seed = torch.tensor([0x123456789ABCDEF])
    fusion = Operands(seed=seed, dropout_p=p, residual=torch.zeros(M, N))
    result, _ = _run(config, x, b, fusion)
    kept = random.kept(seed, M, N, p)
    plain, _ = _run(config, x, b, Operands(residual=torch.zeros(M, N)))
    assert_bitwise_equal(result, torch.where(kept, plain * random.scale(p), 0.0))


@every_config
def test_eager_rounds_after_each_operation(config):
    x, b = _operands(torch.float16)
    bias, residual = _normal(N, seed=2, dtype=torch.float16), _normal(M, N, seed=3, dtype=torch.float16)
    product, _ = _run(config, x, b, Operands(row_scale=torch.ones(M)))
    fusion = Operands(bias=bias, residual=residual, alpha_value=0.3, activation="relu", eager=True)
    assert_bitwise_equal(_run(config, x, b, fusion)[0], residual + torch.relu(product * 0.3 + bias))


@triton.jit
def _weighed(acc, col, row, gain, shift):
    return acc * gain + shift + tl.where(col == row, 100.0, 0.0)


@pytest.mark.parametrize("config", list(CONFIGS.values())[:4], ids=list(CONFIGS)[:4])
def test_user_epilogue(config):
    register(
        "weighed_in_test",
        _weighed,
        lambda acc, col, row, gain, shift: acc * gain + shift + torch.where(col == row, 100.0, 0.0),
    )
    x, b = _operands()
    fusion = Operands(epilogue="weighed_in_test", aux=(_normal(N, seed=2), _normal(M, 1, seed=3)))
    _assert_close(_run(config, x, b, fusion)[0], _exact(x, b, fusion), scale=10)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@every_config
def test_gradient_in_the_epilogue(config, activation):
    """dz from the product of dY and the second layer's weight."""
    grad, weight = _normal(M, K), _normal(K, N, seed=1)
    gated = bool(ACTIVATIONS[activation].gate)
    kind = "out" if activation == "relu" else "pre"
    fusion = Operands(activation=activation, arguments=(0.2,) * (activation == "leaky_relu"))
    saved = _normal(*((2, M, N) if gated else (M, N)), seed=2)
    saved = saved.relu() if kind == "out" else saved
    buffer, out = _guarded((2, M, N) if gated else (M, N), torch.float32)
    first, second = (out[0], out[1]) if gated else (out, None)
    epilogue = fusion.of_gradient(kind, exact=True)
    problem = describe.product(grad, weight, None, grad.dtype, "ieee", 0)
    read = _placed(saved=saved, second=second)
    _launch(config, replace(problem, epilogue=epilogue), grad, weight, None, read, first, (None,) * 4)
    exact = torch_forms.activation_grad(grad.double() @ weight.double(), saved.double(), kind, fusion, torch.float64)
    assert _untouched(buffer)
    _assert_close(out, exact, scale=20)


SUMMING = {
    "pointer": Config(64, 32, 32, 4, 1),
    "tma": Config(64, 32, 32, 4, 2, "tma"),
    "tma in parts": Config(128, 64, 32, 4, 2, "tma", persistent=True, parts=2),
    "stream": Config(128, 32, 32, 4, 2, "stream", persistent=True),
    "stream in parts": Config(64, 64, 32, 4, 2, "stream", persistent=True, parts=4),
}


@pytest.mark.filterwarnings("ignore:invalid value")  # of the infinity
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("tokens", [21, 64, 200])
def test_gradient_s_sums_over_rows(tokens, activation, dtype):
    """In one order by every tile; a weight that is not finite makes nothing of rows that are not stored."""
    grad, weight = _normal(tokens, K, dtype=dtype), _normal(K, N, seed=1, dtype=dtype)
    weight[3, 5] = torch.inf
    gated = bool(ACTIVATIONS[activation].gate)
    kind = "out" if activation == "relu" else "pre"
    saved = _normal(2 if gated else 1, tokens, N, seed=2, dtype=dtype)
    saved = saved.relu() if kind == "out" else saved
    epilogue = Epilogue(activation=activation, gradient=kind, exact=True, sums=True)
    problem = replace(describe.product(grad, weight, None, dtype, "ieee", 0), epilogue=epilogue)
    blocks = -(-tokens // configs.BIAS_ROWS)
    for name, config in SUMMING.items():
        _, out = _guarded((2 if gated else 1, tokens, N), dtype)
        buffer, sums = _guarded((2 if gated else 1, blocks, N), torch.float32)
        read = _placed(saved=saved, second=out[1] if gated else None, row_sums=sums)
        _launch(config, problem, grad, weight, None, read, out[0], (None,) * 4)
        assert _untouched(buffer)
        for half, of_half in zip(out, sums, strict=True):
            assert_bitwise_equal(of_half, cpu.row_sums(half, configs.BIAS_ROWS), name)
            exact = torch.stack([rows.double().sum(0) for rows in half.split(configs.BIAS_ROWS)])
            size = torch.stack([rows.double().abs().sum(0) for rows in half.split(configs.BIAS_ROWS)])
            finite = exact.isfinite()
            assert finite[:, torch.arange(N) != 5].all()
            assert ((of_half - exact).abs() <= 6 * 2**-24 * size)[finite].all()  # as many additions deep


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("count", "together"), [(1, 1), (5, 1), (1, 16), (16, 16), (37, 16)])
def test_sums_of_chunks(count, together, accumulate):
    partial = _normal(count, 200)
    partial[:, 3] = -0.0
    buffer, out = _guarded((200, 2), torch.float32)
    total = _normal(200, seed=1) if accumulate else None
    if accumulate:
        total[3] = -0.0
        out[:, 0] = total
    launch = kernels_gradients.describe_chunk_sums(count, 200, together, 2, accumulate)
    launch.run(partial, out[:, 0])
    assert _untouched(buffer)
    assert out[:, 1].isnan().all()
    assert_bitwise_equal(out[:, 0], fused.chunk_sums(partial, together, total, torch.float32))


SAVED = (("relu", "mask"), ("gelu", "pre"), ("tanh", "out"), ("swiglu", "pre"))


@pytest.mark.parametrize("few_programs", [0, 128], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    ("activation", "kind", "dropout_p"), [("", "", 0.3), *((*saved, p) for saved in SAVED for p in (0.0, 0.3))]
)
def test_activation_grad(activation, kind, dropout_p, few_programs, monkeypatch):
    """dz, and the sums of its chunks in the order of the bias gradient's kernel."""
    monkeypatch.setattr(gradient_problems, "_FEW_PROGRAMS", few_programs)
    tokens, n = 1100, 70
    seed = torch.tensor([99]) if dropout_p else None
    fusion = Operands(activation=activation, dropout_p=dropout_p, seed=seed)
    grad = _normal(tokens, n + 2)[:, 2:]
    z = _normal(*((2, tokens, n) if fusion.gated else (tokens, n)), seed=1)
    saved = {"mask": lambda: torch_forms.packed(z > 0), "out": z.tanh, "pre": lambda: z, "": lambda: None}[kind]()
    epilogue = Epilogue(activation=activation, dropout=dropout_p > 0, gradient=kind, exact=True)
    problem = gradient_problems.ActivationGradProblem(tokens, n, "float32", epilogue, grad.stride(0), True)
    buffer, dz = _guarded(z.shape, torch.float32)
    sums_buffer, sums = _guarded((2, 2, n) if fusion.gated else (1, 2, n), torch.float32)
    launch = kernels_gradients.describe_activation_grad(problem)
    launch.run(grad, saved, seed, dz, sums, numbers=fused.call_numbers(fusion)[2:])
    exact = torch_forms.activation_grad(
        grad.double(),
        None if saved is None else saved if kind == "mask" else saved.double(),
        kind,
        fusion,
        torch.float64,
    )
    assert _untouched(buffer)
    assert _untouched(sums_buffer)
    _assert_close(dz, exact)
    for half, of_half in zip(dz.view(-1, tokens, n), sums, strict=True):
        bias_grad, out = (
            gradient_problems.BiasGradProblem(tokens, n, "float32", "float32", (n, 1), configs.BIAS_CHUNK),
            torch.empty(n),
        )
        kernels_gradients.describe_bias_grad(bias_grad).run(half, out)
        assert_bitwise_equal(of_half[0] + of_half[1], out)


@pytest.mark.filterwarnings("ignore:invalid value")  # in columns beyond the last
def test_rows_beyond_the_last_add_nothing():
    """Whose slope may be infinite."""
    tokens, n = 65, 10
    grad, fusion = _normal(tokens, n), Operands(activation="leaky_relu", arguments=(torch.inf,))
    epilogue = Epilogue(activation="leaky_relu", arguments=(torch.inf,), gradient="mask", exact=True)
    problem = gradient_problems.ActivationGradProblem(tokens, n, "float32", epilogue, n, True)
    dz, sums, positive = torch.empty(tokens, n), torch.empty(1, n), torch.ones(tokens, n, dtype=torch.bool)
    launch = kernels_gradients.describe_activation_grad(problem)
    launch.run(grad, torch_forms.packed(positive), None, dz, sums, numbers=fused.call_numbers(fusion)[2:])
    assert_bitwise_equal(dz, grad)
    _assert_close(sums[0], grad.double().sum(0))


@pytest.mark.parametrize("config", ["pointer swapped", "tma in parts"])
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "relu"])  # which keeps bits
def test_pre_activations_beyond_float16(activation, config):
    """Kept by the product's kernel, read by the gradient's: dz is right where float16 does not hold z."""
    x, weight, weight_up = float16_range.operands("cpu")
    entry = ACTIVATIONS[activation]
    b_up = weight_up.t() if entry.gate else None
    fusion = Operands(activation=activation, arguments=tuple(entry.arguments.values()))
    result, saved = _run(CONFIGS[config], x, weight.t(), fusion, b_up, "pre", torch.float32)
    assert result.isfinite().all()
    tokens, n = result.shape
    grad, (buffer, dz) = torch.full((tokens, n), 1e-4), _guarded(saved.shape, torch.float16)
    epilogue = Epilogue(activation=activation, arguments=fusion.arguments, gradient="pre")
    problem = gradient_problems.ActivationGradProblem(tokens, n, "float16", epilogue, n)
    launch = kernels_gradients.describe_activation_grad(problem)
    launch.run(grad, saved, None, dz, None), (None, None)
    assert _untouched(buffer)
    z = x.double() @ weight.double().t()
    z = z if b_up is None else torch.stack((z, x.double() @ b_up.double()))
    exact = torch_forms.activation_grad(grad.double(), z, "pre", fusion, torch.float64)
    error = (dz.double() - exact).abs()
    # z's own rounding, dz's, and the forms'.
    assert bool((error <= 4 * float16_range.EPS * exact.abs() + 4e-4 * grad + float16_range.TINY).all()), error.max()
