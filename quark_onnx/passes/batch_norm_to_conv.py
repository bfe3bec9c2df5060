"""Replace a BatchNormalization that could not be folded by a depthwise 1x1 convolution.

``(x - mean) * gamma / sqrt(var + epsilon) + beta`` is ``x * factor + shift`` for each channel.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register

_RANK = 4


@register
def batch_norm_to_conv(graph: Graph) -> int:
    """Replace BatchNormalization of images in inference mode with constant parameters."""
    return sum(
        _replace(graph, node)
        for node in graph.nodes
        if node.kind == "BatchNormalization"
    )


def _replace(graph: Graph, node: Node) -> bool:
    shape = graph.shape(node.inputs[0])
    parameters = [graph.constant(name) for name in node.inputs[1:5]]
    training = node.attribute("training_mode", 0) or any(node.outputs[1:])
    if (
        shape is None
        or len(shape) != _RANK
        or training
        or graph.elem_type(node.inputs[0]) != TensorProto.FLOAT
    ):
        return False
    if any(value is None for value in parameters):
        return False
    # In float64: `beta - mean * factor` cancels where a channel's mean is large.
    gamma, beta, mean, variance = (
        np.asarray(value, np.float64) for value in parameters
    )
    factor = gamma / np.sqrt(variance + node.attribute("epsilon", 1e-5))
    shift = beta - mean * factor
    # A variance and an epsilon of 0 divide by zero; such a norm stays as it is.
    if not (np.isfinite(factor).all() and np.isfinite(shift).all()):
        return False
    names = [
        graph.add_constant(f"{node.name}_{name}", value.astype(np.float32))
        for name, value in (("weight", factor.reshape(-1, 1, 1, 1)), ("bias", shift))
    ]
    graph.remove([node])
    graph.add(
        "Conv",
        [node.inputs[0], *names],
        node.outputs[:1],
        name=node.name,
        kernel_shape=[1, 1],
        strides=[1, 1],
        pads=[0, 0, 0, 0],
        dilations=[1, 1],
        group=len(factor),
    )
    return True
