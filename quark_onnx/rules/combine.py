"""Plan the tensors of operators that join tensors: Concat, Pad, Scatter."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.graph.matching import keeps_range
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import control, is_control_tensor, rule


@rule("Concat")
def concat(node: Node, plan: PlanBuilder) -> None:
    """Quantize every input and the result, with separate scales.

    Pieces of a float input of the model are joined first, so that values are rounded once.
    onnxruntime then computes the slices of a Focus layer as one SpaceToDepth.
    """
    # One such input decides: a single scale of the result would span a mask and a signal.
    for name in node.inputs:
        if control(plan.graph, name) or plan.holds_mask_constants(name):
            plan.keep_node(node, f"{name!r} is a mask or a position, not a signal")
            return
    if _joins_pieces_of_inputs(node, plan):
        plan.activation(node, node.outputs[0])
    else:
        plan.activation(node, *node.inputs, node.outputs[0])
        plan.align(node)


def _joins_pieces_of_inputs(node: Node, plan: PlanBuilder) -> bool:
    """Return whether all tensors are slices of the model's inputs, which stay float.

    Integer engines, and power-of-two scales, which are meant for one, need rounded pieces.
    """
    if not plan.safe or plan.aligns:
        return False
    spec = plan.specs[node].activation
    if spec is None or spec.pow2 or plan.rounds_results(node):
        return False
    return all(_is_piece_of_input(tensor, plan) for tensor in node.inputs)


def _is_piece_of_input(tensor: str, plan: PlanBuilder) -> bool:
    """Return whether a float tensor is sliced from an input of the model, once or repeatedly.

    Args:
        plan: the plan, in which nodes before this one have been planned.
    """
    # An input that is joined as a whole, without a Slice, is no piece.
    sliced = False
    while not plan.quantized(tensor):
        producer = plan.graph.producer(tensor)
        if producer is None:
            return sliced and plan.graph.is_input(tensor)
        if producer.kind != "Slice":
            return False
        sliced = True
        tensor = producer.inputs[0]
    return False


@rule("Pad")
def pad(node: Node, plan: PlanBuilder) -> None:
    """Share the input's scale; use another scale if the padding value is not zero."""
    if keeps_range(plan.graph, node):
        plan.same_as(node, node.outputs[0], node.inputs[0])
    elif plan.holds_mask_constants(node.input(2)):
        plan.keep_node(node, "it pads with a value that means 'never'")
    else:
        plan.activation(node, node.inputs[0], node.outputs[0])


@rule("ScatterElements", "ScatterND", "TensorScatter")
def scatter(node: Node, plan: PlanBuilder) -> None:
    """Quantize data, updates and result with separate scales, except masks."""
    # TensorScatter reads (past cache, update, indices), the others (data, indices, updates).
    updates = node.input(1 if node.kind == "TensorScatter" else 2)
    if not is_control_tensor(node, plan, node.inputs[0], updates):
        plan.activation(node, node.inputs[0], updates, node.outputs[0])
