"""dy.map: the same values and gradients as a loop, in few full rounds, whatever the instances do to each other."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from greenlet import getcurrent, greenlet
from hypothesis import example, given
from hypothesis import strategies as st

import dynbatch as dy
from dynbatch import compiled
from dynbatch.batching import agenda, layout, run, stream
from dynbatch.batching import plan as plans
from dynbatch.batching.execution import Execution
from dynbatch.config import config
from dynbatch.cpu import tiers
from dynbatch.fibers import Hub
from dynbatch.graph import state
from dynbatch.greenlets import workers

STRATEGIES = ["off", "depth", "agenda"]

pytestmark = pytest.mark.usefixtures("float64")


class Walker:
    """A recurrent network that looks at what it has computed to find out what to do next."""

    def __init__(self, size: int = 4) -> None:
        self.pc = dy.ParameterCollection()
        self.E = self.pc.add_lookup_parameters((10, size))
        self.W, self.U = self.pc.add_parameters((size, size)), self.pc.add_parameters((size, size))
        self.V = self.pc.add_parameters((3, size))

    @dy.cell
    def step(self, h: Any, word: int) -> Any:
        return dy.tanh(self.W * h + self.U * self.E[word])

    @dy.cell
    def scores(self, h: Any) -> Any:
        return self.V * h

    def start(self, i: int) -> Any:
        return dy.inputVector([np.sin(i), np.cos(3 * i), 0.3, -0.1 * (i % 7)])

    def walk(self, i: int, most: int = 12) -> tuple[Any, list[int]]:
        """Loss, and what was decided on the way."""
        h, losses, taken = self.start(i), [], []
        for n in range(most):
            h = self.step(h, (i + n) % 10)
            scores = self.scores(h)
            taken.append(scores.argmax_value())
            losses.append(dy.pickneglogsoftmax(scores, (taken[-1] + i) % 3))
            if taken[-1] == 0 and n:
                break
            if scores[taken[-1]] > 0.4:
                h = dy.tanh(self.W * h)
        return dy.esum(losses), taken

    def count(self, i: int, steps: int) -> Any:
        """A fixed number of steps, each of them read."""
        h = self.start(i)
        for n in range(steps):
            h = self.step(h, n % 10)
            h.npvalue()
        return h


def looped(fn: Callable[[Any], Any], instances: Iterable[Any]) -> list[Any]:
    """What a map is to be equal to."""
    found = []
    for i, x in enumerate(instances):
        with dy.stream(i):
            found.append(fn(x))
    return found


def gradients(walker: Walker, losses: list[Any]) -> list[np.ndarray]:
    total = dy.esum(losses)
    total.backward()
    found = [total.npvalue(), *[p.grad_as_array() for p in (walker.W, walker.U, walker.V, walker.E)]]
    walker.pc.reset_gradient()
    return found


def fresh(draws: int = 0) -> None:
    """A new graph that draws what the last one drew."""
    dy.renew_cg()
    config.draws = draws


# ---- the same as a loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_and_gradients_are_those_of_a_loop(strategy: str, tier: None) -> None:
    walker = Walker()
    with dy.autobatch(strategy):
        mapped = dy.map(walker.walk, range(20))
        found = gradients(walker, [loss for loss, _ in mapped])
        fresh()
        expected = looped(walker.walk, range(20))
        assert [taken for _, taken in mapped] == [taken for _, taken in expected]
        assert len({len(taken) for _, taken in mapped}) > 2  # control flow does differ
        for a, b in zip(found, gradients(walker, [loss for loss, _ in expected])):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


Script = list[tuple[int, int, int]]
SCRIPTS = st.lists(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9), st.integers(0, 9)), max_size=12), max_size=6
)


class Interpreter:
    """Carries out a script: ops, reads, branches on what was read, draws, maps within maps, settings."""

    def __init__(self, walker: Walker, each: Callable[..., list[Any]]) -> None:
        self.walker = walker
        self.each = each
        self.seen: dict[tuple[int, ...], list[float]] = {}

    def run(self, script: Script, path: tuple[int, ...]) -> Any:
        w, seen = self.walker, self.seen.setdefault(path, [])
        made = [w.start(len(script) + path[-1])]
        for k, (name, i, j) in enumerate(script):
            x, y = made[-1 - i % len(made)], made[-1 - j % len(made)]
            if name == 0:
                made.append(w.step(x, j))
            elif name == 1:
                made.append(dy.tanh(x + y))
            elif name == 2:
                made.append(w.W * x)
            elif name == 3:
                made.append(dy.dropout(x, 0.5))
            elif name == 4:
                seen.extend(x.vec_value())
            elif name == 5:
                dy.wait(x, y)
                made.append(x if w.scores(y).argmax_value() else dy.cmult(x, y))
            elif name == 6:
                while dy.squared_norm(made[-1]) > 0.5 and len(made) < 30:
                    made.append(made[-1] * 0.8)
            elif name == 7 and len(path) < 3:
                inner = script[k + 1 : k + 1 + i]
                made += self.each(lambda b: self.run(b[0], (*path, b[1])), [(inner[b:], b) for b in range(j % 4)])
            elif name == 8:
                with dy.no_grad():
                    seen.append(dy.squared_norm(x).value())
                    made.append(dy.logistic(x))
            elif name == 9:
                with dy.phase("ab"[i % 2]):
                    made.append(w.step(y, i))
                    seen.append(float(w.scores(x)[0]))
            elif name == 10:
                with dy.autobatch(STRATEGIES[i % 3]):
                    seen.extend(dy.average([x, y]).npvalue())
            else:
                lanes = dy.inputTensor(np.ones((4, 2)) * i, batched=True) + x
                made.append(dy.sum_batches(dy.tanh(lanes)))
                seen.extend(lanes.npvalue().reshape(-1))
        return dy.esum(made)


@given(SCRIPTS, st.sampled_from([None, 1, 2, 3]), st.sampled_from([1.0, 0.6, 0.1]), st.sampled_from(STRATEGIES))
@example([[(7, 3, 2), (4, 0, 0), (3, 0, 0)]] * 3, 1, 1.0, "agenda")
@example([[(7, 9, 3), (7, 9, 3), (3, 0, 0), (4, 0, 0)]] * 3, 2, 0.5, "depth")
def test_random_control_flow(scripts: list[Script], most: int | None, share: float, strategy: str) -> None:
    walker = MODEL[0] if MODEL else MODEL.append(Walker()) or MODEL[0]
    instances = [(script, i) for i, script in enumerate(scripts)]

    def each(fn: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        return dy.map(fn, items, max_concurrent=most, **({} if state.fiber else {"share": share}))

    results = []
    for how in (each, looped):
        fresh()
        with dy.autobatch(strategy):
            ran = Interpreter(walker, how)
            ends = how(lambda x, ran=ran: ran.run(x[0], (x[1],)), instances)
            losses = [dy.squared_norm(e) for e in ends] or [dy.squared_norm(walker.start(0))]
            results.append((ran.seen, gradients(walker, losses)))
    (seen, found), (seen_in_loop, expected) = results
    assert seen.keys() == seen_in_loop.keys()
    for path, numbers in seen.items():
        np.testing.assert_allclose(numbers, seen_in_loop[path], rtol=1e-9, atol=1e-9)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)


MODEL: list[Walker] = []


def test_results_are_what_the_function_returns_in_order() -> None:
    walker = Walker()
    assert dy.map(lambda i: walker.count(i, i).npvalue()[:0].sum() or None, range(3)) == [None] * 3
    assert dy.map(lambda i: (i, walker.count(0, 3 - i).dim()), range(3)) == [(i, ((4,), 1)) for i in range(3)]
    assert dy.map(lambda i: i * 2, (i for i in range(4))) == [0, 2, 4, 6]
    assert dy.map(lambda i: 1 / 0, []) == []
    assert dy.map(lambda i: dy.map(lambda j: 1 / 0, ()), range(2)) == [[], []]


def test_a_generator_of_instances_may_read_values() -> None:
    walker = Walker()

    def children(i: int) -> Any:
        for n in range(2):
            yield i, n, walker.count(i + n, 2).npvalue()

    found = dy.map(lambda i: dy.map(lambda child: child[:2], children(i)), range(3))
    assert found == [[(i, 0), (i, 1)] for i in range(3)]


def test_every_way_to_read_waits() -> None:
    readers: list[Callable[[Any], Any]] = [
        lambda e: e.value(),
        lambda e: e.npvalue().tolist(),
        lambda e: e.scalar_value(),
        lambda e: e.vec_value(),
        lambda e: e.argmax_value(),
        lambda e: e > 0.1,
        lambda e: e == 0.25,
        lambda e: float(e),
        lambda e: e.forward(),
        lambda e: [dy.forward([e]), e.value()],
        lambda e: [dy.wait(e), e.value()],
        lambda e: max([e, e], key=float).value(),
        lambda e: [x.value() for x in (y for y in [e])],
    ]

    def read(k: int) -> Any:
        return [readers[k](dy.squared_norm(dy.inputVector([0.1 * i, 0.5]))) for i in range(3)]

    mapped = dy.map(read, range(len(readers)))
    assert len(dy.plan("map").rounds) == 3
    assert {r.instances for r in dy.plan("map").rounds} == {len(readers)}
    assert mapped == [read(k) for k in range(len(readers))]


def test_what_one_round_reads_belongs_to_the_reader() -> None:
    """Values of several shapes, of one instance twice, and large ones; changing what was read changes nothing else."""
    shapes = [(3,), (2, 3), (2, 3, 4), (200, 100)]

    def fn(i: int) -> tuple[np.ndarray, np.ndarray]:
        shape = shapes[i % len(shapes)]
        e = shared[i] if i < 16 else -dy.inputTensor(values[i])
        assert e.dim() == (shape, 1)
        mine = e.npvalue()
        found = mine.copy()
        assert mine.flags.c_contiguous and mine.flags.writeable
        mine[...] = np.nan
        return found, e.npvalue()

    values = [np.random.default_rng(i % 8 if i < 16 else i).normal(size=shapes[i % len(shapes)]) for i in range(24)]
    shared = [-dy.inputTensor(values[i]) for i in range(8)]
    shared += shared  # read by two instances
    for value, found in zip(values, dy.map(fn, range(24))):
        for array in found:
            np.testing.assert_array_equal(array, -value)
    batch = np.arange(24.0).reshape(2, 3, 4)
    for array in dy.map(lambda _: (-dy.inputTensor(batch, batched=True)).npvalue(), range(3)):
        np.testing.assert_array_equal(array, -batch)
    assert not state.graph.execution.fetched


def test_more_instances_than_python_may_recurse() -> None:
    """An instance goes on to the next one by itself, and still none lies on top of another's stack."""
    count = 3 * sys.getrecursionlimit()

    def fn(i: int) -> float:
        x = dy.scalarInput(i)
        for _ in range(2):
            x = x + 1
            assert x.value() > i
        return float(sum(dy.map(lambda k: (x + k).value(), range(2))))

    assert dy.map(fn, range(count)) == [2 * i + 5 for i in range(count)]


def test_what_is_computed_is_read_at_once() -> None:
    x = dy.inputVector([1, 2])
    x.value()
    assert dy.map(lambda i: x.npvalue().sum() + i, range(3)) == [3, 4, 5]
    assert not dy.plan("map").rounds
    assert dy.map(lambda p: p.npvalue().shape, [Walker().W]) == [(4, 4)]
    assert not dy.plan("map").rounds


# ---- rounds ----------------------------------------------------------------------------------------------------------


def test_rounds_are_as_many_as_the_longest_instance_has() -> None:
    walker = Walker()
    lengths = [3, 1, 5, 5, 0]
    dy.map(lambda n: walker.count(n, n), lengths)
    plan = dy.plan()
    assert plan is dy.plan("map")
    assert [r.instances for r in plan.rounds] == [sum(n > k for n in lengths) for k in range(5)]
    # each round: a step of those that go on, in one batch; in the first their inputs too
    assert [(r.nodes, r.batches) for r in plan.rounds] == [(8, 2), (3, 1), (3, 1), (2, 1), (2, 1)]
    assert plan.rows_per_batch == [4, 4, 3, 3, 2, 2]
    assert (plan.nodes, plan.batches, plan.instances) == (18, 6, 5)
    assert "5 instances in 5 rounds: 2.8 instances a round (2 to 4), 3.0 rows a batch" in repr(plan)
    assert "Walker.step" in repr(plan)


def test_what_nobody_waits_for_stays_pending_and_batches_later() -> None:
    walker = Walker()

    def fn(i: int) -> Any:
        losses = []
        h = walker.start(i)
        for n in range(1 + i % 3):
            h = walker.step(h, n)
            losses.append(dy.pickneglogsoftmax(walker.scores(h), n))  # of the same kind as what is read, but not read
            walker.scores(walker.step(h, 9)).npvalue()
        return dy.esum(losses)

    losses = dy.map(fn, range(6))
    assert len(dy.plan("map").rounds) == 3
    reports = [b for b in dy.plan("map").batch_reports if b.name == "Walker.scores"]
    assert [b.rows for b in reports] == [6, 4, 2]  # only those that are read
    dy.esum(losses).backward()
    assert [(b.name, b.rows) for b in dy.plan().batch_reports] == [
        ("Walker.scores", 12),
        ("pickneglogsoftmax", 12),
        ("esum", 2),
        ("esum", 2),
        ("esum", 2),
        ("esum", 1),
    ] or dy.plan().rows_per_batch[:2] == [12, 12]
    assert dy.plan("backward").nodes > 12
    scores = [b for b in dy.plan("backward").batch_reports if b.name.startswith("Walker.scores")]
    assert [b.rows for b in scores] == [12]


def test_waiting_for_several_is_one_round() -> None:
    def fn(i: int) -> Any:
        x = dy.inputVector([i, 1.0])
        a, b = dy.tanh(x), dy.squared_norm(x)
        dy.wait(a, b)
        return a.value(), b.value()

    mapped = dy.map(fn, range(3))
    assert len(dy.plan("map").rounds) == 1
    assert mapped == [fn(i) for i in range(3)]
    dy.wait()
    with pytest.raises(TypeError, match="wait: expected expressions, not int"):
        dy.wait(3)  # type: ignore[arg-type]


def test_wait_outside_of_a_map_computes() -> None:
    a, b = dy.scalarInput(1), dy.tanh(dy.scalarInput(0))
    dy.wait(a, b)
    plan = dy.plan()
    assert (a.value(), b.value()) == (1, 0)
    assert dy.plan() is plan


def test_a_share_of_the_instances_makes_a_round() -> None:
    walker = Walker()
    dy.map(lambda i: walker.count(i, 2), range(8), share=0.5)
    assert [r.instances for r in dy.plan("map").rounds] == [4, 4, 4, 4]
    dy.map(lambda i: walker.count(i, 2), range(8), share=0.01)
    assert [r.instances for r in dy.plan("map").rounds] == [1] * 16
    for share in (0, 1.5, -1):
        with pytest.raises(ValueError, match="share must be above 0"):
            dy.map(lambda i: i, [1], share=share)
    with pytest.raises(dy.MapError, match="outermost"):
        dy.map(lambda i: dy.map(lambda j: j, [1], share=0.5), [1])


class Visits:
    """Counts the nodes that the passes of a plan are given."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nodes = 0
        for owner, name, place in (
            (stream, "levels", 5),
            (stream, "place_rows", 0),
            (plans, "make_tables", 4),
            (agenda, "_agenda", 5),
            (layout, "_arrange", 6),
        ):
            patch.setattr(owner, name, self._counting(getattr(owner, name), place))
        patch.setattr(stream, "list_ancestors", self._counting_result(stream.list_ancestors))
        for name in ("mark_ancestors", "joiners"):  # these go over all that is pending
            patch.setattr(stream, name, self._refused)

    def _counting(self, function: Any, place: int) -> Any:
        def call(*args: Any) -> Any:
            self.nodes += args[place].size
            return function(*args)

        return call

    def _counting_result(self, function: Any) -> Any:
        def call(*args: Any) -> Any:
            found = function(*args)
            self.nodes += found
            return found

        return call

    def _refused(self, *args: Any) -> Any:
        raise AssertionError("a pass over all that is pending")


def test_a_round_costs_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that have run and nodes that nobody waits for are not looked at again, however many rounds there are."""
    walker = Walker()
    counted = {}
    for rounds in (5, 40):
        fresh()

        def fn(i: int, rounds: int = rounds) -> Any:
            h, losses = walker.start(i), []
            for n in range(rounds):
                with dy.phase("ab"[n % 2]):
                    h = walker.step(h, n % 10)
                losses += [dy.squared_norm(h) * k for k in range(5)]
                h.npvalue()
            return losses

        with monkeypatch.context() as patch:
            visits = Visits(patch)
            patch.setattr(
                type(state.graph.execution or run._execution(state.graph)), "pending", property(visits._refused)
            )
            patch.setattr(stream, "staged_levels", visits._counting(stream.staged_levels, 5))
            dy.map(fn, range(3))
        ran = dy.plan("map").nodes
        assert ran == 3 * (rounds + 1)
        counted[rounds] = visits.nodes / ran
        assert state.graph.execution.pending.size > 20 * rounds
    assert counted[40] == pytest.approx(counted[5])


def test_phase_marks_are_taken_over_once() -> None:
    walker = Walker()

    def fn(i: int) -> list[Any]:
        with dy.phase("even" if i % 2 else "odd"):
            return [walker.count(i, 5)]

    dy.map(fn, range(4))
    names = {number: name for name, number in state.graph.phases.items()}
    ran = state.graph.execution
    found = [names[p] for p in ran.phase[: ran.nodes]]
    assert found.count("even") == found.count("odd") == 12
    walker.count(0, 1)
    assert ran.phase_words == len(state.graph.phase_marks) <= 2 * (2 * 4 * 6)  # at most two a switch
    assert ran.phase[ran.nodes - 1] == 0
    with dy.phase("even"):
        for _ in range(2):  # a second time without another mark
            walker.count(0, 1)
            assert names[ran.phase[ran.nodes - 1]] == "even"


# ---- how many at a time ----------------------------------------------------------------------------------------------


class UnderWay:
    """How many are between entering and leaving, at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __enter__(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)

    def __exit__(self, *_: Any) -> None:
        self.now -= 1


@pytest.mark.parametrize("most", [1, 2, 7, 100])
def test_no_more_than_max_concurrent_are_under_way(most: int) -> None:
    walker, under_way = Walker(), UnderWay()

    def fn(i: int) -> int:
        with under_way:
            walker.count(i, 1 + i % 4)
        return i

    assert dy.map(fn, range(20), max_concurrent=most) == list(range(20))
    assert under_way.most == min(most, 20)
    assert max(r.instances for r in dy.plan("map").rounds) == min(most, 20)


def test_places_are_taken_over_as_they_get_free() -> None:
    walker = Walker()
    dy.map(lambda i: walker.count(i, [6, 1, 1, 1, 1, 1][i]), range(6), max_concurrent=2)
    assert [r.instances for r in dy.plan("map").rounds] == [2, 2, 2, 2, 2, 1]


def test_bounds_must_be_numbers_of_instances() -> None:
    for bound in (0, -1):
        with pytest.raises(ValueError, match="max_concurrent must be at least 1"):
            dy.map(lambda i: i, [1], max_concurrent=bound)
    with pytest.raises(TypeError):
        dy.map(lambda i: i, [1], max_concurrent=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [1, 3])
def test_a_bound_holds_for_maps_within_and_blocked_parents_give_up_their_places(most: int) -> None:
    walker, leaves, parents = Walker(), UnderWay(), UnderWay()

    def leaf(i: int) -> int:
        with leaves:
            walker.count(i, 2)
        return i

    def parent(i: int) -> list[int]:
        walker.count(i, 1)
        with parents:
            found = dy.map(leaf, [10 * i, 10 * i + 1, 10 * i + 2])
        walker.count(i, 1)
        return found

    assert dy.map(parent, range(4), max_concurrent=most) == [[10 * i, 10 * i + 1, 10 * i + 2] for i in range(4)]
    assert leaves.most == most
    assert parents.most <= most  # the children of one that is blocked come before others are begun
    assert all(r.instances <= most for r in dy.plan("map").rounds)
    assert dy.map(lambda i: dy.map(leaf, range(5), max_concurrent=2), range(3)) == [list(range(5))] * 3
    assert max(r.instances for r in dy.plan("map").rounds) == 6


# ---- maps within maps ------------------------------------------------------------------------------------------------


class Grower:
    """Generates trees: a node's value says how many children it gets."""

    def __init__(self) -> None:
        self.pc = dy.ParameterCollection()
        self.W = self.pc.add_lookup_parameters((3, 4, 4), init=dy.UniformInitializer(1.5))
        self.V = self.pc.add_parameters((3, 4), init=dy.UniformInitializer(1.0))

    def grow(self, h: Any, depth: int, each: Callable[..., list[Any]]) -> tuple[Any, tuple[Any, ...]]:
        children = dy.affine_transform([self.V[0][0] * 0, self.V, h]).argmax_value() if depth else 0
        parts = each(lambda k: self.grow(dy.tanh(self.W[k] * h), depth - 1, each), range(children))
        losses = [dy.squared_norm(h), *[loss for loss, _ in parts]]
        return dy.esum(losses), tuple(shape for _, shape in parts)


def height(shape: tuple[Any, ...]) -> int:
    return 1 + max(map(height, shape), default=0)


def test_children_of_all_trees_grow_together() -> None:
    grower = Grower()
    starts = [[np.sin(i), np.cos(i), 0.5, 1.0] for i in range(12)]
    results = []
    for each in (dy.map, looped):
        fresh()
        grown = each(lambda x, each=each: grower.grow(dy.inputVector(x), 6, each), starts)
        rounds = len(dy.plan("map").rounds)
        loss = dy.esum([loss for loss, _ in grown])
        loss.backward()
        results.append((loss.value(), [s for _, s in grown], grower.W.grad_as_array(), grower.V.grad_as_array()))
        grower.pc.reset_gradient()
    (loss, shapes, *found), (expected_loss, expected_shapes, *expected) = results
    assert rounds == max(height(shape) for shape in shapes) > 3
    assert shapes == expected_shapes and len(set(shapes)) > 3
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_maps_nest_to_any_depth() -> None:
    walker = Walker()

    def down(depth: int) -> int:
        if not depth:
            return int(walker.count(0, 1).dim()[1])
        return dy.map(down, [depth - 1])[0] + 1

    depth = 3 * sys.getrecursionlimit()
    assert dy.map(down, [depth, 5]) == [depth + 1, 6]


# ---- errors ----------------------------------------------------------------------------------------------------------


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_an_exception_comes_as_it_is_and_stops_the_others() -> None:
    walker, log, refused = Walker(), [], []
    raised = KeyError("gone")

    def fn(i: int) -> Any:
        try:
            walker.count(i, 2 + i)
            if i == 1:
                raise raised
            walker.count(i, 5)
        except Exception:
            assert i == 1  # a stopped instance does not go on as after an error
            raise
        finally:
            log.append(i)
            if i != 1:
                with pytest.raises(dy.InstanceStopped):
                    walker.count(i, 1)
                with pytest.raises(dy.InstanceStopped):
                    dy.map(fn, [])
                with pytest.raises(dy.InstanceStopped):
                    dy.wait(walker.start(0))
                refused.append(i)

    before = walker.count(7, 2)
    with pytest.raises(KeyError) as caught:
        dy.map(fn, range(4))
    assert caught.value is raised
    assert notes(raised) == ["in instance 1 of dynbatch.map"]
    assert log[0] == 1 and sorted(log) == [0, 1, 2, 3] and sorted(refused) == [0, 2, 3]
    assert [entry.name for entry in caught.traceback][-1] == "fn"
    assert state.fiber is None
    np.testing.assert_allclose(before.npvalue(), walker.count(7, 2).npvalue(), rtol=1e-12)
    loss, _ = dy.map(walker.walk, [3])[0]
    after = gradients(walker, [loss])
    fresh()
    for a, b in zip(after, gradients(walker, [walker.walk(3)[0]])):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_those_that_were_not_begun_are_not_begun() -> None:
    begun = []

    def fn(i: int) -> None:
        begun.append(i)
        dy.scalarInput(1).value()
        raise ValueError

    with pytest.raises(ValueError):
        dy.map(fn, range(10), max_concurrent=2)
    assert begun == [0, 1]


def test_what_goes_wrong_while_stopping_is_noted() -> None:
    def fn(i: int) -> None:
        try:
            dy.scalarInput(i).value()
            if i == 2:
                raise ValueError("first")
            dy.scalarInput(1 + i).value()
        finally:
            if i == 0:
                raise OSError("closing failed")

    with pytest.raises(ValueError, match="first") as caught:
        dy.map(fn, [1, 0, 2])
    assert notes(caught.value) == [
        "in instance 2 of dynbatch.map",
        "instance 1 of dynbatch.map raised OSError('closing failed') when it was stopped for this",
    ]


def test_an_inner_map_fails_where_it_was_called() -> None:
    walker, stopped = Walker(), []

    def leaf(x: tuple[int, int]) -> int:
        try:
            walker.count(x[1], 1 + x[1])
            if x == (1, 1):
                raise ValueError("leaf")
            walker.count(x[1], 3)
            return x[1]
        except dy.InstanceStopped:
            stopped.append(x)
            raise

    def parent(i: int) -> Any:
        try:
            return dy.map(leaf, [(i, k) for k in range(3)])
        except ValueError as error:
            assert notes(error) == ["in instance 1 of dynbatch.map"]
            return walker.count(i, 2).dim()

    assert dy.map(parent, range(3)) == [[0, 1, 2], ((4,), 1), [0, 1, 2]]
    assert sorted(stopped) == [(1, 0), (1, 2)]


def test_stopping_reaches_the_innermost_first() -> None:
    walker, log = Walker(), []

    def inner(x: tuple[int, int]) -> None:
        try:
            walker.count(x[1], 9)
        finally:
            log.append(x)

    def outer(i: int) -> None:
        try:
            if i == 3:
                walker.count(i, 2)
                raise ValueError("outer")
            dy.map(lambda k: dy.map(inner, [(i, k)]), range(2))
        finally:
            log.append((i,))

    with pytest.raises(ValueError) as caught:
        dy.map(outer, range(4))
    assert notes(caught.value) == ["in instance 3 of dynbatch.map"]
    assert log[0] == (3,) and len(log) == 10
    for i in range(3):
        assert log.index((i,)) > max(log.index((i, k)) for k in range(2))


def test_notes_name_the_way_to_the_instance() -> None:
    def fn(i: int) -> Any:
        return dy.map(lambda j: dy.scalarInput(1).value() / (i + j), [0, -1], max_concurrent=1)

    with pytest.raises(ZeroDivisionError) as caught:
        dy.map(fn, [3, 1])
    assert notes(caught.value) == ["in instance 1 of dynbatch.map"] * 2


def test_what_cannot_be_computed_is_raised_where_it_is_asked_for() -> None:
    dy.init(check_validity=True)

    def fn(i: int) -> Any:
        x = dy.log(dy.scalarInput(i))
        try:
            return x.value()
        except dy.ValidityError:
            return dy.tanh(dy.scalarInput(0)).value()

    np.testing.assert_allclose(dy.map(fn, [1, -1, 2, -2, 3]), [0, 0, np.log(2), 0, np.log(3)])
    with pytest.raises(dy.ValidityError) as caught:
        dy.map(lambda i: dy.log(dy.scalarInput(i)).value(), [1, -1, -2])
    assert notes(caught.value) == ["in instance 1 of dynbatch.map"]


def test_what_cannot_be_copied_together_is_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(execution: Any, vids: list[int], type: Any) -> None:
        if len(vids) > 1 or vids[0] == unreadable:
            raise MemoryError("no room for copies")
        original(execution, vids, type)

    def fn(i: int) -> float:
        nonlocal unreadable
        x = dy.scalarInput(i) * 2
        if i == failing:
            unreadable = x.vid
        return x.value()

    original, unreadable, failing = Execution.fetch, -1, -1
    monkeypatch.setattr(Execution, "fetch", fetch)
    assert dy.map(fn, range(4)) == [0, 2, 4, 6]
    failing = 2
    with pytest.raises(MemoryError) as caught:
        dy.map(fn, range(4))
    assert notes(caught.value) == ["in instance 2 of dynbatch.map"]


@pytest.mark.parametrize("within", [False, True])
def test_interrupting_a_round(within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a plan runs, or while an instance does."""
    walker, stopped, calls = Walker(), [], []

    def interrupt(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args)

    original = stream.levels
    if not within:
        monkeypatch.setattr(stream, "levels", interrupt)

    def leaf(i: int) -> None:
        try:
            for n in range(3):
                walker.count(i, 1)
                if within and (i, n) == (1, 1):
                    raise KeyboardInterrupt
        except dy.InstanceStopped:
            stopped.append(i)
            raise

    with pytest.raises(KeyboardInterrupt):
        dy.map(lambda i: dy.map(leaf, [i]), range(3))
    assert sorted(stopped) == ([0, 2] if within else [0, 1, 2])
    assert state.fiber is None
    monkeypatch.undo()
    assert len(dy.map(walker.walk, range(3))) == 3


@pytest.mark.cpu  # an interrupt may come between what the emulator of a device notes of its memory
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may meet a callback of gc
@pytest.mark.cpu  # what the emulator remembers of its memory does not outlive an interrupt
def test_interrupting_anywhere() -> None:
    """A signal at any moment ends the map, and leaves a graph that computes what it would have."""

    def interrupt(*_: Any) -> None:
        if armed:
            raise KeyboardInterrupt

    def tree(i: int) -> list[Any]:
        with dy.phase("p") if i % 2 else dy.no_grad():
            return [walker.walk(i), *(dy.map(tree, [i // 2, i // 3]) if i else [])]

    walker = Walker()
    expected = [taken for _, taken in dy.map(walker.walk, range(3))]
    dy.map(tree, range(8))  # numba does not outlive being interrupted while it loads a function: all are loaded here
    gradients(walker, [walker.walk(0)[0]])
    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for k in range(60):
            dy.renew_cg()
            early = walker.count(k, 2)
            context = contextvars.copy_context()  # an interrupt may come before np.errstate is left
            armed = True
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 * (k + 1))
                context.run(dy.map, tree, range(8))
                armed = False
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            if not compiled.in_use:  # recording in Python may be interrupted in the middle of a node
                dy.renew_cg()
                early = walker.count(k, 2)
            assert state.fiber is None and state.settings == (True, None, "", None)
            assert [taken for _, taken in dy.map(walker.walk, range(3))] == expected
            np.testing.assert_allclose(early.npvalue(), walker.count(k, 2).npvalue(), rtol=1e-12)
            gradients(walker, [dy.squared_norm(early)])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 10


def test_interrupting_between_entering_an_instance_and_running_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is entered next: from the hub or from another instance, in a new greenlet, a used one or where it is."""

    def tree(i: int) -> int:
        taken = len(walker.walk(i)[1])
        return taken + (sum(dy.map(tree, [i // 2, i // 3])) if i else 0)

    def enter(hub: Any, fiber: Any) -> None:
        entered.append(fiber)
        original(hub, fiber)
        if len(entered) == interrupted:
            raise KeyboardInterrupt

    walker, original = Walker(), Hub.enter
    expected = dy.map(tree, range(5))
    monkeypatch.setattr(Hub, "enter", enter)
    interrupted, entered = 0, list[Any]()
    assert dy.map(tree, range(5)) == expected
    for interrupted in range(1, len(entered) + 1):
        entered = []
        with pytest.raises(KeyboardInterrupt):
            dy.map(tree, range(5))
        assert len(entered) >= interrupted and state.fiber is None and state.settings == (True, None, "", None)
    assert dy.map(tree, range(5)) == expected


def test_an_interrupt_while_going_on_to_another_that_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(hub: Any, fiber: Any) -> None:
        nonlocal interrupted
        original(hub, fiber)
        if not interrupted and fiber.fork.parent is None and getcurrent() is not hub.greenlet:
            interrupted = True
            raise KeyboardInterrupt

    def fn(i: int) -> Any:
        for k in range(3):
            try:
                walker.count(i, k)
            except KeyboardInterrupt:
                caught.append(i)
        return walker.count(i, 2).npvalue()

    walker, original, interrupted, caught = Walker(), Hub.enter, True, list[int]()
    expected = dy.map(fn, range(4))
    monkeypatch.setattr(Hub, "enter", enter)
    interrupted = False
    np.testing.assert_allclose(dy.map(fn, range(4)), expected, rtol=1e-12)
    assert len(caught) == 1


@pytest.mark.parametrize("steps", [0, 2])
def test_an_interrupt_that_is_caught_while_waiting(steps: int) -> None:
    """However a fiber comes to wait twice, or for nothing, it goes on once."""
    walker = Walker()
    ended = []

    def fn(i: int) -> None:
        fiber, h = state.fiber, walker.step(walker.start(i), 1)
        fiber.hub.waiting[fiber] = [h.vid], None  # as after an interrupt between this and the switch
        walker.count(i, steps + i)
        ended.append(i)

    dy.map(fn, range(3))
    assert ended == [0, 1, 2]


def test_an_interrupt_before_an_inner_map_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    walker, begun = Walker(), []

    def child(i: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(type(state.fiber), "_pause", interrupt)
            dy.map(begun.append, [i])

    def interrupt(fiber: Any) -> None:
        raise KeyboardInterrupt

    def parent(i: int) -> Any:
        with pytest.raises(KeyboardInterrupt):
            dy.map(child, [i])
        return walker.count(i, 2).dim()

    assert dy.map(parent, range(2)) == [((4,), 1)] * 2
    assert not begun


def test_nothing_is_left_behind() -> None:
    class Thing:
        pass

    things: list[Any] = []

    def fn(i: int) -> Any:
        thing = Thing()
        things.append(weakref.ref(thing))
        dy.scalarInput(i).value()
        if i == 2:
            raise ValueError
        dy.scalarInput(i).value()
        return i

    gc.collect()
    gc.disable()
    try:
        dy.map(fn, [0, 1])
        assert not [t for t in things if t() is not None]
        with contextlib.suppress(ValueError):
            dy.map(fn, range(4))
        assert len(things) == 6
        assert not [t for t in things if t() is not None]
    finally:
        gc.enable()


# ---- settings --------------------------------------------------------------------------------------------------------


def test_settings_hold_in_the_instance_that_sets_them() -> None:
    variable = contextvars.ContextVar("variable", default="outside")
    variable.set("around")

    def look() -> tuple[Any, ...]:
        return *state.settings[:3], variable.get(), np.geterr()["divide"]

    def fn(i: int) -> None:
        assert look() == around
        if i == 0:
            with dy.no_grad(), dy.autobatch("off"), dy.phase("p"), np.errstate(divide="ignore"):
                variable.set("zero")
                for n in range(4):
                    dy.scalarInput(n).value()
                    assert look() == (False, "off", "p", "zero", "ignore")
                    assert dy.map(lambda j: (dy.scalarInput(j).value(), look()), [1])[0][1] == look()
            assert look() == (*around[:3], "zero", around[4])
        else:
            for n in range(4):
                dy.scalarInput(n).value()
                assert look() == around
                with dy.autobatch("depth"):
                    dy.scalarInput(n).value()
                    assert state.strategy == "depth"

    with dy.phase("q"), np.errstate(divide="raise"):
        around = look()
        dy.map(fn, range(3))
        assert look() == around
        with pytest.raises(ZeroDivisionError), dy.no_grad():
            dy.map(lambda i: dy.no_grad().__enter__() or dy.scalarInput(i).value() / 0, [1, 2])
        assert look() == around
    assert look()[2:] == ("", "around", "warn")


def test_settings_hold_for_what_is_computed() -> None:
    """Of one round, what is read under no_grad keeps nothing for a backward pass, and the rest does."""
    walker = Walker()

    def fn(i: int) -> Any:
        h = walker.step(walker.start(i), i)
        with dy.no_grad() if i % 2 else dy.autobatch("off"):
            h.npvalue()
        return dy.squared_norm(h)

    losses = dy.map(fn, range(5))
    assert [(r.instances, r.nodes) for r in dy.plan("map").rounds] == [(5, 10)]
    assert sorted(dy.plan("map").rows_per_batch) == [1] * 6 + [2, 2]
    steps = next(p for p in state.graph.execution.pools if p.signature.program.name == "Walker.step")
    assert sorted((segment.first_row, segment.kept) for segment in steps.segments) == [(0, True), (3, False)]
    found = gradients(walker, losses)
    fresh()
    for a, b in zip(found, gradients(walker, looped(fn, range(5)))):
        np.testing.assert_allclose(a, b, rtol=1e-12)


# ---- random numbers --------------------------------------------------------------------------------------------------


def draw(i: int) -> list[float]:
    found = []
    for n in range(1 + i % 3):
        found.append(dy.random_normal(1).value())
        dy.scalarInput(n).value()
        found += dy.dropout(dy.ones(3), 0.5).vec_value()
    return found


def test_draws_do_not_depend_on_the_order_of_running() -> None:
    found = []
    for how in (
        lambda: dy.map(draw, range(6)),
        lambda: dy.map(draw, range(6), max_concurrent=2),
        lambda: dy.map(draw, range(6), share=0.3),
        lambda: looped(draw, range(6)),
    ):
        fresh(5)
        found.append(how())
    assert found[0] == found[1] == found[2] == found[3]
    assert len({x[0] for x in found[0]}) == 6
    fresh(5)
    with dy.stream(4):  # one instance alone
        assert draw(4) == found[0][4]
    fresh(6)
    assert dy.map(draw, range(6)) != found[0]


def test_the_next_map_draws_other_numbers() -> None:
    fresh()
    first, second = dy.map(draw, range(3)), dy.map(draw, range(3))
    assert first != second
    dy.renew_cg()
    third = dy.map(draw, range(3))
    assert third not in (first, second)
    fresh()
    assert [looped(draw, range(3)), looped(draw, range(3))] == [first, second]
    dy.renew_cg()
    assert looped(draw, range(3)) == third


def test_streams_of_maps_within_come_from_the_parent() -> None:
    def parent(i: int, each: Callable[..., list[Any]]) -> Any:
        own = [dy.random_uniform(1).value()]
        inner = each(draw, range(1 + i))
        own.append(dy.random_uniform(1).value())
        return own, inner, each(draw, range(2))

    found = []
    for each in (dy.map, looped):
        fresh()
        found.append(each(lambda i, each=each: parent(i, each), range(3)))
    assert found[0] == found[1]
    firsts = [x[0] for own, a, b in found[0] for x in (own, own[1:], *a, *b)]
    assert len(set(firsts)) == len(firsts)


def test_streams_open_and_close() -> None:
    def one() -> float:
        return dy.random_uniform(1).value()

    fresh()
    plain = [one(), one()]
    fresh()
    mixed = [one()]
    with dy.stream(3):
        three = one()
        with dy.stream(-1):
            inner = one()
        with pytest.raises(ZeroDivisionError), dy.stream(1):
            raise ZeroDivisionError
        three_again = one()
    with dy.stream(3):
        last = one()
    assert len({*plain, *mixed, three, inner, three_again, last}) == 6
    assert mixed[0] == plain[0]
    fresh(1)
    with dy.stream(3):
        assert [one(), one(), one()] == [three, three_again, last]
    with pytest.raises(TypeError):
        dy.stream("a").__enter__()  # type: ignore[arg-type]


def test_draws_do_not_depend_on_who_records_a_tape() -> None:
    def noisy(words: tuple[int, ...]) -> Any:
        h = dy.ones(4)
        for word in words:
            h = dy.dropout(walker.step(h, word), 0.5)
        return h

    walker = Walker()

    found = []
    for function in (dy.static(noisy), noisy):

        def fn(i: int, function: Any = function) -> list[float]:
            return [*function((1, 2, 3)).vec_value(), *dy.dropout(dy.ones(8), 0.5).vec_value()]

        fresh()
        found.append(dy.map(fn, range(3)))
        fresh()
        found.append(looped(fn, range(3)))
    assert len({tuple(np.sign(x)) for x in found[0]}) == 3
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, rtol=1e-12)


def test_streams_are_for_outside_of_cells_and_tapes() -> None:
    @dy.cell
    def in_cell(x: Any) -> Any:
        with dy.stream(1):
            return dy.dropout(x, 0.5)

    @dy.static
    def in_tape(x: Any) -> Any:
        with dy.stream(1):
            return dy.dropout(x, 0.5)

    with pytest.raises(dy.CellError, match="opens a random stream"):
        in_cell(dy.ones(2))
    with pytest.raises(dy.StaticError, match="opens a random stream"):
        in_tape(dy.ones(2))


# ---- with everything else --------------------------------------------------------------------------------------------


def test_backward_within_an_instance() -> None:
    walker = Walker()

    def fn(i: int) -> Any:
        loss, taken = walker.walk(i)
        loss.backward(full=True)
        return loss.gradient().item(), taken

    mapped = dy.map(fn, range(4))
    found = [p.grad_as_array() for p in (walker.W, walker.E)]
    walker.pc.reset_gradient()
    fresh()
    assert [fn(i) for i in range(4)] == mapped
    for a, b in zip(found, [walker.W.grad_as_array(), walker.E.grad_as_array()]):
        np.testing.assert_allclose(a, b, rtol=1e-10)
    dy.map(lambda i: dy.squared_norm(walker.step(walker.start(i), i)).backward(), range(4))
    assert [r.instances for r in dy.plan("map").rounds] == [4]


def test_a_graph_is_not_renewed_by_an_instance() -> None:
    x = dy.scalarInput(2)
    for renew in (dy.renew_cg, lambda: dy.init(dtype="float32")):
        with pytest.raises(dy.MapError, match=r"renew_cg\(\) within an instance of dy.map"):
            dy.map(lambda i: renew(), range(2))  # noqa: B023
        config.dtype = "float64"
    assert x.value() == 2


def test_cells_and_static_functions_in_instances() -> None:
    walker = Walker()

    @dy.static
    def encode(words: tuple[int, ...]) -> Any:
        h = walker.start(1)
        for word in words:
            h = walker.step(h, word)
        return h

    @dy.static
    def reads(words: tuple[int, ...]) -> Any:
        return dy.ones(1) * walker.step(walker.start(0), words[0]).npvalue()[0]

    @dy.cell
    def maps(x: Any) -> Any:
        return dy.map(lambda i: x, [1])[0]

    def fn(i: int) -> list[float]:
        first = encode((i % 2, 3)).vec_value()
        with pytest.raises(dy.StaticError, match="reads a value while it is recorded"):
            reads((i,))
        with pytest.raises(dy.CellError, match="calls map"):
            maps(walker.start(1))
        with pytest.raises(dy.StaticError, match="calls map"):
            dy.static(lambda k: dy.map(len, [k]))("k")
        return first + walker.scores(encode((i, 4))).vec_value()

    np.testing.assert_allclose(dy.map(fn, range(4)), looped(fn, range(4)), rtol=1e-12)


def test_no_grad_around_a_map_keeps_nothing() -> None:
    walker = Walker()
    for _ in range(3):  # equal graphs, whose plans could be used again
        fresh()
        with dy.no_grad():
            mapped = [h.npvalue() for h in dy.map(lambda i: walker.count(i, 3), range(4))]
            more = walker.step(walker.start(0), 1).npvalue()
        np.testing.assert_allclose(mapped, [walker.count(i, 3).npvalue() for i in range(4)], rtol=1e-12)
        np.testing.assert_allclose(more, walker.count(0, 1).npvalue() * 0 + more)
    assert not any(segment.kept for p in state.graph.execution.pools for segment in p.segments[:1] if p.rows > 4)


def test_maps_in_threads() -> None:
    walker, found, errors = Walker(), {}, []

    def work(k: int) -> None:
        try:
            dy.renew_cg()
            found[k] = [taken for _, taken in dy.map(walker.walk, range(k, k + 8))]
            assert dy.plan("map").instances == 8
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    for k in range(4):
        dy.renew_cg()
        assert found[k] == [walker.walk(i)[1] for i in range(k, k + 8)]


def test_an_instance_may_start_threads_and_greenlets_of_its_own() -> None:
    import greenlet

    walker = Walker()

    def fn(i: int) -> float:
        def other() -> float:
            return float(walker.scores(walker.count(i, 2))[0])

        first = greenlet.greenlet(other).switch()
        seen: list[float] = []
        thread = threading.Thread(target=lambda: seen.append(other()))
        thread.start()
        thread.join()
        assert seen == pytest.approx([first])
        return first

    mapped = dy.map(fn, range(3))
    assert len(dy.plan("map").rounds) == 3
    assert mapped == pytest.approx([fn(i) for i in range(3)])


def test_greenlets_serve_one_map_after_the_other() -> None:
    """Of maps within maps, too, and of maps that were called in a greenlet, which nothing then keeps."""

    def tree(i: int) -> Any:
        used.add(getcurrent())
        return dy.scalarInput(i).value() + (sum(dy.map(tree, [i // 2, i // 3])) if i else 0)

    def in_a_greenlet() -> Any:
        called.append(weakref.ref(getcurrent()))
        return dy.map(tree, range(4))

    used, called = set[Any](), list[Any]()
    expected = dy.map(tree, range(4))
    dy.map(tree, range(4))
    first, used = used, set()
    for _ in range(3):
        assert dy.map(tree, range(4)) == expected
    assert used <= first
    assert greenlet(in_a_greenlet).switch() == expected
    del first, used
    used = set()
    assert called[0]() is None
    assert all(idle.parent is getcurrent() for idle in workers.idle)
    assert dy.map(tree, range(4)) == expected


def test_a_process_with_idle_greenlets_ends_cleanly() -> None:
    code = (
        "import threading, dynbatch as dy\n"
        "def run(): print(sum(dy.map(lambda i: dy.scalarInput(i).value(), range(200))))\n"
        "thread = threading.Thread(target=run)\n"
        "thread.start(); thread.join(); run()\n"
    )
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "19900.0\n19900.0\n") and "rror" not in done.stderr, done.stderr


def test_an_instance_that_switches_away_is_an_error() -> None:
    import greenlet

    with pytest.raises(dy.MapError, match="greenlet switch of its own"):
        dy.map(lambda i: greenlet.getcurrent().parent.switch(), [1])


def test_without_greenlet_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    monkeypatch.delitem(sys.modules, "dynbatch.greenlets")
    with pytest.raises(ImportError, match="needs the package greenlet"):
        dy.map(lambda i: i, [1])


def test_plans_of_maps_can_be_seen_later() -> None:
    walker = Walker()
    dy.map(walker.walk, range(3))
    plan = dy.plan("map")
    assert dy.plan() is plan and plan.direction == "map" and plan.nodes == sum(plan.rows_per_batch)
    walker.count(1, 1)
    assert dy.plan() is not plan
    dy.renew_cg()
    assert dy.plan("map") is plan


@pytest.fixture(autouse=True)
def forget_model() -> Any:
    yield
    MODEL.clear()
    tiers.set_mode("never")
