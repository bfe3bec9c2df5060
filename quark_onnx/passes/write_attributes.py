"""Write out the attributes of convolutions and pools that ONNX has defaults for, and the pads that
auto_pad, ceil_mode and the output_shape of a ConvTranspose stand for.

Compilers for accelerators read attributes without knowing the defaults: that of Ryzen AI ends the
process where one is missing (onnxsim/onnxsim#1404, 2026-09-13), and ignores auto_pad of pools
(amd/RyzenAI-SW#264). Where the last window of ceil_mode would begin behind the input, shape
inference of onnx and onnxruntime do not even agree on the number of windows. Pads may differ on two
sides: its converter takes all four (zmaychek84/vaip, to_xir_ops_pass.cpp, 2025-03).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.pool_windows import overhang
from quark_onnx.passes.base import register

_WINDOWED = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool"})
_WEIGHTED = frozenset({"Conv", "ConvTranspose"})
_SAME = ("SAME_UPPER", "SAME_LOWER")


@register
def write_attributes(graph: Graph) -> int:
    """Write them out wherever the sizes that they depend on are known."""
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
    pads, instead = _pads(graph, node, kernel)
    if pads is not None and (instead or node.attribute("pads") is None):
        wanted["pads"] = pads
        wanted |= {"ceil_mode": 0} if "ceil_mode" in instead else {}
        for name in instead:
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
    sizes = [size for size in shape[2:] if isinstance(size, int)]
    return tuple(sizes) if len(sizes) == len(shape) - 2 else None


@dataclass(frozen=True)
class _Axis:
    """How windows lie along an axis of the input.

    ``reach`` is from the first to the last tap of one.
    """

    size: int
    reach: int
    stride: int

    def same(self) -> int:
        """What is to be padded so that there is a window for every stride."""
        return (-(-self.size // self.stride) - 1) * self.stride + self.reach - self.size

    def covers(self, added: int) -> int:
        """How many places the windows of a ConvTranspose cover."""
        return (self.size - 1) * self.stride + self.reach + added


def _pads(
    graph: Graph,
    node: Node,
    kernel: tuple[int, ...],
) -> tuple[list[int] | None, list[str]]:
    """All pads of a node, and the attributes that they stand for.

    None where sizes are not known, or there are none.
    """
    rank, mode = len(kernel), node.attribute("auto_pad", "NOTSET") or "NOTSET"
    instead = ["auto_pad"] if mode != "NOTSET" else []
    given = (
        [0] * 2 * rank
        if mode == "VALID"
        else list(node.attribute("pads", [0] * 2 * rank))
    )
    rounds_up = node.attribute("ceil_mode", 0) and not node.attribute(
        "count_include_pad",
        0,
    )
    output = list(node.attribute("output_shape", ()))
    if not (mode in _SAME or rounds_up or output):
        return given, instead
    axes = _axes(graph, node, kernel)
    if axes is None or len(output) not in (0, rank):
        return None, []
    instead += (
        ["ceil_mode"] if rounds_up and mode in _SAME else []
    )  # for that it does nothing
    if rounds_up and mode not in _SAME:
        after = [
            end + overhang(axis.size, start, end, axis.reach, axis.stride)
            for axis, start, end in zip(axes, given, given[rank:], strict=False)
        ]
        fits = all(
            pad < taps for pad, taps in zip(after, kernel, strict=True)
        )  # else it would be no padding
        return (
            ([*given[:rank], *after], [*instead, "ceil_mode"])
            if fits
            else (given, instead)
        )
    totals = [axis.same() for axis in axes]
    if node.kind == "ConvTranspose":
        asked = output or [axis.size * axis.stride for axis in axes]
        added = node.attribute("output_padding", [0] * rank)
        totals = [
            axis.covers(more) - size
            for axis, more, size in zip(axes, added, asked, strict=True)
        ]
        if output and min(totals) < 0:  # more is asked for than windows cover
            return None, []
    halves = [(max(0, total) // 2, -(-max(0, total) // 2)) for total in totals]
    before, after = (
        [half[side] for half in halves]
        for side in ((0, 1) if mode == "SAME_UPPER" else (1, 0))
    )
    return [*before, *after], [*instead, *(["output_shape"] if output else [])]


def _axes(graph: Graph, node: Node, kernel: tuple[int, ...]) -> list[_Axis] | None:
    """The spatial axes of what a node reads; None where a size is not known."""
    rank, shape = len(kernel), graph.shape(node.input(0)) or ()
    sizes = [size for size in shape[2:] if isinstance(size, int)]
    if len(sizes) != rank:
        return None
    strides, dilations = (
        node.attribute(name, [1] * rank) for name in ("strides", "dilations")
    )
    rows = zip(sizes, kernel, strides, dilations, strict=True)
    return [
        _Axis(size, (taps - 1) * dilation + 1, stride)
        for size, taps, stride, dilation in rows
    ]
