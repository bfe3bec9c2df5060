"""Make default attributes of convolutions and pools explicit, and resolve auto_pad.

Pads replace auto_pad, ceil_mode and the output_shape of a ConvTranspose.

Compilers for accelerators read attributes without knowing the defaults: Ryzen AI's ends the process
if one is missing (onnxsim/onnxsim#1404, 2026-09-13), and ignores auto_pad of pools
(amd/RyzenAI-SW#264). If the last window of ceil_mode begins beyond the input, shape inference of
onnx and onnxruntime disagree on the number of windows. Pads may differ on both sides: the converter
takes all four (zmaychek84/vaip, to_xir_ops_pass.cpp, 2025-03).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quark_onnx.containers import of_type
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.pool_windows import overhang
from quark_onnx.passes.base import register

_WINDOWED = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool"})
_WEIGHTED = frozenset({"Conv", "ConvTranspose"})
_SAME = ("SAME_UPPER", "SAME_LOWER")


@register
def write_attributes(graph: Graph) -> int:
    """Make attributes explicit where the sizes are known."""
    return sum(_write(graph, node) for node in graph.nodes if node.kind in _WINDOWED)


def _write(graph: Graph, node: Node) -> bool:
    kernel = _kernel(graph, node)
    if kernel is None:
        return False
    rank = len(kernel)
    defaults: dict[str, Any] = {"kernel_shape": list(kernel), "strides": [1] * rank}
    if node.kind in _WEIGHTED:
        defaults |= {"dilations": [1] * rank, "group": 1}
    wanted = {
        name: value for name, value in defaults.items() if node.attribute(name) is None
    }
    pads, replaced = _pads(graph, node, kernel)
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
    if node.kind not in _WEIGHTED:
        return tuple(node.attribute("kernel_shape", ())) or None
    shape = graph.shape(node.input(1))
    if shape is None or len(shape) < 3:
        return None
    sizes = of_type(shape[2:], int)
    if len(sizes) == len(shape) - 2:
        return tuple(sizes)
    return None


@dataclass(frozen=True)
class _Axis:
    """Positions of windows along an axis of the input.

    Attributes:
        size: length of the axis.
        reach: distance from the first to the last tap of a window, plus 1.
        stride: distance between windows.
    """

    size: int
    reach: int
    stride: int

    def same(self) -> int:
        """Return the total padding for a window at every stride."""
        return (-(-self.size // self.stride) - 1) * self.stride + self.reach - self.size

    def covers(self, added: int) -> int:
        """Return the number of output positions that a ConvTranspose's windows cover."""
        return (self.size - 1) * self.stride + self.reach + added


def _pads(
    graph: Graph,
    node: Node,
    kernel: tuple[int, ...],
) -> tuple[list[int] | None, list[str]]:
    """Return the pads of a node, and the attributes to replace.

    None if the sizes are unknown, or no pads have the same effect.
    """
    rank = len(kernel)
    mode = node.attribute("auto_pad", "NOTSET") or "NOTSET"
    replaced = [] if mode == "NOTSET" else ["auto_pad"]
    pads = [0] * 2 * rank
    if mode != "VALID":
        pads = list(node.attribute("pads", pads))
    # With count_include_pad, ceil_mode differs from padding.
    rounds_up = bool(node.attribute("ceil_mode", 0))
    rounds_up = rounds_up and not node.attribute("count_include_pad", 0)
    output = list(node.attribute("output_shape", ()))
    if not (mode in _SAME or rounds_up or output):
        return pads, replaced
    axes = _axes(graph, node, kernel)
    if axes is None or len(output) not in (0, rank):
        return None, []
    if rounds_up and mode not in _SAME:
        rounded = _pads_rounding_up(pads, axes, kernel)
        if not rounded:
            return (pads, replaced)
        return (rounded, [*replaced, "ceil_mode"])
    if rounds_up:
        # With SAME padding, ceil_mode has no effect.
        replaced.append("ceil_mode")
    totals = _same_totals(node, axes, output)
    if totals is None:
        return None, []
    if output:
        replaced.append("output_shape")
    # SAME_UPPER puts the odd pad at the end, SAME_LOWER at the start (ONNX, Conv: auto_pad); an
    # output_shape without auto_pad does as SAME_LOWER (ONNX, ConvTranspose-11).
    before = [total // 2 for total in totals]
    after = [-(-total // 2) for total in totals]
    if mode != "SAME_UPPER":
        before, after = after, before
    return [*before, *after], replaced


def _pads_rounding_up(
    pads: list[int],
    axes: list[_Axis],
    kernel: tuple[int, ...],
) -> list[int] | None:
    """Return the pads with the effect of ceil_mode; None if a pad would fill a window."""
    rank = len(kernel)
    after = []
    for axis, start, end in zip(
        axes,
        pads,
        pads[rank:],
        strict=False,
    ):
        after.append(
            end
            + overhang(
                axis.size,
                start,
                end,
                axis.reach,
                axis.stride,
            )
        )
    if all(
        pad < taps
        for pad, taps in zip(
            after,
            kernel,
            strict=True,
        )
    ):
        return [*pads[:rank], *after]
    return None


def _same_totals(
    node: Node,
    axes: list[_Axis],
    output: list[int],
) -> list[int] | None:
    """Return the total padding per axis; None for an unreachable output shape."""
    totals = [axis.same() for axis in axes]
    if node.kind == "ConvTranspose":
        sizes = output or [axis.size * axis.stride for axis in axes]
        added = node.attribute("output_padding", [0] * len(axes))
        totals = [
            axis.covers(more) - size
            for axis, more, size in zip(axes, added, sizes, strict=True)
        ]
        if output and min(totals) < 0:
            return None
    return [max(0, total) for total in totals]


def _axes(graph: Graph, node: Node, kernel: tuple[int, ...]) -> list[_Axis] | None:
    """Return the spatial axes of a node's input; None if a size is unknown."""
    rank = len(kernel)
    shape = graph.sizes(node.input(0))
    sizes = of_type(shape[2:], int)
    if len(sizes) != rank:
        return None
    strides = node.attribute("strides", [1] * rank)
    dilations = node.attribute("dilations", [1] * rank)
    rows = zip(sizes, kernel, strides, dilations, strict=True)
    return [
        _Axis(size, (taps - 1) * dilation + 1, stride)
        for size, taps, stride, dilation in rows
    ]
