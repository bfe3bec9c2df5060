"""Number formats of AMD Quark for ONNX, with their names in this package."""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.config.checks import require_known


@dataclass(frozen=True)
class DataType:
    """A number format.

    Attributes:
        name: AMD's name.

    >>> parse_data_type("Int8").dtype
    'int8'
    """

    name: str

    @property
    def dtype(self) -> str:
        """Return the name in this package."""
        return self.name.lower()


Int4 = DataType("Int4")
UInt4 = DataType("UInt4")
Int8 = DataType("Int8")
UInt8 = DataType("UInt8")
Int16 = DataType("Int16")
UInt16 = DataType("UInt16")
Int32 = DataType("Int32")
UInt32 = DataType("UInt32")
Float16 = DataType("Float16")
BFloat16 = DataType("BFloat16")
BFP16 = DataType("BFP16")
MX4 = DataType("MX4")
MX6 = DataType("MX6")
MX9 = DataType("MX9")
MXFP8E5M2 = DataType("MXFP8E5M2")
MXFP8E4M3 = DataType("MXFP8E4M3")
MXFP6E3M2 = DataType("MXFP6E3M2")
MXFP6E2M3 = DataType("MXFP6E2M3")
MXFP4E2M1 = DataType("MXFP4E2M1")
MXInt8 = DataType("MXInt8")

DATA_TYPES = {
    value.name: value
    for value in list(globals().values())
    if isinstance(value, DataType)
}


def parse_data_type(name: str) -> DataType:
    """Return the number format with a name.

    Args:
        name: AMD's name.

    Raises:
        ConfigError: the name is unknown.
    """
    require_known(name, DATA_TYPES, "unknown data type")
    return DATA_TYPES[name]
