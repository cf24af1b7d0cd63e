import contextlib
import threading
from dataclasses import replace

import pytest

from isogemm.core import dispatch, env
from isogemm.core.dispatch import Dispatch, dispatch_log

TINY = Dispatch("bmm", "tiny", "[2; 3,4,5] float32/ieee nn", "dot 16x16x16 w1 s1", "")
TORCH = Dispatch("bmm", "torch", "[1; 3,4,5] float32/ieee nn", "", "batch is 1")


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    monkeypatch.setattr(env, "settings", replace(env.settings, disable_tiny=False, log=False))
    monkeypatch.setattr(dispatch, "active", False)


def test_words():
    assert str(TINY) == "isogemm.bmm [2; 3,4,5] float32/ieee nn: tiny dot 16x16x16 w1 s1"
    modelled = Dispatch("matmul", "gemm", "[2,4,5] bfloat16 nt", "pointer 16x16x16 w1 s1", "", "model")
    assert str(modelled) == "isogemm.matmul [2,4,5] bfloat16 nt: gemm pointer 16x16x16 w1 s1 (model)"
    assert str(TORCH) == "isogemm.bmm [1; 3,4,5] float32/ieee nn: torch (batch is 1)"


def test_log_collects_inside_alone():
    with dispatch_log() as log:
        assert dispatch.active
        dispatch.record(TINY)
    assert not dispatch.active
    dispatch.record(TORCH)
    assert log == [TINY]


def test_logs_nest_and_end_on_errors():
    with dispatch_log() as outer:
        with contextlib.suppress(ZeroDivisionError), dispatch_log() as inner:
            dispatch.record(TINY)
            raise ZeroDivisionError
        assert dispatch.active
        dispatch.record(TORCH)
    assert not dispatch.active
    assert (inner, outer) == ([TINY], [TINY, TORCH])


def test_logs_that_look_alike_are_told_apart():
    """Two empty logs are equal lists: the one that ends is the one that is dropped."""
    with dispatch_log() as outer:
        with dispatch_log():
            pass
        dispatch.record(TINY)
    assert outer == [TINY]


def test_other_threads_are_heard():
    """Autograd runs the backward on a thread of its own."""
    with dispatch_log() as log:
        thread = threading.Thread(target=dispatch.record, args=(TINY,))
        thread.start()
        thread.join()
    assert log == [TINY]


def test_line_on_stderr(monkeypatch, capsys):
    monkeypatch.setattr(env, "settings", replace(env.settings, disable_tiny=False, log=True))
    dispatch.record(TINY)
    with dispatch_log():
        pass
    assert dispatch.active
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"{TINY}\n")
