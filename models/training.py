"""What the command lines of all models share: flags, the training loop, evaluation, saving and resuming.

A model file subclasses `Task`, which says what an instance is, what its loss is and how a prediction is made, and ends
with ``sys.exit(training.main(MyTask))``. Everything here is the same for a tree, a sentence or a program.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm

import dynbatch as dy
from dynbatch.batching.plan import Plan
from dynbatch.config import STRATEGIES
from dynbatch.errors import ConfigurationError, FileFormatError
from models import plot

DEFAULT_EPOCHS = 5
COMPARED_MINIBATCHES = 5
COMPARED_SECONDS = 5.0  # per strategy, and less to warm up; "off" is slow, and its figure settles early
WARM_UP_SECONDS = 2.0
ONE_BY_ONE = "one by one"


class Task:
    """A model together with its data, as the training loop sees it. Subclass it; `models.treelstm` is an example.

    Attributes:
        name: of the model, kept in saved files.
        unit: what an instance is called, in the plural; the JSON report has ``<unit>_per_s``.
        metric: the entry of `measure` that tells which epoch was best.
        shape_flags: the flags that the parameters' shapes depend on; a saved model fixes them.
        demo: values of flags for ``--demo``.
        maps: whether instances run in `Task.each`, since what they do depends on values.
        one_by_one: whether they then run in a plain loop.
    """

    name = "model"
    unit = "instances"
    metric = "dev_accuracy"
    shape_flags: tuple[str, ...] = ("hidden",)
    demo: ClassVar[dict[str, Any]] = {}
    maps = False
    one_by_one = False

    def __init__(self, collection: dy.ParameterCollection, args: argparse.Namespace, vocabulary: dict) -> None:
        """Adds the parameters to ``collection``; all that this needs beyond the flags is in ``vocabulary``."""
        self.collection = collection

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds this model's own flags, and with ``parser.set_defaults`` changes the defaults of the shared ones."""

    @classmethod
    def data(cls, args: argparse.Namespace) -> tuple[list, list]:
        """The training and the dev instances: those of ``args.data``, or generated ones where it is None."""
        if args.data is None:
            return cls.generated(args)
        return cls.read(Path(args.data) / "train.txt", args), cls.read(Path(args.data) / "dev.txt", args)

    @classmethod
    def generated(cls, args: argparse.Namespace) -> tuple[list, list]:
        """Generated instances, to train on and for dev."""
        raise NotImplementedError

    @classmethod
    def read(cls, path: Path, args: argparse.Namespace, labels: bool = True) -> list:
        """The instances of a file; ``labels=False`` for ``--predict``, where they need none."""
        raise NotImplementedError

    @classmethod
    def vocabulary(cls, args: argparse.Namespace, train: list) -> dict:
        """What the model takes from the training data, such as its words: a dict that JSON can hold."""
        return {}

    def trainer(self, learning_rate: float) -> dy.Trainer:
        """The trainer of this model's parameters.

        With DyNet's eps of 1e-20 Adagrad's first steps are as long for a gradient that is nothing but rounding error as
        for any other; 1e-8, a gradient of 1e-4, keeps runs under different strategies alike and trains better.
        """
        return dy.AdagradTrainer(self.collection, learning_rate=learning_rate, eps=1e-8)

    def loss(self, instance: Any) -> dy.Expression:
        """The loss of one instance, a scalar."""
        raise NotImplementedError

    def batch_loss(self, instances: list) -> dy.Expression:
        """The sum of the losses of a minibatch."""
        return dy.esum([self.loss(instance) for instance in instances])

    def each(self, fn: Callable[[Any], Any], instances: list) -> list:
        """`dy.map`, or under ``--one-by-one`` a loop in its place that gives the same results."""
        if not self.one_by_one:
            return dy.map(fn, instances)
        results = []
        for number, instance in enumerate(instances):
            with dy.stream(number):
                results.append(fn(instance))
        return results

    def length(self, instance: Any) -> int:
        """About how many steps an instance takes: minibatches to predict are of like ones, so that they end together.

        The same for all, and so in the order of the file, unless a model says otherwise.
        """
        return 0

    def predict(self, instances: list) -> list:
        """What the model says of each instance of a minibatch. Record them all, then read values: so they batch."""
        raise NotImplementedError

    def measure(self, instances: list, predictions: list) -> dict[str, float]:
        """How good the predictions for a whole data set are; the names become entries of the JSON report."""
        raise NotImplementedError

    def write(self, instances: list, predictions: list) -> Iterator[str]:
        """The lines that ``--predict`` prints: one a prediction."""
        return map(str, predictions)


def main(task_class: type[Task], argv: list[str] | None = None) -> int:
    """Runs a model's command line; returns the exit status. A fault in the user's files or flags is one line."""
    try:
        run(task_class, parse(task_class, argv))
    except (FileFormatError, ConfigurationError, OSError) as error:
        print(f"{task_class.name}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{task_class.name}: interrupted; a file of --save holds the last complete epoch", file=sys.stderr)
        return 130
    return 0


def argument_parser(task_class: type[Task]) -> argparse.ArgumentParser:
    """The parser of the shared flags and the model's own."""
    module = sys.modules[task_class.__module__]
    parser = argparse.ArgumentParser(
        prog=f"python -m models.{task_class.name}",
        description=(module.__doc__ or "").split("\n")[0],
    )
    data = parser.add_argument_group("data and model")
    data.add_argument("--data", metavar="DIR", help="folder of the training and dev files; none: generated data")
    data.add_argument("--limit", type=positive, metavar="N", help=f"use the first N {task_class.unit} of each file")
    data.add_argument(
        "--hidden", type=positive, default=256, metavar="N", help="size of the hidden state (default: %(default)s)"
    )
    train = parser.add_argument_group("training")
    epochs = f"epochs to train from here (default: {DEFAULT_EPOCHS}; 0 with --evaluate, --predict or --compare)"
    train.add_argument("--epochs", type=int, default=argparse.SUPPRESS, metavar="N", help=epochs)
    limit = "start no epoch that would not end within this time, if it takes as long as the longest so far"
    train.add_argument("--time-limit", type=float, metavar="SECONDS", help=limit)
    train.add_argument(
        "--batch-size",
        type=positive,
        default=64,
        metavar="N",
        help=f"{task_class.unit} a minibatch (default: %(default)s)",
    )
    train.add_argument(
        "--learning-rate", type=float, default=0.03, metavar="RATE", help="of the trainer (default: %(default)s)"
    )
    train.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of initial values, order and dropout (default: %(default)s)"
    )
    train.add_argument("--save", metavar="FILE", help="write the model and all that resuming needs, every epoch")
    train.add_argument("--load", metavar="FILE", help="continue from a saved file, with its flags unless given here")
    running = parser.add_argument_group("running")
    running.add_argument(
        "--autobatch", choices=STRATEGIES, default="agenda", help="the batching strategy (default: %(default)s)"
    )
    running.add_argument("--device", default="cpu", help="where to compute: cpu, cuda or cuda:1 (default: %(default)s)")
    running.add_argument("--threads", type=positive, metavar="N", help="the most to use (default: all cores)")
    if task_class.maps:
        loop = f"run one of the {task_class.unit} after the other, without dy.map"
        running.add_argument("--one-by-one", action="store_true", help=loop)
    other = parser.add_argument_group("what else to do")
    other.add_argument("--evaluate", action="store_true", help="measure on the dev data, without training")
    other.add_argument("--predict", metavar="FILE", help="print what the model of --load says of each instance there")
    other.add_argument("--compare", action="store_true", help="run a few minibatches under every batching strategy")
    other.add_argument("--plot", metavar="FILE", help="write the loss curve as PNG, and draw it in the terminal")
    other.add_argument("--json", metavar="FILE", help="write the results")
    other.add_argument("--demo", action="store_true", help="a short training run, the comparison and the plot")
    task_class.add_arguments(parser)
    return parser


def positive(text: str) -> int:
    """An argument that must be an integer from 1 on."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


_NOT_SAVED = {"epochs", "time_limit", "save", "load", "autobatch", "device", "threads", "one_by_one"} | {
    "evaluate", "predict", "compare", "plot", "json", "demo",
}  # fmt: skip


def parse(task_class: type[Task], argv: list[str] | None = None) -> argparse.Namespace:
    """The flags: as given, else as in the file of ``--load``, else as ``--demo`` wants them, else the defaults."""
    parser = argument_parser(task_class)
    args = parser.parse_args(argv)
    if args.predict and not args.load:
        parser.error("--predict needs a model: --load FILE")
    if args.evaluate and "epochs" in args:
        parser.error("--evaluate does not train: leave out --epochs")
    for path in filter(None, (args.save, args.json)):
        if not Path(path).absolute().parent.is_dir():  # found out now, not after hours of training
            parser.error(f"there is no folder to write {path} to")
    if args.demo:
        parser.set_defaults(**{"compare": True, "plot": f"runs/{task_class.name}-loss.png"} | task_class.demo)
    saved = {}
    if args.load:
        metadata = dy.load_metadata(args.load)
        if metadata.get("model") != task_class.name:
            raise FileFormatError(f"{args.load} holds no {task_class.name} model")
        saved = metadata["flags"]
        parser.set_defaults(**saved)
    args = parser.parse_args(argv)
    for flag in task_class.shape_flags:
        if flag in saved and getattr(args, flag) != saved[flag]:
            parser.error(f"--{flag} {getattr(args, flag)} does not fit {args.load}, which has {flag} {saved[flag]}")
    if "epochs" not in args:
        args.epochs = 0 if args.evaluate or args.predict or args.compare else DEFAULT_EPOCHS
    return args


@dataclass
class Throughput:
    """What some minibatches took, and what their forward plans held.

    Rates are without the first minibatch, if there are others: kernels are loaded or compiled in it.
    """

    instances: int = 0
    minibatches: int = 0
    seconds: float = 0.0
    first: tuple[int, float] = (0, 0.0)  # instances and seconds of the first minibatch
    loss: float = 0.0  # sum over instances
    nodes: int = 0
    batches: int = 0
    losses: list[float] = field(default_factory=list)  # per instance, of each minibatch

    def add(self, instances: int, loss: float, plan: Plan | None, seconds: float) -> None:
        """Counts one more minibatch; ``loss`` is per instance, ``plan`` None if it had very many."""
        if not self.minibatches:
            self.first = instances, seconds
        self.instances += instances
        self.minibatches += 1
        self.seconds += seconds
        self.loss += loss * instances
        if plan is not None:
            self.nodes += plan.nodes
            self.batches += plan.batches
        self.losses.append(loss)

    def report(self, unit: str) -> dict[str, Any]:
        """Rate, and nodes and batches a minibatch; None of each where there was no minibatch."""
        if not self.minibatches:
            return {f"{unit}_per_s": None, "nodes": None, "batches": None}
        instances, seconds = self.first if self.minibatches > 1 else (0, 0.0)
        return {
            f"{unit}_per_s": (self.instances - instances) / (self.seconds - seconds),
            "nodes": self.nodes / self.minibatches or None,
            "batches": self.batches / self.minibatches or None,
        }


def forward_plan(task: Task) -> Plan | None:
    """What a minibatch ran before its loss was asked for, or all of it; None for a loop that reads values."""
    if not task.maps:
        return dy.plan()
    return None if task.one_by_one else dy.plan("map")


@functools.cache
def spare_what_stays() -> None:
    """Called after a minibatch; the first call keeps the garbage collector off all that is there by then.

    Libraries, kernels, data and model stay until the end. Going through them again and again took a tenth of the time
    of a parser under `dy.map`, whose minibatches have many objects alive at a time.
    """
    gc.collect()
    gc.freeze()


def train_step(task: Task, trainer: dy.Trainer, batch: list) -> tuple[float, Plan | None]:
    """One minibatch: record, run, differentiate, update. Returns the loss per instance and the forward plan."""
    dy.renew_cg()
    loss = task.batch_loss(batch) / len(batch)
    value = loss.value()
    plan = forward_plan(task)
    loss.backward()
    trainer.update()
    spare_what_stays()
    return value, plan


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the instances in an epoch. It depends on nothing else, so that a resumed run continues it."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def minibatches(instances: list, size: int, order: Sequence[int] | np.ndarray) -> Iterator[list]:
    """The instances in parts of `size`, the last one maybe smaller."""
    for start in range(0, len(instances), size):
        yield [instances[k] for k in order[start : start + size]]


def train_epoch(
    task: Task, trainer: dy.Trainer, train: list, args: argparse.Namespace, epoch: int, total: Throughput
) -> float:
    """One pass over the training data, with a progress bar; returns the loss per instance."""
    before, first = total.loss, total.minibatches
    order = epoch_order(len(train), args.seed, epoch)
    with tqdm(total=len(train), desc=f"epoch {epoch}", unit=f" {task.unit}", dynamic_ncols=True) as bar:
        for batch in minibatches(train, args.batch_size, order):
            started = time.perf_counter()
            loss, plan = train_step(task, trainer, batch)
            total.add(len(batch), loss, plan, time.perf_counter() - started)
            recent = total.losses[first:][-20:]
            bar.set_postfix(loss=f"{sum(recent) / len(recent):.3f}", refresh=False)
            bar.update(len(batch))
    return (total.loss - before) / len(train)


def predict(task: Task, instances: list, batch_size: int, what: str) -> tuple[list, Throughput]:
    """The predictions for a data set, without gradients, with a progress bar."""
    order = sorted(range(len(instances)), key=lambda k: task.length(instances[k]))
    predictions: list = []
    total = Throughput()
    with dy.no_grad(), tqdm(total=len(instances), desc=what, unit=f" {task.unit}", leave=False) as bar:
        for batch in minibatches(instances, batch_size, order):
            started = time.perf_counter()
            dy.renew_cg()
            predictions += task.predict(batch)
            total.add(len(batch), 0.0, forward_plan(task), time.perf_counter() - started)
            spare_what_stays()
            bar.update(len(batch))
    found = dict(zip(order, predictions))
    return [found[k] for k in range(len(instances))], total


def compare(task: Task, trainer: dy.Trainer, train: list, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Trains on the same few minibatches under every strategy, from the same parameters, which it leaves as they were.

    A model whose instances run in `Task.each` also does so with a loop in place of `dy.map`, as "one by one".

    Returns, per strategy, ``<unit>_per_s`` of training steps, ``nodes`` and ``batches`` a minibatch, and ``loss``, the
    mean of the first minibatches; it must be the same for all.
    """
    batches = list(minibatches(train, args.batch_size, epoch_order(len(train), args.seed, 0)))[:COMPARED_MINIBATCHES]
    found: dict[str, Throughput] = {}
    ways = [*STRATEGIES, *([ONE_BY_ONE] if task.maps else [])]
    loop = task.one_by_one
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.safetensors"
        dy.save_checkpoint(start, task.collection, trainer)

        def timed(way: str, seconds: float, bar: tqdm) -> Throughput:
            dy.load_checkpoint(start, task.collection, trainer)
            total = Throughput()
            task.one_by_one = way == ONE_BY_ONE
            with dy.autobatch(args.autobatch if task.one_by_one else way):
                for batch in batches:
                    started = time.perf_counter()
                    loss, plan = train_step(task, trainer, batch)
                    total.add(len(batch), loss, plan, time.perf_counter() - started)
                    bar.update()
                    if total.seconds > seconds:
                        break
            return total

        with tqdm(total=2 * len(ways) * len(batches), desc="comparing strategies", leave=False) as bar:
            for way in ways:
                timed(way, WARM_UP_SECONDS, bar)  # whatever is compiled or allocated at first use
                found[way] = timed(way, COMPARED_SECONDS, bar)
        task.one_by_one = loop
        dy.load_checkpoint(start, task.collection, trainer)
    common = min(total.minibatches for total in found.values())
    return {
        strategy: total.report(task.unit) | {"loss": sum(total.losses[:common]) / common}
        for strategy, total in found.items()
    }


def comparison_table(rows: dict[str, dict[str, Any]], unit: str) -> str:
    """The result of `compare` as lines of text."""
    lines = [f"{'strategy':<10}{unit + '/s':>12}{'against off':>13}{'nodes':>10}{'batches':>10}{'loss':>12}"]
    base = rows["off"][f"{unit}_per_s"]
    for strategy, row in rows.items():
        rate = row[f"{unit}_per_s"]
        nodes, batches = ("-" if row[key] is None else f"{row[key]:,.0f}" for key in ("nodes", "batches"))
        lines.append(f"{strategy:<10}{rate:>12,.0f}{rate / base:>12.1f}x{nodes:>10}{batches:>10}{row['loss']:>12.4f}")
    return "\n".join(lines)


def run(task_class: type[Task], args: argparse.Namespace) -> dict[str, Any]:
    """Does what the flags say; returns the report that ``--json`` writes.

    Its entries: what `Task.measure` gave at the best epoch and, per epoch, ``<metric>_per_epoch``; ``train_loss``, per
    instance, of the last epoch; ``<unit>_per_s`` of training (of prediction, if nothing was trained), without dev
    evaluation and the first minibatch; ``nodes`` and ``batches``, the mean of a minibatch's forward plans;
    ``strategy``; ``seconds`` for everything; ``compare``, if asked for. What was not asked for is null.
    """
    started = time.perf_counter()
    dy.init(device=args.device, autobatch=args.autobatch, seed=args.seed, threads=args.threads)
    train, dev = ([], []) if args.predict else task_class.data(args)
    train, dev = train[: args.limit], dev[: args.limit]
    vocabulary = dy.load_metadata(args.load)["vocabulary"] if args.load else task_class.vocabulary(args, train)
    task = task_class(dy.ParameterCollection(), args, vocabulary)
    if task.maps:
        task.one_by_one = args.one_by_one
    trainer = task.trainer(args.learning_rate)
    state: dict[str, Any] = {"epoch": 0, "history": [], "train_loss": None}
    if args.load:
        _, state = dy.load_checkpoint(args.load, task.collection, trainer)
        trainer.learning_rate = args.learning_rate
    if args.predict:
        return predict_file(task, args)

    parameters = task.collection.parameter_count()
    print(f"{len(train):,} {task.unit} to train on, {len(dev):,} for dev; {parameters:,} parameters")
    metadata = {"model": task.name, "vocabulary": vocabulary}
    metadata["flags"] = {name: value for name, value in vars(args).items() if name not in _NOT_SAVED}
    total = Throughput()
    longest = 0.0
    for _ in range(args.epochs):
        epoch_started = time.perf_counter()
        if args.time_limit is not None and epoch_started - started + longest > args.time_limit:
            print(f"no more epochs within {args.time_limit:g} s")
            break
        state["epoch"] += 1
        state["train_loss"] = train_epoch(task, trainer, train, args, state["epoch"], total)
        predictions, _ = predict(task, dev, args.batch_size, "dev")
        state["history"].append(task.measure(dev, predictions))
        if args.save:
            dy.save_checkpoint(args.save, task.collection, trainer, metadata=metadata, state=state)
        longest = max(longest, time.perf_counter() - epoch_started)
        figures = ", ".join(f"{name} {value:.4f}" for name, value in state["history"][-1].items())
        print(f"epoch {state['epoch']}: loss {state['train_loss']:.4f} per instance, {figures}")

    history, speed = state["history"], total
    if args.evaluate:
        predictions, speed = predict(task, dev, args.batch_size, "dev")
        history = [task.measure(dev, predictions)]
    report: dict[str, Any] = dict(max(history, key=lambda figures: figures[task.metric], default={task.metric: None}))
    report[f"{task.metric}_per_epoch"] = [figures[task.metric] for figures in history]
    report |= {"train_loss": state["train_loss"], "strategy": args.autobatch} | speed.report(task.unit)
    if speed.minibatches:
        batches = ONE_BY_ONE
        if report["nodes"] is not None:
            batches = f"{report['nodes']:,.0f} nodes in {report['batches']:,.0f} batches a minibatch"
        print(
            f"\n{task.metric.replace('_', ' ')} {report[task.metric]:.4f}; "
            f"{report[f'{task.unit}_per_s']:,.0f} {task.unit}/s; {batches} ({args.autobatch})"
        )
    if args.compare:
        report["compare"] = compare(task, trainer, train, args)
        if not speed.minibatches:
            report |= {name: value for name, value in report["compare"][args.autobatch].items() if name != "loss"}
        print("\n" + comparison_table(report["compare"], task.unit))
    if args.plot and total.losses:
        show_curve(task, args, total)
    report["seconds"] = time.perf_counter() - started
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def predict_file(task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """``--predict``: the predictions on standard output, and nothing else there. The report has the speed only."""
    started = time.perf_counter()
    instances = task.read(Path(args.predict), args, labels=False)
    predictions, total = predict(task, instances, args.batch_size, "predict")
    for line in task.write(instances, predictions):
        print(line)
    report = {"strategy": args.autobatch} | total.report(task.unit) | {"seconds": time.perf_counter() - started}
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def show_curve(task: Task, args: argparse.Namespace, total: Throughput) -> None:
    """``--plot``: the loss of every minibatch, drawn in the terminal and written as a PNG."""
    seen = np.minimum(np.arange(1, total.minibatches + 1) * args.batch_size, total.instances)
    curve = list(zip(seen.tolist(), np.maximum(total.losses, 1e-9).tolist()))  # the scale is logarithmic
    print("\n" + plot.drawn(curve, f"{task.unit} seen", f"loss per instance of {task.name}"))
    if plot.save_png(args.plot, curve, f"{task.unit} seen", "loss per instance", f"{task.name} ({args.autobatch})"):
        print(f"the same as PNG: {args.plot}")
    else:
        print("no PNG: matplotlib is not installed (pip install matplotlib)")
