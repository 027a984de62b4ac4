"""What each step from DyNet's way of batching to dynbatch's is worth: ``python -m bench --ablation``.

As the table of the ACRoBat paper: every line has what the lines above have, and one thing more. The switches are
variables of the worker's environment, and passes that the worker replaces by nothing; all strategies are agenda.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from bench.measure import Entry

STRATEGY = "agenda"


class Step(NamedTuple):
    """One thing that is added: a system, a variable, or the pass of that name."""

    name: str
    system: str | None = None
    variable: tuple[str, str] | None = None
    is_pass: bool = False


START = (("DYNBATCH_COMPILE", "never"), ("DYNBATCH_BLAS", "numpy"))
STEPS = (
    Step("DyNet's way", system="dynbatch-plain"),
    Step("cells", system="dynbatch"),
    Step("horizontal fusion", is_pass=True),
    Step("vertical fusion", variable=("DYNBATCH_COMPILE", "hot")),
    Step("packed products", variable=("DYNBATCH_BLAS", "own")),
    Step("layout", is_pass=True),
    Step("static replay", system="dynbatch-static"),
)


def entries(module: ModuleType) -> tuple[list[Entry], dict[str, str]]:
    """The steps for a model, and why some were left out; those after them do without."""
    environment, system, without = dict(START), "", [step.name for step in STEPS if step.is_pass]
    found, skipped = [], {}
    for step in STEPS:
        if step.system and step.system not in module.PROGRAMS:
            skipped[step.name] = f"the model has no {step.system}"
        else:
            system = step.system or system
            environment |= dict([step.variable]) if step.variable else {}
            without = [name for name in without if name != step.name]
            found.append(Entry(system, STRATEGY, step.name, tuple(environment.items()), tuple(without)))
    return found, skipped
