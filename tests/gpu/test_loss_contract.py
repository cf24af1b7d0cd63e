"""linear_logprob and linear_cross_entropy on the GPU: the bits of log_softmax(linear(...)), without its memory."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from loss_cases import IGNORED, Head, plain_cross_entropy, plain_logprob, plain_logprob_and_entropy, sum_of_losses
from promises.rows import assert_batch, assert_chunks, assert_decode, assert_padding
from torch._dynamo.testing import CompileCounterWithBackend

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import LAYOUTS, make_data, with_layout

DEVICE = "cuda"
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32]
KINDS = ("logprob", "entropy", "loss")
HEADS = ((65, 64, 1), (65, 17, 3), (33, 63, 130), (130, 128, 1000), (70, 256, 50257))  # tokens, k, vocab
VOCABULARIES = (1, 1000, 50257, 128256, 151936)


def _head(tokens, k, vocab, dtype, **options):
    return Head(tokens, k, vocab, dtype, device=DEVICE, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_depends_on_nothing_but_itself(kind, dtype):
    for k, vocab in ((64, 131), (1000, 1003), (512, 5000)):
        head = _head(65, k, vocab, dtype, bias=kind != "logprob", ignored=True)
        f = head.function(kind, (5, 13))
        assert_batch(f, (2, 3, 16, 17, 31, 33, 63, 64), (3, 17, 4097))
        assert_decode(f, 5)
        assert_padding(f)
        assert_chunks(f)


@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_up_to_64(kind):
    options = {"softcap": 3.0} | ({} if kind == "loss" else {"temperature": 0.7})
    f = _head(65, 512, 2000, torch.bfloat16).function(kind, **options)
    assert_batch(f, range(1, 65), (64,))


def test_many_tokens():
    """One, 64 and 4097 of 9000 tokens, with gradients."""
    head = _head(9000, 256, 3000, torch.bfloat16, bias=True, ignored=True)
    for kind in KINDS:
        f = head.function(kind)
        for first, last in ((0, 1), (8999, 9000), (0, 64), (4000, 8097)):
            rows = {name: each[first:last] for name, each in f.rows.items()}
            assert_bitwise_equal(f.call(rows), f.whole[first:last], f"{f.what}: tokens {first} to {last}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_logits_that_are_never_made(dtype):
    for sizes in (*HEADS, (1, 4096, 1000), (300, 4096, 5000), (17, 1000, 4097)):
        for bias in (False, True):
            for temperature in (1.0, 0.5, 0.7):
                _head(*sizes, dtype, bias=bias, ignored=True).assert_as_logits(temperature)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_vocabularies(vocab):
    for dtype in DTYPES:
        head = _head(70, 512, vocab, dtype)
        head.assert_as_logits()
        head.assert_precise()
        whole = head.logprob()
        for i in (0, 37, 69):
            alone = isogemm.linear_logprob(head.hidden[i], targets=head.targets[i], **head.parameters)
            assert_bitwise_equal(alone, whole[i])


def test_every_token_of_the_vocabulary():
    head = _head(1, 512, 5000, torch.bfloat16)
    expected = isogemm.log_softmax(head.logits())[0]
    targets = torch.arange(5000, device=DEVICE)
    found = isogemm.linear_logprob(head.hidden.expand(5000, -1), targets=targets, **head.parameters)
    assert_bitwise_equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_strides(dtype):
    head = _head(130, 256, 1000, dtype)
    expected = head.gradients(isogemm.linear_logprob)
    hidden, weight, targets = head.hidden, head.parameters["weight"], head.targets
    for layout in LAYOUTS:
        head.hidden = with_layout(hidden, layout)
        if layout != "transposed":
            head.targets = with_layout(targets, layout)
        for name, each in head.gradients(isogemm.linear_logprob).items():
            assert_bitwise_equal(each, expected[name], f"{name}, hidden {layout}")
        head.parameters["weight"] = with_layout(weight, layout)
        head.assert_as_logits()
        head.assert_right(isogemm.linear_logprob, plain_logprob)
        head.hidden, head.targets, head.parameters["weight"] = hidden, targets, weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_worse_than_torch(dtype):
    for sizes in HEADS:
        head = _head(*sizes, dtype, bias=True, ignored=True)
        head.assert_right(isogemm.linear_logprob, plain_logprob)
    head = _head(1500, 1024, 5000, dtype, bias=True, ignored=True)
    for options in ({}, {"temperature": 0.7}, {"softcap": 3.0}, {"temperature": 2.0, "softcap": 5.0}):
        head.assert_right(isogemm.linear_logprob, plain_logprob, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 3.0}], ids=str)
def test_log_probabilities_and_entropies_of_fp32_logits(dtype, options):
    for sizes in (*HEADS, (300, 4096, 5000)):
        _head(*sizes, dtype, bias=True).assert_precise(**options)


def _with_entropy(**arguments):
    return isogemm.linear_logprob(return_entropy=True, **arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_entropy_is_no_worse_than_torch(dtype):
    head = _head(300, 256, 5000, dtype, bias=True)
    for grads in ([head.grad, head.grad_entropy], [torch.zeros_like(head.grad), head.grad_entropy]):
        head.assert_right(_with_entropy, plain_logprob_and_entropy, grads=grads, temperature=0.7)
    assert_bitwise_equal(head.logprob(return_entropy=True)[0], head.logprob())


OPTIONS = (
    {}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"softcap": 3.0},
    {"label_smoothing": 0.3, "z_loss": 1e-3, "softcap": 5.0},
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_no_worse_than_torch(reduction, dtype):
    head = _head(300, 256, 5003, dtype, bias=True, ignored=True)
    grads = None if reduction == "none" else [torch.tensor(0.7, device=DEVICE)]
    for options in OPTIONS:
        options = options | {"reduction": reduction}
        head.assert_right(isogemm.linear_cross_entropy, plain_cross_entropy, grads=grads, **options)


def test_cross_entropy_is_the_negative_log_probability():
    for dtype in DTYPES:
        head = _head(300, 256, 5003, dtype, bias=True)
        loss = isogemm.linear_cross_entropy(head.hidden, targets=head.targets, **head.parameters, reduction="none")
        assert_bitwise_equal(loss, -head.logprob())


def test_ignored_and_nonfinite_tokens():
    head = _head(130, 256, 5003, torch.bfloat16, ignored=True)
    expected = head.gradients(isogemm.linear_logprob)
    ignored = head.targets == IGNORED
    assert not expected["logprob"][ignored].any()
    assert not expected["gradient of hidden"][ignored].any()
    head.hidden[3, 7], head.hidden[5] = torch.nan, torch.inf
    found = head.gradients(isogemm.linear_logprob)
    others = torch.ones(130, dtype=torch.bool, device=DEVICE)
    others[[3, 5]] = False
    assert found["logprob"][[3, 5]].isnan().all()
    for name in ("logprob", "gradient of hidden"):
        assert_bitwise_equal(found[name][others], expected[name][others], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [isogemm.linear_logprob, sum_of_losses], ids=["logprob", "loss"])
@pytest.mark.parametrize("sizes", [(64, 130), (512, 5003)], ids=str)
def test_weight_gradients_in_micro_batches(sizes, function, dtype):
    chunk = _head(1, *sizes, dtype).chunk
    head = _head(2 * chunk + 37, *sizes, dtype, bias=True, ignored=True)
    whole = head.assert_micro_batches_add_up(function)
    grads = [torch.tensor(1.0, device=DEVICE)] if function is sum_of_losses else None
    found = head.gradients(function, grads=grads)
    for name, each in whole.items():
        assert_bitwise_equal(found[f"gradient of {name}"], each.to(dtype), f"{name}.grad, rounded once")


def _peak(call):
    """Bytes that a call needs at most beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["logprob", "entropy", "loss"])
def test_peak_memory(kind):
    """Forward and backward of 4096 tokens x 4096 x 128256 into main_grad: at most a quarter of torch's."""
    tokens, k, vocab = 4096, 4096, 128256
    head = _head(tokens, k, vocab, torch.bfloat16)
    parameter = torch.nn.Parameter(head.parameters["weight"])
    hidden = head.hidden.requires_grad_()

    def ours():
        if kind == "loss":
            return isogemm.linear_cross_entropy(hidden, parameter, head.targets)
        found = isogemm.linear_logprob(hidden, parameter, head.targets, return_entropy=kind == "entropy")
        return sum(found).sum() if kind == "entropy" else found.sum()

    def theirs():
        if kind == "loss":
            return plain_cross_entropy(hidden, parameter, head.targets)
        if kind == "entropy":
            return sum(plain_logprob_and_entropy(hidden, parameter, head.targets)).sum()
        return plain_logprob(hidden, parameter, head.targets).sum()

    most = _peak(lambda: theirs().backward())
    parameter.grad = hidden.grad = None
    parameter.main_grad = torch.zeros(vocab, k, device=DEVICE)
    ours().backward()  # compiles
    hidden.grad = None
    assert _peak(lambda: ours().backward()) <= 0.25 * most
    with torch.no_grad():
        assert _peak(ours) <= 0.25 * 4 * tokens * vocab, "of fp32 logits"


@pytest.mark.alone
def test_logits_past_2_to_the_31():
    """16400 tokens x 131072 of a vocabulary: the first and the last have the bits of a few alone."""
    tokens, vocab = 16400, 131072
    head = _head(tokens, 64, vocab, torch.bfloat16)
    whole = head.gradients(isogemm.linear_logprob)
    for rows in (slice(0, 7), slice(tokens - 7, tokens)):
        part = _head(7, 64, 1, torch.bfloat16)
        part.hidden, part.targets, part.grad = head.hidden[rows], head.targets[rows], head.grad[rows]
        part.parameters = head.parameters
        found = part.gradients(isogemm.linear_logprob)
        for name in ("logprob", "gradient of hidden"):
            assert_bitwise_equal(found[name], whole[name][rows], name)


@pytest.mark.alone
def test_a_weight_past_2_to_the_31_elements():
    k, vocab = 8192, 2**31 // 8192 + 8
    weight = torch.zeros(vocab, k, dtype=torch.bfloat16, device=DEVICE)
    weight[-8:] = make_data("normal", (8, k), seed=1, dtype=torch.bfloat16, device=DEVICE) / 64
    hidden = make_data("normal", (3, k), seed=0, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    targets = torch.tensor([vocab - 1, 0, vocab - 8], device=DEVICE)
    found = isogemm.linear_logprob(hidden, weight, targets)
    logits = torch.cat([torch.zeros(3, vocab - 8, device=DEVICE), hidden.float() @ weight[-8:].float().T], 1)
    expected = torch.log_softmax(logits.double(), -1).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)  # sums of 8192 bf16 products
    (dhidden,) = torch.autograd.grad(found.sum(), hidden)
    assert dhidden.isfinite().all()
    assert dhidden[0].any()


FUNCTIONS = {
    "logprob": lambda **t: isogemm.linear_logprob(**t, temperature=0.7, softcap=5.0),
    "entropy": lambda **t: isogemm.linear_logprob(**t, return_entropy=True),
    "loss": lambda **t: isogemm.linear_cross_entropy(**t, reduction="none", label_smoothing=0.1, z_loss=1e-3),
}


def _gradients(head, name, function=None):
    grads = [head.grad, head.grad_entropy] if name == "entropy" else [head.grad]
    return head.gradients(function or FUNCTIONS[name], grads=grads)


def _same(found, expected, what=""):
    for name, right in expected.items():
        assert_bitwise_equal(found[name], right, f"{name} {what}")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_training_step_in_a_graph(name):
    head = _head(1100, 256, 5003, torch.bfloat16, bias=True, ignored=True)
    parameters = {each: torch.nn.Parameter(x) for each, x in head.parameters.items()}
    for each in parameters.values():
        each.main_grad = torch.zeros(each.shape, device=DEVICE)

    def step():
        hidden = head.hidden.detach().requires_grad_()
        results = FUNCTIONS[name](hidden=hidden, targets=head.targets, **parameters)
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, [head.grad, head.grad_entropy][: len(results)])
        return [*(each.detach() for each in results), hidden.grad]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        head.hidden.copy_(make_data("normal", (1100, 256), seed=30 + seed, dtype=torch.bfloat16, device=DEVICE))
        head.targets.copy_(head.targets.roll(1))
        for each in parameters.values():
            each.main_grad.zero_()
        for each in captured:
            each.fill_(torch.nan)
        graph.replay()
        found = [each.clone() for each in (*captured, *(each.main_grad for each in parameters.values()))]
        for each in parameters.values():
            each.main_grad.zero_()
        expected = [*step(), *(each.main_grad for each in parameters.values())]
        for got, right in zip(found, expected, strict=True):
            assert_bitwise_equal(got, right)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_runs_on_the_current_stream(name):
    head = _head(300, 256, 5003, torch.bfloat16, bias=True)
    expected = _gradients(head, name)
    hidden, head.hidden = head.hidden, torch.full_like(head.hidden, torch.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of ms: a launch on another stream would read the NaN
        head.hidden.copy_(hidden)
        found = _gradients(head, name)
    stream.synchronize()
    _same(found, expected)


def test_two_threads_and_again():
    heads = [_head(m, 256, vocab, torch.bfloat16, bias=True) for m in (17, 300) for vocab in (1000, 5003)] * 2
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda head: _gradients(head, "entropy"), heads))
    torch.cuda.synchronize()
    for head, got in zip(heads, found, strict=True):
        for _ in range(3):  # state that a call leaves behind changes nothing
            _same(got, _gradients(head, "entropy"), str(head))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled(name, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, dynamic=True, backend=counter)
    for tokens in (7, 300):
        head = _head(tokens, 64, 131, torch.bfloat16, bias=True, ignored=True)
        _same(_gradients(head, name, compiled), _gradients(head, name), f"of {tokens} tokens")
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast_casts_as_linear(name, dtype):
    head, cast = (_head(33, 64, 131, torch.float32, bias=True) for _ in range(2))
    cast.hidden = cast.hidden.to(dtype)
    cast.parameters = {each: x.to(dtype) for each, x in cast.parameters.items()}
    with torch.autocast(DEVICE, dtype):
        found = _gradients(head, name)
    assert found["logprob"].dtype == torch.float32
    assert_bitwise_equal(found["logprob"], _gradients(cast, name)["logprob"])
    for each in ("hidden", *head.parameters):
        assert found[f"gradient of {each}"].dtype == torch.float32


def test_no_tokens():
    head = _head(1, 64, 131, torch.bfloat16, bias=True)
    head.hidden, head.targets, head.grad = head.hidden[:0], head.targets[:0], head.grad[:0]
    head.grad_entropy = head.grad
    for name in FUNCTIONS:
        found = _gradients(head, name)
        assert found["logprob"].shape == (0,)
        assert not found["gradient of weight"].any()


def test_devices_must_agree():
    head = _head(3, 64, 131, torch.bfloat16)
    with pytest.raises(ValueError, match=r"targets.*cpu"):
        isogemm.linear_logprob(head.hidden, targets=head.targets.cpu(), **head.parameters)
    with pytest.raises(ValueError, match=r"hidden and weight.*cpu|weight.*cpu"):
        isogemm.linear_logprob(head.hidden, head.parameters["weight"].cpu(), head.targets)
