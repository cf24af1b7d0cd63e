"""The way of a warm call: which of isogemm's functions run between the public function and Triton's launcher.

At most five functions in four files for every operation. A GPU without TMA is simulated: CPU tensors say that they are
on it, and kernels are bound to a launcher that does nothing.
"""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from idle_gpu import idle_gpu  # noqa: F401

import isogemm

MOST_FUNCTIONS, MOST_FILES = 5, 4
SOURCE = str(Path(isogemm.__file__).parent)


@pytest.fixture(autouse=True)
def simulated_gpu(idle_gpu):  # noqa: F811
    """Every test has one."""


def functions_of(call):
    """(file, name) of isogemm's functions that a warm call runs, in order; comprehensions are part of theirs.

    The shortest of several: the encoder's launches are kept by address, and a CPU's memory comes back less often to the
    same ones than torch's caching allocator's.
    """
    call()
    found = []

    def profile(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            found[-1].append((code.co_filename.removeprefix(SOURCE + "/"), code.co_name))

    for _ in range(20):
        found.append([])
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
    return min(found, key=len)


def half(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


X, WEIGHT, BIAS = half(16, 64), half(32, 64), half(32)
PARAMETERS = isogemm.EncoderParameters(
    half(192, 64), half(64, 64), half(128, 64), half(64, 128), half(64), half(64), half(192), half(64), half(128),
    half(64), half(64), half(64),
)  # fmt: skip
CU_Q, CU_K = (torch.tensor([0, 7, 16], dtype=torch.int32) for _ in range(2))
CALLS = {
    "mm": lambda: isogemm.mm(X, WEIGHT.t()),
    "matmul": lambda: isogemm.matmul(X, WEIGHT.t()),
    "linear": lambda: isogemm.linear(X, WEIGHT, BIAS),
    "linear, gelu": lambda: isogemm.linear(X, WEIGHT, BIAS, activation="gelu"),
    "linear, swiglu": lambda: isogemm.linear(X, WEIGHT, weight_up=half(32, 64), activation="swiglu"),
    "matmul_fused": lambda: isogemm.matmul_fused(X, WEIGHT.t(), bias=BIAS, activation="relu", residual=half(16, 32)),
    "bmm": lambda: isogemm.bmm(half(8, 16, 16), half(8, 16, 16)),
    "attention": lambda: isogemm.attention(half(2, 4, 1, 64), half(2, 2, 32, 64), half(2, 2, 32, 64), causal=True),
    "attention_varlen": lambda: isogemm.attention_varlen(half(16, 4, 64), half(16, 2, 64), half(16, 2, 64), CU_Q, CU_K),
    "rms_norm": lambda: isogemm.rms_norm(X, half(64)),
    "layer_norm": lambda: isogemm.layer_norm(X, half(64), half(64)),
    "softmax": lambda: isogemm.softmax(X),
    "log_softmax": lambda: isogemm.log_softmax(X),
    "encoder_layer": lambda: isogemm.encoder_layer(half(8, 16, 64), PARAMETERS, nhead=4),
}


@pytest.mark.parametrize("operation", CALLS)
def test_a_warm_call_is_short(operation):
    with torch.no_grad():
        functions = functions_of(CALLS[operation])
    files = {file for file, _ in functions}
    assert functions, operation
    assert len(functions) <= MOST_FUNCTIONS, functions
    assert len(files) <= MOST_FILES, functions
    assert functions[-1] in (("core/launch.py", "launch"), ("encoder/schedule.py", "run"))
