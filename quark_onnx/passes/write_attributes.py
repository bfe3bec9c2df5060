"""Make default attributes of convolutions and pools explicit, and resolve auto_pad.

Pads replace auto_pad, ceil_mode and the output_shape of a ConvTranspose.

Compilers for accelerators read attributes without knowing the defaults: Ryzen AI's ends the process
if one is missing (onnxsim/onnxsim#1404, 2026-09-13), and ignores auto_pad of pools
(amd/RyzenAI-SW#264). If the last window of ceil_mode begins beyond the input, shape inference of
onnx and onnxruntime disagree on the number of windows. Pads may differ on both sides: the converter
takes all four (zmaychek84/vaip, to_xir_ops_pass.cpp, 2025-03).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.pool_windows import Axis, axes_of, rounded_up
from quark_onnx.graph.shapes import known_sizes
from quark_onnx.passes.base import register
from quark_onnx.patterns.conv_and_gemm import SPATIAL

_WINDOWED = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool"})
_SAME = ("SAME_UPPER", "SAME_LOWER")


@register
def write_attributes(graph: Graph) -> int:
    """Make attributes explicit where the sizes are known."""
    return sum(_write(graph, node) for node in graph.nodes_of(_WINDOWED))


def _write(graph: Graph, node: Node) -> bool:
    kernel = _kernel(graph, node)
    if kernel is None:
        return False
    rank = len(kernel)
    defaults: dict[str, Any] = {"kernel_shape": list(kernel), "strides": [1] * rank}
    if node.kind in SPATIAL:
        defaults |= {"dilations": [1] * rank, "group": 1}
    # Attributes that the node has stay; only missing ones are written.
    wanted = {name: defaults[name] for name in node.lacking(defaults)}
    pads, replaced = _pads(graph, node, kernel)
    # Pads that the node has already, and that replace nothing, stay.
    if pads is not None and (replaced or node.attribute("pads") is None):
        wanted["pads"] = pads
        if "ceil_mode" in replaced:
            wanted["ceil_mode"] = 0
        for name in replaced:
            node.drop_attribute(name)
    for name, value in wanted.items():
        node.set_attribute(name, value)
    return bool(wanted)


def _kernel(graph: Graph, node: Node) -> tuple[int, ...] | None:
    if node.kind not in SPATIAL:
        # A pool must have a kernel_shape; a layer may leave it to the weight.
        return tuple(node.attribute("kernel_shape", ())) or None
    shape = graph.sizes(node.input(1))
    return known_sizes(shape[2:]) or None


def _pads(
    graph: Graph, node: Node, kernel: tuple[int, ...]
) -> tuple[list[int] | None, Sequence[str]]:
    """Return the pads of a node, and the attributes to replace.

    The pads are None if the sizes are unknown, or no pads have the same effect.
    """
    mode = node.attribute("auto_pad", "NOTSET") or "NOTSET"
    replaced = [] if mode == "NOTSET" else ["auto_pad"]
    output = list(node.attribute("output_shape", ()))
    rounds_up = _rounds_up(node)
    pads = [0] * 2 * len(kernel)
    # An output_shape decides the pads of a ConvTranspose, whatever auto_pad says.
    if mode in _SAME or (output and not rounds_up):
        totals = _same_totals(node, _axes(graph, node, kernel, pads), output)
        if totals is None:
            return None, ()
        if rounds_up:
            # With SAME padding, ceil_mode has no effect.
            replaced.append("ceil_mode")
        if output:
            replaced.append("output_shape")
        return _halves(totals, mode), replaced
    if mode != "VALID":
        pads = list(node.attribute("pads", pads))
    if rounds_up:
        axes = _axes(graph, node, kernel, pads)
        if not axes:
            return None, ()
        rounded = rounded_up(axes)
        # The windows of ceil_mode extend beyond the end. A pad that fills a window is invalid.
        ends = rounded[len(kernel) :]
        if all(end < taps for end, taps in zip(ends, kernel, strict=False)):
            return rounded, [*replaced, "ceil_mode"]
    return pads, replaced


def _rounds_up(node: Node) -> bool:
    """Return whether pads can have the effect of ceil_mode: not with count_include_pad."""
    rounds_up: bool = node.attribute("ceil_mode", 0) != 0
    return rounds_up and not node.attribute("count_include_pad", 0)


def _halves(totals: list[int], mode: str) -> list[int]:
    """Divide the total padding of each axis into the pads before and after it.

    SAME_UPPER puts the odd pad at the end, SAME_LOWER at the start (ONNX, Conv: auto_pad); an
    output_shape without auto_pad does as SAME_LOWER (ONNX, ConvTranspose-11).
    """
    smaller = [total // 2 for total in totals]
    larger = [total - total // 2 for total in totals]
    if mode == "SAME_UPPER":
        return [*smaller, *larger]
    return [*larger, *smaller]


def _same_totals(node: Node, axes: list[Axis], output: list[int]) -> list[int] | None:
    """Return the total padding per axis; None if it is unknown, or cannot give an output shape."""
    if not axes or len(output) not in (0, len(axes)):
        return None
    if node.kind == "ConvTranspose":
        totals = _transposed_totals(node, axes, output)
        # Pads cut values off, and add none.
        if output and min(totals) < 0:
            return None
    else:
        totals = [axis.same for axis in axes]
    # Windows that leave out values at the end (stride > reach) need no padding.
    return [max(0, total) for total in totals]


def _transposed_totals(node: Node, axes: list[Axis], output: list[int]) -> list[int]:
    """Return the values to cut off from the result of a ConvTranspose, per axis.

    The result has the sizes of ``output``, by default those of the input times the strides.
    """
    added = node.attribute("output_padding", [0] * len(axes))
    sizes = output or [axis.size * axis.stride for axis in axes]
    totals = list[int]()
    for axis, padding, size in zip(axes, added, sizes, strict=True):
        # ONNX, ConvTranspose: the result is as long before pads are cut off.
        length = (axis.size - 1) * axis.stride + axis.reach + padding
        totals.append(length - size)
    return totals


def _axes(
    graph: Graph, node: Node, kernel: tuple[int, ...], pads: list[int]
) -> list[Axis]:
    """Return the spatial axes of a node's input; none if a size is unknown."""
    attributes = {**node.attributes, "kernel_shape": kernel, "pads": pads}
    return axes_of(attributes, graph.sizes(node.input(0)))
