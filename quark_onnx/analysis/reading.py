"""Readings of a quantized model of any tool: computed tensors, consumers and grids.

Nodes that only change the format of a value are skipped: Q/DQ of ONNX, com.microsoft and the
vendors, block formats, casts among float types, Identity, and a Min that prevents a runtime from
fusing. Operators on codes count as their float operators.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, filterfalse
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from quark_onnx.analysis.constants import Constants
from quark_onnx.fusions.moving import MOVING
from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.codes import spread
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE, nested_nodes

FLOATS = frozenset(
    {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE},
)
_HALVES: dict[int, str] = {
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
}
_QUANTIZE = QUANTIZE | {"DynamicQuantizeLinear"}
#: Operators that only change the format of their first input, whatever their inputs.
_FORMATS = _QUANTIZE | DEQUANTIZE | {"Identity"}
#: Types of tensors that consumers compute with. bfloat16 is the result of a rounding cast, which is
#: undone before an operator reads it.
_NO_CODES = (FLOATS - {TensorProto.BFLOAT16}) | {TensorProto.UNDEFINED}
#: Parts of the names of rounding nodes without a known grid.
_ROUNDING = (
    "QuantizeDequantize",
    "FixNeuron",
    "BFPFix",
    "MXFix",
    "Float4Quantize",
    "Float4Dequantize",
)
#: Parts of the names of operators that compute with integers, or on packed weights.
_ON_INTEGERS = (
    "MatMulInteger",
    "ConvInteger",
    "DynamicQuantizeLSTM",
    "NBits",
    "Bnb4",
    "BlockQuantized",
)
#: Operators on codes: input indices of the data, each followed by scale and zero point, and of the
#: result's scale and zero point.
_ON_CODES: dict[str, tuple[tuple[int, ...], int]] = {
    # x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B
    "QLinearConv": ((0, 3), 6),
    "QLinearMatMul": ((0, 3), 6),
    "QLinearAdd": ((0, 3), 6),
    "QLinearMul": ((0, 3), 6),
    # com.microsoft: A, a_scale, a_zero_point, B, b_scale, b_zero_point, C, y_scale, y_zero_point
    "QGemm": ((0, 3), 7),
    "QLinearSigmoid": ((0,), 3),
    "QLinearLeakyRelu": ((0,), 3),
    "QLinearSoftmax": ((0,), 3),
    "QLinearAveragePool": ((0,), 3),
    "QLinearGlobalAveragePool": ((0,), 3),
    "QLinearReduceMean": ((0,), 3),
    # Input 0 is the condition, which has no scale.
    "QLinearWhere": ((1, 4), 7),
}
#: Input index of the bias, whose scale is the product of the other scales.
_BIAS = {"QLinearConv": 8, "QGemm": 6}
#: Operators with the same effect on codes and on real values.
_MOVING = frozenset({*MOVING, "Clip", "Relu"})
_FUSED = {
    "FusedConv": "Conv",
    "FusedGemm": "Gemm",
    "FusedMatMul": "MatMul",
    "QGemm": "Gemm",
}


@dataclass(frozen=True)
class Ends:
    """Ends and step of a grid, of each channel or block in the shape of the scale.

    Attributes:
        lo: least value.
        hi: greatest value.
        step: step; positive.
    """

    lo: NDArray[np.float64]
    hi: NDArray[np.float64]
    step: NDArray[np.float64]


@dataclass(frozen=True)
class CodeGrid:
    """Grid of the dequantized values of codes.

    Attributes:
        format: name of the type.
        ends: ends and step of each channel or block; None without a fixed grid.
        axis: axis of the channels or blocks; None for a per-tensor grid.
        granularity: tensor, channel or block.
        uniform: True if all steps are equal.
    """

    format: str
    ends: Ends | None = None
    axis: int | None = None
    granularity: str = "tensor"
    uniform: bool = True

    @property
    def bits(self) -> int:
        """Return the width of a code in bits; 0 if unknown."""
        # The first number of the name: 8 for uint8, 8 for float8e4m3fn, 16 for bfloat16.
        digits = re.search(r"\d+", self.format)
        return int(digits[0]) if digits else 0

    def extremes(self) -> tuple[float | None, float | None, float | None]:
        """Return the least and the greatest value and the widest step over all channels.

        All three are None without a fixed grid.
        """
        if self.ends is None:
            return None, None, None
        ends = self.ends
        return float(ends.lo.min()), float(ends.hi.max()), float(ends.step.max())


@dataclass(frozen=True)
class Scale:
    """Names of a scale and a zero point, empty if omitted, with their layout."""

    scale: str
    zero_point: str
    axis: int = 1
    block: int = 0
    factor: str = ""  # a second scale that multiplies the first


@dataclass(frozen=True)
class Operand:
    """An input tensor of a node, with the scale of its codes if any."""

    tensor: str
    scale: Scale | None = None


@dataclass(frozen=True)
class View:
    """A tensor of the quantized model.

    Attributes:
        raw: the operator's result before its grid.
        value: the tensor that consumers read.
        scale: scale of ``value`` if ``value`` holds codes.
        grid: grid between ``raw`` and ``value``; None if the tensor stays float.
    """

    raw: str
    value: str
    scale: Scale | None
    grid: CodeGrid | None


class Reading:
    """A quantized graph with its computed tensors, consumers and grids."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.constants = Constants(graph)

    # -- through nodes that only change the format
    # -------------------------------------------------------------------

    def formats(self, node: Node) -> bool:
        """Return True if a node only changes the format of its first input."""
        name = node.op_type
        if name in _FORMATS:
            return True
        if name == "Cast":
            types = {self.graph.elem_type(node.inputs[0]), _target(node)}
            return types <= FLOATS or self._undone(node)
        if name == "Min":
            return self._guards_codes(node)
        return _rounds(name)

    def _guards_codes(self, node: Node) -> bool:
        """Return True if a Min only bounds values by a constant that no code exceeds.

        It stands before or after a Q/DQ pair, to keep a runtime from fusing.
        """
        if len(node.inputs) != 2 or not self.constants.known(node.inputs[1]):
            return False
        if self.graph.producer_of_type(node.inputs[0], DEQUANTIZE) is not None:
            return True
        after = {reader.op_type for reader in self.graph.consumers(node.outputs[0])}
        return bool(after) and after <= _QUANTIZE

    def _undone(self, node: Node) -> bool:
        """Return True if a cast to a narrow float is undone by a later cast.

        The later cast identifies the format where types were not inferred.
        """
        if not _narrows(node):
            return False
        casts = map(_target, self.graph.consumers(node.outputs[0]))
        return not FLOATS.isdisjoint(casts)

    def origin(self, tensor: str) -> str:
        """Return the computed tensor before all changes of format.

        Args:
            tensor: a tensor after any number of quantizations, dequantizations and casts.

        Returns:
            The name of the operator's result, of a constant, or of an input of the model.
        """
        # A constant may be quantized and dequantized in the graph; the walk ends at the constant.
        for node in self._formats_before(tensor):
            if self.constants.known(tensor):
                break
            tensor = node.inputs[0]
        return tensor

    def _formats_before(self, tensor: str) -> Iterator[Node]:
        """Yield the chain of format changes before a tensor, the nearest node first."""
        # Backwards along the first input, the data; the others are scales and zero points.
        node = self.graph.producer(tensor)
        while node is not None and self.formats(node):
            yield node
            node = self.graph.producer(node.inputs[0])

    def readers(self, raw: str) -> list[Node]:
        """Return the nodes that compute with a tensor, regardless of its format.

        Args:
            raw: a computed tensor before its grid.

        Returns:
            The nodes in the order of discovery, each once. Nodes that only change the format are
            passed through and left out.
        """

        def formatted(tensor: str) -> list[str]:
            changes = filter(self.formats, self.graph.consumers(tensor))
            return [node.outputs[0] for node in changes]

        consumers = list(
            chain.from_iterable(map(self.graph.consumers, reach([raw], formatted)))
        )
        return list(dict.fromkeys(filterfalse(self.formats, consumers)))

    def view(self, raw: str) -> View:
        """Return the quantized view of a computed tensor.

        If consumers read several tensors, the first counts.

        Args:
            raw: result of an operator or input of the model, before any grid.
        """
        scale = self.scale_of(raw)
        if scale is not None:
            # The operator itself computes codes (QLinearConv, ...): no node after it rounds.
            return View(raw, raw, scale, self.grid(scale, self.graph.elem_type(raw)))
        tensor = value = raw
        grid: CodeGrid | None = None
        # Forward through the nodes that change the format, up to the value that operators compute
        # with. A graph has no cycles, so the walk ends.
        while True:
            step = self._next_format(tensor)
            # A second Q/DQ pair after the first belongs to other consumers; where a node computes
            # with the value directly, the walk must not go on to that pair.
            ends = grid is not None and tensor == value and self._ends(tensor)
            if step is None or ends:
                return View(raw, value, scale, grid)
            tensor = step.outputs[0]
            # A DequantizeLinear or an Identity has no grid of its own, and keeps the one before.
            grid = self._format(step) or grid
            # Codes are no value to compare; the next tensor is.
            if not self._is_codes(tensor):
                value, scale = tensor, None
            elif self._next_format(tensor) is None:  # read by an operator on codes
                value, scale = tensor, self.scale_of(tensor)

    def _next_format(self, tensor: str) -> Node | None:
        """Return the first consumer that only changes the format of a tensor."""
        consumers = self.graph.consumers(tensor)
        return next(filter(self.formats, consumers), None)

    def _ends(self, tensor: str) -> bool:
        """Return True if a node computes with a tensor directly."""
        consumers = self.graph.consumers(tensor)
        return self.graph.is_output(tensor) or not all(
            self.formats(reader) for reader in consumers
        )

    def _is_codes(self, tensor: str) -> bool:
        """Return whether a tensor has integer codes, and no values."""
        if self.graph.producer_of_type(tensor, _QUANTIZE) is not None:
            return True
        return self.graph.elem_type(tensor) not in _NO_CODES

    def _format(self, node: Node) -> CodeGrid | None:
        """Return the grid that a node rounds to; None if the node does not round."""
        if node.op_type == "DynamicQuantizeLinear":
            # The scale is computed from each sample's range, so that there are no fixed ends.
            return CodeGrid("dynamic uint8")
        if node.op_type in _QUANTIZE:
            scale = self._scale(node)
            if scale.zero_point:
                # ONNX: the zero point has the type of the codes.
                return self.grid(scale, self.graph.elem_type(scale.zero_point))
            # uint8 unless the node says otherwise.
            kind = self.graph.elem_type(node.outputs[0])
            kind = kind or int(node.attribute("output_dtype", 0)) or TensorProto.UINT8
            return self.grid(scale, kind)
        if _rounds(node.op_type):
            return CodeGrid(str(node.attribute("element_dtype", "") or node.op_type))
        name = _HALVES.get(_target(node))
        return CodeGrid(name, uniform=False) if name else None

    @staticmethod
    def _scale(node: Node) -> Scale:
        axis = int(node.attribute("axis", 1))
        block = int(node.attribute("block_size", 0))
        return Scale(node.input(1), node.input(2), axis, block)

    # -- codes
    # ----------------------------------------------------------------------------------

    def scale_of(self, codes: str) -> Scale | None:
        """Return the scale of a tensor's codes; None without codes or a known scale.

        Args:
            codes: a tensor, of which the producer is followed back through operators that move
                codes.
        """
        # At most one step for each node, so that the loop ends whatever the graph.
        for _ in range(len(self.graph.nodes)):
            node = self.graph.producer(codes)
            if node is None or self.graph.elem_type(codes) in FLOATS:
                return None
            if node.op_type not in _MOVING:
                return self._written_scale(node)
            # The first input of Where is the condition.
            codes = node.inputs[1 if node.op_type == "Where" else 0]
        return None

    def _written_scale(self, node: Node) -> Scale | None:
        """Return the scale of the codes that a node computes, if the scale is known.

        Args:
            node: the producer of codes, such as QuantizeLinear or QLinearConv.
        """
        if node.op_type == "DynamicQuantizeLinear":
            return None
        if node.op_type in _QUANTIZE:
            return self._scale(node)
        if node.op_type == "QLinearConcat":
            return Scale(node.inputs[0], node.inputs[1])
        if node.op_type not in _ON_CODES:
            return None
        # QGemm without an output scale returns float values.
        index = _ON_CODES[node.op_type][1]
        if not node.input(index):
            return None
        return Scale(node.input(index), node.input(index + 1))

    def grid(self, scale: Scale, kind: int) -> CodeGrid:
        """Return the grid of codes of a type; the zero point's for type 0.

        Args:
            scale: names of scale and zero point, with their layout.
            kind: type of the codes, a value of ``TensorProto.DataType``; 0 if it was not inferred.

        Returns:
            The grid; without ends if the scale is computed at runtime or the type has no bounds.
        """
        # The zero point has the type of the codes; an omitted one has none.
        kind = kind or self.graph.elem_type(scale.zero_point) or TensorProto.UINT8
        name = TensorProto.DataType.Name(kind).lower()
        # Scales that the graph computes (dynamic quantization) have no value without a sample.
        names = [name for name in (scale.scale, scale.zero_point, scale.factor) if name]
        ends = _ends_of(kind)
        if ends is None or not all(self.constants.known(name) for name in names):
            return CodeGrid(name)
        step = self._doubles(scale.scale)
        if scale.factor:
            step = step * self._doubles(scale.factor)
        # float64 from here on: zero points of uint32 and products of two scales are exact enough.
        zero = np.zeros_like(step)
        if scale.zero_point:
            zero = self._doubles(scale.zero_point)
        # Some tools store a scale of shape () with a zero point of shape (1,).
        if zero.size == step.size:
            zero = zero.reshape(step.shape)
        first = (ends[0] - zero) * step
        last = (ends[1] - zero) * step
        # Some tools write negative scales.
        grid_ends = Ends(np.minimum(first, last), np.maximum(first, last), np.abs(step))
        return CodeGrid(
            name,
            grid_ends,
            None if step.size == 1 else scale.axis,
            _granularity(step),
            uniform=not name.startswith("float"),
        )

    def _doubles(self, name: str) -> NDArray[np.float64]:
        return self.constants.value(name).astype(np.float64)

    def operands(self, node: Node) -> tuple[str, list[Operand]]:
        """Return the float operator of a node, and its operands.

        Args:
            node: a node on floats, or one on codes such as QLinearConv.

        Returns:
            The type of the float operator that a fused or QLinear node stands for, and the operands
            in the order of that operator's inputs. Operands of nodes on floats have no scale.
        """
        name = _FUSED.get(node.op_type, node.op_type.removeprefix("QLinear"))
        if name == "Sum" and len(node.inputs) == 2:
            # The same function: ``quantize`` writes some Adds as Sum.
            name = "Add"
        if node.op_type == "DynamicQuantizeLSTM":
            # Inputs 1 and 2 are codes in another layout, with a scale per gate and unit.
            names = [node.inputs[0], "", "", *node.inputs[3:8]]
            return "LSTM", [Operand(operand) for operand in names]
        if node.op_type == "QLinearConcat":
            # After the output's scale and zero point: tensor, scale and zero point of each input.
            places: tuple[int, ...] = tuple(range(2, len(node.inputs), 3))
        elif node.op_type in _ON_CODES:
            places = _ON_CODES[node.op_type][0]
        else:
            return name, [Operand(operand) for operand in node.inputs]
        # Axis of the output channels of the weight; without channels the axis has no effect.
        transposed = node.op_type == "QGemm" and bool(node.attribute("transB", 0))
        axis = 0 if transposed or node.op_type == "QLinearConv" else 1
        operands = [
            Operand(node.inputs[i], Scale(node.inputs[i + 1], node.inputs[i + 2], axis))
            for i in places
        ]
        bias = node.input(_BIAS.get(node.op_type, len(node.inputs)))
        if bias:
            operands.append(
                # ONNX, QLinearConv: the bias is int32 with scale x_scale * w_scale and zero point
                # 0.
                Operand(bias, Scale(node.inputs[4], "", 0, factor=node.inputs[1])),
            )
        return name, operands

    def reals(self, operand: Operand) -> NDArray[np.float64]:
        """Return the values of a constant operand.

        Args:
            operand: an operand whose tensor, scale and zero point are constant.
        """
        if operand.scale is None:
            return self._doubles(operand.tensor)
        return self.decoded(self.constants.value(operand.tensor), operand.scale)

    def decoded(self, codes: NDArray[Any], scale: Scale) -> NDArray[np.float64]:
        """Return the dequantized values of codes.

        Args:
            codes: integer or float8 codes.
            scale: constant scale and zero point, with their axis and block size.

        Returns:
            Values in float64, of the shape of the codes.
        """
        # The default axis 1 of QuantizeLinear has no meaning for vectors with one scale.
        axis = scale.axis if scale.axis < codes.ndim else codes.ndim - 1
        step = spread(self._doubles(scale.scale), codes.shape, axis, scale.block)
        if scale.factor:
            # The factor is the per-tensor scale of the activation.
            step = step * self._doubles(scale.factor).reshape(())
        values = codes.astype(np.float64)
        if scale.zero_point:
            zero = self._doubles(scale.zero_point)
            values = values - spread(zero, codes.shape, axis, scale.block)
        return np.asarray(values * step)

    def stored(self, operand: Operand) -> tuple[str, Scale] | None:
        """Return the codes and the scale of a constant operand; None without codes.

        Args:
            operand: an input of an operator on codes, or a tensor of an operator on floats, such as
                the result of a DequantizeLinear.

        Returns:
            The name of the codes, and their scale.
        """
        if operand.scale is not None:
            return operand.tensor, operand.scale
        tensor = operand.tensor
        # Codes may be stored in another arrangement than the weight.
        mover = self.graph.producer_of_type(tensor, {"Reshape", "Transpose"})
        while mover is not None and self.constants.known(tensor):
            tensor = mover.inputs[0]
            mover = self.graph.producer_of_type(tensor, {"Reshape", "Transpose"})
        for node in self._formats_before(tensor):
            if node.op_type in DEQUANTIZE:
                return node.inputs[0], self._scale(node)
        return None


def quantizes(model: ModelProto) -> bool:
    """Return True if a model has a quantized tensor, in a body, too."""
    return any(_quantizes(Node(node)) for node in nested_nodes(model.graph.node))


def _rounds(op_type: str) -> bool:
    """Return True for an operator of a vendor that rounds to a format without codes."""
    return any(word in op_type for word in _ROUNDING)


def _quantizes(node: Node) -> bool:
    """Return True for an operator on codes, a vendor's rounding and a cast to a narrow float."""
    on_codes = node.op_type in _QUANTIZE | DEQUANTIZE | _ON_CODES.keys()
    return (
        on_codes
        or _narrows(node)
        or any(word in node.op_type for word in (*_ON_INTEGERS, *_ROUNDING))
    )


def _narrows(node: Node) -> bool:
    """Return True for a cast to a narrow float."""
    return _target(node) in _HALVES


def _target(node: Node) -> int:
    """Return the type that a Cast converts to; 0 (UNDEFINED) for other operators."""
    return int(node.attribute("to", 0)) if node.op_type == "Cast" else 0


def _granularity(step: NDArray[np.float64]) -> str:
    """Return "tensor", "channel" or "block", by the stored shape of the scales."""
    if step.size == 1:
        return "tensor"
    return "block" if step.ndim > 1 else "channel"


def _ends_of(kind: int) -> tuple[float, float] | None:
    """Return the least and the greatest code of a type; None without relevant ends.

    Args:
        kind: type of the codes, a value of ``TensorProto.DataType``.
    """
    name = TensorProto.DataType.Name(kind)
    integer = re.fullmatch(r"(U?)INT(\d+)", name)
    if integer is not None:
        # A float, exact up to 32 bits and more.
        codes = 2.0 ** int(integer[2])
        # half of the signed ones are negative
        least = 0.0 if integer[1] else -codes / 2
        return least, least + codes - 1
    # FLOAT has no codes, and FLOAT8E8M0 is a type of scales.
    if name.startswith(("FLOAT8E4", "FLOAT8E5", "FLOAT4", "FLOAT16")):
        import ml_dtypes

        dtype = helper.tensor_dtype_to_np_dtype(kind)
        top = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
        return -top, top
    return None
