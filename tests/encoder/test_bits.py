"""The contract on the CPU: what a sequence's bits may depend on, and a parameter's gradient's."""

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

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VARIANTS = {
    "pre": {"norm_first": True, "activation": "gelu"},
    "post": {"norm_first": False, "activation": "relu"},
    "rms": {"norm_first": True, "activation": "silu", "norm": "rms_norm"},
    "causal": {"norm_first": True, "activation": "gelu_tanh", "is_causal": True},
}
SHAPES = [  # the issue's, of fewer sequences
    EncoderShape(*sizes)
    for sizes in (
        (40, 5, 64, 4, 256),
        (9, 42, 16, 4, 128),
        (3, 42, 128, 16, 256),
        (3, 64, 128, 16, 512),
        (13, 2, 16, 4, 4),
        (11, 1, 16, 4, 32),
        (2, 128, 256, 8, 1024),
        (11, 17, 48, 3, 100),
    )
]
SMALL = EncoderShape(9, 17, 48, 3, 100)


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype)


class Layer:
    """A layer and a batch; the result and the input's gradient of any of its sequences, in any order."""

    def __init__(self, shape, dtype, mask=None, **options):
        tensors = encoder_tensors(shape, dtype, norm=options.get("norm", "layer_norm"))
        self.x, self.mask = tensors["x"], mask
        self.grad = _normal(*self.x.shape, seed=9, dtype=dtype)
        self.call = functools.partial(
            isogemm.encoder_layer, params=encoder_parameters(tensors), nhead=shape.nhead, **options
        )

    def __call__(self, at, mask=None):
        leaf = self.x[at].clone().requires_grad_()
        result = self.call(leaf, key_padding_mask=self.mask[at] if mask is None and self.mask is not None else mask)
        (dx,) = torch.autograd.grad(result, leaf, self.grad[at])
        return result.detach(), dx


def _assert_same(actual, expected, what):
    for kind, got, same in zip(("result", "dx"), actual, expected, strict=True):
        assert_bitwise_equal(got, same, f"{kind}, {what}")


def _assert_sequences_follow_themselves(layer):
    whole, count = layer(slice(None)), len(layer.x)

    def expected(at):
        return [each[at] for each in whole]

    for i in sorted({0, count // 2, count - 1}):
        _assert_same(layer(slice(i, i + 1)), expected(slice(i, i + 1)), f"sequence {i} alone")
        pair = [i, (i + 1) % count]
        _assert_same(layer(pair), expected(pair), f"sequences {pair}")
        _assert_same(layer(pair[::-1]), expected(pair[::-1]), f"sequences {pair[::-1]}")
    many = torch.arange(2 * count) % count
    _assert_same(layer(many), expected(many), "twice each")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    _assert_same(layer(order), expected(order), "permuted")
    _assert_same(layer(slice(1, count)), expected(slice(1, count)), "without the first")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_follows_nothing_but_itself(shape, dtype):
    _assert_sequences_follow_themselves(Layer(shape, dtype, **VARIANTS["pre"]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_sequence_follows_nothing_but_itself_in_any_variant(name, dtype):
    _assert_sequences_follow_themselves(Layer(SMALL, dtype, **VARIANTS[name]))


@pytest.mark.parametrize("floating", [False, True], ids=["bool", "float"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_sequence_follows_its_own_mask(name, floating):
    """One of the sequences has no key at all."""
    mask = torch.arange(17) >= torch.tensor([[17], [3], [0], [9], [17], [16], [1], [12], [5]])
    if floating:
        mask = torch.zeros(mask.shape).masked_fill(mask, -torch.inf)
    _assert_sequences_follow_themselves(Layer(SMALL, torch.float32, mask, **VARIANTS[name]))


def test_other_data_in_the_batch():
    """Also when the others overflow."""
    layer = Layer(SMALL, torch.float32, **VARIANTS["pre"])
    whole = layer(slice(None))
    layer.x[1:] = 1e30
    _assert_same([each[:1] for each in layer(slice(None))], [each[:1] for each in whole], "beside huge ones")
    layer.x[1:] = torch.nan
    layer.grad[1:] = torch.inf
    _assert_same([each[:1] for each in layer(slice(None))], [each[:1] for each in whole], "beside NaN")


# Padding of tokens


def _assert_padding_changes_nothing(shape, dtype, padded, own, floating=False, **options):
    """Pad from `shape.tokens` tokens, where `own` may leave out some already, to each length of `padded`."""
    layer = Layer(shape, dtype, **options)
    s, t = shape.sequences, shape.tokens
    mask = torch.zeros(s, t, dtype=torch.bool) if own is None else own

    def as_given(mask):
        return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf) if floating else mask

    expected = layer(slice(None), None if own is None else as_given(mask))
    for tokens in padded:
        more = tokens - t
        wide = Layer(shape._replace(tokens=tokens), dtype, **options)
        wide.x = torch.cat([layer.x, 10 * _normal(s, more, shape.d_model, seed=tokens, dtype=dtype)], 1)
        wide.grad = torch.cat([layer.grad, torch.zeros(s, more, shape.d_model, dtype=dtype)], 1)
        found = wide(slice(None), as_given(torch.cat([mask, torch.ones(s, more, dtype=torch.bool)], 1)))
        _assert_same([each[:, :t] for each in found], expected, f"{t} tokens in {tokens}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 17, 42, 64])
def test_right_padding_changes_nothing(tokens, dtype):
    shape = EncoderShape(4, tokens, 16, 4, 32)
    padded = (tokens + 1, 64, 65, 200)
    _assert_padding_changes_nothing(shape, dtype, [each for each in padded if each > tokens], None, norm_first=True)


@pytest.mark.parametrize("floating", [False, True], ids=["bool", "float"])
@pytest.mark.parametrize("name", VARIANTS)
def test_right_padding_of_what_has_a_mask(name, floating):
    own = torch.arange(17) >= torch.tensor([[17], [3], [0], [9], [17], [16], [1], [12], [5]])
    _assert_padding_changes_nothing(SMALL, torch.float32, [18, 32, 60], own, floating, **VARIANTS[name])


def test_a_mask_of_nothing_is_no_mask():
    layer = Layer(SMALL, torch.float32, **VARIANTS["pre"])
    _assert_same(layer(slice(None), torch.zeros(9, 17, dtype=torch.bool)), layer(slice(None)), "nothing left out")
    _assert_same(layer(slice(None), torch.zeros(9, 17)), layer(slice(None)), "0 added")


# Gradients of parameters


def _gradients(tensors, grad, **options):
    return gradients_of(isogemm_encoder, tensors, grad, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_sequences_without_a_gradient_change_nothing(name, dtype):
    """Padding of the batch: trailing sequences whose upstream gradient is zero."""
    _assert_trailing_sequences_change_nothing(SMALL, dtype, (1, 7, 130), VARIANTS[name])


def _assert_trailing_sequences_change_nothing(shape, dtype, numbers, options):
    tensors = encoder_tensors(shape, dtype, norm=options.get("norm", "layer_norm"))
    grad = _normal(*tensors["x"].shape, seed=9, dtype=dtype)
    expected = _gradients(tensors, grad, nhead=shape.nhead, **options)
    count = shape.sequences
    for more in numbers:
        x = torch.cat([tensors["x"], _normal(more, shape.tokens, shape.d_model, seed=more, dtype=dtype)])
        longer = torch.cat([grad, torch.zeros_like(x[count:])])
        found = _gradients(tensors | {"x": x}, longer, nhead=shape.nhead, **options)
        for each, same in expected.items():
            if each == "x":
                assert not bool(found[each][count:].any())
                assert_bitwise_equal(found[each][:count], same, f"x, {more} more")
            else:
                assert_bitwise_equal(found[each], same, f"{each}, {more} more")


def _trained(tensors, *, separate=False, start=0.0):
    """Parameters with a main_grad each, and the layer's NamedTuple of them."""
    parameters = encoder_parameters(tensors, separate=separate)
    made = {}
    for name, each in zip(parameters._fields, parameters, strict=True):
        if isinstance(each, tuple):
            made[name] = tuple(torch.nn.Parameter(part.clone()) for part in each)
        elif each is not None:
            made[name] = torch.nn.Parameter(each.clone())
    own = isogemm.EncoderParameters(**made)
    leaves = [leaf for each in made.values() for leaf in (each if isinstance(each, tuple) else [each])]
    for leaf in leaves:
        leaf.main_grad = torch.full(leaf.shape, start)
    return own, leaves


def _accumulated(tensors, grad, cuts=(), *, separate=False, **options):
    own, leaves = _trained(tensors, separate=separate)
    x = tensors["x"]
    for first, last in itertools.pairwise([0, *cuts, len(x)]):
        isogemm.encoder_layer(x[first:last], own, **options).backward(grad[first:last])
    for leaf in leaves:
        assert leaf.grad is None
        assert leaf.grad_added_to_main_grad is True
    return [leaf.main_grad for leaf in leaves]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("sizes", [(16, 16, 4, 32), (5, 16, 2, 24)], ids=str)
def test_micro_batches_add_up_to_the_batch(sizes, separate, dtype):
    """Cut at multiples of the chunk, through main_grad."""
    chunk = isogemm.encoder_chunk(*sizes, dtype, device="cpu")
    shape = EncoderShape(2 * chunk + 3, *sizes)
    tensors = encoder_tensors(shape, dtype)
    grad = _normal(*tensors["x"].shape, seed=9, dtype=dtype)
    options = {"nhead": shape.nhead, "norm_first": True, "activation": "gelu", "separate": separate}
    whole = _accumulated(tensors, grad, **options)
    for cuts in ([chunk], [2 * chunk], [chunk, 2 * chunk]):
        for total, same in zip(_accumulated(tensors, grad, cuts, **options), whole, strict=True):
            assert_bitwise_equal(total, same, f"cut at {cuts}")


def test_the_chunk_is_a_number_of_sequences_whatever_the_batch():
    for dtype, tokens in itertools.product(DTYPES, (1, 5, 42, 128)):
        chunk = isogemm.encoder_chunk(tokens, 16, 4, 32, dtype, device="cpu")
        assert isinstance(chunk, int)
        assert chunk >= 1
        assert chunk == isogemm.encoder_chunk(tokens, 16, 4, 32, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_main_grad_is_the_gradient_not_yet_rounded(name, dtype):
    options = VARIANTS[name]
    tensors = encoder_tensors(SMALL, dtype, norm=options.get("norm", "layer_norm"))
    grad = _normal(*tensors["x"].shape, seed=9, dtype=dtype)
    plain = _gradients(tensors, grad, nhead=3, **options)
    own, _ = _trained(tensors)
    isogemm.encoder_layer(tensors["x"], own, nhead=3, **options).backward(grad)
    for field, parameter in zip(own._fields, own, strict=True):
        if parameter is not None:
            assert_bitwise_equal(parameter.main_grad.to(dtype), plain[field], field)


def test_main_grad_is_added_to():
    """One chunk: what was there plus the gradient, one addition."""
    tensors = encoder_tensors(SMALL)
    grad = _normal(*tensors["x"].shape, seed=9)
    plain = _gradients(tensors, grad, nhead=3)
    own, _ = _trained(tensors, start=0.3)
    isogemm.encoder_layer(tensors["x"], own, nhead=3).backward(grad)
    for field, parameter in zip(own._fields, own, strict=True):
        assert_bitwise_equal(parameter.main_grad, 0.3 + plain[field], field)


def test_some_have_a_main_grad_and_some_do_not():
    tensors = encoder_tensors(SMALL)
    grad = _normal(*tensors["x"].shape, seed=9)
    plain = _gradients(tensors, grad, nhead=3)
    own, _ = _trained(tensors)
    without = ("in_proj_weight", "linear1_bias", "norm2_weight")
    for field in without:
        del getattr(own, field).main_grad
    isogemm.encoder_layer(tensors["x"], own, nhead=3).backward(grad)
    for field, parameter in zip(own._fields, own, strict=True):
        found = parameter.grad if field in without else parameter.main_grad
        assert_bitwise_equal(found, plain[field], field)


def test_a_main_grad_that_does_not_fit():
    tensors = encoder_tensors(SMALL)
    for wrong in (torch.zeros(5), torch.zeros(100, 48, dtype=torch.bfloat16)):
        own, _ = _trained(tensors)
        own.linear1_weight.main_grad = wrong
        with pytest.raises((TypeError, ValueError), match=r"linear1_weight|main_grad"):
            isogemm.encoder_layer(tensors["x"], own, nhead=3).sum().backward()


def test_autograd_accumulates():
    """Two backward passes into .grad: their sum."""
    tensors = encoder_tensors(SMALL)
    batches = [(_normal(4, 17, 48, seed=seed), _normal(4, 17, 48, seed=seed + 1)) for seed in (3, 5)]
    single = [_gradients(tensors | {"x": x}, grad, nhead=3) for x, grad in batches]
    leaves = {name: each.requires_grad_() for name, each in tensors.items() if name != "x"}
    for x, grad in batches:
        isogemm_encoder(x, **leaves, nhead=3).backward(grad)
    for name, leaf in leaves.items():
        assert_bitwise_equal(leaf.grad, single[0][name] + single[1][name], name)


def test_a_layer_used_twice_gets_the_sum():
    tensors = encoder_tensors(SMALL)
    grad = _normal(*tensors["x"].shape, seed=9)

    def twice(x, **parameters):
        return isogemm_encoder(isogemm_encoder(x, **parameters, nhead=3), **parameters, nhead=3)

    first = isogemm_encoder(**tensors, nhead=3)
    last = _gradients(tensors | {"x": first}, grad, nhead=3)
    before = _gradients(tensors, last["x"], nhead=3)
    for name, found in gradients_of(twice, tensors, grad).items():
        assert_bitwise_equal(found, before[name] if name == "x" else last[name] + before[name], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_twenty_runs(dtype):
    tensors = encoder_tensors(SMALL, dtype)
    grad = _normal(*tensors["x"].shape, seed=9, dtype=dtype)
    result = isogemm_encoder(**tensors, nhead=3)
    expected = _gradients(tensors, grad, nhead=3)
    for run in range(20):
        assert_bitwise_equal(isogemm_encoder(**tensors, nhead=3), result, f"run {run}")
        for name, found in _gradients(tensors, grad, nhead=3).items():
            assert_bitwise_equal(found, expected[name], f"{name}, run {run}")


def test_threads_change_nothing():
    """torch's own kernels cut their work by the number of threads."""
    tensors = encoder_tensors(SMALL)
    grad = _normal(*tensors["x"].shape, seed=9)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(_gradients(tensors, grad, nhead=3) | {"y": isogemm_encoder(**tensors, nhead=3)})
    finally:
        torch.set_num_threads(before)
    for name, same in found[0].items():
        for other in found[1:]:
            assert_bitwise_equal(other[name], same, name)


@pytest.mark.parametrize(
    ("name", "threads"), [*(("causal", threads) for threads in (1, 2, 3, 4, 8, 16)), ("rms", 3), ("pre", 3)]
)
def test_the_contract_on_any_number_of_threads(name, threads):
    """With a hidden layer large enough for torch to split among threads."""
    shape, before = EncoderShape(9, 17, 48, 3, 200), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _assert_sequences_follow_themselves(Layer(shape, torch.float32, **VARIANTS[name]))
        _assert_padding_changes_nothing(shape, torch.float32, [18], None, **VARIANTS[name])
        _assert_trailing_sequences_change_nothing(shape, torch.float32, (7,), VARIANTS[name])
    finally:
        torch.set_num_threads(before)
