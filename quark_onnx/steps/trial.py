"""trial: how far the outputs of a model are from those of the float model, for one choice of scales after another."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto

from calibrators.interrupt import Lanes
from calibrators.session import open_session
from quark_onnx.graph import Graph, Node, ShapeArithmetic
from quark_onnx.graph.node import QUANTIZE
from quark_onnx.graph.segment import segment
from quark_onnx.graph.walk import reach
from quark_onnx.report.shapes import other_shape
from quark_onnx.steps.run import Sample

#: A sample counts as right from this share of noise on: no single good sample outweighs the others.
_FLOOR = 1e-3
#: Operators behind which an output is judged by what they read: they only move values.
_PUT_TOGETHER = frozenset({"Concat", "Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
#: So many samples are run before it is asked whether the others are worth it: not if they are worse by this much.
_AT_ONCE, _SLACK = 2, 0.02
#: To leave out the beginning of a model pays if so many values for each of its other nodes need not be computed again.
_WORTH = 1_000_000

logger = logging.getLogger(__name__)

Scales = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class _Stage:
    """A part of the model, up to its outputs.

    Attributes:
        nodes: of the part, in order.
        session: runs it.
        given: what it reads beside scales, for each sample; and results that are computed before it.
        results: what the session computes.
        frozen: the scales that it was computed with before the part.
    """

    nodes: list[Node]
    session: Any
    given: list[dict[str, Any]]
    results: list[str]
    frozen: Scales

    @cached_property
    def read(self) -> list[str]:
        """The inputs of the session."""
        return [value.name for value in self.session.get_inputs()]

    def holds(self, scales: Scales) -> bool:
        """Whether what is before the part has these scales."""
        return all(np.array_equal(scales[name], scale) for name, scale in self.frozen.items())

    def run(self, scales: Scales, place: int) -> dict[str, Any]:
        """The results on a sample."""
        given = self.given[place]
        feeds = {name: given[name] if name in given else scales[name] for name in self.read}
        found = self.session.run(self.results, feeds) if self.results else []
        return given | dict(zip(self.results, found, strict=True))


class Probe:
    """The float outputs of some samples, and a model whose scales are inputs."""

    def __init__(self, graph: Graph, live: Graph, samples: Sequence[Sample]) -> None:
        judged = _parts(graph)
        session = open_session(_with_outputs(graph, [tensor for tensor, _ in judged]), what="the float model")
        self._live, self._shapes = live, ShapeArithmetic.of(graph)
        self._names = [tensor for tensor, _ in judged]
        self._judged = [_as_read(live, tensor, reader) for tensor, reader in judged]
        read = list(dict.fromkeys(self._judged))
        whole = _open(_with_outputs(live, read))
        given = [dict(sample) for sample in samples]
        live.infer()
        self._sizes = {node: _size(live, node) for node in live.nodes}
        self._whole = self._stage = _Stage(list(live.nodes), whole, given, read, {})
        self._references: list[list[tuple[int, NDArray[np.float64]]]] = []
        for sample in samples:
            values = session.run(None, dict(sample))
            self._references.append([(place, v.astype(np.float64)) for place, v in enumerate(values) if _measurable(v)])
        self.usable = all(self._references)
        self._pool, self._pays = Lanes(_AT_ONCE), True

    @property
    def nodes(self) -> list[Node]:
        """What is run for each choice."""
        return self._stage.nodes

    def freeze(self, scales: Scales, still: Sequence[str]) -> bool:
        """Compute once and for all what depends on other scales than those that are still to be tried, if that pays.

        Scales that are tried nevertheless are tried on the whole model. A model in parts may round otherwise than the
        whole one, and coarse codes make much of that: true says that what was measured before compares no longer.
        """
        stage = self._stage if self._stage.holds(scales) else self._whole
        live = self._live
        moving = reach((node for name in still for node in live.consumers(name)), live.followers)
        moving = reach(moving, self._unrounded)
        before, behind = [n for n in stage.nodes if n not in moving], [n for n in stage.nodes if n in moving]
        if (
            not self._pays
            or not before
            or sum(map(self._sizes.__getitem__, before)) * len(still) < _WORTH * len(behind)
        ):
            return False
        try:
            self._stage = self._behind(stage, before, behind, scales)
        except Exception as error:  # onnxruntime raises several unrelated types, for what it does not run in parts
            logger.debug("the search runs the whole model each time: %s", error)
            self._pays = False
        return self._pays

    def _unrounded(self, node: Node) -> list[Node]:
        """What computes a node's inputs up to the codes: parts meet at codes only.

        The runtime rounds the bias of a Conv or Gemm that stands between a DequantizeLinear and a QuantizeLinear, as
        the quantized model will; cut off from one of them, it would not.
        """
        return [leader for leader in self._live.leaders(node) if leader.op_type not in QUANTIZE]

    def _behind(self, stage: _Stage, before: list[Node], behind: list[Node], scales: Scales) -> _Stage:
        """What is left of a stage once some of its nodes have been computed."""
        read = {name for node in behind for name in (*node.inputs, *node.captures)} | set(self._judged)
        made = [name for node in before for name in node.outputs if name in read]
        needed = reach(before, self._live.leaders)  # with what both parts compute
        front = [node for node in stage.nodes if node in needed]
        given: Iterable[dict[str, Any]] = stage.given
        if made:
            session = _open(self._part(front, stage.given, scales, made))
            first = _Stage(front, session, stage.given, made, {})
            given = self._pool.map(lambda place: first.run(scales, place), range(len(stage.given)))
        given = [{name: value for name, value in values.items() if name in read} for values in given]
        results = [name for name in stage.results if name not in made]
        after = _open(self._part(behind, given, scales, results))
        frozen = {name: scales[name] for node in front for name in node.inputs if name in scales}
        return _Stage(behind, after, given, results, {**stage.frozen, **frozen})

    def _part(
        self, nodes: list[Node], given: Sequence[Mapping[str, Any]], scales: Scales, results: list[str]
    ) -> ModelProto:
        """A model of some nodes that the runtime optimizes as it does the whole one.

        Raises:
            ValueError: what it is given has another rank or type on other samples.
        """
        kinds, shapes = zip(*(_kinds(values) for values in given), strict=True)
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError("ranks or types of what a part reads differ between samples")
        sized = all(shape == shapes[0] for shape in shapes)
        return segment(self._live, nodes, {**given[0], **scales}, results, sized=sized)

    def noise(self, scales: Scales, best: list[float]) -> list[float]:
        """For each sample, the mean over outputs of the logarithm of noise over signal.

        Fewer samples where the first few are worse than ``best``, what was found before: nothing more can come of that.

        Raises:
            ModelError: an output has another shape than in the float model.
        """
        found = list[float]()
        stage = self._stage if self._stage.holds(scales) else self._whole
        for start in range(0, len(self._references), _AT_ONCE):
            some = range(start, min(len(self._references), start + _AT_ONCE))
            found += self._pool.map(lambda place: self._one(stage, scales, place), some)
            if best and np.mean(found) > np.mean(best[: len(found)]) + _SLACK:
                break
        return found

    def _one(self, stage: _Stage, scales: Scales, place: int) -> float:
        values, shares = stage.run(scales, place), []
        for output, reference in self._references[place]:
            value = values[self._judged[output]]
            if value.shape != reference.shape:
                self._require_sized_by_data(self._names[output], reference.shape, value.shape)
                shares.append(np.log(1 + _FLOOR))  # as if nothing of the signal was left
                continue
            error = np.square(value - reference).sum() / np.square(reference).sum()
            shares.append(np.log(error + _FLOOR) if np.isfinite(error) else np.inf)
        return float(np.mean(shares))

    def _require_sized_by_data(self, tensor: str, reference: tuple[int, ...], found: tuple[int, ...]) -> None:
        """Raise an error unless values of a signal decide the shape of a tensor."""
        if not self._shapes.sized_by_data(tensor):
            what = "output" if self._live.is_output(tensor) else "tensor"
            raise other_shape(f"{what} {tensor!r}", str(reference), str(found))

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, trace)


def _open(model: ModelProto) -> Any:
    """A session with one thread, as several samples run side by side, in which biases are rounded."""
    return open_session(model, threads=1, what="the quantized model with its scales as inputs")


def _kinds(values: Mapping[str, Any]) -> tuple[dict[str, tuple[object, int]], dict[str, tuple[int, ...]]]:
    """Types and ranks of arrays, and their shapes."""
    kinds = {name: (getattr(value, "dtype", type(value)), np.ndim(value)) for name, value in values.items()}
    return kinds, {name: np.shape(value) for name, value in values.items()}


def _size(graph: Graph, node: Node) -> int:
    """Values that a node computes, for a batch of one."""
    shapes = (graph.shape(name) for name in node.outputs if name)
    return sum(prod(dim for dim in shape if isinstance(dim, int)) for shape in shapes if shape is not None)


def _parts(graph: Graph) -> list[tuple[str, Node | None]]:
    """The tensors that outputs are put together from, with a node that reads them; None for an output.

    In one tensor with large coordinates the scores of a detector would count for nothing.
    """
    found, todo = dict[str, Node | None](), list[tuple[str, Node | None]]()
    todo += [(value.name, None) for value in reversed(graph.outputs)]
    while todo:
        tensor, reader = todo.pop()
        node = graph.producer(tensor)
        if node is None or node.kind not in _PUT_TOGETHER:
            if not graph.is_constant(tensor):
                found.setdefault(tensor, reader)
            continue
        inputs = node.inputs if node.kind == "Concat" else node.inputs[:1]
        todo += [(name, node) for name in reversed(inputs)]
    return list(found.items())


def _as_read(live: Graph, tensor: str, reader: Node | None) -> str:
    """The tensor as its reader sees it once it is rounded; the name of an output stays."""
    if reader is None:
        return tensor
    node = next(node for node in live.nodes if node.name == reader.name)
    return node.inputs[reader.inputs.index(tensor)]


def _with_outputs(graph: Graph, tensors: list[str]) -> ModelProto:
    """The model with other outputs, of any type that onnxruntime finds."""
    model = graph.to_model()
    del model.graph.output[:]
    model.graph.output.extend(ValueInfoProto(name=name) for name in tensors)
    return model


def _measurable(value: Any) -> bool:
    floating = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return bool(floating and np.isfinite(value).all() and value.any())
