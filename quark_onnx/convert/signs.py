"""s8s8, u8s8, s16s8 and u16s8: exchange signed and unsigned codes of the same values.

Codes and zero points are shifted by half the number of codes. The second half of a name is about
the weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto, helper

from quark_onnx.common.wording import counted as with_noun
from quark_onnx.convert.base import (
    ConversionSettings,
    conversion,
    counted,
    everywhere,
    settled,
)
from quark_onnx.convert.pairs import (
    ENDS,
    parameters,
    readers,
    write_zero_point,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import code_type
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE

_INT8 = int(TensorProto.INT8)
_UINT8 = int(TensorProto.UINT8)
_INT16 = int(TensorProto.INT16)
_UINT16 = int(TensorProto.UINT16)
_WEIGHTS = {_UINT8: _INT8}


@conversion("s8s8", keeps="exactly")
def s8s8(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Convert uint8 activations to int8, and uint8 weights to int8."""
    return _converted(graph, {_UINT8: _INT8})


@conversion("u8s8", keeps="exactly")
def u8s8(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Convert int8 activations to uint8, and uint8 weights to int8."""
    return _converted(graph, {_INT8: _UINT8})


@conversion("s16s8", keeps="exactly")
def s16s8(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Convert uint16 activations to int16, and uint8 weights to int8."""
    return _converted(graph, {_UINT16: _INT16})


@conversion("u16s8", keeps="exactly")
def u16s8(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Convert int16 activations to uint16, and uint8 weights to int8."""
    return _converted(graph, {_INT16: _UINT16})


def _converted(graph: Graph, activations: Mapping[int, int]) -> tuple[Graph, list[str]]:
    """Exchange the types of codes in a graph and its bodies, and of uint8 weights for int8.

    Return the graph, reloaded after a change, and notes.

    Args:
        activations: new ``TensorProto.DataType`` of the codes of activations, by the present one.
    """
    refused = list[str]()
    count = everywhere(graph, lambda inner: _move_all(inner, activations, refused))
    notes = counted(count, "tensor", "moved")
    if refused:
        stay = with_noun(
            len(refused), "tensor stays as it is", "tensors stay as they are"
        )
        notes.append(
            f"{stay}, {refused[0]!r} the first of them:"
            " other operators read their codes, or their zero point is computed",
        )
    return settled(graph, count), notes


def _move_all(graph: Graph, activations: Mapping[int, int], refused: list[str]) -> int:
    """Shift the codes of activations and of constants; return their number.

    The names of tensors that cannot be shifted are added to ``refused``.
    """
    count = 0
    for node in graph.nodes_of_type(QUANTIZE | DEQUANTIZE):
        is_weight = graph.is_constant(node.input(0))
        if node.op_type in DEQUANTIZE and not is_weight:
            continue  # goes with its QuantizeLinear
        kind = code_type(graph, node)
        new = (_WEIGHTS if is_weight else activations).get(kind)
        if new is None:
            continue
        if _move(graph, node, kind, new):
            count += 1
        else:
            refused.append(node.inputs[0])
    return count


def _move(graph: Graph, node: Node, kind: int, new: int) -> bool:
    """Shift the codes of a QuantizeLinear, or the constant codes of a DequantizeLinear.

    Return False, and leave the graph unchanged, if a parameter is computed, or if another node than
    a DequantizeLinear with equal parameters reads the codes.

    Args:
        kind: present type of the codes.
        new: new type, of as many bits and the other signedness.
    """
    # A computed zero point cannot be shifted.
    if parameters(graph, node) is None:
        return False
    if node.op_type in QUANTIZE:
        dequantizing = readers(graph, node)
        if dequantizing is None:
            return False
        # The codes change for all their readers at once.
        members = [node, *dequantizing]
    else:
        members = [node]
        graph.set_input(node, 0, _moved(graph, node.inputs[0], kind, new))
    for member in members:
        _set_zero_point(graph, member, kind, new)
    return True


def _set_zero_point(graph: Graph, node: Node, kind: int, new: int) -> None:
    """Shift the constant zero point of a Q/DQ node, which is added if omitted."""
    write_zero_point(graph, node)
    # The zero point tells the new type, and the attribute would contradict it.
    node.drop_attribute("output_dtype")
    graph.set_input(node, 2, _moved(graph, node.inputs[2], kind, new))


def _moved(graph: Graph, name: str, kind: int, new: int) -> str:
    """Return the constant of shifted codes or zero points, shared like the original."""
    # In int32, as the shifted codes leave the range of the old type.
    moved = graph.known(name).astype(np.int32) + _shift(kind, new)
    codes = moved.astype(helper.tensor_dtype_to_np_dtype(new))
    return graph.shared_constant(
        ("moved", name), f"{name}_{ENDS[new].dtype}", lambda: codes
    )


def _shift(kind: int, new: int) -> int:
    """Return the number to add to codes of a type to get codes of another type."""
    # -128 from uint8 to int8, 128 back; 32768 accordingly for 16 bits.
    return int(ENDS[new].min) - int(ENDS[kind].min)
