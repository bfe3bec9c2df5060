"""Float arithmetic for values that are read as integers, positions or decisions."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.graph.decisions import Decision, is_layer
from quark_onnx.plan import PlanBuilder, looks_up


def spare_decisions(plan: PlanBuilder) -> None:
    """Keep float what nothing but decisions read, before rules are applied.

    The nodes that compute such values stay float, back to the last layer with weights. The layer
    itself is quantized, its result is not. Engines that round every result (power-of-two scales,
    formats without a scale, targets) keep their format for values that a layer computes, as the
    layer could not run there otherwise; labels and positions that no layer computes stay float
    for them, too.
    """
    for value in plan.graph.inputs:
        _spare_tensor(plan, value.name, plan.graph.consumers(value.name))
    for node in plan.graph.nodes:
        decisions = list[Decision]()
        for name in node.results:
            nodes = [node, *plan.graph.consumers(name)]
            decision = _spare_tensor(plan, name, nodes)
            if decision is not None:
                decisions.append(decision)
        if decisions and not is_layer(node.kind) and not _computes_signal(plan, node):
            _spare_node(plan, node, decisions[0].reason)


def _spare_tensor(plan: PlanBuilder, name: str, nodes: list[Node]) -> Decision | None:
    """Keep a tensor float if only decisions read it; return the decision, otherwise None.

    Args:
        plan: the plan under construction; changed in place.
        nodes: the nodes that compute and read the tensor.
    """
    decision = plan.shapes.decision(name)
    if decision is None or plan.ineligible(name):
        return None
    if decision.layered and _is_rounded(plan, nodes):
        return None
    # Without static activations nothing would round the tensor, and no reason is needed.
    if any(map(plan.static, nodes)):
        plan.keep(name, decision.reason)
    return decision


def _is_rounded(plan: PlanBuilder, nodes: list[Node]) -> bool:
    """Return whether the engine of a node rounds what a layer computes, or is asked to."""
    asked = not plan.safe or plan.asked.like_onnxruntime
    return asked or plan.aligns or any(map(plan.rounds_results, nodes))


def _computes_signal(plan: PlanBuilder, node: Node) -> bool:
    """Return whether a node has a further result that is read as a signal."""
    graph = plan.graph
    return any(
        plan.shapes.decision(name) is None and not plan.ineligible(name)
        for name in node.results
        if graph.consumers(name) or graph.is_output(name)
    )


def _spare_node(plan: PlanBuilder, node: Node, reason: str) -> None:
    """Keep a node float with its constants, unless it has a reason or nothing to quantize."""
    if node.name in plan.kept:
        return
    table = looks_up(plan.graph, node) and plan.specs[node].weight is not None
    if not (plan.static(node) or table):
        return
    plan.keep_node(node, reason)
    # Other readers may request a constant that the node reads, too.
    for name in filter(plan.graph.is_constant, node.operands):
        plan.keep_for(node, name, reason)


def is_decided(plan: PlanBuilder, node: Node) -> bool:
    """Return whether a node stays float because nothing but decisions read its results."""
    reason = plan.kept.get(node.name)
    decided = filter(None, map(plan.shapes.decision, node.results))
    return any(decision.reason == reason for decision in decided)
