"""If, Loop and Scan played outside the runtime, so that the tensors inside their bodies can be
watched.

The operators are those of ONNX: https://onnx.ai/onnx/operators/onnx__Loop.html and its neighbours.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import onnx

from calibrators.base import Calibrator

#: What a body is run on, and then what it has computed.
Steps = Generator[tuple[str, list[Any]], list[Any], None]


@dataclass(frozen=True)
class Observation:
    """A tensor to watch.

    Attributes:
        tensor: its name in the model.
        calibrator: decides which statistic is kept.
        axis: channel axis of a per-channel statistic; None per tensor.
    """

    tensor: str
    calibrator: Calibrator
    axis: int | None = None


@dataclass(frozen=True)
class Scope:
    """A model, the main one or a body as a model of its own, and what to watch in it.

    Attributes:
        model: it; what a body reads from around it is an input, too, or a constant.
        observations: tensors and inputs of this graph.
        controls: nodes whose bodies are watched, too.
        borrowed: inputs that come from around a body.
    """

    model: onnx.ModelProto
    observations: tuple[Observation, ...]
    controls: tuple[Control, ...] = ()
    borrowed: frozenset[str] = frozenset()

    def flat(self) -> Iterator[Observation]:
        """The observations here, and then those in the bodies."""
        yield from self.observations
        for control in self.controls:
            for body in control.bodies.values():
                yield from body.flat()


@dataclass(frozen=True)
class Control:
    """A node with bodies.

    Attributes:
        name: of the node, for messages.
        kind: If, Loop or Scan.
        inputs: the tensors it reads, an empty name for one that is left out.
        bodies: by the name of the attribute.
        scanned: of a Scan: how many inputs are cut into slices; 0 of the others.
        axes: of a Scan: the axis that each of them is cut along.
        backwards: of a Scan: whether each of them is read from its end.
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
        """The tensors around it that it and its bodies need."""
        return {name for name in self.inputs if name}.union(
            *(body.borrowed for body in self.bodies.values()),
        )

    def play(self, values: Mapping[str, Any]) -> Steps:
        """Yields the attribute of each body to run, with its own inputs in order.

        Wants what the body has computed.

        Args:
            values: at least the inputs of the node, by name.
        """
        given = [values[name] if name else None for name in self.inputs]
        if self.kind == "If":
            yield ("then_branch" if np.all(given[0]) else "else_branch"), []
        elif self.kind == "Loop":
            yield from _loop(given)
        else:
            yield from self._scan(given)

    def _scan(self, given: list[Any]) -> Steps:
        states = given[: len(given) - self.scanned]
        sliced = [
            np.moveaxis(v, axis, 0)
            for v, axis in zip(given[len(states) :], self.axes, strict=True)
        ]
        for place in range(len(sliced[0])):
            rows = [
                v[~place if back else place]
                for v, back in zip(sliced, self.backwards, strict=True)
            ]
            states = (yield "body", [*states, *map(np.ascontiguousarray, rows)])[
                : len(states)
            ]


def _loop(given: list[Any]) -> Steps:
    times, go, carried = given[0], given[1] is None or bool(np.all(given[1])), given[2:]
    for step in count() if times is None else range(int(np.asarray(times).reshape(()))):
        if not go:
            return
        found = yield "body", [np.array(step, np.int64), np.array(go), *carried]
        go, carried = bool(np.all(found[0])), found[1 : 1 + len(carried)]
