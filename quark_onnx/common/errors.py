"""Errors raised by the package on purpose.

QuarkError
├── ConfigError              a setting is unknown, malformed, contradictory, or matches nothing
│   └── ConfigNotFoundError  a file of settings does not exist
├── ModelError               the model cannot be read, checked, run or written
│   ├── ModelNotFoundError   a file of the model does not exist
│   ├── RuntimeCrashError    onnxruntime has ended the process that it ran in
│   ├── RunError             onnxruntime cannot run the model on a sample
│   └── UnknownOperatorError onnxruntime lacks a custom operator of the model
├── DataError                the calibration data does not fit the model, or is unusable
│   └── DataNotFoundError    the path of data or labels does not exist
├── PlanError                a rule decided something impossible (a defect of the rule, not of the input)
├── ConstraintError          the constraints of a target cannot be met together
├── AccuracyError            the quantized model is worse than the bound that was asked for
└── MissingDependency        an optional package is needed for what was asked

Where a class means what an exception of Python means, it derives from that, too: a wrong argument is
a ValueError, a file that does not exist a FileNotFoundError, a missing package an ImportError.

A message names the finding, its place (node, tensor, sample, file, option), and the remedy.
TimeLimitError, the end of a time limit, is none of them: code that handles errors lets it pass.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from calibrators.errors import CalibrationError, RuntimeCrash, nearest, reading_error
from calibrators.shown import printable

__all__ = [
    "AccuracyError",
    "ConfigError",
    "ConfigNotFoundError",
    "ConstraintError",
    "DataError",
    "DataNotFoundError",
    "MissingDependency",
    "ModelError",
    "ModelNotFoundError",
    "PlanError",
    "QuarkError",
    "RunError",
    "RuntimeCrashError",
    "TimeLimitError",
    "UnknownOperatorError",
    "crash_behind",
    "crash_errors",
    "data_errors",
    "nearest",
    "raise_crash",
    "reading_error",
    "system_reason",
]


#: Advice after a crash of the process, and after its end by the system.
_CRASHED = {
    "onnxruntime": (
        "this is a defect of onnxruntime: try another version of it, or leave operators"
        " float with exclude"
    ),
    "onnx": (
        "this is a defect of onnx: try another version of it, or another version of the"
        " tool that wrote the model"
    ),
}
_CRASHED_ENGINE = (
    "this is a defect of the engine: try another version of it, or another form or"
    " preset of the model"
)
_KILLED = "the system does that where memory runs out"


class QuarkError(Exception):
    """The base of errors raised by the package on purpose.

    A message is one line, but for a list of broken rules. It contains names from files and texts of
    other libraries, so line ends and terminal control characters in it are escaped.
    """

    def __init__(self, message: object = "") -> None:
        # A name of a model may hold escape sequences, which would act on the terminal.
        super().__init__(printable(str(message).strip()))


class ConfigError(QuarkError, ValueError):
    """A setting is unknown, malformed, contradictory, or matches nothing."""

    not_found: ClassVar[type[ConfigError]]


class ConfigNotFoundError(ConfigError, FileNotFoundError):
    """A file of settings does not exist."""

    # That of ValueError, which comes first, makes no OSError; libraries that restore an exception
    # of another process call it.
    __new__ = FileNotFoundError.__new__  # type: ignore[assignment]


class ModelError(QuarkError, ValueError):
    """The model cannot be read, checked, run or written."""

    not_found: ClassVar[type[ModelError]]


class ModelNotFoundError(ModelError, FileNotFoundError):
    """A file of the model does not exist."""

    __new__ = FileNotFoundError.__new__  # type: ignore[assignment]


class RuntimeCrashError(ModelError, RuntimeError):
    """The process crashed in onnxruntime, or in onnx.

    Without ``isolate``, the crash would have ended this process.
    """


class RunError(ModelError, RuntimeError):
    """onnxruntime opens the model, and cannot run it on a sample."""


class UnknownOperatorError(ModelError):
    """onnxruntime lacks a custom operator of the model; see ``custom_op_libraries``."""


class DataError(QuarkError, ValueError):
    """The calibration data does not fit the model, or is unusable."""

    not_found: ClassVar[type[DataError]]


class DataNotFoundError(DataError, FileNotFoundError):
    """The path of data or labels does not exist."""

    __new__ = FileNotFoundError.__new__  # type: ignore[assignment]


# The classes that ``reading_error`` takes for a file that does not exist.
ConfigError.not_found = ConfigNotFoundError
ModelError.not_found = ModelNotFoundError
DataError.not_found = DataNotFoundError


class PlanError(QuarkError, RuntimeError):
    """A rule decided something impossible."""


class ConstraintError(QuarkError, ValueError):
    """A model breaks rules of a target, or the constraints cannot be met together.

    Attributes:
        reason: the message without the broken rules.
        findings: the broken rules, a line each.
    """

    def __init__(self, reason: object = "", findings: Iterable[object] = ()) -> None:
        super().__init__(reason)
        self.reason = super().__str__()
        self.findings = tuple(printable(str(finding)) for finding in findings)

    def __str__(self) -> str:
        return "\n".join([self.reason, *self.findings])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.findings)


class AccuracyError(QuarkError):
    """The quantized model is below the required accuracy.

    Attributes:
        reason: the message without the changes to try.
        next_steps: changes to try, each a ``report.verdict.NextStep``.
        outputs: errors of the refused model's outputs, each a ``report.measure.OutputError``; empty
            if unknown.
        verdict: the ``report.verdict.Verdict`` on the refused model; None if it was not judged.
        model: the float model that was quantized, where it is not the caller's; else None.
    """

    model: Any = None

    def __init__(
        self,
        reason: object = "",
        next_steps: Sequence[Any] = (),
        outputs: Sequence[Any] = (),
        verdict: Any = None,
    ) -> None:
        message = reason
        if calls := " or ".join(str(step.call) for step in next_steps if step.call):
            message = f"{reason} Try {calls}."
        super().__init__(message)
        self.reason = printable(str(reason).strip())
        self.next_steps = tuple(next_steps)
        self.outputs, self.verdict = tuple(outputs), verdict


class MissingDependency(QuarkError, ImportError):  # noqa: N818
    """An optional package is needed for the request."""


class TimeLimitError(BaseException):
    """The work took longer than its time limit.

    Like KeyboardInterrupt, it is no Exception: work that goes on after an error of a part must not
    go on after the end of its time.
    """


def crash_behind(error: BaseException) -> RuntimeCrash | None:
    """Return the crash as the cause of an error, or None."""
    cause: BaseException | None = error
    # Each layer re-raises with ``from``, so that the crash is somewhere along the chain.
    while cause is not None and not isinstance(cause, RuntimeCrash):
        cause = cause.__cause__
    return cause


def raise_crash(error: Exception) -> None:
    """Raise an error again if a crash caused it.

    For errors that are passed over: without isolation, the crash would have ended this process.
    """
    if crash_behind(error) is not None:
        raise error


def system_reason(error: BaseException) -> str:
    """Return the operating system's words for an error; of other errors the message.

    >>> system_reason(FileNotFoundError(2, "No such file or directory", "model.onnx"))
    'No such file or directory'
    """
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def crash_errors(*models: object) -> Iterator[None]:
    """Name the models in the error of a crash of onnxruntime or onnx.

    Args:
        models: paths or models; a ModelProto has no name.

    Raises:
        RuntimeCrashError: in place of any error that a crash caused.
    """
    try:
        yield
    # Named already, by an inner call.
    except RuntimeCrashError:
        raise
    except Exception as error:
        crash = crash_behind(error)
        if crash is None:
            raise
        advice = _KILLED
        if not crash.killed:
            advice = _CRASHED.get(crash.library, _CRASHED_ENGINE)
        names = ", ".join(
            str(model) for model in models if isinstance(model, str | Path)
        )
        raise RuntimeCrashError(
            f"{names}{': ' if names else ''}{error}; {advice}",
        ) from error


@contextmanager
def data_errors() -> Iterator[None]:
    """Convert calibration errors about data to the package's errors.

    Raises:
        DataError: in place of a ``CalibrationError``.
    """
    try:
        yield
    # calibrators is a package of its own, whose errors are none of this package's.
    except CalibrationError as error:
        raise reading_error(DataError, str(error), error) from error
