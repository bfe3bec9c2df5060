"""Read the bounds of a Relu or Clip."""

from __future__ import annotations

import numpy as np

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node


def clip_bounds(graph: Graph, node: Node) -> tuple[float, float] | None:
    """Return the least and the greatest result of a Relu or Clip; None if not constant."""
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
