"""Replacements for onnxruntime's enumerations and its reader.

Scripts can import them from this package.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from onnx import TensorProto

from quark_onnx.common.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


class CallError(ConfigError, ValueError):
    """An onnxruntime call is wrong; a ValueError, as in onnxruntime."""


class NamedEnum(Enum):
    """Enumeration that command lines read by name."""

    def __str__(self) -> str:
        return self.name

    @classmethod
    def from_string(cls, name: str) -> Self:
        """Return the member with a name.

        Args:
            name: name of the member.

        Raises:
            CallError: the name is unknown. The error is a ValueError, which argparse reports.
        """
        # A look-up by name would raise a KeyError, which argparse does not report.
        if name not in cls.__members__:
            raise CallError(f"{name!r} is none of: {', '.join(cls.__members__)}")
        return cls[name]


class QuantType(NamedEnum):
    """Number formats, with onnxruntime's numbers."""

    QInt8 = 0
    QUInt8 = 1
    QFLOAT8E4M3FN = 2
    QInt16 = 3
    QUInt16 = 4
    QInt4 = 5
    QUInt4 = 6

    @property
    def tensor_type(self) -> int:
        """Return the ``TensorProto.DataType`` of the codes."""
        # QInt8 is INT8: the name without its Q is that of ONNX.
        return int(TensorProto.DataType.Value(self.name[1:].upper()))


class QuantFormat(NamedEnum):
    """Output formats, with onnxruntime's numbers."""

    QOperator = 0
    QDQ = 1


class CalibrationMethod(Enum):
    """Calibration methods, with onnxruntime's numbers."""

    MinMax = 0
    Entropy = 1
    Percentile = 2
    Distribution = 3


class CalibrationDataReader:
    """Base class for onnxruntime's readers.

    ``get_next`` returns a sample, and None at the end.
    """

    def get_next(self) -> dict[str, Any] | None:
        raise NotImplementedError

    def __iter__(self) -> CalibrationDataReader:
        return self

    def __next__(self) -> dict[str, Any]:
        # The loops of Python and onnxruntime's get_next read the same stream.
        sample = self.get_next()
        if sample is None:
            raise StopIteration
        return sample
