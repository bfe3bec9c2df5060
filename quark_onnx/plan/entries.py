"""Define the four possible decisions for a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators import QParams, rows
from quark_onnx.config import QuantizationSpec, TensorOverride, format_calibrator
from quark_onnx.dtypes import BODY_OPSET, INT32, Block, Integer, Scaled
from quark_onnx.patterns.weight_axes import Layout


@dataclass(frozen=True)
class Use:
    """A tensor as read by all nodes, or by a single node.

    Attributes:
        tensor: name of the tensor.
        node: name of the reader; None stands for every reader without an entry of its own.
    """

    tensor: str
    node: str | None = None

    def __str__(self) -> str:
        if self.node is None:
            return self.tensor
        return f"{self.tensor} in {self.node}"


@dataclass(frozen=True)
class Quantize:
    """Quantize the tensor to a number format.

    A scale, if the format has one, follows from the range, measured or known.

    Attributes:
        spec: the number format and its settings.
        axis: axis of the channels of a constant, or of its blocks; None per tensor, or for blocks
            along their usual axis.
        bounds: the range, if known without measuring.
        flat: blocks run over all axes from ``axis`` on, flattened into one.
        layout: arrangement of a weight whose output channels lie along several axes, to which
            ``axis`` refers; the codes are stored in it. None for the weight itself.
        note: reason for a deviation from the request, empty if there is none.
        given: the user's override for this tensor.
    """

    spec: QuantizationSpec
    axis: int | None = None
    bounds: tuple[float, float] | None = None
    flat: bool = False
    layout: Layout | None = None
    # Two decisions with the same format are equal, whatever led to them.
    note: str = field(default="", compare=False)
    given: TensorOverride | None = None

    @property
    def min_opset(self) -> int:
        """Least opset for the format in standard operators."""
        spec = self.spec
        needs = (
            (spec.dynamic or spec.saturate, 11),  # DynamicQuantizeLinear; Clip's inputs
            (self.axis is not None, 13),  # the attribute axis
            (_needs_body(spec), BODY_OPSET),
            (spec.block_size > 0, 21),  # the attribute block_size
        )
        opsets = [opset for is_needed, opset in needs if is_needed]
        return max([spec.dtype.min_opset, *opsets])

    @property
    def contributed(self) -> bool:
        """Whether the com.microsoft domain has Q/DQ nodes for the format, at every opset."""
        spec = self.spec
        if not isinstance(spec.dtype, Integer) or spec.dynamic:
            return False
        return spec.dtype.bits >= 4

    @property
    def any_axis(self) -> Quantize:
        """The decision with blocks along an open axis."""
        # Elements share an exponent along any axis; integers with an axis have scales per channel.
        if isinstance(self.spec.dtype, Block):
            return replace(self, axis=None)
        return self

    def rows(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a constant as (rows, n), with a scale per row.

        The last block of a line is padded.

        Args:
            array: the constant, of any shape that has the axis.

        Returns:
            Blocks as rows, or channels as rows; a single row per tensor.
        """
        return rows(self.stored(array), self.axis, self.spec.block_size)

    def stored(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a constant, or its codes, in the shape in which codes are stored."""
        sizes = self.stored_sizes(array.shape)
        if self.layout is not None:
            array = self.layout.arranged(array)
        return array.reshape(sizes)

    def spread(
        self, params: QParams, shape: tuple[int, ...]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scale and zero point shaped to broadcast against a constant of this shape."""
        if self.layout is None:
            return params.spread(shape)
        merged = self.layout.merged
        scale, zero = params.spread(merged)
        return (
            self.layout.restored(np.broadcast_to(scale, merged)),
            self.layout.restored(np.broadcast_to(zero, merged)),
        )

    def sizes(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the shape that ``axis`` refers to, for a tensor of this shape."""
        return shape if self.layout is None else self.layout.merged

    def stored_sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the codes of a constant of this shape."""
        sizes = self.sizes(shape)
        # A kernel (M, C/group, kh, kw) becomes (M, C/group * kh * kw) for axis 1.
        if self.flat:
            return (*sizes[: self.axis], prod(sizes[self.axis :]))
        return sizes

    def placed(self, params: QParams, shape: tuple[int, ...]) -> QParams:
        """Convert parameters per row of ``rows`` to parameters of a constant of this shape.

        Args:
            params: a scale and a zero point per row.
            shape: shape of the constant.

        Returns:
            With blocks, scales in the rank of the constant, flattened from the axis on if
            ``flat``, with an index per block along the axis; otherwise ``params``.
        """
        if not self.spec.block_size or self.axis is None:
            return params
        # The scales keep the rank of the codes, with one index per block along the axis.
        sizes = self.stored_sizes(shape)
        return params.in_blocks(sizes, self.axis, self.spec.block_size)

    def __str__(self) -> str:
        if self.note:
            return f"{self.form}, as {self.note}"
        return self.form

    @property
    def form(self) -> str:
        """Format, zero point, granularity and range as text."""
        spec = self.spec
        words = ["quantize", spec.dtype.name]
        if spec.dtype.scaled:
            words.append("symmetric" if spec.symmetric else "asymmetric")
            if spec.pow2:
                words.append("pow2")
        words.append(self._axis_text())
        if spec.block_size:
            words.append(f"blocks of {spec.block_size}")
        if spec.dtype.scaled:
            words.append(self._range_text())
        return " ".join(filter(None, words))

    def _axis_text(self) -> str:
        """Return the axis of the channels or blocks as text; empty per tensor."""
        if self.axis is None:
            return ""
        if self.flat:
            return f"axes from {self.axis},"
        if self.layout is not None:
            return "each output channel"
        return f"axis {self.axis}"

    def _range_text(self) -> str:
        """Return the range, or the way to measure the range, as text."""
        if self.spec.dynamic:
            return "dynamic"
        if self.given and self.given.known:
            return "as given"
        if self.bounds:
            return f"[{self.bounds[0]:g}, {self.bounds[1]:g}]"
        return format_calibrator(self.spec.calibrator)


def _needs_body(spec: QuantizationSpec) -> bool:
    """Return whether only function bodies express the operators of a number format."""
    dtype = spec.dtype
    return isinstance(dtype, Scaled) and not (dtype.emitted and dtype.read)


@dataclass(frozen=True)
class SameAs:
    """Use the scale of another tensor, whose values are selected or rearranged."""

    use: Use

    def __str__(self) -> str:
        return f"same as {self.use}"


@dataclass(frozen=True)
class BiasOf:
    """Store a bias as integers, to be added to the product of ``x`` and ``w``.

    The scale is the product of both scales; for a 16-bit bias times a power of two, where the
    values need a wider range.

    Attributes:
        x: the activation.
        w: the weight.
        dtype: int32 or int16.
        repeat: number of repetitions of the weight's channel scales, where these are fewer than
            the outputs (grouped ConvTranspose).
        stored: store integers. A float bias must fit the integers all the same: onnxruntime
            converts it when it loads the model, without a check for overflow.
    """

    x: Use
    w: Use
    repeat: int = 1
    stored: bool = True
    dtype: Integer = INT32

    @property
    def alone(self) -> Quantize:
        """The number format with an independent scale."""
        return Quantize(QuantizationSpec(self.dtype), 0)

    def __str__(self) -> str:
        if self.dtype == INT32:
            kind = ""
        else:
            kind = f"{self.dtype.name} "
        return f"{kind if self.stored else 'float '}bias of {self.x} and {self.w}"


@dataclass(frozen=True)
class Keep:
    """Keep the tensor float, for a reason."""

    reason: str

    def __str__(self) -> str:
        return f"float: {self.reason}"


def fused_into(name: str, op_type: str) -> Keep:
    """Return the decision for a result that the next, rounding node computes and clips.

    Args:
        name: name of the next node, which is fused into the producer of the result.
        op_type: its operator type.
    """
    return Keep(f"fused into {name} ({op_type})")


Entry = Quantize | SameAs | BiasOf | Keep
