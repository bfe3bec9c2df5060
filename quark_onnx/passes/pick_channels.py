"""Replace a channel shuffle followed by a selection with a Gather of channels."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from quark_onnx.containers import of_type
from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register

#: Most values of a tensor that are traced one by one.
_LARGEST = 1 << 24

Indices = NDArray[np.int64]


@register
def pick_channels(graph: Graph) -> int:
    """Replace Reshape, Transpose, Reshape and Gather by a Gather along the channels.

    ShuffleNet-like detectors (FastestDet) write this: half of the channels of a tensor bypass a
    block,
    every second one. The shuffle moves the full tensor in memory, the Gather copies what is read. A
    Slice with a step would be equivalent, but takes longer in onnxruntime 1.32.
    """
    count = 0
    for node in list(graph.nodes):
        if node.kind == "Gather" and _pick(graph, node):
            count += 1
    if count:
        graph.drop_unused()
    return count


def _pick(graph: Graph, node: Node) -> bool:
    chain = _shuffle_before(graph, node)
    index = graph.constant(node.inputs[1])
    if not chain or index is None:
        return False
    source = chain[0].inputs[0]
    shape = _static(graph, source)
    places = _followed(graph, chain, shape)
    if places is None:
        return False
    channels = _channels(
        places.take(index, axis=int(node.attribute("axis", 0))),
        shape,
    )
    if channels is None:
        return False
    result = node.outputs[0]
    name = graph.add_constant(f"{result}_channels", channels)
    graph.remove([node])
    graph.add(
        "Gather",
        [source, name],
        [result],
        name=node.name,
        axis=1,
    )
    return True


def _shuffle_before(graph: Graph, node: Node) -> list[Node]:
    """Return the Reshape, Transpose and Reshape before a node; empty if absent."""
    chain = list[Node]()
    tensor = node.inputs[0]
    for kind in ("Reshape", "Transpose", "Reshape"):
        producer = graph.producer_of_kind(tensor, {kind})
        if producer is None:
            return []
        chain.insert(0, producer)
        tensor = producer.inputs[0]
    return chain


def _static(graph: Graph, tensor: str) -> tuple[int, ...]:
    """Return the sizes of a tensor; empty if a size is open."""
    shape = graph.sizes(tensor)
    sizes = tuple(of_type(shape, int))
    return sizes if len(sizes) == len(shape) else ()


def _followed(
    graph: Graph,
    chain: list[Node],
    shape: tuple[int, ...],
) -> Indices | None:
    """Return the origins of the values after a shuffle; None for open sizes."""
    if not shape or prod(shape) > _LARGEST:
        return None
    # Moving the indices of the values through the shuffle shows what any such chain does,
    # whatever its shapes are.
    origins = np.arange(prod(shape)).reshape(shape)
    for node in chain:
        if node.kind == "Transpose":
            origins = origins.transpose(
                node.attribute(
                    "perm",
                    list(range(origins.ndim))[::-1],
                ),
            )
            continue
        sizes = _static(graph, node.outputs[0])
        if prod(sizes) != origins.size:
            return None
        origins = origins.reshape(sizes)
    return origins


def _channels(picked: Indices, shape: tuple[int, ...]) -> Indices | None:
    """Return the channels that were picked completely; otherwise None.

    Args:
        picked: origins of the picked values.
        shape: layout of the origins.
    """
    if picked.ndim != len(shape) or picked.ndim < 2 or picked.size == 0:
        return None
    channels: Indices = picked[0].reshape(len(picked[0]), -1)[:, 0] // prod(shape[2:])
    places = np.arange(prod(shape)).reshape(shape)
    # The guess from the first value of each plane is checked against all of them: a Transpose may
    # have exchanged rows and columns as well.
    same = channels.max() < shape[1] and np.array_equal(
        picked,
        places.take(channels, axis=1),
    )
    return channels if same else None
