"""Plan the tensors of functions that degrade with few input codes.

No runtime has an integer form of them.
"""

from __future__ import annotations

from quark_onnx.dtypes import BFLOAT16
from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import is_control_tensor, kept_float, rule, spare_masked

_FACTORS = "small and large results differ by factors, which evenly spaced codes do not tell apart"
POLE = "it is steepest where its input is smallest, and few codes do not tell small values apart"
_EDGE = "it is steepest at the ends of its domain, which rounding may leave"
_ANGLE = "an angle of many turns leaves few codes to one turn"
_JUMP = "it jumps: a step of the input decides between two values"
_REMAINDER = "no engine without float32 computes a remainder, but that for bfloat16"
_PRODUCT = "errors multiply with each factor"
_SCORES = "it is the logarithm of probabilities, whose differences count"
_PART = (
    "it is the inner part of a decomposed Gelu, whose errors the rest of it multiplies"
)

_WHY = {
    **dict.fromkeys(("Exp", "Pow", "Sinh", "Cosh"), _FACTORS),
    **dict.fromkeys(("Log", "Sqrt", "Reciprocal", "ReduceLogSum"), POLE),
    **dict.fromkeys(("Asin", "Acos", "Acosh", "Atanh"), _EDGE),
    **dict.fromkeys(("Sin", "Cos", "Tan"), _ANGLE),
    **dict.fromkeys(
        ("Ceil", "Floor", "Round", "Sign", "Hardmax", "ThresholdedRelu", "Shrink"),
        _JUMP,
    ),
    **dict.fromkeys(("ReduceProd", "CumProd"), _PRODUCT),
    **dict.fromkeys(("LogSoftmax", "ReduceLogSumExp"), _SCORES),
    "Erf": _PART,
}
_BOUNDS = {
    **dict.fromkeys(("Sin", "Cos", "Sign", "Erf"), (-1.0, 1.0)),
    "Hardmax": (0.0, 1.0),
}


@rule(*_WHY)
def sensitive(node: Node, plan: PlanBuilder) -> None:
    """Keep float where possible; otherwise quantize input and result."""
    source = node.inputs[0]
    if is_control_tensor(node, plan, source):
        return
    if kept_float(node, plan, _WHY[node.kind]):
        return
    # An exponent, a divisor or an axis stays float.
    plan.activation(node, source)
    plan.activation(node, node.outputs[0], bounds=_BOUNDS.get(node.kind))
    # As Softmax, both read scores that a mask may be part of.
    if node.kind in ("Exp", "LogSoftmax"):
        spare_masked(node, plan)


@rule("Mod")
def remainder(node: Node, plan: PlanBuilder) -> None:
    """Quantize input and result for engines with a Mod; keep float elsewhere.

    Of the engines without float32, only the one for bfloat16 has Mod.
    """
    if is_control_tensor(node, plan, node.inputs[0]) or kept_float(node, plan, _JUMP):
        return
    if _lacks_mod(node, plan):
        plan.keep_node(node, _REMAINDER)
    else:
        plan.activation(node, node.inputs[0], node.outputs[0])


def _lacks_mod(node: Node, plan: PlanBuilder) -> bool:
    """Return whether the engine of a node has no float32, and no Mod in its own format."""
    spec = plan.specs[node].activation
    if spec is None or not plan.rounds_results(node):
        return False
    return spec.dtype is not BFLOAT16
