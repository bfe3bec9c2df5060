"""without-qdq: no Q/DQ pairs.

Activations are float again, and weights the numbers that their codes stand for.

Quantizers leave out a Relu, or a Clip from 0 to 6, whose work saturation does. So where the codes
of a pair end at zero, what it reads gets one back, unless it is known to be nowhere negative.
"""

from __future__ import annotations

import numpy as np

from quark_onnx.convert.base import Settings, conversion, counted, everywhere, reloaded
from quark_onnx.convert.pairs import (
    ENDS,
    code_type,
    constant,
    parameters,
    readers,
    rounded,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE, inner_nodes
from quark_onnx.passes import fold_constants
from quark_onnx.patterns.clip_bounds import clip_bounds

#: Operators whose results are nowhere negative, and those whose results are not if nothing that
#: they read is.
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
_KEEPING = frozenset(
    {
        "Add",
        "AveragePool",
        "Cast",
        "Concat",
        "DepthToSpace",
        "Flatten",
        "GlobalAveragePool",
        "GlobalMaxPool",
        "Identity",
    }
    | {
        "MaxPool",
        "Mul",
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
def without_qdq(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """No Q/DQ pairs: activations float again, weights dequantized to float constants."""
    count = everywhere(graph, _remove)
    left = [
        node
        for node in (*graph.nodes, *inner_nodes(graph.nodes))
        if node.op_type in QUANTIZE | DEQUANTIZE
    ]
    notes = [f"{line} removed" for line in counted(count, "pair")]
    if left:
        notes.append(
            f"{len(left)} Q/DQ nodes stay, {left[0].name!r} the first of them: other"
            " operators read or write their codes, or a scale is computed;"
            " qoperator-to-qdq may help before",
        )
    return (reloaded(graph) if count else graph), notes


def _remove(graph: Graph) -> int:
    """Remove all pairs of a graph; how many. A DequantizeLinear of a constant counts as one."""
    if not any(node.op_type in QUANTIZE | DEQUANTIZE for node in graph.nodes):
        return 0
    fold_constants(graph)  # a scale or codes may hide behind a Cast or a Transpose
    count = 0
    for node in list(graph.nodes):
        if node.op_type in DEQUANTIZE:
            array = constant(graph, node)
            if array is not None:
                graph.remove([node])
                graph.set_constant(node.outputs[0], array)
                count += 1
        elif node.op_type in QUANTIZE:
            count += _remove_pair(graph, node)
    return count


def _remove_pair(graph: Graph, node: Node) -> bool:
    undone = readers(graph, node)
    if undone is None:
        return False
    array, source = rounded(graph, node), node.inputs[0]
    if array is not None:
        source = graph.add_constant(f"{source}_rounded", array)
    elif not graph.is_constant(source):
        source = _clipped(graph, node)
    graph.remove([node, *undone])
    for each in undone:
        graph.bypass(
            graph.add("Identity", [source], each.outputs, name=f"{each.name}_float"),
        )
    return True


def _clipped(graph: Graph, node: Node) -> str:
    """What a QuantizeLinear reads, behind the Relu or Clip whose work it does."""
    source, own, kind = node.inputs[0], parameters(graph, node), code_type(graph, node)
    if (
        own is None
        or own.scale.ndim
        or kind not in ENDS
        or own.zero_point != ENDS[kind].min
    ):
        return source
    if graph.producer(source) is None or _is_positive(graph, source):
        return source
    ends_at = float(ENDS[kind].max - own.zero_point) * float(own.scale)
    result = graph.fresh(f"{source}_positive")
    if abs(ends_at - 6.0) <= float(own.scale) / 2 and graph.opset >= 11:
        dtype = own.scale.dtype
        bounds = [
            graph.add_constant(f"{result}_{end}", np.asarray(end, dtype))
            for end in (0, 6)
        ]
        graph.add("Clip", [source, *bounds], [result])
    else:
        graph.add("Relu", [source], [result])
    return result


def _is_positive(graph: Graph, tensor: str) -> bool:
    """Whether a tensor is known to be nowhere negative."""
    array = graph.constant(tensor)
    if array is not None:
        return bool((array >= 0).all())
    node = graph.producer(tensor)
    if node is None:
        return False
    if node.kind == "Clip":
        bounds = clip_bounds(graph, node)
        return bounds is not None and bounds[0] >= 0
    if node.kind in _POSITIVE:
        return True
    places = (
        node.inputs[:1] if node.kind not in ("Add", "Concat", "Mul") else node.inputs
    )
    return node.kind in _KEEPING and all(_is_positive(graph, name) for name in places)
