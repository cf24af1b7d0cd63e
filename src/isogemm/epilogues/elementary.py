"""Elementary functions whose CPU results do not depend on an element's position.

torch computes whole vectors by one function and the rest of a thread's share by another, so its bits depend on the
size, the number of threads and the vector unit. These functions use sums, products, quotients and shifts in float64,
one torch operation each, which round alike everywhere; the result is rounded to the argument's dtype. Their error is
below 0.71 ulp of a float32. On a GPU and for float64 they are torch's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Form = Callable[[Tensor], Tensor]

_SHARE = 32768  # elements per thread and block: the fewest that torch gives to a thread, and a core's cache holds them
_BITS = 52  # of a float64's fraction
_ROUND = 1.5 * 2.0**_BITS  # added to a number, it leaves the nearest integer in the lowest bits
_SQRT_HALF = 0.7071067811865476
_ONE_BITS, _SQRT_HALF_BITS = 0x3FF0000000000000, 0x3FE6A09E667F3BCD  # of 1 and of sqrt(1/2)
_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453
_MOST = 700.0  # an exponent past which a 16- or 32-bit result is 0 or Inf, and a float64 is neither
_LEAST = 2.0**-900  # of a factor; smaller ones are 0 in any result

# tanh(f ln(2) / 2) = f (p0 + p1 f^2) / (q0 + f^2) for |f| <= 1/2, of 2^f to 1e-10.
_TANH_P = 7.215285237667849, 0.05769022674254286
_TANH_Q = 20.818912500668045
# erf(x) = x P(x^2) / Q(x^2) for |x| <= 4.1, to 1.3e-8; P is 1e-8 too large, so that the last values are 1 exactly.
_ERF_MOST = 4.1
_ERF_P = (
    -0.00021229491211669288, 0.07451624897745852, 5.996437688736877, 60.56153382137632, 853.7004517708166,
    2908.1917575298908, 17716.967090456874,
)  # fmt: skip
_ERF_Q = 1.0, 20.602994717004975, 243.13566316947055, 1790.1282027103118, 7811.0702930382, 15701.25323825512
_CUBIC = 0.044715  # of gelu's tanh form
_SQRT_2_OVER_PI = 0.7978845608028654


def _replacing(torchs: Form, derivative: Form) -> Callable[[Form], Form]:
    """Replace `torchs` on the CPU by a function of a float64 tensor, which it may overwrite."""

    def of(function: Form) -> Form:
        def in_blocks(x: Tensor) -> Tensor:
            result = torch.empty_like(x, memory_format=torch.contiguous_format)
            given, found = x.reshape(-1), result.view(-1)
            step = _SHARE * torch.get_num_threads()
            for start in range(0, len(given), step):
                block = slice(start, start + step)
                found[block].copy_(function(given[block].double()))
            return result

        @functools.wraps(function)
        def run(x: Tensor) -> Tensor:
            if x.device.type != "cpu" or x.dtype is torch.float64:
                return torchs(x)
            if x.requires_grad and torch.is_grad_enabled():
                return cast(Tensor, cast(Any, _Differentiable).apply(x, in_blocks, derivative))
            return in_blocks(x)

        return run

    return of


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Form, derivative: Form) -> Tensor:
        ctx.save_for_backward(x)
        ctx.derivative = derivative
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.derivative(*ctx.saved_tensors), None, None


def _quotient(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e^x = 2^n (even + odd) / (even - odd): even, odd, and n where a float64 has its exponent."""
    x.clamp_(-_MOST, _MOST).mul_(_LOG2_E)
    rounded = x + _ROUND
    x -= rounded - _ROUND  # to [-1/2, 1/2]
    square = x * x
    odd = (square * _TANH_P[1]).add_(_TANH_P[0]).mul_(x)
    return square.add_(_TANH_Q), odd, rounded.view(torch.int64).bitwise_left_shift_(_BITS)


def _power(x: Tensor) -> tuple[Tensor, Tensor]:
    """The dividend and the divisor of e^x."""
    even, odd, exponent = _quotient(x)
    above = even + odd
    above.view(torch.int64).add_(exponent)
    return above, even.sub_(odd)


def _logistic(x: Tensor) -> Tensor:
    """e^x / (1 + e^x)"""
    above, below = _power(x)
    return above.div_(below.add_(above))


def _gated(x: Tensor, logit: Tensor) -> Tensor:
    """x times the logistic function, whose smallest values are 0: as in torch, -Inf gives NaN."""
    return F.threshold(_logistic(logit), _LEAST, 0.0, inplace=True).mul_(x)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """The highest power's coefficient first."""
    value = (x * coefficients[0]).add_(coefficients[1])
    for coefficient in coefficients[2:]:
        value.mul_(x).add_(coefficient)
    return value


def _erf(x: Tensor) -> Tensor:
    x.clamp_(-_ERF_MOST, _ERF_MOST)
    square = x * x
    value = _polynomial(square, _ERF_P).mul_(x.mul_(1 + 1e-8))
    return value.div_(_polynomial(square, _ERF_Q)).clamp_(-1, 1)


@_replacing(torch.exp, lambda x: exp(x))
def exp(x: Tensor) -> Tensor:
    above, below = _power(x)
    return above.div_(below)


@_replacing(torch.log, torch.reciprocal)
def log(x: Tensor) -> Tensor:
    """The natural logarithm of positive normal numbers and NaN; of others it is wrong."""
    bits = x.view(torch.int64)
    exponent = (bits - _SQRT_HALF_BITS).bitwise_right_shift_(_BITS)
    fraction = (bits - (exponent << _BITS)).view(torch.float64)  # sqrt(1/2) to sqrt(2)
    u = (fraction - 1).div_(fraction.add_(1))
    series = _polynomial(u * u, (2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0)).mul_(u)
    return series.add_(exponent.double().mul_(_LN_2)).add_(x.sub_(x))


@_replacing(torch.erf, lambda x: exp(-x * x) * (2 / math.sqrt(math.pi)))
def erf(x: Tensor) -> Tensor:
    return _erf(x)


@_replacing(torch.tanh, lambda x: 1 - tanh(x) ** 2)
def tanh(x: Tensor) -> Tensor:
    even, odd, exponent = _quotient(x * 2)
    power = exponent.add_(_ONE_BITS).view(torch.float64)  # 2^n
    more, less = power + 1, power - 1
    return (less * even).add_(more * odd).div_(more.mul_(even).add_(less.mul_(odd))).copysign_(x)


@_replacing(torch.sigmoid, lambda x: sigmoid(x) * sigmoid(-x))
def sigmoid(x: Tensor) -> Tensor:
    return _logistic(x)


def silu_derivative(x: Tensor) -> Tensor:
    gate = sigmoid(x)
    return gate + x * gate * (1 - gate)


@_replacing(F.silu, silu_derivative)
def silu(x: Tensor) -> Tensor:
    return _gated(x, x.clone())


def gelu_derivative(x: Tensor) -> Tensor:
    density = exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return 0.5 * (1 + erf(x * _SQRT_HALF)) + x * density


@_replacing(F.gelu, gelu_derivative)
def gelu(x: Tensor) -> Tensor:
    return _erf(x * _SQRT_HALF).add_(1).mul_(x.mul_(0.5))


def gelu_tanh_derivative(x: Tensor) -> Tensor:
    inner = tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x * x * x))
    slope = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
    return 0.5 * (1 + inner) + 0.5 * x * (1 - inner * inner) * slope


@_replacing(functools.partial(F.gelu, approximate="tanh"), gelu_tanh_derivative)
def gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x).mul_(2 * _SQRT_2_OVER_PI * _CUBIC).add_(2 * _SQRT_2_OVER_PI).mul_(x)
    return _gated(x, inner)
