"""Replace an average that counts the zeros of its padding by a depthwise convolution.

OpenVINO 2026.4 pads the codes of an AveragePool with 0, not with their zero point: results are
wrong where the zero point is not 0. It pads a convolution rightly, and computes it as fast.
"""

from __future__ import annotations

from math import prod

import numpy as np
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.matching import counts_padding
from quark_onnx.passes.base import register, rewrite_each
from quark_onnx.patterns.openvino_faults import POSITIVE

_RANK = 4


@register
def padded_means_to_conv(graph: Graph) -> int:
    """Replace AveragePool of images that counts padding, unless a Relu or the like is first."""
    return rewrite_each(graph, _replace, "AveragePool")


def _replace(graph: Graph, node: Node) -> bool:
    source = node.inputs[0]
    sizes = graph.sizes(source)
    if len(sizes) != _RANK or graph.elem_type(source) != TensorProto.FLOAT:
        return False
    channels = sizes[1]
    if not isinstance(channels, int) or not counts_padding(node):
        return False
    # The last window of ceil_mode may reach beyond the padding, which is not counted.
    has_others = (
        node.attribute("ceil_mode", 0)
        or node.attribute("auto_pad", "NOTSET") != "NOTSET"
    )
    if has_others or graph.producer_of_kind(source, POSITIVE) is not None:
        return False
    kernel = node.attribute("kernel_shape", [])
    mean = np.full((channels, 1, *kernel), 1 / prod(kernel), np.float32)
    weight = graph.add_constant(f"{node.name}_mean", mean)
    settings = {
        name: node.attribute(name, default)
        for name, default in (
            ("strides", [1, 1]),
            ("dilations", [1, 1]),
            ("pads", [0] * 4),
        )
    }
    graph.remove([node])
    graph.add(
        "Conv",
        [source, weight],
        node.outputs[:1],
        name=node.name,
        kernel_shape=kernel,
        group=channels,
        **settings,
    )
    return True
