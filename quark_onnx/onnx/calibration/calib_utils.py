"""Ranges of tensors that operators such as Reshape pass on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import ModelProto


def nearest_non_passthrough_ancestor_mapping(
    model: ModelProto, passthrough_node_types: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Return, for each result of operators that pass values on, the tensor that it comes from.

    Args:
        model: the model, with its nodes in order of execution.
        passthrough_node_types: operator types whose first input has the values of the result.

    Returns:
        Results -> the nearest tensor before these operators, and the types of operators that have
        no input.
    """
    sources = dict[str, str]()
    without_input = list[str]()
    for node in model.graph.node:
        if node.op_type not in passthrough_node_types:
            continue
        if node.input:
            source = sources.get(node.input[0], node.input[0])
            sources.update(dict.fromkeys(node.output, source))
        elif node.op_type not in without_input:
            without_input.append(node.op_type)
    return sources, without_input


def update_tensors_range_with_dependencies(
    tensors_range: Any, dependencies: Mapping[str, str]
) -> Any:
    """Return ranges in which dependent tensors have the range of their source.

    Args:
        tensors_range: the ranges, a ``TensorsData`` of onnxruntime, which is not changed.
        dependencies: tensor -> its source. A source without a range is ignored.
    """
    from onnxruntime.quantization.calibrate import TensorsData

    given = tensors_range.data
    ranges = {name: data.range_value for name, data in given.items()}
    for tensor, source in dependencies.items():
        if source in given:
            ranges[tensor] = given[source].range_value
    return TensorsData(tensors_range.calibration_method, ranges)
