"""Compute how far the windows of a pool extend beyond its input.

Follows MaxPool and AveragePool of the ONNX specification.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto, helper

#: Operators whose windows may extend beyond the input.
POOLS = ("MaxPool", "AveragePool")


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
    room = size + before + after - reach
    last = _last(room, stride)
    if last >= size + before:
        last -= stride
    return max(0, last - room)


def _last(room: int, stride: int) -> int:
    """Return the start of the last window, rounding up."""
    return -(-room // stride) * stride


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
    if not attributes.get("ceil_mode") or same:
        return False
    taps = attributes.get("kernel_shape", ())
    rank = len(taps)
    sizes = [size for size in shape[2:] if isinstance(size, int)]
    pads = list(attributes.get("pads", [0] * 2 * rank))
    strides = attributes.get("strides", [1] * rank)
    dilations = attributes.get("dilations", [1] * rank)
    if (
        not len(sizes) == len(strides) == len(dilations) == rank
        or len(pads) != 2 * rank
        or 0 in strides
    ):
        return False
    reaches = [
        (count - 1) * dilation + 1
        for count, dilation in zip(taps, dilations, strict=True)
    ]
    rows = list(
        zip(
            sizes,
            pads,
            pads[rank:],
            reaches,
            strides,
            strict=False,
        )
    )
    if not any(
        _last(
            sum(row[:3]) - row[3],
            row[4],
        )
        >= row[0] + row[1]
        for row in rows
    ):
        return False
    replaced = {
        "pads": pads[:rank] + [row[2] + overhang(*row) for row in rows],
        "ceil_mode": 0,
    }
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
