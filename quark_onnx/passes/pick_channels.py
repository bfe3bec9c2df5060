"""Replace a channel shuffle followed by a selection with a Gather of channels."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.pattern import op, tensor
from quark_onnx.graph.shapes import known_sizes
from quark_onnx.passes.base import register, rewrite_each

#: Most values of a tensor that are traced one by one.
_LARGEST = 1 << 24

Indices = NDArray[np.int64]

_SHUFFLED = op("Reshape", op("Transpose", op("Reshape", tensor("x"))))
#: Gather of constant indices from the shuffled tensor x.
_PICKED = op("Gather", _SHUFFLED, tensor("indices", where=Graph.is_constant))


@register
def pick_channels(graph: Graph) -> int:
    """Replace Reshape, Transpose, Reshape and Gather by a Gather along the channels.

    ShuffleNet-like detectors (FastestDet) write this: every second channel of a tensor bypasses a
    block. The shuffle moves the full tensor in memory, the Gather copies only the values that are
    read. A Slice with a step would be equivalent, but takes longer in onnxruntime 1.32.
    """
    count = rewrite_each(graph, _pick, "Gather")
    # The shuffle may have other readers, such as a Gather of the other half: unused nodes go last.
    if count:
        graph.drop_unused()
    return count


def _pick(graph: Graph, node: Node) -> bool:
    result = node.outputs[0]
    # Two Gathers may share a shuffle.
    match = _PICKED.match(graph, result, shared=True)
    if match is None:
        return False
    _, *shuffle = match.nodes
    source = match["x"]
    indices = graph.constant(match["indices"])
    shape = known_sizes(graph.shape(source))
    if indices is None or shape is None:
        return False
    origins = _followed(graph, shuffle[::-1], shape)
    if origins is None:
        return False
    axis = int(node.attribute("axis", 0))
    size = origins.shape[axis]
    # An index out of range is left to the runtime, which reports the node.
    if not np.all((-size <= indices) & (indices < size)):
        return False
    channels = _channels(origins.take(indices, axis=axis), shape)
    if channels is None:
        return False
    name = graph.add_constant(f"{result}_channels", channels)
    graph.remove([node])
    graph.add("Gather", [source, name], [result], name=node.name, axis=1)
    return True


def _followed(
    graph: Graph, chain: list[Node], shape: tuple[int, ...]
) -> Indices | None:
    """Return the positions that the values after a shuffle had before it.

    None if a size is unknown or too large.
    """
    if not shape or prod(shape) > _LARGEST:
        return None
    # Moving the indices of the values through the shuffle shows what any such chain does,
    # whatever its shapes are.
    origins = np.arange(prod(shape)).reshape(shape)
    for node in chain:
        if node.kind == "Transpose":
            # Without ``perm`` a Transpose reverses the axes, as numpy does.
            origins = origins.transpose(node.attribute("perm"))
            continue
        sizes = known_sizes(graph.shape(node.outputs[0]))
        if sizes is None or prod(sizes) != origins.size:
            return None
        origins = origins.reshape(sizes)
    return origins


def _channels(picked: Indices, shape: tuple[int, ...]) -> Indices | None:
    """Return the picked channels; None if only some values of a channel were picked.

    Args:
        picked: positions of the picked values in a tensor.
    """
    if len(shape) < 2 or picked.ndim != len(shape) or not picked.size:
        return None
    # The first value of each plane of the first sample tells the channel: position // plane size.
    channels: Indices = picked[0].reshape(len(picked[0]), -1)[:, 0] // prod(shape[2:])
    positions = np.arange(prod(shape)).reshape(shape)
    # The guess from the first value of each plane is checked against all of them: a Transpose may
    # have exchanged rows and columns as well.
    if channels.max() >= shape[1]:
        return None
    is_whole = np.array_equal(picked, positions.take(channels, axis=1))
    return channels if is_whole else None
