"""A channel shuffle of which parts are picked one by one picks channels in place: one Gather each."""  # noqa: E501

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register

#: Larger tensors are not followed value by value.
_LARGEST = 1 << 24

Indices = NDArray[np.int64]


@register
def pick_channels(graph: Graph) -> int:
    """Replace Reshape, Transpose, Reshape and Gather by one Gather along the channels.

    As ShuffleNet-like detectors have it (FastestDet): half of the channels of a tensor pass a block
    by, every second one. The shuffle moves the whole tensor in memory, the Gather copies what is
    read. A Slice with a step would say the same, and takes longer in onnxruntime 1.32.
    """
    count = 0
    for node in list(graph.nodes):
        if node.kind == "Gather" and _pick(graph, node):
            count += 1
    if count:
        graph.drop_unused()
    return count


def _pick(graph: Graph, node: Node) -> bool:
    chain, index = _shuffle_before(graph, node), graph.constant(node.inputs[1])
    if not chain or index is None:
        return False
    source = chain[0].inputs[0]
    shape = _static(graph, source)
    places = _followed(graph, chain, shape)
    if places is None:
        return False
    channels = _channels(places.take(index, axis=int(node.attribute("axis", 0))), shape)
    if channels is None:
        return False
    result = node.outputs[0]
    name = graph.add_constant(f"{result}_channels", channels)
    graph.remove([node])
    graph.add("Gather", [source, name], [result], name=node.name, axis=1)
    return True


def _shuffle_before(graph: Graph, node: Node) -> list[Node]:
    """Return the Reshape, Transpose and Reshape that compute what a node reads.

    None if it reads something else.
    """
    chain, tensor = list[Node](), node.inputs[0]
    for kind in ("Reshape", "Transpose", "Reshape"):
        producer = graph.producer(tensor)
        if producer is None or producer.kind != kind:
            return []
        chain.insert(0, producer)
        tensor = producer.inputs[0]
    return chain


def _static(graph: Graph, tensor: str) -> tuple[int, ...]:
    """Return the sizes of a tensor; none if one of them is open."""
    shape = graph.shape(tensor) or ()
    sizes = tuple(size for size in shape if isinstance(size, int))
    return sizes if len(sizes) == len(shape) else ()


def _followed(
    graph: Graph,
    chain: list[Node],
    shape: tuple[int, ...],
) -> Indices | None:
    """Return where each value behind a shuffle comes from; None where sizes are open."""
    if not shape or prod(shape) > _LARGEST:
        return None
    places = np.arange(prod(shape)).reshape(shape)
    for node in chain:
        if node.kind == "Transpose":
            places = places.transpose(
                node.attribute("perm", list(range(places.ndim))[::-1]),
            )
            continue
        sizes = _static(graph, node.outputs[0])
        if prod(sizes) != places.size:
            return None
        places = places.reshape(sizes)
    return places


def _channels(picked: Indices, shape: tuple[int, ...]) -> Indices | None:
    """Return the channels of which these are all places, in the layout of ``shape``.

    None if they are none.
    """
    if picked.ndim != len(shape) or picked.ndim < 2 or picked.size == 0:
        return None
    channels: Indices = picked[0].reshape(len(picked[0]), -1)[:, 0] // prod(shape[2:])
    places = np.arange(prod(shape)).reshape(shape)
    same = channels.max() < shape[1] and np.array_equal(
        picked,
        places.take(channels, axis=1),
    )
    return channels if same else None
