"""The encoder layer's contract by the kernels: what a sequence's bits may depend on, and a parameter's gradient's."""

import functools
import itertools

import pytest
import torch
from encoder_oracle import isogemm_encoder
from gradients import gradients_of

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.encoder_reference import EncoderShape, encoder_parameters, encoder_tensors
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"
NUMBERS = {
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
}
PRE = {"norm_first": True, "activation": "gelu"}
POST = {"norm_first": False, "activation": "relu"}
SMALL = EncoderShape(2688, 42, 16, 4, 128)
SHORT = EncoderShape(2688, 5, 64, 4, 256)
WIDE = EncoderShape(2688, 42, 128, 16, 256)
ODD = EncoderShape(700, 17, 48, 3, 100)
LONG = EncoderShape(130, 64, 128, 16, 512)
COMPOSED = EncoderShape(40, 33, 512, 8, 640)
CASES = [  # shape, number, options
    *((shape, "tf32", PRE) for shape in (SMALL, SHORT, WIDE, ODD, LONG, COMPOSED)),
    *((shape, "bf16", PRE) for shape in (SMALL, SHORT, WIDE, ODD, COMPOSED)),
    (SMALL, "ieee", PRE),
    (SMALL, "fp16", PRE),
    (SMALL, "tf32", POST),
    (SMALL, "tf32", PRE | {"is_causal": True}),
    (EncoderShape(2688, 1, 16, 4, 32), "tf32", PRE),
    (EncoderShape(2688, 2, 16, 4, 4), "tf32", PRE),
    (EncoderShape(40, 128, 256, 8, 1024), "tf32", PRE),
]
# Both sides of where packings, tiles and grids of them may change.
COUNTS = (1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 25, 26, 31, 33, 64, 65, 131, 132, 133, 255, 264, 265, 528, 896, 1280, 2049)


def _name(value):
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


class Layer:
    """A layer and a batch; the result and the input's gradient of any of its sequences, in any order."""

    def __init__(self, shape, number, **options):
        dtype, precision = NUMBERS[number]
        tensors = encoder_tensors(shape, dtype, device=DEVICE, activation=options["activation"])
        self.x, self.mask = tensors["x"], None
        self.grad = make_data("normal", tuple(self.x.shape), seed=9, dtype=dtype, device=DEVICE)
        parameters = encoder_parameters(tensors)
        options |= {"params": parameters, "nhead": shape.nhead, "precision": precision}
        self.call = functools.partial(isogemm.encoder_layer, **options)

    def __call__(self, at):
        leaf = self.x[at].clone().requires_grad_()
        with poisoned_allocations():
            result = self.call(leaf, key_padding_mask=None if self.mask is None else self.mask[at])
            (dx,) = torch.autograd.grad(result, leaf, self.grad[at])
        return result.detach(), dx


def _assert_same(actual, expected, what):
    for kind, got, same in zip(("result", "dx"), actual, expected, strict=True):
        assert_bitwise_equal(got, same, f"{kind}, {what}")


def _assert_sequences_follow_themselves(layer):
    whole, count = layer(slice(None)), len(layer.x)

    def check(at, what):
        _assert_same(layer(at), [each[at] for each in whole], what)

    for size in COUNTS:
        if size < count:
            check(slice(0, size), f"the first {size}")
            check(slice(count - size, count), f"the last {size}")
    for i in (0, 1, 6, count // 2, count - 1):
        check(slice(i, i + 1), f"sequence {i} alone")
        check([i, 0], f"sequences {i} and 0")
        check([0, i], f"sequences 0 and {i}")
    check(slice(1, count), "one place further up")
    check(torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(DEVICE), "permuted")
    check(slice(None), "again")


@pytest.mark.parametrize(("shape", "number", "options"), CASES, ids=_name)
def test_a_sequence_follows_nothing_but_itself(shape, number, options):
    _assert_sequences_follow_themselves(Layer(shape, number, **options))


@pytest.mark.parametrize("number", ["tf32", "bf16"])
@pytest.mark.parametrize("shape", [SMALL, ODD], ids=str)
def test_a_sequence_follows_its_own_mask(shape, number):
    layer = Layer(shape, number, **PRE)
    lengths = torch.randint(0, shape.tokens + 1, (shape.sequences, 1), generator=torch.Generator().manual_seed(0))
    layer.mask = (torch.arange(shape.tokens) >= lengths).to(DEVICE)
    _assert_sequences_follow_themselves(layer)


@pytest.mark.parametrize("number", ["tf32", "bf16"])
@pytest.mark.parametrize("shape", [SMALL, SHORT, WIDE, LONG], ids=str)
def test_other_data_in_the_batch(shape, number):
    """Every other sequence overflows, or is no number at all."""
    layer = Layer(shape._replace(sequences=60), number, **PRE)
    expected = [each[::2] for each in layer(slice(None))]
    layer.x[1::2] = 1e30
    _assert_same([each[::2] for each in layer(slice(None))], expected, "beside huge ones")
    layer.x[1::2] = torch.nan
    layer.grad[1::2] = torch.inf
    _assert_same([each[::2] for each in layer(slice(None))], expected, "beside NaN")


# Padding of tokens


@pytest.mark.parametrize("number", ["tf32", "bf16", "ieee"])
@pytest.mark.parametrize(("sizes", "tokens"), [((16, 4, 128), 42), ((64, 4, 256), 5), ((128, 16, 256), 42)], ids=str)
def test_right_padding_changes_nothing(sizes, tokens, number):
    """To the next tile, far beyond it, and past what the fused kernels take."""
    if number == "ieee" and sizes[0] > 16:
        pytest.skip("the same kernels, and long to compile")
    shape = EncoderShape(30, tokens, *sizes)
    layer = Layer(shape, number, **PRE)
    expected = layer(slice(None))
    lengths = torch.randint(1, tokens + 1, (30, 1), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    own = torch.arange(tokens, device=DEVICE) >= lengths
    layer.mask = own
    masked = layer(slice(None))
    for wide in (tokens + 1, 64, 128):
        padded = Layer(shape._replace(tokens=wide), number, **PRE)
        padded.x[:, :tokens], padded.grad[:, :tokens], padded.grad[:, tokens:] = layer.x, layer.grad, 0
        padded.mask = (torch.arange(wide, device=DEVICE) >= tokens).expand(30, -1)
        found = padded(slice(None))
        _assert_same([each[:, :tokens] for each in found], expected, f"{tokens} tokens in {wide}")
        behind, padded.mask = padded.mask, torch.zeros(30, wide, device=DEVICE).masked_fill(padded.mask, -torch.inf)
        found = padded(slice(None))
        _assert_same([each[:, :tokens] for each in found], expected, f"{tokens} tokens in {wide}, by numbers")
        padded.mask = torch.cat([own, behind[:, tokens:]], 1)
        found = padded(slice(None))
        _assert_same([each[:, :tokens] for each in found], masked, f"{tokens} tokens in {wide}, of which some are out")


# Gradients of parameters


def _gradients(tensors, grad, number, shape, **options):
    call = functools.partial(isogemm_encoder, nhead=shape.nhead, precision=NUMBERS[number][1])
    with poisoned_allocations():
        return gradients_of(call, tensors, grad, **options)


def _batch(shape, number, **options):
    dtype, _ = NUMBERS[number]
    tensors = encoder_tensors(shape, dtype, device=DEVICE, **options)
    return tensors, make_data("normal", tuple(tensors["x"].shape), seed=9, dtype=dtype, device=DEVICE)


FEW = [
    (SMALL._replace(sequences=112), "tf32"),
    (SMALL._replace(sequences=112), "bf16"),
    (SHORT._replace(sequences=130), "tf32"),
    (WIDE._replace(sequences=61), "tf32"),
    (WIDE._replace(sequences=61), "bf16"),
    (COMPOSED, "bf16"),
]


@pytest.mark.parametrize(("shape", "number"), FEW, ids=str)
def test_sequences_without_a_gradient_change_nothing(shape, number):
    """Padding of the batch: trailing sequences whose upstream gradient is zero."""
    tensors, grad = _batch(shape, number)
    expected = _gradients(tensors, grad, number, shape, **PRE)
    for more in (1, 7, 300):
        other = make_data("normal", (more, *grad.shape[1:]), seed=more, dtype=grad.dtype, device=DEVICE)
        longer = tensors | {"x": torch.cat([tensors["x"], other])}
        found = _gradients(longer, torch.cat([grad, torch.zeros_like(other)]), number, shape, **PRE)
        for name, same in expected.items():
            got = found[name]
            if name == "x":
                assert not bool(got[len(grad) :].any())
                got = got[: len(grad)]
            assert_bitwise_equal(got, same, f"{name}, {more} more")


def _trained(tensors, separate):
    parameters = encoder_parameters(tensors, separate=separate)
    leaves = []

    def leaf(value):
        if isinstance(value, tuple):
            return tuple(map(leaf, value))
        if value is None:
            return None
        leaves.append(torch.nn.Parameter(value.clone()))
        leaves[-1].main_grad = torch.zeros(value.shape, device=DEVICE)
        return leaves[-1]

    return isogemm.EncoderParameters(*map(leaf, parameters)), leaves


def _accumulated(tensors, grad, cuts=(), separate=False, **options):
    own, leaves = _trained(tensors, separate)
    x = tensors["x"]
    for first, last in itertools.pairwise([0, *cuts, len(x)]):
        with poisoned_allocations():
            isogemm.encoder_layer(x[first:last], own, **options).backward(grad[first:last])
    for leaf in leaves:
        assert leaf.grad is None
        assert leaf.grad_added_to_main_grad is True
    return [leaf.main_grad for leaf in leaves]


@pytest.mark.parametrize("separate", [False, True], ids=["", "separate"])
@pytest.mark.parametrize(("shape", "number"), FEW, ids=str)
def test_micro_batches_add_up_to_the_batch(shape, number, separate):
    """Cut at multiples of the chunk, through main_grad; rounded, the sums are the plain gradients."""
    dtype, precision = NUMBERS[number]
    chunk = isogemm.encoder_chunk(*shape[1:], dtype)
    tensors, grad = _batch(shape._replace(sequences=3 * chunk + 5), number)
    options = {"nhead": shape.nhead, "precision": precision, "separate": separate, **PRE}
    whole = _accumulated(tensors, grad, **options)
    for cuts in ([chunk], [2 * chunk], [chunk, 2 * chunk, 3 * chunk]):
        for total, same in zip(_accumulated(tensors, grad, cuts, **options), whole, strict=True):
            assert_bitwise_equal(total, same, f"cut at {cuts}")
    if not separate:
        plain = _gradients(tensors, grad, number, shape, **PRE)
        names = [name for name in isogemm.EncoderParameters._fields if name in plain]
        for name, total in zip(names, whole, strict=True):
            assert_bitwise_equal(plain[name], total.to(dtype), name)


def test_the_chunk_follows_no_batch():
    for shape, number in FEW:
        chunk = isogemm.encoder_chunk(*shape[1:], NUMBERS[number][0])
        assert chunk == isogemm.encoder_chunk(*shape[1:], NUMBERS[number][0], device=torch.device("cuda", 0))
        assert chunk >= 1


def test_autograd_accumulates():
    shape, number = FEW[0]
    tensors, grad = _batch(shape, number)
    single = [_gradients(tensors | {"x": tensors["x"] * k}, grad * k, number, shape, **PRE) for k in (1, 2)]
    leaves = {name: each.clone().requires_grad_() for name, each in tensors.items() if name != "x"}
    for k in (1, 2):
        result = isogemm_encoder(tensors["x"] * k, **leaves, nhead=shape.nhead, precision="tf32", **PRE)
        result.backward(grad * k)
    for name, leaf in leaves.items():
        assert_bitwise_equal(leaf.grad, single[0][name] + single[1][name], name)


@pytest.mark.parametrize(("shape", "number"), [*FEW, (WIDE, "tf32")], ids=str)
def test_twenty_runs(shape, number):
    tensors, grad = _batch(shape, number)
    expected = _gradients(tensors, grad, number, shape, **PRE)
    for run in range(20):
        for name, found in _gradients(tensors, grad, number, shape, **PRE).items():
            assert_bitwise_equal(found, expected[name], f"{name}, run {run}")
