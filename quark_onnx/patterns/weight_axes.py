"""The axes of the output channels in the weights of all operators.

``weight_axes`` is the one table from operator and input to axes: rules, and the analysis of errors,
read it. Values that share an output channel are summed, and may share a scale; values of two output
channels never are, and may differ in range by any factor. Optimizers see Conv, ConvTranspose, Gemm
and MatMul through ``conv_and_gemm``, in the same arrangement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.graph import Graph, Node
from quark_onnx.patterns.conv_and_gemm import output_axis

#: Operators in order: the type, and the new shape of a Reshape or the axes of a Transpose.
Moves = list[tuple[str, tuple[int, ...]]]

_MS = "com.microsoft::"
#: Loss in dB of fewer scales than output channels, from which on each output channel gets one.
_LOSS = 6.0
#: The axes of an operand that an equation does not name.
_ELLIPSIS = "..."


@dataclass(frozen=True)
class WeightAxes:
    """Axes of a weight.

    Attributes:
        channels: axes of the output channels, ascending.
        summed: axis of the sum, along which blocks run; None where blocks are impossible.
        groups: number of parts of the first axis that belong to different output channels
            (ConvTranspose with groups).
        in_kernels: axes of the scales in integer kernels, which take one axis at most; None where
            there is no such kernel, or where the kernel takes the scales of all channels.
    """

    channels: tuple[int, ...]
    summed: int | None = None
    groups: int = 1
    in_kernels: tuple[int, ...] | None = None

    def layout(self, shape: Sequence[int], *, first_axis: bool = False) -> Layout:
        """Return the arrangement with all output channels along one axis.

        Args:
            shape: shape of the weight.
            first_axis: this is the first axis, as in the kernel of a Conv.
        """
        split, channels = tuple(shape), self.channels
        if self.groups == shape[0]:
            # A group is one index of the first axis.
            channels = (0, *channels)
        elif self.groups > 1:
            split = (self.groups, shape[0] // self.groups, *shape[1:])
            channels = (0, *(axis + 1 for axis in channels))
        # An axis of length 1 separates no channels.
        channels = tuple(axis for axis in channels if split[axis] != 1) or channels[-1:]
        first, last = channels[0], channels[-1]
        order = tuple(range(len(split)))
        if last - first + 1 != len(channels) or first_axis:
            order = (*channels, *(axis for axis in order if axis not in channels))
            first, last = 0, len(channels) - 1
        sizes = [split[axis] for axis in order]
        merged = (*sizes[:first], prod(sizes[first : last + 1]), *sizes[last + 1 :])
        if self.in_kernels == () and merged == tuple(shape):
            # A kernel with one scale must not read the weight with several: (1, K, N) is (K, N).
            first -= sizes[:first].count(1)
            merged = tuple(size for size in merged if size != 1)
        return Layout(tuple(shape), split, order, merged, first)

    def rows(self, weight: NDArray[Any]) -> NDArray[Any]:
        """Return a weight as a matrix with a row for each output channel."""
        layout = self.layout(weight.shape)
        moved = np.moveaxis(layout.arranged(weight), layout.axis, 0)
        return moved.reshape(len(moved), -1)

    def loses(self, weight: NDArray[Any]) -> bool:
        """Return whether the scales of integer kernels are too coarse for the output channels.

        A scale follows the greatest magnitude, and the error of each output channel counts in
        relation to its own values.
        """
        if self.in_kernels is None:
            return False
        magnitudes = np.abs(weight.astype(np.float64))
        others = tuple(
            axis for axis in range(weight.ndim) if axis not in self.in_kernels
        )
        coarse = magnitudes.max(axis=others, initial=0.0, keepdims=True)
        rows = self.rows(magnitudes)
        power = np.square(rows).mean(axis=1)
        # Output channels of zeros have no error.
        used = power > 0
        if not used.any():
            return False
        # (channels,): the greatest magnitudes that the scales follow.
        before = self.rows(np.broadcast_to(coarse, weight.shape)).max(axis=1)[used]
        after = rows.max(axis=1)[used]
        ratio = (before**2 / power[used]).mean() / (after**2 / power[used]).mean()
        return bool(10 * np.log10(ratio) > _LOSS)


@dataclass(frozen=True)
class Layout:
    """An arrangement of a weight that has all output channels along one axis.

    Attributes:
        shape: shape of the weight.
        split: shape in which each output channel is an index of whole axes.
        order: axes of ``split`` in the order of the arrangement.
        merged: shape of the arrangement, with the output channels along one axis.
        axis: axis of the output channels in the arrangement.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    merged: tuple[int, ...]
    axis: int

    @property
    def is_plain(self) -> bool:
        """Whether the weight itself has all output channels along one axis."""
        in_order = self.order == tuple(range(len(self.order)))
        return in_order and self.merged == self.shape

    def arranged(self, weight: NDArray[Any]) -> NDArray[Any]:
        """Arrange an array of the weight's shape."""
        ordered = weight.reshape(self.split).transpose(self.order)
        return np.asarray(ordered.reshape(self.merged))

    def restored(self, arranged: NDArray[Any]) -> NDArray[Any]:
        """Return an array of the shape of the arrangement in the weight's shape."""
        ordered = arranged.reshape([self.split[axis] for axis in self.order])
        split = ordered.transpose(np.argsort(self.order))
        return np.asarray(split.reshape(self.shape))

    def arranging(self) -> Moves:
        """Return the operators that arrange the weight."""
        steps: Moves = []
        if self.split != self.shape:
            steps.append(("Reshape", self.split))
        if self.order != tuple(range(len(self.order))):
            steps.append(("Transpose", self.order))
        return [*steps, ("Reshape", self.merged)]

    def restoring(self, stored: Sequence[int]) -> Moves:
        """Return the operators that restore the weight's shape.

        Args:
            stored: shape of the codes: ``merged``, or a matrix of the same values.
        """
        if self.order == tuple(range(len(self.order))):
            return [("Reshape", self.shape)]
        steps: Moves = []
        ordered = tuple(self.split[axis] for axis in self.order)
        if ordered != tuple(stored):
            steps.append(("Reshape", ordered))
        steps.append(("Transpose", tuple(np.argsort(self.order).tolist())))
        if self.split != self.shape:
            steps.append(("Reshape", self.shape))
        return steps


def weight_axes(graph: Graph, node: Node, place: int) -> WeightAxes | None:
    """Return the axes of the weight that a node reads as an input.

    Args:
        graph: the graph, which knows the rank of the weight.
        node: a node of any operator.
        place: position of the weight among the inputs.

    Returns:
        The axes; None where the input has no output channels: the operator reads no weight there,
        or a vector, or a constant of fewer axes than its weights have.
    """
    if place >= len(node.inputs):
        return None
    find = BY_INPUT.get((node.kind, place))
    if find is None:
        return None
    rank = len(graph.sizes(node.inputs[place]))
    axes = find(node, place, rank)
    if axes is None or not graph.is_constant(node.inputs[place]):
        return axes
    named = (*axes.channels, -1 if axes.summed is None else axes.summed)
    return axes if max(named) < rank else None


def _fixed(channels: tuple[int, ...], summed: int) -> _Find:
    """Return a row of the table that depends on no attribute."""

    def find(node: Node, place: int, rank: int) -> WeightAxes:
        del node, place, rank
        return WeightAxes(channels, summed)

    return find


def _conv_transpose(node: Node, place: int, rank: int) -> WeightAxes:
    """Return the axes of (C, M/group, ...): group g has the g-th part of the C inputs."""
    del place, rank
    groups = int(node.attribute("group", 1))
    if groups == 1:
        return WeightAxes((1,), 0)
    return WeightAxes((1,), 0, groups, in_kernels=(1,))


def _gemm(node: Node, place: int, rank: int) -> WeightAxes:
    """Return the axes of (M, K) on the left, of (K, N) on the right, or of the transposes."""
    del rank
    transposed = bool(node.attribute("trans" + "AB"[place], 0))
    axis = output_axis(node) if place else int(transposed)
    return WeightAxes((axis,), 1 - axis)


def _matmul(node: Node, place: int, rank: int) -> WeightAxes | None:
    """Return the axes of (..., M, K) on the left and of (..., K, N) on the right."""
    if place == 0:
        return _product(rank, rank - 1, (rank - 2,))
    # onnxruntime refuses integer products with a stack on the right and scales per column.
    return _product(rank, rank - 2, ())


def _fused_matmul(node: Node, place: int, rank: int) -> WeightAxes | None:
    """Return the axes of a MatMul with operands that may be transposed."""
    summed = fused_sum_axis(node, "AB"[place], rank)
    return _product(rank, rank + summed, ())


def fused_sum_axis(node: Node, letter: str, rank: int) -> int:
    """Return the axis of the sum of an operand of a fused MatMul, from the end.

    Args:
        node: the product.
        letter: "A" for the left operand, "B" for the right one.
        rank: rank of the operand; 0 if unknown.
    """
    if rank == 1:
        return -1
    # The last axis of A and the second to last of B, the reverse if transposed.
    transposed = bool(node.attribute(f"trans{letter}", 0))
    if (letter == "A") != transposed:
        return -1
    # With the batch axes in the middle, the rows come first.
    if node.attribute(f"transBatch{letter}", 0):
        return -rank
    return -2


def _product(rank: int, summed: int, in_kernels: tuple[int, ...]) -> WeightAxes | None:
    """Return the axes of an operand of a matrix product: all but one are output channels."""
    if rank < 2:
        return None
    channels = tuple(axis for axis in range(rank) if axis != summed)
    if rank == 2:
        return WeightAxes(channels, summed)
    return WeightAxes(channels, summed, in_kernels=in_kernels)


def _einsum(node: Node, place: int, rank: int) -> WeightAxes | None:
    """Return the axes of an operand of a product: indices of the result are output channels."""
    terms, result = equation_terms(node)
    summed = last_axis(terms, result, place)
    if len(node.inputs) != 2 or rank < 2 or summed is None:
        return None
    indices = _indices(terms[place], rank)
    channels = tuple(
        axis for axis, index in enumerate(indices) if index in result or not index
    )
    if len(channels) < 2:
        return WeightAxes(channels, summed % rank)
    # Indices that the other operand shares are batch axes.
    unshared = [axis for axis in channels if indices[axis] not in terms[1 - place]]
    return WeightAxes(channels, summed % rank, in_kernels=tuple(unshared[-1:]))


def equation_terms(node: Node) -> tuple[list[str], str]:
    """Return the indices of each operand and of the result of an Einsum.

    Without an arrow, the result has the axes of ellipses and the indices that occur once.
    """
    equation = str(node.attribute("equation", "")).replace(" ", "")
    operands, arrow, result = equation.partition("->")
    if not arrow:
        letters = sorted(set(operands) - set(",."))
        once = [letter for letter in letters if operands.count(letter) == 1]
        result = "".join(once)
        if _ELLIPSIS in operands:
            result = _ELLIPSIS + result
    return operands.split(","), result


def last_axis(terms: list[str], result: str, place: int) -> int | None:
    """Return the last axis of an operand that an Einsum sums over; None without any.

    Args:
        terms: indices of each operand.
        result: indices of the result.
        place: position of the operand among the inputs.

    Returns:
        The axis, from the end (negative) after an ellipsis, which stands for any number of axes.
    """
    # An equation with fewer terms than inputs is not valid: nothing is known of the others.
    term = terms[place] if place < len(terms) else ""
    others = "".join(terms[:place] + terms[place + 1 :])
    # Indices that this operand shares with others, and that the result lacks, are summed over.
    summed = set(others) - set(result)
    before, _, after = term.partition(_ELLIPSIS)
    for axis in range(-1, -len(after) - 1, -1):
        if after[axis] in summed:
            return axis
    for axis in range(len(before) - 1, -1, -1):
        if before[axis] in summed:
            return axis
    return None


def _indices(term: str, rank: int) -> list[str]:
    """Return the index of each axis of an operand; empty for the axes of an ellipsis."""
    before, _, after = term.partition(_ELLIPSIS)
    return [*before, *[""] * (rank - len(before) - len(after)), *after]


def transposed_matrix(graph: Graph, tensor: str) -> Node | None:
    """Return the Transpose of a constant matrix that one product reads; None for other tensors.

    Preparation folds it; without preparation it stays.
    """
    transpose = graph.producer_of_kind(tensor, {"Transpose"})
    if transpose is None or graph.is_output(tensor):
        return None
    matrix = transpose.inputs[0]
    if not graph.is_constant(matrix) or len(graph.sizes(matrix)) != 2:
        return None
    readers = graph.consumers(tensor)
    is_product = len(readers) == 1 and readers[0].kind in ("MatMul", "Gemm")
    turns = transpose.attribute("perm", [1, 0]) == [1, 0]
    return transpose if is_product and turns else None


_Find = Callable[[Node, int, int], WeightAxes | None]

#: Weights (M, C/group, ...) of convolutions, with the output channels M.
_KERNEL = _fixed((0,), 1)
#: Weights (directions, gates * hidden, inputs) of recurrent layers: each unit of each gate is a sum
#: of its own. No engine computes gates on integers with one scale for several.
_GATES = _fixed((0, 1), 2)
#: Projections (inputs, outputs) of attention, of query, key and value side by side.
_PROJECTION = _fixed((1,), 0)
#: Weights (experts, outputs, inputs) of a mixture of experts.
_EXPERTS = _fixed((0, 1), 2)
#: Tables (entries, features): entries reach the next layer unsummed.
_TABLE = _fixed((0,), 1)

#: The table: operator and input to axes.
BY_INPUT: dict[tuple[str, int], _Find] = {
    ("Conv", 1): _KERNEL,
    ("DeformConv", 1): _KERNEL,
    (_MS + "FusedConv", 1): _KERNEL,
    # Depthwise (C, 1, ...): a channel sums over the positions of the kernel alone.
    ("CausalConvWithState", 1): _fixed((0,), 2),
    (_MS + "CausalConvWithState", 1): _fixed((0,), 2),
    ("ConvTranspose", 1): _conv_transpose,
    ("Gemm", 0): _gemm,
    ("Gemm", 1): _gemm,
    (_MS + "FusedGemm", 0): _gemm,
    (_MS + "FusedGemm", 1): _gemm,
    (_MS + "GemmFastGelu", 1): _PROJECTION,
    ("MatMul", 0): _matmul,
    ("MatMul", 1): _matmul,
    **{
        (_MS + name, place): _fused_matmul
        for name in ("FusedMatMul", "FusedMatMulActivation", "TransposeMatMul")
        for place in (0, 1)
    },
    ("Einsum", 0): _einsum,
    ("Einsum", 1): _einsum,
    **{(kind, place): _GATES for kind in ("LSTM", "GRU", "RNN") for place in (1, 2)},
    (_MS + "Attention", 1): _PROJECTION,
    (_MS + "PackedAttention", 1): _PROJECTION,
    (_MS + "DecoderMaskedSelfAttention", 1): _PROJECTION,
    (_MS + "LongformerAttention", 1): _PROJECTION,
    (_MS + "LongformerAttention", 4): _PROJECTION,
    (_MS + "DecoderAttention", 2): _PROJECTION,
    (_MS + "DecoderAttention", 3): _PROJECTION,
    **{(_MS + "MoE", place): _EXPERTS for place in (2, 4, 6)},
    ("Gather", 0): _TABLE,
    **{(_MS + "EmbedLayerNormalization", place): _TABLE for place in (2, 3, 4)},
}
