"""Plots of a mixed-precision search: bits and divergence per group of layers."""

from __future__ import annotations

from html import escape

from quark_onnx.common.containers import merged
from quark_onnx.common.wording import first_of
from quark_onnx.page.svg import short, tag
from quark_onnx.torch.page.frame import Frame, series
from quark_onnx.torch.pipelines.mixed_precision import Group, Mixture

#: Relative width of a bar; minimum and maximum radius of a dot.
_BAR, _LEAST, _GREATEST = 0.72, 1.4, 4.0


def schemes_of(mixture: Mixture) -> list[str]:
    """Return the names of the candidate schemes by ascending size."""
    # Groups differ slightly in their bits per weight; the sizes only give the order here.
    sizes = merged(map(_sizes, mixture.groups))
    return sorted(sizes, key=sizes.__getitem__)


def _sizes(group: Group) -> dict[str, float]:
    """Return the bits per weight of each option of a group, by scheme."""
    return {option.scheme: option.bits / group.weights for option in group.options}


def _greatest_size(group: Group) -> float:
    """Return the bits per weight of a group with its largest option."""
    return max(_sizes(group).values())


def _names(mixture: Mixture) -> list[str]:
    """Return a name for each group: that of its first layer."""
    return [group.layers[0] for group in mixture.groups]


def bits(mixture: Mixture, width: float, height: float, class_: str) -> str:
    """Draw the bits per weight of each group, in model order.

    Returns:
        SVG.
    """
    most = max(map(_greatest_size, mixture.groups))
    # 8 % of room above the tallest bar.
    frame = Frame(_names(mixture), width, height, 0.0, 1.08 * most, log=False)
    schemes, parts, wide = schemes_of(mixture), [], _BAR * frame.slot
    # The bar of a group has the size of its chosen scheme.
    for place, group in enumerate(mixture.groups):
        top = frame.y(group.chosen.bits / group.weights)
        hover, own = (
            tag("title", escape(_hover(group))),
            series(schemes.index(group.chosen.scheme)),
        )
        left = frame.x(place) - wide / 2
        parts.append(
            tag(
                "rect",
                hover,
                class_=f"{own} filled",
                x=left,
                y=top,
                width=wide,
                height=frame.bottom - top,
            ),
        )
    return frame.drawn(
        "Bits per weight of each group of layers",
        "bits",
        parts,
        class_,
    )


def divergences(mixture: Mixture, width: float, height: float, class_: str) -> str:
    """Draw the divergence of each group with each scheme; chosen schemes are filled.

    Returns:
        SVG.
    """
    # All groups and schemes share the axis.
    values = list[float]()
    for group in mixture.groups:
        values += [option.divergence for option in group.options]
    frame = Frame.around(_names(mixture), width, height, values)
    schemes, parts = schemes_of(mixture), []
    # A dot is narrower than its slot, and neither vanishes nor covers its neighbours.
    radius = min(max(0.35 * frame.slot, _LEAST), _GREATEST)
    for place, group in enumerate(mixture.groups):
        dots = ""
        for each in sorted(
            group.options,
            key=lambda option: option == group.chosen,
        ):  # drawn last, on top
            marker = "hollow"
            if each == group.chosen:
                marker = "filled"
            dots += tag(
                "circle",
                class_=f"{series(schemes.index(each.scheme))} {marker}",
                cx=frame.x(place),
                cy=frame.y(each.divergence),
                r=radius,
            )
        parts.append(tag("g", tag("title", escape(_hover(group))) + dots))
    return frame.drawn(
        "Divergence of each group of layers at each scheme",
        "nats for each token",
        parts,
        class_,
    )


def _hover(group: Group) -> str:
    """Return the size and the divergence of a group with each scheme, a line each."""
    lines = [first_of(group.layers)]
    for option in group.options:
        size = f"{option.bits / group.weights:.3g} bits"
        line = f"{option.scheme}: {size}, {short(option.divergence)} nats"
        if option == group.chosen:
            line += ", chosen"
        lines.append(line)
    return "\n".join(lines)
