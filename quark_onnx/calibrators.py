"""The package ``calibrators`` under the name of this package.

``calibrators`` is a general name; an import from here says whose it is. Both lead to the same
objects.
"""

from calibrators import *  # noqa: F403
from calibrators import __all__ as _calibrators
from calibrators.readers.open import (
    CalibrationData,
    CalibrationReader,
    ImageSpec,
    InputSpec,
    RandomData,
    Reader,
    open_reader,
)

__all__ = [
    *_calibrators,
    "CalibrationData",
    "CalibrationReader",
    "ImageSpec",
    "InputSpec",
    "RandomData",
    "Reader",
    "open_reader",
]
