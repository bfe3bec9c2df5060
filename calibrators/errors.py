"""Define the errors of calibration.

CalibrationError              the calibration cannot be done as requested
├── RuntimeCrash              onnxruntime has ended the process that it ran in
├── UnknownOperator           onnxruntime lacks a custom operator of the model
└── DataError                 the calibration data cannot be used
    ├── DataNotFound          the path of the data does not exist
    ├── EmptyReader           no sample, or none left
    ├── ReaderEndedEarly      fewer samples than expected
    ├── NonFiniteSample       a sample holds NaN or infinity
    └── SampleMismatch        a sample does not fit the model's inputs

A message names the object (sample, input, file), the value found, and the action to take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TypeVar

from calibrators.shown import printable

#: Most known names that a message lists.
_LISTED = 12
_Error = TypeVar("_Error", bound=Exception)


class CalibrationError(Exception):
    """Base of the errors that the package raises on purpose.

    A message is one line. It holds names from files and texts of other libraries: line ends and
    terminal control characters in it are escaped.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message).strip()))


class RuntimeCrash(CalibrationError):  # noqa: N818
    """The process of onnxruntime ended, or of another library with native code.

    Only ``calibrators.onnx_runtime.isolation`` can turn a crash into an error.
    """

    def __init__(
        self,
        message: str,
        printed: str = "",
        *,
        killed: bool = False,
        library: str = "onnxruntime",
    ) -> None:
        """Create the error.

        Args:
            message: describes the crash.
            printed: the end of the output of the process.
            killed: another process or the system ended the process.
            library: the library that was at work.
        """
        super().__init__(f"{message}; it printed {printed!r}" if printed else message)
        self.killed = killed
        self.library = library


class UnknownOperator(CalibrationError):  # noqa: N818
    """onnxruntime lacks a custom operator of the model, whose library was not given."""


class DataError(CalibrationError):
    """The calibration data cannot be used: an unreadable file, an unknown kind of source."""


class DataNotFound(DataError, FileNotFoundError):  # noqa: N818
    """The path of the data does not exist."""


class EmptyReader(DataError):  # noqa: N818
    """The data has no sample, or was read before and cannot restart."""


class ReaderEndedEarly(DataError):  # noqa: N818
    """The data has fewer samples than expected."""


class NonFiniteSample(DataError):  # noqa: N818
    """A sample holds NaN or infinity, from which no range can be learned."""


class SampleMismatch(DataError):  # noqa: N818
    """A sample does not fit the model's inputs.

    Names, number, element types, ranks or fixed dimensions differ.
    """


def reading_error(
    kind: Callable[[str], _Error], message: str, cause: BaseException
) -> _Error:
    """Return the error for a file that cannot be read.

    Args:
        kind: class of the error. Its attribute ``not_found``, if it has one, is the class for a
            file that does not exist.
        message: the message.
        cause: the error of the system.
    """
    if isinstance(cause, FileNotFoundError):
        kind = getattr(kind, "not_found", kind)
    return kind(message)


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: similar known words.

    >>> nearest("imge", ["image", "mask"])
    "; did you mean 'image'?"
    >>> nearest("x", ["image", "mask"])
    '; known: image, mask'
    """
    names = sorted(str(name) for name in known)
    # ``word`` comes from users and files, and may be of any type.
    similar = get_close_matches(str(word), names, n=1)
    if similar:
        return f"; did you mean {similar[0]!r}?"
    listed = ", ".join(names[:_LISTED]) or "none"
    if len(names) > _LISTED:
        listed += ", ..."
    return f"; known: {listed}"
