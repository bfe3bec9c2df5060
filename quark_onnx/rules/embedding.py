"""Plan the tensors of embeddings with a normalization."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import RESIDUAL, rule

# Words, positions and segments, after two inputs with indices.
_TABLES = slice(2, 5)


@rule("com.microsoft::EmbedLayerNormalization")
def embedding(node: Node, plan: PlanBuilder) -> None:
    """Quantize the three tables as weights with a scale per entry.

    The result is quantized where the format can hold a residual stream.
    """
    # The table of segments is optional: an empty name is no constant.
    for table in filter(plan.graph.is_constant, node.inputs[_TABLES]):
        plan.weight(node, table, axis=0, along=1)
    if plan.is_low_bit(node):
        plan.keep_node(node, RESIDUAL)
    else:
        plan.activation(node, node.outputs[0])
