"""CUDA's built-in functions: expressions in x and y, the types that they take and give, and what they mean in NumPy."""

from __future__ import annotations

import math

import numpy as np

F, D, S, U, L, W = np.float32, np.float64, np.int32, np.uint32, np.int64, np.uint64
_C_NAMES = {F: "float", D: "double", S: "int", U: "unsigned", L: "long long", W: "unsigned long long"}
_SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, np.inf, -np.inf, np.nan]
COUNT = 64  # of operands


def each(function, result):
    """A function of numbers, applied to each of an array."""
    return lambda *operands: np.array(list(map(function, *(x.tolist() for x in operands))), result)


def _bits(dtype):
    """How many bits are set, lead as zeros, and where the lowest one is, counted from 1."""
    width = np.dtype(dtype).itemsize * 8

    def count(v):
        v &= (1 << width) - 1
        return v.bit_count() + 100 * (width - v.bit_length()) + 10000 * (v & -v).bit_length()

    return each(count, S)


def _high(dtype):
    return each(lambda a, b: a * b >> np.dtype(dtype).itemsize * 8, dtype)


def _lgamma(v):
    return math.inf if math.isinf(v) or (v <= 0 and v == int(v)) else math.lgamma(v)


def _classes(x):
    return np.isnan(x) + 2 * np.isinf(x) + 4 * np.isfinite(x) + 8 * np.signbit(x)


UNARY = [
    *[(F, F, f"{name}f(x)", getattr(np, name)) for name in ("exp", "tanh", "exp2", "expm1", "sin", "cos", "floor")],
    *[(D, D, f"{name}(x)", getattr(np, name)) for name in ("exp", "tanh", "exp2", "expm1", "sin", "cos", "ceil")],
    *[(F, F, f"{name}(x)", getattr(np, name)) for name in ("exp", "tanh", "trunc", "rint", "log", "sqrt")],
    (F, F, "__expf(x)", np.exp),
    (F, F, "__logf(x)", np.log),
    (F, F, "log1pf(x)", np.log1p),
    (D, D, "log1p(x)", np.log1p),
    (F, F, "__sinf(x) + __cosf(x)", lambda x: np.sin(x) + np.cos(x)),
    (F, F, "rsqrtf(x)", lambda x: 1 / np.sqrt(x)),
    (D, D, "rsqrt(x)", lambda x: 1 / np.sqrt(x)),
    (F, F, "erff(x)", each(math.erf, F)),
    (D, D, "lgamma(x)", each(_lgamma, D)),
    (F, F, "__saturatef(x)", lambda x: np.clip(np.nan_to_num(x, nan=0), 0, 1)),
    (F, S, "isnan(x) + 2 * isinf(x) + 4 * isfinite(x) + 8 * signbit(x)", _classes),
    (D, S, "isnan(x) + 2 * isinf(x) + 4 * isfinite(x) + 8 * signbit(x)", _classes),
    (F, S, "__float_as_int(x)", lambda x: x.view(S)),
    (F, U, "__float_as_uint(x)", lambda x: x.view(U)),
    (S, F, "__int_as_float(x & 0x7f7fffff)", lambda x: (x & 0x7F7FFFFF).view(F)),
    (D, L, "__double_as_longlong(x)", lambda x: x.view(L)),
    (D, D, "__hiloint2double(__double2hiint(x), __double2loint(x))", lambda x: x),
    (F, S, "__float2int_rn(x)", each(lambda v: 0 if v != v else round(min(max(v, -(2**31)), 2**31 - 1)), S)),
    (D, L, "__double2ll_rn(x)", each(lambda v: 0 if v != v else round(min(max(v, -(2**63)), 2**63 - 1)), L)),
    (S, S, "__popc(x) + 100 * __clz(x) + 10000 * __ffs(x)", _bits(S)),
    (L, S, "__popcll(x) + 100 * __clzll(x) + 10000 * __ffsll(x)", _bits(L)),
    (U, U, "__brev(x)", each(lambda v: int(f"{v:032b}"[::-1], 2), U)),
    (F, F, "__ldg(&xs[threadIdx.x]) + warpSize", lambda x: x + F(32)),
]
BINARY = [
    (F, F, "__powf(x, y)", np.power),
    (D, D, "pow(x, y)", np.power),
    (D, D, "atan2(x, y)", np.arctan2),
    (F, F, "__fdividef(x, y)", np.divide),
    (F, F, "fmaf(x, y, 1.5f)", lambda x, y: (x.astype(D) * y + 1.5).astype(F)),
    (F, F, "fminf(x, y)", np.fmin),
    (F, F, "max(x, y)", np.fmax),
    (D, D, "min(x, y)", np.fmin),
    (F, F, "copysignf(x, y)", np.copysign),
    (F, F, "fmodf(x, y)", np.fmod),
    (F, F, "__fmul_rn(__fadd_rn(x, y), __fsub_rn(x, y))", lambda x, y: (x + y) * (x - y)),
    (U, U, "__umulhi(x, y)", _high(U)),
    (S, S, "__mulhi(x, y)", _high(S)),
    (W, W, "__umul64hi(x, y)", _high(W)),
    (L, L, "__mul64hi(x, y)", _high(L)),
    (U, U, "__funnelshift_l(x, y, 5)", lambda x, y: (y << U(5)) | (x >> U(27))),
    (U, U, "__funnelshift_r(x, y, 5)", lambda x, y: (y << U(27)) | (x >> U(5))),
    (S, S, "min(x, y) ^ abs(y)", lambda x, y: np.minimum(x, y) ^ np.abs(y)),
    (L, L, "max(x, y) ^ abs(y)", lambda x, y: np.maximum(x, y) ^ np.abs(y)),
    (W, W, "min(x, y)", np.minimum),
    (F, D, "max(x, (double)y)", lambda x, y: np.fmax(x, y).astype(D)),
    (U, U, "min((int)(x / 2), y)", lambda x, y: np.minimum(x // 2, y)),
]
ALL = [(of, to, text, lambda x, y, f=f: f(x)) for of, to, text, f in UNARY] + BINARY


def source():
    """A module with a kernel for each of them, named f0, f1 and so on."""
    return "".join(
        f'extern "C" __global__ void f{n}(const {_C_NAMES[of]}* xs, const {_C_NAMES[of]}* ys, {_C_NAMES[to]}* out) {{\n'
        f"  {_C_NAMES[of]} x = xs[threadIdx.x], y = ys[threadIdx.x]; out[threadIdx.x] = {expression}; }}\n"
        for n, (of, to, expression, _) in enumerate(ALL)
    )


def operands(dtype):
    """Numbers of all kinds, for x and y."""
    rng = np.random.default_rng(0)
    if np.issubdtype(dtype, np.floating):
        numbers = 3 * rng.normal(size=(2, COUNT - len(_SPECIAL)))
        return np.array([*_SPECIAL, *numbers[0]], dtype), np.array([*numbers[1], *_SPECIAL], dtype)
    lowest, highest = np.iinfo(dtype).min + 1, np.iinfo(dtype).max  # -lowest is a number too
    x, y = (rng.integers(lowest, highest, COUNT, dtype, endpoint=True) for _ in range(2))
    x[:3], y[3:6] = (0, 1, highest), (0, 1, lowest)
    return x, y
