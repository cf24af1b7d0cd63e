"""The kernel whose warps have roles has the canonical bits after any epilogue, and saves and reads the same."""

import functools
from dataclasses import replace

import pytest
import torch
from role_tiles import ALTERNATING, BALANCED, FEW, GATHERED, GATHERING, ROLES, TILES, UNEVEN

from isogemm.epilogues.operands import Operands
from isogemm.gemm import configs, fused, op
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"


def _drawn(*shape, seed, dtype=torch.bfloat16):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=DEVICE)


def _fusions(m, n):
    """What an epilogue reads, by name."""
    seed = torch.tensor([7], device=DEVICE)
    bias, bias_up, residual, c = (_drawn(*shape, seed=at) for at, shape in enumerate(((n,), (n,), (m, n), (m, n))))
    rows, columns = _drawn(m, seed=4), _drawn(n, seed=5)
    return {
        "bias": Operands(bias),
        "activated": Operands(bias, activation="gelu_tanh"),
        "dropout": Operands(bias, activation="relu", dropout_p=0.3, seed=seed),
        "residual": Operands(residual=residual, c=c, beta_value=0.5),
        "everything": Operands(
            rows, residual=residual, c=c, row_scale=rows, col_scale=columns, alpha_value=0.7, beta_value=-1.3,
            bias_dim=-2, activation="silu",
        ),
        "eager": Operands(residual=residual, activation="relu", eager=True),
        "gated": Operands(bias, bias_up, activation="swiglu"),
        "gated dropout": Operands(activation="swiglu", dropout_p=0.3, seed=seed),
    }  # fmt: skip


FUSED = ("bias", "activated", "dropout", "residual", "everything", "eager", "gated", "gated dropout")
BY_EPILOGUE = {"activated": ("128", "256", "128+64", "64+16"), "dropout": FEW, "gated": ("128", "256")}


@pytest.mark.parametrize("name", FUSED)
def test_epilogues(name):
    k = 520
    for m, n in ((1, 136), (300, 264)):
        a, weight, up = _drawn(m, k, seed=8) / k**0.5, _drawn(n, k, seed=9), _drawn(n, k, seed=10)
        fusion = _fusions(m, n)[name]
        call = functools.partial(fused.gemm, a, weight.T, up.T if fusion.gated else None, fusion)
        problem = fused.problem_of(a, weight.T, up.T if fusion.gated else None, fusion)
        with poisoned_allocations():
            expected = call(config=configs.canonical(problem))
            for tile in BY_EPILOGUE.get(name, ("128",)):
                config = configs.fitted(problem, TILES[tile])
                assert config.kernel == "roles"
                assert_bitwise_equal(call(config=config), expected, f"{tile}: [{m}, {k}] by {n}")


@pytest.mark.parametrize("name", FUSED)
def test_epilogues_of_uneven_grids(name):
    """A warpgroup's epilogue runs while the other one multiplies; and after what another program began."""
    (m, n), k = UNEVEN[0], 520
    a, weight, up = _drawn(m, k, seed=8) / k**0.5, _drawn(n, k, seed=9), _drawn(n, k, seed=10)
    fusion = _fusions(m, n)[name]
    b_up = up.T if fusion.gated else None
    call = functools.partial(fused.gemm, a, weight.T, b_up, fusion)
    problem = fused.problem_of(a, weight.T, b_up, fusion)
    expected = call(config=configs.canonical(problem))
    for config in (ALTERNATING, BALANCED["alternating"], BALANCED["shared"]):
        fits = configs.fitted(problem, config)
        assert (fits.kernel, fits.alternating, fits.balanced) == ("roles", config.alternating, config.balanced)
        for _ in range(5):
            with poisoned_allocations():
                assert_bitwise_equal(call(config=fits), expected, str(fits))


@pytest.mark.parametrize("name", ["bias", "activated", "gated"])
def test_epilogues_after_gathered_chunks(name):
    m, k, n = 300, 2600, 264
    a, weight, up = _drawn(m, k, seed=8) / k**0.5, _drawn(n, k, seed=9), _drawn(n, k, seed=10)
    fusion = _fusions(m, n)[name]
    b_up = up.T if fusion.gated else None
    problem = replace(fused.problem_of(a, weight.T, b_up, fusion), chunk=1024)
    call = fused.Call(a, weight.T, b_up, fusion, by_rows=False)

    def run(config):
        return fused._plan(call, problem, config).run((a, weight.T, b_up, *fused._operands(call)))

    expected = run(replace(configs.canonical(problem), persistent=True))
    for config in (GATHERED, GATHERING["128+64"], ROLES):
        with poisoned_allocations():
            assert_bitwise_equal(run(configs.fitted(problem, config)), expected, str(config))


@pytest.mark.parametrize(("activation", "save"), [("relu", "mask"), ("gelu", "pre"), ("swiglu", "pre")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_saved(activation, save, dtype):
    """As the canonical config saves it, and no byte more."""
    k = 520
    tiles = ("128", "256") if dtype == torch.bfloat16 else ("64",)
    for m, n in ((300, 264), (129, 136), UNEVEN[0]):
        shapes = (m, k), (n, k), (n, k)
        a, weight, up = (_drawn(*shape, seed=8 + at, dtype=dtype) for at, shape in enumerate(shapes))
        fusion = Operands(_drawn(n, seed=1, dtype=dtype), activation=activation)
        b_up = up.T if fusion.gated else None
        call = fused.Call(a, weight.T, b_up, fusion, by_rows=False)
        problem = fused._problem(call, save)

        def run(config, call=call, problem=problem, fusion=fusion):
            saved = fused.saved_like(call.x, call.shape, save, fusion)
            inputs = [call.x, call.weight, call.weight_up, *fused._operands(call)]
            inputs[fused._READ + fused.PLACES["saved"]] = saved
            return fused._plan(call, problem, config).run(inputs), saved

        with poisoned_allocations():
            expected = run(configs.canonical(problem))
            every = [TILES[tile] for tile in tiles]
            if (m, n) == UNEVEN[0] and dtype == torch.bfloat16:
                every = [ALTERNATING, BALANCED["alternating"]]
            for each in every:
                config = configs.fitted(problem, each)
                assert (config.kernel, config.alternating) == ("roles", each.alternating)
                for got, same, what in zip(run(config), expected, ("result", save), strict=True):
                    assert_bitwise_equal(got, same, f"{what} of {config}, {n} columns")


GRADIENTS = [("relu", "out"), ("relu", "mask"), ("gelu", "pre"), ("swiglu", "pre")]


@pytest.mark.parametrize(("activation", "kind"), GRADIENTS)
def test_hidden_gradients(activation, kind):
    """Both results of a gate have the canonical bits."""
    for m, n, tiles in (
        (300, 264, [TILES[each] for each in FEW]),
        (*UNEVEN[0], [ALTERNATING, BALANCED["alternating"]]),
    ):
        _assert_hidden_gradient(activation, kind, m, n, tiles)


def _assert_hidden_gradient(activation, kind, m, n, tiles):
    k = 520
    grad, weight = _drawn(m, k, seed=1), _drawn(k, n, seed=2)
    fusion = Operands(activation=activation)
    saved = _drawn(*((2, m, n) if fusion.gated else (m, n)), seed=3).relu()
    if kind == "mask":
        saved = torch.randint(0, 256, (m, (n + 7) // 8), dtype=torch.uint8, device=DEVICE)
    call = functools.partial(fused.hidden_grad, grad, weight, saved, kind, fusion, None, False)
    problem = replace(op.problem_of(grad, weight), epilogue=fusion.of_gradient(kind, False))
    with poisoned_allocations():
        expected, _ = call(config=configs.canonical(problem))
        for tile in tiles:
            config = configs.fitted(problem, tile)
            assert config.kernel == "roles"
            result, _ = call(config=config)
            assert_bitwise_equal(result, expected, str(config))
