"""Let operators that move or clip values between equal Q/DQ pairs work on codes."""

from __future__ import annotations

from collections.abc import Sequence
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
    one_scale,
    read_bytes,
    value,
    write,
    written_bytes,
    zero_points,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import private
from quark_onnx.graph.matching import alone_reads

#: Operators, with the first opset at which both onnx and the CPU kernels of onnxruntime 1.31
#: support uint8 and int8; each was tried. GlobalMaxPool supports floats only. Interpolation does
#: not move values: onnxruntime truncates between codes.
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

#: First opset whose Clip supports integer codes; its bounds are inputs.
_CLIP_OPSET = 12
#: First opset whose ArgMax supports both types of bytes.
_RANK_OPSET = 13


def moved_inputs(node: Node) -> Sequence[int]:
    """Return the indices of the inputs whose values an operator of ``MOVING`` moves."""
    if node.kind == "Concat":
        return range(len(node.inputs))
    return (1, 2) if node.kind == "Where" else (0,)


def move_codes(graph: Graph, node: Node) -> bool:
    """Let an operator of ``MOVING`` read and compute codes with equal scales."""
    if graph.opset < MOVING[node.kind]:
        return False
    indices = moved_inputs(node)
    read = [read_bytes(graph, node.inputs[index]) for index in indices]
    sources = [codes for codes in read if codes is not None]
    results = _results(graph, node)
    if len(sources) < len(read) or not results:
        return False
    # One scale for all: the codes of each source mean the same values in each result.
    if not alike(graph, *sources, *results.values()):
        return False
    if not _moves(graph, node, sources[0]):
        return False
    for index, codes in zip(indices, sources, strict=True):
        graph.set_input(node, index, codes.codes)
    # The QuantizeLinear nodes go, so that the node itself can write their results.
    graph.remove([codes.node for codes in results.values()])
    for index, name in enumerate(node.outputs):
        if index in results:
            graph.set_output(node, index, results[index].codes)
        elif name:
            # An unused result changes its type with the node, and therefore its name.
            graph.set_output(node, index, graph.fresh(f"{name}_idle"))
    return True


def _results(graph: Graph, node: Node) -> dict[int, Codes] | None:
    """Return the codes of the results that are needed, by index; None if one has no codes."""
    results = dict[int, Codes]()
    for index, name in enumerate(node.outputs):
        if graph.consumers(name) or graph.is_output(name):
            codes = written_bytes(graph, name)
            if codes is None:
                return None
            results[index] = codes
    return results


def _moves(graph: Graph, node: Node, codes: Codes) -> bool:
    """Return whether an operator moves values under its attributes.

    A Pad gets the code of its padding value.
    """
    if node.kind in ("Resize", "Upsample"):
        mode = node.attribute("coordinate_transformation_mode")
        is_nearest: bool = node.attribute("mode", "nearest") == "nearest"
        # tf_crop_and_resize fills places outside with a float, extrapolation_value.
        return is_nearest and mode != "tf_crop_and_resize"
    return node.kind != "Pad" or _encode_padding(graph, node, codes)


def _encode_padding(graph: Graph, node: Node, codes: Codes) -> bool:
    """Give a Pad the code of its padding value; return False if the value is computed."""
    number = graph.optional_constant(node.input(2), np.float32(0))
    if number is None:
        return False
    code = _encoded(graph, codes, number.reshape(()))
    graph.fill_input(node, 2, graph.add_constant(f"{node.name}_code", code))
    return True


def rank_codes(graph: Graph, node: Node) -> bool:
    """Let ArgMax read codes, which are in the order of their values."""
    codes = read_bytes(graph, node.inputs[0])
    if graph.opset < _RANK_OPSET or codes is None or not one_scale(graph, codes):
        return False
    graph.set_input(node, 0, codes.codes)
    return True


def clip_codes(graph: Graph, node: Node) -> bool:
    """Exchange Relu or Clip with the QuantizeLinear after it, and clip codes.

    Clipping and rounding commute, as rounding is monotonic. The QuantizeLinear comes first, where
    it can be fused with the operator that computes the values.
    """
    if graph.opset < _CLIP_OPSET:
        return False
    y = written_bytes(graph, node.outputs[0])
    bounds = _bounds(graph, node)
    if y is None or bounds is None:
        return False
    limits = [_limit(graph, node, y, bound) for bound in bounds]
    source = node.inputs[0]
    x = read_bytes(graph, source)
    if x is not None and alike(graph, x, y):
        return write(graph, node, "Clip", [x.codes, *limits], y, "")
    # Only where an operator computes the values, with which the QuantizeLinear can be fused.
    if graph.producer(source) is None:
        return False
    # Another reader needs the float values; dequantized values have codes already.
    if not alone_reads(graph, node, source) or codes_of(graph, source) is not None:
        return False
    rounded = graph.fresh(f"{source}_quantized")
    graph.remove([node])
    graph.set_input(y.node, 0, source)
    graph.set_output(y.node, 0, rounded)
    graph.add("Clip", [rounded, *limits], [y.codes]).name = node.name
    return True


def _bounds(graph: Graph, node: Node) -> list[NDArray[Any] | None] | None:
    """Return the bounds of a Relu or Clip, None for a missing one; None if one is computed."""
    if node.kind == "Relu":
        return [np.asarray(np.float32(0))]
    names = (node.input(1), node.input(2))
    if not all(graph.is_constant(name) for name in names if name):
        return None
    return [value(graph, name) if name else None for name in names]


def _limit(graph: Graph, node: Node, codes: Codes, bound: NDArray[Any] | None) -> str:
    """Add the code of a bound; return an empty name without a bound."""
    if bound is None:
        return ""
    code = _encoded(graph, codes, bound.reshape(()))
    return graph.add_constant(f"{node.name}_code", code)


def drop_rounding_again(graph: Graph, node: Node) -> bool:
    """Remove a QuantizeLinear after a DequantizeLinear of equal codes."""
    x = read_bytes(graph, node.inputs[0])
    # The input is checked by ``read_bytes``.
    if x is None or not all(graph.is_constant(name) for name in node.operands[1:]):
        return False
    result = node.outputs[0]
    y = Codes(node, result, node.inputs[1], node.input(2))
    if not private(graph, result) or not alike(graph, x, y):
        return False
    graph.remove([node])
    graph.replace_uses(result, x.codes)
    return True


def _encoded(graph: Graph, codes: Codes, number: NDArray[Any]) -> NDArray[Any]:
    """Return the code of a scalar."""
    dtype = helper.tensor_dtype_to_np_dtype(code_type(graph, codes))
    ends = np.iinfo(dtype)
    scale = value(graph, codes.scale).reshape(())
    params = QParams(scale, zero_points(graph, codes).reshape(()))
    return quantize(number, params, Grid(ends.min, ends.max)).astype(dtype)
