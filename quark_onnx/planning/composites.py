"""Float arithmetic within functions that exporters write as several operators.

Opsets before 17 have no LayerNormalization, those before 20 no Gelu, and no opset below 23 has a
normalization by the root mean square. Quantized one by one, the mean of the squares of a
normalization has few codes for the small values that decide the result: a vision transformer
(DeiT) has 7 dB then, and 29 dB with the operator. onnxruntime fuses the operators into one where
nothing is rounded in between.
"""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.patterns.composites import composites
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import NORMALIZES


def spare_composites(plan: PlanBuilder) -> None:
    """Keep the operators of a decomposed function float, before rules are applied.

    What enters and leaves the function is quantized as the operators around it request.
    """
    for composite in composites(plan.graph):
        reason = f"it is a part of a decomposed {composite.function}"
        if composite.over_channels:
            reason = NORMALIZES
        if any(_is_rounded(plan, node) for node in composite.nodes):
            for node in composite.nodes:
                plan.keep_node(node, reason)


def _is_rounded(plan: PlanBuilder, node: Node) -> bool:
    """Return whether the activations of a node get scales.

    An engine for a format without scales, such as bfloat16, computes each operator in the format.
    """
    spec = plan.specs[node].activation
    return spec is not None and not spec.dynamic and spec.dtype.scaled
