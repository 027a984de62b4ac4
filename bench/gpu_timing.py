"""What a GPU takes: kernels by events, and models against PyTorch and against the way of DyNet; see `bench.gpu_check`.

Everything is compared before it is timed. Times of minibatches are those of the clock on the wall between two moments
when the device has nothing to do, as medians; minibatches rotate, and none comes twice, but where a graph of CUDA's
repeats one.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

import dynbatch as dy
from bench import models
from bench.gpu_programs import fresh, like_dynet, ordinary
from bench.systems import SYSTEMS
from bench.worker import Minibatches
from dynbatch.batching import backends
from dynbatch.cuda import job, launches
from dynbatch.cuda.driver import Driver
from dynbatch.cuda.sources import Kernels

MODELS = ("treelstm", "birnn")
MODES = ("infer", "train")
FIRST = 2  # number of the first minibatch that is timed; those before it are compared
LONGEST = 6  # programs whose times are told
COMPARED = 1e-3  # relative, between losses in float32 of different systems
NULL = np.uint64(0)
clock = time.perf_counter


class Differs(Exception):
    """What was to be timed does not compute what it should."""


# ---- kernels ---------------------------------------------------------------------------------------------------------


def device_seconds(driver: Driver, call: Callable[[], Any], repeats: int) -> float:
    """Of one call among many behind each other, by events; the median of five such measurements.

    Calls must take the device longer than the host needs to ask for them, or it is the host that is measured.
    """
    call()
    found = []
    for _ in range(5):
        start = driver.record_event()
        for _ in range(repeats):
            call()
        end = driver.record_event()
        driver.synchronize()
        found.append(driver.elapsed(start, end) / repeats)
    return max(statistics.median(found), 1e-9)


def copies(driver: Driver, smoke: bool) -> Iterator[tuple[str, float, float | None]]:
    """Names, GB/s, and shares of what CUDA's copy within the device reaches, of kernels that move rows.

    A share is None where that copy is not there.
    """
    kernels, repeats = Kernels(driver, "float32"), 1 if smoke else 20
    nbytes = 1 << 12 if smoke else 256 << 20
    source, target = driver.allocate(nbytes), driver.allocate(nbytes)
    values = np.random.default_rng(0).standard_normal(nbytes // 4, np.float32)
    driver.upload(source, values)

    def rate(call: Callable[[], Any]) -> float:
        return 2 * nbytes / device_seconds(driver, call, repeats) / 1e9

    copy = copy_within(driver, source, target, nbytes)
    best = rate(copy) if copy else None
    if best:
        yield "copy within the device", best, 1.0
    for width in (16,) if smoke else (64, 256, 1024):
        rows = nbytes // 4 // width
        order = np.random.default_rng(1).permutation(rows)
        offsets = driver.allocate(order.nbytes)
        driver.upload(offsets, order * width)
        launch = launches.teams(rows, width, launches.vector("float32"))
        start = np.int64(target // 4)
        gathered = (
            NULL, np.int64(rows), np.int32(width), start, np.int64(width), np.uint64(source), np.uint64(offsets),
            np.int64(0),
        )  # fmt: skip
        copied = (
            NULL, np.int64(rows), np.int32(width), start, np.int64(width), np.int64(source // 4), np.int64(width)
        )  # fmt: skip
        table = values.reshape(rows, width)
        for name, arguments, wanted in (("gather", gathered, table[order]), ("copy_rows", copied, table)):
            kernel = kernels.fixed(name)
            call = functools.partial(driver.launch, kernel, launch.grid, launch.block, 0, arguments)
            driver.fill(target, 0, nbytes)
            call()
            out = np.empty_like(table)
            driver.download(target, out)
            if not np.array_equal(out, wanted):
                raise Differs(f"{name} of rows of {width} moves them elsewhere")
            reached = rate(call)
            yield f"{name}, rows of {width}", reached, reached / best if best else None
        driver.free(offsets)
    driver.free(source)
    driver.free(target)


def copy_within(driver: Driver, source: int, target: int, nbytes: int) -> Callable[[], None] | None:
    """CUDA's own copy; none where the driver is not CuPy's."""
    stream = getattr(driver, "stream", None)
    if stream is None:
        return None
    runtime = importlib.import_module("cupy").cuda.runtime
    return lambda: runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)


@dy.cell
def _gates(i: Any, f: Any, o: Any, u: Any, c: Any) -> Any:
    kept = dy.cmult(dy.logistic(i), dy.tanh(u)) + dy.cmult(dy.logistic(f), c)
    return dy.cmult(dy.logistic(o), dy.tanh(kept)), kept


FUSED: dict[str, tuple[int, Callable[..., Any]]] = {
    "LSTM gates": (5, _gates),
    "softmax": (1, dy.cell(lambda x: dy.softmax(x))),
    "log of a loss": (1, dy.cell(lambda x: dy.pickneglogsoftmax(x, 3))),
    "layer norm": (3, dy.cell(lambda x, g, b: dy.layer_norm(x, g, b))),
    "gelu of a sum": (2, dy.cell(lambda x, y: dy.gelu(x + y))),
    "dropout": (1, dy.cell(lambda x: dy.dropout(x, 0.5))),
}
"""Fused kernels: how many vectors each takes a row, and what it computes."""


@contextmanager
def commands() -> Iterator[list[tuple[Any, int, list[Any]]]]:
    """For each batch that runs inside: its name, its bytes, and its commands; parameters' own come first."""
    found: list[tuple[Any, int, list[Any]]] = []
    run = job.Commands.run

    def noted(self: job.Commands, driver: Driver) -> None:
        asked, start = list(self.batches), 0
        if self.shared:
            found.append(("(parameters)", 0, list(self.shared)))
        for routine, one, end in self.ends:
            name, _, nbytes = routine.cost(one)
            found.append((name, nbytes, asked[start:end]))
            start = end
        if asked[start:]:
            found.append(("(gradients of parameters)", 0, asked[start:]))
        run(self, driver)

    job.Commands.run = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        job.Commands.run = run  # type: ignore[method-assign]


def fused(driver: Driver, device: str, smoke: bool) -> Iterator[tuple[str, float, int]]:
    """Names, GB/s over what is read and written once, and the number of launches, of `FUSED` over many rows."""
    rows, width, times = (16, 16, 1) if smoke else (1 << 14, 1024, 20)
    values = np.random.default_rng(2).standard_normal((rows, width), np.float32)
    for name, (count, cell) in FUSED.items():
        results: list[list[np.ndarray]] = []
        for where, number in (("cpu", 4), (device, rows)):
            fresh(where, "float32")
            table = dy.ParameterCollection().add_lookup_parameters((rows, width))
            table.init_from_array(values)
            operands = [[dy.lookup(table, (k + 7 * j) % rows) for j in range(count)] for k in range(number)]
            with dy.no_grad():
                dy.forward([x for xs in operands for x in xs])
                outputs = [cell(*xs) for xs in operands]
                first = [y[0] if isinstance(y, tuple) else y for y in outputs]
                with commands() as noted:
                    dy.forward(first)
            results.append([y.npvalue() for y in first[:4]])
        ((_, nbytes, own),) = noted
        graph = graph_of(driver, own * times)
        seconds = device_seconds(driver, lambda: driver.launch_graph(graph), 1) / times  # noqa: B023
        if name != "dropout" and not np.allclose(*results, rtol=1e-3, atol=1e-4):
            raise Differs(f"{name} is not the CPU's")
        yield name, nbytes / seconds / 1e9, len(own)


def _again(asked: list[Any]) -> None:
    for _, function, arguments in asked:
        function(*arguments)


# ---- models ----------------------------------------------------------------------------------------------------------


class Contest:
    """One model, size and mode: what each system takes.

    Arguments:
        say: told of a system, by its name, that failed, and how.
        until: when to stop, by `clock`.

    Attributes:
        row: of the table: times in ms by system, and why one is missing.
    """

    def __init__(
        self, device: str, model: str, mode: str, hidden: int, batch: int, repeats: int, until: float,
        say: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self.device, self.model, self.mode, self.batch = device, model, mode, batch
        self.repeats, self.until, self.say = repeats, until, say
        module = models.find(model)
        instances, sizes = module.load(None)
        self.minibatches = Minibatches(instances, batch)
        self.programs = module.PROGRAMS
        self.weights = module.weights(hidden, sizes, np.random.default_rng(1))
        self.warm = 1 if repeats == 1 else 5
        candidates = [self.minibatches[FIRST + self.warm + k] for k in range(repeats)]
        flops = [sum(module.flops(instance, hidden, sizes) for instance in one) for one in candidates]
        self.typical = candidates[int(np.argsort(flops)[repeats // 2])]
        self.wanted: list[float] = []
        self.row: dict[str, Any] = {"model": model, "mode": mode, "hidden": hidden, "batch": batch}

    def run(self, name: str, measure: Callable[[], float]) -> None:
        """Measure one system, whatever happens to the others."""
        if clock() > self.until:
            self.row.setdefault("cut", []).append(name)
            return
        try:
            self.row[name] = 1e3 * measure()
        except Exception as error:
            self.say(name, trace(error))

    def everything(self) -> None:
        """All systems, dynbatch's first."""
        self.run("cells", lambda: self.dynbatch("dynbatch"))
        self.run("dynet_like", lambda: self.dynbatch("dynbatch-plain"))
        self.run("replay", lambda: self.dynbatch("dynbatch-static"))
        if torch_device():
            self.run("torch", self.torch_eager)
            if torch_device() == "cuda":
                self.run("torch_graph", self.torch_graph)

    def compare(self, run: Callable[[list], Any]) -> None:
        """Losses of the first minibatches, each in training behind an update, with those of who came first."""
        losses = [run(self.minibatches[k])[0] for k in range(FIRST)]
        self.wanted = self.wanted or losses
        if not np.allclose(losses, self.wanted, rtol=COMPARED):
            raise Differs(f"losses are {losses}, not {self.wanted}")

    def rotate(self, run: Callable[[list], Any], synchronize: Callable[[], None]) -> float:
        """Seconds of a minibatch, all different; the phases that a system tells of go into the row."""
        seconds, phases = [], []
        for k in range(self.warm + self.repeats):
            minibatch = self.minibatches[FIRST + k]
            synchronize()
            begin = clock()
            _, told = run(minibatch)
            synchronize()
            if k >= self.warm:
                seconds.append(clock() - begin)
                phases.append(told)
                if clock() > self.until:
                    break
        self.phases = {name: 1e3 * statistics.median(p[name] for p in phases) for name in phases[0]}
        return statistics.median(seconds)

    def repeated(self, run: Callable[[], Any], synchronize: Callable[[], None]) -> float:
        """Seconds of the same thing again and again."""
        seconds = []
        for _ in range(self.repeats):
            synchronize()
            begin = clock()
            run()
            synchronize()
            seconds.append(clock() - begin)
        return statistics.median(seconds)

    # ---- dynbatch ---------------------------------------------------------------------------------------------------

    def dynbatch(self, name: str) -> float:
        """One of dynbatch's systems: with cells also what is repeated, and what the device alone takes."""
        fresh(self.device, "float32")
        system = SYSTEMS[name](self.programs[name], self.weights, "agenda", self.batch)
        driver = backends.backend().driver
        run = getattr(system, self.mode)
        with like_dynet() if name == "dynbatch-plain" else ordinary():
            self.compare(run)
            system.restore()
            if system.program.remember:
                numbers = range(FIRST + self.warm + self.repeats)
                system.program.remember([instance for k in numbers for instance in self.minibatches[k]])
            seconds = self.rotate(run, driver.synchronize)
            if name == "dynbatch":
                self.row["phases"] = self.phases
                self.run("device", lambda: self.device_alone(system, driver))
                if self.mode == "infer":
                    self.run("captured", lambda: self.captured(system, driver))
            elif name == "dynbatch-plain":
                self.row["dynet_like_nodes"] = system.counts()["nodes"]
        return seconds

    def captured(self, system: Any, driver: Driver) -> float:
        """A minibatch whose plan is a CUDA graph from the third time on."""
        for _ in range(4):
            system.infer(self.typical)
        return self.repeated(lambda: system.infer(self.typical), driver.synchronize)

    def device_alone(self, system: Any, driver: Driver) -> float:
        """What the kernels of a minibatch take behind each other, each plan as a CUDA graph; tells the longest, too.

        A plan is measured before the next one's tables take the place of its own.
        """
        seconds, self.row["launches"], times = 0.0, 0, []
        with nullcontext() if self.mode == "train" else dy.no_grad():
            dy.renew_cg()
            loss = system.program.loss(self.typical)
            for stage in (loss.value, loss.backward) if self.mode == "train" else (loss.value,):
                with commands() as found:
                    stage()
                asked = [command for _, _, own in found for command in own]
                graph = graph_of(driver, asked)
                seconds += device_seconds(driver, lambda: driver.launch_graph(graph), 1 if self.repeats == 1 else 5)  # noqa: B023
                self.row["launches"] += len(asked)
                if self.repeats > 1:
                    times += by_program(driver, found)
        self.row["longest"] = [text for _, text in sorted(times, reverse=True)[:LONGEST]]
        dy.renew_cg()
        return seconds

    # ---- PyTorch ----------------------------------------------------------------------------------------------------

    def torch_system(self) -> Any:
        """PyTorch batched by hand, on the device, in full precision."""
        import torch

        torch.set_default_device(torch_device())
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        return SYSTEMS["torch-by-hand"](self.programs["torch-by-hand"], self.weights, None, self.batch)

    def torch_eager(self) -> float:
        """Index tensors are made anew for each minibatch, as they are in a loop over data."""
        system = self.torch_system()
        run = getattr(system, self.mode)
        self.compare(run)
        system.restore()
        seconds = self.rotate(run, torch_synchronize)
        self.row["torch_prepare"] = self.phases.get("record", 0.0)
        return seconds

    def torch_graph(self) -> float:
        """One minibatch as a graph of CUDA's: with the update in training; index tensors exist."""
        import torch

        system = self.torch_system()
        program, rate = system.program, system.rate
        prepared = program.prepare(self.typical)
        tensors = [tensor for tensor, _ in program.parameters]

        def step() -> Any:
            if self.mode == "infer":
                with torch.no_grad():
                    return program.loss(prepared)
            loss = program.loss(prepared)
            loss.backward()
            with torch.no_grad():
                for tensor in tensors:
                    gradient, tensor.grad = tensor.grad, None
                    if gradient.is_sparse:
                        tensor.index_add_(0, gradient._indices()[0], gradient._values(), alpha=-rate)
                    else:
                        tensor.add_(gradient, alpha=-rate)
            return loss.detach()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        system.restore()
        wanted = step().item()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        system.restore()
        graph.replay()
        if not np.isclose(out.item(), wanted, rtol=COMPARED):
            raise Differs(f"the graph's loss is {out.item()}, not {wanted}")
        return self.repeated(lambda: (graph.replay(), out.item()), torch_synchronize)


def graph_of(driver: Driver, asked: list[Any]) -> Any:
    """Commands as a graph."""
    driver.begin_capture()
    try:
        _again(asked)
    finally:
        graph = driver.end_capture()
    return graph


def by_program(driver: Driver, found: list[tuple[Any, int, list[Any]]]) -> list[tuple[float, str]]:
    """What each program's commands take, as a graph of their own: seconds, and a line."""
    of: dict[str, tuple[list[Any], int]] = {}
    for name, nbytes, own in found:
        asked, total = of.get(name, ([], 0))
        of[name] = asked + own, total + nbytes
    times = []
    for name, (asked, nbytes) in of.items():
        if asked:
            graph = graph_of(driver, asked)
            seconds = device_seconds(driver, lambda: driver.launch_graph(graph), 3)  # noqa: B023
            times.append((seconds, f"{name} {1e3 * seconds:.3f} ms {len(asked)}x {nbytes / seconds / 1e9:.0f} GB/s"))
    return times


def torch_device() -> str:
    """Where PyTorch runs here; empty where it cannot be imported."""
    try:
        import torch
    except ImportError:
        return ""
    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_synchronize() -> None:
    """Wait for what PyTorch has asked for."""
    if torch_device() == "cuda":
        importlib.import_module("torch").cuda.synchronize()


def trace(error: BaseException) -> str:
    """An error with the last three places that it passed, on one line."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:400]} ({places})"
