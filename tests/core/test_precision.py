"""torch's precision of float32 products: what isogemm changes of it, and that all of it is put back."""

import contextlib
import itertools
import threading

import pytest
import torch

import isogemm
from isogemm.core.precision import _own_setting, of_cuda_products, overridden
from isogemm.fusion import execution_state

get, set_ = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
LEVELS = {backend: (("generic", "all"), (backend, "all"), (backend, "matmul")) for backend in ("cuda", "mkldnn")}
VALUES = {"cuda": ("none", "ieee", "tf32"), "mkldnn": ("none", "ieee", "tf32", "bf16")}
STATES = [
    (backend, (generic, *settings))
    for backend, values in VALUES.items()
    for generic in ("none", "ieee", "tf32", "bf16")
    for settings in itertools.product(values, values)
]


@pytest.fixture(autouse=True)
def _as_before():
    yield
    torch.set_float32_matmul_precision("highest")
    for level in {level for levels in LEVELS.values() for level in levels}:
        set_(*level, "none")


def _set(backend, settings):
    for level, setting in zip(LEVELS[backend], settings, strict=True):
        set_(*level, setting)


def _assert_set(backend, settings):
    """By what is in effect as the levels before change: an inherited setting follows them, one of its own does not."""
    generic, of_backend, of_products = settings
    assert get("generic", "all") == generic
    for other in ("ieee", "tf32"):
        set_("generic", "all", other)
        assert get(backend, "all") == (other if of_backend == "none" else of_backend)
    for other in ("ieee", "tf32"):
        set_(backend, "all", other)
        assert get(backend, "matmul") == (other if of_products == "none" else of_products)


@pytest.mark.parametrize("backend", LEVELS)
def test_every_setting_is_put_back(backend):
    for settings in (settings for each, settings in STATES if each == backend):
        for meanwhile in ("ieee", "tf32"):
            _set(backend, settings)
            with contextlib.suppress(ZeroDivisionError), overridden(backend, meanwhile):
                assert get(backend, "matmul") == meanwhile
                raise ZeroDivisionError
            _assert_set(backend, settings)


X = torch.ones(20, 32)


def _product_on_the_cpu():
    isogemm.linear(X, X)


def _product_on_a_gpu():
    for precision in ("ieee", "tf32", "tf32x3", None):
        with of_cuda_products(precision):
            pass


def _deferred_product():
    now = execution_state.ExecutionState(*execution_state.read(-1))
    for precision in ("ieee", "tf32", ""):
        with execution_state.restored(now, now, precision):
            pass


CALLS = {"mkldnn": [_product_on_the_cpu], "cuda": [_product_on_a_gpu, _deferred_product]}


@pytest.mark.parametrize(
    ("backend", "call"),
    [(backend, call) for backend, calls in CALLS.items() for call in calls],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_calls_leave_settings_alone(backend, call):
    for settings in (settings for each, settings in STATES if each == backend):
        _set(backend, settings)
        call()
        _assert_set(backend, settings)


@pytest.mark.parametrize(
    ("backend", "call"),
    [(backend, call) for backend, calls in CALLS.items() for call in calls],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_generic_setting_goes_on_to_be_followed(backend, call):
    torch.backends.fp32_precision = "tf32"
    call()
    assert get(backend, "matmul") == "tf32"
    torch.backends.fp32_precision = "ieee"
    assert get(backend, "matmul") == "ieee"


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_torchs_older_interface(setting):
    """Its getters raise where a setting is not what they set."""
    torch.set_float32_matmul_precision(setting)
    for call in itertools.chain(*CALLS.values()):
        call()
        assert torch.get_float32_matmul_precision() == setting
        assert torch.backends.cuda.matmul.allow_tf32 == (setting != "highest")


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_products_on_the_cpu_are_ieee(precision):
    """At a size where torch's own products differ, on a CPU that has another way to compute them."""
    x, weight = (torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    expected = isogemm.linear(x, weight)
    for level in LEVELS["mkldnn"]:
        set_(*level, precision)
        assert torch.equal(isogemm.linear(x, weight), expected)
        set_(*level, "none")


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_a_product_sees_ieee_on_the_cpu(precision, monkeypatch):
    """On any CPU: what torch's own product finds set."""
    seen, multiply = [], torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *args, **options: (seen.append(get("mkldnn", "matmul")), multiply(*args, **options))[1]
    )
    for level in LEVELS["mkldnn"]:
        set_(*level, precision)
        isogemm.linear(torch.ones(20, 16), torch.ones(17, 16))
        set_(*level, "none")
    assert seen
    assert set(seen) == {"ieee"}


@pytest.mark.parametrize(("asked", "meanwhile"), [("tf32", "tf32"), ("ieee", "ieee"), ("tf32x3", "ieee")])
@pytest.mark.parametrize("before", ["ieee", "tf32"])
def test_a_precision_on_the_gpu(before, asked, meanwhile):
    torch.backends.cuda.matmul.fp32_precision = before
    with of_cuda_products(asked):
        assert torch.backends.cuda.matmul.fp32_precision == meanwhile
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize("first", ["tf32", "ieee"])
def test_threads_take_turns(first):
    """A thread that finds what it needs waits too: the other's change may end before its product is launched."""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    entered, leave, seen = threading.Event(), threading.Event(), []

    def hold():
        with of_cuda_products(first):
            entered.set()
            leave.wait(5)
            seen.append(torch.backends.cuda.matmul.fp32_precision)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(5)
    threading.Timer(0.1, leave.set).start()
    with of_cuda_products("tf32"):  # waits for the other
        assert seen == [first]
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    thread.join()
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_a_setting_of_its_own_is_found_without_changing_those_above():
    """Which other threads follow."""

    class Level:
        def __init__(self, own):
            self.own, self.changes = own, 0

        @property
        def fp32_precision(self):
            return self.own

        @fp32_precision.setter
        def fp32_precision(self, value):
            self.changes += 1

    levels = [Level("none"), Level("none"), Level("bf16")]
    assert _own_setting(levels) == "bf16"
    assert [level.changes for level in levels] == [0, 0, 0]
