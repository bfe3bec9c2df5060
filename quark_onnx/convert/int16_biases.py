"""int16-biases: store int32 biases in 16 bits, with larger scales where codes would overflow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibrators.affine import octaves_for
from quark_onnx.convert.base import Settings, conversion, counted, everywhere, settled
from quark_onnx.convert.pairs import Parameters, parameters
from quark_onnx.dtypes import INT16
from quark_onnx.fusions.base import CONTRIB
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import DEQUANTIZE


@conversion("int16-biases", keeps="no")
def int16_biases(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """Convert int32 biases to int16.

    A scale grows by the least power of two with which 16 bits hold the bias.
    """
    count = everywhere(graph, _narrow_all)
    notes = [f"{line} became int16" for line in counted(count, "bias")]
    return settled(graph, count), notes


def _narrow_all(graph: Graph) -> int:
    """Convert the biases of a graph in place; return their number."""
    count = 0
    for node in list(graph.nodes):
        if node.op_type not in DEQUANTIZE:
            continue
        codes = graph.constant(node.input(0))
        own = parameters(graph, node)
        if codes is None or own is None:
            continue
        if codes.dtype != np.int32 or own.zero_point.any():
            continue
        # Per-channel scales of a matrix, or blocks, belong to a weight.
        if own.scale.ndim and codes.ndim != 1:
            continue
        _narrow(graph, node, codes, own)
        count += 1
    return count


def _narrow(
    graph: Graph,
    node: Node,
    codes: NDArray[np.int32],
    parameters_: Parameters,
) -> None:
    """Store the codes of a bias in 16 bits, with new scale and zero point."""
    magnitude = np.abs(codes.astype(np.float64))
    if not parameters_.scale.ndim:
        magnitude = magnitude.max(initial=0.0)
    octaves = octaves_for(magnitude, INT16.qmax)
    narrow = np.clip(
        np.rint(codes / np.exp2(octaves)),
        INT16.qmin,
        INT16.qmax,
    ).astype(
        np.int16,
    )
    scale = (parameters_.scale * np.exp2(octaves)).astype(parameters_.scale.dtype)
    stem = node.inputs[0]
    graph.set_input(node, 0, graph.add_constant(f"{stem}_int16", narrow))
    graph.set_input(node, 1, graph.add_constant(f"{stem}_int16_scale", scale))
    zero_point = graph.add_constant(
        f"{stem}_int16_zero_point",
        np.zeros(scale.shape, np.int16),
    )
    graph.fill_input(node, 2, zero_point)
    if not node.domain and graph.opset < INT16.min_opset:
        graph.import_domain(CONTRIB)
        node.rename(node.op_type, CONTRIB)
