"""Plan a graph at the opset that its formats need.

The formats of a plan decide the opset, and the opset decides what the converter makes of the graph.
A draft of the plan therefore comes first. It is the plan where no other opset is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.config import QConfig
from quark_onnx.graph import Graph
from quark_onnx.plan import Plan
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.planning.opsets import raise_opset_for
from quark_onnx.planning.subgraph_plans import SubgraphPlan, plan_insides, wanted
from quark_onnx.running.run import Reference, Sample


@dataclass(frozen=True)
class PlannedGraph:
    """A graph with its plan, at the opset of the result.

    Attributes:
        graph: the graph; the given one if its opset suffices.
        plan: the plan of the graph.
        insides: the plans of bodies.
        notes: notes for the report.
    """

    graph: Graph
    plan: Plan
    insides: list[SubgraphPlan]
    notes: list[str]


def plan_at_opset(
    graph: Graph,
    config: QConfig,
    reference: Reference,
    sample: Sample | None,
    *,
    inside: bool = True,
) -> PlannedGraph:
    """Return a graph at the opset that its formats need, and the plan.

    Args:
        graph: the float graph, which is not changed.
        config: the settings.
        reference: the float model.
        sample: a sample for the comparison of both opsets; None for none.
        inside: plan bodies, too; their formats count for the opset.

    Raises:
        ModelError: the com.microsoft domain lacks a format as well.
        ConfigError: a higher opset would help, and the config forbids it.
    """
    # Patterns were checked on the user's graph (``strict``); rewrites may have removed nodes they
    # name.
    draft = make_plan(graph, config, strict=False)
    insides = plan_insides(graph, config) if inside else []
    raised, notes = raise_opset_for(
        graph, draft, config, reference, sample, wanted(insides)
    )
    # Identity: raise_opset_for returns the same object where nothing was converted.
    if raised is graph:
        return PlannedGraph(graph, draft, insides, notes)
    # The converter rewrites operators whose meaning changes: decisions of the draft name nodes and
    # tensors that may be gone.
    plan = make_plan(raised, config, strict=False)
    return PlannedGraph(
        raised, plan, plan_insides(raised, config) if inside else [], notes
    )
