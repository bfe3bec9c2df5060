"""Hash the computation of each tensor, to recognize tensors of other versions of a graph."""

from __future__ import annotations

import hashlib

import numpy as np

from calibrators.onnx_runtime.external_tensors import raw_bytes
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node


def tensor_keys(graph: Graph) -> dict[str, str]:
    """Return a key for each input of the graph and each output of a node.

    Tensors with equal keys have equal values on equal inputs: the key is a hash of the operators
    and the constants that the tensor depends on, independent of names.
    """
    keys = {value.name: f"input {value.name}" for value in graph.inputs}
    constants = {"": ""}  # an omitted input has no key

    def key_of(name: str) -> bytes:
        if name not in keys and name not in constants:
            constants[name] = _constant_key(graph, name)
        return (keys.get(name) or constants[name]).encode()

    for node in graph.nodes:
        operator = _node_text(node)
        read = [key_of(name) for name in (*node.inputs, *node.captures)]
        for position, name in enumerate(node.outputs):
            if name:
                # The position tells the results of one node apart.
                keys[name] = _digest(operator, *read, str(position).encode())
    return keys


def _node_text(node: Node) -> bytes:
    """Serialize the operator and the attributes of a node, without names."""
    proto = node.to_proto()
    proto.name = proto.doc_string = ""
    del proto.input[:], proto.output[:], proto.metadata_props[:]
    # The order of attributes has no meaning.
    attributes = sorted(proto.attribute, key=lambda attribute: attribute.name)
    del proto.attribute[:]
    proto.attribute.extend(attributes)
    return proto.SerializeToString(deterministic=True)


def _constant_key(graph: Graph, name: str) -> str:
    array = graph.constant(name)
    if array is None:  # a value of the graph around a body
        return f"name {name}"
    header = f"{array.dtype} {array.shape}".encode()
    if array.dtype == np.object_:
        return _digest(header, repr(array.tolist()).encode())
    return _digest(header, raw_bytes(array))


def _digest(*parts: bytes | memoryview) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        # Lengths mark the ends of the parts: ("ab", "c") and ("a", "bc") differ.
        digest.update(f"{len(part)} ".encode())
        digest.update(part)
    return digest.hexdigest()
