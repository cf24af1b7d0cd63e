"""The encoder layer under torch's machinery on the CPU: torch.compile, checkpointing, autocast, second derivatives."""

import pytest
import torch
from encoder_oracle import assert_encoder_no_worse, isogemm_encoder
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.encoder_reference import EncoderShape, encoder_parameters, encoder_tensors, torch_encoder
from isogemm.verify.inputs import make_data

SHAPE = EncoderShape(6, 9, 32, 4, 40)
VARIANTS = {
    "pre": {"norm_first": True, "activation": "gelu"},
    "post": {"activation": "gelu_tanh", "is_causal": True},
    "separate": {"norm_first": True, "activation": "silu", "norm": "rms_norm", "separate": True},
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype)


def _layer(name="pre", **more):
    """A function of x, parameters and mask, and leaves for it."""
    options = VARIANTS[name] | more
    separate = options.pop("separate", False)

    def layer(x, parameters, mask=None):
        return isogemm.encoder_layer(x, parameters, nhead=4, key_padding_mask=mask, **options)

    tensors = encoder_tensors(SHAPE, norm=options.get("norm", "layer_norm"))
    x = tensors.pop("x").requires_grad_()
    return layer, x, _leaves(encoder_parameters(tensors, separate=separate))


def _leaves(parameters):
    """The same parameters, each a leaf of its own."""

    def leaf(value):
        if isinstance(value, tuple):
            return tuple(map(leaf, value))
        return None if value is None else torch.nn.Parameter(value.detach().clone())

    return isogemm.EncoderParameters(*map(leaf, parameters))


def _flat(parameters):
    return [
        each for value in parameters for each in (value if isinstance(value, tuple) else (value,)) if each is not None
    ]


def _loss(layer, x, parameters, *rest):
    result = layer(x, parameters, *rest)
    return result, torch.autograd.grad(result.square().sum(), [x, *_flat(parameters)])


def _assert_same(actual, expected):
    assert_bitwise_equal(actual[0], expected[0])
    for got, same in zip(actual[1], expected[1], strict=True):
        assert_bitwise_equal(got, same)


def _padding():
    return torch.arange(SHAPE.tokens) >= torch.tensor([[9], [3], [0], [1], [8], [9]])


@pytest.mark.parametrize("name", VARIANTS)
def test_compiled(name):
    layer, x, parameters = _layer(name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    _assert_same(_loss(compiled, x, parameters), _loss(layer, x, parameters))


@pytest.mark.parametrize("floating", [False, True], ids=["bool", "float"])
def test_compiled_with_a_mask(floating):
    layer, x, parameters = _layer()
    mask = torch.zeros(SHAPE[:2]).masked_fill(_padding(), -torch.inf) if floating else _padding()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    _assert_same(_loss(compiled, x, parameters, mask), _loss(layer, x, parameters, mask))


def test_one_graph_for_any_number_of_sequences():
    """And one more on the composed path for up to 64 tokens, whose sums are one block, as for a biased mlp."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    layer, _, parameters = _layer()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for sequences in (6, 2, 31):
        x = _normal(sequences, 9, 32, seed=sequences).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        _assert_same(_loss(compiled, x, parameters), _loss(layer, x, parameters))
    assert counter.frame_count == 2


def test_compiled_inference():
    layer, x, parameters = _layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_bitwise_equal(compiled(x, parameters), layer(x, parameters))


def test_main_grad_in_a_graph():
    found = []
    for compile_it in (True, False):
        layer, x, parameters = _layer()
        for each in _flat(parameters):
            each.main_grad = torch.ones(each.shape)
        call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compile_it else layer
        for _ in range(2):
            call(x, parameters).square().sum().backward()
        assert all(each.grad is None for each in _flat(parameters))
        found.append([each.main_grad for each in _flat(parameters)])
    for got, same in zip(*found, strict=True):
        assert_bitwise_equal(got, same)


def test_the_log_changes_no_graph():
    layer, x, parameters = _layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = compiled(x, parameters)
        with isogemm.dispatch_log() as log:
            assert_bitwise_equal(compiled(x, parameters), expected)
    assert log


class Recorded(TorchDispatchMode):
    """The calls of isogemm's operators, with copies of what they were given."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "isogemm":
            copied = tree_map_only(torch.Tensor, lambda each: each.detach().clone(), (args, kwargs or {}))
            self.calls.append((func, *copied))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["pre", "separate"])
def test_opcheck(name):
    """Every operator that a call goes through, by what it was given there, forward and backward."""
    layer, x, parameters = _layer(name)
    with Recorded() as recorded:
        layer(x, parameters, _padding()).sum().backward()
    operators = {func: (args, kwargs) for func, args, kwargs in recorded.calls}  # one call of each
    assert any("encoder" in str(func) or "attention" in str(func) for func in operators), list(operators)
    for func, (args, kwargs) in operators.items():
        torch.library.opcheck(func, args, kwargs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["pre", "post"])
def test_autocast(name, dtype):
    """Products in autocast's dtype; x, the result and the gradients in theirs, no worse than torch's."""
    tensors = encoder_tensors(SHAPE)
    assert_encoder_no_worse(tensors, nhead=4, autocast=dtype, **VARIANTS[name])
    with torch.autocast("cpu", dtype):
        result = isogemm_encoder(**tensors, nhead=4, **VARIANTS[name])
    assert result.dtype == torch.float32
    plain = isogemm_encoder(**tensors, nhead=4, **VARIANTS[name])
    assert bool((result != plain).any()), "products were not in 16 bits"


def test_autocast_in_a_graph():
    layer, x, parameters = _layer()

    def cast(x, parameters):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x, parameters)

    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    _assert_same(_loss(compiled, x, parameters), _loss(cast, x, parameters))


def test_autocast_of_what_is_16_bit_already():
    """x keeps its dtype, and parameters of other dtypes serve; a float mask too."""
    tensors = encoder_tensors(SHAPE)
    mask = torch.zeros(SHAPE[:2]).masked_fill(_padding(), -torch.inf)
    with torch.autocast("cpu", torch.bfloat16):
        result = isogemm_encoder(**tensors | {"x": tensors["x"].bfloat16()}, nhead=4, key_padding_mask=mask)
    assert result.dtype == torch.bfloat16
    assert bool(result.isfinite().all())


def test_autocast_turned_off():
    tensors = encoder_tensors(SHAPE)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        result = isogemm_encoder(**tensors, nhead=4)
    assert_bitwise_equal(result, isogemm_encoder(**tensors, nhead=4))


def test_backward_outside_autocast_has_the_bits_of_inside():
    found = []
    for inside in (True, False):
        layer, x, parameters = _layer()
        leaves = [x, *_flat(parameters)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(x, parameters).square().sum()
            if inside:
                found.append(torch.autograd.grad(loss, leaves))
        if not inside:
            found.append(torch.autograd.grad(loss, leaves))
    for got, same in zip(*found, strict=True):
        assert_bitwise_equal(got, same)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", ""])
def test_checkpointing(use_reentrant, autocast):
    """Recomputed, the bits are those of the first time."""
    found = []
    for saved in (True, False):
        layer, x, parameters = _layer()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = checkpoint(layer, x, parameters, use_reentrant=use_reentrant) if saved else layer(x, parameters)
        result.square().sum().backward()
        found.append([result, x.grad, *(each.grad for each in _flat(parameters))])
    for got, same in zip(*found, strict=True):
        assert_bitwise_equal(got, same)


def test_checkpointing_in_a_graph():
    layer, x, parameters = _layer()

    def saved(x, parameters):
        return checkpoint(layer, x, parameters, use_reentrant=False)

    compiled = torch.compile(saved, fullgraph=True, backend="aot_eager")
    _assert_same(_loss(compiled, x, parameters), _loss(layer, x, parameters))


# Backward more than once


def test_the_graph_kept_for_another_backward():
    layer, x, parameters = _layer()
    leaves = [x, *_flat(parameters)]
    loss = layer(x, parameters).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for got, same in zip(torch.autograd.grad(loss, leaves), first, strict=True):
        assert_bitwise_equal(got, same)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("name", ["pre", "post"])
def test_second_derivatives_are_refused(name):
    leaves = {each: tensor.requires_grad_() for each, tensor in encoder_tensors(SHAPE).items()}
    loss = isogemm_encoder(**leaves, nhead=4, **VARIANTS[name]).square().sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, leaves.values(), create_graph=True)


def test_a_stack():
    layers = [encoder_tensors(SHAPE, seed=seed) for seed in range(3)]

    def stack(function):
        x = y = layers[0]["x"].clone().requires_grad_()
        for tensors in layers:
            y = function(**tensors | {"x": y}, nhead=4, norm_first=True)
        return y, *torch.autograd.grad(y.square().sum(), x)

    for got, same in zip(stack(isogemm_encoder), stack(torch_encoder), strict=True):
        torch.testing.assert_close(got, same, rtol=1e-4, atol=1e-4)
