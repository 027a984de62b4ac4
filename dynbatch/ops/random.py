"""Counter-based random numbers: element ``i`` of a draw is a hash of (the node's key, which draw, ``i``).

The key is a payload given at recording (see `dynbatch.config.Config.next_key`), so what is drawn depends neither on
the strategy nor on the batch, and recomputing a value draws it again. The hash is SplitMix64's.
"""

from __future__ import annotations

import numpy as np

from dynbatch.ops.primitive import Array, Indexed, Primitive
from dynbatch.types import Type, type_of

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ELEMENT = np.uint64(0xD1B54A32D192ED03)  # another odd constant, so that elements and draws do not meet


def _mix(x: Array) -> Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _uniform(key: Array, size: int, salt: int) -> Array:
    """(rows, size) numbers in (0, 1), open at both ends so that logarithms are finite."""
    with np.errstate(over="ignore"):
        start = _mix(key.view(np.uint64) + np.uint64(salt) * _GOLDEN)
        bits = _mix(start[:, None] + np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


class Uniform(Indexed):
    """Uniform in (0, 1)."""

    name = "random_uniform"
    formula = "uniform(x, salt, i)"

    def infer(self, key: None, shape: tuple[int, ...], salt: int, dtype: str) -> Type:
        return type_of(shape, dtype)

    def numpy(self, key: Array, shape: tuple[int, ...], salt: int, dtype: str) -> Array:  # type: ignore[override]
        t = type_of(shape, dtype)
        u = _uniform(key, t.size, salt)
        if dtype == "float32":  # rounding to float32 can reach 1
            u = np.minimum(u, 1 - 2.0**-24)
        return u.astype(dtype).reshape(-1, *t.storage)


class Normal(Indexed):
    """Normal with mean zero and deviation one, by Box and Muller's transform of two uniforms."""

    name = "random_normal"
    formula = "normal(x, salt, i, size)"

    def infer(self, key: None, shape: tuple[int, ...], salt: int, dtype: str) -> Type:
        return type_of(shape, dtype)

    def numpy(self, key: Array, shape: tuple[int, ...], salt: int, dtype: str) -> Array:  # type: ignore[override]
        t = type_of(shape, dtype)
        u = _uniform(key, 2 * t.size, salt)
        radius = np.sqrt(-2 * np.log(u[:, : t.size]))
        return (radius * np.cos(2 * np.pi * u[:, t.size :])).astype(dtype).reshape(-1, *t.storage)


class ElementKey(Primitive):
    """A key for each element of a node's list, from the node's key."""

    name = "element_key"
    expands = True

    def infer(self, key: None, ptr: None) -> None:
        return None

    def numpy(self, key: Array, ptr: Array) -> Array:  # type: ignore[override]
        lengths = np.diff(ptr)
        place = np.arange(1, ptr[-1] + 1) - np.repeat(ptr[:-1], lengths)
        with np.errstate(over="ignore"):
            mixed = _mix(np.repeat(key.view(np.uint64), lengths) + place.astype(np.uint64) * _ELEMENT)
        return mixed.view(np.int64)


element_key = ElementKey()
uniform = Uniform()
normal = Normal()
