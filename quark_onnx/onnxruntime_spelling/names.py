"""Stand-ins for onnxruntime's enumerations and its reader, for scripts that import them from this package."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from onnx import TensorProto

if TYPE_CHECKING:
    from typing_extensions import Self


class _Named(Enum):
    """An enumeration that command lines read by name."""

    def __str__(self) -> str:
        return self.name

    @classmethod
    def from_string(cls, name: str) -> Self:
        """The member of that name.

        Raises:
            ValueError: there is none, which argparse reports.
        """
        try:
            return cls[name]
        except KeyError:
            raise ValueError(f"{name!r} is none of: {', '.join(cls.__members__)}") from None


class QuantType(_Named):
    """Number formats, as onnxruntime numbers them."""

    QInt8 = 0
    QUInt8 = 1
    QFLOAT8E4M3FN = 2
    QInt16 = 3
    QUInt16 = 4
    QInt4 = 5
    QUInt4 = 6

    @property
    def tensor_type(self) -> int:
        """The ``TensorProto.DataType`` of its codes."""
        return int(TensorProto.DataType.Value(self.name[1:].upper()))


class QuantFormat(_Named):
    """Output formats, as onnxruntime numbers them."""

    QOperator = 0
    QDQ = 1


class CalibrationMethod(Enum):
    """Calibration methods, as onnxruntime numbers them."""

    MinMax = 0
    Entropy = 1
    Percentile = 2
    Distribution = 3


class CalibrationDataReader:
    """Base class for readers in onnxruntime's style: ``get_next`` returns one sample, and None at the end."""

    def get_next(self) -> dict[str, Any] | None:
        raise NotImplementedError

    def __iter__(self) -> CalibrationDataReader:
        return self

    def __next__(self) -> dict[str, Any]:
        sample = self.get_next()
        if sample is None:
            raise StopIteration
        return sample
