"""Kinds of values that extra options accept."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import cast

import numpy as np

from quark_onnx.config.checks import require
from quark_onnx.onnxruntime_spelling.request import name_of


@dataclass(frozen=True)
class Kind:
    """Kind of values of an option.

    Attributes:
        holds: predicate of a value of this kind.
        wanted: the accepted values, for the message: "it must be ...".
    """

    holds: Callable[[object], bool]
    wanted: str

    def check(self, option: str, value: object) -> None:
        """Raise ConfigError for a value of another kind.

        Args:
            option: name of the option.
            value: its value.
        """
        require(self.holds(value), f"extra option {option}", value, self.wanted)


def _is_flag(value: object) -> bool:
    # Scripts write 0 and 1, too; other numbers and texts are mistakes ("False" would be true).
    return isinstance(value, np.bool_ | Integral) and value in (0, 1)


def _is_number(value: object) -> bool:
    # True is an integer of Python, and no number that a user means.
    if isinstance(value, bool):
        return False
    return isinstance(value, Real) and math.isfinite(float(value))


def _is_between(value: object, least: float, greatest: float) -> bool:
    return _is_number(value) and least <= cast("float", value) <= greatest


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and _is_integer(value) and int(value) > 0


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | Mapping)


def _is_names(value: object) -> bool:
    # A single name need not be put into a list.
    if isinstance(value, str):
        return True
    return _list_of(value, lambda name: isinstance(name, str))


def _list_of(value: object, holds: Callable[[object], bool]) -> bool:
    if not _is_list(value):
        return False
    return all(holds(item) for item in cast("Collection[object]", value))


def _is_dictionary(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_lists_by_name(
    value: object,
    holds: Callable[[object], bool],
) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) for name in value)
        and all(holds(item) for item in value.values())
    )


def _is_shape(value: object) -> bool:
    return _list_of(value, _is_count)


def _is_range(value: object) -> bool:
    return _list_of(value, _is_number) and _size(value) == 2


def _size(value: object) -> int:
    return len(cast("Collection[object]", value))


#: Names of calibration methods in onnxruntime and AMD Quark.
_METHODS = (
    "MinMax",
    "MinMSE",
    "Percentile",
    "Entropy",
    "Distribution",
    "LayerWisePercentile",
    "NonOverflow",
)

FLAG = Kind(_is_flag, "True or False")
NUMBER = Kind(_is_number, "a finite number")
ALPHA = Kind(
    lambda value: (
        (isinstance(value, str) and value == "auto") or _is_between(value, 0, 1)
    ),
    "a number from 0 to 1, or 'auto'",
)
FRACTION = Kind(lambda value: _is_between(value, 0, 1), "a number from 0 to 1")
PERCENT = Kind(lambda value: _is_between(value, 0, 100), "a number from 0 to 100")
INTEGER = Kind(_is_integer, "a whole number")
COUNT = Kind(_is_count, "a whole number, 1 or more")
TEXT = Kind(lambda value: isinstance(value, str), "a text")
PATH = Kind(lambda value: isinstance(value, str | Path), "a path")
METHOD = Kind(
    lambda value: name_of(value) in _METHODS,
    f"a calibration method or its name: {', '.join(_METHODS)}",
)
NAMES = Kind(_is_names, "a list of names")
PAIRS = Kind(_is_list, "a list of pairs ([start nodes], [end nodes])")
NUMBERS = Kind(
    lambda value: _list_of(value, _is_number) and _size(value) > 0,
    "a list of finite numbers",
)
PARAMETERS = Kind(_is_dictionary, "a dictionary by parameter names")
BY_TENSOR = Kind(_is_dictionary, "a dictionary by tensor names")
TENSORS_BY_TYPE = Kind(
    lambda value: (
        isinstance(value, Mapping) and all(_is_names(names) for names in value.values())
    ),
    "a dictionary by types, with lists of tensor names",
)
SHAPES = Kind(
    lambda value: _is_lists_by_name(value, _is_shape),
    "a dictionary of shapes by input names, such as {'x': [1, 3, 224, 224]}",
)
RANGES = Kind(
    lambda value: _is_lists_by_name(value, _is_range),
    "a dictionary of (least, greatest) by input names",
)
