"""Measure int8 activations in uint8 codes, which onnxruntime computes several times as fast.

On x64, the kernels of onnxruntime (1.20 to 1.32) for int8 activations are slower than those for
float. With power-of-two scales most layers even stay float, because a Relu before a symmetric
QuantizeLinear cannot become part of its clipping. Codes and zero points that are both greater by
128 represent the same values, and a Q/DQ pair before the Relu changes no code (ResNet-50 XINT8, one
thread: 90 ms with int8, 25 ms with uint8). The model in unsigned codes is measured, never written.
"""

from __future__ import annotations

import platform

import numpy as np
from onnx import TensorProto

from calibrators.onnx_runtime.cpu_features import saturates
from quark_onnx.graph import Graph, Node

#: The difference between the codes of uint8 and int8.
_OFFSET = 128
#: Operators that onnxruntime computes on 8-bit integers between Q/DQ pairs.
_INTEGER = frozenset({"Add", "Concat", "Conv", "Gemm", "MatMul", "Mul"})
#: Monotonic operators that map every code to a code: a Q/DQ pair before changes no result.
_CLIPPING = frozenset({"Clip", "Relu"})
#: Domains of QuantizeLinear and DequantizeLinear.
_DOMAINS = frozenset({"", "com.microsoft"})
_X64 = frozenset({"amd64", "x86_64"})


def faster_unsigned() -> bool:
    """Return whether this processor computes uint8 activations faster, and exactly."""
    return platform.machine().lower() in _X64 and not saturates()


def in_unsigned_codes(graph: Graph) -> Graph | None:
    """Return a copy of a quantized graph with uint8 activations instead of int8.

    Returns:
        The copy; None if it would not be faster on this processor.
    """
    if not faster_unsigned():
        return None
    if not any(_is_signed_activation(graph, node) for node in graph.nodes):
        return None
    copy = graph.copy()
    use_unsigned_codes(copy)
    return copy


def use_unsigned_codes(graph: Graph) -> bool:
    """Change the int8 activations of a quantized graph to uint8.

    The results are bitwise equal with power-of-two scales. With others, the integer and the float
    kernels of onnxruntime may round a few codes differently. Bodies of If, Loop and Scan are not
    changed.

    Args:
        graph: a graph with Q/DQ pairs; changed in place.

    Returns:
        Whether an activation was changed.
    """
    signed = [node for node in graph.nodes if _is_signed_activation(graph, node)]
    for node in signed:
        _round_before_clipping(graph, node)
        # A fresh name: the type of the old one may be declared as int8.
        codes = graph.fresh(node.output(0))
        readers = graph.consumers(node.output(0))
        graph.set_output(node, 0, codes)
        for reader in readers:
            graph.set_input(reader, 0, codes)
        for member in (node, *readers):
            graph.set_input(member, 2, _unsigned(graph, member.input(2)))
    return bool(signed)


def _is_signed_activation(graph: Graph, node: Node) -> bool:
    """Return whether a node quantizes to int8, and only DequantizeLinear reads the codes."""
    if not _is_signed(graph, node, "QuantizeLinear"):
        return False
    # ``output_dtype`` (opset 21) would contradict the type of the new zero point.
    if node.attribute("output_dtype") or graph.is_constant(node.input(0)):
        return False
    codes = node.output(0)
    return not _is_visible(graph, codes) and all(
        _is_signed(graph, reader, "DequantizeLinear")
        for reader in graph.consumers(codes)
    )


def _is_signed(graph: Graph, node: Node, op_type: str) -> bool:
    """Return whether a node is of a type and has a constant int8 zero point."""
    zero_point = node.input(2)
    return (
        node.op_type == op_type
        and node.domain in _DOMAINS
        and graph.is_constant(zero_point)
        and graph.elem_type(zero_point) == TensorProto.INT8
    )


def _unsigned(graph: Graph, name: str) -> str:
    """Return the name of the uint8 zero point for that of int8."""
    codes = (graph.known(name).astype(np.int16) + _OFFSET).astype(np.uint8)
    # Nodes with a common zero point keep a common one.
    return graph.shared_constant(("unsigned", name), f"{name}_unsigned", lambda: codes)


def _round_before_clipping(graph: Graph, quantize: Node) -> None:
    """Insert a Q/DQ pair between an operator with an integer kernel and its Relu or Clip.

    Args:
        graph: the graph; changed in place, or left as it is where the pair is of no use.
        quantize: the QuantizeLinear, whose scale the new pair has.
    """
    clipping = graph.producer_of_kind(quantize.input(0), _CLIPPING)
    if clipping is None or not _is_read_once(graph, clipping.output(0)):
        return
    source = clipping.input(0)
    if not graph.producer_of_kind(source, _INTEGER) or not _is_read_once(graph, source):
        return
    scale, zero_point = quantize.input(1), quantize.input(2)
    value = graph.constant(zero_point)
    # Where zero is the least code, onnxruntime makes a Relu part of the clipping itself.
    if value is None or value.size != 1 or value.item() == -_OFFSET:
        return
    codes = graph.fresh(f"{source}_codes")
    rounded = graph.fresh(f"{source}_rounded")
    unsigned = _unsigned(graph, zero_point)
    for op_type, tensor, result in (
        ("QuantizeLinear", source, codes),
        ("DequantizeLinear", codes, rounded),
    ):
        inputs = [tensor, scale, unsigned]
        graph.add(op_type, inputs, [result], domain=quantize.domain)
    graph.set_input(clipping, 0, rounded)


def _is_read_once(graph: Graph, tensor: str) -> bool:
    return len(graph.consumers(tensor)) == 1 and not _is_visible(graph, tensor)


def _is_visible(graph: Graph, tensor: str) -> bool:
    """Return whether a caller or a body of If, Loop or Scan reads a tensor."""
    return graph.is_output(tensor) or graph.captured(tensor)
