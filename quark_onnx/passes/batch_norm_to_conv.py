"""Replace a BatchNormalization that could not be folded by a depthwise 1x1 convolution.

``(x - mean) * gamma / sqrt(var + epsilon) + beta`` is ``x * factor + shift`` for each channel.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register, rewrite_each
from quark_onnx.passes.fold_batch_norm import inference_parameters

_RANK = 4


@register
def batch_norm_to_conv(graph: Graph) -> int:
    """Replace BatchNormalization of images in inference mode with constant parameters."""
    return rewrite_each(graph, _replace, "BatchNormalization")


def _replace(graph: Graph, node: Node) -> bool:
    source = node.inputs[0]
    if graph.elem_type(source) != TensorProto.FLOAT:
        return False
    if len(graph.sizes(source)) != _RANK:
        return False
    parameters = inference_parameters(graph, node)
    if parameters is None:
        return False
    # In float64: `beta - mean * factor` cancels where a channel's mean is large.
    gamma, beta, mean, variance = parameters
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = gamma / np.sqrt(variance + node.attribute("epsilon", 1e-5))
        shift = (beta - mean * factor).astype(np.float32)
        # Weight (channels, 1, 1, 1): one 1x1 filter per group.
        weight = factor.reshape(-1, 1, 1, 1).astype(np.float32)
    # A variance and an epsilon of 0 divide by zero; such a norm stays as it is.
    if not np.isfinite(weight).all() or not np.isfinite(shift).all():
        return False
    names = [
        graph.add_constant(f"{node.name}_weight", weight),
        graph.add_constant(f"{node.name}_bias", shift),
    ]
    graph.remove([node])
    graph.add(
        "Conv",
        [source, *names],
        node.outputs[:1],
        name=node.name,
        kernel_shape=[1, 1],
        strides=[1, 1],
        pads=[0, 0, 0, 0],
        dilations=[1, 1],
        group=len(factor),
    )
    return True
