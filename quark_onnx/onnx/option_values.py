"""Kinds of values that extra options accept."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from calibrators.base import is_number
from quark_onnx.config.checks import instance_of, require
from quark_onnx.onnxruntime_spelling.request import name_of


@dataclass(frozen=True)
class Kind:
    """Kind of values of an option.

    Attributes:
        holds: predicate of a value of this kind.
        wanted: the accepted values, for the message: "it must be ...".
    """

    holds: Callable[[Any], bool]
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


def _is_number(value: Any) -> bool:
    return is_number(value, Real) and math.isfinite(value)


def _is_share_of(greatest: float, value: Any) -> bool:
    return _is_number(value) and 0 <= value <= greatest


def _is_count(value: Any) -> bool:
    return is_number(value, Integral) and value > 0


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | Mapping)


def _is_names(value: Any) -> bool:
    # A single name need not be put into a list.
    return isinstance(value, str) or _is_list_of(instance_of(str), value)


def _is_list_of(holds: Callable[[Any], bool], value: Any) -> bool:
    return _is_list(value) and all(map(holds, value))


def _is_lists_by_name(holds: Callable[[Any], bool], value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) for name in value)
        and all(map(holds, value.values()))
    )


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
        (isinstance(value, str) and value == "auto") or _is_share_of(1, value)
    ),
    "a number from 0 to 1, or 'auto'",
)
FRACTION = Kind(partial(_is_share_of, 1), "a number from 0 to 1")
PERCENT = Kind(partial(_is_share_of, 100), "a number from 0 to 100")
INTEGER = Kind(lambda value: is_number(value, Integral), "a whole number")
COUNT = Kind(_is_count, "a whole number, 1 or more")
TEXT = Kind(instance_of(str), "a text")
PATH = Kind(instance_of(str, Path), "a path")
METHOD = Kind(
    lambda value: name_of(value) in _METHODS,
    f"a calibration method or its name: {', '.join(_METHODS)}",
)
NAMES = Kind(_is_names, "a list of names")
PAIRS = Kind(_is_list, "a list of pairs ([start nodes], [end nodes])")
NUMBERS = Kind(
    lambda value: _is_list_of(_is_number, value) and len(value) > 0,
    "a list of finite numbers",
)
PARAMETERS = Kind(instance_of(Mapping), "a dictionary by parameter names")
BY_TENSOR = Kind(instance_of(Mapping), "a dictionary by tensor names")
TENSORS_BY_TYPE = Kind(
    lambda value: isinstance(value, Mapping) and all(map(_is_names, value.values())),
    "a dictionary by types, with lists of tensor names",
)
SHAPES = Kind(
    partial(_is_lists_by_name, partial(_is_list_of, _is_count)),
    "a dictionary of shapes by input names, such as {'x': [1, 3, 224, 224]}",
)
RANGES = Kind(
    partial(
        _is_lists_by_name,
        lambda value: _is_list_of(_is_number, value) and len(value) == 2,
    ),
    "a dictionary of (least, greatest) by input names",
)
