"""The kind of each output of a model, and the task of the model, from the outputs on a sample.

Type, shape, values and the operator that computes an output decide. Names are the weakest hint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto

from quark_onnx.graph import Graph, scopes_of
from quark_onnx.graph.node import subgraphs
from quark_onnx.graph.states import State, states
from quark_onnx.report.verdict.boxes import (
    DetectorLayout,
    detector_layout,
    image_inputs,
)

Arrays = Mapping[str, NDArray[Any]]

#: Words of names, hints where nothing else tells: of classes, of vectors, and of quantities.
_CLASS_NAMES = frozenset(
    {"logit", "logits", "prob", "probs", "probability", "probabilities", "class"}
    | {"classes", "label", "labels", "softmax"}
)
_VECTOR_NAMES = re.compile(
    r"embed|feature|hidden|pooler|sentence|vector|repr",
    re.IGNORECASE,
)
_QUANTITY_NAMES = frozenset(
    {"mean", "means", "std", "var", "variance", "forecast", "landmark", "landmarks"}
    | {"keypoint", "keypoints", "pose", "coords", "coordinates", "angle", "angles"}
    | {"age", "depth", "regression", "value", "values", "offset", "offsets"}
)
#: Class counts of well-known data sets; embeddings do not have these widths.
_COMMON_CLASSES = {10, 100, 1000, 1001, 21841, 21843}
#: Minimum width of an embedding, and a divisor of its width.
#: Embeddings have widths such as 384, 768 or 1024, all of them multiples of 32.
_VECTOR_WIDTH, _VECTOR_DIVISOR = 64, 32
#: Minimum number of classes of each token; two values of a token may be any.
_TOKEN_CLASSES = 3
#: Maximum number of classes of a semantic segmentation.
_SEGMENTS = 256
#: Minimum height of a segmentation output, as a share of the input's height.
_SEGMENT_SCALE = 8
#: Minimum number of anchors of a detector, and minimum width of their boxes with landmarks.
_ANCHORS, _BOX_WIDTH = 50, 5
_INTEGERS = {TensorProto.INT32, TensorProto.INT64}
#: Operators that compute probabilities of exclusive classes, and of independent decisions.
_OF_CLASSES = frozenset({"Softmax", "LogSoftmax", "Hardmax"})
_OF_DECISIONS = frozenset({"Sigmoid", "HardSigmoid"})
#: Operators that choose classes, which are integers.
_OF_CHOICES = frozenset({"ArgMax", "ArgMin", "TopK"})
_TELLING = _OF_CLASSES | _OF_DECISIONS | _OF_CHOICES
#: Operators that hand values on.
_MOVING = frozenset(
    {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Cast"}
    | {"Slice", "Gather", "Split", "Dropout", "QuantizeLinear", "DequantizeLinear"}
)
#: Kinds without a figure of their own, which are compared by SQNR.
WITHOUT_FIGURE = frozenset({"regression", "series", "state", "signal"})


@dataclass(frozen=True)
class Traits:
    """Properties of a float model that indicate the task.

    Attributes:
        token_input: an integer input of rank 2, probably token identifiers; empty if none.
        vocabulary: row counts of tables read by a Gather; the vocabulary size is among them.
        operators: operator that computes the values of an output, by output; operators that move
            values are passed.
        states: outputs that are inputs of the next step.
    """

    token_input: str
    vocabulary: frozenset[int]
    operators: Mapping[str, str]
    states: frozenset[str]

    @classmethod
    def of(cls, model: ModelProto) -> Traits:
        """Return the properties of a model."""
        tables = set[int]()
        operators = dict[str, str]()
        # The inner graphs first, so that results go outward through any depth.
        for graph, constants in reversed(list(scopes_of(model))):
            results = dict[str, list[str]]()
            for name, inner in _outputs_of_bodies(graph):
                results.setdefault(name, []).append(operators.get(inner, ""))
            for node in graph.node:
                operator = node.op_type
                if operator == "Gather" and node.input[0] in constants:
                    # (rows, width): an embedding matrix; lookups of other ranks are indexing.
                    shape = constants[node.input[0]].dims
                    if len(shape) == 2:
                        tables.add(int(shape[0]))
                elif operator in _MOVING and node.input:
                    operator = operators.get(node.input[0], "")
                for name in node.output:
                    # Of the branches of an If, the one with probabilities tells more. Results of
                    # two branches may have one name.
                    producers = [
                        operators.get(name, ""),
                        *results.get(name, [operator]),
                    ]
                    telling = [
                        producer for producer in producers if producer in _TELLING
                    ]
                    operators[name] = (telling or producers)[-1]
        return cls(
            _token_input(model),
            frozenset(tables),
            {value.name: operators.get(value.name, "") for value in model.graph.output},
            frozenset(state.output for state in states_of(model)),
        )


def states_of(model: ModelProto) -> list[State]:
    """Return the outputs of a model that are inputs of its next step."""
    # A state is an input besides those of the step.
    if len(model.graph.input) < 2:
        return []
    return states(Graph.of(model))


def _outputs_of_bodies(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """Yield the results of the nodes with bodies, each with the output of a body that it becomes.

    Args:
        graph: the graph of a model, or a body; bodies inside its bodies are left out.

    Yields:
        Name in the graph, and name in the body.
    """
    for node in graph.node:
        for body in subgraphs(node):
            # Aligned at the end: the first output of a Loop's body is the condition, which is no
            # result.
            inner = reversed([value.name for value in body.output])
            yield from zip(reversed(node.output), inner, strict=False)


def _token_input(model: ModelProto) -> str:
    """Return the name of the first input of possible token identifiers, or an empty string."""
    constants = {tensor.name for tensor in model.graph.initializer}
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
        layout: layout of a detector's outputs; None if they are not decoded.
        ranks: rank and kind of type of each output that is read.
        axis: axis of the classes, without trailing axes of size 1.
        certain: whether values, an operator or the user tell the task, and not the shape alone.
    """

    name: str
    output: str
    layout: DetectorLayout | None = None
    ranks: tuple[tuple[str, int, str], ...] = ()
    axis: int = -1
    certain: bool = True

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
            read = [name for name in layout.outputs if name]
        ranks = [
            (output_name, outputs[output_name].ndim, outputs[output_name].dtype.kind)
            for output_name in read
        ]
        return cls(name, output, layout, tuple(ranks))

    def of_kind(self, kind: Kind) -> Task:
        """Return the task with what is known of its output."""
        return replace(self, axis=kind.axis, certain=kind.certain)

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


@dataclass(frozen=True)
class Kind:
    """The kind of an output.

    Attributes:
        name: name of a task in ``TASKS``, or ``state``.
        axis: axis of the classes, without trailing axes of size 1.
        certain: whether values or an operator tell the kind, and not the shape alone.
    """

    name: str
    axis: int = -1
    certain: bool = True


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
    layout = None
    if asked in ("auto", "detector"):
        layout = _layout(traits, feeds, outputs)
    if layout is not None:
        return Task.of("detector", layout.boxes, outputs, layout)
    kinds = output_kinds(traits, feeds, outputs)
    if asked != "auto":
        # A requested task still needs an output that its judge can read.
        for name, value in outputs.items():
            if asked in WITHOUT_FIGURE or _readable(asked, value):
                return Task.of(asked, name, outputs).of_kind(_asked(asked, kinds[name]))
        return Task("signal", next(iter(outputs), ""))
    # The first output of a kind with a figure; further ones (hidden states, features) rarely are
    # the result. A state is never the result.
    for name, kind in kinds.items():
        if kind.name == "detector" or _readable(kind.name, outputs[name]):
            return Task.of(kind.name, name, outputs).of_kind(kind)
    for name, kind in kinds.items():
        if kind.name in ("regression", "series"):
            return Task.of(kind.name, name, outputs)
    # Any output will do: signals are compared by SQNR.
    return Task("signal", next(iter(outputs), ""))


def _asked(name: str, kind: Kind) -> Kind:
    """Return the kind that a user asks for, with the axis of the classes if it is known."""
    if name == kind.name:
        return Kind(name, kind.axis)
    return Kind(name, 1 if name == "segmentation" else -1)


def output_kinds(traits: Traits, feeds: Arrays, outputs: Arrays) -> dict[str, Kind]:
    """Return the kind of each output of a float model with the given properties.

    Args:
        traits: properties of the float model.
        feeds: one sample.
        outputs: the float model's outputs on the sample, without sequences and maps.
    """
    boxes = _outputs_of_detector(traits, feeds, outputs)
    kinds = dict[str, Kind]()
    for name, value in outputs.items():
        if name in traits.states:
            kinds[name] = Kind("state")
        elif name in boxes:
            kinds[name] = Kind("detector")
        else:
            output = _Output(name, value, feeds, traits)
            kinds[name] = _kind(output)
    return kinds


def _layout(traits: Traits, feeds: Arrays, outputs: Arrays) -> DetectorLayout | None:
    """Return the layout of a detector's outputs, if the model is a detector."""
    layout = detector_layout(outputs, feeds)
    if layout is None or layout.form == "pair":
        return layout
    # Coordinates and scores are joined after the Sigmoid of the scores. Of an output that is all
    # probabilities, the first four are no coordinates.
    operator = traits.operators.get(layout.boxes, "")
    return None if operator in _OF_DECISIONS | _OF_CLASSES else layout


def _outputs_of_detector(traits: Traits, feeds: Arrays, outputs: Arrays) -> set[str]:
    """Return the names of a detector's outputs; empty for other models.

    Boxes and scores are outputs of their own, or undecoded: maps of a common size or of several
    strides, or rows per anchor.
    """
    layout = _layout(traits, feeds, outputs)
    if layout is not None:
        return {name for name in layout.outputs if name}
    images = [feed for feed in image_inputs(feeds) if _channel_axis(feed) is not None]
    if not images:
        return set()
    names = set[str]()
    floats = {name: value for name, value in outputs.items() if value.dtype.kind == "f"}
    for (name, value), (other_name, other) in combinations(floats.items(), 2):
        if _are_maps_of_detector(value, other, images[0]) or _are_anchors(value, other):
            names |= {name, other_name}
    return names


def _are_maps_of_detector(
    value: NDArray[Any], other: NDArray[Any], image: NDArray[Any]
) -> bool:
    """Return whether two outputs are maps of boxes and scores.

    Args:
        other: another output.
        image: the input image.
    """
    if value.ndim != 4 or other.ndim != 4:
        return False
    # Maps of a detector are coarser than the image.
    if max(*value.shape[2:], *other.shape[2:]) > max(image.shape[1:]) // 2:
        return False
    channels = {value.shape[1], other.shape[1]}
    if value.shape[2:] == other.shape[2:]:
        # A heat map, and sizes, offsets or boxes of its cells.
        return len(channels) == 2 and not channels.isdisjoint({2, 4})
    # Three anchors in each cell of several strides, each with a box and scores. Features of several
    # strides have channels in multiples of eight.
    (count,) = channels if len(channels) == 1 else (0,)
    return count > 15 and count % 3 == 0 and count % 8 != 0


def _are_anchors(value: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether two outputs have boxes with landmarks, and scores, for the same anchors."""
    if value.ndim != 3 or other.ndim != 3 or value.shape[:2] != other.shape[:2]:
        return False
    least, greatest = sorted([value.shape[2], other.shape[2]])
    if value.shape[1] < _ANCHORS:
        return False
    return bool(least < _BOX_WIDTH <= greatest and greatest % 2 == 0)


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
        return value.ndim in _RANKS_OF_CHOICES.get(task, ())
    if task in _RANKS_OF_VECTORS:
        return len(squeezed(value)) in _RANKS_OF_VECTORS[task]
    return value.ndim in _RANKS.get(task, ())


#: Ranks of float outputs that the judges of a task read; those of vectors without trailing ones.
_RANKS_OF_VECTORS = {"classifier": (2, 3), "embedding": (2, 3)}
_RANKS = {
    "language": (3,),
    "segmentation": (4,),
    "image": (3, 4),
    "mask": (2, 3, 4, 5),
    "decisions": (1, 2, 3, 4, 5),
}
#: Ranks of integer outputs, which are classes.
_RANKS_OF_CHOICES = {"classifier": (1, 2), "segmentation": (3, 4)}


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


@dataclass(frozen=True)
class _Output:
    """An output on a sample, and the signs of its kind.

    Attributes:
        name: name of the output.
        value: the output of the float model.
        feeds: the inputs.
        traits: properties of the model.
    """

    name: str
    value: NDArray[Any]
    feeds: Arrays
    traits: Traits

    @property
    def operator(self) -> str:
        """Return the operator that computes the values; empty if unknown."""
        return self.traits.operators.get(self.name, "")

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape without trailing ones."""
        return squeezed(self.value)

    @property
    def words(self) -> set[str]:
        """Return the words of the name."""
        return set(re.split(r"[^a-z]+", self.name.lower()))

    @property
    def image(self) -> NDArray[Any] | None:
        """Return the first input of images, if there is one."""
        for feed in image_inputs(self.feeds):
            if _channel_axis(feed) is not None:
                return feed
        return None

    def is_named(self, words: frozenset[str]) -> bool:
        """Return whether a word occurs in the name."""
        return not words.isdisjoint(self.words)

    def is_per_token(self) -> bool:
        """Return whether the output has a vector for each token."""
        tokens = self.feeds.get(self.traits.token_input)
        if tokens is None or len(self.shape) != 3:
            return False
        return tokens.shape == self.shape[:2]

    def is_like_an_input(self) -> bool:
        """Return whether a float input has the same shape, of two or more axes of a signal."""
        if sum(size > 1 for size in self.value.shape[1:]) < 2:
            return False
        return any(
            feed.shape == self.value.shape and feed.dtype.kind == "f"
            for feed in self.feeds.values()
        )


def _kind(output: _Output) -> Kind:
    """Return the kind of an output."""
    value = output.value
    if value.dtype.kind in "iu":
        return _kind_of_integers(output)
    if not value.size or value.dtype.kind != "f":
        return Kind("signal")
    kind: Kind | None = None
    if output.operator in _OF_CLASSES:
        kind = _kind_of_probabilities(output)
    elif output.operator in _OF_DECISIONS:
        kind = _kind_of_decisions(output)
    return kind or _kind_by_shape(output)


def _kind_by_shape(output: _Output) -> Kind:
    """Return the kind of floats of which the operator tells nothing."""
    rank = len(output.shape)
    if output.value.ndim == 4 and rank > 2:
        return _kind_of_maps(output)
    if rank == 2 and output.value.ndim > 1:
        return _kind_of_vectors(output)
    if rank == 3:
        return _kind_of_sequences(output)
    return Kind("signal")


def _kind_of_integers(output: _Output) -> Kind:
    """Return the kind of integers: classes where the model chose them, else a signal."""
    rank = output.value.ndim
    chosen = output.operator in _OF_CHOICES or output.is_named(_CLASS_NAMES)
    if chosen and rank in (1, 2):
        return Kind("classifier")
    if chosen and rank in (3, 4) and output.image is not None:
        return Kind("segmentation")
    return Kind("signal")


def _kind_of_probabilities(output: _Output) -> Kind | None:
    """Return the kind of the result of a Softmax; None if no axis has probabilities of classes."""
    value = output.value.reshape(output.shape)
    if output.is_per_token() and output.shape[-1] in output.traits.vocabulary:
        return Kind("language")
    if output.operator == "LogSoftmax":
        value = np.exp(value)
    axis = _axis_of_sums(value)
    if axis is None:
        return None
    if value.ndim in (2, 3):
        return Kind("classifier", axis)
    if value.ndim == 4 and output.image is not None and value.shape[axis] <= _SEGMENTS:
        return Kind("segmentation", axis)
    return None


def _axis_of_sums(value: NDArray[Any]) -> int | None:
    """Return the axis along which values sum to 1; -1 for the last axis, None without any.

    Args:
        value: the output, without trailing ones.
    """
    if value.min() < 0:
        return None
    for axis in range(value.ndim - 1, 0, -1):
        sums = value.sum(axis=axis, dtype=np.float64)
        if value.shape[axis] > 1 and np.allclose(sums, 1, atol=1e-3):
            return -1 if axis == value.ndim - 1 else axis
    return None


def _kind_of_decisions(output: _Output) -> Kind:
    """Return the kind of the result of a Sigmoid: a mask, an image, or independent decisions."""
    value, image = output.value, output.image
    # One value for each value of a sound or another signal: a mask of it.
    if image is None and output.is_like_an_input():
        return Kind("mask")
    if value.ndim != 4 or image is None:
        return Kind("decisions")
    channels, height, pixels = _sizes(value, image)
    if channels == 3 and height >= pixels:
        return Kind("image")
    return Kind("mask" if height >= pixels / _SEGMENT_SCALE else "decisions")


def _kind_of_vectors(output: _Output) -> Kind:
    """Return the kind of vectors by the first sign."""
    vectors = _Vectors(output, output.value.reshape(output.shape))
    for has_sign, kind in _SIGNS_OF_VECTORS:
        if has_sign(vectors):
            return kind
    return Kind("regression")


@dataclass(frozen=True)
class _Vectors:
    """An output with a vector for each sample.

    Attributes:
        output: the output.
        rows: the vectors, shape (samples, width).
    """

    output: _Output
    rows: NDArray[Any]

    @property
    def width(self) -> int:
        """Return the number of values in a vector."""
        return int(self.rows.shape[1])

    def are_not_finite(self) -> bool:
        """Return whether a value is infinite or no number."""
        return not np.isfinite(self.rows).all()

    def are_numbers(self) -> bool:
        """Return whether each sample has a single value."""
        return self.width < 2

    def are_probabilities(self) -> bool:
        """Return whether the rows sum to 1."""
        return _axis_of_sums(self.rows) == -1

    def are_normalized(self) -> bool:
        """Return whether vectors have length 1; half the width of an embedding suffices then."""
        return self.width >= _VECTOR_WIDTH // 2 and _are_unit_vectors(self.rows)

    def are_steps_of_a_series(self) -> bool:
        """Return whether there is a value for each position of a signal of rank three."""
        return any(
            feed.ndim == 3 and feed.dtype.kind == "f" and self.width in feed.shape[1:]
            for feed in self.output.feeds.values()
        )

    def are_named_quantities(self) -> bool:
        """Return whether the name is that of quantities."""
        return self.output.is_named(_QUANTITY_NAMES)

    def are_named_classes(self) -> bool:
        """Return whether the name is that of classes, or the width that of known classes."""
        if self.output.is_named(_CLASS_NAMES):
            return True
        return self.width in _COMMON_CLASSES and self._describe_senses()

    def have_embedding_width(self) -> bool:
        """Return whether the width is usual for an embedding."""
        return self.width >= _VECTOR_WIDTH and self.width % _VECTOR_DIVISOR == 0

    def describe_senses(self) -> bool:
        """Return whether the model reads images or text, and no name speaks of vectors."""
        # Vectors of numbers for such inputs are mostly scores of classes.
        return self._describe_senses() and not _VECTOR_NAMES.search(self.output.name)

    def _describe_senses(self) -> bool:
        """Return whether the model reads images or text."""
        reads_maps = any(feed.ndim >= 4 for feed in self.output.feeds.values())
        return reads_maps or bool(self.output.traits.token_input)


#: Signs of the kind of vectors. The strongest come first; names decide where values do not.
_SIGNS_OF_VECTORS: tuple[tuple[Callable[[_Vectors], bool], Kind], ...] = (
    (_Vectors.are_not_finite, Kind("signal")),
    (_Vectors.are_numbers, Kind("regression")),
    (_Vectors.are_probabilities, Kind("classifier")),
    (_Vectors.are_normalized, Kind("embedding")),
    (_Vectors.are_steps_of_a_series, Kind("series")),
    (_Vectors.are_named_quantities, Kind("regression")),
    (_Vectors.are_named_classes, Kind("classifier", certain=False)),
    (_Vectors.have_embedding_width, Kind("embedding")),
    (_Vectors.describe_senses, Kind("classifier", certain=False)),
)


def _are_unit_vectors(rows: NDArray[Any]) -> bool:
    # float16 squares of long vectors overflow.
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    return bool(np.allclose(lengths, 1, atol=1e-3))


def _kind_of_sequences(output: _Output) -> Kind:
    """Return the kind of vectors for each position: of tokens, or of a signal."""
    if output.is_per_token():
        return _kind_of_tokens(output)
    if any(
        feed.ndim in (2, 3) and feed.dtype.kind == "f" for feed in output.feeds.values()
    ):
        return Kind("series")
    return Kind("signal")


def _kind_of_tokens(output: _Output) -> Kind:
    """Return the kind of vectors for each token: a language model's, classes, or an encoder's."""
    width = output.shape[2]
    if width in output.traits.vocabulary:
        return Kind("language")
    if width >= _VECTOR_WIDTH:
        return Kind("embedding")
    if width >= _TOKEN_CLASSES:
        return Kind("classifier", certain=False)
    return Kind("signal")


def _channel_axis(image: NDArray[Any]) -> int | None:
    """Return the axis of the channels of gray or colour images, 1 or 3; None for other maps."""
    for axis in (1, 3):
        if image.shape[axis] in (1, 3):
            return axis
    return None


def _sizes(value: NDArray[Any], image: NDArray[Any]) -> tuple[int, int, int]:
    """Return channels and height of maps in the layout of the image, and the image's height."""
    axis = _channel_axis(image) or 1
    height = 2 if axis == 1 else 1
    return value.shape[axis], value.shape[height], image.shape[height]


def _kind_of_maps(output: _Output) -> Kind:
    """Return whether maps with channels are an image, a segmentation, or quantities per pixel."""
    value, image = output.value, output.image
    if image is None:
        return Kind("signal")
    channels, height, pixels = _sizes(value, image)
    if channels in (1, 3) and height >= pixels:
        # Depths in metres are no shades.
        is_shade = channels == _sizes(image, image)[0] or _has_range_of_image(value)
        return Kind("image" if is_shade else "regression")
    # Smaller maps with many channels are features.
    is_small = height < max(channels, pixels / _SEGMENT_SCALE)
    if is_small or output.is_named(_QUANTITY_NAMES) or not 2 <= channels <= _SEGMENTS:
        return Kind("signal")
    axis = _channel_axis(image) or 1
    return Kind("segmentation", axis if axis == 1 else -1, certain=False)


def _has_range_of_image(value: NDArray[Any]) -> bool:
    """Return whether values lie in 0 to 1, -1 to 1 or 0 to 255, with some overshoot at edges."""
    least, greatest = float(value.min()), float(value.max())
    return (least > -1.2 and greatest < 1.2) or (least > -26 and 2 < greatest < 282)
