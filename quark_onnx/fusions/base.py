"""The contract of a fusion, and how it looks at Q/DQ pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from quark_onnx.graph import Graph, Node

#: Writes an operator that computes on codes in place of a node between Q/DQ pairs; False if it has
#: none for the node.
Fusion = Callable[[Graph, Node], bool]

CONTRIB = "com.microsoft"

BYTES = frozenset({TensorProto.INT8, TensorProto.UINT8})


@dataclass(frozen=True)
class Codes:
    """What a DequantizeLinear reads, or a QuantizeLinear computes.

    Attributes:
        node: the DequantizeLinear or QuantizeLinear.
        codes, scale, zero_point: names; zero_point is empty where it is left out.
    """

    node: Node
    codes: str
    scale: str
    zero_point: str

    @property
    def axis(self) -> int:
        return int(self.node.attribute("axis", 1))

    @property
    def block_size(self) -> int:
        return int(self.node.attribute("block_size", 0))


def codes_of(graph: Graph, tensor: str) -> Codes | None:
    """The codes behind a tensor; None if it is not dequantized."""
    node = graph.producer(tensor)
    if node is None or node.op_type != "DequantizeLinear":
        return None
    return Codes(node, node.input(0), node.input(1), node.input(2))


def stored_codes(graph: Graph, tensor: str) -> Codes | None:
    """The codes behind a constant; None if it is computed, or not dequantized."""
    found = codes_of(graph, tensor)
    return found if found is not None and graph.is_constant(found.codes) else None


def value(graph: Graph, tensor: str) -> NDArray[Any]:
    """A constant that is known to be one.

    Scales may be stored in 16 bits, with a Cast behind them.
    """
    cast = graph.producer(tensor)
    if cast is not None and cast.op_type == "Cast":
        return value(graph, cast.inputs[0]).astype(np.float32)
    array = graph.constant(tensor)
    assert array is not None, tensor
    return array


def zero_points(graph: Graph, codes: Codes) -> NDArray[np.int64]:
    """Zero points of constant codes, of the shape of their scale; zeros where they are left out."""
    if codes.zero_point:
        return value(graph, codes.zero_point).astype(np.int64)
    return np.zeros(value(graph, codes.scale).shape, np.int64)


def read_bytes(graph: Graph, tensor: str) -> Codes | None:
    """The codes behind a tensor.

    None unless they have 8 bits and a scale, for all or for channels, that is known.
    """
    found = codes_of(graph, tensor) if tensor else None
    return found if found is not None and _known(graph, found) else None


def written_bytes(graph: Graph, tensor: str) -> Codes | None:
    """The codes that a result becomes.

    None unless a QuantizeLinear to 8 bits with one known scale alone reads it.
    """
    readers = graph.consumers(tensor)
    if graph.is_output(tensor) or [node.op_type for node in readers] != [
        "QuantizeLinear",
    ]:
        return None
    node = readers[0]
    found = Codes(node, node.outputs[0], node.inputs[1], node.input(2))
    return (
        found
        if tensor == node.inputs[0] and _known(graph, found) and one_scale(graph, found)
        else None
    )


def _known(graph: Graph, codes: Codes) -> bool:
    parameters = [codes.scale, codes.zero_point] if codes.zero_point else [codes.scale]
    constant = (
        all(map(graph.is_constant, parameters))
        and graph.elem_type(codes.scale) == TensorProto.FLOAT
    )
    return constant and not codes.block_size and code_type(graph, codes) in BYTES


def code_type(graph: Graph, codes: Codes) -> int:
    """``TensorProto.DataType`` of codes."""
    return graph.elem_type(codes.zero_point or codes.codes)


def one_scale(graph: Graph, *codes: Codes) -> bool:
    """Whether all codes have one scale for the whole tensor each."""
    return all(value(graph, one.scale).size == 1 for one in codes)


def alike(graph: Graph, first: Codes, *others: Codes) -> bool:
    """Whether codes of whole tensors mean the same numbers."""
    return one_scale(graph, first, *others) and all(
        code_type(graph, first) == code_type(graph, other)
        and value(graph, first.scale).item() == value(graph, other.scale).item()
        and zero_points(graph, first).item() == zero_points(graph, other).item()
        for other in others
    )


def grid(graph: Graph, codes: Codes) -> list[str]:
    """Names of scale and zero point, which is written if it was left out."""
    if codes.zero_point:
        return [codes.scale, codes.zero_point]
    dtype = helper.tensor_dtype_to_np_dtype(code_type(graph, codes))
    zero = np.zeros(value(graph, codes.scale).shape, dtype)
    return [codes.scale, graph.add_constant(f"{codes.codes}_zero_point", zero)]


def attributes(node: Node) -> dict[str, Any]:
    """All attributes of a node."""
    return {a.name: helper.get_attribute_value(a) for a in node.to_proto().attribute}


def write(  # noqa: PLR0913
    graph: Graph,
    node: Node,
    op_type: str,
    inputs: list[str],
    result: Codes | str,
    domain: str = CONTRIB,
    **set_to: Any,
) -> bool:
    """Let an operator take the place of a node, and of the QuantizeLinear behind it where codes are
    the result; True.

    Args:
        set_to: attributes of the operator.
    """
    output = result.codes if isinstance(result, Codes) else result
    graph.remove([node, result.node] if isinstance(result, Codes) else [node])
    if domain:
        graph.import_domain(domain)
    graph.add(op_type, inputs, [output], domain=domain, **set_to).name = node.name
    return True


def replace(graph: Graph, node: Node, result: str) -> None:
    """Let ``result`` stand for the first output of ``node``, which goes."""
    output = node.outputs[0]
    graph.remove([node])
    producer = graph.producer(result)
    assert producer is not None
    graph.set_output(producer, producer.outputs.index(result), output)
