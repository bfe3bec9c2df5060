"""Values of held-out samples that lie outside of the calibrated ranges."""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.common.wording import counted
from quark_onnx.report.figures import percentage

#: Maximum number of tensors in the report.
_SHOWN = 3


@dataclass(frozen=True)
class ClippedTensor:
    """The clipped values of a tensor.

    Attributes:
        name: name of the tensor in the float graph.
        share: share of its values that are clipped, by more than half a step.
        low, high: least and greatest value of its codes.
        least, greatest: least and greatest value on the samples.
    """

    name: str
    share: float
    low: float
    high: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {percentage(self.share)} of the values; its range is"
            f" {self.low:.4g} to {self.high:.4g}, its values {self.least:.4g} to"
            f" {self.greatest:.4g}"
        )


@dataclass(frozen=True)
class Clipping:
    """The clipped values of all activations in integer codes.

    Attributes:
        samples: number of held-out samples.
        tensors: number of tensors that were compared with their ranges.
        clipped: the tensors with clipped values, the greatest share first.
    """

    samples: int
    tensors: int
    clipped: tuple[ClippedTensor, ...]

    def lines(self) -> list[str]:
        """Return the clipping as text."""
        where = f"on {counted(self.samples, 'held-out sample')}"
        if not self.clipped:
            return [f"nothing in {counted(self.tensors, 'tensor')} {where}"]
        lines = [f"{len(self.clipped)} of {counted(self.tensors, 'tensor')} {where}:"]
        lines += [f"  {tensor}" for tensor in self.clipped[:_SHOWN]]
        if len(self.clipped) > _SHOWN:
            lines.append(f"  and {len(self.clipped) - _SHOWN} more")
        return lines
