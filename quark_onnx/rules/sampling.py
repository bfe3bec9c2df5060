"""Plan the tensors of operators that sample images; grids and boxes stay float."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import rule


@rule("GridSample", "com.microsoft::GridSample")
def grid_sample(node: Node, plan: PlanBuilder) -> None:
    """Share the image's scale with nearest and linear samples; cubic ones need another.

    The grid stays float.
    """
    # Weights of a cubic interpolation are negative in part: samples overshoot the range of the
    # image.
    if node.attribute("mode", "linear") in ("cubic", "bicubic"):
        plan.activation(node, node.inputs[0], node.outputs[0])
    else:
        plan.same_as(node, node.outputs[0], node.inputs[0])


@rule("RoiAlign", "com.microsoft::CropAndResize")
def roi_align(node: Node, plan: PlanBuilder) -> None:
    """Quantize image and result; the boxes stay float."""
    # Boxes hold coordinates up to the size of the image, for which 256 codes are few.
    plan.activation(node, node.inputs[0], node.outputs[0])


@rule("Col2Im")
def col2im(node: Node, plan: PlanBuilder) -> None:
    """Quantize the input, and the result, in which overlapping blocks are added."""
    plan.activation(node, node.inputs[0], node.outputs[0])
