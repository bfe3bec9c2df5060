"""Limit the memory requests of small files.

A file of a few hundred bytes can describe terabytes: a shape, a compressed array, the size of an
image. The need is estimated before anything is allocated, and refused above a limit that the user
can raise.
"""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG

from calibrators.errors import CalibrationError

#: Environment variable with the gigabytes that a single tensor, array or image may take.
VARIABLE = "QUARK_ONNX_TENSOR_LIMIT_GB"
#: Limit in bytes where the variable is not set.
DEFAULT = 1 << 30

#: Most bytes of a file of settings or of a report.
TEXT = 1 << 26


def tensor_limit() -> int:
    """Return the limit in bytes of tensors beyond the size of their file.

    Raises:
        CalibrationError: the environment variable is not a number above 0.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return DEFAULT
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = 0.0
    # NaN fails both comparisons; infinity and numbers that overflow an int fail the second one.
    if not 0 < gigabytes < 1e9:
        raise CalibrationError(
            f"{VARIABLE} is {text[:80]!r}; it must be a number of gigabytes above 0",
        )
    return int(gigabytes * (1 << 30))


def raise_it(size: int) -> str:
    """Return the end of a message about an object of so many bytes over the limit.

    >>> raise_it(5 << 30)
    'that is 5.0 GB; set QUARK_ONNX_TENSOR_LIMIT_GB=6 if it is meant'
    """
    gigabytes = size / (1 << 30)
    return f"that is {gigabytes:,.1f} GB; set {VARIABLE}={int(gigabytes) + 1} if it is meant"


def regular_size(path: Path) -> int:
    """Return the bytes of a regular file; a device or a pipe may never end.

    Raises:
        OSError: the file does not exist, or is not a regular file.
    """
    status = path.stat()
    if not S_ISREG(status.st_mode):
        raise OSError(None, "it is no regular file", str(path))
    return status.st_size


def read_text(path: Path, most: int = TEXT) -> str:
    """Read a file of settings or of a report, in UTF-8.

    Args:
        path: the file.
        most: most bytes that are read.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is too large.
        ValueError: the file is not UTF-8 text.
    """
    size = regular_size(path)
    if size > most:
        raise OSError(None, f"it has {size:,} bytes; {most:,} are allowed", str(path))
    return path.read_text(encoding="utf-8")
