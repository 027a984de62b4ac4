"""Control flow that depends on values: the instances of a minibatch take turns, and run in batches when all wait.

Each instance is a greenlet, here called a *fiber*: a function call that can pause. One that asks for a value is put
aside and another goes on. When every one of them waits, is blocked in a map of its own or has ended, a *round* computes
what they wait for, across all of them, and they go on.

A `Hub` drives them from where the outermost map was called; between two rounds, an instance that pauses switches to the
next one by itself. A map within an instance is a `Fork`: its instances join the others, and the instance that called it
is blocked until they have ended.
"""

from __future__ import annotations

import contextvars
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dynbatch.config import config
from dynbatch.errors import CellError, InstanceStopped, MapError, StaticError, user_line
from dynbatch.graph import Expression, state
from dynbatch.random_stream import enclosing_stream

if TYPE_CHECKING:
    from dynbatch.batching.execution import Execution
    from dynbatch.batching.plan import Plan
    from dynbatch.types import Type

Instance = TypeVar("Instance")
Result = TypeVar("Result")
Wanted = tuple[Sequence[int], "Type | None"]
"""Values that an instance waits for, and their type if it is going to read them; None if they are only to be computed.
"""


def map(
    fn: Callable[[Instance], Result],
    instances: Iterable[Instance],
    max_concurrent: int | None = None,
    share: float | None = None,
) -> list[Result]:
    """Call ``fn`` on each instance, and batch across instances although their control flow depends on values.

    ```python
    def loss(sentence):
        state = parser.start(sentence)
        while not state.done:
            scores = parser.scores(state)
            state = state.take(scores.argmax_value())  # waits; runs together with those of the other sentences
        return state.loss


    dy.esum(dy.map(loss, minibatch)).backward()
    ```

    An instance that asks for a value (``value()`` and its like, a comparison, ``float()``, ``dy.forward``, `wait`)
    waits, and another one goes on. When all wait or have ended, one plan computes what they wait for, with what that
    needs and no more; so losses stay pending, and run together when they are asked for. Results and gradients are those
    of ``[fn(x) for x in instances]`` with ``dy.stream(i)`` around each call (see `stream`).

    Within an instance, another map lets its instances run beside all others, and its caller waits for them; so does
    recursion, to any depth. Settings of ``with`` blocks (`autobatch`, `no_grad`, `phase`, `stream`) and context
    variables hold in the instance that sets them, and begin as they are where ``map`` is called. ``backward()`` in an
    instance waits for its loss and then runs by itself: sum the losses and call it outside to have it batched.

    Arguments:
        fn: what to call; may return anything.
        instances: what to call it on; read to its end first.
        max_concurrent: the most instances under way at a time, those of maps within them included; None for no bound.
            One that is blocked in a map of its own does not count. Bounds memory: fewer instances fill smaller batches.
        share: a round is run as soon as this share of the instances under way wait, above 0 and at most 1 (the
            default). For the outermost map only.

    Returns:
        What ``fn`` returned, in the order of ``instances``.

    Raises:
        The first exception of an instance, as it is, with a note that has the number of the instance (from 0). The
        other instances are stopped before: `InstanceStopped` is raised where they wait, and again if they ask for
        values then. What was recorded stays usable. An exception while computing is raised in the instance whose
        values cannot be computed.
        CellError, StaticError: called within a cell or a static function.
        ImportError: the package greenlet is not installed.
    """
    if state.tracer is not None:
        raise CellError(f"{user_line()}: cell {state.tracer.name} calls map, which is not for use in a cell")
    if state.graph.tape:
        raise StaticError(f"{user_line()}: {state.graph.tape} calls map, and a static structure reads no values")
    if max_concurrent is not None and operator.index(max_concurrent) < 1:
        raise ValueError(f"{user_line()}: map: max_concurrent must be at least 1, not {max_concurrent}")
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"{user_line()}: map: share must be above 0 and at most 1, not {share}")
    fiber: Fiber | None = state.fiber
    if fiber is not None and share is not None:
        raise MapError(f"{user_line()}: map: the share that a round waits for is set by the outermost map")
    fork = Fork(fn, list(instances), max_concurrent, fiber)
    if fiber is not None:
        return fiber.join(fork)
    return Hub(fork, 1.0 if share is None else share).run()


def wait(*expressions: Expression) -> None:
    """Compute several expressions at once; within an instance of a `map`, wait for all of them in one round.

    ```python
    dy.wait(scores, gate)
    if gate.value() > 0.5:  # neither waits any more
        action = scores.argmax_value()
    ```

    Raises:
        TypeError: not an expression.
    """
    from dynbatch.batching.run import forward

    for e in expressions:
        if not isinstance(e, Expression):
            raise TypeError(f"{user_line()}: wait: expected expressions, not {type(e).__name__}")
    forward(list(expressions))


class Places:
    """Room for as many instances as may be under way at a time in a map, and in the maps around it."""

    __slots__ = ("free", "outer")

    def __init__(self, free: int, outer: Places | None) -> None:
        self.free = free
        self.outer = outer

    def take(self) -> bool:
        """Take one place here and in each map around, if there is one."""
        around: Places | None = self
        while around is not None:
            if not around.free:
                return False
            around = around.outer
        self._add(-1)
        return True

    def give(self) -> None:
        """Give the place back."""
        self._add(1)

    def _add(self, number: int) -> None:
        around: Places | None = self
        while around is not None:
            around.free += number
            around = around.outer


class Fork:
    """One call of `map`: its instances, their results, and who is blocked in it.

    Attributes:
        parent: the instance that called it; None for an outermost map.
        places: None for no bound.
        begun: how many instances were begun; the others wait for a place.
        live: those that were begun and have not ended.
        error: the first exception of an instance.
    """

    def __init__(
        self, fn: Callable[[Any], Any], instances: list[Any], max_concurrent: int | None, parent: Fiber | None
    ) -> None:
        self.fn = fn
        self.instances = instances
        self.parent = parent
        self.places: Places | None = parent.fork.places if parent is not None else None
        if max_concurrent is not None:
            self.places = Places(max_concurrent, self.places)
        self.settings = state.settings
        self.stream = enclosing_stream()
        self.context = contextvars.copy_context()
        self.results: list[Any] = [None] * len(instances)
        self.begun = 0
        self.live: dict[Fiber, None] = {}
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether all instances have ended, or one has failed."""
        return self.error is not None or (self.begun == len(self.instances) and not self.live)


class Fiber:
    """One instance, and where it stands.

    Attributes:
        greenlet: what it runs in, once it is entered.
        paused: the greenlet to go on with: that one, or one that the instance itself has made; None before the start.
        is_begun: whether it runs, or has run, in its greenlet: an interrupt may come between entering and that.
        is_over: whether it has returned or failed.
        settings: of ``with`` blocks, while another instance runs.
        has_place: False while it is blocked.
        inner: the map that it is blocked in.
        thrown: raised where it waits, when it goes on.
        stopping: the exception that it is stopped for, if it is to end.
        error: the exception that it ended with.
    """

    __slots__ = (
        "error", "fork", "greenlet", "has_place", "hub", "index", "inner", "is_begun", "is_over", "paused",
        "settings", "stopping", "thrown",
    )  # fmt: skip

    def __init__(self, hub: Hub, fork: Fork, index: int) -> None:
        self.hub = hub
        self.fork = fork
        self.index = index
        self.greenlet: Any = None
        self.paused: Any = None
        self.is_begun = False
        self.is_over = False
        self.settings = (*fork.settings[:3], fork.stream.within(index))
        self.has_place = True
        self.inner: Fork | None = None
        self.thrown: BaseException | None = None
        self.stopping: BaseException | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """The whole of it; called in its greenlet."""
        fork = self.fork
        self.is_begun = True
        try:
            fork.results[self.index] = fork.fn(fork.instances[self.index])
        except BaseException as error:
            self.error = error
        self.is_over = True

    def wait(self, execution: Execution, targets: Sequence[int], reads: Type | None = None) -> None:
        """Let others go on until these values are computed, which are of the type ``reads`` if they are read next."""
        self.check_stopping()
        if not execution.has(targets):
            self.hub.waiting[self] = targets, reads
            self._pause()

    def join(self, fork: Fork) -> list[Any]:
        """Let others go on until all instances of the fork have ended; returns their results."""
        self.check_stopping()
        if not fork.instances:
            return []
        self.inner = fork
        self.give_place()
        self.hub.starting.append(fork)
        self._pause()
        return fork.results

    def check_stopping(self) -> None:
        """Raise `InstanceStopped` if this instance is to end."""
        if self.stopping is not None:
            raise InstanceStopped(f"instance {self.index} of dynbatch.map is being stopped, and can wait for nothing")

    def give_place(self) -> None:
        """Others may have the place of this instance, if it has one."""
        if self.has_place and self.fork.places is not None:
            self.fork.places.give()
        self.has_place = False

    def take_place(self) -> bool:
        """Have a place again, if there is one."""
        self.has_place = self.fork.places is None or self.fork.places.take()
        return self.has_place

    def _pause(self) -> None:
        """Let the next instance that can go on do so, or the hub if there is none; returns when this one goes on."""
        hub = self.hub
        self.paused = hub.current()
        following = hub.following()
        if following is None:
            hub.greenlet.switch()
            return
        self.settings = state.settings
        try:
            hub.enter(following)
            following.paused.switch()
        except BaseException:
            if state.fiber is not self:  # interrupted before the switch
                if not following.is_begun:
                    following.paused = None
                hub.ready.appendleft(following)
                state.settings, state.fiber = self.settings, self
            raise


class Hub:
    """Runs the instances of an outermost map, and those of the maps within it.

    Attributes:
        greenlet: where the map was called.
        current: greenlet's function that says which one runs.
        workers: the greenlets that instances run in.
        share: of the instances under way, how many wait when a round is run.
        ready: instances that can go on.
        waiting: instances that wait, with what they wait for.
        starting: maps with instances that were not begun, the newest last.
        returning: instances whose inner map has ended, and that need a place.
    """

    def __init__(self, fork: Fork, share: float) -> None:
        from dynbatch.batching.rounds import MapPlan

        try:
            from dynbatch.greenlets import getcurrent, workers  # here, since nothing but a map needs the package
        except ImportError as error:
            needed = "dynbatch.map needs the package greenlet: pip install greenlet"
            raise ImportError(needed, name="greenlet") from error
        self.greenlet = getcurrent()
        self.current = getcurrent
        self.workers = workers
        self.fork = fork
        self.share = share
        self.ready: deque[Fiber] = deque()
        self.waiting: dict[Fiber, Wanted] = {}
        self.starting = [fork]
        self.returning: list[Fiber] = []
        self.report = MapPlan(state.strategy or config.autobatch)

    def run(self) -> list[Any]:
        """Run all to their end; returns the outermost map's results."""
        settings, fork = state.settings, self.fork
        try:
            while not fork.is_over:
                self._advance()
                if self.waiting:
                    self._round()
                elif not fork.is_over:
                    raise MapError("an instance of dynbatch.map has left by a greenlet switch of its own")
        except BaseException as error:
            self._stop(fork, error)
            raise
        finally:
            if self.greenlet.parent is not None:  # idle ones would keep it, whatever becomes of it
                self.workers.idle.clear()
            state.settings = settings
            self._hand_over_report()
        failed, fork.error = fork.error, None
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # its traceback has this frame
        return fork.results

    def _hand_over_report(self) -> None:
        state.last_map = self.report
        execution = state.graph.execution
        if execution is not None and self.report.rounds:
            execution.last = self.report

    def _advance(self) -> None:
        """Let instances go on until a round is due."""
        while True:
            self._admit()
            if not self.ready:
                return
            while self.ready:
                if self.share < 1:
                    waiting = len(self.waiting)
                    if waiting and waiting >= self.share * (waiting + len(self.ready)):
                        return
                self._go_on(self.ready.popleft())

    def _admit(self) -> None:
        """Give places: to instances that had one before, then to new ones, of the newest map first.

        So a bound on instances also bounds how many are blocked with theirs begun.
        """
        returning, self.returning = self.returning, []
        for fiber in returning:
            (self.ready if fiber.take_place() else self.returning).append(fiber)
        for fork in reversed(self.starting):
            while fork.begun < len(fork.instances) and (fork.places is None or fork.places.take()):
                fiber = Fiber(self, fork, fork.begun)
                fork.begun += 1
                fork.live[fiber] = None
                self.ready.append(fiber)
                self.report.instances += 1
        self.starting = [fork for fork in self.starting if fork.begun < len(fork.instances)]

    def _go_on(self, fiber: Fiber) -> None:
        """Switch to an instance; returns when it, or one that it went on to, ends or finds none to go on to."""
        try:
            self.enter(fiber)
            if fiber.thrown is None:
                fiber.paused.switch()
            else:
                thrown, fiber.thrown = fiber.thrown, None
                fiber.paused.throw(thrown)
        finally:
            last: Fiber = state.fiber or fiber
            state.fiber = None
            last.settings = state.settings
        if last.is_over:
            self._ended(last)

    def following(self) -> Fiber | None:
        """The instance that the one that pauses can go on to by itself; no longer among those that are ready.

        New greenlets start from the hub: one that starts from another one lies on top of its stack.
        """
        if self.share < 1 or not self.ready:
            return None
        fiber = self.ready[0]
        if fiber.thrown is not None or (fiber.paused is None and not self.workers.idle):
            return None
        return self.ready.popleft()

    def enter(self, fiber: Fiber) -> None:
        """What is to be before a switch to an instance."""
        if fiber.paused is None:
            self._begin(fiber)
        state.settings = fiber.settings
        state.fiber = fiber

    def _begin(self, fiber: Fiber) -> None:
        greenlet = self.workers.take(self.greenlet)
        greenlet.gr_context = fiber.fork.context.copy()
        fiber.greenlet = fiber.paused = greenlet
        self.workers.entering = fiber

    def _ended(self, fiber: Fiber) -> None:
        fork = fiber.fork
        fork.live.pop(fiber)
        self.waiting.pop(fiber, None)
        fiber.give_place()
        why, fiber.stopping = fiber.stopping, None
        error, fiber.error = fiber.error, None
        if why is not None:
            if error is not None and not isinstance(error, InstanceStopped):
                why.add_note(f"instance {fiber.index} of dynbatch.map raised {error!r} when it was stopped for this")
            return
        if error is not None:
            error.add_note(f"in instance {fiber.index} of dynbatch.map")
            fork.error = error
            if fiber.inner is not None:  # left by an interrupt
                self._stop(fiber.inner, error)
            self._stop(fork, error)
        if fork.is_over and fork.parent is not None:
            fork.parent.inner = None
            fork.parent.thrown, fork.error = fork.error, None
            self.returning.append(fork.parent)

    def _stop(self, fork: Fork, why: BaseException) -> None:
        """End the instances of a map and of the maps within it, the innermost first."""
        forks, fibers = [fork], list[Fiber]()
        for each in forks:  # it grows
            fibers += each.live
            forks += [fiber.inner for fiber in each.live if fiber.inner is not None]
        gone = set(forks)
        self.ready = deque(fiber for fiber in self.ready if fiber.fork not in gone)
        self.returning = [fiber for fiber in self.returning if fiber.fork not in gone]
        self.waiting = {fiber: targets for fiber, targets in self.waiting.items() if fiber.fork not in gone}
        self.starting = [each for each in self.starting if each not in gone]
        for fiber in reversed(fibers):
            fiber.stopping = why
            if fiber.is_begun and fiber.greenlet and not fiber.is_over:  # runs, and no interrupt has ended its greenlet
                fiber.thrown = InstanceStopped(f"instance {fiber.index} of dynbatch.map is stopped")
                self._go_on(fiber)
            else:
                self._ended(fiber)

    def _round(self) -> None:
        """Compute what is waited for: one plan for each combination of settings that plans depend on."""
        from dynbatch.batching.run import run_round

        waiting, self.waiting = self.waiting, {}
        groups: dict[tuple[bool, str | None], list[Fiber]] = {}
        for fiber in waiting:
            groups.setdefault(fiber.settings[:2], []).append(fiber)
        plans: list[Plan] = []
        for (keep, strategy), fibers in groups.items():
            state.keep, state.strategy = keep, strategy
            try:
                plans.append(run_round([waiting[fiber] for fiber in fibers]))
            except Exception:  # some fail, or all of them together: each may have what can be computed for it alone
                for fiber in fibers:
                    try:
                        plans.append(run_round([waiting[fiber]]))
                    except Exception as error:
                        fiber.thrown = error
        self.report.add_round(len(waiting), plans)
        self.ready.extend(waiting)
