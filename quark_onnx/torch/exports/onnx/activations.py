"""Rounding of a torch model's activations as nodes of an ONNX graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import FunctionProto, TensorProto

from quark_onnx.common.errors import ConfigError
from quark_onnx.dtypes import Block, Half, Integer, Minifloat, Scaled
from quark_onnx.functions import DOMAIN as VENDOR
from quark_onnx.graph import Graph, Node
from quark_onnx.torch.config.number_formats import is_float8
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.exports.onnx import bodies
from quark_onnx.torch.exports.onnx.weights import array_of
from quark_onnx.torch.formats.affine import explicit_zero
from quark_onnx.torch.models.quantized_layer import Rounding
from quark_onnx.writing.fusion_barriers import is_small

if TYPE_CHECKING:
    import torch

_MX = "MXQuantizeDequantize"


class RoundingWriter:
    """Writer of activation rounding; equal rounding of a tensor is written once.

    Args:
        graph: the graph, which is changed.
        kind: the ``TensorProto.DataType`` of activations, FLOAT or FLOAT16.
    """

    def __init__(self, graph: Graph, kind: int) -> None:
        self._graph, self._kind = graph, kind
        self._done: dict[tuple[Any, ...], tuple[str, str]] = {}
        self.functions: dict[str, FunctionProto] = {}

    def write(self, node: Node, rounding: Rounding, layer: str, side: str) -> str:
        """Replace a placeholder of a rounding by nodes, and describe the result.

        Raises:
            ConfigError: ONNX has no equivalent operators.
        """
        graph, spec = self._graph, rounding.spec
        self._check(spec, layer, side)
        source, result = node.inputs[0], node.outputs[0]
        # Layers that read a tensor with equal parameters share its rounding.
        key = (source, spec, _bytes_of(rounding.scale), _bytes_of(rounding.zero))
        graph.remove([node])
        # An output of the graph keeps its name, so its rounding is written once more.
        if key in self._done and not graph.is_output(result):
            rounded, text = self._done[key]
            graph.replace_uses(result, rounded)
            return text
        stem, narrow = f"{layer}.{side}", result
        # The nodes below round float32.
        if self._kind != TensorProto.FLOAT:
            source = self._cast(source, f"{stem}_wide", TensorProto.FLOAT)
            narrow = graph.fresh(f"{stem}_rounded_wide")
        text = self._rounded(source, narrow, rounding, stem)
        if narrow != result:
            graph.add("Cast", [narrow], [result], to=self._kind)
        self._done[key] = result, text
        return text

    def _cast(self, source: str, name: str, kind: int) -> str:
        """Add a Cast to a ``TensorProto.DataType``, and return the name of the result."""
        result = self._graph.fresh(name)
        self._graph.add("Cast", [source], [result], to=int(kind))
        return result

    def _check(self, spec: TensorSpec, layer: str, side: str) -> None:
        """Raise ConfigError if no operators compute the same as torch."""
        where = f"layer {layer!r}: its {side} is rounded to {spec}"
        if not isinstance(spec.dtype, Scaled):
            # 16-bit floats are cast, and block formats have functions.
            return
        has_operators = is_float8(spec.dtype) or (
            isinstance(spec.dtype, Integer) and spec.dtype.bits <= 16
        )
        if not has_operators or (spec.dynamic and spec.scale == "bfloat16"):
            raise ConfigError(f"{where}; ONNX has no operators that compute the same")
        if self._kind != TensorProto.FLOAT and spec.dynamic and spec.scale == "model":
            raise ConfigError(
                f"{where}, its scales computed in float16; export it with dtype='float32'",
            )

    def _rounded(self, source: str, result: str, rounding: Rounding, stem: str) -> str:
        """Add nodes that round a float32 tensor."""
        graph, spec = self._graph, rounding.spec
        if isinstance(spec.dtype, Half):
            narrow = self._cast(source, f"{stem}_{spec.dtype.name}", spec.dtype.onnx)
            graph.add("Cast", [narrow], [result], to=int(TensorProto.FLOAT))
            return f"Cast to {spec.dtype.name} and back"
        if isinstance(spec.dtype, Block) and (
            spec.dtype.op_type != _MX or spec.exponent == "floor"
        ):
            graph.import_domain(VENDOR)  # its operator rounds exponents down
            attributes = {**dict(spec.dtype.attributes), "axis": -1}
            graph.add(
                spec.dtype.op_type,
                [source],
                [result],
                name=f"{stem}_rounded",
                domain=VENDOR,
                **attributes,
            )
            return spec.dtype.op_type
        if _has_pair(spec):
            self._pair(source, result, rounding, stem)
            return f"QuantizeLinear to {spec.dtype.name}"
        return self._function(source, result, rounding, stem)

    def _pair(self, source: str, result: str, rounding: Rounding, stem: str) -> None:
        """Add a Q/DQ pair with a calibrated scale, between barriers for small codes."""
        graph, dtype = self._graph, rounding.spec.dtype
        assert isinstance(dtype, Scaled)
        assert rounding.scale is not None
        scale = array_of(rounding.scale.float()).reshape(())
        zero_point = explicit_zero(rounding.zero, rounding.scale)
        zero = array_of(zero_point.float()).reshape(())
        parts = [
            graph.add_constant(f"{stem}_scale", scale),
            graph.add_constant(f"{stem}_zero_point", zero.astype(dtype.numpy)),
        ]
        codes, plain = graph.fresh(f"{stem}_quantized"), result
        if is_small(dtype):
            # onnxruntime fuses these pairs with adjacent nodes incorrectly
            # (``writing.fusion_barriers``); a Min prevents the fusion, without an effect on values,
            # since greater values saturate.
            # Values of the least and of the greatest code; the greater magnitude bounds both.
            ends = np.abs(np.array([dtype.qmin, dtype.qmax], np.float32) - zero) * scale
            greatest = graph.add_constant(f"{stem}_greatest", ends.max())
            bounded, plain = graph.fresh(f"{stem}_float"), graph.fresh(f"{stem}_plain")
            graph.add("Min", [source, greatest], [bounded], name=f"{stem}_Min")
            graph.add("Min", [plain, greatest], [result], name=f"{stem}_Min_behind")
            source = bounded
        graph.add(
            "QuantizeLinear",
            [source, *parts],
            [codes],
            name=f"{stem}_QuantizeLinear",
        )
        graph.add(
            "DequantizeLinear",
            [codes, *parts],
            [plain],
            name=f"{stem}_DequantizeLinear",
        )

    def _function(self, source: str, result: str, rounding: Rounding, stem: str) -> str:
        """Add a call of a model-local function in the project's domain."""
        graph, spec = self._graph, rounding.spec
        name = bodies.name_of(spec)
        if name not in self.functions:
            self.functions[name] = bodies.rounding(spec, graph.opset)
            graph.import_domain(bodies.DOMAIN)
        # NVFP4 has its calibrated scale as the global scale.
        parameters = {
            "scale": rounding.scale,
            "whole": rounding.scale,
            "zero": rounding.zero,
        }
        inputs = [source]
        for parameter in bodies.inputs_of(spec)[1:]:
            tensor = parameters[parameter]
            if tensor is None:
                value = np.float32(0)
            else:
                value = array_of(tensor.float()).reshape(())
            inputs.append(graph.add_constant(f"{stem}_{parameter}", np.asarray(value)))
        graph.add(
            name,
            inputs,
            [result],
            name=f"{stem}_rounded",
            domain=bodies.DOMAIN,
            axis=-1,
        )
        return f"a function of standard operators for {spec.dtype.name}"


def _bytes_of(part: torch.Tensor | None) -> bytes | None:
    """Return the bytes of a scale or zero point, which compare by value."""
    if part is None:
        return None
    return array_of(part.float()).tobytes()


def _has_pair(spec: TensorSpec) -> bool:
    """Return whether a static Q/DQ pair covers the codes of the format."""
    if not (
        spec.measured
        and isinstance(spec.dtype, Integer | Minifloat)
        and spec.dtype.emitted
    ):
        return False
    # QuantizeLinear saturates at the ends of the type, so all codes have to be in use.
    return (spec.grid.qmin, spec.grid.qmax) == (spec.dtype.qmin, spec.dtype.qmax)
