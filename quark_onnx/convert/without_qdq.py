"""without-qdq: remove Q/DQ pairs.

Activations become float, and weights their dequantized values. Quantizers remove a Relu, or a Clip
from 0 to 6, if saturation has the same effect. So if the codes of a pair end at zero, its input
gets a Relu or Clip back, unless it is known not to be negative.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.convert.base import (
    ConversionSettings,
    conversion,
    counted,
    everywhere,
    settled,
)
from quark_onnx.convert.pairs import (
    ENDS,
    constant,
    parameters,
    readers,
    rounded,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import code_type
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE, inner_nodes
from quark_onnx.passes import fold_constants
from quark_onnx.patterns.clip_bounds import clip_bounds

#: Operators without negative results.
_POSITIVE = frozenset(
    {
        "Abs",
        "Exp",
        "HardSigmoid",
        "Relu",
        "ReduceL1",
        "ReduceL2",
        "Sigmoid",
        "Softmax",
        "Softplus",
        "Sqrt",
    },
)
#: Operators without negative results if no input is negative.
_COMBINING = frozenset({"Add", "Concat", "Mul"})
#: Operators without negative results if the first input is not negative.
_KEEPING = frozenset(
    {
        "AveragePool",
        "Cast",
        "DepthToSpace",
        "Flatten",
        "GlobalAveragePool",
        "GlobalMaxPool",
        "Identity",
        "MaxPool",
        "ReduceMax",
        "ReduceMean",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    },
)


@conversion("without-qdq", keeps="no")
def without_qdq(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Remove Q/DQ pairs: activations become float, weights dequantized float constants."""
    count = everywhere(graph, _remove)
    remaining = [
        node
        for node in (*graph.nodes, *inner_nodes(graph.nodes))
        if node.op_type in QUANTIZE | DEQUANTIZE
    ]
    notes = counted(count, "pair", "removed")
    if remaining:
        notes.append(
            f"{len(remaining)} Q/DQ nodes stay, {remaining[0].name!r} the first of them: other"
            " operators read or write their codes, or a scale is computed;"
            " qoperator-to-qdq may help before",
        )
    return settled(graph, count), notes


def _remove(graph: Graph) -> int:
    """Remove the pairs of a graph; return the number of pairs.

    A DequantizeLinear of a constant counts as a pair.
    """
    if not graph.nodes_of_type(_REMOVERS):
        return 0
    # A scale or codes may be the result of a Cast or a Transpose.
    fold_constants(graph)
    nodes = graph.nodes_of_type(_REMOVERS)
    return sum(_REMOVERS[node.op_type](graph, node) for node in nodes)


def _store_float(graph: Graph, node: Node) -> bool:
    """Replace a DequantizeLinear of constants by the dequantized constant.

    Return False, and leave the graph unchanged, if an input is computed.
    """
    array = constant(graph, node)
    if array is None:
        return False
    graph.remove([node])
    graph.set_constant(node.outputs[0], array)
    return True


def _remove_pair(graph: Graph, node: Node) -> bool:
    """Remove a QuantizeLinear, and the DequantizeLinear nodes that read its codes.

    Return False, and leave the graph unchanged, if a parameter is computed, or if another node
    reads the codes.
    """
    dequantizing = readers(graph, node)
    if dequantizing is None:
        return False
    array = rounded(graph, node)
    source = node.inputs[0]
    # A constant keeps the rounding of its pair, as weights do.
    if array is not None:
        source = graph.add_constant(f"{source}_rounded", array)
    # A constant of unknown rounding is left as it is.
    elif not graph.is_constant(source):
        source = _clipped(graph, node)
    # Before the Identity is added, which takes over the names of the dequantized tensors.
    graph.remove([node, *dequantizing])
    for dequantize in dequantizing:
        name = f"{dequantize.name}_float"
        identity = graph.add("Identity", [source], dequantize.outputs, name=name)
        graph.bypass(identity)
    return True


_REMOVERS = {
    **dict.fromkeys(QUANTIZE, _remove_pair),
    **dict.fromkeys(DEQUANTIZE, _store_float),
}


def _clipped(graph: Graph, node: Node) -> str:
    """Restore the Relu or Clip before a QuantizeLinear where one is needed.

    Return the name of its result, or of the input where none is needed.
    """
    source = node.inputs[0]
    greatest = _greatest(graph, node)
    if greatest is None:
        return source
    # The range of an input of the model is that of the data.
    if graph.producer(source) is None or _is_positive(graph, source):
        return source
    result = graph.fresh(f"{source}_positive")
    ends_at, scale = greatest
    # A range up to 6 is that of a Relu6, within the rounding of its end. Clip has its bounds as
    # inputs from opset 11 on.
    if abs(ends_at - 6.0) <= float(scale) / 2 and graph.opset >= 11:
        bounds = [
            graph.add_constant(f"{result}_{end}", np.asarray(end, scale.dtype))
            for end in (0, 6)
        ]
        graph.add("Clip", [source, *bounds], [result])
    else:
        graph.add("Relu", [source], [result])
    return result


def _greatest(graph: Graph, node: Node) -> tuple[float, NDArray[Any]] | None:
    """Return the greatest value of a QuantizeLinear's grid, and the scale as an array of rank 0.

    None if the grid has negative values or several scales, or is unknown.
    """
    grid = parameters(graph, node)
    kind = code_type(graph, node)
    if grid is None or kind not in ENDS or grid.scale.ndim:
        return None
    # Codes that end at zero, such as uint8 with zero point 0.
    if grid.zero_point != ENDS[kind].min:
        return None
    codes = float(ENDS[kind].max - grid.zero_point)
    return codes * float(grid.scale), grid.scale


def _is_positive(graph: Graph, tensor: str) -> bool:
    """Return whether a tensor is known not to be negative."""
    array = graph.constant(tensor)
    if array is not None:
        return bool((array >= 0).all())
    # Recursion ends at an operator of unknown sign, or at the input of the model.
    node = graph.producer(tensor)
    if node is None:
        return False
    if node.kind == "Clip":
        bounds = clip_bounds(graph, node)
        return bounds is not None and bounds[0] >= 0
    if node.kind in _COMBINING:
        return all(_is_positive(graph, name) for name in node.inputs)
    if node.kind in _KEEPING:
        return _is_positive(graph, node.inputs[0])
    return node.kind in _POSITIVE
