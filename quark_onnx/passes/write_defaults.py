"""Write out attributes that ONNX has defaults for, so that a compiler need not know them.

The converter of Ryzen AI copies them as they stand (zmaychek84/vaip, to_xir_ops_pass.cpp, 2025-03):
axes of Softmax, Gather and Flatten, slopes, factors of Gemm, epsilons, what reductions keep, how
pools round and count, and the modes of Pad, Resize and DepthToSpace.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx
from onnx import helper

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
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
    }
    | {"mode", "nearest_mode", "p", "transA", "transB"},
)


@register
def write_defaults(graph: Graph) -> int:
    """Write them out for every operator of the standard; how many operators lacked one."""
    return sum(_write(graph, node) for node in graph.nodes if not node.domain)


def _write(graph: Graph, node: Node) -> bool:
    if node.op_type in QUANTIZE | DEQUANTIZE:  # with one scale they have no axis
        return False
    missing = {
        k: v
        for k, v in _defaults(node.op_type, graph.opset).items()
        if node.attribute(k) is None
    }
    for name, value in missing.items():
        node.set_attribute(name, value)
    return bool(missing)


@cache
def _defaults(op_type: str, opset: int) -> dict[str, Any]:
    """Those of the attributes above that an operator has a default for at an opset."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return {}
    known = {
        name: schema.attributes[name].default_value
        for name in _NAMES & set(schema.attributes)
    }
    return {
        name: helper.get_attribute_value(value)
        for name, value in sorted(known.items())
        if value.name
    }
