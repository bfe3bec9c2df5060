"""Make default attributes explicit, so that a compiler need not know the defaults.

The converter of Ryzen AI copies attributes verbatim (zmaychek84/vaip, to_xir_ops_pass.cpp,
2025-03): axes of Softmax, Gather and Flatten, slopes, factors of Gemm, epsilons, keepdims of
reductions, rounding and counting of pools, and the modes of Pad, Resize and DepthToSpace.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from onnx import helper

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE, schema_of
from quark_onnx.passes.base import register

_NAMES = frozenset(
    {
        "alpha",
        "axis",
        "beta",
        "ceil_mode",
        "coordinate_transformation_mode",
        "count_include_pad",
        "epsilon",
        "keepdims",
        "mode",
        "nearest_mode",
        "p",
        "transA",
        "transB",
    },
)


@register
def write_defaults(graph: Graph) -> int:
    """Make defaults of standard operators explicit; return the number of changed nodes."""
    # Other domains have defaults of their own, which onnx does not know.
    return sum(_write(graph, node) for node in graph.nodes if not node.domain)


def _write(graph: Graph, node: Node) -> bool:
    # With a per-tensor scale, an axis would be invalid.
    if node.op_type in QUANTIZE | DEQUANTIZE:
        return False
    defaults = _defaults(node.op_type, graph.opset)
    missing = node.lacking(defaults)
    for name in missing:
        node.set_attribute(name, defaults[name])
    return bool(missing)


@cache
def _defaults(op_type: str, opset: int) -> dict[str, Any]:
    """Return the defaults of an operator's attributes among the names above."""
    schema = schema_of(op_type, opset)
    if schema is None:
        return {}
    defaults = dict[str, Any]()
    # Sorted, as the order of a set differs between runs.
    for name in sorted(_NAMES & set(schema.attributes)):
        value = schema.attributes[name].default_value
        # An attribute without a default has an empty default_value.
        if value.name:
            defaults[name] = helper.get_attribute_value(value)
    return defaults
