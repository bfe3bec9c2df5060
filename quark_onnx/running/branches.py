"""Record the branches of If nodes that samples take: figures hold for these alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto

from calibrators.onnx_runtime.session import open_session

#: The branches of an If node, by the value of its condition.
_BRANCHES = {True: "then_branch", False: "else_branch"}


class Branches:
    """The branches of the If nodes of a main graph that were taken."""

    def __init__(self, model: ModelProto) -> None:
        """Start without samples.

        Args:
            model: the float model.
        """
        constants = {tensor.name for tensor in model.graph.initializer}
        constants |= {
            node.output[0] for node in model.graph.node if node.op_type == "Constant"
        }
        self._model = model
        self._conditions = dict[str, str]()
        for node in model.graph.node:
            # A constant condition leaves a branch that no data can reach.
            if node.op_type == "If" and node.input[0] not in constants:
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
            inputs = {
                value.name: feeds[value.name]
                for value in self._session.get_inputs()
                if value.name in feeds
            }
            values = self._session.run(self._computed, inputs)
            taken |= dict(zip(self._computed, values, strict=True))
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
        for condition in self._computed:
            model.graph.output.append(ValueInfoProto(name=condition))
        return open_session(model, what="the conditions of the float model")
