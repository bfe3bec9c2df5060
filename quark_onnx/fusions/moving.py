"""Operators that move or limit values between Q/DQ pairs of one scale: they do the same with codes."""  # noqa: E501

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from calibrators import Grid, QParams, quantize
from quark_onnx.fusions.base import (
    Codes,
    alike,
    code_type,
    codes_of,
    read_bytes,
    value,
    write,
    written_bytes,
    zero_points,
)
from quark_onnx.graph import Graph, Node

#: The operators, and the first opset at which both onnx and the kernels of onnxruntime 1.31 for the
#: CPU let them take uint8 and int8, which was tried for each. GlobalMaxPool takes floats only.
#: Interpolation is not moving: onnxruntime truncates where it computes between codes.
MOVING = {
    "Concat": 4,
    "DepthToSpace": 11,
    "Expand": 8,
    "Flatten": 9,
    "Gather": 1,
    "Identity": 1,
    "MaxPool": 12,
    "Pad": 11,
    "Reshape": 5,
    "Resize": 10,
    "Slice": 1,
    "SpaceToDepth": 1,
    "Split": 2,
    "Squeeze": 1,
    "Tile": 6,
    "Transpose": 1,
    "Unsqueeze": 1,
    "Upsample": 7,
    "Where": 9,
}

#: First opset whose Clip takes codes; its bounds are inputs.
_CLIP_OPSET = 12


def move_codes(graph: Graph, node: Node) -> bool:
    """An operator of ``MOVING`` whose inputs and results have one scale: it reads and computes
    codes.
    """
    places = {"Concat": range(len(node.inputs)), "Where": (1, 2)}.get(node.kind, (0,))
    read = [read_bytes(graph, node.inputs[place]) for place in places]
    sources = [codes for codes in read if codes is not None]
    idle = [
        not graph.consumers(name) and not graph.is_output(name) for name in node.outputs
    ]
    written = [
        None if unread else written_bytes(graph, name)
        for name, unread in zip(node.outputs, idle, strict=True)
    ]
    results = [codes for codes in written if codes is not None]
    if len(sources) < len(read) or not results or len(results) < len(idle) - sum(idle):
        return False
    if (
        graph.opset < MOVING[node.kind]
        or not alike(graph, *sources, *results)
        or not _moves(graph, node, sources[0])
    ):
        return False
    for place, codes in zip(places, sources, strict=True):
        graph.set_input(node, place, codes.codes)
    graph.remove([codes.node for codes in results])
    for place, result in enumerate(written):
        if result is not None:
            graph.set_output(node, place, result.codes)
        elif node.outputs[place]:
            graph.set_output(node, place, graph.fresh(f"{node.outputs[place]}_idle"))
    return True


def _moves(graph: Graph, node: Node, codes: Codes) -> bool:
    """Whether an operator moves values under its attributes.

    A Pad is given the code of the value that it pads with.
    """
    if node.kind in ("Resize", "Upsample"):
        outside = (
            node.attribute("coordinate_transformation_mode") == "tf_crop_and_resize"
        )
        return node.attribute("mode", "nearest") == "nearest" and not outside
    if node.kind == "Pad":
        number = (
            value(graph, node.input(2))
            if graph.is_constant(node.input(2))
            else np.float32(0)
        )
        if node.input(2) and not graph.is_constant(node.input(2)):
            return False
        code = graph.add_constant(
            f"{node.name}_code",
            _encoded(graph, codes, number.reshape(())),
        )
        if len(node.inputs) > 2:
            graph.set_input(node, 2, code)
        else:
            graph.append_input(node, code)
    return True


def clip_codes(graph: Graph, node: Node) -> bool:
    """Relu and Clip: what is limited before it is rounded is the same as what is rounded and then
    limited.

    So the QuantizeLinear comes first, where it can become part of what computes the values.
    """
    y, source = written_bytes(graph, node.outputs[0]), node.inputs[0]
    bounds = [""] if node.kind == "Relu" else [node.input(1), node.input(2)]
    if (
        y is None
        or graph.opset < _CLIP_OPSET
        or not all(graph.is_constant(name) for name in bounds if name)
    ):
        return False
    numbers = (
        [np.float32(0)]
        if node.kind == "Relu"
        else [value(graph, name) if name else None for name in bounds]
    )
    limits = [
        ""
        if number is None
        else graph.add_constant(
            f"{node.name}_code",
            _encoded(graph, y, number.reshape(())),
        )
        for number in numbers
    ]
    x = read_bytes(graph, source)
    if x is not None and alike(graph, x, y):
        return write(graph, node, "Clip", [x.codes, *limits], y, "")
    alone = graph.consumers(source) == [node] and not graph.is_output(source)
    if (
        not alone
        or graph.producer(source) is None
        or codes_of(graph, source) is not None
    ):
        return False
    rounded = graph.fresh(f"{source}_quantized")
    graph.remove([node])
    graph.set_input(y.node, 0, source)
    graph.set_output(y.node, 0, rounded)
    graph.add("Clip", [rounded, *limits], [y.codes]).name = node.name
    return True


def drop_rounding_again(graph: Graph, node: Node) -> bool:
    """A QuantizeLinear whose input is dequantized from the same codes."""
    x, result = read_bytes(graph, node.inputs[0]), node.outputs[0]
    y = Codes(node, result, node.inputs[1], node.input(2))
    if x is None or not all(
        map(graph.is_constant, filter(None, (y.scale, y.zero_point))),
    ):
        return False
    if graph.is_output(result) or graph.captured(result) or not alike(graph, x, y):
        return False
    graph.remove([node])
    graph.replace_uses(result, x.codes)
    return True


def _encoded(graph: Graph, codes: Codes, number: NDArray[Any]) -> NDArray[Any]:
    """The code of a number, a scalar."""
    dtype = helper.tensor_dtype_to_np_dtype(code_type(graph, codes))
    ends, scale = np.iinfo(dtype), value(graph, codes.scale).reshape(())
    params = QParams(scale, zero_points(graph, codes).reshape(()))
    return quantize(number, params, Grid(ends.min, ends.max)).astype(dtype)
