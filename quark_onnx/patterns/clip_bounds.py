"""The interval that a Relu or Clip lets through."""

from __future__ import annotations

import numpy as np

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node


def clip_bounds(graph: Graph, node: Node) -> tuple[float, float] | None:
    """The least and the greatest value behind a Relu or Clip; None if they are not constant."""
    if node.kind == "Relu":
        return 0.0, float("inf")
    bounds = [
        float(node.attribute("min", -np.inf)),
        float(node.attribute("max", np.inf)),
    ]
    for place, name in enumerate(node.inputs[1:3]):
        if name:
            value = graph.constant(name)
            if value is None or value.size != 1:
                return None
            bounds[place] = float(value.reshape(-1)[0])
    return bounds[0], bounds[1]
