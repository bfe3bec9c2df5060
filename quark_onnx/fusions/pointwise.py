"""Arithmetic, activation functions, averages and joins between Q/DQ pairs: the QLinear operators of
onnxruntime.

The kernels of onnxruntime 1.31 for the CPU take uint8 throughout or int8 throughout, each
combination tried: QLinearAdd, QLinearMul, QLinearSigmoid, QLinearLeakyRelu, QLinearSoftmax,
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
    attributes,
    code_type,
    grid,
    one_scale,
    read_bytes,
    value,
    write,
    written_bytes,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import softmax_axis

#: First opset whose ReduceMean has its axes as an input.
_AXES_INPUT_OPSET = 18
#: Steps of which 256 make up 1.
_LEAST_SOFTMAX_SCALE = 2.0**-8
#: First version of Flatten that takes codes.
_FLATTEN_OPSET = 9


def qlinear_elementwise(graph: Graph, node: Node) -> bool:
    """Add, Mul, Sigmoid and LeakyRelu."""
    found = _all_bytes(graph, node, *node.inputs)
    if found is None:
        return False
    *operands, y = found
    inputs = [
        name for operand in operands for name in (operand.codes, *grid(graph, operand))
    ]
    return write(
        graph,
        node,
        f"QLinear{node.op_type}",
        [*inputs, *grid(graph, y)],
        y,
        **attributes(node),
    )


def qlinear_softmax(graph: Graph, node: Node) -> bool:
    """Softmax, where onnxruntime's is right.

    It counts results in steps of ``1 / floor(1 / scale)``, which is 1/254 for the float32 next to
    1/255; so the scale that it is given is one float less.
    """
    found = _all_bytes(graph, node, node.inputs[0])
    if found is None or softmax_fails(graph, node, value(graph, found[1].scale)):
        return False
    x, y = found
    scale, zero = grid(graph, y)
    below = graph.add_constant(
        f"{scale}_below",
        np.nextafter(value(graph, scale), np.float32(0)),
    )
    inputs = [x.codes, *grid(graph, x), below, zero]
    axis = softmax_axis(node, graph.opset)
    return write(graph, node, "QLinearSoftmax", inputs, y, axis=axis, opset=graph.opset)


def softmax_fails(graph: Graph, node: Node, scale: NDArray[Any]) -> bool:
    """Whether onnxruntime's 8-bit softmax may be wrong.

    Of a single value it makes 0, an empty result it forgets, and where more than 256 steps make up
    1 it wraps around to 0 where it should saturate (up to 1.31).
    """
    shape = graph.shape(node.inputs[0])
    if shape is None or not all(isinstance(dim, int) and dim > 0 for dim in shape):
        return True
    return (
        bool((scale < _LEAST_SOFTMAX_SCALE).any())
        or shape[softmax_axis(node, graph.opset)] == 1
    )


def qlinear_average_pool(graph: Graph, node: Node) -> bool:
    """AveragePool.

    Without dilations, and where it counts its padding without rounding the size of its result up.

    With both, onnxruntime divides the sums at the end by more than what is there.
    """
    found = _all_bytes(graph, node, node.inputs[0])
    own = attributes(node)
    dilated = any(step != 1 for step in own.pop("dilations", ()))
    if (
        found is None
        or dilated
        or (own.get("ceil_mode") and own.get("count_include_pad"))
    ):
        return False
    x, y = found
    return write(
        graph,
        node,
        "QLinearAveragePool",
        [x.codes, *grid(graph, x), *grid(graph, y)],
        y,
        **own,
    )


def qlinear_global_average_pool(graph: Graph, node: Node) -> bool:
    """GlobalAveragePool, and a ReduceMean over all axes but the first two."""
    found = _all_bytes(graph, node, node.inputs[0])
    if found is None or (
        node.kind == "ReduceMean" and not _reduces_images(graph, node)
    ):
        return False
    x, y = found
    inputs = [x.codes, *grid(graph, x), *grid(graph, y)]
    if node.kind == "GlobalAveragePool" or node.attribute("keepdims", 1):
        return write(
            graph,
            node,
            "QLinearGlobalAveragePool",
            inputs,
            y,
            channels_last=0,
        )
    if graph.opset < _FLATTEN_OPSET:
        return False
    pooled = graph.fresh(f"{y.codes}_pooled")
    graph.remove([y.node])
    graph.add("Flatten", [pooled], [y.codes], axis=1)
    return write(
        graph,
        node,
        "QLinearGlobalAveragePool",
        inputs,
        pooled,
        channels_last=0,
    )


def qlinear_concat(graph: Graph, node: Node) -> bool:
    """Concat of codes with scales of their own."""
    found = _all_bytes(graph, node, *node.inputs)
    if found is None:
        return False
    *parts, y = found
    inputs = [name for part in parts for name in (part.codes, *grid(graph, part))]
    return write(
        graph,
        node,
        "QLinearConcat",
        [*grid(graph, y), *inputs],
        y,
        **attributes(node),
    )


def qlinear_where(graph: Graph, node: Node) -> bool:
    """Where, by a condition that nothing is done about."""
    found = _all_bytes(graph, node, *node.inputs[1:])
    if found is None:
        return False
    inputs = [name for one in found[:2] for name in (one.codes, *grid(graph, one))]
    return write(
        graph,
        node,
        "QLinearWhere",
        [node.inputs[0], *inputs, *grid(graph, found[2])],
        found[2],
    )


def _all_bytes(graph: Graph, node: Node, *tensors: str) -> list[Codes] | None:
    """The codes behind these tensors, then of the result.

    None unless all are of one type, with one scale each.
    """
    found = [read_bytes(graph, tensor) for tensor in tensors] + [
        written_bytes(graph, node.outputs[0]),
    ]
    codes = [one for one in found if one is not None]
    same = (
        len(codes) == len(found) and len({code_type(graph, one) for one in codes}) == 1
    )
    return codes if same and one_scale(graph, *codes) else None


def _reduces_images(graph: Graph, node: Node) -> bool:
    """Whether a ReduceMean runs over all axes but the first two."""
    rank = len(graph.shape(node.inputs[0]) or ())
    axes = node.attribute("axes")
    if graph.opset >= _AXES_INPUT_OPSET:
        axes = graph.constant(node.input(1)) if node.input(1) else None
    return (
        axes is not None
        and rank > 2
        and {int(axis) % rank for axis in axes} == set(range(2, rank))
    )
