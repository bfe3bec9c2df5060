"""OpenVINO on the CPU, by its package ``openvino``."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from onnx import ModelProto, TensorProto

from calibrators.onnx_runtime.worker import EngineLayer, SessionSettings, Value
from quark_onnx.common.extras import pip_install
from quark_onnx.common.wording import counted
from quark_onnx.engines.base import Engine
from quark_onnx.graph import Graph, scopes_of
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.patterns.openvino_faults import padded_means, unscaled_products

#: Types of layers with products in the graph that the CPU plug-in runs.
_LAYERS = frozenset(
    {
        "Convolution",
        "Deconvolution",
        "FullyConnected",
        "GroupConvolution",
        "LSTMCell",
        "LSTMSequence",
        "MatMul",
        "RNNCell",
        "RNNSeq",
    }
)
#: Types of products of integers.
_INTEGERS = frozenset({"i8", "u8"})
#: The command that writes the same values in other codes.
_REMEDY = "quark-onnx convert --to u8s8 writes the same values in codes that it takes"
#: Types of onnxruntime by the names of OpenVINO's, where these differ from numpy's.
_ONNX_TYPES = {"f32": "float", "f64": "double", "f16": "float16", "boolean": "bool"}


class OpenVINO(Engine):
    """A model that OpenVINO has compiled for the CPU.

    Layers that the file leaves in float are computed in float32, also on processors where OpenVINO
    would take bfloat16: the errors are those of the file, the same on every processor.
    """

    name: ClassVar[str] = "openvino"
    package: ClassVar[str] = "openvino"
    install: ClassVar[str] = pip_install("openvino")

    def __init__(self, source: str | bytes, settings: SessionSettings) -> None:
        import openvino

        properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if settings.threads:
            properties["INFERENCE_NUM_THREADS"] = settings.threads
        core = openvino.Core()
        self._compiled = core.compile_model(core.read_model(source), "CPU", properties)
        self._request = self._compiled.create_infer_request()
        # A request has one set of inputs and outputs.
        self._lock = threading.Lock()

    def get_inputs(self) -> list[Value]:
        """Return the inputs of the model."""
        return [_value(port) for port in self._compiled.inputs]

    def get_outputs(self) -> list[Value]:
        """Return the outputs of the model."""
        # An output of the file may share its tensor with another one.
        return [
            _value(port, name)
            for port in self._compiled.outputs
            for name in sorted(port.get_names())
        ]

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Compute outputs."""
        if names is None:
            names = [value.name for value in self.get_outputs()]
        given = {name: np.asarray(value, order="C") for name, value in feeds.items()}
        with self._lock:
            self._request.infer(given)
            # Copies: the next run writes into the same memory.
            return [self._request.get_tensor(name).data.copy() for name in names]

    def layers(self) -> list[EngineLayer]:
        """Return the layers of the graph that the CPU plug-in runs."""
        layers = []
        for operation in self._compiled.get_runtime_model().get_ordered_ops():
            facts = operation.get_rt_info()
            kind = facts["layerType"].astype(str)
            if kind in _LAYERS:
                precision = facts["runtimePrecision"].astype(str)
                layers.append(EngineLayer(kind, precision in _INTEGERS))
        return layers

    @classmethod
    def remarks(cls, model: ModelProto) -> list[str]:
        """Return remarks on codes and operators that it computes wrongly or in float.

        As measured with 2026.4.
        """
        signed = unsigned = 0
        for graph, constants in scopes_of(model):
            for node in graph.node:
                zero_point = (
                    constants.get(node.input[2]) if len(node.input) > 2 else None
                )
                if zero_point is None:
                    continue
                is_weight = node.input[0] in constants
                if node.op_type in QUANTIZE and not is_weight:
                    signed += zero_point.data_type == TensorProto.INT8
                elif node.op_type in DEQUANTIZE and is_weight:
                    unsigned += zero_point.data_type == TensorProto.UINT8
        remarks = []
        if signed:
            activations = counted(signed, "activation is int8", "activations are int8")
            remarks.append(
                f"{activations}, of which OpenVINO computed some wrongly, up to 16 dB"
                f" worse: {_REMEDY}"
            )
        if unsigned:
            weights = counted(unsigned, "weight is uint8", "weights are uint8")
            remarks.append(f"{weights}, whose layers run in float: {_REMEDY}")
        quantized = Graph.of(model)
        faults = len(unscaled_products(quantized)) + len(padded_means(quantized))
        if faults:
            operators = counted(faults, "operator is", "operators are")
            remarks.append(
                f"{operators} computed wrongly by OpenVINO, of small products without a bias and"
                " averages that count their padding: quark-onnx quantize --target openvino"
                " writes them in another form"
            )
        return remarks


def _value(port: Any, name: str = "") -> Value:
    """Return an input or output with the attributes of onnxruntime's."""
    kind = port.get_element_type().get_type_name()
    if kind not in _ONNX_TYPES:
        kind = port.get_element_type().to_dtype().name
    shape = [
        dimension.get_length() if dimension.is_static else None
        for dimension in port.get_partial_shape()
    ]
    return Value(
        name or port.get_any_name(), f"tensor({_ONNX_TYPES.get(kind, kind)})", shape
    )
