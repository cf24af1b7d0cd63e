"""What the fused layer's launches are given, and what autograd makes of its gradients: no kernel runs."""

import contextlib
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from triton import knobs

from isogemm.core import device as devices
from isogemm.core import launch, plan
from isogemm.core.eager import KnownCalls
from isogemm.core.launch import BoundKernel, Launch
from isogemm.core.plan import Cache
from isogemm.encoder import api, buffers, fused
from isogemm.encoder.gradients import Gradients
from isogemm.encoder.parameters import EncoderDropout, Options
from isogemm.verify.encoder_reference import EncoderShape, encoder_parameters, encoder_tensors

SHAPE = EncoderShape(6, 5, 16, 4, 32)


class Compiled:
    """A kernel that notes what it was launched with."""

    packed_metadata, function, name = "metadata", "handle", "kernel"

    def __init__(self, kernel, launched):
        self.kernel, self.launched = kernel, launched

    def _init_handles(self):
        pass

    def run(self, programs, _y, _z, stream, function, metadata, described, enter, leave, *args):
        self.launched.append((self.kernel, stream, enter, args))

    def launch_metadata(self, grid, stream, *args):
        return args


@pytest.fixture
def launched(monkeypatch):
    found = []
    monkeypatch.setattr(Launch, "bind", lambda self, *tensors: BoundKernel(Compiled(self.kernel.__name__, found), []))
    monkeypatch.setattr(launch, "current_stream", lambda index: 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    monkeypatch.setattr(devices, "current_device", lambda: 0)
    monkeypatch.setattr(devices, "index_of", lambda device: 0)
    monkeypatch.setattr(plan, "_kernels", Cache())
    monkeypatch.setattr(fused, "_plans", Cache())
    return found


def _leaves(seed=0, dtype=torch.float32, shape=SHAPE):
    return {name: torch.nn.Parameter(each) for name, each in encoder_tensors(shape, dtype, seed=seed).items()}


def _options(leaves, precision="ieee"):
    dtype = leaves["x"].dtype
    precision = precision if dtype is torch.float32 else None
    return Options(4, True, False, "gelu", "layer_norm", 1e-5, False, precision, dtype)


def _parameters(leaves):
    return encoder_parameters({name: each for name, each in leaves.items() if name != "x"})


def _call(leaves, precision="ieee"):
    return fused.encoder_layer(leaves["x"], _parameters(leaves), buffers.ExtraInputs(), _options(leaves, precision)).y


def _step(leaves, **options):
    for leaf in leaves.values():
        leaf.grad = None
    _call(leaves, **options).sum().backward()


def _projection(launched):
    """The addresses of in_proj's weight in the forwards launched."""
    return [args[3] for name, _, _, args in launched if name == "_project_kernel" and args[10] is None]


def test_layers_that_share_a_plan_have_their_own_arguments(launched):
    one, two = _leaves(0), _leaves(1)
    with torch.no_grad():
        for _ in range(3):
            _call(one), _call(two)
    assert len(fused._plans) == 1
    assert _projection(launched) == [leaves["in_proj_weight"].data_ptr() for leaves in (one, two)] * 3


def test_arguments_are_made_once_for_the_same_addresses(launched, monkeypatch):
    prepared, prepare = [], BoundKernel.prepared
    monkeypatch.setattr(BoundKernel, "prepared", lambda self, *args: prepared.append(args) or prepare(self, *args))
    leaves = _leaves()
    parameters = _parameters(leaves).flat()
    given = buffers.ExtraInputs()
    tensors = (*given, *parameters, leaves["x"], *(torch.empty(1 << 16) for _ in range(3)), None, None)
    kind = fused.kind_of(leaves["x"], _parameters(leaves), given, _options(leaves))
    made, _ = fused._Call(leaves["x"], given, parameters, kind).plan._forwards[True]
    for _ in range(3):
        made.run(tensors)
    assert len(prepared) == 3
    assert launched[:3] == launched[3:6] == launched[6:]
    monkeypatch.setattr(launch, "current_stream", lambda index: 8)
    made.run(tensors)
    assert [stream for _, stream, _, _ in launched] == [7] * 9 + [8] * 3


def test_a_parameter_given_other_memory(launched):
    leaves = _leaves()
    addresses = []
    for _ in range(2):
        _step(leaves)
        addresses.append(leaves["in_proj_weight"].data_ptr())
        leaves["in_proj_weight"].data = leaves["in_proj_weight"].data.clone()
    assert addresses[0] != addresses[1]
    assert _projection(launched) == addresses


def test_memory_swapped_between_forward_and_backward(launched):
    leaves = _leaves()
    result = _call(leaves)
    leaves["in_proj_weight"].data = leaves["in_proj_weight"].data.clone()
    result.sum().backward()
    again = [args[3] for name, _, _, args in launched if name == "_project_kernel" and args[10] is not None]
    assert again == [leaves["in_proj_weight"].data_ptr()]


def test_gradients_of_other_types_are_of_another_kind():
    """The second place of a parameter with a main_grad is summed in float32, another's gradient is of its own type."""
    single, half = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    assert Gradients.of([single, single], (True, False)).kind != Gradients.of([single, half], (True, False)).kind


def test_an_unaligned_parameter_is_copied(launched):
    leaves = _leaves()
    leaves["in_proj_weight"].data = torch.empty(48 * 16 + 1)[1:].view(48, 16)
    _step(leaves)
    assert [address % 16 for address in _projection(launched)] == [0]


@pytest.fixture
def layer(launched, monkeypatch):
    """isogemm.encoder_layer, by the fused kernels."""
    monkeypatch.setattr(api, "_decisions", KnownCalls(32, is_plan=False))
    monkeypatch.setattr(api, "_known_layers", KnownCalls())
    monkeypatch.setattr(api, "_decide", lambda *arguments: api._Decision(api._options(*arguments), ""))
    return lambda leaves: api.encoder_layer(leaves["x"], _parameters(leaves), nhead=4, norm_first=True)


def _kinds():
    return [decision.kind for found in api._decisions._cache.values() for *_, decision in found]


def test_calls_that_differ_in_memory_alone_are_of_one_kind(launched, layer):
    one, two = _leaves(0), _leaves(1)
    for leaves in (one, two, one, two):
        layer(leaves).sum().backward()
    (kind,) = _kinds()
    assert len(kind.plans) == 2
    assert len(set(kind.plans.values())) == 1
    assert _projection(launched) == [leaves["in_proj_weight"].data_ptr() for leaves in (one, two)] * 2


def test_calls_that_differ_in_more_are_not(launched, layer):
    leaves = _leaves()
    layer(leaves)
    square = leaves["out_proj_weight"]
    address = square.data_ptr()
    square.data = square.data.t()
    layer(leaves)
    first, second = [args[2] for name, _, _, args in launched if name == "_feedforward_kernel"]
    assert first == square.data_ptr() == address != second
    for each in leaves.values():
        each.requires_grad_(False)
    assert not layer(leaves).requires_grad
    assert [len(kind.plans) for kind in _kinds()] == [1, 0, 0]  # none where a weight is copied


def test_calls_with_a_parameter_in_two_places_are_of_one_kind(layer):
    leaves = _leaves()
    leaves["norm2_weight"] = leaves["norm1_weight"]
    for _ in range(3):
        layer(leaves).sum().backward()
    (kind,) = _kinds()
    assert len(kind.plans) == 1


def test_a_known_kind_within_a_transform(layer):
    leaves = _leaves()
    layer(leaves)
    with pytest.raises(RuntimeError, match="no rule for forward-mode AD"):
        torch.func.vmap(lambda _: layer(leaves))(torch.zeros(2))


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm"])
@pytest.mark.parametrize("operand", [torch.float32, torch.bfloat16])
def test_operators_without_memory_make_what_those_with_it_do(launched, norm, operand):
    """In shape, dtype and strides; the scores given are transposed."""
    tensors, scores = encoder_tensors(SHAPE), torch.zeros(6, 4, 5, 5, dtype=operand).mT
    x, params = tensors["x"], list(_parameters(tensors))
    precision = "ieee" if operand is torch.float32 else None
    dropout = EncoderDropout(output=0.5)
    options = Options(
        4, False, False, "gelu", norm, 1e-5, False, precision, operand, dropout, norm == "batch_norm", True
    )
    given, places = (
        buffers.ExtraInputs(seed=torch.zeros(1, dtype=torch.int64), previous=scores),
        list(range(len(params))),
    )
    forward = (x, params, places, *given, [], [], [], True, *options)
    made = fused._encoder_layer(*forward)
    _assert_alike(made, fused._encoder_layer_fake(*forward))
    y, kept, of_layer, statistics, own = made
    backward = (y, of_layer, None, kept, statistics, own, x, params, places, *given.read_again, True, *options)
    _assert_alike(fused._encoder_layer_backward(*backward), fused._encoder_layer_backward_fake(*backward))


def test_operators_without_memory_make_the_factors_of_those_with_it(launched):
    tensors = encoder_tensors(SHAPE)
    x, params = tensors["x"], list(_parameters(tensors))
    factor = torch.zeros(2, 4, 6, 5, 4, dtype=torch.bfloat16)
    options = Options(4, False, False, "gelu", "layer_norm", 1e-5, False, None, torch.bfloat16, return_factors=True)
    given, places = buffers.ExtraInputs(factor0=factor, factor1=factor.clone()), list(range(len(params)))
    forward = (x, params, places, *given, [], [], [], True, *options)
    made = fused._encoder_layer(*forward)
    _assert_alike(made, fused._encoder_layer_fake(*forward))
    y, kept, _, statistics, own = made
    assert own.shape == factor.shape
    backward = (y, None, own, kept, statistics, own, x, params, places, *given.read_again, True, *options)
    found = fused._encoder_layer_backward(*backward)
    _assert_alike(found, fused._encoder_layer_backward_fake(*backward))
    assert [each.shape for each in found[1:3]] == [factor.shape] * 2


def test_factors_that_the_fused_kernels_do_not_take():
    tensors = encoder_tensors(SHAPE)
    x, params = tensors["x"], encoder_parameters({name: each for name, each in tensors.items() if name != "x"})
    options = Options(4, False, False, "gelu", "layer_norm", 1e-5, False, None, torch.bfloat16)
    by_factors = options._replace(return_factors=True)
    for given in (x, x[0]):
        assert fused.unserved(given, params, by_factors) == ""
        assert fused.unserved(given, params, by_factors, 4) == ""
        assert fused.unserved(given, params, options, 4) == ""
        assert "at most 4" in fused.unserved(given, params, options, 5)
        assert "are a result" in fused.unserved(given, params, options._replace(return_scores=True), 1)
        assert "TF32" in fused.unserved(given, params, by_factors._replace(operand=torch.float32, precision="ieee"))
    assert "no chunk" in fused.unserved(x.new_zeros(1, 129, 16), params, by_factors)


def test_whether_factors_are_taken_is_compiled():
    tensors = encoder_tensors(SHAPE)
    params = encoder_parameters({name: each for name, each in tensors.items() if name != "x"})

    def asked(x):
        return x if not fused.unserved_factors(x, params, 4, torch.bfloat16, None) else 0 * x

    x = torch.ones(3, 5, 16)
    assert torch.compile(asked, fullgraph=True, backend="eager")(x).equal(x)


def _assert_alike(made, fakes):
    for each, fake in zip(made, fakes, strict=True):
        assert (each.shape, each.dtype, each.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_profilers_hear_launches_that_were_prepared(launched, monkeypatch):
    leaves = _leaves()
    _step(leaves)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", print)
    count = len(launched)
    _step(leaves)
    assert [enter for _, _, enter, _ in launched] == [None] * count + [print] * count


def test_the_tensors_device_is_made_current(launched, monkeypatch):
    current = [1]

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(devices, "current_device", lambda: current[-1])
    monkeypatch.setattr(launch, "current_stream", lambda index: 10 * index + current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    _step(_leaves())
    assert {stream for _, stream, _, _ in launched} == {0}
    assert current == [1]


def test_nothing_is_compiled_while_a_graph_is_captured(launched, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="nothing can be compiled while a CUDA graph is captured"):
        _call(_leaves())
    assert launched == []


# Gradients


def _storage(x):
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_taken_as_they_are(launched, monkeypatch, dtype):
    """autograd copies none of them: they are the memory that the launch wrote to."""
    leaves = _leaves(dtype=dtype)
    _step(leaves)
    parameters = [each for name, each in leaves.items() if name != "x"]
    (sums,) = [args for name, _, _, args in launched if name == "_sum_chunks_kernel"]
    assert {each.grad.data_ptr() for each in parameters} == {each for each in sums[2:18] if each is not None}
    assert len({_storage(each.grad) for each in parameters}) == 1
    assert _storage(leaves["x"].grad) != _storage(parameters[0].grad)
    for each in parameters:
        assert each.grad.shape == each.shape
        assert each.grad.dtype == dtype
        assert each.grad.is_contiguous()
        assert each.grad.data_ptr() % 16 == 0
    ends = sorted((each.grad.data_ptr(), each.grad.nbytes) for each in parameters)
    assert all(at + size <= after for (at, size), (after, _) in pairwise(ends))


def test_gradients_change_one_at_a_time(launched):
    leaves = _leaves()
    _step(leaves)
    parameters = [each for name, each in leaves.items() if name != "x"]
    for each in parameters:
        each.grad.zero_()
    before = [each.grad._version for each in parameters]
    parameters[0].grad.add_(1.0)
    assert [each.grad._version for each in parameters[1:]] == before[1:]
    assert not any(each.grad.any() for each in parameters[1:])
    kept = parameters[0].grad
    _call(leaves).sum().backward()
    assert parameters[0].grad is kept  # added to, not replaced
    torch.optim.SGD(parameters, lr=0.1, foreach=True).step()
    parameters[0].grad = None
    assert parameters[1].grad is not None


def test_odd_sizes_have_memory_of_their_own(launched):
    shape = EncoderShape(2, 3, 6, 2, 5)
    leaves = _leaves(shape=shape)
    options = Options(2, True, False, "gelu", "layer_norm", 1e-5, False, "ieee", torch.float32)
    fused.encoder_layer(leaves["x"], _parameters(leaves), buffers.ExtraInputs(), options).y.sum().backward()
    assert len({_storage(each.grad) for each in leaves.values()}) == len(leaves)


def test_frozen_and_accumulated_parameters_are_left_out(launched):
    leaves = _leaves()
    leaves["linear2_weight"].requires_grad_(False)
    total = leaves["linear1_weight"].main_grad = torch.zeros(32, 16)
    _step(leaves)
    (sums,) = [args for name, _, _, args in launched if name == "_sum_chunks_kernel"]
    written = [each for each in sums[2:18] if each is not None]
    assert total.data_ptr() in written
    assert len(written) == 11
    assert leaves["linear1_weight"].grad is None
    assert leaves["linear2_weight"].grad is None
    assert leaves["linear1_bias"].grad is not None


def test_only_xs_gradient(launched):
    leaves = _leaves()
    for name, each in leaves.items():
        each.requires_grad_(name == "x")
    _step(leaves)
    assert leaves["x"].grad is not None
    names = [name for name, *_ in launched[3:]]
    assert names == [
        "_feedforward_backward_kernel", "_project_kernel", "_attention_backward_kernel", "_input_grad_kernel",
    ]  # fmt: skip


def test_a_parameter_changed_between_forward_and_backward(launched):
    leaves = _leaves()
    result = _call(leaves)
    with torch.no_grad():
        leaves["linear1_weight"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_a_graph_kept_for_another_backward(launched):
    leaves = _leaves()
    result = _call(leaves).sum()
    result.backward(retain_graph=True)
    first = leaves["linear1_weight"].grad
    leaves["linear1_weight"].grad = None
    result.backward()
    assert leaves["linear1_weight"].grad.data_ptr() != first.data_ptr()
    with pytest.raises(RuntimeError, match="second time"):
        result.backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_main_grad_under_checkpointing(launched, use_reentrant):
    leaves = _leaves()
    total = leaves["linear1_weight"].main_grad = torch.zeros(32, 16)
    x = leaves["x"]
    checkpoint(lambda x: _call(leaves | {"x": x}), x, use_reentrant=use_reentrant).sum().backward()
    (sums,) = [args for name, _, _, args in launched if name == "_sum_chunks_kernel"]
    assert total.data_ptr() in sums[2:18]
    assert leaves["linear1_weight"].grad is None
    assert x.grad is not None
