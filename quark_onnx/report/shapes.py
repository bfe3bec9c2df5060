"""Checks of output shapes, which quantization must preserve."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onnx import ModelProto

from quark_onnx.check.inlined import inlined
from quark_onnx.common.errors import ModelError
from quark_onnx.graph import Graph, ShapeArithmetic
from quark_onnx.report.measure import OutputError


def other_shape(what: str, reference: str, other: str) -> ModelError:
    """Return the error for a tensor whose shape differs from the float model's.

    Args:
        what: the kind of the tensor and its name.
        reference: the shape in the float model.
        other: the shape in the quantized model.
    """
    return ModelError(
        f"{what} has shape {other} in the quantized model and {reference} in the float"
        " model: a value that computes the shape was rounded; exclude the nodes that"
        " compute it",
    )


def require_same_shapes(
    errors: Iterable[OutputError],
    sized_by_data: Callable[[str], bool],
) -> None:
    """Raise an error for the first output whose shape differs from the float model's.

    Args:
        errors: the outputs as measured.
        sized_by_data: returns whether values of a signal decide the shape of an output, as in a
            detector that selects boxes. Such an output may change its shape.

    Raises:
        ModelError: the shape of an output differs.
    """
    for error in errors:
        # sized_by_data indexes the whole graph, and is asked for differing shapes alone.
        if error.shapes is not None and not sized_by_data(error.name):
            raise other_shape(f"output {error.name!r}", *error.shapes)


def sized_by_data(model: ModelProto, output: str) -> bool:
    """Return whether values of a signal decide the shape of a float output."""
    return ShapeArithmetic.of(Graph.of(inlined(model))).sized_by_data(output)
