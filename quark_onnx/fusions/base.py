"""Define the contract of a fusion, and access to Q/DQ pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import BYTES
from quark_onnx.graph.matching import only_reader

#: Replaces a node between Q/DQ pairs by an operator on integer codes; returns False if impossible.
Fusion = Callable[[Graph, Node], bool]

CONTRIB = "com.microsoft"


@dataclass(frozen=True)
class Codes:
    """Integer codes: the input of a DequantizeLinear, or the output of a QuantizeLinear.

    Attributes:
        node: the DequantizeLinear or QuantizeLinear.
        codes: name of the codes.
        scale: name of the scale.
        zero_point: name of the zero point, empty if omitted.
    """

    node: Node
    codes: str
    scale: str
    zero_point: str

    @classmethod
    def read_by(cls, node: Node) -> Codes:
        """Return the codes that a DequantizeLinear reads."""
        return cls(node, node.input(0), node.input(1), node.input(2))

    @property
    def axis(self) -> int:
        """Axis of per-channel scales or of blocks."""
        return int(self.node.attribute("axis", 1))

    @property
    def block_size(self) -> int:
        """Values in a block; 0 without blocks."""
        return int(self.node.attribute("block_size", 0))


def codes_of(graph: Graph, tensor: str) -> Codes | None:
    """Return the codes of a dequantized tensor; None for a float tensor."""
    node = graph.producer_of_type(tensor, {"DequantizeLinear"})
    return None if node is None else Codes.read_by(node)


def stored_codes(graph: Graph, tensor: str) -> Codes | None:
    """Return the codes of a constant; None if computed, or not dequantized."""
    codes = codes_of(graph, tensor)
    return codes if codes is not None and graph.is_constant(codes.codes) else None


def value(graph: Graph, tensor: str) -> NDArray[Any]:
    """Return the value of a known constant.

    Scales may be stored in 16 bits, followed by a Cast.
    """
    cast = graph.producer_of_type(tensor, {"Cast"})
    if cast is not None:
        # The Cast is one to float32 (``OriginalDtypes.store_constants``).
        return value(graph, cast.inputs[0]).astype(np.float32)
    return graph.known(tensor)


def zero_points(graph: Graph, codes: Codes) -> NDArray[np.int64]:
    """Return the zero points of constant codes, in the shape of the scale; zeros if omitted."""
    if codes.zero_point:
        return value(graph, codes.zero_point).astype(np.int64)
    return np.zeros(value(graph, codes.scale).shape, np.int64)


def read_bytes(graph: Graph, tensor: str) -> Codes | None:
    """Return the codes of a dequantized tensor.

    None unless the codes have 8 bits and a constant scale, per tensor or per channel.
    """
    codes = codes_of(graph, tensor)
    return codes if codes is not None and _is_readable(graph, codes) else None


def written_bytes(graph: Graph, tensor: str) -> Codes | None:
    """Return the codes of a quantized result.

    None unless the only reader is a QuantizeLinear to 8 bits with a constant per-tensor scale.
    """
    node = only_reader(graph, tensor)
    if node is None or graph.is_output(tensor):
        return None
    # The tensor must be what is quantized, not a scale.
    if node.op_type != "QuantizeLinear" or tensor != node.inputs[0]:
        return None
    codes = Codes(node, node.outputs[0], node.inputs[1], node.input(2))
    return codes if _is_readable(graph, codes) and one_scale(graph, codes) else None


def _is_readable(graph: Graph, codes: Codes) -> bool:
    """Return whether codes have 8 bits and constant float32 scales, not of blocks."""
    # An omitted zero point is 0, which is constant.
    parameters = [name for name in (codes.scale, codes.zero_point) if name]
    if codes.block_size or not all(graph.is_constant(name) for name in parameters):
        return False
    is_float = graph.elem_type(codes.scale) == TensorProto.FLOAT
    return is_float and code_type(graph, codes) in BYTES


def code_type(graph: Graph, codes: Codes) -> int:
    """Return the ``TensorProto.DataType`` of codes."""
    # The type of the codes may be unknown to shape inference; that of the zero point is stored.
    return graph.elem_type(codes.zero_point or codes.codes)


def one_scale(graph: Graph, *codes: Codes) -> bool:
    """Return whether the codes have per-tensor scales."""
    return all(value(graph, one.scale).size == 1 for one in codes)


def alike(graph: Graph, *codes: Codes) -> bool:
    """Return whether codes represent the same values, with one scale per tensor."""
    if not one_scale(graph, *codes):
        return False
    # Equal values count, not names: pairs of two tools have parameters of their own.
    return len({_parameters(graph, one) for one in codes}) == 1


def _parameters(graph: Graph, codes: Codes) -> tuple[int, float, int]:
    """Return type, scale and zero point of per-tensor codes."""
    scale = value(graph, codes.scale).item()
    return code_type(graph, codes), scale, zero_points(graph, codes).item()


def grid(graph: Graph, codes: Codes) -> list[str]:
    """Return the names of scale and zero point; add an omitted zero point."""
    if codes.zero_point:
        return [codes.scale, codes.zero_point]
    dtype = helper.tensor_dtype_to_np_dtype(code_type(graph, codes))
    # Operators on codes require a zero point, of the shape of the scale.
    zero = np.zeros(value(graph, codes.scale).shape, dtype)
    return [codes.scale, graph.add_constant(f"{codes.codes}_zero_point", zero)]


def operand_inputs(graph: Graph, *operands: Codes) -> list[str]:
    """Return codes, scale and zero point of operands, in a row."""
    inputs = list[str]()
    for operand in operands:
        inputs += [operand.codes, *grid(graph, operand)]
    return inputs


def write(  # noqa: PLR0913  the parts of a node
    graph: Graph,
    node: Node,
    op_type: str,
    inputs: list[str],
    result: Codes | Sequence[str],
    domain: str = CONTRIB,
    **set_to: Any,
) -> bool:
    """Replace a node, and the QuantizeLinear after it if the result is codes; return True.

    Args:
        graph: the model, changed in place.
        node: the node to replace.
        op_type: type of the operator.
        inputs: names of the operator's inputs.
        result: codes, or the name of a float result, or the names of several.
        domain: domain of the operator.
        **set_to: attributes of the operator.
    """
    removed = [node]
    if isinstance(result, Codes):
        removed.append(result.node)
        result = result.codes
    outputs = [result] if isinstance(result, str) else [*result]
    # Before the operator is added, as it takes over the name of the codes.
    graph.remove(removed)
    if domain:
        graph.import_domain(domain)
    # Named after ``add``, which would make the name of the removed node unique once more.
    written = graph.add(op_type, inputs, outputs, domain=domain, **set_to)
    written.name = node.name
    return True


def replace(graph: Graph, node: Node, result: str) -> None:
    """Remove ``node``, and rename ``result`` to its first output."""
    output = node.outputs[0]
    # First, so that the name of the result is free for the new producer.
    graph.remove([node])
    producer = graph.producer(result)
    assert producer is not None
    graph.set_output(producer, producer.outputs.index(result), output)
