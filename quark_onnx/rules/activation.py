"""Activation functions."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.graph.node import softmax_axis
from quark_onnx.plan import Plan, fused_into
from quark_onnx.rules.base import is_control_tensor, rule, spare_masked

#: Operators whose result need not be quantized before a Relu or Clip that alone reads it.
_FUSING = frozenset(
    {
        "Conv",
        "ConvTranspose",
        "Gemm",
        "MatMul",
        "Add",
        "Sub",
        "Mul",
        "BatchNormalization",
    },
)
#: The same in the integer engine of a target.
_POOLING = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool"})


@rule("Relu", "Clip")
def clipping(node: Node, plan: Plan) -> None:
    """The result alone if a producer can do the clipping within its own rounding.

    Else input and result.

    It is then the producer's result, too, and an override that names the producer alone is meant
    for it.
    """
    source, result = node.inputs[0], node.outputs[0]
    producer = _computing(node, plan)
    if producer is not None:
        plan.keep(source, fused_into(node.name, node.op_type).reason)
        named = plan.specs[producer].overridden and not plan.specs[node].overridden
        plan.activation(producer if named else node, result)
    else:
        plan.activation(node, source, result)


def _computing(node: Node, plan: Plan) -> Node | None:
    """What computes an activation together with its own result; None if it is computed apart."""
    if not plan.asked.clipping:
        return None
    source = node.inputs[0]
    producer = plan.graph.producer(source)
    alone = plan.graph.consumers(source) == [node] and not plan.graph.is_output(source)
    fusing = _FUSING | _POOLING if plan.aligns else _FUSING
    return (
        producer
        if producer
        and alone
        and producer.kind in fusing
        and producer.name not in plan.kept
        else None
    )


@rule("LeakyRelu")
def leaky(node: Node, plan: Plan) -> None:
    """Input and result.

    The result alone where the engine of a target computes it with what is in front.
    """
    (clipping if plan.aligns else pointwise)(node, plan)


@rule("HardSwish", "Gelu", "com.microsoft::Gelu", "com.microsoft::FastGelu")
def pointwise(node: Node, plan: Plan) -> None:
    """Input and result; the bias that FastGelu may add stays float."""
    plan.activation(node, node.inputs[0], node.outputs[0])


_SMOOTH = ("Elu", "Selu", "Celu", "Mish", "Swish", "Softplus")
_PLAIN = ("Abs", "Neg", "Atan", "Asinh")
_CONTRIBUTED = ("QuickGelu", "ScaledSiLU", "BiasGelu", "BiasSplitGelu")


@rule(*_SMOOTH, *_PLAIN, *(f"com.microsoft::{name}" for name in _CONTRIBUTED))
def smooth(node: Node, plan: Plan) -> None:
    """Input and result, unless the input is a mask or a position.

    A bias that is added first stays float.
    """
    if not is_control_tensor(node, plan, node.inputs[0]):
        plan.activation(node, node.inputs[0], node.outputs[0])


@rule("PRelu")
def prelu(node: Node, plan: Plan) -> None:
    """Input, slope and result.

    No input where the engine of a target computes it with what is in front.
    """
    if plan.aligns and _computing(node, plan) is not None:
        clipping(node, plan)
        plan.activation(node, node.inputs[1])
    else:
        plan.activation(node, *node.inputs, node.outputs[0])


@rule("Softmax")
def softmax(node: Node, plan: Plan) -> None:
    """Input, and a result between 0 and 1.

    Float over a single value, of which onnxruntime's 8-bit softmax makes 0.
    """
    shape, result = plan.graph.shape(node.inputs[0]), node.outputs[0]
    if shape and shape[softmax_axis(node, plan.graph.opset)] == 1:
        plan.keep(result, "it is the softmax of a single value")
    unit_interval(node, plan)
    spare_masked(node, plan)


@rule("Sigmoid", "HardSigmoid")
def unit_interval(node: Node, plan: Plan) -> None:
    """Input, and a result that lies between 0 and 1 by definition."""
    plan.activation(node, node.inputs[0])
    plan.activation(node, node.outputs[0], bounds=(0.0, 1.0))


@rule("Tanh", "Softsign")
def tanh(node: Node, plan: Plan) -> None:
    """Input, and a result that lies between -1 and 1 by definition."""
    plan.activation(node, node.inputs[0])
    plan.activation(node, node.outputs[0], bounds=(-1.0, 1.0))
