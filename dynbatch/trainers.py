"""Trainers: DyNet's update rules, clipping, weight decay and sparse updates, with DyNet's names and defaults.

The defaults and rules were checked against dyNET38 by running it; see `docs/dynet_defaults.md`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dynbatch.buffers import aligned_zeros
from dynbatch.errors import FileFormatError, ValidityError
from dynbatch.lookup_parameters import LookupParameter
from dynbatch.parameters import Parameter, ParameterCollection

if TYPE_CHECKING:
    from dynbatch.cuda.copies import DeviceCopy

__all__ = [
    "AMSGradTrainer",
    "AdagradTrainer",
    "AdamTrainer",
    "AmsgradTrainer",
    "MomentumSGDTrainer",
    "RMSPropTrainer",
    "SimpleSGDTrainer",
    "Trainer",
]


class Part:
    """What one run of an update kernel works on: the dense parameters of a collection, or one lookup table.

    Attributes:
        arrays: values, gradient and the rule's state, all flat and laid out alike; on a device their copies there.
        starts, stops: which parts of them are updated; int64 arrays.
        keep: what the values are multiplied by at the end (weight decay), in their dtype.
    """

    def __init__(self, arrays: list[Any], starts: np.ndarray, stops: np.ndarray, keep: float) -> None:
        self.arrays = arrays
        self.starts = starts
        self.stops = stops
        self.keep = arrays[0].dtype.type(keep)


class Trainer:
    """Base of the trainers: clips, applies the rule of the subclass, decays the weights, clears the gradients.

    ```python
    trainer = dy.AdamTrainer(pc)
    for batch in batches:
        dy.renew_cg()
        loss = ...
        loss.backward()
        trainer.update()
    ```

    Attributes:
        collection: what it trains.
        learning_rate: may be set at any time.
        updates: how many updates were made; Adam's bias correction depends on it.
    """

    _settings: ClassVar[tuple[str, ...]] = ("learning_rate",)  # attributes that are part of the state
    _slots: ClassVar[tuple[str, ...]] = ()  # what the rule remembers for every value

    def __init__(self, m: ParameterCollection, learning_rate: float) -> None:
        self.collection = m
        self.learning_rate = float(learning_rate)
        self.updates = 0
        self.clip_threshold = 5.0
        self.sparse_updates = True
        self._clips_since_status = 0
        self._updates_since_status = 0
        self._dense_state: list[np.ndarray] = []
        self._table_state: dict[LookupParameter, list[np.ndarray]] = {}
        self._copies: dict[int, DeviceCopy] = {}  # of state on a device, by the id of the host's array

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.collection}, learning_rate={self.learning_rate})"

    def update(self) -> None:
        """Apply the gradients added since the last update to the parameters, and clear them.

        If the norm of the gradient, over all parameters that are updated, is more than the clipping threshold, the
        gradient is scaled to the threshold. Parameters with ``update=False`` stay as they are, and their gradients
        are dropped.

        Raises:
            ValidityError: the norm is NaN or infinite. Nothing is changed then; the gradients are kept.
        """
        kernels = self._kernels()
        parts, decayed = self._parts()
        norm = math.sqrt(kernels.sum_of_squares([(part.arrays[1], part.starts, part.stops) for part in parts]))
        if not math.isfinite(norm):
            raise ValidityError(self._describe_bad(norm))
        clip = 1.0
        if 0.0 < self.clip_threshold < norm:
            clip = self.clip_threshold / norm
            self._clips_since_status += 1
        for part in parts:
            self._apply(kernels, part, clip)
        for values, keep in decayed:
            kernels.scale(values, keep)
        self._clear_rest()
        self.updates += 1
        self._updates_since_status += 1
        self.collection.buffers.version += 1

    def restart(self, learning_rate: float | None = None) -> None:
        """Forget momentum and moving averages, and set the learning rate if one is given.

        As in DyNet, `updates` goes on counting, so that Adam's bias correction does not start again.
        """
        self._dense_state = []
        self._table_state = {}
        self._copies = {}
        if learning_rate is not None:
            self.learning_rate = float(learning_rate)

    def status(self) -> None:
        """Write learning rate, clipped and all updates since the last call to standard error, without a newline."""
        clips, updates = self._clips_since_status, self._updates_since_status
        print(f"[lr={self.learning_rate:g} clips={clips} updates={updates}]", end=" ", file=sys.stderr, flush=True)
        self._clips_since_status = self._updates_since_status = 0

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set `learning_rate`."""
        self.learning_rate = float(learning_rate)

    def set_clip_threshold(self, thr: float) -> None:
        """Clip gradients to this norm; 0 or less turns clipping off. 5 at the start."""
        self.clip_threshold = max(float(thr), 0.0)

    def get_clip_threshold(self) -> float:
        """The norm that gradients are clipped to; 0 if they are not."""
        return self.clip_threshold

    def set_sparse_updates(self, su: bool) -> None:
        """Update only the rows of lookup tables that have a gradient (True, as at the start), or all rows.

        With momentum, RMSProp and Adam a row without a gradient would move too, or its averages decay: leaving it
        alone, as DyNet does, is faster and not the same.
        """
        self.sparse_updates = bool(su)

    # State

    def state(self) -> dict[str, np.ndarray]:
        """Everything that the next update depends on besides values and gradients, for a checkpoint.

        Returns:
            Copies by name, such as ``"AdamTrainer.mean/encoder/W"``, in the user's shapes; settings are scalars.
        """
        kind = type(self).__name__
        found: dict[str, np.ndarray] = {f"{kind}.updates": np.array(self.updates)}
        found[f"{kind}.clip_threshold"] = np.array(self.clip_threshold)
        found[f"{kind}.sparse_updates"] = np.array(self.sparse_updates)
        for setting in self._settings:
            found[f"{kind}.{setting}"] = np.array(getattr(self, setting), dtype=np.float64)
        for name, view in self._state_views():
            found[f"{kind}.{name}"] = np.array(view, order="C")
        return found

    def state_differences(self, state: dict[str, np.ndarray]) -> list[str]:
        """What keeps ``state`` from being loaded, a line each; empty where `load_state` would take it."""
        expected = self.state()
        lines = [f"{name}: missing" for name in expected.keys() - state.keys()]
        lines += [f"{name}: not used by this trainer" for name in state.keys() - expected.keys()]
        for name in expected.keys() & state.keys():
            if state[name].shape != expected[name].shape:
                lines.append(f"{name}: shape {state[name].shape}, and {expected[name].shape} here")
        return sorted(lines)

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Go on from what `state` returned: settings, learning rate and averages; set afterwards what is to differ.

        Raises:
            FileFormatError: it is of another kind of trainer or other parameters; nothing is changed then.
        """
        differences = self.state_differences(state)
        if differences:
            raise FileFormatError("the state does not fit this trainer:\n  " + "\n  ".join(differences))
        kind = type(self).__name__
        self.updates = int(state[f"{kind}.updates"])
        self.clip_threshold = float(state[f"{kind}.clip_threshold"])
        self.sparse_updates = bool(state[f"{kind}.sparse_updates"])
        for setting in self._settings:
            setattr(self, setting, float(state[f"{kind}.{setting}"]))
        for name, view in self._state_views():
            view[...] = state[f"{kind}.{name}"]
        for copy in self._copies.values():
            copy.written()

    def _state_views(self) -> Iterator[tuple[str, np.ndarray]]:
        """Views of the rule's state: (slot and parameter name, array in the user's shape)."""
        self._fetch()
        dense = self._state_of_dense()
        for name, parameter in self.collection.named_parameters().items():
            if isinstance(parameter, Parameter):
                where = slice(parameter.offset, parameter.offset + parameter.type.size)
                views = [array[where].reshape(parameter.type.storage).T for array in dense]
            else:
                views = [parameter.as_user_rows(array) for array in self._state_of_table(parameter)]
            for slot, view in zip(self._slots, views, strict=True):
                yield slot + name, view

    def _state_of_dense(self) -> list[np.ndarray]:
        """The rule's state for all dense parameters under the root; new parameters start with zeros."""
        values = self.collection.buffers.values
        old = self._dense_state
        if len(old) != len(self._slots) or any(len(array) != len(values) for array in old):
            self._fetch()
            self._copies = {}
            self._dense_state = [aligned_zeros(len(values), values.dtype) for _ in self._slots]
            for array, before in zip(self._dense_state, old, strict=False):
                array[: len(before)] = before
        return self._dense_state

    def _state_of_table(self, table: LookupParameter) -> list[np.ndarray]:
        """The rule's state for a table, flat; zeros at first."""
        if table not in self._table_state:
            size = table.size * table.type.size
            self._table_state[table] = [aligned_zeros(size, table.type.dtype) for _ in self._slots]
        return self._table_state[table]

    def _fetch(self) -> None:
        """Bring the state's host arrays up to date."""
        for copy in self._copies.values():
            copy.fetch()

    # One update

    def _kernels(self) -> Any:
        """The kernels of the rules: `dynbatch.cpu.trainer_kernels`, or those of the device."""
        if self.collection.device == "cpu":
            # Imported here, since numba takes long to import and not everyone trains.
            from dynbatch.cpu import trainer_kernels

            return trainer_kernels
        from dynbatch.cuda.trainer_kernels import trainer_kernels as of_device

        return of_device(self.collection.device, self.collection.dtype.name)

    def _placed(self, arrays: list[np.ndarray]) -> list[Any]:
        """State as the kernels take it."""
        if self.collection.device == "cpu":
            self._fetch()
            self._copies = {}
            return arrays
        from dynbatch.cuda.copies import copy_for
        from dynbatch.cuda.devices import driver

        there = driver(self.collection.device)
        for array in arrays:
            self._copies[id(array)] = copy_for(self._copies.get(id(array)), there, array)
        return [self._copies[id(array)] for array in arrays]

    def _apply(self, kernels: Any, part: Part, clip: float) -> None:
        """Run the rule's kernel on ``part``, with gradients multiplied by ``clip``."""
        raise NotImplementedError

    def _parts(self) -> tuple[list[Part], list[tuple[Any, float]]]:
        """What the rule runs on, and the whole tables (with their factor) that are then to be decayed."""
        collection = self.collection
        keep = 1.0 - collection.weight_decay_lambda
        dense = [*collection.flat(), *self._placed(self._state_of_dense())]
        parts = [Part(dense, *collection.dense_segments(), keep)]
        decayed = []
        for table in collection.lookup_parameters_list():
            if not table.update:
                continue
            values, gradient = table.flat()
            if self.sparse_updates:
                starts = table.touched * table.type.size
                stops = starts + table.type.size
                if keep != 1.0:
                    decayed.append((values, values.dtype.type(keep)))
            else:
                starts, stops = np.array([0]), np.array([len(values)])
            if len(starts):
                arrays = [values, gradient, *self._placed(self._state_of_table(table))]
                parts.append(Part(arrays, starts, stops, 1.0 if self.sparse_updates else keep))
        return parts, decayed

    def _clear_rest(self) -> None:
        """Clear what the kernels have not cleared: lists of touched rows, and gradients that were not applied."""
        collection = self.collection
        for start, stop in zip(*collection.dense_segments(update=False), strict=True):
            collection.buffers.clear_gradients(int(start), int(stop))
        for table in collection.lookup_parameters_list():
            if table.update:
                table.mark_cleared()
            else:
                table.clear_gradient()

    def _describe_bad(self, norm: float) -> str:
        bad = [
            name
            for name, p in self.collection.named_parameters().items()
            if p.update and not np.isfinite(p.grad if isinstance(p, Parameter) else p.gradient_rows[p.touched]).all()
        ]
        return (
            f"the norm of the gradient is {norm}, so the update was refused and no parameter was changed. "
            f"Gradients that are not finite: {', '.join(bad) or 'none, but their squares overflow'}. "
            "dynbatch.init(check_validity=True) names the op that computes the first bad value; "
            "ParameterCollection.reset_gradient() drops these gradients."
        )


class SimpleSGDTrainer(Trainer):
    """Stochastic gradient descent: ``x -= learning_rate * g``."""

    def __init__(self, m: ParameterCollection, learning_rate: float = 0.1) -> None:
        super().__init__(m, learning_rate)

    def _apply(self, kernels: Any, part: Part, clip: float) -> None:
        real = part.arrays[0].dtype.type
        kernels.sgd(*part.arrays, part.starts, part.stops, part.keep, real(self.learning_rate * clip))


class MomentumSGDTrainer(Trainer):
    """Gradient descent with momentum: ``v = mom * v - learning_rate * g; x += v``."""

    _settings = ("learning_rate", "mom")
    _slots = ("velocity",)

    def __init__(self, m: ParameterCollection, learning_rate: float = 0.01, mom: float = 0.9) -> None:
        super().__init__(m, learning_rate)
        self.mom = float(mom)

    def _apply(self, kernels: Any, part: Part, clip: float) -> None:
        real = part.arrays[0].dtype.type
        rate = real(self.learning_rate * clip)
        kernels.momentum(*part.arrays, part.starts, part.stops, part.keep, rate, real(self.mom), np.finfo(real).tiny)


class AdagradTrainer(Trainer):
    """Adagrad (Duchi et al. 2011): ``s += g^2; x -= learning_rate * g / sqrt(s + eps)``."""

    _settings = ("learning_rate", "eps")
    _slots = ("squares",)

    def __init__(self, m: ParameterCollection, learning_rate: float = 0.1, eps: float = 1e-20) -> None:
        super().__init__(m, learning_rate)
        self.eps = float(eps)

    def _apply(self, kernels: Any, part: Part, clip: float) -> None:
        real = part.arrays[0].dtype.type
        rate = real(self.learning_rate)
        kernels.adagrad(*part.arrays, part.starts, part.stops, part.keep, real(clip), rate, real(self.eps))


class RMSPropTrainer(Trainer):
    """RMSProp (Tieleman and Hinton 2012): ``s = rho * s + (1 - rho) * g^2; x -= learning_rate * g / sqrt(s + eps)``."""

    _settings = ("learning_rate", "eps", "rho")
    _slots = ("squares",)

    def __init__(
        self, m: ParameterCollection, learning_rate: float = 0.001, eps: float = 1e-8, rho: float = 0.9
    ) -> None:
        super().__init__(m, learning_rate)
        self.eps = float(eps)
        self.rho = float(rho)

    def _apply(self, kernels: Any, part: Part, clip: float) -> None:
        real = part.arrays[0].dtype.type
        rate, rho = real(self.learning_rate), real(self.rho)
        rule = (real(clip), rate, real(self.eps), rho, real(1) - rho, np.finfo(real).tiny)
        kernels.rmsprop(*part.arrays, part.starts, part.stops, part.keep, *rule)


class AdamTrainer(Trainer):
    """Adam (Kingma and Ba 2015), with the bias correction in the learning rate.

    ``m = beta_1 * m + (1 - beta_1) * g; s = beta_2 * s + (1 - beta_2) * g^2`` and, at update t,
    ``x -= alpha * sqrt(1 - beta_2^t) / (1 - beta_1^t) * m / (sqrt(s) + eps)``. The learning rate is ``alpha``.
    """

    _settings = ("learning_rate", "beta_1", "beta_2", "eps")
    _slots: ClassVar[tuple[str, ...]] = ("mean", "squares")

    def __init__(
        self,
        m: ParameterCollection,
        alpha: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(m, alpha)
        self.beta_1 = float(beta_1)
        self.beta_2 = float(beta_2)
        self.eps = float(eps)

    def _apply(self, kernels: Any, part: Part, clip: float) -> None:
        kernels.adam(*part.arrays, part.starts, part.stops, part.keep, *self._rule(part, clip))

    def _rule(self, part: Part, clip: float) -> tuple[float, ...]:
        real = part.arrays[0].dtype.type
        # 1 - beta is taken after rounding, as the averages' weights have to add up to 1.
        beta_1, beta_2 = real(self.beta_1), real(self.beta_2)
        t = self.updates + 1
        corrected = self.learning_rate * math.sqrt(1 - float(beta_2) ** t) / (1 - float(beta_1) ** t)
        rests = (beta_1, real(1) - beta_1, beta_2, real(1) - beta_2)
        return real(clip), real(corrected), real(self.eps), *rests, np.finfo(real).tiny


class AmsgradTrainer(AdamTrainer):
    """AMSGrad (Reddi et al. 2018): Adam that divides by the square root of the largest ``s`` so far."""

    _slots = ("mean", "squares", "largest")

    def _apply(self, kernels: Any, part: Part, clip: float) -> None:
        kernels.amsgrad(*part.arrays, part.starts, part.stops, part.keep, *self._rule(part, clip))


AMSGradTrainer = AmsgradTrainer
