"""Calls of `mlp` whose like was checked before: the same launches, the same errors, and no way past a mode."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from idle_gpu import idle_gpu  # noqa: F401

from isogemm.core.plan import clear_caches
from isogemm.gemm.api import mlp

M, K, HIDDEN, N = 16, 32, 48, 16


def _tensor(*shape, dtype=torch.bfloat16, grad=False):
    return torch.zeros(shape, dtype=dtype, requires_grad=grad)


def _arguments(grad=False, **options):
    tensors = (_tensor(M, K, grad=grad), _tensor(HIDDEN, K, grad=grad), _tensor(N, HIDDEN, grad=grad))
    return tensors, {"bias": _tensor(HIDDEN), "bias_down": _tensor(N), **options}


OPTIONS = {
    "gelu": {},
    "leaky_relu": {"activation": "leaky_relu", "activation_args": {"negative_slope": 0.1}},
    "swiglu": {"activation": "swiglu", "weight_up": _tensor(HIDDEN, K), "bias_up": _tensor(HIDDEN)},
    "residual": {"residual": _tensor(M, N)},
    "no biases": {"bias": None, "bias_down": None},
    "float32 result": {"out_dtype": torch.float32},
    "dropout": {"dropout_p": 0.25, "hidden_dropout_p": 0.5},
}


def _launched(idle_gpu, call):  # noqa: F811
    """Kernels, programs and arguments that are no addresses."""
    idle_gpu.clear()
    call()
    return [
        (name, programs, [each for each in arguments if not (isinstance(each, int) and each > 2**32)])
        for name, programs, arguments in idle_gpu
    ]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_checked_call_launches_what_an_unchecked_one_does(idle_gpu, options, grad):  # noqa: F811
    tensors, keywords = _arguments(grad, **options)
    first = _launched(idle_gpu, lambda: mlp(*tensors, **keywords))
    again = [_launched(idle_gpu, lambda: mlp(*tensors, **keywords)) for _ in range(3)]
    assert len(first) == 2
    assert again == [first] * 3


def test_inference_launches_what_training_does(idle_gpu):  # noqa: F811
    """relu saves nothing besides its result: the forward is the same."""
    trained, keywords = _arguments(grad=True, activation="relu")
    plain = [each.detach() for each in trained]
    assert _launched(idle_gpu, lambda: mlp(*plain, **keywords)) == _launched(
        idle_gpu, lambda: mlp(*trained, **keywords)
    )


WRONG = {
    "weight_down": ({"weight_down": _tensor(N, HIDDEN + 1)}, ValueError, "weight_down"),
    "bias_down": ({"bias_down": _tensor(N + 1)}, ValueError, "bias_down"),
    "dtype of bias_down": ({"bias_down": _tensor(N, dtype=torch.float16)}, (TypeError, ValueError), "bias_down"),
    "residual": ({"residual": _tensor(M, N + 1)}, ValueError, "residual"),
    "activation": ({"activation": "swoosh"}, ValueError, "swoosh"),
    "activation_args": ({"activation_args": {"negative_slope": 1.0}}, (TypeError, ValueError), "negative_slope"),
    "no dictionary": ({"activation_args": 3}, (TypeError, ValueError, AttributeError), None),
    "precision": ({"precision": "tf33"}, ValueError, "tf33"),
    "out_dtype": ({"out_dtype": torch.float64}, (TypeError, ValueError), "out_dtype"),
    "dropout_p": ({"dropout_p": 1.5}, ValueError, "dropout_p"),
    "no number": ({"dropout_p": torch.zeros(2)}, TypeError, "dropout_p is"),
    "no number inside": ({"hidden_dropout_p": torch.zeros(2)}, TypeError, "dropout_p is"),
    "no weight_down": ({"weight_down": None}, TypeError, "weight_down"),
    "no x": ({"x": None}, TypeError, "x is a NoneType"),
}


@pytest.mark.parametrize(("wrong", "error", "named"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_raise_before_a_launch(idle_gpu, wrong, error, named):  # noqa: F811
    """The call before was right in all else."""
    (x, weight, weight_down), keywords = _arguments()
    mlp(x, weight, weight_down, **keywords)
    idle_gpu.clear()
    given = {"x": x, "weight": weight, "weight_down": weight_down, **keywords} | wrong
    with pytest.raises(error, match=named):
        mlp(**given)
    assert not idle_gpu


@pytest.mark.parametrize("known", [False, True])
def test_a_mode_sees_one_operator(known):
    clear_caches()
    tensors, keywords = _arguments()
    if known:
        for _ in range(2):
            mlp(*tensors, **keywords)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operators.append(str(function))
            return function(*args, **(kwargs or {}))

    operators = []
    with Seen():
        mlp(*tensors, **keywords)
    assert [each for each in operators if each.startswith("isogemm")] == ["isogemm.mlp.default"]
