"""How long compiling takes where nothing is cached: ``python -m bench.compiling``.

A line for each cell, compiled one after the other in a folder of its own: seconds of this process for its forward and
for its backward pass (those of the first cell include the functions that all steps call), and how many steps and
kernels were compiled.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cells(dy: Any) -> dict[str, Callable[[], Any]]:
    """By name, what records one call and gives a scalar."""
    collection = dy.ParameterCollection()
    lstm = dy.VanillaLSTMBuilder(1, 8, 8, collection)
    weight = collection.add_parameters((8, 8))

    @dy.cell
    def attend(x: Any, ys: list[Any]) -> Any:
        scores = [dy.dot_product(x, weight * y) for y in ys]
        return dy.esum([y * dy.exp(score) for y, score in zip(ys, scores)])

    def vector() -> Any:
        return dy.inputVector([0.1] * 8)

    return {
        "tanh": lambda: dy.sum_elems(dy.tanh(vector())),
        "exp": lambda: dy.sum_elems(dy.exp(vector())),
        "softmax": lambda: dy.pick(dy.softmax(vector()), 1),
        "LSTM": lambda: dy.sum_elems(lstm.initial_state().add_input(vector()).output()),
        "attention": lambda: dy.sum_elems(attend(vector(), [vector(), vector()])),
    }


def main() -> None:
    """Compile them, and print a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"DYNBATCH_CACHE": folder, "DYNBATCH_COMPILE": "always"}
        import dynbatch as dy

        def compiled() -> int:
            return len(list(Path(folder, "kernels").glob("*.py")))

        print(f"{'cell':<12}{'forward':>10}{'backward':>10}{'sources':>10}")
        for name, record in cells(dy).items():
            dy.renew_cg()
            before, begin = compiled(), time.process_time()
            loss = record()
            loss.value()
            middle = time.process_time()
            loss.backward(full=True)
            end = time.process_time()
            print(f"{name:<12}{middle - begin:>8.2f} s{end - middle:>8.2f} s{compiled() - before:>10}", flush=True)


if __name__ == "__main__":
    main()
