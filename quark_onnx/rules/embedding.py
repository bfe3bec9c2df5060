"""Plan the tensors of embeddings with a normalization."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import RESIDUAL, rule

# Words, positions and segments, after two inputs with indices.
_TABLES = (2, 3, 4)


@rule("com.microsoft::EmbedLayerNormalization")
def embedding(node: Node, plan: PlanBuilder) -> None:
    """Quantize the three tables as weights with a scale per entry.

    The result is quantized where the format can hold a residual stream.
    """
    # The table of segments is optional: an empty name is no constant.
    for index in _TABLES:
        if plan.graph.is_constant(node.input(index)):
            plan.weight_at(node, index)
    if plan.is_low_bit(node):
        plan.keep_node(node, RESIDUAL)
    else:
        plan.activation(node, node.outputs[0])
