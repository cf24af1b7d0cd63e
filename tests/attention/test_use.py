"""How attention is called on the CPU: torch.compile, opcheck, autocast, gradcheck, strides, empty sizes, errors."""

import pytest
import torch
from attention_cases import Case, Pages, attend, attend_packed, offsets, plain_attention
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def _normal(*shape, seed=0, dtype=torch.bfloat16):
    return make_data("normal", shape, seed=seed, dtype=dtype)


def _operands(batch=2, heads=4, kv_heads=2, queries=9, keys=13, head=8, value_head=8, dtype=torch.bfloat16):
    """q, k, v."""
    shapes = (heads, queries, head), (kv_heads, keys, head), (kv_heads, keys, value_head)
    return [_normal(batch, *shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def _packed_operands(queries=(5, 1, 9), keys=(5, 12, 9), dtype=torch.bfloat16):
    """q, k, v, cu_seqlens_q, cu_seqlens_k."""
    q = _normal(sum(queries), 4, 8, dtype=dtype)
    k, v = (_normal(sum(keys), 2, 8, seed=seed, dtype=dtype) for seed in (1, 2))
    return q, k, v, offsets(queries, "cpu"), offsets(keys, "cpu")


def _leaves(tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def _options(dtype=torch.bfloat16, queries=9, keys=13):
    """Keyword arguments of calls, by what they have."""
    lengths = {"kv_lengths": torch.tensor([13, 7]), "kv_starts": torch.tensor([3, 0], dtype=torch.int32)}
    masks = _normal(2, 1, queries, keys, seed=7, dtype=dtype)
    return {
        "full": {},
        "causal": {"causal": True, "scale": 0.3},
        "window, sinks, softcap": {
            "causal": True, "window": 4, "sinks": _normal(4, seed=8, dtype=dtype), "softcap": 3.0,
        },
        "window of two sides": {"window": (3, 2)},
        "lengths": {"causal": True, **lengths, "kv_offsets": torch.tensor([0, 5])},
        "bool mask": {"attn_mask": masks > -1},
        "mask": {"causal": True, "attn_mask": masks},
    }  # fmt: skip


NAMES = tuple(_options())


def _gradients(function, leaves, grad_of=torch.ones_like):
    result = function(*leaves)
    return result, *torch.autograd.grad(result, leaves, grad_of(result))


# torch.compile


@pytest.mark.parametrize("name", NAMES)
def test_compiled_has_the_bits_of_eager(name):
    options = _options()[name]
    differentiated = [n for n, x in options.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    fixed = {n: x for n, x in options.items() if n not in differentiated}

    def call(q, k, v, *rest):
        return isogemm.attention(q, k, v, **fixed, **dict(zip(differentiated, rest, strict=True)))

    leaves = _leaves([*_operands(), *(options[n] for n in differentiated)])
    leaves[0] = leaves[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, found = _gradients(call, leaves), _gradients(compiled, leaves)
    assert found[0].stride() == expected[0].stride()
    for got, same in zip(found, expected, strict=True):
        assert_bitwise_equal(got, same, name)
    with torch.no_grad():
        assert_bitwise_equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves), expected[0], name)


def test_compiled_varlen():
    def call(q, k, v, cu_queries, cu_keys):
        return isogemm.attention_varlen(q, k, v, cu_queries, cu_keys, causal=True)

    *operands, cu_queries, cu_keys = _packed_operands()
    leaves = _leaves(operands)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = _gradients(lambda *x: call(*x, cu_queries, cu_keys), leaves)
    found = _gradients(lambda *x: compiled(*x, cu_queries, cu_keys), leaves)
    for got, same in zip(found, expected, strict=True):
        assert_bitwise_equal(got, same)


@pytest.mark.parametrize("training", [False, True])
def test_one_graph_for_any_sizes(training):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(isogemm.attention, fullgraph=True, dynamic=True, backend=counter)
    for batch, queries, keys in ((3, 9, 13), (7, 70, 75), (5, 3, 140)):
        leaves = [x.requires_grad_(training) for x in _operands(batch, queries=queries, keys=keys)]
        result = compiled(*leaves, causal=True)
        expected = isogemm.attention(*leaves, causal=True)
        assert_bitwise_equal(result, expected)
        if training:
            for got, same in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (result, expected)), strict=True):
                assert_bitwise_equal(got, same)
    assert counter.frame_count == 1


def test_exported():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return isogemm.attention(q, k, v, causal=True, window=5)

    tokens = torch.export.Dim("tokens", min=2, max=512)
    shapes = [{2: tokens}] * 3
    exported = torch.export.export(Model(), tuple(_operands(queries=13)), dynamic_shapes=tuple(shapes))
    for count in (13, 100):
        operands = _operands(queries=count, keys=count)
        assert_bitwise_equal(exported.module()(*operands), Model()(*operands))


# operators


class _Recorded(TorchDispatchMode):
    """Notes calls of isogemm's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if getattr(func, "namespace", "") == "isogemm":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _recorded(call):
    with _Recorded() as recorded:
        result = call()
        if result.requires_grad:
            result.float().square().sum().backward()
    assert any(func.name().startswith("isogemm::attention") for func, *_ in recorded.calls)
    return [
        (func, args, kwargs) for func, args, kwargs in recorded.calls if func.name().startswith("isogemm::attention")
    ]


@pytest.mark.parametrize("name", [*NAMES, "varlen", "paged"])
def test_opcheck(name):
    """Every operator that a call and its backward use, as it was called; the forward's autograd too."""
    if name == "varlen":
        *operands, cu_queries, cu_keys = _packed_operands(dtype=torch.float32)
        leaves = _leaves(operands)
        calls = _recorded(lambda: isogemm.attention_varlen(*leaves, cu_queries, cu_keys, causal=True))
    elif name == "paged":
        calls = _recorded(_paged_call)
    else:
        leaves, options = _leaves(_operands(dtype=torch.float32)), _options(torch.float32)[name]
        calls = _recorded(lambda: isogemm.attention(*leaves, **options))
    for func, args, kwargs in calls:
        args = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)
        torch.library.opcheck(func, args, kwargs, test_utils=("test_schema", "test_faketensor"))
    func, args, kwargs = calls[0]
    if name != "paged":
        args = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda x: x.detach().clone().requires_grad_(x.is_floating_point()), args
        )
        torch.library.opcheck(func, args, kwargs, atol=1e-5, rtol=1e-4)


def _paged_call():
    case = Case("ieee", 4, 2, 8)
    sequences = [case.sequence(20), case.sequence(7, seed=1)]
    pages = Pages.of(case, sequences, 4, garbage=0.0)
    q = torch.cat([each.q[:, -2:].transpose(0, 1) for each in sequences])
    counts = offsets([2, 2], "cpu"), offsets([20, 7], "cpu")
    return isogemm.attention_varlen(q, pages.k, pages.v, *counts, causal=True, block_table=pages.table)


def test_fake_tensors():
    """Shapes, dtypes and strides, of any strides of the queries."""
    for queries in (_operands()[0], _operands()[0].transpose(1, 2).contiguous().transpose(1, 2), _operands()[0].mT):
        q = queries if queries.shape[-1] == 8 else queries.contiguous().mT
        _, k, v = _operands(value_head=5)
        real = isogemm.attention(q, k, v)
        with FakeTensorMode() as mode:
            fake = isogemm.attention(*(mode.from_tensor(x) for x in (q, k, v)))
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_meta_tensors():
    result = isogemm.attention(*(x.to("meta") for x in _operands(value_head=5)), causal=True)
    assert result.shape == (2, 4, 9, 5)
    assert result.device.type == "meta"


def test_dispatch_log():
    leaves = _leaves(_operands())
    with isogemm.dispatch_log() as log:
        isogemm.attention(*leaves, causal=True).sum().backward()
        isogemm.attention(*(x.detach().double() for x in leaves))
    ops = [entry.op for entry in log]
    assert "attention" in ops
    assert "attention_backward" in ops
    assert log[-1].path == "torch"
    assert all(entry.path != "torch" for entry in log[:-1])
    assert "bfloat16" in log[0].problem


# autocast, checkpoints, gradcheck


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    leaves = _leaves(_operands(dtype=torch.float32))
    with torch.autocast("cpu", dtype):
        result = isogemm.attention(*leaves, causal=True)
        mixed = isogemm.attention(leaves[0], *(x.to(dtype) for x in leaves[1:]), causal=True)
        theirs = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        with torch.autocast("cpu", enabled=False):
            plain = isogemm.attention(*leaves, causal=True)
    expected = isogemm.attention(*(x.detach().to(dtype) for x in leaves), causal=True)
    assert result.dtype == theirs.dtype == dtype
    assert_bitwise_equal(result, expected)
    assert_bitwise_equal(mixed, expected)
    assert plain.dtype == torch.float32
    found = torch.autograd.grad(result.sum(), leaves)
    assert [x.dtype for x in found] == [torch.float32] * 3


def test_autocast_of_packed_sequences():
    *operands, cu_queries, cu_keys = _packed_operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = isogemm.attention_varlen(*operands, cu_queries, cu_keys, causal=True)
    half = [x.bfloat16() for x in operands]
    assert_bitwise_equal(result, isogemm.attention_varlen(*half, cu_queries, cu_keys, causal=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    leaves = _leaves(_operands())

    def call(q, k, v):
        return isogemm.attention(q, k, v, causal=True)

    expected = _gradients(call, leaves)[1:]
    checkpoint(call, *leaves, use_reentrant=use_reentrant).sum().backward()
    for leaf, same in zip(leaves, expected, strict=True):
        assert_bitwise_equal(leaf.grad, same)


def test_float64_has_lengths_beyond_the_buffer_end_there():
    lengths = torch.tensor([99, 7])
    found, expected = (
        isogemm.attention(*_operands(dtype=torch.float64), causal=True, window=3, kv_lengths=each)
        for each in (lengths, lengths.clamp(max=13))
    )
    assert_bitwise_equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    options = _options(torch.float64, queries=5, keys=7)[name]
    if "kv_lengths" in options:
        options |= {"kv_lengths": torch.tensor([7, 4])}
    differentiated = [n for n, x in options.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]

    def call(q, k, v, *rest):
        return isogemm.attention(q, k, v, **options | dict(zip(differentiated, rest, strict=True)))

    operands = _operands(queries=5, keys=7, head=3, value_head=4, dtype=torch.float64)
    leaves = _leaves([*operands, *(options[n] for n in differentiated)])
    assert gradcheck(call, tuple(leaves), fast_mode=True)
    expected = plain_attention(*operands, **options)
    torch.testing.assert_close(isogemm.attention(*operands, **options), expected)


def test_gradcheck_of_packed_sequences():
    *operands, cu_queries, cu_keys = _packed_operands(dtype=torch.float64)
    sinks = _normal(4, seed=8, dtype=torch.float64)

    def call(q, k, v, sinks):
        return isogemm.attention_varlen(q, k, v, cu_queries, cu_keys, causal=True, window=6, softcap=4.0, sinks=sinks)

    assert gradcheck(call, tuple(_leaves([*operands, sinks])), fast_mode=True)


def test_gradient_of_sinks_of_packed_sequences():
    """In fp32, within the errors of sums of two hundred terms of what it is in float64."""
    *operands, cu_queries, cu_keys = _packed_operands((50, 1, 9), (50, 12, 9), dtype=torch.float32)
    sinks = _normal(4, seed=8, dtype=torch.float32)

    def call(q, k, v, sinks):
        return isogemm.attention_varlen(q, k, v, cu_queries, cu_keys, causal=True, sinks=sinks)

    found = _gradients(call, _leaves([*operands, sinks]))
    expected = _gradients(call, _leaves(x.double() for x in [*operands, sinks]))
    for got, same in zip(found, expected, strict=True):
        assert got.dtype == torch.float32
        assert float((got - same).abs().max()) <= 200 * 2**-24 * float(same.abs().max())


def test_only_the_gradients_that_are_asked_for():
    operands = _operands()
    whole = _gradients(lambda *x: isogemm.attention(*x, causal=True), _leaves(operands))[1:]
    for wanted in ((0,), (1,), (2,), (0, 2)):
        tensors = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(operands)]
        isogemm.attention(*tensors, causal=True).sum().backward()
        for i, x in enumerate(tensors):
            if i in wanted:
                assert_bitwise_equal(x.grad, whole[i])
            else:
                assert x.grad is None


# sizes


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"queries": 0}, {"keys": 0}, {"queries": 0, "keys": 0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_empty_sizes(sizes, dtype):
    """Zeros where there are no keys, and gradients that are zero."""
    sinks = _normal(4, dtype=dtype).requires_grad_()
    for options in ({}, {"causal": True, "window": 3}, {"sinks": sinks}):
        leaves = _leaves(_operands(value_head=5, dtype=dtype, **sizes))
        result = isogemm.attention(*leaves, **options)
        assert result.shape == (*leaves[0].shape[:3], 5)
        assert not bool(result.any())
        result.sum().backward()
        for leaf in leaves:
            assert leaf.grad.shape == leaf.shape
            assert not bool(leaf.grad.any())
    assert not bool(sinks.grad.any())


def test_empty_packs():
    for queries, keys in (((), ()), ((0,), (0,)), ((0, 0), (5, 3)), ((3, 0), (0, 0))):
        *operands, cu_queries, cu_keys = _packed_operands(queries, keys)
        leaves = _leaves(operands)
        result = isogemm.attention_varlen(*leaves, cu_queries, cu_keys, causal=True)
        assert result.shape == (sum(queries), 4, 8)
        assert not bool(result.any())
        result.sum().backward()
        assert not any(bool(leaf.grad.any()) for leaf in leaves)


def test_an_integer_window_and_lengths_of_either_dtype():
    q, k, v = _operands()
    lengths = torch.tensor([13, 7])
    expected = isogemm.attention(q, k, v, causal=True, kv_lengths=lengths)
    assert_bitwise_equal(isogemm.attention(q, k, v, causal=True, kv_lengths=lengths.int()), expected)


def test_precision():
    """Refused but for fp32: bf16 products have one kind of arithmetic."""
    case = Case("ieee", 2, 1, 16)
    q, k, v, _ = (x[None] for x in case.sequence(20))
    assert_bitwise_equal(isogemm.attention(q, k, v, precision="ieee"), attend(case, q, k, v, causal=False)[0])
    assert isogemm.attention(q, k, v, precision="tf32").dtype == torch.float32
    with pytest.raises(ValueError, match="precision"):
        isogemm.attention(*(x.bfloat16() for x in (q, k, v)), precision="tf32")


# errors


def _dense_errors():
    q, k, v = _operands()
    return {
        "q of three axes": ({"q": q[0]}, "q"),
        "k of three axes": ({"k": k[0]}, "k"),
        "heads that groups do not share": ({"q": q[:, :3]}, "head"),
        "other batches": ({"k": k[:1], "v": v[:1]}, "k|batch"),
        "other head sizes": ({"k": k[..., :5]}, "k"),
        "fewer values than keys": ({"v": v[:, :, :5]}, "v"),
        "fewer value heads": ({"v": v[:, :1]}, "v"),
        "two dtypes": ({"k": k.half()}, "k|dtype"),
        "integers": ({"q": q.int(), "k": k.int(), "v": v.int()}, "q|dtype"),
        "large heads": ({"q": _normal(2, 4, 9, 257), "k": _normal(2, 2, 13, 257)}, "256"),
        "large value heads": ({"v": _normal(2, 2, 13, 264)}, "256"),
        "no head size": ({"q": q[..., :0], "k": k[..., :0]}, "q|head"),
        "a negative scale": ({"scale": -1.0}, "scale"),
        "a scale of zero": ({"scale": 0.0}, "scale"),
        "a window that is not causal": ({"window": 4}, "window"),
        "an empty window": ({"window": 0, "causal": True}, "window"),
        "a negative window": ({"window": (-1, 3)}, "window"),
        "three sides": ({"window": (1, 2, 3)}, "window"),
        "a negative softcap": ({"softcap": -2.0}, "softcap"),
        "too many sinks": ({"sinks": _normal(5)}, "sinks"),
        "sinks of two axes": ({"sinks": _normal(4, 1)}, "sinks"),
        "integer sinks": ({"sinks": torch.ones(4, dtype=torch.int64)}, "sinks"),
        "a mask of other keys": ({"attn_mask": torch.ones(2, 1, 9, 12, dtype=torch.bool)}, "attn_mask"),
        "a mask of other heads": ({"attn_mask": torch.ones(2, 3, 9, 13, dtype=torch.bool)}, "attn_mask"),
        "an integer mask": ({"attn_mask": torch.ones(2, 1, 9, 13, dtype=torch.int64)}, "attn_mask"),
        "lengths of floats": ({"kv_lengths": torch.tensor([3.0, 4.0])}, "kv_lengths"),
        "too few lengths": ({"kv_lengths": torch.tensor([3])}, "kv_lengths"),
        "too many starts": ({"kv_starts": torch.tensor([0, 0, 0])}, "kv_starts"),
        "offsets of two axes": ({"kv_offsets": torch.tensor([[0, 0]])}, "kv_offsets"),
        "lengths in a list": ({"kv_lengths": [3, 4]}, "kv_lengths"),
        "an unknown precision": ({"precision": "fast"}, "precision"),
    }


@pytest.mark.parametrize("what", _dense_errors())
def test_errors_name_the_argument(what):
    changes, name = _dense_errors()[what]
    q, k, v = _operands()
    arguments = {"q": q, "k": k, "v": v} | changes
    with pytest.raises((ValueError, TypeError), match=name):
        isogemm.attention(**arguments)
    with torch.no_grad(), pytest.raises((ValueError, TypeError), match=name):
        isogemm.attention(**arguments)


def _packed_errors():
    q, k, v, cu_queries, cu_keys = _packed_operands()
    return {
        "q of four axes": ({"q": q[None]}, "q"),
        "offsets of floats": ({"cu_seqlens_q": cu_queries.float()}, "cu_seqlens_q"),
        "other numbers of sequences": ({"cu_seqlens_k": cu_keys[:-1]}, "cu_seqlens"),
        "offsets of two axes": ({"cu_seqlens_k": cu_keys[None]}, "cu_seqlens_k"),
        "heads that groups do not share": ({"q": q[:, :3]}, "head"),
        "a table of floats": ({"k": k[None], "v": v[None], "block_table": torch.zeros(3, 1)}, "block_table"),
        "a table of other sequences": (
            {"k": k[None], "v": v[None], "block_table": torch.zeros(2, 1, dtype=torch.int32)}, "block_table",
        ),
        "pages without a table": ({"k": k[None], "v": v[None]}, "k|block_table"),
        "tokens of no sequence": ({"cu_seqlens_q": cu_queries[:1], "cu_seqlens_k": cu_keys[:1]}, "cu_seqlens_q"),
        "a window that is not causal": ({"window": 4}, "window"),
        "too few offsets": ({"kv_offsets": torch.tensor([0])}, "kv_offsets"),
    }  # fmt: skip


@pytest.mark.parametrize("what", _packed_errors())
def test_errors_of_packed_calls_name_the_argument(what):
    changes, name = _packed_errors()[what]
    q, k, v, cu_queries, cu_keys = _packed_operands()
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_queries, "cu_seqlens_k": cu_keys} | changes
    with pytest.raises((ValueError, TypeError), match=name):
        isogemm.attention_varlen(**arguments)


def test_a_paged_cache_has_no_gradient():
    """It raises where one is wanted, in the call or in its backward, and serves where none is."""
    expected = _paged_call()
    case = Case("ieee", 4, 2, 8)
    sequences = [case.sequence(20), case.sequence(7, seed=1)]
    pages = Pages.of(case, sequences, 4)
    q = torch.cat([each.q[:, -2:].transpose(0, 1) for each in sequences])
    counts = offsets([2, 2], "cpu"), offsets([20, 7], "cpu")
    (found,) = attend_packed(case, q, pages.k, pages.v, *counts, block_table=pages.table)
    assert_bitwise_equal(found, expected)
    with pytest.raises((RuntimeError, ValueError), match=r"paged|block_table"):
        isogemm.attention_varlen(q.requires_grad_(), pages.k, pages.v, *counts, causal=True, block_table=pages.table)


def test_forward_mode_is_refused():
    q, k, v = _operands(dtype=torch.float32)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises((RuntimeError, NotImplementedError), match=r"forward.mode|jvp"):
            isogemm.attention(dual, k, v)
