"""Initial values of parameters: DyNet's initializers, with DyNet's fans, bounds and defaults.

The figures were read off dyNET38 by running it; `docs/dynet_defaults.md` lists them with the commands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dynbatch.errors import ConfigurationError, ShapeError

__all__ = [
    "ConstInitializer",
    "GlorotInitializer",
    "IdentityInitializer",
    "Initializer",
    "NormalInitializer",
    "NumpyInitializer",
    "SaxeInitializer",
    "UniformInitializer",
]


class Initializer:
    """Base of the initializers: makes the initial values of one parameter.

    A subclass defines `values`.
    """

    def values(self, shape: tuple[int, ...], generator: np.random.Generator, lookup: bool = False) -> np.ndarray:
        """The initial values, an array of ``shape``.

        Arguments:
            shape: the parameter's shape; of a lookup parameter ``(V, *row shape)``.
            generator: where random values come from.
            lookup: True for a lookup parameter.

        Raises:
            ShapeError: the initializer does not fit the shape.
        """
        raise NotImplementedError


class GlorotInitializer(Initializer):
    """Uniform in ``[-b, b]`` with ``b = gain * sqrt(6 / fan)`` (Glorot and Bengio 2010); DyNet's default.

    For a matrix of shape ``(m, n)`` the fan is ``m + n``, for a vector of n elements ``2 n``, and for another
    number of dimensions twice their mean; a tensor of shape ``(h, w, channels, filters)`` counts as a convolution,
    with the fan ``h * w * (channels + filters)``. A lookup table of V rows counts as a tensor with the last
    dimension V, as in DyNet, so that the default for a table ``(V, d)`` has the fan ``V + d``.

    Arguments:
        is_lookup: leave the last dimension out of the fan; of a table that is V, so that each row counts alone.
        gain: 1 for tanh, 0.5 for rectify, 4 for logistic.
    """

    def __init__(self, is_lookup: bool = False, gain: float = 1.0) -> None:
        self.is_lookup = is_lookup
        self.gain = gain

    def values(self, shape: tuple[int, ...], generator: np.random.Generator, lookup: bool = False) -> np.ndarray:
        """Uniform values; see `Initializer.values`."""
        dims = (*shape[1:], shape[0]) if lookup else shape
        if self.is_lookup:
            dims = dims[:-1]
        if not dims:
            raise ShapeError(f"GlorotInitializer(is_lookup=True) needs two dimensions or more, not shape {shape}")
        if len(dims) == 4:
            fan = float(dims[0] * dims[1] * (dims[2] + dims[3]))
        else:
            fan = 2.0 * sum(dims) / len(dims)
        bound = self.gain * math.sqrt(6.0 / fan)
        return generator.uniform(-bound, bound, shape)


class UniformInitializer(Initializer):
    """Uniform in ``[-scale, scale]``."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def values(self, shape: tuple[int, ...], generator: np.random.Generator, lookup: bool = False) -> np.ndarray:
        """Uniform values; see `Initializer.values`."""
        return generator.uniform(-self.scale, self.scale, shape)


class NormalInitializer(Initializer):
    """Normal with the given mean and variance; as in DyNet the second argument is not the standard deviation."""

    def __init__(self, mean: float = 0.0, var: float = 1.0) -> None:
        if var < 0:
            raise ConfigurationError(f"NormalInitializer: a variance cannot be negative, and var is {var}")
        self.mean = mean
        self.var = var

    def values(self, shape: tuple[int, ...], generator: np.random.Generator, lookup: bool = False) -> np.ndarray:
        """Normal values; see `Initializer.values`."""
        return generator.normal(self.mean, math.sqrt(self.var), shape)


class ConstInitializer(Initializer):
    """The same value ``c`` everywhere."""

    def __init__(self, c: float) -> None:
        self.c = c

    def values(self, shape: tuple[int, ...], generator: np.random.Generator, lookup: bool = False) -> np.ndarray:
        """Constant values; see `Initializer.values`."""
        return np.full(shape, float(self.c))


class IdentityInitializer(Initializer):
    """The identity; only for square matrices."""

    def values(self, shape: tuple[int, ...], generator: np.random.Generator, lookup: bool = False) -> np.ndarray:
        """The identity matrix; see `Initializer.values`."""
        _require_square("IdentityInitializer", shape)
        return np.eye(shape[0])


class NumpyInitializer(Initializer):
    """The values of an array of the parameter's shape; of a lookup parameter ``(V, *row shape)``."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.asarray(array)

    def values(self, shape: tuple[int, ...], generator: np.random.Generator, lookup: bool = False) -> np.ndarray:
        """The array itself; see `Initializer.values`."""
        if self.array.shape != shape:
            raise ShapeError(f"an initial array of shape {self.array.shape} does not fit the shape {shape}")
        return self.array


class SaxeInitializer(Initializer):
    """A random orthonormal matrix times ``scale`` (Saxe et al. 2014); only for square matrices."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def values(self, shape: tuple[int, ...], generator: np.random.Generator, lookup: bool = False) -> np.ndarray:
        """A scaled orthonormal matrix; see `Initializer.values`."""
        _require_square("SaxeInitializer", shape)
        q, r = np.linalg.qr(generator.standard_normal(shape))
        # The signs make the distribution uniform over the orthogonal group (Mezzadri 2007).
        return self.scale * q * np.where(np.diag(r) < 0, -1.0, 1.0)


class _HeInitializer(Initializer):
    """What ``init="he"`` means in DyNet: normal with the variance ``1 / (2 n)``, n the last dimension."""

    def values(self, shape: tuple[int, ...], generator: np.random.Generator, lookup: bool = False) -> np.ndarray:
        return generator.normal(0.0, math.sqrt(0.5 / shape[-1]), shape)


def _require_square(initializer: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ShapeError(f"{initializer} needs a square matrix, not the shape {shape}")


_BY_NAME: dict[str, Callable[[float, float, float], Initializer]] = {
    "glorot": lambda scale, mean, std: GlorotInitializer(),
    "he": lambda scale, mean, std: _HeInitializer(),
    "uniform": lambda scale, mean, std: UniformInitializer(scale),
    "normal": lambda scale, mean, std: NormalInitializer(mean, std * std),
    "identity": lambda scale, mean, std: IdentityInitializer(),
    "saxe": lambda scale, mean, std: SaxeInitializer(scale),
}


def initializer_from(init: Any, scale: float = 1.0, mean: float = 0.0, std: float = 1.0) -> Initializer:
    """The initializer that DyNet's ``init`` argument means.

    Arguments:
        init: None (Glorot), an `Initializer`, a number, an array, or one of the names ``"glorot"``, ``"he"``,
            ``"uniform"``, ``"normal"``, ``"identity"`` and ``"saxe"``.
        scale: bound of ``"uniform"``, factor of ``"saxe"``.
        mean: mean of ``"normal"``.
        std: standard deviation of ``"normal"``.

    Raises:
        ConfigurationError: an unknown name.
        TypeError: ``init`` is something else.
    """
    if init is None:
        return GlorotInitializer()
    if isinstance(init, Initializer):
        return init
    if isinstance(init, str):
        if init not in _BY_NAME:
            raise ConfigurationError(f"unknown initializer {init!r}: choose one of {', '.join(_BY_NAME)}")
        return _BY_NAME[init](scale, mean, std)
    if isinstance(init, (bool, int, float, np.number, np.bool_)):
        return ConstInitializer(float(init))
    if isinstance(init, np.ndarray):
        return NumpyInitializer(init)
    raise TypeError(f"init must be an initializer, a number, an array or a name, not {type(init).__name__}")
