"""Rules of the integer engine for scales, zero points and codes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from quark_onnx.common.wording import counted
from quark_onnx.graph import Node
from quark_onnx.graph.codes import BYTES, WORDS
from quark_onnx.graph.node import QUANTIZE
from quark_onnx.patterns.conv_and_gemm import LAYERS
from quark_onnx.targets.finding import Finding
from quark_onnx.targets.pairs import PairParameters, Pairs
from quark_onnx.targets.wiring import FUSED, constraints_of

#: Operators that are fused with a following activation.
_WITH_ACTIVATION = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "MaxPool", "AveragePool"},
)


def scale_findings(pairs: Pairs) -> Iterator[Finding]:
    """Yield broken rules for power-of-two scales, including C1 to C10.

    Args:
        pairs: Q and DQ nodes of the model.
    """
    # Both nodes of a pair: tools may give them initializers of their own.
    for node in (*pairs.quantizing, *pairs.dequantizing):
        yield from grid_findings(node, pairs.grid(node))
    yield from _least_codes(pairs)
    yield from _unlike(pairs)
    yield from _rounded_between(pairs)
    on_codes = [
        node for node in pairs.graph.nodes if node.op_type.startswith("QLinear")
    ]
    if on_codes:
        yield Finding(
            "S8",
            on_codes[0].name,
            f"{len(on_codes)} do, this {on_codes[0].op_type} first",
        )
    constraints = constraints_of(pairs.graph, pairs.graph.nodes, pairs)
    for constraint, figures in constraints.broken(pairs.positions):
        yield Finding(constraint.rule, constraint.node, figures)


def grid_findings(node: Node, grid: PairParameters) -> Iterator[Finding]:
    """Yield broken rules for the scale and zero point of a Q or DQ node.

    Args:
        node: the Q or DQ node.
        grid: scale and zero point of the node.
    """
    # Nothing else is known of a computed scale, as of DynamicQuantizeLinear.
    if grid.scale is None or grid.zero_point is None:
        yield Finding("S4", node.name, "its scale is computed as the model runs")
        return
    # The position of a per-channel scale is not defined, so that S1 is not checked.
    if grid.scale.size != 1:
        yield Finding("S3", node.name, f"{grid.scale.size} scales")
    elif grid.position is None:
        yield Finding(
            "S1", node.name, f"a scale of {float(grid.scale.reshape(-1)[0]):.6g}"
        )
    if not grid.symmetric:
        yield Finding(
            "S2", node.name, f"a zero point of {grid.zero_point.reshape(-1)[0]}"
        )
    is_bias = node.op_type not in QUANTIZE and grid.elem_type == TensorProto.INT32
    if grid.elem_type not in BYTES and not is_bias:
        yield Finding(
            "S6",
            node.name,
            f"codes of {TensorProto.DataType.Name(grid.elem_type).lower()}",
        )


def alignment_findings(pairs: Pairs) -> Iterator[Finding]:
    """Yield every Concat that joins 16-bit tensors under other scales than its result's.

    Args:
        pairs: Q and DQ nodes of a model with float scales.
    """
    written = {node.outputs[0]: pairs.grid(node) for node in pairs.quantizing}
    for node in pairs.graph.nodes_of({"Concat"}):
        result = written.get(pairs.codes_of(node))
        if result is None or result.scale is None or result.elem_type not in WORDS:
            continue
        for leader in pairs.graph.leaders(node):
            grid = written.get(leader.input(0))
            if grid is None or grid.scale is None:
                continue
            if grid.scale.tolist() != result.scale.tolist():
                figures = [
                    f"{scale.reshape(-1)[0]:g}" for scale in (grid.scale, result.scale)
                ]
                yield Finding("S9", node.name, f"scales {' and '.join(figures)}")
                break


def _least_codes(pairs: Pairs) -> Iterator[Finding]:
    """Yield DQ nodes of weights with the code -128, which amd-quark does not write."""
    for node in pairs.dequantizing:
        codes = pairs.graph.constant(node.inputs[0])
        if codes is None or codes.dtype != np.int8 or codes.ndim < 2:
            continue
        # Other constants, such as a summand or a slope, are activations, whose codes reach -128.
        if all(reader.kind not in LAYERS for reader in pairs.graph.followers(node)):
            continue
        count = int((codes == np.iinfo(np.int8).min).sum())
        if count:
            yield Finding("S10", node.name, f"{counted(count, 'code')} of -128")


def _unlike(pairs: Pairs) -> Iterator[Finding]:
    """Yield DQ nodes whose scale is not that of the Q node that wrote the codes."""
    # With dedicated pairs, the refinement of amd-quark may move the scale of one node alone.
    written = {node.outputs[0]: pairs.grid(node).scale for node in pairs.quantizing}
    for node in pairs.dequantizing:
        before = written.get(node.inputs[0])
        after = pairs.grid(node).scale
        # Lists compare sizes as well as values, where arrays would broadcast.
        if before is None or after is None or before.tolist() == after.tolist():
            continue
        figures = f"scales {before.reshape(-1)[0]:g} and {after.reshape(-1)[0]:g}"
        yield Finding("S5", node.name, figures)


def _rounded_between(pairs: Pairs) -> Iterator[Finding]:
    """Yield operators whose result is rounded before an activation that could be fused."""
    graph = pairs.graph
    for node in graph.nodes_of(_WITH_ACTIVATION):
        dequantizing = graph.consumers(pairs.codes_of(node))
        followers = [
            follower for pair in dequantizing for follower in graph.followers(pair)
        ]
        # A Clip fuses only with the bounds [0, 6] or [0, 1], and is not judged.
        if len(followers) == 1 and followers[0].kind in FUSED - {"Clip"}:
            text = (
                f"{followers[0].name} ({followers[0].op_type}) reads what was rounded"
            )
            yield Finding("S7", node.name, text)
