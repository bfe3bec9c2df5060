"""What can become of a tensor: a closed sum of four decisions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from numpy.typing import NDArray

from calibrators import QParams, rows
from quark_onnx.config import QuantizationSpec, TensorOverride, format_calibrator
from quark_onnx.dtypes import BODY_OPSET, INT32, Block, Integer, Scaled


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
    """It is rounded to a number format.

    A scale, if the format has one, follows from its range, measured or known.

    Attributes:
        spec: how.
        axis: of the channels of a constant or of its blocks; None per tensor, or for blocks
            wherever they usually run.
        bounds: the range, where it is known without measuring.
        flat: blocks run over all axes from ``axis`` on, as if these were one.
        note: why it is not what was asked for, empty if it is.
        given: what the user has said of this tensor.
    """

    spec: QuantizationSpec
    axis: int | None = None
    bounds: tuple[float, float] | None = None
    flat: bool = False
    note: str = field(default="", compare=False)
    given: TensorOverride | None = None

    @property
    def min_opset(self) -> int:
        """First opset whose own operators can write it."""
        spec = self.spec
        vendor = isinstance(spec.dtype, Scaled) and not (
            spec.dtype.emitted and spec.dtype.read
        )
        least = {
            spec.dtype.min_opset: True,
            11: spec.dynamic or spec.saturate,
            13: self.axis is not None,
            BODY_OPSET: vendor,
            21: spec.block_size > 0,
        }
        return max(
            opset
            for opset, needed in least.items()
            if needed or opset == spec.dtype.min_opset
        )

    @property
    def any_axis(self) -> Quantize:
        """The same with blocks along whatever axis."""
        return replace(self, axis=None) if isinstance(self.spec.dtype, Block) else self

    def rows(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the values of a constant as (rows, n), one row for each scale.

        The last block is filled up.
        """
        flattened = array.reshape(*array.shape[: self.axis], -1) if self.flat else array
        return rows(flattened, self.axis, self.spec.block_size)

    def placed(self, params: QParams, shape: tuple[int, ...]) -> QParams:
        """Return parameters with one value for each row of ``rows`` as those of a constant of this
        shape.
        """
        if not self.spec.block_size or self.axis is None:
            return params
        flattened = (
            (*shape[: self.axis], prod(shape[self.axis :])) if self.flat else shape
        )
        return params.in_blocks(flattened, self.axis, self.spec.block_size)

    def __str__(self) -> str:
        return f"{self.form}, as {self.note}" if self.note else self.form

    @property
    def form(self) -> str:
        """Format, zero point, granularity and range as a text."""
        s = self.spec
        words = ["quantize", s.dtype.name]
        axis = (
            [f"axes from {self.axis}," if self.flat else f"axis {self.axis}"]
            if self.axis is not None
            else []
        )
        if not s.dtype.scaled:
            return " ".join([*words, *axis])
        words += ["symmetric" if s.symmetric else "asymmetric"]
        words += ["pow2"] if s.pow2 else []
        words += [*axis, f"blocks of {s.block_size}"] if s.block_size else axis
        if s.dynamic:
            return " ".join([*words, "dynamic"])
        words += [
            f"[{self.bounds[0]:g}, {self.bounds[1]:g}]"
            if self.bounds
            else format_calibrator(s.calibrator),
        ]
        words[-1:] = ["as given"] if self.given and self.given.known else words[-1:]
        return " ".join(words)


@dataclass(frozen=True)
class SameAs:
    """It has the scale of another tensor: its values are a selection or a rearrangement of that
    one's.
    """

    use: Use

    def __str__(self) -> str:
        return f"same as {self.use}"


@dataclass(frozen=True)
class BiasOf:
    """A bias in integers, added to the product of ``x`` and ``w``.

    Its scale is the product of theirs; one of 16 bits has that times a power of two, where its
    values need it.

    Attributes:
        dtype: int32 or int16.
        axis: the axis of the bias that runs over the channels of the weight.
        repeat: how often the channel scales of the weight repeat along it (grouped ConvTranspose).
        stored: whether it is stored as integers. If it stays float it has to fit all the same:
            onnxruntime makes integers of it when it loads the model, and does not mind an overflow.
    """

    x: Use
    w: Use
    axis: int = 0
    repeat: int = 1
    stored: bool = True
    dtype: Integer = INT32

    @property
    def alone(self) -> Quantize:
        """The same number format without the tie to other scales."""
        return Quantize(QuantizationSpec(self.dtype), self.axis)

    def __str__(self) -> str:
        kind = "" if self.dtype == INT32 else f"{self.dtype.name} "
        return f"{kind if self.stored else 'float '}bias of {self.x} and {self.w}"


@dataclass(frozen=True)
class Keep:
    """It stays float, and why."""

    reason: str

    def __str__(self) -> str:
        return f"keep: {self.reason}"


def fused_into(name: str, op_type: str) -> Keep:
    """It is computed and clipped at once, by the node that rounds the result."""
    return Keep(f"fused into {name} ({op_type})")


Entry = Quantize | SameAs | BiasOf | Keep
