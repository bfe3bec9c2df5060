"""Read the bounds of a Relu or Clip."""

from __future__ import annotations

from typing import Any

import numpy as np

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.matching import setting
from quark_onnx.graph.node import Node


def clip_bounds(graph: Graph, node: Node) -> tuple[float, float] | None:
    """Return the least and the greatest result of a Relu or Clip; None if not constant.

    Args:
        graph: the graph.
        node: a Relu or Clip, of any opset.

    Returns:
        The bounds, infinite where the Clip has none.
    """
    if node.kind == "Relu":
        return 0.0, np.inf
    # Attributes before opset 11, inputs from then on; both may be missing.
    low = _number(setting(graph, node, "min", 1, -np.inf))
    high = _number(setting(graph, node, "max", 2, np.inf))
    if low is None or high is None:
        return None
    return low, high


def _number(bound: Any) -> float | None:
    """Return a bound as a number; None if it is computed (None), or has several elements."""
    if bound is None or np.size(bound) != 1:
        return None
    return float(np.reshape(bound, ()))
