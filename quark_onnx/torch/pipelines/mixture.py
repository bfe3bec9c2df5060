"""Mixture: the schemes of groups of layers, with plots of their bits and divergences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from operator import attrgetter

from quark_onnx.common.wording import first_of, tally
from quark_onnx.page.blocks import Drawing
from quark_onnx.page.svg import short, tag
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.page.frame import Frame, key_of, series

#: Relative width of a bar; minimum and maximum radius of a dot.
_BAR, _LEAST, _GREATEST = 0.72, 1.4, 4.0


@dataclass(frozen=True)
class Option:
    """Scheme for a group of layers, with its cost and sensitivity.

    Attributes:
        scheme: the name of the scheme.
        bits: bits of the group's weights in the checkpoint, with scales.
        divergence: divergence of the predictions in nats per token, with only this group quantized.
    """

    scheme: str
    bits: int
    divergence: float


@dataclass(frozen=True)
class Group:
    """Group of layers with a common scheme, since runtimes fuse them.

    Attributes:
        layers: the names of the layers.
        weights: the number of weights.
        options: the options by ascending bits.
        chosen: the option that the group gets.
    """

    layers: tuple[str, ...]
    weights: int
    options: tuple[Option, ...]
    chosen: Option


@dataclass(frozen=True)
class Mixture:
    """Result of a mixed-precision search.

    Attributes:
        config: the configuration with the schemes of all layers.
        groups: the groups in the order of the model.
    """

    config: TorchConfig
    groups: tuple[Group, ...]

    @property
    def bits(self) -> float:
        """Return the bits per weight, with scales."""
        bits = sum(map(attrgetter("chosen.bits"), self.groups))
        weights = sum(map(attrgetter("weights"), self.groups))
        return float(bits / weights)

    @property
    def divergence(self) -> float:
        """Return the sum of the groups' divergences, in nats per token."""
        return float(sum(map(attrgetter("chosen.divergence"), self.groups)))

    def line(self) -> str:
        """Return the bits and the numbers of groups by scheme in words."""
        counts = Counter(group.chosen.scheme for group in self.groups)
        return (
            f"{self.bits:.3f} bits per weight of the quantized layers; groups of layers:"
            f" {tally(sorted(counts.items()))}"
        )

    def drawing(self) -> Drawing:
        """Return the bits and the divergences of the groups in the order of the model."""
        chosen = Counter(group.chosen.scheme for group in self.groups)
        count = len(self.groups)
        key = key_of(
            f"{scheme}: {chosen[scheme]} of {count}" for scheme in _schemes_of(self)
        )
        return Drawing(
            "Mixed precision",
            "Bits per weight of a group of layers, scales included; below, how far what the"
            " model predicts moves if that group alone is quantized, at each scheme. What was"
            " chosen is filled; all groups together:"
            f" {short(self.divergence)} nats for each token.",
            self._plots,
            key,
        )

    def _plots(self) -> list[str]:
        wide, narrow = (1000.0, 240.0, "wide"), (380.0, 220.0, "narrow")
        return [
            draw(self, *size)
            for size in (wide, narrow)
            for draw in (_bits, _divergences)
        ]


def _schemes_of(mixture: Mixture) -> list[str]:
    """Return the names of the candidate schemes by ascending size."""
    # Groups differ slightly in their bits per weight; the sizes only give the order here.
    sizes = dict[str, float]()
    for group in mixture.groups:
        sizes |= _sizes(group)
    return sorted(sizes, key=sizes.__getitem__)


def _sizes(group: Group) -> dict[str, float]:
    """Return the bits per weight of each option of a group, by scheme."""
    return {option.scheme: option.bits / group.weights for option in group.options}


def _names(mixture: Mixture) -> list[str]:
    """Return a name for each group: that of its first layer."""
    return [group.layers[0] for group in mixture.groups]


def _bits(mixture: Mixture, width: float, height: float, class_: str) -> str:
    """Draw the bits per weight of each group, in model order.

    Returns:
        SVG.
    """
    most = max(size for group in mixture.groups for size in _sizes(group).values())
    # 8 % of room above the tallest bar.
    frame = Frame(_names(mixture), width, height, 0.0, 1.08 * most, log=False)
    schemes, bars, bar_width = _schemes_of(mixture), [], _BAR * frame.slot
    # The bar of a group has the size of its chosen scheme.
    for index, group in enumerate(mixture.groups):
        top = frame.y(group.chosen.bits / group.weights)
        color = series(schemes.index(group.chosen.scheme))
        bars.append(
            tag(
                "rect",
                tag("title", escape(_hover(group))),
                class_=f"{color} filled",
                x=frame.x(index) - bar_width / 2,
                y=top,
                width=bar_width,
                height=frame.bottom - top,
            ),
        )
    return frame.drawn(
        "Bits per weight of each group of layers",
        "bits",
        bars,
        class_,
    )


def _divergences(mixture: Mixture, width: float, height: float, class_: str) -> str:
    """Draw the divergence of each group with each scheme; chosen schemes are filled.

    Returns:
        SVG.
    """
    # All groups and schemes share the axis.
    values = list[float]()
    for group in mixture.groups:
        values += [option.divergence for option in group.options]
    frame = Frame.around(_names(mixture), width, height, values)
    schemes, columns = _schemes_of(mixture), []
    # A dot is narrower than its slot, and neither vanishes nor covers its neighbours.
    radius = min(max(0.35 * frame.slot, _LEAST), _GREATEST)
    for index, group in enumerate(mixture.groups):
        dots = ""
        # the chosen option is drawn last, on top
        for option in sorted(group.options, key=lambda option: option == group.chosen):
            marker = "filled" if option == group.chosen else "hollow"
            dots += tag(
                "circle",
                class_=f"{series(schemes.index(option.scheme))} {marker}",
                cx=frame.x(index),
                cy=frame.y(option.divergence),
                r=radius,
            )
        columns.append(tag("g", tag("title", escape(_hover(group))) + dots))
    return frame.drawn(
        "Divergence of each group of layers at each scheme",
        "nats for each token",
        columns,
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
