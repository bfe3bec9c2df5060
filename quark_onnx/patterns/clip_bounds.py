"""Read the bounds of a Relu or Clip."""

from __future__ import annotations

from typing import Any

import numpy as np

from quark_onnx.common.conditions import only_if, otherwise, required
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.matching import setting
from quark_onnx.graph.node import Node


@otherwise(None)
def clip_bounds(graph: Graph, node: Node) -> tuple[float, float]:
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
    low = setting(graph, node, "min", 1, -np.inf)
    high = setting(graph, node, "max", 2, np.inf)
    return _number(low), _number(high)


def _number(bound: Any) -> float:
    """Return a bound as a number.

    Args:
        bound: a number, or an array of one element; None if computed.

    Raises:
        UnmetError: the bound is computed, or has several elements.
    """
    array = np.asarray(required(bound))
    only_if(array.size == 1)
    return float(array.reshape(()))
