"""output_steps: the step of each output in the output's own unit.

A signal-to-noise ratio does not show the loss of a box: a step of four pixels is 48 dB below an
image of 1,000 pixels, and is as wide as a small face.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quark_onnx.graph import Graph, reach
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
    widest = {value.name: _widest(graph, value.name, steps) for value in graph.outputs}
    return {key: value for key, value in widest.items() if value is not None}


def _widest(
    graph: Graph,
    output: str,
    steps: Mapping[str, float | None],
) -> float | None:
    """Return the widest step on the way back to tensors that have one.

    Args:
        graph: the float model.
        steps: step of each compared tensor; None without a uniform grid.
    """

    def sources(tensor: str) -> Iterable[str]:
        # A tensor with a step ends the walk: its own grid decides, whatever is before it.
        node = graph.producer_of_kind(tensor, HANDING_ON | {"Concat"})
        if node is None or steps.get(tensor) is not None:
            return ()
        # Further inputs of the moving operators are shapes and indices.
        return node.inputs if node.kind == "Concat" else node.inputs[:1]

    widths = map(steps.get, reach([output], sources))
    return max((width for width in widths if width is not None), default=None)
