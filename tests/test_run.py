"""Running: what runs when a value is asked for, in which batches, what a failure leaves, memory, threads, processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynbatch as dy
from dynbatch.batching import agenda, backward, execution, layout, plan, stream
from dynbatch.batching.backends import backend
from dynbatch.batching.stream import ARGS, LISTS
from dynbatch.cpu import job
from dynbatch.cuda import job as device_job
from dynbatch.graph import state
from dynbatch.ops import elementwise as ew
from tests.conftest import TIER

STRATEGIES = ["off", "depth", "agenda"]

pytestmark = pytest.mark.usefixtures("float64")


def vector(*numbers: float) -> Any:
    return dy.inputVector(numbers or (0.5, -1.0, 2.0))


class Chain:
    """One step of a recurrent network."""

    def __init__(self) -> None:
        self.pc = dy.ParameterCollection()
        self.W, self.U = self.pc.add_parameters((3, 3)), self.pc.add_parameters((3, 3))

    @dy.cell
    def step(self, x: Any, h: Any) -> Any:
        return dy.tanh(self.W * x + self.U * h)

    def run(self, steps: int, k: int = 0) -> Any:
        h = vector(k, 1, -1)
        for t in range(steps):
            h = self.step(vector(t, k, 1), h)
        return h


# ---- what runs -------------------------------------------------------------------------------------------------------


def test_only_what_is_new_runs() -> None:
    chain = Chain()
    h = chain.run(3)
    h.value()
    assert dy.plan().nodes == 7
    before = dy.plan()
    h.value()
    assert dy.plan() is before
    chain.step(h, h).value()
    assert dy.plan().nodes == 1
    dy.sum_elems(h).backward()
    assert dy.plan().nodes == 1  # the sum
    assert dy.plan("backward").nodes == 4


def test_what_is_not_needed_waits() -> None:
    a, b = dy.tanh(vector()), dy.exp(dy.square(vector()))
    b.value()
    assert "tanh" not in {r.name for r in dy.plan().batch_reports}
    a.value()
    assert {r.name for r in dy.plan().batch_reports} == {"tanh"}  # its input has run beside the other


def test_agenda_runs_what_only_follows_a_kind_once_that_is_done() -> None:
    """A loss at the end of each chain, chains of 1 to 9 steps: all losses go together, whatever the mean levels are."""
    chain = Chain()
    with dy.autobatch("agenda"):
        dy.esum([dy.squared_norm(chain.run(steps, steps)) for steps in range(1, 10)]).value()
    rows = {r.name: [b.rows for b in dy.plan().batch_reports if b.name == r.name] for r in dy.plan().batch_reports}
    assert rows["squared_norm"] == [9]
    assert rows["Chain.step"] == [9, 8, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("strategy", ["depth", "agenda"])
def test_pending_work_joins_where_it_fills_a_batch(strategy: str) -> None:
    dy.init(autobatch=strategy)
    chain = Chain()
    ends = [chain.run(3, k) for k in range(6)]
    longer = [chain.step(h, h) for h in ends]
    ends[0].value()
    assert dy.plan().batches == 4
    assert {r.name for r in dy.plan().batch_reports} == {"input", "Chain.step"}
    assert dy.plan().rows_per_batch[1:] == [6, 6, 6]
    for h in ends[1:]:
        h.value()
    assert dy.plan().nodes == 24 + 18  # nothing ran since
    longer[3].value()
    assert dy.plan().rows_per_batch == [6]


def test_without_batching_nothing_joins() -> None:
    dy.init(autobatch="off")
    chain = Chain()
    ends = [chain.run(3, k) for k in range(6)]
    ends[0].value()
    assert dy.plan().nodes == dy.plan().batches == 7
    ends[5].value()
    assert dy.plan().nodes == 7


def test_several_values_in_one_plan() -> None:
    chain = Chain()
    ends = [chain.run(k + 1, k) for k in range(4)]
    dy.forward(ends)
    made = dy.plan()
    assert made.nodes == 4 + 2 * (1 + 2 + 3 + 4)
    for h in ends:
        h.value()
    assert dy.plan() is made
    dy.forward([])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_asked_for_midway_change_nothing(strategy: str) -> None:
    chain = Chain()
    found = []
    for midway in (False, True):
        dy.renew_cg()
        chain.pc.reset_gradient()
        with dy.autobatch(strategy):
            losses = []
            for k in range(4):
                h = vector(k, 1, -1)
                for t in range(4):
                    h = chain.step(vector(t, k, 1), h)
                    if midway and (k + t) % 2:
                        h.value()
                losses.append(dy.squared_norm(h))
            loss = dy.esum(losses)
            loss.backward()
        found.append((loss.value(), chain.W.grad_as_array(), chain.U.grad_as_array()))
    for a, b in zip(*found):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("strategy", ["depth", "agenda"])
def test_backward_over_several_plans_takes_few_batches(strategy: str) -> None:
    dy.init(autobatch=strategy)
    chain = Chain()
    together = dy.esum([dy.squared_norm(chain.run(6, k)) for k in range(8)])
    together.backward()
    batches = dy.plan("backward").batches
    dy.renew_cg()
    ends = []
    for k in range(8):  # one after the other, each step's value looked at
        h = vector(k, 1, -1)
        for t in range(6):
            h = chain.step(vector(t, k, 1), h)
            h.value()
        ends.append(h)
    dy.esum([dy.squared_norm(h) for h in ends]).backward()
    assert dy.plan("backward").nodes == 8 * 7 + 1
    assert dy.plan("backward").batches == batches


def test_plans_without_and_with_kept_values_mix() -> None:
    """Rows of one signature from several plans lie in several places, also where an earlier one had room left."""
    dy.init(autobatch="depth")
    xs, ys = [], []
    for k in range(8):
        xs.append(vector(k, 0.5, -k))
        ys.append(dy.tanh(xs[-1]))
        with dy.no_grad() if k in (3, 6) else contextlib.nullcontext():
            ys[-1].value()
    for first in range(7):
        dy.sum_elems(dy.esum(ys[first:])).backward(full=True)
        for k in range(8):
            expected = (1 - np.tanh(xs[k].npvalue()) ** 2) if k >= first else np.zeros(3)
            np.testing.assert_allclose(xs[k].gradient(), expected, rtol=1e-12, err_msg=f"{k} of {first}")


def test_no_grad_keeps_less() -> None:
    chain = Chain()
    tops = []
    for quiet in (False, True):
        dy.renew_cg()
        with dy.no_grad() if quiet else contextlib.nullcontext():
            gate = dy.cell(lambda x: dy.cmult(dy.logistic(chain.W * x), dy.tanh(chain.U * x)))
            dy.forward([gate(dy.inputTensor(np.ones(3))) for _ in range(100)])
        tops.append(state.graph.execution.arena.top)
    assert tops[1] < tops[0]
    assert state.keep


def test_settings_of_a_block_end_with_it() -> None:
    with pytest.raises(KeyError), dy.no_grad(), dy.autobatch("off"):
        assert not state.keep and state.strategy == "off"
        raise KeyError
    assert state.keep and state.strategy is None
    with dy.autobatch("depth"):
        with dy.autobatch("off"):
            dy.tanh(vector()).value()
            assert dy.plan().strategy == "off"
        dy.exp(vector()).value()
        assert dy.plan().strategy == "depth"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_gradients_have_the_configured_type(dtype: str) -> None:
    dy.init(dtype=dtype)
    chain = Chain()
    h = chain.run(2)
    loss = dy.squared_norm(h)
    loss.backward(full=True)
    found = [h.npvalue(), loss.npvalue(), h.gradient(), chain.W.grad_as_array(), chain.W.as_array()]
    assert {a.dtype.name for a in found} == {dtype}
    assert isinstance(loss.value(), float)


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_tells_what_ran() -> None:
    chain = Chain()
    dy.esum([dy.squared_norm(chain.run(2, k)) for k in range(5)]).backward()
    made, back = dy.plan(), dy.plan("backward")
    assert made.direction == "forward" and back.direction == "backward" and made.strategy == "agenda"
    assert made.nodes == sum(made.rows_per_batch) == 15 + 10 + 5 + 1
    assert made.batches == len(made.rows_per_batch) == len(made.seconds_per_batch) == len(made.batch_reports) == 5
    assert back.nodes == 16 and back.batches == 4
    assert made.bytes_gathered == sum(r.gathered for r in made.batch_reports) >= 0
    assert 0 <= made.gathering_avoided <= 1
    assert made.schedule_seconds > 0 and made.run_seconds >= sum(made.seconds_per_batch) > 0
    assert {r.tier for r in made.batch_reports} == {TIER}


def test_a_plan_prints_as_a_table() -> None:
    chain = Chain()
    dy.forward([chain.run(2, k) for k in range(5)])
    lines = str(dy.plan()).splitlines()
    assert lines[0].startswith("forward plan by agenda: 25 nodes in 3 batches, ")
    assert lines[1].split()[:3] == ["program", "outputs", "batches"]
    row = next(line for line in lines if line.startswith("Chain.step"))
    assert row.split()[:5] == ["Chain.step", "(3,)", "2", "10", "5.0"] and row.endswith(TIER)


def test_plans_of_the_last_graph_can_be_seen() -> None:
    chain = Chain()
    dy.squared_norm(chain.run(2)).backward()
    plans = dy.plan(), dy.plan("backward")
    dy.renew_cg()
    assert (dy.plan(), dy.plan("backward")) == plans
    dy.tanh(vector()).value()
    assert dy.plan().nodes == 2 and dy.plan("backward").nodes == 0
    with pytest.raises(ValueError, match="forward, backward or map"):
        dy.plan("sideways")


def test_debug_prints_a_line_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    dy.init(debug=True)
    chain = Chain()
    dy.squared_norm(chain.run(2)).backward()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == dy.plan().batches + dy.plan("backward").batches
    assert any("Chain.step" in line and "1 rows" in line and "(3,)" in line and TIER in line for line in lines)


# ---- orders ----------------------------------------------------------------------------------------------------------


def operands(ran: Any, node: int) -> list[int]:
    """The nodes that a node's arguments and list elements come from."""
    p = int(ran.pos[node])
    args, lists = ran.layout[ran.stream[p], ARGS], ran.layout[ran.stream[p], LISTS]
    found = ran.stream[p + 1 : p + 1 + args].tolist()
    p += 1 + int(args)
    for _ in range(lists):
        length = int(ran.stream[p])
        found += ran.stream[p + 1 : p + 1 + length].tolist()
        p += 1 + length
    return [int(ran.producer[v]) for v in found]


def check_executed(strategy: str) -> int:
    """Every node that ran did so once, in a batch of its signature, after what it needs; returns how many ran."""
    ran = state.graph.execution
    done: set[int] = set()
    for order, starts, signatures in ran.executed:
        assert starts[0] == 0 and starts[-1] == order.size and (np.diff(starts) > 0).all()
        for begin, end, signature in zip(starts[:-1], starts[1:], signatures):
            batch = order[begin:end].tolist()
            assert {int(ran.sig[n]) for n in batch} == {int(signature)}
            assert not done.intersection(batch)
            for n in batch:
                assert done.issuperset(operands(ran, n))
            done.update(batch)
            if strategy == "off":
                assert len(batch) == 1 or len({int(ran.lane_group[n]) for n in batch}) == 1
    assert (ran.row[sorted(done)] >= 0).all()
    waiting = set(range(ran.nodes)) - done
    assert waiting == set(ran.pending.tolist())
    for s in range(len(ran.pools)):  # rows count up in order of running
        rows = [int(ran.row[n]) for order, _, _ in ran.executed for n in order if ran.sig[n] == s]
        assert rows == list(range(len(rows)))
    return len(done)


RECIPES = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=60)


@pytest.fixture(scope="module")
def chain() -> Chain:
    dy.init(dtype="float64")
    return Chain()


@given(recipe=RECIPES, asked=st.lists(st.integers(0, 99), max_size=3))
def test_orders_are_valid(chain: Chain, recipe: list[tuple[int, int, int]], asked: list[int]) -> None:
    for strategy in STRATEGIES:
        dy.init(dtype="float64", autobatch=strategy)
        dy.renew_cg()
        made = [vector(), vector(1, 2, 3)]
        for name, i, j in recipe:
            x, y = made[-1 - i % len(made)], made[-1 - j % len(made)]
            if name == 0:
                made.append(vector(i, j, 1))
            elif name == 1:
                made.append(dy.tanh(x))
            elif name == 2:
                made.append(x + y)
            elif name == 3:
                made.append(chain.step(x, y))
            elif name == 4:
                made.append(dy.average(made[-1 - i % 4 :]))
            elif name == 5:
                lanes = dy.tanh(dy.inputTensor(np.ones((3, 2 + i % 3)) * j, batched=True) + x)
                made.append(dy.sum_batches(lanes))
            elif name == 6:
                made.append(dy.esum([x, y, x]))
            elif name == 7:
                made.append(dy.cmult(dy.logistic(x), y) * 0.5)
            elif i % 3 == 0:
                x.value()
        for k in asked:
            made[k % len(made)].value()
            check_executed(strategy)
        loss = dy.esum([dy.squared_norm(dy.tanh(e)) for e in made[-4:]])
        loss.backward()
        dy.forward(made)
        assert check_executed(strategy) <= state.graph.execution.nodes


# ---- failures --------------------------------------------------------------------------------------------------------


class Interrupted:
    """Raises at the n-th call of a function, which otherwise runs."""

    def __init__(self, function: Any, at: int, error: type[BaseException]) -> None:
        self.function, self.left, self.error = function, at, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.left == 0:
            self.left = -1
            raise self.error
        self.left -= 1
        return self.function(*args, **kwargs)


FORWARD = {
    "an op": (ew.tanh, "_function"),
    "choosing": (stream, "mark_ancestors"),
    "levels": (stream, "levels"),
    "scheduling": (agenda, "_agenda"),
    "the layout": (layout, "_arrange"),
    "placing rows": (stream, "place_rows"),
    "tables": (plan, "make_tables"),
}
BACKWARD = {
    "an op": (ew.tanh._grads[0][0], "_function"),
    "reaching": (backward, "reach"),
    "edges": (backward, "place_edges"),
    "pulling": (job, "sum_edges"),
}
if TIER == "cuda":
    FORWARD["an op"] = BACKWARD["an op"] = (backend().driver, "launch")
    BACKWARD["pulling"] = (device_job, "count_edges")
ERRORS = [KeyboardInterrupt, MemoryError, ZeroDivisionError]


@pytest.mark.parametrize("place", FORWARD)
@pytest.mark.parametrize("error", ERRORS)
def test_a_failed_forward_leaves_everything_as_it_was(
    place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(first: Any) -> tuple[list[Any], Any]:
        ends = [chain.step(first, chain.run(3, k)) for k in range(4)]
        return ends, dy.esum([dy.squared_norm(h) for h in ends])

    owner, name = FORWARD[place]
    chain = Chain()
    first = chain.run(2)
    early = first.npvalue()
    ends, loss = build(first)
    ran = state.graph.execution
    before = ran.arena.top, [p.rows for p in ran.pools]
    words = len(state.graph.stream)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Interrupted(getattr(owner, name), 1 if place == "an op" else 0, error))
        with pytest.raises(error):
            loss.value()
    assert len(state.graph.stream) == words
    assert (ran.arena.top, [p.rows for p in ran.pools][: len(before[1])]) == before
    assert not any(p.rows for p in ran.pools[len(before[1]) :])
    np.testing.assert_array_equal(first.npvalue(), early)
    for ask in (ends[1], ends[0], loss):  # part of what failed, then all of it
        ask.value()
        check_executed("agenda")
    loss.backward()
    found = [loss.value(), chain.W.grad_as_array()]
    dy.renew_cg()
    chain.pc.reset_gradient()
    loss = build(chain.run(2))[1]
    loss.backward()
    for actual, expected in zip(found, [loss.value(), chain.W.grad_as_array()]):
        np.testing.assert_allclose(actual, expected, rtol=1e-10)


@pytest.mark.parametrize("place", BACKWARD)
@pytest.mark.parametrize("error", ERRORS)
def test_a_failed_backward_leaves_gradients_as_they_were(
    place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = BACKWARD[place]
    chain = Chain()
    dy.squared_norm(chain.run(3)).backward()
    before = chain.W.grad_as_array()
    loss = dy.squared_norm(chain.run(4, 1))
    loss.value()
    top = state.graph.execution.arena.top
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Interrupted(getattr(owner, name), 0, error))
        with pytest.raises(error):
            loss.backward()
    assert state.graph.execution.arena.top == top
    np.testing.assert_array_equal(chain.W.grad_as_array(), before)
    loss.backward()
    both = chain.W.grad_as_array()
    chain.pc.reset_gradient()
    dy.renew_cg()
    dy.squared_norm(chain.run(4, 1)).backward()
    np.testing.assert_allclose(both - before, chain.W.grad_as_array(), rtol=1e-10)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_used_again() -> None:
    chain = Chain()
    executions, peaks = set(), []
    for _ in range(5):
        dy.renew_cg()
        loss = dy.esum([dy.squared_norm(chain.run(5, k)) for k in range(20)])
        loss.backward(full=True)
        ran = state.graph.execution
        executions.add(id(ran))
        assert ran.arena.used > 0
        peaks.append(ran.arena.peak)
    dy.renew_cg()
    assert len(executions) == 1 and peaks[0] == peaks[-1]
    assert ran.arena.used == 0 and ran.graph is None and not ran.pools


def test_backward_gives_its_memory_back() -> None:
    chain = Chain()
    loss = dy.squared_norm(chain.run(5))
    loss.value()
    top = state.graph.execution.arena.top
    for _ in range(3):
        loss.backward()
        assert state.graph.execution.arena.top == top


@pytest.mark.cpu
def test_many_small_plans_take_memory_in_proportion() -> None:
    """The pools grow geometrically, so that rows stay together; at most twice of what is needed is taken."""
    chain = Chain()
    h = vector()
    for _ in range(300):
        h = chain.step(h, h)
        h.value()
    ran = state.graph.execution
    steps = next(p for p in ran.pools if p.signature.program.name == "Chain.step")
    assert steps.rows == 300 and len(steps.segments) < 12
    assert ran.arena.top < 300 * 3 * 8 * 3
    dy.squared_norm(h).backward()
    assert dy.plan("backward").batches == 301


def test_a_graph_that_is_never_renewed_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "GRAPH_WARNING", 50)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            dy.renew_cg()
            for k in range(8):
                dy.tanh(dy.esum([vector(k, i) for i in range(10)])).value()
    messages = [str(w.message) for w in found]
    assert len(messages) == 2  # one a graph
    assert all("renew_cg" in m and w.category is RuntimeWarning for m, w in zip(messages, found))


# ---- threads and processes -------------------------------------------------------------------------------------------


def train(chain: Chain, minibatches: int) -> list[float]:
    trainer = dy.AdamTrainer(chain.pc, 0.05)
    losses = []
    for n in range(minibatches):
        dy.renew_cg()
        loss = dy.esum([dy.squared_norm(chain.run(3 + n % 3, k)) for k in range(4)])
        losses.append(loss.value())
        loss.backward()
        trainer.update()
    return losses


def test_two_threads_train_models_of_their_own() -> None:
    def chains() -> list[Chain]:
        rng = np.random.default_rng(0)
        made = [Chain() for _ in range(3)]
        for chain in made:
            chain.W.set_value(rng.normal(size=(3, 3)))
            chain.U.set_value(rng.normal(size=(3, 3)))
        return made

    expected = [train(chain, 25) for chain in chains()]
    found: dict[int, list[float]] = {}
    threads = [
        threading.Thread(target=lambda k=k, chain=chain: found.update({k: train(chain, 25)}))  # type: ignore[misc]
        for k, chain in enumerate(chains())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[k] for k in range(3)] == expected


def test_threads_trace_one_cell_at_once() -> None:
    chain = Chain()
    barrier = threading.Barrier(4)
    found: list[float] = []

    def work() -> None:
        barrier.wait()
        found.append(float(dy.squared_norm(chain.run(5)).value()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1


def process(script: str, **environment: str) -> str:
    """What a process of its own prints."""
    blank = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS") and not k.startswith("DYNBATCH_")}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=blank | environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("blas", ["auto", "numpy"])
def test_a_fork_after_first_use(blas: str) -> None:
    """The child has the parent's parameters and graph, and computes on its own."""
    printed = process(
        """
        import os
        import numpy as np
        import dynbatch as dy

        W = dy.ParameterCollection().add_parameters((300, 300), init=0.001)

        def compute():
            loss = dy.esum([dy.sum_elems(dy.tanh(W * dy.inputVector(np.full(300, k)))) for k in range(100)])
            loss.backward()
            return round(loss.value(), 3), round(float(W.grad_as_array().sum()), 1)

        before = dy.tanh(W * dy.inputVector(np.ones(300)))
        print("parent", *compute(), flush=True)
        W.scale_gradient(0)
        child = os.fork()
        if child == 0:
            print("child", *compute(), round(float(before.npvalue().sum()), 3), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("parent", *compute(), round(float(before.npvalue().sum()), 3), flush=True)
        """,
        DYNBATCH_BLAS=blas,
    )
    first, child, parent = (line.split() for line in printed.splitlines())
    assert child[1:] == parent[1:] and child[1:3] == first[1:]


@pytest.mark.cpu
def test_threads_bounds_the_team_and_numba_and_blas_is_one_thread_within_plans_alone() -> None:
    printed = process(
        """
        import numba, threadpoolctl
        import dynbatch as dy
        from dynbatch.cpu import team
        from dynbatch.cpu.routine import Routine

        def blas():
            return {l["num_threads"] for l in threadpoolctl.threadpool_info() if "numpy" in l["filepath"]}

        run, within = Routine.run, []
        Routine.run = lambda *args: (within.append(blas()), run(*args))
        before = blas()
        for threads in (1, 2, None):
            dy.init(threads=threads)
            W = dy.ParameterCollection().add_parameters((3, 3))
            (W * dy.inputVector([1, 2, 3])).value()
            print(numba.get_num_threads(), team.TEAM._threads)
        print(set(map(tuple, within)) == {(1,)}, blas() == before)
        """
    )
    one, two, free, blas = (line.split() for line in printed.splitlines())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert one == ["1", "1"]
    assert two == [str(min(2, cores))] * 2
    assert set(free) <= {str(cores), str(os.cpu_count())}
    assert blas == ["True", "True"]


def test_numbas_layer_goes_with_numpys_blas() -> None:
    """numba's OpenMP layer beside OpenBLAS is twenty times slower (see `dynbatch.cpu.threads`): it is never taken."""
    script = """
        import numpy as np
        import numba
        import dynbatch as dy

        @numba.njit(parallel=True)
        def total(x):
            s = 0.0
            for i in numba.prange(x.size):
                s += x[i]
            return s

        W = dy.ParameterCollection().add_parameters((200, 200))
        for _ in range(3):
            dy.renew_cg()
            found = total((W * dy.inputVector(np.ones(200))).npvalue())
        print(numba.threading_layer())
        """
    assert process(script).split() == ["workqueue"]
    assert process(script, NUMBA_THREADING_LAYER="omp").split() in (["omp"], ["workqueue"])  # the user's own choice
