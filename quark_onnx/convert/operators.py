"""qdq-to-qoperator: operators that compute on codes take the place of operators between Q/DQ pairs."""  # noqa: E501

from __future__ import annotations

from quark_onnx.convert.base import Settings, conversion
from quark_onnx.graph import Graph
from quark_onnx.steps import fuse


@conversion("qdq-to-qoperator", keeps="but for rounding")
def qdq_to_qoperator(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """QLinearConv, QLinearMatMul and their kin in place of operators between Q/DQ pairs."""
    return fuse(graph, settings.samples)
