"""unique-initializers and shared-initializers: unshare constants, or share equal ones."""

from __future__ import annotations

import hashlib

from onnx import TensorProto

from calibrators.onnx_runtime.external_tensors import values
from quark_onnx.convert.base import ConversionSettings, conversion, counted, everywhere
from quark_onnx.graph import Graph
from quark_onnx.graph.codes import copied
from quark_onnx.graph.node import DEQUANTIZE


@conversion("unique-initializers", keeps="exactly")
def unique_initializers(
    graph: Graph, settings: ConversionSettings
) -> tuple[Graph, list[str]]:
    """Give nodes unshared constants, with the DequantizeLinear of a shared weight."""
    # Pairs first: each copied DequantizeLinear then reads the codes, which are copied next.
    pairs = everywhere(graph, _split_pairs)
    copies = everywhere(graph, _copy)
    return graph, [
        *counted(pairs, "DequantizeLinear", "of constants added"),
        *counted(copies, "initializer", "added"),
    ]


@conversion("shared-initializers", keeps="exactly")
def shared_initializers(
    graph: Graph, settings: ConversionSettings
) -> tuple[Graph, list[str]]:
    """Store bitwise equal initializers once."""
    return graph, counted(everywhere(graph, _share), "initializer", "removed")


def _split_pairs(graph: Graph) -> int:
    """Copy the DequantizeLinear of a constant per reader; return the number of copies."""
    added = 0
    for node in graph.nodes_of_type(DEQUANTIZE):
        result = node.outputs[0]
        if not graph.is_constant(node.inputs[0]) or graph.captured(result):
            continue
        readers = graph.consumers(result)
        # The first reader keeps the node, unless the node's result is an output.
        for reader in readers[not graph.is_output(result) :]:
            copy = graph.compute(
                node.op_type,
                node.inputs,
                f"{result}_of_{reader.name}",
                name=f"{node.name}_of_{reader.name}",
                domain=node.domain,
                **node.attributes,
            )
            graph.replace_input(reader, result, copy)
            added += 1
    return added


def _copy(graph: Graph) -> int:
    """Copy a constant for each reader but the first; return the number of copies."""
    added = 0
    # A list, as copies are added on the way.
    for name in [name for name in graph.initializers if graph.is_constant(name)]:
        # An output, or a body that captures the name, keeps the original.
        read_elsewhere = graph.is_output(name) or graph.captured(name)
        for reader in graph.consumers(name)[not read_elsewhere :]:
            if name in reader.inputs:
                copy = copied(graph, name, f"{name}_of_{reader.name}")
                graph.replace_input(reader, name, copy)
                added += 1
    return added


def _share(graph: Graph) -> int:
    """Let nodes read the first of equal constants; return the number of the others."""
    names: dict[tuple[object, ...], str] = {}
    count = 0
    for name, tensor in list(graph.initializers.items()):
        if not graph.is_constant(name):
            continue
        same = names.setdefault(_key(tensor), name)
        # Outputs and captured tensors are found by name.
        if same != name and not graph.is_output(name) and not graph.captured(name):
            graph.replace_uses(name, same)
            count += 1
    return count


def _key(tensor: TensorProto) -> tuple[object, ...]:
    """Return a key that is equal for bitwise equal tensors."""
    kind = (tensor.data_type, tuple(tensor.dims))
    if tensor.data_type == TensorProto.STRING:
        return (*kind, *tensor.string_data)
    # A digest instead of the bytes: the keys of a large model would be as large as the weights.
    return (*kind, hashlib.sha256(values(tensor).tobytes()).digest())
