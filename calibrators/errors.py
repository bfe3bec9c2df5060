"""Everything that can go wrong in a calibration on purpose.

CalibrationError              the calibration cannot be done as asked
├── RuntimeCrash              onnxruntime has ended the process that it ran in
└── DataError                 the calibration data cannot be used
    ├── EmptyReader           it has no sample, or none left
    ├── ReaderEndedEarly      it has fewer samples than were promised
    ├── NonFiniteSample       a sample holds NaN or infinity
    └── SampleMismatch        a sample does not fit the model's inputs

A message says what was found, where (sample, input, file), and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from calibrators.shown import printable

#: How many known names a message lists at most.
_LISTED = 12


class CalibrationError(Exception):
    """Base of all errors that this package raises on purpose.

    Messages hold names out of files, and what other libraries say of them: what a terminal would
    act on is escaped.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), lines=True))


class RuntimeCrash(CalibrationError):  # noqa: N818
    """The process of onnxruntime ended.

    Only ``calibrators.onnx_runtime.isolation`` can turn that into an error.
    """

    def __init__(
        self,
        message: str,
        printed: str = "",
        *,
        killed: bool = False,
    ) -> None:
        """``printed``: the end of what the process has printed.

        ``killed``: another process or the system ended it.
        """
        super().__init__(f"{message}; it printed {printed!r}" if printed else message)
        self.killed = killed


class DataError(CalibrationError):
    """The calibration data cannot be used: an unreadable file, an unknown kind of source."""


class EmptyReader(DataError):  # noqa: N818
    """The data has no sample, or was read before and cannot start again."""


class ReaderEndedEarly(DataError):  # noqa: N818
    """The data has fewer samples than were promised."""


class NonFiniteSample(DataError):  # noqa: N818
    """A sample holds NaN or infinity, from which no range can be learned."""


class SampleMismatch(DataError):  # noqa: N818
    """A sample does not fit the model's inputs: names, number, element types, ranks or fixed
    dimensions.
    """


def nearest(word: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, or all of them.

    >>> nearest("imge", ["image", "mask"])
    "; did you mean 'image'?"
    >>> nearest("x", ["image", "mask"])
    '; known: image, mask'
    """
    names = sorted(map(str, known))
    near = get_close_matches(str(word), names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(names[:_LISTED]) or 'none'}" + (
        ", ..." if len(names) > _LISTED else ""
    )
