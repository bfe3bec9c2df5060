"""Everything that can go wrong on purpose.

QuarkError
├── ConfigError           a setting is unknown, malformed, contradictory, or matches nothing
├── ModelError            the model cannot be read, checked, run or written
├── DataError             the calibration data does not fit the model, or is unusable
├── PlanError             a rule decided something impossible (a defect of the rule, not of the input)
├── ConstraintError       the constraints of a target cannot be met together
├── AccuracyError         the quantized model is worse than the bound that was asked for
└── MissingDependency     an optional package is needed for what was asked

A message says what was found, where (node, tensor, sample, file, option), and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from calibrators.errors import CalibrationError, nearest
from calibrators.shown import printable

__all__ = [
    "AccuracyError",
    "ConfigError",
    "ConstraintError",
    "DataError",
    "MissingDependency",
    "ModelError",
    "PlanError",
    "QuarkError",
    "data_errors",
    "nearest",
]


class QuarkError(Exception):
    """Base of all errors that this package raises on purpose.

    Messages hold names out of files, and what other libraries say of them: what a terminal would act on is escaped.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), lines=True))


class ConfigError(QuarkError):
    """A setting is unknown, malformed, contradictory, or matches nothing."""


class ModelError(QuarkError):
    """The model cannot be read, checked, run or written."""


class DataError(QuarkError):
    """The calibration data does not fit the model, or is unusable."""


class PlanError(QuarkError):
    """A rule decided something impossible."""


class ConstraintError(QuarkError):
    """The constraints of a target cannot be met together."""


class AccuracyError(QuarkError):
    """The quantized model is worse than the bound that was asked for."""


class MissingDependency(QuarkError):
    """An optional package is needed for what was asked."""


@contextmanager
def data_errors() -> Iterator[None]:
    """What calibration says of the data becomes an error of this package, too.

    Raises:
        DataError: in place of a ``CalibrationError``.
    """
    try:
        yield
    except CalibrationError as error:
        raise DataError(str(error)) from error
