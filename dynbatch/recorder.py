"""Generated recorders: the function that a call of a traced cell reaches first."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dynbatch.config import config
from dynbatch.graph import Expression, state
from dynbatch.guards import FAILURES

if TYPE_CHECKING:
    from dynbatch.cell import BoundCell, Variant

_RECORDER = """
def record({parameters}, *rest, **named):
    graph = state.graph
    try:
        fits = {condition}
    except failures:
        fits = False
    if not fits:
        return slow(*[a for a in ({arguments},) if a is not missing], *rest, **named)
    place = signature.place
    graph.stream.extend(({record}))
    {floats}
    vid = graph.values
    graph.values = vid + {count}
    return {result}
"""


def specialized(bound: BoundCell, variant: Variant, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """A function that records calls like this one, with all checks of `BoundCell.__call__` written out in one place.

    It serves expressions, lists of them and numbers (None where there is anything else); every other call it leaves
    to the cell. Recording is what a user's Python pays for each node: this takes a third of the general path's time.
    """
    signature = variant.signature
    plain = all(
        type(a) in (Expression, int, float) or (type(a) is list and a and all(type(e) is Expression for e in a))
        for a in args
    )
    if signature.tail or any(bound._static) or bound.cell.keyword_only or not plain or not args:
        return None
    names = [f"a{i}" for i in range(len(args))]
    tests: list[str] = []
    vids: list[str] = []
    ints: list[str] = []
    floats: list[str] = []
    lists: list[str] = []
    listed: list[str] = []
    namespace: dict[str, Any] = {
        **variant.guards.namespace,
        "Expression": Expression,
        "signature": signature,
        "slow": bound.record,
        "failures": FAILURES,
        "missing": object(),
        "state": state,
        "config": config,
    }
    limits: dict[int, int] = {}
    for position, size, _, _ in signature.bounds:
        limits[position] = min(size, limits.get(position, size))
    for name, arg in zip(names, args):
        if type(arg) is Expression:
            namespace[f"t_{name}"] = arg.key
            tests.append(f"{name}.key is t_{name} and {name}.graph is graph")
            vids.append(f"{name}.vid")
        elif type(arg) is list:
            namespace[f"t_{name}"] = arg[0].key
            each = f"all([e.key is t_{name} and e.graph is graph for e in {name}])"
            tests.append(f"type({name}) is list and {name} and {each}")
            lists += [f"len({name})", f"*[e.vid for e in {name}]"]
            listed.append(name)
        elif type(arg) is int:
            limit = limits.get(len(ints))
            in_range = f"0 <= {name} < {limit}" if limit is not None else f"{-1 << 63} <= {name} < {1 << 63}"
            tests.append(f"type({name}) is int and {in_range}")
            ints.append(name)
        else:
            tests.append(f"type({name}) is float")
            floats.append(name)
    for group in signature.equal_lists:
        tests.append(" == ".join(f"len({listed[k]})" for k in group))
    if not vids and not lists:  # types of expressions say which precision it is; payload alone does not
        namespace["dtype"] = state.graph.dtype
        tests.append("graph.dtype == dtype")
    tests += ["graph is not None", "not rest", "not named", "not config.debug", variant.guards.condition]
    for o, t in enumerate(signature.types):
        namespace[f"out{o}"] = t
    index = "place[1] if place[0] == graph.serial else graph.touch(signature)"
    made = [f"Expression(graph, vid + {o}, out{o})" for o in range(len(signature.types))]
    source = _RECORDER.format(
        parameters=", ".join(f"{name}=missing" for name in names),
        arguments=", ".join(names),
        condition=" and ".join(tests),
        record=", ".join([index, *vids, *lists, *ints]) + ",",
        floats=f"graph.floats.extend(({', '.join(floats)},))" if floats else "",
        count=len(made),
        result=f"({', '.join(made)},)" if variant.returns else made[0],
    )
    # a file name within the package, so that an error names the line of the user's that called it
    exec(
        compile(source, os.path.join(os.path.dirname(__file__), f"<recorder of {bound.cell.name}>"), "exec"), namespace
    )
    recorder = namespace["record"]
    recorder.bound_cell = bound
    recorder.__name__ = bound.__name__
    recorder.__doc__ = bound.__doc__
    return recorder
