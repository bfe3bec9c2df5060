"""output_steps: the step of each output in the output's own unit.

A signal-to-noise ratio does not show the loss of a box: a step of four pixels is 48 dB below an
image of 1,000 pixels, and is as wide as a small face.
"""

from __future__ import annotations

from collections.abc import Mapping

from quark_onnx.containers import excluding, present_values
from quark_onnx.graph import Graph
from quark_onnx.rules.passthrough import HANDING_ON


def output_steps(graph: Graph, steps: Mapping[str, float | None]) -> dict[str, float]:
    """Return the widest step of the grids of each output.

    Outputs without a step are omitted. An output that only moves values (Concat, Reshape, Slice,
    ...) has the steps of its source tensors.

    Args:
        graph: the float model.
        steps: step of each compared tensor; None without a uniform grid.

    Returns:
        The step of each output, by name.
    """
    found = {value.name: _widest(graph, value.name, steps) for value in graph.outputs}
    return present_values(found)


def _widest(
    graph: Graph,
    output: str,
    steps: Mapping[str, float | None],
) -> float | None:
    widest: float | None = None
    todo = [output]
    seen = {output}
    while todo:
        tensor = todo.pop()
        step = steps.get(tensor)
        if step is not None:
            widest = max(step, widest or 0.0)
            continue
        node = graph.producer(tensor)
        if node is None or node.kind not in HANDING_ON | {"Concat"}:
            continue
        inputs = node.inputs if node.kind == "Concat" else node.inputs[:1]
        todo += excluding(inputs, seen)
        seen.update(inputs)
    return widest
