"""The plot of the error along the graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from html import escape

from quark_onnx.analysis.findings import TensorError
from quark_onnx.page.blocks import Drawing
from quark_onnx.page.svg import Scale, axes, drawing, linear, short, tag, ticks

_MOVING = (
    *(
        "Reshape",
        "Transpose",
        "Concat",
        "Slice",
        "Gather",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Split",
        "Pad",
        "Expand",
    ),
    *(
        "Resize",
        "Identity",
        "Dropout",
        "Cast",
        "Tile",
        "DepthToSpace",
        "SpaceToDepth",
        "Upsample",
    ),
)
#: Operator families: CSS class, title, and prefixes of operator names.
FAMILIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("input", "input", ("Input",)),
    (
        "product",
        "convolution, matrix product",
        ("Conv", "Gemm", "MatMul", "Einsum", "LSTM", "GRU", "RNN", "Attention"),
    ),
    (
        "normal",
        "normalization, softmax",
        ("BatchNorm", "LayerNorm", "InstanceNorm", "GroupNorm", "SkipLayer", "Softmax"),
    ),
    (
        "arithmetic",
        "arithmetic",
        (
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Pow",
            "Sqrt",
            "Sum",
            "Neg",
            "Where",
            "Min",
            "Max",
        ),
    ),
    (
        "reduce",
        "pooling, reduction",
        (
            "MaxPool",
            "AveragePool",
            "GlobalAverage",
            "GlobalMax",
            "Reduce",
            "LpPool",
            "GlobalLp",
        ),
    ),
    (
        "move",
        "moving of values",
        _MOVING,
    ),
)
_OTHER = ("activation", "activation function, other")
_CEILING = 70.0
_NUMBERED = 5
#: Width of a single label.
_LABEL = 16.0


def family(op_type: str) -> tuple[str, str]:
    """Return the CSS class and the title of an operator's family.

    Args:
        op_type: the operator.

    >>> family("ConvTranspose")[0], family("MaxPool")[0], family("Relu")[0]
    ('product', 'reduce', 'activation')
    """
    # The longest prefix wins: "MaxPool" is a pooling, and no "Max".
    longest = 0
    best = _OTHER
    for name, title, prefixes in FAMILIES:
        for prefix in filter(op_type.startswith, prefixes):
            if len(prefix) > longest:
                longest = len(prefix)
                best = (name, title)
    return best


def along_the_graph(
    tensors: Sequence[TensorError], ranking: Sequence[TensorError], sqnr: float
) -> Drawing:
    """Return a plot of the SQNR of each tensor in the order of execution.

    Args:
        tensors: the tensors in this order.
        ranking: the tensors that add noise; the first have numbers in the plot.
        sqnr: SQNR of the worst output in dB.
    """
    # The key names the families that occur, in the order of the graph.
    key = list(dict.fromkeys(family(tensor.op_type) for tensor in tensors))
    if math.isfinite(sqnr):
        key.append(("dash", f"output, {sqnr:.1f} dB"))
    return Drawing(
        "Error along the graph",
        "Filled: the error with everything before it quantized. Rings: what the tensor's own"
        " operator and grid add, with everything before it float. Numbers are places in the"
        " ranking below.",
        partial(_plots, tensors, ranking, sqnr),
        [*key, ("ring", "alone")],
    )


def _plots(
    tensors: Sequence[TensorError], ranking: Sequence[TensorError], sqnr: float
) -> list[str]:
    """Return a plot for wide and for narrow windows; none without tensors."""
    sizes = ((1000.0, 330.0, "wide"), (380.0, 300.0, "narrow"))
    return [_plot(tensors, ranking, sqnr, *size) for size in sizes if tensors]


def _plot(  # noqa: PLR0913
    tensors: Sequence[TensorError],
    ranking: Sequence[TensorError],
    sqnr: float,
    width: float,
    height: float,
    class_: str,
) -> str:
    """Return the plot as SVG.

    Args:
        tensors: the tensors in the order of execution.
        ranking: the tensors that add noise.
        sqnr: SQNR of the worst output in dB.
        width: width of the plot in pixels.
        height: height of the plot in pixels.
        class_: CSS class of the plot.
    """
    # Exact tensors (infinite) and lost ones (minus infinite) have no point.
    shown = [tensor for tensor in tensors if math.isfinite(tensor.sqnr)]
    ratios = list[float]()
    for tensor in shown:
        ratios.append(min(tensor.sqnr, _CEILING))
        if tensor.sqnr_local:
            ratios.append(min(tensor.sqnr_local, _CEILING))
    # Multiples of 5 dB, with room for numbers below the points.
    lo = math.floor((min(ratios, default=0.0) - 4) / 5) * 5
    hi = math.ceil((max(ratios, default=40.0) + 2) / 5) * 5
    left, right, top, bottom = 44.0, width - 12, 32.0, height - 40
    x = linear(0, max(1, len(tensors) - 1), left + 8, right - 8)
    y = linear(lo, hi, bottom, top)
    places = ticks(0, max(1, len(tensors) - 1), max(3, int(width / 140)))
    parts = axes(
        (left, right, bottom),
        {x(place): short(place + 1) for place in places if float(place).is_integer()},
        {y(value): short(value) for value in ticks(lo, hi, 6)},
        ("tensor, in order of execution", "SQNR, dB"),
    )
    parts += _points(tensors, ranking, x, y, lo)
    if math.isfinite(sqnr):
        parts.append(
            tag(
                "line",
                class_="final",
                x1=left,
                x2=right,
                y1=y(sqnr),
                y2=y(sqnr),
            ),
        )
    return drawing(
        width,
        height,
        "Signal-to-noise ratio of each tensor in order of execution",
        parts,
        class_,
    )


def _points(
    tensors: Sequence[TensorError],
    ranking: Sequence[TensorError],
    x: Scale,
    y: Scale,
    lo: float,
) -> list[str]:
    """Return the points of the tensors and the line through them, with numbers for the worst.

    Args:
        tensors: the tensors in the order of execution.
        ranking: the tensors that add noise.
        x: scale of the places in the order of execution.
        y: scale of the ratios in dB.
        lo: ratio at the lower end of the axis, in dB.
    """
    numbers = {
        tensor.name: index for index, tensor in enumerate(ranking[:_NUMBERED], 1)
    }
    alone = list[str]()
    points = list[str]()
    line = list[str]()
    labels = list[tuple[float, float, str]]()
    for index, tensor in enumerate(tensors):
        local = tensor.sqnr_local
        if local is not None and math.isfinite(local):
            high = y(min(max(local, lo), _CEILING))
            # Ratios of tensors that are exact in the full run may lie below the axis: they are
            # drawn at its end.
            alone.append(tag("circle", class_="alone", cx=x(index), cy=high, r=2.2))
        if not math.isfinite(tensor.sqnr):
            continue
        high = y(min(tensor.sqnr, _CEILING))
        line.append(f"{x(index):.1f},{high:.1f}")
        style, radius = family(tensor.op_type)[0], 3.6
        if tensor.name in numbers:
            style, radius = f"{style} worst", 5.0
            labels.append((x(index), high + 18, str(numbers[tensor.name])))
        hover = tag("title", escape(_hover(tensor)))
        points.append(
            tag("circle", hover, class_=style, cx=x(index), cy=high, r=radius),
        )
    # later elements cover earlier ones
    parts = [*alone, *points]
    if line:
        parts.insert(0, tag("polyline", class_="thread", points=" ".join(line)))
    for at, high, text in _apart(labels):
        parts.append(
            tag("text", text, class_="rank", x=at, y=high, text_anchor="middle"),
        )
    return parts


def _apart(labels: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Return labels from left to right; labels that would touch are merged.

    >>> _apart([(10.0, 5.0, "2"), (14.0, 9.0, "1"), (90.0, 5.0, "3")])
    [(12.0, 9.0, '2, 1'), (90.0, 5.0, '3')]
    """
    result: list[tuple[float, float, str]] = []
    for at, high, text in labels:
        # A merged label is as many labels wide as it has numbers.
        if result and at - result[-1][0] < _LABEL * (1 + result[-1][2].count(",")):
            before = result.pop()
            result.append(
                ((before[0] + at) / 2, max(before[1], high), f"{before[2]}, {text}"),
            )
        else:
            result.append((at, high, text))
    return result


def _hover(tensor: TensorError) -> str:
    """Return the hover text of a point."""
    lines = [tensor.name, f"{tensor.op_type}: {tensor.sqnr:.1f} dB"]
    if tensor.sqnr_local is not None and math.isfinite(tensor.sqnr_local):
        lines.append(f"alone: {tensor.sqnr_local:.1f} dB")
    lines.append(tensor.format or "stays float")
    return "\n".join(lines + [cause.text for cause in tensor.causes[:2]])
