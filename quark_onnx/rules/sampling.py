"""Operators that read images at places of their own: grids and boxes stay float, as they are
positions.
"""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import rule


@rule("GridSample", "com.microsoft::GridSample")
def grid_sample(node: Node, plan: Plan) -> None:
    """Nearest and linear samples have the image's scale, cubic ones a scale of their own.

    The grid stays float.
    """
    if node.attribute("mode", "linear") in ("cubic", "bicubic"):
        plan.activation(node, node.inputs[0], node.outputs[0])
    else:
        plan.same_as(node, node.outputs[0], node.inputs[0])


@rule("RoiAlign", "com.microsoft::CropAndResize")
def roi_align(node: Node, plan: Plan) -> None:
    """Image and result; the boxes stay float."""
    plan.activation(node, node.inputs[0], node.outputs[0])


@rule("Col2Im")
def col2im(node: Node, plan: Plan) -> None:
    """Input, and a result in which overlapping blocks are added."""
    plan.activation(node, node.inputs[0], node.outputs[0])
