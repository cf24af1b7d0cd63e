"""Layers as PatchTST's users train them, by the fused kernels: against float64, and their bits."""

import itertools

import pytest
import torch
from encoder_variants import Variant, assert_variant_no_worse

import isogemm
from isogemm import EncoderDropout, RunningStatistics
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.encoder_reference import EncoderShape, encoder_parameters, encoder_tensors

DROPPED = EncoderDropout(0.2, 0.25, 0.3, 0.15)
SHAPES = [
    EncoderShape(40, 42, 128, 16, 256),  # ETTm1's layer: warpgroups, fragments
    EncoderShape(64, 5, 64, 4, 256),
    EncoderShape(40, 42, 16, 4, 128),  # ETTh1's: rows by fragments, heads in registers
    EncoderShape(13, 2, 16, 4, 4),
    EncoderShape(9, 17, 48, 3, 100),  # nothing divides anything
    EncoderShape(5, 64, 256, 8, 512),
]
NUMBERS = [(torch.float32, "tf32"), (torch.float32, "ieee"), (torch.bfloat16, None)]
OFFICIAL = {"norm": "batch_norm", "dropout": DROPPED, "tracked": True}
VARIANTS = [
    Variant(**OFFICIAL, previous=True, return_scores=True),
    Variant(**OFFICIAL, norm_first=True),  # Hugging Face's
    Variant(**OFFICIAL, norm_first=True, residual_normed=True, return_scores=True),
    Variant(dropout=DROPPED, norm_first=True, mask="bool"),
    Variant(dropout=DROPPED, is_causal=True, previous=True),
    Variant(norm_first=True, residual_normed=True, mask="additive", previous=True, return_scores=True),
    Variant("batch_norm", training=False, tracked=True),
    Variant("rms_norm", True, dropout=EncoderDropout(output=0.5)),
]


def _cases():
    """Each pair of shape, variant and arithmetic: kernels of all combinations take minutes to compile."""
    for (i, shape), (j, variant) in itertools.product(enumerate(SHAPES), enumerate(VARIANTS)):
        dtype, precision = NUMBERS[(i + j) % len(NUMBERS)]
        yield pytest.param(shape, variant, dtype, precision, id=f"{shape}-{variant}-{precision or 'bf16'}")


@pytest.mark.parametrize(("shape", "variant", "dtype", "precision"), [*_cases()])
def test_no_worse_than_torch(shape, variant, dtype, precision):
    if variant.norm == "batch_norm" and not variant.training and dtype is torch.bfloat16:
        variant = variant._replace(norm_first=True)  # one of each
    assert_variant_no_worse(shape, variant, dtype, device="cuda", precision=precision, fused=True)


@pytest.mark.parametrize("stack", [2, 3, 5])
@pytest.mark.parametrize("mask", ["", "bool"])
@pytest.mark.parametrize(("dtype", "precision"), [NUMBERS[0], NUMBERS[2]], ids=["tf32", "bf16"])
@pytest.mark.parametrize("shape", [*SHAPES[:3], SHAPES[4]], ids=str)
def test_scores_by_factors(shape, dtype, precision, mask, stack):
    variant = Variant("batch_norm", stack=stack, mask=mask, norm_first=stack == 2)
    with isogemm.dispatch_log() as log:
        assert_variant_no_worse(shape, variant, dtype, device="cuda", precision=precision, fused=True)
    assert {entry.path for entry in log} == {"fused"}


def _tensors(shape, dtype=torch.float32):
    return encoder_tensors(shape, dtype, device="cuda")


def _layer(tensors, nhead, x=None, **options):
    named = {name: each for name, each in tensors.items() if name != "x"}
    x = tensors["x"] if x is None else x
    return isogemm.encoder_layer(x, encoder_parameters(named), nhead=nhead, precision="tf32", **options)


def _step(tensors, nhead, **options):
    leaves = {name: each.detach().clone().requires_grad_() for name, each in tensors.items()}
    torch.manual_seed(3)
    y = _layer(leaves, nhead, **options)
    y.square().sum().backward()
    return [y.detach(), *(each.grad for each in leaves.values())]


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_run_to_run_bits(shape):
    tensors = _tensors(shape)
    first = _step(tensors, shape.nhead, norm="batch_norm", dropout=DROPPED)
    for _ in range(3):
        for one, other in zip(_step(tensors, shape.nhead, norm="batch_norm", dropout=DROPPED), first, strict=True):
            assert_bitwise_equal(one, other)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_eval_mode_does_not_depend_on_the_batch(shape):
    tensors = _tensors(shape)
    d = shape.d_model
    running = tuple(
        RunningStatistics(torch.full((d,), 0.25, device="cuda"), torch.full((d,), 2.0, device="cuda")) for _ in range(2)
    )
    options = {"norm": "batch_norm", "running": running, "training": False, "return_scores": True}
    whole, scores = _layer(tensors, shape.nhead, **options)
    for part in (slice(0, 1), slice(3, 10)):
        y, of_part = _layer(tensors, shape.nhead, tensors["x"][part], **options)
        assert_bitwise_equal(y, whole[part])
        assert_bitwise_equal(of_part, scores[part])


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_residual_scores_do_not_depend_on_the_batch(shape):
    tensors = _tensors(shape)
    _, first = _layer(tensors, shape.nhead, return_scores=True)
    whole = _layer(tensors, shape.nhead, scores=first, norm_first=True, residual_normed=True)
    for part in (slice(2, 3), slice(5, 12)):
        y = _layer(tensors, shape.nhead, tensors["x"][part], scores=first[part], norm_first=True, residual_normed=True)
        assert_bitwise_equal(y, whole[part])


def _stacked(tensors, nhead, x, **options):
    """Three layers, the last of which gives no factors."""
    factors = None
    for _ in range(2):
        x, factors = _layer(tensors, nhead, x, scores=factors, return_scores="factors", **options)
    return _layer(tensors, nhead, x, scores=factors, **options)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_scores_by_factors_do_not_depend_on_the_batch(shape):
    tensors = _tensors(shape)
    made = []
    for part in (slice(None), slice(2, 3), slice(5, 12)):
        x = tensors["x"][part].detach().clone().requires_grad_()
        y = _stacked(tensors, shape.nhead, x)
        y.square().sum().backward()
        made.append((part, y.detach(), x.grad))
    for part, y, grad in made[1:]:
        assert_bitwise_equal(y, made[0][1][part])
        assert_bitwise_equal(grad, made[0][2][part])


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_scores_by_factors_compiled_in_a_graph_and_into_main_grads(shape):
    """The same bits as eager; of a parameter, whose three gradients are added in any order, nearly."""
    tensors = {name: torch.nn.Parameter(each) for name, each in _tensors(shape).items()}

    def step(function):
        y = function(tensors["x"])
        return [y, *torch.autograd.grad(y.square().sum(), list(tensors.values()))]

    def eager(x):
        return _stacked(tensors, shape.nhead, x, norm="batch_norm")

    expected = [each.detach().clone() for each in step(eager)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # first: another step's results would hold on to its stream
        captured = [each.detach() for each in step(eager)]
    graph.replay()
    found = [captured, [each.detach() for each in step(torch.compile(eager, fullgraph=True))]]
    weight = tensors["linear1_weight"]
    weight.main_grad = torch.zeros_like(weight)
    y = eager(tensors["x"])
    y.square().sum().backward()
    assert weight.grad is None
    found.append([y, *(weight.main_grad if each is weight else each.grad for each in tensors.values())])
    of_x = 1 + list(tensors).index("x")
    for one in found:
        assert_bitwise_equal(one[0], expected[0])
        assert_bitwise_equal(one[of_x], expected[of_x])
        for ours, right in zip(one, expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))


def test_served_by_the_fused_kernels():
    shape = SHAPES[0]
    with isogemm.dispatch_log() as log:
        _layer(_tensors(shape), shape.nhead, norm="batch_norm", dropout=0.1, return_scores=True)
    assert [(entry.op, entry.path) for entry in log] == [("encoder_layer", "fused")]


def test_replays_of_a_graph_drop_anew_and_move_the_running_statistics():
    shape = SHAPES[2]
    tensors = _tensors(shape)
    running = tuple(
        RunningStatistics(*(torch.full((16,), value, device="cuda") for value in (0.0, 1.0)), torch.tensor(0).cuda())
        for _ in range(2)
    )
    options = {"norm": "batch_norm", "dropout": 0.5, "running": running}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _layer(tensors, shape.nhead, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = _layer(tensors, shape.nhead, **options)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(y.clone())
    assert not torch.equal(*found)
    assert [int(each.batches) for each in running] == [3, 3]


@pytest.mark.parametrize("variant", VARIANTS[:3], ids=str)
def test_compiled(variant):
    """fullgraph, with its mutated statistics; the same bits as eager."""
    shape = EncoderShape(12, 42, 16, 4, 128)
    tensors = _tensors(shape)
    made = []
    for compiled in (False, True):
        torch.compiler.reset()
        running = tuple(
            RunningStatistics(*(torch.full((16,), each, device="cuda") for each in (0.0, 1.0)), torch.tensor(0).cuda())
            for _ in range(2)
        )

        def layer(x, running=running):
            named = {name: each for name, each in tensors.items() if name != "x"}
            return isogemm.encoder_layer(
                x, encoder_parameters(named), nhead=4, running=running, precision="tf32",
                **variant._replace(return_scores=False).options(),
            )  # fmt: skip

        function = torch.compile(layer, fullgraph=True) if compiled else layer
        x = tensors["x"].detach().requires_grad_()
        y = function(x)
        y.square().sum().backward()
        made.append([y.detach(), x.grad, *(each for one in running for each in one[:3])])
    for one, other in zip(*made, strict=True):
        assert_bitwise_equal(one, other)
