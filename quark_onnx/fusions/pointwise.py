"""Write pointwise operators, averages and joins between Q/DQ pairs as QLinear operators.

The CPU kernels of onnxruntime 1.31 take uint8 throughout or int8 throughout, each combination
tried: QLinearAdd, QLinearMul, QLinearSigmoid, QLinearLeakyRelu, QLinearSoftmax,
QLinearAveragePool, QLinearGlobalAveragePool, QLinearConcat and QLinearWhere. QLinearReduceMean has
a definition and no kernel; there is nothing for Sub, Div, Tanh, HardSwish, HardSigmoid, Gelu and
PRelu.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.fusions.base import (
    Codes,
    code_type,
    grid,
    one_scale,
    operand_inputs,
    read_bytes,
    value,
    write,
    written_bytes,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.matching import reduced_axes
from quark_onnx.graph.node import softmax_axis
from quark_onnx.graph.shapes import known_sizes

#: Scale of which 256 steps cover the range 0 to 1.
_LEAST_SOFTMAX_SCALE = 2.0**-8
#: First version of Flatten that supports integer codes.
_FLATTEN_OPSET = 9


def qlinear_elementwise(graph: Graph, node: Node) -> bool:
    """Replace Add, Mul, Sigmoid and LeakyRelu."""
    # Checked completely before the first change: a fusion that fails leaves the graph as it was.
    codes = _all_bytes(graph, node, *node.inputs)
    if codes is None:
        return False
    *operands, y = codes
    inputs = [*operand_inputs(graph, *operands), *grid(graph, y)]
    name = f"QLinear{node.op_type}"
    return write(graph, node, name, inputs, y, **node.attributes)


def qlinear_softmax(graph: Graph, node: Node) -> bool:
    """Replace Softmax, where onnxruntime's operator is correct.

    onnxruntime counts results in steps of ``1 / floor(1 / scale)``, which is 1/254 for the float32
    next to 1/255; so the operator gets the next smaller scale.
    """
    codes = _all_bytes(graph, node, node.inputs[0])
    if codes is None:
        return False
    x, y = codes
    if softmax_fails(graph, node, value(graph, y.scale)):
        return False
    scale, zero = grid(graph, y)
    smaller_scale = graph.add_constant(
        f"{scale}_below",
        # For a scale of float32(1 / 255), 1 / scale is then above 255, not just below.
        np.nextafter(value(graph, scale), np.float32(0)),
    )
    inputs = [*operand_inputs(graph, x), smaller_scale, zero]
    axis = softmax_axis(node, graph.opset)
    return write(graph, node, "QLinearSoftmax", inputs, y, axis=axis, opset=graph.opset)


def softmax_fails(
    graph: Graph, node: Node, scale: NDArray[Any], *, cautious: bool = True
) -> bool:
    """Return whether onnxruntime's 8-bit softmax may be wrong.

    For a single value it computes 0, it skips empty results, and where more than 256 steps cover 0
    to 1 it wraps around to 0 instead of saturating (up to 1.31).

    Args:
        graph: the graph.
        node: the Softmax.
        scale: the scale of its result.
        cautious: take an unknown size for one that fails.
    """
    sizes = known_sizes(graph.shape(node.inputs[0]))
    wraps_around = bool((scale < _LEAST_SOFTMAX_SCALE).any())
    if sizes is None:
        return cautious or wraps_around
    if 0 in sizes:
        return True
    return wraps_around or sizes[softmax_axis(node, graph.opset)] == 1


def qlinear_average_pool(graph: Graph, node: Node) -> bool:
    """Replace AveragePool without dilations, unless ceil_mode meets count_include_pad.

    With both, onnxruntime divides the last sums by a count beyond the padding.
    """
    settings = node.attributes
    if any(step != 1 for step in settings.pop("dilations", ())):
        return False
    if settings.get("ceil_mode") and settings.get("count_include_pad"):
        return False
    codes = _all_bytes(graph, node, node.inputs[0])
    if codes is None:
        return False
    x, y = codes
    inputs = [*operand_inputs(graph, x), *grid(graph, y)]
    return write(graph, node, "QLinearAveragePool", inputs, y, **settings)


def qlinear_global_average_pool(graph: Graph, node: Node) -> bool:
    """Replace GlobalAveragePool, and ReduceMean over all axes but the first two."""
    codes = _all_bytes(graph, node, node.inputs[0])
    if codes is None:
        return False
    if node.kind == "ReduceMean" and not _reduces_images(graph, node):
        return False
    x, y = codes
    name = "QLinearGlobalAveragePool"
    inputs = [*operand_inputs(graph, x), *grid(graph, y)]
    if node.kind == "GlobalAveragePool" or node.attribute("keepdims", 1):
        return write(graph, node, name, inputs, y, channels_last=0)
    if graph.opset < _FLATTEN_OPSET:
        return False
    # Without keepdims the result is (N, C): a Flatten of the codes (N, C, 1, ...) of the pool.
    pooled = graph.fresh(f"{y.codes}_pooled")
    graph.remove([y.node])
    graph.add("Flatten", [pooled], [y.codes], axis=1)
    return write(graph, node, name, inputs, pooled, channels_last=0)


def qlinear_concat(graph: Graph, node: Node) -> bool:
    """Replace Concat of codes with different scales."""
    codes = _all_bytes(graph, node, *node.inputs)
    if codes is None:
        return False
    *operands, y = codes
    read = operand_inputs(graph, *operands)
    # QLinearConcat takes the parameters of the result first.
    inputs = [*grid(graph, y), *read]
    return write(graph, node, "QLinearConcat", inputs, y, **node.attributes)


def qlinear_where(graph: Graph, node: Node) -> bool:
    """Replace Where; the condition stays unchanged."""
    codes = _all_bytes(graph, node, *node.inputs[1:])
    if codes is None:
        return False
    *operands, y = codes
    inputs = [node.inputs[0], *operand_inputs(graph, *operands), *grid(graph, y)]
    return write(graph, node, "QLinearWhere", inputs, y)


def _all_bytes(graph: Graph, node: Node, *tensors: str) -> list[Codes] | None:
    """Return the codes of tensors, then of the result: of one type, with per-tensor scales.

    None if one of them has no such codes.
    """
    read = [read_bytes(graph, tensor) for tensor in tensors]
    read.append(written_bytes(graph, node.outputs[0]))
    codes = [operand for operand in read if operand is not None]
    if len(codes) < len(read):
        return None
    # The kernels take one type throughout (see the module's docstring).
    if len({code_type(graph, operand) for operand in codes}) != 1:
        return None
    return codes if one_scale(graph, *codes) else None


def _reduces_images(graph: Graph, node: Node) -> bool:
    """Return whether a ReduceMean runs over all axes but the first two."""
    rank = len(graph.sizes(node.inputs[0]))
    return rank > 2 and reduced_axes(graph, node) == {*range(2, rank)}
