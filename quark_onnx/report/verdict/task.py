"""Detection of a model's task from graph and outputs on a sample."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto

from quark_onnx.common.containers import names_of
from quark_onnx.graph import scopes_of
from quark_onnx.graph.node import subgraphs
from quark_onnx.report.verdict.boxes import (
    DetectorLayout,
    detector_layout,
    image_inputs,
)

Arrays = Mapping[str, NDArray[Any]]

_CLASS_NAMES = re.compile(r"logit|prob|class|score|label|softmax|pred", re.IGNORECASE)
_VECTOR_NAMES = re.compile(
    r"embed|feature|hidden|pooler|sentence|vector|repr",
    re.IGNORECASE,
)
#: Class counts of well-known data sets; embeddings do not have these widths.
_COMMON_CLASSES = {10, 100, 1000, 1001, 21841, 21843}
#: Minimum width of an embedding, and a divisor of its width.
#: Embeddings have widths such as 384, 768 or 1024, all of them multiples of 32.
_VECTOR_WIDTH, _VECTOR_DIVISOR = 64, 32
#: Maximum number of classes of a semantic segmentation.
_SEGMENTS = 256
#: Minimum height of a segmentation output, as a share of the input's height.
_SEGMENT_SCALE = 8
_INTEGERS = {TensorProto.INT32, TensorProto.INT64}


@dataclass(frozen=True)
class Traits:
    """Properties of a float model that indicate the task.

    Attributes:
        token_input: an integer input of rank 2, probably token identifiers; empty if none.
        vocabulary: row counts of tables read by a Gather; the vocabulary size is among them.
        probabilities: outputs computed by a Softmax or a Sigmoid.
    """

    token_input: str
    vocabulary: frozenset[int]
    probabilities: frozenset[str]

    @classmethod
    def of(cls, model: ModelProto) -> Traits:
        """Return the properties of a model."""
        tables = set[int]()
        probabilities = set[str]()  # results of a Softmax or Sigmoid
        for graph, constants in scopes_of(model):
            for node in graph.node:
                if node.op_type in ("Softmax", "Sigmoid"):
                    probabilities.update(node.output)
                elif node.op_type == "Gather" and node.input[0] in constants:
                    # (rows, width): an embedding matrix; lookups of other ranks are indexing.
                    shape = constants[node.input[0]].dims
                    if len(shape) == 2:
                        tables.add(int(shape[0]))
        # The inner graphs first, so that results go outward through any depth.
        for graph, _ in reversed(list(scopes_of(model))):
            for inner, outer in _outputs_of_bodies(graph):
                if inner in probabilities:
                    probabilities.add(outer)
        outputs = set(names_of(model.graph.output))
        return cls(
            _token_input(model),
            frozenset(tables),
            frozenset(probabilities & outputs),
        )


def _outputs_of_bodies(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """Yield the outputs of the bodies in a graph, each with the result of the node that it becomes.

    Args:
        graph: the graph of a model, or a body; bodies inside its bodies are left out.

    Yields:
        Name in the body, and name in the graph.
    """
    for node in graph.node:
        for body in subgraphs(node):
            # Aligned at the end: the first output of a Loop's body is the condition, which is no
            # result.
            inner = reversed(names_of(body.output))
            yield from zip(inner, reversed(node.output), strict=False)


def _token_input(model: ModelProto) -> str:
    """Return the name of the first input of possible token identifiers, or an empty string."""
    constants = set(names_of(model.graph.initializer))
    for value in model.graph.input:
        # Up to IR version 3, initializers are inputs, too.
        if value.name not in constants and _may_hold_tokens(value):
            return value.name
    return ""


def _may_hold_tokens(value: ValueInfoProto) -> bool:
    """Return whether an input is an integer matrix, and no mask or segment by its name."""
    kind = value.type.tensor_type
    if kind.elem_type not in _INTEGERS or len(kind.shape.dim) != 2:
        return False
    name = value.name.lower()
    return "mask" not in name and "type" not in name


@dataclass(frozen=True)
class Task:
    """The task of a model, and the outputs read by judges.

    Attributes:
        name: name of a task in ``TASKS``.
        output: the judged output; the boxes of a detector.
        layout: layout of a detector's outputs.
        ranks: rank and kind of type of each output that is read.
    """

    name: str
    output: str
    layout: DetectorLayout | None = None
    ranks: tuple[tuple[str, int, str], ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        output: str,
        outputs: Arrays,
        layout: DetectorLayout | None = None,
    ) -> Task:
        """Return a task for outputs of the given ranks and types.

        Args:
            name: name of the task.
            output: the judged output.
            outputs: outputs on the first sample, by name.
            layout: layout of a detector's outputs.
        """
        read = [output]
        if layout is not None:
            # labels is empty for detectors without an output of classes.
            read = list(filter(None, layout.outputs))
        ranks = [(each, outputs[each].ndim, outputs[each].dtype.kind) for each in read]
        return cls(name, output, layout, tuple(ranks))

    def reads(self, outputs: Arrays) -> bool:
        """Return whether outputs have the ranks and types of the first sample's.

        Args:
            outputs: outputs of either model by name.
        """
        for name, rank, kind in self.ranks:
            value = outputs.get(name)
            if value is None or (value.ndim, value.dtype.kind) != (rank, kind):
                return False
        if self.layout is not None:
            return self.layout.fits(outputs)
        # An empty array has no class, no vector and no image. A detector may find nothing.
        return all(outputs[name].size for name, _, _ in self.ranks)


def find_task(
    model: ModelProto,
    feeds: Arrays,
    outputs: Arrays,
    asked: str = "auto",
) -> Task:
    """Return the task of a model.

    Args:
        model: the float model.
        feeds: one sample.
        outputs: the float model's outputs on the sample, without sequences and maps.
        asked: name of a task in ``TASKS``, or ``auto``.
    """
    traits = Traits.of(model)
    # A detector is recognized by all outputs together, other tasks by one.
    if asked in ("auto", "detector"):
        layout = detector_layout(outputs, feeds)
        if layout is not None:
            return Task.of("detector", layout.boxes, outputs, layout)
    # The first output that a task fits; further ones (hidden states, features) rarely are the
    # result.
    for name, value in outputs.items():
        # A requested task still needs an output that its judge can read.
        found = asked if asked != "auto" else _kind(name, value, feeds, traits)
        if found != "signal" and _readable(found, value):
            return Task.of(found, name, outputs)
    # Any output will do: signals are compared by SQNR.
    return Task("signal", next(iter(outputs), ""))


def _readable(task: str, value: NDArray[Any]) -> bool:
    """Return whether a judge of the task can read an output.

    Args:
        task: name of a task in ``TASKS``.
        value: the output on a sample.
    """
    if not value.size or value.dtype.kind not in "fiu":
        return False
    if value.dtype.kind in "iu":
        # classes that the model itself has chosen
        return task == "classifier" and value.ndim in (1, 2)
    if task in _RANKS_OF_VECTORS:
        return len(squeezed(value)) in _RANKS_OF_VECTORS[task]
    return value.ndim in _RANKS.get(task, ())


#: Ranks of float outputs that the judges of a task read; those of vectors without trailing ones.
_RANKS_OF_VECTORS = {"classifier": (2, 3), "embedding": (2, 3)}
_RANKS = {"language": (3,), "segmentation": (4,), "image": (3, 4)}


def squeezed(value: NDArray[Any]) -> tuple[int, ...]:
    """Return a shape without trailing ones, of rank two at least.

    >>> squeezed(np.zeros((2, 10, 1, 1)))
    (2, 10)
    """
    shape = value.shape
    # Global pooling leaves (N, classes, 1, 1).
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _kind(
    name: str,
    value: NDArray[Any],
    feeds: Arrays,
    traits: Traits,
) -> str:
    """Return the task by rank, type and name of an output.

    Args:
        name: name of the output.
        value: the output on one sample.
        feeds: inputs by name.
        traits: properties of the model.
    """
    shape = squeezed(value)
    if value.dtype.kind in "iu" and _CLASS_NAMES.search(name):
        return "classifier"
    if not value.size or value.dtype.kind != "f":
        return "signal"
    if len(shape) == 2:
        return _vector_kind(_Vectors(name, value.reshape(shape), feeds, traits))
    if len(shape) == 3:
        return _sequence_kind(shape, feeds, traits)
    return _map_kind(value, feeds) if len(shape) == 4 else "signal"


def _sequence_kind(shape: tuple[int, ...], feeds: Arrays, traits: Traits) -> str:
    """Return whether vectors per token are a language model's or an encoder's.

    Args:
        shape: shape of the output, (N, positions, width).
        feeds: inputs by name.
        traits: properties of the model.
    """
    tokens = feeds.get(traits.token_input)
    if tokens is None or tokens.shape != shape[:2]:
        return "signal"
    if shape[2] in traits.vocabulary:
        return "language"
    return "embedding" if shape[2] >= _VECTOR_WIDTH else "signal"


@dataclass(frozen=True)
class _Vectors:
    """An output with a vector for each sample, and the signs of its task.

    Attributes:
        name: name of the output.
        rows: the vectors, shape (samples, width).
        feeds: the inputs.
        traits: properties of the model.
    """

    name: str
    rows: NDArray[Any]
    feeds: Arrays
    traits: Traits

    @property
    def width(self) -> int:
        """Return the number of values in a vector."""
        return int(self.rows.shape[1])

    def are_unusable(self) -> bool:
        """Return whether the values are single or not finite."""
        return self.width < 2 or not np.isfinite(self.rows).all()

    def are_probabilities(self) -> bool:
        """Return whether a Softmax or Sigmoid computes the output, or its rows sum to 1."""
        return self.name in self.traits.probabilities or _sums_to_one(self.rows)

    def are_normalized(self) -> bool:
        """Return whether vectors have length 1; half the width of an embedding suffices then."""
        return self.width >= _VECTOR_WIDTH // 2 and _are_unit_vectors(self.rows)

    def are_named_classes(self) -> bool:
        """Return whether the width or the name is that of classes."""
        known_width = self.width in _COMMON_CLASSES
        return known_width or _CLASS_NAMES.search(self.name) is not None

    def have_embedding_width(self) -> bool:
        """Return whether the width is usual for an embedding."""
        return self.width >= _VECTOR_WIDTH and self.width % _VECTOR_DIVISOR == 0

    def describe_senses(self) -> bool:
        """Return whether the model reads images, sound or text, and no name speaks of vectors.

        Vectors of numbers for such inputs are mostly scores of classes.
        """
        if _VECTOR_NAMES.search(self.name):
            return False
        return any(feed.ndim >= 3 for feed in self.feeds.values()) or bool(
            self.traits.token_input
        )


#: Signs of the task of vectors. The strongest come first; names decide where values do not.
_SIGNS_OF_VECTORS: tuple[tuple[Callable[[_Vectors], bool], str], ...] = (
    (_Vectors.are_unusable, "signal"),
    (_Vectors.are_probabilities, "classifier"),
    (_Vectors.are_normalized, "embedding"),
    (_Vectors.are_named_classes, "classifier"),
    (_Vectors.have_embedding_width, "embedding"),
    (_Vectors.describe_senses, "classifier"),
)


def _vector_kind(vectors: _Vectors) -> str:
    """Return the task of vectors by the first sign."""
    for has_sign, task in _SIGNS_OF_VECTORS:
        if has_sign(vectors):
            return task
    return "signal"


def _are_unit_vectors(rows: NDArray[Any]) -> bool:
    # float16 squares of long vectors overflow.
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    return bool(np.allclose(lengths, 1, atol=1e-3))


def _sums_to_one(rows: NDArray[Any]) -> bool:
    return bool((rows >= 0).all() and np.allclose(rows.sum(axis=1), 1, atol=1e-3))


def _map_kind(value: NDArray[Any], feeds: Arrays) -> str:
    """Return whether maps with channels, (N, C, H, W), are an image or a segmentation.

    Args:
        value: the output.
        feeds: inputs by name.
    """
    maps = image_inputs(feeds)
    # Gray or colour images, (N, C, H, W).
    if not maps or maps[0].shape[1] not in (1, 3):
        return "signal"
    pixels = maps[0].shape[2]
    channels, height = value.shape[1:3]
    if channels in (1, 3) and height >= pixels:
        return "image"
    # Smaller maps with many channels are features.
    if height < max(channels, pixels / _SEGMENT_SCALE):
        return "signal"
    return "segmentation" if 2 <= channels <= _SEGMENTS else "signal"
