"""From an attention's tensors to its problem and launches, on a simulated GPU."""

import pytest
import torch

pytest.importorskip("triton")

from idle_gpu import idle_gpu  # noqa: F401
from torch._subclasses import FakeTensorMode

import isogemm
from isogemm.attention import api, configs, op
from isogemm.attention.describe import Call, problem_of
from isogemm.core import plan
from isogemm.core.dispatch import dispatch_log


@pytest.fixture(autouse=True)
def simulated_gpu(idle_gpu):  # noqa: F811
    return idle_gpu


def half(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def call(q, k, v, **given):
    fields = dict.fromkeys(Call._fields) | {"causal": True, "left": -1, "right": -1, "softcap": 0.0} | given
    return op.readable(Call(**fields | {"q": q, "k": k, "v": v}))


def names(launched):
    found = [name for name, *_ in launched]
    launched.clear()
    return found


def test_problem_of_transposed_tensors():
    q, k, v = half(3, 10, 8, 64).transpose(1, 2), half(3, 2, 20, 64), half(3, 2, 20, 32)
    problem = problem_of(call(q, k, v, lengths=torch.ones(3, dtype=torch.int32)), True)
    assert (problem.kind, problem.sequences, problem.queries, problem.keys) == ("dense", 3, 10, 20)
    assert (problem.heads, problem.kv_heads, problem.head, problem.value_head) == (8, 2, 64, 32)
    assert problem.q_strides == (5120, 512, 64)
    assert problem.k_strides == (2560, 64, 1280)
    assert problem.o_strides == (2560, 256, 32)
    assert problem.placed == (True, False, False)
    assert problem.scale == 0.125


def test_problem_of_a_mask():
    q, k, v = half(3, 8, 10, 64), half(3, 2, 20, 64), half(3, 2, 20, 64)
    mask = torch.zeros(3, 1, 10, 20)
    assert problem_of(call(q, k, v, mask=mask), False).mask_strides == (200, 0, 20, 1)
    assert problem_of(call(q, k, v, mask=mask), False).mask == "added"
    assert problem_of(call(q, k, v, mask=mask[:1] > 0), False).mask_strides == (0, 0, 20, 1)
    assert problem_of(call(q, k, v, mask=mask > 0), False).mask == "bool"


def test_problem_of_packed_and_paged():
    cu = torch.tensor([0, 3, 10], dtype=torch.int32)
    q, k = half(10, 8, 64), half(30, 2, 64)
    packed = problem_of(call(q, k, k, cu_q=cu, cu_k=cu), False)
    assert (packed.kind, packed.sequences, packed.queries, packed.keys) == ("packed", 2, 10, 30)
    assert packed.q_strides == (0, 512, 64)
    cache, table = half(7, 16, 2, 64), torch.zeros(2, 5, dtype=torch.int32)
    paged = problem_of(call(q, cache, cache, cu_q=cu, cu_k=cu, block_table=table), False)
    assert (paged.kind, paged.keys, paged.page, paged.table_stride) == ("paged", 80, 16, 5)
    assert paged.k_strides == (2048, 128, 64)


def test_a_growing_cache_compiles_nothing(simulated_gpu):
    cache = half(1, 8, 4096, 128)
    with torch.no_grad():
        for n in (1600, 1601):
            isogemm.attention(half(1, 32, 1, 128), cache[:, :, :n], cache[:, :, :n], causal=True)
        compiled = plan.compiled()
        for n in range(1602, 1700):
            isogemm.attention(half(1, 32, 1, 128), cache[:, :, :n], cache[:, :, :n], causal=True)
    assert plan.compiled() == compiled
    assert names(simulated_gpu) == ["_attention_kernel", "_merge_kernel"] * 100


def test_launches_of_a_training_step(simulated_gpu):
    q, k, v = (half(2, heads, 64, 64).requires_grad_() for heads in (4, 2, 2))
    sinks = torch.zeros(4, requires_grad=True)
    with dispatch_log() as log:
        o = isogemm.attention(q, k, v, causal=True, sinks=sinks)
        assert names(simulated_gpu) == ["_attention_kernel"]
        o.backward(torch.ones_like(o))
    assert names(simulated_gpu)[:2] == ["_query_gradients_kernel", "_key_gradients_kernel"]
    assert [each.op for each in log][:2] == ["attention", "attention_backward"]
    assert {each.path for each in log[:2]} == {"attention"}
    assert [x.grad.shape for x in (q, k, v, sinks)] == [x.shape for x in (q, k, v, sinks)]


def test_empty_problems_launch_nothing(simulated_gpu):
    for batch, queries, keys in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        q, k, v = half(batch, 4, queries, 64), half(batch, 2, keys, 64), half(batch, 2, keys, 64)
        o = isogemm.attention(q, k, v)
        assert o.shape == q.shape
        assert not bool(o.any())
    assert not simulated_gpu


@pytest.mark.parametrize("heads", [(32, 8), (7, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("head", [16, 64, 80, 128, 256])
def test_every_config_chosen_launches(heads, head, simulated_gpu):
    for queries, keys in ((1, 5000), (16, 16), (300, 3000), (2048, 2048)):
        q, k, v = half(1, heads[0], queries, head), half(1, heads[1], keys, head), half(1, heads[1], keys, head)
        with torch.no_grad():
            isogemm.attention(q, k, v, causal=True)
        launched = names(simulated_gpu)
        split = configs.choose(problem_of(call(q, k, v), False)).split
        assert len(launched) == 1 + split


def test_a_cache_without_pages_launches_nothing(simulated_gpu):
    cu_q, cu_k = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    cache, table = half(7, 16, 2, 64), torch.zeros(1, 0, dtype=torch.int32)
    o = isogemm.attention_varlen(half(3, 4, 64), cache, cache, cu_q, cu_k, block_table=table)
    assert not bool(o.any())
    assert not simulated_gpu


def test_strides_of_results_do_not_depend_on_copies():
    """A kernel reads a copy of some tensors; plans are found by the copy's strides."""
    for q in (half(2, 8, 5, 4).permute(0, 3, 2, 1), half(2, 5, 4, 16).transpose(1, 2)[..., ::2]):
        given = Call(**dict.fromkeys(Call._fields) | {"q": q, "k": q, "v": q})
        copied = op.readable(given)
        assert op.empty_like(given, q, 8).stride() == op.empty_like(copied, copied.q, 8).stride()
        o = isogemm.attention(q, q, q)
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(q)
            assert isogemm.attention(fake, fake, fake).stride() == o.stride()


def test_gradients_of_copied_tensors_have_their_own_strides(simulated_gpu):
    for q in (half(2, 4, 5, 8), half(2, 5, 4, 16).transpose(1, 2)[..., ::2]):
        given = call(q, q, q)
        o, lse = op.attention(*given, True)
        simulated_gpu.clear()
        dq = op.attention_backward(torch.zeros_like(o), o, lse, False, False, *Call(q, q, q, *given[3:]))[0]
        arguments = next(arguments for name, _, arguments in simulated_gpu if name == "_query_gradients_kernel")
        assert dq.stride() == (160, 40, 8, 1)
        assert arguments[37:40] == (160, 8, 40)


def test_a_call_under_autocast_is_not_known(simulated_gpu):
    q = half(2, 4, 5, 8)
    dtypes = torch.bfloat16, torch.float16
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        for dtype in dtypes:
            torch.set_autocast_dtype("cuda", dtype)
            assert isogemm.attention(q, q, q).dtype is dtype
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def test_a_window_wider_than_any_sequence_sees_all():
    """In int32, a position minus it would wrap around."""
    wide = 2**31 - 1
    assert api._window((wide, wide), False) == api._window((None, None), False) == (-1, -1)
    assert api._window(wide, True) == (-1, -1)
    assert api._window(4096, True) == (4095, -1)


def test_a_step_with_a_mask_of_two_dimensions_can_be_repeated():
    q, mask = half(2, 4, 16, 8).requires_grad_(), torch.zeros(16, 16, requires_grad=True)
    for _ in range(3):
        isogemm.attention(q, q, q, attn_mask=mask).sum().backward()
    assert mask.grad.shape == mask.shape
