"""fixed-shapes: inputs of fixed sizes, and a graph in which no size is left to be computed.

Compilers for accelerators ask for it. A dimension that several inputs share by its name is fixed
for all of them.
"""

from __future__ import annotations

from quark_onnx.convert.base import Settings, conversion, counted, everywhere, reloaded
from quark_onnx.errors import ConfigError
from quark_onnx.graph import Graph, fixed
from quark_onnx.graph.shapes import is_static
from quark_onnx.passes import fold_constants, fold_shapes


@conversion("fixed-shapes", keeps="exactly", reads=["shapes"])
def fixed_shapes(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """Inputs of the sizes of --shape, a batch of 1 without one.

    What was computed of sizes becomes constant.
    """
    graph, notes = fixed(graph, settings.shapes)
    for value in graph.inputs:
        if value.type.WhichOneof("value") in ("tensor_type", None) and not is_static(
            graph.shape(value.name),
        ):
            raise ConfigError(_missing(value.name, graph.shape(value.name)))
    folded = 0
    while count := everywhere(
        graph,
        lambda inner: fold_shapes(inner) + fold_constants(inner),
    ):
        graph, folded = reloaded(graph), folded + count
    notes += [f"{line} folded" for line in counted(folded, "node")]
    dynamic = [
        name
        for node in graph.nodes
        for name in node.outputs
        if name and not is_static(graph.shape(name))
    ]
    if notes and dynamic:
        notes.append(
            f"{len(dynamic)} tensors have sizes that depend on values, {dynamic[0]!r}"
            " the first of them",
        )
    return graph, notes


def _missing(name: str, shape: tuple[int | str | None, ...] | None) -> str:
    """What is missing of the shape of an input, and how to give it."""
    if shape is None:
        return (
            f"nothing is known of the shape of input {name!r}; give it (--shape"
            f" {name}=1,3,224,224)"
        )
    place, size = next(
        (place, size) for place, size in enumerate(shape) if not isinstance(size, int)
    )
    example = ",".join(str(each) if isinstance(each, int) else "N" for each in shape)
    what = f"dimension {size!r}" if size else f"dimension {place}"
    return (
        f"{what} of input {name!r} has no size; give the shape (--shape"
        f" {name}={example})"
    )
