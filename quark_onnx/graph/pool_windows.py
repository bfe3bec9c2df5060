"""Where the windows of a pool end that may hang over its input (ONNX specification: MaxPool,
AveragePool).
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto, helper

#: Operators whose windows may hang over.
POOLS = ("MaxPool", "AveragePool")


def overhang(size: int, before: int, after: int, reach: int, stride: int) -> int:
    """By how much the last window hangs over with ``ceil_mode``. There is none that begins in the
    padding behind the input.

    Args:
        size: of an axis of the input.
        before, after: how it is padded.
        reach: from the first to the last tap of a window.

    >>> overhang(8, 0, 0, reach=3, stride=2), overhang(8, 0, 1, reach=2, stride=2)
    (1, 0)
    """
    room = size + before + after - reach
    last = _last(room, stride)
    return max(0, (last if last < size + before else last - stride) - room)


def _last(room: int, stride: int) -> int:
    """Where the last window would begin."""
    return -(-room // stride) * stride


def without_those_in_padding(
    node: NodeProto,
    shape: Sequence[int | str | None],
) -> bool:
    """Give a pool pads in the place of ``ceil_mode`` where a window would begin in the padding,
    which onnx counts and runtimes do not; whether it was so.

    Args:
        shape: of what it reads.
    """
    own = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    if not own.get("ceil_mode") or own.get("auto_pad", b"NOTSET").startswith(b"SAME"):
        return False
    taps = own.get("kernel_shape", ())
    rank, sizes = len(taps), [size for size in shape[2:] if isinstance(size, int)]
    pads = list(own.get("pads", [0] * 2 * rank))
    strides, dilations = (
        own.get(name, [1] * rank) for name in ("strides", "dilations")
    )
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
    rows = list(zip(sizes, pads, pads[rank:], reaches, strides, strict=False))
    if not any(_last(sum(row[:3]) - row[3], row[4]) >= row[0] + row[1] for row in rows):
        return False
    replaced = {
        "pads": pads[:rank] + [row[2] + overhang(*row) for row in rows],
        "ceil_mode": 0,
    }
    kept = [each for each in node.attribute if each.name not in (*replaced, "auto_pad")]
    del node.attribute[:]
    node.attribute.extend(
        [
            *kept,
            *(helper.make_attribute(name, value) for name, value in replaced.items()),
        ],
    )
    return True
