"""Plan the tensors of embeddings with a normalization."""

from __future__ import annotations

from quark_onnx.dtypes import INT8, UINT8
from quark_onnx.graph import Node
from quark_onnx.patterns.coded_embedding import PARAMETERS, TABLES, has_coded_form
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import RESIDUAL, rule


@rule("com.microsoft::EmbedLayerNormalization")
def embedding(node: Node, plan: PlanBuilder) -> None:
    """Quantize the three tables as weights with a scale per entry.

    Where operators on codes are written, QEmbedLayerNormalization looks up codes: each table has
    one scale, and so do scale and bias of the normalization. A DequantizeLinear would dequantize
    all entries in each run. The result is quantized where the format can hold a residual stream.
    """
    tables = [node.input(index) for index in TABLES if node.input(index)]
    parameters = [node.input(index) for index in PARAMETERS]
    if plan.fuses and _has_codes(node, plan, [*tables, *parameters]):
        for tensor in (*tables, *parameters):
            plan.weight(node, tensor, axis=None)
    else:
        for index in TABLES:
            # The table of segments is optional: an empty name is no constant.
            if plan.graph.is_constant(node.input(index)):
                plan.weight_at(node, index)
    if plan.is_low_bit(node):
        plan.keep_node(node, RESIDUAL)
    else:
        plan.activation(node, node.outputs[0])


def _has_codes(node: Node, plan: PlanBuilder, tensors: list[str]) -> bool:
    """Return whether QEmbedLayerNormalization computes a node on codes of its constants."""
    spec = plan.specs[node].weight
    if spec is None or spec.block_size or spec.dtype not in (INT8, UINT8):
        return False
    are_constant = all(plan.graph.is_constant(tensor) for tensor in tensors)
    return are_constant and has_coded_form(plan.graph, node)
