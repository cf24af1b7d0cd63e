import pytest
import torch

from isogemm.core.errors import PRECISIONS, require_precision, require_same, require_tensor


def test_require_tensor():
    require_tensor("x", torch.ones(2, 3), 2, "[M, K]")
    with pytest.raises(TypeError, match=r"^x is a float; expected a torch\.Tensor \[M, K\]$"):
        require_tensor("x", 1.0, 2, "[M, K]")
    with pytest.raises(ValueError, match=r"^x has shape \[2\]; expected 2 dimensions \[M, K\]$"):
        require_tensor("x", torch.ones(2), 2, "[M, K]")


def test_require_same():
    require_same("K", ("a", "b"), (3, 3))
    with pytest.raises(ValueError, match=r"^a and b must have the same K; a has 3, b has 4$"):
        require_same("K", ("a", "b"), (3, 4))


@pytest.mark.parametrize("precision", [None, *PRECISIONS])
def test_precisions_of_float32(precision):
    require_precision(precision, torch.float32)


def test_bad_precisions():
    require_precision(None, torch.float16)
    with pytest.raises(ValueError, match=r"^precision is 'high'; accepted: 'ieee', 'tf32', 'tf32x3' or None$"):
        require_precision("high", torch.float32)
    with pytest.raises(
        ValueError, match=r"^precision is 'ieee', which applies to torch\.float32 .*; got torch\.float16$"
    ):
        require_precision("ieee", torch.float16)
