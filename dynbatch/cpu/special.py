"""Scalar functions for generated kernels, as plain arithmetic that LLVM vectorizes (calls to libm do not).

The float32 versions are polynomials; the float64 versions call libm, since their use is checking, not speed. What must
not be computed under a kernel's fast-math flags says so itself: left unset, numba hands the caller's flags on.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types, vectorize
from numba.extending import intrinsic


@intrinsic
def _float_from_bits(typing_context, bits):
    """The float32 with these 32 bits."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def _maximum(typing_context, x, y):
    """LLVM's maximum, which keeps NaN, and which it vectorizes in a loop (a comparison it would not)."""

    def generate(context, builder, signature, args):
        type = args[0].type
        function = builder.module.declare_intrinsic("llvm.maximum", [type], ir.FunctionType(type, [type, type]))
        return builder.call(function, args)

    return x(x, x), generate


@njit(inline="always", error_model="numpy")
def greatest(x, y):
    """The greater of two numbers; NaN if either is."""
    return _maximum(x, y)


_LIMIT = np.float32(7.90531110763549805)
_P = [
    np.float32(c)
    for c in (
        -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
        1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03,
    )
]  # fmt: skip
_Q = [np.float32(c) for c in (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)]
_P0, _P1, _P2, _P3, _P4, _P5, _P6 = _P
_Q0, _Q1, _Q2, _Q3 = _Q
_HALF, _ONE = np.float32(0.5), np.float32(1)


@njit(inline="always", error_model="numpy")
def tanh32(x):
    """Hyperbolic tangent as a clamped rational polynomial (coefficients as in Eigen); NaN stays NaN. Error 3e-7."""
    x = _LIMIT if x > _LIMIT else x
    x = -_LIMIT if x < -_LIMIT else x
    s = x * x
    p = (((((_P0 * s + _P1) * s + _P2) * s + _P3) * s + _P4) * s + _P5) * s + _P6
    return x * p / (((_Q0 * s + _Q1) * s + _Q2) * s + _Q3)


_ERF_LIMIT = np.float32(3.95)  # beyond it is one
_A0, _A1, _A2, _A3, _A4, _A5 = (
    np.float32(c) for c in (2.02590952e-06, 2.84687378e-04, 3.80814902e-03, 5.28754088e-02, 1.91550028e-01, 1.12837914)
)
_B0, _B1, _B2, _B3, _B4 = (
    np.float32(c) for c in (3.78317977e-05, 1.17072256e-03, 1.50550652e-02, 1.14559506e-01, 5.03089468e-01)
)


@njit(inline="always", error_model="numpy")
def erf32(x):
    """The error function as a rational polynomial, fitted to its relative error; NaN stays NaN. Error 4e-7.

    It is exactly one where it is that in single precision: GELU multiplies what is missing to one by large numbers.
    """
    x = _ERF_LIMIT if x > _ERF_LIMIT else x
    x = -_ERF_LIMIT if x < -_ERF_LIMIT else x
    s = x * x
    p = ((((_A0 * s + _A1) * s + _A2) * s + _A3) * s + _A4) * s + _A5
    y = x * p / (((((_B0 * s + _B1) * s + _B2) * s + _B3) * s + _B4) * s + _ONE)
    y = _ONE if x >= _ERF_LIMIT else y
    return -_ONE if x <= -_ERF_LIMIT else y


_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP_HIGH, _EXP_LOW = np.float32(89), np.float32(-104.5)  # beyond are infinity and zero
_BIAS, _MANTISSA, _ONE_BIT = np.int32(127), np.int32(23), np.int32(1)
_E0, _E1, _E2, _E3, _E4, _E5 = (
    np.float32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)


@njit(forceinline=True, error_model="numpy", fastmath={"contract"})
def exp32(x):
    """Exponential by range reduction to powers of two (the method and constants of Cephes); NaN stays NaN. Error 1e-7.

    The power of two is multiplied in two steps, so that neither overflows before the result does and denormal results
    come out; the kernel's own flags would let the two be joined.
    """
    inside = _EXP_HIGH if x > _EXP_HIGH else x
    inside = _EXP_LOW if inside < _EXP_LOW else inside
    n = np.floor(inside * _LOG2E + _HALF)
    r = inside - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    y = p * r * r + r + _ONE
    whole = np.int32(n)
    half = np.int32(whole >> _ONE_BIT)
    y = y * _float_from_bits(np.int32((half + _BIAS) << _MANTISSA))
    return y * _float_from_bits(np.int32((np.int32(whole - half) + _BIAS) << _MANTISSA))


@njit(inline="always", error_model="numpy")
def logistic32(x):
    """The logistic function, right to the last bits also where it is tiny (by way of tanh it would be zero)."""
    return _ONE / (_ONE + exp32(-x))


@njit(inline="always", error_model="numpy")
def logistic64(x):
    """The logistic function."""
    return 1.0 / (1.0 + math.exp(-x))


@njit(forceinline=True, error_model="numpy", fastmath=False)
def quotient(x, y):
    """Division that is not replaced by multiplication with the inverse."""
    return x / y


@njit(forceinline=True, error_model="numpy", fastmath=False)
def inverse_root(x):
    """One divided by the square root, without the approximation that is NaN where the root is infinite."""
    return _ONE / math.sqrt(x)


_GOLDEN, _LOW_BITS = np.uint64(0x9E3779B97F4A7C15), np.uint64(12)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT1, _SHIFT2, _SHIFT3 = np.uint64(30), np.uint64(27), np.uint64(31)
_BELOW_ONE = 1 - 2.0**-24  # in float32; what is greater would be rounded to one


@njit(inline="always", error_model="numpy")
def _mix(x):
    x = (x ^ (x >> _SHIFT1)) * _MIX1
    x = (x ^ (x >> _SHIFT2)) * _MIX2
    return x ^ (x >> _SHIFT3)


@njit(inline="always", error_model="numpy")
def uniform64(key, salt, i):
    """Element ``i`` of a uniform draw in (0, 1): the same number as in `dynbatch.ops.random`."""
    start = _mix(np.uint64(key) + np.uint64(salt) * _GOLDEN)
    bits = _mix(start + np.uint64(i + 1) * _GOLDEN)
    return (np.float64(bits >> _LOW_BITS) + 0.5) * 2.0**-52


@njit(inline="always", error_model="numpy")
def uniform32(key, salt, i):
    """The same in single precision, still below one."""
    u = uniform64(key, salt, i)
    return np.float32(_BELOW_ONE if u > _BELOW_ONE else u)


@njit(inline="always", error_model="numpy")
def normal64(key, salt, i, size):
    """Element ``i`` of a normal draw of ``size`` elements."""
    radius = math.sqrt(-2.0 * math.log(uniform64(key, salt, i)))
    return radius * math.cos(2.0 * math.pi * uniform64(key, salt, i + size))


@njit(inline="always", error_model="numpy")
def normal32(key, salt, i, size):
    """The same in single precision."""
    return np.float32(normal64(key, salt, i, size))


@vectorize(["float32(float32)", "float64(float64)"], cache=True)
def erf(x):
    """The error function, of arrays."""
    return math.erf(x)
