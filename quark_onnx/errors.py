"""Everything that can go wrong on purpose.

QuarkError
├── ConfigError           a setting is unknown, malformed, contradictory, or matches nothing
├── ModelError            the model cannot be read, checked, run or written
│   └── RuntimeCrashError onnxruntime has ended the process that it ran in
├── DataError             the calibration data does not fit the model, or is unusable
├── PlanError             a rule decided something impossible (a defect of the rule, not of the input)
├── ConstraintError       the constraints of a target cannot be met together
├── AccuracyError         the quantized model is worse than the bound that was asked for
├── MissingDependency     an optional package is needed for what was asked
└── TimeLimitError        the work took longer than its time limit

A message says what was found, where (node, tensor, sample, file, option), and what to do.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from calibrators.errors import CalibrationError, RuntimeCrash, nearest
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
    "RuntimeCrashError",
    "TimeLimitError",
    "crash_behind",
    "crash_errors",
    "data_errors",
    "nearest",
]


#: What to do about a process that crashed, and about one that was killed.
_CRASHED = (
    "this is a defect of onnxruntime: try another version of it, or leave operators"
    " float with exclude"
)
_KILLED = "the system does that where memory runs out"


class QuarkError(Exception):
    """Base of all errors that this package raises on purpose.

    Messages hold names out of files, and what other libraries say of them: what a terminal would
    act on is escaped.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), lines=True))


class ConfigError(QuarkError):
    """A setting is unknown, malformed, contradictory, or matches nothing."""


class ModelError(QuarkError):
    """The model cannot be read, checked, run or written."""


class RuntimeCrashError(ModelError):
    """Onnxruntime has ended the process that it ran in.

    Without ``isolate`` that would have been this process.
    """


class DataError(QuarkError):
    """The calibration data does not fit the model, or is unusable."""


class PlanError(QuarkError):
    """A rule decided something impossible."""


class ConstraintError(QuarkError):
    """The constraints of a target cannot be met together."""


class AccuracyError(QuarkError):
    """The quantized model is worse than the bound that was asked for."""


class MissingDependency(QuarkError):  # noqa: N818
    """An optional package is needed for what was asked."""


class TimeLimitError(QuarkError):
    """The work took longer than its time limit."""


def crash_behind(error: BaseException) -> RuntimeCrash | None:
    """Return the crash that an error was raised because of, if it was one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RuntimeCrash):
        cause = cause.__cause__
    return cause


@contextmanager
def crash_errors(*models: object) -> Iterator[None]:
    """Name the models in the error of a crash of onnxruntime.

    Args:
        models: paths count, a ModelProto has no name.

    Raises:
        RuntimeCrashError: in place of any error that was raised because of a crash.
    """
    try:
        yield
    except RuntimeCrashError:
        raise
    except Exception as error:
        crash = crash_behind(error)
        if crash is None:
            raise
        advice = _KILLED if crash.killed else _CRASHED
        names = ", ".join(
            str(model) for model in models if isinstance(model, str | Path)
        )
        raise RuntimeCrashError(
            f"{names}{': ' if names else ''}{error}; {advice}",
        ) from error


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
