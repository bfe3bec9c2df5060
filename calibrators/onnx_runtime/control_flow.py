"""Interpret If, Loop and Scan outside the runtime, to observe tensors inside their bodies.

The operators follow https://onnx.ai/onnx/operators/onnx__Loop.html, onnx__If.html and
onnx__Scan.html.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import onnx

from calibrators.base import Calibrator

#: Yields the attribute and the inputs of a body to run, and receives its outputs.
Steps = Generator[tuple[str, list[Any]], list[Any], None]


@dataclass(frozen=True)
class Observation:
    """A tensor to observe.

    Attributes:
        tensor: name of the tensor in the model.
        calibrator: decides which statistic is updated.
        axis: channel axis of a per-channel statistic; None per tensor.
    """

    tensor: str
    calibrator: Calibrator
    axis: int | None = None


@dataclass(frozen=True)
class Scope:
    """A model (the main graph, or a body as a separate model) with observations.

    Attributes:
        model: the model; tensors that a body captures are inputs or constants.
        observations: tensors and inputs of this graph.
        controls: nodes whose bodies are observed, too.
        borrowed: inputs that a body captures from outer graphs.
    """

    model: onnx.ModelProto
    observations: tuple[Observation, ...]
    controls: tuple[Control, ...] = ()
    borrowed: frozenset[str] = frozenset()

    def flat(self) -> Iterator[Observation]:
        """Yield the observations of the graph, then of the bodies."""
        yield from self.observations
        for control in self.controls:
            for body in control.bodies.values():
                yield from body.flat()


@dataclass(frozen=True)
class Control:
    """A node with bodies.

    Attributes:
        name: name of the node, for messages.
        kind: If, Loop or Scan.
        inputs: names of its inputs, empty for an omitted one.
        bodies: scopes by attribute name.
        scanned: number of inputs that a Scan slices; 0 for If and Loop.
        axes: axis along which a Scan slices each of these inputs.
        backwards: whether a Scan reads each of these inputs from its end.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    bodies: Mapping[str, Scope]
    scanned: int = 0
    axes: Sequence[int] = ()
    backwards: Sequence[bool] = ()

    @property
    def reads(self) -> set[str]:
        """Names of the outer tensors for the node and the bodies."""
        names = {name for name in self.inputs if name}
        for body in self.bodies.values():
            names |= body.borrowed
        return names

    def play(self, values: Mapping[str, Any]) -> Steps:
        """Yield the attribute and the inputs of each body to run; receive the body's outputs.

        Args:
            values: at least the inputs of the node, by name.
        """
        given: list[Any] = []
        for name in self.inputs:
            given.append(values[name] if name else None)
        if self.kind == "If":
            yield ("then_branch" if np.all(given[0]) else "else_branch"), []
        elif self.kind == "Loop":
            yield from _loop(given)
        else:
            yield from self._scan(given)

    def _scan(self, given: list[Any]) -> Steps:
        # Inputs of a Scan: N state variables, then M sequences.
        states = given[: len(given) - self.scanned]
        sequences = []
        for value, axis in zip(given[len(states) :], self.axes, strict=True):
            # A view; each slice is copied below, as onnxruntime takes contiguous arrays.
            sequences.append(np.moveaxis(value, axis, 0))
        for step in range(len(sequences[0])):
            slices = []
            for sequence, backwards in zip(sequences, self.backwards, strict=True):
                # ~step counts from the end: -1, -2 ...
                row = sequence[~step if backwards else step]
                slices.append(np.ascontiguousarray(row))
            outputs = yield "body", [*states, *slices]
            # The outputs behind the states are rows of the scan outputs, which the main graph
            # computes itself.
            states = outputs[: len(states)]


def _loop(given: list[Any]) -> Steps:
    trip_count = given[0]
    # Trip count and condition are both optional; np.all accepts scalars and arrays of one element.
    condition = given[1] is None or bool(np.all(given[1]))
    carried = given[2:]
    steps: Iterable[int] = count()
    if trip_count is not None:
        steps = range(int(np.asarray(trip_count).reshape(())))
    for step in steps:
        if not condition:
            return
        outputs = yield (
            "body",
            [np.array(step, np.int64), np.array(condition), *carried],
        )
        # Outputs of the body: condition, carried values, rows of the scan outputs.
        condition = bool(np.all(outputs[0]))
        carried = outputs[1 : 1 + len(carried)]
