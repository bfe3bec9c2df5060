"""Plan the tensors of normalizations.

Their few parameters stay float at no cost, unless all pairs of onnxruntime are asked for.
"""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import NORMALIZING, RESIDUAL, rule

#: Operators whose parameters onnxruntime's quantizer stores in codes.
_WITH_PARAMETERS = frozenset({"InstanceNormalization", "LayerNormalization"})


@rule("LayerNormalization", "InstanceNormalization", "BatchNormalization")
@rule(
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    "GroupNormalization",
    "MeanVarianceNormalization",
    "LRN",
)
@rule("com.microsoft::GroupNorm")
def normalization(node: Node, plan: PlanBuilder) -> None:
    """Quantize input and first result; further results (statistics) stay float."""
    # BatchNormalization and InstanceNormalization read no residual stream.
    if node.kind in NORMALIZING and plan.is_low_bit(node):
        plan.keep_node(node, RESIDUAL)
    else:
        plan.activation(node, node.inputs[0], node.outputs[0])
        if node.kind in _WITH_PARAMETERS and plan.asked.all_pairs:
            _parameters(node, plan)


def _parameters(node: Node, plan: PlanBuilder) -> None:
    """Quantize scale and bias as onnxruntime does; engines without float need them in codes."""
    x, scale = node.inputs[:2]
    # That of a LayerNormalization is optional.
    bias = node.input(2)
    if not all(plan.graph.is_constant(name) for name in (scale, bias) if name):
        return
    # onnxruntime gives the scale one scale, also with scales per channel.
    plan.weight(node, scale, axis=None)
    if bias:
        plan.bias(node, bias, x, scale)


@rule("LpNormalization")
def unit_length(node: Node, plan: PlanBuilder) -> None:
    """Quantize the input, and the result with its mathematical range, -1 to 1."""
    plan.activation(node, node.inputs[0])
    plan.activation(node, node.outputs[0], bounds=(-1.0, 1.0))


@rule(
    "com.microsoft::SkipLayerNormalization",
    "com.microsoft::SkipSimplifiedLayerNormalization",
)
def skip_normalization(node: Node, plan: PlanBuilder) -> None:
    """Quantize both summands, result and sum, if the format can hold a residual stream."""
    if plan.is_low_bit(node):
        plan.keep_node(node, RESIDUAL)
    else:
        # Outputs 1 and 2 are statistics, output 3 is the sum of input and skip.
        plan.activation(
            node, node.input(0), node.input(1), *node.outputs[:1], *node.outputs[3:4]
        )


@rule("com.microsoft::SkipGroupNorm")
def skip_group_norm(node: Node, plan: PlanBuilder) -> None:
    """Quantize both summands, result and sum; the bias stays float."""
    # Inputs 1 and 2 are gamma and beta, input 3 is the skip.
    plan.activation(node, node.input(0), node.input(3), *node.outputs[:2])
