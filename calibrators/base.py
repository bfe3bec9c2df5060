"""Define the contracts of statistics and calibrators, and register calibrators by name.

A *statistic* is the mutable, mergeable, O(bins) summary of a tensor that grows while data streams
by. A *calibrator* is a frozen value whose fields are its settings: it names the statistic that it
needs, and reads a range off it.
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
    """Summary of the values of a tensor, updated batch by batch."""

    lo: Floats
    hi: Floats
    nonfinite: int

    def observe(self, rows: NDArray[np.float32]) -> None:
        """Take in values of shape (rows, n); the number of rows never changes."""

    def merge(self, other: Any) -> None:
        """Merge the values of ``other``, a later statistic."""


class Calibrator(Protocol):
    """A frozen dataclass that turns a statistic into a range."""

    def statistic(self) -> Statistic:
        """Return an empty statistic of the kind that ``range`` reads."""

    def range(self, statistic: Any, grid: Grid) -> Range:
        """Return the interval for ``grid`` to cover, per row of the statistic."""


def range_of(calibrator: Calibrator, statistic: Any, grid: Grid) -> Range:
    """Return the range that a calibrator reads off a statistic.

    Raises:
        CalibrationError: a calibrator of someone else fails, or returns no range of finite numbers;
            the message names it.
    """
    try:
        ends = calibrator.range(statistic, grid)
    except Exception as error:
        cls = type(calibrator)
        # Errors of our own calibrators are defects, and need their traceback.
        if cls.__module__.startswith("calibrators."):
            raise
        raise CalibrationError(
            f"{_described(calibrator)} fails: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(ends, Range):
        raise CalibrationError(
            f"{_described(calibrator)} returned a {type(ends).__name__}; range(statistic, grid)"
            " must return a Range"
        )
    if not (np.isfinite(ends.lo).all() and np.isfinite(ends.hi).all()):
        raise CalibrationError(
            f"{_described(calibrator)} returned a range that is not finite: {ends}"
        )
    return ends


def _described(calibrator: Calibrator) -> str:
    """Return the name of a calibrator and of its class."""
    cls = type(calibrator)
    where = f"{cls.__module__}.{cls.__qualname__}"
    name = getattr(cls, "name", "")
    return f"calibrator {name!r} ({where})" if name else f"calibrator {where}"


def require(fits: bool, setting: str, value: object, wanted: str) -> None:
    """Raise CalibrationError with the requirement ``wanted`` unless the setting ``fits``."""
    if not fits:
        raise CalibrationError(f"{setting} is {value!r}; it must be {wanted}")


def is_number(value: object, kind: type | tuple[type, ...] = (int, float)) -> bool:
    """Return whether a setting is a number that a float holds.

    Booleans, which Python counts as integers, are not numbers here.
    """
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    try:
        float(value)  # type: ignore[arg-type]
    except OverflowError:  # of an int
        return False
    return True


def is_whole(value: object, least: int) -> bool:
    """Return whether a setting is an integer of at least ``least``; booleans are none."""
    return type(value) is int and value >= least


#: Calibrators: name -> a frozen dataclass.
CALIBRATORS: Registry[type[Any]] = Registry(
    "calibrator", plugins="quark_onnx.calibrators", spelling=str.lower
)
T = TypeVar("T", bound=type[Any])


def register(name: str, *, override: bool = False) -> Callable[[T], T]:
    """Return a class decorator that registers a calibrator under ``name``.

    Args:
        name: name of the calibrator.
        override: replace the calibrator of this name.

    Raises:
        CalibrationError: the name is taken, or the class is no calibrator.
    """

    def add(cls: T) -> T:
        missing = [each for each in ("statistic", "range") if not hasattr(cls, each)]
        # As a value: mypy would forget that the class is a T.
        is_value: bool = dataclasses.is_dataclass(cls)
        if missing or not is_value:
            lacks = (
                " and ".join(f"{each}()" for each in missing)
                or "@dataclass(frozen=True)"
            )
            raise CalibrationError(
                f"{cls.__module__}.{cls.__qualname__} is no calibrator: it lacks {lacks}; a"
                " calibrator is a frozen dataclass with statistic() and range(statistic, grid),"
                " and @register stands above @dataclass"
            )
        CALIBRATORS.add(name, cls, override=override)
        cls.name = name.lower()
        return cls

    return add


def create(name: str, /, **settings: Any) -> Calibrator:
    """Return the calibrator called ``name`` with the given settings.

    Args:
        name: registered name, in any case.
        **settings: fields of the calibrator.

    Raises:
        CalibrationError: the name or a setting is unknown; the message lists similar ones.

    >>> create("percentile", percentile=99.9)
    Percentile(percentile=99.9)
    """
    cls = CALIBRATORS[name]
    # Checked here, as the TypeError of a dataclass names neither the calibrator nor similar
    # settings.
    known = [field.name for field in dataclasses.fields(cls)]
    for setting in settings:
        if setting not in known:
            raise CalibrationError(
                f"calibrator {name!r} has no setting {setting!r}{nearest(setting, known)}",
            )
    calibrator: Calibrator = cls(**settings)
    return calibrator
