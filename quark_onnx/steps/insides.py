"""insides: quantize inside the bodies of If, Loop and Scan, as far as it takes no measuring."""

from __future__ import annotations

from dataclasses import replace

from quark_onnx.config import Override, QConfig
from quark_onnx.graph import Graph
from quark_onnx.graph.bodies import bodies, put_back
from quark_onnx.plan import EXCLUDED, Keep, Quantize, select
from quark_onnx.steps.insert import insert
from quark_onnx.steps.make_plan import make_plan
from quark_onnx.steps.prepare import contributed
from quark_onnx.steps.solve import solve, solve_biases

_CONTROL = frozenset({"If", "Loop", "Scan"})


def quantize_insides(graph: Graph, config: QConfig) -> list[str]:
    """Quantize the bodies of a quantized graph in place; what was done, for the report.

    Weights are quantized wherever they are, and activations where their format needs no range. Ranges of activations
    are not measured inside a body: those that need one stay float there.
    """
    if not any(node.has_subgraph for node in graph.nodes):
        return []
    unmeasured = _unmeasured(config).with_(keep_existing=True)
    excluded = {node.name for node, spec in select(graph, unmeasured, strict=False).items() if spec.keep == EXCLUDED}
    notes = []
    for body in list(bodies(graph)):
        if body.node.kind not in _CONTROL or body.node.name in excluded:
            continue
        inner = Graph(body.model)
        inner.reserve(graph.names)
        plan = make_plan(inner, unmeasured, strict=False)
        for value in inner.outputs:  # what a body hands out keeps its value; what reads it outside decides
            for use in [use for use in plan.entries if use.tensor == value.name and use.node is None]:
                plan.entries[use] = Keep("a body hands it out")
        for use, entry in list(plan.entries.items()):
            if isinstance(entry, Quantize) and entry.min_opset > inner.opset and not contributed(entry):
                plan.entries[use] = Keep(f"the model's opset is {inner.opset}, the format needs {entry.min_opset}")
        params = solve(inner, plan, {})
        solve_biases(inner, plan, params)
        result = insert(inner, plan, params, vendor=config.form == "vendor")
        deeper = quantize_insides(result, config)
        count = sum(isinstance(entry, Quantize) for entry in plan.entries.values())
        if count or deeper:
            put_back(graph, body, result)
            notes += [f"{count} tensors inside {body.node.name!r} ({body.attribute})"] if count else []
            notes += deeper
    return notes


def _unmeasured(config: QConfig) -> QConfig:
    """The settings without activations whose range would have to be measured."""
    overrides = list[Override]()
    for override in config.overrides:
        if override.activation is None or not override.activation.measured:
            overrides.append(override)
        elif override.weight is not None:
            overrides.append(replace(override, activation=None))
    activation = config.activation if config.activation and not config.activation.measured else None
    return config.with_(activation=activation, overrides=tuple(overrides))
