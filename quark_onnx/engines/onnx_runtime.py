"""onnxruntime as an application opens it, on any of its providers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import onnx

from calibrators.onnx_runtime.worker import (
    EngineLayer,
    SessionSettings,
    Value,
    interface,
    native_session,
    session_options,
)
from quark_onnx.engines.base import Engine
from quark_onnx.graph.node import nested_nodes

#: Operators with integer products (onnx/defs and core/graph/contrib_ops/quantization_defs.cc).
_INTEGER = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulInteger16",
        "MatMulIntegerToFloat",
        "QAttention",
        "QGemm",
        "QLinearConv",
        "QLinearMatMul",
    }
)
#: Operators with float products, and their fused forms (contrib_defs.cc, nchwc_schema_defs.cc).
_FLOAT = frozenset(
    {
        "Attention",
        "Conv",
        "ConvTranspose",
        "FusedConv",
        "FusedGemm",
        "FusedMatMul",
        "GRU",
        "Gemm",
        "GroupQueryAttention",
        "LSTM",
        "MatMul",
        "MultiHeadAttention",
        "NhwcConv",
        "NhwcFusedConv",
        "RNN",
    }
)
#: The value of MatMulNBits' accuracy_level at which activations are rounded to 8 bits.
_INT8_PRODUCTS = 4


class OnnxRuntime(Engine):
    """A session with the default options of an application."""

    name: ClassVar[str] = "onnxruntime"
    package: ClassVar[str] = "onnxruntime"
    install: ClassVar[str] = "pip install onnxruntime"

    def __init__(self, source: str | bytes, settings: SessionSettings) -> None:
        self._source, self._settings = source, settings
        self._session = native_session(
            source, session_options(settings), settings.provider
        )

    def get_inputs(self) -> list[Value]:
        """Return the inputs of the model."""
        return interface(self._session)[0]

    def get_outputs(self) -> list[Value]:
        """Return the outputs of the model."""
        return interface(self._session)[1]

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Compute outputs."""
        return list(self._session.run(names, feeds))

    def layers(self) -> list[EngineLayer]:
        """Return the layers of the graph that the session runs.

        Empty for a provider that compiles parts of the graph, which onnxruntime cannot write.
        """
        options = session_options(self._settings)
        with tempfile.TemporaryDirectory(prefix="quark_onnx_") as folder:
            path = Path(folder) / "optimized.onnx"
            options.optimized_model_filepath = str(path)
            try:
                native_session(self._source, options, self._settings.provider)
            except Exception:  # onnxruntime raises several unrelated types
                return []
            model = onnx.load(path, load_external_data=False)
        return list(_layers(model))


def _layers(model: onnx.ModelProto) -> Iterator[EngineLayer]:
    for node in nested_nodes(model.graph.node):
        if node.op_type == "MatMulNBits":
            levels = [a.i for a in node.attribute if a.name == "accuracy_level"]
            yield EngineLayer(node.op_type, levels == [_INT8_PRODUCTS])
        elif node.op_type in _INTEGER | _FLOAT:
            yield EngineLayer(node.op_type, node.op_type in _INTEGER)
