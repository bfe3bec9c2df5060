"""A call in onnxruntime's spelling while it is translated: its arguments, and the settings found so
far.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from onnx import TensorProto

from quark_onnx.config import QuantizationSpec, TensorOverride
from quark_onnx.errors import nearest
from quark_onnx.graph import Graph, Node, inlined
from quark_onnx.graph.io import load
from quark_onnx.onnxruntime_spelling.names import CallError as CallError
from quark_onnx.onnxruntime_spelling.names import QuantType

logger = logging.getLogger(__name__)


@dataclass
class Request:
    """A call, and what it asks for in this package's terms.

    Attributes:
        arguments: of the call, with defaults.
        options: ``extra_options``.
        dynamic: whether ``quantize_dynamic`` was called.
        activation, weight: how tensors are quantized.
        changes: other settings of the QConfig.
        tensors: overrides of single tensors.
        exclude: names of nodes that stay float.
        data: the calibration data.
    """

    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    dynamic: bool
    activation: QuantizationSpec
    weight: QuantizationSpec
    changes: dict[str, Any] = field(default_factory=dict)
    tensors: list[TensorOverride] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    data: Any = None

    @cached_property
    def graph(self) -> Graph:
        """The float model, whose names some options speak of."""
        return Graph.of(inlined(load(self.arguments["model_input"])))

    @property
    def operators(self) -> bool:
        """Whether operators on codes are asked for, instead of Q/DQ pairs."""
        return self.changes.get("form") == "operators"

    def nodes_of(self, op_type: str) -> list[Node]:
        """Nodes of an operator type, by its bare name."""
        return [node for node in self.graph.nodes if node.op_type == op_type]


def name_of(value: Any) -> str:
    """The name of an enumeration's member, or the text itself."""
    return value.name if isinstance(value, Enum) else str(value)


def names(arguments: Mapping[str, Any], argument: str) -> tuple[str, ...]:
    """A list of names, which may be None."""
    value = arguments[argument]
    if isinstance(value, list | tuple | set | frozenset | None) and all(
        isinstance(item, str) for item in value or ()
    ):
        return tuple(value or ())
    raise CallError(f"{argument} is {value!r}; it must be a list of names")


def flag(value: Any, where: str) -> bool:
    """A truth value, which may be written as 0 or 1."""
    if value is None or value in (True, False):
        return bool(value)
    raise CallError(f"{where} is {value!r}; it must be True or False")


#: Number formats by the names of QuantType.
_FORMATS = {
    name: "fp8e4m3" if name == "QFLOAT8E4M3FN" else name[1:].lower()
    for name in QuantType.__members__
}


def format_of(value: Any) -> str:
    """The number format of a QuantType, its name, or a ``TensorProto.DataType``."""
    name = name_of(value)
    if type(value) is int and value in TensorProto.DataType.values():
        spelled = {kind.tensor_type: kind.name for kind in QuantType}
        name = spelled.get(value, TensorProto.DataType.Name(value))
    if name not in _FORMATS:
        raise CallError(
            f"quantization type {name!r} is not supported{nearest(name, _FORMATS)}",
        )
    return _FORMATS[name]
