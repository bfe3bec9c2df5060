"""Plan the tensors of activation functions."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.graph.matching import alone_reads
from quark_onnx.graph.node import softmax_axis
from quark_onnx.plan import PlanBuilder, fused_into
from quark_onnx.rules.base import (
    follows_floats,
    is_control_tensor,
    kept_before_root,
    rule,
    spare_masked,
)

#: Operators whose result is not quantized before a Relu or Clip that is the only reader.
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
#: Further operators of this kind in the integer engine of a target.
_POOLING = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool"})
#: Further operators of this kind where a kernel rounds to any scale. An integer engine copies the
#: codes of a Concat, and clips them afterwards.
_ROUNDING = frozenset({"Concat"})
#: Further operators of this kind where onnxruntime's quantizer places the pairs.
_NORMALIZING = frozenset({"InstanceNormalization", "LayerNormalization"})


@rule("Relu", "Clip")
def clipping(node: Node, plan: PlanBuilder) -> None:
    """Quantize the result alone if the producer clips by its own rounding.

    Otherwise quantize input and result. The clipped result is the producer's result, too: an
    override that names the producer alone applies to it. A bound of a denominator stays float.
    """
    # The rounded result may be 0 again.
    if kept_before_root(node, plan):
        return
    source = node.inputs[0]
    result = node.outputs[0]
    producer = _computing(node, plan)
    if producer is not None:
        # A pair for the unclipped result would round once more, to a scale for values that the clip
        # removes.
        plan.keep(source, fused_into(node.name, node.op_type).reason)
        named = plan.specs[producer].overridden and not plan.specs[node].overridden
        plan.activation(producer if named else node, result)
    elif not follows_floats(node, plan, source):
        plan.activation(node, source, result)
        if not plan.asked.clipping and _producer(node, plan) is not None:
            # The clip would remove what the pair before it saturates.
            plan.same_as(node, source, result)


def _computing(node: Node, plan: PlanBuilder) -> Node | None:
    """Return the producer that computes the activation, too; otherwise None."""
    # The scale of the clipped range saturates where the clip does.
    if not plan.asked.clipping:
        return None
    return _producer(node, plan)


def _producer(node: Node, plan: PlanBuilder) -> Node | None:
    """Return the producer whose kernel rounds to any scale, if a Relu or Clip alone reads it."""
    source = node.inputs[0]
    if not alone_reads(plan.graph, node, source):
        return None
    producer = plan.graph.producer_of_kind(source, _fusing(node, plan))
    if producer is None or producer.name in plan.kept:
        return None
    return producer


def _fusing(node: Node, plan: PlanBuilder) -> frozenset[str]:
    """Return the operators that compute the activation after them, too."""
    # amd-quark 0.13 writes no pair between a pool and the activation after the pool.
    if plan.aligns:
        return _FUSING | _POOLING
    if plan.integer_only(node):
        return _FUSING
    spec = plan.specs[node].activation
    # Before a clip to symmetric codes, which stays, onnxruntime writes a pair.
    if plan.asked.all_pairs and spec is not None and not spec.symmetric:
        return _FUSING | _ROUNDING | _NORMALIZING
    return _FUSING | _ROUNDING


@rule("LeakyRelu")
def leaky(node: Node, plan: PlanBuilder) -> None:
    """Quantize input and result; the result alone where the target's engine fuses them."""
    if plan.aligns:
        clipping(node, plan)
    else:
        pointwise(node, plan)


@rule("HardSwish", "Gelu", "com.microsoft::Gelu", "com.microsoft::FastGelu")
def pointwise(node: Node, plan: PlanBuilder) -> None:
    """Quantize input and result; the bias that FastGelu may add stays float."""
    plan.activation(node, node.inputs[0], node.outputs[0])


_SMOOTH = ("Elu", "Selu", "Celu", "Mish", "Swish", "Softplus")
_PLAIN = ("Abs", "Neg", "Atan", "Asinh")
_CONTRIBUTED = ("QuickGelu", "ScaledSiLU", "BiasGelu", "BiasSplitGelu")


@rule(*_SMOOTH, *_PLAIN, *(f"com.microsoft::{name}" for name in _CONTRIBUTED))
def smooth(node: Node, plan: PlanBuilder) -> None:
    """Quantize input and result, unless the input is a mask or a position.

    A bias that is added first stays float.
    """
    if not is_control_tensor(node, plan, node.inputs[0]):
        plan.activation(node, node.inputs[0], node.outputs[0])


@rule("PRelu")
def prelu(node: Node, plan: PlanBuilder) -> None:
    """Quantize input, slope and result; no input where the target's engine fuses them."""
    if plan.aligns and _computing(node, plan) is not None:
        clipping(node, plan)
        plan.activation(node, node.inputs[1])
    else:
        plan.activation(node, *node.inputs, node.outputs[0])


@rule("Softmax")
def softmax(node: Node, plan: PlanBuilder) -> None:
    """Quantize the input, and the result with the range 0 to 1.

    Over a single value the result stays float: onnxruntime's 8-bit softmax computes 0 there.
    """
    shape = plan.graph.shape(node.inputs[0])
    result = node.outputs[0]
    if shape and shape[softmax_axis(node, plan.graph.opset)] == 1:
        plan.keep(result, "it is the softmax of a single value")
    unit_interval(node, plan)
    spare_masked(node, plan)


@rule("Sigmoid", "HardSigmoid")
def unit_interval(node: Node, plan: PlanBuilder) -> None:
    """Quantize the input, and the result with its mathematical range, 0 to 1."""
    plan.activation(node, node.inputs[0])
    plan.activation(node, node.outputs[0], bounds=(0.0, 1.0))


@rule("Tanh", "Softsign")
def tanh(node: Node, plan: PlanBuilder) -> None:
    """Quantize the input, and the result with its mathematical range, -1 to 1."""
    plan.activation(node, node.inputs[0])
    plan.activation(node, node.outputs[0], bounds=(-1.0, 1.0))
