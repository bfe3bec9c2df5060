"""fixed-shapes: fix the sizes of inputs, and fold the shape computations.

Compilers for accelerators require static shapes. A dimension that several inputs share by name is
fixed for all of them.
"""

from __future__ import annotations

from quark_onnx.check.static_shapes import fixed
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.wording import counted as with_noun
from quark_onnx.convert.base import (
    ConversionSettings,
    conversion,
    counted,
    everywhere,
    reloaded,
)
from quark_onnx.graph import Graph
from quark_onnx.passes import fold_constants, fold_shapes


@conversion("fixed-shapes", keeps="exactly", reads=["shapes"])
def fixed_shapes(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Fix the sizes of inputs to --shape, with a batch of 1 by default.

    Values computed from sizes become constants.
    """
    graph, notes = fixed(graph, settings.shapes)
    _check_inputs(graph)
    folded = 0
    # Folded constants make further shapes static, which can be folded in turn.
    while count := everywhere(graph, _fold):
        graph = reloaded(graph)
        folded += count
    notes += counted(folded, "node", "folded")
    dynamic = [name for name in graph.results() if not graph.has_static_shape(name)]
    if notes and dynamic:
        notes.append(
            f"{with_noun(len(dynamic), 'tensor has', 'tensors have')} sizes that depend on"
            f" values, {dynamic[0]!r} the first of them",
        )
    return graph, notes


def _check_inputs(graph: Graph) -> None:
    """Raise ConfigError if a size of an input is open; sequences and optionals have none."""
    for value in graph.inputs:
        # A value without a declared type may be a tensor.
        may_be_tensor = value.type.WhichOneof("value") in ("tensor_type", None)
        if may_be_tensor and not graph.has_static_shape(value.name):
            raise ConfigError(_missing(value.name, graph.shape(value.name)))


def _fold(graph: Graph) -> int:
    """Fold shape computations and constants in place; return the number of folded nodes."""
    return fold_shapes(graph) + fold_constants(graph)


def _missing(name: str, shape: tuple[int | str | None, ...] | None) -> str:
    """Return a message on the missing part of an input's shape, and how to give it.

    Args:
        shape: dimensions, at least one of which is open; None for an unknown rank.
    """
    if shape is None:
        return (
            f"nothing is known of the shape of input {name!r}; give it (--shape"
            f" {name}=1,3,224,224)"
        )
    # The caller has found an open size.
    axis = next(axis for axis, size in enumerate(shape) if not isinstance(size, int))
    example = ",".join(str(size) if isinstance(size, int) else "N" for size in shape)
    what = f"dimension {shape[axis]!r}" if shape[axis] else f"dimension {axis}"
    return (
        f"{what} of input {name!r} has no size; give the shape (--shape"
        f" {name}={example})"
    )
