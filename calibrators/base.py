"""The two contracts of the package, and the table of calibrators by name.

A *statistic* is the mutable, mergeable, O(bins) summary of a tensor that grows while data streams
by. A *calibrator* is a frozen value that says which statistic it needs and how a range is read off
it: its fields are its settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError, nearest
from calibrators.grid import Floats, Grid, Range
from calibrators.registry import Registry


class Statistic(Protocol):
    """What is remembered of a tensor while its values stream by."""

    lo: Floats
    hi: Floats
    nonfinite: int

    def observe(self, rows: NDArray[np.float32]) -> None:
        """Take in values of shape (rows, n); the number of rows never changes."""

    def merge(self, other: Any) -> None:
        """Take in what ``other``, a statistic of the same kind, has seen after this one."""


class Calibrator(Protocol):
    """A frozen dataclass that turns a statistic into a range."""

    def statistic(self) -> Statistic:
        """A new, empty statistic of the kind that ``range`` reads."""

    def range(self, statistic: Any, grid: Grid) -> Range:
        """The interval that ``grid`` should cover, one entry per row of the statistic."""


def require(fits: bool, setting: str, value: object, wanted: str) -> None:
    """Raise CalibrationError, with what is ``wanted`` of a setting, unless its value ``fits``."""
    if not fits:
        raise CalibrationError(f"{setting} is {value!r}; it must be {wanted}")


def is_number(value: object, kind: type | tuple[type, ...] = (int, float)) -> bool:
    """Whether a setting is a number that a float holds.

    True and False, which Python takes for integers, are none.
    """
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    try:
        float(value)  # type: ignore[arg-type]
    except OverflowError:  # of an int
        return False
    return True


#: Calibrators: name -> a frozen dataclass.
CALIBRATORS: Registry[type[Any]] = Registry(
    "calibrator",
    plugins="quark_onnx.calibrators",
    spelling=str.lower,
)
T = TypeVar("T", bound=type[Any])


def register(name: str, *, override: bool = False) -> Callable[[T], T]:
    """Class decorator: register a calibrator by ``name``.

    Args:
        override: replace the calibrator that has this name.

    Raises:
        CalibrationError: the name is taken.
    """

    def add(cls: T) -> T:
        CALIBRATORS.add(name, cls, override=override)
        cls.name = name.lower()
        return cls

    return add


def create(name: str, /, **settings: Any) -> Any:
    """The calibrator called ``name`` with these settings.

    Raises:
        CalibrationError: the name or a setting is unknown; the message lists the nearest.

    >>> create("percentile", percentile=99.9)
    Percentile(percentile=99.9)
    """
    cls = CALIBRATORS[name]
    known = [field.name for field in dataclasses.fields(cls)]
    for setting in settings:
        if setting not in known:
            raise CalibrationError(
                f"calibrator {name!r} has no setting {setting!r}{nearest(setting, known)}",
            )
    return cls(**settings)
