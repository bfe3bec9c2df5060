"""Windows of convolutions and pools.

ONNX specification: Conv, ConvTranspose, MaxPool, AveragePool.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from quark_onnx.graph import Node
from quark_onnx.kernels.axes import along
from quark_onnx.kernels.im2col import Window
from quark_onnx.refine.layer_problems import window_of

_SAME = ("SAME_UPPER", "SAME_LOWER")


def placed(
    node: Node, size: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[Window, tuple[int, ...]]:
    """Return the window of a node and the spatial sizes of its output.

    Args:
        node: a convolution or pool.
        size: spatial sizes of the input.
        kernel: sizes of the window.
    """
    rank, turned = len(kernel), node.kind == "ConvTranspose"
    strides = node.attribute("strides", [1] * rank)
    dilations = node.attribute("dilations", [1] * rank)
    pads = node.attribute("pads", [0] * 2 * rank)
    extra = node.attribute("output_padding", [0] * rank)
    auto = node.attribute("auto_pad", "NOTSET")
    # The spatial sizes alone, if the attribute holds batch and channels as well.
    output = list(node.attribute("output_shape", ()))[-rank:] if turned else []
    ceil = bool(node.attribute("ceil_mode", 0))
    for axis in range(rank) if not output else ():
        # The reach of a dilated kernel: the distance from its first to its last tap, inclusive.
        reach, stride = (kernel[axis] - 1) * dilations[axis] + 1, strides[axis]
        before, after = (0, 0) if auto == "VALID" else (pads[axis], pads[rank + axis])
        # SAME pads so that the output has one position per stride, whatever the kernel.
        if auto in _SAME:
            output.append(size[axis] * stride if turned else -(-size[axis] // stride))
        elif turned:
            output.append(
                stride * (size[axis] - 1) + extra[axis] + reach - before - after,
            )
        else:
            output.append(_count(size[axis] + before, after, reach, stride, ceil))
    return window_of(node, size, tuple(output), kernel), tuple(output)


def _count(size: int, after: int, reach: int, stride: int, ceil: bool) -> int:
    """Return the number of windows along an axis.

    With ``ceil`` the last window may extend beyond the padding if it begins in the input.
    """
    # ONNX, MaxPool: floor or ceil of (input + pads - reach) / stride, plus 1.
    room = size + after - reach
    count = (-(-room // stride) if ceil else room // stride) + 1
    # A last window that would begin in the padding at the end is dropped.
    return count - (ceil and (count - 1) * stride >= size)


def covered(
    node: Node, window: Window, size: tuple[int, ...], output: tuple[int, ...]
) -> NDArray[np.int64]:
    """Return the number of inputs in each average, (output sizes).

    With ``count_include_pad`` padding counts, but not the part of a last window beyond the padding.
    """
    rank, padded = len(output), bool(node.attribute("count_include_pad", 0))
    pads = node.attribute("pads", [0] * 2 * rank)
    automatic = node.attribute("auto_pad", "NOTSET") in _SAME
    # Counted padding is part of the room: the window starts at its edge.
    seen = replace(window, pads=(0,) * rank) if padded else window
    counts: NDArray[np.int64] = np.ones((1,) * rank, np.int64)
    for axis in range(rank):
        room = size[axis]
        if padded:
            last = (
                (output[axis] - 1) * window.strides[axis]
                + (window.kernel[axis] - 1) * window.dilations[axis]
                + 1
            )
            room = last if automatic else room + pads[axis] + pads[rank + axis]
        inside = seen.seen(axis, room, output[axis])[1].sum(axis=0)
        # Counts of the axes multiply: a window is a box.
        counts = counts * inside.reshape(along(axis, rank))
    return np.broadcast_to(counts, output)


def places(batch: int, output: tuple[int, ...]) -> int:
    """Return the number of windows in a batch."""
    return batch * prod(output)
