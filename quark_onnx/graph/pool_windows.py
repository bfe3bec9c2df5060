"""Compute how far the windows of a pool extend beyond its input.

Follows MaxPool and AveragePool of the ONNX specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto, helper

#: Operators whose windows may extend beyond the input.
POOLS = ("MaxPool", "AveragePool")


@dataclass(frozen=True)
class _Axis:
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
        """Return how far the last window extends beyond the padded input.

        No window begins in the padding after the input.
        """
        last = self.last
        # The specification drops a window that would begin after the input.
        if self.ends_in_padding:
            last -= self.stride
        return max(0, last - self.room)


def overhang(size: int, before: int, after: int, reach: int, stride: int) -> int:
    """Return how far the last window extends beyond the padded input with ``ceil_mode``.

    No window begins in the padding after the input.

    Args:
        size: size of an axis of the input.
        before: padding before it.
        after: padding after it.
        reach: distance from the first to the last tap of a window, plus 1.
        stride: distance between windows.

    >>> overhang(8, 0, 0, reach=3, stride=2), overhang(8, 0, 1, reach=2, stride=2)
    (1, 0)
    """
    return _Axis(size, before, after, reach, stride).overhang


def without_those_in_padding(
    node: NodeProto,
    shape: Sequence[int | str | None],
) -> bool:
    """Replace ``ceil_mode`` of a pool by pads if a window would begin in the padding.

    onnx counts such windows, and runtimes do not.

    Args:
        node: the pool, changed in place.
        shape: shape of its input.

    Returns:
        Whether the pool was changed.
    """
    attributes = {
        attribute.name: helper.get_attribute_value(attribute)
        for attribute in node.attribute
    }
    same = attributes.get("auto_pad", b"NOTSET").startswith(b"SAME")
    # With SAME, the number of windows is ceil(size / stride), whatever ceil_mode says.
    if not attributes.get("ceil_mode") or same:
        return False
    axes = _axes(attributes, shape)
    if not any(axis.ends_in_padding for axis in axes):
        return False
    # Layout of ``pads``: all beginnings, then all ends.
    starts = list[int]()
    ends = list[int]()
    for axis in axes:
        starts.append(axis.before)
        ends.append(axis.after + axis.overhang)
    replaced = {"pads": [*starts, *ends], "ceil_mode": 0}
    kept = [
        attribute
        for attribute in node.attribute
        if attribute.name not in (*replaced, "auto_pad")
    ]
    del node.attribute[:]
    node.attribute.extend(kept)
    for name, value in replaced.items():
        node.attribute.append(helper.make_attribute(name, value))
    return True


def _axes(attributes: Mapping[str, Any], shape: Sequence[object]) -> list[_Axis]:
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
    axes = list[_Axis]()
    for index, size in enumerate(sizes):
        reach = (taps[index] - 1) * dilations[index] + 1
        after = pads[rank + index]
        axes.append(_Axis(size, pads[index], after, reach, strides[index]))
    return axes
