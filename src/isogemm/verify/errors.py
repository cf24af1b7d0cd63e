"""Errors measured in fp64, and bounds for them: multiples of torch's own error at that dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_error(actual: Tensor, reference: Tensor, scale: Tensor | None = None) -> float:
    """Largest |actual - reference| / scale over the elements whose fp64 reference is finite in the result's dtype.

    `scale` is the natural size of an element's rounding error, for a GEMM |A| @ |B|, elementwise or
    broadcastable; without it, max|reference|. A NaN or Inf where the reference is finite is an infinite error.
    """
    _require_reference(actual, reference, "actual")
    finite, _, natural = _magnitudes(reference, actual.dtype, scale)
    return _largest(_ratio(_absolute_error(actual, reference, finite), natural))


def assert_no_worse_than_torch(
    actual: Tensor, torch_result: Tensor, reference: Tensor, *, factor: float = 2.0, ulps: float = 1,
    scale: Tensor | None = None, what: str = "",
) -> tuple[float, float]:  # fmt: skip
    """Assert, for every element whose fp64 reference is finite in the result's dtype,

        |actual - reference| <= factor * E * scale + ulps * ulp(reference)

    where E = max(|torch_result - reference| / scale) over the elements that torch has finite, ulp(x) is the
    spacing of the result's dtype at x, and `scale` is as in `scaled_error`. Returns isogemm's scaled error and torch's.
    """
    __tracebackhide__ = True
    _require_reference(actual, reference, "actual")
    _require_reference(torch_result, reference, "torch_result")
    if actual.dtype != torch_result.dtype:
        raise AssertionError(f"{_prefix(what)}dtype {actual.dtype}, but torch's result is {torch_result.dtype}")
    finite, magnitude, natural = _magnitudes(reference, actual.dtype, scale)
    torch_error = _absolute_error(torch_result, reference, finite & torch_result.isfinite())
    allowed = factor * _largest(_ratio(torch_error, natural)) * natural + ulps * _ulp(magnitude, actual.dtype)
    error = _absolute_error(actual, reference, finite)
    excess = error > allowed
    if bool(excess.any()):
        worst = _ratio(error, allowed).argmax()
        coordinate = tuple(int(at) for at in torch.unravel_index(worst, error.shape))
        raise AssertionError(
            f"{_prefix(what)}{int(excess.sum())} of {error.numel()} elements exceed "
            f"{factor:g} x torch's error + {ulps:g} ulp; worst at {coordinate}: "
            f"got {actual[coordinate].item()!r}, torch {torch_result[coordinate].item()!r}, "
            f"reference {reference[coordinate].item()!r}, "
            f"error {error[coordinate].item():.3g}, allowed {allowed[coordinate].item():.3g}"
        )
    return scaled_error(actual, reference, scale), scaled_error(torch_result, reference, scale)


def _require_reference(result: Tensor, reference: Tensor, name: str) -> None:
    if reference.dtype != torch.float64:
        raise TypeError(f"reference: got {reference.dtype}, expected torch.float64")
    if result.shape != reference.shape:
        raise AssertionError(f"{name}: shape {tuple(result.shape)}, reference {tuple(reference.shape)}")


def _absolute_error(result: Tensor, reference: Tensor, where: Tensor) -> Tensor:
    error = (result.detach().double() - reference).abs()
    return torch.where(where, error.nan_to_num(nan=torch.inf, posinf=torch.inf), 0)


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """error / size with 0 / 0 = 0: an exact zero is no error, whatever the scale."""
    return torch.where(error == 0, 0, error / size)


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _magnitudes(reference: Tensor, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Where the reference is finite in the dtype, its absolute values there, and the scale of an element's error."""
    finite = reference.to(dtype).isfinite()
    magnitude = torch.where(finite, reference, 0).abs()
    if scale is None:
        largest = magnitude.max() if magnitude.numel() else magnitude.sum()
        return finite, magnitude, largest.expand(magnitude.shape)
    natural = torch.where(finite, scale.detach().double(), 1)
    if not bool(((natural >= 0) & natural.isfinite()).all()):
        raise ValueError("scale: got negative or non-finite values, expected sizes such as |A| @ |B|")
    return finite, magnitude, natural


def _ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    exponent = torch.frexp(magnitude.clamp_min(info.smallest_normal)).exponent.double()
    return torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)


def _prefix(what: str) -> str:
    return f"{what}: " if what else ""
