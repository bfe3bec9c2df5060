"""Operators that only move values, computed by ONNX's reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.npu.integers.call import NodeCall, Operator, Real, Value, in_float
from quark_onnx.npu.integers.fixed import Fixed, Ints, aligned

Floats = NDArray[np.float32]

#: Offset of the centres of outputs and of inputs, by coordinate transformation mode.
_CENTRES = {
    "asymmetric": (0, 0),
    "half_pixel": (0.5, 0.5),
    "pytorch_half_pixel": (0.5, 0.5),
    "tf_half_pixel_for_nn": (0.5, 0),
}


def move(call: NodeCall) -> list[Value]:
    """Move the values of the first input; the other inputs hold indices."""
    value = call.inputs[0]
    if isinstance(value, Real):
        # Values that were moved are still values of the input.
        results = call.evaluated({0: value.values})
        return [Real(result, value.given) for result in results]
    x = call.fixed(0)
    results = call.evaluated({0: x.values})
    return [Fixed(result, x.position, x.divisor) for result in results]


def shape(call: NodeCall) -> list[Value]:
    """Compute Shape or Size, for any kind of number."""
    # Only the shape matters: the smallest type stands for the values.
    return list(call.evaluated({0: np.empty(call.size(), np.bool_)}))


def join(call: NodeCall) -> list[Value]:
    """Join values at their finest position: Concat, and the fill value of Pad."""
    joined = _joined(call)
    inputs = [call.inputs[index] for index in joined]
    real = [value for value in inputs if isinstance(value, Real)]
    if not real:
        values, position, divisor = aligned([call.fixed(index) for index in joined])
        results = call.evaluated(dict(zip(joined, values, strict=True)))
        return [Fixed(result, position, divisor) for result in results]
    # A float has no position at which integers could join it.
    if len(real) < len(joined):
        raise call.refused("some of its inputs are float, others are not")
    given = all(value.given for value in real)
    arrays = [value.values for value in real]
    results = call.evaluated(dict(zip(joined, arrays, strict=True)))
    return [Real(result, given) for result in results]


def _joined(call: NodeCall) -> list[int]:
    """Return the indices of the inputs with the values that are joined."""
    if call.node.kind == "Concat":
        return list(range(len(call.node.inputs)))
    # Input 1 of Pad holds the pads, input 2 the value.
    return [0, 2] if call.has(2) else [0]


def resize(call: NodeCall) -> list[Value]:
    """Compute Resize in mode nearest, axis by axis; in float where it interpolates linearly."""
    if call.node.attribute("mode", "nearest") == "linear":
        return in_float(call)
    node, taken, rank = call.node, list[tuple[int, Ints]](), len(call.size())
    supported = (
        ("mode", "nearest"),
        ("keep_aspect_ratio_policy", "stretch"),
        ("antialias", 0),
    )
    for name, value in supported:
        # Other modes interpolate, or change the scales by the aspect ratio.
        if node.attribute(name, value) != value:
            raise call.refused(f"{name} is {node.attribute(name)!r}")
    old = call.graph.opset < 11  # scales came second
    scales = _known_or_empty(call, 1 if old else 2)
    sizes = _known_or_empty(call, 3)
    for index, axis in enumerate(node.attribute("axes", range(rank))):
        size = call.size()[axis]
        if sizes.size:
            output = int(sizes[index])
        else:
            # In float32, as in onnxruntime: the product may round to the next whole number.
            output = int(np.floor(np.float32(size) * np.float32(scales[index])))
        # With sizes in place of scales, ONNX defines the scale as the ratio of the sizes.
        scale = np.float32(scales[index] if scales.size else output / size)
        # Index lists per axis: nearest neighbours of several axes are independent.
        if scale != 1:
            taken.append((axis, _nearest(call, size, output, scale)))

    def resized(values: NDArray[Any]) -> NDArray[Any]:
        for axis, indices in taken:
            values = values.take(indices, axis=axis)
        return values

    return call.moved(resized)


def _known_or_empty(call: NodeCall, index: int) -> NDArray[Any]:
    """Return the value of a constant input; no values if the input is omitted."""
    return call.known(index) if call.has(index) else np.empty(0)


def _nearest(call: NodeCall, size: int, output: int, scale: np.float32) -> Ints:
    """Return the input index of each output (ONNX specification, Resize).

    Coordinates are computed in float32, as in onnxruntime.
    """
    node = call.node
    old = call.graph.opset < 11
    mode = node.attribute(
        "coordinate_transformation_mode", "asymmetric" if old else "half_pixel"
    )
    at: Floats = np.arange(output, dtype=np.float32)
    half = np.float32(0.5)
    if output == 1 and mode in ("pytorch_half_pixel", "align_corners"):
        x = at  # which is zero
    elif mode == "align_corners":
        x = at * np.float32(size - 1) / np.float32(output - 1)
    elif mode in _CENTRES:
        before, behind = map(np.float32, _CENTRES[mode])
        x = (at + before) / scale - behind
    else:
        raise call.refused(f"coordinate_transformation_mode is {mode!r}")
    roundings: dict[str, Floats] = {
        "round_prefer_floor": np.ceil(x - half),
        "round_prefer_ceil": np.floor(x + half),
        "floor": np.floor(x),
        "ceil": np.ceil(x),
    }
    chosen = roundings[
        node.attribute("nearest_mode", "floor" if old else "round_prefer_floor")
    ]
    # Coordinates beyond the border take the value at the border.
    return chosen.astype(np.int64).clip(0, size - 1)


MOVING: dict[str, Operator] = {
    "Concat": join,
    "DepthToSpace": move,
    "Expand": move,
    "Flatten": move,
    "Gather": move,
    "Identity": move,
    "Pad": join,
    "Reshape": move,
    "Resize": resize,
    "Shape": shape,
    "Size": shape,
    "Slice": move,
    "SpaceToDepth": move,
    "Split": move,
    "Squeeze": move,
    "Tile": move,
    "Transpose": move,
    "Unsqueeze": move,
    "Upsample": resize,
}
