"""Record the branches of If nodes that samples take: figures hold for these alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from onnx import ModelProto

from calibrators.onnx_runtime.session import open_session, outputs_of
from quark_onnx.graph import Node, reach
from quark_onnx.graph.random_operators import RANDOM
from quark_onnx.graph.shapes import declared_values, has_shape, untyped

#: Operators that read the shape of a tensor, and not its values.
_OF_SHAPES = frozenset({"Shape", "Size"})
#: The branches of an If node, by the value of its condition.
_BRANCHES = {True: "then_branch", False: "else_branch"}


class Branches:
    """The branches of the If nodes of a main graph that were taken."""

    def __init__(self, model: ModelProto) -> None:
        """Start without samples.

        Args:
            model: the float model.
        """
        self._model = model
        self._conditions = dict[str, str]()
        for node in model.graph.node:
            # A constant condition leaves a branch that no data can reach.
            if node.op_type == "If" and _may_change(model, node.input[0]):
                self._conditions[node.name or node.output[0]] = node.input[0]
        self._taken: dict[str, set[bool]] = {name: set() for name in self._conditions}

    def add(self, feeds: Mapping[str, Any]) -> None:
        """Run the conditions on a sample.

        Args:
            feeds: inputs by name.
        """
        if not self._conditions:
            return
        taken = dict(feeds)  # a condition may be an input
        if self._computed:
            taken |= outputs_of(self._session, feeds, self._computed)
        for name, condition in self._conditions.items():
            self._taken[name].add(bool(np.all(taken[condition])))

    @property
    def unseen(self) -> list[str]:
        """Return the branches that no sample took, in words."""
        return [
            f"the {branch} of {name!r}"
            for name, taken in self._taken.items()
            for value, branch in _BRANCHES.items()
            if taken and value not in taken
        ]

    @cached_property
    def _computed(self) -> list[str]:
        """The conditions that are no inputs of the model."""
        inputs = [value.name for value in self._model.graph.input]
        conditions = dict.fromkeys(self._conditions.values())
        return [condition for condition in conditions if condition not in inputs]

    @cached_property
    def _session(self) -> Any:
        """A session on the part of the model that computes the conditions."""
        model = ModelProto()
        model.CopyFrom(self._model)
        # onnxruntime removes the nodes that no output needs.
        del model.graph.output[:]
        model.graph.output.extend(untyped(self._computed))
        return open_session(model, what="the conditions of the float model")


def _may_change(model: ModelProto, name: str) -> bool:
    """Return whether the value of a tensor may differ between samples."""
    nodes = map(Node, model.graph.node)
    makers = {result: node for node in nodes for result in node.results}
    fixed = _tensors_of_fixed_size(model)

    def needed(tensor: str) -> list[str]:
        node = makers.get(tensor)
        # The shape of a tensor of fixed size does not depend on its values.
        if node is None or (node.kind in _OF_SHAPES and node.inputs[0] in fixed):
            return []
        return node.reads

    tensors = reach([name], needed)
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name for value in model.graph.input} - constants
    made = [makers[tensor] for tensor in tensors if tensor in makers]
    is_random = any(node.kind in RANDOM for node in made)
    return is_random or not inputs.isdisjoint(tensors)


def _tensors_of_fixed_size(model: ModelProto) -> set[str]:
    """Return the names of the tensors of the main graph that are declared without open sizes."""
    fixed = set[str]()
    for value in filter(has_shape, declared_values(model.graph)):
        sizes = value.type.tensor_type.shape.dim
        if all(size.HasField("dim_value") for size in sizes):
            fixed.add(value.name)
    return fixed
