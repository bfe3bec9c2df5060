"""Write products with dynamic scales: MatMulInteger or ConvInteger, Cast and two Muls.

An LSTM becomes a DynamicQuantizeLSTM, which also quantizes its hidden state in each step, and an
Attention of com.microsoft a QAttention.
onnxruntime recognizes the pattern MatMulInteger, Cast, Mul, Mul and runs it as one operator. After
a ConvInteger it runs each one alone, so that scale and bias of the channels are applied at once, by
BatchNormalization, unless the result is to be portable.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from calibrators.layout import turned
from quark_onnx.fusions.base import (
    Codes,
    codes_of,
    replace,
    stored_codes,
    value,
    write,
    zero_points,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import BYTES
from quark_onnx.patterns.conv_and_gemm import plain_matrix
from quark_onnx.patterns.quantized_attention import (
    effective_attributes,
    has_quantized_form,
)

#: Zero point of int8 codes that are stored as uint8.
_MIDDLE = 128


def matmul_integer(graph: Graph, node: Node) -> bool:
    """Replace MatMul and Gemm by a constant matrix, with a scale per tensor or per column."""
    operands = _operands(graph, node)
    if operands is None:
        return False
    x, w = operands
    transposed = bool(node.attribute("transB", 0))
    stored = value(graph, w.codes)
    scale = value(graph, w.scale)
    columns = 0 if transposed else stored.ndim - 1
    if not plain_matrix(node, stored.shape):
        return False
    # A scale per row could not be taken out of the sums over the rows.
    if scale.ndim and w.axis % stored.ndim != columns:
        return False
    weight = w.codes
    if transposed:
        # Nodes that share a weight share its transpose.
        weight = graph.shared_constant(
            ("transposed", w.codes), f"{w.codes}_transposed", lambda: turned(stored)
        )
    # 0 is the default of an omitted zero point.
    zero_point = [w.zero_point] if zero_points(graph, w).any() else []
    return _write(graph, node, "MatMulInteger", x, [weight, *zero_point], w.scale)


def conv_integer(graph: Graph, node: Node) -> bool:
    """Replace Conv by a constant kernel with a scale per tensor or channel and a zero point."""
    return _conv_integer(graph, node, at_once=True)


def portable_conv_integer(graph: Graph, node: Node) -> bool:
    """Replace Conv as ``conv_integer`` does, with Mul and Add for scale and bias."""
    return _conv_integer(graph, node, at_once=False)


def _conv_integer(graph: Graph, node: Node, *, at_once: bool) -> bool:
    """Replace Conv; ``at_once`` applies scale and bias in one operator."""
    operands = _operands(graph, node)
    if operands is None:
        return False
    x, w = operands
    stored = value(graph, w.codes)
    scale = value(graph, w.scale)
    zeros = zero_points(graph, w)
    # ONNX allows a zero point per channel, onnxruntime 1.32 does not (conv_integer.cc:52; for
    # QLinearConv microsoft/onnxruntime#28447). The scale multiplies the sums, and may differ per
    # channel.
    if scale.ndim and w.axis % stored.ndim != 0:
        return False
    if (zeros != zeros.flat[0]).any():
        return False
    if node.input(2) and not graph.is_constant(node.input(2)):
        return False
    if node.input(2) and at_once:
        # BatchNormalization takes one factor per channel: (channels,).
        by_channel = np.broadcast_to(scale, stored.shape[:1])
    elif scale.ndim:
        # (channels, 1, ...) broadcasts along the spatial axes of the sums.
        by_channel = scale.reshape(-1, *[1] * (stored.ndim - 2))
    else:
        by_channel = scale
    factor = graph.shared_constant(
        ("by channel", w.scale, *map(str, by_channel.shape)),
        f"{w.scale}_by_channel",
        lambda: by_channel,
    )
    weight = graph.once(
        ("unsigned", w.codes, w.zero_point), lambda: _unsigned(graph, w)
    )
    return _write(graph, node, "ConvInteger", x, weight, factor, at_once=at_once)


def _unsigned(graph: Graph, w: Codes) -> list[str]:
    """Write kernel codes and their zero point as uint8; return their names.

    onnxruntime 1.32 multiplies the kernel, as the left factor, by the im2col patches. Its fast
    products have an unsigned left factor; a signed one takes a loop that is several times slower.
    Both compute the same sums.
    """
    stored = value(graph, w.codes)
    zero_point = zero_points(graph, w).flat[0]
    offset = _MIDDLE if stored.dtype == np.int8 else 0
    # Code and zero point move together: their difference, the multiplied value, stays.
    codes = (stored.astype(np.int16) + offset).astype(np.uint8)
    name = graph.add_constant(f"{w.codes}_unsigned", codes) if offset else w.codes
    zero = np.uint8(zero_point + offset)
    return [name, graph.add_constant(f"{name}_zero_point", zero)]


def lstm_integer(graph: Graph, node: Node) -> bool:
    """Replace an LSTM by DynamicQuantizeLSTM, with a scale per unit of each gate.

    Weights are (directions, inputs, 4 * hidden) there, and scales (directions, 4 * hidden)
    (onnxruntime, ContribOperators.md).
    """
    quantizing = _quantizing(graph, node)
    if quantizing is None or node.attribute("layout", 0):
        return False
    w = _gates(graph, node.input(1))
    if w is None:
        return False
    r = _gates(graph, node.input(2))
    if r is None:
        return False
    optional = [node.input(index) for index in range(3, 8)]
    inputs = [quantizing.inputs[0], w[0], r[0], *optional, *w[1:], *r[1:]]
    settings = node.attributes
    settings.pop("layout", None)
    return write(graph, node, "DynamicQuantizeLSTM", inputs, node.outputs, **settings)


def attention_integer(graph: Graph, node: Node) -> bool:
    """Replace com.microsoft Attention by QAttention, whose projection multiplies codes.

    The weight (inputs, outputs) has a scale per tensor or per output.
    """
    operands = _operands(graph, node)
    if operands is None or not has_quantized_form(node):
        return False
    x, w = operands
    scale, zeros = value(graph, w.scale), zero_points(graph, w)
    if scale.ndim and w.axis % 2 != 1:
        return False
    # One zero point for all outputs: onnxruntime reads no others.
    if (zeros != zeros.flat[0]).any():
        return False
    weight_zero = graph.add_constant(
        f"{w.codes}_one_zero_point",
        zeros.reshape(-1)[0].astype(value(graph, w.codes).dtype),
    )
    inputs = [x.codes, w.codes, node.input(2), x.scale, w.scale, node.input(3)]
    inputs += [x.zero_point, weight_zero, node.input(4)]
    settings = effective_attributes(node)
    return write(graph, node, "QAttention", inputs, node.outputs, **settings)


def _gates(graph: Graph, tensor: str) -> list[str] | None:
    """Write the weights of gates; return the names of codes, scales and zero points.

    None for other weights than constants of 8 bits with a scale per unit of each gate.
    """
    reshape = graph.producer_of_type(tensor, {"Reshape"})
    source = tensor if reshape is None else reshape.inputs[0]
    weight = stored_codes(graph, source)
    if weight is None or not _has_plain_bytes(graph, weight):
        return None
    stored, scale = value(graph, weight.codes), value(graph, weight.scale)
    shape, axis = stored.shape, 1
    if reshape is not None:
        # Two directions: a matrix with a row for each unit.
        shape, axis = tuple(value(graph, reshape.inputs[1]).tolist()), 0
    if len(shape) != 3 or stored.size != prod(shape):
        return None
    units = prod(shape[:2])
    if scale.size > 1 and (weight.axis % stored.ndim != axis or scale.size != units):
        return None
    # One zero point for all units: onnxruntime reads no others.
    zeros = zero_points(graph, weight)
    if (zeros != zeros.flat[0]).any():
        return None
    codes = stored.reshape(shape).astype(np.int16)
    by_unit = np.broadcast_to(scale.reshape(-1), units).reshape(shape[:2])
    return graph.once(
        ("gates", tensor),
        lambda: _write_gates(graph, weight.codes, codes - zeros.flat[0], by_unit),
    )


def _write_gates(
    graph: Graph, tensor: str, codes: NDArray[Any], scale: NDArray[Any]
) -> list[str]:
    """Write codes (directions, inputs, gates * hidden) as uint8, with scales and zero points.

    The zero point is 128: onnxruntime's products of uint8 activations and int8 weights saturate on
    processors without VNNI, and the state would carry the error on. With VNNI int8 codes give equal
    results 1.6 times as fast (256 units, one thread), but a file does not know its processor.

    Args:
        tensor: name of the former codes.
        codes: (directions, gates * hidden, inputs), without a zero point.
        scale: (directions, gates * hidden).
    """
    unsigned = (codes.transpose(0, 2, 1) + _MIDDLE).clip(0, 255).astype(np.uint8)
    zero_point = np.full(scale.shape, _MIDDLE, np.uint8)
    return [
        graph.add_constant(f"{tensor}_gates", np.ascontiguousarray(unsigned)),
        graph.add_constant(f"{tensor}_gate_scale", np.ascontiguousarray(scale)),
        graph.add_constant(f"{tensor}_gate_zero_point", zero_point),
    ]


def _quantizing(graph: Graph, node: Node) -> Node | None:
    """Return the DynamicQuantizeLinear before the first input."""
    x = codes_of(graph, node.input(0))
    if x is None:
        return None
    return graph.producer_of_type(x.codes, {"DynamicQuantizeLinear"})


def _operands(graph: Graph, node: Node) -> tuple[Codes, Codes] | None:
    """Return dynamic codes on the left and constant 8-bit codes on the right."""
    x = codes_of(graph, node.input(0))
    w = stored_codes(graph, node.input(1))
    if x is None or w is None or _quantizing(graph, node) is None:
        return None
    return (x, w) if _has_plain_bytes(graph, w) else None


def _has_plain_bytes(graph: Graph, codes: Codes) -> bool:
    """Return whether codes have 8 bits, and no scales of blocks."""
    return graph.elem_type(codes.codes) in BYTES and not codes.block_size


#: Attributes that a ConvInteger has in common with a Conv.
_ATTRIBUTES = (
    "auto_pad",
    "dilations",
    "group",
    "kernel_shape",
    "pads",
    "strides",
)


def _write(  # noqa: PLR0913  the operands of a product
    graph: Graph,
    node: Node,
    op_type: str,
    x: Codes,
    weight: list[str],
    factor: str,
    *,
    at_once: bool = False,
) -> bool:
    """Write the product; ``weight`` names the codes and, unless it is 0, the zero point.

    ``at_once`` applies scale and bias in one operator.
    """
    names = [
        graph.fresh(f"{node.name}_{suffix}")
        for suffix in ("sum", "float", "scale", "product")
    ]
    # A Gemm has none of these, so that its own attributes are dropped.
    settings = {name: node.attribute(name) for name in _ATTRIBUTES}
    inputs = [x.codes, weight[0], x.zero_point, *weight[1:]]
    graph.add(op_type, inputs, names[:1], name=node.name, **settings)
    graph.add("Cast", names[:1], names[1:2], to=int(TensorProto.FLOAT))
    # Scales of activation and weight first: one product per channel instead of one per value.
    graph.add("Mul", [x.scale, factor], names[2:3])
    bias = node.input(2)
    if bias and at_once:
        _scale_and_shift(graph, names[1:3], bias, names[3])
        replace(graph, node, names[3])
        return True
    graph.add("Mul", names[1:3], names[3:])
    result = names[3]
    if bias:
        if op_type == "ConvInteger":
            bias = _along_channels(graph, bias, len(graph.sizes(node.inputs[1])))
        result = graph.compute("Add", [names[3], bias], f"{node.name}_biased")
    replace(graph, node, result)
    return True


def _along_channels(graph: Graph, bias: str, rank: int) -> str:
    """Return the name of a constant bias in a shape that broadcasts along the channels."""
    array = value(graph, bias)
    return graph.shared_constant(
        ("along channels", bias, str(rank)),
        f"{bias}_along_channels",
        lambda: array.reshape(-1, *[1] * (rank - 2)),
    )


def _scale_and_shift(graph: Graph, product: list[str], bias: str, result: str) -> None:
    """Multiply a product by a scale per channel and add the bias, in one pass over the values."""
    channels = graph.sizes(bias)[0]
    assert isinstance(channels, int)
    names = graph.once(
        ("no statistics", str(channels)),
        lambda: [
            graph.add_constant(f"mean_of_{channels}", np.zeros(channels, np.float32)),
            graph.add_constant(
                f"variance_of_{channels}", np.ones(channels, np.float32)
            ),
        ],
    )
    # (x - 0) * scale / sqrt(1 + 0) + bias, with the product of the scales as scale.
    graph.add("BatchNormalization", [*product, bias, *names], [result], epsilon=0.0)
