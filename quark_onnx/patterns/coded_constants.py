"""Find weights that a model stores as integer codes, followed by arithmetic that scales them.

Such files hold ``Mul(Cast(codes), scale)``, also with a zero point, ``Mul(Sub(Cast(codes), zero),
scale)``, or with an offset, ``Add(Mul(Cast(codes), scale), offset)``. Others hold
``DequantizeLinear(codes, scale, zero)``.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from calibrators.onnx_runtime.external_tensors import values
from quark_onnx.graph import Graph, Node, store_constants
from quark_onnx.graph.codes import BYTES
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE

#: Largest share of a step by which an offset may miss a whole number of steps.
_TOLERANCE = 1e-3
#: Zero points of bytes are smaller.
_MOST_CODES = 256


@dataclass(frozen=True)
class CodedConstant:
    """A constant that is computed as ``(codes - zero) * scale`` or as ``codes * scale + offset``.

    Attributes:
        tensor: the codes, int8 or uint8.
        scale: broadcasts against the codes.
        zero: broadcasts against the codes; None for 0.
        offset: broadcasts against the codes; None for 0.
        dequantize: a DequantizeLinear computes the values, and not arithmetic.
    """

    tensor: TensorProto
    scale: NDArray[np.float32]
    zero: NDArray[np.float32] | None = None
    offset: NDArray[np.float32] | None = None
    dequantize: bool = False

    def dequantized(self) -> NDArray[np.float32]:
        """Return the float values, as the operators of the model compute them."""
        result = values(self.tensor).astype(np.float32)
        if self.zero is not None:
            result = result - self.zero
        result = result * self.scale
        return result if self.offset is None else result + self.offset

    def parameters(self) -> CodedParameters | None:
        """Return the parameters of an equal DequantizeLinear; None if there are none."""
        rank = len(self.tensor.dims)
        scale = np.asarray(self.scale, np.float64)
        if 0 in self.tensor.dims or not ((scale > 0) & np.isfinite(scale)).all():
            return None
        zero = np.zeros(1) if self.zero is None else np.asarray(self.zero, np.float64)
        if self.offset is not None:
            zero = -np.asarray(self.offset, np.float64) / scale
        # Comparisons with NaN are false.
        if max(scale.ndim, zero.ndim) > rank or not (np.abs(zero) < _MOST_CODES).all():
            return None
        if (np.abs(zero - np.round(zero)) > _TOLERANCE).any():
            return None
        scale, zero = np.broadcast_arrays(scale, np.round(zero))
        axes = [
            axis + rank - scale.ndim
            for axis, size in enumerate(scale.shape)
            if size > 1
        ]
        if len(axes) > 1:
            return None
        return CodedParameters(
            scale.reshape(-1), zero.reshape(-1).astype(np.int64), next(iter(axes), None)
        )

    def write(self, graph: Graph, name: str) -> None:
        """Compute a tensor from the codes, by the operators that the model had.

        onnxruntime computes them once, when it loads the model.

        Args:
            graph: the graph, which is changed in place and has no tensor of the name.
            name: name of the result.
        """
        codes = graph.fresh(f"{name}_codes")
        tensor = TensorProto()
        tensor.CopyFrom(self.tensor)
        tensor.name = codes
        graph.initializers[codes] = tensor
        if self.dequantize:
            self._write_dequantize(graph, codes, name)
            return
        steps: list[tuple[str, NDArray[Any]]] = [("Mul", self.scale)]
        if self.zero is not None:
            steps.insert(0, ("Sub", self.zero))
        if self.offset is not None:
            steps.append(("Add", self.offset))
        to = int(TensorProto.FLOAT)
        value = graph.compute("Cast", [codes], f"{name}_float", to=to)
        for index, (kind, operand) in enumerate(steps, 1):
            is_last = index == len(steps)
            result = name if is_last else graph.fresh(f"{name}_{kind.lower()}")
            constant = graph.add_constant(f"{name}_{kind.lower()}_by", operand)
            graph.add(kind, [value, constant], [result])
            value = result

    def _write_dequantize(self, graph: Graph, codes: str, name: str) -> None:
        parameters = self.parameters()
        assert parameters is not None
        zeros = parameters.zero_point.astype(values(self.tensor).dtype)
        scales = parameters.scale.astype(np.float32)
        attributes: dict[str, Any] = {}
        if parameters.axis is None:
            scales, zeros = scales.reshape(()), zeros.reshape(())
        else:
            attributes["axis"] = parameters.axis
        inputs = [codes]
        inputs += [graph.add_constant(f"{name}_scale", scales)]
        inputs += [graph.add_constant(f"{name}_zero_point", zeros)]
        graph.add("DequantizeLinear", inputs, [name], **attributes)


@dataclass(frozen=True)
class CodedParameters:
    """Scale and zero point, of a tensor or of each index of an axis."""

    scale: NDArray[np.float64]
    zero_point: NDArray[np.int64]
    axis: int | None


def coded_constants(graph: Graph) -> dict[str, CodedConstant]:
    """Return the constants of a graph, without bodies, that are stored as codes, by name.

    Args:
        graph: the float graph before its constants are folded; not changed.
    """
    # Codes are cast to float, which few models do with constants.
    if not graph.nodes_of({"Cast"}):
        return {}
    graph = graph.copy()
    store_constants(graph)
    constants = dict[str, CodedConstant]()
    for node in graph.nodes_of({"Mul", "Add", "Sub"}):
        coded = _coded(graph, node)
        result = node.outputs[0]
        # Weights that are multiplied by a small constant of integers are no codes.
        if coded is not None and graph.shape(result) == tuple(coded.tensor.dims):
            constants[result] = coded
    # A product that an offset follows is a step on the way.
    return {
        name: coded
        for name, coded in constants.items()
        if not _is_step(graph, name, constants)
    }


def take_dequantized_weights(
    graph: Graph, layers: Container[str]
) -> dict[str, CodedConstant]:
    """Turn each DequantizeLinear of a weight of a float layer into a constant, in place.

    The layer can then be quantized like one with a float weight. A layer that is connected to
    other quantized values is left as it is.

    Args:
        graph: the graph; its constants are initializers.
        layers: operator types that multiply by weights.

    Returns:
        The codes of the constants, by name.
    """
    stored = dict[str, tuple[Node, CodedConstant]]()
    for node in graph.nodes_of_type(DEQUANTIZE):
        coded = _stored(graph, node)
        if coded is not None:
            stored[node.outputs[0]] = (node, coded)
    taken = dict[str, CodedConstant]()
    for name, (_, coded) in stored.items():
        readers = graph.consumers(name)
        if graph.is_output(name) or graph.captured(name) or not readers:
            continue
        if all(_is_float_layer(graph, reader, layers, stored) for reader in readers):
            taken[name] = coded
    for name, coded in taken.items():
        graph.remove([stored[name][0]])
        graph.set_constant(name, coded.dequantized())
    return taken


def _is_float_layer(
    graph: Graph, node: Node, layers: Container[str], stored: Container[str]
) -> bool:
    """Return whether a layer exchanges only floats with other nodes, apart from stored weights."""
    if node.kind not in layers:
        return False
    sources = [graph.producer(name) for name in node.inputs if name not in stored]
    neighbours = [*filter(None, sources), *graph.followers(node)]
    return not any(
        neighbour.op_type in QUANTIZE | DEQUANTIZE for neighbour in neighbours
    )


def _stored(graph: Graph, node: Node) -> CodedConstant | None:
    """Return the codes of a constant that a node dequantizes, with one scale or one per index."""
    codes, scale = (
        graph.initializers.get(node.inputs[0]),
        graph.constant(node.inputs[1]),
    )
    if codes is None or scale is None or codes.data_type not in BYTES:
        return None
    if node.attribute("block_size", 0) or scale.ndim > 1:
        return None
    zero = graph.optional_constant(node.input(2), 0)
    if zero is None:
        return None
    shape = [1] * len(codes.dims)
    if scale.size > 1:
        shape[node.attribute("axis", 1)] = scale.size
    coded = CodedConstant(
        codes,
        scale.astype(np.float32).reshape(shape),
        np.broadcast_to(zero, scale.shape).astype(np.float32).reshape(shape),
        dequantize=True,
    )
    return None if coded.parameters() is None else coded


def _is_step(graph: Graph, name: str, found: dict[str, CodedConstant]) -> bool:
    readers = graph.consumers(name)
    return bool(readers) and all(reader.outputs[0] in found for reader in readers)


def _coded(graph: Graph, node: Node) -> CodedConstant | None:
    """Return the result of a node as a coded constant; None if it is not one."""
    for place in (0, 1):
        source, constant = node.inputs[place], _float(graph, node.inputs[1 - place])
        if constant is None:
            continue
        if node.kind == "Mul":
            coded = _product(graph, source, constant)
        elif node.kind == "Add" or place == 0:
            offset = constant if node.kind == "Add" else -constant
            coded = _sum(graph, source, offset)
        else:
            coded = None
        if coded is not None:
            return coded
    return None


def _product(
    graph: Graph, source: str, scale: NDArray[np.float32]
) -> CodedConstant | None:
    """Return the codes that are multiplied by a scale, and may have a zero point."""
    zero = None
    subtraction = graph.producer_of_kind(source, {"Sub"})
    if subtraction is not None:
        source = subtraction.inputs[0]
        zero = _float(graph, subtraction.inputs[1])
        if zero is None:
            return None
    cast = graph.producer_of_kind(source, {"Cast"})
    if cast is None or not graph.is_constant(cast.inputs[0]):
        return None
    tensor = graph.initializers[cast.inputs[0]]
    if tensor.data_type not in BYTES or graph.elem_type(source) != TensorProto.FLOAT:
        return None
    return CodedConstant(tensor, scale, zero)


def _sum(
    graph: Graph, source: str, offset: NDArray[np.float32]
) -> CodedConstant | None:
    """Return the codes to whose product an offset is added."""
    product = graph.producer_of_kind(source, {"Mul"})
    coded = None if product is None else _coded(graph, product)
    if coded is None or coded.zero is not None:
        return None
    return replace(coded, offset=offset)


def _float(graph: Graph, name: str) -> NDArray[np.float32] | None:
    """Return a float32 constant, which may be stored in another type before a Cast."""
    cast = graph.producer_of_kind(name, {"Cast"})
    source = name if cast is None else cast.inputs[0]
    stored = graph.constant(source)
    if stored is None or graph.elem_type(name) != TensorProto.FLOAT:
        return None
    return stored.astype(np.float32)
