"""Find the residual streams of a transformer, with their writers and readers.

A residual stream is the sum of all tensors between normalizations. The search follows edges alone:
operands of an Add belong together, whatever the nodes are called.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import ConstantInput, private
from quark_onnx.graph.matching import is_along_last_axis
from quark_onnx.graph.pattern import scalar, tensor
from quark_onnx.kernels.hadamard import Rotation
from quark_onnx.patterns.linear import Floats, Linear, last_stays, width
from quark_onnx.patterns.norms import Norm

#: Rearrangements of vectors that leave the vectors unchanged.
_MOVING = frozenset(
    {
        "Identity",
        "Dropout",
        "Reshape",
        "Transpose",
        "Slice",
        "Squeeze",
        "Unsqueeze",
        "Expand",
        "Gather",
    },
)


def _is_computed(graph: Graph, tensor: str) -> bool:
    return not graph.is_constant(tensor)


_X = tensor("x", where=_is_computed)
#: A multiple of a tensor; a constant divided by the tensor is none.
_SCALED = _X * scalar() | _X / scalar()


class Unknown(Exception):  # noqa: N818
    """The reason why a stream cannot be rotated."""


@dataclass
class Stream:
    """Tensors to add up, with ``size`` channels along the last axis.

    Attributes:
        size: number of channels.
        tensors: names of the tensors.
        writers: constants that compute the summands, along the axis of the channels.
        readers: layers that read the stream, and the normalization between, if any.
        norms: normalizations that read the stream.
    """

    size: int
    tensors: set[str] = field(default_factory=set)
    writers: dict[tuple[Node, int], ConstantInput] = field(default_factory=dict)
    readers: dict[Node, tuple[Linear, Norm | None]] = field(default_factory=dict)
    norms: list[Norm] = field(default_factory=list)

    @property
    def centered(self) -> bool:
        """Whether a normalization subtracts the mean."""
        return any(norm.centered for norm in self.norms)

    def rotate(self, graph: Graph, rotation: Rotation, key: str) -> None:
        """Rotate the writers, and inversely the weights of the readers.

        Scales and shifts of normalizations are folded into the readers first.

        Args:
            graph: the graph, which is changed in place.
            rotation: a rotation of ``size`` channels.
            key: suffix of the names of changed constants; a shared one is changed once per key.
        """
        for writer in self.writers.values():
            _turn(graph, writer, rotation, key)
        # Scale and shift are folded before the rotation, which acts on the input of the plain
        # matrix.
        for layer, norm in self.readers.values():
            if norm is not None:
                # The shift goes through the unscaled matrix: bias += shift @ W, then W *= scale
                # per row.
                _unfold(graph, layer, norm, self.size)
            _turn(graph, layer.weight[0], rotation, key)
        # Last: the readers above still read scale and shift.
        for norm in self.norms:
            _strip(graph, norm)


def _turn(graph: Graph, stored: ConstantInput, rotation: Rotation, key: str) -> None:
    """Rotate the vectors of a constant along the axis of the channels."""

    def turned(value: Floats) -> Floats:
        # A single value for all channels becomes one value per channel by the rotation.
        if value.ndim == 0 or value.shape[stored.axis] == 1:
            value = np.broadcast_to(value, (*value.shape[:-1], rotation.size))
        return rotation.turn(value, stored.axis)

    stored.change(graph, key, turned)


def _unfold(graph: Graph, layer: Linear, norm: Norm, size: int) -> None:
    """Fold the scale and the shift of a normalization into a layer that reads the result."""
    # One value for all channels stands for a vector (channels,).
    if norm.shift is not None and norm.shift.value(graph).any():
        shift = np.broadcast_to(norm.shift.value(graph), (size,))
        layer.add_to_bias(graph, f"shift_{norm.result}", shift @ layer.matrix(graph))
    if norm.scale is not None:
        scale = np.broadcast_to(norm.scale.value(graph), (size,))
        layer.weight[0].scale(graph, f"scale_{norm.result}", scale)


def _strip(graph: Graph, norm: Norm) -> None:
    """Remove scale and shift of a normalization, which its readers have taken over."""
    # A decomposed normalization has a tensor before its Mul and Add; an operator keeps both
    # inputs, set to 1 and 0.
    if norm.bare:
        graph.replace_uses(norm.result, norm.bare)
        return
    if norm.scale is not None:
        norm.scale.change(graph, "ones", lambda value: value * 0 + 1)
    if norm.shift is not None:
        norm.shift.change(graph, "zeros", lambda value: value * 0)


def streams(
    graph: Graph,
    norms: list[Norm],
) -> tuple[list[Stream], list[str]]:
    """Return the streams to rotate, and notes on refused streams.

    Args:
        graph: the graph.
        norms: its normalizations over the last axis.

    Returns:
        The streams, without those of which a part cannot be rotated; and at most one note.
    """
    result = list[Stream]()
    refused = list[str]()
    seen = set[str]()
    for norm in norms:
        # The stream of an earlier normalization contains this one.
        if seen & {*norm.sources}:
            continue
        search = _Search(graph, norms, Stream(width(graph, norm.sources[0])))
        try:
            search.run(norm.sources[0])
        except Unknown as reason:
            refused.append(f"{norm.name}: {reason}")
        else:
            result.append(search.stream)
        # Also for a refused stream: its other norms would be refused for the same reason.
        seen |= search.stream.tensors
    if not refused:
        return result, []
    note = f"the residual stream is not rotated at {refused[0]}"
    if len(refused) > 1:
        note += f" (and {len(refused) - 1} more like it)"
    return result, [note]


class _Search:
    """Search for the tensors of a stream along the edges."""

    def __init__(self, graph: Graph, norms: list[Norm], stream: Stream) -> None:
        self.graph = graph
        self.stream = stream
        self.todo = list[str]()
        # Nodes that read the sources of a normalization, such as its ReduceMean and its Sub.
        self.by_node = {node: norm for norm in norms for node in norm.nodes}
        self.results = {norm.result: norm for norm in norms}

    def run(self, start: str) -> None:
        """Find the stream of a tensor.

        Args:
            start: a source of a normalization.

        Raises:
            Unknown: an operator or a shape is not supported.
        """
        if self.stream.size < 2:
            raise Unknown("the number of its channels is not known")
        self.push(start)
        while self.todo:
            tensor = self.todo.pop()
            # Callers and bodies would see rotated values.
            if not private(self.graph, tensor):
                raise Unknown(
                    f"{tensor!r} is an output of the model, or read by a body",
                )
            # A width of 0 is unknown; the edges around decide then.
            if width(self.graph, tensor) not in (0, self.stream.size):
                raise Unknown(f"{tensor!r} has another number of channels")
            self.written(tensor)
            for node in self.graph.consumers(tensor):
                self.read(tensor, node)
        # Last, when every norm of the stream is known: a rotation passes a norm only if its scale
        # and shift can be folded into linear readers.
        for norm in self.stream.norms:
            self.normalized(norm, norm.result)

    def push(self, tensor: str) -> None:
        """Add a tensor to the stream."""
        if tensor not in self.stream.tensors:
            self.stream.tensors.add(tensor)
            self.todo.append(tensor)

    def operand(self, node: Node, index: int) -> None:
        """Add an operand of an Add or Sub: another tensor of the stream, or a constant writer.

        Raises:
            Unknown: a constant has another size or type.
        """
        name = node.inputs[index]
        if not self.graph.is_constant(name):
            self.push(name)
        else:
            self.constant(ConstantInput(node, index))

    def constant(self, stored: ConstantInput) -> None:
        """Add a constant writer.

        Args:
            stored: a constant whose last axis has the channels, or a single value.

        Raises:
            Unknown: the constant has another size or type.
        """
        if not stored.spread(self.graph, self.stream.size):
            raise Unknown(
                f"{stored.node.name} ({stored.node.kind}) adds a constant of another size or type",
            )
        self.stream.writers[stored.node, stored.index] = stored

    def written(self, tensor: str) -> None:
        """Follow the producer of a tensor of the stream.

        Raises:
            Unknown: the stream cannot be followed through the producer, or there is none.
        """
        if tensor in self.results:
            raise Unknown("what a normalization computes is added up as well")
        node = self.graph.producer(tensor)
        if node is None:
            raise Unknown(f"{tensor!r} is an input of the model")
        # Writers end the search: their constants are rotated.
        if self.layer(node) or self.lookup(node):
            return
        norm = self.by_node.get(node)
        scaled = _SCALED.match(self.graph, tensor)
        if node.kind in ("Add", "Sub"):
            self.operand(node, 0)
            self.operand(node, 1)
        elif scaled is not None:
            self.push(scaled["x"])
        elif self.moves(node):
            self.push(node.inputs[0])
        # The sum that a SkipLayerNormalization returns next to the normalized tensor.
        elif norm is not None and tensor == norm.sources[-1]:
            self.sum_of(norm)
        else:
            raise Unknown(f"{node.name} ({node.kind}) writes to it")

    def layer(self, node: Node) -> bool:
        """Add weight and bias of a layer that writes all channels; return False if not one."""
        layer = Linear.of(self.graph, node)
        if layer is None or layer.outputs != self.stream.size:
            return False
        self.stream.writers[node, 1] = layer.weight[1]
        if node.input(2):
            self.constant(ConstantInput(node, 2))
        return True

    def lookup(self, node: Node) -> bool:
        """Add a constant table of vectors; return False if the node reads none.

        Raises:
            Unknown: the table is not a matrix, or is read along another axis than the first.
        """
        if node.kind != "Gather" or not self.graph.is_constant(node.inputs[0]):
            return False
        rank = len(self.graph.sizes(node.inputs[0]))
        # Rows of the table (vectors, channels) are looked up along axis 0.
        if node.attribute("axis", 0) or rank != 2:
            raise Unknown(f"{node.name} (Gather) does not look up vectors")
        self.constant(ConstantInput(node, 0))
        return True

    def read(self, tensor: str, node: Node) -> None:
        """Follow a reader of a tensor of the stream.

        Raises:
            Unknown: the reader is no normalization, layer, sum, multiple or movement.
        """
        norm = self.by_node.get(node)
        layer = Linear.reading(self.graph, node, tensor)
        if norm is not None and tensor in norm.sources:
            self.sum_of(norm)
            if norm not in self.stream.norms:
                self.stream.norms.append(norm)
        elif layer is not None:
            self.stream.readers[node] = (layer, None)
        # The operands of a sum that is reached from one of them are found by ``written``.
        elif self.passes(node):
            self.push(node.outputs[0])
        # A Shape reads no value.
        elif node.kind != "Shape":
            raise Unknown(f"{node.name} ({node.kind}) reads it")

    def sum_of(self, norm: Norm) -> None:
        """Add the sources of a normalization."""
        for name in norm.sources:
            self.push(name)
        if norm.bias is not None:
            self.constant(norm.bias)

    def normalized(self, norm: Norm, tensor: str) -> None:
        """Follow the readers of a normalized tensor, which must be layers.

        Args:
            norm: a normalization of the stream.
            tensor: its result, or a tensor that only moves the vectors of the result.

        Raises:
            Unknown: another node reads the tensor, or scale or shift cannot be folded.
        """
        if not private(self.graph, tensor):
            raise Unknown(
                f"{tensor!r}, which is normalized, is an output of the model, or read by a body",
            )
        for stored in (norm.scale, norm.shift):
            if stored is not None and not stored.spread(self.graph, self.stream.size):
                raise Unknown(f"{norm.name} has a scale of another size")
        for node in self.graph.consumers(tensor):
            layer = Linear.reading(self.graph, node, tensor)
            if layer is not None:
                self.stream.readers[node] = (layer, norm)
            # A movement between normalization and layer passes the rotation unchanged.
            elif self.moves(node) and node.inputs[0] == tensor:
                self.normalized(norm, node.outputs[0])
            elif node.kind != "Shape":
                raise Unknown(
                    f"{node.name} ({node.kind}) reads {tensor!r}, which is normalized",
                )

    def passes(self, node: Node) -> bool:
        """Return whether the result of a node belongs to the stream if an operand does."""
        if node.kind in ("Add", "Sub") or self.moves(node):
            return True
        return _SCALED.match(self.graph, node.outputs[0]) is not None

    def moves(self, node: Node) -> bool:
        """Return whether a node moves complete vectors."""
        if node.kind not in _MOVING or not self._keeps_width(node):
            return False
        if node.kind == "Transpose":
            return last_stays(node)
        if node.kind == "Gather":
            return not is_along_last_axis(self.graph, node, 0)
        return node.kind != "Slice" or self._slices_rows(node)

    def _slices_rows(self, node: Node) -> bool:
        """Return whether a Slice leaves the last axis unchanged."""
        rank = len(self.graph.sizes(node.inputs[0]))
        # Without axes a Slice cuts the first ones, which may include the last.
        axes = self.graph.constant(node.input(3))
        if axes is None or rank == 0:
            return False
        return {-1, rank - 1}.isdisjoint(axes.ravel().tolist())

    def _keeps_width(self, node: Node) -> bool:
        """Return whether the channels lie along the last axis before and after a node."""
        widths = {width(self.graph, name) for name in (node.inputs[0], node.outputs[0])}
        if node.kind != "Reshape":
            widths.discard(0)  # an unknown width, which only a Reshape changes
        return widths <= {self.stream.size}
