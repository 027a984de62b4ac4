"""Random cells: a script drawn by Hypothesis, interpreted on expressions, so that it can be traced or called as it is.

And kernels that are interpreted instead of compiled, so that random Programs can run in the compiled tier.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

import dynbatch as dy

S, W, V, L, M = (1,), (2,), (3,), (5,), (3, 3)
PARAMETERS = {"A": M, "B": M, "N": (2, 3), "b": V, "g": V, "w": W, "s": S}

Step = tuple[str, int, int, int]

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "tanh": lambda x, i: dy.tanh(x),
    "logistic": lambda x, i: dy.logistic(x),
    "exp": lambda x, i: dy.exp(dy.tanh(x)),
    "square": lambda x, i: dy.square(dy.tanh(x)),
    "rectify": lambda x, i: dy.rectify(x - 0.25),
    "abs": lambda x, i: dy.abs(x + 0.1),
    "gelu": lambda x, i: dy.gelu(x),
    "softsign": lambda x, i: dy.softsign(x),
    "log": lambda x, i: dy.log(1.5 + dy.tanh(x)),
    "negate": lambda x, i: -x,
    "rest": lambda x, i: 1 - x,
    "scale": lambda x, i: x * (0.25 * (i % 5 + 1)),
    "divide": lambda x, i: x / (1 + dy.square(x)),
    "nobackprop": lambda x, i: dy.nobackprop(x) + x,
    "scale_gradient": lambda x, i: dy.scale_gradient(x, 0.5),
    "flip_gradient": lambda x, i: dy.flip_gradient(x),
}
BINARY: dict[str, Callable[..., Any]] = {
    "plus": lambda x, y: x + y,
    "minus": lambda x, y: x - y,
    "cmult": dy.cmult,
    "cdiv": lambda x, y: x / (1.5 + dy.tanh(y)),
    "bmax": dy.bmax,
    "esum": lambda x, y: dy.esum([x, y, x]),
    "average": lambda x, y: dy.average([x, y]),
    "emax": lambda x, y: dy.emax([x, y]),
    "logsumexp": lambda x, y: dy.logsumexp([x, y, y]),
}
SHAPED: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "bias": ((M, V), lambda x, y: x + y),
    "shift": ((V, S), lambda x, y: x - y),
    "stretch": ((M, S), lambda x, y: dy.cmult(y, x)),
    "product": ((M, V), lambda x, y: x * y),
    "products": ((M, M), lambda x, y: x * y),
    "transpose": ((M,), dy.transpose),
    "dot": ((V, V), dy.dot_product),
    "sum_elems": ((M,), dy.sum_elems),
    "norm": ((V,), dy.squared_norm),
    "sum_dim": ((M,), lambda x: dy.sum_dim(x, [1])),
    "max_dim": ((M,), dy.max_dim),
    "softmax": ((V,), dy.softmax),
    "attend": ((M, V), lambda x, y: x * dy.softmax(dy.transpose(x) * y)),
    "log_softmax": ((V,), dy.log_softmax),
    "front": ((V,), lambda x: x[0:2]),
    "back": ((L,), lambda x: x[2:5]),
    "middle": ((L,), lambda x: x[1:3]),
    "joined": ((V, W), lambda x, y: dy.concatenate([x, y])),
    "doubled": ((W, S), lambda x, y: dy.concatenate([y, x])),
    "columns": ((V, V, V), lambda x, y, z: dy.concatenate_cols([x, y, z])),
    "flat": ((M,), lambda x: dy.reshape(x, (9,))[2:7]),
    "gates": ((V, V), lambda x, y: (lambda z: dy.cmult(z[0:3], dy.tanh(z[3:6])))(dy.concatenate([x, y]))),
}
NAMES = [
    *ELEMENTWISE,
    *BINARY,
    *SHAPED,
    "shared",
    "gated",
    "narrow",
    "affine",
    "layer_norm",
    "pick",
    "column",
    "loss",
    "rate",
]

steps = st.tuples(st.sampled_from(NAMES), *[st.integers(0, 40)] * 3)
scripts = st.fixed_dictionaries(
    {
        "steps": st.lists(steps, min_size=1, max_size=12),
        "children": st.lists(steps, max_size=5),
        "reduce": st.sampled_from(["esum", "average", "emax", "logsumexp"]),
        "outputs": st.lists(st.integers(0, 20), min_size=1, max_size=3),
        "seed": st.integers(0, 99),
    }
)


class Pool:
    """Values made so far, by shape; there is one of each shape at least."""

    def __init__(self, dense: dict[str, Any], values: list[Any], k: Any, rate: Any) -> None:
        self.dense = dense
        self.values = values
        self.k, self.rate = k, rate
        self.by_shape: dict[tuple[int, ...], list[Any]] = {}
        for value in values:
            self._keep(value)

    def _keep(self, value: Any) -> Any:
        self.by_shape.setdefault(value.dim()[0], []).append(value)
        return value

    def add(self, value: Any) -> None:
        """A new value; the latest one."""
        self.values.append(self._keep(value))

    def get(self, shape: tuple[int, ...], i: int) -> Any:
        """A value of this shape: one of the latest, or a parameter."""
        found = self.by_shape.get(shape, [])
        named = [p for name, p in self.dense.items() if PARAMETERS[name] == shape]
        if not found or (i % 4 == 3 and named):
            return named[i // 4 % len(named)] if named else self._keep(dy.concatenate([self.get(V, i), self.get(W, i)]))
        return found[-1 - i // 4 % len(found)]

    def step(self, name: str, a: int, b: int, c: int) -> None:
        """One instruction of a script."""
        p, get = self.dense, self.get
        if name in ELEMENTWISE:
            self.add(ELEMENTWISE[name](self.values[-1 - a % min(3, len(self.values))], b))
        elif name in BINARY:
            x = self.values[-1 - a % min(3, len(self.values))]
            self.add(BINARY[name](x, get(x.dim()[0], b)))
        elif name in SHAPED:
            shapes, call = SHAPED[name]
            self.add(call(*[get(s, i) for s, i in zip(shapes, (a, b, c))]))
        elif name == "shared":
            self.add(p["AB"[a % 2]] * get(V, b))
        elif name == "gated":  # two products with the same input, one of them read by what makes the other
            x = get(V, a)
            self.add(dy.cmult(dy.logistic(p["A"] * x + p["b"]), dy.tanh(p["B"] * x) + get(V, b)))
        elif name == "narrow":
            self.add(p["N"] * get(V, a) + p["w"])
        elif name == "affine":
            self.add(dy.affine_transform([p["b"], p["A"], get(V, a), p["B"], get(V, b)]))
        elif name == "layer_norm":
            self.add(dy.layer_norm(dy.tanh(get(V, a)) + p["b"] * 3, p["g"], p["b"]))
        elif name == "pick":
            self.add(dy.pick(get(V, a), self.k))
        elif name == "column":
            self.add(dy.pick(get(M, a), self.k, 1))
        elif name == "loss":
            self.add(dy.pickneglogsoftmax(get(V, a), self.k))
        else:
            self.add(self.values[-1] * self.rate + (self.rate - 0.5))


def function(script: dict[str, Any], dense: dict[str, Any]) -> Callable[..., Any]:
    """The function that a script describes: ``f(x, h, m, children, k, rate)`` gives a tuple."""

    def run(x: Any, h: Any, m: Any, children: Any, k: int, rate: float) -> Any:
        def of_child(child: Any) -> Any:
            inner = Pool(dense, [x, child], k, rate)
            for step in script["children"]:
                inner.step(*step)
            return dy.tanh(inner.values[-1] + dy.sum_elems(child))  # a value that all children share is refused

        total = getattr(dy, script["reduce"])([of_child(c) for c in children])
        pool = Pool(dense, [h, m, x, total], k, rate)
        for step in script["steps"]:
            pool.step(*step)
        return tuple(pool.values[-1 - i % len(pool.values)] for i in script["outputs"])

    return run


def _quiet(f: Callable[[Any], Any]) -> Callable[[float], Any]:
    def call(x: float) -> Any:
        with np.errstate(all="ignore"):
            return f(np.float64(x))

    return staticmethod(call)  # type: ignore[return-value]


class _Math:
    """The functions of `math` as numba compiles them: they overflow to infinity instead of raising."""

    tanh, exp, log = _quiet(np.tanh), _quiet(np.exp), _quiet(np.log)
    log1p, expm1, sqrt = _quiet(np.log1p), _quiet(np.expm1), _quiet(np.sqrt)
    erf = staticmethod(math.erf)


_Function = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64)
_interpreted: dict[str, dict[str, Any]] = {}
_raised: list[BaseException] = []


class _JobFunction:
    """A function of a job that compiled code can call by its address, run by Python."""

    def __init__(self, function: Callable[[Any, int], None]) -> None:
        def call(job: Any, index: int) -> None:
            try:
                function(job, index)
            except BaseException as error:  # it would be lost in the code that called this
                _raised.append(error)

        self._callback = _Function(call)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value


def _call(function: int, arguments: tuple[int, ...]) -> int:
    """`dynbatch.cpu.native.call_long`."""
    types = [ctypes.c_int64] * len(arguments)
    result = ctypes.CFUNCTYPE(ctypes.c_int64, *types)(int(function))(*map(int, arguments))
    if _raised:
        raise _raised.pop()
    return result


def _array_at(pointer: tuple[type, int], size: int) -> np.ndarray:
    """`numba.carray`."""
    dtype, address = pointer
    kind = np.ctypeslib.as_ctypes_type(dtype)
    return np.ctypeslib.as_array((kind * size).from_address(int(address) or ctypes.addressof(_nothing)))


_nothing = ctypes.c_int64()


def interpreted(text: str) -> dict[str, Any]:
    """What `dynbatch.cpu.kernels.load` gives, run by Python: for float64 only."""
    found = _interpreted.get(text)
    if found is None:
        found = {}
        plain = re.sub(r"@(jit|job_function)\(.*?\)\n", "", text, flags=re.DOTALL)
        exec(compile(plain, "<interpreted kernel>", "exec"), found)
        found |= {"math": _Math, "call": _call, "call_long": _call, "address": lambda array: array.ctypes.data}
        found |= {"pointer_to": lambda zero, address: (type(zero), address), "carray": _array_at}
        if "kernel" in found:
            found["kernel"] = _JobFunction(found["kernel"])
        _interpreted[text] = found
    return found
