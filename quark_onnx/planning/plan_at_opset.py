"""Plan a graph and its bodies at the opset that their formats need.

This is the last step of planning, and calls all others: ``make_plan`` for the graph,
``plan_bodies`` (which calls ``make_plan``) for its bodies, and ``raise_opset_for`` with both. None
of them calls back.

The formats of a plan decide the opset, and the opset decides what the converter makes of the graph.
A draft of the plan therefore comes first. It is the plan where no other opset is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quark_onnx.config import QConfig
from quark_onnx.dtypes import BODY_OPSET
from quark_onnx.graph import Graph
from quark_onnx.plan import Entry, Keep, Plan, Quantize, Use
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.planning.opsets import raise_opset_for
from quark_onnx.planning.subgraph_plans import SubgraphPlan, plan_bodies, wanted
from quark_onnx.running.run import Reference, Sample


@dataclass(frozen=True)
class PlannedGraph:
    """A graph with its plan, at the opset of the result.

    Attributes:
        graph: the graph; the given one if its opset suffices.
        plan: the plan of the graph.
        body_plans: the plans of bodies, in which a format that the opset lacks is given up.
        notes: notes for the report.
    """

    graph: Graph
    plan: Plan
    body_plans: list[SubgraphPlan]
    notes: list[str]


def raise_to_formats(
    graph: Graph, config: QConfig, reference: Reference, sample: Sample | None
) -> tuple[Graph, list[str]]:
    """Return a graph at the opset that its formats need, without its plan, and notes.

    The arguments, the errors and the graph are those of ``plan_at_opset``.
    """
    return _raised(graph, _draft(graph, config), config, reference, sample)


def plan_at_opset(
    graph: Graph,
    config: QConfig,
    reference: Reference,
    sample: Sample | None,
    *,
    bodies: bool = True,
) -> PlannedGraph:
    """Return a graph at the opset that its formats need, and the plan.

    Args:
        graph: the float graph, which is not changed.
        config: the settings.
        reference: the float model.
        sample: a sample for the comparison of both opsets; None for none.
        bodies: plan bodies, too; their formats count for the opset.

    Raises:
        ModelError: the com.microsoft domain lacks a format as well.
        ConfigError: a higher opset would help, and the config forbids it.
    """
    draft = _draft(graph, config, bodies=bodies)
    raised, notes = _raised(graph, draft, config, reference, sample)
    # Identity: raise_opset_for returns the same object where nothing was converted.
    if raised is not graph:
        # The converter rewrites operators whose meaning changes: decisions of the draft name nodes
        # and tensors that may be gone.
        draft = _draft(raised, config, bodies=bodies)
    plan, body_plans = draft
    body_plans = _kept_to_opset(body_plans, vendor=config.form == "vendor")
    return PlannedGraph(raised, plan, body_plans, notes)


def _draft(
    graph: Graph, config: QConfig, *, bodies: bool = True
) -> tuple[Plan, list[SubgraphPlan]]:
    """Return the plans of a graph and of its bodies at its own opset."""
    # Patterns were checked on the user's graph (``strict``); rewrites may have removed nodes they
    # name.
    plan = make_plan(graph, config, strict=False)
    return plan, plan_bodies(graph, config) if bodies else []


def _raised(
    graph: Graph,
    draft: tuple[Plan, list[SubgraphPlan]],
    config: QConfig,
    reference: Reference,
    sample: Sample | None,
) -> tuple[Graph, list[str]]:
    """Return a graph at the opset that the formats of its plans need, and notes."""
    plan, body_plans = draft
    return raise_opset_for(graph, plan, config, reference, sample, wanted(body_plans))


def _kept_to_opset(
    body_plans: Sequence[SubgraphPlan], *, vendor: bool
) -> list[SubgraphPlan]:
    """Return plans of bodies with float tensors where the final opset lacks a format.

    Args:
        body_plans: the plans of bodies, at the final opset of the model; not changed.
        vendor: the vendor's operators are written, which need function bodies.

    Returns:
        The plans in the same order, nested bodies included.
    """
    plans = list[SubgraphPlan]()
    for body_plan in body_plans:
        opset = body_plan.graph.opset
        changes: dict[Use, Entry] = {}
        for use, entry in body_plan.plan.entries.items():
            if not isinstance(entry, Quantize):
                continue
            # The vendor's operators need function bodies whatever the format.
            least = max(entry.min_opset, BODY_OPSET * vendor)
            if least > opset and (vendor or not entry.contributed):
                changes[use] = Keep(
                    f"the model's opset is {opset}, the format needs {least}",
                )
        plan = body_plan.plan.revised(changes)
        inner = _kept_to_opset(body_plan.body_plans, vendor=vendor)
        plans.append(replace(body_plan, plan=plan, body_plans=inner))
    return plans
