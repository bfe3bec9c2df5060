"""s8s8, u8s8, s16s8 and u16s8: signed codes for unsigned ones, or the other way round, of the same
real values.

Codes and zero points move by half the number of codes. The second half of a name is that of the
weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto, helper

from quark_onnx.convert.base import Settings, conversion, counted, everywhere, reloaded
from quark_onnx.convert.pairs import (
    ENDS,
    code_type,
    parameters,
    readers,
    write_zero_point,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE

_INT8, _UINT8 = int(TensorProto.INT8), int(TensorProto.UINT8)
_INT16, _UINT16 = int(TensorProto.INT16), int(TensorProto.UINT16)
_WEIGHTS = {_UINT8: _INT8}


@conversion("s8s8", keeps="exactly")
def s8s8(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """Uint8 activations as int8, and uint8 weights as int8."""
    return _converted(graph, {_UINT8: _INT8})


@conversion("u8s8", keeps="exactly")
def u8s8(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """Int8 activations as uint8, and uint8 weights as int8."""
    return _converted(graph, {_INT8: _UINT8})


@conversion("s16s8", keeps="exactly")
def s16s8(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """Uint16 activations as int16, and uint8 weights as int8."""
    return _converted(graph, {_UINT16: _INT16})


@conversion("u16s8", keeps="exactly")
def u16s8(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """Int16 activations as uint16, and uint8 weights as int8."""
    return _converted(graph, {_INT16: _UINT16})


def _converted(graph: Graph, activations: Mapping[int, int]) -> tuple[Graph, list[str]]:
    left = list[str]()
    count = everywhere(graph, lambda inner: _move_all(inner, activations, left))
    notes = [f"{line} moved" for line in counted(count, "tensor")]
    if left:
        notes.append(
            f"{len(left)} tensors stay as they are, {left[0]!r} the first of them:"
            " other operators read their codes, or their zero point is computed",
        )
    return (reloaded(graph) if count else graph), notes


def _move_all(graph: Graph, activations: Mapping[int, int], left: list[str]) -> int:
    """Move the codes of activations and of constants; how many.

    Those that cannot be moved are added to ``left``.
    """
    count = 0
    for node in list(graph.nodes):
        weight = graph.is_constant(node.input(0))
        kind = code_type(graph, node) if node.op_type in QUANTIZE | DEQUANTIZE else 0
        new = (_WEIGHTS if weight else activations).get(kind)
        if new is None or (node.op_type in DEQUANTIZE and not weight):
            continue
        undone = readers(graph, node) if node.op_type in QUANTIZE else [node]
        if undone is None or parameters(graph, node) is None:
            left.append(node.inputs[0])
            continue
        if node.op_type in DEQUANTIZE:
            graph.set_input(node, 0, _moved(graph, node.inputs[0], kind, new))
        for each in {node, *undone}:
            _set_zero_point(graph, each, kind, new)
        count += 1
    return count


def _set_zero_point(graph: Graph, node: Node, kind: int, new: int) -> None:
    write_zero_point(graph, node)
    node.drop_attribute("output_dtype")
    graph.set_input(node, 2, _moved(graph, node.inputs[2], kind, new))


def _moved(graph: Graph, name: str, kind: int, new: int) -> str:
    """The constant of moved codes, which nodes share that shared the codes."""
    array = graph.constant(name)
    assert array is not None
    moved = (array.astype(np.int32) + _shift(kind, new)).astype(
        helper.tensor_dtype_to_np_dtype(new),
    )
    [found] = graph.once(
        ("moved", name),
        lambda: [graph.add_constant(f"{name}_{ENDS[new].dtype}", moved)],
    )
    return found


def _shift(kind: int, new: int) -> int:
    return int(ENDS[new].min) - int(ENDS[kind].min)
