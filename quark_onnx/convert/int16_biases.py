"""int16-biases: store int32 biases in 16 bits, with larger scales where codes would overflow."""

from __future__ import annotations

import numpy as np

from calibrators.affine import octaves_for
from quark_onnx.convert.base import (
    ConversionSettings,
    conversion,
    counted,
    everywhere,
    settled,
)
from quark_onnx.convert.pairs import parameters
from quark_onnx.dtypes import INT16
from quark_onnx.fusions.base import CONTRIB
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import DEQUANTIZE


@conversion("int16-biases", keeps="no")
def int16_biases(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Convert int32 biases to int16.

    A scale grows by the least power of two with which 16 bits hold the bias.
    """
    count = everywhere(graph, _narrow_all)
    return settled(graph, count), counted(count, "bias vector", "became int16")


def _narrow_all(graph: Graph) -> int:
    """Convert the biases of a graph in place; return their number."""
    return sum(_narrow(graph, node) for node in graph.nodes_of_type(DEQUANTIZE))


def _narrow(graph: Graph, node: Node) -> bool:
    """Store the codes of a bias in 16 bits, with new scale and zero point.

    Return False, and leave the graph unchanged, if the DequantizeLinear does not dequantize a
    constant int32 bias with zero point 0.
    """
    codes = graph.constant(node.input(0))
    old = parameters(graph, node)
    if codes is None or old is None:
        return False
    if codes.dtype != np.int32 or old.zero_point.any():
        return False
    # Per-channel scales of a matrix, or blocks, belong to a weight.
    if old.scale.ndim and codes.ndim != 1:
        return False
    # float64, as the absolute value of -2**31 does not fit int32.
    magnitude = np.abs(codes.astype(np.float64))
    # One scale for all: the largest code decides. Otherwise (channels,), one power each.
    if not old.scale.ndim:
        magnitude = magnitude.max(initial=0.0)
    octaves = octaves_for(magnitude, INT16.qmax)
    rounded = np.rint(codes / np.exp2(octaves))
    narrow = np.clip(rounded, INT16.qmin, INT16.qmax).astype(np.int16)
    # A power of two keeps the scale's mantissa, so that only the codes are rounded.
    scale = (old.scale * np.exp2(octaves)).astype(old.scale.dtype)
    stem = node.inputs[0]
    graph.set_input(node, 0, graph.add_constant(f"{stem}_int16", narrow))
    graph.set_input(node, 1, graph.add_constant(f"{stem}_int16_scale", scale))
    zeros = np.zeros(scale.shape, np.int16)
    graph.fill_input(node, 2, graph.add_constant(f"{stem}_int16_zero_point", zeros))
    # com.microsoft has 16-bit Q/DQ nodes at every opset.
    if not node.domain and graph.opset < INT16.min_opset:
        graph.import_domain(CONTRIB)
        node.rename(node.op_type, CONTRIB)
    return True
