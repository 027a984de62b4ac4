"""How tests of the models run them: as a user does, or as a task in this process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dynbatch as dy
from models import training

ROOT = Path(__file__).parent.parent


def command(name, *flags, status=0):
    """Runs a model's command line as a user does, in a process of its own: seeds are per process."""
    done = subprocess.run(
        [sys.executable, "-m", f"models.{name}", *map(str, flags)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    return done


def new_task(task_class, *flags, instances):
    """A task with new parameters, and the vocabulary of these instances."""
    args = training.parse(task_class, list(flags))
    return task_class(dy.ParameterCollection(), args, task_class.vocabulary(args, instances))


def gradients(task):
    """Of all its parameters."""
    collection = task.collection
    return [p.grad_as_array() for p in (*collection.parameters_list(), *collection.lookup_parameters_list())]
