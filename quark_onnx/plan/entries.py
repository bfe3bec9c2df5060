"""What can become of a tensor: a closed sum of four decisions."""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.config import QuantizationSpec, format_calibrator


@dataclass(frozen=True)
class Use:
    """A tensor as everybody reads it, or as one node reads it.

    Attributes:
        tensor: its name.
        node: name of the one reader; None stands for every reader without an entry of its own.
    """

    tensor: str
    node: str | None = None

    def __str__(self) -> str:
        return self.tensor if self.node is None else f"{self.tensor} in {self.node}"


@dataclass(frozen=True)
class Quantize:
    """Its scale follows from its range, which is measured or known.

    Attributes:
        spec: how.
        axis: channel axis of a per-channel constant; None per tensor.
        bounds: the range, where it is known without measuring.
    """

    spec: QuantizationSpec
    axis: int | None = None
    bounds: tuple[float, float] | None = None

    def __str__(self) -> str:
        s = self.spec
        words = ["quantize", s.dtype.name, "symmetric" if s.symmetric else "asymmetric"]
        words += ["pow2"] if s.pow2 else []
        words += [f"axis {self.axis}"] if self.axis is not None else []
        words += [f"[{self.bounds[0]:g}, {self.bounds[1]:g}]" if self.bounds else format_calibrator(s.calibrator)]
        return " ".join(words)


@dataclass(frozen=True)
class SameAs:
    """It has the scale of another tensor: its values are a selection or a rearrangement of that one's."""

    use: Use

    def __str__(self) -> str:
        return f"same as {self.use}"


@dataclass(frozen=True)
class BiasOf:
    """An int32 bias, added to the product of ``x`` and ``w``; its scale is the product of theirs.

    Attributes:
        axis: the axis of the bias that runs over the channels of the weight.
        repeat: how often the channel scales of the weight repeat along it (grouped ConvTranspose).
    """

    x: Use
    w: Use
    axis: int = 0
    repeat: int = 1

    def __str__(self) -> str:
        return f"bias of {self.x} and {self.w}"


@dataclass(frozen=True)
class Keep:
    """It stays float, and why."""

    reason: str

    def __str__(self) -> str:
        return f"keep: {self.reason}"


Entry = Quantize | SameAs | BiasOf | Keep
