"""A request: the state of an onnxruntime call during translation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from onnx import TensorProto

from quark_onnx.check.inlined import inlined
from quark_onnx.config import QuantizationSpec, TensorOverride
from quark_onnx.config.checks import require, require_known
from quark_onnx.files.io import load
from quark_onnx.graph import Graph, Node
from quark_onnx.onnxruntime_spelling.names import CallError as CallError
from quark_onnx.onnxruntime_spelling.names import QuantType

logger = logging.getLogger(__name__)


#: Symmetric formats that omit the least code: ONNX_INT_TYPE_SYMMETRIC_RANGE of
#: ``onnxruntime.quantization.quant_utils``. In fewer bits a code is too much to give away.
NARROW = frozenset({"int8", "int16"})


@dataclass(kw_only=True)
class Wanted:
    """Changes that the extra options of a script ask for, onnxruntime's or AMD's.

    Attributes:
        changes: settings of the QConfig.
        tensors: overrides of tensors.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    tensors: list[TensorOverride] = field(default_factory=list)


@dataclass
class Request(Wanted):
    """An onnxruntime call, and its translation.

    Attributes:
        arguments: arguments of the call, with defaults.
        options: ``extra_options``.
        dynamic: True for ``quantize_dynamic``.
        activation: specification of activations.
        weight: specification of weights.
        exclude: names of nodes that stay float.
        data: the calibration data.
    """

    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    dynamic: bool
    activation: QuantizationSpec
    weight: QuantizationSpec
    exclude: list[str] = field(default_factory=list)
    data: Any = None

    @cached_property
    def graph(self) -> Graph:
        """Return the graph of the float model, for options with names."""
        # Read on first use, and once for all uses.
        return Graph.of(inlined(load(self.arguments["model_input"])))

    @property
    def operators(self) -> bool:
        """Return True if operators on codes are requested instead of Q/DQ pairs."""
        return self.changes.get("form") == "operators"

    def nodes_of(self, op_type: str) -> list[Node]:
        """Return the nodes of an operator type without its domain.

        Args:
            op_type: the operator type.
        """
        return [node for node in self.graph.nodes if node.op_type == op_type]


def name_of(value: object) -> str:
    """Return the name of an enumeration's member, or the text.

    Args:
        value: a member or a text.
    """
    return value.name if isinstance(value, Enum) else str(value)


def names(arguments: Mapping[str, Any], argument: str) -> tuple[str, ...]:
    """Return a list of names; empty for None.

    Args:
        arguments: arguments of the call.
        argument: name of the argument.

    Raises:
        CallError: the argument is no list of names.
    """
    value = arguments[argument]
    if value is None:
        return ()
    # A bare string would be a list of its letters.
    is_list = isinstance(value, list | tuple | set | frozenset)
    is_names = is_list and all(isinstance(name, str) for name in value)
    require(is_names, argument, value, "a list of names", CallError)
    return tuple(value)


def flag(value: object, where: str) -> bool:
    """Return a boolean, which may be given as 0 or 1.

    Args:
        value: the value; None is False.
        where: name of the argument or option in the message.

    Raises:
        CallError: the value is no boolean.
    """
    # 0 and 1 equal False and True, and are accepted.
    require(value in (None, True, False), where, value, "True or False", CallError)
    return bool(value)


#: Number formats by the names of QuantType.
_FORMATS = {
    name: "fp8e4m3" if name == "QFLOAT8E4M3FN" else name[1:].lower()
    for name in QuantType.__members__
}


def format_of(value: object) -> str:
    """Return the number format of a QuantType, its name, or a ``TensorProto.DataType``.

    Args:
        value: the type.

    Raises:
        CallError: the type is not supported.
    """
    name = name_of(value)
    # Types of TensorProto are plain integers; QuantType is an enumeration.
    if type(value) is int and value in TensorProto.DataType.values():
        spelled = {kind.tensor_type: kind.name for kind in QuantType}
        name = spelled.get(value, TensorProto.DataType.Name(value))
    require_known(name, _FORMATS, "unsupported quantization type", CallError)
    return _FORMATS[name]
