"""Products with a scale that the model computes: MatMulInteger and ConvInteger, and one
multiplication by both scales.

The shape Cast, Mul, Mul is the one that onnxruntime recognizes and runs as one operator.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from calibrators.layout import turned
from quark_onnx.fusions.base import (
    Codes,
    codes_of,
    replace,
    stored_codes,
    value,
    zero_points,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.patterns.conv_and_gemm import plain_matrix


def matmul_integer(graph: Graph, node: Node) -> bool:
    """MatMul and Gemm by a constant matrix with one scale, or one for each column."""
    x, w = _operands(graph, node)
    if x is None or w is None:
        return False
    transposed = bool(node.attribute("transB", 0))
    stored, scale = value(graph, w.codes), value(graph, w.scale)
    columns = 0 if transposed else stored.ndim - 1
    if not plain_matrix(node, stored.shape):
        return False
    if scale.ndim and w.axis % stored.ndim != columns:
        return False
    weight = w.codes
    if transposed:
        key = ("transposed", w.codes)
        [weight] = graph.once(
            key,
            lambda: [graph.add_constant(f"{w.codes}_transposed", turned(stored))],
        )
    zero_point = [w.zero_point] if zero_points(graph, w).any() else []
    return _write(graph, node, "MatMulInteger", x, [weight, *zero_point], w.scale)


def conv_integer(graph: Graph, node: Node) -> bool:
    """Conv by a constant kernel with one scale, or one for each output channel, and one zero point."""  # noqa: E501
    x, w = _operands(graph, node)
    if x is None or w is None:
        return False
    stored, scale, zeros = (
        value(graph, w.codes),
        value(graph, w.scale),
        zero_points(graph, w),
    )
    if (scale.ndim and w.axis % stored.ndim != 0) or (zeros != zeros.flat[0]).any():
        return False
    by_channel = scale.reshape(-1, *[1] * (stored.ndim - 2)) if scale.ndim else scale
    [factor] = graph.once(
        ("by channel", w.scale),
        lambda: [graph.add_constant(f"{w.scale}_by_channel", by_channel)],
    )
    weight = graph.once(
        ("unsigned", w.codes, w.zero_point),
        lambda: _unsigned(graph, w),
    )
    return _write(graph, node, "ConvInteger", x, weight, factor)


def _unsigned(graph: Graph, w: Codes) -> list[str]:
    """Write kernel codes and their zero point as uint8; return their names.

    onnxruntime 1.32 multiplies the kernel, as the left factor, by the patches. Its fast products
    have an unsigned left factor; a signed one takes a loop that is several times slower. Both have
    the same sums.
    """
    stored, zero_point = value(graph, w.codes), zero_points(graph, w).flat[0]
    offset = 128 if stored.dtype == np.int8 else 0
    codes = (stored.astype(np.int16) + offset).astype(np.uint8)
    name = graph.add_constant(f"{w.codes}_unsigned", codes) if offset else w.codes
    return [
        name,
        graph.add_constant(f"{name}_zero_point", np.uint8(zero_point + offset)),
    ]


def _operands(graph: Graph, node: Node) -> tuple[Codes | None, Codes | None]:
    """Dynamic codes on the left and 8-bit constant ones on the right, where both are there."""
    x, w = codes_of(graph, node.input(0)), stored_codes(graph, node.input(1))
    producer = graph.producer(x.codes) if x is not None else None
    if (
        producer is None
        or producer.op_type != "DynamicQuantizeLinear"
        or w is None
        or w.block_size
    ):
        return None, None
    bytes_ = graph.elem_type(w.codes) in (TensorProto.INT8, TensorProto.UINT8)
    return (x, w) if bytes_ else (None, None)


def _write(  # noqa: PLR0913
    graph: Graph,
    node: Node,
    op_type: str,
    x: Codes,
    weight: list[str],
    factor: str,
) -> bool:
    """Write the product; ``weight`` names the codes and, unless it is 0, their zero point."""
    names = [
        graph.fresh(f"{node.name}_{part}")
        for part in ("sum", "float", "scale", "product")
    ]
    attributes = {
        name: node.attribute(name)
        for name in (
            "auto_pad",
            "dilations",
            "group",
            "kernel_shape",
            "pads",
            "strides",
        )
        if node.attribute(name) is not None
    }
    graph.add(
        op_type,
        [x.codes, weight[0], x.zero_point, *weight[1:]],
        names[:1],
        name=node.name,
        **attributes,
    )
    graph.add("Cast", names[:1], names[1:2], to=int(TensorProto.FLOAT))
    graph.add("Mul", [x.scale, factor], names[2:3])
    graph.add("Mul", names[1:3], names[3:])
    result, bias = names[3], node.input(2)
    if bias:
        if op_type == "ConvInteger":
            spatial = len(graph.shape(weight[0]) or ()) - 2
            if not graph.is_constant(bias):
                return _undo(graph, names)
            bias = graph.add_constant(
                f"{bias}_by_channel",
                value(graph, bias).reshape(-1, *[1] * spatial),
            )
        result = graph.fresh(f"{node.name}_biased")
        graph.add("Add", [names[3], bias], [result])
    replace(graph, node, result)
    return True


def _undo(graph: Graph, results: list[str]) -> bool:
    graph.remove(
        [node for name in results if (node := graph.producer(name)) is not None],
    )
    return False
