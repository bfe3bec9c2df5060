"""Give every Clip both bounds.

The converter of X1 takes no other (zmaychek84/vaip, to_xir_ops_pass.cpp, 2025-03). A Clip at 0 from
below alone is a Relu. Elsewhere a missing bound is the one that ONNX defines, the last finite
number; amd-quark 0.13 limits the bounds of the engine to its codes (simulate_dpu.py).
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.matching import constant_number
from quark_onnx.passes.base import register, rewrite_each

#: First opset in which the bounds of Clip are inputs.
_INPUTS_OPSET = 11
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


@register
def write_bounds(graph: Graph) -> int:
    """Write the missing bounds of every Clip of floats."""
    return rewrite_each(graph, _write, "Clip")


def _write(graph: Graph, node: Node) -> bool:
    elem_type = graph.elem_type(node.inputs[0])
    if elem_type not in _FLOATS:
        return False
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    limits = np.finfo(dtype)
    if graph.opset < _INPUTS_OPSET:
        defaults = {"min": float(limits.min), "max": float(limits.max)}
        missing = node.lacking(defaults)
        for name in missing:
            node.set_attribute(name, defaults[name])
        return bool(missing)
    if node.input(1) and node.input(2):
        return False
    if not node.input(2) and constant_number(graph, node.input(1)) == 0:
        graph.remove([node])
        graph.add("Relu", [node.inputs[0]], [node.outputs[0]], name=node.name)
        return True
    for index, name, bound in ((1, "min", limits.min), (2, "max", limits.max)):
        if not node.input(index):
            bound_name = f"{node.outputs[0]}_{name}"
            constant = graph.add_constant(bound_name, np.array(bound, dtype))
            graph.fill_input(node, index, constant)
    return True
