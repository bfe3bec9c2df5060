"""Plots of a mixed-precision search: bits and divergence per group of layers."""

from __future__ import annotations

from html import escape

from quark_onnx.containers import flattened, merged
from quark_onnx.page.svg import short, tag
from quark_onnx.torch.page.frame import Frame, series
from quark_onnx.torch.pipelines.mixed_precision import Group, Mixture
from quark_onnx.wording import first_of

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


def bits(mixture: Mixture, width: float, height: float, class_: str) -> str:
    """Draw the bits per weight of each group, in model order.

    Returns:
        SVG.
    """
    # A group is drawn under the name of its first layer.
    names = [group.layers[0] for group in mixture.groups]
    most = max(max(_sizes(group).values()) for group in mixture.groups)
    # 8 % of room above the tallest bar.
    frame = Frame(names, width, height, 0.0, 1.08 * most, log=False)
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
    names = [group.layers[0] for group in mixture.groups]
    # All groups and schemes share the axis.
    options = flattened(group.options for group in mixture.groups)
    frame = Frame.around(
        names,
        width,
        height,
        (option.divergence for option in options),
    )
    schemes, parts = schemes_of(mixture), []
    # A dot is narrower than its slot, and neither vanishes nor covers its neighbours.
    radius = min(max(0.35 * frame.slot, _LEAST), _GREATEST)
    for place, group in enumerate(mixture.groups):
        dots = ""
        for each in sorted(
            group.options,
            key=lambda option: option == group.chosen,
        ):  # drawn last, on top
            own = (
                f"{series(schemes.index(each.scheme))}"
                f" {'filled' if each == group.chosen else 'hollow'}"
            )
            dots += tag(
                "circle",
                class_=own,
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
    rows = (
        f"{each.scheme}: {each.bits / group.weights:.3g} bits, {short(each.divergence)}"
        " nats" + (", chosen" if each == group.chosen else "")
        for each in group.options
    )
    return "\n".join([first_of(group.layers), *rows])
