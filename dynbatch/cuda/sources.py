"""The kernels that are not generated: CUDA C in ``kernels/``, compiled file by file when one is first asked for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from dynbatch.cuda.driver import Driver

_FOLDER = Path(__file__).with_name("kernels")

FILES = {
    "rows": ("gather", "copy_rows", "lookup_rows"),
    "sums": ("sum_edges", "lookup_gradient", "sum_slices", "add_slices", "add_parts"),
    "shapes": ("rearrange", "pad_range", "select_along", "select_along_gradient", "sum_to", "mean_to", "max_to"),
    "lines": (
        "softmax", "log_softmax", "softmax_gradient", "log_softmax_gradient", "one_hot_argmax", "normalize",
        "normalize_gradient",
    ),
    "lists": ("segment_first",),
    "products": ("product", "product_of_columns"),
    "gather_product": ("gather_product_64", "gather_product_16", "gather_product_4"),
    "trainers": (
        "sgd", "momentum", "adagrad", "rmsprop", "adam", "amsgrad", "scale", "squared_norm", "add_norms",
    ),
}  # fmt: skip
"""The kernels of each file; what they take and what they are launched with is said there."""

_FILE_OF = {kernel: file for file, kernels in FILES.items() for kernel in kernels}


@cache
def prelude(dtype: str) -> str:
    """What comes before every kernel's text: the precision, and what all share."""
    common = (_FOLDER / "common.cuh").read_text(encoding="utf-8")
    return f'#define DOUBLE {int(dtype == "float64")}\n#line 1 "common.cuh"\n{common}'


@cache
def text(file: str, dtype: str) -> str:
    """The whole source of one of `FILES`."""
    return f'{prelude(dtype)}#line 1 "{file}.cu"\n{(_FOLDER / f"{file}.cu").read_text(encoding="utf-8")}'


def generated(text: str, dtype: str) -> str:
    """The whole source of a generated kernel."""
    return f'{prelude(dtype)}#line 1 "generated"\n{text}'


class Kernels:
    """The kernels on one device, in one precision.

    Arguments:
        driver: of the device.
        dtype: ``"float32"`` or ``"float64"``.

    Attributes:
        choices: what `dynbatch.cuda.products` has found to be faster here.
    """

    def __init__(self, driver: Driver, dtype: str) -> None:
        self.driver = driver
        self.dtype = dtype
        self.choices: dict[Any, str] = {}
        self._found: dict[str, Any] = {}

    def fixed(self, name: str) -> Any:
        """A kernel of `FILES`, for `Driver.launch`."""
        if name not in self._found:
            module = self.driver.module(text(_FILE_OF[name], self.dtype))
            self._found.update({kernel: module.kernel(kernel) for kernel in FILES[_FILE_OF[name]]})
        return self._found[name]

    def generated(self, text: str) -> Any:
        """A generated kernel, by its text."""
        if text not in self._found:
            self._found[text] = self.driver.module(generated(text, self.dtype)).kernel("kernel")
        return self._found[text]
