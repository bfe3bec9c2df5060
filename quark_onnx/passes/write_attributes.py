"""Write out the attributes of convolutions and pools that ONNX has defaults for, and the pads that auto_pad stands for.

Compilers for accelerators read attributes without knowing the defaults: that of Ryzen AI ends the process where one is
missing (onnxsim/onnxsim#1404, 2026-09-13), and ignores auto_pad of pools (amd/RyzenAI-SW#264).
"""

from __future__ import annotations

from quark_onnx.graph import Graph, Node
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
    defaults: dict[str, object] = {"kernel_shape": list(kernel), "strides": [1] * rank}
    if node.kind in _WEIGHTED:
        defaults |= {"dilations": [1] * rank, "group": 1}
    automatic = node.attribute("auto_pad", "NOTSET") not in ("NOTSET", "")
    pads = _pads(graph, node, kernel) if automatic else [0] * 2 * rank
    if pads is not None and not (node.kind == "ConvTranspose" and node.attribute("output_shape") is not None):
        defaults["pads"] = pads
    missing = {name: value for name, value in defaults.items() if node.attribute(name) is None}
    for name, value in missing.items():
        node.set_attribute(name, value)
    if automatic and "pads" in missing:
        node.drop_attribute("auto_pad")
    return bool(missing)


def _kernel(graph: Graph, node: Node) -> tuple[int, ...] | None:
    if node.kind not in _WEIGHTED:
        return tuple(node.attribute("kernel_shape", ())) or None
    shape = graph.shape(node.input(1))
    if shape is None or len(shape) < 3:
        return None
    sizes = [size for size in shape[2:] if isinstance(size, int)]
    return tuple(sizes) if len(sizes) == len(shape) - 2 else None


def _pads(graph: Graph, node: Node, kernel: tuple[int, ...]) -> list[int] | None:
    """The pads that auto_pad stands for; None where sizes are not known, or they are pads of an output."""
    mode, rank = node.attribute("auto_pad"), len(kernel)
    if mode == "VALID" and node.kind != "ConvTranspose":
        return [0] * 2 * rank
    sizes = (graph.shape(node.input(0)) or ())[2:]
    if mode not in _SAME or node.kind == "ConvTranspose" or len(sizes) != rank:
        return None
    strides, dilations = (node.attribute(name, [1] * rank) for name in ("strides", "dilations"))
    before, after = list[int](), list[int]()
    for size, taps, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        if not isinstance(size, int):
            return None
        total = max(0, (-(-size // stride) - 1) * stride + (taps - 1) * dilation + 1 - size)
        before.append(total // 2 if mode == "SAME_UPPER" else total - total // 2)
        after.append(total - before[-1])
    return [*before, *after]
