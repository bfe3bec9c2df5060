"""Compute how far the windows of a pool extend beyond its input.

Follows MaxPool and AveragePool of the ONNX specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto

from quark_onnx.graph.node import Node

#: Operators whose windows may extend beyond the input.
POOLS = ("MaxPool", "AveragePool")


@dataclass(frozen=True)
class Axis:
    """An axis of a pool's input.

    Attributes:
        size: size of the input.
        before: padding before the input.
        after: padding after the input.
        reach: distance from the first to the last tap of a window, plus 1.
        stride: distance between windows.
    """

    size: int
    before: int
    after: int
    reach: int
    stride: int

    @property
    def same(self) -> int:
        """Return the total padding for a window at every stride."""
        # ceil(size / stride) windows: stride * (windows - 1) + reach covers the padded input.
        return (-(-self.size // self.stride) - 1) * self.stride + self.reach - self.size

    @property
    def room(self) -> int:
        """Return the greatest start of a window within the padded input."""
        return self.size + self.before + self.after - self.reach

    @property
    def last(self) -> int:
        """Return the start of the last window with ``ceil_mode``, in the padding or not."""
        # Rounded up to a multiple of the stride, as ``ceil_mode`` does.
        return -(-self.room // self.stride) * self.stride

    @property
    def ends_in_padding(self) -> bool:
        """Return whether the last window would begin in the padding after the input."""
        return self.last >= self.size + self.before

    @property
    def overhang(self) -> int:
        """Return how far the last window extends beyond the padded input with ``ceil_mode``.

        No window begins in the padding after the input.
        """
        last = self.last
        # The specification drops a window that would begin after the input.
        if self.ends_in_padding:
            last -= self.stride
        return max(0, last - self.room)


def rounded_up(axes: Sequence[Axis]) -> list[int]:
    """Return the pads with the effect of ``ceil_mode``: all beginnings, then all ends.

    >>> rounded_up([Axis(8, 0, 0, reach=3, stride=2), Axis(8, 0, 1, reach=2, stride=2)])
    [0, 0, 1, 1]
    """
    ends = [axis.after + axis.overhang for axis in axes]
    return [*(axis.before for axis in axes), *ends]


def without_those_in_padding(
    proto: NodeProto, shape: Sequence[int | str | None]
) -> bool:
    """Replace ``ceil_mode`` of a pool by pads if a window would begin in the padding.

    onnx counts such windows, and runtimes do not.

    Args:
        proto: the pool, changed in place.
        shape: shape of its input.

    Returns:
        Whether the pool was changed.
    """
    node = Node(proto)
    same = node.attribute("auto_pad", "NOTSET").startswith("SAME")
    # With SAME, the number of windows is ceil(size / stride), whatever ceil_mode says.
    if not node.attribute("ceil_mode") or same:
        return False
    axes = axes_of(node.attributes, shape)
    if not any(axis.ends_in_padding for axis in axes):
        return False
    node.drop_attribute("auto_pad")
    node.set_attribute("pads", rounded_up(axes))
    node.set_attribute("ceil_mode", 0)
    return True


def axes_of(attributes: Mapping[str, Any], shape: Sequence[object]) -> list[Axis]:
    """Return the axes of a pool; empty if a size is not known or the attributes are wrong.

    Args:
        attributes: attributes of the pool by name.
        shape: shape of the pool's input, (N, C, ...).
    """
    taps = attributes.get("kernel_shape", ())
    rank = len(taps)
    sizes = [size for size in shape[2:] if isinstance(size, int)]
    pads = attributes.get("pads", [0] * 2 * rank)
    strides = attributes.get("strides", [1] * rank)
    dilations = attributes.get("dilations", [1] * rank)
    # An open size makes ``sizes`` shorter; invalid attributes are left to the runtime.
    if not len(sizes) == len(strides) == len(dilations) == rank:
        return []
    if len(pads) != 2 * rank or 0 in strides:
        return []
    axes = list[Axis]()
    for index, size in enumerate(sizes):
        reach = (taps[index] - 1) * dilations[index] + 1
        after = pads[rank + index]
        axes.append(Axis(size, pads[index], after, reach, strides[index]))
    return axes
