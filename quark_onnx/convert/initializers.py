"""unique-initializers and shared-initializers: one constant for each node that reads it, or one for
all.
"""

from __future__ import annotations

import hashlib

from onnx import TensorProto

from calibrators.onnx_runtime.external_tensors import values
from quark_onnx.convert.base import Settings, conversion, counted, everywhere
from quark_onnx.fusions.base import attributes
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import copied
from quark_onnx.graph.node import DEQUANTIZE


@conversion("unique-initializers", keeps="exactly")
def unique_initializers(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """Each node reads constants of its own, the DequantizeLinear behind a shared weight included."""  # noqa: E501
    pairs = everywhere(graph, _split_pairs)
    copies = everywhere(graph, _copy)
    return graph, [
        *(f"{line} of constants added" for line in counted(pairs, "DequantizeLinear")),
        *(f"{line} added" for line in counted(copies, "initializer")),
    ]


@conversion("shared-initializers", keeps="exactly")
def shared_initializers(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """Initializers that are equal bit by bit are stored once."""
    return graph, [
        f"{line} removed" for line in counted(everywhere(graph, _share), "initializer")
    ]


def _split_pairs(graph: Graph) -> int:
    """Give each node that reads a dequantized constant a DequantizeLinear of its own.

    How many were added.
    """
    added = 0
    for node in [
        node
        for node in graph.nodes
        if node.op_type in DEQUANTIZE and graph.is_constant(node.inputs[0])
    ]:
        result = node.outputs[0]
        for reader in (
            []
            if graph.captured(result)
            else graph.consumers(result)[not graph.is_output(result) :]
        ):
            own = graph.fresh(f"{result}_of_{reader.name}")
            graph.add(
                node.op_type,
                node.inputs,
                [own],
                name=f"{node.name}_of_{reader.name}",
                domain=node.domain,
                **attributes(node),
            )
            _redirect(graph, reader, result, own)
            added += 1
    return added


def _copy(graph: Graph) -> int:
    """Give each node but the first that reads a constant a copy of it; how many."""
    added = 0
    for name in [name for name in graph.initializers if graph.is_constant(name)]:
        kept = graph.is_output(name) or graph.captured(name)
        for reader in graph.consumers(name)[not kept :]:
            if name in reader.inputs:
                _redirect(
                    graph,
                    reader,
                    name,
                    copied(graph, name, f"{name}_of_{reader.name}"),
                )
                added += 1
    return added


def _redirect(graph: Graph, node: Node, old: str, new: str) -> None:
    for place, name in enumerate(node.inputs):
        if name == old:
            graph.set_input(node, place, new)


def _share(graph: Graph) -> int:
    """Let nodes read the first of equal constants; how many others there were."""
    first: dict[tuple[object, ...], str] = {}
    count = 0
    for name, tensor in list(graph.initializers.items()):
        if not graph.is_constant(name):
            continue
        same = first.setdefault(_key(tensor), name)
        if same != name and not graph.is_output(name) and not graph.captured(name):
            graph.replace_uses(name, same)
            count += 1
    return count


def _key(tensor: TensorProto) -> tuple[object, ...]:
    """Equal for tensors that are equal bit by bit."""
    kind = (tensor.data_type, tuple(tensor.dims))
    if tensor.data_type == TensorProto.STRING:
        return (*kind, *tensor.string_data)
    return (*kind, hashlib.sha256(values(tensor).tobytes()).digest())
