"""Plans for the bodies of If, Loop and Scan.

``plan_bodies`` calls ``make_plan`` for each body; ``plan_at_opset`` calls both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onnx import ModelProto, TensorProto, TypeProto

from calibrators import Statistic
from calibrators.onnx_runtime.control_flow import Control, Scope
from calibrators.onnx_runtime.external_tensors import EXCHANGED
from quark_onnx.config import QConfig
from quark_onnx.graph import Graph, Node, ShapeArithmetic, overridable
from quark_onnx.graph.bodies import Body, bodies
from quark_onnx.graph.operations import CONTROL_FLOW
from quark_onnx.graph.states import State, states
from quark_onnx.plan import (
    EXCLUDED,
    OVERRIDABLE,
    Keep,
    Plan,
    PlanBuilder,
    Quantize,
    Use,
    select,
)
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.planning.states import inner_states

#: Scan had a batch axis before this opset.
_SCAN_OPSET = 9


@dataclass(frozen=True)
class SubgraphPlan:
    """A body with a plan.

    Attributes:
        body: location of the body.
        graph: the body as a separate graph.
        plan: decisions about its tensors.
        body_plans: nested bodies.
        played: whether the body can be run on its own, and therefore be measured.
        ranges: the measured ranges of its tensors.
    """

    body: Body
    graph: Graph
    plan: Plan
    body_plans: list[SubgraphPlan]
    played: bool
    ranges: dict[Use, Statistic] = field(default_factory=dict)


def plan_bodies(
    graph: Graph,
    config: QConfig,
    shapes: ShapeArithmetic | None = None,
    recurrent: Sequence[State] | None = None,
    *,
    measured: bool = True,
) -> list[SubgraphPlan]:
    """Return plans for the bodies of a graph's nodes.

    A body that cannot be measured is planned without measured activations. The outputs of a
    body keep their values: the consumers outside decide.

    Args:
        graph: the graph.
        config: the settings.
        shapes: tensors that are shape arithmetic; None computes them from the graph; pass them
            for subgraphs.
        recurrent: states that persist from step to step; None for the states that the graph's
            interface declares.
        measured: the graph can be run to be measured; the bodies in one that cannot are not run
            either.
    """
    if not config.bodies or not any(node.has_subgraph for node in graph.nodes):
        return []
    # The shape arithmetic of a body continues that of the outer graph: captured sizes count as
    # sizes.
    shapes = shapes or ShapeArithmetic.of(graph)
    outer = states(graph) if recurrent is None else recurrent
    # The main graph has been checked for existing pairs; here they must not raise an error.
    specs = select(graph, config.with_(keep_existing=True), strict=False)
    plans = list[SubgraphPlan]()
    for body in bodies(graph):
        # Bodies of other operators, such as SequenceMap, are not run step by step.
        if body.node.kind not in CONTROL_FLOW or specs[body.node].keep == EXCLUDED:
            continue
        played = _playable(graph, body.node)
        # New names must not hide those of the outer graph, as ONNX forbids.
        inner = Graph(body.model)
        inner.reserve(graph.names)
        inner_shapes = shapes.inside(body)
        carried = inner_states(graph, outer, body)
        decided = make_plan(
            inner,
            config.with_(keep_existing=True),
            strict=False,
            shapes=inner_shapes,
            recurrent=carried,
            measured=measured and played,
        )
        plan = PlanBuilder.of(decided)
        if config.safe:
            _spare_carried(plan, body)
        for name in body.borrowed.intersection(overridable(graph)):
            plan.keep(name, OVERRIDABLE)
        for value in inner.outputs:
            # A second pair inside would round what the consumer outside rounds with its own scale.
            if Use(value.name) in plan.entries:
                plan.entries[Use(value.name)] = Keep("it is an output of the subgraph")
        plans.append(
            SubgraphPlan(
                body,
                inner,
                plan.build(),
                plan_bodies(
                    inner, config, inner_shapes, carried, measured=measured and played
                ),
                played,
            ),
        )
    return plans


def wanted(body_plans: Sequence[SubgraphPlan]) -> list[Quantize]:
    """Return every tensor to quantize in bodies, nested bodies included."""
    entries = [
        entry for body_plan in body_plans for entry in body_plan.plan.entries.values()
    ]
    deeper = [
        entry for body_plan in body_plans for entry in wanted(body_plan.body_plans)
    ]
    return [entry for entry in entries if isinstance(entry, Quantize)] + deeper


def all_plans(body_plans: Sequence[SubgraphPlan]) -> list[Plan]:
    """Return the plans of bodies, nested bodies included."""
    return [
        plan
        for body_plan in body_plans
        for plan in (body_plan.plan, *all_plans(body_plan.body_plans))
    ]


def controls(
    body_plans: Sequence[SubgraphPlan], scopes: Sequence[Scope]
) -> tuple[Control, ...]:
    """Return the control-flow nodes to run, with bodies and observations.

    Args:
        body_plans: the bodies of a graph's nodes.
        scopes: the observations in each of these bodies.

    Returns:
        The nodes with an observation in a body that can be run; others run in onnxruntime.
    """
    # Both branches of an If belong to one node.
    nodes: dict[Node, dict[str, Scope]] = {}
    for body_plan, scope in zip(body_plans, scopes, strict=True):
        if body_plan.played:
            nodes.setdefault(body_plan.body.node, {})[body_plan.body.attribute] = scope
    # A node in whose bodies nothing is observed runs in onnxruntime, faster than step by step.
    return tuple(
        _control(node, node_scopes)
        for node, node_scopes in nodes.items()
        if any(True for scope in node_scopes.values() for _ in scope.flat())
    )


def shapeless(body_plan: SubgraphPlan) -> ModelProto:
    """Return a body as a model with inputs of unknown shape.

    The declared shapes of a body are sometimes wrong.

    Args:
        body_plan: the body; iteration number and condition of a Loop keep their shapes.
    """
    model, node = body_plan.graph.to_model(), body_plan.body.node
    pinned = list[str]()
    if node.kind == "Loop":
        # The iteration number and the condition are scalars by definition.
        pinned = [
            value.name
            for value in model.graph.input
            if value.name not in body_plan.body.borrowed
        ][:2]
    for value in model.graph.input:
        if value.name not in pinned and value.type.WhichOneof("value") == "tensor_type":
            value.type.tensor_type.ClearField("shape")
    return model


def _spare_carried(plan: PlanBuilder, body: Body) -> None:
    """Keep loop-carried values float, as steps of a Loop or Scan share a scale.

    Args:
        plan: the plan of the body; changed in place.
        body: a body of any node; that of an If carries nothing.
    """
    inputs = [
        value.name
        for value in body.model.graph.input
        if value.name not in body.borrowed
    ]
    results = [value.name for value in body.model.graph.output]
    if body.node.kind == "Loop":
        # Body of Loop: inputs (iteration, condition, carried...), outputs (condition, carried...,
        # scanned...), by the ONNX specification.
        carried = inputs[2:] + results[1 : len(inputs) - 1]
    elif body.node.kind == "Scan":
        # Body of Scan: states first in inputs and outputs, then scanned elements.
        states_count = len(inputs) - int(body.node.attribute("num_scan_inputs", 0))
        carried = inputs[:states_count] + results[:states_count]
    else:
        return
    # A dictionary for its order: sets have another order in each process.
    for root in dict.fromkeys(plan.root(Use(tensor)) for tensor in carried):
        entry = plan.entries.get(root)
        if isinstance(entry, Quantize) and entry.spec.measured:
            plan.keep(
                root.tensor,
                "it is carried from step to step, and its range may change at each",
            )


def _playable(graph: Graph, node: Node) -> bool:
    """Return whether the bodies of a node can be run step by step, outside of onnxruntime."""
    if node.kind == "Scan" and graph.opset < _SCAN_OPSET:
        return False
    return all(
        _is_exchanged(value.type)
        for body in bodies(graph, node)
        for value in body.model.graph.input
    )


def _is_exchanged(kind: TypeProto) -> bool:
    """Return whether onnxruntime exchanges values of a type with numpy."""
    value = kind.WhichOneof("value")
    if value != "tensor_type":
        # Sequences, maps and optionals arrive as lists, dictionaries or None.
        return value is not None
    return kind.tensor_type.elem_type in EXCHANGED | {TensorProto.STRING}


def _control(node: Node, scopes: dict[str, Scope]) -> Control:
    """Return a control-flow node with bodies, for the run step by step.

    Args:
        node: the If, Loop or Scan.
        scopes: the observations of its bodies, by attribute name.
    """
    if node.kind == "Loop":
        # Trailing optional inputs (trip count, condition) may be missing; readers expect both.
        inputs = node.inputs + ("",) * (2 - len(node.inputs))
    else:
        inputs = node.inputs
    if node.kind != "Scan":
        return Control(node.name, node.kind, inputs, scopes)
    count = node.attribute("num_scan_inputs", 0)
    axes = tuple(node.attribute("scan_input_axes", [0] * count))
    backwards = tuple(map(bool, node.attribute("scan_input_directions", [0] * count)))
    return Control(node.name, node.kind, inputs, scopes, count, axes, backwards)
