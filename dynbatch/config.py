"""Settings of the process: device, strategy, seed, dtype, threads, checks; `init` and its environment variables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dynbatch.errors import ConfigurationError

if TYPE_CHECKING:
    import numpy as np

STRATEGIES = ("off", "depth", "agenda")
DTYPES = ("float32", "float64")
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): a bijective scramble of 64 bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def key_at(base: int, number: int) -> int:
    """Random key ``number`` of the stream that begins at ``base``, as a signed 64-bit integer."""
    key = mix64((base + number * _GOLDEN) & _MASK)
    return key - (1 << 64) if key >> 63 else key


class Config:
    """The current settings; read anywhere, changed through `init` only.

    Attributes:
        draws: how many random keys were drawn here since the seed was set, for nodes and for the streams of graphs
            (`dynbatch.random_stream`); part of every random key, and saved in checkpoints so that a resumed run draws
            the same numbers.
        parameters_exist: set by the first parameter; dtype and seed are fixed from then on.
    """

    def __init__(self) -> None:
        self.device = "cpu"
        self.autobatch = "agenda"
        self.seed: int | None = None
        self.dtype = "float32"
        self.threads: int | None = None
        self.check_validity = False
        self.debug = False
        self.parameters_exist = False
        self.draws = 0
        self._generator: np.random.Generator | None = None
        self._entropy: int | None = None

    @property
    def entropy(self) -> int:
        """The seed in use: ``seed`` where one was given, else one drawn once for this process."""
        if self._entropy is None:
            self._entropy = self.seed if self.seed is not None else int.from_bytes(os.urandom(7), "little")
        return self._entropy

    @entropy.setter
    def entropy(self, value: int) -> None:
        self._entropy = value
        self._generator = None

    @property
    def generator(self) -> np.random.Generator:
        """NumPy's generator for initial parameter values."""
        if self._generator is None:
            import numpy as np

            self._generator = np.random.default_rng(self.entropy)
        return self._generator

    def next_key(self) -> int:
        """A fresh random key, as a signed 64-bit integer: (seed, counter), scrambled."""
        self.draws += 1
        return key_at(mix64(self.entropy & _MASK), self.draws)


config = Config()


def truth(text: str) -> bool:
    """A truth value from the environment."""
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise ConfigurationError(f"expected a truth value such as 0 or 1, not {text!r}")


_PARSERS: dict[str, Any] = {
    "device": str,
    "autobatch": str,
    "seed": int,
    "dtype": str,
    "threads": int,
    "check_validity": truth,
    "debug": truth,
}
_CHANGEABLE_LATE = ("device", "autobatch", "threads", "check_validity", "debug")


def _from_environment() -> dict[str, Any]:
    found = {}
    for name, parse in _PARSERS.items():
        text = os.environ.get(f"DYNBATCH_{name.upper()}")
        if text is not None and (text or parse is not int):
            try:
                found[name] = parse(text)
            except ValueError as error:
                raise ConfigurationError(f"DYNBATCH_{name.upper()}={text!r}: {error}") from None
    return found


def check_strategy(name: object) -> str:
    """``name`` where it is a known strategy; DyNet's False, True, 0, 1, 2 and 3 are understood too."""
    if isinstance(name, (bool, int)):
        by_number = {0: "off", 1: "agenda", 2: "depth", 3: "depth"}
        name = by_number.get(int(name), name)
    if name not in STRATEGIES:
        raise ConfigurationError(f"unknown batching strategy {name!r}: choose one of {', '.join(STRATEGIES)}")
    return str(name)


def check_device(name: object) -> str:
    """The full name of a device that can be used: ``"cpu"``, or ``"cuda:0"`` for ``"cuda"``.

    Raises:
        ConfigurationError: no name of a device.
        DeviceError: the device cannot be used; it says why.
    """
    if name == "cpu":
        return "cpu"
    from dynbatch.cuda.devices import driver, full_name

    found = full_name(name)
    driver(found)
    return found


def _check(name: str, value: Any) -> Any:
    if name == "autobatch":
        return check_strategy(value)
    if name == "device":
        value = check_device(value)
    elif name == "dtype":
        value = getattr(value, "__name__", None) or getattr(value, "name", None) or str(value)
        if value not in DTYPES:
            raise ConfigurationError(f"unknown dtype {value!r}: choose one of {', '.join(DTYPES)}")
    elif name in ("seed", "threads") and value is not None:
        if isinstance(value, bool) or int(value) != value or int(value) < (1 if name == "threads" else 0):
            raise ConfigurationError(f"{name} must be a {'positive' if name == 'threads' else 'non-negative'} integer")
        value = int(value)
    elif name in ("check_validity", "debug"):
        value = bool(value)
    return value


class _Unset:
    def __repr__(self) -> str:
        return "(environment, else the default)"


UNSET: Any = _Unset()


def init(
    device: str = UNSET,
    autobatch: str = UNSET,
    seed: int | None = UNSET,
    dtype: str = UNSET,
    threads: int | None = UNSET,
    check_validity: bool = UNSET,
    debug: bool = UNSET,
) -> None:
    """Set how dynbatch runs. Optional: without it the environment or the defaults hold.

    An argument that is not given comes from ``DYNBATCH_<NAME>`` in the environment, else it is the default
    (on a later call: it stays as it was).

    Arguments:
        device: ``"cpu"``, ``"cuda"`` (the first GPU) or ``"cuda:1"``; see `devices`. Parameters are made there; those
            that exist move with `ParameterCollection.to`.
        autobatch: the batching strategy, ``"off"``, ``"depth"`` or ``"agenda"`` (the default).
        seed: seed of initial values and of all random ops; None draws one from the system.
        dtype: ``"float32"`` (the default) or ``"float64"``.
        threads: the most threads that BLAS and compiled kernels use together; None means all cores.
        check_validity: raise `ValidityError` at the first batch that computes a NaN or an infinity.
        debug: check every cell call against a fresh trace, every softmax for fully masked rows, and kernels that
            users bring (`custom_op`); and print one line a batch.

    Raises:
        ConfigurationError: an unknown value; or seed or dtype changed after parameters were made.
        DeviceError: the device cannot be used; it says why.
    """
    given = {
        "device": device,
        "autobatch": autobatch,
        "seed": seed,
        "dtype": dtype,
        "threads": threads,
        "check_validity": check_validity,
        "debug": debug,
    }
    changes = {name: _check(name, value) for name, value in given.items() if value is not UNSET}
    if config.parameters_exist:
        for name, value in changes.items():
            if name not in _CHANGEABLE_LATE and value != getattr(config, name):
                raise ConfigurationError(
                    f"init({name}={value!r}) after parameters were made: only {', '.join(_CHANGEABLE_LATE)} "
                    f"can change then. Call init before the first ParameterCollection is filled."
                )
    from dynbatch.graph import renew_cg

    fresh = "seed" in changes and not config.parameters_exist
    for name, value in changes.items():
        setattr(config, name, value)
    if fresh:
        config._entropy = None
        config._generator = None
        config.draws = 0
    if "dtype" in changes or "device" in changes:
        renew_cg()


def load_environment() -> None:
    """Take the settings that the environment names; called once, at import."""
    for name, value in _from_environment().items():
        setattr(config, name, _check(name, value))
