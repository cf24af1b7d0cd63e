"""The registry of epilogues: values, derivatives, torch's spellings of them, the user's own, the dropout generator."""

import itertools
import math

import pytest
import torch
import triton
from torch import nn
from torch.nn import functional as F

from isogemm.epilogues import ACTIVATIONS, of_module, random, recognise, register, spec

DEFINITIONS = {  # written out, in fp64
    "relu": lambda z: torch.where(z > 0, z, 0 * z),
    "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "quick_gelu": lambda z: z / (1 + torch.exp(-1.702 * z)),
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "tanh": lambda z: (torch.exp(2 * z) - 1) / (torch.exp(2 * z) + 1),
    "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
    "relu2": lambda z: torch.where(z > 0, z * z, 0 * z),
    "leaky_relu": lambda z, negative_slope=0.01: torch.where(z > 0, z, negative_slope * z),
}
GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
PLAIN = list(DEFINITIONS)


def test_names():
    assert set(ACTIVATIONS) == set(DEFINITIONS) | set(GATES)
    assert all(entry.name == name for name, entry in ACTIVATIONS.items())
    assert {name: entry.gate for name, entry in ACTIVATIONS.items() if entry.gate} == GATES
    assert {entry.saved for entry in ACTIVATIONS.values()} <= {"mask", "out", "pre"}
    assert ACTIVATIONS["relu"].saved == "mask"
    assert {name: dict(entry.arguments) for name, entry in ACTIVATIONS.items() if entry.arguments} == {
        "leaky_relu": {"negative_slope": 0.01}
    }


@pytest.mark.parametrize("name", PLAIN)
def test_every_entry_has_a_device_form(name):
    from isogemm.epilogues import device

    assert isinstance(getattr(device, name), triton.JITFunction)


def _grid():
    """No kink among them."""
    return torch.cat([torch.linspace(-9, 9, 2000), torch.tensor([1e-30, -1e-30, 1e-8, -1e-8])]).double()


@pytest.mark.parametrize("name", PLAIN)
def test_value(name):
    torch.testing.assert_close(ACTIVATIONS[name].torch(_grid()), DEFINITIONS[name](_grid()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", GATES)
def test_value_of_a_gate(name):
    entry = ACTIVATIONS[name]
    torch.testing.assert_close(entry.torch(_grid()), DEFINITIONS[GATES[name]](_grid()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivative(name):
    entry = ACTIVATIONS[name]
    z = _grid().requires_grad_()
    (slope,) = torch.autograd.grad(DEFINITIONS[entry.gate or name](z).sum(), z)
    torch.testing.assert_close(entry.derivative(z.detach()), slope, rtol=1e-11, atol=1e-13)
    if entry.of_output is not None:
        value = entry.torch(z.detach())
        torch.testing.assert_close(entry.of_output(value), slope, rtol=1e-6, atol=1e-13)  # 1 - y y cancels


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivative_where_torch_has_to_choose(name):
    """At a kink, at zeros, far out, and at NaN: what autograd makes of the torch form."""
    entry = ACTIVATIONS[name]
    z = torch.tensor([0.0, -0.0, 50.0, -50.0, 1e4, -1e4, torch.nan], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(entry.torch(z).sum(), z)
    torch.testing.assert_close(entry.derivative(z.detach()), slope, equal_nan=True)


@pytest.mark.parametrize("slope", [0.2, 0.0, -0.5, 3.0])
def test_arguments(slope):
    entry, z = ACTIVATIONS["leaky_relu"], _grid().requires_grad_()
    value = DEFINITIONS["leaky_relu"](z, slope)
    torch.testing.assert_close(entry.torch(z, slope), value)
    torch.testing.assert_close(entry.derivative(z, slope), torch.autograd.grad(value.sum(), z)[0])


X = torch.linspace(-3, 3, 24, dtype=torch.float64)
CALLS = {  # name: (function, arguments after the input, keywords, what it is)
    "torch.relu": (torch.relu, (), {}, ("relu", {})),
    "Tensor.relu": (torch.Tensor.relu, (), {}, ("relu", {})),
    "F.relu": (F.relu, (), {}, ("relu", {})),
    "F.relu not in place": (F.relu, (), {"inplace": False}, ("relu", {})),
    "F.relu not in place, by position": (F.relu, (False,), {}, ("relu", {})),
    "F.gelu": (F.gelu, (), {}, ("gelu", {})),
    "F.gelu none": (F.gelu, (), {"approximate": "none"}, ("gelu", {})),
    "F.gelu tanh": (F.gelu, (), {"approximate": "tanh"}, ("gelu_tanh", {})),
    "F.silu": (F.silu, (), {}, ("silu", {})),
    "F.silu by position": (F.silu, (False,), {}, ("silu", {})),
    "torch.tanh": (torch.tanh, (), {}, ("tanh", {})),
    "Tensor.tanh": (torch.Tensor.tanh, (), {}, ("tanh", {})),
    "F.tanh": (F.tanh, (), {}, ("tanh", {})),
    "torch.sigmoid": (torch.sigmoid, (), {}, ("sigmoid", {})),
    "Tensor.sigmoid": (torch.Tensor.sigmoid, (), {}, ("sigmoid", {})),
    "F.sigmoid": (F.sigmoid, (), {}, ("sigmoid", {})),
    "torch.special.expit": (torch.special.expit, (), {}, ("sigmoid", {})),
    "F.leaky_relu": (F.leaky_relu, (), {}, ("leaky_relu", {})),
    "F.leaky_relu slope": (F.leaky_relu, (0.2,), {}, ("leaky_relu", {"negative_slope": 0.2})),
    "F.leaky_relu keyword": (F.leaky_relu, (), {"negative_slope": 0.3}, ("leaky_relu", {"negative_slope": 0.3})),
    "F.leaky_relu both": (F.leaky_relu, (0.2, False), {}, ("leaky_relu", {"negative_slope": 0.2})),
    "F.relu in place": (F.relu, (), {"inplace": True}, None),
    "F.relu in place, by position": (F.relu, (True,), {}, None),
    "F.silu in place": (F.silu, (True,), {}, None),
    "F.leaky_relu in place": (F.leaky_relu, (0.2, True), {}, None),
    "torch.relu_": (torch.relu_, (), {}, None),
    "Tensor.relu_": (torch.Tensor.relu_, (), {}, None),
    "torch.tanh out": (torch.tanh, (), {"out": torch.empty(24, dtype=torch.float64)}, None),
    "F.relu6": (F.relu6, (), {}, None),
    "F.elu": (F.elu, (), {}, None),
    "F.hardswish": (F.hardswish, (), {}, None),
    "torch.exp": (torch.exp, (), {}, None),
    "torch.add": (torch.add, (1,), {}, None),
}


@pytest.mark.parametrize("name", CALLS)
def test_recognise(name):
    """And where something is recognised, it computes what the call does."""
    function, more, keywords, expected = CALLS[name]
    found = recognise(function, (X, *more), keywords)
    assert found == expected
    if found is not None:
        activation, arguments = found
        torch.testing.assert_close(ACTIVATIONS[activation].torch(X, **arguments), function(X, *more, **keywords))


def test_options_that_torch_would_refuse_are_not_recognised():
    assert recognise(F.gelu, (X,), {"approximate": "erf"}) is None
    assert recognise(torch.relu, (X, 1), {}) is None
    assert recognise(F.relu, (X, False, 1), {}) is None
    assert recognise(torch.tanh, (X,), {"inplace": False}) is None
    assert recognise(torch.relu, (), {}) is None


class Doubled(nn.ReLU):
    def forward(self, x):
        return 2 * super().forward(x)


MODULES = [
    (nn.ReLU(), ("relu", {})),
    (nn.ReLU(inplace=True), ("relu", {})),  # of a value that nothing else sees
    (nn.GELU(), ("gelu", {})),
    (nn.GELU(approximate="tanh"), ("gelu_tanh", {})),
    (nn.SiLU(), ("silu", {})),
    (nn.SiLU(inplace=True), ("silu", {})),
    (nn.Tanh(), ("tanh", {})),
    (nn.Sigmoid(), ("sigmoid", {})),
    (nn.LeakyReLU(), ("leaky_relu", {"negative_slope": 0.01})),
    (nn.LeakyReLU(0.2), ("leaky_relu", {"negative_slope": 0.2})),
    (nn.ReLU6(), None),
    (nn.ELU(), None),
    (nn.Identity(), None),
    (nn.Linear(3, 3), None),
    (nn.Sequential(nn.ReLU()), None),
    (Doubled(), None),
]


@pytest.mark.parametrize(("module", "expected"), MODULES, ids=[str(module) for module, _ in MODULES])
def test_of_module(module, expected):
    found = of_module(module)
    assert found == expected
    if found is not None:
        torch.testing.assert_close(ACTIVATIONS[found[0]].torch(X, **found[1]), module(X.clone()))


@triton.jit
def plain(acc, col, row):
    return acc * 2


@triton.jit
def with_two(acc, col, row, first, second):
    return acc * first + second


@triton.jit
def with_five(acc, col, row, a, b, c, d, e):
    return acc + a + b + c + d + e


@triton.jit
def too_few(acc, col):
    return acc


@pytest.fixture
def registry(monkeypatch):
    """An empty one, and the former after the test."""
    monkeypatch.setattr(spec, "REGISTERED", {})
    return spec.REGISTERED


def test_register(registry):
    entry = register("double", plain, lambda acc, col, row: acc * 2)
    assert (entry.name, entry.aux, entry.function) == ("double", 0, plain)
    assert spec.registered("double") is entry
    again = register("double", with_two, lambda acc, col, row, first, second: acc * first + second)
    assert again.aux == 2
    assert spec.registered("double") is again, "registered again, it replaces the former"


def _form(acc, col, row):
    return acc


WRONG = {  # name: (arguments, error, what the message starts with)
    "an activation's name": (("relu", plain, _form), ValueError, "name is 'relu'"),
    "a gated one's name": (("swiglu", plain, _form), ValueError, "name is 'swiglu'"),
    "no identifier": (("my epilogue", plain, _form), ValueError, "name is 'my epilogue'"),
    "empty name": (("", plain, _form), ValueError, "name is ''"),
    "no string": ((3, plain, _form), (TypeError, ValueError), "name is 3"),
    "torch form not callable": (("mine", plain, None), TypeError, "torch_form is a NoneType"),
    "function not of Triton": (("mine", _form, _form), TypeError, "function is"),
    "function no function": (("mine", None, _form), TypeError, "function is None"),
    "function of two": (("mine", too_few, _form), TypeError, "function is"),
    "more aux than are passed": (("mine", with_five, lambda *args: args[0]), ValueError, "function takes 5 aux"),
    "forms of different arguments": (("mine", with_two, _form), ValueError, "torch_form"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_registrations(name, registry):
    arguments, error, message = WRONG[name]
    with pytest.raises(error, match=f"^{message}"):
        register(*arguments)
    assert registry == {}


# The generator, written again from its definition (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").


def _philox(counter, key, rounds=10):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & 0xFFFFFFFF, (left >> 32) ^ c3 ^ k1, left & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [  # of philox4x32-10: counter, key, words
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _bits(seed, row, column):
    """The 16 bits of an element: 8 columns that agree but for bits 0, 3 and 4 share a counter."""
    group = (column >> 5 << 2) + (column >> 1 & 3)
    words = _philox((group, row, 0, 0), (seed & ONES, seed >> 32 & ONES))
    return words[column >> 3 & 3] >> (16 if column & 1 else 0) & 0xFFFF


def _seed(value):
    return torch.tensor([value], dtype=torch.int64)


SEEDS = [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 0x299F31D0A4093822]


@pytest.mark.parametrize("case", KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(case):
    counter, key, words = case
    assert _philox(counter, key) == words


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_are_philox(seed):
    rows, columns, p = 3, 70, 0.3
    dropped = round(p * 2**16)
    expected = torch.tensor([[_bits(seed, row, col) >= dropped for col in range(columns)] for row in range(rows)])
    assert torch.equal(random.kept(_seed(seed), rows, columns, p), expected)


def _weight_bits(seed, matrix, query, key):
    """The 16 bits of a weight: two queries and two keys that agree but for bit 3 share a counter."""
    groups = [(token >> 4 << 3) + (token & 7) for token in (key, query)]
    words = _philox((*groups, matrix, 0), (seed & ONES, seed >> 32 & ONES))
    return words[(query >> 3 & 1) * 2 + (key >> 3 & 1)] >> 16


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("first", "tokens"), [(0, 17), (5, 9), (2**31 - 1, 3)])
def test_masks_of_weights_are_philox(seed, first, tokens):
    p, numbers = 0.3, range(tokens)
    expected = torch.tensor(
        [
            [[_weight_bits(seed, matrix, query, key) >= round(p * 2**16) for key in numbers] for query in numbers]
            for matrix in (first, first + 1)
        ]
    )
    assert torch.equal(random.kept_weights(_seed(seed), 2, tokens, p, first), expected)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_statistics_of_weights(p):
    kept = random.kept_weights(_seed(4321), 400, 50, p).double()
    for axes in ((0, 1, 2), (1, 2), (0, 1), (0, 2)):
        rate, count = kept.mean(axes), math.prod(kept.shape[axis] for axis in axes)
        assert float((rate - (1 - p)).abs().max()) < 5 * math.sqrt(p * (1 - p) / count)


def test_masks_do_not_follow_the_shape():
    whole = random.kept(_seed(5), 300, 200, 0.5)
    for rows, columns in ((1, 1), (17, 65), (300, 3), (2, 200), (0, 5), (5, 0)):
        assert torch.equal(random.kept(_seed(5), rows, columns, 0.5), whole[:rows, :columns])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_statistics(p):
    rows, columns = 1024, 1000
    kept = random.kept(_seed(1234), rows, columns, p).double()
    for axis, count in ((None, rows * columns), (0, rows), (1, columns)):
        rate = kept.mean() if axis is None else kept.mean(axis)
        sigma = math.sqrt(p * (1 - p) / count)
        # Five sigma of one draw; of a thousand, the largest stays below.
        assert float((rate - (1 - p)).abs().max()) < 5 * sigma
        if axis is not None:
            assert 0.85 < float(rate.std()) / sigma < 1.15


def _correlation(a, b):
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])


def test_elements_are_independent():
    """Of their neighbours at every distance that shares a counter or a word, and of other seeds."""
    kept = random.kept(_seed(99), 512, 512, 0.5)
    bound = 5 / math.sqrt(kept.numel())
    for distance in (1, 2, 4, 8, 16, 24, 32, 33):
        assert abs(_correlation(kept[:, distance:], kept[:, :-distance])) < bound, f"columns {distance} apart"
        assert abs(_correlation(kept[distance:], kept[:-distance])) < bound, f"rows {distance} apart"
    for seed in (98, 100, 99 + 2**32, -99):
        assert abs(_correlation(kept, random.kept(_seed(seed), 512, 512, 0.5))) < bound, f"seed {seed}"
    assert abs(_correlation(kept, kept.T)) < bound


def test_ends_of_the_probability():
    assert bool(random.kept(_seed(3), 64, 64, 0.0).all())
    assert not bool(random.kept(_seed(3), 64, 64, 1.0).any())
    assert random.scale(0.0) == 1
    assert random.scale(1.0) == 0


@pytest.mark.parametrize("p", [1e-9, 0.1, 1 / 3, 0.5, 0.75, 0.9999])
def test_scale_keeps_the_mean(p):
    """Exactly, for the probability as it is rounded; and that is near."""
    share = 1 - random.threshold(p) / random.LEVELS
    assert share * random.scale(p) == pytest.approx(1, abs=1e-15)
    assert abs(share - (1 - p)) <= 0.5 / random.LEVELS


def test_fewer_are_kept_as_p_grows():
    """One draw per element: what a p drops, a larger one does too."""
    masks = [random.kept(_seed(8), 40, 40, p) for p in (0.0, 0.2, 0.5, 0.7, 1.0)]
    for more, fewer in itertools.pairwise(masks):
        assert not bool((fewer & ~more).any())
        assert int(fewer.sum()) < int(more.sum())
