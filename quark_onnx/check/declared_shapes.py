"""Correct declared shapes that contradict the operators of a model.

Exporters write wrong ones: files of Paddle declare outputs of rank 3 with an empty shape. Runtimes
trust their own inference and only warn, until a rewrite lets them read the declaration. Shapes of
inputs are not corrected: they are what callers have to feed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto, helper

from calibrators.shown import short
from quark_onnx.common.wording import counted
from quark_onnx.graph.shapes import (
    has_shape,
    infer_values,
    is_tensor,
    sizes_of,
    without_parameters,
)
from quark_onnx.graph.traversal import copy_fields


def contradicted_shapes(model: ModelProto) -> dict[str, ValueInfoProto]:
    """Return the inferred declarations of results that are declared with other shapes, by name."""
    declared = {
        value.name: value
        for value in (*model.graph.value_info, *model.graph.output)
        if is_tensor(value) and has_shape(value)
    }
    if not declared:
        return {}
    skeleton = ModelProto()
    copy_fields(model, skeleton, but="graph")
    skeleton.graph.name = model.graph.name
    skeleton.graph.node.extend(map(without_parameters, model.graph.node))
    skeleton.graph.input.extend(model.graph.input)
    # By name alone: onnx keeps a declared shape where it infers another.
    for value in model.graph.output:
        skeleton.graph.output.add(name=value.name)
    inferred = infer_values(skeleton, model.graph.initializer)
    return {
        name: inferred[name]
        for name, value in declared.items()
        if name in inferred and _contradict(value, inferred[name])
    }


def _contradict(declared: ValueInfoProto, inferred: ValueInfoProto) -> bool:
    """Return whether two declarations differ in the rank, or in a size that both know."""
    if not is_tensor(inferred) or not has_shape(inferred):
        return False
    old, new = sizes_of(declared), sizes_of(inferred)
    if len(old) != len(new):
        return True
    return any(
        isinstance(before, int) and isinstance(after, int) and before != after
        for before, after in zip(old, new, strict=True)
    )


def correct_shapes(
    model: ModelProto,
    inferred: Mapping[str, ValueInfoProto],
) -> list[str]:
    """Correct the shapes of outputs and drop those of inner tensors, in place; return notes.

    Args:
        model: the model.
        inferred: the result of ``contradicted_shapes``.
    """
    notes = list[str]()
    for value in model.graph.output:
        if value.name not in inferred:
            continue
        before = list(sizes_of(value))
        value.type.tensor_type.shape.CopyFrom(
            inferred[value.name].type.tensor_type.shape,
        )
        notes.append(
            f"output {value.name!r} is declared with the shape {before}, and its"
            f" operators give it {list(sizes_of(value))}: corrected",
        )
    kept = [value for value in model.graph.value_info if value.name not in inferred]
    dropped = [value.name for value in model.graph.value_info if value.name in inferred]
    if dropped:
        shapes = counted(len(dropped), "declared shape", "declared shapes")
        notes.append(
            f"{shapes} of inner tensors contradict the operators: {short(dropped)}"
        )
        del model.graph.value_info[:]
        model.graph.value_info.extend(kept)
    return notes


def open_contradicted(
    values: list[ValueInfoProto],
    arrays: Mapping[str, Any],
) -> list[str]:
    """Open the sizes of outputs that contradict a run, in place; return notes.

    Args:
        values: declarations of outputs; a changed one is replaced.
        arrays: results of the run by name; others than arrays have no shape.
    """
    notes = list[str]()
    for index, value in enumerate(values):
        array = arrays.get(value.name)
        if not (
            isinstance(array, np.ndarray) and is_tensor(value) and has_shape(value)
        ):
            continue
        before = sizes_of(value)
        if len(before) == array.ndim:
            sizes = [
                None if isinstance(size, int) and size != length else size
                for size, length in zip(before, array.shape, strict=True)
            ]
        else:
            sizes = [None] * array.ndim
        if tuple(sizes) == before:
            continue
        elem_type = value.type.tensor_type.elem_type
        values[index] = helper.make_tensor_value_info(value.name, elem_type, sizes)
        notes.append(
            f"output {value.name!r} is declared with the shape {list(before)}, and has"
            f" {list(array.shape)}: written as {sizes}",
        )
    return notes
