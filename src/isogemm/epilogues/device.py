"""The activations of `spec` in Triton: elementwise, on fp32 tiles.

EXACT: the operations of torch's own CUDA kernels, in their order (verified for every 16-bit number). Otherwise shorter
forms, whose error a 16-bit result does not show: below 2e-4 of the value where |z| <= 5 and 1e-7 beyond; 6e-5 for
gelu's derivative.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from isogemm.epilogues import random

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter has no libdevice
_LOG2_E = tl.constexpr(1.4426950408889634)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)
_QUICK = tl.constexpr(1.702)
_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
_ROUNDS = tl.constexpr(random.ROUNDS)
_LEFT, _RIGHT = map(tl.constexpr, random.MULTIPLIERS)
_STEP, _OTHER_STEP = map(tl.constexpr, random.KEY_STEPS)


@triton.jit
def philox(seed, c0, c1, c2):
    """The four words of `random`'s generator for counters (c0, c1, c2, 0), int32 tensors of one shape.

    It uses 64-bit products: tl.philox computes each half of a product by itself, with twice the multiplications.
    """
    c0, c1, c2 = c0.to(tl.uint32, bitcast=True), c1.to(tl.uint32, bitcast=True), c2.to(tl.uint32, bitcast=True)
    c3 = tl.zeros(c0.shape, tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        left, right = c0.to(tl.uint64) * _LEFT, c2.to(tl.uint64) * _RIGHT
        c0, c2 = (right >> 32).to(tl.uint32) ^ c1 ^ k0, (left >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = right.to(tl.uint32), left.to(tl.uint32)
        k0 += _STEP
        k1 += _OTHER_STEP
    return c0, c1, c2, c3


@triton.jit
def _exp(x):
    if _INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def _erf(x):
    if _INTERPRETED:
        return tl.erf(x)
    else:
        return libdevice.erf(x)


@triton.jit
def _tanh(x):
    if _INTERPRETED:
        return 1 - 2 / (tl.exp(2 * x) + 1)
    else:
        return libdevice.tanh(x)


@triton.jit
def _quotient(x, y):
    """x / y, to 2 ulp; 0 where y passes 2^126."""
    if _INTERPRETED:
        return x / y
    else:
        return libdevice.fast_dividef(x, y)


@triton.jit
def _logistic(x, EXACT: tl.constexpr):
    """1 / (1 + e^-x)"""
    if EXACT:
        return tl.div_rn(1.0, 1.0 + _exp(-x))
    else:
        return _quotient(1.0, 1.0 + tl.exp2(x * -_LOG2_E))


@triton.jit
def relu(z, EXACT: tl.constexpr):
    return tl.where(z <= 0, 0.0, z)  # a NaN passes


@triton.jit
def relu_derivative(z, EXACT: tl.constexpr):
    return tl.where(z <= 0, 0.0, 1.0)


@triton.jit
def _normal_logit(z):
    """x such that z is below a normal number with probability 1 / (1 + 2^x), to 1.5e-4 up to |z| = 5."""
    t = tl.minimum(z * z, 25.0)
    p = tl.fma(t, 1.2770069632014696e-09 * -_LOG2_E, 1.2166429955170352e-07 * _LOG2_E)
    p = tl.fma(t, p, 4.515068816620975e-06 * -_LOG2_E)
    p = tl.fma(t, p, 7.21773266819908e-05 * _LOG2_E)
    p = tl.fma(t, p, 0.0002729663909723886 * _LOG2_E)
    p = tl.fma(t, p, 0.07314390259367717 * -_LOG2_E)
    p = tl.fma(t, p, 1.5954572596782328 * -_LOG2_E)
    return z * p


@triton.jit
def gelu(z, EXACT: tl.constexpr):
    if EXACT:
        return (z * 0.5) * (1.0 + _erf(z * _SQRT_HALF))
    else:
        return z * _quotient(1.0, 1.0 + tl.exp2(_normal_logit(z)))


@triton.jit
def gelu_derivative(z, EXACT: tl.constexpr):
    if EXACT:
        density = tl.exp2(z * z * (-0.5 * _LOG2_E)) * _DENSITY
        return tl.fma(z, density, 0.5 * (1.0 + _erf(z * _SQRT_HALF)))
    else:  # a polynomial, to 6e-5: three special functions would take longer than the rest of an epilogue
        x = tl.clamp(z, -4.5, 4.5)
        s = tl.fma(x * x, 2 / 4.5**2, -1.0)
        p = tl.fma(s, -0.02472207136452198, 0.055966321378946304)
        p = tl.fma(s, p, -0.04548660293221474)
        p = tl.fma(s, p, 0.047734349966049194)
        p = tl.fma(s, p, -0.08775594830513)
        p = tl.fma(s, p, 0.10503783822059631)
        p = tl.fma(s, p, -0.0953681543469429)
        p = tl.fma(s, p, 0.08618613332509995)
        p = tl.fma(s, p, -0.08992297202348709)
        p = tl.fma(s, p, 0.15944574773311615)
        return tl.where(z < -5.5, 0.0, tl.fma(x, p, 0.5))


@triton.jit
def gelu_tanh(z, EXACT: tl.constexpr):
    if EXACT:
        inner = tl.fma(z * z * z, _CUBIC, z) * _SQRT_2_OVER_PI
        return (0.5 * z) * (1.0 + _tanh(inner))
    else:
        t = z * z
        inner = z * tl.fma(t, _CUBIC * _SQRT_2_OVER_PI * -2 * _LOG2_E, _SQRT_2_OVER_PI * -2 * _LOG2_E)
        return z * _quotient(1.0, 1.0 + tl.exp2(inner))


@triton.jit
def gelu_tanh_derivative(z, EXACT: tl.constexpr):
    t = z * z
    if EXACT:
        inner = tl.fma(z * t, _CUBIC, z) * _SQRT_2_OVER_PI
        gate = 0.5 * (1.0 + _tanh(inner))
    else:
        inner = z * tl.fma(t, _CUBIC * _SQRT_2_OVER_PI * -2 * _LOG2_E, _SQRT_2_OVER_PI * -2 * _LOG2_E)
        gate = _quotient(1.0, 1.0 + tl.exp2(inner))
    slope = z * tl.fma(t, 6 * _CUBIC * _SQRT_2_OVER_PI, 2 * _SQRT_2_OVER_PI)
    return gate * tl.fma(1.0 - gate, slope, 1.0)


@triton.jit
def quick_gelu(z, EXACT: tl.constexpr):
    return z * _logistic(z * _QUICK, EXACT)


@triton.jit
def quick_gelu_derivative(z, EXACT: tl.constexpr):
    gate = _logistic(z * _QUICK, EXACT)
    return gate * tl.fma(1.0 - gate, z * _QUICK, 1.0)


@triton.jit
def silu(z, EXACT: tl.constexpr):
    if EXACT:
        return tl.div_rn(z, 1.0 + _exp(-z))
    else:
        return z * _logistic(z, False)


@triton.jit
def silu_derivative(z, EXACT: tl.constexpr):
    gate = _logistic(z, EXACT)
    return gate * tl.fma(1.0 - gate, z, 1.0)


@triton.jit
def tanh(z, EXACT: tl.constexpr):
    if EXACT:
        return tl.where(tl.abs(z) < 1e-30, z, _tanh(z))  # _tanh would flush the smallest to zero
    else:
        return _tanh(z)


@triton.jit
def tanh_derivative(z, EXACT: tl.constexpr):
    y = _tanh(z)
    return 1.0 - y * y


@triton.jit
def tanh_of_output(y, EXACT: tl.constexpr):
    return 1.0 - y * y


@triton.jit
def sigmoid(z, EXACT: tl.constexpr):
    return _logistic(z, EXACT)


@triton.jit
def sigmoid_derivative(z, EXACT: tl.constexpr):
    y = _logistic(z, EXACT)
    return y * (1.0 - y)


@triton.jit
def sigmoid_of_output(y, EXACT: tl.constexpr):
    return y * (1.0 - y)


@triton.jit
def relu2(z, EXACT: tl.constexpr):
    positive = tl.where(z <= 0, 0.0, z)
    return positive * positive


@triton.jit
def relu2_derivative(z, EXACT: tl.constexpr):
    return 2.0 * tl.where(z <= 0, 0.0, z)


@triton.jit
def leaky_relu(z, EXACT: tl.constexpr, SLOPE: tl.constexpr):
    return tl.where(z > 0, z, z * SLOPE)


@triton.jit
def leaky_relu_derivative(z, EXACT: tl.constexpr, SLOPE: tl.constexpr):
    return tl.where(z > 0, 1.0, SLOPE)
