"""qdq-to-qoperator: replace operators between Q/DQ pairs by operators on codes."""

from __future__ import annotations

from quark_onnx.convert.base import ConversionSettings, conversion
from quark_onnx.graph import Graph
from quark_onnx.writing.fuse import fuse


@conversion("qdq-to-qoperator", keeps="but for rounding")
def qdq_to_qoperator(
    graph: Graph, settings: ConversionSettings
) -> tuple[Graph, list[str]]:
    """Replace operators between Q/DQ pairs by QLinearConv, QLinearMatMul and similar ones."""
    return fuse(graph, settings.samples)
