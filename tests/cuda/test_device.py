"""Training and evaluation on a device, held against the CPU; what goes up and comes down; what fails, and how.

The device is the emulator. The rest of the suite runs on it, too: ``DYNBATCH_DEVICE=cuda
DYNBATCH_CUDA_DRIVER=tests.cuda_emulator`` before ``python -m pytest``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dynbatch as dy
from dynbatch.batching import backends
from dynbatch.cpu import profile
from dynbatch.cuda import devices, trainer_kernels
from dynbatch.cuda.products import choose
from dynbatch.errors import ConfigurationError, DeviceError, OutOfMemoryError
from tests.cuda.device import needs_compiler
from tests.cuda_emulator import asan

pytestmark = needs_compiler

SENTENCES = [[1, 2, 3], [4], [5, 6, 0, 1], [2, 2]]


class Model:
    """A classifier over sequences with cells, lookups, stacked gates, a list, dropout and values given by the user."""

    def __init__(self) -> None:
        self.pc = dy.ParameterCollection()
        self.words = self.pc.add_lookup_parameters((7, 4), name="words")
        self.U, self.V = (self.pc.add_parameters((5, 5), name=name) for name in "UV")
        self.W, self.b = self.pc.add_parameters((5, 4), name="W"), self.pc.add_parameters(5, name="b")
        self.out = self.pc.add_parameters((3, 5), name="out")
        self.frozen = self.pc.add_parameters(5, init=0.5, name="frozen", update=False)

    @dy.cell
    def step(self, h: Any, word: int) -> Any:
        x = self.words[word]
        gate = dy.logistic(self.U * h + self.W * x + self.b)
        return dy.cmult(gate, dy.tanh(self.V * h + self.W * x)) + dy.cmult(gate, self.frozen)

    @dy.cell
    def pool(self, hs: list[Any]) -> Any:
        return dy.average(hs) + dy.emax(hs)

    @dy.cell
    def loss(self, h: Any, label: int, weight: float) -> Any:
        return dy.pickneglogsoftmax(self.out * dy.dropout(h, 0.2), label) * weight

    def sentence(self, words: list[int], shift: float = 0.0) -> Any:
        h, hs = dy.inputVector([0.1 * k + shift for k in range(5)]), []
        for word in words:
            h = self.step(h, word)
            hs.append(h)
        return self.loss(self.pool(hs), len(words) % 3, 0.5)

    def minibatch(self, shift: float = 0.0) -> Any:
        return dy.esum([self.sentence(s, shift) for s in SENTENCES])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The emulator as the device ``cuda``; gives its driver."""
    caches = devices._driver, backends._backend, trainer_kernels.trainer_kernels
    monkeypatch.setenv("DYNBATCH_CUDA_DRIVER", "tests.cuda_emulator")
    dy.renew_cg()
    for cache in caches:
        cache.cache_clear()
    yield devices.driver("cuda")
    dy.renew_cg()
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def quick(cuda: Any) -> Any:
    """The same without zones between tensors, so that whole plans are prepared before they run, as on a GPU."""
    cuda.red_zone = 0
    return cuda


def train(
    device: str, trainer: Callable[[Any], dy.Trainer], steps: int = 4, **settings: Any
) -> tuple[list[float], Any]:
    """Losses, and the model."""
    dy.init(device=device, dtype="float64", seed=3, **settings)
    model = Model()
    rule = trainer(model.pc)
    losses = []
    for k in range(steps):
        dy.renew_cg()
        loss = model.minibatch(0.01 * k)
        losses.append(loss.value())
        loss.backward()
        rule.update()
    return losses, model


def parameters(model: Any) -> dict[str, np.ndarray]:
    return {name: p.as_array() for name, p in model.pc.named_parameters().items()}


def reset() -> None:
    """Let another device be chosen, with the same seed."""
    from dynbatch.config import Config, config

    vars(config).update(vars(Config()))
    dy.renew_cg()


TRAINERS: list[Callable[[Any], dy.Trainer]] = [
    dy.SimpleSGDTrainer, dy.MomentumSGDTrainer, dy.AdagradTrainer, dy.RMSPropTrainer, dy.AdamTrainer, dy.AMSGradTrainer,
]  # fmt: skip


@pytest.mark.parametrize("strategy", ["off", "depth", "agenda"])
@pytest.mark.parametrize("zones", [True, False])
def test_training_equals_the_cpus(cuda: Any, zones: bool, strategy: str) -> None:
    """Losses and parameters, with dropout of the same elements."""
    cuda.red_zone = cuda.red_zone if zones else 0
    expected, reference = train("cpu", dy.AdamTrainer, autobatch=strategy)
    wanted = parameters(reference)
    reset()
    losses, model = train("cuda", dy.AdamTrainer, autobatch=strategy)
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    for name, array in parameters(model).items():
        np.testing.assert_allclose(array, wanted[name], atol=1e-10, err_msg=name)
    np.testing.assert_array_equal(model.frozen.as_array(), [0.5] * 5)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("sparse", [True, False])
def test_trainers_equal_the_cpus(quick: Any, trainer: Any, decay: float, sparse: bool) -> None:
    def made(pc: Any) -> dy.Trainer:
        pc.set_weight_decay_lambda(decay)
        found = trainer(pc)
        found.set_sparse_updates(sparse)
        found.set_clip_threshold(0.5)
        return found

    expected, reference = train("cpu", made)
    wanted = parameters(reference)
    reset()
    losses, model = train("cuda", made)
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    for name, array in parameters(model).items():
        np.testing.assert_allclose(array, wanted[name], atol=1e-9, err_msg=name)


class Traffic:
    """What a driver was asked for."""

    def __init__(self, driver: Any, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("upload", "download", "synchronize", "launch", "gemm", "begin_capture", "launch_graph"):
            function = getattr(driver, name)
            patch.setattr(driver, name, lambda *a, _f=function, _n=name: (self.calls.append(_n), _f(*a))[1])

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def test_index_tables_go_up_in_one_copy_and_nothing_waits(quick: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dy.init(device="cuda", seed=1)
    model = Model()
    trainer = dy.SimpleSGDTrainer(model.pc)
    traffic = Traffic(quick, monkeypatch)
    for k in range(3):
        dy.renew_cg()
        loss = model.minibatch(0.1 * k)
        dy.forward([loss])
        forward = traffic.take()
        loss.backward()
        backward = traffic.take()
        trainer.update()
        update = traffic.take()
        loss.value()
        value = traffic.take()
    assert forward.count("upload") == 1 and forward[0] == "upload" and "download" not in forward
    assert backward.count("upload") == 1 and backward[0] == "upload" and "download" not in backward
    assert update.count("download") == 1, "the norm of the gradient"
    assert value == ["download"]
    assert "synchronize" not in forward + backward + update + value


def test_values_of_a_round_come_down_together(quick: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each size, however many instances wait; and each may be read again."""
    dy.init(device="cuda", dtype="float64", seed=1)
    model = Model()

    def walk(k: int) -> list[float]:
        h = model.step(dy.inputVector([0.1 * k] * 5), k % 7)
        found = [float(h.npvalue()[0])]
        norm = dy.squared_norm(model.step(h, 1 if found[0] > 0 else 2))
        return [*found, norm.value(), norm.value(), float(h.npvalue()[0])]

    alone = [walk(k) for k in range(6)]
    dy.renew_cg()
    traffic = Traffic(quick, monkeypatch)
    together = dy.map(walk, range(6))
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    assert traffic.take().count("download") == 2 + 2 * 6, "two rounds, and what each instance reads again"


def test_launches_do_not_grow_with_the_minibatch(quick: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dy.init(device="cuda", seed=1)
    model = Model()
    traffic = Traffic(quick, monkeypatch)
    counts = []
    for times in (1, 1, 5):
        dy.renew_cg()
        loss = dy.esum([model.minibatch(0.1 * k) for k in range(times)])
        loss.value()
        loss.backward()
        counts.append(traffic.take().count("launch"))
    assert counts[2] <= counts[1] + 3


def test_a_plan_that_repeats_is_captured(quick: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And follows parameters and values given by the user, which may differ from one time to the next."""
    shifts, found = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], []
    for device in ("cpu", "cuda"):
        reset()
        dy.init(device=device, dtype="float64", seed=3)
        model = Model()
        traffic = Traffic(quick, monkeypatch)
        values, calls = [], []
        for k, shift in enumerate(shifts):
            with dy.no_grad():
                dy.renew_cg()
                h = dy.inputVector([0.1 * k + shift for k in range(5)])
                total = dy.sum_elems(model.pool([model.step(h, 1), model.step(h, 2)]))
                values.append(total.value())
                calls.append(traffic.take())
            if k == 3:
                model.W.scale(1.5)
            if k == 4:
                model.words.init_row(2, [1.0, 2.0, 3.0, 4.0])
        found.append(values)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)
    assert [c.count("launch_graph") for c in calls] == [0, 0, 1, 1, 1, 1]
    assert [c.count("begin_capture") for c in calls] == [0, 0, 1, 0, 0, 0]
    assert calls[3].count("launch") == 0 and calls[3].count("upload") == 1
    assert calls[4].count("launch") > 0, "what depends on parameters alone is computed again"


def test_a_captured_plan_is_made_anew_where_parameters_moved(quick: Any) -> None:
    dy.init(device="cuda", dtype="float64", seed=3)
    model = Model()

    def value() -> float:
        with dy.no_grad():
            dy.renew_cg()
            return dy.sum_elems(model.step(dy.inputVector([1.0] * 5), 1)).value()

    found = {value() for _ in range(4)}
    model.pc.add_parameters((300, 300))
    found |= {value() for _ in range(3)}
    assert len(found) == 1


def test_parameters_move_between_devices(cuda: Any) -> None:
    """With their gradients and what the trainer remembers; the numbers are those of the CPU alone."""
    results = []
    for route in (["cpu"] * 6, ["cpu", "cuda", "cuda", "cpu", "cuda:1", "cuda"]):
        reset()
        dy.init(dtype="float64", seed=3)
        model = Model()
        trainer = dy.AdamTrainer(model.pc)
        for k, device in enumerate(route):
            dy.init(device=device)
            assert model.pc.to(device) is model.pc
            assert model.pc.device == ("cuda:0" if device == "cuda" else device)
            dy.renew_cg()
            model.minibatch(0.1 * k).backward()
            if k % 2:
                trainer.update()
        results.append((parameters(model), {n: s.copy() for n, s in trainer.state().items()}))
    (expected, state), (found, moved_state) = results
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], atol=1e-10, err_msg=name)
    for name, array in moved_state.items():
        np.testing.assert_allclose(array, state[name], atol=1e-10, err_msg=name)


def test_what_the_host_writes_is_seen_on_the_device(cuda: Any) -> None:
    dy.init(device="cuda", dtype="float64")
    pc = dy.ParameterCollection()
    w, table = pc.add_parameters(3, init=1.0), pc.add_lookup_parameters((4, 3), init=0.0)
    total = lambda: dy.sum_elems(dy.parameter(w) + table[1])  # noqa: E731

    def value() -> float:
        dy.renew_cg()
        return total().value()

    assert value() == 3
    w.set_value([1, 2, 3])
    assert value() == 6
    table.init_row(1, [1, 1, 1])
    assert value() == 9
    w.data[...] = 0
    table.data[1] = 5
    pc.mark_changed()
    assert value() == 15
    dy.renew_cg()
    total().backward()
    w.grad[...] *= 3
    dy.renew_cg()
    total().backward()
    np.testing.assert_array_equal(w.grad_as_array(), [4, 4, 4])
    np.testing.assert_array_equal(table.grad_as_array()[1], [2, 2, 2])
    assert table.touched.tolist() == [1]
    pc.reset_gradient()
    assert not w.grad_as_array().any() and not table.grad_as_array().any() and not table.touched.size
    w.zero()
    assert value() == 15


def test_files_know_no_device(cuda: Any, tmp_path: Path) -> None:
    for one, other in (("cuda", "cpu"), ("cpu", "cuda")):
        reset()
        _, model = train(one, dy.AdamTrainer, steps=2)
        model.pc.save(tmp_path / "model")
        wanted = parameters(model)
        reset()
        dy.init(device=other, dtype="float64")
        fresh = Model()
        fresh.pc.populate(tmp_path / "model")
        assert fresh.pc.device.startswith(other)
        for name, array in parameters(fresh).items():
            np.testing.assert_array_equal(array, wanted[name])
        assert np.isfinite(fresh.minibatch().value())


def test_devices_and_their_names(cuda: Any) -> None:
    assert [d.name for d in dy.devices()] == ["cpu", "cuda:0", "cuda:1"]
    dy.init(device="cuda:1")
    assert dy.ParameterCollection().device == "cuda:1"
    assert dy.tanh(dy.inputVector([0.0])).value() == 0
    for wrong in ("gpu", "cuda:", "cuda:x", "cuda:-1", "", None, 0):
        with pytest.raises(ConfigurationError, match='choose "cpu", "cuda" or "cuda:1"'):
            dy.init(device=wrong)  # type: ignore[arg-type]
    pc = dy.ParameterCollection()
    with pytest.raises(ConfigurationError, match="unknown device"):
        pc.to("abacus")


def test_parameters_on_another_device_than_the_graph(cuda: Any) -> None:
    w = dy.ParameterCollection("model").add_parameters(3, name="w")
    dy.init(device="cuda")
    with pytest.raises(DeviceError, match=r"parameter /model/w of .* is on cpu, and the graph runs on cuda:0"):
        dy.tanh(w).value()
    w.root.to("cuda")
    dy.renew_cg()
    assert dy.tanh(w).npvalue().shape == (3,)
    dy.init(device="cpu")
    with pytest.raises(DeviceError, match=r"is on cuda:0, and the graph runs on cpu"):
        dy.tanh(w).value()


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_out_of_device_memory(cuda: Any, what: str) -> None:
    """Says how much was wanted and what the pool holds; the graph, and gradients, are as before."""
    dy.init(device="cuda")
    w = dy.ParameterCollection().add_parameters(100, init=1.0)
    small = dy.sum_elems(dy.parameter(w))
    small.backward()
    wide = dy.inputTensor(np.ones((100, 2000)))
    loss = dy.sum_elems(dy.cmult(wide, dy.tanh(wide) + w))
    if what == "backward":
        loss.value()
    limit, cuda._memory.size = cuda._memory.size, cuda._memory.used + (1 << 19)
    with pytest.raises(OutOfMemoryError, match=r"\d+ bytes wanted on the emulator; its pool holds \d+ bytes"):
        loss.value() if what == "forward" else loss.backward(full=True)
    np.testing.assert_array_equal(w.grad_as_array(), np.ones(100))
    cuda._memory.size = limit
    loss.backward()
    np.testing.assert_allclose(w.grad_as_array(), np.full(100, 2001), rtol=1e-5)
    assert small.value() == 100


@pytest.mark.skipif(asan.ENABLED, reason="AddressSanitizer ends the process")
def test_an_illegal_access_names_the_kernel_and_the_batch(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dy.init(device="cuda", debug=True)
    model = Model()
    launch, name = cuda.launch, []

    def wrong(kernel: Any, grid: Any, block: Any, shared: int, args: Any) -> None:
        if kernel.name == "lookup_rows":
            name.append(kernel.name)
            args = (args[0], args[1], np.int32(1000), *args[3:])  # rows that are too wide
        launch(kernel, grid, block, shared, args)

    monkeypatch.setattr(cuda, "launch", wrong)
    with pytest.raises(DeviceError, match=r"kernel lookup_rows .*, in batch \d+ of the plan, Model.step \(\d+ rows\)"):
        model.minibatch().value()
    assert name


def test_profile(quick: Any) -> None:
    dy.init(device="cuda")
    model = Model()
    model.minibatch().backward()
    dy.renew_cg()
    loss = model.minibatch()
    with dy.profile() as forward:
        loss.value()
    with dy.profile() as backward:
        loss.backward()
    assert len(forward.batches) == dy.plan().batches
    assert {b.name for b in forward.batches} >= {"Model.step", "Model.loss"}
    assert len(backward.batches) == dy.plan("backward").batches + 1, "what sums over all batches comes behind them"
    for batch in (*forward.batches, *backward.batches):
        assert batch.commands > 0 and batch.kernel_seconds > 0 and batch.gap_seconds >= 0 and batch.bandwidth >= 0
    lines = str(forward).splitlines()
    assert "ms in kernels" in lines[0] and any(line.startswith("Model.step") for line in lines)
    with dy.profile(), pytest.raises(ConfigurationError, match=r"inside of profile"), dy.profile():
        pass


@pytest.mark.parametrize("transposed", [False, True])
def test_both_ways_to_multiply_scattered_rows(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, transposed: bool, tmp_path: Path
) -> None:
    """They agree; which one runs is measured once, and remembered in the cache."""
    monkeypatch.setenv("DYNBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(profile, "_answers", {})
    values = []
    for which in ("cublas", "gather", "auto"):
        monkeypatch.setenv("DYNBATCH_CUDA_PRODUCT", which)
        reset()
        dy.init(device="cuda", dtype="float64", seed=1)
        pc = dy.ParameterCollection()
        W = pc.add_parameters((4, 4))
        W = dy.transpose(dy.parameter(W)) if transposed else W
        xs = [dy.inputVector([1.0 * i, 2, 3, i * i]) for i in range(5)]
        mixed = [xs[3], xs[0], xs[4], xs[1]]
        values.append(np.array([h.npvalue() for h in [dy.tanh(W * dy.tanh(x)) for x in mixed]]))
    for found in values[1:]:
        np.testing.assert_allclose(found, values[0], rtol=1e-12)
    kernels = backends.backend()._kernels("float64")
    monkeypatch.setenv("DYNBATCH_CUDA_PRODUCT", "auto")
    first = choose(kernels, 6, 4, 4, False)
    assert first in ("cublas", "gather") and choose(kernels, 7, 4, 4, False) == first
    assert f"gathered product on {cuda.properties.name}: float64 8 x 4 x 4" in (tmp_path / "profile.json").read_text()
    monkeypatch.setenv("DYNBATCH_CUDA_PRODUCT", "abacus")
    with pytest.raises(ConfigurationError, match="DYNBATCH_CUDA_PRODUCT='abacus': choose one of auto, cublas, gather"):
        choose(kernels, 6, 4, 4, False)


def test_a_captured_plan_whose_tables_outgrow_a_buffer(quick: Any) -> None:
    """Values given by the user are found again where they went up, in whatever buffer that was."""
    size = 150_000  # more than half a buffer each
    found = []
    for device in ("cpu", "cuda"):
        reset()
        dy.init(device=device, dtype="float64", seed=3)
        values = []
        with dy.no_grad():
            for k in range(5):
                dy.renew_cg()
                x, y = dy.inputVector(np.full(size, 1.0 + k)), dy.inputTensor(np.full((size, 1), 2.0 - k))
                values.append((dy.sum_elems(x) + dy.mean_elems(y)).value())
        found.append(values)
    np.testing.assert_allclose(found[1], found[0])


@pytest.mark.parametrize("keep", [True, False])
def test_the_way_of_dynet_gives_the_same(quick: Any, keep: bool) -> None:
    """Each instruction alone, on gathered copies: for comparisons."""
    results, launches = [], []
    for like_dynet in (False, True):
        reset()
        dy.init(device="cuda", dtype="float64", seed=3)
        backend = backends.backend()
        backend.like_dynet = like_dynet
        try:
            model = Model()
            with dy.profile() as profiled, contextlib.nullcontext() if keep else dy.no_grad():
                loss = model.minibatch(0.1)
                value = loss.value()
            if keep:
                loss.backward()
            results.append([value, *[p.grad_as_array() for p in model.pc.named_parameters().values()]])
            launches.append(sum(b.commands for b in profiled.batches))
        finally:
            backend.like_dynet = False
    for found, wanted in zip(results[1], results[0]):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-13)
    assert launches[1] > 2 * launches[0]
